"""A measured figure beside the one asked for, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure.

    Attributes
    ----------
    what : str
        What was measured, in words.
    value : float
        NaN where it could not be measured; `note` then says why.
    asked : float
        The limit that the figure is to keep.
    unit : str
    at_least : bool
        Whether the limit is the least that is asked, rather than the most.
    note : str
        What to know beside the figure.
    """

    what: str
    value: float
    asked: float
    unit: str = ""
    at_least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """`met`, `MISSED` or `not measured`."""
        if math.isnan(self.value):
            return "not measured"
        met = self.value >= self.asked if self.at_least else self.value <= self.asked
        return "met" if met else "MISSED"

    def row(self) -> tuple[str, str, str, str, str]:
        """Cells of the figure in a table: what, measured, asked, verdict, note."""
        measured = "" if math.isnan(self.value) else f"{_text(self.value)} {self.unit}".rstrip()
        limit = f"{'>=' if self.at_least else '<='} {_text(self.asked)} {self.unit}".rstrip()
        return self.what, measured, limit, self.verdict, self.note


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_figures(figures: Iterable[Figure]) -> None:
    """Print figures as a table."""
    print_table(("", "measured", "asked", "", ""), [figure.row() for figure in figures])


def print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of text in aligned columns, the first column to the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        print("  " + "  ".join(cells).rstrip())
