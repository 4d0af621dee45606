"""Workload and tuning -> tile program: one structured array per GPU, a row per tile task.

The rows stand in issue order. Row i of a GPU runs on CTA i mod n_ctas, as the static tile loop
of a persistent kernel does. Changing the schedule means permuting rows; nothing else changes.
"""

from xstage_lab.schedule.programs import MAX_TASKS, STORES, Program, build, parameters
from xstage_lab.schedule.tasks import (
    BURST,
    COPY,
    GEMM_TILE,
    LINEAR_1,
    LINEAR_2,
    NOTHING,
    QUERY_TILE,
    TASK,
    Tasks,
)

__all__ = [
    "BURST",
    "COPY",
    "GEMM_TILE",
    "LINEAR_1",
    "LINEAR_2",
    "MAX_TASKS",
    "NOTHING",
    "QUERY_TILE",
    "STORES",
    "TASK",
    "Program",
    "Tasks",
    "build",
    "parameters",
]
