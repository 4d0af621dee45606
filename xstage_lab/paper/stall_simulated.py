"""The stall of runs of storing tiles on the simulated device: which mechanism appears there."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import numpy as np

from xstage_lab import catalog
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.paper.constants import MACHINE
from xstage_lab.paper.stall import held_s, published_wait, run_wait
from xstage_lab.paper.table import X_STAGE, Compared, Table, spread
from xstage_lab.record import Tiles
from xstage_lab.schedule import build
from xstage_lab.spec import FusedGemm, Tuning
from xstage_lab.units import text

TILE, N_GPUS = 128, 8  # 32 KiB of bf16, the burst of X-Stage's constants
FULL_RUN = 14           # tiles after which the path is full in all runs below
#: Issue depth, storing tiles of an SM in its run (sevenths of all), compute time of a tile (s).
RUNS = (
    (2, 7, 5e-6), (2, 14, 5e-6), (2, 28, 5e-6), (2, 56, 5e-6), (2, 14, 3e-6), (2, 14, 6e-6),
    (2, 14, 9e-6), (3, 7, 5e-6), (3, 14, 5e-6), (3, 28, 5e-6), (3, 56, 5e-6),
)


def moe_stall_simulated_table() -> Table:
    """Run fused GEMMs whose storing tiles form one run, and look at every wait for a slot."""
    machine = catalog.with_assumptions(catalog.machine(MACHINE))
    # Compute takes what the FLOP rate says, whatever the weights' locality.
    device = SimulatedDevice(dataclasses.replace(machine, hbm_bytes_per_s=math.nan))
    rows = [_row(device, *run) for run in RUNS]
    return Table(
        name="moe-stall-simulated",
        compared=(Compared(
            "simulated_wait_s", ("law_s", "published_form_s"), difference=True),),
        title="Waits for a slot in a run of storing tiles, simulated, beside the forms",
        source=f"none; the simulated machine has the constants {X_STAGE}", rows=rows, fitted_on={},
        summary={**spread("published_form_error_s", (r["published_form_error_s"] for r in rows)),
                 **spread("law_error_s", (r["law_error_s"] for r in rows)),
                 "worst_steady_error_s": max(
                     abs(r["simulated_wait_steady_s"] - r["published_form_s"])
                     for r in rows if r["n_run_tiles"] >= FULL_RUN)},
        notes=_notes([row["mean_span_form_error_s"] for row in rows]))


def _notes(mean_span_errors: list[float]) -> tuple[str, ...]:
    low, high = (text("_s", end(mean_span_errors)) for end in (min, max))
    return (
        "Each run is the 7 of 8 tiles of a row-owner GEMM that are for other GPUs; tiles for the "
        "GPU itself follow and store to its own memory, as compute after a run of storing tiles. "
        "The device frees a slot when its last store is accepted.",
        f"In runs of {FULL_RUN} tiles and more the path is full at the end, and there each tile "
        "waits the span less t_mma at either depth: the published form is exact. So an earlier "
        "slot, which is worth one more at most, changes no steady wait.",
        "What appears is the start of the run: the first tiles do not wait, because Q and the "
        "slots take their stores, and the mean over a run falls short of the steady wait by "
        "(Q/R + D T_span - 2 T_mma)/n; by Q/(R n) at depth 2 if waits of the tiles after the run "
        "are counted to it and there are at least D of them. The published form is too large by "
        "that. Counted over the run alone, in runs of one length, the excess shrinks as T_mma "
        "grows, which the measured one does not; with the waits after the run it is constant, "
        "which the measured one nearly is.",
        f"With the mean span over the run instead of the steady one the form errs by {low} to "
        f"{high}: the first tiles' spans are short, yet spare nobody a wait that was none.",
        "The model has one store role per SM and so no spans that overlap: it can neither "
        "support nor refute that mechanism.")


def _row(device: SimulatedDevice, depth: int, n_run: int, t_mma_s: float) -> dict[str, Any]:
    """Measure one run of `n_run` storing tiles on every SM."""
    machine = device.machine
    tile_s_per_k = 2 * TILE * TILE / (machine.flop_per_s("bf16") / machine.n_sms)
    gemm = FusedGemm(m=N_GPUS * TILE, n=n_run * machine.n_sms // (N_GPUS - 1) * TILE,
                     k=round(t_mma_s / tile_s_per_k), n_gpus=N_GPUS, destinations="row-owner")
    program = build(gemm, machine, Tuning(tile_m=TILE, tile_n=TILE, issue_depth=depth))
    everything = cast(Tiles, device.measure(program).tiles)
    tiles = everything[: program.tasks[0].size]  # of GPU 0, which stands for all
    remote = program.tasks[0]["owner"] != 0
    run, after = tiles[remote], tiles[~remote]
    number = run["row"] // program.n_ctas
    steady = (number >= n_run - 2) & (number < n_run - 1)  # the last may find the path emptier
    span = run["issue_end_s"] - run["issue_start_s"]
    mma = float((run["mma_end_s"] - run["mma_start_s"]).mean())
    wait = float(run["slot_wait_s"].mean())
    waits_after = float(after["slot_wait_s"].sum()) / run.size
    steady_span = float(span[steady].mean())
    form, mean_form = (float(published_wait(s, mma)) for s in (steady_span, span.mean()))
    by_law, with_after = (float(run_wait(steady_span, mma, n_run, depth, held_s(), after_run=a))
                          for a in (False, True))
    return {
        "issue_depth": depth, "n_run_tiles": n_run, "t_mma_s": mma,
        "simulated_span_steady_s": steady_span, "simulated_span_mean_s": float(span.mean()),
        "simulated_wait_steady_s": float(np.mean(run["slot_wait_s"][steady])),
        "simulated_wait_s": wait, "simulated_wait_after_s": waits_after,
        "published_form_s": form, "published_form_error_s": form - wait,
        "mean_span_form_error_s": mean_form - wait,
        "law_s": by_law, "law_error_s": by_law - wait,
        "law_after_run_error_s": with_after - wait - waits_after,
    }
