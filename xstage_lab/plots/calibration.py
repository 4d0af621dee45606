"""Figures of a calibration: what its four experiments measured, and the fit through them."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import ArrayLike

from xstage_lab.plots.base import Plot
from xstage_lab.plots.style import PREDICTED, add_hover, add_measured, new_figure

Columns = Mapping[str, ArrayLike]


class Fitted(Plot):
    """Measured points, the fit through them, and the ends of its 90 % interval.

    Parameters
    ----------
    name : str
        Stem for exported files.
    title : str
    x, y : str
        Fields on the axes.
    x_axis_type : str
        `linear` or `log`.
    """

    def __init__(self, name: str, title: str, x: str, y: str, x_axis_type: str = "linear") -> None:
        self.name, self.x, self.y = name, x, y
        fig = new_figure(title, x, y, height=410, legend_rows=1, x_axis_type=x_axis_type)
        super().__init__(fig)
        for end in ("low", "high"):
            fig.line(x, y, source=self._add(end, x, y), color=PREDICTED, line_width=1,
                     line_dash="dashed", legend_label="90 % interval")
        fit = fig.line(x, y, source=self._add("fit", x, y), color=PREDICTED, line_width=2.5,
                       legend_label="fit")
        measured = self._add("measured", x, y, "badge")
        add_hover(fig, [fit], (x, y), heading="fit")
        add_hover(fig, [add_measured(fig, x, y, measured)], ("badge", x, y))

    def update(self, measured: Columns | None = None, fit: Columns | None = None,
               low: Columns | None = None, high: Columns | None = None, *,
               badges: str = "") -> None:
        """Replace what is shown.

        Parameters
        ----------
        measured : mapping, optional
            The fields of both axes and `badge`, arrays of shape (n,).
        fit, low, high : mapping, optional
            The fields of both axes along the fit and along the ends of its interval.
        badges : str
            Where the numbers come from.
        """
        for series, values in (("measured", measured), ("fit", fit), ("low", low),
                               ("high", high)):
            self._show(series, values)
        self._say(badges)
