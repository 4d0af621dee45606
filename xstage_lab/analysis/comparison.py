"""Prediction beside record: errors, and what the record itself says of the regime."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab.analysis.explanation import explain
from xstage_lab.analysis.prediction import Prediction
from xstage_lab.errors import XStageError
from xstage_lab.record import SUMMARY_KEYS, Record, Tiles, lanes

NEGLIGIBLE_SHARE = 0.05  # shares of time below this count as none when a regime is named
NEGLIGIBLE_BLOCKED_SHARE = 0.1  # of the spans, where the free span is known; jitter is less
EMPTY_SHARE = 0.05       # of the largest backlog


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A prediction beside a measurement of the same configuration.

    Attributes
    ----------
    predicted, low, high, measured, error_ratio : dict
        Over `record.SUMMARY_KEYS`; low and high are the prediction's band. The error is
        predicted/measured - 1, for `stall_ratio` the difference; NaN where either is missing.
    regime, regime_measured : str
        As the law names it, and as observed busy and wait shares do.
    explain : list of str
    provenance : dict
        `predicted` and `measured`, each with its badge.
    """

    predicted: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    measured: dict[str, float]
    error_ratio: dict[str, float]
    regime: str
    regime_measured: str
    explain: list[str]
    provenance: dict[str, Any]


def compare(prediction: Prediction, record: Record) -> Comparison:
    """Set a prediction beside a record.

    Raises
    ------
    XStageError
        If they are of different configurations.
    """
    ours_all = prediction.parameters | {"machine": prediction.provenance["machine"]}
    theirs_all = record.parameters | {
        "machine": record.provenance.get("machine", ours_all["machine"])}
    for name, ours in ours_all.items():
        theirs = theirs_all.get(name, ours)  # a published record says only so much
        if ours != theirs:
            raise XStageError(f"{name}: predicted for {ours!r}, measured at {theirs!r}; compare "
                              "like with like.")
    measured = {key: record.summary.get(key, math.nan) for key in SUMMARY_KEYS}
    is_burst = "gap_s" in prediction.terms
    if is_burst and math.isnan(measured["stall_ratio"]) and not math.isnan(measured["issue_s"]):
        blocked = measured["issue_s"] - prediction.terms["issue_free_s"]
        measured["stall_ratio"] = (
            record.parameters["n_bursts"] * blocked / measured["accepted_s"])
    error = {key: _error(key, prediction.summary[key], measured[key]) for key in SUMMARY_KEYS}
    comparison = Comparison(
        predicted=dict(prediction.summary), low=prediction.low, high=prediction.high,
        measured=measured, error_ratio=error,
        regime=prediction.regime,
        regime_measured=measured_regime(record, prediction.terms["issue_free_s"]),
        explain=explain(prediction),
        provenance={"predicted": prediction.provenance, "measured": record.provenance})
    return dataclasses.replace(comparison, explain=[*comparison.explain, _verdict(comparison)])


def _error(key: str, predicted: float, measured: float) -> float:
    if key == "stall_ratio":
        return predicted - measured
    return predicted / measured - 1.0 if measured else math.nan


def _verdict(comparison: Comparison) -> str:
    badge = comparison.provenance["measured"].get("badge", "measured")
    error = comparison.error_ratio["accepted_s"]
    if math.isnan(error):
        error = comparison.error_ratio["total_s"]
        what = "total time"
    else:
        what = "time to the last acceptance"
    if math.isnan(error):
        return f"The record ({badge}) holds no time the law predicts."
    side = "above" if error > 0 else "below"
    text = (f"The law is {abs(error):.1%} {side} the {badge} {what}" if abs(error) >= 0.0005
            else f"The law agrees with the {badge} {what} to 0.1%")
    if comparison.regime_measured and comparison.regime_measured != comparison.regime:
        return (f"{text}; it calls the run {comparison.regime}, its busy and wait shares say "
                f"{comparison.regime_measured}.")
    return f"{text}."


def measured_regime(record: Record, issue_free_s: float | None = None) -> str:
    """Name the regime from observed busy and wait shares alone; empty where they are not known.

    Spans count as blocked by what they exceed the free one: `issue_free_s` as measured by a
    calibration, or the shortest of the record. Where the MMA role hardly ever waits for a slot
    (for bursts and at depth 1: spans are hardly blocked) the run is compute- or issue-bound by
    what takes longer. Else the path blocks it: drain-bound, or capacity-bound if the path still
    runs empty in the second half of the run. Where tasks of their own send what tiles left, what
    counts is how long they go on after the last tile.
    """
    tiles = record.tiles
    if tiles is None:
        return ""
    if record.parameters.get("mode") in ("dedicated", "serial"):
        return _regime_of_senders(tiles, issue_free_s)
    storing = tiles[tiles["store_bytes"] > 0]
    mma = float((tiles["mma_end_s"] - tiles["mma_start_s"]).sum())
    if not storing.size:
        return "compute-bound"
    span = storing["issue_end_s"] - storing["issue_start_s"]
    size = storing["store_bytes"] / storing["store_bytes"].mean()
    free = (float(np.quantile(span / size, 0.01)) if issue_free_s is None else issue_free_s) * size
    blocked = np.maximum(span - free, 0.0)
    waits = float(tiles["slot_wait_s"].sum())
    serial = record.parameters.get("issue_depth") == 1
    everything = mma + (float(span.sum()) if serial else waits)
    negligible = (NEGLIGIBLE_SHARE * everything if issue_free_s is None
                  else NEGLIGIBLE_BLOCKED_SHARE * span.sum())
    if serial and blocked.sum() < negligible:
        return "compute-bound" if mma >= free.sum() else "issue-bound"
    if not serial and math.isnan(waits):
        return ""
    if not serial and waits < NEGLIGIBLE_SHARE * everything:
        return "capacity-bound" if _blocked_at_the_end(storing, blocked) else "compute-bound"
    if blocked.sum() < NEGLIGIBLE_SHARE * span.sum():
        return "issue-bound"
    alone = storing.size <= len(lanes(storing))
    return "capacity-bound" if alone or _path_runs_empty(record) else "drain-bound"


def _regime_of_senders(tiles: Tiles, issue_free_s: float | None) -> str:
    """Name the regime where some tasks compute and others send.

    Those beside the tiles should end with them, those after take as long as the tiles at most.
    """
    computes = tiles["mma_end_s"] > tiles["mma_start_s"]
    sends = tiles[~computes & (tiles["store_bytes"] > 0)]
    computed_s = float(tiles["issue_end_s"][computes].max())
    rest_s = float(tiles["issue_end_s"].max()) - computed_s
    if not sends.size:
        return "compute-bound"
    beside = float(sends["issue_start_s"].min()) < computed_s
    if rest_s <= (NEGLIGIBLE_SHARE * computed_s if beside else computed_s):
        return "compute-bound"
    span = float((sends["issue_end_s"] - sends["issue_start_s"]).sum())
    free = math.inf if issue_free_s is None else issue_free_s * sends.size
    return "drain-bound" if span > (1 + NEGLIGIBLE_BLOCKED_SHARE) * free else "issue-bound"


def _blocked_at_the_end(storing: Tiles, blocked: NDArray[np.float64]) -> bool:
    """Whether the last tiles of the SMs are blocked for a share of the run worth naming."""
    last = [own[-1] for own in lanes(storing)]
    end = float(storing["issue_end_s"].max())
    return bool(blocked[last].mean() > NEGLIGIBLE_SHARE * end)


def _path_runs_empty(record: Record) -> bool:
    """Whether the backlog, where it was seen, still falls to nothing late in the run."""
    if record.backlog is None or not record.backlog.size:
        return False
    when, held = record.backlog
    late = held[(when > 0.5 * record.summary["accepted_s"]) & (
        when < record.summary["accepted_s"])]
    return not late.size or float(late.min()) < EMPTY_SHARE * float(held.max())


def error_text(key: str, comparison: Comparison) -> str:
    """Return how far off the prediction of a key is, with its unit; empty where not known."""
    error = comparison.error_ratio[key]
    if math.isnan(error):
        return ""
    percent = round(100 * error, 1) + 0.0  # no minus before a zero
    return f"{percent:+.1f} points" if key == "stall_ratio" else f"{percent:+.1f} %"
