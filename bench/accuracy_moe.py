"""How true the law is for MoE layers, and whether it tells the faster order."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from bench.accuracy_gemm import log_uniform
from bench.figures import Figure, print_table
from bench.timing import best_of
from xstage_lab import catalog, law
from xstage_lab.analysis import (
    Calibration,
    calibrate,
    measure_t_mma,
    predict,
    two_layers,
    verdict,
)
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.schedule import build
from xstage_lab.spec import MachineSpec, MoELayer, Tuning
from xstage_lab.spec.moe import ORDERS

MACHINES = ("B200-SXM", "H100-SXM", "H20", "MI300X")
TILES = ((128, 128), (128, 256), (64, 128), (64, 256), (192, 128))
N_STILL, N_JITTERED = 13, 12  # of each machine, 100 in all
JITTER_RATIO = 0.05
MEDIAN_ASKED, P95_ASKED = 0.04, 0.10
WORTH_RATIO, RIGHT_ASKED = 0.01, 0.95
SIMULATION_ASKED_S = 2.0


class Run(NamedTuple):
    """One order of one configuration: errors of each source of the compute time."""

    order: str
    balanced: bool
    serial: bool
    jitter: bool
    machine: str
    accepted_errors: tuple[float, float]  # |predicted / measured - 1|, measured t_mma, roofline
    total_errors: tuple[float, float]


class Choice(NamedTuple):
    """Wave over interleaved minus 1: simulated without jitter, and as each form has it."""

    measured_ratio: float
    forms_ratio: tuple[float, ...]  # of each of FORMS


FORMS = ("the law", "closed form with critical paths", "closed form, SMs equally busy")


def measure() -> list[Figure]:
    """Run 100 configurations in both orders; print errors by stratum and choices of the order."""
    jobs = [(name, jitter) for name in MACHINES for jitter in (False, True)]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(runs_on_machine, jobs))
    runs = [run for part, _ in found for run in part]
    choices = [choice for _, part in found for choice in part]
    strata = dict(_strata(runs))
    head = ("", "runs", "accepted: median", "p95", "worst", "total: median", "p95", "worst", "")
    print("  Compute time measured once with stores off:")
    print_table(head, [_row(name, of, 0) for name, of in strata.items()])
    print("\n  Compute time from FLOP and memory rates:")
    print_table(head, [_row(name, of, 1) for name, of in strata.items()])
    print(f"\n  Where the orders differ by over {WORTH_RATIO:.0%}:")
    right = [_right(choices, form) for form in range(len(FORMS))]
    print_table(("", "told right", "of"), [(name, str(n), str(of)) for name, (n, of) in
                                           zip(FORMS, right, strict=True)])
    n_right, n_told = right[0]
    return [*_figures(strata),
            Figure(what="which order of an MoE layer is faster, told right",
                   value=100 * n_right / n_told, asked=100 * RIGHT_ASKED, unit="%", at_least=True,
                   note=f"{n_right} of {n_told} that differ by over {WORTH_RATIO:.0%}"),
            _simulation()]


def runs_on_machine(job: tuple[str, bool]) -> tuple[list[Run], list[Choice]]:
    """Calibrate a machine once, then predict and run its configurations."""
    name, jittered = job
    machine = catalog.with_assumptions(catalog.machine(name))
    ratio = JITTER_RATIO if jittered else 0.0
    device = SimulatedDevice(machine, mma_jitter_ratio=ratio, issue_jitter_ratio=ratio)
    still = SimulatedDevice(machine)
    rng = np.random.default_rng([100, MACHINES.index(name), int(jittered)])
    calibration = calibrate(device)
    runs, choices = [], []
    for _ in range(N_JITTERED if jittered else N_STILL):
        moe, tuning = draw(rng, machine)
        orders = [dataclasses.replace(moe, order=order) for order in ORDERS]
        seed = int(rng.integers(2**31))
        runs += [_run(device, calibration, each, tuning, seed) for each in orders]
        choices.append(_choice(still, calibration, orders, tuning))
    return runs, choices


def draw(rng: np.random.Generator, machine: MachineSpec) -> tuple[MoELayer, Tuning]:
    """Draw a published model or any shape, a routing, and a tiling that fits into `machine`."""
    models = catalog.moe_models()
    tokens = round(log_uniform(rng, 64, 8192))
    routing = "balanced" if rng.random() < 0.5 else f"zipf:{rng.uniform(0.2, 1.2):.2f}"
    if rng.random() < 0.7:
        name = str(rng.choice(list(models)))
        moe = dataclasses.replace(models[name], tokens=tokens, routing=routing)
    else:
        moe = MoELayer(
            tokens=tokens, routing=routing, hidden=128 * round(log_uniform(rng, 8, 64)),
            intermediate=128 * round(log_uniform(rng, 4, 32)),
            experts=int(rng.choice([16, 64, 128, 256])), top_k=int(rng.choice([1, 2, 4, 8])))
    (tile_m, tile_n), depth = TILES[rng.integers(len(TILES))], int(rng.integers(1, 4))
    tuning = Tuning(tile_m=tile_m, tile_n=tile_n, issue_depth=depth, n_stages=2)
    while tuning.smem_bytes(moe) > machine.smem_per_cta_bytes:
        depth = max(depth - 1, 1)
        tuning = Tuning(tile_m=64, tile_n=128, issue_depth=depth, n_stages=2)
    return moe, tuning


def _run(device: SimulatedDevice, calibration: Calibration, moe: MoELayer, tuning: Tuning,
         seed: int) -> Run:
    """Predict from the calibration, and from one run with stores off, then measure."""
    machine = device.machine
    t_mma = measure_t_mma(device, moe, tuning, seed)
    predictions = [predict(moe, machine, calibration, tuning, each) for each in (t_mma, None)]
    measured = device.measure(build(moe, machine, tuning), seed + 1).summary
    accepted, total = (tuple(abs(p.summary[key] / measured[key] - 1) for p in predictions)
                       for key in ("accepted_s", "total_s"))
    return Run(moe.order, moe.routing == "balanced", tuning.issue_depth == 1,
               device.mma_jitter_ratio > 0, machine.name, accepted, total)


def _choice(device: SimulatedDevice, calibration: Calibration, orders: Sequence[MoELayer],
            tuning: Tuning) -> Choice:
    machine = device.machine
    wave, interleaved = (device.measure(build(moe, machine, tuning)).summary["total_s"]
                         for moe in orders)
    told = verdict(orders[0], machine, calibration, tuning)
    equal = law.compare_orders(two_layers(orders[0], machine, calibration, tuning))
    return Choice(wave / interleaved - 1, (told.gain_ratio, float(told.rule.gain_ratio),
                                           float(equal.gain_ratio)))


def _right(choices: Sequence[Choice], form: int) -> tuple[int, int]:
    """Choices told right by a form, and how many there are where the order matters."""
    told = [choice.measured_ratio * choice.forms_ratio[form] > 0 for choice in choices
            if abs(choice.measured_ratio) > WORTH_RATIO]
    return sum(told), len(told)


def _strata(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Runs by order and routing, by depth, by jitter, by machine."""
    for order in ORDERS:
        for balanced, name in ((True, "balanced"), (False, "skewed")):
            yield f"{order}, {name}", [r for r in runs
                                       if r.order == order and r.balanced == balanced]
    yield "depth 1", [r for r in runs if r.serial]
    yield "deeper", [r for r in runs if not r.serial]
    yield "jitter off", [r for r in runs if not r.jitter]
    yield "jitter on", [r for r in runs if r.jitter]
    for machine in MACHINES:
        yield machine, [r for r in runs if r.machine == machine]


def _errors(runs: Sequence[Run], source: int) -> tuple[list[float], list[float]]:
    return ([run.accepted_errors[source] for run in runs],
            [run.total_errors[source] for run in runs])


def _row(name: str, runs: Sequence[Run], source: int) -> tuple[str, ...]:
    both = _errors(runs, source)
    met = all(np.median(errors) <= MEDIAN_ASKED and np.quantile(errors, 0.95) <= P95_ASKED
              for errors in both)
    cells = [f"{value:.1%}" for errors in both
             for value in (np.median(errors), np.quantile(errors, 0.95), max(errors))]
    return name, str(len(runs)), *cells, "met" if met else "MISSED"


def _figures(strata: dict[str, list[Run]]) -> Iterator[Figure]:
    """Return the worst median and 95th percentile over the strata, with measured t_mma."""
    for i, what in enumerate(("accepted_s", "total_s")):
        for statistic, share, asked in (("median", 0.5, MEDIAN_ASKED), ("p95", 0.95, P95_ASKED)):
            found = {name: float(np.quantile(_errors(of, 0)[i], share))
                     for name, of in strata.items()}
            worst = max(found, key=found.__getitem__)
            met = sum(value <= asked for value in found.values())
            yield Figure(what=f"MoE layer, {what}, {statistic} in the worst stratum",
                         value=100 * found[worst], asked=100 * asked, unit="%",
                         note=f"{worst}; {met} of {len(found)} strata within")


def _simulation() -> Figure:
    """Time a whole simulation of the largest published model, every GPU for itself."""
    machine = catalog.with_assumptions(catalog.machine("B200-SXM"))
    moe = catalog.moe_layer("DSv4-Pro", 8192)
    device = SimulatedDevice(machine, mirror=False)
    taken = best_of(lambda: device.measure(build(moe, machine)), 2)
    return Figure(what="simulation of DSv4-Pro, 8192 tokens a rank, all of 8 x 148 SMs",
                  value=taken.wall_s, asked=SIMULATION_ASKED_S, unit="s",
                  note=f"{taken.cpu_s:.2f} s of CPU time")
