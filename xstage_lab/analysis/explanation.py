"""A prediction in two or three plain sentences: which regime, by how much, what would help."""

from __future__ import annotations

import math

from xstage_lab.analysis.prediction import Prediction
from xstage_lab.units import text


def explain(prediction: Prediction) -> list[str]:
    """Return what a colleague would say: the regime with its numbers, the remedy, the verdict."""
    is_burst = "gap_s" in prediction.terms
    sentences = _bursts(prediction) if is_burst else _tiles(prediction)
    unsure = sorted(prediction.calibration.assumed)
    if unsure:
        low, high = prediction.low["accepted_s"], prediction.high["accepted_s"]
        band = ""
        if high > low * 1.001:
            over = "Q from unbounded to none" if "capacity_bytes" in unsure else "what is known"
            band = (f"; over {over} the last acceptance moves from {text('_s', low)} "
                    f"to {text('_s', high)}")
        names = ", ".join(name.rsplit("_bytes", 1)[0].removesuffix("_s") for name in unsure)
        sentences.append(f"ASSUMED, not measured: {names}{band}.")
    return sentences


def _bursts(prediction: Prediction) -> list[str]:
    t = prediction.terms
    drain, free, gap = t["drain_s"], t["issue_free_s"], t["gap_s"]
    head = (f"{text('_bytes', t['volume_bytes'])} a burst take {text('_s', free)} to issue and "
            f"{text('_s', drain)} to drain at {text('_bytes_per_s', t['drain_bytes_per_s'])}")
    if prediction.regime == "drain-bound":
        missing = drain - free - gap
        return [f"Drain-bound: {head}, but issue and gap give the path only "
                f"{text('_s', free + gap)}.",
                f"Each burst issues {text('_s', missing)} longer than free; a gap of at least "
                f"G* = {text('_s', t['gap_recovery_s'])}, {text('_s', missing)} more, or "
                f"{missing / drain:.0%} fewer bytes a burst would make it free."]
    if prediction.regime == "capacity-bound":
        over = t["peak_backlog_bytes"] - t["capacity_bytes"]
        return [f"Capacity-bound: {head}; the path keeps up on average, but a burst leaves a "
                f"backlog of {text('_bytes', t['peak_backlog_bytes'])} where only "
                f"{text('_bytes', t['capacity_bytes'])} fit.",
                f"Smaller bursts, by {text('_bytes', over)} over all producers, or producers "
                "out of step would not be blocked."]
    return [f"Free of backpressure: {head}, and issue and gap last {text('_s', free + gap)}.",
            f"There is room for {prediction.margin_ratio:.0%} more bytes at this pace."
            if math.isfinite(prediction.margin_ratio) else "Nothing leaves the GPU."]


def _tiles(prediction: Prediction) -> list[str]:
    t, total = prediction.terms, prediction.summary["total_s"]
    mma, issue, drain = t["t_mma_s"], t["issue_free_s"], t["drain_s"]
    source = {"measured": "as timed without stores", "roofline": "by FLOP and memory rates",
              "timed": "the median of its tiles"}
    pace = (f"a wave computes in {text('_s', mma)} ({source[prediction.t_mma_source]}), issues in "
            f"{text('_s', issue)} and drains in {text('_s', drain)}")
    serial = prediction.parameters["issue_depth"] == 1
    chain = mma + issue if serial else max(mma, issue)
    sentences = []
    if prediction.regime == "drain-bound":
        exposed = prediction.summary["accepted_s"] - t["compute_bound_s"]
        sentences += [
            f"Drain-bound by {prediction.margin_ratio:.0%}: {pace}; the link is the bottleneck "
            f"and {text('_s', max(exposed, 0.0))} of communication stay exposed.",
            _drain_remedy(prediction, drain, chain)]
    elif prediction.regime == "capacity-bound":
        sentences += [
            f"Capacity-bound by {prediction.margin_ratio:.0%}: {pace}; the path keeps up on "
            f"average, but the last wave stores more than the "
            f"{text('_bytes', t['capacity_bytes'])} it holds.",
            "Smaller tiles, or an order that spreads the last stores, would shorten the end."]
    elif prediction.regime == "issue-bound":
        sentences += [
            f"Issue-bound by {prediction.margin_ratio:.0%}: {pace}; the SM's own store rate is "
            "the bottleneck.",
            "More store warps or bulk copies (a higher rate per SM), or a tile with more "
            "compute per output byte, would help; a faster link would not."]
    else:
        sentences.append(f"Compute-bound by {prediction.margin_ratio:.0%}: {pace}; the stores "
                         "hide behind the MMA.")
        if serial and issue > 0.02 * mma:
            sentences.append(f"Depth 1 adds the issue to every tile: depth 2 would save about "
                             f"{text('_s', t['n_waves'] * issue)}.")
    sentences.append(_fuse(prediction, total))
    return sentences


def _drain_remedy(prediction: Prediction, drain: float, chain: float) -> str:
    destinations = prediction.parameters.get("destinations", "")
    if destinations == "row-owner-unrotated":
        return ("All GPUs store to the same owner at a time, a moving incast at its ingress: "
                "start each GPU at its successor's rows (row-owner) and it is gone.")
    if destinations.startswith("hot:") and drain > chain:
        return ("The hot GPU's ingress sets the rate: spreading its share over the others would "
                "help, deeper staging would not.")
    if drain <= chain:
        return ("Only the fill and drain ends are exposed; more tiles per SM, or smaller ones, "
                "would hide them.")
    return (f"Scheduling cannot change that: per wave the path needs {drain / chain:.1f} times "
            "the time the SMs do. A larger k, fewer output bytes (bf16 instead of fp32) or a "
            "faster store path would.")


def _fuse(prediction: Prediction, total: float) -> str:
    gain, unfused = prediction.fuse_gain_ratio, prediction.unfused["total_s"]
    if prediction.unfused["copy_s"] == 0:
        return "On one GPU nothing is remote: there is nothing to fuse."
    both = f"{text('_s', total)} fused against {text('_s', unfused)} compute-then-copy"
    if gain > 0.02:
        return f"Fusing pays: {both}, {1 + gain:.2f} times as fast."
    if gain < -0.02:
        return f"Do not fuse: {both}, it takes {1 / (1 + gain):.2f} times as long."
    return f"Fusing makes no difference: {both}."
