"""Published times of DeepGEMM's Mega MoE against the tokens of a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab import catalog
from xstage_lab.paper.moe_kernel import law_total_s, machine_of, times, tuning_of
from xstage_lab.paper.table import Compared, Table, error_ratio, spread
from xstage_lab.units import text

MACHINE = "B200-SXM"
TIME_ROUNDING_S, TFLOPS_ROUNDING = 0.05e-6, 0.5e12  # a digit after the comma; whole TFLOPS
MANY_TOKENS = 8192        # from here on compute decides, not the fetching of weights


def mega_moe_table(published: NDArray[np.void] | None = None) -> Table:
    """Predict every row with nothing fitted, and reproduce the published FLOP rates."""
    published = catalog.table("megamoe_pr316") if published is None else published
    rows = [_row(row) for row in published]
    many = [row for row in rows if row["tokens_per_rank"] >= MANY_TOKENS] or rows
    summary = {"n_flop_rates_reproduced": float(sum(row["reproduced"] for row in rows))}
    for form in ("law", "simulated"):
        summary |= spread(f"{form}_error_ratio", (row[f"{form}_error_ratio"] for row in rows))
        summary |= spread(f"{form}_many_tokens_error_ratio",
                          (row[f"{form}_error_ratio"] for row in many))
    return Table(
        name="mega-moe", compared=(
            Compared("time_s", ("law_s", "simulated_s", "law_half_weights_s")),),
        title="Fused MoE layer on 8 GPUs against the tokens of a GPU",
        source=str(published["source"][0]), rows=rows, fitted_on={}, summary=summary,
        notes=_notes(rows, many))


def _row(row: np.void) -> dict[str, Any]:
    machine, time_s = machine_of(MACHINE), float(row["time_s"])
    moe = catalog.moe_layer(str(row["model"]), int(row["tokens_per_rank"]))
    tuning = tuning_of(moe, machine)
    found = times(moe, machine, tuning)
    rate = moe.flop / moe.n_gpus / time_s
    # Twice the memory rate and twice the cache is what weights of half the size are.
    halved = dataclasses.replace(machine, hbm_bytes_per_s=2 * machine.hbm_bytes_per_s,
                                 l2_bytes=2 * machine.l2_bytes)
    active = moe.experts // moe.n_gpus - int((moe.expert_rows[:moe.experts // moe.n_gpus]
                                              == 0).sum())
    return {
        "model": str(row["model"]), "tokens_per_rank": moe.tokens, "tile_m": tuning.tile_m,
        "time_s": time_s, "reported_flop_per_s": float(row["flop_per_s"]),
        "achieved_flop_per_s": rate,
        "reproduced": bool(abs(rate - row["flop_per_s"])
                           <= TFLOPS_ROUNDING + rate * TIME_ROUNDING_S / time_s),
        "n_active_experts": active, "law_s": found.law_s,
        "law_error_ratio": error_ratio(found.law_s, time_s), "simulated_s": found.simulated_s,
        "simulated_error_ratio": error_ratio(found.simulated_s, time_s),
        "law_interleaved_s": law_total_s(dataclasses.replace(moe, order="interleaved"), machine,
                                         tuning),
        "law_half_weights_s": law_total_s(moe, halved, tuning),
        "not_in_law_s": time_s - found.law_s,
    }


def _notes(rows: list[dict[str, Any]], many: list[dict[str, Any]]) -> tuple[str, ...]:
    few = [row for row in rows if row["tokens_per_rank"] == 1] or rows[:1]
    best = max(row["achieved_flop_per_s"] for row in many)
    rate = machine_of(MACHINE).flop_per_s("fp8")
    return (
        "FLOP rates are 2 x tokens x top_k x 3 x hidden x intermediate / time. Predictions take "
        f"{text('_flop_per_s', rate)} of {MACHINE} as others measured it for dense FP8, and "
        "its published store path; no time of this table enters. Tiles by rows per expert as in "
        "the kernel's public source; two staged tiles are ASSUMED. Wave order, as the kernel had "
        "it then.",
        f"Many tokens: the law is {-max(r['law_error_ratio'] for r in many):.0%} to "
        f"{-min(r['law_error_ratio'] for r in many):.0%} too fast. Nothing in the model waits "
        f"there but for compute, and the kernel reaches {text('_flop_per_s', best)} at best, "
        f"{best / rate:.0%} of what the rate was measured at: the best of many large GEMMs, "
        "without FP4 weights, per-row scales or an activation between. This is a rate that is "
        "missing, and the store path is not tested by these rows.",
        "Few tokens: what decides is the fetching of weights, of the experts that any row is "
        f"routed to ({few[0]['n_active_experts']} of a GPU's at one token each). The weights are "
        "FP4 and are modelled as FP8, twice as large; `law half weights` has half of the bytes. "
        "At one token it leaves "
        + " and ".join(f"{text('_s', r['time_s'] - r['law_half_weights_s'])} of "
                       f"{text('_s', r['time_s'])}" for r in few)
        + " unexplained: barriers between GPUs, dispatch, a launch, and loads too few to fill "
        "the memory's rate, none of which is in the model.",
        "Dispatch, shared experts and the top-k sum are not modelled.")
