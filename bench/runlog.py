"""How fast the run log takes points, what a killed writer loses, and what a second worker gains."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import sqlite3
import tempfile
import threading
import time
from concurrent.futures import Executor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.figures import Figure, print_table
from xstage_lab import experiment
from xstage_lab.catalog import machine, with_assumptions
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import XStageError
from xstage_lab.parallel import local_processes
from xstage_lab.record import Record
from xstage_lab.runlog import RunLog
from xstage_lab.schedule import Program, build
from xstage_lab.spec import BurstTrain, MachineSpec

N_POINTS, BATCH = 10_000, 250
N_KILLS, KILL_BATCH = 50, 5
N_SWEPT, N_ROUNDS = 1_000, 3
RATE_ASKED_PER_S, GAIN_ASKED = 2_000, 1.7
_SPAWN = multiprocessing.get_context("spawn")


def measure() -> list[Figure]:
    """Log points beside a reader, kill writers, and sweep on one and on two workers."""
    b200 = with_assumptions(machine("B200-SXM"))
    with tempfile.TemporaryDirectory() as folder:
        return [_speed(Path(folder) / "speed.sqlite", b200),
                _kills(Path(folder) / "kills.sqlite", b200),
                *_gains(Path(folder), b200)]


def _points(machine: MachineSpec) -> list[Record]:
    """One batch of points as a live device gives them: per-tile times, and no backlog."""
    program = build(BurstTrain(n_producers=8, burst_bytes=32768, gap_s=3e-6, n_bursts=8), machine)
    points = experiment.run(SimulatedDevice(machine, issue_jitter_ratio=0.05), [program],
                            repeats=BATCH)
    return [dataclasses.replace(record, backlog=None) for record in points]


def _speed(path: Path, machine: MachineSpec) -> Figure:
    """Log points in batches while another process reads them."""
    points, log = _points(machine), RunLog(path)
    ours, theirs = _SPAWN.Pipe()
    reader = _SPAWN.Process(target=_read, args=(str(path), theirs), daemon=True)
    reader.start()
    ours.recv()  # it reads
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(N_POINTS // BATCH):
        log.add(points)
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    ours.send("enough")
    n_read = ours.recv()
    reader.join()
    tiles = points[0].tiles
    kept = path.stat().st_size / N_POINTS / 1024
    log.close()
    return Figure(
        what=f"runs logged per second, batches of {BATCH}, another process reading",
        value=N_POINTS / wall, asked=RATE_ASKED_PER_S, unit="/s", at_least=True,
        note=f"{0 if tiles is None else tiles.size} tiles each, {kept:.1f} KiB on the disk; "
             f"{N_POINTS / cpu:,.0f}/s by CPU time; {n_read} listings and records read meanwhile")


def _read(path: str, pipe: Connection) -> None:
    """List the newest runs and read one of them until told that it is enough."""
    log, n_read = RunLog(path), 0
    pipe.send("reading")
    while not pipe.poll():
        for run in log.runs(limit=BATCH)[:1]:
            log.record(run.id)
        n_read += 1
    pipe.send(n_read)


def _kills(path: Path, machine: MachineSpec) -> Figure:
    """Kill a writer again and again, and look for damage and for points it reported as saved."""
    rng, points = np.random.default_rng(50), _points(machine)[:KILL_BATCH]
    n_saved, faults = 0, []
    for _ in range(N_KILLS):
        ours, theirs = _SPAWN.Pipe(duplex=False)
        writer = _SPAWN.Process(target=_write, args=(str(path), points, theirs), daemon=True)
        writer.start()
        theirs.close()
        reported = n_saved + ours.recv()  # it is at work
        timer = threading.Timer(rng.uniform(0.0, 0.1), writer.kill)
        timer.start()
        with contextlib.suppress(EOFError):
            while True:
                reported = n_saved + ours.recv()
        writer.join()
        n_saved, fault = _state(path, reported)
        faults += fault
    for fault in faults:
        print(f"  {fault}")
    return Figure(what=f"faults after {N_KILLS} SIGKILLs of the writer", value=len(faults), asked=0,
                  note=f"{n_saved:,} points; a fault is a file that does not open or is damaged, "
                       "a point missing that was reported as saved, or half a batch")


def _write(path: str, points: list[Record], pipe: Connection) -> None:
    """Log batches until killed, and report how many points are saved."""
    log = RunLog(path)
    for n_batches in itertools.count(1):
        log.add(points)
        pipe.send(n_batches * len(points))


def _state(path: Path, reported: int) -> tuple[int, list[str]]:
    """Return how many points the log holds, and what is wrong with it."""
    try:
        runs = RunLog(path).runs()
    except XStageError as error:
        return 0, [str(error)]
    faults = []
    if len(runs) < reported:
        faults.append(f"{reported - len(runs)} of {reported} reported points are missing")
    if len(runs) % KILL_BATCH:
        faults.append(f"{len(runs)} points are no whole batches")
    with contextlib.closing(sqlite3.connect(path)) as db:
        checked, = db.execute("PRAGMA quick_check").fetchone()
    return len(runs), faults + ([checked] if checked != "ok" else [])


def _gains(folder: Path, machine: MachineSpec) -> list[Figure]:
    """Sweep small points on one worker and on two, the points logged and not."""
    device = SimulatedDevice(machine)
    programs = [build(BurstTrain(n_producers=148, burst_bytes=32768, gap_s=float(gap_s),
                                 n_bursts=8), machine)
                for gap_s in np.linspace(0.0, 20e-6, N_SWEPT)]
    taken: dict[tuple[bool, int], float] = {}
    with local_processes(1) as one, local_processes(2) as two:
        for executor in (one, two):  # start the workers; each loads the simulator
            list(experiment.run(device, programs[:40], executor=executor))
        for turn, logged, executor in itertools.product(range(N_ROUNDS), (False, True), (one, two)):
            log = RunLog(folder / f"sweep{turn}.sqlite") if logged else None
            key = logged, 1 if executor is one else 2
            taken[key] = min(taken.get(key, np.inf), _swept_s(device, programs, executor, log))
            if log is not None:
                log.close()
    print_table(("1,000 points of 1,184 bursts", "one worker", "two workers"), [
        ("logged" if logged else "not logged", f"{taken[logged, 1]:.2f} s",
         f"{taken[logged, 2]:.2f} s") for logged in (False, True)])
    return [Figure(what=f"gain of a second local worker, {N_SWEPT:,} simulated points, {words}",
                   value=taken[logged, 1] / taken[logged, 2], asked=GAIN_ASKED, unit="times",
                   at_least=True, note=note)
            for logged, words, note in (
                (False, "no log", f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"),
                (True, "all logged", "workers pack what is logged"))]


def _swept_s(
    device: SimulatedDevice, programs: list[Program], executor: Executor, log: RunLog | None
) -> float:
    began = time.perf_counter()
    for _ in experiment.run(device, programs, executor=executor, log=log):
        pass
    return time.perf_counter() - began
