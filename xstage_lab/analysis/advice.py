"""What a search found, as an answer: the best, the runner-up, whether to fuse, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.candidates import Candidates, Choice, Counts, Floats
from xstage_lab.analysis.explanation import explain, fuse_words
from xstage_lab.analysis.prediction import Prediction, predict
from xstage_lab.record import Record
from xstage_lab.spec import MachineSpec
from xstage_lab.units import text

# Measured times this near, and predicted ones, are as good as equal.
TIE_RATIO, NO_DIFFERENCE_RATIO = 0.001, 0.01


class Found(NamedTuple):
    """What a search measured.

    Attributes
    ----------
    records : dict of int to Record
        By place among the candidates.
    local : (int, Record) or None
        Of the candidate that is best for compute-then-copy, with stores to its own memory.
    refused : dict of int to str
        Candidates that the device does not run, and why.
    expected_s : float array
        What the law says, corrected by how far off it was at the measured candidates near by.
    n_hopeful : int
        Candidates that were not measured and may be faster by the law's error.
    """

    records: dict[int, Record]
    local: tuple[int, Record] | None
    refused: dict[int, str]
    expected_s: Floats
    n_hopeful: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A candidate, what the law says of it, and what was measured.

    Attributes
    ----------
    predicted_s, expected_s, measured_s : float
        Time of all the work that was asked for: by the law alone, corrected by its errors at
        what was measured, and measured; NaN where it was not measured.
    record : Record or None
    """

    choice: Choice
    predicted_s: float
    expected_s: float
    measured_s: float
    prediction: Prediction
    record: Record | None

    @property
    def time_s(self) -> float:
        """Measured time, else the expected one."""
        return self.expected_s if math.isnan(self.measured_s) else self.measured_s

    @property
    def badge(self) -> str:
        """What `time_s` is."""
        return "PREDICTED" if self.record is None else str(self.record.provenance["badge"])


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best configuration of a space, and how sure that is.

    Attributes
    ----------
    best : Outcome
    runner_up : Outcome or None
        The next that is not as good as equal, or else the next; None where there is no other.
    margin_ratio : float
        By what the runner-up takes longer; NaN where there is none.
    fuse_gain_ratio : float
        The best compute-then-copy over the best, minus 1; NaN where nothing is remote.
    fuse : str
        The same in words.
    explain : list of str
        Why this one wins, and what limits the others.
    n_measured, n_candidates : int
    excluded : dict of str to int
        Limits in words, and how many configurations each excludes.
    provenance : dict
        `predicted` and, where something was measured, `measured`.
    """

    best: Outcome
    runner_up: Outcome | None
    margin_ratio: float
    fuse_gain_ratio: float
    fuse: str
    explain: list[str]
    n_measured: int
    n_candidates: int
    excluded: dict[str, int]
    provenance: dict[str, Any]

    @property
    def badges(self) -> list[str]:
        """What the answer rests on."""
        supposed = ["ASSUMED"] * bool(self.best.prediction.calibration.assumed)
        return list(dict.fromkeys(["PREDICTED", *supposed, self.best.badge]))


def measured_times(of: Candidates, records: Mapping[int, Record]) -> Floats:
    """Measured times of all the work, NaN where not measured; shape (n,) (s).

    Where a device cannot see the last byte arrive, it is the time to the last acceptance.
    """
    times = np.full(len(of), np.nan)
    for i, record in records.items():
        total = record.summary["total_s"]
        times[i] = record.summary["accepted_s"] if math.isnan(total) else total
    return times * of.work_ratio


def answer(of: Candidates, machine: MachineSpec, calibrations: Mapping[str, Calibration],
           found: Found) -> Answer:
    """Make an answer of what was predicted and measured."""
    measured = measured_times(of, found.records)
    unknown = np.isnan(measured)
    time = np.where(unknown, found.expected_s, measured)
    time[list(found.refused)] = np.inf
    preference = of.preference()
    order = np.lexsort((preference, time.round(15), unknown))  # measured ones first
    order = order[:len(of) - len(found.refused)]
    tie = TIE_RATIO if found.records else NO_DIFFERENCE_RATIO
    near = (unknown == unknown[order[0]]) & (time <= (1 + tie) * time[order[0]])
    first = np.flatnonzero(near)[np.argmin(preference[near])]
    behind = order[(time > (1 + tie) * time[first])[order]]

    def outcome(i: int) -> Outcome:
        choice = of.choice(i)
        prediction = predict(choice.workload, machine, calibrations[choice.store_path],
                             choice.tuning)
        return Outcome(
            choice=choice, predicted_s=float(of.total_s[i]), expected_s=float(found.expected_s[i]),
            measured_s=float(measured[i]), prediction=prediction, record=found.records.get(i))

    best = outcome(int(first))
    others = behind if behind.size else order[order != first]
    second = outcome(int(others[0])) if others.size else None
    margin = math.nan if second is None else second.time_s / best.time_s - 1.0
    fused_s, unfused_s, copy_s, said = _unfused(of, machine, calibrations, found, best)
    excluded = of.excluded | Counter(found.refused.values())
    origin = {"predicted": best.prediction.provenance}
    if best.record is not None:
        origin["measured"] = best.record.provenance
    return Answer(
        best=best, runner_up=second, margin_ratio=margin,
        fuse_gain_ratio=unfused_s / fused_s - 1.0 if copy_s else math.nan,
        fuse=f"{fuse_words(fused_s, unfused_s, copy_s)}{said}",
        explain=[_first(best, order.size, int(near.sum()) - 1, tie),
                 explain(best.prediction)[0],
                 *_second(best, second, margin), *_others(of, int(first), order),
                 *_left_out(excluded), *_searched(of, measured, found)],
        n_measured=len(found.records) + (found.local is not None), n_candidates=order.size,
        excluded=excluded, provenance=origin)


def _unfused(of: Candidates, machine: MachineSpec, calibrations: Mapping[str, Calibration],
             found: Found, best: Outcome) -> tuple[float, float, float, str]:
    """Time of the best, of the best compute-then-copy and of its copy alone; and what they are."""
    copy_s = best.prediction.unfused["copy_s"]
    if found.local is None or best.record is None:
        unfused_s = np.delete(of.unfused_s, list(found.refused)).min()
        return best.predicted_s, float(unfused_s), copy_s, " Both are PREDICTED."
    i, record = found.local
    choice = of.choice(i)
    copy = predict(choice.workload, machine, calibrations[choice.store_path],
                   choice.tuning).unfused["copy_s"]
    said = (f" Its compute ({choice.label()}) is {record.provenance['badge']}, its copy PREDICTED.")
    fused_s = best.measured_s
    if math.isnan(best.record.summary["total_s"]):  # nobody saw the last byte arrive
        law = best.prediction.summary
        fused_s += best.predicted_s * (1.0 - law["accepted_s"] / law["total_s"])
    return (fused_s, float(of.work_ratio[i]) * (record.summary["accepted_s"] + copy),
            copy_s, said)


def _first(best: Outcome, n: int, n_ties: int, tie: float) -> str:
    known = "" if best.record is None else f" {best.badge}, {text('_s', best.predicted_s)}"
    ties = (f" {n_ties:,} more are as fast to {tie:.1%}; of equals the largest tile at the least "
            "depth is named, as operand traffic is not modelled." if n_ties else "")
    return (f"The best of {n:,} is {best.choice.label()}: {text('_s', best.time_s)}{known} "
            f"PREDICTED.{ties}")


def _second(best: Outcome, second: Outcome | None, margin: float) -> list[str]:
    if second is None:
        return []
    regime = second.prediction.regime
    corrected = second.record is None and abs(second.expected_s / second.predicted_s - 1) > 5e-3
    name = (f"Runner-up: {second.choice.label()}, {text('_s', second.time_s)} "
            + (f"expected (PREDICTED {text('_s', second.predicted_s)}, corrected by the errors "
               "seen)" if corrected else second.badge))
    if abs(margin) < NO_DIFFERENCE_RATIO:
        return [f"{name}, no slower to speak of ({margin:.1%})."]
    return [f"{name}, {margin:.1%} slower" + (f"; it is {regime}." if
            regime != best.prediction.regime else f" and {regime} too.")]


def _others(of: Candidates, best: int, order: Counts) -> list[str]:
    others = order[order != best]
    if not others.size:
        return []
    counts = Counter(of.regime[others].tolist()).most_common()
    half = float(np.median(of.total_s[others])) / float(of.total_s[best])
    return [f"The others: {', '.join(f'{n:,} {name}' for name, n in counts)}; half of them take "
            f"{half:.2f} times as long or longer (PREDICTED)."]


def _left_out(excluded: Mapping[str, int]) -> list[str]:
    return [f"Left out: {n:,} ({reason.rstrip('.')})." for reason, n in excluded.items()]


def _searched(of: Candidates, measured: Floats, found: Found) -> list[str]:
    known = list(found.records)
    if not known:
        return ["Nothing was measured: the law alone says so."]
    error = np.abs(of.total_s[known] / measured[known] - 1.0)
    rest = ("" if len(known) + len(found.refused) == len(of) else
            f"; {found.n_hopeful:,} of the others might still be faster by the law's error, and a "
            "larger budget would tell." if found.n_hopeful else
            "; none of the others is expected to be faster.")
    return [f"{len(known)} of {len(of):,} were measured; the law was off by "
            f"{np.median(error):.1%} in the median and {error.max():.1%} at most{rest or '.'}"]
