"""The command line's verb `paper`: tables as one object, or as lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xstage_lab.paper import TABLES, worked_out
from xstage_lab.paper.table import Table, lines


def show(name: str | None, say: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
    """Return one table, or all of them, for `--json` and as lines.

    Of several, `say` is told which one is being worked out, because some take many seconds.

    Raises
    ------
    UnknownName
        If there is no table of that name.
    """
    asked, found = list(TABLES) if name is None else [name], dict[str, Table]()
    for number, each in enumerate(asked, 1):
        if len(asked) > 1:
            say(f"{number} of {len(asked)}: {each} ...")
        found[each] = worked_out(each)
    told = [line for each in found.values() for line in (*lines(each), "")]
    return {"tables": found}, told[:-1]
