"""How near the tuner comes to the best of a whole space, at a twentieth of its measurements."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.figures import Figure, print_table
from bench.timing import best_of
from xstage_lab import catalog, experiment
from xstage_lab.analysis import Answer, Calibration, Space, calibrate, tune
from xstage_lab.analysis.candidates import Candidates, Tunable, candidates
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.parallel import local_processes
from xstage_lab.schedule import build
from xstage_lab.spec import FusedGemm, MachineSpec, UlyssesAttention

REGRET_ASKED, SHARE_ASKED, SECONDS_ASKED = 0.01, 0.05, 1.0
N_RANDOM = 1000  # draws of random search
TILES = (64, 96, 128, 160, 192, 224, 256)
GEMM_SPACE = {"tile_m": TILES, "tile_n": TILES, "issue_depth": tuple(range(1, 9)),
              "n_stages": (2,)}
MOE_SPACE = {"tile_m": (64, 128, 192, 256), "tile_n": TILES, "issue_depth": (1, 2, 3, 4),
             "order": ("interleaved", "wave")}
ATTENTION_SPACE = {"tile_m": tuple(range(32, 257, 16)), "issue_depth": (1, 2, 3, 4)}


class Race(NamedTuple):
    """One workload: its candidates, and what each way of choosing finds.

    Regrets are over the exhaustive best: of the tuner, of the candidate that the law alone takes,
    and the mean of random search with as many measurements.
    """

    name: str
    n_candidates: int
    n_measured: int
    regret_ratio: float
    law_ratio: float
    random_ratio: float
    random_within: float


def measure() -> list[Figure]:
    """Race the tuner against exhaustive and random search over 20 workloads."""
    with local_processes() as executor:
        races = [_race(*of, executor) for of in _workloads()]
    print_table(("", "candidates", "measured", "tuner", "the law alone", "random, mean",
                 "random within 1 %"), [
        (race.name, str(race.n_candidates), str(race.n_measured), f"{race.regret_ratio:.2%}",
         f"{race.law_ratio:.2%}", f"{race.random_ratio:.1%}", f"{race.random_within:.0%}")
        for race in races])
    return list(_figures(races))


def _workloads() -> Iterator[tuple[Tunable, str]]:
    """Return published shapes, and others that reach every regime and kind of destination."""
    yield FusedGemm(m=8192, n=8192, k=4096), "B200-SXM"
    yield FusedGemm(m=8192, n=7168, k=2048), "B200-SXM"
    yield FusedGemm(m=4096, n=16384, k=8192), "B200-SXM"
    yield FusedGemm(m=4096, n=4096, k=4096, destinations="row-owner"), "B200-SXM"
    yield FusedGemm(m=4096, n=7168, k=2048, destinations="row-owner", out_dtype="fp32"), "B200-SXM"
    yield FusedGemm(m=4096, n=4096, k=2048, destinations="row-owner-unrotated"), "H100-SXM"
    yield FusedGemm(m=8192, n=4096, k=512, destinations="row-owner"), "H100-SXM"
    yield FusedGemm(m=3000, n=5000, k=3000), "H100-SXM"
    yield FusedGemm(m=4096, n=4096, k=4096, dtype="fp8"), "H100-SXM"
    yield FusedGemm(m=2048, n=2048, k=16384, n_gpus=2, destinations="hot:0.5"), "H100-SXM"
    yield FusedGemm(m=4096, n=7168, k=4096, n_gpus=4, destinations="hot:0.25"), "A100-SXM"
    yield FusedGemm(m=1024, n=8192, k=4096), "A100-SXM"
    yield FusedGemm(m=8192, n=2048, k=4096, out_dtype="fp32"), "H20"
    yield FusedGemm(m=4096, n=2048, k=2048, n_gpus=2), "GB300-NVL"
    yield catalog.moe_layer("DSv4-Flash", 512), "B200-SXM"
    yield catalog.moe_layer("GLM-5.2", 256), "H100-SXM"
    yield catalog.moe_layer("DiT-MoE-XL", 1024), "H20"
    yield catalog.attention("FLUX.1-1024", n_gpus=8), "B200-SXM"
    yield catalog.attention("Wan2.2-TI2V-5B", n_gpus=4), "H100-SXM"
    yield UlyssesAttention(sequence=8192, heads=32, n_gpus=8, causal=True), "H20"


def _race(workload: Tunable, machine_name: str, executor: Executor) -> Race:
    machine, calibration = _calibrated(machine_name)
    device = SimulatedDevice(machine)
    space = _space(workload, machine)
    of = candidates(workload, machine, {"": calibration}, space)
    times = _every_time(of, device, executor)
    budget = int(SHARE_ASKED * len(of))
    answer: Answer = tune(workload, machine, calibration, space, budget, device=device)
    best, n_random = times.min(), answer.n_measured
    rng = np.random.default_rng(0)
    random = np.array([times[rng.permutation(len(of))[:n_random]].min()
                       for _ in range(N_RANDOM)]) / best - 1
    by_law = int(np.lexsort((of.smem_bytes, of.total_s))[0])
    return Race(_name(workload, machine_name), len(of), answer.n_measured,
                answer.best.measured_s / best - 1, float(times[by_law]) / best - 1,
                float(random.mean()), float((random <= REGRET_ASKED).mean()))


@functools.cache
def _calibrated(machine_name: str) -> tuple[MachineSpec, Calibration]:
    machine = catalog.with_assumptions(catalog.machine(machine_name))
    return machine, calibrate(SimulatedDevice(machine))


def _space(workload: Tunable, machine: MachineSpec) -> Space:
    if isinstance(workload, FusedGemm):
        return Space.of(workload, machine, **GEMM_SPACE)
    if isinstance(workload, UlyssesAttention):
        fewer = tuple(machine.n_sms - n for n in (0, 4, 8, 16))
        return Space.of(workload, machine, **ATTENTION_SPACE, n_ctas=fewer)
    return Space.of(workload, machine, **MOE_SPACE)


def _every_time(of: Candidates, device: SimulatedDevice, executor: Executor) -> NDArray[np.float64]:
    """Measure all candidates, total times (s)."""
    choices = [of.choice(i) for i in range(len(of))]
    records = experiment.run(device, [build(c.workload, device.machine, c.tuning)
                                      for c in choices], executor=executor)
    return np.array([record.summary["total_s"] for record in records])


def _name(workload: Tunable, machine_name: str) -> str:
    if isinstance(workload, FusedGemm):
        what = f"{workload.m} x {workload.n} x {workload.k} {workload.destinations}"
    elif isinstance(workload, UlyssesAttention):
        what = f"attention {workload.sequence}, {workload.heads} heads"
    else:
        what = f"MoE {workload.tokens} tokens, {workload.hidden} x {workload.intermediate}"
    return f"{what} on {workload.n_gpus} {machine_name}"


def _figures(races: list[Race]) -> Iterator[Figure]:
    worst = max(races, key=lambda race: race.regret_ratio)
    within = sum(race.regret_ratio <= REGRET_ASKED for race in races)
    lucky = float(np.mean([race.random_within for race in races]))
    chance = float(np.mean([race.random_ratio for race in races]))
    law = sum(race.law_ratio <= REGRET_ASKED for race in races)
    yield Figure(what="tuner, regret over the exhaustive best, worst workload",
                 value=100 * worst.regret_ratio, asked=100 * REGRET_ASKED, unit="%",
                 note=f"{worst.name}; {within} of {len(races)} within, the law alone {law}")
    yield Figure(what="tuner, measurements over exhaustive ones, most",
                 value=100 * max(race.n_measured / race.n_candidates for race in races),
                 asked=100 * SHARE_ASKED, unit="%",
                 note=f"{sum(race.n_measured for race in races)} of "
                      f"{sum(race.n_candidates for race in races):,} in all")
    yield Figure(what="tuner, workloads within 1 % over those of random search",
                 value=within / max(lucky * len(races), 1.0), asked=1.0, at_least=True,
                 note=f"random search as long: {lucky * len(races):.1f} of {len(races)} within, "
                      f"mean regret {chance:.1%}")
    b200, calibration = _calibrated("B200-SXM")
    gemm = FusedGemm(m=8192, n=8192, k=4096, destinations="row-owner-unrotated")
    sizes = tuple(range(16, 116))
    space = Space(tile_m=sizes, tile_n=sizes, issue_depth=(2,), tile_k=(16,))
    n = len(candidates(gemm, b200, {"": calibration}, space))
    taken = best_of(lambda: candidates(gemm, b200, {"": calibration}, space))
    yield Figure(what="tuner, predictions of a fused GEMM", value=taken.wall_s,
                 asked=SECONDS_ASKED, unit="s", note=f"{n:,} candidates, feasibility included")
