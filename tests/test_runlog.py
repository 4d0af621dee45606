"""The run log gives back what it was given, whoever else is at it and however its writer ends."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import machine_of

from xstage_lab import runlog
from xstage_lab.analysis import calibrate
from xstage_lab.devices.base import Device
from xstage_lab.devices.recorded import RecordedDevice
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import FileRejected, InvalidValue
from xstage_lab.experiment import Logged
from xstage_lab.record import SUMMARY_KEYS, TILE, Record, provenance
from xstage_lab.runlog import Run, RunLog

ROOT = Path(__file__).resolve().parent.parent


def point(number: float, n_tiles: int = 3, **origin: Any) -> Record:
    """A measurement that takes `number` seconds."""
    tiles = np.zeros(n_tiles, TILE)
    tiles["issue_end_s"] = number
    tiles["arrived_s"] = np.nan
    about = {"machine": "B200-SXM"} | origin
    return Record(summary={"total_s": number, "period_s": math.nan, "t_mma_s": 2e-6},
                  parameters={"workload": "BurstTrain", "n_producers": 4, "gap_s": 0.0},
                  provenance=provenance("SIMULATED", "simulated", "tests") | about, tiles=tiles)


def totals(runs: list[Run]) -> list[float | None]:
    return [run.total_s for run in runs]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a log may lie; nothing is there yet, nor its folder."""
    return tmp_path / "new folder" / "runs.sqlite"


@pytest.fixture
def log(path: Path) -> Iterator[RunLog]:
    """An empty log."""
    made = RunLog(path)
    yield made
    made.close()


def test_a_run_comes_back_after_reopening(log: RunLog, path: Path) -> None:
    """A logged run is listed and read by whoever opens the file next."""
    first, second = log.add([point(1.0), point(2.0)])
    log.close()
    reopened = RunLog(path)
    run = reopened.runs()[1]
    assert (run.id, run.device, run.badge, run.machine, run.workload) == (
        first, "simulated", "SIMULATED", "B200-SXM", "BurstTrain")
    assert (run.total_s, run.period_s) == (1.0, None)
    assert run.parameters == point(1.0).parameters
    assert reopened.record(second).summary["total_s"] == 2.0
    reopened.close()


NUMBERS = st.floats(allow_infinity=False)
WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
PLAIN = st.one_of(st.integers(-(2**70), 2**70), WORDS, st.none(), st.booleans(),
                  st.floats(allow_nan=False, allow_infinity=False))


@settings(max_examples=40, deadline=None)
@given(
    summary=st.dictionaries(st.one_of(st.sampled_from(SUMMARY_KEYS), WORDS), NUMBERS, max_size=8),
    parameters=st.dictionaries(WORDS, PLAIN, max_size=4),
    times=st.one_of(st.none(), st.lists(st.floats(width=64), max_size=20)),
)
def test_any_record_comes_back_as_it_was(
    summary: dict[str, float], parameters: dict[str, Any], times: list[float] | None
) -> None:
    """Summaries with NaN, any plain parameters and any per-tile times come back bit for bit."""
    tiles = None
    if times is not None:
        tiles = np.zeros(len(times), TILE)
        tiles["arrived_s"] = times
    record = Record(summary=summary, parameters=parameters, provenance={"badge": "LIVE"},
                    tiles=tiles, backlog=None if tiles is None else np.array([times, times]))
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(Path(folder) / "runs.sqlite")
        found = log.record(log.add(record)[0])
        listed = log.runs()[0]
        log.close()
    assert (found.parameters, found.provenance) == (parameters, {"badge": "LIVE"})
    assert found.summary.keys() == summary.keys()
    np.testing.assert_array_equal(list(found.summary.values()),
                                  [summary[key] for key in found.summary])
    for key in SUMMARY_KEYS:
        value = summary.get(key, math.nan)
        assert getattr(listed, key) == (None if math.isnan(value) else value)
    assert listed.parameters == parameters
    if tiles is None:
        assert (found.tiles, found.backlog) == (None, None)
    else:
        assert found.tiles is not None
        assert found.tiles.tobytes() == tiles.tobytes()
        np.testing.assert_array_equal(found.backlog, record.backlog)


def test_the_newest_run_is_listed_first_and_filters_hold_together(log: RunLog) -> None:
    """Filters leave the runs that meet all of them, the newest first, at most `limit`."""
    log.add([point(1.0), point(2.0, machine="H100-SXM"), point(3.0, device="sockets"),
             point(4.0, badge="LIVE"), point(5.0, date="2020-02-01T00:00:00+00:00")])
    assert totals(log.runs()) == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert totals(log.runs(machine="B200-SXM", device="simulated")) == [5.0, 4.0, 1.0]
    assert totals(log.runs(badge="LIVE")) == [4.0]
    assert totals(log.runs(workload="FusedGemm")) == []
    assert totals(log.runs(since="2020-02-02", limit=2)) == [4.0, 3.0]
    assert log.runs(limit=0) == []


@pytest.mark.parametrize("asked", [{"device": 3}, {"since": b"2026"}, {"machine": ["B200-SXM"]},
                                   {"limit": -1}, {"limit": "many"}, {"limit": math.nan}])
def test_a_filter_of_the_wrong_type_is_named(log: RunLog, asked: dict[str, Any]) -> None:
    """A filter that cannot match anything by its type is an error, not an empty list."""
    with pytest.raises(InvalidValue, match=next(iter(asked))):
        log.runs(**asked)


@pytest.mark.parametrize("number", [0, 7, -1, "one", None, 10**30, 1.5, math.nan])
def test_an_unknown_run_is_named(log: RunLog, number: Any) -> None:
    """A run that is not there, or cannot be, is named and nothing is written."""
    log.add(point(1.0))
    with pytest.raises(InvalidValue, match="run"):
        log.record(number)


def test_deleting_takes_only_what_was_asked(log: RunLog) -> None:
    """Deleting removes the runs asked for with their samples, and their ids do not come back."""
    ids = log.add([point(float(i)) for i in range(4)])
    assert log.delete([ids[1], ids[3], ids[3], 99]) == 2
    assert totals(log.runs()) == [2.0, 0.0]
    with pytest.raises(InvalidValue):
        log.record(ids[3])
    assert log.add(point(9.0)) == [ids[3] + 1]
    with sqlite3.connect(log.path) as db:
        assert db.execute("SELECT count(*) FROM samples").fetchone() == (3,)
    db.close()


def test_exported_runs_open_elsewhere(log: RunLog, tmp_path: Path) -> None:
    """An export holds every number of the chosen runs as CSV and JSON, and replays."""
    ids = log.add([point(1.0), point(2.0), point(3.0)])
    files = log.export([ids[2], ids[0]], tmp_path / "out")
    assert sorted(f.name for f in files) == ["run-1.npz", "run-3.npz", "runs.csv", "runs.json"]
    with (tmp_path / "out" / "runs.csv").open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert [(row["id"], float(row["total_s"]), row["period_s"], row["n_producers"])
            for row in rows] == [("3", 3.0, "", "4"), ("1", 1.0, "", "4")]
    entries = json.loads((tmp_path / "out" / "runs.json").read_text())["runs"]
    assert entries[0]["summary"] == {"total_s": 3.0, "period_s": None, "t_mma_s": 2e-6}
    assert entries[0]["provenance"]["source"] == "tests"
    replayed = RecordedDevice(tmp_path / "out").records()
    assert sorted(r.summary["total_s"] for r in replayed) == [1.0, 3.0]


def test_every_run_says_which_code_logged_it(log: RunLog) -> None:
    """A run carries the package's version and, in a checkout, the git commit."""
    log.add(point(1.0))
    version = log.runs()[0].version
    assert version.startswith(runlog.__version__)
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = version.partition("+")[2].removesuffix("-dirty")
        assert commit == done.stdout.strip()[:12]


def test_the_log_lies_where_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a path the log is the user's own, and XSTAGE_RUNLOG overrides where that is."""
    monkeypatch.delenv("XSTAGE_RUNLOG", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert runlog.default_path() == tmp_path / "xstage-lab" / "runs.sqlite"
    monkeypatch.setenv("XSTAGE_RUNLOG", str(tmp_path / "mine.sqlite"))
    RunLog().close()
    assert (tmp_path / "mine.sqlite").exists()


def test_the_log_is_flushed_at_every_commit(log: RunLog) -> None:
    """The file keeps a write-ahead log that is on the disk before a commit returns."""
    with log._database.reading() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_a_logged_device_logs_whatever_measures_on_it(log: RunLog) -> None:
    """A calibration on a logged device comes out as on the device, and all its runs are kept."""
    device = SimulatedDevice(machine_of(n_sms=8, max_gpus=2, per_sm_bytes_per_s=40e9))
    logged = Logged(device, log)
    assert isinstance(logged, Device)
    assert (logged.name, logged.badge, logged.machine, logged.capabilities) == (
        device.name, device.badge, device.machine, device.capabilities)
    found, alone = calibrate(logged), calibrate(device)
    assert found.drain_bytes_per_s == alone.drain_bytes_per_s
    assert found.capacity_bytes == alone.capacity_bytes
    runs = log.runs()
    assert len(runs) >= 10
    assert {run.device for run in runs} == {"simulated"}


# Files that are no log of ours: each is refused in words and left as it was.


def _text(path: Path) -> str:
    path.write_text("gap_s,period_s\n" + "1e-6,2e-6\n" * 500)
    return "no run log"


def _short_text(path: Path) -> str:
    path.write_text("hello")
    return "no run log"


def _foreign(path: Path) -> str:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE runs (id INTEGER)")
    db.close()
    return "another program's"


def _of_another_application(path: Path) -> str:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA application_id = 77")
    db.close()
    return "another program's"


def _newer(path: Path) -> str:
    RunLog(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 2")
    db.close()
    return "schema 2; this version reads 1. Update"


def _cut_short(path: Path) -> str:
    log = RunLog(path)
    log.add([point(float(i), n_tiles=100) for i in range(200)])
    log.close()
    path.write_bytes(path.read_bytes()[:8192])
    return "damaged"


@pytest.mark.parametrize(
    "make", [_text, _short_text, _foreign, _of_another_application, _newer, _cut_short])
def test_a_file_that_is_no_log_is_left_alone(make: Callable[[Path], str], tmp_path: Path) -> None:
    """What is not ours, too new or damaged is told by name and not changed by a byte."""
    file = tmp_path / "runs.sqlite"
    reason = make(file)
    before = file.read_bytes()
    with pytest.raises(FileRejected, match=reason) as told:
        RunLog(file).runs()
    assert str(file) in str(told.value)
    assert file.read_bytes() == before


def test_damaged_samples_are_told_and_the_rest_is_read(log: RunLog) -> None:
    """Damage within one run is told with its number, and the other runs are still there."""
    first, second = log.add([point(1.0), point(2.0)])
    with log._database.writing() as db:
        db.execute("UPDATE samples SET record = substr(record, 1, 300) WHERE run = ?", (first,))
    with pytest.raises(FileRejected, match=f"run {first}"):
        log.record(first)
    assert log.record(second).summary["total_s"] == 2.0
    with log._database.writing() as db:
        db.execute("UPDATE runs SET parameters = '{' WHERE id = ?", (first,))
    with pytest.raises(FileRejected, match=f"run {first}: its entry is damaged"):
        log.runs()
    log.delete([first])
    assert totals(log.runs()) == [2.0]


@pytest.fixture
def nobody() -> Iterator[None]:
    """Give up root's right to write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions work otherwise on Windows")
def test_a_folder_that_cannot_be_written_is_told(nobody: None) -> None:
    """A log in a folder without the right to write says so and what to do."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        for file in (Path(folder) / "runs.sqlite", Path(folder) / "new" / "runs.sqlite"):
            with pytest.raises(FileRejected, match="XSTAGE_RUNLOG"):
                RunLog(file)
        Path(folder).chmod(0o755)


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    """A path through a file, or to a folder, cannot be a log and says so."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "runs.sqlite", tmp_path):
        with pytest.raises(FileRejected, match="XSTAGE_RUNLOG"):
            RunLog(path)


def test_a_full_disk_is_told_and_loses_nothing_earlier(log: RunLog) -> None:
    """When the disk is full that is told, all or nothing of the batch is kept, and all before."""
    log.add([point(float(i)) for i in range(20)])
    with log._database.reading() as db:
        pages, = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages + 20}")
    with pytest.raises(FileRejected, match="the disk is full"):
        log.add([point(float(i)) for i in range(20, 400)])
    assert totals(log.runs()) == [float(i) for i in reversed(range(20))]
    assert log.record(20).summary["total_s"] == 19.0
    log.close()  # space is there again
    log.add(point(20.0))
    assert len(RunLog(log.path).runs()) == 21


def test_a_log_deleted_meanwhile_is_made_anew(log: RunLog) -> None:
    """Runs do not vanish into a file that somebody deleted while it was open."""
    log.add(point(1.0))
    for file in log.path.parent.iterdir():
        file.unlink()
    log.add(point(2.0))
    assert totals(RunLog(log.path).runs()) == totals(log.runs()) == [2.0]


def test_threads_share_a_log(log: RunLog) -> None:
    """Runs added from several threads at once all arrive, each once."""
    ids: list[int] = []
    threads = [threading.Thread(target=lambda i=i: ids.extend(
        n for j in range(10) for n in log.add(point(100.0 * i + j)))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(1, 41))
    assert sorted(t for t in totals(log.runs()) if t is not None) == sorted(
        100.0 * i + j for i in range(4) for j in range(10))


# A process that adds batches of points and prints the number of each point that is saved.
WRITER = """
    import sys
    sys.path.insert(0, {tests!r})
    from test_runlog import RunLog, point
    log, number = RunLog({path!r}), {first}
    sys.stdin.readline()
    while number < {last}:
        log.add([point(float(i), n_tiles=50) for i in range(number, number + {batch})])
        number += {batch}
        print(number, flush=True)
"""


def start_writer(path: Path, first: int, last: int, batch: int) -> subprocess.Popen[str]:
    """Start a process that waits for a line and then adds points `first` to `last`."""
    code = WRITER.format(tests=str(ROOT / "tests"), path=str(path), first=first, last=last,
                         batch=batch)
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def go(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    writer.stdin.write("\n")
    writer.stdin.flush()


def test_two_processes_write_while_one_reads(log: RunLog) -> None:
    """Two writers lose nothing to each other, and a reader meanwhile sees whole batches only."""
    writers = [start_writer(log.path, first, first + 200, batch=5) for first in (0, 1000)]
    try:
        for writer in writers:
            go(writer)
        counts = []
        while any(writer.poll() is None for writer in writers):
            counts.append(len(log.runs()))
        assert [writer.wait() for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert counts == sorted(counts)
    assert all(count % 5 == 0 for count in counts)
    found = totals(log.runs())
    assert len(found) == 400
    assert set(found) == {*map(float, range(200)), *map(float, range(1000, 1200))}


def test_a_killed_writer_loses_no_point_it_reported(log: RunLog) -> None:
    """Killed at any moment, a writer leaves a whole file with every point it said was saved."""
    rng, saved = np.random.default_rng(), 0
    for _ in range(8):
        first = saved
        writer = start_writer(log.path, first, first + 100_000, batch=2)
        assert writer.stdout is not None
        go(writer)
        saved = int(writer.stdout.readline())  # it is at work
        timer = threading.Timer(rng.uniform(0.0, 0.05), writer.send_signal, [signal.SIGKILL])
        timer.start()
        saved = max([saved, *map(int, writer.stdout)])
        writer.communicate()
        found = [t for t in totals(log.runs()) if t is not None]
        assert found[::-1] == list(map(float, range(len(found))))  # none missing, none twice
        assert saved <= len(found) <= saved + 2  # and at most the batch in flight besides
        saved = len(found)
    with log._database.reading() as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert all(log.record(run.id).tiles is not None for run in log.runs(limit=20))
