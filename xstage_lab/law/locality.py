"""Which row blocks of two layers find their weights in L2, in closed form.

All tiles of a row block read all weights of its expert and layer, so that L2 sees the same
weights again and again, one block after the other. With least-recently-used replacement a block
finds them if and only if all that was read since its expert's block before fits beside them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage_lab.law.bursts import Floats, floats


def missing_blocks(layer: NDArray[np.int64], expert: NDArray[np.int64], weight_bytes: ArrayLike,
                   l2_bytes: float) -> NDArray[np.bool_]:
    """Return whether each row block must fetch its weights from memory.

    Between two blocks of an expert come blocks of the other layer, of one expert or more; their
    weights must fit into L2 as well.

    Parameters
    ----------
    layer, expert : shape (n_blocks,), in issue order; experts come one after the other in each
        layer
    weight_bytes : shape (2,), weights of one expert in each layer
    l2_bytes : capacity of the cache, inf for an unlimited one
    """
    size = floats(weight_bytes)[0]
    missing = np.zeros(layer.size, dtype=np.bool_)
    for this in (0, 1):
        mine, others = np.flatnonzero(layer == this), np.flatnonzero(layer != this)
        if not mine.size:
            continue
        nth = np.cumsum(np.diff(expert[others], prepend=-1) != 0)  # other experts so far
        n_before = np.searchsorted(others, mine)
        since = np.concatenate([[0], n_before[:-1]])
        last = nth[np.maximum(n_before - 1, 0)]
        first = nth[np.minimum(since, others.size - 1)]
        between = np.where(n_before > since, last - first + 1, 0)
        new = np.diff(expert[mine], prepend=-1) != 0
        missing[mine] = new | (size[this] + between * size[1 - this] > l2_bytes)
    return missing


def fetch_time(compute_s: ArrayLike, missed_bytes: ArrayLike,
               memory_bytes_per_s: ArrayLike) -> Floats:
    """Time of a tile whose weights are missing: what its round misses comes in together (s)."""
    compute, missed, rate = floats(compute_s, missed_bytes, memory_bytes_per_s)
    return np.maximum(compute, missed / rate)
