"""What `burst_gap.cu` takes: its variants and their limits, and its arguments by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from xstage_lab.errors import Infeasible, InvalidValue
from xstage_lab.kernels.source import Source, read
from xstage_lab.schedule import Program
from xstage_lab.spec import BurstTrain

SHARED_BYTES = 1024  # of a CTA, before the source of bulk copies
N_ANCHORS = 5        # start and end of a CTA in ns and cycles, arrival in cycles
WAITS = ("all CTAs of all GPUs to start", "all CTAs to end their burst")

#: Type of each argument, in the kernel's order; uint64 is an address.
ARGUMENTS: dict[str, type[np.integer[Any]]] = {
    "destinations": np.uint64, "n_destinations": np.uint32, "burst_bytes": np.uint32,
    "n_bursts": np.uint32, "n_slots": np.uint32, "seed": np.uint32, "gap_cycles": np.int64,
    "lockstep": np.uint32, "spans": np.uint64, "anchors": np.uint64, "sms": np.uint64,
    "counter": np.uint64, "started": np.uint64, "n_starters": np.uint32, "abort": np.uint64,
    "budget_cycles": np.int64, "report": np.uint64,
}


def source(store_path: str, n_threads: int) -> Source:
    """Return the kernel for a store path and a number of threads in a CTA."""
    return read("burst_gap", N_THREADS=n_threads, BULK=int(store_path == "bulk"))


def shared_bytes(store_path: str, burst_bytes: int) -> int:
    """Return the dynamic shared memory of a CTA: bulk copies need their source in it."""
    return SHARED_BYTES + (burst_bytes if store_path == "bulk" else 0)


def train_of(program: Program) -> BurstTrain:
    """Return the burst train of a program.

    Raises
    ------
    InvalidValue
        If the kernel does not take it.
    """
    train = program.workload
    if not isinstance(train, BurstTrain):
        raise InvalidValue("workload", type(train).__name__, "BurstTrain")
    if train.burst_bytes % 16:
        raise InvalidValue("burst_bytes", train.burst_bytes, "multiples of 16", "B",
                           "The kernel stores 16 bytes at a time.")
    if program.stores == "off":
        raise InvalidValue("stores", "off", "remote or local",
                           remedy="Without its stores a burst train does nothing.")
    return train


def require_shared(store_path: str, burst_bytes: int, limit_bytes: float) -> None:
    """Raise `Infeasible` where a CTA may have only `limit_bytes` of shared memory."""
    needed = shared_bytes(store_path, burst_bytes)
    if needed > limit_bytes:
        raise Infeasible(f"burst_bytes = {burst_bytes} B as a bulk copy needs {needed / 1024:.0f} "
                         f"KiB of shared memory; the device allows {limit_bytes / 1024:.0f} KiB. "
                         "Take smaller bursts, or the store path registers.")


def in_order(**arguments: Any) -> tuple[Any, ...]:
    """Return arguments given by name in the kernel's order."""
    return tuple(arguments[name] for name in ARGUMENTS)
