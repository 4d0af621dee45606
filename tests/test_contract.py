"""The contract: what every device promises, asserted over all of them by capability.

A device joins by a function that makes it and, once the tests are done, ends it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import emulated_cuda
import numpy as np
import pytest
from strategies import machine_of

from xstage_lab.devices.base import Capabilities, Device
from xstage_lab.devices.cuda import CudaDevice
from xstage_lab.devices.host import HostDevice
from xstage_lab.devices.recorded import RecordedDevice
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.devices.sockets import SocketsDevice, this_computer
from xstage_lab.errors import DeviceUnavailable, NotMeasured, XStageError
from xstage_lab.record import BADGES, SUMMARY_KEYS, TILE, Record, Tiles, to_plain
from xstage_lab.schedule import Program, build
from xstage_lab.spec import BurstTrain, FusedGemm, MachineSpec, Tuning

MACHINE = machine_of(8, issue_latency_s=0.1e-6, path_capacity_bytes=200e3)


def programs_on(machine: MachineSpec) -> dict[str, Program]:
    """Small programs of every kind that any machine of two GPUs can run, kernels included."""
    k = min(machine.n_sms, 8)
    train = BurstTrain(n_producers=k, burst_bytes=20_000, gap_s=1e-5, n_bursts=10)
    gemm = FusedGemm(m=64 * 5 - 3, n=64 * k * 2, k=256, n_gpus=2)
    tuning = Tuning(tile_m=64, tile_n=64, n_ctas=k)
    lockstep = dataclasses.replace(train, sync="lockstep")
    serial = dataclasses.replace(tuning, issue_depth=1)
    return {
        "train": build(train, machine),
        "lockstep": build(lockstep, machine),
        "local train": build(train, machine, stores="local"),
        "gemm": build(gemm, machine, tuning),
        "gemm at depth 1": build(gemm, machine, serial),
        "row owners": build(dataclasses.replace(gemm, destinations="row-owner"), machine, tuning),
        "local gemm": build(gemm, machine, tuning, stores="local"),
        "stores off": build(gemm, machine, tuning, stores="off"),
        "one gpu": build(dataclasses.replace(gemm, n_gpus=1), machine, tuning),
    }


PROGRAMS = tuple(programs_on(MACHINE))


class Subject(NamedTuple):
    """A device with the programs it is asked to run and what it gave back."""

    device: Device
    programs: dict[str, Program]
    records: dict[str, Record]


def simulated() -> Iterator[Device]:
    yield SimulatedDevice(MACHINE, mma_jitter_ratio=0.1, issue_jitter_ratio=0.1)


def recorded() -> Iterator[Device]:
    measuring = SimulatedDevice(MACHINE, mma_jitter_ratio=0.1)
    yield RecordedDevice([measuring.measure(program, seed) for seed in (1, 2)
                          for program in programs_on(MACHINE).values()], MACHINE)


def sockets() -> Iterator[Device]:
    if os.name != "posix":
        pytest.skip("needs Unix stream sockets")
    device = SocketsDevice(this_computer(2))
    yield device
    device.close()


def host() -> Iterator[Device]:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    yield HostDevice()


def cuda() -> Iterator[Device]:
    try:
        yield CudaDevice()
    except DeviceUnavailable as error:
        pytest.skip(str(error))


def cuda_on_emulated_gpus() -> Iterator[Device]:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with pytest.MonkeyPatch.context() as patch:
        emulated_cuda.install(patch, 2)
        yield CudaDevice()


DEVICES: tuple[Callable[[], Iterator[Device]], ...] = (
    simulated, recorded, sockets, host, cuda, cuda_on_emulated_gpus)


@pytest.fixture(scope="module", params=DEVICES, ids=lambda make: make.__name__)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Make each device once, and run every program on it once."""
    making = request.param()
    device = next(making)
    programs = programs_on(device.machine)
    yield Subject(device, programs, {
        name: device.measure(program, seed=1) for name, program in programs.items()})
    next(making, None)


def requires(subject: Subject, **capabilities: bool) -> None:
    """Skip where the device does not claim what a test is about."""
    for name, needed in capabilities.items():
        if getattr(subject.device.capabilities, name) != needed:
            pytest.skip(f"{subject.device.name} has {name} = {not needed}")


def of_each_sm(tiles: Tiles) -> Iterator[Tiles]:
    """Tiles of each SM of each GPU in issue order."""
    for gpu in np.unique(tiles["gpu"]):
        for sm in np.unique(tiles["sm"][tiles["gpu"] == gpu]):
            own = tiles[(tiles["gpu"] == gpu) & (tiles["sm"] == sm)]
            yield np.sort(own, order="row")


def test_it_says_what_it_is(subject: Subject) -> None:
    """A device has a name, one of the badges of a measurement, a machine and capabilities."""
    device = subject.device
    assert isinstance(device, Device)
    assert device.name
    assert device.badge in set(BADGES) - {"PREDICTED", "ASSUMED"}
    assert isinstance(device.machine, MachineSpec)
    assert isinstance(device.capabilities, Capabilities)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_record_says_where_it_is_from(subject: Subject, name: str) -> None:
    """Every record carries the device's badge, name and machine, the source, versions and date; a
    replay of what was simulated stays SIMULATED."""
    said = subject.records[name].provenance
    device = subject.device
    badge = "SIMULATED" if device.name == "recorded" else device.badge
    assert (said["badge"], said["device"], said["machine"]) == (
        badge, device.name, device.machine.name)
    assert said["source"]
    assert {"xstage_lab", "python", "numpy", "date", "seed"} <= set(said)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_record_says_what_was_run(subject: Subject, name: str) -> None:
    """A record's parameters are those of the program."""
    record, program = subject.records[name], subject.programs[name]
    assert to_plain(record.parameters) == to_plain(program.parameters())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_summary_is_complete(subject: Subject, name: str) -> None:
    """Every summary has all keys, as plain numbers; what is not observed is NaN, and no time is
    0 or infinite."""
    summary = subject.records[name].summary
    assert set(SUMMARY_KEYS) <= set(summary)
    assert all(isinstance(value, float | int) for value in summary.values())
    times = [value for key, value in summary.items() if key.endswith("_s") and key != "t_mma_s"]
    assert all(math.isnan(value) or 0 < value < math.inf for value in times)
    if not subject.device.capabilities.times:
        assert all(math.isnan(value) for value in times)


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_is_there_after_all_is_accepted(subject: Subject, name: str) -> None:
    """total_s is not below accepted_s, nor the mean span of a task above accepted_s."""
    requires(subject, times=True)
    summary = subject.records[name].summary
    assert summary["accepted_s"] > 0
    assert math.isnan(summary["total_s"]) or summary["total_s"] >= summary["accepted_s"]
    assert math.isnan(summary["issue_s"]) or summary["issue_s"] <= summary["accepted_s"]
    stall = summary["stall_ratio"]
    assert math.isnan(stall) or 0 <= stall < 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_task_is_run_once(subject: Subject, name: str) -> None:
    """Per-tile times hold every row of every GPU that was run once, on its CTA, with its bytes."""
    requires(subject, per_tile=True)
    program, tiles = subject.programs[name], subject.records[name].tiles
    assert tiles.dtype == TILE
    for gpu in np.unique(tiles["gpu"]):
        own = np.sort(tiles[tiles["gpu"] == gpu], order="row")
        tasks = program.tasks[gpu]
        assert (own["row"] == np.arange(tasks.size)).all()
        assert (own["sm"] == own["row"] % program.n_ctas).all()
        assert (own["store_bytes"] == tasks["store_bytes"]).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_task_goes_forward(subject: Subject, name: str) -> None:
    """A task computes, then issues, then has its stores accepted and later arrived; nothing is
    before the first start."""
    requires(subject, times=True, per_tile=True)
    tiles = subject.records[name].tiles
    steps = ("mma_start_s", "mma_end_s", "issue_start_s", "issue_end_s")
    for before, after in itertools.pairwise(steps):
        assert (tiles[before] <= tiles[after]).all()
    assert tiles["mma_start_s"].min() == pytest.approx(0.0, abs=1e-9)
    assert (tiles["slot_wait_s"] >= 0).all()
    seen = ~np.isnan(tiles["arrived_s"])
    assert (tiles["arrived_s"] > tiles["issue_start_s"])[seen & (tiles["store_bytes"] > 0)].all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_sm_keeps_its_order_and_depth(subject: Subject, name: str) -> None:
    """An SM computes one task at a time and issues one at a time, in order, and holds no more
    output tiles than its issue depth."""
    requires(subject, times=True, per_tile=True)
    depth = subject.programs[name].issue_depth
    for own in of_each_sm(subject.records[name].tiles):
        slack = 1e-9 * own["issue_end_s"].max()
        assert (own["mma_start_s"][1:] >= own["mma_end_s"][:-1] - slack).all()
        assert (own["issue_start_s"][1:] >= own["issue_end_s"][:-1] - slack).all()
        assert (own["mma_start_s"][depth:] >= own["issue_end_s"][:-depth] - slack).all()


def test_lockstep_is_kept(subject: Subject) -> None:
    """No producer starts the gap after a burst before the last one's burst is accepted."""
    requires(subject, times=True, per_tile=True)
    tiles, program = subject.records["lockstep"].tiles, subject.programs["lockstep"]
    for gpu in np.unique(tiles["gpu"]):
        bursts = np.sort(tiles[tiles["gpu"] == gpu], order="row").reshape(-1, program.n_ctas)
        ended = bursts["issue_end_s"].max(axis=1)
        slack = 1e-9 * ended[-1]
        assert (bursts["mma_start_s"][1:] >= ended[:-1, None] - slack).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_summary_is_that_of_the_tiles(subject: Subject, name: str) -> None:
    """The summary's times are the last acceptance, the last arrival and the mean span."""
    requires(subject, times=True, per_tile=True)
    record = subject.records[name]
    tiles, summary = record.tiles, record.summary
    assert summary["accepted_s"] == pytest.approx(tiles["issue_end_s"].max())
    if not math.isnan(summary["total_s"]):
        assert summary["total_s"] == pytest.approx(
            max(np.nanmax(tiles["arrived_s"]), tiles["issue_end_s"].max()))
    storing = tiles[tiles["store_bytes"] > 0]
    if storing.size:
        assert summary["issue_s"] == pytest.approx(
            (storing["issue_end_s"] - storing["issue_start_s"]).mean())
    else:
        assert math.isnan(summary["issue_s"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_remote_bytes_are_those_of_the_program(subject: Subject, name: str) -> None:
    """What is counted as stored to others is exactly that, and nothing where stores are local,
    off, or there is nobody else."""
    record, program = subject.records[name], subject.programs[name]
    if math.isnan(record.summary.get("remote_bytes", math.nan)):
        pytest.skip(f"{subject.device.name} counts no bytes")
    run = range(program.n_gpus) if record.tiles is None else np.unique(record.tiles["gpu"])
    assert record.summary["remote_bytes"] == pytest.approx(
        np.mean([program.remote_bytes(int(gpu)) for gpu in run]))
    if name in ("local train", "local gemm", "stores off", "one gpu"):
        assert record.summary["remote_bytes"] == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_backlog_is_a_backlog(subject: Subject, name: str) -> None:
    """A backlog runs forward in time and is never negative."""
    backlog = subject.records[name].backlog
    if backlog is None:
        pytest.skip(f"{subject.device.name} cannot see the backlog")
    assert backlog.ndim == 2
    assert len(backlog) == 2
    assert (np.diff(backlog[0]) >= 0).all()
    assert (backlog[1] >= -1e-6).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_record_survives_its_file(
    subject: Subject, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A record comes back from its file as it was, tiles, backlog and provenance."""
    record = subject.records[name]
    back = Record.load(record.save(tmp_path_factory.mktemp("records") / "one.npz"))
    assert to_plain(back.summary) == to_plain(record.summary)
    assert back.parameters == to_plain(record.parameters)
    assert back.provenance == to_plain(record.provenance)
    for ours, theirs in ((back.tiles, record.tiles), (back.backlog, record.backlog)):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.tobytes() == theirs.tobytes()


def test_a_seed_repeats_what_is_random(subject: Subject) -> None:
    """Where times are not live, the same seed gives the same times and another seed others."""
    requires(subject, times=True)
    if subject.device.badge == "LIVE":
        pytest.skip("live times never repeat")
    program = subject.programs["gemm"]
    once, again, other = (subject.device.measure(program, seed).summary for seed in (1, 1, 2))
    assert to_plain(once) == to_plain(again)
    assert to_plain(once) != to_plain(other)


def unseen(machine: MachineSpec) -> Program:
    return build(BurstTrain(n_producers=1, burst_bytes=784, gap_s=0.0, n_bursts=3), machine)


def test_any_program_runs(subject: Subject) -> None:
    """A device that says so runs a program that it never saw."""
    requires(subject, any_program=True)
    record = subject.device.measure(unseen(subject.device.machine))
    assert record.parameters["burst_bytes"] == 784


def test_a_program_nobody_recorded_is_refused(subject: Subject) -> None:
    """A device that only remembers refuses what it does not know, naming the nearest run."""
    requires(subject, any_program=False)
    with pytest.raises(NotMeasured, match="nearest"):
        subject.device.measure(unseen(subject.device.machine))


@pytest.mark.parametrize("what", ["n_ctas", "n_gpus"])
def test_a_program_too_large_is_refused(subject: Subject, what: str) -> None:
    """A program with more CTAs or GPUs than the device has is refused, not clamped or made up."""
    machine = subject.device.machine
    larger = dataclasses.replace(machine, n_sms=machine.n_sms + 1, max_gpus=machine.max_gpus + 1)
    n_gpus = larger.max_gpus if what == "n_gpus" else 2
    k = larger.n_sms if what == "n_ctas" else 1
    train = BurstTrain(n_producers=k, burst_bytes=64, gap_s=0.0, n_bursts=2, n_gpus=n_gpus)
    with pytest.raises(XStageError):
        subject.device.measure(build(train, larger))
