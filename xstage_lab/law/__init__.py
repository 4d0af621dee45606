"""The Burst-Gap law: what it says of bursts (`bursts`) and of staged tiles (`tiles`)."""

from xstage_lab.law.bursts import (
    completion_coupled_period,
    floats,
    is_free,
    isolated_issue_time,
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
    "Staged",
    "TileRun",
    "completion_coupled_period",
    "floats",
    "incast",
    "is_free",
    "isolated_issue_time",
    "issue_free_time",
    "issue_rate",
    "issue_time",
    "lockstep_issue_time",
    "peak_backlog",
    "period",
    "recovery_gap",
    "regime",
    "staged_tiles",
    "train_bounds",
    "train_total",
    "unfused_time",
]
