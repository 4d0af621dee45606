"""Traces hold what the record holds, in the form that ui.perfetto.dev and chrome://tracing read."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import burst_trains, gemms, machine_of, machines, tunings

from xstage_lab import trace
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import FileRejected, NotMeasured
from xstage_lab.record import TILE, Record, Tiles
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain, FusedGemm, MachineSpec, Tuning

GEMM = FusedGemm(m=1024, n=1024, k=256, n_gpus=4)
TRAIN = BurstTrain(n_producers=4, burst_bytes=32768, gap_s=2e-6, n_bursts=5)
HALF_NS = 0.5e-9


def simulated(workload: BurstTrain | FusedGemm, tuning: Tuning | None = None,
              machine: MachineSpec | None = None, mirror: bool = False) -> Record:
    machine = machine or machine_of()
    return SimulatedDevice(machine, mirror=mirror).measure(build(workload, machine, tuning))


def spans(record: Record, row: str) -> list[dict[str, Any]]:
    return [e for e in trace.events(record) if e["ph"] == "X" and e["cat"] == row]


def total_s(events: list[dict[str, Any]]) -> float:
    return sum(e["dur"] for e in events) * 1e-6


def names(record: Record, what: str) -> list[str]:
    return [e["args"]["name"] for e in trace.events(record) if e["name"] == what]


@given(st.one_of(gemms(max_edge=600), burst_trains(n_sms=8)), tunings(max_ctas=8),
       machines(max_sms=8))
def test_a_row_holds_the_records_time_and_never_overlaps(
    workload: BurstTrain | FusedGemm, tuning: Tuning, machine: MachineSpec
) -> None:
    """Every row adds up to its column of the record, within a nanosecond a tile, in turn."""
    machine = dataclasses.replace(machine, n_sms=24)
    is_burst = isinstance(workload, BurstTrain)
    record = simulated(workload, None if is_burst else tuning, machine)
    assert record.tiles is not None
    tiles = record.tiles
    columns = {"gap" if is_burst else "MMA": tiles["mma_end_s"] - tiles["mma_start_s"],
               "issue": tiles["issue_end_s"] - tiles["issue_start_s"]}
    if not is_burst:
        columns["stall"] = tiles["slot_wait_s"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for label, times in columns.items():
        found = spans(record, label)
        assert total_s(found) == pytest.approx(times.sum(), abs=2 * HALF_NS * tiles.size)
        for event in found:
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in
                   itertools.pairwise(row))


def test_bytes_in_flight_lie_between_acceptance_and_arrival() -> None:
    """Each tile seen to arrive later than it was accepted is one pair of async events."""
    record = simulated(GEMM)
    assert record.tiles is not None
    tiles = record.tiles
    late = tiles[tiles["arrived_s"] > tiles["issue_end_s"] + 2 * HALF_NS]
    begun = {e["id2"]["local"]: e for e in trace.events(record) if e["ph"] == "b"}
    ended = {e["id2"]["local"]: e for e in trace.events(record) if e["ph"] == "e"}
    assert len(begun) == late.size > 0
    assert begun.keys() == ended.keys()
    flown = sum(ended[i]["ts"] - begun[i]["ts"] for i in begun) * 1e-6
    assert flown == pytest.approx((late["arrived_s"] - late["issue_end_s"]).sum(),
                                  abs=2 * HALF_NS * late.size)
    unseen = dataclasses.replace(record, tiles=tiles.copy())
    assert unseen.tiles is not None
    unseen.tiles["arrived_s"] = np.nan
    assert not any(e["ph"] in "be" for e in trace.events(unseen))


def test_the_backlog_is_a_counter_of_gpu_0() -> None:
    """Every sample of the backlog stands in the first GPU's counter, in bytes."""
    record = simulated(GEMM)
    assert record.backlog is not None
    counted = [e for e in trace.events(record) if e["ph"] == "C"]
    assert [e["args"]["bytes"] for e in counted] == record.backlog[1].tolist()
    assert {e["pid"] for e in counted} == {min(e["pid"] for e in spans(record, "MMA"))}


@pytest.mark.parametrize("badge", ["LIVE", "SIMULATED", "RECORDED"])
def test_every_process_wears_the_badge(badge: str) -> None:
    """A process is a GPU, and its name says what the times are and where they come from."""
    record = simulated(GEMM)
    record.provenance.update(badge=badge, source="somebody")
    named = names(record, "process_name")
    assert len(named) == GEMM.n_gpus
    assert all(f"GPU {gpu}, {badge}: somebody" == name for gpu, name in enumerate(named))


def test_gpus_that_were_not_simulated_are_not_shown() -> None:
    """Where one GPU was simulated for all that do the same, it stands alone and says so."""
    record = simulated(GEMM, mirror=True)
    (name,) = names(record, "process_name")
    assert "one of 4 alike" in name
    assert {e["pid"] for e in spans(record, "MMA")} == {1}


def test_rows_are_named_by_sm_and_role() -> None:
    """Each SM has a row per role, and events say which tile and how many bytes."""
    record = simulated(GEMM, machine=machine_of(n_sms=16))
    assert {"SM 00 MMA", "SM 15 stall", "SM 07 issue"} <= set(names(record, "thread_name"))
    assert len(names(record, "thread_name")) == 3 * 16 * GEMM.n_gpus
    assert spans(record, "issue")[0]["name"] == "tile 0, 32 KiB"
    train = simulated(TRAIN)
    assert {name.split()[-1] for name in names(train, "thread_name")} == {"gap", "issue"}


def made(*tiles: tuple[float, float, float, float, float]) -> Record:
    """Return a record of one SM from MMA start and end, issue start and end, slot wait."""
    rows: Tiles = np.zeros(len(tiles), TILE)
    for i, tile in enumerate(tiles):
        for name, value in zip(("mma_start_s", "mma_end_s", "issue_start_s", "issue_end_s",
                                "slot_wait_s"), tile, strict=True):
            rows[name][i] = value
        rows["row"][i], rows["arrived_s"][i] = i, np.nan
    return Record(summary={}, parameters={}, provenance={"badge": "LIVE", "source": "test"},
                  tiles=rows)


def test_waits_stand_where_the_kernel_waits() -> None:
    """A wait stands before the MMA, or after it where waits do not fit in before."""
    before = made((0, 1e-6, 1e-6, 2e-6, 0), (1.5e-6, 2e-6, 2e-6, 3e-6, 0.5e-6))
    assert [e["ts"] for e in spans(before, "stall")] == [1.0]
    after = made((0, 1e-6, 1.5e-6, 2e-6, 0.5e-6), (1.5e-6, 2e-6, 2e-6, 3e-6, 0))
    assert [e["ts"] for e in spans(after, "stall")] == [1.0]
    unknown = made((0, 1e-6, 1e-6, 2e-6, np.nan))
    assert spans(unknown, "stall") == []


def test_overlapping_issue_is_shown_in_turn() -> None:
    """Where a store warp is early at the next tile, the row shows what is left of its span."""
    record = made((0, 1e-6, 1e-6, 4e-6, 0), (1e-6, 2e-6, 3e-6, 5e-6, 0))
    assert [(e["ts"], e["dur"]) for e in spans(record, "issue")] == [(1.0, 3.0), (4.0, 1.0)]


def test_a_file_is_whole_and_says_where_it_comes_from(tmp_path: Path) -> None:
    """The file is JSON of the trace format; compressed it holds the same."""
    record = simulated(TRAIN)
    plain = json.loads(trace.write(record, tmp_path / "run.json").read_text())
    packed = trace.write(record, tmp_path / "run.json.gz").read_bytes()
    assert json.loads(gzip.decompress(packed)) == plain
    assert plain["displayTimeUnit"] == "ns"
    assert plain["traceEvents"] == trace.events(record)
    assert plain["otherData"]["provenance"]["badge"] == "SIMULATED"
    assert plain["otherData"]["parameters"]["burst_bytes"] == TRAIN.burst_bytes
    assert all({"ph", "pid", "tid", "name"} <= e.keys() for e in plain["traceEvents"])


def test_what_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    """A record without tiles is refused, and so is a folder that cannot be."""
    record = simulated(TRAIN)
    with pytest.raises(NotMeasured, match="per-tile"):
        trace.write(dataclasses.replace(record, tiles=None), tmp_path / "run.json")
    (tmp_path / "file").touch()
    with pytest.raises(FileRejected, match="cannot be written"):
        trace.write(record, tmp_path / "file" / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
