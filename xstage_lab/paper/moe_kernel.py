"""Fused MoE kernels as others measured them: their tiles, and what law and simulation make of them.

Tiles are those of DeepGEMM's Mega MoE in its public source (csrc/jit_kernels/heuristics of
deepseek-ai/DeepGEMM, and a port to sm_90), later versions perhaps than those that were measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from xstage_lab import analysis, catalog
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.schedule import build
from xstage_lab.spec import MachineSpec, MoELayer, Tuning

TILE_N = 128
ISSUE_DEPTH, N_STAGES = 2, 2  # ASSUMED
#: Height of a tile for up to so many rows per expert.
TILE_M = {
    "H100-SXM": ((64.0, 64), (math.inf, 128)),
    "B200-SXM": ((8.5, 16), (16.5, 32), (32.5, 64), (64.5, 96), (96.5, 128), (math.inf, 192)),
}


class Times(NamedTuple):
    """Total time of one run by the law and on the simulated device (s)."""

    law_s: float
    simulated_s: float


def machine_of(name: str) -> MachineSpec:
    """Return a machine with what nobody published of its store path supposed."""
    return catalog.with_assumptions(catalog.machine(name))


def tuning_of(moe: MoELayer, machine: MachineSpec) -> Tuning:
    """Return the tiles that the public kernel takes for `moe`."""
    rows = moe.tokens * moe.n_gpus * moe.top_k / moe.experts
    tile_m = next(height for limit, height in TILE_M[machine.name] if rows <= limit)
    return Tuning(tile_m=tile_m, tile_n=TILE_N, issue_depth=ISSUE_DEPTH, n_stages=N_STAGES)


def law_total_s(moe: MoELayer, machine: MachineSpec, tuning: Tuning) -> float:
    """Total time by the law, from the machine's figures alone (s)."""
    return float(analysis.predict_moe_map(
        moe, machine, analysis.published(machine), tuning.tile_m, tuning.tile_n,
        tuning.issue_depth, [moe.order], tuning).total_s[0])


def times(moe: MoELayer, machine: MachineSpec, tuning: Tuning) -> Times:
    """Predict and simulate one run; compute times are those of the machine's FLOP rate."""
    record = SimulatedDevice(machine).measure(build(moe, machine, tuning))
    return Times(law_total_s(moe, machine, tuning), record.summary["total_s"])
