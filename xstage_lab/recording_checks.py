"""Whether the kernels of a live device are right, in every tile, path, signal and depth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from xstage_lab.devices.base import Device
from xstage_lab.errors import Infeasible, XStageError
from xstage_lab.kernels import burst_gap
from xstage_lab.kernels.fused_tiles import SIGNALS, STORE_PATHS, TILE_DEPTHS, TILE_SIZES, Variant
from xstage_lab.kernels.source import Source
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain, FusedGemm, MachineSpec, Tuning
from xstage_lab.worker import Worker

N_CTAS = 6  # so that each has several tiles
MakeDevice = Callable[[str, str], Callable[[], Device]]  # of a store path and a signal


class Case(NamedTuple):
    """A small program and the variant of the kernel that runs it."""

    store_path: str
    signal: str
    workload: FusedGemm | BurstTrain
    tuning: Tuning | None

    @property
    def name(self) -> str:
        """In words, for the report."""
        if self.tuning is None:
            sync = self.workload.sync if isinstance(self.workload, BurstTrain) else ""
            return f"bursts, {self.store_path}, {sync}"
        t = self.tuning
        return (f"tile {t.tile_m}x{t.tile_n}x{t.tile_k}, depth {t.issue_depth}, "
                f"{t.n_stages} stages, {self.store_path}, {self.signal}")


class Outcome(NamedTuple):
    """What became of a case: `right`, `not possible` (words say why) or `wrong`."""

    case: str
    outcome: str
    words: str


def cases(machine: MachineSpec, paths: Sequence[str] = STORE_PATHS) -> list[Case]:
    """Return every tile on every path, with depths, stages, dtypes and signals in turn.

    Shapes leave ragged edges in m, n and k.
    """
    n_gpus = min(machine.max_gpus, 3)
    found: list[Case] = []
    depths, stages = itertools.cycle((2, 1, 3, 4)), itertools.cycle((3, 2, 4, 3, 2))
    dtypes, signals = itertools.cycle(("bf16", "fp32", "bf16")), itertools.cycle(SIGNALS)
    for tile_m, tile_n, tile_k, path in itertools.product(TILE_SIZES, TILE_SIZES, TILE_DEPTHS,
                                                          paths):
        if (tile_m, tile_n) == (256, 256):
            continue  # more sums than a thread has registers for
        tuning = Tuning(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, issue_depth=next(depths),
                        n_stages=next(stages), n_ctas=min(N_CTAS, machine.n_sms))
        gemm = FusedGemm(m=6 * tile_m - 5, n=5 * tile_n - 3, k=500 + 7 * len(found),
                         n_gpus=n_gpus, out_dtype=next(dtypes))
        found.append(Case(path, next(signals), gemm, tuning))
    for path, sync in itertools.product(paths, ("free", "lockstep")):
        train = BurstTrain(n_producers=machine.n_sms, burst_bytes=16 * 1024 + 16, gap_s=1e-6,
                           n_bursts=7, sync=sync, n_gpus=n_gpus)
        found.append(Case(path, "none", train, None))
    return sorted(found, key=lambda case: case[:2])  # by device


def sources(every: Sequence[Case], n_burst_threads: int) -> list[Source]:
    """Return what must be compiled for the cases that fit."""
    found = []
    for case in every:
        if case.tuning is None:
            found.append(burst_gap.source(case.store_path, n_burst_threads))
        elif isinstance(case.workload, FusedGemm):
            found.append(Variant.of(case.workload, case.tuning, store_path=case.store_path,
                                    signal=case.signal).source)
    return found


def check(worker: Worker, make: MakeDevice, every: Sequence[Case]) -> Iterator[Outcome]:
    """Run every case, and yield what became of it; what fails is told and the next one runs."""
    used: tuple[str, str] | None = None
    for seed, case in enumerate(every):
        try:
            if used != case[:2]:
                used = case[:2]
                worker.use(make(*used))
            worker.measure(build(case.workload, worker.machine, case.tuning), seed)
        except Infeasible as error:
            yield Outcome(case.name, "not possible", str(error))
        except XStageError as error:
            yield Outcome(case.name, "wrong", str(error))
        else:
            yield Outcome(case.name, "right", "")
