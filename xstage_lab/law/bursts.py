"""The Burst-Gap law for bursts, as pure functions over arrays.

A store is *accepted* long before it is *visible*. Between the two the path holds up to Q bytes
and drains at R, so that stores cost their issuer nothing but their issue until they come faster
than R for longer than Q lasts. All arguments are floats or arrays that broadcast, in SI units.

Symbols: K producers, B bytes of one burst, V = K B, gap G, drain rate R, outstanding capacity Q,
backpressure-free issue time T_iss0 = t0 + B / r_SM, of which the latency t0 issues nothing and
lets the path drain as the gap does.

References
----------
Burst-Gap relations: as reported by X-Stage (arXiv 2607.23264 v1, via public notes). Lockstep
trains and the split of T_iss0 are extensions made here; the tests hold them against the
simulated device, which knows none of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def floats(*values: ArrayLike) -> tuple[Floats, ...]:
    """Return each value as an array of float64."""
    return tuple(np.asarray(value, dtype=np.float64) for value in values)


def issue_free_time(
    burst_bytes: ArrayLike, per_sm_bytes_per_s: ArrayLike, issue_latency_s: ArrayLike = 0.0
) -> Floats:
    """Issue time without backpressure, T_iss0 = t0 + B / r_SM (s)."""
    size, rate, latency = floats(burst_bytes, per_sm_bytes_per_s, issue_latency_s)
    return latency + size / rate


def issue_rate(
    n_sms: ArrayLike, per_sm_bytes_per_s: ArrayLike, drain_bytes_per_s: ArrayLike
) -> Floats:
    """Sustained store rate of `n_sms` SMs, min(K r_SM, R) (B/s)."""
    k, rate, drain = floats(n_sms, per_sm_bytes_per_s, drain_bytes_per_s)
    return np.minimum(k * rate, drain)


def period(
    gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
    drain_bytes_per_s: ArrayLike,
) -> Floats:
    """Steady period of free-running producers, max(T_iss0 + G, V / R) (s)."""
    gap, free, volume, drain = floats(gap_s, issue_free_s, volume_bytes, drain_bytes_per_s)
    return np.maximum(free + gap, volume / drain)


def completion_coupled_period(
    gap_s: ArrayLike, volume_bytes: ArrayLike, drain_bytes_per_s: ArrayLike
) -> Floats:
    """Period if issue waited for completion, G + V / R (s): the form measurements refute."""
    gap, volume, drain = floats(gap_s, volume_bytes, drain_bytes_per_s)
    return gap + volume / drain


def issue_time(
    gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
    drain_bytes_per_s: ArrayLike,
) -> Floats:
    """Steady issue time of a burst, max(T_iss0, V / R - G) (s)."""
    return period(gap_s, issue_free_s, volume_bytes, drain_bytes_per_s) - floats(gap_s)[0]


def recovery_gap(
    issue_free_s: ArrayLike, volume_bytes: ArrayLike, drain_bytes_per_s: ArrayLike
) -> Floats:
    """Gap from which on bursts are free of backpressure, G* = (V / R - T_iss0)+ (s)."""
    free, volume, drain = floats(issue_free_s, volume_bytes, drain_bytes_per_s)
    return np.maximum(volume / drain - free, 0.0)


def peak_backlog(
    issue_free_s: ArrayLike, volume_bytes: ArrayLike, drain_bytes_per_s: ArrayLike,
    issue_latency_s: ArrayLike = 0.0,
) -> Floats:
    """Backlog after a free burst into an empty path of unlimited capacity (bytes).

    (V - R T_iss0)+, where only the part of T_iss0 after the latency drains.
    """
    free, volume, drain, latency = floats(
        issue_free_s, volume_bytes, drain_bytes_per_s, issue_latency_s)
    return np.maximum(volume - drain * (free - latency), 0.0)


def isolated_issue_time(
    issue_free_s: ArrayLike, volume_bytes: ArrayLike, drain_bytes_per_s: ArrayLike,
    capacity_bytes: ArrayLike, issue_latency_s: ArrayLike = 0.0,
) -> Floats:
    """Issue time of a burst into an empty path, max(T_iss0, t0 + (V - Q) / R) (s)."""
    free, volume, drain, held, latency = floats(
        issue_free_s, volume_bytes, drain_bytes_per_s, capacity_bytes, issue_latency_s)
    return np.maximum(free, latency + (volume - held) / drain)


def isolated_knee(
    n_producers: ArrayLike, per_sm_bytes_per_s: ArrayLike, drain_bytes_per_s: ArrayLike,
    capacity_bytes: ArrayLike,
) -> Floats:
    """Volume of a burst into an empty path from which on its issue is blocked (bytes).

    Where (V - R V / (K r_SM))+ = Q; NaN where the path drains as fast as K producers issue.
    """
    k, rate, drain, held = floats(
        n_producers, per_sm_bytes_per_s, drain_bytes_per_s, capacity_bytes)
    left = 1.0 - drain / (k * rate)
    return np.where(left > 0, held / np.where(left > 0, left, 1.0), np.nan)


def is_free(
    gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
    drain_bytes_per_s: ArrayLike, capacity_bytes: ArrayLike, issue_latency_s: ArrayLike = 0.0,
) -> NDArray[np.bool_]:
    """Whether bursts see no backpressure: the path keeps up, and one burst fits."""
    gap, free, volume, drain, held = floats(
        gap_s, issue_free_s, volume_bytes, drain_bytes_per_s, capacity_bytes)
    backlog = peak_backlog(free, volume, drain, issue_latency_s)
    return np.asarray((volume <= drain * (free + gap)) & (backlog <= held))


def lockstep_issue_time(
    gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
    drain_bytes_per_s: ArrayLike, capacity_bytes: ArrayLike, issue_latency_s: ArrayLike = 0.0,
) -> Floats:
    """Steady issue time with a barrier between bursts (s).

    In a gap no more drains than the path holds: max(T_iss0, t0 + V/R - min(G + t0, Q/R)).
    """
    gap, free, volume, drain, held, latency = floats(
        gap_s, issue_free_s, volume_bytes, drain_bytes_per_s, capacity_bytes, issue_latency_s)
    return np.maximum(free, latency + volume / drain - np.minimum(gap + latency, held / drain))


def train_bounds(
    n_bursts: ArrayLike, gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
    drain_bytes_per_s: ArrayLike, capacity_bytes: ArrayLike, issue_latency_s: ArrayLike = 0.0,
) -> tuple[Floats, Floats]:
    """Time to accept a whole train: (free-running at least, lockstep) (s).

    Lockstep takes the second value; a free-running train lies between the two.
    """
    n, gap, free, volume, drain, held, latency = floats(
        n_bursts, gap_s, issue_free_s, volume_bytes, drain_bytes_per_s, capacity_bytes,
        issue_latency_s)
    least = np.maximum(n * free + (n - 1) * gap, latency + (n * volume - held) / drain)
    alone = isolated_issue_time(free, volume, drain, held, latency)
    return least, np.maximum(least, n * alone + (n - 1) * gap)


def train_total(
    accepted_s: ArrayLike, n_bursts: ArrayLike, gap_s: ArrayLike, volume_bytes: ArrayLike,
    drain_bytes_per_s: ArrayLike, issue_latency_s: ArrayLike = 0.0,
) -> Floats:
    """Time until a train's last byte is at its destination (s).

    The path either drained all the time, or was empty when the last burst began.
    """
    accepted, n, gap, volume, drain, latency = floats(
        accepted_s, n_bursts, gap_s, volume_bytes, drain_bytes_per_s, issue_latency_s)
    last_start = accepted - (accepted - (n - 1) * gap) / n
    drained = np.maximum(n * volume / drain, last_start + volume / drain)
    return np.maximum(accepted, latency + drained)
