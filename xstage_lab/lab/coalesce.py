"""Many changes, few redraws: a dragged slider must not flood the kernel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: Between two redraws the kernel gets at least this long, and at least as long as the last
#: redraw took, to take in the changes that queued up meanwhile.
LEAST_PAUSE_S = 0.01


class Coalescer:
    """Calls `redraw` after a change; changes in quick succession share one call.

    At most one call is waiting or running, and one always follows the last change. Where no
    event loop runs, every change redraws at once.

    Parameters
    ----------
    redraw : callable
        Takes nothing; reads the values as they are when it is called.
    """

    def __init__(self, redraw: Callable[[], None]) -> None:
        self._redraw = redraw
        self._waiting = False
        self._free_at_s = 0.0

    def __call__(self, _change: object = None) -> None:
        """Ask for a redraw; fit for a widget's `observe`."""
        if self._waiting:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._redraw()
            return
        self._waiting = True
        loop.call_later(max(self._free_at_s - time.monotonic(), 0.0), self._run)

    def _run(self) -> None:
        self._waiting = False  # what changes from here on needs another call
        started = time.monotonic()
        try:
            self._redraw()
        finally:
            ended = time.monotonic()
            self._free_at_s = ended + max(LEAST_PAUSE_S, ended - started)
