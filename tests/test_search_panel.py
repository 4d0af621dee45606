"""Find the best without a browser: what it measures, says, and does to the controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from xstage_lab.lab import Tune
from xstage_lab.lab.picture import Values
from xstage_lab.record import Record
from xstage_lab.runlog import Run, RunLog

SMALL = {"m": 2048, "n": 2048, "k": 1024, "n_gpus": 4}


@pytest.fixture
def opened() -> Iterator[Callable[..., Tune]]:
    """Open panels, and close them after the test, so that their workers end."""
    panels: list[Tune] = []

    def make(kind: type[Tune] = Tune, **settings: Any) -> Tune:
        panels.append(kind(**SMALL | settings))
        return panels[-1]

    yield make
    for panel in panels:
        panel.close()


def _logged(k: int) -> list[Run]:
    """Return the runs of the small shape with `k` that the log holds."""
    return [run for run in RunLog().runs(workload="FusedGemm")
            if SMALL | {"k": k} == {name: run.parameters[name] for name in SMALL}]


def test_the_controls_show_the_best(opened: Callable[..., Tune]) -> None:
    """Untouched controls end on the best; words name it, the runner-up, and whether to fuse."""
    panel = opened()
    panel.find_best()
    answer = panel.answer
    assert answer is not None
    best = answer.best.choice.tuning
    values = panel.controls.values()
    assert (values["tile_m"], values["tile_n"], values["issue_depth"]) == (
        best.tile_m, best.tile_n, best.issue_depth)
    assert "controls are set to the best" in panel.strip.message.value
    words = panel.finding.children[1].value
    for said in ("The best of", "Runner-up", "compute-then-copy", "SIMULATED"):
        assert said in words
    assert panel.finding.layout.display == ""
    assert panel.finding.offer.layout.display == "none"


def test_points_arrive_in_the_figures(opened: Callable[..., Tune]) -> None:
    """What is measured is on the map that is shown, and in the run log."""
    panel = opened(k=768)
    panel.find_best()
    assert panel.visible == "Tile × depth"
    assert panel.answer is not None
    stored = [point for point in panel.points if point.record.parameters["stores"] == "remote"]
    assert len(stored) == len(panel.points) == panel.answer.n_measured - 1  # one was local
    table = panel.tabs["Tile × depth"].plot.data()
    drawn = table["series"] == "measured"
    assert sorted(table["total_s"][drawn]) == pytest.approx(
        sorted(point.record.summary["total_s"] for point in stored))
    assert set(table["badge"][drawn]) == {"SIMULATED"}
    assert len(_logged(768)) == panel.answer.n_measured


def test_controls_under_a_hand_stay(opened: Callable[..., Tune]) -> None:
    """Controls that were moved meanwhile stay; a button sets them to the best."""
    class Moved(Tune):
        def take(self, values: Values, record: Record) -> None:
            super().take(values, record)
            self.controls.set(n_stages=2)

    panel = opened(Moved)
    before = panel.controls.values()
    panel.find_best()
    assert panel.controls.values() == before | {"n_stages": 2}
    assert "stay where they are" in panel.strip.message.value
    assert panel.finding.offer.layout.display == ""
    panel.finding.offer.click()
    assert panel.answer is not None
    assert panel.controls.values() == before | panel.settings_of(panel.answer.best.choice)
    assert panel.finding.offer.layout.display == "none"


def test_stop_answers_with_what_there_is_and_another_press_goes_on(
    opened: Callable[..., Tune]
) -> None:
    """A stopped search answers; pressed again it takes what was measured from the run log."""
    class Stopped(Tune):
        def take(self, values: Values, record: Record) -> None:
            super().take(values, record)
            if len(self.points) == 2:
                self.stop()

    panel = opened(Stopped, k=640)
    before = panel.controls.values()
    panel.find_best()
    assert panel.controls.values() == before
    assert panel.finding.offer.layout.display == ""
    assert panel.answer is not None
    assert panel.answer.n_measured == 2
    assert panel.strip.message.value.count("Stopped: 2 runs") == 1
    whole = opened(k=640)
    whole.find_best()
    assert whole.answer is not None
    assert len(_logged(640)) == whole.answer.n_measured


def test_a_search_without_anything_that_fits_says_why(opened: Callable[..., Tune]) -> None:
    """Settings under which no tile can run end with the limit, and the panel lives on."""
    panel = opened(n_gpus=9)
    panel.find_best()
    assert "n_gpus = 9" in panel.strip.message.value
    assert panel.answer is None
    panel.controls.set(n_gpus=4)
    panel.find_best()
    assert panel.answer is not None


def test_sweep_shows_its_figure(opened: Callable[..., Tune]) -> None:
    """Sweep turns to the figure that its points appear in; where it cannot begin, it does not."""
    panel = opened()
    panel.controls.set(n_gpus=9)
    panel.sweep()
    assert panel.visible == "Times"
    panel.controls.set(n_gpus=4, issue_depth=1)
    panel.sweep()
    assert panel.visible == "Series"
