"""The law for tile programs whose tiles differ: round by round, a round being a tile on every SM.

Every round is a burst of the Burst-Gap law with a volume and a compute time of its own. What SMs
lose to each other before any store waits is a critical path over the static schedule; what the
store path adds is a recurrence over rounds. Pure functions over arrays.
"""

from __future__ import annotations

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


def critical_path(pieces: Pieces, n_sms: int, step_s: ArrayLike,
                  late_s: ArrayLike) -> tuple[float, Floats]:
    """Time of a static schedule in which no store waits for room, and how far SMs drift apart.

    An SM takes its tiles in order; a tile that waits for a counter starts once all tiles that
    raise it are accepted. SMs whose tiles are shorter run ahead, until a counter stops them.

    Parameters
    ----------
    step_s : shape (n_pieces,), time from a tile to the next on its SM
    late_s : shape (n_pieces,), acceptance of a tile after its step

    Returns
    -------
    end_s : float
        End of the last step.
    spread_s : shape (n_rounds,)
        Full width of the SMs' ends of a round, taken as uniform.
    """
    n_rounds = int(pieces.round[-1]) + 1 if pieces.round.size else 0
    free, spread = np.zeros(n_sms), np.zeros(n_rounds)
    full = [0.0] * (int(pieces.signals.max(initial=-1)) + 1)
    last = np.append(np.diff(pieces.round) > 0, True)
    columns = (pieces.first_sm, pieces.n_tiles, pieces.round, pieces.signals, pieces.waits_for,
               *floats(step_s, late_s), last)
    for sm, n, at, raised, needed, step, late, ends in zip(
            *(column.tolist() for column in columns), strict=True):
        mine = free[sm:sm + n]
        if needed >= 0:
            np.maximum(mine, full[needed], out=mine)
        mine += step
        if raised >= 0:
            full[raised] = max(full[raised], float(mine.max()) + late)
        if ends:
            spread[at] = FULL_WIDTH * free.std()
    return float(free.max(initial=0.0)), spread


class RoundRun(NamedTuple):
    """Programs as rounds. Arrays of shape (..., n_rounds), padded by zeros; scalars of (...).

    Attributes
    ----------
    compute_s, issue_s : mean compute and issue time of a round's tiles
    store_bytes : bytes that a round stores to other GPUs
    spread_s : full width of the SMs' progress that the static schedule gives, after each round
    slack_s : scalar, how far SMs may drift apart before they wait for each other's tiles
    issue_depth, drain_bytes_per_s, capacity_bytes : scalars D, R, Q
    """

    compute_s: ArrayLike
    issue_s: ArrayLike
    store_bytes: ArrayLike
    spread_s: ArrayLike
    slack_s: ArrayLike
    issue_depth: ArrayLike
    drain_bytes_per_s: ArrayLike
    capacity_bytes: ArrayLike


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
    is done half of it before the last. The spread is that of the static schedule; waits for room
    pull SMs further apart, by as much as they last, since who stores first waits for nothing,
    until the slack between the layers is used up. At the end the last SM counts.
    """
    compute, issue, volume, static = np.broadcast_arrays(*floats(*run[:4]))
    slack, depth, drain, held = (np.broadcast_to(a, compute.shape[:-1]).ravel()
                                 for a in floats(*run[4:]))
    shape, n_rounds = compute.shape[:-1], compute.shape[-1]
    compute, issue, volume, static = (a.reshape(-1, n_rounds).T
                                      for a in (compute, issue, volume, static))
    lanes, back = np.arange(slack.size), depth.astype(np.int64)
    most = int(back.max(initial=1))
    accepted = np.zeros((n_rounds + most, slack.size))  # the rounds before the first one first
    issued = np.zeros((n_rounds, slack.size))
    computed, drained, grown, room_wait, slot_wait = np.zeros((5, slack.size))
    for j in range(n_rounds):
        before = accepted[j + most - 1]
        slot = accepted[j + most - back, lanes]
        slot_wait += np.where(compute[j] > 0, np.maximum(slot - computed, 0.0), 0.0)
        computed = np.maximum(computed, slot) + compute[j]
        issued[j] = np.maximum(computed, before)
        half = 0.5 * np.maximum(grown, static[max(j - 1, 0)])
        stores = volume[j] > 0
        first = issued[j] - np.minimum(half, compute[j] if j else 0.0)
        drained = np.where(stores, np.maximum(drained, first) + volume[j] / drain, drained)
        free = issued[j] + issue[j]
        wait = np.where(stores, np.maximum(drained - held / drain - half - free, 0.0), 0.0)
        grown = np.minimum(grown + wait, slack)
        room_wait += wait
        accepted[j + most] = free + wait
    end = np.maximum(accepted[-1], drained - held / drain)
    plain = (end, np.maximum(end, drained), room_wait, slot_wait)
    end, total, room_wait, slot_wait = (a.reshape(shape) for a in plain)
    start_s, end_s = (a.T.reshape(*shape, n_rounds) for a in (issued, accepted[most:]))
    return Rounds(end, total, start_s, end_s, room_wait, slot_wait)
