"""What one SM did, tile by tile, above the backlog of the link at the same time."""

from __future__ import annotations

import math

import numpy as np
from bokeh.layouts import column
from bokeh.models import DataRange1d, FactorRange
from bokeh.transform import factor_cmap
from numpy.typing import ArrayLike

from xstage_lab.plots.base import Plot, thinned
from xstage_lab.plots.style import (
    CAPACITY,
    COMPUTE,
    DRAIN,
    INK,
    ISSUE,
    LINEAR_2,
    PAPER,
    STALL,
    add_hover,
    new_figure,
)
from xstage_lab.record import Record, slot_wait_start

_LANES = {"slot wait": STALL, "issue": ISSUE, "MMA": COMPUTE}  # from the bottom up
_PARTS = _LANES | {"Linear-1": COMPUTE, "Linear-2": LINEAR_2}


class Timeline(Plot):
    """MMA, issue and slot waits of one SM, and the backlog of the link below them."""

    name = "timeline"

    def __init__(self) -> None:
        upper = new_figure("One SM over time", "", "", height=190, legend_rows=0,
                           y_range=FactorRange(factors=list(_LANES)))
        lower = new_figure("", "time_s", "backlog_bytes", height=210, legend_rows=1,
                           x_range=upper.x_range, y_range=DataRange1d(start=0))
        super().__init__(column(upper, lower, sizing_mode="stretch_width",
                                styles={"background": PAPER}))
        upper.xaxis.visible = False
        bars = self._add("tiles", "lane", "part", "start_s", "end_s", "duration_s", "tile_number",
                         "store_bytes")
        drawn = upper.hbar("lane", 0.7, "end_s", "start_s", source=bars, line_color=INK,
                           line_width=0.5,
                           fill_color=factor_cmap("part", list(_PARTS.values()), list(_PARTS)))
        add_hover(upper, [drawn], list(bars.data))
        curve = self._add("backlog", "time_s", "backlog_bytes")
        lower.varea("time_s", 0, "backlog_bytes", source=curve, fill_color=DRAIN, fill_alpha=0.25)
        line = lower.line("time_s", "backlog_bytes", source=curve, color=DRAIN, line_width=1.5,
                          legend_label="backlog")
        limits = self._add("limits", "capacity_bytes")
        lower.hspan("capacity_bytes", source=limits, line_color=CAPACITY, line_width=2,
                    legend_label="capacity Q")
        add_hover(lower, [line], ("time_s", "backlog_bytes"))

    def update(
        self, record: Record | None, *, sm: int = 0, gpu: int = 0,
        capacity_bytes: float = math.nan, part: ArrayLike = "MMA", badges: str = "",
    ) -> None:
        """Replace what is shown.

        Parameters
        ----------
        record : Record or None
            What has no per-tile times, or no backlog, leaves that part empty.
        sm, gpu : int
            Which SM; the backlog is that of GPU 0.
        capacity_bytes : float
            Q; NaN or inf draws no line.
        part : array of str
            What the MMA of each tile of the record is: `MMA`, `Linear-1` or `Linear-2`.
        badges : str
            Where the numbers come from.
        """
        tiles = None if record is None else record.tiles
        backlog = None if record is None else record.backlog
        if tiles is None:
            self._show("tiles", None)
        else:
            shown = (tiles["sm"] == sm) & (tiles["gpu"] == gpu)
            own, waited = tiles[shown], slot_wait_start(tiles)[shown]
            start = np.concatenate((waited, own["issue_start_s"], own["mma_start_s"]))
            end = np.concatenate((waited + own["slot_wait_s"], own["issue_end_s"],
                                  own["mma_end_s"]))
            lanes = np.repeat(list(_LANES), own.size)
            parts = np.concatenate((lanes[:2 * own.size],
                                    np.broadcast_to(part, tiles.size)[shown]))
            some = end > start
            self._show("tiles", {
                "lane": lanes[some], "part": parts[some], "start_s": start[some],
                "end_s": end[some], "duration_s": (end - start)[some],
                "tile_number": np.tile(own["row"], len(_LANES))[some],
                "store_bytes": np.tile(own["store_bytes"], len(_LANES))[some],
            })
        time_s, held = thinned(*backlog) if backlog is not None else ((), ())
        self._show("backlog", {"time_s": time_s, "backlog_bytes": held})
        self._show("limits", {"capacity_bytes": capacity_bytes})
        self._say(badges)
