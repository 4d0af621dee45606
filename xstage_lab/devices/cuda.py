"""The cuda device: CUDA kernels on the GPUs of this computer, live.

Stores go to peers, to host memory over the GPU's own link (which gives real backpressure with a
single GPU), or to the GPU's own memory (the control). Not yet run on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from xstage_lab.devices import cuda_gpus
from xstage_lab.devices.base import Capabilities
from xstage_lab.devices.cuda_bursts import (
    N_THREADS,
    BurstRun,
    Route,
    measure_clock,
    run_train,
    tiles_of_bursts,
)
from xstage_lab.devices.cuda_clock import Anchors
from xstage_lab.devices.cuda_launch import (
    Gpu,
    HostLink,
    Place,
    Watchdog,
    cuda_errors,
    require_arch,
)
from xstage_lab.devices.cuda_peers import connect
from xstage_lab.devices.cuda_tiles import TileJob, tiles_of_run
from xstage_lab.devices.tile_checks import Inputs, Shape, gemms_of, random_inputs, shapes_of
from xstage_lab.errors import (
    DeviceUnavailable,
    Infeasible,
    InvalidValue,
    require_choice,
    require_number,
)
from xstage_lab.kernels import burst_gap
from xstage_lab.kernels.fused_tiles import MAX_GPUS, SIGNALS, STORE_PATHS, Variant
from xstage_lab.kernels.nvrtc import compile_kernel, nvrtc_version
from xstage_lab.record import Record, Tiles, provenance, summarize
from xstage_lab.schedule import Program
from xstage_lab.spec import BurstTrain, FusedGemm, MachineSpec, MoELayer, Tuning

DESTINATIONS = ("peer", "host", "local")
#: A run at least so long tells the clock's rate itself; for a shorter one it is measured beside it.
CLOCK_RUN_S = 5e-4


class CudaDevice:
    """The GPUs of this computer; its times are LIVE.

    A tile's times are cycles of its SM, turned into seconds once, with the rate measured over the
    run. Within an SM they are exact to a cycle; SMs are aligned with each other by the GPU's global
    timer, read by every CTA beside its own clock when it starts; GPUs by their first start, as the
    kernels start on all of them together. A posted store's arrival cannot be seen (`arrived_s` is
    NaN) but where somebody waits for it: behind a CTA's last burst, and before a flag that a fence
    protects.

    Every measurement runs on fresh random inputs into poisoned memory, is checked whole, warmed up,
    and only then timed; of bursts every timed one is checked.

    For the destinations `host` and `local` GPU 0 of a program is run alone, and host memory, or its
    own, stands for the memory of the others.

    Of an MoE layer the kernel computes both GEMMs and no activation: Linear-1 is stored whole,
    twice the bytes that its activation has, to the GPU's own memory.

    Parameters
    ----------
    machine : MachineSpec, optional
        In place of what the CUDA runtime says; its SMs and GPUs may not be more than there are.
    destination : str, optional
        `peer`, `host` or `local`; if left out `peer` where two GPUs reach each other, else `host`.
    store_path : str
        `registers` (16-byte stores) or `bulk` (copies from shared memory, sm_90 and up).
    signal : str
        How stored tiles are announced: `none`, `release` or `fence`.

    Raises
    ------
    DeviceUnavailable
        If CuPy, the driver, a GPU, NVRTC or a peer path is missing; says which and what to do.
    UnknownName, InvalidValue
        If an option is not possible.
    """

    name = "cuda"
    badge = "LIVE"
    capabilities = Capabilities(times=True, per_tile=True, any_program=True)

    def __init__(self, machine: MachineSpec | None = None, *, destination: str | None = None,
                 store_path: str = "registers", signal: str = "none") -> None:
        if destination is not None:
            require_choice("destination", destination, DESTINATIONS)
        require_choice("store_path", store_path, STORE_PATHS)
        require_choice("signal", signal, SIGNALS)
        self.store_path, self.signal = store_path, signal
        cuda = cuda_gpus.load_cuda()
        facts = cuda_gpus.gpus(cuda)
        if destination is None:
            destination = "peer" if len(facts) > 1 else "host"
        _require_possible(facts[0], destination, store_path)
        self._versions = _versions(cuda, facts[0])
        with cuda_errors("while it was made ready"):
            self._watchdog = Watchdog(cuda)
            if destination == "peer":
                for gpu in facts:
                    require_arch(gpu)
                every = [Gpu(cuda, each) for each in facts]
                self._gpus, self.left_out = connect(cuda, self._watchdog, every)
            else:
                self._gpus, self.left_out = [Gpu(cuda, facts[0])], []
        del self._gpus[MAX_GPUS:]
        self.destination, self._host = destination, HostLink(cuda)
        self.machine = machine or cuda_gpus.machine_of([g.facts for g in self._gpus], destination)
        self._clock_hz = [gpu.facts.clock_hz for gpu in self._gpus]
        self._inputs: tuple[tuple[Any, ...], list[list[Inputs]]] = ((), [])

    def measure(self, program: Program, seed: int | None = None) -> Record:
        """Run `program`: checked, warmed up, timed.

        Parameters
        ----------
        program : Program
        seed : int, optional
            Of the inputs.

        Raises
        ------
        WrongResult
            If what was stored is not what should be: where, expected, got.
        KernelFailed
            If a kernel waited in vain: who waited for what.
        Infeasible, InvalidValue
            If the GPU or the kernel does not take the program, with the limit.
        WorkerFailed, DeviceLost
            If the run was ended, or the GPU was lost.
        """
        self._require_fits(program)
        self._watchdog.clear()
        used = 0 if seed is None else seed
        require_number("seed", used, low=0, high=2**62, integer=True)
        with cuda_errors(f"measuring {type(program.workload).__name__}"):
            if isinstance(program.workload, BurstTrain):
                tiles, more, about = self._bursts(program, used)
            else:
                tiles, more, about = self._gemms(program, gemms_of(program, self.name), used)
        run = dataclasses.replace(program, tasks=program.tasks[:self._n_run(program)])
        return Record(
            summary=summarize(tiles, run) | more, tiles=tiles, parameters=program.parameters(),
            provenance=self._provenance(program, seed, about))

    @property
    def settings(self) -> dict[str, Any]:
        """What a record's provenance says of the kernels."""
        return {"destination": self.destination, "store_path": self.store_path,
                "signal": self.signal}

    def abort(self) -> None:
        """End the run that is being measured; may be called from any thread."""
        self._watchdog.abort()

    def _n_run(self, program: Program) -> int:
        """GPUs of a program that are run."""
        return program.n_gpus if self.destination == "peer" else 1

    def _require_fits(self, program: Program) -> None:
        machine, n_sms = self.machine, self._gpus[0].facts.n_sms
        require_number("n_ctas", program.n_ctas, low=1, high=min(machine.n_sms, n_sms),
                       integer=True, unit="CTAs", remedy=f"{machine.name} has {n_sms} SMs.")
        most = len(self._gpus) if self.destination == "peer" else cuda_gpus.STAND_INS
        why = " ".join(self.left_out) or (
            "There are no more." if self.destination == "peer" else
            "The kernels store to no more.")
        require_number("n_gpus", program.n_gpus, low=1, high=min(machine.max_gpus, most),
                       integer=True, unit="GPUs", remedy=why)
        if isinstance(program.workload, MoELayer) and self._n_run(program) < program.n_gpus:
            _require_busiest(program.workload, self.destination)

    def _places(self, program: Program, gpu: int) -> list[Place]:
        """Where a GPU stores, by owner."""
        if self.destination == "peer":
            return list(self._gpus[:program.n_gpus])
        other: Place = self._gpus[0] if self.destination == "local" else self._host
        return [self._gpus[0] if owner == gpu else other for owner in range(program.n_gpus)]

    def _bursts(self, program: Program, seed: int) -> tuple[Tiles, dict[str, float], Any]:
        train = burst_gap.train_of(program)
        gpus = self._gpus[:self._n_run(program)]
        routes = [Route(self._places(program, i),
                        program.tasks[i]["owner"][:program.n_ctas].astype(np.int64))
                  for i in range(len(gpus))]
        patterns = np.random.default_rng(seed).integers(0, 2**31, 2)

        def run(pattern: int) -> list[BurstRun]:
            gap = round(train.gap_s * self._clock_hz[0]) if train.gap_s else 0
            return run_train(self._watchdog, gpus, routes, train, store_path=self.store_path,
                             seed=int(pattern), gap_cycles=gap)

        run(patterns[0])
        before = measure_clock(self._watchdog, gpus)  # which also keeps the clocks up
        self._note_clocks(before)
        runs = run(patterns[1])
        self._read_clocks([each.anchors for each in runs])
        tiles = np.concatenate([tiles_of_bursts(program, i, each, self._clock_hz[i])
                                for i, each in enumerate(runs)])
        last = max(float(np.nanmax(tiles["arrived_s"])), float(tiles["issue_end_s"].max()))
        gaps = (tiles["mma_end_s"] - tiles["mma_start_s"])[tiles["row"] >= program.n_ctas]
        source = burst_gap.source(self.store_path, N_THREADS)
        about = {"kernel": source.digest, "n_threads": N_THREADS, "gap_asked_s": train.gap_s,
                 "clock_before_hz": before[0],
                 "gap_achieved_s": float(gaps.mean()) if gaps.size else math.nan,
                 "sms": [each.sms.tolist() for each in runs],
                 "clock_over_s": runs[0].anchors.over_s}
        return tiles, {"total_s": last}, about

    def _gemms(self, program: Program, workload: FusedGemm | MoELayer,
               seed: int) -> tuple[Tiles, dict[str, float], Any]:
        variant = Variant.of(workload, program.tuning or Tuning(), store_path=self.store_path,
                             signal=self.signal)
        variant.require_shared(self.machine.smem_per_cta_bytes)
        gpus = self._gpus[:self._n_run(program)]
        shapes = [shapes_of(workload, i, program.stores) for i in range(len(gpus))]
        _require_memory(shapes, variant, gpus[0].facts)
        job = TileJob(self._watchdog, gpus, [self._places(program, i) for i in range(len(gpus))],
                      program, variant, self._inputs_of(shapes, variant.out_dtype, seed))
        runs = job.run()
        self._read_clocks([each.anchors for each in runs])
        told = [tiles_of_run(program, i, each, self._clock_hz[i], variant)
                for i, each in enumerate(runs) if program.tasks[i].size]  # experts may be idle
        about = {"kernel": variant.source.digest, "n_registers": runs[0].n_registers,
                 "shared_bytes": variant.shared_bytes, "sms": [each.sms.tolist() for each in runs],
                 "clock_over_s": runs[0].anchors.over_s}
        if isinstance(workload, MoELayer):
            about["activation"] = "none; Linear-1 is stored whole"
        signal_s = np.concatenate([each for _, each in told])
        more = {} if self.signal == "none" else {
            "signal_s": float(signal_s.mean()) if signal_s.size else math.nan}
        return np.concatenate([tiles for tiles, _ in told]), more, about

    def _inputs_of(self, shapes: list[tuple[Shape, ...]], out_dtype: str,
                   seed: int) -> list[list[Inputs]]:
        """Inputs and products, kept for the next program of the same shapes and seed."""
        key = (shapes, out_dtype, seed)
        if self._inputs[0] != key:
            self._inputs = ((), [])  # before as much is made again
            self._inputs = (key, random_inputs(shapes, out_dtype, seed))
        return self._inputs[1]

    def _note_clocks(self, found: list[float]) -> None:
        self._clock_hz[:len(found)] = found

    def _read_clocks(self, anchors: list[Anchors]) -> None:
        """Take the clock's rate from the run, or beside it where the run was short."""
        if min(each.over_s for each in anchors) >= CLOCK_RUN_S:
            self._note_clocks([each.clock_hz for each in anchors])
        else:
            self._note_clocks(measure_clock(self._watchdog, self._gpus[:len(anchors)]))

    def _provenance(self, program: Program, seed: int | None, about: Any) -> dict[str, Any]:
        n_run, facts = self._n_run(program), self._gpus[0].facts
        to = {"peer": "peer memory", "host": "host memory, which stands for the other GPUs'",
              "local": "its own memory, the control"}[self.destination]
        driver = cuda_gpus.driver_facts(facts)
        return provenance(
            self.badge, self.name,
            f"CUDA kernels on {n_run} x {facts.name}, stores to {to}",
            machine=self.machine.name, seed=seed, gpu=facts.name, arch=facts.arch,
            gpus=[gpu.facts.bus_id for gpu in self._gpus[:n_run]], n_gpus_run=n_run,
            **self.settings,
            clock_hz=self._clock_hz[0], clocks_hz=self._clock_hz[:n_run],
            left_out=self.left_out, **self._versions, **driver, **about)


def _require_possible(facts: cuda_gpus.GpuFacts, destination: str, store_path: str) -> None:
    """Raise where GPU 0 cannot run the kernels this way, or nothing compiles them."""
    require_arch(facts)
    if store_path == "bulk" and not facts.has_bulk:
        raise InvalidValue("store_path", store_path, f"registers on {facts.name}",
                           remedy="Bulk copies need compute capability 9.0 or newer.")
    if destination == "host" and not facts.maps_host:
        raise DeviceUnavailable(f"{facts.name} does not map host memory under one address; take "
                                "the destination local, or another GPU.")
    compile_kernel(burst_gap.source(store_path, N_THREADS), facts.arch)


def _require_busiest(moe: MoELayer, destination: str) -> None:
    """Raise where GPU 0, which runs alone, cannot stand for the GPU that takes longest."""
    rows = moe.gpu_rows
    if rows[0] < rows.max():
        raise Infeasible(f"with destination = {destination} GPU 0 runs alone, and with this "
                         f"routing it has {rows[0]:,} rows where GPU {rows.argmax()} has "
                         f"{rows.max():,}. Take routing = balanced, or the destination peer.")


def _require_memory(shapes: list[tuple[Shape, ...]], variant: Variant,
                    facts: cuda_gpus.GpuFacts) -> None:
    """Raise where a GPU cannot even hold its own operands and results, before they are made."""
    needed = max(sum(shape.operand_bytes + shape.output_bytes(variant) for shape in each)
                 for each in shapes)
    if needed > facts.memory_bytes:
        raise Infeasible(f"a GPU's operands and results take {needed / 2**20:,.0f} MiB; "
                         f"{facts.name} has {facts.memory_bytes / 2**20:,.0f} MiB of memory. Take "
                         "a smaller workload, or more GPUs.")


def _versions(cuda: Any, facts: cuda_gpus.GpuFacts) -> dict[str, Any]:
    import cupy

    return {"cupy": str(cupy.__version__), "compute_capability": ".".join(
                map(str, facts.capability)),
            "cuda_driver": cuda_gpus.cuda_version(cuda.runtime.driverGetVersion()),
            "cuda_runtime": cuda_gpus.cuda_version(cuda.runtime.runtimeGetVersion()),
            "nvrtc": nvrtc_version()}
