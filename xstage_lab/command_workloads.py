"""From the options of the command line to a workload and its tuning."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from xstage_lab import catalog
from xstage_lab.errors import InvalidValue, UnknownName, XStageError
from xstage_lab.spec import (
    BurstTrain,
    FusedGemm,
    MachineSpec,
    MoELayer,
    Tuning,
    UlyssesAttention,
    Workload,
    default_tuning,
)

#: Options that only some workloads have, and what they are where they are left out.
WORKLOAD_DEFAULTS: dict[str, dict[str, Any]] = {
    "burst": {"producers": None, "bytes": 32768, "gap": 3e-6, "bursts": 50, "sync": "free"},
    "fused-gemm": {"m": 8192, "n": 8192, "k": 4096, "tile": "128x128x64", "depth": 2,
                   "destinations": "round-robin", "dtype": "bf16", "out_dtype": "bf16"},
    "ulysses": {"model": "Wan2-14B-480p", "tokens": None, "mode": "fused", "causal": False,
                "comm_sms": 16, "tile": None, "depth": 2},
    "moe": {"model": "DSv4-Pro", "tokens": 4096, "routing": "balanced", "order": "wave",
            "wave_experts": None, "dtype": "fp8", "tile": "128x128x64", "depth": 2},
}


def workload_of(
    options: argparse.Namespace, machine: MachineSpec
) -> tuple[Workload, Tuning | None]:
    """Build the workload and its tuning from the options."""
    _fill_in(options)
    n_gpus = min(8, machine.max_gpus) if options.gpus is None else options.gpus
    if options.workload == "burst":
        return BurstTrain(
            n_producers=machine.n_sms if options.producers is None else options.producers,
            burst_bytes=options.bytes, gap_s=options.gap, n_bursts=options.bursts,
            sync=options.sync,
            n_gpus=machine.full_rate_gpus if options.gpus is None else options.gpus), None
    if options.workload == "ulysses":
        return _ulysses(options, machine, n_gpus)
    layer: MoELayer | FusedGemm
    if options.workload == "moe":
        layer = catalog.moe_layer(options.model, options.tokens, n_gpus=n_gpus,
                                  routing=_routing(options.routing), order=options.order,
                                  wave_experts=options.wave_experts, dtype=options.dtype)
    else:
        layer = FusedGemm(m=options.m, n=options.n, k=options.k, n_gpus=n_gpus,
                          destinations=options.destinations, dtype=options.dtype,
                          out_dtype=options.out_dtype)
    tile_m, tile_n, tile_k = _tile(options.tile)
    return layer, Tuning(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, issue_depth=options.depth)


def _routing(routing: str) -> str | tuple[int, ...]:
    """Return a routing by name, or the rows of each expert from numbers between commas."""
    counts = str(routing).split(",")
    if len(counts) > 1 and all(count.isascii() and count.isdigit() for count in counts):
        return tuple(map(int, counts))
    return routing


def _ulysses(options: argparse.Namespace, machine: MachineSpec,
             n_gpus: int) -> tuple[UlyssesAttention, Tuning]:
    tokens = {} if options.tokens is None else {"sequence": options.tokens}
    attention = catalog.attention(options.model, n_gpus=n_gpus, mode=options.mode,
                                  causal=options.causal, n_comm_sms=options.comm_sms, **tokens)
    size = {} if options.tile is None else dict(
        zip(("tile_m", "tile_n", "tile_k"), _tile(options.tile), strict=True))
    return attention, dataclasses.replace(default_tuning(attention, machine), **size,
                                          issue_depth=options.depth)


def _fill_in(options: argparse.Namespace) -> None:
    """Set what was left out; refuse options of other workloads, which would be dropped unread."""
    if options.workload not in WORKLOAD_DEFAULTS:
        raise UnknownName("workload", options.workload, WORKLOAD_DEFAULTS)
    own = WORKLOAD_DEFAULTS[options.workload]
    for name in dict.fromkeys(name for each in WORKLOAD_DEFAULTS.values() for name in each):
        if getattr(options, name) is None:
            setattr(options, name, own.get(name))
        elif name not in own:
            others = (f"--workload {workload}" for workload, defaults in WORKLOAD_DEFAULTS.items()
                      if name in defaults)
            raise XStageError(f"--{name.replace('_', '-')} is an option of {' and '.join(others)}; "
                              f"the workload here is {options.workload}.")


def _tile(tile: str) -> tuple[int, int, int]:
    parts = tile.lower().split("x")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidValue("tile", tile, "MxNxK in elements", remedy="For example 128x128x64.")
    return int(parts[0]), int(parts[1]), int(parts[2])
