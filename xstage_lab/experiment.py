"""Run tile programs on a device, one point after another, here or behind a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from xstage_lab.devices.base import Device
from xstage_lab.errors import WorkerFailed, XStageError, require_number
from xstage_lab.record import Record
from xstage_lab.schedule import Program

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

    Yields
    ------
    Record
        In the order of `programs`, the repeats of a program together.

    Raises
    ------
    XStageError
        If a count is out of range, or whatever the device raises.
    """
    require_number("repeats", repeats, low=1, high=1_000_000, integer=True)
    require_number("warm_up", warm_up, low=0, high=1_000_000, integer=True)
    require_number("seed", seed, low=0, integer=True)
    return _points(device, programs, repeats, warm_up, seed, progress or (lambda *_: None),
                   stop or (lambda: False))


def _points(
    device: Device,
    programs: Sequence[Program],
    repeats: int,
    warm_up: int,
    seed: int,
    progress: Callable[[float, str], None],
    stop: Callable[[], bool],
) -> Iterator[Record]:
    n_points, done = repeats * len(programs), 0
    for program in programs:
        for repeat in range(-warm_up, repeats):
            if stop():
                return
            try:
                record = device.measure(program, seed=seed + done)
            except WorkerFailed:
                if stop():  # ended because it was told to
                    return
                raise
            if repeat >= 0:
                done += 1
                progress(done / n_points, f"{done} of {n_points} points")
                yield record


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
