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
from xstage_lab.devices.base import Capabilities, gemm_of
from xstage_lab.devices.tile_checks import check_flags, operand, tiles_of
from xstage_lab.errors import Infeasible, require_choice, require_number
from xstage_lab.kernels import burst_gap, fused_tiles
from xstage_lab.kernels.failures import N_REPORT_WORDS, KernelFailed, describe_report
from xstage_lab.kernels.fused_tiles import MAX_LAYERS, SIGNALS, STORE_PATHS, LayerAt, Variant
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
        elif isinstance(program.workload, MoELayer):
            digest = self._run_moe(program, program.workload, used)
        else:
            digest = self._run_gemm(program, gemm_of(program, self.name), used)
        remote = sum(map(program.remote_bytes, range(program.n_gpus))) / program.n_gpus
        return Record(
            summary={**dict.fromkeys(SUMMARY_KEYS, math.nan), "remote_bytes": remote},
            parameters=program.parameters(),
            provenance=provenance(self.badge, self.name, _SOURCE, machine=self.machine.name,
                                  seed=seed, store_path=self.store_path, signal=self.signal,
                                  kernel=digest))

    def _run_gemm(self, program: Program, gemm: FusedGemm, seed: int) -> str:
        variant = Variant.of(gemm, program.tuning or Tuning(), store_path=self.store_path,
                             signal=self.signal)
        variant.require_shared(self.machine.smem_per_cta_bytes)
        n_gpus, n_rows = program.n_gpus, gemm.m + variant.tile_m  # more than any tile may write
        out_ld = fused_tiles.leading_dimension(gemm.n, variant.out_bytes)
        _require_memory(n_gpus**2 * n_rows * out_ld * variant.out_bytes)
        _require_speed(variant, program)
        rng = np.random.default_rng(seed)
        a = [operand(rng, gemm.m, gemm.k) for _ in range(n_gpus)]
        b = [operand(rng, gemm.n, gemm.k) for _ in range(n_gpus)]
        out = [_poisoned((n_gpus, n_rows, out_ld), variant.out_dtype) for _ in range(n_gpus)]
        tasks = [fused_tiles.pack_tasks(program, gpu) for gpu in range(n_gpus)]
        source = self.edit(variant.source)
        run = launch_tiles(
            variant, source, tasks, [[Layer(a[g], b[g], list(out[g]))] for g in range(n_gpus)],
            n_ctas=program.n_ctas, seed=seed, budget_cycles=self.budget_cycles)
        for gpu in range(n_gpus):
            expected, tolerance = reference.product(a[gpu][:, :gemm.k], b[gpu][:, :gemm.k],
                                                    variant.out_dtype)
            reference.check_output(out[gpu], expected, tolerance, tiles_of(tasks[gpu]), gpu=gpu)
            check_flags(run.flags[gpu], tasks[gpu], variant.signal, gpu)
        return source.digest

    def _run_moe(self, program: Program, moe: MoELayer, seed: int) -> str:
        """Run both layers and check each against its operands, Linear-2 against Linear-1's output.

        The kernel has no activation: Linear-2 takes the first `intermediate` columns of
        Linear-1's output, which is stored whole where an activation would store half of it.
        """
        variant = Variant.of(moe, program.tuning or Tuning(), store_path=self.store_path,
                             signal=self.signal)
        variant.require_shared(self.machine.smem_per_cta_bytes)
        _require_layers(moe, variant, program)
        _require_speed(variant, program)
        rng = np.random.default_rng(seed)
        layers = [_expert_layers(rng, moe, variant, gpu) for gpu in range(program.n_gpus)]
        tasks = [fused_tiles.pack_tasks(program, gpu) for gpu in range(program.n_gpus)]
        source = self.edit(variant.source)
        run = launch_tiles(variant, source, tasks, layers, n_ctas=program.n_ctas, seed=seed,
                           budget_cycles=self.budget_cycles)
        for gpu, held in enumerate(layers):
            for i, (layer, k) in enumerate(zip(held, (moe.hidden, moe.intermediate) * len(held),
                                               strict=False)):
                rows = layer.out[gpu].shape[0] - variant.tile_m
                expected, tolerance = reference.product(layer.a[:rows, :k], layer.b[:, :k],
                                                        variant.out_dtype)
                reference.check_output(np.stack(layer.out), expected, tolerance,
                                       tiles_of(tasks[gpu], i), gpu=gpu)
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


def _require_layers(moe: MoELayer, variant: Variant, program: Program) -> None:
    """Raise `Infeasible` where an MoE layer has more experts or bytes than a run may."""
    held = moe.experts // moe.n_gpus
    if 2 * held > MAX_LAYERS:
        raise Infeasible(f"{held} experts on a GPU need {2 * held} sets of operands; the kernel "
                         f"takes {MAX_LAYERS}. Take more GPUs or fewer experts.")
    if moe.out_dtype != "bf16":
        raise Infeasible("the kernel keeps one output type, and Linear-2 multiplies bf16: take "
                         "out_dtype = bf16.")
    n_rows = moe.expert_rows.sum() + moe.experts * variant.tile_m
    _require_memory(2 * int(n_rows) * moe.n_gpus * (2 * moe.intermediate + moe.hidden))


def _expert_layers(rng: np.random.Generator, moe: MoELayer, variant: Variant,
                   gpu: int) -> list[Layer]:
    """Return random inputs and weights, and poisoned outputs, of the experts of a GPU."""
    layers = []
    for rows in moe.expert_rows.reshape(moe.n_gpus, -1)[gpu].tolist():
        def poisoned(n: int, rows: int = rows) -> list[NDArray[Any]]:
            ld = fused_tiles.leading_dimension(n, variant.out_bytes)
            shape = (moe.n_gpus, rows + variant.tile_m, ld)  # more rows than any tile may write
            return list(_poisoned(shape, variant.out_dtype))
        hidden = poisoned(2 * moe.intermediate)
        layers += [
            Layer(operand(rng, rows, moe.hidden), operand(rng, 2 * moe.intermediate, moe.hidden),
                  hidden),
            Layer(hidden[gpu], operand(rng, moe.hidden, moe.intermediate), poisoned(moe.hidden))]
    return layers


def _raise_reported(reports: Sequence[NDArray[np.uint32]], waits: Sequence[str]) -> None:
    told = [f"GPU {gpu}: {text}" for gpu, report in enumerate(reports)
            if (text := describe_report(report, waits))]
    if told:
        raise KernelFailed("\n".join(told))
