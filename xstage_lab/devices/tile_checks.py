"""What goes into a run of `fused_tiles.cu`, and what it must leave: on the host as on GPUs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xstage_lab import reference
from xstage_lab.kernels import fused_tiles


def operand(rng: np.random.Generator, n_rows: int, k: int) -> NDArray[np.uint16]:
    """Return random bf16 values, in rows padded with NaN to a multiple of 16 bytes."""
    padded = np.full((n_rows, fused_tiles.leading_dimension(k, 2)), 0xFFFF, np.uint16)
    padded[:, :k] = reference.random_bf16(rng, (n_rows, k))
    return padded


def tiles_of(tasks: NDArray[np.void], layer: int = 0) -> list[reference.Tile]:
    """Return the tiles of one layer of a GPU's tasks, dtype `fused_tiles.TASK`."""
    return [reference.Tile(row, *(int(task[name]) for name in ("owner", "m0", "n0", "m", "n")))
            for row, task in enumerate(tasks) if task["layer"] == layer]


def check_flags(flags: NDArray[np.uint32], tasks: NDArray[np.void], signal: str, gpu: int) -> None:
    """Raise `WrongResult` unless each stored tile's flag was raised at its owner, and no other."""
    expected = np.zeros_like(flags)
    stored = np.flatnonzero(tasks["owner"] >= 0)
    if signal != "none":
        expected[tasks["owner"][stored], stored] = fused_tiles.N_STORE_WARPS
    if (flags != expected).any():
        owner, row = np.argwhere(flags != expected)[0]
        raise reference.WrongResult(
            f"GPU {gpu}, tile in row {row}: its flag at GPU {owner} is {flags[owner, row]}, "
            f"expected {expected[owner, row]} (signal = {signal}).")
