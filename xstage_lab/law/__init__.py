"""The Burst-Gap law: bursts (`bursts`), staged tiles (`tiles`), rounds of unequal ones (`rounds`).

`locality` says which weights a tile order finds in L2; `queues` takes any tiles, one by one.
"""

from xstage_lab.law.bursts import (
    completion_coupled_period,
    floats,
    is_free,
    isolated_issue_time,
    isolated_knee,
    issue_free_time,
    issue_rate,
    issue_time,
    lockstep_issue_time,
    peak_backlog,
    period,
    recovery_gap,
    train_bounds,
    train_total,
)
from xstage_lab.law.locality import fetch_time, missing_blocks
from xstage_lab.law.orders import Orders, TwoLayers, compare_orders
from xstage_lab.law.rounds import (
    Pieces,
    RoundRun,
    Rounds,
    SchedulePath,
    critical_path,
    staged_rounds,
)
from xstage_lab.law.tiles import (
    REGIMES,
    Staged,
    TileRun,
    incast,
    regime,
    staged_tiles,
    unfused_time,
)

__all__ = [
    "REGIMES",
    "Orders",
    "Pieces",
    "RoundRun",
    "Rounds",
    "SchedulePath",
    "Staged",
    "TileRun",
    "TwoLayers",
    "compare_orders",
    "completion_coupled_period",
    "critical_path",
    "fetch_time",
    "floats",
    "incast",
    "is_free",
    "isolated_issue_time",
    "isolated_knee",
    "issue_free_time",
    "issue_rate",
    "issue_time",
    "lockstep_issue_time",
    "missing_blocks",
    "peak_backlog",
    "period",
    "recovery_gap",
    "regime",
    "staged_rounds",
    "staged_tiles",
    "train_bounds",
    "train_total",
    "unfused_time",
]
