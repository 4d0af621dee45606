"""The rows of tile programs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BURST, GEMM_TILE, LINEAR_1, LINEAR_2, QUERY_TILE, COPY, NOTHING = range(7)

TASK = np.dtype([
    ("kind", np.int8),          # one of the above
    ("m0", np.int32),           # first output row and column of the tile
    ("n0", np.int32),
    ("m", np.int32),            # extent, edge tiles are smaller
    ("n", np.int32),
    ("k", np.int32),
    ("group", np.int32),        # its GPU's expert or head that the tile belongs to, else 0
    ("flop", np.int64),
    ("gap_s", np.float64),      # work of fixed duration before the stores (burst trains)
    ("store_bytes", np.int64),
    ("owner", np.int16),        # destination GPU
    ("waits_for", np.int32),    # counter that must reach wait_count before the task, -1 none
    ("wait_count", np.int32),   # as many as tasks raise it
    ("signals", np.int32),      # counter the task raises by one once its stores are accepted
    ("panel", np.int32),        # weight panel read, -1 none
    ("panel_bytes", np.int64),
])

Tasks = NDArray[np.void]


def empty_tasks(n_rows: int, kind: int) -> Tasks:
    """Return rows that do nothing and wait for nobody."""
    rows = np.zeros(n_rows, TASK)
    rows["kind"] = kind
    rows["waits_for"] = rows["signals"] = rows["panel"] = -1
    return rows
