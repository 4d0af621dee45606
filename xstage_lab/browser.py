"""The Chromium that renders figures to SVG and PNG, and that the browser tests drive."""

from __future__ import annotations

import os
import shutil

#: Names an executable, and goes before everything that is found.
BROWSER_VARIABLE = "XSTAGE_CHROMIUM"

_EXECUTABLES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)

_FLAGS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)


def find_browser() -> str | None:
    """Return the Chromium or Chrome of this computer.

    The environment variable ``XSTAGE_CHROMIUM`` decides alone where it is set; otherwise the
    usual names are looked up on the search path.

    Returns
    -------
    str or None
        Absolute path of an executable; None if there is none.
    """
    chosen = os.environ.get(BROWSER_VARIABLE)
    for name in (chosen,) if chosen else _EXECUTABLES:
        if path := shutil.which(name):
            return os.path.abspath(path)  # noqa: PTH100 - keep links: snap starts by link name
    return None


def browser_flags() -> list[str]:
    """Return the command-line flags for a headless, offline Chromium.

    Returns
    -------
    list of str
        Chromium refuses to sandbox for root, so root alone goes without the sandbox.
    """
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return [*_FLAGS, *(["--no-sandbox"] if is_root else [])]
