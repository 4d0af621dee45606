"""A program of two layers, the second fed by the first, on emulated GPUs: what MoE layers do.

It lives in a module of its own so that a race check can run it in another process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab import reference
from xstage_lab.devices.host import Layer, TileRun, launch_tiles
from xstage_lab.devices.tile_checks import check_flags, tiles_of
from xstage_lab.kernels.fused_tiles import TASK, Variant
from xstage_lab.kernels.source import Source

M, HIDDEN, N, K = 100, 72, 88, 40  # (M, K) x (K, HIDDEN), then (M, HIDDEN) x (HIDDEN, N)
TILE = 64


def tiles(n_columns: int) -> NDArray[np.void]:
    """The tiles of an output of M rows, as tasks."""
    rows = [(m0, n0) for m0 in range(0, M, TILE) for n0 in range(0, n_columns, TILE)]
    tasks = np.zeros(len(rows), TASK)
    tasks["m0"], tasks["n0"] = np.transpose(rows)
    tasks["m"] = np.minimum(TILE, M - tasks["m0"])
    tasks["n"] = np.minimum(TILE, n_columns - tasks["n0"])
    tasks["waits_for"] = tasks["signals"] = -1
    return tasks


def program(gpu: int, n_gpus: int, interleaved: bool) -> NDArray[np.void]:
    """Layer 1's tiles, kept, and layer 2's, stored to the GPUs in turn.

    A tile of layer 2 needs all tiles of layer 1 in its rows. Interleaved, the rows' two layers
    follow each other; else all of layer 1 comes first.
    """
    first, second = tiles(HIDDEN), tiles(N)
    first["k"], second["k"] = K, HIDDEN
    first["owner"], second["owner"] = gpu, (gpu + np.arange(second.size)) % n_gpus
    second["layer"] = 1
    first["signals"] = first["m0"] // TILE
    second["waits_for"] = second["m0"] // TILE
    second["wait_count"] = -(-HIDDEN // TILE)
    both = np.concatenate([first, second])
    return both[np.argsort(both["m0"], kind="stable")] if interleaved else both


def operands(n_gpus: int, seed: int) -> list[list[Layer]]:
    """Random weights and inputs, and poisoned outputs, for every GPU."""
    rng = np.random.default_rng(seed)

    def poisoned(n_columns: int) -> NDArray[Any]:
        return np.full((M + TILE, n_columns), 0xFFFF, np.uint16)  # more rows than anybody may write

    layers = []
    for gpu in range(n_gpus):
        hidden = poisoned(HIDDEN)
        kept = [hidden if owner == gpu else poisoned(HIDDEN) for owner in range(n_gpus)]
        layers.append([
            Layer(reference.random_bf16(rng, (M, K)), reference.random_bf16(rng, (HIDDEN, K)),
                  kept),
            Layer(hidden, reference.random_bf16(rng, (N, HIDDEN)),
                  [poisoned(N) for _ in range(n_gpus)]),
        ])
    return layers


def variant(**fields: Any) -> Variant:
    """The smallest variant."""
    return Variant(**{"tile_m": TILE, "tile_n": TILE, "tile_k": 32, "n_stages": 2, **fields})


def run(used: Variant, source: Source, *, n_gpus: int = 2, n_ctas: int = 2,
        interleaved: bool = False, seed: int = 0, budget_cycles: int = 5_000_000) -> TileRun:
    """Run the program and check both layers; the second against what the first has left."""
    layers = operands(n_gpus, seed)
    tasks = [program(gpu, n_gpus, interleaved) for gpu in range(n_gpus)]
    done = launch_tiles(used, source, tasks, layers, n_ctas=n_ctas, seed=seed,
                        budget_cycles=budget_cycles)
    for gpu in range(n_gpus):
        for i, layer in enumerate(layers[gpu]):
            expected, tolerance = reference.product(layer.a[:M], layer.b, used.out_dtype)
            reference.check_output(np.stack(layer.out), expected, tolerance,
                                   tiles_of(tasks[gpu], i), gpu=gpu)
        check_flags(done.flags[gpu], tasks[gpu], used.signal, gpu)
    return done
