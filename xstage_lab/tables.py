"""CSV tables whose column names carry units, read as SI.

This is the one place where microseconds, GB/s and MiB become seconds, bytes per second and
bytes. An empty cell is not known.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from xstage_lab.datafiles import data_path
from xstage_lab.errors import FileRejected, UnknownName

Number = TypeVar("Number", float, NDArray[np.float64])

# Unit in a column name -> factor to SI, and the suffix that SI names end with.
UNITS = {
    "gb_per_s": (1e9, "bytes_per_s"),
    "tb_per_s": (1e12, "bytes_per_s"),
    "tflops": (1e12, "flop_per_s"),
    "mhz": (1e6, "hz"),
    "mib": (2.0**20, "bytes"),
    "kib": (2.0**10, "bytes"),
    "ns": (1e-9, "s"),
    "us": (1e-6, "s"),
    "ms": (1e-3, "s"),
    "percent": (1e-2, "ratio"),
}
_UNIT = re.compile(rf"(?:^|_)({'|'.join(UNITS)})(?=_|$)")


def to_si(column: str) -> tuple[str, float]:
    """Return the SI name of a column, and the factor its numbers take.

    >>> to_si("store_gb_per_s_low")
    ('store_low_bytes_per_s', 1000000000.0)
    >>> to_si("experts")
    ('experts', 1.0)
    """
    found = _UNIT.search(column)
    if not found:
        return column, 1.0
    scale, suffix = UNITS[found[1]]
    return "_".join(filter(None, (without_unit(column), suffix))), scale


def scaled(value: Number, scale: float) -> Number:
    """Return `value` times `scale`, rounded once: 0.76 us is 7.6e-07 s to the last digit."""
    return value * scale if scale >= 1.0 else value / round(1.0 / scale)


def without_unit(column: str) -> str:
    """Return a column name less its unit.

    >>> without_unit("store_gb_per_s_low")
    'store_low'
    """
    return _UNIT.sub("", column).strip("_")


def read_rows(
    path: str | Path, comments: list[str] | None = None
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header of a CSV file and its rows, each with its number in the file, from 1.

    Cells are stripped, blank rows left out, and every row is as long as the header.

    Parameters
    ----------
    comments : list of str, optional
        Lines that begin with ``#`` are put here, less that sign; without it they are rows.

    Raises
    ------
    FileRejected
        Naming the file, the row and the reason.
    """
    def uncommented(stream: TextIO) -> Iterator[str]:
        for line in stream:
            if comments is not None and line.startswith("#"):
                comments.append(line[1:].strip())
                line = "\n"  # so that the rows keep their numbers
            yield line

    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as stream:
            lines = [[cell.strip() for cell in line]
                     for line in csv.reader(uncommented(stream), strict=True)]
    except FileNotFoundError:
        raise FileRejected(path, "no such file.") from None
    except (OSError, ValueError, csv.Error) as error:  # of which some concern the path itself
        raise FileRejected(path, f"cannot be read as CSV in UTF-8 ({error}).") from None
    rows = [(number, line) for number, line in enumerate(lines, 1) if any(line)]
    if len(rows) < 2:
        raise FileRejected(path, "holds no rows; a header and at least one row are needed.")
    header = rows[0][1]
    for number, line in rows[1:]:
        if len(line) != len(header):
            raise FileRejected(
                path,
                f"{len(line)} cells where the header has {len(header)} columns. Text with a "
                "comma in it needs double quotes.",
                f"row {number}",
            )
    return header, rows[1:]


def check_header(
    path: str | Path, header: list[str], known: tuple[str, ...], text: Container[str] = (),
    where: str = "row 1",
) -> None:
    """Raise `FileRejected` for a column that is unknown, has no unit, or stands twice.

    Parameters
    ----------
    known : tuple of str
        Names of columns; any unit of the same quantity will do.
    text : container of str
        Those of them that hold no quantity.
    where : str
        Where the header stands, for messages.
    """
    known_si = {to_si(column)[0] for column in known}
    by_bare_name = {without_unit(column): column for column in known if column not in text}
    seen: set[str] = set()
    for column in header:
        si_name, there = to_si(column)[0], f"{where}, column {column!r}"
        if si_name in seen:
            raise FileRejected(path, "the same quantity stands in an earlier column.", there)
        seen.add(si_name)
        if si_name in known_si:
            continue
        if column in by_bare_name:
            raise FileRejected(
                path, f"no unit in its name; write for instance {by_bare_name[column]!r}.", there
            )
        raise FileRejected(path, str(UnknownName("column", column, known)), there)


def table(name: str) -> NDArray[np.void]:
    """Return a table of `data/`, one element per published row.

    Parameters
    ----------
    name : str
        File name without `.csv`, for instance ``"sm_sweeps"``.

    Returns
    -------
    structured array, shape (n_rows,)
        Columns by their SI names (`to_si`): float64 with NaN where nothing was published, int64
        for whole numbers without a unit, else text.

    Raises
    ------
    UnknownName, FileRejected
    """
    header, rows = read_rows(data_path(f"{name}.csv"))
    columns = {}
    for index, column in enumerate(header):
        si_name, scale = to_si(column)
        columns[si_name] = _column([cells[index] for _, cells in rows], scale)
    found = np.empty(len(rows), [(si_name, values.dtype) for si_name, values in columns.items()])
    for si_name, values in columns.items():
        found[si_name] = values
    return found


def _column(cells: list[str], scale: float) -> NDArray[Any]:
    try:
        values = np.array([float(cell) if cell else np.nan for cell in cells])
    except ValueError:
        return np.array(cells)
    if scale == 1.0 and all(cell.lstrip("-").isdigit() for cell in cells):
        return values.astype(np.int64)
    return scaled(values, scale)
