"""Files of per-tile times: what a record looks like once somebody has written it down.

`python tests/timings_files.py` writes data/timings_example.csv again.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from xstage_lab import catalog
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.record import Record, Tiles
from xstage_lab.schedule import build
from xstage_lab.spec import FusedGemm, MachineSpec, Tuning

EXAMPLE = Path(__file__).parent.parent / "data" / "timings_example.csv"
#: Drain-bound: 32 SMs store faster than the link of an H100 drains.
GEMM = FusedGemm(m=2048, n=2560, k=256, n_gpus=8)
TUNING = Tuning(issue_depth=2, n_ctas=32)
HEAD = ("the form for per-tile times of your own; these are SIMULATED, measured by nobody",
        "machine: H100-SXM",
        "source: SIMULATED by the discrete-event model of H100-SXM, as an example",
        "issue_depth: 2",
        "n_gpus: 8")
TIMES = ("mma_start", "mma_end", "issue_start", "issue_end")
SCALES = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


def machine() -> MachineSpec:
    return catalog.with_assumptions(catalog.machine("H100-SXM"))


def simulated(gemm: FusedGemm = GEMM, tuning: Tuning = TUNING) -> tuple[Record, Tiles]:
    """Return a record, and GPU 0's tiles as a file has them: local tiles store nothing remote."""
    program = build(gemm, machine(), tuning)
    record = SimulatedDevice(machine()).measure(program)
    assert record.tiles is not None
    tiles = record.tiles[record.tiles["gpu"] == 0].copy()
    tiles["store_bytes"][program.tasks[0]["owner"] == 0] = 0
    return record, tiles


def as_csv(tiles: Tiles, unit: str = "us", digits: int = 3, head: tuple[str, ...] = (),
           also: tuple[str, ...] = ("arrived",)) -> str:
    """Return a file's text; unknown times are empty cells."""
    text = io.StringIO()
    text.writelines(f"# {line}\n" for line in head)
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["gpu", "sm", "tile", *(f"{name}_{unit}" for name in TIMES), "store_bytes",
                   *(f"{name}_{unit}" for name in also)])
    for tile in tiles:
        def told(name: str, tile: np.void = tile) -> str:
            value = tile[f"{name}_s"] * SCALES[unit]
            return "" if np.isnan(value) else f"{value:.{digits}f}"
        rows.writerow([tile["gpu"], tile["sm"], tile["row"], *map(told, TIMES),
                       tile["store_bytes"], *map(told, also)])
    return text.getvalue()


if __name__ == "__main__":
    EXAMPLE.write_text(as_csv(simulated()[1], head=HEAD))
