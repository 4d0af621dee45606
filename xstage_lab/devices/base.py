"""What every device promises."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, NamedTuple, Protocol, runtime_checkable

from xstage_lab.errors import Infeasible
from xstage_lab.record import Record, to_plain
from xstage_lab.schedule import Program
from xstage_lab.spec import FusedGemm, MachineSpec


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


def gemm_of(program: Program, device: str) -> FusedGemm:
    """Return the fused GEMM of a program, for devices whose kernel computes nothing else.

    Raises
    ------
    Infeasible
        Naming the device, the workload, and where it runs.
    """
    if not isinstance(program.workload, FusedGemm):
        raise Infeasible(f"the {device} device does not run {type(program.workload).__name__}, "
                         "only burst trains and fused GEMMs; use the simulated device.")
    return program.workload


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
