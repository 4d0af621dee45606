"""The panels without a browser: controls, redraws, measuring, stopping and exporting."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from importlib import metadata

import pytest

from xstage_lab.errors import FileRejected, InvalidValue, UnknownName
from xstage_lab.lab import BurstGap, Calculator, Tune, controls, panel
from xstage_lab.lab.coalesce import Coalescer
from xstage_lab.lab.panel import Panel


def test_a_flood_of_changes_gives_few_redraws_and_ends_on_the_last():
    """100 changes a second for 2 s redraw rarely, and the last redraw sees the last value."""
    value, drawn = 0, []

    def redraw() -> None:
        time.sleep(0.05)  # a redraw that cannot keep up
        drawn.append(value)

    async def drag() -> None:
        nonlocal value
        ask = Coalescer(redraw)
        for value in range(1, 201):  # noqa: B007 - read by redraw
            ask()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)

    asyncio.run(drag())
    assert drawn[-1] == 200
    assert 2 <= len(drawn) <= 60


def test_a_change_made_while_redrawing_is_drawn():
    """A value that changes in the middle of a redraw gets a redraw of its own."""
    drawn: list[int] = []

    async def main() -> None:
        value = [1]

        def redraw() -> None:
            drawn.append(value[0])
            if value[0] == 1:
                value[0] = 2
                ask()

        ask = Coalescer(redraw)
        ask()
        await asyncio.sleep(0.2)

    asyncio.run(main())
    assert drawn == [1, 2]


def test_a_redraw_that_fails_does_not_block_the_next():
    """After an exception in a redraw, the next change redraws again."""
    calls: list[int] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def redraw() -> None:
            calls.append(1)
            raise ZeroDivisionError

        ask = Coalescer(redraw)
        for _ in range(2):
            ask()
            await asyncio.sleep(0.1)

    asyncio.run(main())
    assert len(calls) == 2


def test_without_a_loop_every_change_redraws_at_once():
    """In a script a change has been drawn when the assignment returns."""
    drawn: list[int] = []
    ask = Coalescer(lambda: drawn.append(1))
    ask()
    ask()
    assert len(drawn) == 2


def _controls() -> controls.Controls:
    return controls.Controls(
        n_producers=controls.whole("n_producers", "producers", 148, 1, 160),
        burst_bytes=controls.log("burst_bytes", "burst", 32 * 1024, 1, 1024),
        gap_s=controls.real("gap_s", "gap", 3e-6, 0.0, 20.0, 0.05),
        m=controls.field("m", "m", 4096),
        sync=controls.choice("sync", "sync", "free", ("free", "lockstep")))


def test_controls_show_units_and_give_si():
    """Widgets hold KiB and us, settings come out in bytes and seconds, counts as integers."""
    made = _controls()
    assert made["burst_bytes"].value == pytest.approx(32)
    assert made["gap_s"].value == pytest.approx(3)
    assert "KiB" in made["burst_bytes"].description
    assert "us" in made["gap_s"].description
    assert made.values() == {"n_producers": 148, "burst_bytes": 32768,
                             "gap_s": pytest.approx(3e-6), "m": 4096, "sync": "free"}


def test_values_beyond_a_slider_are_taken_as_they_are():
    """A setting outside its slider's range widens the slider and is not clamped."""
    made = _controls()
    wanted = {"n_producers": 5000, "burst_bytes": 2**24, "gap_s": 1e-3, "m": -7}
    made.set(**wanted)
    assert {name: made.values()[name] for name in wanted} == {
        **wanted, "gap_s": pytest.approx(1e-3)}


@pytest.mark.parametrize(("setting", "kind", "says"), [
    ({"n_producer": 1}, UnknownName, "n_producers"),
    ({"sync": "locked"}, UnknownName, "lockstep"),
    ({"gap_s": "3us"}, InvalidValue, "gap_s = '3us'"),
    ({"gap_s": float("nan")}, InvalidValue, "gap_s"),
    ({"n_producers": 1.5}, InvalidValue, "whole numbers"),
    ({"burst_bytes": 0}, InvalidValue, "above 0"),
])
def test_bad_settings_are_named(setting, kind, says):
    """A setting that is unknown or no number is refused, with what would be right."""
    with pytest.raises(kind, match=says):
        _controls().set(**setting)


SMALL = {"m": 2048, "n": 2048, "k": 1024}


@pytest.fixture
def close() -> Iterator[list[Panel]]:
    """Panels to close after the test, so that their workers end."""
    opened: list[Panel] = []
    yield opened
    for each in opened:
        each.close()


def _open(close: list[Panel], kind: type[Panel], **settings) -> Panel:
    close.append(kind(**settings))
    return close[-1]


def _is_stale(made: Panel) -> bool:
    return "xstage-stale" in made.figures._dom_classes


@pytest.mark.parametrize("kind", [BurstGap, Tune])
def test_moving_controls_predicts_and_never_measures(close, kind):
    """Every change of a control changes the numbers at once and starts no worker."""
    made = _open(close, kind, machine="GB300-NVL")
    numbers = made.numbers.value
    made.controls.set(machine="B200-SXM", drain_bytes_per_s=2e11)
    assert made.numbers.value != numbers
    assert made.points == []
    assert made._worker is None


@pytest.mark.parametrize("kind", [BurstGap, Tune, Calculator])
def test_unknown_keywords_are_refused_with_a_hint(kind):
    """A keyword that no control has is refused, and the nearest are named."""
    with pytest.raises(UnknownName, match="drain_bytes_per_s"):
        kind(drain_byte_per_s=1e9)


@pytest.mark.parametrize(("settings", "kind"), [
    ({"machine": "B2000"}, UnknownName),
    ({"machine": "nowhere.csv"}, FileRejected),
    ({"tile_m": "big"}, InvalidValue),
    ({"k": None}, InvalidValue),
])
def test_bad_keywords_of_a_panel_are_named(settings, kind):
    """A setting that cannot be shown at all is refused when the panel is made."""
    with pytest.raises(kind):
        Tune(**settings)


@pytest.mark.parametrize(("settings", "says"), [
    ({"tile_m": 512}, "KiB of shared memory"),
    ({"issue_depth": 8}, "KiB of shared memory"),
    ({"n_gpus": 9}, "n_gpus = 9"),
    ({"n_gpus": 0}, "n_gpus = 0"),
    ({"k": -5}, "k = -5"),
    ({"machine": "MI355X"}, "drain rate"),
    ({"drain_bytes_per_s": 0}, "egress_bytes_per_s"),
    ({"machine": "RTX-PRO-5000", "tile_n": 64}, "flop_per_s"),
])
def test_impossible_settings_keep_the_last_picture_and_say_why(close, settings, says):
    """Impossible settings are not clamped: the last picture fades and the reason shows."""
    made = _open(close, Tune)
    numbers, shown = made.numbers.value, made.shown
    possible = {name: made.controls.values()[name] for name in settings}
    made.controls.set(**settings)
    assert says in made.words.value
    assert made.numbers.value == numbers
    assert made.shown is shown
    assert _is_stale(made)
    assert {name: made.controls.values()[name] for name in settings} == settings
    made.controls.set(**possible)
    assert not _is_stale(made)
    assert "xstage-problem" not in made.words.value


def test_a_panel_opens_on_impossible_settings(close):
    """A panel made with settings that cannot run opens, says why, and recovers."""
    made = _open(close, BurstGap, n_producers=149)
    assert "148 SMs" in made.words.value
    made.export()
    assert "no figure yet" in made.strip.message.value
    made.controls.set(n_producers=148)
    assert "us" in made.numbers.value


def test_packages_that_do_not_fit_are_named_above_the_panel(close, monkeypatch):
    """A Bokeh that does not fit is named with its version and the remedy, above the figures."""
    installed = metadata.version
    monkeypatch.setattr(metadata, "version",
                        lambda name: "2.4.3" if name == "bokeh" else installed(name))
    made = _open(close, BurstGap)
    assert "bokeh 2.4.3" in made.children[0].value
    assert "pip install" in made.children[0].value


def test_text_that_is_no_number_is_named(close):
    """Letters in a field of the store path are told as what they are."""
    made = _open(close, BurstGap)
    made.controls["capacity_bytes"].value = "lots"
    assert "capacity_bytes = &#x27;lots&#x27; KiB" in made.words.value


def test_a_machine_without_a_drain_rate_works_once_it_is_entered(close):
    """An unknown R is refused until it is entered, and then it is ASSUMED."""
    made = _open(close, BurstGap, machine="MI355X")
    assert made.shown is None
    made.controls.set(drain_bytes_per_s=4e11)
    assert made.shown is not None
    assert "drain" in made.shown.assumed()
    assert "ASSUMED" in made.strip.badges.value


def test_a_figure_is_opened_by_its_title(close):
    """Setting `visible` opens that figure, and an unknown title is refused with the titles."""
    made = _open(close, Tune)
    made.visible = "Series"
    assert made.figures.selected_index == 3
    with pytest.raises(UnknownName, match="Residuals"):
        made.visible = "Residual"


def test_only_the_visible_figure_is_redrawn(close):
    """A change redraws the visible figure alone; the others follow when they are opened."""
    made = _open(close, Tune)
    drawn = []
    for title, tab in made.tabs.items():
        def draw(plot, picture, title=title, draw=tab.draw):
            drawn.append(title)
            return draw(plot, picture)
        made.tabs[title] = tab._replace(draw=draw)
    made.controls.set(issue_depth=3)
    assert drawn == ["Times"]
    made.figures.selected_index = 2
    assert drawn == ["Times", "Tile × depth"]


def test_measure_shows_a_simulated_point_beside_the_prediction(close):
    """Measure times the tile without stores, then the run, and both feed the comparison."""
    made = _open(close, Tune, **SMALL)
    assert "FLOP and memory rates" in made.strip.badges.value
    made.measure()
    assert len(made.points) == 1
    assert "SIMULATED" in made.strip.badges.value
    assert "compute time of a simulated run" in made.strip.badges.value
    assert made.shown.comparison.error_ratio["total_s"] == pytest.approx(0.0, abs=0.1)
    assert made.tabs["Times"].plot.data()["end_s"].tolist().count(
        made.points[0].record.summary["total_s"]) == 1


def test_points_belong_to_their_settings(close):
    """A measured point vanishes with the settings it was made at, and returns with them."""
    made = _open(close, BurstGap, n_bursts=4)
    made.measure()
    assert made.shown.comparison is not None
    made.controls.set(n_producers=100)
    assert made.shown.comparison is None
    assert made.tabs["Issue time"].plot.data()["series"].tolist().count("measured") == 0
    made.controls.set(n_producers=148)
    assert made.shown.comparison is not None


@pytest.mark.parametrize(("tab", "varied"), [
    (1, "gap_s"), (3, "burst_bytes"), (4, "n_producers")])
def test_sweep_varies_the_axis_of_the_visible_figure(close, tab, varied):
    """Sweep measures along the visible figure's axis, near the law, and the figure shows it all."""
    made = _open(close, BurstGap, n_bursts=10)
    made.figures.selected_index = tab
    made.sweep()
    assert "Done" in made.strip.message.value
    assert len({point.values[varied] for point in made.points}) == len(made.points) >= 12
    shown = made.tabs[made.visible].plot.data()["series"].tolist()
    assert shown.count("measured") == len(made.points)


def test_a_series_skips_what_cannot_run(close):
    """A sweep over depth measures the depths that fit and draws the others as missing."""
    made = _open(close, Tune, **SMALL)
    made.figures.selected_index = 3
    made.sweep()
    assert [point.values["issue_depth"] for point in made.points] == [1, 2, 3, 4, 5]
    data = made.tabs["Series"].plot.data()
    assert (data["series"] == "measured").sum() == 5


def test_published_runs_replay_and_nothing_else_does(close):
    """The recorded device gives back what was published, and refuses everything nobody ran."""
    made = _open(close, Tune, machine="H100-SXM", device="recorded", series="k", m=32768, n=32768,
                 k=2048, destinations="row-owner", tile_n=256)
    made.measure()
    assert made.points[0].record.summary["total_s"] == pytest.approx(7.531e-3)
    assert "RECORDED" in made.strip.badges.value
    made.controls.set(k=2000)
    made.measure()
    assert "k = 2048 (asked for: 2000)" in made.strip.message.value
    made.controls.set(series="tile")
    made.sweep()
    assert "Choose k" in made.strip.message.value
    made.controls.set(machine="B200-SXM")
    made.measure()
    assert "nothing is recorded of B200-SXM" in made.strip.message.value
    assert len(made.points) == 1


def test_export_writes_figure_data_and_parameters(close, tmp_path, monkeypatch):
    """Export writes the visible figure with all settings, and a bad folder is told in words."""
    monkeypatch.setenv("XSTAGE_CHROMIUM", "no-such-browser")
    made = _open(close, Tune)
    made.strip.folder.value = str(tmp_path / "out")
    made.figures.selected_index = 2
    made.export()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"tile-depth-map{suffix}" for suffix in (".html", ".csv", ".json")}
    assert "No SVG and PNG" in made.strip.message.value
    about = json.loads((tmp_path / "out/tile-depth-map.json").read_text())
    assert about["parameters"]["settings"] == made.controls.values()
    assert about["parameters"]["machine"]["name"] == "B200-SXM"
    assert about["provenance"]["badge"] == "PREDICTED, ASSUMED"
    (tmp_path / "file").write_text("")
    made.strip.folder.value = str(tmp_path / "file")
    made.export()
    assert "cannot be written" in made.strip.message.value
    assert not made.strip._export.disabled


def test_export_of_the_timeline_has_its_trace(close, tmp_path, monkeypatch):
    """Export of One SM writes the measured run's trace beside the figure, once there is one."""
    monkeypatch.setenv("XSTAGE_CHROMIUM", "no-such-browser")
    made = _open(close, Tune, m=1024, n=1024, k=256, n_gpus=2)
    made.strip.folder.value = str(tmp_path)
    made.visible = "One SM"
    made.export()
    assert not (tmp_path / "timeline.trace.json").exists()
    made.measure()
    made.export()
    content = json.loads((tmp_path / "timeline-2.trace.json").read_text())
    tiles = made.points[-1].record.tiles
    assert sum(e.get("cat") == "MMA" for e in content["traceEvents"]) == (tiles["gpu"] == 0).sum()
    assert "timeline-2.trace.json" in made.strip.message.value


def test_old_tiles_are_let_go_and_their_numbers_stay(close, monkeypatch):
    """Beyond the budget the oldest points lose their per-tile times, never their summary."""
    monkeypatch.setattr(panel, "MOST_TILE_BYTES", 1)
    made = _open(close, BurstGap, n_bursts=2)
    made.figures.selected_index = 3
    made.sweep()
    kept = [point.record.tiles is not None for point in made.points]
    assert kept == [False] * (len(kept) - 1) + [True]
    assert all(point.record.summary["accepted_s"] > 0 for point in made.points)


def test_measuring_leaves_the_kernel_free_and_stops(close):
    """Behind an event loop a sweep runs beside the kernel, says so, and Stop ends it."""
    said: list[str] = []

    async def main() -> Panel:
        made = _open(close, BurstGap, n_bursts=100)
        made.strip.message.observe(lambda change: said.append(change["new"]), names="value")
        assert "once the running cell has finished" in made.strip.message.value
        made.sweep()
        assert made.points == []  # points come while the loop runs, not before
        while not made.points:
            await asyncio.sleep(0.01)
        made.stop()
        while made._running:
            await asyncio.sleep(0.01)
        return made

    made = asyncio.run(main())
    assert 1 <= len(made.points) < 21
    assert "Stopped after" in said[-1]


@pytest.mark.parametrize(("settings", "says"), [
    ({}, "Blocked by the link: a tile takes 6.76 us where the SM alone would take 5 us"),
    ({"t_mma_s": 20e-6}, "Not blocked by the link"),
    ({"t_mma_s": 5e-6, "issue_depth": 1}, "would take 5.76 us"),
    ({"t_mma_s": 20e-6, "capacity_bytes": 0}, "each such burst waits 6 us"),
    ({"t_mma_s": 0.1e-6, "tile_bytes": 1024}, "The MMA waits 0.66 us"),
    ({"tile_bytes": 10**6}, "Already the first tile of each SM"),
    ({"drain_bytes_per_s": 0}, "drain_bytes_per_s = 0.0 B/s"),
    ({"t_mma_s": -1e-6}, "t_mma_s"),
])
def test_calculator_says_whether_and_by_how_much(settings, says):
    """The calculator's verdicts on a B200 carry the numbers worked out by hand."""
    assert says in Calculator(**settings).answer.value
