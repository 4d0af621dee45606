"""Every published number the lab has, beside what the law gives and, where it can, the model.

Each table is one function, one of `TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable

from xstage_lab.errors import require_choice
from xstage_lab.paper.attention import attention_table
from xstage_lab.paper.attention_simulated import (
    attention_simulated_table,
    ulysses_turnover_table,
)
from xstage_lab.paper.constants import constants_table
from xstage_lab.paper.gemm_rs import gemm_rs_table
from xstage_lab.paper.grid import grid_assumptions_table, grid_layers_table, grid_table
from xstage_lab.paper.mega_moe import mega_moe_table
from xstage_lab.paper.messages import issue_completion_table
from xstage_lab.paper.moe_spans import moe_spans_table
from xstage_lab.paper.stall import (
    moe_stall_forms_table,
    moe_stall_left_out_table,
    moe_stall_table,
)
from xstage_lab.paper.stall_simulated import moe_stall_simulated_table
from xstage_lab.paper.sweeps import store_sweeps_table
from xstage_lab.paper.table import Table
from xstage_lab.paper.wave_lag import wave_lag_table

#: Tables by name; each is worked out when it is called.
TABLES: dict[str, Callable[[], Table]] = {
    "constants": constants_table,
    "moe-stall": moe_stall_table,
    "moe-stall-forms": moe_stall_forms_table,
    "moe-stall-left-out": moe_stall_left_out_table,
    "moe-stall-simulated": moe_stall_simulated_table,
    "attention": attention_table,
    "attention-simulated": attention_simulated_table,
    "ulysses-turnover": ulysses_turnover_table,
    "store-sweeps": store_sweeps_table,
    "gemm-rs": gemm_rs_table,
    "issue-completion": issue_completion_table,
    "wave-lag": wave_lag_table,
    "mega-moe": mega_moe_table,
    "moe-spans": moe_spans_table,
    "grid": grid_table,
    "grid-layers": grid_layers_table,
    "grid-assumptions": grid_assumptions_table,
}


def worked_out(name: str) -> Table:
    """Work out one table.

    Raises
    ------
    UnknownName
        With the nearest names.
    """
    require_choice("table", name, TABLES)
    return TABLES[name]()
