"""Exports are whole, faithful and never overwrite; without a browser they still hold the data."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from bokeh.document import Document
from PIL import Image

from xstage_lab import export as module
from xstage_lab import plots, trace
from xstage_lab.browser import BROWSER_VARIABLE, find_browser
from xstage_lab.errors import FileRejected, InvalidValue
from xstage_lab.export import Exported, export
from xstage_lab.record import TILE, Record

PARAMETERS = {"gap_s": 1.0 / 3.0, "capacity_bytes": math.nan, "assumed": frozenset({"b", "a"})}
PROVENANCE = {"badge": "SIMULATED", "device": "simulated", "source": "two\nlines"}


def issue_gap() -> plots.IssueGap:
    plot = plots.IssueGap()
    gaps = np.linspace(0, 1e-5, 7) / 3
    plot.update({"gap_s": gaps, "free_s": np.maximum(7.6e-7, 6.7e-6 - gaps)},
                {"gap_s": [1e-6, 2e-6], "issue_s": [5.7e-6, math.nan], "badge": "SIMULATED"},
                recovery_gap_s=6e-6, badges="PREDICTED from B200; points SIMULATED")
    return plot


def written(plot: plots.Plot, folder: Path, name: str = "fig") -> Exported:
    return export(plot.figure, folder, name, plot.data(), PARAMETERS, PROVENANCE)


@pytest.fixture
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_browser", lambda: None)


@pytest.fixture
def browser() -> str:
    path = find_browser()
    if path is None:
        if os.environ.get("XSTAGE_REQUIRE_BROWSER") == "1":
            pytest.fail("a browser is required here and none was found")
        pytest.skip("no Chromium or Chrome on this computer")
    return path


def fake_browser(folder: Path, script: str) -> str:
    """An executable that stands in for a browser that misbehaves."""
    path = folder / "fake-browser"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def read_table(text: str) -> dict[str, list[str]]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    header, *rows = csv.reader(io.StringIO("\n".join(lines)))
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def test_without_browser(tmp_path: Path, no_browser: None) -> None:
    """Without a browser there are page, data and parameters, and a reason for what is missing."""
    files, notes = written(issue_gap(), tmp_path)
    assert [path.name for path in files] == ["fig.html", "fig.csv", "fig.json"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    (note,) = notes
    assert "Chromium" in note
    assert BROWSER_VARIABLE in note


def test_table_round_trip(tmp_path: Path, no_browser: None) -> None:
    """Reading the CSV gives back every number exactly; unknown ones are empty cells."""
    plot = issue_gap()
    table = read_table(written(plot, tmp_path).files[1].read_text())
    assert list(table) == list(plot.data())
    for name, column in plot.data().items():
        if column.dtype.kind == "U":
            assert table[name] == column.tolist()
        else:
            read = [float(cell) if cell else math.nan for cell in table[name]]
            np.testing.assert_array_equal(read, column)
    assert "0" not in table["issue_s"]


def test_provenance_travels(tmp_path: Path, no_browser: None) -> None:
    """Badge and parameters stand in the CSV's head and whole in the JSON."""
    _, table, about = written(issue_gap(), tmp_path).files
    assert table.read_text().startswith(
        "# badge: SIMULATED\n# device: simulated\n# source: two lines\n")
    told = json.loads(about.read_text())
    assert told["parameters"] == {"gap_s": 1.0 / 3.0, "capacity_bytes": None,
                                  "assumed": ["a", "b"]}
    assert told["provenance"] == PROVENANCE
    assert told["data"] == table.name


def test_page_needs_no_network(tmp_path: Path, no_browser: None) -> None:
    """The HTML page holds BokehJS and the data, and loads nothing from elsewhere."""
    page = written(issue_gap(), tmp_path).files[0].read_text()
    assert "recovery gap G*" in page
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", page)
    assert len(page) > 500_000


def test_trace_beside_the_figure(tmp_path: Path, no_browser: None) -> None:
    """A record to be traced is written under the figure's stem, which its trace keeps taken."""
    record = Record(summary={}, parameters={}, tiles=np.zeros(1, TILE),
                    provenance={"badge": "LIVE", "source": "test"})
    plot = issue_gap()
    files, _ = export(plot.figure, tmp_path, "fig", plot.data(), PARAMETERS, PROVENANCE, record)
    assert files[-1].name == "fig.trace.json"
    assert files[-1].read_bytes() == trace.to_bytes(record)
    for path in files[:-1]:
        path.unlink()
    assert written(plot, tmp_path).files[0].name == "fig-2.html"


def test_nothing_is_overwritten(tmp_path: Path, no_browser: None) -> None:
    """A second export takes a new stem for all its files, even if one alone is in the way."""
    first = written(issue_gap(), tmp_path).files
    before = {path: path.read_bytes() for path in first}
    (tmp_path / "fig-2.svg").write_text("mine")
    second = written(issue_gap(), tmp_path).files
    assert [path.name for path in second] == ["fig-3.html", "fig-3.csv", "fig-3.json"]
    assert {path: path.read_bytes() for path in first} == before
    assert json.loads(second[2].read_text())["data"] == "fig-3.csv"


def test_screen_stays_as_it_is(tmp_path: Path, browser: str) -> None:
    """Exporting a figure changes neither the figure nor the document it is shown in."""
    plot, other = issue_gap(), plots.Backlog()
    document = Document()
    document.add_root(plot.figure)
    document.add_root(other.figure)
    events: list[object] = []
    document.on_change(events.append)
    before = document.to_json(deferred=False)
    written(plot, tmp_path)
    assert plot.figure.document is document
    assert document.to_json(deferred=False) == before
    assert not events


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder that cannot be made is an error that names it, and leaves nothing behind."""
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FileRejected, match="taken"):
        written(issue_gap(), tmp_path / "taken" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("name", ["", "../up", "a/b", "/root", ".hidden", ".."])
def test_name_with_folders(name: str, tmp_path: Path) -> None:
    """A name that would leave the folder or hide the files is refused."""
    with pytest.raises(InvalidValue, match="name"):
        written(issue_gap(), tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_ragged_data(tmp_path: Path) -> None:
    """Columns of different lengths are refused before anything is written."""
    with pytest.raises(InvalidValue, match="one length"):
        export(issue_gap().figure, tmp_path, "fig", {"a_s": [1.0, 2.0], "b_s": [1.0]}, {}, {})
    assert not list(tmp_path.iterdir())


def test_vectors_and_pixels(tmp_path: Path, browser: str) -> None:
    """With a browser the SVG holds labels as text, and the PNG shows the curve, twice as fine."""
    plot = issue_gap()
    files, notes = written(plot, tmp_path)
    assert notes == []
    assert [path.suffix for path in files] == [".html", ".csv", ".json", ".svg", ".png"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    svg = files[3].read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    for words in ("gap G (us)", "issue time of a burst (us)", "PREDICTED from B200; points "
                  "SIMULATED", "predicted, free-running", "SIMULATED", "G* = 6 us"):
        assert texts.count(words) == 1
    assert "<image" not in svg
    width, height = re.search(r'<svg[^>]*width="(\d+)" height="(\d+)"', svg).groups()
    assert (int(width), int(height)) == (900, plot.figure.height)
    with Image.open(files[4]) as picture:
        assert picture.size == (1800, 2 * plot.figure.height)
        seen = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    blue = (seen == (0x00, 0x72, 0xB2)).all(axis=1).sum()
    assert blue > 1000  # the predicted line
    assert (seen == 255).all(axis=1).mean() > 0.5  # on white paper


def test_linked_figures_are_one_picture(tmp_path: Path, browser: str) -> None:
    """A figure of two parts is exported as one picture with both."""
    tiles = np.zeros(1, TILE)
    tiles["mma_end_s"], tiles["issue_start_s"], tiles["issue_end_s"] = 3e-6, 3e-6, 5e-6
    plot = plots.Timeline()
    plot.update(Record(summary={}, parameters={}, provenance={}, tiles=tiles,
                       backlog=np.array([[0.0, 5e-6], [0.0, 4e6]])))
    files, notes = written(plot, tmp_path)
    assert notes == []
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", files[3].read_text(encoding="utf-8"))
    assert {"MMA", "slot wait", "backlog (MiB)", "time (us)"} <= set(texts)


@pytest.mark.parametrize(("script", "reason"), [
    ("raise SystemExit(7)", "exit status 7"),
    ("print('<html></html>')", "stayed empty"),
    ("import time; time.sleep(60)", "no answer within 1 s"),
])
def test_broken_browser(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser that fails or hangs costs the pictures alone, and the note says what it did."""
    path = fake_browser(tmp_path, script)
    monkeypatch.setattr(module, "find_browser", lambda: path)
    monkeypatch.setattr(module, "_BROWSER_LIMIT_S", 1.0)
    folder = tmp_path / "out"
    files, (note,) = written(issue_gap(), folder)
    assert [path.suffix for path in files] == [".html", ".csv", ".json"]
    assert sorted(folder.iterdir()) == sorted(files)
    assert reason in note
