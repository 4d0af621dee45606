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
#: Takes text, file name and options; returns what failed (nothing: it compiled), log and cubin.
Compiler = Callable[[str, str, list[str]], tuple[str, str, bytes]]
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
    compiler, version = _load()
    path = cache_folder() / f"{source.name}-{arch}-nvrtc{version}-{source.digest[:32]}.npz"
    with contextlib.suppress(*_NOT_KEPT), np.load(path) as stored:
        return Binary(source.name, arch, stored["cubin"].tobytes(), str(stored["log"]))
    binary = _compile(compiler, source, arch)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, cubin=np.frombuffer(binary.cubin, np.uint8),
                        log=np.array(binary.log))
    with contextlib.suppress(FileRejected):  # without a cache it is only slower
        write_atomic(path, buffer.getvalue())
    return binary


def nvrtc_version() -> str:
    """Return the version of NVRTC; raises `DeviceUnavailable` if there is none."""
    return _load()[1]


def _load() -> tuple[Compiler, str]:
    """Return what compiles, by NVIDIA's bindings or else by CuPy's, and NVRTC's version."""
    reasons = []
    for load in (_by_bindings, _by_cupy):
        try:
            return load()
        except (ImportError, OSError, RuntimeError) as error:
            first = str(error).strip().splitlines() or [type(error).__name__]
            reasons.append(first[0])
    raise DeviceUnavailable(f"NVRTC cannot be used ({'; '.join(reasons)}). {_REMEDY}")


def _by_bindings() -> tuple[Compiler, str]:
    from cuda.bindings import nvrtc

    def fetch(program: Any, size_of: Callable[[Any], Any], content_of: Callable[..., Any]) -> bytes:
        _, n_bytes = size_of(program)
        content = bytearray(n_bytes)
        content_of(program, content)
        return bytes(content)

    def compiler(text: str, file: str, options: list[str]) -> tuple[str, str, bytes]:
        _, program = nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, [], [])
        try:
            error, = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
            log = fetch(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            cubin = b"" if int(error) else fetch(program, nvrtc.nvrtcGetCUBINSize,
                                                 nvrtc.nvrtcGetCUBIN)
            return error.name if int(error) else "", log.decode(errors="replace"), cubin
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error):
        raise RuntimeError(error.name)
    return compiler, f"{major}.{minor}"


def _by_cupy() -> tuple[Compiler, str]:
    from cupy_backends.cuda.libs import nvrtc

    def compiler(text: str, file: str, options: list[str]) -> tuple[str, str, bytes]:
        program, failed = nvrtc.createProgram(text, file, (), ()), ""
        try:
            nvrtc.compileProgram(program, tuple(options))
        except nvrtc.NVRTCError as error:
            failed = str(error)
        try:
            return failed, nvrtc.getProgramLog(program), (
                b"" if failed else nvrtc.getCUBIN(program))
        finally:
            nvrtc.destroyProgram(program)

    return compiler, ".".join(map(str, nvrtc.getVersion()))


def _compile(compiler: Compiler, source: Source, arch: str) -> Binary:
    file = f"{source.name}.cu"
    failed, log, cubin = compiler(source.text, file,
                                  [f"-arch={arch}", *_OPTIONS, *source.options])
    messages = log.rstrip("\0").strip()
    if failed:
        raise CompileFailed(f"{file} does not compile for {arch} ({' '.join(source.options)}):\n"
                            f"{messages or failed}")
    return Binary(source.name, arch, cubin, messages)
