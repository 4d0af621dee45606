"""What the GPU does without our kernels: plain copies, and cuBLAS. What ours are held against.

Not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xstage_lab.devices.cuda_gpus import first_line, gpus, load_cuda
from xstage_lab.devices.cuda_launch import Gpu, HostLink

COPY_BYTES, PINNED_BYTES = 2**30, 2**28
GEMM_EDGE = 8192
_N_TIMED = 5
_ANY_WAY = 4  # cudaMemcpyDefault


def yardsticks() -> dict[str, Any]:
    """Measure them on GPU 0.

    Returns
    -------
    dict
        `copy_memory_bytes_per_s` : bytes that a copy within the GPU reads and writes.
        `pinned_copy_bytes_per_s` : bytes that the copy engine moves to pinned host memory.
        `cublas_flop_per_s` : a matrix product of 8192 cubed, fp16 operands and fp32 sums (bf16 runs
        at the same rate); NaN where cuBLAS is not there, and `cublas_missing` says why.

    Raises
    ------
    DeviceUnavailable, Infeasible
        If there is no GPU, or no room.
    """
    cuda = load_cuda()
    gpu = Gpu(cuda, gpus(cuda)[0])
    source, to = gpu.memory("source", COPY_BYTES), gpu.memory("to", COPY_BYTES)
    host = HostLink(cuda).memory("to", PINNED_BYTES)

    def copy(destination: int, n_bytes: int) -> Callable[[], None]:
        return lambda: gpu.runtime.memcpyAsync(destination, source.address, n_bytes, _ANY_WAY,
                                               gpu.stream)

    with gpu.current():
        found: dict[str, Any] = {
            "copy_memory_bytes_per_s": 2 * COPY_BYTES / _fastest(
                gpu, gpu.stream, copy(to.address, COPY_BYTES)),
            "pinned_copy_bytes_per_s": PINNED_BYTES / _fastest(
                gpu, gpu.stream, copy(host.address, PINNED_BYTES))}
        try:
            found["cublas_flop_per_s"] = _cublas(gpu)
        except (ImportError, OSError, RuntimeError) as error:
            found |= {"cublas_flop_per_s": math.nan, "cublas_missing": first_line(error)}
    return found


def _fastest(gpu: Gpu, stream: int, run: Callable[[], object]) -> float:
    """Return the shortest time of some runs, by events on their stream (s)."""
    start, end = gpu.runtime.eventCreate(), gpu.runtime.eventCreate()
    times = []
    for _ in range(1 + _N_TIMED):  # the first warms up
        gpu.runtime.eventRecord(start, stream)
        run()
        gpu.runtime.eventRecord(end, stream)
        gpu.runtime.eventSynchronize(end)
        times.append(gpu.runtime.eventElapsedTime(start, end) * 1e-3)
    for event in (start, end):
        gpu.runtime.eventDestroy(event)
    return float(min(times[1:]))


def _cublas(gpu: Gpu) -> float:
    import cupy

    rng = np.random.default_rng(0)
    shape = (GEMM_EDGE, GEMM_EDGE)
    a, b = (cupy.asarray(rng.uniform(-1.0, 1.0, shape).astype(np.float16)) for _ in range(2))
    out = cupy.empty(shape, cupy.float16)
    stream = cupy.cuda.get_current_stream().ptr
    taken = _fastest(gpu, stream, lambda: cupy.matmul(a, b, out=out))
    return 2.0 * GEMM_EDGE**3 / taken
