"""Fixtures of the browser tests: Chromium, one JupyterLab server, and notebooks open in it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from live_lab import LiveLab, OpenNotebook, OpenNotebookNamed, serve
from playwright.sync_api import Browser, sync_playwright

from xstage_lab.browser import BROWSER_VARIABLE, browser_flags, find_browser


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser; without one the test is skipped, or fails where it is required."""
    found = find_browser()
    if found is not None:
        return found
    reason = f"no Chromium or Chrome found; install one or set {BROWSER_VARIABLE} to its path"
    if os.environ.get("XSTAGE_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def live_lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveLab]:
    """One JupyterLab server for all browser tests, started only where there is a browser."""
    root, private = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("private")
    with serve(root, private) as lab:
        yield lab


# Not for the session: a running Playwright keeps other tests from starting an event loop.
@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """Chromium, headless."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=browser_flags())
        yield launched
        launched.close()


@pytest.fixture
def open_notebook(live_lab: LiveLab, browser: Browser) -> Iterator[OpenNotebookNamed]:
    """Return `open(name, width=1280, height=900, theme="light")`, which opens a notebook.

    It is opened in a folder of its own with copies of the project's notebooks; `content` makes
    another notebook of that name. Whatever the page complains about fails the test at its end.
    """
    opened: list[OpenNotebook] = []

    def open_it(
        name: str,
        *,
        content: str | None = None,
        width: int = 1280,
        height: int = 900,
        theme: str = "light",
    ) -> OpenNotebook:
        path = live_lab.new_folder() / name
        if content is not None:
            path.write_text(content)
        live_lab.choose_theme(theme)
        opened.append(OpenNotebook.at(browser, live_lab, path, width, height))
        return opened[-1]

    yield open_it
    for notebook in opened:
        notebook.page.context.close()
    live_lab.end_kernels()
    assert [line for notebook in opened for line in notebook.complaints] == []
