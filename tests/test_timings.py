"""Tile times that others took: read as they were written, set beside the law, or refused."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timings_files import EXAMPLE, GEMM, HEAD, SCALES, TUNING, as_csv, machine, simulated

from xstage_lab import analysis, timings, trace
from xstage_lab.__main__ import main
from xstage_lab.errors import FileRejected, InvalidValue, NotMeasured, XStageError
from xstage_lab.record import SUMMARY_KEYS, Record, summarize_tiles
from xstage_lab.spec import FusedGemm, Tuning

HEADER = "gpu,sm,tile,mma_start_us,mma_end_us,issue_start_us,issue_end_us,store_bytes"
ROW = "0,0,0,0,1,1,2,4096"


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "kernel.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture(scope="module")
def run() -> Record:
    return simulated()[0]


@pytest.mark.parametrize("unit", SCALES)
def test_what_is_written_is_read(unit: str, tmp_path: Path) -> None:
    """A simulated run comes back from its file with the same tiles and summary, in any unit."""
    record, tiles = simulated()
    digits = 12 - round(math.log10(SCALES[unit]))  # picoseconds
    path = written(tmp_path, as_csv(tiles, unit, digits, also=("arrived", "slot_wait")))
    found = timings.read(path)
    assert found.tiles is not None
    tiles = tiles[np.lexsort((tiles["row"], tiles["mma_start_s"], tiles["sm"]))]
    for name in found.tiles.dtype.names or ():
        np.testing.assert_allclose(found.tiles[name], tiles[name], rtol=0, atol=1.1e-12)
    expected = summarize_tiles(tiles, TUNING.n_ctas or 0, record.summary["remote_bytes"])
    assert found.summary == pytest.approx(expected, rel=1e-5, nan_ok=True)
    for key in ("accepted_s", "total_s", "t_mma_s", "stall_ratio"):
        assert found.summary[key] == pytest.approx(record.summary[key], rel=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_waits_follow_from_the_issue_depth(depth: int, tmp_path: Path) -> None:
    """With the depth known the waits are those that the device saw; without, none is known."""
    _, tiles = simulated(GEMM, Tuning(issue_depth=depth, n_ctas=32))
    path = written(tmp_path, as_csv(tiles, digits=6))
    given_depth, unknown = timings.read(path, issue_depth=depth), timings.read(path)
    whole = timings.read(written(tmp_path, as_csv(tiles, digits=6, also=("arrived", "slot_wait"))))
    assert given_depth.tiles is not None
    assert whole.tiles is not None
    np.testing.assert_allclose(given_depth.tiles["slot_wait_s"], whole.tiles["slot_wait_s"],
                               rtol=0, atol=3e-12)
    assert unknown.tiles is not None
    assert np.isnan(unknown.tiles["slot_wait_s"]).all()
    assert math.isnan(unknown.summary["stall_ratio"])
    assert timings.most_held(unknown.tiles) == depth
    assert not any(event.get("cat") == "stall" for event in trace.events(unknown))


def test_a_depth_that_the_times_contradict_is_refused(tmp_path: Path) -> None:
    """A tile that starts before the depth allows it shows that the depth is larger."""
    _, tiles = simulated(GEMM, Tuning(issue_depth=3, n_ctas=32))
    path = written(tmp_path, as_csv(tiles, digits=6))
    with pytest.raises(FileRejected, match=r"row \d+.*issue depth is 3 or more, not 2"):
        timings.read(path, issue_depth=2)


def test_order_of_rows_and_zero_of_time_do_not_matter(tmp_path: Path) -> None:
    """Shuffled rows and nanosecond stamps of a clock that began in 1970 give the same times."""
    _, tiles = simulated()
    epoch_ns = 1_764_547_200_123_456_789
    head, *rows = as_csv(tiles, "ns", 0, also=()).splitlines()
    late = []
    for row in rows:
        cells = row.split(",")
        late.append(",".join([*cells[:3], *(str(int(c) + epoch_ns) for c in cells[3:7]), cells[7]]))
    random.Random(0).shuffle(late)
    first = timings.read(written(tmp_path, "\n".join([head, *rows]))).tiles
    again = timings.read(written(tmp_path, "\n".join([head, *late]))).tiles
    assert first is not None
    assert again is not None
    for name in ("gpu", "sm", "row", "mma_start_s", "mma_end_s", "issue_start_s", "issue_end_s"):
        np.testing.assert_array_equal(first[name], again[name])


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    """Lines at its head name machine, source, depth and GPUs; arguments stand in their place."""
    text = "\n".join([*(f"# {line}" for line in HEAD), HEADER, ROW])
    found = timings.read(written(tmp_path, text))
    assert found.provenance["badge"] == "RECORDED"
    assert found.provenance["machine"] == "H100-SXM"
    assert "SIMULATED by" in found.provenance["source"]
    assert "kernel.csv" in found.provenance["source"]
    assert (found.parameters["issue_depth"], found.parameters["n_gpus"]) == (2, 8)
    found = timings.read(written(tmp_path, text), machine="B200-SXM", source="me", n_gpus=4)
    assert found.provenance["machine"] == "B200-SXM"
    assert found.provenance["source"] == "me, kernel.csv"
    assert found.parameters["n_gpus"] == 4
    with pytest.raises(InvalidValue, match="issue_depth = 0"):
        timings.read(written(tmp_path, text), issue_depth=0)


def test_the_example_is_what_it_says() -> None:
    """The example file is a run of the simulated device, and says that nobody measured it."""
    _, tiles = simulated()
    found = timings.read(EXAMPLE)
    assert found.tiles is not None
    tiles = tiles[np.lexsort((tiles["row"], tiles["mma_start_s"], tiles["sm"]))]
    for name in ("row", "sm", "store_bytes", "mma_start_s", "issue_end_s", "arrived_s"):
        np.testing.assert_allclose(found.tiles[name], tiles[name], rtol=0, atol=1e-9)
    assert "SIMULATED" in EXAMPLE.read_text().splitlines()[0]
    assert "SIMULATED" in found.provenance["source"]


def cells(**changed: object) -> str:
    """Return a row with some cells changed."""
    names = HEADER.replace("_us", "").split(",")
    values = dict(zip(names, ROW.split(","), strict=True)) | changed
    return ",".join(str(values[name]) for name in names)


BAD: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "empty": ([], ("no rows",)),
    "header alone": ([HEADER], ("no rows",)),
    "missing column": ([HEADER.replace(",issue_end_us", ""), "0,0,0,0,1,1,4096"],
                       ("issue_end_us", "missing")),
    "unknown column": ([HEADER + ",slot_weight_us", ROW + ",1"], ("slot_weight_us",
                                                                 "slot_wait_us")),
    "no unit": ([HEADER.replace("mma_end_us", "mma_end"), ROW], ("mma_end", "no unit")),
    "column twice": ([HEADER + ",mma_end_ns", ROW + ",1"], ("mma_end_ns", "earlier column")),
    "short row": ([HEADER, ROW, "0,0,1"], ("row 3", "3 cells")),
    "text": ([HEADER, cells(mma_end="soon")], ("row 2", "mma_end_us", "'soon'")),
    "NaN": ([HEADER, cells(mma_end="nan")], ("row 2", "mma_end_us", "'nan'")),
    "infinite": ([HEADER, cells(issue_end="inf")], ("row 2", "issue_end_us", "'inf'")),
    "no time": ([HEADER, cells(issue_end="")], ("row 2", "issue_end_us")),
    "negative": ([HEADER, cells(mma_start="-1")], ("row 2", "mma_start_us", "negative")),
    "half a tile": ([HEADER, cells(tile="0.5")], ("row 2", "tile", "whole numbers")),
    "half a byte": ([HEADER, cells(store_bytes="1.5")], ("row 2", "store_bytes")),
    "GPU too high": ([HEADER, cells(gpu=2000)], ("row 2", "gpu", "1,023")),
    "ends first": ([HEADER, cells(mma_start=3, issue_start=4, issue_end=5)],
                   ("row 2", "mma_end_us", "before it starts")),
    "stores first": ([HEADER, cells(issue_start=0.5)], ("row 2", "issue_start_us",
                                                        "MMA has ended")),
    "issue ends first": ([HEADER, cells(issue_start=3)], ("row 2", "issue_end_us",
                                                          "before they start")),
    "arrives first": ([HEADER + ",arrived_us", ROW + ",0.5"], ("row 2", "arrived_us", "arrive")),
    "negative wait": ([HEADER + ",slot_wait_us", ROW + ",-1"], ("row 2", "slot_wait_us")),
    "overlap": ([HEADER, cells(tile=1, mma_start=0.5, mma_end=2, issue_start=2, issue_end=3), ROW],
                ("row 2", "mma_start_us", "one tile at a time", "CTAs")),
    "out of turn": ([HEADER, cells(issue_end=9), cells(tile=1, mma_start=1, mma_end=2,
                                                       issue_start=2, issue_end=3)],
                    ("row 3", "computed earlier")),
    "duplicate": ([HEADER, ROW, cells(sm=1)], ("row 3", "tile", "earlier row")),
    "two clocks": ([HEADER, ROW, cells(gpu=1, mma_start=50, mma_end=51, issue_start=51,
                                       issue_end=52)], ("row 3", "one clock")),
    "wrong unit": ([HEADER.replace("issue_end_us", "issue_end_s"), cells(issue_end=1e6)],
                   ("row 2", "issue_end_s", "unit")),
    "no time at all": ([HEADER, cells(mma_end=0, issue_start=0, issue_end=0)], ("any time",)),
    "misspelt head": (["# issue_dept: 2", HEADER, ROW], ("issue_dept", "issue_depth")),
    "depth in words": (["# issue depth: two", HEADER, ROW], ("two", "whole number")),
    "too few GPUs": (["# n_gpus: 1", HEADER, cells(gpu=1)], ("GPU 1", "1 GPUs")),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    """Each kind of bad file is refused by name, row and column, with the reason."""
    lines, said = BAD[name]
    with pytest.raises(FileRejected) as caught:
        timings.read(written(tmp_path, "\n".join(lines)))
    for words in ("kernel.csv", *said):
        assert words in str(caught.value)


def test_a_good_row_is_accepted(tmp_path: Path) -> None:
    """The row that the bad ones are made from is fine, as are other comments and blank lines."""
    text = "\n".join(["# taken on a Tuesday", "", HEADER, ROW, "", "# the end"])
    assert timings.read(written(tmp_path, text)).summary["accepted_s"] == pytest.approx(2e-6)
    with pytest.raises(FileRejected, match="no such file"):
        timings.read(tmp_path / "none.csv")
    with pytest.raises(FileRejected, match="cannot be read"):
        timings.read(tmp_path)


SNIPPETS = st.sampled_from([HEADER, ROW, "#", "# machine: x", "# n_gpus: 9", ",", "\n", "\r", '"',
                            "nan", "1e400", "-1", "1e999999", "0", "\x00", "\ufeff", "mma_end_us",
                            "arrived_ns", "1_0", "٣", "sNaN", "0x1"])


@given(st.one_of(st.binary(max_size=200),
                 st.lists(SNIPPETS | st.text(max_size=6), max_size=30).map("".join)
                 .map(lambda s: s.encode("utf-8", "surrogatepass")),
                 st.lists(st.lists(SNIPPETS, min_size=8, max_size=8).map(",".join), max_size=4)
                 .map(lambda rows: "\n".join([HEADER, *rows]).encode())))
def test_garbage_is_only_ever_refused(tmp_path_factory: pytest.TempPathFactory,
                                      content: bytes) -> None:
    """Whatever the bytes, reading them ends in a record or in a refusal."""
    path = written(tmp_path_factory.mktemp("garbage", numbered=True), content)
    with contextlib.suppress(FileRejected):
        assert timings.read(path).tiles is not None


def explained(folder: Path, gemm: FusedGemm, tuning: Tuning,
              change: Callable[[Record], Record] = lambda record: record) -> analysis.Comparison:
    _, tiles = simulated(gemm, tuning)
    path = written(folder, as_csv(tiles, digits=6))
    record = change(timings.read(path, machine="H100-SXM", issue_depth=tuning.issue_depth,
                                 n_gpus=gemm.n_gpus))
    return analysis.explain_timings(
        record, machine(), analysis.published(machine(), record.parameters["n_ctas"]))


def test_the_law_beside_a_drain_bound_file(tmp_path: Path) -> None:
    """Where the link is the bottleneck the law is within a few percent and calls it so."""
    found = explained(tmp_path, FusedGemm(m=8192, n=8192, k=1024), Tuning())
    for key in ("accepted_s", "total_s", "issue_s"):
        assert abs(found.error_ratio[key]) < 0.05
    assert found.regime == found.regime_measured == "drain-bound"
    said = " ".join(found.explain)
    assert "Backpressure" in said
    assert "waits for slots" in said
    assert "Drain-bound" in said


def test_the_law_beside_a_compute_bound_file(tmp_path: Path) -> None:
    """Where the MMA is the bottleneck nothing is said to be held up."""
    found = explained(tmp_path, FusedGemm(m=2048, n=2560, k=4096), TUNING)
    assert abs(found.error_ratio["accepted_s"]) < 0.02
    assert found.regime == found.regime_measured == "compute-bound"
    said = " ".join(found.explain)
    assert "No backpressure" in said
    assert "hardly waits" in said


def test_an_unknown_depth_is_assumed_and_said(tmp_path: Path) -> None:
    """Without the issue depth the law takes the deepest holding, says so, and knows no waits."""
    _, tiles = simulated()
    record = timings.read(written(tmp_path, as_csv(tiles)), machine="H100-SXM")
    found = analysis.explain_timings(record, machine(), analysis.published(machine(), 32))
    assert math.isnan(found.measured["stall_ratio"])
    assert found.regime_measured == ""
    said = " ".join(found.explain)
    assert "ASSUMED, not known: an issue depth of 2" in said
    assert "is not known" in said


def test_stores_faster_than_the_calibration_are_told(tmp_path: Path) -> None:
    """Where stores issue faster than T_iss0 allows, the calibration is doubted, not the file."""
    _, tiles = simulated()
    record = timings.read(written(tmp_path, as_csv(tiles)), machine="H100-SXM", issue_depth=2)
    slow = analysis.published(machine(), 32).override(per_sm_bytes_per_s=5e9)
    assert "r_SM" in " ".join(analysis.explain_timings(record, machine(), slow).explain)


def test_like_is_compared_with_like(run: Record, tmp_path: Path) -> None:
    """Times of another machine, and a record without tiles, are not explained."""
    record = timings.read(written(tmp_path, f"{HEADER}\n{ROW}"), machine="B200-SXM")
    cal = analysis.published(machine())
    with pytest.raises(XStageError, match="B200-SXM"):
        analysis.explain_timings(record, machine(), cal)
    with pytest.raises(NotMeasured, match="per-tile"):
        analysis.explain_timings(Record(summary={}, parameters={}, provenance={}), machine(), cal)
    device = analysis.explain_timings(run, machine(), cal)  # counts bytes for itself, too
    assert abs(device.error_ratio["total_s"]) < 0.05


def test_a_file_without_remote_stores(tmp_path: Path) -> None:
    """Tiles that all stay on their GPU are compute-bound and have no issue span."""
    text = "\n".join([HEADER, cells(store_bytes=0)])
    record = timings.read(written(tmp_path, text), machine="H100-SXM", issue_depth=2)
    found = analysis.explain_timings(record, machine(), analysis.published(machine(), 1))
    assert found.regime == "compute-bound"
    assert "No tile stores anything" in found.explain[0]


def test_explain_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The verb prints what the library gives, and what it saves is traced."""
    assert main(["explain", "--timings", str(EXAMPLE), "--json",
                 "--out", str(tmp_path / "run.npz")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(SUMMARY_KEYS) <= found["predicted"].keys() & found["error_ratio"].keys()
    assert found["provenance"]["measured"]["badge"] == "RECORDED"
    assert found["regime_measured"] == "drain-bound"
    assert main(["explain", "--timings", str(EXAMPLE)]) == 0
    told = capsys.readouterr().out
    assert "SIMULATED by" in told
    assert "Backpressure" in told
    for source in (("--record", str(tmp_path / "run.npz")), ("--timings", str(EXAMPLE))):
        assert main(["trace", *source, "--out", str(tmp_path / "run.json")]) == 0
        content = json.loads((tmp_path / "run.json").read_text())
        assert sum(event["ph"] == "X" and event["cat"] == "MMA"
                   for event in content["traceEvents"]) == 320


def test_trace_of_a_workload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A workload is run and traced at once."""
    out = tmp_path / "burst.json.gz"
    assert main(["trace", "--workload", "burst", "--producers", "4", "--bursts", "3",
                 "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n_bytes"] == out.stat().st_size > 0
    assert found["provenance"]["badge"] == "SIMULATED"


@pytest.mark.parametrize(("arguments", "said"), [
    (("explain", "--timings", "no.csv"), ("no.csv", "no such file")),
    (("explain", "--timings", str(EXAMPLE), "--machine", "B200"), ("B200-SXM",)),
    (("explain", "--timings", str(EXAMPLE), "--depth", "1"), ("row", "2 or more")),
    (("explain", "--timings", str(EXAMPLE), "--depth", "x"), ("issue_depth = 'x'",)),
    (("explain", "--timings", str(EXAMPLE), "--machine", "MI355X"), ("drain rate",)),
    (("explain", "--timings", str(EXAMPLE), "--calibration", "no.json"), ("no.json",)),
    (("trace", "--timings", str(EXAMPLE)), ("--out",)),
    (("trace", "--timings", str(EXAMPLE), "--out", "x.json", "--m", "9"), ("leave --m out",)),
    (("trace", "--timings", "a", "--record", "b", "--out", "x"), ("leave --record out",)),
    (("trace", "--record", "no.npz", "--out", "x.json"), ("no.npz",)),
    (("trace", "--out", "x.json", "--m", "0"), ("m = 0",)),
], ids=lambda value: " ".join(value)[-30:] if isinstance(value, tuple) else "")
def test_impossible_options_end_with_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    """What cannot be ends with status 2 and one line, and leaves no file."""
    monkeypatch.chdir(tmp_path)
    assert main(list(arguments)) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    for words in said:
        assert words in told.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_its_machine_asks_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where neither file nor option names the machine, the verb asks for it."""
    path = written(tmp_path, f"{HEADER}\n{ROW}")
    assert main(["explain", "--timings", str(path)]) == 2
    assert "# machine: NAME" in capsys.readouterr().err
    assert main(["explain", "--timings", str(path), "--machine", "H100-SXM"]) == 0
