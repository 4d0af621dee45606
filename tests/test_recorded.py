"""The recorded device replays what was measured, says so, and invents nothing."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xstage_lab import catalog
from xstage_lab.datafiles import data_path
from xstage_lab.devices.base import Device
from xstage_lab.devices.recorded import (
    RecordedDevice,
    published_gemm_rs,
    published_issue_times,
    published_sweeps,
    published_wave_lag,
)
from xstage_lab.errors import FileRejected, InvalidValue, NotMeasured, UnknownName
from xstage_lab.record import SUMMARY_KEYS, TILE, Record, provenance
from xstage_lab.schedule import Program, build
from xstage_lab.spec import BurstTrain, FusedGemm, MoELayer, Tuning

B200 = catalog.machine("B200-SXM")


def burst(gap_s: float = 0.0, burst_bytes: int = 4096) -> Program:
    train = BurstTrain(n_producers=4, burst_bytes=burst_bytes, gap_s=gap_s, n_bursts=2)
    return build(train, B200)


def measured(program: Program, total_s: float, **more: Any) -> Record:
    """A record as a device would give it."""
    origin = {"machine": "B200-SXM", "seed": 0} | more
    return Record(
        summary={"total_s": total_s, "period_s": math.nan},
        parameters=program.parameters(),
        provenance=provenance("LIVE", "cuda", "somebody's node", **origin),
        tiles=np.zeros(3, TILE),
    )


def test_replay_from_files(tmp_path: Path) -> None:
    """A saved run is replayed number for number, and says what it was when it was measured."""
    programs = [burst(gap_s) for gap_s in (0.0, 1e-6, 1e-6 / 3)]
    stored = [measured(program, i + 1.0) for i, program in enumerate(programs)]
    paths = [record.save(tmp_path / f"{i}.npz") for i, record in enumerate(stored)]
    device = RecordedDevice(tmp_path)
    assert isinstance(device, Device)
    assert (device.name, device.badge, device.machine) == ("recorded", "RECORDED", B200)
    assert tuple(device.capabilities) == (True, True, False)
    assert len(device.records()) == 3
    for program, record in zip(programs, stored, strict=True):
        found = device.measure(program)
        assert found.summary["total_s"] == record.summary["total_s"]
        assert math.isnan(found.summary["period_s"])
        assert found.tiles is not None
        said = found.provenance
        assert (said["badge"], said["device"]) == ("RECORDED", "recorded")
        assert (said["recorded_badge"], said["recorded_device"]) == ("LIVE", "cuda")
        assert said["date"] == record.provenance["date"]
        assert said["source"] == "somebody's node"
    assert RecordedDevice(str(paths[1])).measure(programs[1]).summary["total_s"] == 2.0


def test_replay_of_a_replay_keeps_its_origin(tmp_path: Path) -> None:
    """A replayed run that is saved and replayed again still says who measured it."""
    program = burst()
    once = RecordedDevice([measured(program, 1.0)]).measure(program)
    twice = RecordedDevice(once.save(tmp_path / "again.npz")).measure(program)
    assert twice.provenance == once.provenance


def test_what_nobody_recorded_is_refused() -> None:
    """A program that was not recorded is refused, naming how the nearest run differs."""
    device = RecordedDevice(
        [measured(burst(burst_bytes=b), 1.0) for b in (1024, 4096, 65536)]
    )
    with pytest.raises(NotMeasured) as caught:
        device.measure(burst(burst_bytes=5000))
    assert "burst_bytes = 4096 (asked for: 5000)" in str(caught.value)
    assert "gap_s" not in str(caught.value)
    with pytest.raises(NotMeasured, match=r"workload = BurstTrain.*asked for: FusedGemm"):
        device.measure(build(FusedGemm(m=256, n=256, k=64), B200))
    with pytest.raises(NotMeasured, match="stores = remote"):
        device.measure(build(burst().workload, B200, stores="local"))


def test_seed_chooses_among_repeats() -> None:
    """Repeats of a program are told apart by their seeds; any will do for another seed."""
    device = RecordedDevice([measured(burst(), float(seed), seed=seed) for seed in (5, 6)])
    assert device.measure(burst(), seed=6).summary["total_s"] == 6.0
    assert device.measure(burst(), seed=5).summary["total_s"] == 5.0
    assert device.measure(burst(), seed=99).summary["total_s"] == 5.0
    assert device.measure(burst()).summary["total_s"] == 5.0


def test_machines_are_not_mixed() -> None:
    """The same program on two machines gives each its own run, and an ambiguity is refused."""
    both = [measured(burst(), 1.0), measured(burst(), 2.0, machine="H100-SXM")]
    for name, total_s in (("B200-SXM", 1.0), ("H100-SXM", 2.0)):
        device = RecordedDevice(both, catalog.machine(name))
        assert device.measure(burst()).summary["total_s"] == total_s
    with pytest.raises(InvalidValue, match="B200-SXM, H100-SXM"):
        RecordedDevice(both)
    with pytest.raises(NotMeasured, match=r"A100-SXM.*B200-SXM, H100-SXM"):
        RecordedDevice(both, catalog.machine("A100-SXM"))


def test_machine_of_the_user() -> None:
    """Runs of a machine that the catalog does not know are replayed once it is given."""
    stored = [measured(burst(), 1.0, machine="mine")]
    with pytest.raises(InvalidValue, match="mine"):
        RecordedDevice(stored)
    mine = dataclasses.replace(B200, name="mine")
    assert RecordedDevice(stored, mine).measure(burst()).summary["total_s"] == 1.0


def test_tiles_are_promised_only_where_all_runs_have_them() -> None:
    """A device with a run that has no per-tile times does not promise any."""
    with_tiles = measured(burst(), 1.0)
    without = dataclasses.replace(with_tiles, tiles=None)
    assert not RecordedDevice([with_tiles, without]).capabilities.per_tile


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    """An empty folder, a missing file and a damaged file among good ones are named."""
    with pytest.raises(FileRejected, match="no record files"):
        RecordedDevice(tmp_path)
    with pytest.raises(FileRejected, match=r"none\.npz"):
        RecordedDevice(tmp_path / "none.npz")
    measured(burst(), 1.0).save(tmp_path / "good.npz")
    damaged = measured(burst(), 1.0).save(tmp_path / "short.npz")
    damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(FileRejected, match=r"short\.npz"):
        RecordedDevice(tmp_path)
    with pytest.raises(InvalidValue, match="nothing"):
        RecordedDevice([])


PUBLISHED = {
    "sm_sweeps": (published_sweeps, {"rate_bytes_per_s": ("gb_per_s", 1e9)}),
    "pk_gemm_rs": (
        published_gemm_rs,
        {"total_s": ("gemm_rs_fused_ms", 1e-3), "unfused_gemm_s": ("gemm_ms", 1e-3)},
    ),
    "issue_vs_completion": (
        published_issue_times,
        {
            "issue_s": ("stores_us", 1e-6),
            "release_flag_s": ("stores_release_flag_us", 1e-6),
            "fence_flag_s": ("stores_fence_flag_us", 1e-6),
        },
    ),
}


@pytest.mark.parametrize("table", PUBLISHED)
def test_published_tables(table: str) -> None:
    """A published table opens as records with its figures, its source, and nothing else."""
    opened, columns = PUBLISHED[table]
    with data_path(f"{table}.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    records = opened()
    assert len(records) == len(rows)
    for record, row in zip(records, rows, strict=True):
        for key, (column, scale) in columns.items():
            assert record.summary[key] == pytest.approx(float(row[column]) * scale, rel=1e-12)
        for key in set(SUMMARY_KEYS) - set(columns):
            assert math.isnan(record.summary[key])
        assert record.tiles is None
        assert record.provenance["badge"] == "RECORDED"
        assert record.provenance["source"] == row["source"]
        assert record.provenance["machine"] in catalog.machines()


@pytest.mark.parametrize("table", PUBLISHED)
def test_published_records_survive_the_disk(table: str, tmp_path: Path) -> None:
    """A published record can be saved like any other and comes back the same."""
    for index, record in enumerate(PUBLISHED[table][0]()):
        found = Record.load(record.save(tmp_path / f"{index}.npz"))
        assert found.parameters == record.parameters
        assert found.provenance == record.provenance
        assert str(sorted(found.summary.items())) == str(sorted(record.summary.items()))


def test_published_gemm_answers_for_its_shape() -> None:
    """A published GEMM answers whatever the tile, which nobody published, and no other shape."""
    device = RecordedDevice(published_gemm_rs())
    assert device.machine.name == "H100-SXM"
    assert tuple(device.capabilities) == (True, False, False)

    def program(k: int, tuning: Tuning | None = None, **more: Any) -> Program:
        gemm = FusedGemm(m=32768, n=32768, k=k, destinations="row-owner", **more)
        return build(gemm, device.machine, tuning)

    for tuning in (None, Tuning(tile_m=256, tile_n=128)):
        found = device.measure(program(4096, tuning))
        assert found.summary["total_s"] == 11.828e-3
        assert "ParallelKittens" in found.provenance["source"]
    with pytest.raises(NotMeasured, match=r"k = 4096 \(asked for: 4000\)"):
        device.measure(program(4000))
    with pytest.raises(NotMeasured, match=r"out_dtype = bf16 \(asked for: fp32\)"):
        device.measure(program(4096, out_dtype="fp32"))


def test_published_orders_answer_for_their_layer() -> None:
    """A published MoE layer answers by order and tokens, whatever was not published of it."""
    device = RecordedDevice(published_wave_lag())
    assert len(device.records()) == 2 * len(catalog.table("h100_wave_lag"))

    def measured_s(order: str, tokens: int, tuning: Tuning) -> float:
        moe = MoELayer(tokens=tokens, hidden=4096, intermediate=2048, experts=288, top_k=8,
                       order=order)
        return device.measure(build(moe, device.machine, tuning)).summary["total_s"]

    for tuning in (Tuning(), Tuning(tile_n=256, n_stages=2)):
        assert measured_s("wave", 1024, tuning) == pytest.approx(742e-6)
        assert measured_s("interleaved", 1024, tuning) == pytest.approx(512e-6)
    with pytest.raises(NotMeasured, match=r"tokens = 1024 \(asked for: 1000\)"):
        measured_s("wave", 1000, Tuning())


def test_sweeps_answer_for_no_program() -> None:
    """A published rate is not passed off as the measurement of a burst train."""
    device = RecordedDevice(published_sweeps(), catalog.machine("H20"))
    assert {r.parameters["direction"] for r in device.records()} == {"write"}
    with pytest.raises(NotMeasured, match="H20"):
        device.measure(burst())


def test_catalog_error_is_explained() -> None:
    """Records of nobody knows which machine are refused in words, not by a bare look-up."""
    record = dataclasses.replace(measured(burst(), 1.0), provenance={"badge": "LIVE"})
    with pytest.raises(InvalidValue) as caught:
        RecordedDevice([record])
    assert not isinstance(caught.value, UnknownName)
    assert "machine" in str(caught.value)
