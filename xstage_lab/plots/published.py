"""Measurements that others published, beside what the law says about them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from bokeh.models import LogTicker
from bokeh.transform import factor_cmap
from numpy.typing import ArrayLike

from xstage_lab.plots.base import Plot
from xstage_lab.plots.style import (
    COMPUTE,
    DRAIN,
    INK,
    ISSUE,
    MEASURED,
    PAPER,
    PREDICTED,
    REFUTED,
    STALL,
    add_hover,
    add_measured,
    new_figure,
)

Columns = Mapping[str, ArrayLike]


class RateAgainstSms(Plot):
    """Store rate against the number of SMs that store, for several transfer mechanisms."""

    name = "rate-against-sms"
    _VARIANTS = ("", "_cross", "_dot")  # a badge gives the shape, a path the drawing inside it

    def __init__(self) -> None:
        fig = new_figure("Store rate against the number of SMs", "n_sms", "rate_bytes_per_s",
                         x_axis_type="log", y_axis_type="log")
        super().__init__(fig)
        fig.xaxis.ticker = LogTicker(base=2, mantissas=[1])
        curves = self._add("predicted", "n_sms", "rate_bytes_per_s", "path")
        line = fig.line("n_sms", "rate_bytes_per_s", source=curves, color=PREDICTED,
                        line_width=2.5, legend_label="predicted")
        measured = self._add("measured", "n_sms", "rate_bytes_per_s", "path", "badge", "label",
                             "marker")
        fills = dict(MEASURED.values())
        dots = fig.scatter("n_sms", "rate_bytes_per_s", source=measured, marker="marker", size=9,
                           line_color=INK, line_width=1.5, legend_field="label",
                           fill_color=factor_cmap("marker", list(fills.values()), list(fills),
                                                  nan_color=PAPER))
        add_hover(fig, [line], ("path", "n_sms", "rate_bytes_per_s"),
                  heading="PREDICTED, min(K r_SM, R)")
        add_hover(fig, [dots], ("badge", "path", "n_sms", "rate_bytes_per_s"))

    def update(self, curves: Columns, measured: Columns, *, badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        curves : mapping
            `n_sms`, the predicted `rate_bytes_per_s`, and the transfer mechanism `path`, arrays
            of shape (n,), one path after the other.
        measured : mapping
            `n_sms`, `rate_bytes_per_s`, `path`, `badge`, arrays of shape (m,).
        badges : str
            Where the numbers come from.
        """
        path = np.asarray(curves["path"], str)
        ends = np.flatnonzero(path[1:] != path[:-1]) + 1  # a NaN there ends a path's line
        self._show("predicted", {
            "path": np.insert(path, ends, ""),
            **{name: np.insert(np.asarray(curves[name], np.float64), ends, np.nan)
               for name in ("n_sms", "rate_bytes_per_s")}})
        paths = np.asarray(measured["path"], str).tolist()
        badge = np.asarray(measured["badge"], str).tolist()
        variant = {name: self._VARIANTS[i % len(self._VARIANTS)]
                   for i, name in enumerate(dict.fromkeys(paths))}
        self._show("measured", {
            **measured,
            "label": [f"{p}, {b}" for p, b in zip(paths, badge, strict=True)],
            "marker": [MEASURED[b][0] + variant[p] for p, b in zip(paths, badge, strict=True)]})
        self._say(badges)


class GemmReduceScatter(Plot):
    """Published fused GEMM + reduce-scatter times against K, and two ways to predict them."""

    name = "gemm-reduce-scatter"

    def __init__(self) -> None:
        fig = new_figure("GEMM + reduce-scatter against K", "k", "fused_s",
                         x_axis_type="log", y_axis_type="log")
        super().__init__(fig)
        fig.xaxis.ticker = LogTicker(base=2, mantissas=[1])
        curves = self._add("predicted", "k", "gemm_s", "law_s", "completion_s")
        lines = [fig.line("k", column, source=curves, color=color, line_width=width,
                          line_dash=dash, legend_label=text)
                 for column, text, color, dash, width in (
                     ("gemm_s", "GEMM alone", COMPUTE, "solid", 1.5),
                     ("completion_s", "refuted: T_gemm + T_store", REFUTED, "dashed", 1.5),
                     ("law_s", "predicted", PREDICTED, "solid", 2.5))]
        measured = self._add("measured", "k", "gemm_s", "fused_s", "badge")
        add_hover(fig, lines, list(curves.data),
                  heading="PREDICTED, max(T_gemm, T_store)")
        add_hover(fig, [add_measured(fig, "k", "fused_s", measured)], list(measured.data))

    def update(self, curves: Columns, measured: Columns, *, badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        curves : mapping
            `k`, the plain GEMM's `gemm_s`, the law's `law_s` and the completion-coupled
            `completion_s`, arrays of shape (n,), seconds.
        measured : mapping
            `k`, `gemm_s`, `fused_s`, `badge`, arrays of shape (m,).
        badges : str
            Where the numbers come from.
        """
        self._show("predicted", curves)
        self._show("measured", measured)
        self._say(badges)


class IssueAgainstCompletion(Plot):
    """Time to issue a message, and to issue and complete it, against its size."""

    name = "issue-against-completion"
    _WAYS = (("stores_s", "stores alone", ISSUE), ("release_s", "stores, release flag", DRAIN),
             ("fence_s", "stores, system fence, flag", STALL))

    def __init__(self) -> None:
        fig = new_figure("Issue is not completion: one warp's message to a peer",
                         "payload_bytes", "time_s", x_axis_type="log", y_axis_type="log")
        super().__init__(fig)
        fig.xaxis.ticker = LogTicker(base=2, mantissas=[1])
        law = self._add("predicted", "payload_bytes", "issue_s")
        line = fig.line("payload_bytes", "issue_s", source=law, color=PREDICTED, line_width=2.5,
                        legend_label="predicted issue, t0 + B/r_SM")
        measured = self._add("measured", "payload_bytes", *(way for way, _, _ in self._WAYS),
                             "badge")
        dots = []
        for way, text, color in self._WAYS:
            fig.line("payload_bytes", way, source=measured, color=color, line_width=1)
            dots.append(fig.scatter("payload_bytes", way, source=measured, size=9, marker="square",
                                    line_color=INK, fill_color=color, legend_label=text))
        add_hover(fig, [line], ("payload_bytes", "issue_s"), heading="PREDICTED")
        add_hover(fig, dots, list(measured.data))

    def update(self, curve: Columns, measured: Columns, *, badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        curve : mapping
            `payload_bytes` and the law's `issue_s`, arrays of shape (n,).
        measured : mapping
            `payload_bytes`, `stores_s`, `release_s`, `fence_s`, `badge`, arrays of shape (m,).
        badges : str
            Where the numbers come from.
        """
        self._show("predicted", curve)
        self._show("measured", measured)
        self._say(badges)
