"""The run log below a panel, in a real browser."""

from __future__ import annotations

import re

import pytest
from live_lab import OpenNotebookNamed
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_a_measured_run_is_listed_overlaid_and_deleted(open_notebook: OpenNotebookNamed) -> None:
    """What Measure ran is in the list below, is drawn again when asked, and deleted when asked."""
    notebook = open_notebook("01_burst_gap.ipynb", height=1100)
    notebook.run_all()
    panel = notebook.page.locator(".xstage-panel").first
    panel.get_by_role("button", name="Measure").click()
    expect(panel.locator(".xstage-message", has_text="Done")).to_be_visible(timeout=60_000)
    panel.get_by_text("run log", exact=True).click()
    listed = panel.locator(".xstage-runs option")
    expect(listed.first).to_contain_text("SIMULATED · B200-SXM · BurstTrain")
    n_listed = listed.count()
    listed.first.click()
    notebook.screenshot("run-log")
    panel.get_by_role("button", name="Overlay").click()
    expect(panel.locator(".xstage-message", has_text="1 run overlaid")).to_be_visible()
    origin = panel.locator(".xstage-origin", has_text="run log, simulated on B200-SXM")
    expect(origin).to_be_visible()
    panel.get_by_role("button", name="Delete").click()
    expect(panel.locator(".xstage-problem", has_text="Press Delete again")).to_be_visible()
    panel.get_by_role("button", name="Delete").click()
    expect(panel.locator(".xstage-message", has_text=re.compile("Deleted 1 run"))).to_be_visible()
    expect(listed).to_have_count(n_listed - 1)
    notebook.screenshot("run-log-deleted")
