"""Running programs on a device, and keeping the device in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from fake_device import MACHINE, FakeDevice, programs

from xstage_lab import experiment, worker
from xstage_lab.errors import Infeasible, InvalidValue, WorkerFailed, XStageError
from xstage_lab.record import Record
from xstage_lab.worker import Worker


def _sizes(records: list[Record]) -> list[float]:
    return [record.summary["total_s"] for record in records]


def _gone(pid: int) -> bool:
    """Whether no process `pid` runs; one that has ended and is not yet reaped runs no more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait(condition, what: str, limit_s: float = 30.0) -> None:
    for _ in range(int(limit_s / 0.02)):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail(f"{what} did not happen within {limit_s:g} s")


@pytest.fixture
def make_worker():
    """Make workers and end them after the test."""
    made: list[Worker] = []

    def make(**options) -> Worker:
        limit_s = options.pop("limit_s", 60.0)
        made.append(Worker(partial(FakeDevice, **options), limit_s=limit_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_records_come_in_order_with_repeats_together():
    """Every program is measured `repeats` times, in order, each time with the next seed."""
    records = list(experiment.run(FakeDevice(), programs(3), repeats=2, seed=10))
    assert _sizes(records) == [1, 1, 2, 2, 3, 3]
    assert [record.summary["issue_s"] for record in records] == [10, 11, 12, 13, 14, 15]


def test_warm_up_runs_are_thrown_away(tmp_path):
    """Warm-up runs reach the device and leave no record."""
    log = tmp_path / "log"
    assert len(list(experiment.run(FakeDevice(log=str(log)), programs(2), warm_up=3))) == 2
    assert len(log.read_text().splitlines()) == 8


def test_progress_ends_at_one():
    """Progress rises with every point and ends at 1."""
    shares: list[float] = []
    list(experiment.run(FakeDevice(), programs(4), progress=lambda share, _: shares.append(share)))
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_stop_between_points():
    """No point is measured once stop has said true."""
    records: list[Record] = []
    records.extend(experiment.run(FakeDevice(), programs(9), stop=lambda: len(records) == 3))
    assert _sizes(records) == [1, 2, 3]


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"repeats": 1.5}, {"warm_up": -1}, {"seed": -1}])
def test_bad_counts_are_named_before_anything_runs(bad, tmp_path):
    """A bad count is named at once, before the first measurement."""
    with pytest.raises(InvalidValue, match=next(iter(bad))):
        experiment.run(FakeDevice(log=str(tmp_path / "log")), programs(1), **bad)
    assert not (tmp_path / "log").exists()


def test_without_a_loop_points_are_delivered_before_returning():
    """In a script all points are there when deliver returns, then done is told once."""
    seen: list[object] = []
    experiment.deliver(experiment.run(FakeDevice(), programs(3)), seen.append,
                       lambda error: seen.append(("done", error)))
    assert _sizes(seen[:3]) == [1, 2, 3]  # type: ignore[arg-type]
    assert seen[3:] == [("done", None)]


def test_with_a_loop_points_arrive_on_the_loop_while_it_runs():
    """Where a loop runs, deliver returns at once and every callback is called in its thread."""
    threads: list[int] = []

    async def main() -> XStageError | None:
        ended: asyncio.Future[XStageError | None] = asyncio.get_running_loop().create_future()
        experiment.deliver(experiment.run(FakeDevice(), programs(3)),
                           lambda _: threads.append(threading.get_ident()), ended.set_result)
        assert threads == []
        return await ended

    assert asyncio.run(main()) is None
    assert threads == [threading.get_ident()] * 3


def test_an_error_ends_the_points_in_words():
    """The error of the third point comes after two points, and a defect comes as words."""
    for how, kind in (("infeasible", Infeasible), ("bug", WorkerFailed)):
        seen: list[object] = []
        experiment.deliver(experiment.run(FakeDevice(3, how), programs(5)), seen.append,
                           seen.append)
        assert len(seen) == 3
        assert isinstance(seen[-1], kind)


def test_worker_measures_in_one_other_process(make_worker):
    """A worker gives the device's own records, all from one process that is not ours."""
    device = make_worker()
    records = list(experiment.run(device, programs(3), seed=5))
    direct = list(experiment.run(FakeDevice(), programs(3), seed=5))
    assert [r.summary for r in records] == [r.summary for r in direct]
    pids = {record.provenance["pid"] for record in records}
    assert pids == {device.pid}
    assert device.pid != os.getpid()


def test_worker_is_a_device(make_worker):
    """A worker tells name, badge, machine and capabilities of the device inside."""
    device = make_worker()
    assert (device.name, device.badge) == ("fake", "SIMULATED")
    assert repr(device.machine) == repr(MACHINE)  # NaN is not equal to itself
    assert device.capabilities == FakeDevice.capabilities


def test_another_device_runs_in_the_same_process(make_worker):
    """Changing the device keeps the warm process and measures on the new device."""
    device = make_worker()
    device.measure(programs(1)[0])
    pid = device.pid
    device.use(partial(FakeDevice, bad_bytes=1, how="infeasible"))
    with pytest.raises(Infeasible):
        device.measure(programs(1)[0])
    assert device.pid == pid


@pytest.mark.parametrize("how", ["invalid", "infeasible"])
def test_errors_of_the_device_arrive_unchanged(make_worker, how):
    """An error raised in the worker has the type, text and fields it has when raised here."""
    with pytest.raises(XStageError) as direct:
        FakeDevice(1, how).measure(programs(1)[0])
    device = make_worker(bad_bytes=1, how=how)
    with pytest.raises(XStageError) as through:
        device.measure(programs(1)[0])
    assert type(through.value) is type(direct.value)
    assert str(through.value) == str(direct.value)
    assert vars(through.value) == vars(direct.value)


def test_a_defect_in_the_device_is_told_and_the_worker_lives(make_worker):
    """An unexpected exception arrives as words with its place, and the process stays."""
    device = make_worker(bad_bytes=2, how="bug")
    device.measure(programs(1)[0])
    pid = device.pid
    with pytest.raises(WorkerFailed, match=r"ZeroDivisionError: a defect; fake_device.py"):
        device.measure(programs(2)[1])
    assert device.measure(programs(1)[0]).provenance["pid"] == pid


def test_a_crash_is_told_and_the_next_measurement_starts_a_new_worker(make_worker):
    """A worker that exits says how, and the next measurement runs in another process."""
    device = make_worker(bad_bytes=2, how="exit")
    first = device.measure(programs(1)[0]).provenance["pid"]
    with pytest.raises(WorkerFailed, match=r"exit status 3.*a new one starts by itself"):
        list(experiment.run(device, programs(3)))
    assert _gone(first)
    assert device.measure(programs(1)[0]).provenance["pid"] != first


def test_a_hang_is_told_and_leaves_nothing(make_worker, tmp_path):
    """A worker that gives no answer within its limit is ended and told of."""
    log = tmp_path / "log"
    device = make_worker(bad_bytes=2, how="hang", log=str(log), limit_s=5.0)
    with pytest.raises(WorkerFailed, match=r"no answer for 5 s"):
        list(experiment.run(device, programs(3)))
    assert _gone(int(log.read_text().splitlines()[-1]))
    assert _sizes([device.measure(programs(1)[0])]) == [1]


def test_stop_during_a_point_that_hangs_ends_the_worker(make_worker, tmp_path):
    """Stop ends a point that does not end, without an error, and leaves nothing running."""
    log, stopping = tmp_path / "log", threading.Event()
    device = make_worker(bad_bytes=3, how="hang", log=str(log))
    seen: list[object] = []
    points = experiment.run(device, programs(5), stop=stopping.is_set)
    thread = threading.Thread(target=experiment.deliver, args=(points, seen.append, seen.append))
    thread.start()
    _wait(lambda: log.exists() and len(log.read_text().splitlines()) == 3, "the third point")
    stopping.set()
    device.stop()
    thread.join(30.0)
    assert not thread.is_alive()
    assert _sizes(seen[:2]) == [1, 2]  # type: ignore[arg-type]
    assert seen[2:] == [None]
    assert _gone(int(log.read_text().splitlines()[-1]))


def test_stop_of_a_finished_point_spares_the_next(make_worker, monkeypatch):
    """A stop that came as its point ended does not end the measurement started after it."""
    monkeypatch.setattr(worker, "STOP_GRACE_S", 0.2)
    device = make_worker()
    with device._asking:  # as if a point were being measured when Stop is pressed
        device.stop()
    pid = device.measure(programs(1)[0]).provenance["pid"]
    time.sleep(0.5)
    assert device.measure(programs(1)[0]).provenance["pid"] == pid


def test_close_leaves_nothing_and_can_be_repeated(make_worker):
    """Close ends the process; closing again or measuring again does no harm."""
    device = make_worker()
    pid = device.measure(programs(1)[0]).provenance["pid"]
    device.close()
    device.close()
    assert _gone(pid)
    assert device.measure(programs(1)[0]).provenance["pid"] != pid


def test_a_worker_that_ended_while_idle_is_replaced(make_worker):
    """A worker that ended while nobody asked it anything is replaced without an error."""
    device = make_worker()
    pid = device.measure(programs(1)[0]).provenance["pid"]
    os.kill(pid, signal.SIGKILL)
    _wait(lambda: device.pid is None, "the end of the worker")
    assert device.measure(programs(1)[0]).provenance["pid"] != pid


PARENT = """
    import sys
    from functools import partial
    sys.path.insert(0, {tests!r})
    from fake_device import FakeDevice, programs
    from xstage_lab.worker import Worker
    Worker(partial(FakeDevice, {bad_bytes}, "hang", {log!r})).measure(programs(1)[0])
"""


def _parent_script(tmp_path: Path, bad_bytes: int) -> tuple[Path, Path]:
    script, log = tmp_path / "parent.py", tmp_path / "log"
    script.write_text(textwrap.dedent(PARENT.format(
        tests=str(Path(__file__).parent), bad_bytes=bad_bytes, log=str(log))))
    return script, log


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path):
    """A worker started by a plain script measures once and does not run the script again."""
    script, log = _parent_script(tmp_path, bad_bytes=0)
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_worker_does_not_outlive_its_parent(tmp_path, how):
    """However the parent ends, a worker in the middle of a measurement ends too."""
    script, log = _parent_script(tmp_path, bad_bytes=1)
    parent = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    try:
        _wait(lambda: log.exists() and log.read_text().strip(), "the first measurement")
        pid = int(log.read_text())
        assert not _gone(pid)
        parent.send_signal(how)
        parent.wait(30.0)
        _wait(lambda: _gone(pid), "the end of the worker")
    finally:
        parent.kill()
        parent.wait()
