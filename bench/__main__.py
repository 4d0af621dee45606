"""`python -m bench [SUBJECT ...] [--json FILE]`: measure, print, and nothing else."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

from bench.figures import Figure, print_figures
from xstage_lab.errors import XStageError
from xstage_lab.record import write_atomic

SUBJECTS = (
    "speed_simulator",
    "speed_law",
    "kernels",
    "accuracy_calibration",
    "coverage_intervals",
    "accuracy_bursts",
    "accuracy_gemm",
    "accuracy_moe",
    "accuracy_ulysses",
    "accuracy_sockets",
    "tuner",
    "paper",
    "runlog",
    "slider",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="How fast and how true the lab is on this machine."
    )
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT",
                        help=f"which to measure, all if left out: {', '.join(SUBJECTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures in FILE")
    options = parser.parse_args()
    unknown = set(options.subjects) - set(SUBJECTS)
    if unknown:
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    found: dict[str, list[Figure]] = {}
    for name in options.subjects or SUBJECTS:
        subject = importlib.import_module(f"bench.{name}")
        print(f"\n{name}: {(subject.__doc__ or '').splitlines()[0]}\n", flush=True)
        began = time.perf_counter()
        try:
            found[name] = subject.measure()
        except XStageError as refusal:  # the other subjects' figures are not to be lost
            found[name] = [Figure(what=name, value=math.nan, asked=math.nan, note=str(refusal))]
        print(f"\n  ({time.perf_counter() - began:.0f} s)", flush=True)
    print(f"\nAll figures, on {_machine()}\n")
    print_figures(figure for figures in found.values() for figure in figures)
    if options.json:
        _keep(options.json, found)


def _machine() -> str:
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, " \
           f"load {load}"


def _keep(path: Path, found: dict[str, list[Figure]]) -> None:
    def plain(figure: Figure) -> dict[str, Any]:
        value = None if math.isnan(figure.value) else figure.value
        return dataclasses.asdict(figure) | {"value": value, "verdict": figure.verdict}

    kept = {"machine": _machine(),
            "figures": {name: [plain(f) for f in figures] for name, figures in found.items()}}
    write_atomic(path, json.dumps(kept, indent=1).encode())


if __name__ == "__main__":
    main()
