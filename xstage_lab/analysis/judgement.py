"""Many comparisons in one verdict: does the law explain these runs, and if not, by how much?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xstage_lab.analysis.comparison import Comparison
from xstage_lab.errors import XStageError

MEDIAN_ALLOWED, P95_ALLOWED, FEWEST_RUNS = 0.10, 0.30, 5


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What comparisons say of a law.

    Attributes
    ----------
    n_runs : int
        Runs for which both sides hold `key`.
    bias_ratio, median_ratio, p95_ratio : float
        Mean error; median and 95th percentile of its size.
    coverage_ratio : float
        Share of measurements inside the predicted band; NaN where no prediction has one.
    regimes_right_ratio : float
        Share of regimes named as the record itself names them; NaN where it names none.
    explained : bool
        Median and 95th percentile within what is allowed.
    words : str
    """

    key: str
    n_runs: int
    bias_ratio: float
    median_ratio: float
    p95_ratio: float
    coverage_ratio: float
    regimes_right_ratio: float
    explained: bool
    words: str


def judge(comparisons: Sequence[Comparison], key: str = "accepted_s") -> Verdict:
    """Judge the law by all `comparisons` at once, over one key of the summaries.

    Raises
    ------
    XStageError
        If fewer than 5 runs hold the key on both sides: a law passes too easily there.
    """
    held = [c for c in comparisons if not math.isnan(c.error_ratio[key])]
    if len(held) < FEWEST_RUNS:
        raise XStageError(f"only {len(held)} runs hold both a predicted and a measured {key}; "
                          f"measure at least {FEWEST_RUNS} before judging a law by them.")
    error = np.array([c.error_ratio[key] for c in held])
    median, p95 = (float(np.quantile(np.abs(error), q)) for q in (0.5, 0.95))
    inside = [c.low[key] <= c.measured[key] <= c.high[key] for c in held
              if c.high[key] > c.low[key]]
    right = [c.regime == c.regime_measured for c in held if c.regime_measured]
    explained = median <= MEDIAN_ALLOWED and p95 <= P95_ALLOWED
    worst = held[int(np.argmax(np.abs(error)))]
    words = (f"The law explains these {len(held)} runs" if explained else
             f"The law does not explain these {len(held)} runs")
    words += f": {key} is off by {median:.1%} in the median and {p95:.1%} at the 95th percentile"
    if not explained:
        words += (f", worst by {error[np.argmax(np.abs(error))]:+.0%} where it says "
                  f"{worst.regime}; on average it is {abs(error.mean()):.0%} too "
                  f"{'slow' if error.mean() > 0 else 'fast'}")
    return Verdict(
        key=key, n_runs=len(held), bias_ratio=float(error.mean()), median_ratio=median,
        p95_ratio=p95, coverage_ratio=float(np.mean(inside)) if inside else math.nan,
        regimes_right_ratio=float(np.mean(right)) if right else math.nan, explained=explained,
        words=f"{words}.")
