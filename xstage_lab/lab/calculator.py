"""A small panel for the first question: whether the link blocks a kernel, and by how much."""

from __future__ import annotations

import math
from typing import Any

import ipywidgets as w

from xstage_lab import law
from xstage_lab.errors import XStageError, require_number
from xstage_lab.lab import controls, style
from xstage_lab.lab.coalesce import Coalescer
from xstage_lab.lab.controls import Controls, section
from xstage_lab.units import text


class Calculator(w.HBox):
    """Your tile, your SMs, your link: whether the Tensor Core waits for the stores.

    Parameters
    ----------
    **settings
        `t_mma_s` compute time of a tile; `tile_bytes` what it stores to other GPUs; `n_sms`
        SMs that do so; `issue_free_s` issue time of a tile without backpressure;
        `drain_bytes_per_s` R and `capacity_bytes` Q of the GPU; `issue_depth` tiles an SM may
        hold. SI.

    Raises
    ------
    UnknownName, InvalidValue
        If a setting is unknown or not a number.
    """

    def __init__(self, **settings: Any) -> None:
        made = {
            "t_mma_s": controls.field("t_mma_s", "T_mma", 5e-6, "compute time of a tile"),
            "tile_bytes": controls.field("tile_bytes", "stored a tile", 32 * 1024.0,
                                         "bytes that go to other GPUs"),
            "issue_free_s": controls.field("issue_free_s", "T_iss0", 0.76e-6,
                                           "issue time of a tile without backpressure"),
            "issue_depth": controls.whole("issue_depth", "issue depth", 2, 1, 8,
                                          hint="tiles an SM may hold, the one in the MMA counted"),
            "n_sms": controls.whole("n_sms", "SMs", 148, 1, 320),
            "drain_bytes_per_s": controls.field("drain_bytes_per_s", "drain rate R", 717e9),
            "capacity_bytes": controls.field("capacity_bytes", "capacity Q", 4.25 * 2**20),
        }
        self.controls = Controls(**made)
        self.controls.set(**settings)
        self.answer = w.HTML(layout=w.Layout(flex="1 1 0", min_width="0", min_height="230px"))
        left = w.VBox([section("my kernel"), *list(made.values())[:5], section("my GPU"),
                       *list(made.values())[5:]],
                      layout=w.Layout(flex="0 0 330px", padding="0 24px 0 0"))
        super().__init__([w.HTML(style.STYLE), left, self.answer])
        self.add_class("xstage-panel")
        self.controls.observe(Coalescer(self._draw))
        self._draw()

    def _draw(self) -> None:
        try:
            self.answer.value = _answer(**self.controls.values())
        except XStageError as error:
            self.answer.value = style.problem(str(error))


def _answer(*, t_mma_s: float, tile_bytes: float, issue_free_s: float, issue_depth: int,
            n_sms: int, drain_bytes_per_s: float, capacity_bytes: float) -> str:
    """Return the verdict, what would help, and the numbers behind it, as HTML."""
    require_number("t_mma_s", t_mma_s, low=0.0, unit="s")
    require_number("issue_free_s", issue_free_s, low=0.0, open_low=True, unit="s")
    require_number("tile_bytes", tile_bytes, low=0.0, unit="B")
    require_number("drain_bytes_per_s", drain_bytes_per_s, low=0.0, open_low=True, unit="B/s")
    require_number("capacity_bytes", capacity_bytes, low=0.0, unit="B")
    volume = n_sms * tile_bytes
    # Depth 1 issues after computing; from depth 2 on the two overlap and the longer one paces.
    gap_s = t_mma_s if issue_depth == 1 else max(t_mma_s - issue_free_s, 0.0)
    pace_s = issue_free_s + gap_s
    period_s = float(law.period(gap_s, issue_free_s, volume, drain_bytes_per_s))
    peak_bytes = float(law.peak_backlog(issue_free_s, volume, drain_bytes_per_s))
    if period_s > pace_s:
        verdict = _blocked(period_s, pace_s, (capacity_bytes - peak_bytes)
                           / (volume - drain_bytes_per_s * pace_s))
    else:
        verdict = _keeps_up(pace_s, (peak_bytes - capacity_bytes) / drain_bytes_per_s,
                            period_s - t_mma_s)
    return style.words(verdict) + style.table(["", ""], [
        ("stored by all SMs, V", text("_bytes", volume)),
        ("time to drain it, V / R", text("_s", volume / drain_bytes_per_s)),
        ("pace of an SM by itself", text("_s", pace_s)),
        ("pace of the kernel", text("_s", period_s)),
        ("Tensor Core waits per tile", text("_s", period_s - t_mma_s)),
        ("backlog after one tile of each SM", text("_bytes", peak_bytes))])


def _blocked(period_s: float, pace_s: float, waves_after_first: float) -> list[str]:
    """Say how much the link holds up, for how long it does not, and what would free it."""
    n_free = math.floor(1 + waves_after_first) if waves_after_first >= 0 else 0
    held = "Already the first tile of each SM is more than the path holds."
    if n_free:
        tiles = "tile" if n_free == 1 else f"{n_free} tiles"
        held = (f"The path holds the excess of the first {tiles} of each SM: a run of storing "
                "tiles no longer than that is not blocked.")
    return [
        f"Blocked by the link: a tile takes {text('_s', period_s)} where the SM alone would take "
        f"{text('_s', pace_s)}; {1 - pace_s / period_s:.0%} of the time is waiting.",
        held,
        f"Free again with {1 - pace_s / period_s:.0%} fewer bytes per tile, or "
        f"{text('_s', period_s - pace_s)} more work for each."]


def _keeps_up(pace_s: float, blocked_s: float, stall_s: float) -> list[str]:
    """Say that the link keeps up on average, and what may hold a tile up all the same."""
    found = [f"Not blocked by the link: it drains what the SMs store every {text('_s', pace_s)}."]
    if blocked_s > 0.0:
        found.append(f"But when all SMs store at once, the path holds less than they store: each "
                     f"such burst waits {text('_s', blocked_s)}.")
    if stall_s > 0.0:
        found.append(f"The MMA waits {text('_s', stall_s)} a tile for the issue of stores: more "
                     "depth hides it as far as the MMA is longer, more store warps shorten it.")
    return found
