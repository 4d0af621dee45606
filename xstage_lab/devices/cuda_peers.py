"""GPUs that store to each other: access enabled both ways, and every pair proved by a pattern.

Not yet run on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from xstage_lab.devices.cuda_bursts import Route, run_train
from xstage_lab.devices.cuda_gpus import connection
from xstage_lab.devices.cuda_launch import Gpu, Watchdog
from xstage_lab.errors import DeviceUnavailable
from xstage_lab.kernels.failures import KernelFailed
from xstage_lab.reference import WrongResult
from xstage_lab.spec import BurstTrain

_ALREADY_ENABLED = 704  # cudaError
_PROOF = BurstTrain(n_producers=4, burst_bytes=64 * 1024, gap_s=0.0, n_bursts=8, n_gpus=1)
_MAX_TRIED = 12  # GPUs among which the largest group is looked for


def connect(cuda: Any, watchdog: Watchdog, gpus: Sequence[Gpu]) -> tuple[list[Gpu], list[str]]:
    """Connect GPUs and leave out those that do not reach all others.

    Parameters
    ----------
    cuda : module
        `cupy.cuda`.
    watchdog : Watchdog
    gpus : sequence of Gpu

    Returns
    -------
    connected : list of Gpu
        The most of them among which every pair works.
    left_out : list of str
        Why each pair that does not work does not.

    Raises
    ------
    DeviceUnavailable
        If fewer than two are left, naming the pairs and the reasons.
    """
    reasons = {(i, j): _pair(cuda, watchdog, gpus[i], gpus[j])
               for i, j in itertools.combinations(range(len(gpus)), 2)}
    broken = {pair: reason for pair, reason in reasons.items() if reason}
    chosen = largest_group(len(gpus), broken.keys())
    if len(chosen) < 2:
        told = " ".join(broken.values()) or "there is one GPU only."
        raise DeviceUnavailable(f"No two GPUs reach each other's memory: {told} The destination "
                                "host gives backpressure with a single GPU.")
    return [gpus[i] for i in chosen], list(broken.values())


def largest_group(n_gpus: int, broken: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """Return the most GPUs, the first of equally many, among which no pair is broken."""
    candidates = range(min(n_gpus, _MAX_TRIED))
    for size in range(len(candidates), 1, -1):
        for group in itertools.combinations(candidates, size):
            if not any(pair in broken for pair in itertools.combinations(group, 2)):
                return group
    return (0,) if n_gpus else ()


def _pair(cuda: Any, watchdog: Watchdog, one: Gpu, other: Gpu) -> str:
    """Enable access between two GPUs and prove it both ways; return why not, or nothing."""
    if one.facts.name != other.facts.name:
        return f"{one} and {other} are of different kinds; a machine here has equal GPUs."
    found = connection(cuda, one.facts.number, other.facts.number)
    if found.reason:
        return found.reason
    for source, destination in ((one, other), (other, one)):
        with source.current():
            try:
                source.runtime.deviceEnablePeerAccess(destination.facts.number)
            except RuntimeError as error:
                if getattr(error, "status", None) != _ALREADY_ENABLED:
                    return f"peer access from {source} to {destination} cannot be enabled ({error})"
    for source, destination in ((one, other), (other, one)):
        if reason := prove(watchdog, source, destination):
            return reason
    return ""


def prove(watchdog: Watchdog, source: Gpu, destination: Gpu) -> str:
    """Store a pattern from one GPU to another and read it back there.

    Returns
    -------
    str
        What is wrong with what arrived; empty if nothing is.
    """
    route = Route([destination], np.zeros(_PROOF.n_producers, np.int64))
    for seed in (1, 2):
        try:
            run_train(watchdog, [source], [route], _PROOF, store_path="registers", seed=seed,
                      gap_cycles=0)
        except (WrongResult, KernelFailed) as error:
            return (f"what {source} stores to {destination} does not arrive as it was stored "
                    f"({error}) This pair is left out; an IOMMU or PCIe access control between "
                    "the two can do this (nvidia-smi topo -m, dmesg).")
    return ""
