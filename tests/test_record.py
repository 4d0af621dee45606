"""Records survive the disk whole, and files that are not whole records are refused by name."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xstage_lab.errors import FileRejected
from xstage_lab.record import SCHEMA, TILE, Record, provenance, to_plain, write_atomic


def example(n_tiles: int = 200) -> Record:
    """A record with per-tile times and a backlog."""
    rng = np.random.default_rng(7)
    tiles = np.zeros(n_tiles, TILE)
    tiles["row"] = np.arange(n_tiles)
    tiles["issue_end_s"] = rng.random(n_tiles)
    tiles["arrived_s"] = np.nan
    return Record(
        summary={"total_s": 2.5e-5, "period_s": math.nan},
        parameters={"workload": "FusedGemm", "m": 4096, "n_ctas": None},
        provenance=provenance("SIMULATED", "simulated", "model", machine="B200-SXM", seed=3),
        tiles=tiles,
        backlog=rng.random((2, 50)),
    )


def same(a: Record, b: Record) -> bool:
    """Whether two records say the same, NaN being itself."""
    return (
        str(sorted(a.summary.items())) == str(sorted(b.summary.items()))
        and a.parameters == b.parameters
        and a.provenance == b.provenance
        and _same_array(a.tiles, b.tiles)
        and _same_array(a.backlog, b.backlog)
    )


def _same_array(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_round_trip(tmp_path: Path) -> None:
    """A saved record comes back with every number, time and word it had."""
    record = example()
    assert same(Record.load(record.save(tmp_path / "new" / "run.npz")), record)


SUMMARIES = st.dictionaries(
    st.text(min_size=1, max_size=8), st.floats(allow_infinity=False), max_size=6
)
VALUES = st.one_of(st.integers(), st.text(max_size=5), st.none(), st.booleans(),
                   st.floats(allow_nan=False, allow_infinity=False))  # fmt: skip


@given(summary=SUMMARIES, parameters=st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_any_summary_round_trips(summary: dict[str, float], parameters: dict[str, Any]) -> None:
    """Any finite number or NaN of a summary, and any plain parameter, comes back as it was."""
    record = Record(summary=summary, parameters=parameters, provenance={"badge": "LIVE"})
    with tempfile.TemporaryDirectory() as folder:
        found = Record.load(record.save(Path(folder) / "run.npz"))
    assert found.summary.keys() == summary.keys()
    for key, value in summary.items():
        assert found.summary[key] == value or (math.isnan(value) and math.isnan(found.summary[key]))
    assert found.parameters == parameters


@given(share=st.floats(0.0, 0.999))
def test_cut_short_file_is_refused(share: float) -> None:
    """A record file that was cut short anywhere is refused, naming it."""
    with tempfile.TemporaryDirectory() as folder:
        path = example().save(Path(folder) / "cut.npz")
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(FileRejected, match=r"cut\.npz"):
            Record.load(path)


@given(place=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_damaged_file_is_refused_or_harmless(place: int, bit: int) -> None:
    """A record file with a flipped bit is refused, naming it, or says what it always said."""
    with tempfile.TemporaryDirectory() as folder:
        record = example()
        path = record.save(Path(folder) / "damaged.npz")
        content = bytearray(path.read_bytes())
        content[place % len(content)] ^= 1 << bit
        path.write_bytes(content)
        refusal = "damaged.npz"
        found = record
        try:
            found = Record.load(path)
        except FileRejected as error:
            refusal = str(error)
    assert same(found, record)
    assert "damaged.npz" in refusal


def rewrite(path: Path, **changed: Any) -> None:
    """Change entries of a saved record the way an editor of files would; None removes one."""
    with np.load(path, allow_pickle=False) as stored:
        content = {name: stored[name] for name in stored.files} | changed
    np.savez(path, **{name: value for name, value in content.items() if value is not None})


def head_of(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as stored:
        head: dict[str, Any] = json.loads(stored["head"].item())
    return head


def test_edited_file_is_refused(tmp_path: Path) -> None:
    """A record whose numbers were changed by hand is refused, whichever they are."""
    path = example().save(tmp_path / "edited.npz")
    head = head_of(path)
    head["summary"]["total_s"] = 1.0e-5
    rewrite(path, head=np.array(json.dumps(head).encode()))
    with pytest.raises(FileRejected, match=r"edited\.npz.*edited or damaged"):
        Record.load(path)
    record = example()
    assert record.tiles is not None
    faster = record.tiles.copy()
    faster["issue_end_s"] *= 0.5
    for changed in ({"tiles": faster}, {"tiles": None}, {"backlog": None}):
        path = record.save(tmp_path / "edited.npz")
        rewrite(path, **changed)
        with pytest.raises(FileRejected, match=r"edited\.npz.*edited or damaged"):
            Record.load(path)


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, "2", None])
def test_other_schema_is_refused(tmp_path: Path, schema: object) -> None:
    """A record of a schema that this version does not know is refused, naming both."""
    path = example().save(tmp_path / "newer.npz")
    rewrite(path, head=np.array(json.dumps({**head_of(path), "schema": schema}).encode()))
    with pytest.raises(FileRejected, match=rf"newer\.npz.*{schema!r}.*{SCHEMA}.*Update"):
        Record.load(path)


@pytest.mark.parametrize("head", ["", "{", "[]", "1", '{"schema": 1}', "null"])
def test_head_that_is_none_is_refused(tmp_path: Path, head: str) -> None:
    """A head that is no record's head is refused, naming the file."""
    path = example().save(tmp_path / "head.npz")
    rewrite(path, head=np.array(head.encode()))
    with pytest.raises(FileRejected, match=r"head\.npz"):
        Record.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A file that is no record, no archive, or executable content in disguise is refused."""
    numbers, array, text, pickled = (tmp_path / f"{n}.npz" for n in ("a", "b", "c", "d"))
    np.savez(numbers, x=np.arange(3))
    with array.open("wb") as stream:
        np.save(stream, np.arange(3))
    text.write_text("total_s,1\n")
    np.savez(pickled, head=np.array([object()]), digest=np.array("0"))
    for path in (numbers, array, text, pickled, tmp_path, tmp_path / "none.npz"):
        with pytest.raises(FileRejected, match=path.name):
            Record.load(path)


def test_unwritable_folder(tmp_path: Path) -> None:
    """A record that cannot be written is refused, naming where, and nothing is left behind."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(FileRejected, match=r"file.*cannot be written"):
        example().save(blocked / "run.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    """A folder without write permission is refused in the same way."""
    tmp_path.chmod(0o500)
    with pytest.raises(FileRejected, match="cannot be written"):
        example().save(tmp_path / "run.npz")


def test_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails half way leaves the file that was there, whole, and no other."""
    path = example().save(tmp_path / "run.npz")
    before = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(FileRejected, match=r"run\.npz.*No space left"):
        write_atomic(path, b"half")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_plain_values() -> None:
    """What goes into JSON is plain, and what is not a number becomes null, never 0 or NaN."""
    values = {
        "a": np.float64(1.5), "b": np.int32(2), "c": math.nan, "d": np.array([1.0, math.inf]),
        "e": {"f": (np.nan, "x")}, "g": frozenset({"z", "y"}), "h": None, "i": True,
    }  # fmt: skip
    text = json.dumps(to_plain(values), allow_nan=False)
    assert json.loads(text) == {
        "a": 1.5, "b": 2, "c": None, "d": [1.0, None], "e": {"f": [None, "x"]},
        "g": ["y", "z"], "h": None, "i": True,
    }  # fmt: skip
