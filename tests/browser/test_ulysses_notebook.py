"""The Ulysses notebook in a real browser: modes, GPU counts, one SM, and what cannot be."""

from __future__ import annotations

import re

import pytest
from live_lab import OpenNotebook, OpenNotebookNamed
from playwright.sync_api import expect
from test_tune import Tuning

pytestmark = pytest.mark.browser

expect.set_options(timeout=30_000)
NOTEBOOK = "05_ulysses.ipynb"
MODES = "Attention and its output's all-to-all, by mode"
GPUS = "Attention against the number of GPUs"


class Attention(Tuning):
    """A panel of the open notebook."""

    def __init__(self, notebook: OpenNotebook, number: int = 0) -> None:
        self.notebook, self.page = notebook, notebook.page
        self.panel = self.page.locator(".xstage-panel").nth(number)
        self.panel.scroll_into_view_if_needed()
        expect(self.panel.locator(".bk-Figure:visible").first).to_be_visible()

    def choose(self, label: str, option: str) -> None:
        """Choose from a drop-down list."""
        self.panel.get_by_label(label, exact=True).select_option(option)

    def measured(self, title: str, column: str) -> set[str]:
        """Return what measured points of a figure hold in a column."""
        return set(self.data(title, "measured")[column])


@pytest.fixture
def attention(open_notebook: OpenNotebookNamed) -> Attention:
    """Open the notebook, run all of it, and return its first panel."""
    notebook = open_notebook(NOTEBOOK, height=1100)
    notebook.run_all()
    return Attention(notebook)


def test_a_sweep_measures_every_mode(attention: Attention) -> None:
    """Sweep on the first figure brings a measured point of each mode, none of them live."""
    attention.press("Sweep")
    expect(attention.message("^Done")).to_be_visible(timeout=90_000)
    attention.until(lambda: attention.measured(MODES, "row") == {"fused", "dedicated", "serial"},
                    "a point of each mode")
    assert attention.measured(MODES, "badge") == {"SIMULATED"}
    attention.notebook.screenshot("ulysses-modes")


def test_gpu_counts_that_cannot_be_are_shown(attention: Attention) -> None:
    """GPU counts that the heads do not divide over are marked with the reason, the others
    drawn; a model of 30 heads on 8 GPUs is refused in words over a faded picture."""
    attention.open_tab("GPUs")
    attention.press("Sweep")
    expect(attention.message("^Done")).to_be_visible(timeout=90_000)
    attention.until(lambda: attention.measured(GPUS, "setting") == {"1", "2", "4", "5", "8"},
                    "a point of each number of GPUs")
    shut = attention.data(GPUS, "infeasible")
    assert shut["setting"] == ["3", "6", "7"]
    assert all("divisors of heads = 40" in reason for reason in shut["reason"])
    attention.notebook.screenshot("ulysses-gpus")
    attention.choose("model", "Z-Image")
    problem = attention.panel.locator(".xstage-problem")
    expect(problem).to_contain_text("divisors of heads = 30")
    expect(attention.panel.locator(".xstage-tabs")).to_have_class(re.compile("xstage-stale"))
    attention.choose("model", "FLUX.1-1024")
    expect(problem).to_have_count(0)


@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (1920, "light")])
def test_nothing_is_cut_off(open_notebook: OpenNotebookNamed, width: int, theme: str) -> None:
    """On narrow and wide pages no part of the panel sticks out, and every tab title is whole."""
    notebook = open_notebook(NOTEBOOK, width=width, height=1100, theme=theme)
    notebook.run_all()
    attention = Attention(notebook)
    attention.press("Measure")
    expect(attention.message("^Done")).to_be_visible(timeout=90_000)
    for title in ("Modes", "GPUs", "Sequence", "One SM"):
        attention.open_tab(title)
        notebook.page.wait_for_timeout(700)
        notebook.screenshot(f"ulysses-{title.lower().replace(' ', '-')}-{width}-{theme}")
        assert attention.panel.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    for title_label in attention.panel.locator(".lm-TabBar-tabLabel").all():
        assert title_label.evaluate("e => e.scrollWidth <= e.clientWidth")
    flux = Attention(notebook, 1)
    notebook.page.wait_for_timeout(500)
    notebook.screenshot(f"ulysses-flux-{width}-{theme}")
    assert flux.panel.locator(".xstage-problem").count() == 0
