"""Published values, and what was predicted for them; made anew for each kind of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import NumeralTickFormatter
from numpy.typing import ArrayLike

from xstage_lab.plots.base import Plot
from xstage_lab.plots.style import (
    CAPACITY,
    COMPUTE,
    DRAIN,
    INK,
    ISSUE,
    MEASURED,
    MUTED,
    PAPER,
    PREDICTED,
    REFUTED,
    STALL,
    add_hover,
    new_figure,
)

#: Unit of values of several kinds, which differ by powers of ten.
MIXED = "SI units"
#: Colours of the forms of one origin, in their order.
_BY_LAW, _SIMULATED = (PREDICTED, CAPACITY, COMPUTE, DRAIN), (INK, STALL, ISSUE, DRAIN)


class AgainstPublished(Plot):
    """Predictions against published values, and how far they are off below.

    Parameters
    ----------
    title : str
    words, unit : str
        What was published, and the unit that values are given in; `MIXED` for several.
    forms : sequence of str
        Names of the predictions; how one starts, `law` or `simulated`, says what it is.
    logarithmic, difference : bool
        Kind of the axes; whether errors are predicted less published, and not their ratio less 1.
    """

    name = "against-published"

    def __init__(self, title: str, words: str, unit: str, forms: Sequence[str], *,
                 logarithmic: bool, difference: bool) -> None:
        kind = "log" if logarithmic else "linear"
        upper = new_figure(title, "", "", height=300, legend_rows=0, x_axis_type=kind,
                           y_axis_type=kind)
        lower = new_figure("", "", "", height=240, legend_rows=-(-len(forms) // 3),
                           x_axis_type=kind, x_range=upper.x_range)
        super().__init__(column(upper, lower, sizing_mode="stretch_width",
                                styles={"background": PAPER}))
        upper.yaxis.axis_label = f"predicted ({unit})"
        lower.xaxis.axis_label = f"{words} ({unit})"
        lower.yaxis.axis_label = f"error ({unit if difference else '%'})"
        for axis in (upper.xaxis, upper.yaxis, lower.xaxis, lower.yaxis):
            axis.axis_label_text_font_style = "normal"
            if unit != MIXED:
                axis.formatter = NumeralTickFormatter(format="0,0.[000]")
        diagonal = self._add("exact", "published", "predicted")
        upper.line("published", "predicted", source=diagonal, color=MUTED, line_dash="dashed")
        lower.hspan([0], line_color=MUTED, line_dash="dashed")
        of_origin = {"law": iter(_BY_LAW), "simulated": iter(_SIMULATED)}
        for form in forms:
            points = self._add(form, "label", "published", "predicted", "error")
            line = next(of_origin.get(form.split()[0], iter([REFUTED])))
            marker, fill = (MEASURED["SIMULATED"] if form.startswith("simulated")
                            else ("circle", line) if form.startswith("law")
                            else ("inverted_triangle", line))
            look: dict[str, Any] = {"marker": marker, "fill_color": fill, "line_color": line,
                                    "size": 9, "line_width": 1.5, "source": points}
            for fig, drawn in (
                    (upper, upper.scatter("published", "predicted", **look)),
                    (lower, lower.scatter("published", "error", legend_label=form, **look))):
                add_hover(fig, [drawn], ("label", "published", "predicted", "error"),
                          heading=f"{form}; {unit}, error in "
                                  f"{unit if difference else '%'}")

    def update(self, forms: Mapping[str, Mapping[str, ArrayLike]], *, badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        forms : mapping
            For each form `label`, `published`, `predicted` and `error`, arrays of shape (n,) in
            the units of the axes.
        badges : str
            Where the numbers come from.
        """
        for form, columns in forms.items():
            self._show(form, columns)
        everything = np.concatenate([np.asarray(columns["published"], np.float64)
                                     for columns in forms.values()])
        ends = [np.nanmin(everything), np.nanmax(everything)]
        self._show("exact", {"published": ends, "predicted": ends})
        self._say(badges)
