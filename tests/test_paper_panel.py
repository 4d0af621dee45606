"""The panel of published results without a browser: rows, figure, words and files."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from bokeh.document import Document

from xstage_lab.errors import UnknownName
from xstage_lab.lab import Paper
from xstage_lab.lab import paper as panel
from xstage_lab.paper import worked_out
from xstage_lab.paper.table import Table
from xstage_lab.units import display, words


def test_a_table_is_shown_with_its_rows_words_and_figure() -> None:
    """Every row, note and source is on the page, and the figure has the table's numbers."""
    made = Paper("moe-stall")
    table = made.table
    assert table is not None
    assert made.rows.value.count("<tr>") == len(table.rows) + 1
    assert "arXiv 2607.23264" in made.badges.value
    assert "LIVE" not in made.badges.value
    assert all(note[:40].split("`")[0] in made.words.value for note in table.notes)
    assert made.plot is not None
    data = made.plot.data()
    law = data["series"] == "law"
    scale = display("law_s").scale
    assert data["label"][law].tolist() == [row["model"] for row in table.rows]
    assert data["published"][law] == pytest.approx(
        [scale * row["stall_measured_s"] for row in table.rows])
    assert data["error"][law] == pytest.approx([scale * row["error_s"] for row in table.rows])


def test_every_quantity_is_drawn_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Figures of quick tables are valid documents, with labelled axes and a line of one to one."""
    for name in ("constants", "attention", "issue-completion", "moe-stall"):
        table = worked_out(name)
        for compared in table.compared:
            with caplog.at_level(logging.WARNING):
                plot = panel._figure_of(table, compared)
                document = Document()
                document.add_root(plot.figure)
                document.validate()
            assert not caplog.records
            data = plot.data()
            assert set(data["series"]) == {"exact", *map(words, compared.predicted)}
            exact = data["series"] == "exact"
            assert data["published"][exact].tolist() == data["predicted"][exact].tolist()
            assert np.isfinite(data["predicted"]).all()


def test_another_table_or_quantity_redraws() -> None:
    """Choosing changes rows and figure; a table with nothing to compare has no figure."""
    made = Paper("issue-completion")
    assert made.plot is not None
    first = made.plot.data()
    made.quantity.value = 1
    assert "release" in made.quantity.label
    assert made.plot.data()["published"].tolist() != first["published"].tolist()
    made.chooser.value = "moe-stall-forms"
    assert made.plot is None
    assert made.figure.children == ()
    assert made._export.disabled
    assert "free tiles" in made.rows.value


def test_a_table_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coming back to a table shows the one that was worked out before."""
    asked = []

    def counted(name: str) -> Table:
        asked.append(name)
        return worked_out(name)

    monkeypatch.setattr(panel, "worked_out", counted)
    made = Paper("moe-stall")
    for name in ("moe-stall-left-out", "moe-stall", "moe-stall-left-out"):
        made.chooser.value = name
    assert asked == ["moe-stall", "moe-stall-left-out"]


def test_a_table_of_simulated_runs_is_not_called_recorded() -> None:
    """Where nothing was published no badge says RECORDED; where nothing is simulated, none that."""
    made = Paper("moe-stall-simulated")
    assert "RECORDED" not in made.badges.value
    assert "SIMULATED" in made.badges.value
    made.chooser.value = "moe-stall"
    assert "RECORDED" in made.badges.value
    assert "SIMULATED" not in made.badges.value


def test_a_table_of_no_name_is_refused() -> None:
    """An unknown table is answered with the nearest names."""
    with pytest.raises(UnknownName, match="mega-moe"):
        Paper("megamoe")


def test_export_writes_every_row_and_word(tmp_path: Path) -> None:
    """The CSV holds the table in SI, the JSON its notes and source, and the figure is a page."""
    made = Paper("attention")
    made.folder.value = str(tmp_path)
    made.export()
    table = made.table
    assert table is not None
    assert "Wrote paper-attention.html" in made.message.value
    with (tmp_path / "paper-attention.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert [float(row["law_s"]) for row in rows] == [row["law_s"] for row in table.rows]
    about = json.loads((tmp_path / "paper-attention.json").read_text())
    assert about["parameters"]["notes"] == list(table.notes)
    assert "via public notes" in about["provenance"]["source"]
