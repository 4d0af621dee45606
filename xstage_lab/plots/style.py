"""One look for all figures: colours, markers, the words on axes, and how a figure behaves.

The palette is Okabe and Ito's, made for every kind of colour vision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bokeh.models import HoverTool, NumeralTickFormatter
from bokeh.models.annotations import Legend, Title
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure
from bokeh.transform import factor_cmap, factor_mark

from xstage_lab import units

# A figure brings its own paper, so that it reads alike in a light theme, a dark one and print.
PAPER, INK, MUTED, GRID = "#ffffff", "#1a1a1a", "#5f5f5f", "#e6e6e6"

# One colour per meaning, everywhere. What is measured is drawn in ink, see `MEASURED`.
PREDICTED = "#0072b2"   # blue: what the law says
COMPUTE = "#009e73"     # green: MMA, and the bound it sets
LINEAR_2 = "#8fd6b8"    # light green: MMA of the layer whose tiles are stored to other GPUs
ISSUE = "#e69f00"       # orange: issue of stores, and the bound it sets
DRAIN = "#cc79a7"       # purple: the link, its backlog, and the bound it sets
CAPACITY = "#56b4e9"    # sky blue: what the path can hold
STALL = "#d55e00"       # vermilion: waiting for a slot
UNFUSED = "#666666"     # dark grey: compute, then copy
REFUTED = "#a0a0a0"     # grey, dashed: forms that measurement refuted
INFEASIBLE = "#d0d0d0"  # light grey, hatched: what cannot run

#: Badge -> marker and fill: what was only simulated is hollow and never looks measured.
MEASURED = {"LIVE": ("circle", INK), "SIMULATED": ("diamond", PAPER), "RECORDED": ("square", INK)}

#: Fields that hold words; all others hold numbers.
TEXT = frozenset({"badge", "depth", "label", "lane", "marker", "part", "path", "quantity",
                  "reason", "row", "setting", "sync", "tile"})

_MIB = units.Display(1 / 2**20, "MiB")
_MS = units.Display(1e3, "ms")
_TIMES = units.Display(1.0, "times")
_DISPLAYS = {  # where the unit of the suffix would give unwieldy numbers
    "volume_bytes": _MIB, "backlog_bytes": _MIB, "capacity_bytes": _MIB, "peak_bytes": _MIB,
    "gemm_s": _MS, "fused_s": _MS, "law_s": _MS, "completion_s": _MS,
    "speedup_ratio": _TIMES, "rule_ratio": _TIMES, "published_ratio": _TIMES,
}
_LABELS = {
    "gap_s": "gap G", "issue_s": "issue time of a burst", "period_s": "period",
    "time_s": "time", "backlog_bytes": "backlog", "volume_bytes": "burst V = K B",
    "n_sms": "SMs that store", "rate_bytes_per_s": "store rate", "total_s": "total time",
    "error_ratio": "predicted / measured - 1", "k": "K of each GPU's GEMM",
    "burst_bytes": "burst B of one producer", "n_producers": "producers K",
    "tokens": "tokens of each GPU", "speedup_ratio": "wave / interleaved",
    "rule_ratio": "closed form", "wave_ratio": "in waves", "interleaved_ratio": "interleaved",
    "hidden_ratio": "hidden", "idle_ratio": "SMs idle", "compute_only_s": "attention alone",
    "step_s": "whole step", "step_unfused_s": "whole step, unfused",
    "capacity_bytes": "capacity Q", "fused_s": "time", "payload_bytes": "message",
}


def shown(name: str) -> units.Display:
    """Return the scale and the unit in which figures show a field called `name`."""
    return _DISPLAYS.get(name) or units.display(name)


def label(name: str) -> str:
    """Return the axis label of a field, with its unit.

    >>> label("gap_s")
    'gap G (us)'
    """
    unit = shown(name).unit
    words = _LABELS.get(name, name)
    return f"{words} ({unit})" if unit else words


def new_figure(title: str, x: str, y: str, *, height: int = 330, legend_rows: int = 2,
               **options: Any) -> figure:
    """Return an empty figure in the lab's look.

    Parameters
    ----------
    title : str
        With it comes a line for provenance; empty for the lower part of a figure.
    x, y : str
        Fields on the axes, which give labels and units; empty for an axis of names.
    height : int
        Pixels; the width follows the page.
    legend_rows : int
        Room kept below the data, so that nothing moves when points arrive.
    **options
        Passed to `bokeh.plotting.figure`: ranges and axis types.

    Returns
    -------
    bokeh.plotting.figure
        With an empty legend below the data.
    """
    fig = figure(title=Title(text=title, text_color=INK), height=height,
                 sizing_mode="stretch_width", toolbar_location="right",
                 tools="pan,wheel_zoom,box_zoom,reset", **options)
    fig.toolbar.logo = None
    fig.toolbar.autohide = True
    fig.min_border_left, fig.min_border_right = 76, 16  # tick labels may grow without a jump
    fig.background_fill_color = fig.border_fill_color = PAPER
    fig.outline_line_color = None
    fig.grid.grid_line_color = GRID
    for axis, name in ((fig.xaxis, x), (fig.yaxis, y)):
        axis.axis_label = label(name) if name else None
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = INK
        axis.axis_line_color = axis.major_tick_line_color = MUTED
        axis.minor_tick_line_color = None
        if name:
            axis.formatter = NumeralTickFormatter(format="0,0.[000]")
    if title:
        fig.add_layout(Title(text=" ", text_font_style="normal", text_font_size="11px",
                             text_color=MUTED, name="badges"), "above")
    fig.add_layout(Legend(orientation="horizontal", ncols=3, location="top_left", spacing=6,
                          border_line_color=None, background_fill_color=None, margin=2,
                          label_width=110, label_text_color=INK, label_text_font_size="12px",
                          stylesheets=[f":host {{ min-height: {26 * legend_rows}px; }}"]), "below")
    return fig


def add_hover(
    fig: figure, renderers: Sequence[GlyphRenderer[Any]], columns: Iterable[str], *,
    heading: str = "",
) -> None:
    """Let the reader see the numbers behind `renderers` under the pointer.

    Parameters
    ----------
    fig : bokeh.plotting.figure
    renderers : sequence of GlyphRenderer
    columns : iterable of str
        Fields to show with their units.
    heading : str
        First line of the tooltip, what is shown.
    """
    lines = [("", heading)] if heading else []
    for name in columns:
        number = "" if name in TEXT else f"{{0,0.[000]}} {shown(name).unit}"
        lines.append((_LABELS.get(name, _plain(name)), f"@{name}{number}".rstrip()))
    fig.add_tools(HoverTool(renderers=list(renderers), tooltips=lines, visible=False,
                            line_policy="interp"))


def add_measured(fig: figure, x: Any, y: Any, source: Any, **options: Any) -> GlyphRenderer[Any]:
    """Draw measured points; marker and fill say which badge they carry (field `badge`)."""
    badges = list(MEASURED)
    return fig.scatter(
        x, y, source=source, size=9, line_color=INK, line_width=1.5, legend_field="badge",
        marker=factor_mark("badge", [marker for marker, _ in MEASURED.values()], badges),
        fill_color=factor_cmap("badge", [fill for _, fill in MEASURED.values()], badges),
        **options)


def _plain(name: str) -> str:
    """Return a field's name in words, without its unit suffix."""
    for suffix in ("_bytes_per_s", "_bytes", "_ratio", "_s"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")
