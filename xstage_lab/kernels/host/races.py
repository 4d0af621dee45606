"""Look for races in kernels with ThreadSanitizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from xstage_lab.errors import DeviceUnavailable, require_number
from xstage_lab.kernels.failures import KernelFailed
from xstage_lab.kernels.host.build import THREADS, gxx, run_gxx

_REPORT = re.compile(r"^WARNING: ThreadSanitizer: .*?^SUMMARY: [^\n]*$", re.MULTILINE | re.DOTALL)


def check_races(code: str, *, timeout_s: float = 300.0) -> list[str]:
    """Run Python code in which each CUDA thread is a thread and ThreadSanitizer watches.

    Scopes are not told apart, and fences only as far as relaxed stores after them go.

    Parameters
    ----------
    code : str
        Runs in a fresh interpreter; the kernels it compiles and launches are watched.
    timeout_s : float

    Returns
    -------
    list of str
        ThreadSanitizer's reports, one a race; empty if there are none.

    Raises
    ------
    KernelFailed
        If the code fails for another reason than a race.
    DeviceUnavailable
        If there is no ThreadSanitizer.
    """
    require_number("timeout_s", timeout_s, low=0, open_low=True, unit="s")
    environment = {**os.environ, THREADS: "1", "LD_PRELOAD": str(_sanitizer()),
                   "TSAN_OPTIONS": "exitcode=0:report_signal_unsafe=0:suppress_equal_addresses=0"}
    try:
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                              text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise KernelFailed(f"the race check was not over after {timeout_s:g} s.") from None
    if "FATAL: ThreadSanitizer" in done.stderr:
        raise DeviceUnavailable(f"ThreadSanitizer does not start here ({done.stderr.strip()}). Try "
                                "`setarch -R` before the command, or sysctl vm.mmap_rnd_bits=28.")
    reports = _REPORT.findall(done.stderr)
    if done.returncode and not reports:
        raise KernelFailed(f"the code under race check failed:\n{done.stderr.strip()}")
    return reports


def _sanitizer() -> Path:
    library = Path(run_gxx("-print-file-name=libtsan.so").stdout.strip())
    if not library.is_absolute():
        raise DeviceUnavailable(f"{gxx()} has no ThreadSanitizer. Install it (Debian, Ubuntu: "
                                "sudo apt-get install libtsan2; Fedora: dnf install libtsan).")
    return library
