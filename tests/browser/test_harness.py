"""The way from a cell to the browser works, and the harness notices where it does not."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from live_lab import NOTEBOOKS, OpenNotebookNamed, serve
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

SLIDER = """
import ipywidgets
slider = ipywidgets.IntSlider(value=3, max=10)
label = ipywidgets.Label()
slider.observe(lambda change: setattr(label, 'value', f"now {change['new']}"), 'value')
ipywidgets.VBox([slider, label])
"""


def notebook_of(*cells: str) -> str:
    """The file content of a notebook with these code cells."""
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    written.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    return nbformat.writes(written)


def test_slider_reaches_the_kernel(open_notebook: OpenNotebookNamed) -> None:
    """A slider shown by a cell moves by the keyboard and its kernel answers in the page."""
    notebook = open_notebook("slider.ipynb", content=notebook_of(SLIDER))
    notebook.run_all()
    notebook.page.locator(".noUi-handle").press("ArrowRight")
    expect(notebook.page.get_by_text("now 4", exact=True)).to_be_visible()


def test_failing_cell_is_noticed(open_notebook: OpenNotebookNamed) -> None:
    """A cell that raises makes running all fail with its message."""
    notebook = open_notebook("fails.ipynb", content=notebook_of("1 / 0", "2"))
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        notebook.run_all()


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("console.error('planted')", "console: planted"),
        ("setTimeout(() => { throw Error('planted') })", "exception: planted"),
        ("fetch('http://elsewhere.invalid/bokeh.js')", "leaves this computer: http://elsewhere"),
    ],
)
def test_complaints_are_noticed(
    open_notebook: OpenNotebookNamed, script: str, complaint: str
) -> None:
    """Errors in the console, exceptions and requests to elsewhere are taken down."""
    notebook = open_notebook("noisy.ipynb", content=notebook_of("1"))
    notebook.page.evaluate(f"() => {{ {script} }}")
    notebook.page.wait_for_timeout(300)
    assert any(line.startswith(complaint) for line in notebook.complaints)
    notebook.complaints.clear()  # or the fixture fails this test, as it should any other


def test_theme_and_size(open_notebook: OpenNotebookNamed, tmp_path: Path) -> None:
    """A notebook opens in the theme and the size that were asked for."""
    notebook = open_notebook("dark.ipynb", content=notebook_of("1"), width=1920, theme="dark")
    expect(notebook.page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    assert notebook.page.viewport_size == {"width": 1920, "height": 900}
    assert notebook.screenshot("dark").stat().st_size > 1000


def test_checkout_stays_clean(open_notebook: OpenNotebookNamed) -> None:
    """What a kernel writes beside its notebook lands in the copy."""
    before = set(NOTEBOOKS.iterdir())
    cell = "import pathlib; pathlib.Path('written.txt').write_text('x')"
    notebook = open_notebook("writes.ipynb", content=notebook_of(cell))
    notebook.run_all()
    assert (notebook.folder / "written.txt").exists()
    assert set(NOTEBOOKS.iterdir()) == before


def test_server_ends(chromium: str, tmp_path: Path) -> None:
    """A server is gone when its user is done, even if that user failed."""
    (tmp_path / "root").mkdir()
    (tmp_path / "private").mkdir()
    with pytest.raises(KeyError), serve(tmp_path / "root", tmp_path / "private") as lab:
        raise KeyError
    with pytest.raises(OSError, match="refused"):
        lab._request("GET", "api/status")
