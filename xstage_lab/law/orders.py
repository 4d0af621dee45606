"""When interleaving two layers pays: the rule in closed form, over arrays.

In wave order the stores of Linear-2 come in bursts, and each burst may hold its SMs up. Interleaved
they come evenly, but between two row blocks of an expert come the other layer's weights, and
where both do not fit into L2 every block fetches its weights again. All tiles are taken as equal
and SMs as equally busy; `rounds` knows better, for one configuration at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage_lab.law.bursts import Floats, floats
from xstage_lab.law.locality import fetch_time


class TwoLayers(NamedTuple):
    """Two layers on one GPU; float arrays that broadcast against each other.

    Attributes
    ----------
    n_blocks : row blocks of the GPU
    n_blocks_each : row blocks of one expert
    n_first, n_second : tiles of each layer in a row block
    n_waves : groups of experts in wave order
    n_lead : row blocks by which Linear-1 leads when interleaved
    n_sms : persistent CTAs, K
    t_mma_1_s, t_mma_2_s : compute time of a tile whose weights are in L2
    issue_1_s, issue_2_s : issue time of a tile without backpressure
    issue_depth : output tiles an SM may hold, D
    span_s : time in which the path drains a round of Linear-2, V/R
    held_s : time in which it drains what it holds, Q/R
    weights_1_bytes, weights_2_bytes : of one expert
    l2_bytes, memory_bytes_per_s : cache, and rate at which weights come in
    """

    n_blocks: Floats
    n_blocks_each: Floats
    n_first: Floats
    n_second: Floats
    n_waves: Floats
    n_lead: Floats
    n_sms: Floats
    t_mma_1_s: Floats
    t_mma_2_s: Floats
    issue_1_s: Floats
    issue_2_s: Floats
    issue_depth: NDArray[np.generic]
    span_s: Floats
    held_s: Floats
    weights_1_bytes: Floats
    weights_2_bytes: Floats
    l2_bytes: Floats
    memory_bytes_per_s: Floats


class Orders(NamedTuple):
    """Both orders of two layers.

    Attributes
    ----------
    wave_s, interleaved_s : time to the last acceptance
    stall_wave_s, stall_interleaved_s : what stores add to computing
    locality_s : computing that interleaving adds by weights fetched again
    schedule_s : what it adds by SMs that are busy unequally and wait for each other's tiles
    gain_ratio : wave over interleaved, minus 1
    """

    wave_s: Floats
    interleaved_s: Floats
    stall_wave_s: Floats
    stall_interleaved_s: Floats
    locality_s: Floats
    schedule_s: Floats
    gain_ratio: Floats


def compare_orders(layers: TwoLayers, path_wave_s: ArrayLike | None = None,
                   path_interleaved_s: ArrayLike | None = None) -> Orders:
    """Set interleaving against waves, in closed form.

    The paths are the critical paths of the two static schedules; without them SMs count as
    equally busy, as tiles handed out on demand nearly make them.

    A wave of r rounds of Linear-2 stalls for (r (V/R - step) - Q/R)+, with step = T_mma + T_iss0
    at depth 1 and max(T_mma, T_iss0) beyond. SMs that stalled are apart afterwards, by as much
    and at most by a wave's Linear-1, which later waves need not stall again. Interleaved, only
    the end stalls, where Linear-2 is alone. No order is faster than the path, V/R per round of
    Linear-2 once the first stores are there.

    References
    ----------
    `(span - T_mma)+` per tile of Linear-2 is the stall as X-Stage reports it (arXiv 2607.23264
    v1, via public notes); capacity, drift, order and L2 are extensions made here.
    """
    t = TwoLayers(*np.broadcast_arrays(*floats(*layers)))
    first, second = (t.n_blocks * n / t.n_sms for n in (t.n_first, t.n_second))
    found = []
    for interleaved, path_s in ((False, path_wave_s), (True, path_interleaved_s)):
        mma_1, mma_2 = _compute_s(t, interleaved)
        step_1, step_2 = (np.where(t.issue_depth == 1, mma + issue, np.maximum(mma, issue))
                          for mma, issue in ((mma_1, t.issue_1_s), (mma_2, t.issue_2_s)))
        mean = first * step_1 + second * step_2
        chain = mean if path_s is None else floats(path_s)[0]
        alone = np.minimum(t.n_lead, t.n_blocks) if interleaved else t.n_blocks / t.n_waves
        lead, rounds = alone * t.n_first / t.n_sms * step_1, alone * t.n_second / t.n_sms
        stall = np.maximum(rounds * (t.span_s - step_2) - t.held_s, 0.0)
        if not interleaved:
            stall = stall + (t.n_waves - 1) * np.maximum(stall - lead, 0.0)
        path = lead + mma_2 + second * t.span_s - t.held_s
        found.append((mean, chain, np.maximum(chain + stall, path)))
    (mean, chain, wave), (other_mean, other_chain, other) = found
    locality = other_mean - mean
    return Orders(wave, other, wave - chain, other - other_chain, locality,
                  other_chain - chain - locality, wave / other - 1.0)


def _compute_s(t: TwoLayers, interleaved: bool) -> tuple[Floats, Floats]:
    """Mean compute time of a tile of each layer, waits for weights included.

    The first block of an expert always misses. The others do where what is read between two of
    them does not fit: their own layer's weights, and interleaved the other layer's too.
    """
    both = t.weights_1_bytes + t.weights_2_bytes
    found = []
    for mma, n, weights in ((t.t_mma_1_s, t.n_first, t.weights_1_bytes),
                            (t.t_mma_2_s, t.n_second, t.weights_2_bytes)):
        at_a_time = np.minimum(t.n_sms, n * t.n_blocks)
        once = fetch_time(mma, weights * np.minimum(1.0, t.n_sms / n), t.memory_bytes_per_s)
        per_tile = both / (t.n_first + t.n_second) if interleaved else weights / n
        always = fetch_time(mma, at_a_time * per_tile, t.memory_bytes_per_s)
        again = ((both if interleaved else weights) > t.l2_bytes) | (t.n_blocks_each <= 1)
        found.append(np.where(again, always, mma + (once - mma) / t.n_blocks_each))
    return found[0], found[1]
