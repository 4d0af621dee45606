"""The figures of the burst-gap panel: the law's curves, and the measurements beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xstage_lab import law, plots
from xstage_lab.devices.recorded import published_issue_times, published_sweeps
from xstage_lab.lab.picture import Picture, Values
from xstage_lab.plots import points
from xstage_lab.record import Record
from xstage_lab.spec import BurstTrain
from xstage_lab.units import text

Floats = NDArray[np.float64]

#: Settings of one burst into an empty path, and of trains that keep the path full.
ISOLATED: Values = {"n_bursts": 1, "gap_s": 0.0}
SATURATED: Values = {"n_bursts": 40, "gap_s": 0.0, "sync": "free"}


@dataclass(frozen=True, kw_only=True)
class BurstPicture(Picture):
    """What the figures show of one burst train."""

    train: BurstTrain

    def path(self) -> tuple[float, float, float]:
        """Return V, R and Q: bytes, bytes per second, bytes."""
        terms = self.prediction.terms
        return terms["volume_bytes"], terms["drain_bytes_per_s"], terms["capacity_bytes"]


def gaps(picture: BurstPicture, n: int) -> Floats:
    """Return `n` gaps from none to well past the recovery gap (s)."""
    volume, drain, _ = picture.path()
    return np.linspace(0.0, max(1.6 * volume / drain, 1.2 * picture.train.gap_s), n)


def volumes(picture: BurstPicture, n: int) -> Floats:
    """Return `n` burst volumes from 0 to well past the knee, or past V where there is none."""
    volume, _, capacity = picture.path()
    knee = knee_bytes(picture)
    most = 2.2 * knee if math.isfinite(knee) else max(2.0 * volume, 2.0 * min(capacity, volume))
    return np.linspace(0.0, most, n)


def knee_bytes(picture: BurstPicture) -> float:
    """Return the burst from which issue waits for the link: (V - R V/(K r_SM))+ = Q (bytes)."""
    _, drain, capacity = picture.path()
    return float(law.isolated_knee(picture.train.n_producers,
                                   picture.calibration.per_sm_bytes_per_s, drain, capacity))


def issue_time(plot: plots.IssueGap, picture: BurstPicture) -> list[Record]:
    """Draw the mean issue time of a train of N bursts against the gap."""
    volume, drain, capacity = picture.path()
    n, x, t = picture.train.n_bursts, gaps(picture, 201), picture.prediction.terms
    latency = picture.calibration.issue_latency_s
    bounds = law.train_bounds(n, x, t["issue_free_s"], volume, drain, capacity, latency)
    free, lockstep = ((accepted - (n - 1) * x) / n for accepted in bounds)
    shown = picture.records("gap_s", "sync")
    plot.update({"gap_s": x, "free_s": free, "lockstep_s": lockstep},
                points(shown, "gap_s", "issue_s", "sync"),
                recovery_gap_s=t["gap_recovery_s"], badges=picture.badge_text(shown))
    return shown


def period(plot: plots.PeriodGap, picture: BurstPicture) -> list[Record]:
    """Draw the steady period against the gap."""
    volume, drain, capacity = picture.path()
    x, free = gaps(picture, 201), picture.prediction.terms["issue_free_s"]
    lockstep = x + law.lockstep_issue_time(x, free, volume, drain, capacity,
                                           picture.calibration.issue_latency_s)
    shown = picture.records("gap_s", "sync")
    plot.update({"gap_s": x, "free_s": law.period(x, free, volume, drain), "lockstep_s": lockstep,
                 "drain_bound_s": np.full_like(x, volume / drain), "issue_bound_s": free + x,
                 "additive_s": law.completion_coupled_period(x, volume, drain)},
                points(shown, "gap_s", "period_s", "sync"),
                badges=picture.badge_text(shown))
    return shown


def backlog(plot: plots.Backlog, picture: BurstPicture) -> list[Record]:
    """Draw the backlog of the last overlaid run, else of the last measurement of this train."""
    shown, terms = picture.records()[-1:], picture.prediction.terms
    plot.update(shown[0].backlog if shown else None,
                capacity_bytes=terms["capacity_bytes"], peak_bytes=terms["peak_backlog_bytes"],
                badges=picture.badge_text(shown) if shown else "Measure shows the backlog here")
    return shown


def isolated_burst(plot: plots.IsolatedBurst, picture: BurstPicture) -> list[Record]:
    """Draw the issue time of one burst into an empty path against its volume."""
    _, drain, capacity = picture.path()
    found, x = picture.calibration, volumes(picture, 201)
    latency = found.issue_latency_s
    free = law.issue_free_time(x / picture.train.n_producers, found.per_sm_bytes_per_s, latency)
    shown = picture.records("burst_bytes", **ISOLATED)
    plot.update({"volume_bytes": x, "issue_bound_s": free,
                 "issue_s": law.isolated_issue_time(free, x, drain, capacity, latency),
                 "drain_bound_s": latency + (x - capacity) / drain},
                points(shown, "volume_bytes", "issue_s"),
                knee_bytes=knee_bytes(picture), badges=picture.badge_text(shown))
    return shown


def rate(plot: plots.RateAgainstSms, picture: BurstPicture) -> list[Record]:
    """Draw the store rate against the SMs that store, as published and as measured here."""
    from xstage_lab.paper.sweeps import sweeps
    found, n_sms = picture.calibration, np.arange(1, picture.machine.n_sms + 1)
    series = [("this calibration", n_sms, found.per_sm_bytes_per_s, found.drain_bytes_per_s)]
    published = [r for r in published_sweeps() if r.parameters["direction"] == "write"
                 and r.provenance["machine"] == picture.machine.name]
    series += [(sweep.path, n_sms, sweep.per_sm_bytes_per_s, sweep.drain_bytes_per_s)
               for sweep in sweeps(published)]
    shown = picture.records("n_producers", **SATURATED)
    trains = [r.parameters["n_producers"] * r.parameters["burst_bytes"] / r.summary["period_s"]
              for r in shown]
    measured = {
        "n_sms": [r.parameters["n_producers"] for r in published + shown],
        "rate_bytes_per_s": [r.summary["rate_bytes_per_s"] for r in published] + trains,
        "path": [r.parameters["path"] for r in published] + ["burst trains"] * len(shown),
        "badge": [r.provenance["badge"] for r in published + shown],
    }
    plot.update(
        {"n_sms": np.concatenate([n for _, n, _, _ in series]),
         "rate_bytes_per_s": np.concatenate([law.issue_rate(n, r, R) for _, n, r, R in series]),
         "path": np.repeat([path for path, *_ in series], n_sms.size)},
        measured, badges=picture.badge_text(published + shown))
    return published + shown


def completion(plot: plots.IssueAgainstCompletion, picture: BurstPicture) -> list[Record]:
    """Draw published issue and completion times of one warp's messages.

    Of the chosen machine, or of the first that was published.
    """
    from xstage_lab.paper.messages import messages
    everyone = published_issue_times()
    names = [str(r.provenance["machine"]) for r in everyone]
    name = picture.machine.name if picture.machine.name in names else names[0]
    published = [r for r, machine in zip(everyone, names, strict=True) if machine == name]
    published.sort(key=lambda r: float(r.parameters["burst_bytes"]))
    (found,) = messages(published)
    first, last = found.ends()
    size = np.where(found.payload_bytes > 0, found.payload_bytes, np.nan)  # the axis is logarithmic
    plot.update({"payload_bytes": size[first:last + 1],
                 "issue_s": found.issue_s(size)[first:last + 1]},
                {"payload_bytes": size, "stores_s": found.stores_s,
                 "release_s": found.release_s, "fence_s": found.fence_s,
                 "badge": [str(r.provenance["badge"]) for r in published]},
                badges=f"RECORDED, {name}; the line is drawn through "
                       f"{text('_bytes', size[first])} and {text('_bytes', size[last])}")
    return published
