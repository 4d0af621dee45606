"""The MoE notebook in a real browser: change the model, drag, measure both orders, export."""

from __future__ import annotations

import json

import pytest
from live_lab import OpenNotebook, OpenNotebookNamed
from playwright.sync_api import expect
from test_tune import Tuning

pytestmark = pytest.mark.browser

expect.set_options(timeout=30_000)  # a busy machine is slow, not wrong
NOTEBOOK = "04_moe_schedule.ipynb"
ORDERS = "SMs at work, and the link's backlog"
TIMES = "Total time of both orders, and unfused"


class Lab(Tuning):
    """A panel of the open notebook."""

    def __init__(self, notebook: OpenNotebook, number: int = 0) -> None:
        self.notebook, self.page = notebook, notebook.page
        self.panel = self.page.locator(".xstage-panel").nth(number)
        self.panel.scroll_into_view_if_needed()
        expect(self.panel.locator(".bk-Figure:visible").first).to_be_visible()


def _shares(lab: Lab, order: str) -> list[float]:
    return lab.data(ORDERS, order)["first_ratio"]


def test_a_model_is_chosen_dragged_measured_and_exported(open_notebook: OpenNotebookNamed) -> None:
    """Model and tokens move the prediction; Measure shows both orders SIMULATED; Export writes."""
    notebook = open_notebook(NOTEBOOK, height=1000)
    notebook.run_all()
    lab = Lab(notebook)
    first = _shares(lab, "wave")
    lab.panel.get_by_label("model").select_option("DSv4-Flash")
    lab.until(lambda: _shares(lab, "wave") != first, "a prediction of the other model")
    second = _shares(lab, "interleaved")
    lab.drag("tokens per GPU", 12)
    lab.until(lambda: _shares(lab, "interleaved") != second, "a prediction at other tokens")
    assert lab.panel.locator(".xstage-badge", has_text="SIMULATED").count() == 0
    predicted = {order: _shares(lab, order) for order in ("wave", "interleaved")}
    lab.press("Measure")
    expect(lab.message("^Done: 2 runs")).to_be_visible(timeout=60_000)
    for order, before in predicted.items():
        lab.until(lambda order=order, before=before: _shares(lab, order) != before,
                  f"the measured run, {order},")
    expect(lab.panel.locator(".xstage-badge", has_text="SIMULATED")).to_be_visible()
    lab.open_tab("Times")
    lab.until(lambda: lab.data(TIMES, "times")["part"].count("SIMULATED") == 2, "both bars")
    lab.open_tab("Orders")
    lab.press("Export")
    expect(lab.message("^Wrote orders.html")).to_be_visible(timeout=90_000)
    about = json.loads((notebook.folder / "exports/orders.json").read_text())
    assert about["parameters"]["settings"]["hidden"] == 4096
    assert "SIMULATED" in about["provenance"]["badge"]


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1920, "dark")])
def test_every_figure_is_whole(open_notebook: OpenNotebookNamed, width: int, theme: str) -> None:
    """On narrow and wide pages no part sticks out, and no figure moves what is below it."""
    notebook = open_notebook(NOTEBOOK, width=width, height=1200, theme=theme)
    notebook.run_all()
    lab = Lab(notebook)
    notebook.screenshot(f"moe-predicted-{width}-{theme}")
    lab.press("Measure")
    expect(lab.message("^Done: 2 runs")).to_be_visible(timeout=60_000)
    tops = set()
    for title in ("Orders", "One SM", "Speed-up", "Map", "Times"):
        lab.open_tab(title)
        notebook.page.wait_for_timeout(1000)
        notebook.screenshot(f"moe-{title.lower().replace(' ', '-')}-{width}-{theme}")
        box = lab.panel.get_by_role("button", name="Measure").bounding_box()
        assert box is not None
        tops.add(round(box["y"]))
    assert len(tops) == 1
    assert lab.panel.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    for title in lab.panel.locator(".lm-TabBar-tabLabel").all():
        assert title.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_published_orders_replay(open_notebook: OpenNotebookNamed) -> None:
    """Sweep of the second panel puts the published speed-ups beside the prediction."""
    notebook = open_notebook(NOTEBOOK, height=1000)
    notebook.run_all()
    lab = Lab(notebook, 1)
    lab.press("Sweep")
    expect(lab.message("^Done: 12 runs")).to_be_visible(timeout=60_000)
    expect(lab.panel.locator(".xstage-badge", has_text="RECORDED")).to_be_visible()
    notebook.screenshot("moe-published")
