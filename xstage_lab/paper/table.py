"""One table of published numbers: rows, where each number comes from, and how far it is off."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xstage_lab.units import text, words

X_STAGE = "as reported by X-Stage (arXiv 2607.23264 v1, via public notes)"
CELL_DIGITS = 4  # what most of the published figures have
#: Columns in the unit of the row's `quantity`.
OF_QUANTITY = ("published", "law", "simulated", "completion_coupled", "fitted")


class Compared(NamedTuple):
    """What a figure of a table shows: one column, and those that are to give it.

    Attributes
    ----------
    published : str
    predicted : tuple of str
        In the unit of `published`.
    difference : bool
        Whether errors are differences, because there is nothing to divide by in some rows.
    """

    published: str
    predicted: tuple[str, ...]
    difference: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Published numbers beside what the law and the simulated device give for them.

    Attributes
    ----------
    name, title : str
    source : str
        Who measured the published numbers, and whether they were read second-hand.
    rows : list of dict
        Plain values in SI. A column that starts with `law`, `simulated` or `completion_coupled`
        is what that says; other times and rates were published, follow from published ones, or
        are settings of a simulated run. Columns of `OF_QUANTITY` are in the unit of the row's
        `quantity`.
    fitted_on : dict of str to str
        Each parameter taken from published numbers, and the rows it was taken from.
    summary : dict of str to float
    notes : tuple of str
    compared : tuple of Compared
        What is worth a figure; none where nothing was published row by row.
    """

    name: str
    title: str
    source: str
    rows: list[dict[str, Any]]
    fitted_on: dict[str, str]
    summary: dict[str, float]
    notes: tuple[str, ...] = ()
    compared: tuple[Compared, ...] = ()


def error_ratio(predicted: float, measured: float) -> float:
    """Return predicted / measured - 1."""
    return float(predicted) / float(measured) - 1.0


def spread(name: str, errors: Iterable[float]) -> dict[str, float]:
    """Return the median and the largest size of `errors`, as entries of a summary."""
    size = np.abs(np.fromiter(errors, float))
    return {f"median_{name}": float(np.median(size)), f"worst_{name}": float(size.max())}


def lines(table: Table) -> list[str]:
    """Return a table as lines of text for people."""
    columns, cells = printed(table)
    told = [f"{table.name}: {table.title}", f"Published: {table.source}."]
    told += [f"{parameter} from {rows}." for parameter, rows in table.fitted_on.items()]
    told += ["", *_aligned(columns, cells), ""]
    told += [f"{name}: {text(name, value, CELL_DIGITS)}" for name, value in table.summary.items()]
    return [*told, *table.notes]


def printed(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns, and the rows as text with units."""
    columns = list(dict.fromkeys(column for row in table.rows for column in row))
    return columns, [[_cell(row, column) for column in columns] for row in table.rows]


def row_name(row: dict[str, Any]) -> str:
    """Return what names a row: its words and counts before the first measured value."""
    names = itertools.takewhile(lambda value: isinstance(value, str | int), row.values())
    return " ".join(str(name) for name in names)


def _cell(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str | int):
        return str(value)
    if column.endswith("error_ratio"):
        return f"{value:+.2%}"
    named = row["quantity"] if column in OF_QUANTITY else column
    return text(named, value, CELL_DIGITS)


def _aligned(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Align cells below their columns' names, which are broken into words to save width."""
    names = [words(column) for column in columns]
    widths = [max(map(len, (*name.split(), *column)))
              for name, column in zip(names, zip(*cells, strict=True), strict=True)]
    heads = [textwrap.wrap(name, width) for name, width in zip(names, widths, strict=True)]
    stacked = itertools.zip_longest(*heads, fillvalue="")
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (*stacked, ["-" * width for width in widths], *cells)]
