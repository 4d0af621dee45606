"""Burst trains on GPUs: launches of `burst_gap.cu`, the check of every byte, the times.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab import reference
from xstage_lab.devices.cuda_clock import Anchors, seconds
from xstage_lab.devices.cuda_gpus import GpuFacts
from xstage_lab.devices.cuda_launch import (
    BUDGET_S,
    Gpu,
    Launch,
    Memory,
    Place,
    Watchdog,
    cycles,
)
from xstage_lab.errors import Infeasible
from xstage_lab.kernels import burst_gap
from xstage_lab.kernels.failures import N_REPORT_WORDS
from xstage_lab.kernels.fused_tiles import N_STORE_WARPS
from xstage_lab.record import TILE, Tiles
from xstage_lab.schedule import Program
from xstage_lab.spec import BurstTrain

#: Threads that store a burst: as many as store a tile, so that one law may hold for both.
N_THREADS = 32 * N_STORE_WARPS
#: Bursts of a CTA go to slots in turn; all slots of a GPU together are no larger than this.
MAX_BYTES, MAX_BULK_BYTES = 2**28, 2**32
CLOCK_S = 1e-3  # a train that takes so long tells the clock's rate


class Route(NamedTuple):
    """Where the CTAs of a GPU store: places by owner, and the owner of each CTA."""

    places: Sequence[Place]
    owners: NDArray[np.int64]


class BurstRun(NamedTuple):
    """What a train leaves of one GPU.

    Attributes
    ----------
    spans : int64 array of shape (n_ctas, n_bursts, 2)
        Start and end of each burst, cycles of its SM.
    arrived : int64 array of shape (n_ctas,)
        Cycles once all bursts of the CTA have arrived.
    anchors : Anchors
    sms : uint32 array of shape (n_ctas,)
    """

    spans: NDArray[np.int64]
    arrived: NDArray[np.int64]
    anchors: Anchors
    sms: NDArray[np.uint32]


def run_train(
    watchdog: Watchdog,
    gpus: Sequence[Gpu],
    routes: Sequence[Route],
    train: BurstTrain,
    *,
    store_path: str,
    seed: int,
    gap_cycles: int,
) -> list[BurstRun]:
    """Run a train on every GPU at the same time, and check every byte that it leaves.

    Parameters
    ----------
    watchdog : Watchdog
    gpus, routes : sequences of Gpu and Route
        Those that run, and where each stores.
    train : BurstTrain
    store_path : str
        `registers` or `bulk`.
    seed : int
        Of the pattern; another one for every launch, so that nothing stale passes.
    gap_cycles : int

    Returns
    -------
    list of BurstRun
        By GPU.

    Raises
    ------
    WrongResult, KernelFailed, Infeasible
        If what arrived is not what was stored; a wait ran out; it does not fit.
    """
    n_slots = slots_of(train, store_path)
    needed = burst_gap.shared_bytes(store_path, train.burst_bytes)
    kernels = [gpu.kernel(burst_gap.source(store_path, N_THREADS), N_THREADS,
                          max(needed, alone_bytes(gpu.facts))) for gpu in gpus]
    started = gpus[0].memory("started", 16)
    started.fill(0)
    launches, reports = [], []
    for i, (gpu, route) in enumerate(zip(gpus, routes, strict=True)):
        arguments = _arguments(gpu, route, train, i, n_slots)
        arguments |= {"seed": seed + i, "gap_cycles": gap_cycles, "started": started.address,
                      "n_starters": len(gpus) * train.n_producers, "abort": watchdog.address}
        launches.append(Launch(gpu, kernels[i], train.n_producers, pack(arguments)))
        reports.append(gpu.memory("report", 4 * N_REPORT_WORDS))
    watchdog.run(launches, reports, burst_gap.WAITS)
    for i, (gpu, route) in enumerate(zip(gpus, routes, strict=True)):
        stored = _stored(gpu, route, train, i, n_slots)
        reference.check_bursts(stored, seed=seed + i, n_bursts=train.n_bursts, gpu=i)
    return [_result(gpu, train) for gpu in gpus]


def alone_bytes(facts: GpuFacts) -> int:
    """Return the shared memory with which a CTA has its SM to itself: more than half of it."""
    return min(facts.smem_per_sm_bytes // 2 + 1024, facts.smem_per_cta_bytes)


def slots_of(train: BurstTrain, store_path: str) -> int:
    """Return the slots of a CTA's bursts: one each, where memory allows.

    Register stores may use a slot again. Bulk copies may not: those under way together arrive in
    any order, and nobody could say which must be there.

    Raises
    ------
    Infeasible
        If bulk copies leave too much.
    """
    in_all = train.volume_bytes * train.n_bursts
    if store_path == "bulk":
        if in_all > MAX_BULK_BYTES:
            raise Infeasible(f"{train.n_bursts} bursts of {train.volume_bytes:,} B leave "
                             f"{in_all / 2**20:,.0f} MiB; bulk copies may leave "
                             f"{MAX_BULK_BYTES / 2**20:,.0f} MiB. Take fewer or smaller bursts.")
        return train.n_bursts
    return int(min(max(MAX_BYTES // train.volume_bytes, 1), train.n_bursts))


def pack(arguments: dict[str, int]) -> list[NDArray[np.generic]]:
    """Return the kernel's arguments as it takes them: addresses and numbers, in its order."""
    values = burst_gap.in_order(**arguments)
    return [np.array(value, kind) for value, kind in
            zip(values, burst_gap.ARGUMENTS.values(), strict=True)]


def _arguments(gpu: Gpu, route: Route, train: BurstTrain, source: int,
               n_slots: int) -> dict[str, int]:
    """Make the memory of a GPU's launch ready; return the arguments that are about it."""
    k, n = train.n_producers, train.n_bursts
    of_gpu = {"spans": 16 * k * n, "anchors": 8 * burst_gap.N_ANCHORS * k, "sms": 4 * k,
              "counter": 4, "report": 4 * N_REPORT_WORDS}
    memories = {name: gpu.memory(name, n_bytes) for name, n_bytes in of_gpu.items()}
    for memory in memories.values():
        memory.fill(0)
    pointers = gpu.memory("destinations", 8 * k)
    pointers.write(addresses(route, [_region(route, owner, train, source, n_slots)
                                     for owner in range(len(route.places))],
                             train.burst_bytes * n_slots))
    return {
        **{name: memory.address for name, memory in memories.items()},
        "destinations": pointers.address, "n_destinations": k,
        "burst_bytes": train.burst_bytes, "n_bursts": n, "n_slots": n_slots,
        "lockstep": int(train.sync == "lockstep"), "budget_cycles": cycles(gpu.facts, BUDGET_S),
    }


def _region(route: Route, owner: int, train: BurstTrain, source: int, n_slots: int) -> Memory:
    """Return an owner's memory for the bursts of GPU `source`: those of its CTAs, in order."""
    n_ctas = int((route.owners == owner).sum())
    return route.places[owner].memory(f"bursts {source} to {owner}",
                                      n_ctas * n_slots * train.burst_bytes)


def addresses(route: Route, regions: Sequence[Memory], cta_bytes: int) -> NDArray[np.uint64]:
    """Return what the kernel takes as each CTA's destination.

    The kernel adds `cta_bytes` for each CTA before it; an owner's memory holds its own CTAs alone.
    """
    ctas = np.arange(route.owners.size)
    base = np.array([memory.address for memory in regions], np.uint64)[route.owners]
    before = ranks(route.owners) - ctas  # never above 0; addresses wrap as the kernel's do
    return np.asarray(base + (before * cta_bytes).astype(np.uint64))


def ranks(owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many CTAs before each have the same owner."""
    found = np.zeros(owners.size, np.int64)
    for owner in np.unique(owners):
        found[owners == owner] = np.arange((owners == owner).sum())
    return found


def _stored(gpu: Gpu, route: Route, train: BurstTrain, source: int,
            n_slots: int) -> NDArray[np.uint32]:
    """Fetch what the CTAs of a GPU have left at their owners, shape (n_ctas, n_slots, words)."""
    n_words = train.burst_bytes // 4
    found = np.empty((train.n_producers, n_slots, n_words), np.uint32)
    for owner in np.unique(route.owners):
        mine = route.owners == owner
        region = _region(route, int(owner), train, source, n_slots)
        found[mine] = region.read((int(mine.sum()), n_slots, n_words), np.uint32)
    return found


def _result(gpu: Gpu, train: BurstTrain) -> BurstRun:
    k, n = train.n_producers, train.n_bursts
    anchors = gpu.memory("anchors", 0).read((k, burst_gap.N_ANCHORS), np.int64)
    return BurstRun(
        spans=gpu.memory("spans", 0).read((k, n, 2), np.int64), arrived=anchors[:, 4],
        anchors=Anchors(*anchors[:, :4].T),
        sms=gpu.memory("sms", 0).read(k, np.uint32))


def measure_clock(watchdog: Watchdog, gpus: Sequence[Gpu]) -> list[float]:
    """Return the rate of each GPU's SM clock now (Hz), from a train that hardly stores."""
    train = BurstTrain(n_producers=1, burst_bytes=16, gap_s=CLOCK_S, n_bursts=2, n_gpus=1)
    routes = [Route([gpu], np.zeros(1, np.int64)) for gpu in gpus]
    runs = run_train(watchdog, gpus, routes, train, store_path="registers", seed=0,
                     gap_cycles=cycles(gpus[0].facts, CLOCK_S))
    return [run.anchors.clock_hz for run in runs]


def tiles_of_bursts(program: Program, gpu: int, run: BurstRun, clock_hz: float) -> Tiles:
    """Return the times of a GPU's bursts, seconds since its first burst.

    The MMA columns hold the gap before a burst. Arrival is seen of each CTA's last burst alone:
    there the CTA waits for all its bursts, NaN elsewhere.
    """
    tasks, n_ctas = program.tasks[gpu], program.n_ctas
    spans = seconds(run.spans, run.anchors, clock_hz)
    zero = spans[:, 0, 0].min()
    start, end = (spans - zero).transpose(2, 1, 0)  # (n_bursts, n_ctas)
    before = np.concatenate([start[:1], end[:-1]])
    if isinstance(program.workload, BurstTrain) and program.workload.sync == "lockstep":
        before[1:] = end[:-1].max(axis=1, keepdims=True)
    tiles = np.zeros(tasks.size, TILE)
    tiles["gpu"], tiles["row"] = gpu, np.arange(tasks.size)
    tiles["sm"] = tiles["row"] % n_ctas
    tiles["mma_start_s"] = np.minimum(before, start).ravel()
    tiles["mma_end_s"] = tiles["issue_start_s"] = start.ravel()
    tiles["issue_end_s"] = end.ravel()
    tiles["arrived_s"] = np.nan
    tiles["arrived_s"][-n_ctas:] = seconds(run.arrived, run.anchors, clock_hz) - zero
    tiles["store_bytes"] = tasks["store_bytes"]
    return tiles
