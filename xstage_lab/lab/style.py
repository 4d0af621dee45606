"""How panels look: one style sheet that follows JupyterLab's theme, and small HTML helpers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: White text is legible on each of them, in the light theme and in the dark one.
BADGE_COLOURS = {
    "LIVE": "#1a7f37",
    "SIMULATED": "#6f42c1",
    "RECORDED": "#8a5a00",
    "PREDICTED": "#0b5cad",
    "ASSUMED": "#b3400d",
}

STYLE = """<style>
.xstage-panel { color: var(--jp-ui-font-color1, #222); }
.xstage-panel .widget-html-content { line-height: 1.45; }
.xstage-section { font-weight: 600; font-size: 12px; margin-top: 6px;
  color: var(--jp-ui-font-color2, #555); border-bottom: 1px solid var(--jp-border-color2, #ccc); }
.xstage-badge { color: #fff; border-radius: 3px; padding: 1px 7px; font-size: 11px;
  font-weight: 600; letter-spacing: .03em; white-space: nowrap; }
.xstage-origin { display: inline-block; margin-right: 14px; }
.xstage-beside { margin-left: 6px; font-size: 12px; }
.xstage-table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
.xstage-table th, .xstage-table td { padding: 1px 14px 1px 0; text-align: right;
  white-space: nowrap; }
.xstage-table th { font-weight: 600; color: var(--jp-ui-font-color2, #555); }
.xstage-table th:first-child, .xstage-table td:first-child { text-align: left; }
.xstage-words { margin: 4px 0; max-width: 110ch; }
.xstage-words p { margin: 0 0 3px; }
.xstage-message { color: var(--jp-ui-font-color2, #555); }
.xstage-problem { color: var(--jp-error-color1, #b3261e); font-weight: 600; }
.xstage-stale { opacity: .35; filter: grayscale(1); }
.xstage-folded .jupyter-widget-Collapse-header, .xstage-folded .jupyter-widget-Collapse-contents {
  padding: 4px 0 4px 8px; }
.xstage-tabs > .lm-TabBar .lm-TabBar-tab { padding: 0 9px; min-width: max-content; }
.xstage-tabs { --jp-widgets-horizontal-tab-width: auto; }
.xstage-tabs > .widget-tab-contents { padding: 6px; min-height: 440px; }
</style>"""


def badge(name: str) -> str:
    """Return the HTML of a provenance badge."""
    colour = BADGE_COLOURS.get(name, "#57606a")
    return f'<span class="xstage-badge" style="background:{colour}">{escape(name)}</span>'


def badge_line(badges: Iterable[tuple[str, str]]) -> str:
    """Return badges in a row, each beside the words that say what it stands for."""
    return "".join(f'<span class="xstage-origin">{badge(name)}'
                   f'<span class="xstage-beside">{escape(words)}</span></span>'
                   for name, words in badges)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; the first column is text, the others are numbers."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
                   for row in rows)
    top = f"<tr>{head}</tr>" if any(header) else ""
    return f'<table class="xstage-table">{top}{body}</table>'


def words(sentences: Iterable[str]) -> str:
    """Return sentences as HTML."""
    return ('<div class="xstage-words">'
            + "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences) + "</div>")


def problem(text: str) -> str:
    """Return a message that says what is wrong."""
    return f'<div class="xstage-problem">{escape(text)}</div>'


def note(text: str) -> str:
    """Return a message."""
    return f'<div class="xstage-message">{escape(text)}</div>'
