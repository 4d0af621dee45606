"""What a recording measures once a machine is calibrated: sweeps over what a user may choose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from xstage_lab.analysis import Calibration
from xstage_lab.errors import XStageError
from xstage_lab.spec import BurstTrain, FusedGemm, MachineSpec, Tuning, Workload, check_feasible

BURST_BYTES = 32 * 1024
N_BURSTS = 50
GAP_RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # of V / R
N_PRODUCER_COUNTS = 9
TILES_PER_SM = 16
TILES = ((128, 128), (64, 64), (128, 256), (256, 128), (64, 128), (128, 64))
DEPTHS = (2, 1, 3, 4)
K_RATIOS = (1.0, 0.25, 0.5, 2.0, 4.0)  # of the k at which compute and stores take as long
MIN_K, MAX_K = 64, 16384


class Step(NamedTuple):
    """A workload to predict and to measure."""

    workload: Workload
    tuning: Tuning | None = None


def gap_sweep(machine: MachineSpec, cal: Calibration) -> Iterator[Step]:
    """Yield trains of all SMs from no gap to gaps that outlast the drain."""
    k = machine.n_sms
    for ratio in GAP_RATIOS:
        gap = ratio * k * BURST_BYTES / cal.drain_bytes_per_s
        yield Step(BurstTrain(n_producers=k, burst_bytes=BURST_BYTES, gap_s=gap,
                              n_bursts=N_BURSTS, n_gpus=machine.full_rate_gpus))


def producer_sweep(machine: MachineSpec, cal: Calibration) -> Iterator[Step]:
    """Yield trains without gaps of one SM to all SMs."""
    del cal
    for k in np.unique(np.geomspace(1, machine.n_sms, N_PRODUCER_COUNTS).round().astype(int)):
        yield Step(BurstTrain(n_producers=int(k), burst_bytes=BURST_BYTES, gap_s=0.0,
                              n_bursts=N_BURSTS, n_gpus=machine.full_rate_gpus))


def balanced_gemm(machine: MachineSpec, cal: Calibration, flop_per_s: float) -> FusedGemm:
    """Return a GEMM of some waves whose tiles take as long to compute as to drain.

    Parameters
    ----------
    machine, cal : MachineSpec, Calibration
    flop_per_s : float
        What the machine reaches on such tiles.
    """
    n_tiles = TILES_PER_SM * machine.n_sms
    n_rows = max(round(math.sqrt(n_tiles)), 1)
    gpus = min(machine.max_gpus, 8)
    tile = 128 * 128 * 2  # bytes
    drain_s = machine.n_sms * tile * (gpus - 1) / max(gpus, 1) / cal.drain_bytes_per_s
    k = drain_s * flop_per_s / machine.n_sms / (2 * 128 * 128)
    return FusedGemm(m=128 * n_rows, n=128 * -(-n_tiles // n_rows), n_gpus=gpus,
                     k=int(min(max(round(k / 64), MIN_K // 64), MAX_K // 64)) * 64)


def tile_sweep(machine: MachineSpec, gemm: FusedGemm) -> Iterator[Step]:
    """Yield the GEMM at every tile and depth that the machine holds."""
    for depth in DEPTHS:
        for tile_m, tile_n in TILES:
            step = Step(gemm, Tuning(tile_m=tile_m, tile_n=tile_n, issue_depth=depth))
            if _fits(machine, step):
                yield step


def gpu_sweep(machine: MachineSpec, gemm: FusedGemm) -> Iterator[Step]:
    """Yield the GEMM on one GPU to all of them."""
    for n_gpus in range(1, min(machine.max_gpus, 8) + 1):
        yield Step(dataclasses.replace(gemm, n_gpus=n_gpus), Tuning())


def k_sweep(machine: MachineSpec, gemm: FusedGemm) -> Iterator[Step]:
    """Yield GEMMs from those that the stores hold up to those that the MMAs do."""
    del machine
    for k in dict.fromkeys(min(max(round(gemm.k * ratio / 64), 1) * 64, 4 * MAX_K)
                           for ratio in K_RATIOS):
        yield Step(dataclasses.replace(gemm, k=k), Tuning())


def coupled_s(step: Step, terms: dict[str, float], unfused: dict[str, float]) -> float:
    """Return the time to the last acceptance if issue waited for completion (s).

    The form that measurements refute: a burst is issued once it has drained, and a GEMM's stores
    add to its compute.

    Parameters
    ----------
    step : Step
    terms, unfused : dict
        Of the prediction of `step`.
    """
    if isinstance(step.workload, BurstTrain):
        n = step.workload.n_bursts
        burst = max(terms["issue_free_s"], terms["drain_s"])
        return n * burst + (n - 1) * step.workload.gap_s
    return unfused["total_s"]


def _fits(machine: MachineSpec, step: Step) -> bool:
    try:
        check_feasible(step.workload, machine, step.tuning)
    except XStageError:
        return False
    return True
