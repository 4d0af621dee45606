"""How many store chunks the simulated device takes a second, beside the same queue in SimPy."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
import simpy

from bench.figures import Figure, print_table
from bench.timing import Taken, best_of, best_of_prepared
from xstage_lab.catalog import machine, with_assumptions
from xstage_lab.devices import store_path
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.schedule import Program, build
from xstage_lab.spec import BurstTrain, FusedGemm, MachineSpec, Tuning

CHUNKS_ASKED_PER_S = 10e6
SIMPY_RATIO_ASKED = 30.0
FULL_ASKED_S, BALANCED_ASKED_S = 0.5, 0.1
K, BURST_BYTES = 148, 32 * 1024
TILES_PER_SM, TILE = 100, 128


def measure() -> list[Figure]:
    """Time burst trains, the same queue in SimPy, and a fused GEMM on eight GPUs."""
    b200 = with_assumptions(machine("B200-SXM"))
    rows: list[tuple[str, ...]] = []
    figures = _trains(b200, rows) + _against_simpy(b200, rows) + _gemms(b200, rows)
    print_table(("", "chunks", "wall time", "CPU time", "M chunks/s"), rows)
    return figures


def _row(what: str, n_chunks: int, taken: Taken) -> tuple[str, ...]:
    return (what, f"{n_chunks:,}", f"{taken.wall_s * 1e3:.1f} ms", f"{taken.cpu_s * 1e3:.1f} ms",
            f"{n_chunks / taken.wall_s / 1e6:.2f}")


def _trains(machine: MachineSpec, rows: list[tuple[str, ...]]) -> list[Figure]:
    """Burst trains at zero gap (the path is full) and at a gap that frees them."""
    device, figures = SimulatedDevice(machine), []
    for name, gap_s in (("blocked", 0.0), ("unblocked", 20e-6)):
        program = build(_train(gap_s, 500), machine)
        path, state = _prepared(device, program)
        n_chunks = int(state.rows["n_chunks"].sum())
        loop = _loop(path, state)
        whole = best_of(partial(device.measure, program))
        rows += [_row(f"{name} bursts, event loop", n_chunks, loop),
                 _row(f"{name} bursts, whole measurement", n_chunks, whole)]
        figures += [
            Figure(what=f"simulated chunks, {name} bursts, {part}", at_least=True,
                   value=n_chunks / taken.wall_s / 1e6, asked=CHUNKS_ASKED_PER_S / 1e6,
                   unit="M/s", note=f"{n_chunks / taken.cpu_s / 1e6:.3g} M/s by CPU time")
            for part, taken in (("event loop", loop), ("whole measurement", whole))
        ]
    return figures


def _train(gap_s: float, n_bursts: int) -> BurstTrain:
    return BurstTrain(n_producers=K, burst_bytes=BURST_BYTES, gap_s=gap_s, n_bursts=n_bursts)


def _prepared(
    device: SimulatedDevice, program: Program
) -> tuple[store_path.Path, store_path.State]:
    """What `SimulatedDevice.measure` hands to the event loop."""
    simulated = 1 if device.mirror else program.n_gpus
    rows = device._rows(program, simulated, np.random.default_rng(0))
    state = device._state(program, rows, simulated)
    return device._path(program, state), state


def _loop(path: store_path.Path, state: store_path.State) -> Taken:
    """Time the event loop alone, each run on a fresh copy of the state."""
    return best_of_prepared(partial(copy.deepcopy, state),
                            lambda fresh: store_path.run(path, fresh))


def _against_simpy(machine: MachineSpec, rows: list[tuple[str, ...]]) -> list[Figure]:
    """K producers, a bounded first-in first-out path and a link: here and in SimPy."""
    link = dataclasses.replace(machine.link, credit_bytes=math.inf)  # SimPy's has no credits
    machine = dataclasses.replace(machine, link=link)
    device, figures = SimulatedDevice(machine), []
    for name, gap_s in (("blocked", 0.0), ("unblocked", 20e-6)):
        train = _train(gap_s, 40)
        program = build(train, machine)
        path, state = _prepared(device, program)
        n_chunks = int(state.rows["n_chunks"].sum())
        ours = _loop(path, state)
        wall, cpu = time.perf_counter(), time.thread_time()
        accepted_s = simpy_accepted_s(train, machine, int(state.rows["n_chunks"][0]))
        theirs = Taken(time.perf_counter() - wall, time.thread_time() - cpu)
        apart = accepted_s / device.measure(program).summary["accepted_s"] - 1
        rows += [_row(f"{name} bursts, no credits, event loop", n_chunks, ours),
                 _row(f"{name} bursts, no credits, SimPy", n_chunks, theirs)]
        figures.append(Figure(
            what=f"event loop over SimPy, {name} bursts", value=theirs.wall_s / ours.wall_s,
            asked=SIMPY_RATIO_ASKED, unit="times", at_least=True,
            note=f"{theirs.cpu_s / ours.cpu_s:.0f} by CPU time; their times of the last "
                 f"acceptance differ by {abs(apart):.1e}"))
    return figures


def simpy_accepted_s(train: BurstTrain, machine: MachineSpec, n_chunks: int) -> float:
    """Time to accept a free-running train, simulated with SimPy's processes and containers."""
    link, env = machine.link, simpy.Environment()
    chunk_bytes = train.burst_bytes / n_chunks
    half_s = 0.5 * chunk_bytes / link.per_sm_bytes_per_s
    path = simpy.Container(env, capacity=math.floor(link.path_capacity_bytes / chunk_bytes))
    in_path = simpy.Store(env)
    accepted = [0.0] * train.n_producers

    def producer(number: int) -> Generator[simpy.Event, Any, None]:
        limit = math.floor(link.per_sm_capacity_bytes / chunk_bytes)
        own = simpy.Container(env, capacity=limit)
        for burst in range(train.n_bursts):
            yield env.timeout((train.gap_s if burst else 0.0) + link.issue_latency_s + half_s)
            for chunk in range(n_chunks):
                if chunk:
                    yield env.timeout(2 * half_s)
                yield own.put(1)
                yield path.put(1)
                in_path.put(own)
            yield env.timeout(half_s)
        accepted[number] = env.now

    def drain() -> Generator[simpy.Event, Any, None]:
        while True:
            own = yield in_path.get()
            yield env.timeout(chunk_bytes / link.egress_bytes_per_s)
            path.get(1)
            own.get(1)

    for number in range(train.n_producers):
        env.process(producer(number))
    env.process(drain())
    env.run()
    return max(accepted)


def _gemms(machine: MachineSpec, rows: list[tuple[str, ...]]) -> list[Figure]:
    """Fused GEMM on 8 GPUs x 148 SMs, 100 tiles an SM: every GPU simulated, and one mirrored."""
    across = TILES_PER_SM * K // 100
    figures = []
    for name, destinations, mirror, asked in (
        ("balanced, one GPU stands for all", "round-robin", True, BALANCED_ASKED_S),
        ("balanced, all GPUs simulated", "round-robin", False, FULL_ASKED_S),
        ("hot GPU, all GPUs simulated", "hot:0.3", True, FULL_ASKED_S),
        ("unrotated owners, all GPUs simulated", "row-owner-unrotated", True, FULL_ASKED_S),
    ):
        gemm = FusedGemm(m=100 * TILE, n=across * TILE, k=4096, n_gpus=8,
                         destinations=destinations)
        device = SimulatedDevice(machine, mirror=mirror)
        program = build(gemm, machine, Tuning(tile_m=TILE, tile_n=TILE))
        n_chunks = device.chunks_per_tile * program.tasks[0].size * (
            1 if mirror and destinations == "round-robin" else program.n_gpus)
        taken = best_of(partial(device.measure, program))
        rows.append(_row(f"fused GEMM, {name}, measurement", n_chunks, taken))
        figures.append(Figure(what=f"fused GEMM 8 x 148 SMs x 100 tiles, {name}",
                              value=taken.wall_s, asked=asked, unit="s",
                              note=f"{taken.cpu_s:.3g} s by CPU time"))
    return figures
