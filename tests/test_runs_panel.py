"""The panel of the run log, without a browser."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_runlog import point

from xstage_lab.lab import BurstGap, Tune
from xstage_lab.lab.panel import Panel
from xstage_lab.lab.runs import Runs
from xstage_lab.record import Record
from xstage_lab.runlog import Run, RunLog


class Figures:
    """Stands for a panel's figures: keeps what is overlaid."""

    def __init__(self) -> None:
        self.shown: list[float] = []

    def overlay(self, chosen: list[tuple[Run, Record]]) -> str:
        self.shown = [record.summary["total_s"] for _, record in chosen]
        return f"{len(chosen)} shown."


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    """A log of three runs."""
    made = RunLog(tmp_path / "runs.sqlite")
    made.add([point(1e-6), point(2e-6, machine="H100-SXM"), point(3e-6, badge="LIVE")])
    yield made
    made.close()


@pytest.fixture
def figures() -> Figures:
    return Figures()


@pytest.fixture
def panel(log: RunLog, figures: Figures, tmp_path: Path) -> Iterator[Runs]:
    """The panel of that log, its list read."""
    made = Runs(log.path, overlay=figures.overlay)
    made.folder.value = str(tmp_path / "out")
    made.refresh()
    yield made
    made.close()


def ids(panel: Runs) -> list[int]:
    return [number for _, number in panel.list.options]


def test_opening_the_panel_touches_no_disk(tmp_path: Path) -> None:
    """Until its list is asked for, the panel makes no file."""
    Runs(tmp_path / "runs.sqlite").close()
    assert list(tmp_path.iterdir()) == []


def test_runs_are_listed_with_their_numbers(panel: Runs) -> None:
    """The newest run stands first, each line with date, badge, machine, total and parameters."""
    assert ids(panel) == [3, 2, 1]
    line = panel.list.options[1][0]
    assert line.startswith("#2 · 20")
    assert line.endswith(
        "SIMULATED · H100-SXM · BurstTrain · total 2 us · n_producers=4 gap_s=0 us")


def test_filter_words_hold_together(panel: Runs) -> None:
    """Only lines with every word of the filter stay, whatever its case and order."""
    panel.words.value = "b200 LIVE"
    assert ids(panel) == [3]
    panel.words.value = "h100 n_producers=4 simulated"
    assert ids(panel) == [2]
    panel.words.value = "nothing like it"
    assert ids(panel) == []
    assert "0 runs of 3" in panel.message.value


def test_only_runs_of_the_panels_workload_are_listed(log: RunLog) -> None:
    """A panel of another workload lists none of these."""
    panel = Runs(log.path, workload="FusedGemm")
    panel.refresh()
    assert ids(panel) == []
    panel.close()


def test_refreshing_finds_new_runs_and_keeps_the_choice(panel: Runs, log: RunLog) -> None:
    """Runs logged meanwhile appear at the top, and chosen ones stay chosen."""
    panel.list.value = [2]
    log.add(point(4e-6))
    panel.refresh()
    assert ids(panel) == [4, 3, 2, 1]
    assert panel.list.value == (2,)


def test_chosen_runs_are_overlaid_and_cleared(panel: Runs, figures: Figures) -> None:
    """Overlay hands over the chosen runs with their samples, Clear none."""
    panel.overlay()
    assert "Choose runs" in panel.message.value
    panel.list.value = [3, 1]
    panel.overlay()
    assert figures.shown == [3e-6, 1e-6]
    assert "2 shown" in panel.message.value
    panel.clear()
    assert figures.shown == []


def test_overlaying_leaves_the_kernel_free(panel: Runs, figures: Figures) -> None:
    """Behind an event loop the runs are read beside it, and drawn on it."""

    async def main() -> None:
        panel.list.value = [1]
        panel.overlay()
        assert figures.shown == []
        while figures.shown == []:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30.0))
    assert figures.shown == [1e-6]


def test_chosen_runs_are_exported(panel: Runs, tmp_path: Path) -> None:
    """Export writes the chosen runs and says where, and a bad folder is told in words."""
    panel.list.value = [1, 3]
    panel.export()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "run-1.npz", "run-3.npz", "runs.csv", "runs.json"]
    assert "2 record files" in panel.message.value
    (tmp_path / "file").write_text("")
    panel.folder.value = str(tmp_path / "file")
    panel.export()
    assert "cannot be written" in panel.message.value


def test_deleting_takes_two_presses_on_the_same_runs(panel: Runs, log: RunLog) -> None:
    """Nothing is deleted until Delete is pressed again on the same choice."""
    panel.delete()
    panel.list.value = [1]
    panel.delete()
    assert "Press Delete again to delete 1 run for good" in panel.message.value
    panel.list.value = [1, 2]
    panel.delete()
    assert [run.id for run in log.runs()] == [3, 2, 1]
    panel.delete()
    assert [run.id for run in log.runs()] == [3]
    assert ids(panel) == [3]
    assert "Deleted 2 runs" in panel.message.value
    panel.list.value = [3]
    panel.delete()
    assert len(log.runs()) == 1


def test_a_log_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    """A file that is no log is told in the panel, and the panel lives on."""
    (tmp_path / "runs.sqlite").write_text("gap_s\n" * 100)
    panel = Runs(tmp_path / "runs.sqlite")
    panel.refresh()
    assert "no run log" in panel.message.value
    assert ids(panel) == []
    panel.close()


@pytest.fixture
def own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunLog]:
    """The user's log, empty."""
    monkeypatch.setenv("XSTAGE_RUNLOG", str(tmp_path / "own.sqlite"))
    made = RunLog()
    yield made
    made.close()


@pytest.fixture
def close() -> Iterator[list[Panel]]:
    """Panels to close after the test."""
    opened: list[Panel] = []
    yield opened
    for panel in opened:
        panel.close()


def measured(panel: Panel) -> int:
    """Number of measured points in the visible figure."""
    return int((panel.tabs[panel.visible].plot.data()["series"] == "measured").sum())


def test_what_a_panel_measures_is_in_the_log(own_log: RunLog, close: list[Panel]) -> None:
    """Measure and Sweep log every run with its parameters, and an open list shows them."""
    close.append(panel := BurstGap(n_bursts=3, n_producers=20))
    assert panel.runs is not None
    panel.runs.selected_index = 0
    panel.measure()
    panel.sweep()
    runs = own_log.runs()
    assert len(runs) == len(panel.points) > 10
    assert [run.parameters["gap_s"] for run in reversed(runs)] == [
        point.values["gap_s"] for point in panel.points]
    assert own_log.record(1).tiles is not None
    assert len(panel.runs.children[0].list.options) == len(runs)


def test_replays_are_not_logged_again(own_log: RunLog, close: list[Panel]) -> None:
    """What the recorded device gives back was not measured now and is not logged."""
    close.append(panel := Tune(machine="H100-SXM", device="recorded", series="k", m=32768,
                               n=32768, k=2048, destinations="row-owner", tile_n=256))
    panel.measure()
    assert len(panel.points) == 1
    assert own_log.runs() == []


def test_a_log_that_cannot_be_used_is_told_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: list[Panel]
) -> None:
    """Measure says what is wrong with the log and starts nothing."""
    (tmp_path / "own.sqlite").write_text("no log" * 100)
    monkeypatch.setenv("XSTAGE_RUNLOG", str(tmp_path / "own.sqlite"))
    close.append(panel := BurstGap())
    panel.measure()
    assert "no run log" in panel.strip.message.value
    assert panel._worker is None


def test_logged_runs_of_any_settings_are_drawn(own_log: RunLog, close: list[Panel]) -> None:
    """Runs of the log appear on the figures whatever the sliders say, with their badges."""
    close.append(panel := BurstGap(n_bursts=3, n_producers=20))
    panel.measure()
    panel.controls.set(n_producers=100, machine="H100-SXM")
    assert measured(panel) == 0
    own_log.add(dataclasses.replace(own_log.record(1), provenance=own_log.runs()[0].provenance
                                    | {"badge": "LIVE", "machine": "my box"}))
    simulated, live = reversed([(run, own_log.record(run.id)) for run in own_log.runs()])
    assert panel.overlay([simulated, live]) == "2 runs overlaid."
    assert measured(panel) == 2
    assert "run log, simulated on B200-SXM" in panel.strip.badges.value
    assert "run log, simulated on my box" in panel.strip.badges.value
    shown = panel.tabs["Issue time"].plot.data()
    assert shown["badge"][shown["series"] == "measured"].tolist() == ["SIMULATED", "RECORDED"]
    panel.visible = "Backlog"
    assert "backlog" in panel.tabs["Backlog"].plot.data()["series"]
    panel.visible = "One burst"  # of single bursts; this was a train of three
    assert measured(panel) == 0
    panel.visible = "Issue time"
    panel.overlay([])
    assert measured(panel) == 0


def test_a_logged_gemm_shows_its_timeline_and_its_place_in_a_series(
    own_log: RunLog, close: list[Panel]
) -> None:
    """A logged fused GEMM is drawn along the series and as one SM's timeline."""
    close.append(panel := Tune(m=1024, n=1024, k=512, issue_depth=3))
    panel.measure()
    runs = [(run, own_log.record(run.id)) for run in own_log.runs()]
    panel.controls.set(m=8192, issue_depth=1)
    assert panel.overlay(runs) == "1 run overlaid; 1 that stored nothing remote left out."
    panel.visible = "Series"
    assert measured(panel) == 1
    panel.visible = "One SM"
    assert "SIMULATED" in panel.strip.badges.value
    assert panel.tabs["One SM"].plot.data()["series"].size > 0
