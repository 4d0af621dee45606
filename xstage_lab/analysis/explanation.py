"""A prediction in two or three plain sentences: which regime, by how much, what would help."""

from __future__ import annotations

import math

from xstage_lab.analysis.prediction import Prediction
from xstage_lab.units import text


def explain(prediction: Prediction) -> list[str]:
    """Return what a colleague would say: the regime with its numbers, the remedy, the verdict."""
    words = (_bursts if "gap_s" in prediction.terms else
             _attention if "hidden_ratio" in prediction.terms else
             _moe if "other_order_total_s" in prediction.terms else _tiles)
    sentences = words(prediction)
    return [*sentences, *unsure_words(prediction)]


def unsure_words(prediction: Prediction) -> list[str]:
    """Return what the calibration supposes, and how far that moves the prediction."""
    unsure = sorted(prediction.calibration.assumed)
    if not unsure:
        return []
    low, high = prediction.low["accepted_s"], prediction.high["accepted_s"]
    band = ""
    if high > low * 1.001:
        over = "Q from unbounded to none" if "capacity_bytes" in unsure else "what is known"
        band = (f"; over {over} the last acceptance moves from {text('_s', low)} "
                f"to {text('_s', high)}")
    names = ", ".join(name.rsplit("_bytes", 1)[0].removesuffix("_s") for name in unsure)
    return [f"ASSUMED, not measured: {names}{band}."]


def _regime(prediction: Prediction) -> str:
    """Regime and margin; times over the next bound where that says more than a share."""
    margin = prediction.margin_ratio
    name = prediction.regime.capitalize()
    if not math.isfinite(margin):  # nothing else takes any time
        return name
    return f"{name} by {margin:.0%}" if margin < 10 else f"{name} by a factor of {1 + margin:.3g}"


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
    if prediction.parameters.get("destinations") == "row-owner-unrotated":  # incast included
        drain = max(drain, t["drain_bound_s"] / t["n_waves"])
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
            f"{_regime(prediction)}: {pace}; the link is the bottleneck "
            f"and {text('_s', max(exposed, 0.0))} of communication stay exposed.",
            _drain_remedy(prediction, drain, chain)]
    elif prediction.regime == "capacity-bound":
        sentences += [
            f"{_regime(prediction)}: {pace}; the path keeps up on "
            f"average, but the last wave stores more than the "
            f"{text('_bytes', t['capacity_bytes'])} it holds.",
            "Smaller tiles, or an order that spreads the last stores, would shorten the end."]
    elif prediction.regime == "issue-bound":
        sentences += [
            f"{_regime(prediction)}: {pace}; the SM's own store rate is "
            "the bottleneck.",
            "More store warps or bulk copies (a higher rate per SM), or a tile with more "
            "compute per output byte, would help; a faster link would not."]
    else:
        sentences.append(f"{_regime(prediction)}: {pace}; the stores "
                         "hide behind the MMA.")
        if serial and issue > 0.02 * mma:
            sentences.append(f"Depth 1 adds the issue to every tile: depth 2 would save about "
                             f"{text('_s', t['n_waves'] * issue)}.")
    sentences.append(_fuse(prediction, total))
    return sentences


def _attention(prediction: Prediction) -> list[str]:
    t, given, total = prediction.terms, prediction.parameters, prediction.summary["total_s"]
    sentences = [
        f"{_regime(prediction)}: {given['tile_m']} "
        f"queries loop over {given['sequence']} keys for {text('_s', t['t_mma_s'])}, then store "
        f"{text('_bytes', t['tile_bytes'])} in {text('_s', t['issue_free_s'])}; "
        f"{t['n_tiles']:.0f} tiles on {t['n_compute_sms']:.0f} SMs leave {t['idle_ratio']:.0%} of "
        "their time idle."]
    if given["n_gpus"] == 1:
        return [*sentences, "On one GPU nothing is remote: there is nothing to fuse."]
    alone, serial = t["compute_only_s"], t["serial_s"]
    if given["mode"] == "serial":
        return [*sentences, f"The all-to-all follows the attention, and its "
                f"{text('_s', serial - alone)} of {text('_s', serial)} are exposed."]
    both = (f"{text('_s', total)} against {text('_s', serial)} one after the other and "
            f"{text('_s', alone)} for the attention alone")
    hidden = (f"{t['hidden_ratio']:.0%} of the all-to-all is hidden" if total <= serial else
              "Nothing of the all-to-all is hidden")
    if given["mode"] == "fused":
        return [*sentences, f"{hidden}: {both}.", _fuse(prediction, total)]
    return [*sentences, f"{given['n_comm_sms']} SMs that only send reach "
            f"{text('_bytes_per_s', t['send_bytes_per_s'])} and are missing in the attention.",
            f"{hidden}: {both}."]


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
    unrotated = prediction.parameters.get("destinations") == "row-owner-unrotated"
    return fuse_words(total, prediction.unfused["total_s"], prediction.unfused["copy_s"],
                      " in this order" if unrotated else "")


def fuse_words(fused_s: float, unfused_s: float, copy_s: float, how: str = "") -> str:
    """Return in words whether to fuse, by the times fused and of compute-then-copy (s).

    `how` says what could be changed before giving fusing up.
    """
    gain = unfused_s / fused_s - 1.0
    if copy_s == 0:
        return "On one GPU nothing is remote: there is nothing to fuse."
    both = f"{text('_s', fused_s)} fused against {text('_s', unfused_s)} compute-then-copy"
    if gain > 0.02:
        return f"Fusing pays: {both}, {1 + gain:.2f} times as fast."
    if gain < -0.02:
        return f"Do not fuse{how}: {both}, it takes {1 / (1 + gain):.2f} times as long."
    return f"Fusing makes no difference: {both}."


def _moe(prediction: Prediction) -> list[str]:
    t, total = prediction.terms, prediction.summary["total_s"]
    pace = (f"a tile of Linear-1 computes in {text('_s', t['t_mma_1_s'])}, one of Linear-2 in "
            f"{text('_s', t['t_mma_2_s'])}, and a round of Linear-2 on all SMs drains in "
            f"{text('_s', t['drain_s'])}")
    margin = _regime(prediction)
    if prediction.regime == "drain-bound":
        head = (f"{margin}: {pace}; the {text('_bytes', t['remote_bytes'])} that a GPU sends are "
                "the bottleneck, and no order of tiles changes that.")
    elif prediction.regime == "capacity-bound":
        head = (f"{margin}: {pace}; on average the path keeps up, but runs of Linear-2 store more "
                f"than the {text('_bytes', t['capacity_bytes'])} it holds, and SMs wait "
                f"{text('_s', t['room_wait_s'])} for room.")
    elif prediction.regime == "issue-bound":
        head = f"{margin}: {pace}; the SM's own store rate is the bottleneck."
    else:
        end = "the stores hide behind the MMA" if t["remote_bytes"] else "nothing leaves the GPU"
        head = f"{margin}: {pace}; {end}."
    return [head, *_uneven(t), _other_order(prediction), _fuse(prediction, total)]


def _uneven(t: dict[str, float]) -> list[str]:
    """Say what uneven routing and a static schedule cost, where it is worth a sentence."""
    found = []
    if t["skew_ratio"] > 0.05:
        found.append(f"The busiest GPU has {t['skew_ratio']:.0%} more rows than the mean and sets "
                     "the time.")
    if t["imbalance_ratio"] > 0.05:
        found.append(f"The busiest SM takes {t['imbalance_ratio']:.0%} longer than the mean SM's "
                     "tiles, waits for Linear-1 included.")
    return found


def _other_order(prediction: Prediction) -> str:
    total, other = prediction.summary["total_s"], prediction.terms["other_order_total_s"]
    order = prediction.parameters["order"]
    name = "In waves" if order == "interleaved" else "Interleaved"
    if abs(other / total - 1) < 0.01:
        return f"{name} it would take as long."
    side = "longer" if other > total else "less"
    return f"{name} it would take {text('_s', other)}, {abs(other / total - 1):.0%} {side}."
