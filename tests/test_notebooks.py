"""The committed notebooks: paired, free of outputs, short, and running from top to bottom."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
ALL = sorted(NOTEBOOKS.glob("*.ipynb"))
MOST_LINES = 10

pytestmark = pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)


def _code(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def test_committed_without_outputs(path: Path) -> None:
    """A committed notebook holds no outputs and no execution counts."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_in_step_with_its_script(path: Path) -> None:
    """A notebook and its percent script hold the same cells in the same order."""
    script = jupytext.read(path.parent / "py" / f"{path.stem}.py")
    notebook = nbformat.read(path, as_version=4)
    assert ([(cell.cell_type, cell.source) for cell in notebook.cells]
            == [(cell.cell_type, cell.source) for cell in script.cells])


def test_cells_are_short_and_define_nothing(path: Path) -> None:
    """A code cell has fewer than ten lines, and no function or class of its own."""
    for source in _code(path):
        assert len(source.splitlines()) < MOST_LINES
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not any(isinstance(node, defined) for node in ast.walk(ast.parse(source)))


@pytest.mark.notebook
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    """A copy of the notebook runs without an error, and each panel shows no problem."""
    copy = Path(shutil.copy(path, tmp_path))
    notebook = nbformat.read(copy, as_version=4)
    client = NotebookClient(notebook, timeout=240, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    widgets = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    shown = [str(widget["state"].get("value", "")) for widget in widgets.values()]
    assert any(value.startswith('<div class="xstage-words"') for value in shown)
    assert not any(value.startswith('<div class="xstage-problem"') for value in shown)
