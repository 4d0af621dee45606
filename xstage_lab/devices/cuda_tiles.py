"""Launches of `fused_tiles.cu` on GPUs, the check of every element, the times.

Not yet run on a GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab import reference
from xstage_lab.devices.cuda_clock import Anchors, seconds
from xstage_lab.devices.cuda_launch import (
    BUDGET_S,
    Gpu,
    Kernel,
    Launch,
    Memory,
    Place,
    Watchdog,
    cycles,
)
from xstage_lab.devices.tile_checks import Inputs, check_flags, check_outputs
from xstage_lab.kernels import fused_tiles
from xstage_lab.kernels.failures import N_REPORT_WORDS
from xstage_lab.kernels.fused_tiles import CTA_TIMES, TILE_TIMES, LayerAt, Variant
from xstage_lab.record import TILE, Tiles
from xstage_lab.schedule import Program

#: How long launches before the one that counts go on, for clocks to be up, and the most of them.
WARM_UP_S, MAX_WARM_UPS = 0.03, 20
_APART_BYTES = 256  # what begins in a piece of memory lies at multiples of it


class TileRun(NamedTuple):
    """What a run leaves of one GPU.

    Attributes
    ----------
    tile_times : array of dtype `fused_tiles.TILE_TIMES`, a row for each task
    anchors : Anchors
    sms : int64 array of shape (n_ctas,)
    n_registers : int
        Of a thread.
    """

    tile_times: NDArray[np.void]
    anchors: Anchors
    sms: NDArray[np.int64]
    n_registers: int


class TileJob:
    """The layers of a program made ready on every GPU that runs it; a fused GEMM has one.

    Parameters
    ----------
    watchdog : Watchdog
    gpus : sequence of Gpu
        Those that run: the first GPUs of the program.
    places : sequence of sequence of Place
        Where each of them stores, by owner. Owners after the first that share a place share the
        output there: nobody else stores to where a tile belongs.
    program : Program
    variant : Variant
    inputs : sequence of sequence of Inputs
        By GPU and layer.

    Raises
    ------
    Infeasible, CompileFailed
        If it does not fit, or does not compile.
    """

    def __init__(self, watchdog: Watchdog, gpus: Sequence[Gpu], places: Sequence[Sequence[Place]],
                 program: Program, variant: Variant, inputs: Sequence[Sequence[Inputs]]) -> None:
        self.watchdog, self.gpus, self.places = watchdog, gpus, places
        self.program, self.variant, self.inputs = program, variant, inputs
        self.tasks = [fused_tiles.pack_tasks(program, i) for i in range(len(gpus))]
        #: By GPU and owner: which of the GPU's outputs the owner's tiles are in.
        self.boxes = [boxes_of(each, i) for i, each in enumerate(places)]
        #: By GPU: where in each of its outputs its layers begin, and the end.
        self.out_at = [_offsets([layer.shape.output_bytes(variant) for layer in each])
                       for each in inputs]
        self.kernels: list[Kernel] = [
            gpu.kernel(variant.source, fused_tiles.N_THREADS, variant.shared_bytes)
            for gpu in gpus]
        for gpu, rows in zip(gpus, self.tasks, strict=True):
            gpu.memory("tasks", rows.nbytes).write(rows)
        self.layers = [self._place(i) for i in range(len(gpus))]

    def run(self) -> list[TileRun]:
        """Check a first run against the reference, warm up, run once more and return that run.

        Raises
        ------
        WrongResult
            Naming tile, element, expected, got; also where the last run differs from the first.
        KernelFailed, WorkerFailed, DeviceLost
            As `Watchdog.run`.
        """
        self._poison()
        self._launch()
        checked = [self._outputs(i) for i in range(len(self.gpus))]
        for i, given in enumerate(self.inputs):
            check_outputs(given, checked[i], self.tasks[i], self.boxes[i], i)
            check_flags(self._flags(i), self.tasks[i], self.variant.signal, i)
        self._poison()
        since = time.monotonic()
        for _ in range(MAX_WARM_UPS):
            self._launch()
            if time.monotonic() - since > WARM_UP_S:
                break
        self._launch()
        for i, outputs in enumerate(checked):
            self._require_same(i, outputs)
        return [self._result(i) for i in range(len(self.gpus))]

    def _place(self, i: int) -> list[LayerAt]:
        """Write GPU i's operands; what a layer leaves at the GPU itself feeds the next."""
        own = [array for layer in self.inputs[i] for array in (layer.a, layer.b)]
        starts = _offsets([0 if array is None else array.nbytes for array in own])
        memory, outs = self.gpus[i].memory("operands", starts[-1]), self._outs(i)
        for array, at in zip(own, starts, strict=False):
            if array is not None:
                memory.write(array, at)
        kept = outs[self.boxes[i][i]].address
        layers: list[LayerAt] = []
        for j, layer in enumerate(self.inputs[i]):
            a, a_ld = ((kept + self.out_at[i][j - 1], layers[-1].out_ld) if layer.a is None
                       else (memory.address + starts[2 * j], layer.a.shape[1]))
            layers.append(LayerAt(
                a=a, b=memory.address + starts[2 * j + 1], a_ld=a_ld, b_ld=layer.b.shape[1],
                out=[outs[box].address + self.out_at[i][j] for box in self.boxes[i]],
                out_ld=layer.shape.output(self.variant)[1]))
        return layers

    def _poison(self) -> None:
        for i in range(len(self.gpus)):
            for memory in self._outs(i):
                memory.fill(reference.POISON)

    def _launch(self) -> None:
        started = self.gpus[0].memory("started", 16)
        started.fill(0)
        launches = [Launch(gpu, kernel, self.program.n_ctas, [self._params(i, started.address)])
                    for i, (gpu, kernel) in enumerate(zip(self.gpus, self.kernels, strict=True))]
        self.watchdog.run(launches, [gpu.memory("report", 4 * N_REPORT_WORDS)
                                     for gpu in self.gpus], fused_tiles.WAITS)

    def _params(self, i: int, started: int) -> NDArray[np.void]:
        """Set GPU i's counters, flags and times to zero; return its argument."""
        gpu, rows = self.gpus[i], self.tasks[i]
        n_ctas, owners = self.program.n_ctas, range(self.program.n_gpus)
        cleared = {"counters": 4 * fused_tiles.n_counters(rows), "report": 4 * N_REPORT_WORDS,
                   "tile_times": rows.size * TILE_TIMES.itemsize,
                   "cta_times": n_ctas * CTA_TIMES.itemsize}
        memories = {name: gpu.memory(name, n_bytes) for name, n_bytes in cleared.items()}
        flags = [self._flag_memory(i, owner) for owner in owners]
        for memory in (*memories.values(), *flags):
            memory.fill(0)
        return fused_tiles.pack_params(
            self.layers[i], flags=[memory.address for memory in flags],
            **{name: memory.address for name, memory in memories.items()},
            tasks=gpu.memory("tasks", 0).address, started=started, abort=self.watchdog.address,
            budget_cycles=cycles(gpu.facts, BUDGET_S), n_tasks=rows.size,
            n_starters=len(self.gpus) * n_ctas)

    def _outs(self, i: int) -> list[Memory]:
        """GPU i's outputs, by box: each has room for all layers."""
        return [self.places[i][self.boxes[i].index(box)].memory(f"out {i} to {box}",
                                                                self.out_at[i][-1])
                for box in range(max(self.boxes[i]) + 1)]

    def _flag_memory(self, i: int, owner: int) -> Memory:
        return self.places[i][owner].memory(f"flags {i} to {owner}", 4 * self.tasks[i].size)

    def _outputs(self, i: int) -> list[NDArray[np.generic]]:
        """Fetch what GPU i has stored: of each layer an array of shape (n_boxes, rows, ld)."""
        dtype = np.uint16 if self.variant.out_bytes == 2 else np.float32
        return [np.stack([memory.read(layer.shape.output(self.variant), dtype, at)
                          for memory in self._outs(i)])
                for layer, at in zip(self.inputs[i], self.out_at[i], strict=False)]

    def _flags(self, i: int) -> NDArray[np.uint32]:
        return np.stack([self._flag_memory(i, owner).read(self.tasks[i].size, np.uint32)
                         for owner in range(self.program.n_gpus)])

    def _require_same(self, i: int, checked: Sequence[NDArray[np.generic]]) -> None:
        """Raise unless a later run has left, bit by bit, what was checked of the first."""
        for layer, (before, now) in enumerate(zip(checked, self._outputs(i), strict=True)):
            differs = before.view(np.uint8) != now.view(np.uint8)
            if differs.any():
                owner = self.boxes[i].index(int(np.argwhere(differs)[0][0]))
                raise reference.WrongResult(
                    f"GPU {i}: a later run of the same inputs has left other results of layer "
                    f"{layer} at GPU {owner} than the first, {int(differs.sum())} bytes of them; "
                    "expected the same bits.")

    def _result(self, i: int) -> TileRun:
        gpu = self.gpus[i]
        ctas = gpu.memory("cta_times", 0).read(self.program.n_ctas, CTA_TIMES)
        return TileRun(
            tile_times=gpu.memory("tile_times", 0).read(self.tasks[i].size, TILE_TIMES),
            anchors=Anchors(*(ctas[name] for name in
                              ("start_ns", "start_cycles", "end_ns", "end_cycles"))),
            sms=ctas["sm"], n_registers=self.kernels[i].n_registers)


def boxes_of(places: Sequence[Place], gpu: int) -> list[int]:
    """Return for each owner which of a GPU's outputs is its: one for itself, one for each place."""
    seen: list[tuple[bool, int]] = []
    found = []
    for owner, place in enumerate(places):
        box = (owner == gpu, id(place))
        if box not in seen:
            seen.append(box)
        found.append(seen.index(box))
    return found


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return where pieces of these sizes begin that lie behind each other, and the end."""
    whole = [-(-size // _APART_BYTES) * _APART_BYTES for size in sizes]
    return [0, *itertools.accumulate(whole)]


def tiles_of_run(program: Program, gpu: int, run: TileRun, clock_hz: float,
                 variant: Variant) -> tuple[Tiles, NDArray[np.float64]]:
    """Return the times of a GPU's tiles, seconds since its first MMA, and their signal times.

    Bytes are those that were stored. Arrival is seen where a fence comes before a tile's flag;
    NaN elsewhere.
    """
    times, tasks = run.tile_times, program.tasks[gpu]
    ctas = np.arange(tasks.size) % program.n_ctas
    anchors = Anchors(*(each[ctas] for each in run.anchors))

    def told(cycles: NDArray[np.int64]) -> NDArray[np.float64]:
        return seconds(cycles, anchors, clock_hz)

    tiles = np.zeros(tasks.size, TILE)
    tiles["gpu"], tiles["row"], tiles["sm"] = gpu, np.arange(tasks.size), ctas
    tiles["mma_start_s"] = told(times["mma_start_cycles"])
    tiles["mma_end_s"] = told(times["mma_end_cycles"])
    tiles["issue_start_s"] = told(times["issue_start_cycles"].min(axis=1))
    tiles["issue_end_s"] = told(times["issue_end_cycles"].max(axis=1))
    signalled = told(times["signal_end_cycles"].max(axis=1))
    stores = tasks["store_bytes"] > 0
    tiles["arrived_s"] = np.where(stores & (variant.signal == "fence"), signalled, np.nan)
    tiles["slot_wait_s"] = times["slot_wait_cycles"] / clock_hz
    tiles["store_bytes"] = np.where(
        stores, tasks["m"].astype(np.int64) * tasks["n"] * variant.out_bytes, 0)
    signal_s = (signalled - tiles["issue_end_s"])[stores]
    zero = tiles["mma_start_s"].min()
    for name in ("mma_start_s", "mma_end_s", "issue_start_s", "issue_end_s", "arrived_s"):
        tiles[name] -= zero
    return tiles, signal_s
