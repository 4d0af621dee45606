"""The fit behind a calibration: t0, r_SM, R and Q(K) from samples, with intervals and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab.analysis.calibration import Sample

Floats = NDArray[np.float64]

N_BOOTSTRAP = 400
BLOCKED_SHARE = 0.25      # of what being blocked can add to a span: past the knee
OUTLIER_MADS = 6.0        # trains further off than this are left out
SPLITS_RATIO, DRIFT_RATIO, CONTROL_RATIO, ISSUE_BOUND_RATIO = 1.03, 1.05, 0.1, 1.03
FEWEST_PAST_KNEE = 3
FULL_RATIO = 0.97         # of the largest backlog: sizes that fill all there is
OWN_LIMIT_RATIO = 1.1     # fewer producers hold so much less, about: it is each SM's own limit


class Fit(NamedTuple):
    """The law's parameters as fitted; `capacity_bytes` is inf where no burst was blocked."""

    issue_latency_s: float
    per_sm_bytes_per_s: float
    drain_bytes_per_s: float
    capacity_bytes: float
    capacity_curve_bytes: tuple[tuple[int, float], ...]


class _Arrays(NamedTuple):
    """Samples of one experiment as arrays."""

    k: Floats
    size: Floats
    value: Floats

    def pick(self, index: NDArray[np.intp]) -> _Arrays:
        return _Arrays(*(column[index] for column in self))


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit all parameters to the samples of a calibration."""
    latency, per_sm, drain, held = _parameters(*_groups(samples))
    fewer = _arrays(samples, f"fewer producers{burst_end(samples)}")
    curve = []
    for k in sorted(set(fewer.k)):
        backlog = _backlogs(fewer.pick(np.flatnonzero(fewer.k == k)), latency, per_sm, drain)
        if backlog.size:
            curve.append((int(k), float(backlog.mean())))
    return Fit(latency, per_sm, drain, held, tuple(curve))


def intervals(samples: Sequence[Sample], coverage: float = 0.9) -> list[tuple[float, float]]:
    """Return an interval for each of t0, r_SM, R and Q.

    Of the plateau whole trains are drawn (bootstrap), widened for the few degrees of freedom. R
    and Q are means over splits and over sizes of burst; trains of one kind share what it does to
    the rate, so that it is the kinds that are taken as drawn, with Student's t for so few.
    """
    zero_gap, plateau, isolated = _groups(samples)
    latency, per_sm, drain, held = _parameters(zero_gap, plateau, isolated)
    n, p = plateau.k.size, 2
    student = _student(coverage, max(n - p, 1))
    wider = np.sqrt(n / max(n - p, 1)) * student / _student(coverage, 1e9)
    rng = np.random.default_rng(0)
    drawn = np.array([
        _line(*plateau.pick(rng.integers(0, plateau.k.size, plateau.k.size))[1:])
        for _ in range(N_BOOTSTRAP)])
    found = []
    for value, line, least in ((latency, drawn[:, 0], 0.0), (per_sm, drawn[:, 1], 1e-3 * per_sm)):
        low, high = np.quantile(line - value, (0.5 - coverage / 2, 0.5 + coverage / 2)) * wider
        found.append((max(value + float(low), least), value + float(high)))
    rate, blocked = _rates(zero_gap, latency, per_sm)
    rate, kinds = (rate[blocked], zero_gap.pick(np.flatnonzero(blocked))) if blocked.any() else (
        rate, zero_gap)
    of_split = [_center(rate[(kinds.k == k) & (kinds.size == b)])
                for k, b in set(zip(kinds.k, kinds.size, strict=True))]
    found.append(_spread(drain, of_split, coverage, 1e-3 * drain))
    found.append(_spread(held, _full(isolated, latency, per_sm, drain), coverage, 0.0))
    return found


def _spread(value: float, of_kind: Sequence[float] | Floats, coverage: float,
            least: float) -> tuple[float, float]:
    """Interval of a mean over kinds of train; just the value where there is one kind."""
    n = len(of_kind)
    if n < 2:
        return value, value
    half = float(np.std(of_kind, ddof=1)) / np.sqrt(n) * _student(coverage, n - 1)
    return max(value - half, least), value + half


def _student(coverage: float, freedom: float) -> float:
    from scipy import stats
    return float(stats.t.ppf(0.5 + coverage / 2, freedom))


def checks(samples: Sequence[Sample], found: Fit, vendor_bytes_per_s: float,
           ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say in words what to know of a calibration, and what voids it."""
    notes, faults = [], []
    zero_gap = _arrays(samples, "zero-gap")
    rate, blocked = _rates(zero_gap, found.issue_latency_s, found.per_sm_bytes_per_s)
    splits = [rate[same & blocked].mean() for k, b in set(zip(zero_gap.k, zero_gap.size,
                                                              strict=True))
              if (same := (zero_gap.k == k) & (zero_gap.size == b)).any()
              and (same & blocked).any()]
    if not blocked.any():
        notes.append("zero-gap trains never filled the path: the producers limit, the drain "
                     "rate is at least what is given, and the capacity cannot be seen")
    elif max(splits) > SPLITS_RATIO * min(splits):
        faults.append(f"splits of one volume disagree on the drain rate by "
                      f"{max(splits) / min(splits) - 1:.0%}: fewer producers may not fill the "
                      "path, or it is not the path that limits")
    same = (zero_gap.k == zero_gap.k[-1]) & (zero_gap.size == zero_gap.size[-1])
    drift = rate[same][-1] / rate[same][0]
    if max(drift, 1 / drift) > DRIFT_RATIO:
        faults.append(f"the drain rate drifted by {drift - 1:+.0%} between the first repeat and "
                      "the last: something else used the machine")
    isolated = _arrays(samples, "isolated")
    past = int(_past_knee(isolated, found.issue_latency_s, found.per_sm_bytes_per_s,
                          found.drain_bytes_per_s).sum())
    if not np.isfinite(found.capacity_bytes) and blocked.any():
        notes.append("no burst was blocked: the capacity is larger than any burst tried")
    elif past < FEWEST_PAST_KNEE and blocked.any():
        faults.append(f"only {past} bursts lie past the knee: the capacity is a guess")
    control = _arrays(samples, "control")
    if control.k.size == 2:  # own memory may block too, but far less than the path does
        free = found.issue_latency_s + control.size[0] / found.per_sm_bytes_per_s
        remote = max(control.k[0] * control.size[0] / found.drain_bytes_per_s - free, free)
        share = (control.value[0] - control.value[1]) / remote
        if share > CONTROL_RATIO:
            faults.append(f"without a gap the local-store control is blocked too, {share:.0%} of "
                          "what the remote path blocks: it is not the remote path alone that is "
                          "measured")
    if found.drain_bytes_per_s > vendor_bytes_per_s:  # never so where that is not known
        faults.append(f"the drain rate of {found.drain_bytes_per_s / 1e9:.0f} GB/s is above the "
                      f"{vendor_bytes_per_s / 1e9:.0f} GB/s the link is marketed with")
    return tuple(notes), tuple(faults)


def _arrays(samples: Sequence[Sample], experiment: str) -> _Arrays:
    rows = [(s.n_producers, s.burst_bytes, s.value_s) for s in samples
            if s.experiment == experiment]
    return _Arrays(*np.array(rows, dtype=float).reshape(-1, 3).T)


def free_issue(samples: Sequence[Sample]) -> tuple[float, float]:
    """Start-up t0 and issue rate r_SM of one SM, from the plateau."""
    plateau = _arrays(samples, "plateau")
    return _line(plateau.size, plateau.value)


def _groups(samples: Sequence[Sample]) -> list[_Arrays]:
    """What is fitted to: zero-gap trains, the plateau, and bursts past the knee."""
    isolated = _arrays(samples, f"isolated{burst_end(samples)}")
    return [_arrays(samples, "zero-gap"), _arrays(samples, "plateau"), _repeated(isolated)]


def burst_end(samples: Sequence[Sample]) -> str:
    """Which end of a burst tells Q: `, last` acceptance or `, mean` span; empty if it has none.

    Producers that issued faster while the path still had room are done sooner. Where the path is
    shared, the others then get their share, and the last acceptance is when V - Q has drained.
    Where each SM's own limit stops it, nobody gets more, and the mean is. Fewer producers tell
    the two apart: they hold as much, or less in proportion.
    """
    zero_gap, whole, fewer = (_arrays(samples, name) for name in (
        "zero-gap", "isolated, last", "fewer producers, last"))
    if not whole.k.size or not zero_gap.k.size:
        return ""
    latency, per_sm = free_issue(samples)
    drain = _center(_rates(zero_gap, latency, per_sm)[0])
    held = _backlogs(whole, latency, per_sm, drain)
    for k in sorted(set(fewer.k), reverse=True):
        by_fewer = _backlogs(fewer.pick(np.flatnonzero(fewer.k == k)), latency, per_sm, drain)
        if by_fewer.size and held.size:
            share = np.median(by_fewer) / np.median(held)
            return ", mean" if share < OWN_LIMIT_RATIO * k / whole.k[0] else ", last"
    return ", last"


def _repeated(bursts: _Arrays) -> _Arrays:
    """Bursts of sizes that were run most often: those that looked for the knee ran once."""
    count = np.array([(bursts.size == b).sum() for b in bursts.size])
    return bursts.pick(np.flatnonzero(count >= min(count.max() - 1, 2)))


def _parameters(zero_gap: _Arrays, plateau: _Arrays,
                isolated: _Arrays) -> tuple[float, float, float, float]:
    latency, per_sm = _line(plateau.size, plateau.value)
    rate, blocked = _rates(zero_gap, latency, per_sm)
    if not blocked.any():  # R is at least the best rate, and nothing ever met Q
        return latency, per_sm, float(rate.max()), float("inf")
    drain = _center(rate[blocked])
    full = _full(isolated, latency, per_sm, drain)
    return latency, per_sm, drain, float(full.mean()) if full.size else float("inf")


def _full(isolated: _Arrays, latency: float, per_sm: float, drain: float) -> Floats:
    """Q as each size of burst gives it that fills all there is, its repeats averaged.

    Right past the knee buffers at the destination may still fill, so that a burst shows less than
    the path holds.
    """
    backlog = _backlogs(isolated, latency, per_sm, drain)
    size = isolated.size[_past_knee(isolated, latency, per_sm, drain)]
    of_size: Floats = np.array([_center(backlog[size == b]) for b in set(size)])
    most = of_size.max(initial=0.0)
    return np.asarray(of_size[of_size >= FULL_RATIO * most])


def _rates(zero_gap: _Arrays, latency: float, per_sm: float,
           ) -> tuple[Floats, NDArray[np.bool_]]:
    """Store rate of each zero-gap train, and whether the path and not the issue set it."""
    free = latency + zero_gap.size / per_sm
    return zero_gap.k * zero_gap.size / zero_gap.value, zero_gap.value > ISSUE_BOUND_RATIO * free


def _backlogs(bursts: _Arrays, latency: float, per_sm: float, drain: float) -> Floats:
    """Q as each burst past the knee gives it, V - R (span - t0) (bytes)."""
    past = _past_knee(bursts, latency, per_sm, drain)
    return np.maximum((bursts.k * bursts.size - drain * (bursts.value - latency))[past], 0.0)


def _past_knee(bursts: _Arrays, latency: float, per_sm: float,
               drain: float) -> NDArray[np.bool_]:
    """Whether bursts took longer than free, by enough of the most that being blocked can add.

    Far past the knee a span is K r_SM / R times the free one, which may be little more.
    """
    most = bursts.k * per_sm / drain
    span_free = latency + bursts.size / per_sm
    slow = 1.0 + BLOCKED_SHARE * np.clip(most - 1.0, 0.0, 1.0)
    return np.asarray((most > ISSUE_BOUND_RATIO) & (bursts.value > slow * span_free))


def _center(values: Floats) -> float:
    """Mean without outliers: trains are means already, and near normal but for disturbances."""
    off = np.abs(values - np.median(values))
    kept = off <= OUTLIER_MADS * 1.4826 * np.median(off)
    return float(values[kept].mean()) if kept.any() else float(np.median(values))


def _line(size: Floats, span: Floats) -> tuple[float, float]:
    """Fit span = t0 + B / r, robust against outliers, t0 not negative; return (t0, r)."""
    weight = 1 / span  # errors are relative
    for _ in range(3):
        slope, latency = np.polyfit(size, span, 1, w=weight) if np.ptp(size) else (0.0, 0.0)
        if latency <= 1e-9 * span.max() or slope <= 0:
            latency, slope = 0.0, float(np.average(span / size, weights=weight * span))
        off = np.abs(span / (latency + slope * size) - 1)
        kept = off <= OUTLIER_MADS * 1.4826 * np.median(off) + 1e-9
        weight = np.where(kept, 1 / span, 1e-9 / span)
    return float(latency), float(1 / slope)
