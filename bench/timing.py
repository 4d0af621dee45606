"""The shortest of a few runs: what the code takes when nothing else is in its way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

Prepared = TypeVar("Prepared")
N_RUNS = 5


class Taken(NamedTuple):
    """Time taken: by the clock on the wall, and by this thread on its core."""

    wall_s: float
    cpu_s: float


def best_of(action: Callable[[], object], n_runs: int = N_RUNS) -> Taken:
    """Run `action` once to warm up and then `n_runs` times; return the shortest times."""
    return best_of_prepared(lambda: None, lambda _: action(), n_runs)


def best_of_prepared(
    prepare: Callable[[], Prepared],
    action: Callable[[Prepared], object],
    n_runs: int = N_RUNS,
) -> Taken:
    """Like `best_of`, for an action that uses up what `prepare` makes; making it is not timed."""
    action(prepare())
    taken = []
    for _ in range(n_runs):
        ready = prepare()
        wall, cpu = time.perf_counter(), time.thread_time()
        action(ready)
        taken.append((time.perf_counter() - wall, time.thread_time() - cpu))
    walls, cpus = zip(*taken, strict=True)
    return Taken(min(walls), min(cpus))
