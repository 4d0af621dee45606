"""What all figures share: sources that are made once and refilled, and the data behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, LayoutDOM
from numpy.typing import ArrayLike, NDArray

from xstage_lab.errors import require_choice
from xstage_lab.plots.style import TEXT, shown
from xstage_lab.record import Record

#: Fields that a record does not hold but that follow from those it does.
_DERIVED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "volume_bytes": lambda p: p["n_producers"] * p["burst_bytes"],
    "tile": lambda p: f"{p['tile_m']}×{p['tile_n']}",
}


class Plot:
    """A figure made once; subclasses add `update`, which replaces data and nothing else.

    An update shows what it is given and nothing from before: points that are left out vanish.
    NaN is a value nobody knows and is not drawn.

    Attributes
    ----------
    name : str
        Stem for exported files.
    figure : bokeh.models.LayoutDOM
        What to put on the page.
    """

    name = ""

    def __init__(self, root: LayoutDOM) -> None:
        self.figure = root
        self._sources: dict[str, ColumnDataSource] = {}
        self._values: dict[str, dict[str, NDArray[Any]]] = {}
        self._badges: Any = root.select_one({"name": "badges"})

    def data(self) -> dict[str, NDArray[Any]]:
        """Return what is drawn as one table.

        Returns
        -------
        dict of str to array, shape (n,)
            SI columns under their field names; `series` says which curve or set of points a row
            belongs to. Columns a series does not have are NaN, or empty text.
        """
        sizes = {name: len(next(iter(c.values()))) for name, c in self._values.items()}
        table: dict[str, NDArray[Any]] = {"series": np.repeat(list(sizes), list(sizes.values()))}
        for column in dict.fromkeys(c for values in self._values.values() for c in values):
            missing = "" if column in TEXT else np.nan
            table[column] = np.concatenate([
                values.get(column, np.full(sizes[name], missing))
                for name, values in self._values.items()])
        return table

    def _add(self, series: str, *columns: str) -> ColumnDataSource:
        """Make the source of one series."""
        source = ColumnDataSource({column: [] for column in columns}, name=series)
        self._sources[series] = source
        return source

    def _show(self, series: str, values: Mapping[str, ArrayLike] | None) -> None:
        """Replace the data of one series; `values` are SI, one row per element."""
        source = self._sources[series]
        for name in values or {}:
            require_choice(f"column of {series}", name, source.data)
        given = {name: np.atleast_1d(np.asarray(column, str if name in TEXT else np.float64))
                 for name, column in (values or {}).items()}
        size = max((column.size for column in given.values()), default=0)
        table = {name: np.broadcast_to(given.get(name, "" if name in TEXT else np.nan), size)
                 for name in source.data}
        self._values[series] = table
        source.data = {
            name: column.tolist() if name in TEXT
            else np.where(np.isfinite(column), column * shown(name).scale, np.nan)
            for name, column in table.items()}

    def _say(self, badges: str) -> None:
        """Put provenance under the title."""
        self._badges.text = badges or " "


def points(records: Iterable[Record], *columns: str, **renamed: str) -> dict[str, list[Any]]:
    """Collect fields of records as columns for the measured points of a figure.

    Parameters
    ----------
    records : iterable of Record
    *columns : str
        Fields of the summary or of the parameters; also `volume_bytes` and `tile`.
    **renamed : str
        The same under another name: ``setting="issue_depth"``.

    Returns
    -------
    dict of str to list
        The columns, NaN where a record has no such field, and `badge`.
    """
    fields = {**{name: name for name in (*columns, "badge")}, **renamed}
    table: dict[str, list[Any]] = {name: [] for name in fields}
    for record in records:
        known = {**record.parameters, **record.summary, "badge": record.provenance["badge"]}
        for name, field in fields.items():
            value = _DERIVED[field](known) if field in _DERIVED else known.get(field)
            table[name].append(np.nan if value is None else value)
    return table


def thinned(
    x: NDArray[np.float64], y: NDArray[np.float64], n_most: int = 2000
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return at most `n_most` points of a long curve that look like all of it.

    Of each stretch the lowest and the highest point stay, so that peaks are never lost.
    """
    if x.size <= n_most:
        return x, y
    first = np.linspace(0, x.size, n_most // 2, endpoint=False).astype(np.int64)
    last = np.append(first[1:], x.size)
    keep = np.concatenate([(a + y[a:b].argmin(), a + y[a:b].argmax())
                           for a, b in zip(first, last, strict=True)])
    keep = np.unique(keep)
    return x[keep], y[keep]
