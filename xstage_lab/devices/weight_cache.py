"""Which weight panels a tile order finds in L2: a least-recently-used cache over whole panels."""

from __future__ import annotations

import numba as nb
import numpy as np
from numpy.typing import NDArray


def missed_bytes(
    panel: NDArray[np.int32],
    panel_bytes: NDArray[np.int64],
    n_ctas: int,
    l2_bytes: float,
) -> NDArray[np.float64]:
    """Return for each task the bytes its wave must fetch from memory before it can finish.

    The `n_ctas` tasks of a wave run at a time and fetch their missing panels together, each at
    its share of the memory rate; a task whose panel is in L2 waits for nothing.

    Parameters
    ----------
    panel : int array of shape (n,)
        Weight panel of each task in issue order, -1 for none.
    panel_bytes : int array of shape (n,)
    n_ctas : int
        Tasks in flight at a time.
    l2_bytes : float
        Capacity of the cache.

    Returns
    -------
    float array of shape (n,)
        0 where the panel was in the cache, else the bytes that its wave misses.
    """
    missed = _lru_misses(panel.astype(np.int64), panel_bytes.astype(np.float64), float(l2_bytes))
    wave = np.arange(panel.size) // n_ctas
    in_wave = np.bincount(wave, weights=missed)[wave] if panel.size else missed
    return np.where(missed > 0, in_wave, 0.0)


@nb.njit(cache=True, nogil=True)
def _lru_misses(panel, size, capacity):  # type: ignore[no-untyped-def]
    """Bytes each access misses; panels are kept in a doubly linked list, newest first."""
    n_panels = max(panel.max() + 1, 1) if panel.size else 1
    newer = np.full(n_panels + 1, -1)   # entry n_panels is the list's head and tail
    older = np.full(n_panels + 1, -1)
    head = n_panels
    newer[head] = older[head] = head
    held = np.zeros(n_panels)
    total = 0.0
    missed = np.zeros(panel.size)
    for i in range(panel.size):
        p = panel[i]
        if p < 0:
            continue
        if held[p] > 0:  # unlink, it moves to the front
            older[newer[p]], newer[older[p]] = older[p], newer[p]
        else:
            missed[i] = size[i]
            held[p] = size[i]
            total += size[i]
        older[p], newer[p] = older[head], head
        newer[older[head]] = p
        older[head] = p
        while total > capacity and newer[head] != p:
            last = newer[head]
            total -= held[last]
            held[last] = 0.0
            newer[head] = newer[last]
            older[newer[last]] = head
    return missed
