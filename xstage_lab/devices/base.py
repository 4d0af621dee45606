"""What every device promises."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from xstage_lab.errors import XStageError
from xstage_lab.record import Record, to_plain
from xstage_lab.schedule import Program, Tasks
from xstage_lab.spec import BurstTrain, MachineSpec, MoELayer, UlyssesAttention


class Capabilities(NamedTuple):
    """What a device can do; the contract tests run per capability.

    Attributes
    ----------
    times : bool
        Its times mean something (a functional check has none).
    per_tile : bool
        Its records hold per-tile times.
    any_program : bool
        It runs any tile program, not only what was recorded.
    """

    times: bool
    per_tile: bool
    any_program: bool


@runtime_checkable
class Device(Protocol):
    """Runs a tile program and returns a record.

    Attributes
    ----------
    name : str
        As on the command line: `simulated`, `recorded`, ...
    badge : str
        `LIVE`, `SIMULATED` or `RECORDED`.
    machine : MachineSpec
        What it is, or stands for.
    capabilities : Capabilities
    """

    @property
    def name(self) -> str: ...  # noqa: D102  (described above, like the next three)
    @property
    def badge(self) -> str: ...  # noqa: D102
    @property
    def machine(self) -> MachineSpec: ...  # noqa: D102
    @property
    def capabilities(self) -> Capabilities: ...  # noqa: D102

    def measure(self, program: Program, seed: int | None = None) -> Record:
        """Run `program` once; `seed` makes whatever is random repeatable.

        Raises
        ------
        XStageError
            If the program cannot run here, with the reason and the way out.
        """
        ...


def check_counters(tasks: Sequence[Tasks]) -> None:
    """Refuse programs whose counters can never be full, or are full before their last signal.

    Raises
    ------
    XStageError
        Naming the GPU, the counter, and how many tasks raise it.
    """
    for gpu, rows in enumerate(tasks):
        waiting = rows[rows["waits_for"] >= 0]
        raised = rows["signals"][rows["signals"] >= 0]
        n = np.bincount(raised, minlength=int(waiting["waits_for"].max(initial=-1)) + 1)
        wrong = np.flatnonzero(n[waiting["waits_for"]] != waiting["wait_count"])
        if wrong.size:
            task = waiting[wrong[0]]
            raised_by = n[task["waits_for"]] or "no"
            raise XStageError(
                f"GPU {gpu}: a task waits for counter {task['waits_for']} to reach "
                f"{task['wait_count']}, but {raised_by} tasks raise it; a task waits for all "
                "that raise its counter.")


def is_balanced(program: Program) -> bool:
    """Return whether all GPUs do the same, so that one stands for all.

    Round-robin owners differ by a tile at most; rows may not divide evenly among owners.
    """
    workload = program.workload
    if isinstance(workload, MoELayer):
        rows = workload.expert_rows.reshape(workload.n_gpus, -1)
        return bool((rows == rows[0]).all())
    if isinstance(workload, UlyssesAttention):
        return workload.is_symmetric
    if isinstance(workload, BurstTrain) or workload.destinations == "round-robin":
        return True
    stored = {program.remote_bytes(gpu) for gpu in range(program.n_gpus)}
    return workload.destinations == "row-owner" and len(stored) == 1


def figures_digest(machine: MachineSpec) -> str:
    """Return a short name of all of a machine's figures; equal names mean equal figures.

    Two machines of one name differ where somebody entered other figures of the store path.
    """
    text = json.dumps(to_plain(dataclasses.asdict(machine)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings(device: Device) -> dict[str, Any]:
    """Return what the provenance of a device's records says of it besides names; may be empty."""
    found: dict[str, Any] = getattr(device, "settings", {})
    return found
