"""CuPy's wrappers of CUDA as far as the cuda device calls them, on emulated GPUs.

Allocations are this process's memory, and a launch runs the kernel that g++ has built, with the
very argument pointers that the driver would get. What is computed, where it goes and who waits for
whom is real; times are counts of the emulator's clock and measure nothing.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xstage_lab.devices import cuda, cuda_gpus, cuda_launch
from xstage_lab.kernels.host import HostKernel
from xstage_lab.kernels.host import compile_kernel as compile_for_host
from xstage_lab.kernels.host.launch import _Settings
from xstage_lab.kernels.nvrtc import Binary
from xstage_lab.kernels.source import Source

N_SMS, SMEM_BYTES, CLOCK_HZ = 4, 227 * 1024, 1_000_000_000
# cudaDeviceAttr: 1 GHz, 4 SMs, maps host memory, 1 GHz memory on 64 bits, L2, unified, 9.0, ...
ATTRIBUTES = {13: CLOCK_HZ // 1000, 16: N_SMS, 17: 0, 19: 1, 36: 1_000_000, 37: 64, 38: 2**20,
              41: 1, 75: 9, 76: 0, 81: SMEM_BYTES + 1024, 95: 1, 97: SMEM_BYTES}
NOT_READY, OUT_OF_MEMORY, ILLEGAL_ADDRESS, LAUNCH_FAILURE = 600, 2, 700, 719


class CudaError(RuntimeError):
    """As CuPy's: a status and its name."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(f"cudaError {status}: {text or 'emulated'}")
        self.status = status


class EmulatedCuda:
    """A `cupy` module with GPUs that do not exist.

    Attributes
    ----------
    n_gpus : int
    attributes : dict
        Of every GPU, by number; `names` of each.
    apart, damaged : set of (int, int)
        Pairs without a path, and (source, destination) whose stores arrive damaged.
    failing : str
        Call of the runtime or driver that fails with `status` the next time.
    enabled : list of (int, int)
        Peer access that was enabled.
    """

    __version__ = "emulated"

    def __init__(self, n_gpus: int = 1) -> None:
        self.n_gpus, self.attributes = n_gpus, dict(ATTRIBUTES)
        self.names = ["NVIDIA Emulated"] * n_gpus
        self.apart: set[tuple[int, int]] = set()
        self.damaged: set[tuple[int, int]] = set()
        self.failing, self.status = "", LAUNCH_FAILURE
        self.enabled: list[tuple[int, int]] = []
        self.max_bytes = 2**31
        self.allocated: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}
        self._current, self._queue = 0, []
        self._thread: threading.Thread | None = None
        self._failed = ""
        self._sources: dict[bytes, Source] = {}
        self._kernels: dict[int, tuple[HostKernel, int]] = {}
        names = [n for n in dir(self) if n.startswith("do_")]
        calls = {name.removeprefix("do_"): self._checked(name) for name in names}
        self.cuda = SimpleNamespace(runtime=SimpleNamespace(**calls),
                                    driver=SimpleNamespace(**calls))

    def _checked(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == f"do_{self.failing}":
                self.failing = ""
                raise CudaError(self.status)
            return getattr(self, name)(*arguments)
        return call

    def compile_kernel(self, source: Source, arch: str) -> Binary:
        """Take the place of NVRTC: the "machine code" says which source it is."""
        self._sources[source.digest.encode()] = source
        return Binary(source.name, arch, source.digest.encode(), "Used 168 registers")

    # What GPUs there are.
    def do_getDeviceCount(self) -> int:  # noqa: N802  (CuPy's names, like those below)
        return self.n_gpus

    def do_deviceGetAttribute(self, attribute: int, _gpu: int) -> int:  # noqa: N802
        return self.attributes[attribute]

    def do_getDeviceProperties(self, gpu: int) -> dict[str, Any]:  # noqa: N802
        return {"name": self.names[gpu].encode(), "totalGlobalMem": self.max_bytes}

    def do_deviceGetPCIBusId(self, gpu: int) -> str:  # noqa: N802
        return f"0000:{gpu:02x}:00.0"

    def do_driverGetVersion(self) -> int:  # noqa: N802
        return 13000

    do_runtimeGetVersion = do_driverGetVersion  # noqa: N815

    def do_getDevice(self) -> int:  # noqa: N802
        return self._current

    def do_setDevice(self, gpu: int) -> None:  # noqa: N802
        assert 0 <= gpu < self.n_gpus
        self._current = gpu

    def do_deviceCanAccessPeer(self, one: int, other: int) -> int:  # noqa: N802
        return int((min(one, other), max(one, other)) not in self.apart)

    def do_deviceEnablePeerAccess(self, other: int) -> None:  # noqa: N802
        if (self._current, other) in self.enabled:
            raise CudaError(704, "already enabled")
        self.enabled.append((self._current, other))

    # Memory.
    def do_malloc(self, n_bytes: int) -> int:
        if n_bytes + sum(array.size for _, array in self.allocated.values()) > self.max_bytes:
            raise CudaError(OUT_OF_MEMORY)
        array = np.random.default_rng(n_bytes).integers(0, 255, n_bytes + 256, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self.allocated[address] = (self._current, array)
        return address

    def do_hostAlloc(self, n_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 3  # portable and mapped
        return self.do_malloc(n_bytes)

    def do_free(self, address: int) -> None:
        if address:
            del self.allocated[address]

    do_freeHost = do_free  # noqa: N815

    def do_memcpy(self, to: int, source: int, n_bytes: int, _kind: int) -> None:
        self._finish()
        ctypes.memmove(to, source, n_bytes)

    def do_memsetAsync(self, to: int, byte: int, n_bytes: int, _stream: int) -> None:  # noqa: N802
        self._finish()
        ctypes.memset(to, byte, n_bytes)

    # Kernels.
    def do_moduleLoadData(self, cubin: bytes) -> bytes:  # noqa: N802
        return cubin

    def do_moduleGetFunction(self, module: bytes, name: str) -> int:  # noqa: N802
        source = self._sources[module]
        assert source.name == name
        self._kernels[len(self._kernels) + 1] = (compile_for_host(source), self._current)
        return len(self._kernels)

    def do_funcSetAttribute(self, _function: int, attribute: int, value: int) -> None:  # noqa: N802
        assert attribute != 8 or value <= SMEM_BYTES

    def do_funcGetAttribute(self, _attribute: int, _function: int) -> int:  # noqa: N802
        return 168

    def do_occupancyMaxActiveBlocksPerMultiprocessor(  # noqa: N802
        self, _function: int, _n_threads: int, shared_bytes: int
    ) -> int:
        return int(shared_bytes <= SMEM_BYTES)

    def do_streamCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags == 1
        return self._current + 1

    def do_launchCooperativeKernel(  # noqa: N802
        self, function: int, n_ctas: int, _y: int, _z: int, n_threads: int, _ty: int, _tz: int,
        shared_bytes: int, stream: int, parameters: int
    ) -> None:
        kernel, gpu = self._kernels[function]
        assert gpu == self._current == stream - 1  # loaded on the GPU that runs it
        sizes = [8 if "*" in kind else int(re.sub(r"\D", "", kind)) for kind in kernel.parameters]
        pointers = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        copies = [ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True)]
        self._queue.append((kernel, gpu, n_ctas, n_threads, shared_bytes, copies))

    def do_streamQuery(self, _stream: int) -> int:  # noqa: N802
        self._start()
        return NOT_READY if self._thread is not None and self._thread.is_alive() else 0

    def do_deviceSynchronize(self) -> None:  # noqa: N802
        self._finish()
        if self._failed:
            failed, self._failed = self._failed, ""
            raise CudaError(LAUNCH_FAILURE, failed)

    def _start(self) -> None:
        """Run what was launched, on all GPUs at the same time."""
        if self._queue and self._thread is None:
            queue, self._queue = self._queue, []
            self._thread = threading.Thread(target=self._run, args=(queue,))
            self._thread.start()

    def _finish(self) -> None:
        self._start()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, queue: list[Any]) -> None:
        kernel, _, n_ctas, n_threads, shared_bytes, _ = queue[0]
        buffers = [[ctypes.create_string_buffer(c, len(c)) for c in each[-1]] for each in queue]
        of_gpu = [(ctypes.c_void_p * len(b))(*map(ctypes.addressof, b)) for b in buffers]
        of_all = (ctypes.c_void_p * len(of_gpu))(*map(ctypes.addressof, of_gpu))
        message = ctypes.create_string_buffer(4096)
        settings = _Settings(len(queue), n_ctas, n_threads, shared_bytes, 1, 300.0)
        good = kernel._library.host_launch(ctypes.byref(settings), of_all, message,
                                           ctypes.c_size_t(len(message)))
        self._failed = "" if good else message.value.decode(errors="replace")
        for source, destination in self.damaged:
            if source in [each[1] for each in queue]:
                for gpu, array in self.allocated.values():
                    if gpu == destination and array.size > 2**16:
                        array[300] ^= 1


def install(patch: pytest.MonkeyPatch, n_gpus: int = 1) -> EmulatedCuda:
    """Put emulated GPUs in the place of CuPy and NVRTC."""
    emulated = EmulatedCuda(n_gpus)
    patch.setitem(sys.modules, "cupy", emulated)
    patch.setattr(cuda_gpus, "_p2p_attribute", lambda *_: 1)  # NVLink between all
    patch.setattr(cuda_gpus, "driver_facts", lambda _: {})
    for module in (cuda, cuda_launch):
        patch.setattr(module, "compile_kernel", emulated.compile_kernel)
    return emulated
