"""Kernels -> shared libraries, by g++ and the shim.

What was built once is kept on disk, by digest of everything that went into it.
"""

from __future__ import annotations

import contextlib
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
_FLAGS = ("-std=c++20", "-fPIC", "-pthread", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas",
          "-U_FORTIFY_SOURCE")
_FIBER_FLAGS, _THREAD_FLAGS = ("-O2",), ("-O1", f"-D{THREADS}", "-fsanitize=thread")
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
    flags = [*_FLAGS, *(_THREAD_FLAGS if os.environ.get(THREADS) else _FIBER_FLAGS)]
    library = _kept(f"{source.name}-host", ".so", source.digest, *flags)
    if not library.exists():
        _build_kernel(source, flags, library)
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


def _kept(name: str, suffix: str, *built_from: str) -> Path:
    """Return where something built from this and the shim is kept."""
    content = "\n".join([*built_from, _shim_digest(), _version(gxx())])
    digest = hashlib.sha256(content.encode()).hexdigest()
    return cache_folder() / f"{name}-{digest[:32]}{suffix}"


@functools.cache
def _version(compiler: str) -> str:
    return f"{compiler} {run_gxx('-dumpfullversion').stdout.strip()}"


def _shim_digest() -> str:
    files = [*sorted(_SHIM.glob("*.[ch]pp")), _SHIM.parent / "ptx.cuh"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _as_source(text: str) -> Source:
    names = _KERNEL.findall(text)
    if len(names) != 1:
        raise XStageError(f'the text holds {len(names)} kernels ({", ".join(names) or "none"}); it '
                          'needs exactly one: extern "C" __global__ void name(...).')
    return Source(name=names[0], text=f'#line 1 "{names[0]}.cu"\n{text}', defines={})


def _build_kernel(source: Source, flags: list[str], library: Path) -> None:
    """Build a kernel's shared library."""
    runtime = _runtime(flags)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for name, text in _original_files(source).items():  # for g++ to quote from
            Path(folder, name).write_text(text, encoding="utf-8")
        unit, built = Path(folder, "host_build.cpp"), Path(folder, "kernel.so")
        unit.write_text(f'#include "shim.hpp"\n{source.text}\n#include "kernel.hpp"\n'
                        f"HOST_KERNEL({source.name})\n", encoding="utf-8")
        _compile(f"{source.name}.cu", [*flags, "-shared", *source.options, f"-I{_SHIM}",
                                       f"-I{_SHIM.parent}", f"-ffile-prefix-map={folder}/=",
                                       unit.name, *runtime, "-o", built.name], folder)
        built.replace(library)


def _runtime(flags: list[str]) -> list[str]:
    """Return the objects that every kernel is linked with, built once."""
    kept = _kept("runtime-host", "", *flags)
    sources = sorted(_SHIM.glob("*.cpp"))
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            _compile("the shim", [*flags, "-c", *map(str, sources)], folder)
            with contextlib.suppress(OSError):  # somebody else was faster
                Path(folder).rename(kept)
            Path(folder).mkdir(exist_ok=True)  # there is something to clean up
    return [str(kept / f"{source.stem}.o") for source in sources]


def _compile(what: str, arguments: list[str], folder: str) -> None:
    done = run_gxx(*arguments, cwd=folder)
    if done.returncode:
        lines = done.stderr.splitlines()
        cut = ["..."] if len(lines) > _N_MESSAGE_LINES else []
        raise CompileFailed("\n".join([f"{what} does not compile for the host:",
                                       *lines[:_N_MESSAGE_LINES], *cut]))


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
