"""The command line's verb `paper`: tables as one object, or as lines."""

from __future__ import annotations

from typing import Any

from xstage_lab.paper import TABLES, worked_out
from xstage_lab.paper.table import lines


def show(name: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return one table, or all of them, for `--json` and as lines.

    Raises
    ------
    UnknownName
        If there is no table of that name.
    """
    found = {each: worked_out(each) for each in (TABLES if name is None else [name])}
    told = [line for each in found.values() for line in (*lines(each), "")]
    return {"tables": found}, told[:-1]
