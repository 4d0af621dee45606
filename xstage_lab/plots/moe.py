"""Figures of an MoE layer's two orders: over time, against tokens, over models, in total."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import DataRange1d, FactorRange, LinearColorMapper, LogTicker, Range1d
from bokeh.palettes import PuOr, interp_palette
from bokeh.plotting import figure
from bokeh.transform import dodge
from numpy.typing import ArrayLike

from xstage_lab.plots.base import Plot, thinned
from xstage_lab.plots.style import (
    CAPACITY,
    COMPUTE,
    DRAIN,
    INFEASIBLE,
    INK,
    ISSUE,
    LINEAR_2,
    MUTED,
    PAPER,
    PREDICTED,
    STALL,
    add_hover,
    add_measured,
    new_figure,
)
from xstage_lab.plots.tune import TimeBars, set_factors, time_bars

Columns = Mapping[str, ArrayLike]

ORDERS = ("wave", "interleaved")
_SHARES = {"first_ratio": ("Linear-1", COMPUTE), "second_ratio": ("Linear-2", LINEAR_2),
           "wait_ratio": ("slot wait", STALL)}
#: Orange where waves are faster, purple where interleaving is; ink is legible on all of them.
_SIDES = interp_palette(tuple(reversed(PuOr[11][2:9])), 101)
_LEAST_SCALE = 0.1  # gains up to here have all of the colours


class OrdersOverTime(Plot):
    """What the SMs do in waves and interleaved, and the link's backlog, on one time axis."""

    name = "orders"

    def __init__(self) -> None:
        time, held = DataRange1d(start=0, range_padding=0), DataRange1d(start=0)
        share = Range1d(start=0, end=105)
        parts = [new_figure(title, x, y, height=height, legend_rows=rows, x_range=time, y_range=of)
                 for title, x, y, height, rows, of in (
                     ("SMs at work, and the link's backlog", "", "wave_ratio", 160, 0, share),
                     ("", "", "backlog_bytes", 82, 0, held),
                     ("", "", "interleaved_ratio", 110, 0, share),
                     ("", "time_s", "backlog_bytes", 178, 2, held))]
        super().__init__(column(*parts, sizing_mode="stretch_width",
                                styles={"background": PAPER}))
        for part in parts:
            part.xaxis.visible = part is parts[-1]
            part.yaxis.axis_label_text_font_size = "11px"
        self._draw_shares(parts[0], "wave")
        self._draw_shares(parts[2], "interleaved")
        self._draw_backlog(parts[1], "wave")
        self._draw_backlog(parts[3], "interleaved")
        for words, colour in (*_SHARES.values(), ("issue", ISSUE), ("backlog", DRAIN),
                              ("capacity Q", CAPACITY)):  # in one legend, below everything
            parts[3].rect([math.nan], [math.nan], 1, 1, fill_color=colour, line_color=None,
                          legend_label=words)
        parts[3].legend.update(ncols=4, label_width=60)

    def _draw_shares(self, fig: figure, order: str) -> None:
        shares = self._add(order, "time_s", *_SHARES, "issue_ratio")
        fig.varea_stack(list(_SHARES), x="time_s", source=shares,
                        color=[colour for _, colour in _SHARES.values()])
        line = fig.line("time_s", "issue_ratio", source=shares, color=ISSUE, line_width=2)
        add_hover(fig, [line], list(shares.data), heading=order)

    def _draw_backlog(self, fig: figure, order: str) -> None:
        curve = self._add(f"{order} backlog", "time_s", "backlog_bytes")
        fig.varea("time_s", 0, "backlog_bytes", source=curve, fill_color=DRAIN, fill_alpha=0.25)
        line = fig.line("time_s", "backlog_bytes", source=curve, color=DRAIN, line_width=1.5)
        limits = self._add(f"{order} limits", "capacity_bytes")
        fig.hspan("capacity_bytes", source=limits, line_color=CAPACITY, line_width=2)
        add_hover(fig, [line], ("time_s", "backlog_bytes"), heading=order)

    def update(self, shares: Mapping[str, Columns], backlog: Mapping[str, Columns], *,
               capacity_bytes: float = math.nan, badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        shares : mapping from `wave` and `interleaved`
            `time_s`, and as shares of the SMs `first_ratio`, `second_ratio`, `wait_ratio`,
            `issue_ratio`, arrays of shape (n,). An order left out stays empty.
        backlog : mapping from `wave` and `interleaved`
            `time_s` and `backlog_bytes`, arrays of shape (n,).
        capacity_bytes : float
            Q; NaN or inf draws no line.
        badges : str
            Where the numbers come from.
        """
        for order in ORDERS:
            self._show(order, shares.get(order))
            curve = {name: np.asarray(values, np.float64)
                     for name, values in backlog.get(order, {}).items()}
            if curve:
                when, held = thinned(curve["time_s"], curve["backlog_bytes"])
                curve = {"time_s": when, "backlog_bytes": held}
            self._show(f"{order} backlog", curve)
            self._show(f"{order} limits", {"capacity_bytes": capacity_bytes})
        self._say(badges)


class SpeedUp(Plot):
    """Wave time over interleaved time against the tokens of a GPU."""

    name = "speed-up"

    def __init__(self) -> None:
        fig = new_figure("How much faster interleaved is, against tokens", "tokens",
                         "speedup_ratio", x_axis_type="log")
        super().__init__(fig)
        fig.xaxis.ticker = LogTicker(base=2, mantissas=[1])
        fig.hspan([1.0], line_color=MUTED, line_width=1)
        curve = self._add("predicted", "tokens", "speedup_ratio", "rule_ratio")
        rule = fig.line("tokens", "rule_ratio", source=curve, color=PREDICTED, line_width=2,
                        line_dash="dashed", legend_label="closed form, SMs equally busy")
        law = fig.line("tokens", "speedup_ratio", source=curve, color=PREDICTED, line_width=2.5,
                       legend_label="predicted")
        dots = fig.scatter("tokens", "speedup_ratio", source=curve, color=PREDICTED, size=5)
        measured = self._add("measured", "tokens", "speedup_ratio", "wave_s", "interleaved_s",
                             "badge")
        add_hover(fig, [rule, law, dots], list(curve.data), heading="PREDICTED")
        add_hover(fig, [add_measured(fig, "tokens", "speedup_ratio", measured)],
                  list(measured.data))

    def update(self, curve: Columns, measured: Columns | None = None, *,
               badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        curve : mapping
            `tokens`, the law's `speedup_ratio` and the closed form's `rule_ratio`, arrays of
            shape (n,); wave time over interleaved time, NaN where infeasible.
        measured : mapping, optional
            `tokens`, `speedup_ratio`, `wave_s`, `interleaved_s`, `badge`, shape (m,).
        badges : str
            Where the numbers come from.
        """
        self._show("predicted", curve)
        self._show("measured", measured)
        self._say(badges)


class OrderMap(Plot):
    """Which order is predicted to be faster over layers and tokens, and by how much."""

    name = "order-map"

    def __init__(self) -> None:
        self._columns, self._rows = FactorRange(), FactorRange()
        fig = new_figure("Gain of interleaving by the closed form (%)", "", "",
                         height=360, legend_rows=1, x_range=self._columns, y_range=self._rows)
        super().__init__(fig)
        fig.xaxis.axis_label = "tokens of each GPU"
        fig.yaxis.axis_label = "models, by the weights of an expert"
        fig.grid.grid_line_color = None
        self._colors = LinearColorMapper(palette=_SIDES, low=-_LEAST_SCALE, high=_LEAST_SCALE)
        cells = self._add("map", "row", "setting", "speedup_ratio", "gain_ratio", "label")
        drawn = fig.rect("setting", "row", 1, 1, source=cells, line_color=PAPER,
                         fill_color={"field": "gain_ratio", "transform": self._colors})
        closed = self._add("infeasible", "row", "setting", "reason")
        shut = fig.rect("setting", "row", 1, 1, source=closed, fill_color=INFEASIBLE,
                        line_color=PAPER, hatch_pattern="/", hatch_color=MUTED, hatch_alpha=0.6,
                        legend_label="cannot run")
        told = self._add("published", "row", "setting", "label", "quantity", "reason", "badge")
        self._write(fig, cells, 0.0, 0.18, "center")
        self._write(fig, told, -0.18, -0.24, "left")
        marks = add_measured(fig, dodge("setting", -0.34, self._columns),
                             dodge("row", -0.24, self._rows), told)
        marks.glyph.size = 6  # narrow cells must hold the words beside it
        add_hover(fig, [drawn], ("row", "setting", "speedup_ratio"), heading="PREDICTED")
        add_hover(fig, [shut], ("row", "setting", "reason"), heading="cannot run")
        add_hover(fig, [marks], list(told.data))

    def _write(self, fig: figure, source: Any, right: float, up: float, align: str) -> None:
        """Write the labels into the cells."""
        fig.text(dodge("setting", right, self._columns), dodge("row", up, self._rows), "label",
                 source=source, text_color=INK, text_font_size="10px", text_align=align,
                 text_baseline="middle")

    def update(self, cells: Columns, published: Columns | None = None, *,
               badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        cells : mapping
            `row` the layer and `setting` the tokens, both in the order to draw them;
            `speedup_ratio`, wave time over interleaved time, NaN where it cannot run, and
            `reason` why not; arrays of shape (n,).
        published : mapping, optional
            `row`, `setting`, `label` what is written there, `quantity` what that is, `reason` who
            says so, and `badge`; arrays of shape (m,).
        badges : str
            Where the numbers come from.
        """
        table = {name: np.asarray(values, None if name == "speedup_ratio" else str)
                 for name, values in cells.items()}
        speedup = table["speedup_ratio"].astype(np.float64)
        for axis, name, step in ((self._columns, "setting", 1), (self._rows, "row", -1)):
            others = np.asarray((published or {}).get(name, ()), str).tolist()
            factors = list(dict.fromkeys([*table[name].tolist(), *others]))
            set_factors(axis, factors[::step])
        runs = np.isfinite(speedup)
        gain = speedup[runs] - 1.0
        self._show("map", {
            "row": table["row"][runs], "setting": table["setting"][runs],
            "speedup_ratio": speedup[runs], "gain_ratio": gain,
            "label": [f"{100 * each:+.0f}" if abs(each) >= 0.005 else "0" for each in gain]})
        self._show("infeasible", {name: table[name][~runs]
                                  for name in ("row", "setting", "reason")})
        self._show("published", published)
        scale = 100.0 * max(_LEAST_SCALE, float(np.abs(gain).max(initial=0.0)))
        self._colors.update(low=-scale, high=scale)
        self._say(badges)


class OrderTimes(TimeBars):
    """Predicted, measured and unfused total time of both orders, with the path's lower bound."""

    name = "order-times"
    _ROWS = tuple(tuple(f"{order}, {what}" for what in ("unfused", "measured", "predicted"))
                  for order in reversed(ORDERS))

    def __init__(self) -> None:
        super().__init__("Total time of both orders, and unfused",
                         [row for rows in self._ROWS for row in rows],
                         {"drain_s": (DRAIN, "dotdash")})

    def update(self, times: Mapping[str, Mapping[str, Any]], *, drain_s: float = math.nan,
               badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        times : mapping from `wave` and `interleaved`
            Of each `predicted_s`, `low_s`, `high_s`, `measured_s`, seconds, NaN where not known;
            the measurement's `badge`; and `unfused` with `compute_s` and `copy_s`.
        drain_s : float
            No order ends before the path has drained what is stored.
        badges : str
            Where the numbers come from.
        """
        bars = [time_bars(rows, **times[order])
                for rows, order in zip(self._ROWS, reversed(ORDERS), strict=True)]
        self._show("times", {name: [value for each in bars for value in each[name]]
                             for name in bars[0]})
        self._show("bounds", {"drain_s": drain_s})
        self._say(badges)
