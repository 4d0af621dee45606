"""Records and predictions -> Bokeh figures: each is made once, then only its data change."""

from xstage_lab.plots.base import Plot, points
from xstage_lab.plots.burst import Backlog, IsolatedBurst, IssueGap, PeriodGap
from xstage_lab.plots.moe import OrderMap, OrdersOverTime, OrderTimes, SpeedUp
from xstage_lab.plots.published import GemmReduceScatter, IssueAgainstCompletion, RateAgainstSms
from xstage_lab.plots.timeline import Timeline
from xstage_lab.plots.tune import Residuals, TileMap, TotalCurve, TotalTimes
from xstage_lab.plots.ulysses import HiddenOverGpus, HiddenOverTokens, ModeTimes

__all__ = [
    "Backlog", "GemmReduceScatter", "HiddenOverGpus", "HiddenOverTokens", "IsolatedBurst",
    "IssueAgainstCompletion", "IssueGap", "ModeTimes", "OrderMap", "OrderTimes",
    "OrdersOverTime", "PeriodGap", "Plot", "RateAgainstSms", "Residuals", "SpeedUp", "TileMap",
    "Timeline", "TotalCurve", "TotalTimes", "points",
]
