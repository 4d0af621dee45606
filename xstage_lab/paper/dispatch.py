"""The dispatch of a fused MoE kernel on the same egress as its combine stores.

Before a GPU can compute a row, the row's token must come from the GPU it lives on. Others pull
their tokens from this GPU while its first tiles run, over the link that its combine stores take.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from xstage_lab import analysis, law
from xstage_lab.analysis.moe import rounds_of_gpu
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.paper.moe_kernel import machine_of
from xstage_lab.schedule import COPY, LINEAR_1, Program, Tasks, build
from xstage_lab.schedule.attention import side_by_side
from xstage_lab.schedule.moe import row_blocks
from xstage_lab.schedule.tasks import empty_tasks
from xstage_lab.spec import DTYPE_BYTES, MachineSpec, MoELayer, Tuning

ROWS_SENT = 8  # at a time: of the order of the 32 KiB that a tile stores


def dispatch_bytes(moe: MoELayer) -> float:
    """Bytes that leave a GPU as tokens for rows of other GPUs, one copy for every row."""
    rows = moe.tokens * moe.top_k * (moe.n_gpus - 1) / moe.n_gpus
    return rows * moe.hidden * DTYPE_BYTES[moe.dtype]


def law_total_s(moe: MoELayer, machine: MachineSpec, tuning: Tuning) -> float:
    """Total time by the law where the path drains all of the dispatch first (s).

    `moe` must be balanced: one GPU stands for all.
    """
    _, run, _ = rounds_of_gpu(moe, machine, analysis.published(machine), tuning, 0)
    behind = run._replace(ahead_bytes=dispatch_bytes(moe))
    return float(law.staged_rounds(behind).total_s.max())


def simulated_total_s(moe: MoELayer, machine: MachineSpec, tuning: Tuning) -> float:
    """Total time on a simulated device whose SMs have a second role that sends tokens (s).

    Both roles share the path first come, first served. Linear-1 of a row block waits until a
    like block's tokens have been accepted by the path, which stands for their arrival here.
    """
    n = machine.n_sms
    both = dataclasses.replace(machine, n_sms=2 * n,
                               fp8_flop_per_s=2 * machine.fp8_flop_per_s,
                               bf16_flop_per_s=2 * machine.bf16_flop_per_s)
    plain = build(moe, machine, tuning)
    tasks = tuple(side_by_side(tiles, _waited_for(tiles, moe, tuning, gpu), 2 * n, n)
                  for gpu, tiles in enumerate(plain.tasks))
    program: Program = dataclasses.replace(plain, tasks=tasks, n_ctas=2 * n)
    return SimulatedDevice(both).measure(program).summary["total_s"]


def _waited_for(tiles: Tasks, moe: MoELayer, tuning: Tuning, gpu: int) -> Tasks:
    """Return the tasks that send tokens, and let the tiles of Linear-1 wait for them."""
    _, _, rows = row_blocks(moe, tuning, gpu)
    n_each = -(-rows // ROWS_SENT)
    block, away = np.repeat(np.arange(rows.size), n_each), moe.n_gpus - 1
    sent = empty_tasks(block.size, COPY)
    sent["store_bytes"] = ((rows / n_each)[block] * moe.hidden * DTYPE_BYTES[moe.dtype]
                           * away / moe.n_gpus)
    sent["owner"] = (gpu + 1 + np.arange(block.size) % away) % moe.n_gpus
    sent["signals"] = rows.size + block  # beyond the counters of Linear-1
    first = tiles["kind"] == LINEAR_1
    of = tiles["signals"][first]
    tiles["waits_for"][first], tiles["wait_count"][first] = rows.size + of, n_each[of]
    return sent


def lead_beyond_dispatch(moe: MoELayer, machine: MachineSpec) -> int:
    """Rows of Linear-1 that a GPU computes while the dispatch drains."""
    drain_s = dispatch_bytes(moe) / machine_of(machine.name).link.egress_bytes_per_s
    row_s = 4 * moe.hidden * moe.intermediate / machine.flop_per_s(moe.dtype)
    return min(max(round(drain_s / row_s), 1), int(moe.gpu_rows.max()))
