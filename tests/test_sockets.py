"""The sockets device: what it measures is physics, and nothing of it outlives its owner."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from xstage_lab import __main__ as command_line
from xstage_lab import analysis, catalog
from xstage_lab.devices import sockets, sockets_team
from xstage_lab.devices.base import Device
from xstage_lab.devices.sockets import SocketsDevice, this_computer
from xstage_lab.devices.sockets_processes import BUCKET_NS, CHUNK_BYTES
from xstage_lab.errors import (
    Infeasible,
    InvalidValue,
    UnknownFact,
    WorkerFailed,
    XStageError,
)
from xstage_lab.record import Record
from xstage_lab.schedule import LINEAR_1, LINEAR_2, Program, build
from xstage_lab.spec import BurstTrain, FusedGemm, MoELayer, Tuning
from xstage_lab.worker import Worker

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs Unix stream sockets")

K, PACE = 2, 50e6
MACHINE = this_computer(K, drain_bytes_per_s=PACE)
TWO_DESTINATIONS = this_computer(K, 2, PACE)
BUCKET_S = BUCKET_NS * 1e-9  # a receiver that was held up may be ahead of its pace by this
LONG = BurstTrain(n_producers=K, burst_bytes=2**20, gap_s=0.0, n_bursts=60)  # 2.5 s
SHORT = BurstTrain(n_producers=K, burst_bytes=20_000, gap_s=1e-3, n_bursts=5)
MOE = MoELayer(tokens=256, hidden=640, intermediate=320, experts=12, top_k=2, n_gpus=3,
               wave_experts=1)


@pytest.fixture(scope="module")
def device():
    made = SocketsDevice(MACHINE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def calibration(device):
    return analysis.calibrate(device, repeats=1)


def _run(device: SocketsDevice, workload, **build_options) -> Record:
    return device.measure(build(workload, device.machine, **build_options))


def _of(record: Record, producer: int) -> np.ndarray:
    return record.tiles[record.tiles["sm"] == producer]


def _gone(pid: int) -> bool:
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


def test_it_is_a_live_device(device):
    """The device keeps the protocol of devices, and its records say LIVE and on what."""
    assert isinstance(device, Device)
    record = _run(device, SHORT)
    assert record.provenance["badge"] == "LIVE"
    assert record.provenance["machine"] == MACHINE.name
    assert record.provenance["send_buffer_bytes"] >= MACHINE.link.credit_bytes
    assert record.provenance["scheduling"] in ("real-time", "normal")


@pytest.mark.parametrize("sync", ["free", "lockstep"])
def test_every_byte_arrives_after_it_was_sent(device, sync):
    """All bursts arrive whole, in order, after their issue began, and the path ends up empty."""
    train = BurstTrain(n_producers=K, burst_bytes=70_001, gap_s=5e-4, n_bursts=12, sync=sync)
    record = _run(device, train)
    tiles = record.tiles
    assert tiles["store_bytes"].sum() == train.n_bursts * train.volume_bytes
    assert np.isfinite(tiles["arrived_s"]).all()
    assert (tiles["arrived_s"] > tiles["issue_start_s"]).all()
    assert tiles["mma_start_s"].min() == 0.0
    for producer in range(K):
        own = _of(record, producer)
        assert (np.diff(own["arrived_s"]) >= 0).all()
        assert (own["mma_end_s"] >= own["mma_start_s"]).all()
        assert (own["issue_start_s"] >= own["mma_end_s"]).all()
        assert (own["issue_end_s"] >= own["issue_start_s"]).all()
        assert (own["mma_start_s"][1:] >= own["issue_end_s"][:-1]).all()
    assert record.backlog[1][-1] >= 0
    assert record.summary["total_s"] >= record.summary["accepted_s"]


def test_nothing_drains_faster_than_the_pace(device):
    """A train that fills the path takes no less time than its bytes at the pace."""
    train = BurstTrain(n_producers=K, burst_bytes=2**18, gap_s=0.0, n_bursts=8)
    record = _run(device, train)
    n_bytes = train.n_bursts * train.volume_bytes
    assert record.summary["total_s"] >= n_bytes / PACE - BUCKET_S
    held = K * record.provenance["send_buffer_bytes"] + (K + 1) * CHUNK_BYTES
    assert record.summary["accepted_s"] >= (n_bytes - held) / PACE - BUCKET_S


def test_the_backlog_is_what_the_buffers_hold(device):
    """A burst larger than the buffers fills them, and never holds more than they do."""
    record = _run(device, BurstTrain(n_producers=K, burst_bytes=2**19, gap_s=0.0, n_bursts=1))
    buffers = K * record.provenance["send_buffer_bytes"]
    assert 0.25 * buffers < record.backlog[1].max() <= buffers + (K + 1) * CHUNK_BYTES


def test_a_gap_is_at_least_as_long_as_asked(device):
    """Every gap but the first, of no work, lasts as long as asked or longer, and is recorded."""
    record = _run(device, SHORT)
    gaps = (record.tiles["mma_end_s"] - record.tiles["mma_start_s"])[K:]
    assert (gaps >= SHORT.gap_s).all()
    assert record.provenance["gap_achieved_s"] == pytest.approx(gaps.mean())
    assert record.provenance["gap_asked_s"] == pytest.approx(SHORT.gap_s)


def test_lockstep_producers_wait_for_each_other(device):
    """In lockstep nobody begins a gap before all have issued the burst before."""
    train = BurstTrain(n_producers=K, burst_bytes=100_000, gap_s=2e-4, n_bursts=20,
                       sync="lockstep")
    for _ in range(2):  # the barrier starts anew with every run
        tiles = _run(device, train).tiles.reshape(train.n_bursts, K)
        assert (tiles["mma_start_s"][1:].min(axis=1) >= tiles["issue_end_s"][:-1].max(axis=1)).all()


def test_fewer_producers_than_processes(device):
    """A train of fewer producers leaves the others idle."""
    record = _run(device, BurstTrain(n_producers=1, burst_bytes=5000, gap_s=0.0, n_bursts=9))
    assert set(record.tiles["sm"]) == {0}
    assert np.isfinite(record.summary["period_s"])


def test_local_stores_pass_no_paced_receiver(device):
    """The control's bytes arrive without any backlog on the path to other GPUs."""
    record = _run(device, BurstTrain(n_producers=K, burst_bytes=2**18, gap_s=0.0, n_bursts=5),
                  stores="local")
    assert np.isfinite(record.tiles["arrived_s"]).all()
    assert record.backlog[1].max() == 0.0
    assert record.provenance["drain_achieved_bytes_per_s"] == 0.0
    assert record.provenance["control_bytes_per_s"] > PACE


def test_destinations_share_the_pace():
    """Each of two destinations drains at half the pace of the machine."""
    device = SocketsDevice(TWO_DESTINATIONS)
    train = BurstTrain(n_producers=K, burst_bytes=2**18, gap_s=0.0, n_bursts=4, n_gpus=3)
    record = _run(device, train)
    n_bytes = train.n_bursts * train.burst_bytes  # one producer on each destination
    for producer in range(K):
        last = _of(record, producer)["arrived_s"].max()
        assert last >= n_bytes / (PACE / 2) - BUCKET_S
    device.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fused_gemm_keeps_its_issue_depth(depth):
    """A producer holds no more tiles than the issue depth, and local tiles use no pace."""
    device = SocketsDevice(TWO_DESTINATIONS)
    gemm = FusedGemm(m=1024, n=640, k=256, n_gpus=3)
    record = _run(device, gemm, tuning=Tuning(issue_depth=depth))
    program = build(gemm, device.machine, Tuning(issue_depth=depth))
    assert (record.tiles["store_bytes"] == program.tasks[0]["store_bytes"]).all()
    rate = device.machine.bf16_flop_per_s / K
    assert (record.tiles["mma_end_s"] - record.tiles["mma_start_s"]
            >= program.tasks[0]["flop"] / rate - 2e-9).all()
    for producer in range(K):
        own = _of(record, producer)
        assert (own["mma_start_s"][depth:] >= own["issue_end_s"][:-depth]).all()
        assert (own["mma_start_s"][1:] >= own["mma_end_s"][:-1]).all()
        assert (own["issue_start_s"][1:] >= own["issue_end_s"][:-1]).all()
    remote = program.remote_bytes(0)
    assert record.summary["total_s"] >= remote / PACE - BUCKET_S
    assert record.summary["remote_bytes"] == remote  # of the GPU that was run
    assert 0.0 <= record.summary["stall_ratio"] <= 1.0
    device.close()


def test_gemm_with_stores_off_is_compute_alone(device):
    """With stores off no byte moves, and a tile's compute time is measured."""
    gemm, tuning = FusedGemm(m=512, n=512, k=1024, n_gpus=2), Tuning()
    t_mma_s = analysis.measure_t_mma(device, gemm, tuning)
    assert t_mma_s >= 2 * 128 * 128 * 1024 / (MACHINE.bf16_flop_per_s / K)


def test_calibration_runs_on_sockets(device, calibration):
    """Calibrating gives every parameter of the law, live."""
    cal = calibration
    assert (cal.badge, cal.device, cal.machine) == ("LIVE", "sockets", MACHINE.name)
    assert np.isfinite([cal.issue_latency_s, cal.per_sm_bytes_per_s, cal.drain_bytes_per_s]).all()
    prediction = analysis.predict(SHORT, MACHINE, cal)
    comparison = analysis.compare(prediction, _run(device, SHORT))
    assert np.isfinite(comparison.error_ratio["accepted_s"])


@pytest.mark.parametrize("order", ["wave", "interleaved"])
@pytest.mark.parametrize("depth", [1, 3])
def test_moe_layers_keep_their_dependencies(order, depth, monkeypatch):
    """No tile of Linear-2 starts before all of Linear-1 in its block is accepted, on whichever
    producer; that is no wait for a slot; and receivers get the bytes of the program."""
    device, got = SocketsDevice(TWO_DESTINATIONS), []
    run = sockets_team.Team.run
    monkeypatch.setattr(sockets_team.Team, "run",
                        lambda *asked: got.append(run(*asked)) or got[-1])
    program = build(dataclasses.replace(MOE, order=order), device.machine,
                    Tuning(issue_depth=depth))
    record, tasks = device.measure(program), program.tasks[0]
    tiles = record.tiles
    first, second = (np.flatnonzero(tasks["kind"] == kind) for kind in (LINEAR_1, LINEAR_2))
    full_s = np.zeros(tasks["signals"].max() + 1)
    np.maximum.at(full_s, tasks["signals"][first], tiles["issue_end_s"][first])
    since_ready_s = tiles["mma_start_s"][second] - full_s[tasks["waits_for"][second]]
    assert (since_ready_s >= 0).all()
    assert (tiles["slot_wait_s"][second] <= since_ready_s + 1e-9).all()
    _, receipts = got[-1]
    for owner in (1, 2):
        assert sum(receipts[owner - 1].chunk_bytes) == tasks["store_bytes"][
            tasks["owner"] == owner].sum()
    assert np.isfinite(tiles["arrived_s"]).all()
    assert record.summary["remote_bytes"] == program.remote_bytes(0)
    device.close()


def test_interleaving_begins_to_store_earlier():
    """All of Linear-1 first takes its time and that of the stores; interleaved they overlap."""
    machine = this_computer(3, drain_bytes_per_s=PACE)
    device = SocketsDevice(machine)
    moe = MoELayer(tokens=1024, hidden=2048, intermediate=1280, experts=16, top_k=2, n_gpus=2,
                   wave_experts=8)
    interleaved = build(dataclasses.replace(moe, order="interleaved"), machine)
    tasks = interleaved.tasks[0]
    linear_1_s = (tasks["flop"][tasks["kind"] == LINEAR_1].sum()
                  / machine.flop_per_s(moe.dtype))
    apart_s = linear_1_s + interleaved.remote_bytes(0) / PACE - BUCKET_S
    assert _run(device, moe).summary["total_s"] >= 0.98 * apart_s
    assert min(device.measure(interleaved).summary["total_s"] for _ in range(5)) < apart_s
    device.close()


def test_moe_layers_are_compared_live(device, calibration):
    """A layer's compute time is measured with stores off, and the law is set beside its run."""
    moe, tuning = dataclasses.replace(MOE, n_gpus=2), Tuning()
    t_mma_s = analysis.measure_t_mma(device, moe, tuning)
    flop = build(moe, MACHINE, tuning).tasks[0]["flop"]
    assert t_mma_s >= flop.sum() / -(-flop.size // K) / MACHINE.fp8_flop_per_s
    prediction = analysis.predict(moe, MACHINE, calibration, tuning, t_mma_s)
    comparison = analysis.compare(prediction, _run(device, moe, tuning=tuning))
    assert comparison.provenance["measured"]["badge"] == "LIVE"
    assert all(np.isfinite(comparison.error_ratio[key]) for key in ("total_s", "stall_ratio"))


def _reordered(change) -> Program:
    program = build(dataclasses.replace(MOE, tokens=64, n_gpus=2), MACHINE)
    tasks = program.tasks[0].copy()
    return dataclasses.replace(program, tasks=(change(tasks), program.tasks[1]))


def test_dependencies_that_form_a_circle_end_in_words(monkeypatch):
    """Tiles that stand before what they need are given up, and who waited for what is told."""
    device = SocketsDevice(MACHINE)
    monkeypatch.setattr(sockets, "GRACE_S", 0.2)
    with pytest.raises(WorkerFailed, match=r"task [01] waited for task \d+, of producer [12]"):
        device.measure(_reordered(lambda tasks: tasks[::-1]))
    assert device.pids == []


def test_a_counter_that_nobody_raises_is_refused(device):
    """A program that could never end does not start."""
    with pytest.raises(XStageError, match="but no tasks raise it"):
        device.measure(_reordered(lambda tasks: tasks[tasks["kind"] == LINEAR_2]))


@pytest.mark.parametrize(("options", "told"), [
    ({"routing": "zipf:1"}, "balanced routing"),
    ({"tokens": 2**13, "hidden": 2**14, "intermediate": 2**14}, "takes at least 66 s .* tokens"),
])
def test_moe_layers_that_cannot_run_are_refused(device, options, told):
    """GPUs that differ, and layers too large for the time, are refused with the way out."""
    with pytest.raises(Infeasible, match=told):
        _run(device, dataclasses.replace(MOE, **({"n_gpus": 2} | options)))


@pytest.mark.parametrize(("which", "told"), [
    (0, "producer 1 was killed by SIGKILL"),
    (K, "receiver 1 was killed by SIGKILL"),
])
def test_a_process_that_dies_in_the_middle_is_named(which, told):
    """A killed producer or receiver is told by name, all are ended, the next run works."""
    device = SocketsDevice(MACHINE)
    _run(device, SHORT)
    pids = device.pids
    threading.Timer(0.3, os.kill, (pids[which], signal.SIGKILL)).start()
    with pytest.raises(WorkerFailed, match=told):
        _run(device, LONG)
    assert all(_gone(pid) for pid in pids)
    assert np.isfinite(_run(device, SHORT).tiles["arrived_s"]).all()
    device.close()


def test_a_process_that_died_between_runs_is_replaced(device):
    """A process that is gone before a run starts costs nothing but a new start."""
    _run(device, SHORT)
    before = device.pids
    os.kill(before[-1], signal.SIGKILL)
    psutil.Process(before[-1]).wait(10)
    assert np.isfinite(_run(device, SHORT).tiles["arrived_s"]).all()
    assert not set(before) & set(device.pids)
    assert all(_gone(pid) for pid in before)


def test_a_process_that_hangs_is_given_up(monkeypatch):
    """A receiver that stands still ends the run with words after the deadline."""
    device = SocketsDevice(MACHINE)
    _run(device, SHORT)
    monkeypatch.setattr(sockets, "GRACE_S", 0.2)
    monkeypatch.setattr(sockets_team, "PATIENCE_S", 0.5)
    os.kill(device.pids[K], signal.SIGSTOP)
    with pytest.raises(WorkerFailed, match=r"destination 1 did not take|no answer"):
        _run(device, BurstTrain(n_producers=K, burst_bytes=2**19, gap_s=0.0, n_bursts=1))
    assert device.pids == []


def test_an_interrupt_leaves_a_working_device():
    """Interrupting a run ends its processes, and the next run works."""
    device = SocketsDevice(MACHINE)
    _run(device, SHORT)
    pids = device.pids
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        _run(device, LONG)
    assert all(_gone(pid) for pid in pids)
    assert np.isfinite(_run(device, SHORT).tiles["arrived_s"]).all()
    device.close()


def test_close_ends_every_process():
    """Closing ends all processes; measuring again starts new ones."""
    device = SocketsDevice(MACHINE)
    _run(device, SHORT)
    pids = device.pids
    assert len(pids) == K + 2  # a paced receiver and that of local stores
    device.close()
    assert all(_gone(pid) for pid in pids)
    _run(device, SHORT)
    again = device.pids
    del device
    _wait(lambda: all(_gone(pid) for pid in again), "the end of a dropped device's processes")


OWNER = """
import sys
from test_sockets import LONG, MACHINE, SHORT, SocketsDevice, build
device = SocketsDevice(MACHINE)
device.measure(build(SHORT, MACHINE))
print(*device.pids, flush=True)
if sys.argv[1] == "long":
    device.measure(build(LONG, MACHINE))
elif sys.argv[1] == "idle":
    sys.stdin.read()
"""


@pytest.mark.parametrize("doing", ["long", "idle", "nothing"])
def test_nothing_outlives_its_owner(doing):
    """Killing the owner in the middle of a run or idle, or its normal end, ends all processes."""
    here = Path(__file__).resolve().parent
    path = {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    with subprocess.Popen([sys.executable, "-c", OWNER, doing], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, env=os.environ | path) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == K + 2
        if doing == "nothing":
            assert owner.wait(30) == 0
        else:
            time.sleep(0.2)
            owner.kill()
    _wait(lambda: all(_gone(pid) for pid in pids), "the end of the processes", limit_s=10)


def test_it_works_behind_a_worker():
    """A worker process runs the device, and its end is the end of all processes."""
    worker = Worker(partial(SocketsDevice, MACHINE))
    record = worker.measure(build(SHORT, MACHINE))
    assert record.provenance["badge"] == "LIVE"
    children = [child.pid for child in psutil.Process(worker.pid).children()]
    assert len(children) >= K + 2
    worker.close()
    _wait(lambda: all(_gone(pid) for pid in children), "the end of the processes")


def test_a_pace_the_computer_cannot_keep_is_refused(monkeypatch):
    """A pace too near to what the sockets carry without pace is refused, naming both."""
    monkeypatch.setattr(sockets, "CONTROL_MARGIN", 1e6)
    device = SocketsDevice(MACHINE)
    with pytest.raises(InvalidValue, match=r"drain_bytes_per_s = 50000000.0 B/s.*up to"):
        _run(device, SHORT)
    monkeypatch.undo()
    assert np.isfinite(_run(device, SHORT).tiles["arrived_s"]).all()
    device.close()


@pytest.mark.parametrize(("options", "field"), [
    ({"n_producers": 17}, "n_producers"),
    ({"n_producers": 0}, "n_producers"),
    ({"n_destinations": 5}, "n_destinations"),
    ({"drain_bytes_per_s": 1e11}, "drain_bytes_per_s"),
    ({"drain_bytes_per_s": float("nan")}, "drain_bytes_per_s"),
    ({"drain_bytes_per_s": "fast"}, "drain_bytes_per_s"),
    ({"buffer_bytes": 10}, "buffer_bytes"),
    ({"flop_per_s": 0.0}, "flop_per_s"),
])
def test_impossible_machines_are_refused(options, field):
    """Every value out of its range is named."""
    with pytest.raises(InvalidValue, match=field):
        this_computer(**options)


def test_a_gpu_machine_is_refused():
    """A machine of 148 SMs, or of unknown rate, is not made of processes."""
    b200 = catalog.machine("B200-SXM")
    with pytest.raises(InvalidValue, match="n_producers = 148"):
        SocketsDevice(catalog.with_assumptions(b200))
    with pytest.raises(UnknownFact, match="this_computer"):
        SocketsDevice(b200)


def _programs_of_another_machine() -> list[Program]:
    larger = this_computer(8, 3, PACE)
    return [build(BurstTrain(n_producers=8, burst_bytes=100, gap_s=0.0, n_bursts=1), larger),
            build(BurstTrain(n_producers=2, burst_bytes=100, gap_s=0.0, n_bursts=1, n_gpus=4),
                  larger)]


@pytest.mark.parametrize("program", _programs_of_another_machine())
def test_programs_of_larger_machines_are_refused(device, program):
    """More producers or GPUs than there are processes is an error, not a smaller run."""
    with pytest.raises(InvalidValue, match=r"n_ctas|n_gpus"):
        device.measure(program)


def test_runs_that_take_too_long_are_refused(device):
    """A run of more than a minute is refused before it starts."""
    slow = BurstTrain(n_producers=K, burst_bytes=2**20, gap_s=0.0, n_bursts=3000)
    with pytest.raises(Infeasible, match="takes at least 126 s"):
        _run(device, slow)


@pytest.mark.parametrize("destinations", ["row-owner-unrotated", "hot:0.5"])
def test_gemms_whose_gpus_differ_are_refused(device, destinations):
    """Where GPUs do not all do the same, GPU 0 alone would not be the answer."""
    gemm = FusedGemm(m=256, n=256, k=64, n_gpus=2, destinations=destinations)
    with pytest.raises(Infeasible, match=r"round-robin or row-owner"):
        _run(device, gemm)


def test_command_line_measures_on_sockets(capsys):
    """`measure --device sockets` prints a live measurement of the producers asked for."""
    status = command_line.main([
        "measure", "--device", "sockets", "--workload", "burst", "--producers", "3", "--gap",
        "1e-3", "--bursts", "10", "--drain-bytes-per-s", "4e7", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert status == 0
    assert printed["provenance"]["badge"] == "LIVE"
    assert printed["provenance"]["drain_asked_bytes_per_s"] == 4e7
    assert printed["measured"]["total_s"] >= 10 * 3 * 32768 / 4e7 - BUCKET_S


@pytest.mark.parametrize(("options", "told"), [
    (["--producers", "40"], "n_producers = 40"),
    (["--gpus", "9"], "n_destinations = 8"),
    (["--gpus", "two"], "n_gpus = 'two'"),
    (["--drain-bytes-per-s", "0"], "drain_bytes_per_s = 0"),
    (["--capacity-bytes", "1e6"], "capacity_bytes"),
])
def test_command_line_names_what_sockets_cannot(capsys, options, told):
    """Impossible options end with status 2 and one line that names them."""
    arguments = ["measure", "--device", "sockets", "--workload", "burst", *options]
    assert command_line.main(arguments) == 2
    assert told in capsys.readouterr().err
