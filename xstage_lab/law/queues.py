"""The law for tiles that differ from each other: first come, first served, from SM to link.

Where tiles differ in work or size, or wait for each other, waves say too little. But whatever a
tile passes serves in order: the MMA role, the store role, the way out of its GPU, the way into its
owner's. The first two take one tile at a time; links take the stores of many SMs at a time, drain
them at R and accept them Q / R before. Of equal bursts this says what the Burst-Gap law says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage_lab.law.bursts import Floats, floats, issue_free_time

N_PASSES = 3  # of SMs that nothing blocks, with counters that are waited for, with slots


class TileList(NamedTuple):
    """Tasks of one or all GPUs, arrays of shape (n_gpus, n_turns, n_sms).

    Each SM does its turns in order; where it has nothing to do, work and bytes are 0.

    Attributes
    ----------
    work_s : compute time
    store_bytes : bytes stored, to whomever
    owner : destination GPU, -1 for the own
    waits_for : counter that all tasks that raise it must have raised, -1 none
    signals : counter raised once the task's stores are accepted, -1 none
    """

    work_s: Floats
    store_bytes: Floats
    owner: NDArray[np.int64]
    waits_for: NDArray[np.int64]
    signals: NDArray[np.int64]


class StorePath(NamedTuple):
    """The law's parameters, for a tile list.

    Attributes
    ----------
    issue_depth : output tiles an SM may hold, D
    per_sm_bytes_per_s, issue_latency_s, drain_bytes_per_s, capacity_bytes : r_SM, t0, R, Q
    pair_bytes_per_s : rate from one GPU to one other; less than R where each pair has its own link
    """

    issue_depth: int
    per_sm_bytes_per_s: float
    issue_latency_s: float
    drain_bytes_per_s: float
    capacity_bytes: float
    pair_bytes_per_s: float


class TileTimes(NamedTuple):
    """When the law says each task of a `TileList` does what, arrays of its shape (s).

    Attributes
    ----------
    ready_s : its counter is full, 0 where it waits for none
    mma_start_s, mma_end_s : compute
    issue_start_s, accepted_s : first store, last store accepted
    arrived_s : last byte at its destination
    """

    ready_s: Floats
    mma_start_s: Floats
    mma_end_s: Floats
    issue_start_s: Floats
    accepted_s: Floats
    arrived_s: Floats


def served(ready_s: ArrayLike, service_s: ArrayLike, axis: int = 0) -> Floats:
    """When a server that takes one job at a time, in the order given, is done with each (s).

    References
    ----------
    Lindley's recursion end_i = max(end_{i-1}, ready_i) + service_i, solved for end_i.
    """
    ready, service = floats(ready_s, service_s)
    total = np.cumsum(service, axis=axis)
    waited: Floats = np.maximum.accumulate(ready - total + service, axis=axis)
    return total + waited


def tile_times(tiles: TileList, path: StorePath) -> TileTimes:
    """Time of every task of a tile program.

    The first pass takes SMs that nothing blocks. Acceptance then holds up who waits for it: the
    task behind a counter, the stores of the SM's next tile, the tile that needs the slot. Each
    pass raises what is a lower bound.
    """
    issue = np.where(tiles.store_bytes > 0, issue_free_time(
        tiles.store_bytes, path.per_sm_bytes_per_s, path.issue_latency_s), 0.0)
    ready = np.zeros_like(tiles.work_s)
    with_issue = tiles.work_s + (issue if path.issue_depth == 1 else 0.0)
    mma_end = served(ready, with_issue, axis=1) - with_issue + tiles.work_s
    own_end = served(mma_end, issue, axis=1)
    accepted, arrived = _through_path(tiles, path, own_end - issue, own_end)
    for _ in range(N_PASSES - 1):
        ready = _full(tiles, accepted)
        slot = _turns_ago(accepted, path.issue_depth)
        mma_end = served(np.maximum(ready, slot), tiles.work_s, axis=1)
        own_end = served(np.maximum(mma_end, _turns_ago(accepted, 1)), issue, axis=1)
        accepted, arrived = _through_path(tiles, path, own_end - issue, own_end)
    return TileTimes(ready, mma_end - tiles.work_s, mma_end, own_end - issue, accepted, arrived)


def _turns_ago(times: Floats, n: int) -> Floats:
    """What happened to each SM's task `n` turns before; 0 where there was none."""
    before = np.zeros_like(times)
    before[:, n:] = times[:, :-n]
    return before


def _full(tiles: TileList, accepted: Floats) -> Floats:
    """When the counter that each task waits for is full; 0 where it waits for none."""
    full = np.zeros(int(tiles.waits_for.max(initial=-1)) + 2)  # the last one is that of nobody
    raises = tiles.signals >= 0
    np.maximum.at(full, tiles.signals[raises], accepted[raises])
    return full[tiles.waits_for]


class Offered(NamedTuple):
    """Bytes that several stores have offered together by each begin and each end of one of them.

    Attributes
    ----------
    order : the begins and ends, numbered one after the other, in order of time
    time_s, n_bytes : in that order
    """

    order: NDArray[np.int64]
    time_s: Floats
    n_bytes: Floats


def offered(begin_s: ArrayLike, end_s: ArrayLike, store_bytes: ArrayLike) -> Offered:
    """Add up stores that each offer their bytes evenly from begin to end."""
    begin, end, size = floats(begin_s, end_s, store_bytes)
    end = np.maximum(end, begin + 1e-15)  # a second of times leaves room for that
    when, slope = np.concatenate((begin, end)), size / (end - begin)
    order = np.argsort(when, kind="stable")
    rate = np.cumsum(np.concatenate((slope, -slope))[order])
    return Offered(order, when[order],
                   np.append(0.0, np.cumsum(rate[:-1] * np.diff(when[order]))))


def drained(stores: Offered, rate: float) -> Floats:
    """When a link has drained all that was offered until each begin and each end (s).

    With A(t) offered until t, that is the largest over s <= t of s + (A(t) - A(s)) / rate.
    """
    needed = stores.n_bytes / rate
    left = np.empty_like(needed)
    left[stores.order] = needed + np.maximum.accumulate(stores.time_s - needed)
    return left


def _through_path(tiles: TileList, path: StorePath, start: Floats,
                  own_end: Floats) -> tuple[Floats, Floats]:
    """When stores are accepted and have arrived that SMs alone issue in [start, own_end].

    A GPU's path is one queue: who waits for the way into its owner holds up all behind. A byte is
    accepted once the one that was offered Q bytes before it has left.
    """
    accepted, arrived = own_end.copy(), own_end.copy()
    away = np.flatnonzero((tiles.owner >= 0) & (tiles.store_bytes > 0))
    if not away.size:
        return accepted, arrived
    begin, end, size = (start.flat[away] + path.issue_latency_s, own_end.flat[away],
                        tiles.store_bytes.flat[away])
    gpu = away // (tiles.work_s.size // tiles.work_s.shape[0])
    way_in, rate_in = _ways_in(tiles, path, gpu, tiles.owner.flat[away])
    left = np.zeros((2, away.size))  # of begins and of ends
    for one in _groups(way_in):
        stores = offered(begin[one], end[one], size[one])
        left[:, one] = drained(stores, rate_in).reshape(2, -1)
    for one in _groups(gpu):
        stores = offered(begin[one], end[one], size[one])
        out = np.maximum(drained(stores, path.drain_bytes_per_s), left[:, one].ravel())
        out[stores.order] = np.maximum.accumulate(out[stores.order])
        n_bytes = np.empty_like(out)
        n_bytes[stores.order] = stores.n_bytes
        let_in = np.interp(n_bytes[one.size:] - path.capacity_bytes, stores.n_bytes,
                           out[stores.order])
        arrived.flat[away[one]] = np.maximum(end[one], out[one.size:])
        accepted.flat[away[one]] = np.maximum(end[one], let_in)
    return accepted, arrived


def _ways_in(tiles: TileList, path: StorePath, gpu: NDArray[np.int64],
             owner: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """Number of the link by which each store reaches its owner, and the rate of those links.

    One that GPUs share is not seen where one of them stands for all.
    """
    if path.pair_bytes_per_s < path.drain_bytes_per_s:
        return gpu * (int(owner.max()) + 1) + owner, path.pair_bytes_per_s
    return (owner if tiles.work_s.shape[0] > 1 else gpu), path.drain_bytes_per_s


def _groups(number: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Indices of each number that occurs."""
    order = np.argsort(number, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
