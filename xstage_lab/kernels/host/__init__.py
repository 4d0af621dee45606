"""CUDA kernels on the CPU: what they compute is checked, and races; times mean nothing here.

`compile_kernel` builds a kernel with g++, `HostKernel.launch` runs it on emulated GPUs whose
memory is NumPy arrays, and `check_races` watches it with ThreadSanitizer.
"""

from xstage_lab.kernels.host.build import compile_kernel
from xstage_lab.kernels.host.launch import HostKernel
from xstage_lab.kernels.host.races import check_races

__all__ = ["HostKernel", "check_races", "compile_kernel"]
