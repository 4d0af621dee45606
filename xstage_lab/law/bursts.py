"""The Burst-Gap law and what follows from it, as pure functions over arrays.

A store is *accepted* long before it is *visible*. Between the two the path holds up to Q bytes
and drains at R, so that stores cost their issuer nothing but their issue until they come faster
than R for longer than Q lasts. All arguments are floats or arrays that broadcast, in SI units.

Symbols: K producers, B bytes of one burst, V = K B, gap G, drain rate R, outstanding capacity Q,
backpressure-free issue time T_iss0 = t0 + B / r_SM, of which the latency t0 issues nothing and
lets the path drain as the gap does.

References
----------
Burst-Gap relations: as reported by X-Stage (arXiv 2607.23264 v1, via public notes). Lockstep
trains, the split of T_iss0, staging, destinations and the unfused baseline are extensions made
here; the tests hold them against the simulated device, which knows none of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def issue_free_time(burst_bytes: ArrayLike, per_sm_bytes_per_s: ArrayLike,
                    issue_latency_s: ArrayLike = 0.0) -> Floats:
    """Issue time without backpressure, T_iss0 = t0 + B / r_SM (s)."""
    return np.asarray(issue_latency_s) + np.asarray(burst_bytes) / per_sm_bytes_per_s


def issue_rate(n_sms: ArrayLike, per_sm_bytes_per_s: ArrayLike,
               drain_bytes_per_s: ArrayLike) -> Floats:
    """Sustained store rate of `n_sms` SMs, min(K r_SM, R) (B/s)."""
    return np.minimum(np.asarray(n_sms) * per_sm_bytes_per_s, drain_bytes_per_s)


def period(gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
           drain_bytes_per_s: ArrayLike) -> Floats:
    """Steady period of free-running producers, max(T_iss0 + G, V / R) (s)."""
    return np.maximum(np.asarray(issue_free_s) + gap_s,
                      np.asarray(volume_bytes) / drain_bytes_per_s)


def completion_coupled_period(gap_s: ArrayLike, volume_bytes: ArrayLike,
                              drain_bytes_per_s: ArrayLike) -> Floats:
    """Period if issue waited for completion, G + V / R (s): the form measurements refute."""
    return np.asarray(gap_s) + np.asarray(volume_bytes) / drain_bytes_per_s


def issue_time(gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
               drain_bytes_per_s: ArrayLike) -> Floats:
    """Steady issue time of a burst, max(T_iss0, V / R - G) (s)."""
    return period(gap_s, issue_free_s, volume_bytes, drain_bytes_per_s) - gap_s


def recovery_gap(issue_free_s: ArrayLike, volume_bytes: ArrayLike,
                 drain_bytes_per_s: ArrayLike) -> Floats:
    """Gap from which on bursts are free of backpressure, G* = (V / R - T_iss0)+ (s)."""
    return np.maximum(np.asarray(volume_bytes) / drain_bytes_per_s - issue_free_s, 0.0)


def peak_backlog(issue_free_s: ArrayLike, volume_bytes: ArrayLike, drain_bytes_per_s: ArrayLike,
                 issue_latency_s: ArrayLike = 0.0) -> Floats:
    """Backlog after a free burst into an empty path of unlimited capacity (bytes).

    (V - R T_iss0)+, where only the part of T_iss0 after the latency drains.
    """
    draining = np.asarray(issue_free_s) - issue_latency_s
    return np.maximum(volume_bytes - np.asarray(drain_bytes_per_s) * draining, 0.0)


def isolated_issue_time(issue_free_s: ArrayLike, volume_bytes: ArrayLike,
                        drain_bytes_per_s: ArrayLike, capacity_bytes: ArrayLike,
                        issue_latency_s: ArrayLike = 0.0) -> Floats:
    """Issue time of a burst into an empty path, max(T_iss0, t0 + (V - Q) / R) (s)."""
    blocked = (np.asarray(volume_bytes) - capacity_bytes) / drain_bytes_per_s
    return np.maximum(issue_free_s, np.asarray(issue_latency_s) + blocked)


def is_free(gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
            drain_bytes_per_s: ArrayLike, capacity_bytes: ArrayLike,
            issue_latency_s: ArrayLike = 0.0) -> NDArray[np.bool_]:
    """Whether bursts see no backpressure: the path keeps up, and one burst fits."""
    keeps_up = np.asarray(volume_bytes) <= np.asarray(drain_bytes_per_s) * (
        np.asarray(issue_free_s) + gap_s)
    fits = peak_backlog(issue_free_s, volume_bytes, drain_bytes_per_s,
                        issue_latency_s) <= capacity_bytes
    return np.asarray(keeps_up & fits)


def lockstep_issue_time(gap_s: ArrayLike, issue_free_s: ArrayLike, volume_bytes: ArrayLike,
                        drain_bytes_per_s: ArrayLike, capacity_bytes: ArrayLike,
                        issue_latency_s: ArrayLike = 0.0) -> Floats:
    """Steady issue time with a barrier between bursts (s).

    In a gap no more drains than the path holds: max(T_iss0, t0 + V/R - min(G + t0, Q/R)).
    """
    drain = np.asarray(drain_bytes_per_s, dtype=float)
    quiet = np.minimum(np.asarray(gap_s) + issue_latency_s, np.asarray(capacity_bytes) / drain)
    return np.maximum(issue_free_s, issue_latency_s + np.asarray(volume_bytes) / drain - quiet)


def train_bounds(n_bursts: ArrayLike, gap_s: ArrayLike, issue_free_s: ArrayLike,
                 volume_bytes: ArrayLike, drain_bytes_per_s: ArrayLike,
                 capacity_bytes: ArrayLike, issue_latency_s: ArrayLike = 0.0,
                 ) -> tuple[Floats, Floats]:
    """Time to accept a whole train: (free-running at least, lockstep) (s).

    Lockstep takes the second value; a free-running train lies between the two.
    """
    n, gap = np.asarray(n_bursts, dtype=float), np.asarray(gap_s, dtype=float)
    volume = np.asarray(volume_bytes, dtype=float)
    free = np.maximum(
        n * issue_free_s + (n - 1) * gap,
        issue_latency_s + (n * volume - capacity_bytes) / drain_bytes_per_s)
    each_alone = n * isolated_issue_time(issue_free_s, volume, drain_bytes_per_s, capacity_bytes,
                                         issue_latency_s) + (n - 1) * gap
    return free, np.maximum(free, each_alone)


def train_total(accepted_s: ArrayLike, n_bursts: ArrayLike, gap_s: ArrayLike,
                volume_bytes: ArrayLike, drain_bytes_per_s: ArrayLike,
                issue_latency_s: ArrayLike = 0.0) -> Floats:
    """Time until a train's last byte is at its destination (s).

    The path either drained all the time, or was empty when the last burst began.
    """
    n, volume = np.asarray(n_bursts, dtype=float), np.asarray(volume_bytes, dtype=float)
    span = (np.asarray(accepted_s) - (n - 1) * gap_s) / n
    last_start = np.asarray(accepted_s) - span
    drained = issue_latency_s + np.maximum(n * volume / drain_bytes_per_s,
                                           last_start + volume / drain_bytes_per_s)
    return np.maximum(accepted_s, drained)
