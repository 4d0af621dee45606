"""What goes into a run of `fused_tiles.cu`, and what it must leave: on the host as on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab import reference
from xstage_lab.errors import Infeasible
from xstage_lab.kernels import fused_tiles
from xstage_lab.kernels.fused_tiles import Variant, leading_dimension
from xstage_lab.schedule import Program
from xstage_lab.spec import DTYPE_BYTES, FusedGemm, MoELayer

Product = tuple[NDArray[np.float64], NDArray[np.float64]]


class Shape(NamedTuple):
    """One layer of a GPU's program: the product of A (m, k) and B (n, k), rows with rows.

    Attributes
    ----------
    m, n, k : int
    fed : bool
        Whether A is the first k columns of what the layer before leaves.
    """

    m: int
    n: int
    k: int
    fed: bool = False

    def output(self, variant: Variant) -> tuple[int, int]:
        """Rows and elements of a row of the output's memory: more rows than a tile may write."""
        return self.m + variant.tile_m, leading_dimension(self.n, variant.out_bytes)

    def output_bytes(self, variant: Variant) -> int:
        """Size of the output's memory."""
        n_rows, ld = self.output(variant)
        return n_rows * ld * variant.out_bytes

    @property
    def operand_bytes(self) -> int:
        """Size of the operands that it has of its own."""
        n_rows = self.n + (0 if self.fed else self.m)
        return n_rows * leading_dimension(self.k, 2) * DTYPE_BYTES["bf16"]


def gemms_of(program: Program, device: str) -> FusedGemm | MoELayer:
    """Return the workload of a program of GEMMs.

    Raises
    ------
    Infeasible
        Naming the device, the workload, and where it runs.
    """
    if not isinstance(program.workload, FusedGemm | MoELayer):
        raise Infeasible(f"the {device} device does not run {type(program.workload).__name__}, "
                         "only burst trains, fused GEMMs and MoE layers; use the simulated "
                         "device.")
    return program.workload


def shapes_of(workload: FusedGemm | MoELayer, gpu: int, stores: str) -> tuple[Shape, ...]:
    """Return the layers of a GPU, as `fused_tiles.pack_tasks` counts them.

    The kernel has no activation: Linear-2 of an MoE layer takes the first `intermediate` columns
    of Linear-1's output, which is stored whole where an activation would store half of it. With
    stores off there is none, and Linear-2 has inputs of its own, because what is multiplied
    decides how fast the clocks run.
    """
    if isinstance(workload, FusedGemm):
        return (Shape(workload.m, workload.n, workload.k),)
    rows = workload.expert_rows.reshape(workload.n_gpus, -1)[gpu].tolist()
    return tuple(shape for m in rows for shape in (
        Shape(m, 2 * workload.intermediate, workload.hidden),
        Shape(m, workload.hidden, workload.intermediate, fed=stores != "off")))


class Inputs:
    """Random operands of one layer, and what its result must be.

    Attributes
    ----------
    shape : Shape
    a : uint16 array of shape (m, ld), or None
        Raw bf16 values, rows padded to 16 bytes; None where the layer before feeds it.
    b : uint16 array of shape (n, ld)
    """

    def __init__(self, rng: np.random.Generator, shape: Shape, out_dtype: str) -> None:
        self.shape, self.out_dtype = shape, out_dtype
        self.a = None if shape.fed else operand(rng, shape.m, shape.k)
        self.b = operand(rng, shape.n, shape.k)

    def product(self, before: NDArray[np.uint16]) -> Product:
        """Return result and tolerance, as `reference.product` does; kept where nothing feeds it.

        Parameters
        ----------
        before : uint16 array of shape (m or more, ld)
            What the layer before has left, for one that is fed.
        """
        return self._times_b(before) if self.a is None else self._own

    @functools.cached_property
    def _own(self) -> Product:
        assert self.a is not None  # noqa: S101  (asked only where nothing feeds it)
        return self._times_b(self.a)

    def _times_b(self, a: NDArray[np.uint16]) -> Product:
        m, _, k, _ = self.shape
        return reference.product(a[:m, :k], self.b[:, :k], self.out_dtype)


def random_inputs(shapes: Sequence[Sequence[Shape]], out_dtype: str,
                  seed: int) -> list[list[Inputs]]:
    """Return the inputs of every layer, by GPU; `shapes` likewise."""
    rngs = [np.random.default_rng((seed, gpu)) for gpu in range(len(shapes))]
    return [[Inputs(rng, shape, out_dtype) for shape in each]
            for rng, each in zip(rngs, shapes, strict=True)]


def operand(rng: np.random.Generator, n_rows: int, k: int) -> NDArray[np.uint16]:
    """Return random bf16 values, in rows padded with NaN to a multiple of 16 bytes."""
    padded = np.full((n_rows, leading_dimension(k, 2)), 0xFFFF, np.uint16)
    padded[:, :k] = reference.random_bf16(rng, (n_rows, k))
    return padded


def tiles_of(tasks: NDArray[np.void], layer: int = 0) -> list[reference.Tile]:
    """Return the tiles that a GPU's tasks store of one layer; dtype `fused_tiles.TASK`."""
    return [reference.Tile(row, *(int(task[name]) for name in ("owner", "m0", "n0", "m", "n")))
            for row, task in enumerate(tasks) if task["layer"] == layer and task["owner"] >= 0]


def check_outputs(inputs: Sequence[Inputs], out: Sequence[NDArray[Any]], tasks: NDArray[np.void],
                  boxes: Sequence[int], gpu: int) -> None:
    """Check every element of every layer of a GPU; a layer that is fed, against what fed it.

    Parameters
    ----------
    inputs : sequence of Inputs
        By layer.
    out : sequence of uint16 (bf16) or float32 arrays of shape (n_boxes, rows, ld)
        By layer: what `gpu` has stored, filled with `reference.POISON` bytes before the run.
    tasks : array of dtype `fused_tiles.TASK`
    boxes : sequence of int
        By owner: which of the outputs its tiles are in.
    gpu : int

    Raises
    ------
    WrongResult
        Naming tile, element, expected, got.
    """
    for i, layer in enumerate(inputs):
        tiles = [tile._replace(owner=boxes[tile.owner]) for tile in tiles_of(tasks, i)]
        nothing = np.empty((0, 0))
        expected, tolerance = (layer.product(out[i - 1][boxes[gpu]]) if tiles
                               else (nothing, nothing))
        reference.check_output(out[i], expected, tolerance, tiles, gpu=gpu)


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
