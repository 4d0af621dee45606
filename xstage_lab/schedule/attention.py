"""Tile programs of Ulysses attention: a query tile's loop over keys, then its output tile.

Query tiles are cut at the borders of the GPUs' rows, so that each has one owner. Every GPU starts
each head at its successor's rows: then no two GPUs store to the same owner at a time.
"""

from __future__ import annotations

import numpy as np

from xstage_lab.schedule.tasks import COPY, NOTHING, QUERY_TILE, Tasks, empty_tasks
from xstage_lab.spec import DTYPE_BYTES, Tuning, UlyssesAttention


def tasks_of(attention: UlyssesAttention, tuning: Tuning, n_ctas: int, gpu: int) -> Tasks:
    """Return the tile tasks of one GPU in issue order."""
    tiles = _query_tiles(attention, tuning, gpu)
    if attention.mode == "fused" or attention.n_gpus == 1:
        return tiles
    away = np.flatnonzero(tiles["owner"] != gpu)
    copies = empty_tasks(away.size, COPY)
    for name in ("group", "m0", "n0", "m", "n", "store_bytes", "owner"):
        copies[name] = tiles[name][away]
    tiles["owner"] = gpu
    if attention.mode == "serial":  # one counter: nothing is sent before all is computed
        tiles["signals"], copies["waits_for"], copies["wait_count"] = 0, 0, tiles.size
        return np.concatenate([tiles, copies])
    tiles["signals"][away] = copies["waits_for"] = np.arange(away.size)
    copies["wait_count"] = 1
    return side_by_side(tiles, copies, n_ctas, attention.n_comm_sms)


def _query_tiles(attention: UlyssesAttention, tuning: Tuning, gpu: int) -> Tasks:
    starts, ends, owners = [], [], []
    for step in range(attention.n_gpus):
        owner = (gpu + 1 + step) % attention.n_gpus
        low, high = attention.shard_rows(owner)
        cuts = np.append(np.arange(low, high, tuning.tile_m), high)
        starts.append(cuts[:-1])
        ends.append(cuts[1:])
        owners.append(np.full(cuts.size - 1, owner))
    first, last, owner_of = (np.concatenate(parts) for parts in (starts, ends, owners))
    heads = attention.heads // attention.n_gpus
    head, tile = np.divmod(np.arange(heads * first.size), first.size)
    tasks = empty_tasks(head.size, QUERY_TILE)
    tasks["group"], tasks["owner"] = head, owner_of[tile]
    tasks["m0"], tasks["m"] = first[tile], (last - first)[tile]
    tasks["n0"], tasks["n"] = head * attention.head_dim, attention.head_dim
    rows = tasks["m"].astype(np.int64)
    if attention.causal:  # row r sees r + 1 keys
        pairs = rows * (2 * tasks["m0"].astype(np.int64) + rows + 1) // 2
        tasks["k"] = tasks["m0"] + tasks["m"]
    else:
        pairs = rows * attention.sequence
        tasks["k"] = attention.sequence
    tasks["flop"] = 4 * attention.head_dim * pairs
    tasks["store_bytes"] = rows * attention.head_dim * DTYPE_BYTES[attention.out_dtype]
    return tasks


def side_by_side(tiles: Tasks, copies: Tasks, n_ctas: int, n_comm: int) -> Tasks:
    """Compute on the first CTAs and send on the last ones; who has less to do ends with nothing."""
    n_compute = n_ctas - n_comm
    n_turns = max(-(-tiles.size // n_compute), -(-copies.size // n_comm))
    rows = empty_tasks(n_turns * n_ctas, NOTHING)
    rows["owner"] = tiles["owner"][0]
    for tasks, first, width in ((tiles, 0, n_compute), (copies, n_compute, n_comm)):
        turn, cta = np.divmod(np.arange(tasks.size), width)
        rows[turn * n_ctas + first + cta] = tasks
    return rows
