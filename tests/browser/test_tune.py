"""The tune notebook in a real browser: drag, measure, sweep, stop, export, reload."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from live_lab import OpenNotebook, OpenNotebookNamed
from playwright.sync_api import Locator, expect

pytestmark = pytest.mark.browser

expect.set_options(timeout=30_000)  # a busy machine is slow, not wrong
NOTEBOOK = "03_tune.ipynb"
# The data of a figure's source in the page, by the names of both.
DATA = """([title, source]) => {
    for (const document of Bokeh.documents) {
        const models = [...document._all_models.values()]
        if (models.some(m => m.type === 'Title' && m.text === title)) {
            const found = models.find(m => m.type === 'ColumnDataSource' && m.name === source)
            const columns = found.data instanceof Map ? [...found.data] : Object.entries(found.data)
            return columns.map(([name, values]) => [name, [...values]])
        }
    }
    return []
}"""
MAP = "Predicted total time over tile and depth"
TOTALS, SERIES = "Total time: fused, or computed and then copied", "Total time against one setting"


class Tuning:
    """The first panel of the open notebook."""

    def __init__(self, notebook: OpenNotebook) -> None:
        self.notebook, self.page = notebook, notebook.page
        self.panel = self.page.locator(".xstage-panel").first
        self.panel.scroll_into_view_if_needed()
        expect(self.panel.locator(".bk-Figure").first).to_be_visible()

    def data(self, title: str, source: str) -> dict[str, list[Any]]:
        """Return what the page holds of a figure's source."""
        return dict(self.page.evaluate(DATA, [title, source]))

    def press(self, button: str) -> None:
        """Press a button of the strip."""
        self.panel.get_by_role("button", name=button).click()

    def open_tab(self, title: str) -> None:
        """Choose a figure."""
        self.panel.locator(".lm-TabBar-tab", has_text=title).click()

    def message(self, pattern: str) -> Locator:
        """Return what the strip says, if it matches."""
        return self.panel.locator(".xstage-message", has_text=re.compile(pattern))

    def handle(self, slider: str) -> Locator:
        """Return the handle of a slider."""
        row = self.panel.locator(".widget-inline-hbox", has_text=re.compile(f"^{slider}"))
        return row.locator(".noUi-handle")

    def drag(self, slider: str, pixels: int) -> None:
        """Drag a slider's handle in small steps, as a hand does."""
        handle = self.handle(slider)
        handle.scroll_into_view_if_needed()
        box = handle.bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        for step in range(1, abs(pixels) + 1):
            self.page.mouse.move(x + (step if pixels > 0 else -step), y)
        self.page.mouse.up()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds in the page."""
        for _ in range(300):
            if holds():
                return
            self.page.wait_for_timeout(100)
        pytest.fail(f"{what} did not happen")


@pytest.fixture
def tuning(open_notebook: OpenNotebookNamed) -> Tuning:
    """Open the notebook, run all of it, and return its first panel."""
    notebook = open_notebook(NOTEBOOK, height=1000)
    notebook.run_all()
    return Tuning(notebook)


def _predicted(tuning: Tuning) -> float:
    times = tuning.data(TOTALS, "times")
    return float(times["end_s"][times["row"].index("predicted")])


def _measured(tuning: Tuning) -> float | None:
    times = tuning.data(TOTALS, "times")
    value = times["end_s"][times["row"].index("measured")]
    return None if not isinstance(value, int | float) or value != value else float(value)


def test_dragging_the_tile_moves_the_prediction(tuning: Tuning) -> None:
    """A dragged tile slider moves the predicted bar in data and in pixels, and does not measure."""
    figure = tuning.panel.locator(".bk-Figure").first
    before, picture = _predicted(tuning), figure.screenshot()
    tuning.drag("tile m", -8)
    tuning.until(lambda: _predicted(tuning) != before, "another prediction")
    tuning.page.wait_for_timeout(300)  # the page paints at its next frame
    assert figure.screenshot() != picture
    assert _measured(tuning) is None


def test_measured_points_say_simulated_and_outlive_a_reload(tuning: Tuning) -> None:
    """Measure brings a bar with the badge SIMULATED, and a saved and reloaded page still has it."""
    simulated = tuning.panel.locator(".xstage-badge", has_text="SIMULATED")
    assert simulated.count() == 0
    tuning.press("Measure")
    expect(tuning.message("^Done")).to_be_visible(timeout=60_000)
    tuning.until(lambda: _measured(tuning) is not None, "a measured bar")
    measured = _measured(tuning)
    expect(simulated).to_be_visible()
    assert measured == pytest.approx(_predicted(tuning), rel=0.2)
    tuning.page.keyboard.press("Control+s")
    tuning.page.wait_for_timeout(1000)
    tuning.page.reload()
    again = Tuning(tuning.notebook)
    again.until(lambda: bool(again.data(TOTALS, "times")), "the figure")
    assert _measured(again) == measured
    # JupyterLab may draw saved output before the kernel has told it the models, and then again.
    complaints = tuning.notebook.complaints
    complaints[:] = [line for line in complaints if "widget model not found" not in line]


def test_stop_ends_a_sweep_at_once(tuning: Tuning) -> None:
    """Stop in the middle of a sweep keeps the points that are there and frees the panel."""
    tuning.panel.get_by_label("shape").select_option("GEMM + RS, K = 4096")
    tuning.open_tab("Series")
    tuning.press("Sweep")
    tuning.until(lambda: len(tuning.data(SERIES, "measured")["total_s"]) > 0, "a first point")
    tuning.press("Stop")
    expect(tuning.message("^Stopped after")).to_be_visible(timeout=10_000)
    tuning.page.wait_for_timeout(500)  # the redraw of the last point that came
    n_points = len(tuning.data(SERIES, "measured")["total_s"])
    assert 0 < n_points < len(tuning.data(SERIES, "predicted")["total_s"])
    expect(tuning.panel.get_by_role("button", name="Sweep")).to_be_enabled()
    tuning.page.wait_for_timeout(1500)
    assert len(tuning.data(SERIES, "measured")["total_s"]) == n_points


def test_find_the_best_shows_points_and_sets_the_controls(tuning: Tuning) -> None:
    """Points of the search arrive on the map, and the controls end on what the words name."""
    tuning.press("Find the best")
    expect(tuning.panel.get_by_role("button", name="Measure")).to_be_disabled()
    tuning.until(lambda: len(tuning.data(MAP, "measured").get("total_s", [])) > 0, "a point")
    expect(tuning.message("^Done: [0-9]+ runs. The controls are set")).to_be_visible(
        timeout=90_000)
    tuning.page.wait_for_timeout(500)  # the redraw of the last point that came
    tuning.notebook.screenshot("tune-find-the-best")
    measured = tuning.data(MAP, "measured")
    fastest = measured["total_s"].index(min(measured["total_s"]))
    finding = tuning.panel.locator(".xstage-finding")
    expect(finding).to_contain_text(re.compile("The best of .* SIMULATED"))
    expect(finding).to_contain_text("Runner-up")
    expect(finding).to_contain_text("compute-then-copy")
    readout = tuning.handle("tile m").locator("xpath=ancestor::*[contains(@class,'hbox')][1]")
    shown = measured["tile_m"][fastest]
    expect(finding).to_contain_text(f"tile {shown:.0f}×")
    expect(readout.locator(".widget-readout")).to_have_text(f"{shown:.0f}")
    assert tuning.panel.evaluate("e => e.scrollWidth <= e.clientWidth + 1")


def test_controls_moved_during_a_search_stay(tuning: Tuning) -> None:
    """A slider moved while the search runs is left where it is; the best is offered instead."""
    tuning.panel.get_by_label("shape").select_option("GEMM + RS, K = 4096")
    tuning.press("Find the best")
    tuning.until(lambda: len(tuning.data(MAP, "measured").get("total_s", [])) > 0, "a point")
    tuning.drag("operand stages", -30)
    tuning.press("Stop")
    expect(tuning.message("^Stopped: [0-9]+ runs. The controls were moved")).to_be_visible()
    offered = tuning.panel.get_by_role("button", name="Set the controls")
    expect(offered).to_be_visible()
    tuning.notebook.screenshot("tune-offered")
    offered.click()
    expect(offered).to_be_hidden()


def test_sweep_turns_to_the_figure_of_its_points(tuning: Tuning) -> None:
    """After Sweep the tab Series is open, and its points arrive there."""
    tuning.press("Sweep")
    expect(tuning.panel.locator(".lm-TabBar-tab.lm-mod-current")).to_have_text("Series")
    expect(tuning.message("^Done")).to_be_visible(timeout=60_000)
    tuning.until(lambda: len(tuning.data(SERIES, "measured")["total_s"]) > 0, "a first point")


def test_impossible_settings_say_why_and_keep_the_picture(tuning: Tuning) -> None:
    """A tile that does not fit is shown as impossible with its reason, over a faded picture."""
    tuning.drag("tile m", 90)
    problem = tuning.panel.locator(".xstage-problem")
    expect(problem).to_contain_text("KiB of shared memory")
    expect(tuning.panel.locator(".xstage-tabs")).to_have_class(re.compile("xstage-stale"))
    assert _predicted(tuning) > 0
    tuning.drag("tile m", -90)
    expect(problem).to_have_count(0)
    expect(tuning.panel.locator(".xstage-tabs")).not_to_have_class(re.compile("xstage-stale"))


def test_export_writes_the_visible_figure(tuning: Tuning) -> None:
    """Export leaves page, data, parameters and pictures of the visible figure in the folder."""
    tuning.open_tab("Tile")
    tuning.press("Export")
    expect(tuning.message("^Wrote tile-depth-map.html")).to_be_visible(timeout=90_000)
    folder = tuning.notebook.folder / "exports"
    assert {path.name for path in folder.iterdir()} == {
        f"tile-depth-map{suffix}" for suffix in (".html", ".csv", ".json", ".svg", ".png")}
    about = json.loads((folder / "tile-depth-map.json").read_text())
    assert about["parameters"]["settings"]["tile_m"] == 128
    assert "PREDICTED" in about["provenance"]["badge"]


@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (1920, "light")])
def test_nothing_is_cut_off(open_notebook: OpenNotebookNamed, width: int, theme: str) -> None:
    """On narrow and wide pages no part of the panel sticks out, and every tab title is whole."""
    notebook = open_notebook(NOTEBOOK, width=width, height=1000, theme=theme)
    notebook.run_all()
    tuning = Tuning(notebook)
    notebook.screenshot(f"tune-{width}-{theme}")
    assert tuning.panel.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    for words in (".lm-TabBar-tabLabel", ".jupyter-button"):
        for shown in tuning.panel.locator(f"{words}:visible").all():
            assert shown.evaluate("e => e.scrollWidth <= e.clientWidth"), shown.inner_text()


def test_the_burst_notebook_opens_cleanly(open_notebook: OpenNotebookNamed) -> None:
    """The burst notebook runs, and its figures appear without a complaint from the page."""
    notebook = open_notebook("01_burst_gap.ipynb", height=1000)
    notebook.run_all()
    panels = notebook.page.locator(".xstage-panel")
    expect(panels).to_have_count(3)  # two with figures, and the calculator
    panels.first.scroll_into_view_if_needed()
    expect(panels.first.locator(".bk-Figure").first).to_be_visible()
    notebook.screenshot("burst-gap")


def test_the_picture_of_the_readme(open_notebook: OpenNotebookNamed) -> None:
    """A measured run shows one SM's lanes with the link's backlog below."""
    notebook = open_notebook(NOTEBOOK, width=1280, height=1000)
    notebook.run_all()
    tuning = Tuning(notebook)
    tuning.panel.get_by_label("shape").select_option("8192 × 7168 × 2048")
    tuning.drag("issue depth", 4)
    tuning.press("Measure")
    expect(tuning.message("^Done")).to_be_visible(timeout=60_000)
    tuning.open_tab("One SM")
    tuning.until(lambda: bool(tuning.data("One SM over time", "backlog")), "the backlog")
    notebook.page.wait_for_timeout(500)
    notebook.screenshot("tune")
