"""Records and predictions -> Bokeh figures: each is made once, then only its data change."""

from xstage_lab.plots.base import Plot, points
from xstage_lab.plots.burst import Backlog, IsolatedBurst, IssueGap, PeriodGap
from xstage_lab.plots.published import GemmReduceScatter, IssueAgainstCompletion, RateAgainstSms
from xstage_lab.plots.timeline import Timeline
from xstage_lab.plots.tune import Residuals, TileMap, TotalCurve, TotalTimes

__all__ = [
    "Backlog", "GemmReduceScatter", "IsolatedBurst", "IssueAgainstCompletion", "IssueGap",
    "PeriodGap", "Plot", "RateAgainstSms", "Residuals", "TileMap", "Timeline", "TotalCurve",
    "TotalTimes", "points",
]
