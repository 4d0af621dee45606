"""The notebook of published results in a real browser: choose a table, look, export."""

from __future__ import annotations

import json

import pytest
from live_lab import OpenNotebookNamed
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

NOTEBOOK = "06_paper.ipynb"
SECONDS_60 = 60_000


def test_a_table_is_chosen_and_exported(open_notebook: OpenNotebookNamed) -> None:
    """A simulated table says that it is being worked out, then shows its rows; Export writes."""
    notebook = open_notebook(NOTEBOOK, height=1000)
    notebook.run_all()
    panel = notebook.page.locator(".xstage-panel").first
    panel.scroll_into_view_if_needed()
    expect(panel.locator("td", has_text="DSv4-Pro")).to_be_visible(timeout=SECONDS_60)
    panel.get_by_label("table").select_option("mega-moe")
    expect(panel.locator(".xstage-message", has_text="Working out mega-moe")).to_be_visible()
    expect(panel.locator("th", has_text="half weights")).to_be_visible(timeout=SECONDS_60)
    expect(panel.locator(".xstage-message", has_text="Fused MoE layer")).to_be_visible()
    expect(panel.locator(".bk-Figure").first).to_be_visible()
    panel.get_by_role("button", name="Export").click()
    expect(panel.locator(".xstage-message", has_text="Wrote paper-mega-moe.html")
           ).to_be_visible(timeout=SECONDS_60)
    about = json.loads((notebook.folder / "exports/paper-mega-moe.json").read_text())
    assert about["parameters"]["table"] == "mega-moe"
    assert notebook.complaints == []


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1920, "dark")])
def test_tables_fit_the_page(open_notebook: OpenNotebookNamed, width: int, theme: str) -> None:
    """On narrow and wide pages nothing sticks out of the panel; wide tables scroll inside it."""
    notebook = open_notebook(NOTEBOOK, width=width, height=1200, theme=theme)
    notebook.run_all()
    panel = notebook.page.locator(".xstage-panel").first
    panel.scroll_into_view_if_needed()
    for name, seen in (("moe-stall", "DSv4-Pro"), ("moe-spans", "192"), ("gemm-rs", "4096")):
        panel.get_by_label("table").select_option(name)
        expect(panel.locator("td", has_text=seen).first).to_be_visible(timeout=SECONDS_60)
        expect(panel.locator(".bk-Figure").first).to_be_visible()
        panel.scroll_into_view_if_needed()
        notebook.page.wait_for_timeout(700)
        notebook.screenshot(f"paper-{name}-{width}-{theme}")
        box = panel.bounding_box()
        rows = panel.locator(".xstage-rows").bounding_box()
        assert box is not None
        assert rows is not None
        assert rows["x"] + rows["width"] <= box["x"] + box["width"] + 1
    assert notebook.complaints == []
