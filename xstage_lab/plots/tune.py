"""Figures for choosing a tile and a depth: totals, curves over a setting, a map, residuals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    DataRange1d,
    FactorRange,
    LinearColorMapper,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.models.annotations import ColorBar
from bokeh.palettes import Cividis256
from bokeh.transform import factor_cmap
from numpy.typing import ArrayLike, NDArray

from xstage_lab import units
from xstage_lab.plots.base import Plot
from xstage_lab.plots.style import (
    COMPUTE,
    DRAIN,
    INFEASIBLE,
    INK,
    ISSUE,
    MEASURED,
    MUTED,
    PAPER,
    PREDICTED,
    UNFUSED,
    add_hover,
    add_measured,
    label,
    new_figure,
    shown,
)
from xstage_lab.record import SUMMARY_KEYS

Columns = Mapping[str, ArrayLike]


class TimeBars(Plot):
    """Total times as bars, a row for each, with lines for their lower bounds.

    Parameters
    ----------
    title : str
    rows : names of the rows from the bottom up
    bounds : colour and dash of each lower bound, by its column
    """

    def __init__(self, title: str, rows: Sequence[str],
                 bounds: Mapping[str, tuple[str, str]]) -> None:
        fig = new_figure(title, "total_s", "", height=280, legend_rows=1,
                         x_range=DataRange1d(start=0, range_padding=0.6),  # room for words
                         y_range=FactorRange(factors=list(rows)))
        super().__init__(fig)
        bars = self._add("times", "row", "part", "start_s", "end_s", "low_s", "high_s", "label")
        fills = {"PREDICTED": PREDICTED, "compute": COMPUTE, "copy": UNFUSED,
                 **{badge: fill for badge, (_, fill) in MEASURED.items()}}
        drawn = fig.hbar("row", 0.5, "end_s", "start_s", source=bars, line_color=INK,
                         fill_color=factor_cmap("part", list(fills.values()), list(fills)))
        fig.segment("low_s", "row", "high_s", "row", source=bars, line_color=INK, line_width=3)
        fig.text("high_s", "row", "label", source=bars, x_offset=8, text_baseline="middle",
                 text_color=INK, text_font_size="12px")
        lines = self._add("bounds", *bounds)
        for column, (color, dash) in bounds.items():
            fig.vspan(column, source=lines, line_color=color, line_width=2.5, line_dash=dash,
                      legend_label=f"{column.removesuffix('_s')} bound")
        add_hover(fig, [drawn], ("row", "part", "start_s", "end_s", "low_s", "high_s"))


class TotalTimes(TimeBars):
    """Predicted, measured and unfused total time of one configuration, with the lower bounds."""

    name = "total-times"
    _ROWS = ("unfused", "measured", "predicted")

    def __init__(self) -> None:
        super().__init__("Total time: fused, or computed and then copied", self._ROWS, {
            "compute_s": (COMPUTE, "solid"), "issue_s": (ISSUE, "dashed"),
            "drain_s": (DRAIN, "dotdash")})

    def update(
        self, predicted_s: float, *, low_s: float = math.nan, high_s: float = math.nan,
        measured_s: float = math.nan, badge: str = "", unfused: Mapping[str, float] | None = None,
        bounds: Mapping[str, float] | None = None, badges: str = "",
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        predicted_s, low_s, high_s, measured_s : float
            Total times, seconds; NaN is not known and is not drawn.
        badge : str
            Of the measured time.
        unfused : mapping, optional
            `compute_s` and `copy_s`, one after the other.
        bounds : mapping, optional
            Lower bounds `compute_s`, `issue_s`, `drain_s` of the total, seconds.
        badges : str
            Where the numbers come from.
        """
        self._show("times", time_bars(self._ROWS, predicted_s, low_s, high_s, measured_s, badge,
                                      unfused or {}))
        self._show("bounds", bounds)
        self._say(badges)


def time_bars(rows: Sequence[str], predicted_s: float, low_s: float, high_s: float,
              measured_s: float, badge: str, unfused: Mapping[str, float]) -> dict[str, Any]:
    """Return as columns the bars of one configuration: unfused, measured and predicted.

    Parameters
    ----------
    rows : their names, in this order
    """
    compute, copy = (unfused.get(key, math.nan) for key in ("compute_s", "copy_s"))
    apart, measured, fused = rows
    ends = (predicted_s, measured_s, compute, compute + copy)
    return {
        "row": (fused, measured, apart, apart),
        "part": ("PREDICTED", badge, "compute", "copy"),
        "start_s": (0.0, 0.0, 0.0, compute),
        "end_s": ends,
        "low_s": (np.fmin(predicted_s, low_s), *ends[1:]),
        "high_s": (np.fmax(predicted_s, high_s), *ends[1:]),
        "label": (units.text("total_s", predicted_s),
                  f"{units.text('total_s', measured_s)} {badge}", "",
                  units.text("total_s", compute + copy)),
    }


class TotalCurve(Plot):
    """Total time against one setting: issue depth, tile, GPU count."""

    name = "total-against-setting"

    def __init__(self) -> None:
        self._settings = FactorRange()
        fig = new_figure("Total time against one setting", "", "total_s", x_range=self._settings)
        super().__init__(fig)
        self._axis = fig.xaxis
        curve = self._add("predicted", "setting", "total_s", "low_s", "high_s", "unfused_s")
        fig.varea("setting", "low_s", "high_s", source=curve, fill_color=PREDICTED,
                  fill_alpha=0.15, legend_label="predicted, Q unknown")
        unfused = fig.line("setting", "unfused_s", source=curve, color=UNFUSED, line_width=4,
                           legend_label="unfused")
        line = fig.line("setting", "total_s", source=curve, color=PREDICTED, line_width=2.5,
                        legend_label="predicted")
        dots = fig.scatter("setting", "total_s", source=curve, color=PREDICTED, size=5)
        measured = self._add("measured", "setting", "total_s", "badge")
        add_hover(fig, [unfused, line, dots], list(curve.data), heading="PREDICTED")
        add_hover(fig, [add_measured(fig, "setting", "total_s", measured)],
                  ("badge", "setting", "total_s"))

    def update(
        self, curve: Columns, measured: Columns | None = None, *, setting: str = "",
        badges: str = "",
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        curve : mapping
            `setting` (n values in the order to draw, shown as text), the prediction `total_s`,
            its band `low_s` and `high_s`, and `unfused_s`, seconds; NaN where infeasible.
        measured : mapping, optional
            `setting`, `total_s`, `badge`; see `points`.
        setting : str
            What is varied, in words with its unit: the label of the axis.
        badges : str
            Where the numbers come from.
        """
        set_factors(self._settings, np.asarray(curve["setting"], str).tolist())
        self._axis.axis_label = setting
        self._show("predicted", curve)
        self._show("measured", measured)
        self._say(badges)


class TileMap(Plot):
    """Predicted total time over tile and issue depth; what cannot run is hatched."""

    name = "tile-depth-map"

    def __init__(self) -> None:
        self._tiles, self._depths = FactorRange(), FactorRange()
        fig = new_figure("Predicted total time over tile and depth", "", "",
                         height=360, legend_rows=1,
                         x_range=self._tiles, y_range=self._depths)
        super().__init__(fig)
        fig.xaxis.axis_label, fig.yaxis.axis_label = "tile m × n", "issue depth"
        fig.xaxis.major_label_orientation = 0.7
        fig.grid.grid_line_color = None
        self._colors = LinearColorMapper(palette=Cividis256[::-1])
        place = ("tile", "depth", "tile_m", "tile_n", "issue_depth")
        cells = self._add("map", *place, "total_s")
        drawn = fig.rect("tile", "depth", 1, 1, source=cells, line_color=PAPER,
                         fill_color={"field": "total_s", "transform": self._colors})
        closed = self._add("infeasible", *place, "reason")
        shut = fig.rect("tile", "depth", 1, 1, source=closed, fill_color=INFEASIBLE,
                        line_color=PAPER, hatch_pattern="/", hatch_color=MUTED, hatch_alpha=0.6,
                        legend_label="cannot run")
        best = self._add("best", *place, "total_s")
        fig.rect("tile", "depth", 1, 1, source=best, fill_color=None, line_color=INK,
                 line_width=4, legend_label="predicted best")
        points = self._add("measured", *place, "total_s", "badge")
        measured = add_measured(fig, "tile", "depth", points)
        fig.add_layout(ColorBar(color_mapper=self._colors, width=12, title=label("total_s"),
                                background_fill_color=PAPER, title_text_font_style="normal",
                                formatter=NumeralTickFormatter(format="0,0.[000]")), "right")
        add_hover(fig, [drawn], (*place[2:], "total_s"), heading="PREDICTED")
        add_hover(fig, [shut], (*place[2:], "reason"), heading="cannot run")
        add_hover(fig, [measured], ("badge", *place[2:], "total_s"))

    def update(
        self, tile_m: ArrayLike, tile_n: ArrayLike, issue_depth: ArrayLike, total_s: ArrayLike,
        reason: ArrayLike = "", measured: Columns | None = None, *, badges: str = "",
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        tile_m, tile_n, issue_depth : arrays of int
        total_s : array
            Predicted seconds, NaN where infeasible.
        reason : array of str
            Why a cell is infeasible. All five broadcast against each other.
        measured : mapping, optional
            `tile_m`, `tile_n`, `issue_depth`, `total_s`, `badge` of each measured point.
        badges : str
            Where the numbers come from; the best cell is named before it.
        """
        m, n, depth, total, why = (np.ravel(column) for column in np.broadcast_arrays(
            tile_m, tile_n, issue_depth, np.asarray(total_s, np.float64), reason))
        cells = {"tile": _tiles(m, n),
                 "depth": depth.astype(str), "tile_m": m, "tile_n": n, "issue_depth": depth,
                 "total_s": total, "reason": why}
        by_area = np.lexsort((n, m, m.astype(np.int64) * n))
        set_factors(self._tiles, cells["tile"][by_area].tolist())
        set_factors(self._depths, [str(d) for d in np.unique(depth)])

        def chosen(which: Any, without: str) -> dict[str, NDArray[Any]]:
            return {name: column[which] for name, column in cells.items() if name != without}

        feasible = np.isfinite(total)
        best = [_best(total, m.astype(np.int64) * n, depth)] if feasible.any() else []
        self._show("map", chosen(feasible, "reason"))
        self._show("infeasible", chosen(~feasible, "total_s"))
        self._show("best", chosen(best, "reason"))
        self._show("measured", measured and dict(measured) | {
            "tile": _tiles(measured["tile_m"], measured["tile_n"]),
            "depth": np.asarray(measured["issue_depth"]).astype(str)})
        if best:
            scale = shown("total_s").scale
            self._colors.update(low=total[best[0]] * scale, high=np.nanmax(total) * scale)
        found = [f"best: {cells['tile'][i]}, depth {depth[i]}"
                 for i in best] or ["nothing here can run"]
        self._say("; ".join(filter(None, [*found, badges])))


class Residuals(Plot):
    """How far predictions were off, a point per run and quantity (stall share: difference)."""

    name = "residuals"

    def __init__(self) -> None:
        names = ("total time", "accepted", "period", "issue time", "stall share")
        fig = new_figure("Prediction against measurement", "", "error_ratio",
                         height=280, legend_rows=1,
                         x_range=Range1d(start=-0.5, end=len(names) - 0.5))
        super().__init__(fig)
        fig.xaxis.ticker = list(range(len(names)))
        fig.xaxis.major_label_overrides = dict(enumerate(names))
        fig.hspan([0], line_color=PREDICTED, line_width=2.5, legend_label="predicted")
        errors = self._add("measured", "place", "quantity", "error_ratio", "label", "badge")
        add_hover(fig, [add_measured(fig, "place", "error_ratio", errors)],
                  ("badge", "quantity", "error_ratio", "label"))

    def update(
        self, comparisons: Sequence[Any], badge: ArrayLike = "", *, labels: Sequence[str] = (),
        badges: str = "",
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        comparisons : sequence of Comparison
            As `analysis.compare` returns them, in the order of measurement.
        badge : str or sequence of str
            Of the measured records.
        labels : sequence of str
            What each run was, for the reader who points at it.
        badges : str
            Where the numbers come from.
        """
        n_runs, n_keys = len(comparisons), len(SUMMARY_KEYS)
        beside = (np.arange(n_runs) + 0.5) / max(n_runs, 1) - 0.5  # runs of a quantity, in order
        said = [f"{key}: predicted {units.text(key, c.predicted.get(key))}, measured "
                f"{units.text(key, c.measured.get(key))}" for c in comparisons
                for key in SUMMARY_KEYS]
        of_run = np.broadcast_to(labels if len(labels) else "", n_runs)
        self._show("measured", {
            "place": np.add.outer(0.6 * beside, np.arange(n_keys)).ravel(),
            "quantity": said,
            "error_ratio": [c.error_ratio.get(key, math.nan) for c in comparisons
                            for key in SUMMARY_KEYS],
            "label": np.repeat(of_run, n_keys),
            "badge": np.repeat(np.broadcast_to(badge, n_runs), n_keys),
        })
        self._say(badges)


def _tiles(m: ArrayLike, n: ArrayLike) -> NDArray[np.str_]:
    return np.array([f"{a}×{b}" for a, b in zip(np.ravel(m), np.ravel(n), strict=True)], str)


def _best(total: NDArray[Any], area: NDArray[Any], depth: NDArray[Any]) -> int:
    """Choose among the cells within 1 % of the fastest: the largest tile, then the least depth.

    A tie in predicted time is no reason for a small tile, whose operand traffic is not modelled.
    """
    near = np.flatnonzero(total <= 1.01 * np.nanmin(total))
    return int(near[np.lexsort((depth[near], -area[near]))[0]])


def set_factors(axis: FactorRange, names: Sequence[str]) -> None:
    """Set the names along an axis unless they are there already, which would redraw it all."""
    factors = list(dict.fromkeys(names))
    if axis.factors != factors:
        axis.factors = factors
