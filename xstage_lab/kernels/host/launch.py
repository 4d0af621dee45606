"""Run a kernel that g++ has built, on emulated GPUs whose memory is NumPy arrays."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import Infeasible, InvalidValue, require_number
from xstage_lab.kernels.failures import KernelFailed

_N_MESSAGE_BYTES = 8192
_ANY_TYPE = re.compile(r"u1|V\d+")  # bytes and structures: what the array holds is not checked


class _Settings(ctypes.Structure):
    """`Settings` in thread.hpp."""

    _fields_ = (("n_gpus", ctypes.c_uint), ("n_ctas", ctypes.c_uint),
                ("n_threads", ctypes.c_uint), ("shared_bytes", ctypes.c_uint),
                ("seed", ctypes.c_uint), ("timeout_s", ctypes.c_double))


class HostKernel:
    """A kernel built for this computer's CPU.

    Attributes
    ----------
    name : str
    parameters : tuple of str
        Type of each parameter: a NumPy type, after `*` for a pointer to such values, `const*` if
        the kernel only reads them.
    """

    def __init__(self, name: str, library: Path) -> None:
        self.name = name
        self._library = ctypes.CDLL(str(library))
        self._library.host_signature.restype = ctypes.c_char_p
        self._library.host_launch.restype = ctypes.c_bool
        self._alone = threading.Lock()
        self.parameters = tuple(self._library.host_signature().decode().split())

    def launch(
        self,
        n_ctas: int,
        n_threads: int,
        arguments: Sequence[Sequence[Any]],
        *,
        shared_bytes: int = 0,
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Run the kernel on one or several emulated GPUs at the same time.

        Parameters
        ----------
        n_ctas, n_threads : int
            CTAs of each GPU, and threads of each CTA, a multiple of 32.
        arguments : sequence of sequences
            For each GPU the kernel's arguments: a C-contiguous array of the parameter's type
            for a pointer (or None), a number for a number. GPUs that share memory share arrays.
        shared_bytes : int
            Dynamic shared memory of a CTA.
        seed : int
            Another seed, another order in which threads run; 0 is by index.
        timeout_s : float
            The longest run; one that takes longer hangs.

        Raises
        ------
        KernelFailed
            If it does what it must not, or hangs: who waited where.
        InvalidValue, Infeasible
            If the arguments do not fit the kernel or the grid does not fit the host.
        """
        require_number("n_ctas", n_ctas, low=1, integer=True)
        require_number("shared_bytes", shared_bytes, low=0, high=2**24, unit="bytes", integer=True)
        require_number("timeout_s", timeout_s, low=0, open_low=True, unit="s")
        require_number("seed", seed, low=0, high=2**31 - 2, integer=True)
        if n_threads not in range(32, 1025, 32):
            raise InvalidValue("n_threads", n_threads, "multiples of 32 up to 1024")
        max_threads = self._library.host_max_threads()
        if len(arguments) * n_ctas * n_threads > max_threads:
            raise Infeasible(f"{len(arguments)} GPUs x {n_ctas} CTAs x {n_threads} threads: all "
                             f"run at the same time, and the host takes {max_threads:,}. Take "
                             "fewer or smaller CTAs.")
        packed = [self._pack(each) for each in arguments]
        of_gpu = [(ctypes.c_void_p * len(each))(*(v.ctypes.data for v in each)) for each in packed]
        of_all = (ctypes.c_void_p * len(of_gpu))(*map(ctypes.addressof, of_gpu))
        message = ctypes.create_string_buffer(_N_MESSAGE_BYTES)
        settings = _Settings(len(arguments), n_ctas, n_threads, shared_bytes, seed, timeout_s)
        with self._alone:
            good = self._interruptible(lambda: self._library.host_launch(
                ctypes.byref(settings), of_all, message, ctypes.c_size_t(len(message))))
        if not good:
            said = message.value.decode(errors="replace")
            raise KernelFailed(f"{self.name}: {_name_addresses(said, arguments)}")

    def _interruptible(self, call: Callable[[], bool]) -> bool:
        """Call in a thread of its own, so that Ctrl-C and a notebook's stop button end it."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(call)
            try:
                while not wait([running], timeout=0.1).done:  # a signal may not end a wait
                    pass
                return running.result()
            except KeyboardInterrupt:
                self._library.host_interrupt()
                raise

    def _pack(self, arguments: Sequence[Any]) -> list[NDArray[Any]]:
        """Return an array for each argument that holds it as the kernel takes it."""
        if len(arguments) != len(self.parameters):
            raise InvalidValue(f"arguments of {self.name}", len(arguments),
                               f"{len(self.parameters)}: {', '.join(self.parameters)}")
        return [_pack_one(f"argument {i} of {self.name}", value, kind)
                for i, (value, kind) in enumerate(zip(arguments, self.parameters, strict=True))]


def _pack_one(field: str, value: Any, kind: str) -> NDArray[Any]:
    if "*" not in kind:
        return _pack_value(field, value, np.dtype(kind))
    if value is None:
        return np.zeros(1, np.uintp)
    target = kind.removeprefix("const").removeprefix("*")
    wanted = np.dtype(np.uintp if "*" in target else target)
    if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
        raise InvalidValue(field, value, "C-contiguous arrays",
                           remedy="Take np.ascontiguousarray(...).")
    if value.dtype != wanted and not _ANY_TYPE.fullmatch(target):
        raise InvalidValue(field, value.dtype.name, f"arrays of {wanted.name}")
    if not kind.startswith("const") and not value.flags.writeable:
        raise InvalidValue(field, "a read-only array", "arrays that the kernel may write")
    return np.array([value.ctypes.data], np.uintp)


def _pack_value(field: str, value: Any, wanted: np.dtype[Any]) -> NDArray[Any]:
    if wanted.kind == "V":
        given = np.asarray(value)
        if given.dtype.kind != "V" or given.nbytes != wanted.itemsize:
            raise InvalidValue(field, value, f"structures of {wanted.itemsize} bytes")
        return np.frombuffer(given.tobytes(), np.uint8)
    if wanted.kind == "f":
        require_number(field, value)
    else:
        limits = np.iinfo(wanted)
        require_number(field, value, low=limits.min, high=limits.max, integer=True)
    return np.array([value], wanted)


def _name_addresses(message: str, arguments: Sequence[Sequence[Any]]) -> str:
    """Replace addresses of which array and element are known."""
    def name(found: re.Match[str]) -> str:
        address = int(found.group(), 16)
        for gpu, values in enumerate(arguments):
            for i, value in enumerate(values):
                offset = address - value.ctypes.data if isinstance(value, np.ndarray) else -1
                if isinstance(value, np.ndarray) and 0 <= offset < value.nbytes:
                    return f"element {offset // value.itemsize} of argument {i} of GPU {gpu}"
        return found.group()
    return re.sub(r"0x[0-9a-f]+", name, message)
