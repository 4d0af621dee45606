"""Whether to interleave the two layers of an MoE layer: a verdict in numbers and words."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from xstage_lab import law
from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.prediction import Prediction, predict
from xstage_lab.analysis.tilings import lanes_used
from xstage_lab.schedule import moe as schedule
from xstage_lab.spec import DTYPE_BYTES, MachineSpec, MoELayer, Tuning
from xstage_lab.units import text

WORTH_RATIO = 0.01  # gains below this are called none


def two_layers(moe: MoELayer, machine: MachineSpec, calibration: Calibration,
               tuning: Tuning) -> law.TwoLayers:
    """Return what the closed form of the orders takes, of the GPU with the most rows."""
    k = tuning.n_ctas or machine.n_sms
    busiest = int(np.argmax(moe.gpu_rows))
    _, _, rows = schedule.row_blocks(moe, tuning, busiest)
    held = int((moe.expert_rows.reshape(moe.n_gpus, -1)[busiest] > 0).sum())
    n_first, n_second = schedule.tiles_per_block(moe, tuning)
    area = float(rows.mean()) * np.array([2 * moe.intermediate / n_first, moe.hidden / n_second])
    depth = np.array([moe.hidden, moe.intermediate])
    mma = 2 * area * depth / (machine.flop_per_s(moe.dtype) / machine.n_sms)
    size = area * (0.5 * DTYPE_BYTES[moe.dtype], DTYPE_BYTES[moe.out_dtype])
    issue = [calibration.issue_free_s(each) for each in size]
    drain = calibration.drain_bytes_per_s * lanes_used(machine, moe.n_gpus)
    weights = moe.hidden * moe.intermediate * DTYPE_BYTES[moe.dtype]
    known = not (math.isnan(machine.l2_bytes) or math.isnan(machine.hbm_bytes_per_s))
    wave = schedule.wave_experts(moe, tuning, k)
    lead = -(-schedule.lead_rows(moe, tuning, k) // tuning.tile_m)
    return law.TwoLayers(*law.floats(
        rows.size, rows.size / held, n_first, n_second, -(-(moe.experts // moe.n_gpus) // wave),
        lead, k, mma[0], mma[1], issue[0], issue[1], tuning.issue_depth,
        k * size[1] * (moe.n_gpus - 1) / moe.n_gpus / drain, calibration.capacity_at(k) / drain,
        2 * weights, weights, machine.l2_bytes if known else math.inf,
        machine.hbm_bytes_per_s if known else math.inf))


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """Which order is predicted to be faster, and why.

    Attributes
    ----------
    decision : str
        `wave` or `interleaved`.
    gain_ratio : float
        Total time in waves over interleaved, minus 1.
    terms : dict
        `wave_s`, `interleaved_s`, the totals; `stall_wave_s`, `stall_interleaved_s`, what
        stores add; `locality_s`, `schedule_s`, what interleaving adds by weights fetched again
        and by SMs that are busy unequally or wait for tiles; and what these come from.
    rule : law.Orders
        The closed form, from the same critical paths.
    sentences : list of str
    predictions : dict of str to Prediction
        By order, what the law says of each.
    """

    decision: str
    gain_ratio: float
    terms: dict[str, float]
    rule: law.Orders
    sentences: list[str]
    predictions: dict[str, Prediction]


def verdict(moe: MoELayer, machine: MachineSpec, calibration: Calibration,
            tuning: Tuning | None = None) -> Interleaving:
    """Say whether to interleave `moe`, whichever order it asks for.

    Raises
    ------
    Infeasible, InvalidValue, UnknownFact
        If the machine cannot run it, or its compute rate is not known.
    """
    tuning = tuning or Tuning()
    wave, interleaved = (predict(dataclasses.replace(moe, order=order), machine, calibration,
                                 tuning) for order in ("wave", "interleaved"))
    layers = two_layers(moe, machine, calibration, tuning)
    rule = law.compare_orders(layers, wave.terms["path_s"], interleaved.terms["path_s"])
    gain = wave.summary["total_s"] / interleaved.summary["total_s"] - 1.0
    terms = _terms(wave, interleaved, layers)
    return Interleaving(decision="interleaved" if gain > 0 else "wave", gain_ratio=gain,
                        terms=terms, rule=rule, sentences=_sentences(gain, terms),
                        predictions={"wave": wave, "interleaved": interleaved})


def _terms(wave: Prediction, interleaved: Prediction, layers: law.TwoLayers) -> dict[str, float]:
    both = wave, interleaved
    path_s = [each.terms["path_s"] for each in both]
    stall_s = [each.summary["total_s"] - path for each, path in zip(both, path_s, strict=True)]
    mean_s = [path / (1 + each.terms["imbalance_ratio"])
              for each, path in zip(both, path_s, strict=True)]
    locality = mean_s[1] - mean_s[0]
    of = {name: float(value) for name, value in layers._asdict().items()}
    burst = of["n_blocks"] / of["n_waves"] * of["n_second"] / of["n_sms"]
    return {
        "wave_s": wave.summary["total_s"], "interleaved_s": interleaved.summary["total_s"],
        "stall_wave_s": stall_s[0], "stall_interleaved_s": stall_s[1], "locality_s": locality,
        "schedule_s": path_s[1] - path_s[0] - locality,
        "n_burst_rounds": burst, "t_mma_1_s": wave.terms["t_mma_1_s"],
        "t_mma_2_s": wave.terms["t_mma_2_s"],
        **{name: of[name] for name in ("span_s", "held_s", "l2_bytes", "weights_1_bytes",
                                       "weights_2_bytes")},
        "missed_wave_bytes": wave.terms["missed_bytes"],
        "missed_interleaved_bytes": interleaved.terms["missed_bytes"]}


def _sentences(gain: float, t: dict[str, float]) -> list[str]:
    both = (f"{text('_s', t['interleaved_s'])} interleaved against "
            f"{text('_s', t['wave_s'])} in waves")
    if gain > WORTH_RATIO:
        found = [f"Interleave: {both}, {1 + gain:.2f} times as fast."]
    elif gain < -WORTH_RATIO:
        found = [f"Keep waves: {both}, interleaving takes {1 / (1 + gain):.2f} times as long."]
    else:
        found = [f"The order makes no difference: {both}."]
    found.append(
        f"A wave ends with {t['n_burst_rounds']:.1f} rounds of Linear-2, each computed in "
        f"{text('_s', t['t_mma_2_s'])} and drained in {text('_s', t['span_s'])}, before a path "
        f"that holds {text('_s', t['held_s'])} of drain: stores add "
        f"{text('_s', t['stall_wave_s'])} in waves and {text('_s', t['stall_interleaved_s'])} "
        "interleaved.")
    if math.isfinite(t["l2_bytes"]):
        found.append(_locality(t))
    if abs(t["schedule_s"]) > WORTH_RATIO * t["wave_s"]:
        verb = "adds" if t["schedule_s"] > 0 else "saves"
        found.append(f"Tile i runs on SM i mod K: interleaving {verb} "
                     f"{text('_s', abs(t['schedule_s']))} on the busiest SM and by waits for "
                     "Linear-1; tiles handed out on demand would not see that.")
    return found


def _locality(t: dict[str, float]) -> str:
    alone, both = t["weights_1_bytes"], t["weights_1_bytes"] + t["weights_2_bytes"]
    sets = (f"an expert's Linear-1 weights are {text('_bytes', alone)}, both layers' "
            f"{text('_bytes', both)}, and L2 holds {text('_bytes', t['l2_bytes'])}")
    again = t["missed_interleaved_bytes"] - t["missed_wave_bytes"]
    if again <= 0:
        return f"Interleaving fetches no weights again: {sets}."
    return (f"Interleaving fetches {text('_bytes', again)} of weights again, which adds "
            f"{text('_s', t['locality_s'])}: {sets}.")
