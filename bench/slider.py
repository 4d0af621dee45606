"""How long from a key on a slider to changed pixels, in JupyterLab in a real browser."""

from __future__ import annotations

import math
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.figures import Figure, print_table
from xstage_lab.browser import BROWSER_VARIABLE, browser_flags, find_browser

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/browser"))
from live_lab import LiveLab, OpenNotebook, serve
from playwright.sync_api import Browser, Locator, sync_playwright

NOTEBOOK = "03_tune.ipynb"
SLIDERS = "tile m", "tile n", "issue depth"
N_PAGES, N_KEYS = 3, 24
MEDIAN_ASKED_S, P95_ASKED_S, FIRST_FIGURE_ASKED_S = 0.080, 0.200, 8.0

# Press a key on a slider's handle, and look at the figure's pixels after every frame's drawing.
# Returns the milliseconds until they are others, or null after three seconds.
TO_PIXELS = """async (figure, [handle, key]) => {
    const canvases = node => [...node.querySelectorAll('*')].flatMap(e =>
        [...(e.tagName === 'CANVAS' ? [e] : []), ...(e.shadowRoot ? canvases(e.shadowRoot) : [])])
    const all = canvases(figure.shadowRoot ?? figure).filter(c => c.width > 100)
    const look = () => all.map(c => new Uint32Array(
        c.getContext('2d', {willReadFrequently: true})
            .getImageData(0, 0, c.width, c.height).data.buffer))
    const differ = (a, b) => {
        for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return true
        return a.length !== b.length
    }
    const before = look()
    const changed = () => look().some((now, i) => differ(now, before[i]))
    handle.focus()
    const began = performance.now()
    handle.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}))
    while (performance.now() - began < 3000) {
        await new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn, 0)))
        if (changed()) return performance.now() - began
    }
    return null
}"""


def measure() -> list[Figure]:
    """Open the notebook a few times, then press keys on its sliders."""
    chromium = find_browser()
    if chromium is None:
        note = f"no Chromium or Chrome found; install one or set {BROWSER_VARIABLE} to its path"
        return _figures([math.nan], [math.nan], note)
    with (tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as private,
          serve(Path(root), Path(private)) as lab, sync_playwright() as playwright):
        browser = playwright.chromium.launch(executable_path=chromium, args=browser_flags())
        opened = [_open(browser, lab) for _ in range(N_PAGES)]
        pressed = _press_keys(opened[-1][1])
        browser.close()
    first = [seconds for seconds, _ in opened]
    return _figures(first, [seconds for each in pressed.values() for seconds in each])


def _open(browser: Browser, lab: LiveLab) -> tuple[float, OpenNotebook]:
    """Open the notebook in a page of its own; time it from its address to its first figure."""
    lab.end_kernels()
    path = lab.new_folder() / NOTEBOOK
    began = time.perf_counter()
    notebook = OpenNotebook.at(browser, lab, path, 1280, 1000)
    notebook.run_all()
    notebook.page.locator(".bk-Figure").first.wait_for(state="visible")
    return time.perf_counter() - began, notebook


def _press_keys(notebook: OpenNotebook) -> dict[str, list[float]]:
    """Press keys on each slider, to and fro; return the seconds to changed pixels of each."""
    panel = notebook.page.locator(".xstage-panel").first
    panel.scroll_into_view_if_needed()
    figure = panel.locator(".bk-Figure").first
    found: dict[str, list[float]] = {}
    for slider in SLIDERS:
        row = panel.locator(".widget-inline-hbox", has_text=re.compile(f"^{slider}"))
        found[slider] = [_press(figure, row.locator(".noUi-handle"), i) for i in range(N_KEYS)]
    print_table(("slider", "keys", "median", "p95", "worst"), [
        (slider, str(len(each)), *(f"{1e3 * value:.0f} ms" for value in (
            np.median(each), np.quantile(each, 0.95), max(each))))
        for slider, each in found.items()])
    return found


def _press(figure: Locator, handle: Locator, i: int) -> float:
    key = "ArrowLeft" if i % 2 == 0 else "ArrowRight"
    took_ms = figure.evaluate(TO_PIXELS, [handle.element_handle(), key])
    figure.page.wait_for_timeout(250)  # what comes after the first picture is not the next one's
    return math.inf if took_ms is None else float(took_ms) / 1e3


def _figures(first: list[float], keys: list[float], note: str = "") -> list[Figure]:
    unchanged = sum(math.isinf(seconds) for seconds in keys)
    told = note or f"{len(keys)} keys, {unchanged} without a change in 3 s"
    opened = note or f"median of {len(first)}, worst {max(first):.1f} s"
    return [
        Figure(what="slider to changed pixels, median", value=1e3 * float(np.median(keys)),
               asked=1e3 * MEDIAN_ASKED_S, unit="ms", note=told),
        Figure(what="slider to changed pixels, p95", value=1e3 * float(np.quantile(keys, 0.95)),
               asked=1e3 * P95_ASKED_S, unit="ms", note=told),
        Figure(what="page open to first figure", value=float(np.median(first)),
               asked=FIRST_FIGURE_ASKED_S, unit="s", note=opened),
    ]
