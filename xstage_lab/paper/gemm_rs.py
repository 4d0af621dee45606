"""ParallelKittens' GEMM fused with reduce-scatter on 8 H100, against K.

The plain form knows two times, T_gemm and T_store. The staged form also knows what the public
source of the kernel says (HazyResearch/ThunderKittens, kernels/parallel/gemm_rs/gemm_rs_h100.cu):
tiles of 128 x 256 on 132 CTAs, TMA stores that add at the owner, and each GPU starting at its
successor's tiles, so that its own come last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from xstage_lab import analysis, catalog, law
from xstage_lab.devices.recorded import published_gemm_rs
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.paper.table import Compared, Table, error_ratio, spread
from xstage_lab.record import Record
from xstage_lab.schedule import build
from xstage_lab.spec import DTYPE_BYTES, FusedGemm, MachineSpec, Tuning
from xstage_lab.units import text

Floats = NDArray[np.float64]

MACHINE, PATH = "H100-SXM", "TMA"
TILE_M, TILE_N = 128, 256
ISSUE_DEPTH = 2  # the next tile's first k-steps go on while the last one's stores are read
TRIED_JITTER_RATIO = 0.3


class PlainForms(NamedTuple):
    """Published times against K, shortest first, and two forms with R from the first row.

    Attributes
    ----------
    k : array of int
    gemm_s, fused_s : published
    law_s : max(T_gemm, T_store)
    completion_coupled_s : T_gemm + T_store
    drain_bytes_per_s : R, as though the first row did nothing but store
    remote_bytes : what a GPU stores to others
    """

    k: NDArray[np.int64]
    gemm_s: Floats
    fused_s: Floats
    law_s: Floats
    completion_coupled_s: Floats
    drain_bytes_per_s: float
    remote_bytes: float


def plain_forms(records: Sequence[Record] | None = None) -> PlainForms:
    """Predict every row from the store rate of the shortest K, of the published rows or others."""
    rows = sorted(published_gemm_rs() if records is None else records,
                  key=lambda record: float(record.parameters["k"]))
    first = rows[0].parameters
    gemm, fused = (np.array([record.summary[key] for record in rows])
                   for key in ("unfused_gemm_s", "total_s"))
    volume = (first["m"] * first["n"] * DTYPE_BYTES[first["out_dtype"]]
              * (first["n_gpus"] - 1) / first["n_gpus"])
    drain = volume / float(fused[0])
    return PlainForms(
        np.array([record.parameters["k"] for record in rows]), gemm, fused,
        law.period(0.0, gemm, volume, drain), law.completion_coupled_period(gemm, volume, drain),
        drain, volume)


def gemm_rs_table() -> Table:
    """Predict the fused time of each K, R from K = 512 alone."""
    plain = plain_forms()
    workloads = [_workload(record) for record in sorted(
        published_gemm_rs(), key=lambda record: float(record.parameters["k"]))]
    machine = _machine(_staged_drain(plain, workloads[0], ISSUE_DEPTH))
    staged = [_staged_total(gemm, machine, t, ISSUE_DEPTH)
              for gemm, t in zip(workloads, plain.gemm_s, strict=True)]
    simulated = [_simulated_total(gemm, machine, t, ISSUE_DEPTH)
                 for gemm, t in zip(workloads, plain.gemm_s, strict=True)]
    crossing = int(np.argmin(np.abs(np.log(plain.gemm_s / plain.fused_s[0]))))
    rows: list[dict[str, Any]] = []
    for i, gemm in enumerate(workloads):
        row: dict[str, Any] = {
            "k_per_gpu": gemm.k, "gemm_s": float(plain.gemm_s[i]),
            "gemm_flop_per_s": gemm.flop / float(plain.gemm_s[i]),
            "fused_s": float(plain.fused_s[i]), "fitted_to": i == 0, "crossover": i == crossing}
        for form, predicted in (("law", plain.law_s), ("law_staged", staged),
                                ("simulated", simulated),
                                ("completion_coupled", plain.completion_coupled_s)):
            row[f"{form}_s"] = float(predicted[i])
            row[f"{form}_error_ratio"] = error_ratio(predicted[i], plain.fused_s[i])
        rows.append(row)
    tested = [row for row in rows if not row["fitted_to"]]
    summary = {"drain_bytes_per_s": plain.drain_bytes_per_s,
               "staged_drain_bytes_per_s": machine.link.egress_bytes_per_s,
               "crossover_law_error_ratio": rows[crossing]["law_error_ratio"]}
    summary |= spread("law_but_crossover_error_ratio", (
        row["law_error_ratio"] for row in tested if not row["crossover"]))
    for form in ("law_staged", "simulated", "completion_coupled"):
        summary |= spread(f"{form}_error_ratio", (row[f"{form}_error_ratio"] for row in tested))
    return Table(
        name="gemm-rs", compared=(Compared(
            "fused_s", ("law_s", "law_staged_s", "simulated_s", "completion_coupled_s")),),
        title="GEMM + reduce-scatter on 8 H100, M = N = 32768, against K",
        source="ParallelKittens (arXiv 2511.13940), 8xH100, BF16", rows=rows,
        fitted_on={"R of the plain and of the staged form, each": f"K = {rows[0]['k_per_gpu']}"},
        summary=summary, notes=_notes(plain, workloads, machine, rows, crossing))


def _workload(record: Record) -> FusedGemm:
    return FusedGemm(**{name: value for name, value in record.parameters.items()
                        if name != "workload"})


def _machine(drain_bytes_per_s: float) -> MachineSpec:
    """Return an H100 whose path drains at `drain_bytes_per_s` and whose SMs store by TMA."""
    paths = catalog.table("store_paths")
    tma = paths[(paths["machine"] == MACHINE) & (paths["path"] == PATH)][0]
    return catalog.with_assumptions(catalog.with_parameters(
        catalog.machine(MACHINE), drain_bytes_per_s=drain_bytes_per_s,
        per_sm_bytes_per_s=float(tma["per_sm_bytes_per_s"])))


def _waves(gemm: FusedGemm, n_sms: int) -> int:
    return math.ceil(gemm.m / TILE_M * (gemm.n / TILE_N) / n_sms)


def _staged_total(gemm: FusedGemm, machine: MachineSpec, gemm_s: float, depth: int) -> float:
    """Total time by the law: staged tiles in waves, those for other GPUs first."""
    n_tiles, cal = gemm.m // TILE_M * gemm.n // TILE_N, analysis.published(machine)
    remote = (gemm.n_gpus - 1) / gemm.n_gpus
    return float(law.staged_tiles(law.TileRun(
        n_tiles, remote * n_tiles, machine.n_sms, gemm_s / _waves(gemm, machine.n_sms),
        gemm.store_bytes / n_tiles, remote * gemm.store_bytes, depth, cal.per_sm_bytes_per_s,
        cal.issue_latency_s, cal.drain_bytes_per_s, cal.capacity_bytes)).total_s)


def _staged_drain(plain: PlainForms, gemm: FusedGemm, depth: int) -> float:
    """R with which the staged form gives the first row (B/s): its own tiles store to nobody."""
    return float(brentq(
        lambda drain: _staged_total(gemm, _machine(drain), float(plain.gemm_s[0]), depth)
        - float(plain.fused_s[0]),
        0.8 * plain.drain_bytes_per_s, 2.0 * plain.drain_bytes_per_s, rtol=1e-6))


def _simulated_total(gemm: FusedGemm, machine: MachineSpec, gemm_s: float, depth: int,
                     jitter_ratio: float = 0.0) -> float:
    """Total time on the simulated machine, whose FLOP rate is that of the published plain GEMM."""
    padded = _waves(gemm, machine.n_sms) * machine.n_sms * TILE_M * TILE_N / (gemm.m * gemm.n)
    paced = dataclasses.replace(machine, bf16_flop_per_s=padded * gemm.flop / gemm_s,
                                hbm_bytes_per_s=math.nan)
    device = SimulatedDevice(paced, mma_jitter_ratio=jitter_ratio,
                             issue_jitter_ratio=jitter_ratio)
    tuning = Tuning(tile_m=TILE_M, tile_n=TILE_N, issue_depth=depth)
    return device.measure(build(gemm, paced, tuning)).summary["total_s"]


def _notes(plain: PlainForms, workloads: list[FusedGemm], machine: MachineSpec,
           rows: list[dict[str, Any]], crossing: int) -> tuple[str, ...]:
    """Say what is known of the crossover's cause; nothing here is fitted to it."""
    gemm, gemm_s = workloads[crossing], float(plain.gemm_s[crossing])
    fused_s = float(plain.fused_s[crossing])
    at = functools.partial(error_ratio, measured=fused_s)
    serial = _machine(_staged_drain(plain, workloads[0], 1))
    waves = gemm.m / TILE_M * (gemm.n / TILE_N) / machine.n_sms
    ends_s = gemm_s / waves + gemm.n_gpus * TILE_M * TILE_N / machine.link.per_sm_bytes_per_s
    added_s = 2 * gemm.store_bytes / machine.hbm_bytes_per_s  # read, then written
    tma = catalog.table("store_paths")
    rate = float(tma[(tma["machine"] == MACHINE) & (tma["path"] == PATH)]["bytes_per_s"][0])
    row = rows[crossing]
    slower_s = -rows[-1]["law_staged_error_ratio"] * gemm_s / gemm.n_gpus
    return (
        f"Crossover, K = {gemm.k}: max(T_gemm, T_store) is {row['law_error_ratio']:+.1%}, with "
        f"the order of the tiles {row['law_staged_error_ratio']:+.1%}. A GPU's own eighth of the "
        "tiles comes last and stores to nobody: while the path drains, it is not hidden. That is "
        "near half of the miss, and takes the other drain-bound row to "
        f"{rows[1]['law_staged_error_ratio']:+.1%}.",
        "Tried without fitting, at the crossover: whole waves add "
        f"{math.ceil(waves) / waves - 1:.1%}; first and last tile {ends_s / fused_s:.1%}; issue "
        f"depth 1 instead of {ISSUE_DEPTH} gives "
        f"{at(_staged_total(gemm, serial, gemm_s, 1)):+.1%} by the law and "
        f"{at(_simulated_total(gemm, serial, gemm_s, 1)):+.1%} simulated; tiles that vary by "
        f"{TRIED_JITTER_RATIO:.0%} give "
        f"{at(_simulated_total(gemm, machine, gemm_s, ISSUE_DEPTH, TRIED_JITTER_RATIO)):+.1%} "
        "simulated.",
        "The owner's additions: R from K = 512 is "
        f"{text('_bytes_per_s', machine.link.egress_bytes_per_s)}, "
        f"{machine.link.egress_bytes_per_s / rate:.0%} of plain TMA stores, so that adding is "
        f"in R already. If none of it met L2 it would take {text('_s', added_s)} of the owner's "
        f"memory rate, out of {text('_s', fused_s)}: no bound alone; that it and the operands' "
        "reads are in each other's way at the crossover, and less on either side, is not excluded.",
        f"Left: {-row['law_staged_error_ratio']:.0%} at the crossover, and as much at K = "
        f"{rows[-1]['k_per_gpu']} ({rows[-1]['law_staged_error_ratio']:+.1%}), where the link "
        "rests three quarters of the time, so that there it is the fused kernel's own compute "
        "that is slower than the plain GEMM. Compute slower by as much at the crossover would add "
        f"{slower_s / fused_s:.1%}; for the rest the path would have to drain at "
        f"{text('_bytes_per_s', plain.remote_bytes / (fused_s - gemm_s / gemm.n_gpus))} there. "
        "That is open: no times of stores beside a busy GEMM were published.",
        "Issue depth and the capacity Q are ASSUMED; the source of the kernel is a later version, "
        "perhaps not the one that was measured.")
