"""Sweeps on executors: the same points as one after another, stopped and broken cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_device import FakeDevice, programs

from xstage_lab import experiment
from xstage_lab.errors import FileRejected, Infeasible, InvalidValue, WorkerFailed
from xstage_lab.parallel import local_processes
from xstage_lab.record import Record
from xstage_lab.runlog import RunLog
from xstage_lab.schedule import Program

TESTS = Path(__file__).resolve().parent


class SlowDevice(FakeDevice):
    """A point takes 5 ms, so that several make a batch."""

    def measure(self, program: Program, seed: int | None = None) -> Record:
        record = super().measure(program, seed)
        time.sleep(0.005)
        return record


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    """Two local worker processes."""
    with local_processes(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def threads() -> Iterator[Executor]:
    """Two threads of this process."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def dask() -> Iterator[Executor]:
    """A Dask cluster of two workers on this computer."""
    reason = "Dask is not installed: pip install 'xstage-lab[dask]'"
    distributed = pytest.importorskip("distributed", reason=reason)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1",
                                 dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        yield client.get_executor(pure=False)


@pytest.fixture(params=["threads", "processes", "dask"])
def executor(request: pytest.FixtureRequest) -> Executor:
    """Each kind of executor."""
    found: Executor = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    """An empty run log."""
    made = RunLog(tmp_path / "runs.sqlite")
    yield made
    made.close()


def sizes(records: list[Record]) -> list[float]:
    return [record.summary["total_s"] for record in records]


def test_an_executor_gives_the_same_points_in_the_same_order(
    executor: Executor, log: RunLog
) -> None:
    """On every executor the records, seeds, log and progress are those of one after another."""
    asked: dict[str, Any] = {"repeats": 2, "seed": 10}
    shares: list[float] = []
    spread = list(experiment.run(FakeDevice(), programs(60), executor=executor, log=log,
                                 progress=lambda share, _: shares.append(share), **asked))
    alone = list(experiment.run(FakeDevice(), programs(60), **asked))
    assert [record.summary for record in spread] == [record.summary for record in alone]
    assert [record.parameters for record in spread] == [record.parameters for record in alone]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    logged = [log.record(run.id).summary for run in log.runs()]
    assert sorted(s["issue_s"] for s in logged) == [float(seed) for seed in range(10, 130)]


@pytest.mark.parametrize("name", ["processes", "dask"])
def test_points_are_measured_by_both_workers(name: str, request: pytest.FixtureRequest) -> None:
    """Points run in both worker processes and none in this one."""
    executor = request.getfixturevalue(name)
    pids: set[int] = set()
    for _ in range(50):  # the second worker may still be starting while the first does it all
        pids |= {record.provenance["pid"] for record in
                 experiment.run(SlowDevice(), programs(60), executor=executor)}
        if len(pids) == 2:
            break
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_every_warm_up_runs_before_its_program(processes: Executor, tmp_path: Path) -> None:
    """Warm-up runs reach the device on the workers and leave no record."""
    device = FakeDevice(log=str(tmp_path / "log"))
    assert len(list(experiment.run(device, programs(4), warm_up=2, executor=processes))) == 4
    assert len((tmp_path / "log").read_text().splitlines()) == 12


def test_no_point_starts_after_stop(processes: Executor, log: RunLog, tmp_path: Path) -> None:
    """After Stop the points being measured end and no other starts, in whatever batch it is."""
    started, at_stop = tmp_path / "log", [0]

    def stop() -> bool:
        if at_stop[0] == 0 and len(records) >= 40:
            at_stop[0] = len(started.read_text().splitlines())
        return at_stop[0] > 0

    records: list[Record] = []
    for record in experiment.run(SlowDevice(log=str(started)), programs(400), stop=stop,
                                 executor=processes, log=log):
        records.append(record)  # noqa: PERF402  (stop looks at them meanwhile)
    n_started = len(started.read_text().splitlines())
    assert n_started <= at_stop[0] + 2  # a point may start on each worker as we look
    assert len(log.runs()) == n_started
    assert sizes(records) == [float(i + 1) for i in range(len(records))]
    assert len(records) >= n_started - 2
    time.sleep(0.2)
    assert len(started.read_text().splitlines()) == n_started


def test_a_sweep_that_nobody_reads_on_is_ended(processes: Executor, tmp_path: Path) -> None:
    """Whoever leaves the points early leaves no point to be measured behind."""
    started = tmp_path / "log"
    points = experiment.run(SlowDevice(log=str(started)), programs(400), executor=processes)
    next(points)
    points.close()  # type: ignore[attr-defined]
    n_started = len(started.read_text().splitlines())
    assert n_started < 400
    time.sleep(0.2)
    assert len(started.read_text().splitlines()) == n_started


def test_stopped_from_the_start_nothing_runs(executor: Executor, tmp_path: Path) -> None:
    """A sweep that is stopped before it begins measures nothing."""
    device = FakeDevice(log=str(tmp_path / "log"))
    assert list(experiment.run(device, programs(3), stop=lambda: True, executor=executor)) == []
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(("how", "kind", "words"), [
    ("infeasible", Infeasible, "this does not fit"),
    ("invalid", InvalidValue, "burst_bytes = 30 B"),
    ("bug", WorkerFailed, "ZeroDivisionError: a defect"),
])
def test_an_error_comes_after_the_points_before_it(
    executor: Executor, log: RunLog, how: str, kind: type[Exception], words: str
) -> None:
    """A point that fails ends the sweep with its own error, and the points before it are there."""
    records: list[Record] = []
    with pytest.raises(kind, match=words):
        records.extend(experiment.run(FakeDevice(30, how), programs(60), executor=executor,
                                      log=log))
    assert sizes(records) == [float(i + 1) for i in range(29)]
    logged = {run.total_s for run in log.runs()}
    assert logged >= set(sizes(records))
    assert 30.0 not in logged


def test_a_worker_that_dies_is_told(log: RunLog) -> None:
    """A worker that exits ends the sweep in words; points that came before it are kept."""
    records: list[Record] = []
    with local_processes(2) as executor, pytest.raises(WorkerFailed, match="BrokenProcessPool"):
        records.extend(experiment.run(FakeDevice(300, "exit"), programs(400), executor=executor,
                                      log=log))
    assert sizes(records) == [float(i + 1) for i in range(len(records))]
    assert {run.total_s for run in log.runs()} >= set(sizes(records))


@pytest.mark.parametrize("name", ["processes", "dask"])
def test_a_device_that_cannot_travel_is_told(name: str, request: pytest.FixtureRequest) -> None:
    """A device that holds what no other process can have is refused in words."""
    device = FakeDevice()
    device.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(WorkerFailed, match="cannot import the device"):
        list(experiment.run(device, programs(3), executor=request.getfixturevalue(name)))


@pytest.mark.parametrize("alone", [True, False])
def test_a_full_log_ends_the_sweep_and_keeps_what_it_has(
    alone: bool, threads: Executor, log: RunLog
) -> None:
    """Where the log can take no more that is told; logged points stay, the last is still shown."""
    with log._database.reading() as db:
        pages, = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages + 6}")
    records: list[Record] = []
    with pytest.raises(FileRejected, match="the disk is full"):
        records.extend(experiment.run(FakeDevice(), programs(500), log=log,
                                      executor=None if alone else threads))
    assert 0 < len(log.runs()) < 500
    assert sizes(records) == [float(i + 1) for i in range(len(records))]
    if alone:  # on threads a later point may have been logged before an earlier one
        assert len(records) == len(log.runs()) + 1


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from fake_device import FakeDevice, programs
    from xstage_lab import experiment
    from xstage_lab.parallel import local_processes
    with local_processes(2) as executor:
        device = FakeDevice({bad_bytes}, "hang", {log!r})
        print(len(list(experiment.run(device, programs(20), executor=executor))))
"""


def start(tmp_path: Path, bad_bytes: int) -> subprocess.Popen[str]:
    script = tmp_path / "sweep.py"
    script.write_text(textwrap.dedent(SCRIPT.format(
        tests=str(TESTS), bad_bytes=bad_bytes, log=str(tmp_path / "log"))))
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)


def test_a_script_without_a_main_guard_sweeps(tmp_path: Path) -> None:
    """A plain script may start local processes; they do not run the script again."""
    assert start(tmp_path, bad_bytes=0).communicate(timeout=60)[0] == "20\n"
    assert len((tmp_path / "log").read_text().splitlines()) == 20


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_do_not_outlive_the_sweep(tmp_path: Path, how: signal.Signals) -> None:
    """However the process that sweeps ends, its workers end too."""
    parent = start(tmp_path, bad_bytes=5)
    try:
        children: list[psutil.Process] = []
        for _ in range(3000):
            if (tmp_path / "log").exists() and len((tmp_path / "log").read_text().split()) >= 5:
                children = psutil.Process(parent.pid).children(recursive=True)
                break
            time.sleep(0.02)
        assert len(children) >= 2
        parent.send_signal(how)
        parent.communicate(timeout=30)
        assert psutil.wait_procs(children, timeout=30)[1] == []
    finally:
        parent.kill()
        parent.communicate()
