"""The host device: the CUDA kernels on emulated GPUs, on this computer's CPU.

It checks what kernels compute, where they store it and whom they wait for. Times would mean
nothing here, so its records have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab import reference
from xstage_lab.devices.base import Capabilities
from xstage_lab.devices.tile_checks import (
    Inputs,
    check_flags,
    check_outputs,
    gemms_of,
    random_inputs,
    shapes_of,
)
from xstage_lab.errors import Infeasible, require_choice, require_number
from xstage_lab.kernels import burst_gap, fused_tiles
from xstage_lab.kernels.failures import N_REPORT_WORDS, KernelFailed, describe_report
from xstage_lab.kernels.fused_tiles import SIGNALS, STORE_PATHS, LayerAt, Variant
from xstage_lab.kernels.host import compile_kernel
from xstage_lab.kernels.source import Source
from xstage_lab.record import SUMMARY_KEYS, Record, provenance
from xstage_lab.schedule import Program
from xstage_lab.spec import BurstTrain, FusedGemm, LinkSpec, MachineSpec, MoELayer, Tuning

MAX_FLOP = 2**32          # of a program's whole tiles: minutes
MAX_BYTES = 2**30         # of all buffers
BURST_THREADS = 64
_SOURCE = "the CUDA kernels built by g++ and run on emulated GPUs; no times"


class HostDevice:
    """Emulated GPUs that share this computer's memory.

    Parameters
    ----------
    store_path : str
        `registers` (16-byte stores) or `bulk` (copies from shared memory).
    signal : str
        How stored tiles are announced: `none`, `release` or `fence`.
    n_sms : int
        SMs of each emulated GPU.
    budget_cycles : int
        Emulated cycles a thread may wait before the run counts as hung.
    edit : callable, optional
        Changes a kernel's `Source` before it is built: to try a change, or a mistake.
    """

    name = "host"
    badge = "SIMULATED"
    capabilities = Capabilities(times=False, per_tile=False, any_program=True)

    def __init__(
        self,
        *,
        store_path: str = "registers",
        signal: str = "none",
        n_sms: int = 4,
        budget_cycles: int = 5_000_000,
        edit: Callable[[Source], Source] | None = None,
    ) -> None:
        require_choice("store_path", store_path, STORE_PATHS)
        require_choice("signal", signal, SIGNALS)
        require_number("budget_cycles", budget_cycles, low=1, high=2**62, unit="cycles",
                       integer=True)
        self.store_path, self.signal, self.budget_cycles = store_path, signal, budget_cycles
        self.edit = edit or (lambda source: source)
        self.machine = MachineSpec(
            name="host", n_sms=n_sms, max_gpus=fused_tiles.MAX_GPUS,
            smem_per_cta_bytes=227 * 1024.0, link=LinkSpec(name="this computer's memory"),
            source="emulated on the CPU")

    def measure(self, program: Program, seed: int | None = None) -> Record:
        """Run `program` on fresh random inputs and check every byte it stores.

        Parameters
        ----------
        program : Program
        seed : int, optional
            Of the inputs and of the order in which threads run.

        Returns
        -------
        Record
            Its times are NaN.

        Raises
        ------
        WrongResult
            Naming tile, element, expected, got.
        KernelFailed
            If the kernel does what it must not, or hangs: who waited for what.
        XStageError
            If the kernel does not take the program, with the limit.
        """
        used, machine = 0 if seed is None else seed, self.machine
        require_number("n_ctas", program.n_ctas, low=1, high=machine.n_sms, integer=True,
                       unit="CTAs", remedy=f"An emulated GPU has {machine.n_sms} SMs.")
        require_number("n_gpus", program.n_gpus, low=1, high=machine.max_gpus, integer=True)
        if isinstance(program.workload, BurstTrain):
            digest = self._run_bursts(program, used)
        else:
            digest = self._run_tiles(program, gemms_of(program, self.name), used)
        remote = sum(map(program.remote_bytes, range(program.n_gpus))) / program.n_gpus
        return Record(
            summary={**dict.fromkeys(SUMMARY_KEYS, math.nan), "remote_bytes": remote},
            parameters=program.parameters(),
            provenance=provenance(self.badge, self.name, _SOURCE, machine=self.machine.name,
                                  seed=seed, store_path=self.store_path, signal=self.signal,
                                  kernel=digest))

    def _run_tiles(self, program: Program, workload: FusedGemm | MoELayer, seed: int) -> str:
        variant = Variant.of(workload, program.tuning or Tuning(), store_path=self.store_path,
                             signal=self.signal)
        variant.require_shared(self.machine.smem_per_cta_bytes)
        gpus = range(program.n_gpus)
        shapes = [shapes_of(workload, gpu, program.stores) for gpu in gpus]
        _require_memory(program.n_gpus * sum(shape.output_bytes(variant)
                                             for each in shapes for shape in each))
        _require_speed(variant, program)
        inputs = random_inputs(shapes, variant.out_dtype, seed)
        layers = [_with_outputs(inputs[gpu], variant, gpu, program.n_gpus) for gpu in gpus]
        tasks = [fused_tiles.pack_tasks(program, gpu) for gpu in gpus]
        source = self.edit(variant.source)
        run = launch_tiles(variant, source, tasks, layers, n_ctas=program.n_ctas, seed=seed,
                           budget_cycles=self.budget_cycles)
        for gpu in gpus:
            check_outputs(inputs[gpu], [np.stack(layer.out) for layer in layers[gpu]], tasks[gpu],
                          gpus, gpu)
            check_flags(run.flags[gpu], tasks[gpu], variant.signal, gpu)
        return source.digest

    def _run_bursts(self, program: Program, seed: int) -> str:
        train = burst_gap.train_of(program)
        n_gpus, n_ctas = program.n_gpus, program.n_ctas
        shape = (n_gpus, n_ctas, train.n_bursts, train.burst_bytes // 4)
        _require_memory(n_gpus * 4 * math.prod(shape))
        owners = [rows["owner"][:n_ctas].astype(int) for rows in program.tasks]
        stored = [np.full(shape, 0xFFFFFFFF, np.uint32) for _ in range(n_gpus)]  # by source
        report = [np.zeros(N_REPORT_WORDS, np.uint32) for _ in range(n_gpus)]
        pointers = [np.array([stored[gpu][owner].ctypes.data for owner in owners[gpu]], np.uintp)
                    for gpu in range(n_gpus)]
        abort, started = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        source = self.edit(burst_gap.source(self.store_path, BURST_THREADS))
        arguments = [
            burst_gap.in_order(
                destinations=pointers[gpu], n_destinations=n_ctas, burst_bytes=train.burst_bytes,
                n_bursts=train.n_bursts, n_slots=train.n_bursts, seed=seed + gpu,
                gap_cycles=64 if train.gap_s > 0 else 0, lockstep=int(train.sync == "lockstep"),
                spans=np.zeros((n_ctas, train.n_bursts, 2), np.int64),
                anchors=np.zeros((n_ctas, burst_gap.N_ANCHORS), np.int64),
                sms=np.zeros(n_ctas, np.uint32), counter=np.zeros(1, np.uint32), started=started,
                n_starters=n_gpus * n_ctas, abort=abort, budget_cycles=self.budget_cycles,
                report=report[gpu])
            for gpu in range(n_gpus)]
        compile_kernel(source).launch(
            n_ctas, BURST_THREADS, arguments, seed=seed,
            shared_bytes=burst_gap.shared_bytes(self.store_path, train.burst_bytes))
        _raise_reported(report, burst_gap.WAITS)
        for gpu in range(n_gpus):
            mine = (owners[gpu], np.arange(n_ctas))
            reference.check_bursts(stored[gpu][mine], seed=seed + gpu, n_bursts=train.n_bursts,
                                   gpu=gpu)
            stored[gpu][mine] = 0xFFFFFFFF
            if (stored[gpu] != 0xFFFFFFFF).any():
                owner, cta = np.argwhere(stored[gpu] != 0xFFFFFFFF)[0][:2]
                raise reference.WrongResult(f"GPU {gpu}, CTA {cta} stored to GPU {owner}, not to "
                                            f"its owner, GPU {owners[gpu][cta]}.")
        return source.digest


class Layer(NamedTuple):
    """What the tasks of one layer of one GPU multiply, and where the results go.

    Attributes
    ----------
    a, b : uint16 arrays of shape (m, ld) and (n, ld)
        Raw bf16 values, rows padded to 16 bytes.
    out : list of arrays of shape (m, ld)
        By owner: uint16 (bf16) or float32.
    """

    a: NDArray[Any]
    b: NDArray[Any]
    out: list[NDArray[Any]]


class TileRun(NamedTuple):
    """What a run of the kernel leaves behind besides its outputs.

    Attributes
    ----------
    flags : list of uint32 arrays of shape (n_gpus, n_tasks)
        By GPU that stored: the flags it raised at each owner.
    tile_times : list of arrays of dtype `fused_tiles.TILE_TIMES`
        By GPU, a row for each task. Emulated cycles: they order events and measure nothing.
    """

    flags: list[NDArray[np.uint32]]
    tile_times: list[NDArray[np.void]]


def launch_tiles(
    variant: Variant,
    source: Source,
    tasks: Sequence[NDArray[np.void]],
    layers: Sequence[Sequence[Layer]],
    *,
    n_ctas: int,
    seed: int = 0,
    budget_cycles: int = 5_000_000,
) -> TileRun:
    """Run the tasks of every GPU on emulated GPUs, all at the same time.

    Parameters
    ----------
    variant, source : Variant, Source
        What to launch, and the text to build: the variant's own, or an edited one.
    tasks : sequence of arrays of dtype `fused_tiles.TASK`
        By GPU.
    layers : sequence of sequences of Layer
        By GPU and layer.
    n_ctas, seed, budget_cycles : int
        CTAs of each GPU; order in which threads run; longest wait.

    Returns
    -------
    TileRun

    Raises
    ------
    KernelFailed
        If the kernel does what it must not, or hangs: who waited for what.
    """
    n_gpus = len(tasks)
    started, abort = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    flags = [np.zeros((n_gpus, rows.size), np.uint32) for rows in tasks]
    report = [np.zeros(N_REPORT_WORDS, np.uint32) for _ in tasks]
    tile_times = [np.zeros(rows.size, fused_tiles.TILE_TIMES) for rows in tasks]
    kept: list[NDArray[Any]] = []  # as long as the kernel runs

    def address(array: NDArray[Any]) -> int:
        kept.append(array)
        return array.ctypes.data

    arguments = []
    for gpu, rows in enumerate(tasks):
        params = fused_tiles.pack_params(
            [_layer_at(layer, address) for layer in layers[gpu]],
            flags=[address(row) for row in flags[gpu]], tasks=address(rows),
            counters=address(np.zeros(fused_tiles.n_counters(rows), np.uint32)),
            tile_times=address(tile_times[gpu]),
            cta_times=address(np.zeros(n_ctas, fused_tiles.CTA_TIMES)),
            started=address(started), abort=address(abort), budget_cycles=budget_cycles,
            report=address(report[gpu]), n_tasks=rows.size, n_starters=n_gpus * n_ctas)
        arguments.append((params,))
    compile_kernel(source).launch(n_ctas, fused_tiles.N_THREADS, arguments, seed=seed,
                                  shared_bytes=variant.shared_bytes, timeout_s=300.0)
    _raise_reported(report, fused_tiles.WAITS)
    return TileRun(flags, tile_times)


def _layer_at(layer: Layer, address: Callable[[NDArray[Any]], int]) -> LayerAt:
    return LayerAt(
        a=address(layer.a), b=address(layer.b), out=[address(each) for each in layer.out],
        a_ld=layer.a.shape[1], b_ld=layer.b.shape[1], out_ld=layer.out[0].shape[1])


def _poisoned(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    numpy_dtype = np.uint16 if dtype == "bf16" else np.float32
    n_bytes = math.prod(shape) * np.dtype(numpy_dtype).itemsize
    return np.full(n_bytes, reference.POISON, np.uint8).view(numpy_dtype).reshape(shape)


def _require_memory(n_bytes: int) -> None:
    if n_bytes > MAX_BYTES:
        raise Infeasible(f"the outputs of all GPUs take {n_bytes / 2**20:.0f} MiB; allowed: up to "
                         f"{MAX_BYTES / 2**20:.0f} MiB. Take a smaller workload or fewer GPUs.")


def _require_speed(variant: Variant, program: Program) -> None:
    n_tiles = sum(rows.size for rows in program.tasks)
    n_steps = sum(int((-(-rows["k"] // variant.tile_k)).sum()) for rows in program.tasks)
    flop = 2 * variant.tile_m * variant.tile_n * variant.tile_k * n_steps
    if flop > MAX_FLOP:
        raise Infeasible(f"{n_tiles} whole tiles have {flop:.3g} FLOP on all GPUs, which takes the "
                         f"CPU very long; allowed: up to {MAX_FLOP:.3g}. Take smaller m, n or k, "
                         "or fewer tokens.")


def _with_outputs(inputs: Sequence[Inputs], variant: Variant, gpu: int,
                  n_gpus: int) -> list[Layer]:
    """Return a GPU's layers with poisoned outputs; what a layer leaves feeds the next."""
    layers: list[Layer] = []
    for each in inputs:
        out = list(_poisoned((n_gpus, *each.shape.output(variant)), variant.out_dtype))
        layers.append(Layer(layers[-1].out[gpu] if each.a is None else each.a, each.b, out))
    return layers


def _raise_reported(reports: Sequence[NDArray[np.uint32]], waits: Sequence[str]) -> None:
    told = [f"GPU {gpu}: {text}" for gpu, report in enumerate(reports)
            if (text := describe_report(report, waits))]
    if told:
        raise KernelFailed("\n".join(told))
