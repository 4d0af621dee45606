"""The Ulysses panel without a browser: modes, series, what is hidden, and what cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xstage_lab.__main__ import main
from xstage_lab.browser import BROWSER_VARIABLE
from xstage_lab.errors import UnknownName
from xstage_lab.lab import Ulysses

SMALL = {"sequence": 3072, "heads": 12, "n_gpus": 4, "tile_m": 64, "tile_n": 64}


@pytest.fixture
def panel() -> Iterator[Ulysses]:
    """A panel of a short sequence, its worker ended after the test."""
    made = Ulysses(**SMALL)
    yield made
    made.close()


def drawn(panel: Ulysses, series: str, *columns: str) -> list[tuple[Any, ...]]:
    """Return rows of a series of the visible figure."""
    table = panel.tabs[panel.visible].plot.data()
    rows = zip(table["series"], *(table[name] for name in columns), strict=True)
    return [row[1:] for row in rows if row[0] == series]


def test_a_model_sets_the_fields_and_is_named_by_them(panel: Ulysses) -> None:
    """Choosing a model sets tokens, heads and dimension; other fields are no model."""
    assert panel.model.value == "other"
    panel.model.value = "FLUX.1-1024"
    assert panel.controls.values()["sequence"] == 4608
    assert panel.controls.values()["heads"] == 24
    panel.controls.set(sequence=32760, heads=40)
    assert panel.model.value == "Wan2-14B-480p"
    panel.controls.set(sequence=32761)
    assert panel.model.value == "other"


def test_measure_also_runs_what_it_is_compared_with(panel: Ulysses) -> None:
    """Measure brings the hidden share: it runs the attention alone and serial once, too."""
    panel.visible = "GPUs"
    panel.measure()
    assert "Done: 4 runs" in panel.strip.message.value
    assert "compute time of a simulated run" in panel.strip.badges.value
    (setting, total_s, hidden, badge), = drawn(panel, "measured", "setting", "total_s",
                                               "hidden_ratio", "badge")
    assert (setting, badge) == ("4", "SIMULATED")
    found = panel.shown.prediction
    assert total_s == pytest.approx(found.summary["total_s"], rel=0.05)
    assert hidden == pytest.approx(found.terms["hidden_ratio"], abs=0.1)
    panel.measure()
    assert "Done: 1 runs" in panel.strip.message.value


def test_a_sweep_over_modes_shows_each(panel: Ulysses) -> None:
    """Sweep on the figure of modes measures all three, beside their predictions."""
    panel.sweep()
    predicted = dict(drawn(panel, "predicted", "row", "total_s"))
    measured = dict(drawn(panel, "measured", "row", "total_s"))
    assert set(measured) == {"fused", "dedicated", "serial"}
    assert set(predicted) == {*measured, "compute-then-copy"}
    for mode, seconds in measured.items():
        assert seconds == pytest.approx(predicted[mode], rel=0.05)


def test_gpu_counts_that_cannot_be_are_apart(panel: Ulysses) -> None:
    """A sweep over GPUs measures divisors of the heads; the others stand with their reason."""
    panel.visible = "GPUs"
    panel.sweep()
    assert {setting for setting, in drawn(panel, "measured", "setting")} == {"1", "2", "3", "4",
                                                                              "6"}
    assert {setting for setting, in drawn(panel, "predicted", "setting")} == {"1", "2", "3", "4",
                                                                              "6"}
    shut = dict(drawn(panel, "infeasible", "setting", "reason"))
    assert set(shut) == {"5", "7", "8"}
    assert all("divisors of heads = 12" in reason for reason in shut.values())
    hidden = dict(drawn(panel, "measured", "setting", "hidden_ratio"))
    assert math.isnan(hidden["1"])
    assert not math.isnan(hidden["2"])


def test_costs_of_the_step_change_the_step_alone(panel: Ulysses) -> None:
    """The fixed costs move the whole step and its words, and nothing of the attention."""
    panel.visible = "GPUs"
    before = drawn(panel, "predicted", "step_s", "total_s")
    panel.controls.set(per_peer_s=20e-6)
    after = drawn(panel, "predicted", "step_s", "total_s")
    for (step, total), (dearer, same) in list(zip(before, after, strict=True))[1:]:
        assert dearer > step
        assert same == total
    assert "GPUs are faster" in panel.words.value
    assert "per_peer" in panel.strip.badges.value


@pytest.mark.parametrize(("settings", "says"), [
    ({"heads": 30}, "divisors of heads = 30"),
    ({"n_gpus": 5}, "n_gpus = 5"),
    ({"sequence": 3}, "sequence = 3 tokens"),
    ({"mode": "dedicated", "n_comm_sms": 148}, "1 to 147"),
    ({"tile_m": 512}, "KiB of shared memory"),
    ({"machine": "RTX-PRO-5000", "tile_n": 16}, "flop_per_s"),
    ({"sync_s": -1e-6}, "sync_s"),
])
def test_impossible_settings_say_why(panel: Ulysses, settings: dict[str, Any], says: str) -> None:
    """Impossible settings are not clamped: the last picture fades and the reason shows."""
    panel.controls.set(**settings)
    assert says in panel.words.value
    assert "xstage-stale" in panel.figures._dom_classes


def test_one_sm_shows_whom_it_is_asked_for(panel: Ulysses) -> None:
    """The timeline shows the chosen SM of the run; one that only sends computes nothing."""
    panel.controls.set(mode="dedicated", sm=147)
    panel.visible = "One SM"
    panel.measure()
    assert {lane for lane, in drawn(panel, "tiles", "lane")} <= {"issue", "slot wait"}
    panel.controls.set(sm=0)
    assert "MMA" in {lane for lane, in drawn(panel, "tiles", "lane")}


def test_unknown_keywords_are_refused_with_a_hint() -> None:
    """A keyword that no control has is refused, and the nearest are named."""
    with pytest.raises(UnknownName, match="n_comm_sms"):
        Ulysses(comm_sms=4)


def test_export_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export measures once and writes every figure of the panel with its data."""
    monkeypatch.setenv(BROWSER_VARIABLE, "no-such-browser")
    assert main(["export", "--workload", "ulysses", "--model", "FLUX.1-1024", "--gpus", "4",
                 "--causal", "--out", str(tmp_path)]) == 0
    names = {path.stem for path in tmp_path.iterdir()}
    assert {"attention-modes", "attention-gpus", "attention-tokens", "timeline"} <= names
