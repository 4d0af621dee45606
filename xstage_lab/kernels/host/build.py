"""Kernels -> shared libraries, by g++ and the shim.

What was built once is kept on disk, by digest of everything that went into it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from xstage_lab.errors import DeviceUnavailable, XStageError
from xstage_lab.kernels.host.launch import HostKernel
from xstage_lab.kernels.nvrtc import CompileFailed
from xstage_lab.kernels.source import Source, cache_folder

THREADS = "XSTAGE_THREADS"  # environment: a thread for each CUDA thread, under ThreadSanitizer
_SHIM = Path(__file__).resolve().parent
_FLAGS = ("-std=c++20", "-shared", "-fPIC", "-pthread", "-g1", "-Wall", "-Wextra",
          "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE")
_MODES = {False: ("-O2",), True: ("-O1", f"-D{THREADS}", "-fsanitize=thread")}
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)')
_LINE = re.compile(r'#line (\d+) "([\w.]+)"')
_N_MESSAGE_LINES = 40


def compile_kernel(source: Source | str) -> HostKernel:
    """Build a kernel for this computer's CPU, or fetch what was built before.

    Parameters
    ----------
    source : Source or str
        A kernel of this package, or CUDA C++ with one `extern "C" __global__` kernel, which may
        include "ptx.cuh".

    Returns
    -------
    HostKernel

    Raises
    ------
    CompileFailed
        With the compiler's messages and the source lines they are about.
    DeviceUnavailable
        If there is no g++.
    """
    if isinstance(source, str):
        source = _as_source(source)
    flags = [*_FLAGS, *_MODES[bool(os.environ.get(THREADS))], *source.options]
    built_from = [source.digest, _shim_digest(), gxx(), _gxx_version(), *flags]
    digest = hashlib.sha256("\n".join(built_from).encode()).hexdigest()
    library = cache_folder() / f"{source.name}-host-{digest[:32]}.so"
    if not library.exists():
        _build(source, flags, library)
    return HostKernel(source.name, library)


def gxx() -> str:
    """Return the C++ compiler: the one `CXX` names, or g++.

    Raises
    ------
    DeviceUnavailable
        If there is none.
    """
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise DeviceUnavailable("kernels on the CPU need the compiler g++ 11 or newer, and there "
                                "is none. Install it (Debian, Ubuntu: sudo apt-get install g++; "
                                "conda: conda install gxx) or name it in CXX.")
    return compiler


def run_gxx(*arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the compiler, outside of any sanitizer that this process runs under."""
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return subprocess.run([gxx(), *arguments], capture_output=True, text=True, cwd=cwd,
                          env=environment, check=False)


@functools.cache
def _gxx_version() -> str:
    return run_gxx("-dumpfullversion").stdout.strip()


@functools.cache
def _shim_digest() -> str:
    texts = [path.read_bytes() for path in (*sorted(_SHIM.glob("*.hpp")), _SHIM.parent / "ptx.cuh")]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _as_source(text: str) -> Source:
    names = _KERNEL.findall(text)
    if len(names) != 1:
        raise XStageError(f'the text holds {len(names)} kernels ({", ".join(names) or "none"}); it '
                          'needs exactly one: extern "C" __global__ void name(...).')
    return Source(name=names[0], text=f'#line 1 "{names[0]}.cu"\n{text}', defines={})


def _build(source: Source, flags: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for name, text in _original_files(source).items():  # for g++ to quote from
            Path(folder, name).write_text(text, encoding="utf-8")
        unit, built = Path(folder, "host_build.cpp"), Path(folder, "kernel.so")
        unit.write_text(f'#include "shim.hpp"\n{source.text}\n#include "kernel.hpp"\n'
                        f"HOST_KERNEL({source.name})\n", encoding="utf-8")
        done = run_gxx(*flags, f"-I{_SHIM}", f"-I{_SHIM.parent}", f"-ffile-prefix-map={folder}/=",
                       unit.name, "-o", built.name, cwd=folder)
        if done.returncode:
            lines = done.stderr.splitlines()
            cut = ["..."] if len(lines) > _N_MESSAGE_LINES else []
            raise CompileFailed("\n".join([f"{source.name}.cu does not compile for the host:",
                                           *lines[:_N_MESSAGE_LINES], *cut]))
        built.replace(library)


def _original_files(source: Source) -> dict[str, str]:
    """Return the files a text was put together from, as far as its `#line` directives tell."""
    files: dict[str, list[str]] = {}
    file, number = f"{source.name}.cu", 1
    for line in source.text.splitlines():
        found = _LINE.match(line)
        if found:
            file, number = found.group(2), int(found.group(1))
            continue
        lines = files.setdefault(file, [])
        lines.extend([""] * (number - len(lines)))
        lines[number - 1] = line
        number += 1
    return {name: "\n".join(lines) + "\n" for name, lines in files.items()}
