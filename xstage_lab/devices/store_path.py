"""The event loop of the simulated device: staged tile pipelines in front of a store path.

Mechanisms, and nothing of the law:

- On each SM the MMA role computes the SM's tiles in order; tile j may start once tile j - D is
  accepted (issue depth D) and the counter it waits for is full.
- The store role issues a finished tile in chunks: after a start-up it offers one chunk every
  `chunk / r_SM`. A chunk stands for the stores spread over its issue interval and is offered in
  the middle of it.
- A chunk is accepted once the SM's own outstanding limit and the GPU's shared path have room.
  SMs wait for the path first come, first served; the path drains in the order of acceptance.
- The chunk at the head of the path needs a credit of its destination, then takes the link for
  `chunk / egress`. The destination takes chunks in order at its ingress rate, and the credit is
  back a latency later.

Next on a GPU is either an SM offering a chunk (a tree of SM times) or the link finishing its head
chunk. GPUs meet only at the ingress servers, so the earliest event of all GPUs goes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

# Nothing here allocates, so Numba need not count references to the arrays; at every call that
# would take several times as long as the event itself. Inlined are what every chunk passes.
_options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
_jit = nb.njit(**_options)
_inline = nb.njit(**_options, inline="always")

Structured = NDArray[np.void]

ROW = np.dtype([
    ("work_s", np.float64),      # MMA time, or the gap
    ("start_s", np.float64),     # start-up of the task's issue
    ("half_s", np.float64),      # half a chunk's issue interval
    ("chunk_bytes", np.float64),
    ("n_chunks", np.int64),      # 0: stores nothing
    ("sm", np.int64),            # SM of its GPU
    ("server", np.int64),        # ingress server, -1 for local stores
    ("waits_for", np.int64),     # counter, -1 none
    ("signals", np.int64),       # counter, -1 none
    ("mma_start_s", np.float64),  # from here on: the TILE times that come out
    ("mma_end_s", np.float64),
    ("issue_start_s", np.float64),
    ("issue_end_s", np.float64),
    ("arrived_s", np.float64),
    ("slot_wait_s", np.float64),
], align=True)

# One entry per SM of each GPU; the last two fields are slots of a GPU's (or the) collections.
SM = np.dtype([
    ("row", np.int64),           # row in hand
    ("chunk", np.int64),         # chunks of it already accepted
    ("held_bytes", np.float64),  # accepted, not yet on the link
    ("own_wait", np.int64),      # 1 while its own limit stops it
    ("parked_next", np.int64),   # next SM waiting for the same counter
    ("queue_sm", np.int64),      # SMs waiting for the path, a ring
    ("woken_sm", np.int64),      # SMs to advance, a stack over all GPUs
], align=True)

GPU = np.dtype([
    ("first_row", np.int64),
    ("end_row", np.int64),
    ("first_sm", np.int64),
    ("queue_head", np.int64),
    ("queue_size", np.int64),
    ("ring_head", np.int64),
    ("ring_size", np.int64),
    ("held_bytes", np.float64),  # in the path
    ("link_s", np.float64),      # when the head chunk leaves; inf when idle
    ("next_s", np.float64),      # the earlier of that and the SMs' first offer
    ("n_woken", np.int64),       # entry 0 only, like the samples taken of its backlog
    ("n_events", np.int64),
    ("n_samples", np.int64),
], align=True)

COUNTER = np.dtype([
    ("missing", np.int64),       # signals still missing
    ("full_s", np.float64),      # time of the latest signal
    ("parked", np.int64),        # first SM waiting for it, -1 none
], align=True)

SERVER = np.dtype([
    ("free_s", np.float64),
    ("held_bytes", np.float64),  # credits not yet returned
    ("head", np.int64),          # of its ring of credits
    ("size", np.int64),
], align=True)

CREDIT = np.dtype([("back_s", np.float64), ("bytes", np.float64)], align=True)


class Path(NamedTuple):
    """Scalars of the store path of every GPU."""

    n_sms: int
    depth: int
    egress_bytes_per_s: float
    ingress_bytes_per_s: float
    path_bytes: float
    per_sm_bytes: float
    credit_bytes: float
    credit_latency_s: float
    sample_stride: int


class State(NamedTuple):
    """Everything a run changes."""

    rows: Structured      # (n_rows,) ROW, the GPUs' tasks one after the other
    sms: Structured       # (n_gpus * n_sms,) SM
    gpus: Structured      # (n_gpus,) GPU
    offer_s: NDArray[np.float64]  # (n_gpus, 2 * leaves) when each SM offers its next chunk: a
    offer_sm: NDArray[np.int32]   # tree whose nodes hold the earlier of two, and whose it is
    ring: NDArray[np.int32]  # (n_gpus, slots) rows of the chunks in the path
    counters: Structured  # (n_counters,) COUNTER
    servers: Structured   # (n_servers,) SERVER
    credits: Structured   # (n_servers, slots) CREDIT
    backlog: NDArray[np.float64]  # (2, n) time and bytes in the path of GPU 0


@_inline
def _offer_at(s, number, sm, time):  # type: ignore[no-untyped-def]
    """Note when an SM of a GPU offers its next chunk, inf for never; ties go to the lower SM."""
    node = s.offer_s.shape[1] // 2 + sm
    s.offer_s[number, node] = time
    while node > 1:
        first = node & ~1
        if s.offer_s[number, first + 1] < s.offer_s[number, first]:
            first += 1
        node >>= 1
        s.offer_s[number, node] = s.offer_s[number, first]
        s.offer_sm[number, node] = s.offer_sm[number, first]


@_inline
def _wake(s, sm):  # type: ignore[no-untyped-def]
    s.sms[s.gpus[0].n_woken].woken_sm = sm
    s.gpus[0].n_woken += 1


@_jit
def _signal(s, number, time):  # type: ignore[no-untyped-def]
    """Raise a counter; wake who waited for it once it is full."""
    counter = s.counters[number]
    counter.missing -= 1
    counter.full_s = max(counter.full_s, time)
    if counter.missing == 0:
        sm = counter.parked
        while sm >= 0:
            _wake(s, sm)
            sm = s.sms[sm].parked_next


@_jit
def _advance(p, s, sm):  # type: ignore[no-untyped-def]
    """Run an SM up to its next remote store; return when it offers its first chunk.

    Returns inf when the SM is done or parked at a counter. Tasks without remote stores need no
    shared resource, so they are passed at once.
    """
    gpu = s.gpus[sm // p.n_sms]
    number = s.sms[sm].row
    while number < gpu.end_row:
        row = s.rows[number]
        ready = accepted_before = slot_free = 0.0
        if row.waits_for >= 0:
            counter = s.counters[row.waits_for]
            if counter.missing > 0:
                s.sms[sm].parked_next = counter.parked
                counter.parked = sm
                break
            ready = counter.full_s
        before, slot = number - p.n_sms, number - p.n_sms * p.depth
        if before >= gpu.first_row:
            ready = max(ready, s.rows[before].mma_end_s)
            accepted_before = s.rows[before].issue_end_s
        if slot >= gpu.first_row:
            slot_free = s.rows[slot].issue_end_s
        row.slot_wait_s = max(0.0, slot_free - ready)
        row.mma_start_s = max(ready, slot_free)
        row.mma_end_s = row.mma_start_s + row.work_s
        row.issue_start_s = max(row.mma_end_s, accepted_before)
        if row.n_chunks > 0 and row.server >= 0:
            s.sms[sm].row, s.sms[sm].chunk = number, 0
            return row.issue_start_s + row.start_s + row.half_s
        row.issue_end_s = row.issue_start_s
        if row.n_chunks > 0:
            row.issue_end_s += row.start_s + 2 * row.half_s * row.n_chunks
        row.arrived_s = row.issue_end_s
        if row.signals >= 0:
            _signal(s, row.signals, row.issue_end_s)
        number += p.n_sms
    s.sms[sm].row = number
    return np.inf


@_jit
def _advance_woken(p, s):  # type: ignore[no-untyped-def]
    """Advance every woken SM up to its next offer."""
    while s.gpus[0].n_woken > 0:
        s.gpus[0].n_woken -= 1
        sm = s.sms[s.gpus[0].n_woken].woken_sm
        number = sm // p.n_sms
        _offer_at(s, number, sm - number * p.n_sms, _advance(p, s, sm))


@_inline
def _serve_head(p, s, number, now):  # type: ignore[no-untyped-def]
    """Send the head chunk: take a credit, the link, the destination's ingress."""
    gpu = s.gpus[number]
    row = s.rows[s.ring[number, gpu.ring_head]]
    server, returning = s.servers[row.server], s.credits[row.server]
    while server.size > 0:  # take back credits that are due, and those it must wait for
        credit = returning[server.head]
        if credit.back_s > now:
            if server.held_bytes + row.chunk_bytes <= p.credit_bytes:
                break
            now = credit.back_s
        server.held_bytes -= credit.bytes
        server.size -= 1
        server.head += 1
        if server.head == returning.size:
            server.head = 0
    gpu.link_s = now + row.chunk_bytes / p.egress_bytes_per_s
    server.free_s = max(gpu.link_s, server.free_s) + row.chunk_bytes / p.ingress_bytes_per_s
    row.arrived_s = server.free_s
    at = server.head + server.size
    if at >= returning.size:
        at -= returning.size
    returning[at].back_s = server.free_s + p.credit_latency_s
    returning[at].bytes = row.chunk_bytes
    server.size += 1
    server.held_bytes += row.chunk_bytes


@_inline
def _sample(p, s, time):  # type: ignore[no-untyped-def]
    """Note GPU 0's backlog at every stride-th event."""
    gpu = s.gpus[0]
    if gpu.n_events % p.sample_stride == 0 and gpu.n_samples < s.backlog.shape[1]:
        s.backlog[0, gpu.n_samples] = time
        s.backlog[1, gpu.n_samples] = gpu.held_bytes
        gpu.n_samples += 1
    gpu.n_events += 1


@_inline
def _accept(p, s, number, sm, now):  # type: ignore[no-untyped-def]
    """Accept an SM's chunk into the path; return its next offer, or inf after the last chunk."""
    gpu, lane = s.gpus[number], s.sms[sm]
    row = s.rows[lane.row]
    gpu.held_bytes += row.chunk_bytes
    lane.held_bytes += row.chunk_bytes
    at = gpu.ring_head + gpu.ring_size
    if at >= s.ring.shape[1]:
        at -= s.ring.shape[1]
    s.ring[number, at] = lane.row
    gpu.ring_size += 1
    if gpu.link_s == np.inf:
        _serve_head(p, s, number, now)
    if number == 0:
        _sample(p, s, now)
    lane.chunk += 1
    if lane.chunk < row.n_chunks:
        return now + 2 * row.half_s
    row.issue_end_s = now + row.half_s
    if row.signals >= 0:
        _signal(s, row.signals, row.issue_end_s)
    lane.row += p.n_sms
    _wake(s, sm)
    return np.inf


@_inline
def _fits(held_bytes, chunk_bytes, limit_bytes):  # type: ignore[no-untyped-def]
    """Whether a chunk has room; one alone always has, or a small limit would stop everything."""
    return held_bytes < 0.5 or held_bytes + chunk_bytes <= limit_bytes


@_inline
def _enqueue(p, s, gpu, sm):  # type: ignore[no-untyped-def]
    at = gpu.queue_head + gpu.queue_size
    if at >= p.n_sms:
        at -= p.n_sms
    s.sms[gpu.first_sm + at].queue_sm = sm
    gpu.queue_size += 1


@_inline
def _offer(p, s, number):  # type: ignore[no-untyped-def]
    """Handle the earliest offer of a GPU's SMs."""
    gpu = s.gpus[number]
    now, first = s.offer_s[number, 1], np.int64(s.offer_sm[number, 1])
    sm = gpu.first_sm + first
    chunk_bytes = s.rows[s.sms[sm].row].chunk_bytes
    offer = np.inf
    if not _fits(s.sms[sm].held_bytes, chunk_bytes, p.per_sm_bytes):
        s.sms[sm].own_wait = 1
    elif gpu.queue_size > 0 or not _fits(gpu.held_bytes, chunk_bytes, p.path_bytes):
        _enqueue(p, s, gpu, sm)
    else:
        offer = _accept(p, s, number, sm, now)
    _offer_at(s, number, first, offer)
    if s.gpus[0].n_woken > 0:
        _advance_woken(p, s)


@_inline
def _link_done(p, s, number):  # type: ignore[no-untyped-def]
    """Take the head chunk off the path, start the next, and admit who waited for the room."""
    gpu = s.gpus[number]
    now, row = gpu.link_s, s.rows[s.ring[number, gpu.ring_head]]
    lane_number = gpu.first_sm + row.sm
    lane = s.sms[lane_number]
    gpu.ring_head += 1
    if gpu.ring_head == s.ring.shape[1]:
        gpu.ring_head = 0
    gpu.ring_size -= 1
    lane.held_bytes -= row.chunk_bytes
    gpu.held_bytes = gpu.held_bytes - row.chunk_bytes if gpu.ring_size > 0 else 0.0
    gpu.link_s = np.inf
    if gpu.ring_size > 0:
        _serve_head(p, s, number, now)
    if number == 0:
        _sample(p, s, now)
    if lane.own_wait == 1 and _fits(lane.held_bytes, s.rows[lane.row].chunk_bytes,
                                    p.per_sm_bytes):
        lane.own_wait = 0
        _enqueue(p, s, gpu, lane_number)
    while gpu.queue_size > 0:
        sm = s.sms[gpu.first_sm + gpu.queue_head].queue_sm
        if not _fits(gpu.held_bytes, s.rows[s.sms[sm].row].chunk_bytes, p.path_bytes):
            break
        gpu.queue_head = gpu.queue_head + 1 if gpu.queue_head + 1 < p.n_sms else 0
        gpu.queue_size -= 1
        _offer_at(s, number, sm - gpu.first_sm, _accept(p, s, number, sm, now))
    if s.gpus[0].n_woken > 0:
        _advance_woken(p, s)


@_jit
def run(p, s):  # type: ignore[no-untyped-def]
    """Run to the end; return the number of SMs that never finished (0 unless deadlocked)."""
    for sm in range(s.sms.size - 1, -1, -1):
        _wake(s, sm)
    _advance_woken(p, s)
    for number in range(s.gpus.size):
        s.gpus[number].next_s = s.offer_s[number, 1]
    while True:
        number, soonest = -1, np.inf
        for g in range(s.gpus.size):
            if s.gpus[g].next_s < soonest:
                number, soonest = g, s.gpus[g].next_s
        if number < 0:
            break
        gpu = s.gpus[number]
        if gpu.link_s == soonest:
            _link_done(p, s, number)
        else:
            _offer(p, s, number)
        gpu.next_s = min(gpu.link_s, s.offer_s[number, 1])
    unfinished = 0
    for sm in range(s.sms.size):
        unfinished += s.sms[sm].row < s.gpus[sm // p.n_sms].end_row
    return unfinished
