"""CUDA kernels on the CPU: what they compute is checked, and races; times mean nothing here.

`compile_kernel` builds a kernel with g++, `HostKernel.launch` runs it on emulated GPUs whose
memory is NumPy arrays, and `check_races` watches it with ThreadSanitizer.

Examples
--------
>>> import numpy as np
>>> kernel = compile_kernel(
...     'extern "C" __global__ void twice(const float* x, float* y) {'
...     '    y[threadIdx.x] = 2 * x[threadIdx.x];'
...     '}')
>>> x, y = np.arange(64, dtype=np.float32), np.empty(64, np.float32)
>>> kernel.launch(n_ctas=1, n_threads=64, arguments=[(x, y)])
>>> bool((y == 2 * x).all())
True
"""

from xstage_lab.kernels.host.build import compile_kernel
from xstage_lab.kernels.host.launch import HostKernel
from xstage_lab.kernels.host.races import check_races

__all__ = ["HostKernel", "check_races", "compile_kernel"]
