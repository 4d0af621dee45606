"""Figures of Ulysses attention: its modes side by side, and what is hidden along a setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import FactorRange, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from bokeh.transform import factor_cmap
from numpy.typing import ArrayLike

from xstage_lab import units
from xstage_lab.plots.base import Plot
from xstage_lab.plots.style import (
    COMPUTE,
    INFEASIBLE,
    INK,
    MUTED,
    PAPER,
    PREDICTED,
    UNFUSED,
    add_hover,
    add_measured,
    new_figure,
    shown,
)
from xstage_lab.plots.tune import set_factors

Columns = Mapping[str, ArrayLike]


class ModeTimes(Plot):
    """Total time in each mode, and how far it is beyond the attention alone."""

    name = "attention-modes"
    ROWS = ("compute-then-copy", "serial", "dedicated", "fused")  # from the bottom up

    def __init__(self) -> None:
        fig = new_figure("Attention and its output's all-to-all, by mode", "total_s", "",
                         legend_rows=1, x_range=Range1d(),
                         y_range=FactorRange(factors=list(self.ROWS)))
        super().__init__(fig)
        self._times = fig.x_range
        alone = self._add("alone", "compute_only_s")
        fig.vspan("compute_only_s", source=alone, line_color=COMPUTE, line_width=2.5,
                  legend_label="attention alone")
        bars = self._add("predicted", "row", "compute_only_s", "total_s", "low_s", "high_s",
                         "label")
        fills = [UNFUSED, *[PREDICTED] * (len(self.ROWS) - 1)]
        drawn = fig.hbar("row", 0.45, "total_s", "compute_only_s", source=bars, line_color=INK,
                         fill_color=factor_cmap("row", fills, list(self.ROWS)))
        fig.segment("low_s", "row", "high_s", "row", source=bars, line_color=INK, line_width=3)
        fig.text("high_s", "row", "label", source=bars, x_offset=9, text_baseline="middle",
                 text_color=INK, text_font_size="12px")
        shut = self._add("infeasible", "row", "compute_only_s", "label", "reason")
        words = fig.text("compute_only_s", "row", "label", source=shut, x_offset=9,
                         text_baseline="middle", text_color=MUTED, text_font_size="12px")
        measured = self._add("measured", "row", "total_s", "badge")
        add_hover(fig, [drawn], ("row", "total_s", "low_s", "high_s", "compute_only_s"),
                  heading="PREDICTED")
        add_hover(fig, [words], ("row", "reason"), heading="cannot run")
        add_hover(fig, [add_measured(fig, "total_s", "row", measured)],
                  ("badge", "row", "total_s"))

    def update(self, predicted: Columns, compute_only_s: float, measured: Columns | None = None,
               *, badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        predicted : mapping
            `row` (of `ROWS`), `total_s`, its band `low_s` and `high_s`, seconds; NaN where the
            mode cannot run, and `reason` then says why.
        compute_only_s : float
            Of the attention alone.
        measured : mapping, optional
            `row`, `total_s`, `badge`.
        badges : str
            Where the numbers come from.
        """
        row, reason = (np.asarray(predicted[name], str) for name in ("row", "reason"))
        total, low, high = (np.broadcast_to(np.asarray(predicted[name], np.float64), row.shape)
                            for name in ("total_s", "low_s", "high_s"))
        runs, alone = np.isfinite(total), np.full(total.size, compute_only_s)
        ends = np.append(np.fmax(total, high)[runs], compute_only_s) * shown("total_s").scale
        span = max(np.ptp(ends), 0.01 * ends.max())
        self._times.update(start=ends.min() - 0.1 * span, end=ends.max() + 0.7 * span)  # for words
        self._show("alone", {"compute_only_s": compute_only_s})
        self._show("predicted", {
            "row": row[runs], "compute_only_s": alone[runs], "total_s": total[runs],
            "low_s": np.fmin(total, low)[runs], "high_s": np.fmax(total, high)[runs],
            "label": [f"{units.text('_s', t)} (+{units.text('_s', t - compute_only_s)})"
                      for t in total[runs]]})
        self._show("infeasible", {"row": row[~runs], "compute_only_s": alone[~runs],
                                  "label": ["cannot run"] * int((~runs).sum()),
                                  "reason": reason[~runs]})
        self._show("measured", measured)
        self._say(badges)


class HiddenCurve(Plot):
    """Times along a setting above, and the share of the all-to-all that is hidden below."""

    _TITLE, _SETTING = "", ""
    _LINES: Mapping[str, tuple[str, float, str, str]] = {
        "step_unfused_s": (UNFUSED, 4, "solid", "whole step, unfused"),
        "step_s": (PREDICTED, 2.5, "solid", "whole step"),
        "total_s": (PREDICTED, 1.5, "dashed", "attention and output"),
        "compute_only_s": (COMPUTE, 2, "dotdash", "attention alone"),
    }

    def __init__(self) -> None:
        self._settings = FactorRange()
        upper = new_figure(self._TITLE, "", "total_s", height=210, legend_rows=0,
                           x_range=self._settings, y_axis_type="log")
        lower = new_figure("", "", "hidden_ratio", height=270, legend_rows=4,
                           x_range=self._settings, y_range=Range1d(start=-5, end=110))
        self._shares = lower.y_range
        super().__init__(column(upper, lower, sizing_mode="stretch_width",
                                styles={"background": PAPER}))
        upper.xaxis.visible = False
        lower.xaxis.axis_label = self._SETTING
        for level in (0, 100):
            lower.add_layout(Span(location=level, dimension="width", line_color=MUTED,
                                  line_dash="dotted"))
        self._draw(upper, lower)

    def _draw(self, upper: figure, lower: figure) -> None:
        curve = self._add("predicted", "setting", *self._LINES, "hidden_ratio", "idle_ratio")
        drawn: list[Any] = []
        for field, (colour, width, dash, words) in self._LINES.items():
            drawn.append(upper.line("setting", field, source=curve, color=colour,
                                    line_width=width, line_dash=dash))
            drawn.append(upper.scatter("setting", field, source=curve, color=colour, size=4))
            lower.line([math.nan] * 2, [math.nan] * 2, color=colour, line_width=width,
                       line_dash=dash, legend_label=words)  # the key alone
        shut = self._add("infeasible", "setting", "reason")
        closed = lower.vbar("setting", 0.9, 100, 0, source=shut, fill_color=INFEASIBLE,
                            line_color=None, hatch_pattern="/", hatch_color=MUTED,
                            hatch_alpha=0.6, legend_label="cannot run")
        hidden: list[Any] = [lower.line("setting", "hidden_ratio", source=curve,
                                        color=PREDICTED, line_width=2.5,
                                        legend_label="hidden, predicted"),
                             lower.scatter("setting", "hidden_ratio", source=curve,
                                           color=PREDICTED, size=5)]
        measured = self._add("measured", "setting", "total_s", "hidden_ratio", "badge")
        for fig, field in ((upper, "total_s"), (lower, "hidden_ratio")):
            add_hover(fig, [add_measured(fig, "setting", field, measured)],
                      ("badge", "setting", field))
        upper.legend.visible = False
        add_hover(upper, drawn, ("setting", *self._LINES), heading="PREDICTED")
        add_hover(lower, hidden, ("setting", "hidden_ratio", "idle_ratio"), heading="PREDICTED")
        add_hover(lower, [closed], ("setting", "reason"), heading="cannot run")

    def update(self, curve: Columns, measured: Columns | None = None, *,
               badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        curve : mapping
            `setting` (n values in the order to draw, shown as text); `step_s` and
            `step_unfused_s` of whole steps, `total_s` and `compute_only_s` of the attention,
            seconds; `hidden_ratio`, `idle_ratio`. NaN where it cannot run, and `reason` says why.
        measured : mapping, optional
            `setting`, `total_s`, `hidden_ratio`, `badge`.
        badges : str
            Where the numbers come from.
        """
        setting, reason = (np.asarray(curve[name], str) for name in ("setting", "reason"))
        set_factors(self._settings, setting.tolist())
        shut, hidden = reason != "", 100 * np.asarray(curve["hidden_ratio"], np.float64)
        self._shares.update(start=min(-5.0, np.fmin.reduce(hidden) - 5),
                            end=max(110.0, np.fmax.reduce(hidden) + 5))
        self._show("predicted", {name: np.broadcast_to(column, setting.shape)[~shut]
                                 for name, column in curve.items() if name != "reason"})
        self._show("infeasible", {"setting": setting[shut], "reason": reason[shut]})
        self._show("measured", measured)
        self._say(badges)


class HiddenOverGpus(HiddenCurve):
    """Against the number of GPUs."""

    name = "attention-gpus"
    _TITLE, _SETTING = "Attention against the number of GPUs", "GPUs"


class HiddenOverTokens(HiddenCurve):
    """Against the length of the sequence."""

    name = "attention-tokens"
    _TITLE, _SETTING = "Attention against the length of the sequence", "tokens"
