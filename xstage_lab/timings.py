"""Per-tile times that others took of their own kernels, from a CSV file to a record.

A row is a tile; rows may stand in any order. Times are counted on one clock from any zero, and
their unit is in the column's name. They are subtracted before they are rounded, so that stamps
of a global timer, of nineteen digits, lose nothing.

==================== ========================================================================
column               what it is
==================== ========================================================================
gpu, sm              where the tile ran; `sm` may be the number of the persistent CTA
tile                 its number on that GPU
mma_start, mma_end   the span of its MMA
issue_start          the first store warp takes it up
issue_end            the last of its stores is accepted
store_bytes          what it stores to *other* GPUs; 0 for a tile that stays
arrived              its last byte is at the destination; may be left out
slot_wait            how long the MMA role waited for a slot; may be left out
==================== ========================================================================

Where the file has no `slot_wait` but the issue depth D is known, the wait follows: tile j of an
SM needs the slot of its tile j - D, and what passes from the end of the MMA before to the
acceptance of that tile is spent waiting for it, even if operands or other tiles were waited for
at the same time. Without D a gap between two MMAs can be anything, and waits stay unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import FileRejected, XStageError, require_number
from xstage_lab.record import TILE, Record, Tiles, lanes, provenance, summarize_tiles
from xstage_lab.spec import MAX_GPUS
from xstage_lab.tables import check_header, read_rows, to_si

#: Columns that every file has. Any unit of time will do, `_s _ms _us _ns`; and `store_kib`.
COLUMNS = ("gpu", "sm", "tile", "mma_start_us", "mma_end_us", "issue_start_us", "issue_end_us",
           "store_bytes")
#: Columns that may be left out, and cells in them left empty: not known.
OPTIONAL = ("arrived_us", "slot_wait_us")
#: What a line `# name: value` may say.
ABOUT = ("machine", "source", "issue_depth", "n_gpus")

_HIGHEST = {"gpu": MAX_GPUS - 1, "sm": 99_999, "tile": 2**31 - 1, "store_bytes": 2**40}
_LARGEST = Decimal("1e30")
_LONGEST_S = 86_400.0


def read(
    path: str | Path,
    *,
    machine: str | None = None,
    source: str | None = None,
    issue_depth: int | None = None,
    n_gpus: int | None = None,
) -> Record:
    """Read a file of per-tile times; the module says what its columns are.

    Parameters
    ----------
    machine, source : str, optional
        What the kernel ran on, as the catalog calls it; who measured it. These and the following
        stand in place of the file's own lines ``# machine: H100-SXM``.
    issue_depth : int, optional
        Output tiles an SM may hold from the start of their MMA to the acceptance of their stores.
    n_gpus : int, optional
        GPUs that took part, in the file or not.

    Returns
    -------
    Record
        RECORDED, with times in seconds since the first MMA.

    Raises
    ------
    FileRejected
        Naming file, row, reason and the way out.
    InvalidValue
        If `issue_depth` or `n_gpus` is none.
    """
    comments: list[str] = []
    header, rows = read_rows(path, comments)
    check_header(path, header, (*COLUMNS, *OPTIONAL), where="header")
    about = _about(path, comments)
    given = {"machine": machine, "source": source, "issue_depth": issue_depth, "n_gpus": n_gpus}
    about |= {name: value for name, value in given.items() if value is not None}
    for name, high in (("issue_depth", 64), ("n_gpus", MAX_GPUS)):
        if name in about:
            require_number(name, about[name], low=1, high=high, integer=True)
    table = _Table(path, [number for number, _ in rows], {
        to_si(column)[0]: (column, [cells[i] for _, cells in rows])
        for i, column in enumerate(header)})
    tiles, row_of = table.tiles()
    _check_tiles(table, tiles, row_of)
    waits, depth = "not known", about.get("issue_depth")
    derived = tiles["slot_wait_s"]
    if depth is not None:
        waits, derived = "derived from the issue depth", _slot_waits(table, tiles, row_of, depth)
    if "slot_wait_s" in table.columns:
        waits, derived = "as given", tiles["slot_wait_s"]
    tiles["slot_wait_s"] = derived
    return _record(path, tiles, about, waits)


def most_held(tiles: Tiles) -> int:
    """Return the most tiles any SM holds at a time: the issue depth is this or more."""
    return max(int((np.arange(1, own.size + 1) - np.searchsorted(
        tiles["issue_end_s"][own], tiles["mma_start_s"][own], side="right")).max())
        for own in lanes(tiles))


class _Table(NamedTuple):
    """The cells of a file: numbers of the rows, and by SI name each column's own name and cells."""

    path: str | Path
    numbers: list[int]
    columns: dict[str, tuple[str, list[str]]]

    def rejected(self, i: int, si_name: str, reason: str) -> FileRejected:
        column = self.columns[si_name][0]
        return FileRejected(self.path, reason, f"row {self.numbers[i]}, column {column!r}")

    def exact(self, si_name: str) -> list[Decimal | None]:
        """Return a column in SI without any rounding; None is not known."""
        column, cells = self.columns[si_name]
        factor = Decimal(repr(to_si(column)[1]))
        optional = si_name in {to_si(name)[0] for name in OPTIONAL}
        found: list[Decimal | None] = []
        for i, cell in enumerate(cells):
            if not cell and optional:
                found.append(None)
                continue
            try:
                value = Decimal(cell)
            except InvalidOperation:
                value = Decimal("NaN")
            if not value.is_finite() or value > _LARGEST:
                remedy = " Leave the cell empty if it is not known." if optional else ""
                raise self.rejected(i, si_name, f"{cell[:40]!r} is no number to "
                                    f"count with.{remedy}")
            if value < 0:
                raise self.rejected(i, si_name, f"{cell[:40]} is negative; count times from a "
                                    "zero before all of them, and nothing else is below 0.")
            found.append(value * factor)
        return found

    def whole(self, si_name: str) -> list[int]:
        """Return a column of whole numbers."""
        high, found = _HIGHEST[si_name], []
        for i, value in enumerate(self.exact(si_name)):
            if value is None or value > high or value != int(value):
                raise self.rejected(i, si_name, f"{value} is not possible; allowed: whole numbers "
                                    f"from 0 to {high:,}.")
            found.append(int(value))
        return found

    def tiles(self) -> tuple[Tiles, NDArray[np.int64]]:
        """Return the tiles, each SM's in the order of their MMAs, and for each its row."""
        for column in COLUMNS:
            if to_si(column)[0] not in self.columns:
                raise FileRejected(self.path, f"column {column!r} is missing; every file has "
                                   f"{', '.join(COLUMNS)}, times in any unit.", "header")
        tiles = np.zeros(len(self.numbers), TILE)
        tiles["row"] = self.whole("tile")
        tiles["arrived_s"] = tiles["slot_wait_s"] = np.nan
        for name in ("gpu", "sm", "store_bytes"):
            tiles[name] = self.whole(name)
        starts = self.exact("mma_start_s")
        zero = min(start for start in starts if start is not None)
        for name in ("mma_start_s", "mma_end_s", "issue_start_s", "issue_end_s", "arrived_s",
                     "slot_wait_s"):
            if name in self.columns:
                since = Decimal(0) if name == "slot_wait_s" else zero
                tiles[name] = _floats(self.exact(name), since)
                late = np.flatnonzero(tiles[name] > _LONGEST_S)
                if late.size:
                    raise self.rejected(int(late[0]), name, "is more than a day after the first "
                                        "MMA; check the unit in the column's name.")
        stays = (tiles["store_bytes"] == 0) & np.isnan(tiles["arrived_s"])
        tiles["arrived_s"][stays] = tiles["issue_end_s"][stays]
        order = np.concatenate(lanes(tiles))
        return tiles[order], order


def _floats(values: Sequence[Decimal | None], zero: Decimal) -> list[float]:
    return [float("nan") if value is None else float(value - zero) for value in values]


def _about(path: str | Path, comments: list[str]) -> dict[str, Any]:
    """Return what the lines `# name: value` say; other comments are nobody's business."""
    found: dict[str, Any] = {}
    for comment in comments:
        name, colon, value = (part.strip() for part in comment.partition(":"))
        name = name.lower().replace(" ", "_").replace("-", "_")
        near = difflib.get_close_matches(name, ABOUT, n=1, cutoff=0.8)
        if not colon or not near:
            continue
        where = f"line '# {comment[:40]}'"
        if name not in ABOUT:
            raise FileRejected(path, f"did you mean {near[0]!r}? Known: {', '.join(ABOUT)}.", where)
        found[name] = value
        if name in ("issue_depth", "n_gpus"):
            try:
                found[name] = int(value)
                require_number(name, found[name], low=1, high=64 if name == "issue_depth"
                               else MAX_GPUS, integer=True)
            except XStageError as error:
                raise FileRejected(path, str(error), where) from None
            except ValueError:
                raise FileRejected(path, f"{value[:40]!r} is not a whole number.", where) from None
    return found


def _check_tiles(table: _Table, tiles: Tiles, row_of: NDArray[np.int64]) -> None:
    """Refuse times that no kernel can have taken."""
    def refuse(bad: NDArray[np.bool_], column: str, reason: str) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[np.argmin(row_of[bad])])
            raise table.rejected(int(row_of[i]), column, reason)

    for later, earlier, why in (
        ("mma_end_s", "mma_start_s", "a tile's MMA cannot end before it starts."),
        ("issue_start_s", "mma_end_s", "a tile's stores cannot start before its MMA has ended; "
         "take the time when the store warp has the tile, not when it begins to wait for it."),
        ("issue_end_s", "issue_start_s", "the stores cannot end before they start."),
        ("arrived_s", "issue_start_s", "no byte can arrive before the stores start."),
    ):
        refuse(tiles[later] < tiles[earlier], later, why)
    name = tiles["gpu"].astype(np.int64) * 2**32 + tiles["row"]
    by_row = np.argsort(row_of)
    first = by_row[np.unique(name[by_row], return_index=True)[1]]
    again = np.ones(tiles.size, bool)
    again[first] = False
    refuse(again, "tile", "this GPU has that tile in an earlier row; number its tiles apart.")
    _check_order(tiles, refuse)
    gpus = np.unique(tiles["gpu"])
    starts = [tiles["mma_start_s"][tiles["gpu"] == gpu].min() for gpu in gpus]
    ends = [tiles["issue_end_s"][tiles["gpu"] == gpu].max() for gpu in gpus]
    if max(starts) > min(ends):
        refuse(tiles["gpu"] == gpus[np.argmax(starts)], "mma_start_s",
               "this GPU starts after another has ended. Take all GPUs' times on one clock, or "
               "count each GPU's from its own start; one file is one launch.")
    if not tiles["issue_end_s"].max() > 0:
        raise table.rejected(0, "issue_end_s", "nothing in this file takes any time.")


def _check_order(tiles: Tiles, refuse: Any) -> None:
    """Refuse tiles of an SM that are computed at the same time, or stored out of turn."""
    overlaps, out_of_turn = np.zeros((2, tiles.size), bool)
    for own in lanes(tiles):
        here = tiles[own]
        overlaps[own[1:]] = here["mma_start_s"][1:] < here["mma_end_s"][:-1]
        out_of_turn[own[1:]] = (np.diff(here["issue_start_s"]) < 0) | (
            np.diff(here["issue_end_s"]) < 0)
    refuse(overlaps, "mma_start_s", "starts before the SM's tile before it has ended its MMA; one "
           "MMA role computes one tile at a time. Give CTAs that share an SM numbers of their own.")
    refuse(out_of_turn, "issue_start_s", "is stored before a tile that the SM computed earlier; "
           "slots are freed in the order of the tiles.")


def _slot_waits(table: _Table, tiles: Tiles, row_of: NDArray[np.int64],
                depth: int) -> NDArray[np.float64]:
    """Return how long each tile waited for the slot of the tile `depth` before it."""
    waits = np.zeros(tiles.size)
    for own in lanes(tiles):
        here = tiles[own]
        slot_free = here["issue_end_s"][:-depth]
        early = np.flatnonzero(here["mma_start_s"][depth:] < slot_free)
        if early.size:
            raise table.rejected(
                int(row_of[own[depth + early[0]]]), "mma_start_s",
                f"starts before the stores of the SM's tile {depth} before it are accepted; the "
                f"issue depth is {most_held(tiles)} or more, not {depth}.")
        waits[own[depth:]] = np.maximum(slot_free - here["mma_end_s"][depth - 1:-1], 0.0)
    return waits


def _record(path: str | Path, tiles: Tiles, about: dict[str, Any], waits: str) -> Record:
    gpus, n_sms = np.unique(tiles["gpu"]), len(lanes(tiles))
    if about.get("n_gpus", MAX_GPUS) <= gpus.max():
        raise FileRejected(path, f"holds tiles of GPU {gpus.max()}, but only {about['n_gpus']} "
                           "GPUs are said to take part.")
    file = Path(path).name
    named = {"machine": about["machine"]} if about.get("machine") else {}
    return Record(
        summary=summarize_tiles(tiles, n_sms, float(tiles["store_bytes"].sum()) / gpus.size),
        parameters={"workload": "timings", "n_gpus": about.get("n_gpus"),
                    "issue_depth": about.get("issue_depth"),
                    "n_ctas": -(-n_sms // gpus.size), "n_tiles": int(tiles.size)},
        provenance=provenance(
            "RECORDED", "timings", f"{about.get('source') or 'per-tile times'}, {file}",
            slot_wait=waits, **named),
        tiles=tiles)
