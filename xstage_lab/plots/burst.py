"""Figures of burst trains: issue time and period against the gap, backlog, the isolated burst."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from bokeh.models import DataRange1d
from bokeh.plotting import figure
from numpy.typing import ArrayLike, NDArray

from xstage_lab import units
from xstage_lab.plots.base import Plot, thinned
from xstage_lab.plots.style import (
    CAPACITY,
    DRAIN,
    INK,
    ISSUE,
    MUTED,
    PREDICTED,
    REFUTED,
    add_hover,
    add_measured,
    new_figure,
)

Columns = Mapping[str, ArrayLike]


class IssueGap(Plot):
    """Issue time of a burst against the gap before it."""

    name = "issue-against-gap"

    def __init__(self) -> None:
        fig = new_figure("Issue time against gap", "gap_s", "issue_s")
        super().__init__(fig)
        curves = self._add("predicted", "gap_s", "free_s", "lockstep_s")
        lines = [fig.line("gap_s", column, source=curves, color=PREDICTED, line_width=2.5,
                          line_dash=dash, legend_label=f"predicted, {sync}")
                 for column, sync, dash in (("free_s", "free-running", "solid"),
                                            ("lockstep_s", "lockstep", "dashed"))]
        _add_marker(self, fig, "gap_s", "issue_s", "recovery gap G*")
        measured = self._add("measured", "gap_s", "issue_s", "sync", "badge")
        add_hover(fig, lines, ("gap_s", "free_s", "lockstep_s"), heading="PREDICTED")
        add_hover(fig, [add_measured(fig, "gap_s", "issue_s", measured)],
                  ("badge", "sync", "gap_s", "issue_s"))

    def update(
        self, curves: Columns, measured: Columns | None = None, *,
        recovery_gap_s: float = math.nan, badges: str = "",
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        curves : mapping
            `gap_s` and the predictions `free_s`, `lockstep_s`, arrays of shape (n,), seconds;
            a prediction that is left out is not drawn.
        measured : mapping, optional
            `gap_s`, `issue_s`, `badge`, and `sync` if known; see `points`.
        recovery_gap_s : float
            G*; NaN draws no mark.
        badges : str
            Where the numbers come from.
        """
        self._show("predicted", curves)
        self._show("measured", measured)
        _show_marker(self, "gap_s", "issue_s", recovery_gap_s, curves.get("free_s", math.nan),
                     f"G* = {units.text('gap_s', recovery_gap_s)}")
        self._say(badges)


class PeriodGap(Plot):
    """Period of a burst train against its gap, between the bounds that shape it."""

    name = "period-against-gap"

    def __init__(self) -> None:
        fig = new_figure("Period against gap", "gap_s", "period_s")
        super().__init__(fig)
        curves = self._add("predicted", "gap_s", "free_s", "lockstep_s", "drain_bound_s",
                           "issue_bound_s", "additive_s")
        drawn = {}
        for column, text, color, dash, width in (
            ("drain_bound_s", "drain bound, V/R", DRAIN, "solid", 1.5),
            ("issue_bound_s", "issue bound, T_iss0 + G", ISSUE, "solid", 1.5),
            ("additive_s", "refuted: G + V/R", REFUTED, "dashed", 1.5),
            ("free_s", "predicted, free-running", PREDICTED, "solid", 2.5),
            ("lockstep_s", "predicted, lockstep", PREDICTED, "dashed", 2.5),
        ):
            drawn[column] = fig.line("gap_s", column, source=curves, color=color, line_width=width,
                                     line_dash=dash, legend_label=text)
        measured = self._add("measured", "gap_s", "period_s", "sync", "badge")
        add_hover(fig, [drawn["free_s"], drawn["lockstep_s"]], list(curves.data),
                  heading="PREDICTED")
        add_hover(fig, [add_measured(fig, "gap_s", "period_s", measured)],
                  ("badge", "sync", "gap_s", "period_s"))

    def update(
        self, curves: Columns, measured: Columns | None = None, *, badges: str = ""
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        curves : mapping
            `gap_s`, the predictions `free_s` and `lockstep_s`, the bounds `drain_bound_s` (V/R)
            and `issue_bound_s` (T_iss0 + G), and the refuted form `additive_s` (G + V/R), arrays
            of shape (n,) or single numbers, seconds.
        measured : mapping, optional
            `gap_s`, `period_s`, `badge`, and `sync` if known; see `points`.
        badges : str
            Where the numbers come from.
        """
        self._show("predicted", curves)
        self._show("measured", measured)
        self._say(badges)


class Backlog(Plot):
    """Bytes accepted but not yet on the link, over time."""

    name = "backlog"

    def __init__(self) -> None:
        fig = new_figure("Backlog of the link over time", "time_s", "backlog_bytes",
                         legend_rows=1, y_range=DataRange1d(start=0))
        super().__init__(fig)
        curve = self._add("backlog", "time_s", "backlog_bytes")
        fig.varea("time_s", 0, "backlog_bytes", source=curve, fill_color=DRAIN, fill_alpha=0.25)
        line = fig.line("time_s", "backlog_bytes", source=curve, color=DRAIN, line_width=1.5,
                        legend_label="backlog")
        limits = self._add("limits", "capacity_bytes", "peak_bytes")
        for column, text, color, dash in (
            ("capacity_bytes", "capacity Q", CAPACITY, "solid"),
            ("peak_bytes", "predicted peak", PREDICTED, "dashed"),
        ):
            fig.hspan(column, source=limits, line_color=color, line_width=2, line_dash=dash,
                      legend_label=text)
        add_hover(fig, [line], ("time_s", "backlog_bytes"))

    def update(
        self, backlog: NDArray[np.float64] | None, *, capacity_bytes: float = math.nan,
        peak_bytes: float = math.nan, badges: str = "",
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        backlog : float array of shape (2, n), or None
            Seconds and bytes, as `Record.backlog`.
        capacity_bytes, peak_bytes : float
            Q, and the peak that the law predicts without it; NaN or inf draws no line.
        badges : str
            Where the numbers come from.
        """
        time_s, held = thinned(*backlog) if backlog is not None else ((), ())
        self._show("backlog", {"time_s": time_s, "backlog_bytes": held})
        self._show("limits", {"capacity_bytes": capacity_bytes, "peak_bytes": peak_bytes})
        self._say(badges)


class IsolatedBurst(Plot):
    """Issue time of one isolated burst against its size; the knee shows what the path holds."""

    name = "isolated-burst"

    def __init__(self) -> None:
        fig = new_figure("Isolated burst: issue time against size", "volume_bytes", "issue_s")
        super().__init__(fig)
        curves = self._add("predicted", "volume_bytes", "issue_s", "issue_bound_s",
                           "drain_bound_s")
        for column, text, color in (("issue_bound_s", "issue bound, T_iss0", ISSUE),
                                    ("drain_bound_s", "drain bound, (V - Q)/R", DRAIN)):
            fig.line("volume_bytes", column, source=curves, color=color, line_width=1.5,
                     legend_label=text)
        line = fig.line("volume_bytes", "issue_s", source=curves, color=PREDICTED, line_width=2.5,
                        legend_label="predicted")
        _add_marker(self, fig, "volume_bytes", "issue_s", "knee")
        measured = self._add("measured", "volume_bytes", "issue_s", "badge")
        add_hover(fig, [line], list(curves.data), heading="PREDICTED")
        add_hover(fig, [add_measured(fig, "volume_bytes", "issue_s", measured)],
                  ("badge", "volume_bytes", "issue_s"))

    def update(
        self, curves: Columns, measured: Columns | None = None, *,
        knee_bytes: float = math.nan, badges: str = "",
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        curves : mapping
            `volume_bytes`, the prediction `issue_s`, its bounds `issue_bound_s` and
            `drain_bound_s`, arrays of shape (n,); bounds below zero are not drawn.
        measured : mapping, optional
            `volume_bytes`, `issue_s`, `badge`; see `points`.
        knee_bytes : float
            Burst size from which issue waits for the link; NaN draws no mark.
        badges : str
            Where the numbers come from.
        """
        drain = np.asarray(curves.get("drain_bound_s", math.nan), np.float64)
        self._show("predicted", {**curves, "drain_bound_s": np.where(drain > 0, drain, np.nan)})
        self._show("measured", measured)
        _show_marker(self, "volume_bytes", "issue_s", knee_bytes, curves.get("issue_s", math.nan),
                     f"knee at {units.text('volume_bytes', knee_bytes)}")
        self._say(badges)


def _add_marker(plot: Plot, fig: figure, x: str, y: str, meaning: str) -> None:
    """Add a vertical line with words beside its top."""
    source = plot._add("mark", x, y, "label")
    fig.vspan(x, source=source, line_color=MUTED, line_dash="dotted", line_width=1.5,
                      legend_label=meaning)
    fig.text(x, y, "label", source=source, x_offset=5, text_baseline="top",
                     text_color=INK, text_font_size="12px")


def _show_marker(
    plot: Plot, x: str, y: str, at: float, beside: ArrayLike, text: str
) -> None:
    """Move the line to `at`, and its words to the height of the highest value `beside`."""
    heights = np.asarray(beside, np.float64)
    top = np.nanmax(heights, initial=-math.inf)
    plot._show("mark", {x: at, y: top, "label": text} if math.isfinite(at) else None)
