"""The calibration panel without a browser: measure, judge, save, compare, and what can go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from xstage_lab.analysis import Calibration
from xstage_lab.errors import UnknownName
from xstage_lab.lab import Calibrate
from xstage_lab.runlog import RunLog

SMALL = {"machine": "A100-SXM", "n_producers": 16, "repeats": 1}


@pytest.fixture
def panel(tmp_path: Path) -> Calibrate:
    made = Calibrate(**SMALL)
    made.folder.value = str(tmp_path)
    yield made
    made.close()


def test_calibrating_shows_fit_interval_and_verdict(panel: Calibrate) -> None:
    """After the experiments the figures hold samples and fit, and the verdict is in words."""
    panel.measure()
    assert panel.calibration is not None
    assert panel.calibration.badge == "SIMULATED"
    for figure in list(panel.plots.values())[:3]:
        series = set(figure.plot.data()["series"])
        assert {"measured", "fit"} <= series
    assert "90 % interval" in panel.result.value
    assert "SIMULATED" in panel.result.value
    assert "Done" in panel.message.value


def test_every_sample_is_in_the_run_log(
    panel: Calibrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs behind a calibration are in the log, so that it can be fitted again."""
    monkeypatch.setenv("XSTAGE_RUNLOG", str(tmp_path / "runs.sqlite"))
    panel.measure()
    log = RunLog()
    trains = [s for s in panel.samples if "," not in s.experiment]
    assert len(log.runs(machine="A100-SXM", device="simulated")) >= len(trains) > 10
    log.close()


def test_saved_calibrations_stand_side_by_side(panel: Calibrate, tmp_path: Path) -> None:
    """Save keeps what was fitted, a second one of the name is told, and both names are listed."""
    panel.measure()
    panel.name.value = "first"
    panel.save()
    saved = Calibration.load(tmp_path / "first.json")
    assert saved == panel.calibration
    panel.save()
    assert "is there already" in panel.message.value
    assert Calibration.load(tmp_path / "first.json") == saved
    panel.name.value = "second"
    panel.save()
    assert "first" in panel.overlay.value
    assert "second" in panel.overlay.value


def test_nothing_to_save_is_told(panel: Calibrate) -> None:
    """Save before Calibrate says what to do and writes nothing."""
    panel.save()
    assert "press Calibrate" in panel.message.value
    assert list(Path(panel.folder.value).iterdir()) == []


def test_export_writes_figure_data_and_parameters(
    panel: Calibrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Export leaves the visible figure with its data and the calibration it shows."""
    monkeypatch.setattr("xstage_lab.export.find_browser", lambda: None)
    panel.measure()
    panel.export()
    written = {path.suffix for path in tmp_path.iterdir()}
    assert {".html", ".csv", ".json"} <= written
    assert "drain_bytes_per_s" in next(tmp_path.glob("*.json")).read_text()


def test_impossible_settings_are_told(panel: Calibrate) -> None:
    """More producers than SMs end in a message that names both, and the panel lives on."""
    panel.controls.set(n_producers=10_000)
    panel.measure()
    assert "n_producers" in panel.message.value
    assert "108" in panel.message.value
    panel.controls.set(n_producers=16)
    panel.measure()
    assert panel.calibration is not None


def test_unknown_settings_are_refused() -> None:
    """A misspelt keyword names the setting that was meant."""
    with pytest.raises(UnknownName, match="n_producers"):
        Calibrate(producers=3)
