"""Panels for Jupyter: one per notebook, each a widget that shows itself."""

from xstage_lab.lab.burst_gap import BurstGap
from xstage_lab.lab.calculator import Calculator
from xstage_lab.lab.calibrate import Calibrate
from xstage_lab.lab.moe import MoESchedule
from xstage_lab.lab.paper import Paper
from xstage_lab.lab.runs import Runs
from xstage_lab.lab.tune import Tune
from xstage_lab.lab.ulysses import Ulysses

__all__ = ["BurstGap", "Calculator", "Calibrate", "MoESchedule", "Paper", "Runs", "Tune", "Ulysses"]
