"""What the tuner may choose from: the values of each knob."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from xstage_lab.errors import InvalidValue, require_choice, require_number
from xstage_lab.spec import (
    MAX_GPUS,
    MachineSpec,
    MoELayer,
    Tuning,
    UlyssesAttention,
    Workload,
    default_tuning,
)
from xstage_lab.spec.moe import ORDERS

TILING = ("tile_m", "tile_n", "tile_k", "issue_depth", "n_stages")
_SMALL_SMEM_BYTES = 128 * 1024.0  # below it deep operand stages leave no room for tiles


@dataclass(frozen=True, kw_only=True)
class Space:
    """Values to choose from; every combination is a candidate.

    Attributes
    ----------
    tile_m, tile_n, tile_k, issue_depth, n_stages : tuple of int
        As in `Tuning`.
    n_ctas : tuple of int; empty takes every SM, or as many as are allowed.
    n_gpus : tuple of int; empty keeps the workload's.
    order : tuple of str
        Of an MoE layer; empty keeps the workload's.

    Raises
    ------
    InvalidValue
        If there is nothing to choose from, or a value is no possible one.
    """

    tile_m: tuple[int, ...] = (64, 128, 192, 256)
    tile_n: tuple[int, ...] = (64, 128, 192, 256)
    tile_k: tuple[int, ...] = (64,)
    issue_depth: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    n_stages: tuple[int, ...] = (3,)
    n_ctas: tuple[int, ...] = ()
    n_gpus: tuple[int, ...] = ()
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if not isinstance(given, tuple | list | range):
                raise InvalidValue(field.name, given, "a tuple of values")
            if not given and field.name in TILING:
                raise InvalidValue(field.name, given, "one value or more")
            for value in given:
                if field.name == "order":
                    require_choice("order", value, ORDERS)
                elif field.name == "n_gpus":
                    require_number("n_gpus", value, low=1, high=MAX_GPUS, integer=True)
                else:
                    Tuning(**{field.name: value})
            object.__setattr__(self, field.name, tuple(sorted(set(given))))

    @classmethod
    def of(cls, workload: Workload, machine: MachineSpec, **changes: tuple[Any, ...]) -> Space:
        """Return what is usual for a workload on a machine; `changes` replace fields."""
        usual: dict[str, tuple[Any, ...]] = {}
        if machine.smem_per_cta_bytes < _SMALL_SMEM_BYTES:
            usual |= {"tile_k": (32,), "n_stages": (2,)}
        if isinstance(workload, MoELayer):
            usual |= {"order": ("interleaved", "wave")}
        elif isinstance(workload, UlyssesAttention):  # keys of a stage are not seen by the law
            fits = default_tuning(workload, machine)
            usual |= {name: (getattr(fits, name),) for name in ("tile_n", "tile_k", "n_stages")}
        return cls(**usual | changes)
