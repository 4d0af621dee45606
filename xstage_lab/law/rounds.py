"""The law for tile programs whose tiles differ: round by round, a round being a tile on every SM.

Every round is a burst of the Burst-Gap law with a volume and a compute time of its own. What SMs
lose to each other before any store waits is a critical path over the static schedule; what the
store path adds is a recurrence over rounds. Pure functions over arrays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage_lab.law.bursts import Floats, floats

Ints = NDArray[np.int64]
FULL_WIDTH = 12**0.5  # of a uniform spread, in its standard deviations


class Pieces(NamedTuple):
    """Equal tiles on neighbouring SMs, one round after the other; arrays of shape (n_pieces,).

    Attributes
    ----------
    n_tiles, first_sm, round : SMs first_sm to first_sm + n_tiles - 1 compute a tile each
    signals, waits_for : counter that the tiles raise, counter that must be full; -1 none
    """

    n_tiles: Ints
    first_sm: Ints
    round: Ints
    signals: Ints
    waits_for: Ints


class SchedulePath(NamedTuple):
    """A static schedule on its own.

    Attributes
    ----------
    end_s : last acceptance
    computed_s, accepted_s : shape (n_rounds,), mean over SMs of when a round's tiles are
    spread_s : shape (n_rounds,), full width of the SMs' acceptances, taken as uniform
    slot_wait_s : waits of the mean SM's MMA role for a slot
    """

    end_s: float
    computed_s: Floats
    accepted_s: Floats
    spread_s: Floats
    slot_wait_s: float


def critical_path(pieces: Pieces, n_sms: int, compute_s: ArrayLike, issue_s: ArrayLike,
                  issue_depth: int) -> SchedulePath:
    """Step through a static schedule in which no store waits for room.

    An SM takes its tiles in order, and tile j once tile j - D is accepted; one that waits for a
    counter starts once all tiles that raise it are accepted. SMs whose tiles are shorter run
    ahead, until a counter stops them.

    Parameters
    ----------
    compute_s, issue_s : shape (n_pieces,), of a tile
    """
    n_rounds = int(pieces.round[-1]) + 1 if pieces.round.size else 0
    mean_computed, mean_accepted, spread = np.zeros((3, n_rounds))
    computed, accepted = np.zeros(n_sms), np.zeros((issue_depth, n_sms))  # of the last D rounds
    full = [0.0] * (int(pieces.signals.max(initial=-1)) + 1)
    waits, maximum, add = 0.0, np.maximum, np.add  # looked up once: this loop is what takes time
    last = np.append(np.diff(pieces.round) > 0, True)
    columns = (pieces.first_sm, pieces.n_tiles, pieces.round, pieces.signals, pieces.waits_for,
               *floats(compute_s, issue_s), last)
    for sm, n, at, raised, needed, compute, issue, ends in zip(
            *(column.tolist() for column in columns), strict=True):
        mine, slot = computed[sm:sm + n], accepted[at % issue_depth, sm:sm + n]
        before = accepted[(at - 1) % issue_depth, sm:sm + n]
        if needed >= 0:
            maximum(mine, full[needed], out=mine)
        waits -= add.reduce(mine)
        maximum(mine, slot, out=mine)
        waits += add.reduce(mine)
        mine += compute
        maximum(mine, before, out=slot)
        slot += issue
        if raised >= 0:
            full[raised] = max(full[raised], maximum.reduce(slot))
        if ends:
            idle = slice(sm + n, None)  # SMs without a tile in the last round
            maximum(computed[idle], accepted[at % issue_depth, idle], out=computed[idle])
            maximum(accepted[at % issue_depth, idle], accepted[:, idle].max(axis=0),
                    out=accepted[at % issue_depth, idle])
            ended = accepted[at % issue_depth]
            mean_computed[at] = add.reduce(computed) / n_sms
            mean_accepted[at] = add.reduce(ended) / n_sms
            spread[at] = FULL_WIDTH * math.sqrt(
                max(ended @ ended / n_sms - mean_accepted[at] ** 2, 0.0))
    return SchedulePath(float(accepted.max(initial=0.0)), mean_computed, mean_accepted, spread,
                        float(waits) / n_sms)


class RoundRun(NamedTuple):
    """Programs as rounds. Arrays of shape (..., n_rounds), padded by zeros; scalars of (...).

    Attributes
    ----------
    compute_s, issue_s : what a round takes the mean SM from when it has a slot, waits for
        tiles included, and from when its store role is free
    store_bytes : bytes that a round stores to other GPUs
    spread_s : full width of the SMs' ends of a round
    tail_s : scalar, end of the busiest SM after that of the mean one
    issue_depth, drain_bytes_per_s, capacity_bytes : scalars D, R, Q
    ahead_bytes : scalar, bytes of others that the path drains before any of the program's
    """

    compute_s: ArrayLike
    issue_s: ArrayLike
    store_bytes: ArrayLike
    spread_s: ArrayLike
    tail_s: ArrayLike
    issue_depth: ArrayLike
    drain_bytes_per_s: ArrayLike
    capacity_bytes: ArrayLike
    ahead_bytes: ArrayLike = 0.0


class Rounds(NamedTuple):
    """What the law says of programs.

    Attributes
    ----------
    accepted_s, total_s : shape (...), last acceptance, last byte at its destination
    start_s, end_s : shape (..., n_rounds), when a round's issue starts and is accepted, mean SM
    room_wait_s : shape (...), waits of the mean SM for room in the path
    slot_wait_s : shape (...), waits of its MMA role for a slot
    """

    accepted_s: Floats
    total_s: Floats
    start_s: Floats
    end_s: Floats
    room_wait_s: Floats
    slot_wait_s: Floats


def staged_rounds(run: RoundRun) -> Rounds:
    """Step staged tiles through their rounds, with the store path behind them.

    The mean SM computes round j once round j - D is accepted, and issues it once round j - 1 is.
    The path is a fluid: it has drained everything at `max(drained, start) + V/R`, and a round is
    accepted when all but Q of it has drained. SMs that are not in step store before and after
    the mean one, so that a burst is spread: it starts half their spread earlier, and the mean SM
    is done half of it before the last. At the end the busiest SM counts.
    """
    compute, issue, volume, spread = np.broadcast_arrays(*floats(*run[:4]))
    tail, depth, drain, held, ahead = (np.broadcast_to(a, compute.shape[:-1]).ravel()
                                        for a in floats(*run[4:]))
    shape, n_rounds = compute.shape[:-1], compute.shape[-1]
    compute, issue, volume, spread = (a.reshape(-1, n_rounds).T
                                      for a in (compute, issue, volume, spread))
    lanes, back = np.arange(tail.size), depth.astype(np.int64)
    most = int(back.max(initial=1))
    accepted = np.zeros((n_rounds + most, tail.size))  # the rounds before the first one first
    issued = np.zeros((n_rounds, tail.size))
    computed, room_wait, slot_wait = np.zeros((3, tail.size))
    drained = ahead / drain
    for j in range(n_rounds):
        before = accepted[j + most - 1]
        slot = accepted[j + most - back, lanes]
        slot_wait += np.where(compute[j] > 0, np.maximum(slot - computed, 0.0), 0.0)
        computed = np.maximum(computed, slot) + compute[j]
        issued[j] = np.maximum(computed, before)
        half = 0.5 * spread[max(j - 1, 0)]
        stores = volume[j] > 0
        first = issued[j] - np.minimum(half, compute[j] if j else 0.0)
        drained = np.where(stores, np.maximum(drained, first) + volume[j] / drain, drained)
        free = issued[j] + issue[j]
        wait = np.where(stores, np.maximum(drained - held / drain - half - free, 0.0), 0.0)
        room_wait += wait
        accepted[j + most] = free + wait
    end = np.maximum(accepted[-1] + tail, drained - held / drain)
    plain = (end, np.maximum(end, drained), room_wait, slot_wait)
    end, total, room_wait, slot_wait = (a.reshape(shape) for a in plain)
    start_s, end_s = (a.T.reshape(*shape, n_rounds) for a in (issued, accepted[most:]))
    return Rounds(end, total, start_s, end_s, room_wait, slot_wait)
