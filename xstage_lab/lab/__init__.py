"""Panels for Jupyter: one per notebook, each a widget that shows itself.

A panel is loaded when it is first asked for: a notebook needs one of them, and soon.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xstage_lab.lab.burst_gap import BurstGap
    from xstage_lab.lab.calculator import Calculator
    from xstage_lab.lab.calibrate import Calibrate
    from xstage_lab.lab.moe import MoESchedule
    from xstage_lab.lab.paper import Paper
    from xstage_lab.lab.runs import Runs
    from xstage_lab.lab.tune import Tune
    from xstage_lab.lab.ulysses import Ulysses

_MODULES = {"BurstGap": "burst_gap", "Calculator": "calculator", "Calibrate": "calibrate",
            "MoESchedule": "moe", "Paper": "paper", "Runs": "runs", "Tune": "tune",
            "Ulysses": "ulysses"}

__all__ = ["BurstGap", "Calculator", "Calibrate", "MoESchedule", "Paper", "Runs", "Tune", "Ulysses"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
