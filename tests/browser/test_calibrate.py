"""The calibration notebook in a real browser: samples arrive live, the verdict, Save."""

from __future__ import annotations

import re

import pytest
from live_lab import OpenNotebookNamed
from playwright.sync_api import expect

from xstage_lab.analysis import Calibration

pytestmark = pytest.mark.browser


def test_calibrating_in_the_browser(open_notebook: OpenNotebookNamed) -> None:
    """Calibrate fills the figures, says SIMULATED and the verdict, and Save leaves a file."""
    notebook = open_notebook("02_calibrate.ipynb", width=1280, height=1000)
    notebook.run_all()
    panel = notebook.page.locator(".xstage-panel").first
    panel.scroll_into_view_if_needed()
    expect(panel.locator(".bk-Figure").first).to_be_visible()
    panel.get_by_role("button", name="Calibrate").click()
    said = panel.locator(".xstage-message", has_text=re.compile(r"Done: \d+ samples"))
    expect(said).to_be_visible(timeout=240_000)
    expect(panel.locator(".xstage-badge", has_text="SIMULATED").first).to_be_visible()
    expect(panel.get_by_role("columnheader", name="90 % interval")).to_be_visible()
    panel.locator(".lm-TabBar-tab", has_text="Capacity").click()
    notebook.page.wait_for_timeout(500)
    notebook.screenshot("calibrate-1280-light")
    panel.get_by_role("button", name="Save").click()
    expect(panel.locator(".xstage-message", has_text="Saved to")).to_be_visible(timeout=60_000)
    saved = sorted(notebook.folder.rglob("calibrations/*.json"))
    assert Calibration.load(saved[0]).badge == "SIMULATED"
    assert notebook.complaints == []


def test_calibrating_live_in_the_browser(open_notebook: OpenNotebookNamed) -> None:
    """The sockets of this computer are calibrated live, say so, and Stop ends it in between."""
    notebook = open_notebook("02_calibrate.ipynb", width=1280, height=1000)
    notebook.run_all()
    panel = notebook.page.locator(".xstage-panel").first
    panel.scroll_into_view_if_needed()
    panel.get_by_label("device", exact=True).select_option("sockets")
    start = panel.get_by_role("button", name="Calibrate")
    start.click()
    expect(panel.locator(".xstage-message", has_text=re.compile(r"\d+ samples: "))).to_be_visible(
        timeout=60_000)
    panel.get_by_role("button", name="Stop").click()
    expect(panel.locator(".xstage-message", has_text="Stopped after")).to_be_visible(
        timeout=60_000)
    start.click()
    expect(panel.locator(".xstage-message", has_text=re.compile(r"Done: \d+ samples"))
           ).to_be_visible(timeout=240_000)
    expect(panel.locator(".xstage-badge", has_text="LIVE").first).to_be_visible()
    panel.locator(".lm-TabBar-tab", has_text="Capacity").click()
    notebook.page.wait_for_timeout(500)
    notebook.screenshot("calibrate-sockets-1280-light")
    assert notebook.complaints == []
