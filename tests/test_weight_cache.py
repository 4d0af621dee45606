"""The cache of weight panels: least recently used, whole panels, waves that share the memory."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from xstage_lab.devices.weight_cache import missed_bytes


def lru(panel: list[int], size: list[int], capacity: float) -> NDArray[np.float64]:
    """Return what each access misses, kept as plainly as can be."""
    held: OrderedDict[int, int] = OrderedDict()
    missed = np.zeros(len(panel))
    for i, name in enumerate(panel):
        if name < 0:
            continue
        if name in held:
            held.move_to_end(name)
            continue
        held[name] = size[name]
        missed[i] = size[name]
        while sum(held.values()) > capacity and len(held) > 1:
            held.popitem(last=False)
    return missed


@settings(deadline=None)  # the first call compiles
@given(panel=st.lists(st.integers(-1, 6), max_size=60),
       size=st.lists(st.integers(1, 50), min_size=7, max_size=7),
       capacity=st.integers(0, 250), n_ctas=st.integers(1, 9))
def test_against_an_ordered_dict(
    panel: list[int], size: list[int], capacity: int, n_ctas: int
) -> None:
    """A miss waits for all that its wave misses, a hit for nothing, as a plain LRU has it."""
    sizes = np.array([size[p] if p >= 0 else 0 for p in panel], np.int64)
    found = missed_bytes(np.array(panel, np.int32), sizes, n_ctas, float(capacity))
    missed = lru(panel, size, capacity)
    for start in range(0, len(panel), n_ctas):
        wave = slice(start, start + n_ctas)
        expected = np.where(missed[wave] > 0, missed[wave].sum(), 0.0)
        np.testing.assert_array_equal(found[wave], expected)


def test_a_cache_that_holds_all_misses_each_panel_once() -> None:
    """With room for all panels only the first touch of each is fetched."""
    panel = np.tile(np.arange(5, dtype=np.int32), 10)
    found = missed_bytes(panel, np.full(50, 100, np.int64), 1, 500.0)
    assert (found[:5] == 100).all()
    assert (found[5:] == 0).all()


def test_cycling_through_too_many_panels_misses_every_time() -> None:
    """One panel too many, in turn, and least-recently-used finds nothing: the classic thrash."""
    panel = np.tile(np.arange(5, dtype=np.int32), 10)
    assert (missed_bytes(panel, np.full(50, 100, np.int64), 1, 499.0) == 100).all()


def test_tasks_without_panel_miss_nothing() -> None:
    """Tasks that read no weights neither miss nor disturb the cache."""
    panel = np.array([0, -1, -1, 0], np.int32)
    found = missed_bytes(panel, np.array([100, 999, 999, 100], np.int64), 1, 100.0)
    assert found.tolist() == [100, 0, 0, 0]
