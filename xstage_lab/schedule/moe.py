"""Tile programs of MoE layers: two GEMMs per expert, the second fed by the first.

A row block is up to tile_m rows of one expert. A Linear-2 tile needs all Linear-1 tiles of its
block, which raise the block's counter. The tokens of a block live on all GPUs; one owner stands
for them, so that Linear-2 tiles go to the GPUs in turn and (P - 1) / P of the bytes are remote.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xstage_lab.schedule.tasks import LINEAR_1, LINEAR_2, Tasks, empty_tasks
from xstage_lab.spec import DTYPE_BYTES, MoELayer, Tuning

LEAD_TILES = 2  # tiles of Linear-1 for every SM, between it and Linear-2


def tasks_of(moe: MoELayer, tuning: Tuning, n_ctas: int, gpu: int) -> Tasks:
    """Return the tile tasks of one GPU in the order of the layer."""
    expert, row, rows = row_blocks(moe, tuning, gpu)
    first = _tiles(moe, tuning, expert, row, rows, LINEAR_1)
    second = _tiles(moe, tuning, expert, row, rows, LINEAR_2)
    first["owner"] = gpu
    second["owner"] = (gpu + 1 + np.arange(second.size)) % moe.n_gpus
    first["signals"] = second["waits_for"] = 0  # the blocks' counters, in order
    n_first, n_second = tiles_per_block(moe, tuning)
    first["signals"] = np.repeat(np.arange(rows.size), n_first)
    second["waits_for"] = np.repeat(np.arange(rows.size), n_second)
    second["wait_count"] = n_first
    when = _turns(moe, tuning, n_ctas, expert, rows)
    turn = np.concatenate([np.repeat(when[0], n_first), np.repeat(when[1], n_second)])
    return np.concatenate([first, second])[np.argsort(turn, kind="stable")]


def row_blocks(moe: MoELayer, tuning: Tuning, gpu: int) -> tuple[NDArray[np.int64], ...]:
    """Return expert (of the GPU's own), first row and rows of each of its row blocks."""
    held = moe.expert_rows.reshape(moe.n_gpus, -1)[gpu]
    n_blocks = -(-held // tuning.tile_m)
    expert = np.repeat(np.arange(held.size), n_blocks)
    index = np.arange(expert.size) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
    row = index * tuning.tile_m
    return expert, row, np.minimum(tuning.tile_m, held[expert] - row)


def block_order(moe: MoELayer, tuning: Tuning, n_ctas: int,
                gpu: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return in issue order the row blocks of a GPU: layer (0, 1), and index into `row_blocks`."""
    expert, _, rows = row_blocks(moe, tuning, gpu)
    turn = np.concatenate(_turns(moe, tuning, n_ctas, expert, rows))
    order = np.argsort(turn, kind="stable")
    layer, block = np.divmod(order, rows.size)
    return layer, block


def tiles_per_block(moe: MoELayer, tuning: Tuning) -> tuple[int, int]:
    """Tiles of Linear-1 and of Linear-2 in a row block."""
    return -(-2 * moe.intermediate // tuning.tile_n), -(-moe.hidden // tuning.tile_n)


def wave_experts(moe: MoELayer, tuning: Tuning, n_ctas: int) -> int:
    """Experts of a wave: as asked for, or the fewest whose Linear-1 gives every SM two tiles."""
    if moe.wave_experts is not None:
        return moe.wave_experts
    blocks = max(-(-int(moe.expert_rows.mean()) // tuning.tile_m), 1)
    wanted = LEAD_TILES * n_ctas / (blocks * tiles_per_block(moe, tuning)[0])
    return min(max(int(np.ceil(wanted)), 1), moe.experts // moe.n_gpus)


def lead_rows(moe: MoELayer, tuning: Tuning, n_ctas: int) -> int:
    """Rows by which Linear-1 is ahead when interleaved: as asked for, or two tiles for every SM."""
    if moe.min_lead_rows is not None:
        return moe.min_lead_rows
    return -(-LEAD_TILES * n_ctas // tiles_per_block(moe, tuning)[0]) * tuning.tile_m


def _tiles(moe: MoELayer, tuning: Tuning, expert: NDArray[np.int64], row: NDArray[np.int64],
           rows: NDArray[np.int64], kind: int) -> Tasks:
    """All tiles of one layer, block by block."""
    first = kind == LINEAR_1
    n, k = (2 * moe.intermediate, moe.hidden) if first else (moe.hidden, moe.intermediate)
    n_cols = -(-n // tuning.tile_n)
    block, col = np.divmod(np.arange(rows.size * n_cols), n_cols)
    tasks = empty_tasks(block.size, kind)
    tasks["group"], tasks["m0"], tasks["m"] = expert[block], row[block], rows[block]
    tasks["n0"] = col * tuning.tile_n
    tasks["n"] = np.minimum(tuning.tile_n, n - tasks["n0"])
    tasks["k"] = k
    area = tasks["m"].astype(np.int64) * tasks["n"]
    tasks["flop"] = 2 * area * k
    # Linear-1 leaves its activations, half as wide, to Linear-2 in the precision of operands.
    tasks["store_bytes"] = (area // 2 * DTYPE_BYTES[moe.dtype] if first
                            else area * DTYPE_BYTES[moe.out_dtype])
    most = max(tiles_per_block(moe, tuning))
    tasks["panel"] = (2 * expert[block] + (not first)) * most + col
    tasks["panel_bytes"] = tasks["n"].astype(np.int64) * k * DTYPE_BYTES[moe.dtype]
    return tasks


def _turns(moe: MoELayer, tuning: Tuning, n_ctas: int, expert: NDArray[np.int64],
           rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each block's Linear-1 and Linear-2 have their turn."""
    return (_waves if moe.order == "wave" else _interleaved)(moe, tuning, n_ctas, expert, rows)


def _waves(moe: MoELayer, tuning: Tuning, n_ctas: int, expert: NDArray[np.int64],
           rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each block's Linear-1 and Linear-2 have their turn: by groups of experts."""
    wave = expert // wave_experts(moe, tuning, n_ctas)
    return 2 * wave, 2 * wave + 1


def _interleaved(moe: MoELayer, tuning: Tuning, n_ctas: int, expert: NDArray[np.int64],
                 rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Turns by two cursors: a block's Linear-2 once Linear-1 is far enough ahead of its end."""
    ahead = np.concatenate([[0], np.cumsum(rows)])
    lead = lead_rows(moe, tuning, n_ctas)
    # Linear-1 blocks that go first: as many as put it `lead` rows past the start of the block.
    before = np.minimum(np.searchsorted(ahead, ahead[:-1] + lead), rows.size)
    before = np.maximum(before, np.arange(rows.size) + 1)
    return 2 * np.arange(rows.size), 2 * before - 1
