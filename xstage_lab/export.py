"""A figure on disk: page, picture, data, and everything needed to make it again.

SVG and PNG need a Chromium or Chrome, but neither a driver nor a Python package: the browser
opens a page that writes its own drawing into itself, and prints that page.
"""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xstage_lab import trace
from xstage_lab.browser import BROWSER_VARIABLE, browser_flags, find_browser
from xstage_lab.errors import InvalidValue
from xstage_lab.record import Record, to_plain, write_atomic

if TYPE_CHECKING:
    from bokeh.document import Document
    from bokeh.models import LayoutDOM

_SUFFIXES = (".html", ".csv", ".json", ".trace.json", ".svg", ".png")
_BROWSER_LIMIT_S = 60.0
_PICTURE_WIDTH = 900  # pixels; the PNG has twice as many

# Runs in the page. The PNG is the SVG painted by the same browser, so both always agree.
_DRAW = """
<style>body { margin: 0; }</style>
<script>
const base64 = (text) =>
  btoa(Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join(""))
const put = (id, text) => {
  const holder = document.createElement("script")
  Object.assign(holder, {id, type: "text/plain", textContent: text})
  document.body.append(holder)
}
async function draw() {
  const [drawn] = window.Bokeh?.documents ?? []
  if (!drawn?.is_idle) return void setTimeout(draw, 20)
  try {
    const [view] = Bokeh.index
    const svg = base64(view.export("svg").ctx.get_serialized_svg(true))
    const image = new Image()
    image.src = "data:image/svg+xml;base64," + svg
    await image.decode()
    const canvas = document.createElement("canvas")
    Object.assign(canvas, {width: 2 * image.width, height: 2 * image.height})
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height)
    put("svg", svg)
    put("png", canvas.toDataURL("image/png").split(",")[1])
  } catch (error) {
    put("failure", base64(String(error)))
  }
}
draw()
</script>
</body>"""


class Exported(NamedTuple):
    """What an export wrote, and in words what it could not write."""

    files: list[Path]
    notes: list[str]


def export(
    figure: LayoutDOM,
    folder: str | Path,
    name: str,
    data: Mapping[str, ArrayLike],
    parameters: Mapping[str, Any],
    provenance: Mapping[str, Any],
    traced: Record | None = None,
) -> Exported:
    """Write a figure, its data and its parameters; what is on the screen stays as it is.

    Parameters
    ----------
    figure : bokeh.models.LayoutDOM
        For instance `plots.Plot.figure`.
    folder : str or Path
        Made if it does not exist.
    name : str
        Stem of the files. If any of them exists already, all get ``-2``, ``-3``, ... instead.
    data : mapping of str to array, shape (n,)
        Columns in SI, named with their unit suffix, for instance `plots.Plot.data()`.
    parameters, provenance : mapping
        Everything needed to make the figure again, and where its numbers come from.
    traced : Record, optional
        One with per-tile times, whose trace is written as well (`trace`).

    Returns
    -------
    Exported
        A stand-alone HTML page, a CSV and a JSON file always; SVG and PNG where a browser is
        found, and otherwise the reason.

    Raises
    ------
    InvalidValue
        If `name` is not a plain file name, or columns differ in length.
    FileRejected
        If the folder cannot be written.
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise InvalidValue("name", name, "a file name without folders", remedy="For example fig1.")
    folder = Path(folder)
    stem = _free_stem(folder, name)
    about = to_plain({"figure": name, "data": f"{stem}.csv", "parameters": parameters,
                      "provenance": provenance})
    texts = {".html": _page(_copy(figure), name), ".csv": _table(data, about["provenance"]),
             ".json": json.dumps(about, indent=2) + "\n"}
    contents = {suffix: text.encode() for suffix, text in texts.items()}
    if traced is not None:
        contents[".trace.json"] = trace.to_bytes(traced)
    for suffix, content in contents.items():
        write_atomic(folder / f"{stem}{suffix}", content)
    pictures, notes = _pictures(figure, folder)
    for suffix, content in pictures.items():
        write_atomic(folder / f"{stem}{suffix}", content)
    return Exported([folder / f"{stem}{suffix}" for suffix in (*contents, *pictures)], notes)


def _free_stem(folder: Path, name: str) -> str:
    """Return the first of `name`, `name`-2, ... of which no file exists."""
    stems = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(stem for stem in stems
                if not any((folder / f"{stem}{suffix}").exists() for suffix in _SUFFIXES))


def _table(data: Mapping[str, ArrayLike], provenance: Mapping[str, Any]) -> str:
    """Return CSV with provenance in comment lines; unknown values are empty cells."""
    columns = {name: np.atleast_1d(np.asarray(column)).tolist() for name, column in data.items()}
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise InvalidValue("data", sizes, "columns of one length", "rows")
    text = io.StringIO()
    for key, value in provenance.items():
        print(f"# {key}: {' '.join(str(value).split())}", file=text)
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(["" if value != value else value for value in row]
                    for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def _copy(figure: LayoutDOM) -> Document:
    """Return a document with a copy of `figure`, so that the one on the screen stays as it is."""
    from bokeh.document import Document
    from bokeh.embed.util import OutputDocumentFor

    with OutputDocumentFor([figure], always_new=True) as document:
        return Document.from_json(document.to_json())


def _page(document: Document, title: str) -> str:
    """Return a page that needs no network: BokehJS is part of it."""
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    return file_html(document, INLINE, title)


def _drawing_page(figure: LayoutDOM) -> str:
    """Return a page that draws `figure` as vectors and then holds its own drawing as text."""
    from bokeh.models import Plot

    document = _copy(figure)
    plots: Any = document.select({"type": Plot})
    for plot in plots:
        plot.update(output_backend="svg", toolbar_location=None)
        for legend in plot.legend:  # BokehJS 3.9 leaves vector legend keys without a size
            size = f"svg {{ width: {legend.glyph_width}px; height: {legend.glyph_height}px; }}"
            legend.stylesheets = [*legend.stylesheets, size]
    return _page(document, "").replace("</body>", _DRAW)


def _pictures(figure: LayoutDOM, folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return SVG and PNG by suffix, or what is missing for them."""
    browser = find_browser()
    if browser is None:
        return {}, ["No SVG and PNG: they need Chromium or Chrome on this computer. Install one "
                    "(Debian, Ubuntu: sudo apt-get install chromium), or name its executable in "
                    f"{BROWSER_VARIABLE}."]
    # Inside `folder`, because a browser from a snap sees the user's files but not /tmp.
    with tempfile.TemporaryDirectory(dir=folder, prefix="drawing-",
                                     ignore_cleanup_errors=True) as scratch:
        page = Path(scratch).resolve() / "page.html"
        page.write_text(_drawing_page(figure), encoding="utf-8")
        shown, trouble = _dump(browser, page)
    found = {kind: base64.b64decode(text) for kind, text in
             re.findall(r'<script id="(svg|png|failure)"[^>]*>([^<]*)</script>', shown)}
    if not {"svg", "png"} <= set(found):
        reason = found.get("failure", b"").decode() or trouble or "the page stayed empty"
        return {}, [f"No SVG and PNG: {browser} could not draw the figure ({reason})."]
    # Each text stands twice in BokehJS's SVG, once with an invisible outline: keep one.
    svg = re.sub(rb'<text fill="none"[^>]*stroke-opacity="0"[^>]*>[^<]*</text>', b"", found["svg"])
    return {".svg": svg, ".png": found["png"]}, []


def _dump(browser: str, page: Path) -> tuple[str, str]:
    """Return the page as it stands once its scripts have run, and what went wrong."""
    command = [browser, *browser_flags(), "--headless", "--hide-scrollbars",
               f"--user-data-dir={page.parent / 'profile'}",
               f"--window-size={_PICTURE_WIDTH},1000", "--virtual-time-budget=20000",
               "--dump-dom", page.as_uri()]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                   start_new_session=True)
    except OSError as error:
        return "", str(error.strerror)
    try:
        shown, _ = process.communicate(timeout=_BROWSER_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the browser and the processes it started
        process.communicate()
        return "", f"no answer within {_BROWSER_LIMIT_S:g} s"
    failed = f"exit status {process.returncode}" if process.returncode else ""
    return shown.decode(errors="replace"), failed
