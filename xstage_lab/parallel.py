"""Points spread over the workers of any `concurrent.futures` executor, and one of local processes.

Points travel in batches, so that small ones are worth the way, and come back as they finish.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import NamedTuple

from xstage_lab.devices.base import Device
from xstage_lab.errors import WorkerFailed, XStageError
from xstage_lab.record import Record
from xstage_lab.runlog import Entry, entry
from xstage_lab.schedule import Program
from xstage_lab.worker import without_main

#: What the points of a batch take together, about: long beside sending them, short beside a sweep.
BATCH_S = 0.05
#: Batches handed out at a time; as many workers are kept busy.
MAX_BATCHES = 256
_ASK_STOP_S = 0.1


class Job(NamedTuple):
    """One point: a program, the seed of its run, and the runs before it that are thrown away."""

    program: Program
    seed: int
    warm_up: int


class Measured(NamedTuple):
    """A record, and what a run log keeps of it if there is one."""

    record: Record
    entry: Entry | None


class _Batch(NamedTuple):
    """What came back of a batch: its first points, the error that ended it, and the time taken."""

    points: list[Measured]
    error: XStageError | None
    taken_s: float


def measure(
    device: Device, job: Job, logged: bool, stopped: Callable[[], bool]
) -> Measured | None:
    """Measure one point in this process; None if it was stopped before its last run began."""
    for _ in range(job.warm_up):
        if stopped():
            return None
        device.measure(job.program, seed=job.seed)
    if stopped():
        return None
    record = device.measure(job.program, seed=job.seed)
    return Measured(record, entry(record) if logged else None)


def spread(
    executor: Executor,
    device: Device,
    jobs: Sequence[Job],
    logged: bool,
    stop: Callable[[], bool],
) -> Generator[dict[int, Measured], None, None]:
    """Measure points on the workers of `executor` and yield them by their index, as they finish.

    Parameters
    ----------
    executor : Executor
    device : Device
        Sent to the workers.
    jobs : sequence of Job
    logged : bool
        Whether the points are for a run log.
    stop : callable
        Once it says true no new point starts; those being measured are still yielded. An executor
        whose workers do not share this computer's disk ends its batches first.

    Raises
    ------
    XStageError
        What the device raised at the first point that failed, after all points before it.
    WorkerFailed
        If a worker ended, or the device cannot be sent there.
    """
    with tempfile.TemporaryDirectory(prefix="xstage-") as folder:
        halt = Path(folder) / "stop"
        sent = _Sent(executor, device, jobs, logged, str(halt))
        try:
            while True:
                if stop():
                    sent.end()
                if not sent.hand_out():
                    break
                if points := sent.take():
                    yield points
        finally:
            sent.end()
            wait(sent.batches)
        if sent.error is not None:
            raise sent.error


class _Sent:
    """The batches on their way, and what is left to hand out."""

    def __init__(self, executor: Executor, device: Device, jobs: Sequence[Job], logged: bool,
                 halt: str) -> None:
        self._executor, self._device, self._jobs = executor, device, jobs
        self._logged, self._halt = logged, halt
        self._n_sent, self._size = 0, 1
        self._finished: queue.SimpleQueue[Future[_Batch]] = queue.SimpleQueue()
        self.batches: dict[Future[_Batch], int] = {}  # to the index of its first point
        self.error: XStageError | None = None
        self._failed_at = len(jobs)  # first point of the batch that raised it

    def hand_out(self) -> bool:
        """Submit batches while there are points and room; return whether any is on its way."""
        while self._n_sent < len(self._jobs) and len(self.batches) < MAX_BATCHES:
            batch = self._jobs[self._n_sent : self._n_sent + self._size]
            try:
                future = self._executor.submit(_measure_batch, self._device, batch, self._logged,
                                               self._halt)
            except Exception as error:
                self._fail(error, self._n_sent)
                break
            self.batches[future] = self._n_sent
            self._n_sent += len(batch)
            future.add_done_callback(self._finished.put)
        return bool(self.batches)

    def take(self) -> dict[int, Measured]:
        """Wait a moment for a batch and return its points by index; nothing if none came."""
        try:
            future = self._finished.get(timeout=_ASK_STOP_S)
        except queue.Empty:
            return {}
        first = self.batches.pop(future)
        if future.cancelled():
            return {}
        try:
            batch = future.result()
        except Exception as error:
            self._fail(error, first)
            return {}
        if batch.error is not None:
            self._fail(batch.error, first)
        if batch.points:
            self._size = max(1, int(BATCH_S * len(batch.points) / max(batch.taken_s, 1e-9)))
        return dict(enumerate(batch.points, first))

    def end(self) -> None:
        """Let no new point start, here or in a worker."""
        self._n_sent = len(self._jobs)
        Path(self._halt).touch()
        for future in list(self.batches):
            future.cancel()

    def _fail(self, error: Exception, first: int) -> None:
        """Keep the first point's error; the points before it are still measured."""
        if self.error is None or first < self._failed_at:
            self._failed_at = first
            self.error = error if isinstance(error, XStageError) else WorkerFailed(
                f"the executor could not measure ({type(error).__name__}: {error}): one of its "
                "workers ended, or cannot import the device. Measure again with a new executor; a "
                "device of your own must stand in a module.")
        self._n_sent = len(self._jobs)
        for future, index in list(self.batches.items()):
            if index > first:
                future.cancel()


def _measure_batch(device: Device, jobs: Sequence[Job], logged: bool, halt: str) -> _Batch:
    """Measure points in a worker until one fails or the file `halt` appears."""
    began = time.perf_counter()
    points: list[Measured] = []
    error: XStageError | None = None
    try:
        for job in jobs:
            point = measure(device, job, logged, lambda: Path(halt).exists())
            if point is None:
                break
            points.append(point)
    except XStageError as failure:
        error = failure
    except Exception as failure:  # a defect of the device; what was measured must not be lost
        error = WorkerFailed(f"the device failed unexpectedly ({type(failure).__name__}: "
                             f"{failure}). Please report it.")
    return _Batch(points, error, time.perf_counter() - began)


def local_processes(n_workers: int | None = None) -> ProcessPoolExecutor:
    """Return an executor of processes on this computer, to be used in a `with` statement.

    They start when first needed, stay warm, and end with the `with` statement or with this
    process, however it ends.

    Parameters
    ----------
    n_workers : int, optional
        One for each CPU if left out.
    """
    return ProcessPoolExecutor(n_workers, mp_context=_Spawn(), initializer=_end_with_parent)


class _Process(SpawnProcess):
    def start(self) -> None:
        with without_main():
            super().start()


class _Spawn(SpawnContext):
    Process = _Process


def _end_with_parent() -> None:
    """End this worker when the process that started it ends; leave Ctrl-C to that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
