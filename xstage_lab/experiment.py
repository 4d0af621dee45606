"""Run tile programs on a device: one point after another, or many at once on an executor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from xstage_lab.devices.base import Capabilities, Device, settings
from xstage_lab.errors import WorkerFailed, XStageError, require_number
from xstage_lab.parallel import Job, Measured, measure, spread
from xstage_lab.record import Record
from xstage_lab.runlog import RunLog
from xstage_lab.schedule import Program
from xstage_lab.spec import MachineSpec

Point = TypeVar("Point")


def run(
    device: Device,
    programs: Sequence[Program],
    *,
    repeats: int = 1,
    warm_up: int = 0,
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
    stop: Callable[[], bool] | None = None,
    log: RunLog | None = None,
    executor: Executor | None = None,
) -> Iterator[Record]:
    """Measure every program `repeats` times and yield each record as soon as it is there.

    Parameters
    ----------
    device : Device
        Also a `worker.Worker`, which measures in a process of its own.
    programs : sequence of Program
    repeats : int
        Records of each program, 1 or more.
    warm_up : int
        Runs of each program before its first record, thrown away.
    seed : int
        The i-th record of the whole run is measured with ``seed + i``, so that repeats differ
        and the run as a whole repeats itself.
    progress : callable, optional
        Called with the share done, 0 to 1, and a few words.
    stop : callable, optional
        Asked between points; once it says true, no further point is measured.
    log : RunLog, optional
        Every point goes into it as soon as it is measured.
    executor : concurrent.futures.Executor, optional
        Measure many points at once on its workers, for instance those of
        `parallel.local_processes` or of a Dask cluster (``client.get_executor(pure=False)``).
        They disturb each other's times where they share a computer: meant for devices with
        simulated times.

    Yields
    ------
    Record
        In the order of `programs`, the repeats of a program together.

    Raises
    ------
    XStageError
        If a count is out of range, or whatever the device or the log raises; what was measured
        is yielded before.
    """
    require_number("repeats", repeats, low=1, high=1_000_000, integer=True)
    require_number("warm_up", warm_up, low=0, high=1_000_000, integer=True)
    require_number("seed", seed, low=0, integer=True)
    jobs = [Job(program, seed + i * repeats + repeat, 0 if repeat else warm_up)
            for i, program in enumerate(programs) for repeat in range(repeats)]
    stop = stop or (lambda: False)
    logged = log is not None
    found = _one_by_one(device, jobs, logged, stop) if executor is None else spread(
        executor, device, jobs, logged, stop)
    return _in_order(found, len(jobs), progress or (lambda *_: None), log)


def _one_by_one(
    device: Device, jobs: Iterable[Job], logged: bool, stop: Callable[[], bool]
) -> Generator[dict[int, Measured], None, None]:
    """Measure points in this process, or in the one of a `worker.Worker`."""
    for i, job in enumerate(jobs):
        try:
            point = measure(device, job, logged, stop)
        except WorkerFailed:
            if stop():  # ended because it was told to
                return
            raise
        if point is None:
            return
        yield {i: point}


def _in_order(
    found: Generator[dict[int, Measured], None, None],
    n_points: int,
    progress: Callable[[float, str], None],
    log: RunLog | None,
) -> Iterator[Record]:
    """Log points as they come, and yield them in order up to the first that is missing."""
    early: dict[int, Measured] = {}
    n_found = n_yielded = 0
    with contextlib.closing(found):
        for points in found:
            unlogged: XStageError | None = None
            try:
                if log is not None:
                    log.add(point.entry or point.record for point in points.values())
            except XStageError as error:  # what was measured is shown all the same
                unlogged = error
            early |= points
            n_found += len(points)
            progress(n_found / n_points, f"{n_found} of {n_points} points")
            while n_yielded in early:
                yield early.pop(n_yielded).record
                n_yielded += 1
            if unlogged is not None:
                raise unlogged


class Keeper(Protocol):
    """Keeps records, as a `RunLog` does."""

    def add(self, records: Record) -> object:
        """Keep a record."""


class Logged:
    """A device whose every measurement is kept, for code that measures by itself.

    Parameters
    ----------
    device : Device
    log : Keeper
        For instance a `RunLog`.
    """

    def __init__(self, device: Device, log: Keeper) -> None:
        self.device, self.log = device, log

    @property
    def name(self) -> str:
        """Name of the device."""
        return self.device.name

    @property
    def badge(self) -> str:
        """Badge of the device."""
        return self.device.badge

    @property
    def machine(self) -> MachineSpec:
        """Machine of the device."""
        return self.device.machine

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the device."""
        return self.device.capabilities

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the device, by which its runs are told apart."""
        return settings(self.device)

    def measure(self, program: Program, seed: int | None = None) -> Record:
        """Run `program` once on the device and log the record.

        Raises
        ------
        XStageError
            Whatever the device or the log raises.
        """
        record = self.device.measure(program, seed)
        self.log.add(record)
        return record


def deliver(
    points: Iterator[Point],
    each: Callable[[Point], None],
    done: Callable[[XStageError | None], None],
) -> None:
    """Hand every point to `each`, then call `done` once with the error that ended it, or None.

    Where an event loop runs (a notebook), a thread waits for the points and both callbacks are
    called on the loop, so that the kernel stays free; points then appear once the running cell
    has finished. Where none runs (a script, a test) the points are consumed before returning.

    Parameters
    ----------
    points : iterator
        For instance what `run` returns.
    each : callable
        Takes one point.
    done : callable
        Takes the `XStageError` that ended the points early, or None.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        _consume(points, each, done)
        return

    def each_on_loop(point: Point) -> None:
        loop.call_soon_threadsafe(each, point)

    def done_on_loop(error: XStageError | None) -> None:
        loop.call_soon_threadsafe(done, error)

    threading.Thread(target=_consume, args=(points, each_on_loop, done_on_loop),
                     name="xstage-points", daemon=True).start()


def _consume(
    points: Iterator[Point],
    each: Callable[[Point], None],
    done: Callable[[XStageError | None], None],
) -> None:
    ended: XStageError | None = None
    try:
        for point in points:
            each(point)
    except XStageError as error:
        ended = error
    except Exception as error:  # a defect; whoever waits must be told all the same
        ended = WorkerFailed(f"measuring failed unexpectedly ({type(error).__name__}: {error}). "
                             "Please report it.")
    done(ended)
