"""Every published number the lab has, beside what the law gives and, where it can, the model.

Each table is one function, one of `TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable

from xstage_lab.errors import require_choice
from xstage_lab.paper.constants import constants
from xstage_lab.paper.stall import moe_stall, moe_stall_forms, moe_stall_left_out
from xstage_lab.paper.stall_simulated import moe_stall_simulated
from xstage_lab.paper.table import Table

#: Tables by name; each is worked out when it is called.
TABLES: dict[str, Callable[[], Table]] = {
    "constants": constants,
    "moe-stall": moe_stall,
    "moe-stall-forms": moe_stall_forms,
    "moe-stall-left-out": moe_stall_left_out,
    "moe-stall-simulated": moe_stall_simulated,
}


def table(name: str) -> Table:
    """Work out one table.

    Raises
    ------
    UnknownName
        With the nearest names.
    """
    require_choice("table", name, TABLES)
    return TABLES[name]()
