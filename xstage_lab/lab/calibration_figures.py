"""What the figures of a calibration show of its samples, and of the fit once it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab.analysis import Calibration, Sample
from xstage_lab.analysis.fit import burst_end
from xstage_lab.plots.calibration import Fitted

Columns = dict[str, Any]
Floats = NDArray[np.float64]


def chosen(samples: Sequence[Sample], *experiments: str) -> tuple[Floats, Floats, Floats]:
    """K, B and value of the samples of some experiments, arrays of shape (n,)."""
    rows = [(s.n_producers, s.burst_bytes, s.value_s) for s in samples
            if s.experiment in experiments]
    k, size, value = np.array(rows, dtype=float).reshape(-1, 3).T
    return k, size, value


def drain_rate(plot: Fitted, samples: Sequence[Sample], found: Calibration | None,
               badge: str) -> None:
    """Store rate of the zero-gap trains against V, and R."""
    k, size, value = chosen(samples, "zero-gap")
    _draw(plot, k * size, k * size / value, badge, found, lambda c, _: c.drain_bytes_per_s)


def backlog(plot: Fitted, samples: Sequence[Sample], found: Calibration | None,
            badge: str) -> None:
    """What isolated bursts leave in the path, V - R (span - t0), against V, and Q."""
    end = "" if found is None else burst_end(samples)
    k, size, value = chosen(samples, f"isolated{end}")
    rate, latency = _rate(samples), 0.0
    if found is not None:
        rate, latency = found.drain_bytes_per_s, found.issue_latency_s
    held = np.maximum(k * size - rate * (value - latency), 0.0)
    _draw(plot, k * size, held, badge, found,
          lambda c, v: np.minimum(c.capacity_bytes, v) if np.isfinite(c.capacity_bytes) else np.nan)


def plateau(plot: Fitted, samples: Sequence[Sample], found: Calibration | None,
            badge: str) -> None:
    """Issue time at large gaps against B, and t0 + B / r_SM."""
    _, size, value = chosen(samples, "plateau")
    _draw(plot, size, value, badge, found,
          lambda c, b: c.issue_latency_s + b / c.per_sm_bytes_per_s)


def fewer_producers(plot: Fitted, samples: Sequence[Sample], found: Calibration | None,
                    badge: str) -> None:
    """Q against K: as calibrated, along the curve measured at fewer producers."""
    if found is None or not found.capacity_curve_bytes:
        plot.update(badges="Q at fewer producers is fitted when all trains are done")
        return
    points = [*found.capacity_curve_bytes, (found.n_producers, found.capacity_bytes)]
    k, held = np.array(points, dtype=float).T
    along = np.arange(1, found.n_producers + 1)
    measured: Columns = {"n_producers": k, "capacity_bytes": held, "badge": [badge] * k.size}
    fit: Columns = {"n_producers": along,
                    "capacity_bytes": [found.capacity_at(int(n)) for n in along]}
    plot.update(measured, fit, badges=found.source)


def _rate(samples: Sequence[Sample]) -> float:
    k, size, value = chosen(samples, "zero-gap")
    return float(np.max(k * size / value)) if k.size else np.nan


def _draw(plot: Fitted, x: Floats, y: Floats, badge: str, found: Calibration | None,
          law: Callable[[Calibration, Floats], Any]) -> None:
    measured: Columns = {plot.x: x, plot.y: y, "badge": [badge] * x.size}
    if found is None or not x.size:
        plot.update(measured, badges=badge)
        return
    along = np.linspace(0, float(x.max()) * 1.05, 60)[1:]
    fast, slow = found.ends()
    curves = [{plot.x: along, plot.y: np.broadcast_to(law(c, along), along.shape)}
              for c in (found, fast, slow)]
    plot.update(measured, *curves, badges=f"{badge}; {found.source}")
