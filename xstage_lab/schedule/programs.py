"""Workload and tuning -> tile program: one structured array per GPU, a row per tile task.

The rows stand in issue order. Row i of a GPU runs on CTA i mod n_ctas, as the static tile loop
of a persistent kernel does. Changing the schedule means permuting rows; nothing else changes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import Infeasible, require_choice
from xstage_lab.schedule import attention, moe
from xstage_lab.schedule.tasks import BURST, GEMM_TILE, Tasks, empty_tasks
from xstage_lab.spec import (
    DTYPE_BYTES,
    BurstTrain,
    FusedGemm,
    MachineSpec,
    MoELayer,
    Tuning,
    Workload,
    check_feasible,
    default_tuning,
)

MAX_TASKS = 2**24  # about 1 GB of rows
STORES = ("remote", "off", "local")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A tile program: what every GPU does, in issue order.

    Attributes
    ----------
    workload, tuning : what it was built from
    tasks : tuple of structured arrays, dtype `TASK`
        One per GPU, rows in issue order.
    n_ctas, issue_depth : int
        Persistent CTAs per GPU, and output tiles each may hold.
    stores : str
        `remote`, `local` (the control: same stores, own memory) or `off` (compute only).
    """

    workload: Workload
    tuning: Tuning | None
    tasks: tuple[Tasks, ...]
    n_ctas: int
    issue_depth: int
    stores: str = "remote"

    @property
    def n_gpus(self) -> int:
        """GPUs in the program."""
        return len(self.tasks)

    def remote_bytes(self, gpu: int) -> int:
        """Bytes that `gpu` stores to other GPUs."""
        rows = self.tasks[gpu]
        return int(rows["store_bytes"][rows["owner"] != gpu].sum())

    def parameters(self) -> dict[str, Any]:
        """Plain values that say which program this is, for records and exports."""
        return parameters(self.workload, self.tuning, self.n_ctas, self.stores)


def parameters(
    workload: Workload, tuning: Tuning | None, n_ctas: int, stores: str = "remote"
) -> dict[str, Any]:
    """Plain values that name a configuration; equal values mean the same tile program."""
    plain = {name: list(value) if isinstance(value, tuple) else value  # as JSON gives it back
             for name, value in dataclasses.asdict(workload).items()}
    return {
        "workload": type(workload).__name__,
        **plain,
        **({"issue_depth": 1} if tuning is None else dataclasses.asdict(tuning)),
        "n_ctas": n_ctas,
        "stores": stores,
    }


def build(
    workload: Workload,
    machine: MachineSpec,
    tuning: Tuning | None = None,
    stores: str = "remote",
    n_gpus: int | None = None,
) -> Program:
    """Build the tile program of `workload` on `machine`.

    Parameters
    ----------
    workload : BurstTrain, FusedGemm, MoELayer or UlyssesAttention
    machine : MachineSpec
        Gives the SM count and the limits.
    tuning : Tuning, optional
        For all but burst trains; `spec.default_tuning` if left out.
    stores : str
        `remote`; `local` sends every store to the GPU's own memory; `off` computes only.
    n_gpus : int, optional
        How many GPUs to build, from the first on, where they stand for all; all if left out.

    Raises
    ------
    Infeasible, InvalidValue
        If the machine cannot run it.
    """
    require_choice("stores", stores, STORES)
    check_feasible(workload, machine, tuning)
    used = tuning or default_tuning(workload, machine)
    n_tasks = count_tasks(workload, used) * workload.n_gpus
    if n_tasks > MAX_TASKS:
        raise Infeasible(f"the program would have {n_tasks:,} tasks on {workload.n_gpus} GPUs; "
                         f"allowed: up to {MAX_TASKS:,}. Take fewer bursts or tokens, a larger "
                         "tile, or a smaller m and n.")
    if isinstance(workload, BurstTrain):
        n_ctas, depth = workload.n_producers, 1
    else:
        n_ctas, depth = used.n_ctas or machine.n_sms, used.issue_depth
    tasks = tuple(_tasks_of(workload, used, n_ctas, gpu)
                  for gpu in range(n_gpus or workload.n_gpus))
    for gpu, rows in enumerate(tasks):
        if stores == "local":
            rows["owner"] = gpu
        elif stores == "off":
            rows["store_bytes"] = 0
    return Program(workload=workload, tuning=None if isinstance(workload, BurstTrain) else used,
                   tasks=tasks, n_ctas=n_ctas, issue_depth=depth, stores=stores)


def count_tasks(workload: Workload, tuning: Tuning) -> int:
    """Tasks of one GPU of `workload`, the largest over GPUs; about, where SMs only send."""
    if isinstance(workload, BurstTrain):
        return workload.n_producers * workload.n_bursts
    if isinstance(workload, FusedGemm):
        return -(-workload.m // tuning.tile_m) * -(-workload.n // tuning.tile_n)
    if isinstance(workload, MoELayer):
        held = workload.expert_rows.reshape(workload.n_gpus, -1)
        n_blocks = int((-(-held // tuning.tile_m)).sum(axis=1).max())
        return n_blocks * sum(moe.tiles_per_block(workload, tuning))
    n_tiles = -(-workload.sequence // tuning.tile_m) + workload.n_gpus
    return 2 * n_tiles * workload.heads // workload.n_gpus


def _tasks_of(workload: Workload, tuning: Tuning, n_ctas: int, gpu: int) -> Tasks:
    if isinstance(workload, BurstTrain):
        return _burst_tasks(workload, gpu)
    if isinstance(workload, FusedGemm):
        return _gemm_tasks(workload, tuning, gpu)
    if isinstance(workload, MoELayer):
        return moe.tasks_of(workload, tuning, n_ctas, gpu)
    return attention.tasks_of(workload, tuning, n_ctas, gpu)


def _burst_tasks(train: BurstTrain, gpu: int) -> Tasks:
    burst, producer = np.divmod(np.arange(train.n_bursts * train.n_producers), train.n_producers)
    rows = empty_tasks(burst.size, BURST)
    rows["gap_s"] = np.where(burst > 0, train.gap_s, 0.0)
    rows["store_bytes"] = train.burst_bytes
    peers = max(train.n_gpus - 1, 1)
    rows["owner"] = (gpu + (1 + producer % peers if train.n_gpus > 1 else 0)) % train.n_gpus
    if train.sync == "lockstep":  # burst j starts its gap when all producers ended burst j - 1
        rows["signals"] = burst
        rows["waits_for"] = burst - 1
        rows["wait_count"] = np.where(burst > 0, train.n_producers, 0)
    return rows


def _gemm_tasks(gemm: FusedGemm, tuning: Tuning, gpu: int) -> Tasks:
    n_rows, n_cols = -(-gemm.m // tuning.tile_m), -(-gemm.n // tuning.tile_n)
    row, col = np.divmod(np.arange(n_rows * n_cols), n_cols)
    tasks = empty_tasks(row.size, GEMM_TILE)
    tasks["m0"], tasks["n0"] = row * tuning.tile_m, col * tuning.tile_n
    tasks["m"] = np.minimum(tuning.tile_m, gemm.m - tasks["m0"])
    tasks["n"] = np.minimum(tuning.tile_n, gemm.n - tasks["n0"])
    tasks["k"] = gemm.k
    area = tasks["m"].astype(np.int64) * tasks["n"]
    tasks["flop"] = 2 * area * gemm.k
    tasks["store_bytes"] = area * DTYPE_BYTES[gemm.out_dtype]
    tasks["owner"] = _owners(gemm, row, n_rows)
    tasks["panel"] = col
    tasks["panel_bytes"] = tasks["n"].astype(np.int64) * gemm.k * DTYPE_BYTES[gemm.dtype]
    if gemm.destinations == "row-owner":  # start at the successor's rows
        first = np.searchsorted(tasks["owner"], (gpu + 1) % gemm.n_gpus)
        tasks = np.roll(tasks, -first)
    return tasks


def _owners(gemm: FusedGemm, row: NDArray[np.int64], n_rows: int) -> NDArray[np.int64]:
    """Return the owner of each tile, tiles in row-major order."""
    index = np.arange(row.size)
    if gemm.destinations == "round-robin":
        return index % gemm.n_gpus
    if gemm.destinations.startswith("row-owner"):
        return row * gemm.n_gpus // n_rows
    share = gemm.hot_share_ratio
    hot = np.floor((index + 1) * share) > np.floor(index * share)
    others = np.maximum(gemm.n_gpus - 1, 1)
    cold = (np.cumsum(~hot) - 1) % others + 1
    return np.where(hot, 0, np.minimum(cold, gemm.n_gpus - 1))
