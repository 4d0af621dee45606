"""Attention with Ulysses' all-to-all tile by tile, and where more GPUs stop paying.

The compute time of a tile is taken from the published times of attention alone; what its stores
add is what the law and the simulated device make of the tile program.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab import analysis, catalog
from xstage_lab.analysis.attention import busiest_sm_tiles, full_tile_flop, hidden_ratio
from xstage_lab.analysis.ulysses_step import losing_per_peer_s
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.paper.moe_kernel import machine_of
from xstage_lab.paper.table import X_STAGE, Compared, Table, error_ratio, spread
from xstage_lab.schedule import build
from xstage_lab.spec import MachineSpec, UlyssesAttention, default_tuning
from xstage_lab.units import text

MACHINE, HEADS, OTHER_HEADS = "H100-SXM", 32, 24  # ASSUMED; FlashAttention-3 is for Hopper
TURNOVER_MODEL = "FLUX.1-1024"
TURNOVER_GPUS = (1, 2, 4, 8)
TURNOVER_MACHINES = ("H100-SXM", "B200-SXM")  # ASSUMED: which it was is not known
#: What the public report says of each count against the one before it.
REPORTED = {2: "faster", 4: "faster", 8: "slower"}


def attention_simulated_table(published: NDArray[np.void] | None = None) -> Table:
    """Predict and simulate fused and serial times from those of attention alone."""
    published = catalog.table("xstage_fa3_a2a") if published is None else published
    rows = [_row(row, HEADS) for row in published]
    others = [_row(row, OTHER_HEADS) for row in published]
    forms = ("law_fused", "simulated_fused", "law_serial")
    summary: dict[str, float] = {}
    for form in forms:
        summary |= spread(f"{form}_error_ratio", (row[f"{form}_error_ratio"] for row in rows))
    summary |= spread(f"law_fused_{OTHER_HEADS}_heads_error_ratio",
                      (row["law_fused_error_ratio"] for row in others))
    return Table(
        name="attention-simulated",
        compared=(
            Compared("fused_s", ("law_fused_s", "simulated_fused_s")),
            Compared("added_s", ("law_added_s",), difference=True),
            Compared("serial_s", ("law_serial_s", "simulated_serial_s"))),
        title="Attention with all-to-all tile by tile, from the times of attention alone",
        source=X_STAGE, rows=rows,
        fitted_on={"compute time of a tile": "attention alone, in each row"},
        summary=summary, notes=_notes(rows, summary))


def _row(row: np.void, heads: int) -> dict[str, Any]:
    alone, serial, fused = (float(row[f"{name}_s"]) for name in ("fa3_only", "serial", "fused"))
    machine = machine_of(MACHINE)
    attention = UlyssesAttention(sequence=int(row["tokens_m"]), heads=heads)
    tuning = default_tuning(attention, machine)
    t_mma = alone / busiest_sm_tiles(build(attention, machine, tuning), attention, tuning)
    paced = dataclasses.replace(machine, hbm_bytes_per_s=math.nan, bf16_flop_per_s=(
        full_tile_flop(attention, tuning) / t_mma * machine.n_sms))
    simulated = {mode: SimulatedDevice(paced).measure(build(
        dataclasses.replace(attention, mode=mode), paced, tuning)).summary["total_s"]
        for mode in ("fused", "serial")}
    found = analysis.predict(attention, machine, analysis.published(machine), tuning, t_mma)
    by_law = {"fused": found.summary["total_s"], "serial": found.terms["serial_s"]}
    measured = {"fused": fused, "serial": serial}
    return {
        "tokens": attention.sequence, "fa3_only_s": alone, "fused_s": fused, "serial_s": serial,
        "achieved_flop_per_s": attention.flop / alone, "t_mma_s": t_mma,
        **{f"{form}_{mode}_s": times[mode] for mode in measured
           for form, times in (("law", by_law), ("simulated", simulated))},
        **{f"{form}_{mode}_error_ratio": error_ratio(times[mode], measured[mode])
           for mode in measured for form, times in (("law", by_law), ("simulated", simulated))},
        "added_s": fused - alone, "law_added_s": by_law["fused"] - alone,
        "hidden_ratio": hidden_ratio(serial, fused, alone),
        "law_hidden_ratio": found.terms["hidden_ratio"],
    }


def _notes(rows: list[dict[str, Any]], summary: dict[str, float]) -> tuple[str, ...]:
    rates = [row["achieved_flop_per_s"] for row in rows]
    machine = machine_of(MACHINE)
    first, last = rows[0], rows[-1]
    per_token = ((last["serial_s"] - last["fa3_only_s"]) - (first["serial_s"] - first["fa3_only_s"])
                 ) / (last["tokens"] - first["tokens"])
    sent = HEADS / 8 * 128 * 2 * 7 / 8
    return (
        f"ASSUMED, since shape and machine were not published: 8 GPUs of {MACHINE} (the kernel is "
        f"FlashAttention-3), {HEADS} heads of 128, bf16. Attention alone is then "
        f"{text('_flop_per_s', min(rates))} to {text('_flop_per_s', max(rates))}; with 40 heads "
        f"it would be above the {text('_flop_per_s', machine.flop_per_s('bf16'))} that others "
        "measured for GEMMs. Of fused and serial times none is used.",
        "Fused, law and simulation agree, and are within "
        f"{summary['worst_law_fused_error_ratio']:.1%} of the published times at worst, "
        f"{summary['median_law_fused_error_ratio']:.2%} in the median: every wave but the last is "
        "hidden, and what the last one stores is added. Most of these times is the attention, "
        "which was given: what storing adds is "
        + ", ".join(text("_s", row["added_s"]) for row in rows) + " as published and "
        + ", ".join(text("_s", row["law_added_s"]) for row in rows) + " by the law. With "
        f"{OTHER_HEADS} heads the worst error is "
        f"{summary[f'worst_law_fused_{OTHER_HEADS}_heads_error_ratio']:.1%}. The table `attention` "
        "has the coarser max(attention, all-to-all), and its end from the constants.",
        f"Serial, the model is up to {summary['worst_law_serial_error_ratio']:.0%} too short: it "
        "sends at R from all SMs, with no launch between. The published all-to-all takes "
        f"{per_token * 1e9:.1f} ns per token, which with these heads is "
        f"{text('_bytes_per_s', sent / per_token)}, "
        f"{sent / per_token / machine.link.egress_bytes_per_s:.0%} of R. It packs, or is a "
        "library's, or the shape is another; which was not published. The hidden share, measured "
        "against a slower serial kernel, is larger than the model's for that reason alone.",
        "The last row's fused time is below attention alone, which no model without noise can "
        "give.")


def ulysses_turnover_table() -> Table:
    """Say of each number of GPUs what a whole step of attention takes, and what would lose."""
    rows, losing = [], {}
    for name in TURNOVER_MACHINES:
        machine, before, steps = machine_of(name), None, {}
        for n_gpus in TURNOVER_GPUS:
            row, steps[n_gpus] = _step(machine, n_gpus)
            row["law_against_before"] = None if before is None else (
                "faster" if row["law_step_s"] < before else "slower")
            before = row["law_step_s"]
            rows.append(row)
        losing[f"{name}_losing_per_peer_s"] = losing_per_peer_s(steps[4], steps[8], 4)
    told = [row["law_against_before"] == row["reported"] for row in rows if row["reported"]]
    return Table(
        name="ulysses-turnover", title=f"{TURNOVER_MODEL} over 1 to 8 GPUs: who gains, who loses",
        source="a public report, in words alone: gains up to 4 GPUs, a loss at 8", rows=rows,
        fitted_on={}, summary={"n_told_as_reported": float(sum(told)), "n_told": float(len(told)),
                               **losing},
        notes=_turnover_notes(rows, losing))


def _step(machine: MachineSpec, n_gpus: int) -> tuple[dict[str, Any], analysis.UlyssesStep]:
    attention = catalog.attention(TURNOVER_MODEL, n_gpus=n_gpus)
    prediction = analysis.predict(attention, machine, analysis.published(machine))
    step = analysis.ulysses_step(attention, prediction)
    simulated = SimulatedDevice(machine).measure(build(attention, machine)).summary["total_s"]
    return {
        "machine": machine.name, "n_gpus": n_gpus, "reported": REPORTED.get(n_gpus),
        "n_waves": int(prediction.terms["n_waves"]), "law_attention_s": step.attention_s,
        "law_output_s": step.output_s, "law_input_s": step.input_s, "law_fixed_s": step.fixed_s,
        "law_step_s": step.total_s,
        "simulated_step_s": step.input_s + simulated + step.fixed_s,
    }, step


def _turnover_notes(rows: list[dict[str, Any]], losing: dict[str, float]) -> tuple[str, ...]:
    four, eight = (next(row for row in rows if row["n_gpus"] == n) for n in (4, 8))
    costs = analysis.StepCosts()
    flags = [2 * cost / costs.sync_s for cost in losing.values()]
    return (
        f"ASSUMED: the machine, bf16, the default tile, {text('_s', costs.sync_s)} of "
        f"synchronisation for each of four all-to-alls and {text('_s', costs.launch_s)} for each "
        "launch, whatever the number of GPUs. Compute is at the measured GEMM rate. Nothing is "
        "fitted.",
        f"The loss at 8 GPUs does not come out: on {four['machine']} a step falls from "
        f"{text('_s', four['law_step_s'])} to {text('_s', eight['law_step_s'])}. Compute and "
        "bytes halve, partial waves and fixed costs do not, and do not suffice.",
        "What would make it lose: every all-to-all costing more for each further peer, by "
        + " and ".join(f"{text('_s', cost)} on {name.removesuffix('_losing_per_peer_s')}"
                       for name, cost in losing.items())
        + f", {min(flags):.1f} to {max(flags):.1f} one-way flags between GPUs; or work on "
        "the host between launches that does not shrink. The report gives no times that would "
        "tell.")
