"""The sockets device: live backpressure on any computer, in the operating system's own buffers.

K producer processes send bursts, each over a stream-socket pair of its own to every destination;
one receiver process per destination reads from all of them in turn at a chosen pace. A store is
*accepted* when `send` returns and has *arrived* when the receiver has read it, so that the socket
buffers are the X-Stage of this machine. Local stores (the control, a GPU's own tiles, the
activations that Linear-1 leaves to Linear-2) go to a receiver without pace.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import threading
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab.devices.base import Capabilities, check_counters, figures_digest, is_balanced
from xstage_lab.devices.sockets_processes import CHUNK_BYTES, Delivery, Job, Receipt, Work, now_ns
from xstage_lab.devices.sockets_team import Team
from xstage_lab.errors import (
    DeviceUnavailable,
    Infeasible,
    InvalidValue,
    UnknownFact,
    require_number,
)
from xstage_lab.record import TILE, Record, Tiles, provenance, summarize
from xstage_lab.schedule import Program, Tasks
from xstage_lab.spec import BurstTrain, FusedGemm, LinkSpec, MachineSpec, MoELayer

MAX_PRODUCERS, MAX_DESTINATIONS = 16, 4
#: Pace that can be kept: from many sends a second to what one process moves with ease.
MIN_BYTES_PER_S, MAX_BYTES_PER_S = 1e6, 1e9
#: Unpaced, the sockets must carry this much more than the pace, or the pace is not what limits.
CONTROL_MARGIN = 1.5
#: A run may take this long, and as much longer as the second says, before it is given up.
MAX_RUN_S, GRACE_S = 60.0, 5.0
#: Producers know what they wait for: receivers give up this much later and leave them the word.
LAST_WORD_S = 1.0
N_BACKLOG_SAMPLES = 2000

_LESS = {BurstTrain: "fewer or smaller bursts or shorter gaps", FusedGemm: "a smaller m, n or k",
         MoELayer: "fewer tokens or a smaller layer"}


def this_computer(
    n_producers: int = 2,
    n_destinations: int = 1,
    drain_bytes_per_s: float = 50e6,
    buffer_bytes: int = 64 * 1024,
    flop_per_s: float = 400e9,
) -> MachineSpec:
    """Describe this computer as a machine of sockets.

    Parameters
    ----------
    n_producers : int
        Producer processes, the "SMs" of GPU 0.
    n_destinations : int
        Paced receivers, the GPUs that GPU 0 stores to; each has its share of the rate to itself,
        as in a full mesh.
    drain_bytes_per_s : float
        Pace of all receivers together.
    buffer_bytes : int
        Asked of the operating system for each socket pair.
    flop_per_s : float
        Rate of all producers together at which the compute time of a GEMM tile is timed; nothing
        is multiplied.

    Returns
    -------
    MachineSpec
        Its issue rate, its latency and its capacity are not known; calibrate the device.

    Raises
    ------
    InvalidValue
        If a value is out of its range.
    """
    require_number("n_producers", n_producers, low=1, high=MAX_PRODUCERS, integer=True,
                   unit="processes", remedy="Each producer is a process of this computer.")
    require_number("n_destinations", n_destinations, low=1, high=MAX_DESTINATIONS, integer=True,
                   unit="processes", remedy="Each destination is a process of this computer.")
    require_number("drain_bytes_per_s", drain_bytes_per_s, low=MIN_BYTES_PER_S,
                   high=MAX_BYTES_PER_S, unit="B/s", remedy="A receiver process keeps this pace.")
    require_number("buffer_bytes", buffer_bytes, low=CHUNK_BYTES, high=2**24, unit="B",
                   integer=True)
    require_number("flop_per_s", flop_per_s, low=0.0, open_low=True, unit="FLOP/s")
    rate = float(drain_bytes_per_s)
    link = LinkSpec(
        name="stream sockets", topology="full mesh", egress_bytes_per_s=rate,
        ingress_bytes_per_s=rate, credit_bytes=float(buffer_bytes),
        source="the pace and the buffers asked for")
    return MachineSpec(
        name=f"sockets-this-computer-{n_producers}-to-{n_destinations}-at-{rate / 1e6:g}-MB/s",
        n_sms=int(n_producers), max_gpus=int(n_destinations) + 1, link=link,
        bf16_flop_per_s=flop_per_s, fp8_flop_per_s=flop_per_s,
        assumed=frozenset({"bf16_flop_per_s", "fp8_flop_per_s"}),
        source="processes of this computer; compute time is timed, not computed")


class SocketsDevice:
    """Producers, sockets and paced receivers on this computer; its times are LIVE.

    GPU 0 of a program is run; the others would do the same on links of their own. Gaps and the
    compute time of tiles keep the core busy where producers and receivers have a core each, else
    they are timed sleeps: spinning producers would steal the receiver's core.

    Where the system allows it, mostly to root alone, the processes run before all others and a
    busy computer hardly disturbs them; `scheduling` in the provenance says which it was.

    How the buffers add up to Q: a pair's buffer is charged to its sender (on Linux; SO_RCVBUF is
    set too and counts elsewhere). Of n bytes asked for the system makes 2 n, bookkeeping
    included: 64 KiB hold 15 chunks of 8 KiB. Each receiver has one more chunk in hand. A train of
    K producers to D destinations fills K pairs, some 2 K n in all, less its bookkeeping, plus D
    chunks; a program that spreads each producer over all destinations fills up to D times as
    many pairs. Which it is, only calibration says. Tiles go to GPUs and producers in turn: where
    K and the number of GPUs have a common factor, some producers store to few GPUs or to none.
    Three producers for two GPUs are even.

    Parameters
    ----------
    machine : MachineSpec, optional
        From `this_computer`, the default one if left out.

    Raises
    ------
    DeviceUnavailable
        If this system has no such sockets.
    InvalidValue, UnknownFact
        If `machine` cannot be processes of a computer.
    """

    name = "sockets"
    badge = "LIVE"
    capabilities = Capabilities(times=True, per_tile=True, any_program=True)

    def __init__(self, machine: MachineSpec | None = None) -> None:
        if os.name != "posix":
            raise DeviceUnavailable("the sockets device needs Unix stream sockets, which this "
                                    "system lacks; use the simulated device.")
        self.machine = machine or this_computer()
        link = self.machine.link
        for field in ("egress_bytes_per_s", "credit_bytes"):
            if not math.isfinite(getattr(link, field)):
                raise UnknownFact(field, self.machine.name,
                                  "take devices.sockets.this_computer(...).")
        this_computer(self.machine.n_sms, self.machine.max_gpus - 1, link.egress_bytes_per_s,
                      int(link.credit_bytes))  # the same ranges
        self._team: Team | None = None
        self._end: Callable[[], object] = lambda: None  # once there is a team, ends it
        self._control_bytes_per_s = math.nan
        self._measuring = threading.Lock()

    def measure(self, program: Program, seed: int | None = None) -> Record:
        """Run GPU 0 of `program` once; `seed` changes nothing, nothing here is drawn.

        Raises
        ------
        Infeasible, InvalidValue
            If this device cannot run it, or the computer cannot keep the pace.
        WorkerFailed
            If a process ended in the middle; the next measurement starts new ones.
        """
        self._check(program)
        with self._measuring:
            team = self._running()
            jobs, deliveries = self._split(program)
            works, receipts = team.run(jobs, deliveries)
        tiles, start_ns = _tiles(program, works, receipts)
        return Record(
            summary=summarize(tiles, dataclasses.replace(program, tasks=program.tasks[:1])),
            tiles=tiles,
            backlog=_backlog(works, receipts, start_ns),
            parameters=program.parameters(),
            provenance=self._provenance(program, tiles, receipts, team, seed))

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run: producers, paced receivers, receiver of local stores."""
        return [] if self._team is None else self._team.pids

    @property
    def settings(self) -> dict[str, Any]:
        """What a record's provenance says of the machine: its path is made as it says."""
        return {"figures": figures_digest(self.machine)}

    def close(self) -> None:
        """End the processes; a later measurement starts new ones."""
        with self._measuring:
            self._end()

    def _check(self, program: Program) -> None:
        """Refuse what is not a run of GPU 0 alone on these processes, in bounded time."""
        workload, machine = program.workload, self.machine
        require_number("n_ctas", program.n_ctas, low=1, high=machine.n_sms, integer=True,
                       unit="producers", remedy=f"{machine.name} has {machine.n_sms}.")
        require_number("n_gpus", program.n_gpus, low=1, high=machine.max_gpus, integer=True,
                       remedy=f"{machine.name} has {machine.max_gpus - 1} destinations.")
        if not isinstance(workload, BurstTrain | FusedGemm | MoELayer):
            raise Infeasible(f"the sockets device does not run {type(workload).__name__}, only "
                             "burst trains, fused GEMMs and MoE layers; use the simulated device.")
        if isinstance(workload, MoELayer) and not is_balanced(program):
            raise Infeasible("this routing makes GPUs differ, and the sockets device runs GPU 0 "
                             "alone; use balanced routing, or the simulated device.")
        to = getattr(workload, "destinations", "round-robin")
        if to not in ("round-robin", "row-owner"):
            raise Infeasible(f"destinations {to!r} make GPUs differ, and the sockets device runs "
                             "GPU 0 alone; use round-robin or row-owner, or the simulated device.")
        check_counters(program.tasks[:1])
        work_s, stores_s = self._least_s(program)
        if max(work_s, stores_s) > MAX_RUN_S:
            raise Infeasible(
                f"this run takes at least {max(work_s, stores_s):.0f} s on {machine.name}, "
                f"{work_s:.0f} s for a producer's work and {stores_s:.0f} s for its stores; "
                f"allowed: up to {MAX_RUN_S:.0f} s. Take {_LESS[type(workload)]}, or a machine "
                "of higher flop_per_s or drain_bytes_per_s.")

    def _least_s(self, program: Program) -> tuple[float, float]:
        """What the run takes at least: a producer's work, and the stores to a destination."""
        tasks = program.tasks[0]
        to = np.bincount(tasks["owner"], tasks["store_bytes"], minlength=program.n_gpus)
        stores_s = max(float(to[1:].max(initial=0.0)) / self._pace_bytes_per_s,
                       float(to[0]) / MAX_BYTES_PER_S)
        return float(self._work_s(program).sum()) / program.n_ctas, stores_s

    def _work_s(self, program: Program) -> NDArray[np.float64]:
        """Time of each task of GPU 0 before its stores: its gap, or its FLOPs at the set rate."""
        tasks = program.tasks[0]
        if isinstance(program.workload, BurstTrain):
            return tasks["gap_s"].astype(np.float64)
        rate = self.machine.flop_per_s(program.workload.dtype) / self.machine.n_sms
        return np.asarray(tasks["flop"] / rate)

    @property
    def _pace_bytes_per_s(self) -> float:
        """Pace of one receiver."""
        return self.machine.link.egress_bytes_per_s / (self.machine.max_gpus - 1)

    @property
    def _spins(self) -> bool:
        """Whether producers and receivers have a core each, so that work may keep one busy."""
        return self.machine.n_sms + self.machine.max_gpus - 1 <= _n_cpus()

    def _running(self) -> Team:
        """Return the processes, starting them where they do not run."""
        if self._team is None or not self._team.alive:
            self._end()
            machine = self.machine
            self._team = team = Team(machine.n_sms, machine.max_gpus - 1,
                                     int(machine.link.credit_bytes))
            self._end = weakref.finalize(self, team.end)  # also when Python exits
            self._control_bytes_per_s = max(team.unpaced_rate() for _ in range(3))
        most = self._control_bytes_per_s / CONTROL_MARGIN
        if self.machine.link.egress_bytes_per_s > most:
            self._end()  # a later attempt finds out anew
            raise InvalidValue(
                "drain_bytes_per_s", self.machine.link.egress_bytes_per_s, f"up to {most:,.3g}",
                "B/s", f"Without pace this computer moves {self._control_bytes_per_s:,.3g} B/s "
                f"now, and the pace must be {CONTROL_MARGIN:g} times slower to be what limits.")
        return self._team

    def _split(self, program: Program) -> tuple[list[Job], list[Delivery]]:
        """Deal GPU 0's tasks to the producers, and tell the receivers what will come."""
        tasks, k = program.tasks[0], program.n_ctas
        work_ns = np.rint(self._work_s(program) * 1e9).astype(np.int64)
        n_lanes = self.machine.max_gpus
        lane = (tasks["owner"].astype(np.int64) - 1) % n_lanes  # GPU 0 itself comes last
        limit_s = GRACE_S + 4.0 * max(self._least_s(program))
        deadline_ns, needs = now_ns() + int(limit_s * 1e9), _needs(tasks, k)
        jobs = [
            Job(work_ns=_ints(work_ns[p::k]), n_bytes=_ints(tasks["store_bytes"][p::k]),
                lane=_ints(lane[p::k]), depth=program.issue_depth,
                needs=_ints(needs[p::k]), spin=self._spins, deadline_ns=deadline_ns)
            for p in range(k)]
        deliveries = [
            Delivery(ends=tuple(_ends(tasks[p::k], lane[p::k] == to) for p in range(k)),
                     pace_bytes_per_s=self._pace_bytes_per_s if to < n_lanes - 1 else 0.0,
                     deadline_ns=deadline_ns + int(LAST_WORD_S * 1e9))
            for to in range(n_lanes)]
        return jobs, deliveries

    def _provenance(self, program: Program, tiles: Tiles, receipts: list[Receipt], team: Team,
                    seed: int | None) -> dict[str, Any]:
        work = (tiles["mma_end_s"] - tiles["mma_start_s"])[program.n_ctas:]
        asked = self._work_s(program)[program.n_ctas:]
        return provenance(
            self.badge, self.name,
            f"stream sockets, {platform.system()} {platform.release()}, {_n_cpus()} CPUs",
            machine=self.machine.name, seed=seed, n_cpus=_n_cpus(), **self.settings,
            load_average=os.getloadavg()[0], n_gpus_run=1, chunk_bytes=CHUNK_BYTES,
            **team.buffers, scheduling=team.scheduling,
            gap="busy" if self._spins else "sleep",
            gap_asked_s=float(asked.mean()) if asked.size else math.nan,
            gap_achieved_s=float(work.mean()) if work.size else math.nan,
            drain_asked_bytes_per_s=self.machine.link.egress_bytes_per_s,
            drain_achieved_bytes_per_s=sum(map(_pace_kept, receipts[:-1])),
            control_bytes_per_s=self._control_bytes_per_s)


def _n_cpus() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ints(values: NDArray[np.int64]) -> array[int]:
    return array("q", np.ascontiguousarray(values, np.int64).tobytes())


def _ends(tasks: Tasks, chosen: NDArray[np.bool_]) -> array[int]:
    """Byte counts at which the chosen bursts of a producer end."""
    sizes = tasks["store_bytes"][chosen]
    return _ints(np.cumsum(sizes[sizes > 0]))


def _needs(tasks: Tasks, k: int) -> NDArray[np.int64]:
    """What must be accepted before each task: how many first tasks of each of k producers.

    Row i is task i // k of producer i mod k, and a producer's stores are accepted in order, so
    that a counter is full once each producer has come to the last task that raises it. Shape
    (n_tasks, k), or (0, k) if no task waits.
    """
    waits, signals = tasks["waits_for"], tasks["signals"]
    if (waits < 0).all():
        return np.zeros((0, k), np.int64)
    raising = np.flatnonzero(signals >= 0)
    last = np.zeros((max(waits.max(), signals.max()) + 2, k), np.int64)  # counter -1 needs nobody
    np.maximum.at(last, (signals[raising], raising % k), raising // k + 1)
    return np.asarray(last[waits])


def _pace_kept(receipt: Receipt) -> float:
    """Bytes a receiver read per second of having something to read."""
    return sum(receipt.chunk_bytes) / (receipt.busy_ns * 1e-9) if receipt.busy_ns else 0.0


def _tiles(program: Program, works: list[Work], receipts: list[Receipt]) -> tuple[Tiles, int]:
    """Per-tile times of GPU 0 in seconds, and the first start anywhere as a stamp (ns)."""
    tasks, k = program.tasks[0], program.n_ctas
    tiles = np.zeros(tasks.size, TILE)
    tiles["row"] = np.arange(tasks.size)
    tiles["sm"] = tiles["row"] % k
    tiles["store_bytes"] = tasks["store_bytes"]
    start_ns = min(work.work_start_ns[0] for work in works if work.work_start_ns)

    def seconds(stamps_ns: array[int]) -> NDArray[np.float64]:
        return np.asarray((np.asarray(stamps_ns, np.int64) - start_ns) * 1e-9)

    for p, work in enumerate(works):
        own = tiles[p::k]  # a view
        for name, stamps_ns in zip(("mma_start_s", "mma_end_s", "issue_start_s", "issue_end_s"),
                                   work, strict=False):
            own[name] = seconds(stamps_ns)
        own["arrived_s"] = own["issue_end_s"]
        for to, receipt in enumerate(receipts):
            here = (tasks["owner"][p::k] == (to + 1) % len(receipts)) & (own["store_bytes"] > 0)
            own["arrived_s"][here] = seconds(receipt.arrived_ns[p])
    ready_s, depth = _ready_s(tiles, _needs(tasks, k)), program.issue_depth
    for p in range(k):  # the slot of the tile `depth` before must be free again
        own = tiles[p::k]
        able_s = np.maximum(own["mma_end_s"][depth - 1:-1], ready_s[p::k][depth:])
        own["slot_wait_s"][depth:] = np.maximum(own["issue_end_s"][:-depth] - able_s, 0.0)
    return tiles, start_ns


def _ready_s(tiles: Tiles, needs: NDArray[np.int64]) -> NDArray[np.float64]:
    """When all that each tile needs was accepted; 0 where that is nothing."""
    if not needs.size:
        return np.zeros(tiles.size)
    k = needs.shape[1]
    accepted_s = tiles["issue_end_s"][np.maximum((needs - 1) * k + np.arange(k), 0)]
    return np.asarray(np.where(needs > 0, accepted_s, 0.0).max(axis=1))


def _backlog(works: list[Work], receipts: list[Receipt], start_ns: int) -> NDArray[np.float64]:
    """Bytes accepted and not yet arrived at any of the GPUs' receivers, over time."""
    events = [(work.chunk_ns, work.chunk_bytes, 1) for work in works]
    events += [(receipt.chunk_ns, receipt.chunk_bytes, -1) for receipt in receipts[:-1]]
    time_s = np.concatenate([(np.asarray(stamps, np.int64) - start_ns) * 1e-9
                             for stamps, _, _ in events])
    change = np.concatenate([sign * np.asarray(n, np.float64) for _, n, sign in events])
    order = np.argsort(time_s, kind="stable")
    # A receiver may have read a chunk before its producer has read the clock.
    held = np.maximum(np.cumsum(change[order]), 0.0)
    every = max(1, -(-order.size // N_BACKLOG_SAMPLES))
    return np.column_stack(([0.0, 0.0], [time_s[order][::every], held[::every]]))
