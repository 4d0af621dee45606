"""How true the law is for Ulysses attention, compute time measured once with stores off."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from bench.figures import Figure, print_table
from xstage_lab import catalog
from xstage_lab.analysis import Calibration, calibrate, measure_t_mma, predict
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.schedule import build
from xstage_lab.spec import MachineSpec, Tuning, UlyssesAttention, default_tuning
from xstage_lab.spec.attention import MODES

MACHINES = ("B200-SXM", "H100-SXM", "H20", "MI300X")
GPUS = (1, 2, 4, 8)
N_RANDOM = 20  # of each device, beside every published shape on every number of GPUs
JITTER_RATIO = 0.05
MEDIAN_ASKED, P95_ASKED = 0.03, 0.08
FORMS = ("the law", "attention + V/R", "max(attention, V/R)")


class Run(NamedTuple):
    """One configuration: what it is, and how far each form is from its measured times."""

    mode: str
    causal: bool
    published: bool
    jitter: bool
    serial: bool
    accepted_errors: tuple[float, ...]  # |predicted / measured - 1|, one for each of FORMS
    total_errors: tuple[float, ...]


def measure() -> list[Figure]:
    """Run some 300 configurations on four machines, with and without jitter, each calibrated."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        runs = [run for found in pool.map(runs_on_device, range(2 * len(MACHINES)))
                for run in found]
    head = ("", "runs", "accepted: median", "p95", "worst", "total: median", "p95", "worst", "")
    strata = dict(_strata(runs))
    print_table(head, [_row(name, of, 0, "met" if _met(of) else "MISSED")
                       for name, of in strata.items()])
    print("\n  Fused runs on several GPUs, beside simpler forms:")
    print_table(head, [_row(form, strata["fused"], i) for i, form in enumerate(FORMS)])
    return list(_figures(strata))


def runs_on_device(number: int) -> list[Run]:
    """Calibrate a machine, with jitter or without, then predict and run its workloads."""
    rng = np.random.default_rng([16, number])
    jitter = JITTER_RATIO if number % 2 else 0.0
    machine = catalog.with_assumptions(catalog.machine(MACHINES[number // 2]))
    device = SimulatedDevice(machine, mma_jitter_ratio=jitter, issue_jitter_ratio=jitter)
    calibration = calibrate(device)
    shapes = [(catalog.attention(model, n_gpus=n_gpus), True)
              for model, known in catalog.attention_models().items()
              for n_gpus in GPUS if known.heads % n_gpus == 0]
    shapes += [(_draw_shape(rng), False) for _ in range(N_RANDOM)]
    return [_run(device, calibration, *_draw_rest(rng, machine, shape), published, rng)
            for shape, published in shapes]


def _draw_shape(rng: np.random.Generator) -> UlyssesAttention:
    """Draw a sequence that may be so short that the link matters, and that need not divide."""
    n_gpus = int(rng.choice(GPUS))
    return UlyssesAttention(
        sequence=round(math.exp(rng.uniform(math.log(256), math.log(40_000)))), n_gpus=n_gpus,
        heads=n_gpus * int(rng.integers(1, 9)), head_dim=int(rng.choice([64, 128])))


def _draw_rest(rng: np.random.Generator, machine: MachineSpec,
               shape: UlyssesAttention) -> tuple[UlyssesAttention, Tuning]:
    """Draw mode, mask, tile and the deepest staging up to 3 that fits, or less."""
    attention = dataclasses.replace(
        shape, mode=str(rng.choice(MODES)), causal=bool(rng.random() < 0.4),
        n_comm_sms=int(rng.choice([2, 4, 8, 16, 32])))
    tuning = dataclasses.replace(default_tuning(attention, machine), n_stages=1,
                                 issue_depth=int(rng.integers(1, 4)))
    if rng.random() < 0.5:
        tuning = dataclasses.replace(tuning, tile_m=64)
    while tuning.smem_bytes(attention) > machine.smem_per_cta_bytes:
        tuning = dataclasses.replace(tuning, issue_depth=tuning.issue_depth - 1)
    return attention, tuning


def _run(device: SimulatedDevice, calibration: Calibration, attention: UlyssesAttention,
         tuning: Tuning, published: bool, rng: np.random.Generator) -> Run:
    """Predict from the calibration and a compute time measured with stores off, then measure."""
    machine, seed = device.machine, int(rng.integers(2**31))
    t_mma = measure_t_mma(device, attention, tuning, seed)
    found = predict(attention, machine, calibration, tuning, t_mma)
    measured = device.measure(build(attention, machine, tuning), seed + 1).summary
    alone, copy = found.unfused["compute_s"], found.unfused["copy_s"]
    accepted, total = (
        tuple(abs(form / measured[key] - 1)
              for form in (found.summary[key], alone + copy, max(alone, copy)))
        for key in ("accepted_s", "total_s"))
    return Run(attention.mode if attention.n_gpus > 1 else "one GPU", attention.causal, published,
               device.mma_jitter_ratio > 0, tuning.issue_depth == 1, accepted, total)


def _strata(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    for mode in (*MODES, "one GPU"):
        yield mode, [run for run in runs if run.mode == mode]
    yield "published shapes", [run for run in runs if run.published]
    yield "random shapes", [run for run in runs if not run.published]
    yield "causal", [run for run in runs if run.causal]
    yield "not causal", [run for run in runs if not run.causal]
    yield "depth 1", [run for run in runs if run.serial]
    yield "deeper", [run for run in runs if not run.serial]
    yield "jitter off", [run for run in runs if not run.jitter]
    yield "jitter on", [run for run in runs if run.jitter]
    yield "all", list(runs)


def _errors(runs: Sequence[Run], form: int) -> tuple[list[float], list[float]]:
    return [run.accepted_errors[form] for run in runs], [run.total_errors[form] for run in runs]


def _met(runs: Sequence[Run]) -> bool:
    return all(np.median(errors) <= MEDIAN_ASKED and np.quantile(errors, 0.95) <= P95_ASKED
               for errors in _errors(runs, 0))


def _row(name: str, runs: Sequence[Run], form: int, met: str = "") -> tuple[str, ...]:
    cells = [f"{value:.1%}" for errors in _errors(runs, form)
             for value in (np.median(errors), np.quantile(errors, 0.95), max(errors))]
    return name, str(len(runs)), *cells, met


def _figures(strata: dict[str, list[Run]]) -> Iterator[Figure]:
    """Return the worst median and 95th percentile over the strata."""
    for i, what in enumerate(("accepted_s", "total_s")):
        for statistic, share, asked in (("median", 0.5, MEDIAN_ASKED), ("p95", 0.95, P95_ASKED)):
            found = {name: float(np.quantile(_errors(runs, 0)[i], share))
                     for name, runs in strata.items()}
            worst = max(found, key=found.__getitem__)
            yield Figure(what=f"Ulysses attention, {what}, {statistic} in the worst stratum",
                         value=100 * found[worst], asked=100 * asked, unit="%",
                         note=f"{worst}; {sum(v <= asked for v in found.values())} of "
                              f"{len(found)} strata within")
