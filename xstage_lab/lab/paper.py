"""The panel of published results: a table, a figure of it, and what it says in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from textwrap import shorten
from typing import Any

import ipywidgets as w
import numpy as np
from bokeh.document import Document

from xstage_lab import experiment
from xstage_lab.errors import XStageError, require_choice
from xstage_lab.export import Exported, export
from xstage_lab.lab import style
from xstage_lab.lab.live_figure import LiveFigure, load_bokehjs
from xstage_lab.lab.strip import button
from xstage_lab.paper import TABLES, worked_out
from xstage_lab.paper.table import CELL_DIGITS, Compared, Table, printed, row_name
from xstage_lab.plots.paper import MIXED, AgainstPublished
from xstage_lab.record import provenance
from xstage_lab.units import display, text, words

LOG_FROM = 20.0  # largest over smallest value from which on axes are logarithmic
MOST_SOURCE = 90  # letters of a source that fit under a figure's title
_ROWS = """<style>
.xstage-rows th { position: sticky; top: 0; white-space: normal; vertical-align: bottom;
  background: var(--jp-layout-color1, #fff); }
.xstage-rows td:first-child { padding-right: 20px; }
</style>"""


class Paper(w.VBox):
    """Published numbers beside the law and the simulated device, a table at a time.

    The first table is worked out at once, any other when it is first chosen, while the page
    stays usable.

    Parameters
    ----------
    table : str
        One of `paper.TABLES`.
    """

    def __init__(self, table: str = "moe-stall") -> None:
        require_choice("table", table, TABLES)
        self._worked_out: dict[str, Table] = {}
        self._working = False
        self.plot: AgainstPublished | None = None
        self.chooser = w.Dropdown(options=list(TABLES), value=table, description="table")
        self.quantity = w.Dropdown(options=[], description="figure of")
        self.folder = w.Text("exports", layout=w.Layout(width="84px"),
                             tooltip="the folder that Export writes into")
        self._export = button("Export", "download", self.export, "",
                              "write the figure, the rows and all words to files")
        self.badges, self.message, self.words, self.rows = (w.HTML() for _ in range(4))
        self.message.layout.min_height = "28px"
        self.rows.layout = w.Layout(width="auto", max_height="360px", overflow="auto")
        self.rows.add_class("xstage-rows")
        self.figure = w.VBox(layout=w.Layout(width="100%"))
        super().__init__([
            w.HTML(style.STYLE + _ROWS),
            w.HBox([self.chooser, self.quantity, self._export, self.folder],
                   layout=w.Layout(align_items="center")),
            self.message, self.badges, self.figure, self.rows, self.words],
            layout=w.Layout(width="100%"))
        self.add_class("xstage-panel")
        load_bokehjs()
        self.chooser.observe(lambda _: self._choose(), names="value")
        self.quantity.observe(self._draw, names="value")
        self._take(worked_out(table))
        self._choose()

    @property
    def table(self) -> Table | None:
        """The chosen table; None while it is being worked out."""
        return self._worked_out.get(self.chooser.value)

    def _choose(self) -> None:
        """Show the chosen table, or work it out first."""
        if self.table is not None:
            self._show(self.table)
            return
        self.message.value = style.note(f"Working out {self.chooser.value} ... Some tables are "
                                        "simulated and take up to a minute; what is below is of "
                                        "the last one.")
        for part in (self.figure, self.rows, self.words):
            part.add_class("xstage-stale")
        self._export.disabled = True
        if self._working:
            return
        self._working, name = True, self.chooser.value

        def points() -> Iterator[Table]:
            yield worked_out(name)

        experiment.deliver(points(), self._take, self._end)

    def _take(self, table: Table) -> None:
        self._worked_out[table.name] = table

    def _end(self, error: XStageError | None) -> None:
        self._working = False
        if error is not None:
            self.message.value = style.problem(str(error))
        else:
            self._choose()

    def _show(self, table: Table) -> None:
        for part in (self.figure, self.rows, self.words):
            part.remove_class("xstage-stale")
        self.message.value = style.note(f"{table.title}.")
        columns, cells = printed(table)
        self.badges.value = style.badge_line(_origins(table, columns))
        self.rows.value = style.table([words(name) for name in columns], cells)
        self.words.value = style.words([
            *(f"Taken from published numbers: {name}, from {rows}."
              for name, rows in table.fitted_on.items()),
            *table.notes,
            "; ".join(f"{words(name)} {text(name, value, CELL_DIGITS)}"
                      for name, value in table.summary.items()) + "."])
        self.quantity.unobserve(self._draw, names="value")
        self.quantity.options = [(words(each.published), i)
                                 for i, each in enumerate(table.compared)]
        self.quantity.index = None  # the page may learn of a choice before it has the options
        self.quantity.index = 0 if table.compared else None
        self.quantity.disabled = len(table.compared) < 2
        self.quantity.observe(self._draw, names="value")
        self._draw()

    def _draw(self, _change: object = None) -> None:
        """Draw the chosen quantity of the table; a figure is made anew for its axes."""
        table = self.table
        if table is None:
            return
        self._export.disabled = not table.compared
        if not table.compared:
            self.plot, self.figure.children = None, ()
            return
        compared = table.compared[self.quantity.value or 0]
        self.plot = _figure_of(table, compared)
        self.figure.children = [LiveFigure(self.plot.figure)]

    def export(self) -> None:
        """Write the figure, the rows and every word of the table into the folder."""
        table, plot = self.table, self.plot
        if table is None or plot is None:
            return
        root: Any = plot.figure
        copy: Any = Document.from_json(root.document.to_json()).roots[0]
        columns, _ = printed(table)
        data = {name: [_cell(row.get(name)) for row in table.rows] for name in columns}
        about = {"panel": type(self).__name__, "table": table.name, "title": table.title,
                 "figure": table.compared[self.quantity.value or 0]._asdict(),
                 "fitted_on": table.fitted_on, "summary": table.summary, "notes": table.notes}
        origin = provenance("RECORDED, PREDICTED, SIMULATED", "published tables, law, simulated",
                            table.source)

        def write(folder: str) -> Iterator[Exported]:
            yield export(copy, folder, f"paper-{table.name}", data, about, origin)

        self._export.disabled = True
        self.message.value = style.note("Writing files ...")
        experiment.deliver(write(self.folder.value), self._tell_exported, self._end_export)

    def _tell_exported(self, written: Exported) -> None:
        names = ", ".join(path.name for path in written.files)
        self.message.value = style.note(" ".join(
            [f"Wrote {names} in {written.files[0].parent.resolve()}.", *written.notes]))

    def _end_export(self, error: XStageError | None) -> None:
        self._export.disabled = self.plot is None
        if error is not None:
            self.message.value = style.problem(str(error))


def _figure_of(table: Table, compared: Compared) -> AgainstPublished:
    """Draw one quantity of a table."""
    shown, forms = display(compared.published), {}
    unit = shown.unit or ("times" if "speedup" in compared.published else MIXED)
    published = _column(table, compared.published) * shown.scale
    for column in sorted(compared.predicted, key=_is_simulated):  # hollow ones on top
        predicted = _column(table, column) * shown.scale
        known = np.isfinite(published) & np.isfinite(predicted)
        with np.errstate(divide="ignore", invalid="ignore"):
            error = (predicted - published if compared.difference
                     else 100 * (predicted / published - 1))
        forms[words(column)] = {
            "label": np.array([row_name(row) for row in table.rows])[known],
            "published": published[known], "predicted": predicted[known], "error": error[known]}
    values = np.concatenate([of[name] for of in forms.values()
                             for name in ("published", "predicted")])
    plot = AgainstPublished(
        table.title, words(compared.published), unit, list(forms),
        logarithmic=bool(values.min() > 0 and values.max() > LOG_FROM * values.min()),
        difference=compared.difference)
    columns = (compared.published, *compared.predicted)
    plot.update(forms, badges="; ".join(f"{name}: {shorten(words, MOST_SOURCE)}"
                                        for name, words in _origins(table, columns)))
    return plot


def _column(table: Table, name: str) -> Any:
    values = (row.get(name) for row in table.rows)
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _is_simulated(column: str) -> bool:
    return column.startswith("simulated")


def _origins(table: Table, columns: Iterable[str]) -> list[tuple[str, str]]:
    """Return the badges of columns of a table, by their names, and what each stands for."""
    kinds = {column.split("_")[0] for column in columns}
    recorded = [] if table.source.startswith("none") else [("RECORDED", table.source)]
    return recorded + [(badge, f"columns `{kind}`") for kind, badge in
                       (("law", "PREDICTED"), ("simulated", "SIMULATED")) if kind in kinds]


def _cell(value: Any) -> Any:
    return "" if value is None else value

