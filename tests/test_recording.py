"""The one command for a machine: what it keeps, also when cut short, opens everywhere."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import emulated_cuda
import pytest
from fake_device import FakeDevice
from strategies import machine_of

from xstage_lab import catalog, recording, recording_cuda
from xstage_lab import recording_plan as plan
from xstage_lab.__main__ import main
from xstage_lab.analysis import Calibration, compare, predict, protocol
from xstage_lab.devices.cuda import CudaDevice
from xstage_lab.devices.recorded import RecordedDevice
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import FileRejected, InvalidValue, NotMeasured
from xstage_lab.kernels.fused_tiles import TILE_DEPTHS, TILE_SIZES
from xstage_lab.lab import BurstGap, MoESchedule, Tune
from xstage_lab.lab.device import live_machines, not_offered
from xstage_lab.lab.panel import Panel
from xstage_lab.record import Record
from xstage_lab.recording import Recording, Target, machine_file, median_size, table
from xstage_lab.recording_checks import cases, check, sources
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain, FusedGemm, MachineSpec, Tuning

MACHINE = """machine,sms,max_gpus,topology,smem_per_cta_kib,bf16_tflops_measured,link,\
store_gb_per_s_measured,per_sm_gb_per_s,issue_latency_us,path_capacity_mib,source
small,12,4,switch,227,100,test link,50,20,0.1,0.5,a test
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a small simulated machine, by the command line."""
    where = tmp_path_factory.mktemp("recording")
    (where / "small.csv").write_text(MACHINE)
    command = [sys.executable, "-m", "xstage_lab", "record", "--device", "simulated", "--machine",
               str(where / "small.csv"), "--minutes", "5", "--out", str(where / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (where / "out" / "printed.txt").write_text(done.stdout)
    return where / "out"


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return found


def machine_in(folder: Path) -> MachineSpec:
    return catalog.with_assumptions(catalog.machine(str(folder / "machines.csv")))


def test_every_record_is_a_file_and_every_file_is_in_the_index(folder: Path) -> None:
    """The folder holds each record the index names and no other, all of them whole."""
    named = [point["file"] for point in index_of(folder)["points"]]
    assert sorted(named) == sorted(path.name for path in folder.glob("*.npz"))
    assert len(set(named)) == len(named)
    parts = {point["part"] for point in index_of(folder)["points"]}
    assert parts == {"calibration", "compute", "gap", "producers", "k", "tiles", "gpus"}
    for name in named:
        assert Record.load(folder / name).provenance["machine"] == "small"


def test_each_point_has_both_sides(folder: Path) -> None:
    """Swept points carry what was measured, what the law says, and the refuted form beside it."""
    points = [p for p in index_of(folder)["points"] if "predicted_s" in p]
    assert len(points) > 30
    for point in points:
        measured = Record.load(folder / point["file"]).summary["accepted_s"]
        assert point["accepted_s"] == measured
        assert point["error_ratio"] == pytest.approx(point["predicted_s"] / measured - 1)
        assert point["coupled_error_ratio"] == pytest.approx(point["coupled_s"] / measured - 1)
        assert point["coupled_s"] >= measured * 0.98  # waiting for completion is never faster
    assert index_of(folder)["judgement"]["simulated"]["explained"]


def test_the_table_is_printed_last(folder: Path) -> None:
    """The command ends with the calibration, a line for each sweep and the verdict."""
    lines = (folder / "printed.txt").read_text().splitlines()
    assert lines[0] == "simulated (SIMULATED, small)"
    assert any("R 50 GB/s" in line for line in lines)
    for part in ("gap", "producers", "k", "tiles", "gpus"):
        assert any(line.split()[0] == part and "completion-coupled" in line for line in lines[1:])
    assert "All of it is in" in lines[-1]
    assert lines[:-1] == table(index_of(folder))


def test_the_machine_file_is_the_machine_as_calibrated(folder: Path) -> None:
    """The machine that is written down has the store path that was measured."""
    machine, cal = machine_in(folder), Calibration.load(folder / "calibration-simulated.json")
    assert (machine.name, machine.n_sms, machine.max_gpus) == ("small", 12, 4)
    assert machine.link.egress_bytes_per_s == pytest.approx(cal.drain_bytes_per_s)
    assert machine.link.path_capacity_bytes == pytest.approx(cal.capacity_bytes)
    assert machine.link.per_sm_bytes_per_s == pytest.approx(cal.per_sm_bytes_per_s)
    assert machine.link.issue_latency_s == pytest.approx(cal.issue_latency_s)
    assert machine.bf16_flop_per_s == pytest.approx(100e12)


def test_it_replays(folder: Path) -> None:
    """Every swept program comes back from the recorded device, and nothing that was not run."""
    machine = machine_in(folder)
    device = RecordedDevice(folder, machine)
    cal = Calibration.load(folder / "calibration-simulated.json")
    n_replayed = 0
    for step in (*plan.gap_sweep(machine, cal), *plan.producer_sweep(machine, cal)):
        record = device.measure(build(step.workload, machine, step.tuning), seed=1)
        assert record.provenance["badge"] == "SIMULATED"
        found = compare(predict(step.workload, machine, cal, step.tuning), record)
        assert abs(found.error_ratio["accepted_s"]) < 0.05
        n_replayed += 1
    assert n_replayed > 15
    with pytest.raises(NotMeasured, match="nearest"):
        device.measure(build(BurstTrain(n_producers=1, burst_bytes=48, gap_s=0.0), machine))


def test_it_replays_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded device and the machine file answer for a program of the sweeps."""
    assert main(["measure", "--device", f"recorded:{folder}", "--machine",
                 f"{folder / 'machines.csv'}", "--workload", "burst", "--producers", "12",
                 "--bytes", "32768", "--bursts", "50", "--gap", "0", "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"]["badge"] == "SIMULATED"


# ---- Cut short, or not possible ----------------------------------------------------------------

def test_cut_short_it_keeps_what_it_has(tmp_path: Path) -> None:
    """With hardly any time the calibration is whole, and what was left out is named."""
    made = Recording(tmp_path, 1e-6, lambda _: None)
    target = Target("simulated", partial(SimulatedDevice, machine_of(8)))
    made.calibrate(target)
    made.sweep(target)
    lines = made.finish()
    index = index_of(tmp_path)
    assert "calibration" in index["targets"]["simulated"]
    assert {p["part"] for p in index["points"]} == {"calibration", "compute"}
    for part in ("gap", "producers", "k", "tiles", "gpus"):
        assert "the time was over" in index["not_measured"][f"simulated: {part}"]
        assert any(line.startswith(f"not measured: simulated: {part}: ") for line in lines)


class Interrupting(SimulatedDevice):
    """Behaves as if somebody pressed Ctrl-C after some records."""

    n_left = 5

    def measure(self, program: Any, seed: int | None = None) -> Record:
        Interrupting.n_left -= 1
        if Interrupting.n_left < 0:
            raise KeyboardInterrupt
        return super().measure(program, seed)


def test_stopped_it_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the middle leaves the records so far and an index of them."""
    monkeypatch.setattr(Recording, "worker", lambda self, target: Interrupting(machine_of(8)))
    assert main(["record", "--device", "simulated", "--out", str(tmp_path / "out")]) == 130
    assert "stopped" in capsys.readouterr().err
    index = index_of(tmp_path / "out")
    assert len(index["points"]) == 5
    assert all((tmp_path / "out" / point["file"]).exists() for point in index["points"])


def test_a_device_that_fails_is_noted(tmp_path: Path) -> None:
    """A crash of the measuring process is noted with its words, and the index is written."""
    made = Recording(tmp_path, 1.0, lambda _: None)
    made.calibrate(Target("fake", partial(FakeDevice, 32 * 1024, "exit")))
    made.sweep(Target("fake", FakeDevice))
    made.finish()
    assert "ended before its work did" in index_of(tmp_path)["not_measured"]["fake: calibration"]


@pytest.mark.parametrize(("arguments", "told"), [
    ((), "--out FOLDER"),
    (("--out", "x", "--minutes", "0"), "minutes = 0 min"),
    (("--out", "x", "--minutes", "soon"), "minutes = 'soon'"),
    (("--out", "x", "--device", "recorded:y"), "device 'recorded'"),
    (("--out", "x", "--device", "cuda"), "No GPU is used"),
])
def test_what_cannot_be_recorded_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...], told: str
) -> None:
    """Without a folder, time or device the command says so in a line and makes no folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["record", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A folder that is a file is refused before anything is measured."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FileRejected, match="cannot be written"):
        Recording(tmp_path / "file", 1.0, lambda _: None)
    with pytest.raises(InvalidValue, match="minutes = -1"):
        Recording(tmp_path, -1, lambda _: None)


# ---- The plan ----------------------------------------------------------------------------------

def calibration(**changes: Any) -> Calibration:
    return Calibration(**{
        "name": "c", "device": "d", "machine": "test machine", "badge": "LIVE",
        "issue_latency_s": 0.0, "per_sm_bytes_per_s": 20e9, "drain_bytes_per_s": 55e9,
        "capacity_bytes": 2**20, "n_producers": 132, "burst_bytes": 32768} | changes)


@pytest.mark.parametrize("n_sms", [2, 16, 132, 148])
@pytest.mark.parametrize("drain", [50e6, 55e9, 700e9, 4e12])
def test_sweeps_straddle_the_crossover(n_sms: int, drain: float) -> None:
    """Gaps reach from none to beyond V / R, and k from drained to computed, where limits allow."""
    machine, cal = machine_of(n_sms), calibration(drain_bytes_per_s=drain)
    gaps = [s.workload.gap_s for s in plan.gap_sweep(machine, cal)]  # type: ignore[union-attr]
    drain_s = n_sms * plan.BURST_BYTES / drain
    assert gaps[0] == 0 < drain_s < gaps[-1]
    gemm = plan.balanced_gemm(machine, cal, 400e12)
    assert gemm.k % 64 == 0
    assert plan.MIN_K <= gemm.k <= plan.MAX_K
    n_tiles = gemm.m // 128 * (gemm.n // 128)
    assert plan.TILES_PER_SM * n_sms <= n_tiles <= 1.5 * plan.TILES_PER_SM * n_sms + 2
    ks = [s.workload.k for s in plan.k_sweep(machine, gemm)]  # type: ignore[union-attr]
    assert len(set(ks)) == len(ks)
    assert {s.workload.n_gpus for s in plan.gpu_sweep(machine, gemm)} == set(range(1, 9))


def test_the_machine_file_leaves_unknown_what_is_unknown() -> None:
    """A figure that nobody knows is an empty cell, and a capacity that was not met too."""
    machine = machine_of(4)
    text = machine_file([(machine, calibration(capacity_bytes=math.inf))])
    row = dict(zip(*(line.split(",") for line in text.splitlines()), strict=True))
    assert row["clock_mhz"] == row["l2_mib"] == row["path_capacity_mib"] == ""
    assert row["store_gb_per_s_measured"] == "55.0"


def test_the_median_of_sizes() -> None:
    """Signs and unknown errors do not count, and of two middles the mean does."""
    assert median_size([-0.3, 0.1, math.nan, 0.2]) == pytest.approx(0.2)
    assert median_size([0.1, -0.2]) == pytest.approx(0.15)
    assert math.isnan(median_size([]))


# ---- What GPUs add -----------------------------------------------------------------------------

def test_every_tile_path_and_signal_is_checked() -> None:
    """The checks hold every tile on every path, each depth, dtype and signal, and both trains."""
    every = cases(machine_of(132))
    tiles = {(c.store_path, c.tuning.tile_m, c.tuning.tile_n, c.tuning.tile_k)
             for c in every if c.tuning}
    assert len(tiles) == 2 * (len(TILE_SIZES) ** 2 - 1) * len(TILE_DEPTHS)
    gemms = [c for c in every if isinstance(c.workload, FusedGemm) and c.tuning]
    assert {c.tuning.issue_depth for c in gemms if c.tuning} == {1, 2, 3, 4}
    assert {c.signal for c in gemms} == {"none", "release", "fence"}
    assert {c.workload.out_dtype for c in gemms} == {"bf16", "fp32"}
    assert {c.workload.sync for c in every if isinstance(c.workload, BurstTrain)} == {
        "free", "lockstep"}
    assert len({c.name for c in every}) == len(every) == len(sources(every, 128))
    assert all(c.workload.m % c.tuning.tile_m for c in gemms if c.tuning)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    emulated_cuda.install(monkeypatch)


class InProcess:
    """A worker's face on a device of this process, where the emulated GPUs are."""

    def __init__(self, make: Any) -> None:
        self.use(make)

    def use(self, make: Any) -> None:
        self.device = make()
        self.machine = self.device.machine

    def measure(self, program: Any, seed: int | None = None) -> Record:
        return self.device.measure(program, seed)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def close(self) -> None:
        pass


def test_checks_run_on_the_device(one_gpu: None) -> None:
    """Cases run on a device made for their path and signal; what does not fit is named so."""
    machine = CudaDevice(destination="host").machine
    small = [c for c in cases(machine) if c.tuning is None or (
        c.tuning.tile_m == c.tuning.tile_n == 64)]
    make = partial(recording_cuda._device_maker, "host")
    worker: Any = InProcess(make("registers", "none"))
    large = small[0]._replace(tuning=Tuning(tile_m=256, tile_n=128, issue_depth=4),
                              workload=FusedGemm(m=64, n=64, k=64, n_gpus=2))
    outcomes = list(check(worker, make, [*small, large]))
    assert [o.outcome for o in outcomes] == ["right"] * len(small) + ["not possible"]
    assert "shared memory" in outcomes[-1].words


@pytest.fixture
def small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a recording of GPUs small enough for emulated ones."""
    few = [case for case in cases(machine_of(4)) if case.tuning is None]
    for where, changes in (
        (recording, {"Worker": InProcess, "FIRST_K": 64}),
        (plan, {"TILES_PER_SM": 1, "TILES": ((64, 64),), "DEPTHS": (2,), "N_BURSTS": 8,
                "MAX_K": 64, "K_RATIOS": (1.0,), "BURST_BYTES": 1024}),
        (protocol, {"LARGEST_BURST_BYTES": 2**18, "N_ZERO_GAP_BURSTS": 16}),
        (recording_cuda, {"GEMM_EDGE": 256, "MMA_TILES": ((128, 128),),
                          "cases": lambda *_: few, "compile_all": lambda *_: None}),
    ):
        for name, value in changes.items():
            monkeypatch.setattr(where, name, value)


def test_gpus_are_recorded_from_end_to_end(
    one_gpu: None, small_scale: None, tmp_path: Path
) -> None:
    """Checks, calibrations to both memories, sweeps, paths and what they are held against: all of
    it is run, kept and told, and what a single GPU cannot give is named."""
    said: list[str] = []
    made = Recording(tmp_path, 30.0, said.append)
    recording_cuda.record_gpus(made)
    lines = made.finish()
    index = index_of(tmp_path)
    assert {c["outcome"] for c in index["checks"]} == {"right"}
    assert {(p["target"], p["part"]) for p in index["points"]} >= {
        ("local", "calibration"), ("host", "calibration"), ("local", "mma"), ("host", "gap"),
        ("host", "producers"), ("host", "k"), ("host", "tiles"), ("host", "gpus"),
        ("host", "paths")}
    assert index["targets"]["host"]["machine"] == "Emulated to host memory (this computer)"
    assert len(index["paths"]) == 6
    assert set(index["not_measured"]) == {"peer", "yardsticks"}
    assert "one GPU only" in index["not_measured"]["peer"]
    assert "MMA path: not measured" in lines  # there is no cuBLAS to hold it against
    assert any(line.startswith("host, bulk, signal fence: accepted in") for line in lines)
    assert all(Record.load(path).provenance["device"] == "cuda" for path in tmp_path.glob("*.npz"))
    machine = catalog.machine(f"{tmp_path / 'machines.csv'}:Emulated to host memory "
                              "(this computer)")
    assert len(RecordedDevice(tmp_path, machine).records()) > 60


def test_what_kernels_reach_is_judged_or_not_measured() -> None:
    """Rates are set against what the GPU does without us, and nothing missing passes as good."""
    index = {"targets": {"local": {"drain_bytes_per_s": 4.0e12},
                         "host": {"drain_bytes_per_s": 40e9}}}
    found = {"copy_memory_bytes_per_s": 4.4e12, "pinned_copy_bytes_per_s": 55e9,
             "cublas_flop_per_s": 700e12}
    local, host, mma, law = recording_cuda.judge_gpu(index, found, 400e12, 0.03)
    assert [line["good"] for line in (local, host, mma, law)] == [True, False, True, True]
    assert "4e+03" not in local["words"]
    assert "91% of the 4,400 GB/s that a plain copy reads and writes" in local["words"]
    assert "73% of the 55 GB/s of a pinned copy; at least 90% is wanted" in host["words"]
    nothing = recording_cuda.judge_gpu({"targets": {}}, {}, math.nan, math.nan)
    assert not any(line["good"] for line in nothing)
    assert {line["words"] for line in nothing} == {"not measured"}


# ---- In the panels -----------------------------------------------------------------------------

@pytest.fixture
def close() -> Iterator[list[Panel]]:
    """Close the panels of a test."""
    made: list[Panel] = []
    yield made
    for panel in made:
        panel.close()


def replaying(folder: Path) -> dict[str, Any]:
    return {"machine": str(folder / "machines.csv"), "device": "recorded", "records": str(folder)}


def test_recorded_trains_open_in_the_burst_panel(folder: Path, close: list[Panel]) -> None:
    """Measure and Sweep replay a recording, each on its figure, beside the law's prediction."""
    close.append(panel := BurstGap(**replaying(folder), n_producers=12))
    panel.sweep()
    assert [p.values["gap_s"] > 0 for p in panel.points] == [False] + [True] * 10
    assert all(p.record.provenance["badge"] == "SIMULATED" for p in panel.points)
    panel.controls.set(gap_s=0.0)
    panel.measure()
    found = panel.picture(panel.controls.values()).comparison
    assert found is not None
    assert abs(found.error_ratio["accepted_s"]) < 0.05
    panel.controls.set(n_producers=7, burst_bytes=48)
    panel.sweep()
    assert "differ from these settings in gap_s alone" in panel.strip.message.value


def test_recorded_tiles_open_in_the_tune_panel(folder: Path, close: list[Panel]) -> None:
    """A series of a recording replays with its compute times, and what was not run is left out."""
    point = next(p for p in index_of(folder)["points"] if p["part"] == "gpus")
    shape = Record.load(folder / point["file"]).parameters
    close.append(panel := Tune(**replaying(folder), m=shape["m"], n=shape["n"], k=shape["k"],
                               n_gpus=4, series="issue depth"))
    panel.sweep()
    depths = [p.values["issue_depth"] for p in panel.points]
    assert sorted(set(depths)) == [1, 2, 3, 4]
    assert panel.t_mma_s  # as it was recorded, with stores off
    assert "SIMULATED" in panel.strip.badges.value
    for found, _ in panel._comparisons:
        assert abs(found.error_ratio["accepted_s"]) < 0.1


@pytest.fixture
def offered_anew() -> Iterator[None]:
    """Look at this computer again, and forget what was seen afterwards."""
    live_machines.cache_clear()
    yield
    live_machines.cache_clear()


def test_without_gpus_panels_say_why(
    monkeypatch: pytest.MonkeyPatch, offered_anew: None, close: list[Panel]
) -> None:
    """Without a GPU no panel offers the cuda device, and the reason stands below the list."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    close.append(panel := BurstGap())
    assert not [name for name in panel.controls["device"].options if "cuda" in name]
    assert "cuda is not offered: No GPU is used: CuPy" in not_offered().value


def test_with_gpus_panels_offer_what_works(
    monkeypatch: pytest.MonkeyPatch, offered_anew: None, close: list[Panel]
) -> None:
    """Destinations that work are offered with this computer's machine, the rest with the reason."""
    emulated_cuda.install(monkeypatch, 1)
    close.append(panel := BurstGap(n_producers=4))
    close.append(layers := MoESchedule())
    for each in (panel, layers):
        offered = [name for name in each.controls["device"].options if "cuda" in name]
        assert offered == ["cuda:host", "cuda:local"]
    assert "cuda:peer is not offered: there is one GPU only." in not_offered().value
    panel.controls.set(device="cuda:host")
    values = panel.controls.values()
    assert values["machine"] == "Emulated to host memory (this computer)"
    assert "calibrate its device" in panel.words.value
    panel.controls.set(drain_bytes_per_s=50e9)
    machine = panel.picture(panel.controls.values()).machine
    device = panel.device(panel.controls.values())
    assert device.func is CudaDevice  # type: ignore[attr-defined]
    assert device.args == (machine,)  # type: ignore[attr-defined]
    assert device.keywords == {"destination": "host"}  # type: ignore[attr-defined]
    panel.controls.set(machine="B200-SXM")
    panel.measure()
    assert "measures Emulated to host memory (this computer), not B200-SXM" in (
        panel.strip.message.value)


def test_sockets_are_offered_and_live(offered_anew: None, close: list[Panel]) -> None:
    """The burst panel measures live on any computer, in socket buffers."""
    close.append(panel := BurstGap(n_producers=2, n_bursts=5, burst_bytes=16 * 1024))
    panel.controls.set(device="sockets")
    panel.measure()
    assert panel.points[0].record.provenance["badge"] == "LIVE"
    assert "LIVE" in panel.strip.badges.value
