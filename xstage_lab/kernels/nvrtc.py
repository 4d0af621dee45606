"""Kernels -> machine code by NVRTC, without a driver, a GPU or a CUDA toolkit.

What was compiled once is kept on disk, by architecture and digest of the source.
"""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xstage_lab.errors import DeviceUnavailable, FileRejected, XStageError, require_choice
from xstage_lab.kernels.source import Source, cache_folder
from xstage_lab.record import write_atomic

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
_OPTIONS = ("-std=c++20", "--ptxas-options=-v")
# What reading a file may raise that is not there, or is not whole.
_NOT_KEPT = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
_REMEDY = ('Install what compiles kernels: pip install "cuda-bindings==13.*" '
           '"nvidia-cuda-nvrtc==13.*"')


class CompileFailed(XStageError):
    """NVRTC refused a kernel; the message shows the line of the source."""


class Binary(NamedTuple):
    """A compiled kernel.

    Attributes
    ----------
    name : str
        Of the kernel in it.
    arch : str
        For instance `sm_90a`.
    cubin : bytes
        Machine code that the CUDA driver loads.
    log : str
        What NVRTC and ptxas said.
    """

    name: str
    arch: str
    cubin: bytes
    log: str

    @property
    def n_registers(self) -> int:
        """Registers of one thread."""
        return self._number(r"Used (\d+) registers")

    @property
    def static_smem_bytes(self) -> int:
        """Shared memory that the kernel declares; what a launch adds is not in it."""
        return self._number(r"(\d+) bytes smem")

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers that one thread spills to local memory, stores and loads."""
        return self._number(r"(\d+) bytes spill stores") + self._number(r"(\d+) bytes spill loads")

    @property
    def warnings(self) -> list[str]:
        """Lines that say something was ignored, is slow or is doubtful."""
        return [line.strip() for line in self.log.splitlines()
                if re.search(r"\bwarning\b|\bignored\b|\bC\d{4}\b", line)]

    def _number(self, pattern: str) -> int:
        found = re.search(pattern, self.log)
        return int(found.group(1)) if found else 0


def compile_kernel(source: Source, arch: str) -> Binary:
    """Compile a kernel, or fetch what was compiled before.

    Parameters
    ----------
    source : Source
    arch : str
        One of `ARCHITECTURES`.

    Raises
    ------
    CompileFailed
        With the compiler's messages and the source lines they are about.
    DeviceUnavailable
        If NVRTC is not installed.
    """
    require_choice("arch", arch, ARCHITECTURES)
    nvrtc, version = _load()
    path = cache_folder() / f"{source.name}-{arch}-nvrtc{version}-{source.digest[:32]}.npz"
    with contextlib.suppress(*_NOT_KEPT), np.load(path) as stored:
        return Binary(source.name, arch, stored["cubin"].tobytes(), str(stored["log"]))
    binary = _compile(nvrtc, source, arch)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, cubin=np.frombuffer(binary.cubin, np.uint8),
                        log=np.array(binary.log))
    with contextlib.suppress(FileRejected):  # without a cache it is only slower
        write_atomic(path, buffer.getvalue())
    return binary


def _load() -> tuple[Any, str]:
    """Return NVRTC's bindings and its version."""
    try:
        from cuda.bindings import nvrtc
        error, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as reason:
        first = str(reason).strip().splitlines() or [type(reason).__name__]
        raise DeviceUnavailable(f"NVRTC cannot be used ({first[0]}). {_REMEDY}") from None
    if int(error):
        raise DeviceUnavailable(f"NVRTC does not work ({error.name}). {_REMEDY}")
    return nvrtc, f"{major}.{minor}"


def _compile(nvrtc: Any, source: Source, arch: str) -> Binary:
    options = [o.encode() for o in (f"-arch={arch}", *_OPTIONS, *source.options)]
    text, file = source.text.encode(), f"{source.name}.cu"
    _, program = nvrtc.nvrtcCreateProgram(text, file.encode(), 0, [], [])
    try:
        error, = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _fetch(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        messages = log.rstrip(b"\0").decode(errors="replace").strip()
        if int(error):
            raise CompileFailed(f"{file} does not compile for {arch} "
                                f"({' '.join(source.options)}):\n{messages or error.name}")
        cubin = _fetch(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Binary(source.name, arch, cubin, messages)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _fetch(program: Any, size_of: Callable[[Any], Any], content_of: Callable[..., Any]) -> bytes:
    _, n_bytes = size_of(program)
    content = bytearray(n_bytes)
    content_of(program, content)
    return bytes(content)
