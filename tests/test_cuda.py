"""The cuda device up to what CUDA itself does: on emulated GPUs, and its arithmetic by itself.

No GPU is needed and nothing is timed: what runs here are the kernels built for the CPU, called with
the argument pointers, addresses and memory that the device would give to the driver.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_cuda
import numpy as np
import pytest
from emulated_cuda import EmulatedCuda
from fake_device import FakeDevice
from fake_device import programs as fake_programs
from hypothesis import given
from hypothesis import strategies as st

from xstage_lab import analysis, catalog, experiment
from xstage_lab import worker as worker_module
from xstage_lab.devices import cuda_gpus, cuda_launch, cuda_peers
from xstage_lab.devices.base import Device
from xstage_lab.devices.cuda import CudaDevice
from xstage_lab.devices.cuda_bursts import Route, addresses, alone_bytes, ranks, slots_of
from xstage_lab.devices.cuda_clock import Anchors, seconds
from xstage_lab.devices.cuda_tiles import TileJob, boxes_of
from xstage_lab.devices.tile_checks import random_inputs, shapes_of
from xstage_lab.errors import (
    DeviceLost,
    DeviceUnavailable,
    Infeasible,
    InvalidValue,
    UnknownName,
    WorkerFailed,
    XStageError,
)
from xstage_lab.kernels.failures import KernelFailed
from xstage_lab.record import Record
from xstage_lab.reference import WrongResult
from xstage_lab.schedule import LINEAR_1, LINEAR_2, build
from xstage_lab.spec import BurstTrain, FusedGemm, MoELayer, Tuning, Workload
from xstage_lab.worker import Worker

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
TILE = Tuning(tile_m=64, tile_n=64, tile_k=32, n_stages=2)
Install = Callable[..., EmulatedCuda]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put emulated GPUs in the place of CUDA."""
    return lambda n_gpus=1: emulated_cuda.install(monkeypatch, n_gpus)


def train(n_gpus: int = 2, **changes: Any) -> BurstTrain:
    return BurstTrain(**{"n_producers": 4, "burst_bytes": 1040, "gap_s": 2e-6, "n_bursts": 9,
                         "n_gpus": n_gpus} | changes)


def gemm(n_gpus: int = 2, **changes: Any) -> FusedGemm:
    return FusedGemm(**{"m": 150, "n": 120, "k": 70, "n_gpus": n_gpus} | changes)


def moe(**changes: Any) -> MoELayer:
    return MoELayer(**{"tokens": 50, "hidden": 88, "intermediate": 40, "experts": 4, "top_k": 2,
                       "n_gpus": 2, "dtype": "bf16"} | changes)  # ragged everywhere


def run(device: Device, workload: BurstTrain | FusedGemm | MoELayer,
        stores: str = "remote") -> Record:
    tuning = None if isinstance(workload, BurstTrain) else TILE
    return device.measure(build(workload, device.machine, tuning, stores), seed=3)


# ---- The whole device on emulated GPUs ---------------------------------------------------------

@needs_gxx
@pytest.mark.parametrize("stores", ["remote", "local"])
@pytest.mark.parametrize("sync", ["free", "lockstep"])
@pytest.mark.parametrize("store_path", ["registers", "bulk"])
@pytest.mark.parametrize(("n_gpus", "destination"), [(1, "host"), (1, "local"), (3, "peer")])
def test_bursts_arrive_where_they_belong(
    install: Install, n_gpus: int, destination: str, store_path: str, sync: str, stores: str
) -> None:
    """Every burst lies at its owner's memory, whichever that is, and its record is whole."""
    install(n_gpus)
    device = CudaDevice(destination=destination, store_path=store_path)
    record = run(device, train(3, sync=sync), stores)
    n_run = 3 if destination == "peer" else 1
    assert record.provenance["n_gpus_run"] == n_run
    assert record.tiles.size == n_run * 4 * 9
    assert record.summary["total_s"] >= record.summary["accepted_s"] > 0
    assert np.isfinite(record.tiles["arrived_s"]).sum() == 4 * n_run  # behind the last bursts
    bursts = record.tiles[record.tiles["gpu"] == 0].reshape(9, 4)
    gaps = bursts["issue_start_s"][1:] - bursts["issue_end_s"][:-1]
    assert (gaps >= 2e-6 - 1e-12).all()  # in seconds, by the clock that was measured
    assert record.provenance["gap_achieved_s"] >= 2e-6


@needs_gxx
@pytest.mark.parametrize("stores", ["remote", "local", "off"])
@pytest.mark.parametrize("signal", ["none", "release", "fence"])
@pytest.mark.parametrize(("n_gpus", "destination"), [(1, "host"), (1, "local"), (2, "peer")])
def test_tiles_arrive_where_they_belong(
    install: Install, n_gpus: int, destination: str, signal: str, stores: str
) -> None:
    """Every tile of a GEMM is right at its owner, and its times are in order."""
    install(n_gpus)
    device = CudaDevice(destination=destination, signal=signal)
    record = run(device, gemm(), stores)
    tiles = record.tiles
    for before, after in itertools.pairwise(
            ("mma_start_s", "mma_end_s", "issue_start_s", "issue_end_s")):
        assert (tiles[before] <= tiles[after]).all()
    seen = np.isfinite(tiles["arrived_s"])
    assert seen.all() == (signal == "fence" and stores != "off")
    assert (tiles["arrived_s"] >= tiles["issue_end_s"])[seen].all()
    assert ("signal_s" in record.summary) == (signal != "none")
    expected = 2 if destination == "peer" else 1
    assert len(np.unique(tiles["gpu"])) == record.provenance["n_gpus_run"] == expected


@needs_gxx
@pytest.mark.parametrize("order", ["wave", "interleaved"])
@pytest.mark.parametrize("store_path", ["registers", "bulk"])
@pytest.mark.parametrize(("n_gpus", "destination", "routing"), [
    (1, "host", "balanced"), (2, "peer", "zipf:0.7"), (2, "peer", (100, 100, 0, 0))])
def test_both_layers_of_an_moe_layer_are_right(
    install: Install, n_gpus: int, destination: str, routing: Any, store_path: str, order: str
) -> None:
    """Both layers are right in either order, GPUs may be idle, and Linear-2 starts after what
    feeds it; bytes are those that the kernel stores."""
    install(n_gpus)
    device = CudaDevice(destination=destination, store_path=store_path, signal="fence")
    layer = moe(order=order, routing=routing)
    record = run(device, layer)
    assert (record.parameters["order"], record.provenance["n_gpus_run"]) == (order, n_gpus)
    assert record.summary["signal_s"] > 0
    assert "Linear-1 is stored whole" in record.provenance["activation"]
    for gpu, rows in enumerate(build(layer, device.machine, TILE).tasks[:n_gpus]):
        tiles = record.tiles[record.tiles["gpu"] == gpu]
        assert (tiles["store_bytes"] == 2 * rows["m"] * rows["n"]).all()
        for second in np.flatnonzero(rows["kind"] == LINEAR_2):
            fed_by = rows["signals"] == rows["waits_for"][second]
            assert (tiles["mma_start_s"][second] > tiles["issue_end_s"][fed_by]).all()


@needs_gxx
@pytest.mark.parametrize(("layer", "kind"), [(0, LINEAR_1), (3, LINEAR_2)])
def test_a_changed_operand_of_either_layer_is_caught(
    install: Install, monkeypatch: pytest.MonkeyPatch, layer: int, kind: int
) -> None:
    """A weight that is not what the GPU has got fails the check of its own layer's tiles."""
    place = TileJob._place

    def damage(job: TileJob, i: int) -> Any:
        placed = place(job, i)
        job.inputs[i][layer].b[0, :8] ^= 0x8000  # signs
        return placed

    install()
    device = CudaDevice(destination="host")
    monkeypatch.setattr(TileJob, "_place", damage)
    with pytest.raises(WrongResult, match="GPU 0, tile in row") as caught:
        run(device, moe())
    row = int(re.findall(r"row (\d+)", str(caught.value))[0])
    assert build(moe(), device.machine, TILE).tasks[0]["kind"][row] == kind


def test_without_stores_linear_2_has_inputs_of_its_own() -> None:
    """What stores nothing feeds nothing: Linear-2 multiplies random values, not poison."""
    for stores, fed in (("remote", [0, 1]), ("local", [0, 1]), ("off", [0, 0])):
        [inputs] = random_inputs([shapes_of(moe(experts=2), 0, stores)], "bf16", 0)
        assert [each.a is None for each in inputs] == fed


@needs_gxx
def test_linear_2_that_does_not_wait_is_caught(install: Install) -> None:
    """Linear-2 that comes before what feeds it multiplies poison, and is found out."""
    install()
    device = CudaDevice(destination="host")
    program = build(moe(order="interleaved"), device.machine, TILE)
    hasty = tuple(rows[::-1].copy() for rows in program.tasks)
    for rows in hasty:
        rows["waits_for"], rows["wait_count"] = -1, 0
    with pytest.raises(WrongResult, match="NaN"):
        device.measure(dataclasses.replace(program, tasks=hasty))


@needs_gxx
def test_an_moe_layer_is_predicted_as_on_any_device(install: Install) -> None:
    """Compute time with stores off, prediction and comparison take the same calls as elsewhere."""
    install()
    device = CudaDevice(destination="host")
    calibration = analysis.published(catalog.with_assumptions(catalog.machine("B200-SXM")))
    t_mma_s = analysis.measure_t_mma(device, moe(), TILE, seed=3)
    prediction = analysis.predict(moe(), device.machine, calibration, TILE, t_mma_s)
    found = analysis.compare(prediction, run(device, moe()))
    assert prediction.t_mma_source == "measured"
    assert np.isfinite(found.error_ratio["accepted_s"])
    assert run(device, moe(), "local").summary["remote_bytes"] == 0


@needs_gxx
def test_a_program_runs_again_and_another_after_it(install: Install) -> None:
    """Buffers that are kept, too large or too small for the next program, do no harm."""
    device = (install(), CudaDevice(destination="host"))[1]
    for workload in (gemm(), gemm(3), moe(), train(2), gemm(k=40), train(4, n_bursts=3), gemm(),
                     moe(order="interleaved"), moe(experts=2)):
        assert run(device, workload).summary["accepted_s"] > 0


@needs_gxx
def test_a_small_change_in_the_kernel_is_caught(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wrong kernel leaves fails the check before anything is timed."""
    emulated = install()
    right = emulated.compile_kernel

    def compile_wrong(source: Any, arch: str) -> Any:
        if source.name == "fused_tiles":
            source = source.replace("row < task.m && column < row_bytes",
                                    "row < task.m - 1 && column < row_bytes")
        return right(source, arch)

    monkeypatch.setattr(cuda_launch, "compile_kernel", compile_wrong)
    with pytest.raises(WrongResult, match=r"GPU 0, tile in row .* is NaN"):
        run(CudaDevice(destination="host"), gemm())


@needs_gxx
def test_provenance_says_what_ran(install: Install) -> None:
    """A record names GPU, driver, clock, kernel, path, signal, and what stood for the others."""
    install()
    said = run(CudaDevice(destination="host", signal="release"), gemm()).provenance
    assert said["badge"] == "LIVE"
    assert said["machine"] == "Emulated to host memory (this computer)"
    assert "host memory, which stands for the other GPUs" in said["source"]
    assert (said["destination"], said["store_path"], said["signal"]) == (
        "host", "registers", "release")
    assert said["clock_hz"] > 0
    assert {"gpu", "arch", "cuda_driver", "cuda_runtime", "cupy", "nvrtc", "kernel", "sms",
            "n_registers", "clock_over_s", "left_out"} <= set(said)


# ---- What is missing, and what does not fit ----------------------------------------------------

def test_without_cupy_or_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CuPy, the driver or a GPU is missing the device says which, and the way out."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailable, match=r"CuPy cannot be imported.*pip install"):
        CudaDevice()
    emulated = emulated_cuda.install(monkeypatch, 0)
    with pytest.raises(DeviceUnavailable, match=r"the driver shows none.*CUDA_VISIBLE_DEVICES"):
        CudaDevice()
    emulated.failing, emulated.status = "getDeviceCount", 35
    with pytest.raises(DeviceUnavailable, match=r"CuPy finds none \(cudaError 35.*nvidia-smi"):
        CudaDevice()


def test_importing_it_needs_no_cupy() -> None:
    """The device's modules, and what records, load without CuPy, Bokeh, widgets or plots."""
    code = ("import sys\n"
            "for name in ('cupy', 'bokeh', 'ipywidgets', 'matplotlib', 'jupyter_bokeh', 'torch'):\n"
            "    sys.modules[name] = None\n"
            "import xstage_lab.recording_cuda, xstage_lab.command, xstage_lab.devices.cuda\n"
            "from xstage_lab.__main__ import main\n"
            "raise SystemExit(main(['measure', '--device', 'cuda:host']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=Path(__file__).parents[1])
    assert done.returncode == 2
    assert "CuPy cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("attributes", "options", "told"), [
    ({75: 7}, {}, "compute capability 7.0; the kernels are made for 8.x, 9.0 and 10.0"),
    ({75: 12}, {}, "compute capability 12.0"),
    ({95: 0}, {}, "cannot launch cooperatively"),
    ({19: 0}, {"destination": "host"}, "does not map host memory.*local"),
    ({75: 8}, {"store_path": "bulk"}, "store_path = 'bulk'.*registers on Emulated.*9.0"),
    ({}, {"destination": "peer"}, "No two GPUs.*one GPU only.*host"),
    ({}, {"destination": "nvlink"}, "destination 'nvlink'.*peer"),
    ({}, {"store_path": "tma"}, "store_path 'tma'.*registers"),
    ({}, {"signal": "flag"}, "signal 'flag'.*release"),
])
def test_what_a_gpu_cannot_do_is_refused(
    install: Install, attributes: dict[int, int], options: dict[str, str], told: str
) -> None:
    """A GPU or an option that the kernels do not suit is refused at construction, with why."""
    install().attributes.update(attributes)
    with pytest.raises((DeviceUnavailable, InvalidValue, UnknownName), match=told):
        CudaDevice(**options)


@needs_gxx
@pytest.mark.parametrize(("workload", "tuning", "told"), [
    (train(burst_bytes=24), None, "burst_bytes = 24 B.*multiples of 16"),
    (gemm(dtype="fp8"), TILE, "dtype = 'fp8'.*bf16"),
    (gemm(), Tuning(tile_m=32, tile_n=64), "tile_m = 32.*64 or 128 or 256"),
    (gemm(), Tuning(tile_m=256, tile_n=128, issue_depth=3, n_stages=2),
     "KiB of shared memory per CTA.*allows 227 KiB"),
    (moe(dtype="fp8"), TILE, "dtype = 'fp8'.*bf16"),
    (moe(out_dtype="fp32"), TILE, "Linear-2 multiplies bf16"),
    (moe(experts=18), TILE, "9 experts on a GPU need 18 sets of operands; the kernel takes 16"),
    (moe(tokens=2**18, hidden=4096), TILE, "operands and results take .* has 2,048 MiB"),
    (moe(routing=(20, 20, 80, 80)), TILE, "GPU 0 runs alone.* 40 rows where GPU 1 has 160"),
    (catalog.attention("Wan2-14B-480p", n_gpus=2), None, "does not run UlyssesAttention.*MoE"),
    (train(n_producers=4, burst_bytes=2**30), None, "MiB of memory left.*smaller workload"),
])
def test_what_the_kernel_does_not_take_is_refused(
    install: Install, workload: Workload, tuning: Tuning | None, told: str
) -> None:
    """A burst, dtype, tile or size that does not fit is refused with the limit."""
    install()
    device = CudaDevice(destination="host")
    with pytest.raises((InvalidValue, Infeasible), match=told):
        device.measure(build(workload, device.machine, tuning))


@needs_gxx
def test_a_grid_over_the_resident_limit_is_an_error(install: Install) -> None:
    """K used is K asked for: CTAs that cannot all be resident are refused, not cut down."""
    emulated = install()
    emulated.do_occupancyMaxActiveBlocksPerMultiprocessor = (  # type: ignore[method-assign]
        lambda *_: 0)
    with pytest.raises(Infeasible, match=r"n_ctas = 4 CTAs do not fit on GPU 0 .* at the same "
                                         r"time; it holds 0 with .* fewer CTAs"):
        run(CudaDevice(destination="host"), train())


@needs_gxx
def test_gpus_and_ctas_that_are_not_there_are_refused(install: Install) -> None:
    """More CTAs than SMs, or more GPUs than reach each other, are refused with the reason."""
    emulated = install(3)
    emulated.apart = {(0, 2), (1, 2)}
    device = CudaDevice(destination="peer")
    assert device.machine.max_gpus == 2
    larger = build(train(3), cuda_gpus.machine_of([device._gpus[0].facts] * 3, "peer"))
    with pytest.raises(InvalidValue, match=r"n_gpus = 3.*GPU 0 and GPU 2 have no path"):
        device.measure(larger)


# ---- Peers -------------------------------------------------------------------------------------

@needs_gxx
def test_access_is_enabled_both_ways_between_all_pairs(install: Install) -> None:
    """Every GPU may reach every other before anything runs, also where access was enabled."""
    emulated = install(3)
    emulated.enabled.append((1, 0))
    CudaDevice(destination="peer")
    assert set(emulated.enabled) == set(itertools.permutations(range(3), 2))


@needs_gxx
def test_a_pair_that_damages_data_is_left_out(install: Install) -> None:
    """Stores that arrive damaged are found by a pattern, and the pair is left out by name."""
    emulated = install(3)
    emulated.damaged = {(2, 1)}
    device = CudaDevice(destination="peer")
    assert [gpu.facts.number for gpu in device._gpus] == [0, 1]
    assert len(device.left_out) == 1
    assert "GPU 2 (Emulated) stores to GPU 1 (Emulated) does not arrive" in device.left_out[0]
    assert "CTA 0, burst 0: word" in device.left_out[0]


@needs_gxx
def test_pairs_without_a_path_are_named(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no pair is left the device says which pairs there are, why, and what works instead."""
    install(2).apart = {(0, 1)}
    with pytest.raises(DeviceUnavailable, match=r"GPU 0 and GPU 1 have no path.*host gives"):
        CudaDevice(destination="peer")
    install(2)
    monkeypatch.setattr(cuda_gpus, "_p2p_attribute", lambda *_: 0)
    with pytest.raises(DeviceUnavailable, match=r"GPU 0 and GPU 1 are connected by PCIe, which "
                                                r"carries no atomic.*host link"):
        CudaDevice(destination="peer")
    install(2).names[1] = "NVIDIA Other"
    with pytest.raises(DeviceUnavailable, match=r"GPU 1 \(Other\) are of different kinds"):
        CudaDevice(destination="peer")


@given(n_gpus=st.integers(0, 7), data=st.data())
def test_the_largest_group_without_a_broken_pair(n_gpus: int, data: st.DataObject) -> None:
    """The group chosen has no broken pair, and every larger one has."""
    pairs = list(itertools.combinations(range(n_gpus), 2))
    broken = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    chosen = cuda_peers.largest_group(n_gpus, broken)

    def works(group: tuple[int, ...]) -> bool:
        return not broken & set(itertools.combinations(group, 2))

    assert works(chosen)
    if n_gpus:
        assert not any(works(group) for group in
                       itertools.combinations(range(n_gpus), len(chosen) + 1))


# ---- Hangs, stops and lost devices -------------------------------------------------------------

def hang(source: Any) -> Any:
    """Make a CTA forget to say that it is there."""
    return source.replace("        red_release_sys(started, 1);\n",
                          "        if (cta != 1) red_release_sys(started, 1);\n")


@pytest.fixture
def hanging(install: Install, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], CudaDevice]:
    """Make a device whose bursts wait for a CTA that never comes."""
    def make(budget_s: float) -> CudaDevice:
        emulated = install()
        right = emulated.compile_kernel
        device = CudaDevice(destination="host")
        monkeypatch.setattr(cuda_launch, "compile_kernel",
                            lambda source, arch: right(hang(source), arch))
        monkeypatch.setattr("xstage_lab.devices.cuda_bursts.BUDGET_S", budget_s)
        return device
    return make


@needs_gxx
def test_a_wait_in_vain_ends_by_its_budget(hanging: Callable[[float], CudaDevice]) -> None:
    """A CTA that is waited for in vain ends the run after the budget, with who waited."""
    with pytest.raises(KernelFailed, match=r"GPU 0 \(Emulated\): CTA .* waited for all CTAs of all "
                                           r"GPUs to start: it saw 3 and needs 4; its cycle"):
        run(hanging(1e-4), train())


@needs_gxx
def test_abort_ends_a_run_that_waits(hanging: Callable[[float], CudaDevice]) -> None:
    """The abort flag ends a run that would wait for very long, and the device lives on."""
    device = hanging(1e6)
    timer = threading.Timer(0.5, device.abort)
    timer.start()
    with pytest.raises(WorkerFailed, match="ended by its abort flag"):
        run(device, train())
    timer.join()


@needs_gxx
def test_a_run_after_an_abort_is_whole(install: Install) -> None:
    """An abort that comes between runs does not end the next one."""
    install()
    device = CudaDevice(destination="host")
    device.abort()
    assert run(device, train()).summary["accepted_s"] > 0


@needs_gxx
def test_an_overdue_kernel_is_ended(
    hanging: Callable[[float], CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that runs longer than every wait allows is ended by the abort flag and named."""
    device = hanging(1e6)
    monkeypatch.setattr(cuda_launch, "BUDGET_S", 0.2)
    monkeypatch.setattr(cuda_launch, "GRACE_S", 0.3)
    with pytest.raises(KernelFailed, match=r"ran for more than 0.5 s and was ended"):
        run(device, train())


@needs_gxx
@pytest.mark.parametrize("call", ["launchCooperativeKernel", "deviceSynchronize", "memcpy"])
def test_an_error_of_cuda_loses_the_device(install: Install, call: str) -> None:
    """Whatever CUDA raises in a measurement is told in words, and that the process is done for."""
    emulated = install()
    device = CudaDevice(destination="host")
    run(device, train())
    emulated.failing, emulated.status = call, emulated_cuda.ILLEGAL_ADDRESS
    with pytest.raises(DeviceLost, match=r"measuring BurstTrain \(cudaError 700.*new one.*Xid"):
        run(device, train())


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    """Make workers that end with the test."""
    made: list[Worker] = []

    def make(*arguments: Any) -> Worker:
        made.append(Worker(functools.partial(FakeDevice, *arguments)))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def test_a_worker_ends_with_its_lost_device(make_worker: Callable[..., Worker]) -> None:
    """A lost device is told in its own words, its process ends, and the next point works."""
    worker = make_worker(2, "lost")
    first, bad, _ = fake_programs(3)
    before = worker.measure(first).provenance["pid"]
    with pytest.raises(DeviceLost, match="the device is lost"):
        worker.measure(bad)
    assert worker.pid is None
    assert worker.measure(first).provenance["pid"] != before


def test_stop_aborts_what_the_device_runs(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stop reaches a device that can end its run, so that its process need not be ended."""
    monkeypatch.setattr(worker_module, "STOP_GRACE_S", 30.0)
    log, stopping = tmp_path / "log", threading.Event()
    worker = make_worker(2, "wait", str(log))
    seen: list[Any] = []

    def measure() -> None:
        experiment.deliver(experiment.run(worker, fake_programs(3), stop=stopping.is_set),
                           seen.append, seen.append)

    thread = threading.Thread(target=measure)
    thread.start()
    deadline = time.monotonic() + 60.0
    while not (log.exists() and log.read_text().count("\n") == 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = worker.pid
    stopping.set()
    worker.stop()
    thread.join(25.0)
    assert not thread.is_alive()
    assert [each.summary["total_s"] if isinstance(each, Record) else each for each in seen] == [
        1.0, None]
    assert worker.pid == pid


# ---- Its arithmetic ----------------------------------------------------------------------------

@given(st.data())
def test_clocks_are_aligned(data: st.DataObject) -> None:
    """SMs that count from anywhere at one rate, read at steps of a timer, tell the true times."""
    n, hz = data.draw(st.integers(1, 40)), data.draw(st.sampled_from((1.2e9, 1.98e9)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    offset = rng.integers(0, 2**50, n)
    start_ns = 10**18 + 1024 * rng.integers(0, 20, n)
    end_ns = start_ns + 1024 * rng.integers(500, 5000, n)

    def count(ns: Any) -> Any:
        return offset + np.rint((ns - 10**18) * 1e-9 * hz).astype(np.int64)

    late = rng.integers(0, 50, n)  # cycles from the step to the reading
    anchors = Anchors(start_ns, count(start_ns) + late, end_ns, count(end_ns) + late)
    assert anchors.clock_hz == pytest.approx(hz, rel=1e-5)
    true_ns = 10**18 + 1024 * rng.integers(0, 500, (n, 3))
    cycles = offset[:, None] + np.rint((true_ns - 10**18) * 1e-9 * hz).astype(np.int64)
    told = seconds(cycles, anchors, anchors.clock_hz)
    truth = (true_ns - start_ns.min()) * 1e-9
    assert np.abs(told - truth).max() < 60 / hz + 5e-9


def test_a_timer_that_stands_still_is_told() -> None:
    """Without a moving timer there is no rate, and it says so instead of dividing by zero."""
    zero = np.zeros(3, np.int64)
    with pytest.raises(XStageError, match="global timer did not move"):
        _ = Anchors(zero, zero, zero, zero + 5).clock_hz


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 10**6))
def test_ctas_of_an_owner_lie_side_by_side(owners: list[int], cta_bytes: int) -> None:
    """With the offset that the kernel adds, an owner's CTAs fill its memory without gap or
    overlap."""
    given_owners = np.array(owners)

    class At:
        def __init__(self, address: int) -> None:
            self.address = address

    regions: Any = [At(2**40 * (i + 1)) for i in range(5)]
    told = addresses(Route([], given_owners), regions, cta_bytes)
    kernel = told + np.arange(len(owners), dtype=np.uint64) * np.uint64(cta_bytes)
    for owner in set(owners):
        mine = np.sort(kernel[given_owners == owner]).astype(object)
        wanted = [2**40 * (owner + 1) + i * cta_bytes for i in range(len(mine))]
        assert list(mine) == wanted
    assert (ranks(given_owners) >= 0).all()


@given(k=st.integers(1, 148), burst=st.integers(1, 2**16), n=st.integers(1, 10**4))
def test_slots_stay_in_memory(k: int, burst: int, n: int) -> None:
    """Register stores use slots again to stay in memory; bulk copies have one each, or none."""
    asked = BurstTrain(n_producers=k, burst_bytes=16 * burst, gap_s=0.0, n_bursts=n)
    slots = slots_of(asked, "registers")
    assert 1 <= slots <= n
    assert slots == 1 or slots * asked.volume_bytes <= 2**28
    if n * asked.volume_bytes > 2**32:
        with pytest.raises(Infeasible, match="bulk copies may leave"):
            slots_of(asked, "bulk")
    else:
        assert slots_of(asked, "bulk") == n


@given(smem_kib=st.integers(48, 512), reserved_kib=st.integers(0, 4))
def test_a_producer_has_its_sm_alone(smem_kib: int, reserved_kib: int) -> None:
    """With the shared memory that bursts ask for no two CTAs fit on an SM, and one does."""
    facts = cuda_gpus.GpuFacts(**dict.fromkeys(cuda_gpus.GpuFacts._fields, 0) | {  # type: ignore
        "smem_per_sm_bytes": smem_kib * 1024,
        "smem_per_cta_bytes": (smem_kib - reserved_kib) * 1024})
    asked = alone_bytes(facts)
    assert 2 * asked > smem_kib * 1024 or asked == facts.smem_per_cta_bytes
    assert asked <= facts.smem_per_cta_bytes


def test_outputs_are_told_apart_by_place() -> None:
    """A GPU's own tiles have an output apart, and owners share one only where they share memory."""
    one, other = object(), object()
    places: Any = [one, other, other]
    assert boxes_of(places, 0) == [0, 1, 1]
    assert boxes_of([one, one, one], 0) == [0, 1, 1]  # type: ignore[list-item]
    assert boxes_of([one, other, object()], 1) == [0, 1, 2]  # type: ignore[list-item]


def test_what_it_says_of_the_machine(install: Install) -> None:
    """The machine is what CUDA says, its store path unknown, its FLOP rate the vendor's."""
    install()
    facts = cuda_gpus.gpus(cuda_gpus.load_cuda())
    for destination, name in (("host", "Emulated to host memory (this computer)"),
                              ("local", "Emulated to its own memory (this computer)"),
                              ("peer", "1 x Emulated (this computer)")):
        machine = cuda_gpus.machine_of(facts, destination)
        assert (machine.name, machine.n_sms) == (name, 4)
        assert machine.smem_per_cta_bytes == 227 * 1024
        assert machine.bf16_flop_per_s == 4096 * 4 * 1e9
        assert machine.assumed == {"bf16_flop_per_s"}
        assert machine.hbm_bytes_per_s == 2 * 1e9 * 8
        assert np.isnan(machine.link.egress_bytes_per_s)


def test_every_architecture_has_kernels() -> None:
    """A compute capability gets the architecture whose code it runs, or none."""
    def arch(major: int, minor: int) -> str:
        facts = dict.fromkeys(cuda_gpus.GpuFacts._fields, 0) | {"capability": (major, minor)}
        return cuda_gpus.GpuFacts(**facts).arch  # type: ignore[arg-type]

    assert [arch(*cc) for cc in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))] == [
        "sm_80", "sm_80", "sm_80", "sm_90a", "sm_100a"]
    assert [arch(*cc) for cc in ((7, 5), (10, 3), (12, 0))] == ["", "", ""]


def test_the_emulator_takes_what_cupy_takes() -> None:
    """Every call that is emulated exists in CuPy, with as many arguments."""
    cupy_cuda = pytest.importorskip("cupy").cuda
    for name in (n for n in dir(EmulatedCuda) if n.startswith("do_")):
        call = name.removeprefix("do_")
        real = getattr(cupy_cuda.runtime, call, None) or getattr(cupy_cuda.driver, call)
        declared = re.match(rf"{call}\(([^)]*)\)", real.__doc__ or "")
        assert declared is not None
        n_wanted = len([each for each in declared.group(1).split(",") if each.strip()])
        ours = inspect.signature(getattr(EmulatedCuda, name)).parameters
        assert len(ours) - 1 == n_wanted, call
