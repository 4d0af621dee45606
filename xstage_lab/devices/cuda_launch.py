"""Memory, kernels and launches on the GPUs of this computer, by the addresses that CUDA gives.

Plain allocations only, which peers may reach; host memory pinned and mapped, under the same
address for the CPU and for every GPU. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from xstage_lab.devices.cuda_gpus import GpuFacts
from xstage_lab.errors import DeviceLost, DeviceUnavailable, Infeasible, WorkerFailed
from xstage_lab.kernels.failures import N_REPORT_WORDS, KernelFailed, describe_report
from xstage_lab.kernels.nvrtc import compile_kernel
from xstage_lab.kernels.source import Source

#: The longest a kernel may wait for anything, and the time after it in which it must have ended.
BUDGET_S, GRACE_S = 10.0, 5.0
_MAPPED_PORTABLE, _NON_BLOCKING, _ANY_WAY = 2 | 1, 1, 4
_MAX_DYNAMIC_SHARED, _SHARED_CARVEOUT, _N_REGISTERS = 8, 9, 4  # CUfunction_attribute
_OUT_OF_MEMORY, _NOT_READY = 2, 600                            # cudaError


class Memory(Protocol):
    """A piece of memory that kernels reach under its address."""

    address: int
    n_bytes: int

    def fill(self, byte: int) -> None:
        """Set every byte."""

    def write(self, array: NDArray[Any], at: int = 0) -> None:
        """Copy an array to `at` bytes behind the beginning."""

    def read(self, shape: tuple[int, ...] | int, dtype: DTypeLike, at: int = 0) -> NDArray[Any]:
        """Return a copy of what lies `at` bytes behind the beginning as an array."""
        ...


class Kernel(NamedTuple):
    """A kernel loaded on a GPU.

    Attributes
    ----------
    function : int
        Address for the driver.
    n_threads, shared_bytes : int
        Of a CTA.
    max_ctas : int
        CTAs that can be resident at the same time.
    n_registers : int
        Of a thread.
    """

    function: int
    n_threads: int
    shared_bytes: int
    max_ctas: int
    n_registers: int


class Launch(NamedTuple):
    """A kernel to run on a GPU: its arguments as arrays that hold their bytes."""

    gpu: Gpu
    kernel: Kernel
    n_ctas: int
    arguments: Sequence[NDArray[Any]]


class Gpu:
    """One GPU: its memory by name, its kernels, its stream."""

    def __init__(self, cuda: Any, facts: GpuFacts) -> None:
        self.runtime, self.driver, self.facts = cuda.runtime, cuda.driver, facts
        self._held: dict[str, Memory] = {}
        self._kernels: dict[tuple[str, int, int], Kernel] = {}
        with self.current():
            self.runtime.free(0)  # makes the context
            self.stream: int = self.runtime.streamCreateWithFlags(_NON_BLOCKING)

    def __str__(self) -> str:
        return f"GPU {self.facts.number} ({self.facts.name})"

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the GPU that CUDA's calls are about."""
        before = self.runtime.getDevice()
        self.runtime.setDevice(self.facts.number)
        try:
            yield
        finally:
            self.runtime.setDevice(before)

    def memory(self, name: str, n_bytes: int) -> Memory:
        """Return memory on this GPU that keeps its address as long as it is large enough."""
        return held(self._held, name, n_bytes, lambda size: _DeviceMemory(self, size))

    def kernel(self, source: Source, n_threads: int, shared_bytes: int) -> Kernel:
        """Compile and load a kernel and allow it its shared memory; kept for later launches.

        Raises
        ------
        CompileFailed, DeviceUnavailable
            If it cannot be compiled.
        Infeasible
            If not even one CTA fits on an SM.
        """
        key = (source.digest, n_threads, shared_bytes)
        if key not in self._kernels:
            self._kernels[key] = self._load(source, n_threads, shared_bytes)
        return self._kernels[key]

    def _load(self, source: Source, n_threads: int, shared_bytes: int) -> Kernel:
        if shared_bytes > self.facts.smem_per_cta_bytes:
            raise Infeasible(f"{source.name} needs {shared_bytes / 1024:.0f} KiB of shared memory "
                             f"per CTA; {self} allows {self.facts.smem_per_cta_bytes / 1024:.0f} "
                             "KiB. Take a smaller tile or burst, fewer stages or a smaller depth.")
        binary = compile_kernel(source, self.facts.arch)
        with self.current():
            function = self.driver.moduleGetFunction(
                self.driver.moduleLoadData(binary.cubin), binary.name)
            self.driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
            self.driver.funcSetAttribute(function, _SHARED_CARVEOUT, 100)
            per_sm = self.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                function, n_threads, shared_bytes)
            n_registers = self.driver.funcGetAttribute(_N_REGISTERS, function)
        return Kernel(function, n_threads, shared_bytes, per_sm * self.facts.n_sms, n_registers)

    def launch(self, kernel: Kernel, n_ctas: int, arguments: Sequence[NDArray[Any]]) -> None:
        """Start a kernel, all of whose CTAs run at the same time; return at once.

        Raises
        ------
        Infeasible
            If they do not fit: CTAs that are not there would be waited for.
        """
        if n_ctas > kernel.max_ctas:
            raise Infeasible(f"n_ctas = {n_ctas} CTAs do not fit on {self} at the same time; it "
                             f"holds {kernel.max_ctas} with {kernel.shared_bytes / 1024:.0f} KiB "
                             f"of shared memory and {kernel.n_registers} registers a thread. Take "
                             "fewer CTAs or a smaller tile.")
        pointers = (ctypes.c_void_p * len(arguments))(*(each.ctypes.data for each in arguments))
        with self.current():
            self.driver.launchCooperativeKernel(
                kernel.function, n_ctas, 1, 1, kernel.n_threads, 1, 1, kernel.shared_bytes,
                self.stream, ctypes.addressof(pointers))

    def is_done(self) -> bool:
        """Whether nothing runs; an error of what ran is raised by `synchronize`."""
        return bool(self.runtime.streamQuery(self.stream) != _NOT_READY)

    def synchronize(self) -> None:
        """Wait for everything, and raise what went wrong."""
        with self.current():
            self.runtime.deviceSynchronize()


class HostLink:
    """Host memory that GPUs store to over their link; by name, like a GPU's."""

    def __init__(self, cuda: Any) -> None:
        self.runtime = cuda.runtime
        self._held: dict[str, Memory] = {}

    def __str__(self) -> str:
        return "host memory"

    def memory(self, name: str, n_bytes: int) -> Memory:
        """Return pinned, mapped memory that keeps its address as long as it is large enough."""
        return held(self._held, name, n_bytes, lambda size: HostMemory(self.runtime, size))


Place = Gpu | HostLink  # where stores go


def held(kept: dict[str, Memory], name: str, n_bytes: int,
         make: Callable[[int], Memory]) -> Memory:
    """Return the memory kept under `name`, made anew where it is too small."""
    if name not in kept or kept[name].n_bytes < n_bytes:
        kept.pop(name, None)  # freed before more is asked for
        kept[name] = make(max(n_bytes, 16))
    return kept[name]


class _DeviceMemory:
    def __init__(self, gpu: Gpu, n_bytes: int) -> None:
        self._gpu, self.n_bytes = gpu, n_bytes
        with gpu.current(), _memory_errors(str(gpu), n_bytes):
            self.address: int = gpu.runtime.malloc(n_bytes)
        _free_later(self, gpu.runtime.free, self.address)

    def fill(self, byte: int) -> None:
        with self._gpu.current():
            self._gpu.runtime.memsetAsync(self.address, byte, self.n_bytes, self._gpu.stream)

    def write(self, array: NDArray[Any], at: int = 0) -> None:
        given = np.ascontiguousarray(array)
        with self._gpu.current():
            self._gpu.runtime.memcpy(self.address + at, given.ctypes.data, given.nbytes, _ANY_WAY)

    def read(self, shape: tuple[int, ...] | int, dtype: DTypeLike, at: int = 0) -> NDArray[Any]:
        found = np.empty(shape, dtype)
        with self._gpu.current():
            self._gpu.runtime.memcpy(found.ctypes.data, self.address + at, found.nbytes, _ANY_WAY)
        return found


class HostMemory:
    """Pinned host memory, mapped for all GPUs."""

    def __init__(self, runtime: Any, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        with _memory_errors("the host", n_bytes):
            self.address: int = runtime.hostAlloc(n_bytes, _MAPPED_PORTABLE)
        _free_later(self, runtime.freeHost, self.address)
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(self.address))

    def fill(self, byte: int) -> None:
        """Set every byte."""
        self._bytes[:] = byte

    def write(self, array: NDArray[Any], at: int = 0) -> None:
        """Copy an array to `at` bytes behind the beginning."""
        given = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._bytes[at:at + given.size] = given

    def read(self, shape: tuple[int, ...] | int, dtype: DTypeLike, at: int = 0) -> NDArray[Any]:
        """Return a copy of what lies `at` bytes behind the beginning as an array."""
        found = np.empty(shape, dtype)
        found.reshape(-1).view(np.uint8)[:] = self._bytes[at:at + found.nbytes]
        return found


def _free_later(memory: object, free: Callable[[int], None], address: int) -> None:
    def release() -> None:
        with contextlib.suppress(RuntimeError):  # a lost context has nothing to free
            free(address)
    weakref.finalize(memory, release).atexit = False  # the driver frees what a process leaves


@contextlib.contextmanager
def _memory_errors(where: str, n_bytes: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if getattr(error, "status", None) != _OUT_OF_MEMORY:
            raise
        raise Infeasible(f"{where} has no {n_bytes / 2**20:,.0f} MiB of memory left for a buffer. "
                         "Take a smaller workload, or end what else uses it.") from None


@contextlib.contextmanager
def cuda_errors(doing: str) -> Iterator[None]:
    """Turn an error of CUDA into words: after most of them its context is of no more use.

    Raises
    ------
    DeviceLost
        In place of whatever CUDA raised.
    """
    try:
        yield
    except RuntimeError as error:
        if not hasattr(error, "status"):  # not one of CUDA's
            raise
        raise DeviceLost(f"CUDA failed {doing} ({error}). The process can no longer use the GPU; "
                         "measure again in a new one. If it fails again, look at nvidia-smi and at "
                         "the kernel log (dmesg) for Xid errors.") from None


class Watchdog:
    """Runs launches on several GPUs, and ends them by the abort flag when told or overdue."""

    def __init__(self, cuda: Any) -> None:
        self._flag = HostMemory(cuda.runtime, 16)
        self._told = False
        self.clear()

    @property
    def address(self) -> int:
        """Address of the abort flag for kernels."""
        return self._flag.address

    def clear(self) -> None:
        """Let kernels run."""
        self._flag.fill(0)
        self._told = False

    def abort(self) -> None:
        """End whatever runs; may be called from any thread."""
        self._told = True
        self._flag.fill(0xFF)

    def run(self, launches: Sequence[Launch], reports: Sequence[Memory],
            waits: Sequence[str]) -> None:
        """Launch on every GPU, wait for all, and read what they report.

        Parameters
        ----------
        launches : sequence of Launch
        reports : sequence of Memory
            A GPU's report each, zeros at launch.
        waits : sequence of str
            What each of the kernel's waits is for.

        Raises
        ------
        KernelFailed
            If a wait ran out of its budget: who waited for what.
        WorkerFailed
            If `abort` was called.
        DeviceLost
            If a kernel does not even end by the abort flag.
        """
        for gpu in {launch.gpu for launch in launches}:
            gpu.synchronize()  # counters are zero on all before any starts
        overdue = False
        try:
            for launch in launches:
                launch.gpu.launch(launch.kernel, launch.n_ctas, launch.arguments)
            overdue = self._wait([launch.gpu for launch in launches])
        except BaseException:  # KeyboardInterrupt too: nothing is left running
            self.abort()
            self._wait([launch.gpu for launch in launches])
            raise
        told = [f"{launch.gpu}: {text}" for launch, report in zip(launches, reports, strict=True)
                if (text := describe_report(report.read(N_REPORT_WORDS, np.uint32), waits))]
        if overdue:
            raise KernelFailed("\n".join([f"{launches[0].gpu}: a kernel ran for more than "
                                          f"{BUDGET_S + GRACE_S:g} s and was ended.", *told]))
        if self._told:
            raise WorkerFailed("the run was ended by its abort flag.")
        if told:
            raise KernelFailed("\n".join(told))

    def _wait(self, gpus: Sequence[Gpu]) -> bool:
        """Wait until nothing runs; return whether it took too long and had to be ended."""
        ends, overdue = time.monotonic() + BUDGET_S + GRACE_S, False
        while not all(gpu.is_done() for gpu in gpus):
            if time.monotonic() > ends and overdue:
                raise DeviceLost("a kernel does not end, not even by its abort flag; this process "
                                 "gives up the GPU. Measure again in a new one.")
            if time.monotonic() > ends:
                self.abort()
                ends, overdue = ends + GRACE_S, True
            time.sleep(2e-4)
        for gpu in gpus:
            gpu.synchronize()
        return overdue


def cycles(facts: GpuFacts, time_s: float) -> int:
    """Return a time in cycles of a GPU's SMs at their highest clock."""
    known = facts.clock_hz == facts.clock_hz
    return int(time_s * (facts.clock_hz if known else 2e9))


def require_arch(facts: GpuFacts) -> None:
    """Raise `DeviceUnavailable` where there are no kernels for a GPU, or it cannot run them."""
    major, minor = facts.capability
    if not facts.arch:
        raise DeviceUnavailable(
            f"GPU {facts.number} ({facts.name}) has compute capability {major}.{minor}; the "
            "kernels are made for 8.x, 9.0 and 10.0. Use the simulated device.")
    if not facts.cooperative:
        raise DeviceUnavailable(f"GPU {facts.number} ({facts.name}) cannot launch cooperatively, "
                                "so that CTAs that wait for each other might not all be there.")
