"""The law for staged tiles: MMA, a few staging slots, stores, and the path behind them.

Extensions of the Burst-Gap law made here: staging depth, wave quantisation, mixed and separate
local tiles, the incast of unrotated owners, the unfused baseline. All pure functions over arrays.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage_lab.law.bursts import (
    Floats,
    floats,
    issue_free_time,
    lockstep_issue_time,
    period,
)

IN_STEP_WAVES = 5  # periods at depth 1 until SMs have drifted apart
# Ratios of computing to draining one owner's tiles at which whole maps are worked out.
INCAST_RATIOS = np.geomspace(1e-4, 1e4, 321)
REGIMES = ("compute-bound", "issue-bound", "drain-bound", "capacity-bound")


class TileRun(NamedTuple):
    """A GPU's run of tiles; every field broadcasts against the others.

    Attributes
    ----------
    n_tiles : tiles of the GPU
    n_storing : the first so many of them form the storing run; all of them where remote and
        local tiles are mixed
    n_sms : persistent CTAs, K
    t_mma_s : compute time of a tile
    tile_bytes : output bytes of a full tile
    remote_bytes : bytes the GPU stores to others
    issue_depth : output tiles an SM may hold, D
    per_sm_bytes_per_s, issue_latency_s, drain_bytes_per_s, capacity_bytes : r_SM, t0, R, Q
    """

    n_tiles: ArrayLike
    n_storing: ArrayLike
    n_sms: ArrayLike
    t_mma_s: ArrayLike
    tile_bytes: ArrayLike
    remote_bytes: ArrayLike
    issue_depth: ArrayLike
    per_sm_bytes_per_s: ArrayLike
    issue_latency_s: ArrayLike
    drain_bytes_per_s: ArrayLike
    capacity_bytes: ArrayLike


class Staged(NamedTuple):
    """What the law says of a run, one value per configuration.

    Attributes
    ----------
    accepted_s, total_s : last acceptance; last byte at its destination
    period_s : steady start-to-start of storing tiles on an SM
    issue_s : mean issue span of a tile
    stall_ratio : share of SM time in which the MMA role waits for a slot
    bounds_s : shape (4, ...), the lower bounds of accepted_s in the order of `REGIMES`
    """

    accepted_s: Floats
    total_s: Floats
    period_s: Floats
    issue_s: Floats
    stall_ratio: Floats
    bounds_s: Floats


def staged_tiles(run: TileRun) -> Staged:
    """Time of a run of staged tiles.

    Every SM computes a tile in T_mma and issues it in T_iss0; at depth 1 one after the other, at
    depth D with up to D - 1 finished tiles waiting. Tiles run in waves of K. The last acceptance
    is the largest of a few chains, each a lower bound by itself: all MMAs; all issues; the path
    draining all but Q; and the path draining up to the end of a wave after which the rest of an
    SM's tiles still follow, of which the last storing wave alone may be more than Q.

    References
    ----------
    At depth 1 and many waves the period is max(T_mma + T_iss0, V/R), at depth 2 and more
    max(T_mma, T_iss0, V/R): the Burst-Gap period with G = T_mma, and with the gap hidden.
    """
    count, storing, k, mma, size, volume, depth, r, t0, drain, held = np.broadcast_arrays(
        *floats(*run))
    serial = depth == 1
    issue = t0 + size / r
    step = np.where(serial, mma + issue, mma)
    waves, storing_waves, full = np.ceil(count / k), np.ceil(storing / k), np.floor(storing / k)
    per_tile = volume / np.maximum(storing, 1)

    def rest(tiles: Floats) -> Floats:
        """Time of the tiles that follow once a wave is accepted."""
        staged = np.maximum(np.maximum(tiles - depth + 1, 0) * mma + issue, tiles * issue)
        return np.where(tiles > 0, np.where(serial, tiles * step, staged), 0.0)

    def drained(n_bytes: Floats, start: Floats) -> Floats:
        """Time when all but Q of the bytes that come from `start` on have left."""
        return np.where(volume > 0, start + (n_bytes - held) / drain, 0.0)

    first = mma + t0
    last_wave = np.where(storing > full * k, storing - full * k, np.minimum(k, storing)) * per_tile
    last_start = np.maximum(storing_waves - 1, 0) * step + first
    after = rest(waves - storing_waves)
    bounds = np.stack((
        waves * step + np.where(serial, 0.0, issue),
        np.where(serial, waves * step, mma + waves * issue),
        np.maximum(
            drained(volume, first) + after,
            np.where(full > 0, drained(full * k * per_tile, first) + rest(waves - full), 0.0)),
        drained(last_wave, last_start) + after,
    ))
    wave = np.minimum(k, storing) * per_tile
    in_step = np.where(serial & (volume > 0), np.clip(storing_waves, 0, IN_STEP_WAVES), 0.0)
    # Computing and issuing lose no more than at the drain rate that just keeps up with them.
    bounds[:2] += in_step * _in_step(mma, issue, t0, wave, np.maximum(drain, wave / step), held)
    bounds[2] += np.maximum(in_step - 1, 0) * _in_step(mma, issue, t0, wave, drain, held)
    accepted = bounds.max(axis=0)
    arrived = np.where(volume > 0, np.maximum(first + volume / drain,
                                              last_start + last_wave / drain), 0.0)
    chain = np.where(serial, step, np.maximum(mma, issue))
    steady = np.maximum(chain, k * per_tile / drain)
    # Periods are looked at over the second half of the run, of which the local end may be part.
    end = np.minimum(waves - storing_waves, 0.5 * waves)
    mean_period = (steady * (0.5 * waves - end) + chain * end) / (0.5 * waves)
    return Staged(accepted, np.maximum(accepted, arrived), mean_period,
                  _issue_span(accepted, bounds, waves, mma, issue, serial),
                  _stall_ratio(accepted, waves, mma, issue, depth, steady), bounds)


def _in_step(mma: Floats, issue: Floats, latency: Floats, volume: Floats, drain: Floats,
             held: Floats) -> Floats:
    """Time a wave loses at depth 1 while SMs still compute and store in step.

    They start together, as producers in lockstep, and drift apart within 5 to 20 tiles; a
    handful of periods is as long as lockstep makes them.
    """
    together = mma + lockstep_issue_time(mma, issue, volume, drain, held, latency)
    return np.maximum(together - period(mma, issue, volume, drain), 0.0)


def _issue_span(accepted: Floats, bounds: Floats, waves: Floats, mma: Floats, issue: Floats,
                serial: NDArray[np.bool_]) -> Floats:
    """Mean issue span: what an SM's time leaves for the store role, once it is the bottleneck.

    Behind a bottleneck of compute, spans may be blocked for as long as nobody waits for them;
    that is not modelled.
    """
    blocked = accepted > bounds[:2].max(axis=0) * (1 + 1e-9)
    left = (accepted - np.where(serial, waves, 1) * mma) / waves
    return np.where(serial | blocked, np.maximum(left, issue), issue)


def _stall_ratio(accepted: Floats, waves: Floats, mma: Floats, issue: Floats, depth: Floats,
                 steady: Floats) -> Floats:
    """Share of the time in which the MMA role has neither work nor reached its end."""
    span = (accepted - waves * mma) / waves
    serial = span * (waves - 1)  # at depth 1 every issue but the last holds the next MMA up
    tail = np.minimum(depth - 1, waves - 1) * np.maximum(steady - mma, 0) + issue
    staged = np.where(waves > depth, np.maximum(accepted - waves * mma - tail, 0.0), 0.0)
    return np.maximum(np.where(depth == 1, serial, staged), 0.0) / accepted


def regime(run: TileRun, bounds_s: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Which bound is the largest (index into `REGIMES`), and by what ratio over the next.

    At depth 1 computing and issuing add up to one chain; the longer part names it. The capacity
    bound starts from the compute chain and is set against the others only where it wins.
    """
    which = np.argmax(bounds_s, axis=0)
    tie = (which == 2) & np.isclose(bounds_s[2], bounds_s[3])  # a single wave: it must fit
    which = np.where(tie, 3, which)
    compute, issuing, drain, _ = bounds_s
    issue = issue_free_time(run.tile_bytes, run.per_sm_bytes_per_s, run.issue_latency_s)
    serial = np.broadcast_to(np.asarray(run.issue_depth) == 1, which.shape)
    others = np.where(which == 2, np.maximum(compute, issuing),
                      np.where(which == 0, np.maximum(drain, np.where(serial, 0.0, issuing)),
                               np.maximum(drain, np.where(serial, 0.0, compute))))
    others = np.where(which == 3, bounds_s[:3].max(axis=0), others)
    with np.errstate(divide="ignore"):
        margin = np.where(others > 0, bounds_s.max(axis=0) / others - 1.0, np.inf)
    longer = issue > floats(run.t_mma_s)[0]
    return np.where((which == 0) & serial & longer, 1, which), margin


def incast(n_gpus: int, compute_s: ArrayLike, drain_s: ArrayLike,
           held_ratio: ArrayLike) -> tuple[Floats, Floats]:
    """Predict when all is accepted and drained if all GPUs store to one owner at a time.

    A fluid over owners' phases. A GPU's own phase has nothing remote, so that it runs ahead and
    no longer adds to the incast of later phases; the others share the owner's ingress.

    Parameters
    ----------
    n_gpus : GPUs P, and phases
    compute_s : time in which a GPU computes one owner's tiles (s)
    drain_s : time in which one GPU alone drains them, V / R (s)
    held_ratio : capacity Q as a share of one owner's bytes

    Returns
    -------
    accepted_s : shape (n_gpus, ...), since the first tile's stores
    drained_s : shape (...), when the last byte is out
    """
    compute, drain, held = np.broadcast_arrays(
        *np.atleast_1d(*floats(compute_s, drain_s, held_ratio)))
    if compute.size <= INCAST_RATIOS.size:
        return _incast(n_gpus, compute, drain, held)
    accepted, drained = np.zeros((n_gpus, compute.size)), np.zeros(compute.size)
    for capacity in np.unique(held):
        same = held == capacity
        ratio = compute[same] / drain[same]
        *each, last = (np.interp(ratio, INCAST_RATIOS, row) * (compute[same] + drain[same])
                       for row in _incast_table(n_gpus, float(capacity)))
        accepted[:, same], drained[same] = each, last
    return accepted, drained


@functools.lru_cache(maxsize=32)
def _incast_table(n_gpus: int, held_ratio: float) -> Floats:
    """Times over compute + drain time at `INCAST_RATIOS`: accepted on each GPU, then drained.

    The fluid has no other scale than these two times, and its times are nearly linear between
    the ratios: within 2 %, mostly within 0.5 %.
    """
    ones = np.ones_like(INCAST_RATIOS)
    accepted, drained = _incast(n_gpus, INCAST_RATIOS, ones, held_ratio * ones)
    return np.vstack((accepted, drained)) / (INCAST_RATIOS + 1)


def _incast(n_gpus: int, compute: Floats, drain: Floats, held: Floats) -> tuple[Floats, Floats]:
    """Step the fluid from event to event."""
    me = np.arange(n_gpus)[:, None]
    out, gone = np.zeros((2, n_gpus, compute.size))  # accepted and drained, in phases
    accepted, now = np.zeros_like(out), np.zeros(compute.size)
    for _ in range(40 * n_gpus):  # a handful of events for each GPU and phase
        busy = gone < n_gpus - 1e-7
        if not busy.any():
            break
        fill, flow, to_go = _incast_rates(n_gpus, me, out, gone, compute, drain, held)
        step = np.where(busy.any(axis=0), np.maximum(to_go.min(axis=0), 1e-9 * compute), 0.0)
        out = np.minimum(out + fill * step, n_gpus)
        gone = np.minimum(gone + flow * step, out)
        gone = np.where(np.abs(gone - np.round(gone)) < 1e-7, np.round(gone), gone)
        now = now + step
        done = (out > n_gpus - 1e-6) & (accepted == 0)
        accepted = np.where(done, now, accepted)
    return accepted, now


def _incast_rates(n_gpus: int, me: NDArray[np.int64], out: Floats, gone: Floats, compute: Floats,
                  drain: Floats, held: Floats) -> tuple[Floats, Floats, Floats]:
    """Rates at which each GPU's stores are accepted and drained, and the time until one changes."""
    phase = np.minimum(np.floor(gone + 1e-9), n_gpus - 1)
    fill = np.where(out < n_gpus - 1e-7, 1 / compute, 0.0)
    waiting = out - gone > 1e-9
    own = np.clip(np.minimum(out, me + 1) - np.maximum(gone, me), 0, None)
    room = held - (out - gone - own)
    wants = (gone < n_gpus - 1e-7) & (waiting | (fill > 0))
    remote = wants & (phase != me)
    senders = np.zeros_like(out)
    for owner in range(n_gpus):
        to_owner = remote & (phase == owner)
        senders = np.where(to_owner, to_owner.sum(axis=0), senders)
    flow = np.where(remote, 1 / (np.maximum(senders, 1) * drain), 0.0)
    flow = np.where(wants & ~remote, 1e6 / compute, flow)  # own tiles need no link
    flow = np.where(waiting, flow, np.minimum(flow, fill))
    takes_room = np.floor(out + 1e-9) != me  # own tiles take none
    fill = np.where(takes_room & (room <= 1e-9), np.minimum(fill, flow), fill)
    with np.errstate(divide="ignore", invalid="ignore"):
        events = np.stack((
            np.where(flow > 0, (phase + 1 - gone) / flow, np.inf),
            np.where(fill > 0, (np.floor(out + 1e-9) + 1 - out) / fill, np.inf),
            np.where(takes_room & (fill > flow) & (room > 1e-9), room / (fill - flow), np.inf),
            np.where((flow > fill) & waiting, (out - gone) / (flow - fill), np.inf)))
    return fill, flow, events.min(axis=0)


def unfused_time(compute_s: ArrayLike, remote_bytes: ArrayLike,
                 copy_bytes_per_s: ArrayLike) -> Floats:
    """Compute, then copy: the kernel stores to its own memory and a copy follows (s)."""
    compute, remote, rate = floats(compute_s, remote_bytes, copy_bytes_per_s)
    return compute + remote / rate
