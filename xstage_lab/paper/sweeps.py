"""Published rates against the number of SMs that issue: the issue-bound and drain-bound regimes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from xstage_lab import catalog, law
from xstage_lab.devices.recorded import published_sweeps
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.paper.table import Compared, Table, error_ratio, spread
from xstage_lab.record import Record
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain

BELOW_PLATEAU_RATIO = 0.9
BURST_BYTES, N_BURSTS = 16 * 1024, 200  # register stores were published for 16 KiB messages


class Sweep(NamedTuple):
    """One machine's rates by one transfer mechanism, fewest SMs first.

    Attributes
    ----------
    machine, path, direction, source : str
    points : list of (n_sms, rate in bytes per second)
    """

    machine: str
    path: str
    direction: str
    source: str
    points: list[tuple[int, float]]

    @property
    def per_sm_bytes_per_s(self) -> float:
        """r_SM, from the point of fewest SMs alone."""
        n_sms, rate = self.points[0]
        return rate / n_sms

    @property
    def drain_bytes_per_s(self) -> float:
        """R, from the point of most SMs alone."""
        return self.points[-1][1]


def sweeps(records: Sequence[Record] | None = None) -> list[Sweep]:
    """Return the published sweeps, or those of `records`, one per machine, path and direction."""
    found: dict[tuple[str, str, str, str], list[tuple[int, float]]] = {}
    for record in published_sweeps() if records is None else records:
        key = (str(record.provenance["machine"]), record.parameters["path"],
               record.parameters["direction"], str(record.provenance["source"]))
        found.setdefault(key, []).append(
            (record.parameters["n_producers"], record.summary["rate_bytes_per_s"]))
    return [Sweep(*key, sorted(points)) for key, points in found.items()]


def store_sweeps_table() -> Table:
    """Predict every point between the first and the last of a sweep from these two."""
    everything = sweeps()
    rows = [row for sweep in everything for row in _rows(sweep)]
    below = {direction: [row for row in rows if row["below_plateau"] and not row["fitted_to"]
                         and row["direction"] == direction] for direction in ("write", "read")}
    between = {direction: [row for row in rows if not row["fitted_to"]
                           and row["direction"] == direction] for direction in ("write", "read")}
    summary: dict[str, float] = {}
    for direction, what in (("write", "stores"), ("read", "loads")):
        summary[f"n_{what}_below_plateau"] = float(len(below[direction]))
        summary |= spread(f"{what}_below_plateau_error_ratio",
                          (row["law_error_ratio"] for row in below[direction]))
        summary |= spread(f"{what}_all_points_error_ratio",
                          (row["law_error_ratio"] for row in between[direction]))
    summary |= spread("completion_coupled_stores_below_plateau_error_ratio",
                      (row["completion_coupled_error_ratio"] for row in below["write"]))
    summary |= spread("simulated_stores_error_ratio",
                      (row["simulated_error_ratio"] for row in between["write"]))
    untested = [f"{s.machine} {s.path}" for s in everything if s.direction == "write" and not any(
        row["machine"] == s.machine and row["path"] == s.path for row in below["write"])]
    return Table(
        name="store-sweeps", compared=(Compared(
            "rate_bytes_per_s", ("law_bytes_per_s", "simulated_bytes_per_s",
                                 "completion_coupled_bytes_per_s")),),
        title="Rate against the number of SMs that issue, min(K r_SM, R)",
        source="; ".join(dict.fromkeys(sweep.source for sweep in everything)), rows=rows,
        fitted_on={"r_SM": "the point of fewest SMs of each sweep alone",
                   "R": "the point of most SMs of each sweep alone"},
        summary=summary, notes=_notes(untested))


def _rows(sweep: Sweep) -> list[dict[str, Any]]:
    per_sm, drain = sweep.per_sm_bytes_per_s, sweep.drain_bytes_per_s
    plateau = max(rate for _, rate in sweep.points)
    device = _simulated(sweep) if sweep.direction == "write" else None
    rows = []
    for n_sms, rate in sweep.points:
        by_law = float(law.issue_rate(n_sms, per_sm, drain))
        coupled = _completion_coupled(sweep, n_sms)
        simulated = None if device is None else _saturated_rate(device, n_sms)
        rows.append({
            "machine": sweep.machine, "path": sweep.path, "direction": sweep.direction,
            "n_sms": n_sms, "rate_bytes_per_s": rate,
            "fitted_to": n_sms in (sweep.points[0][0], sweep.points[-1][0]),
            "below_plateau": rate < BELOW_PLATEAU_RATIO * plateau,
            "law_bytes_per_s": by_law, "law_error_ratio": error_ratio(by_law, rate),
            "completion_coupled_bytes_per_s": coupled,
            "completion_coupled_error_ratio": error_ratio(coupled, rate),
            "simulated_bytes_per_s": simulated,
            "simulated_error_ratio": None if simulated is None else error_ratio(simulated, rate)})
    return rows


def _completion_coupled(sweep: Sweep, n_sms: int) -> float:
    """Rate if an SM waited for each message's completion, through the same two points.

    A message then takes its issue and its share of the drain one after the other:
    1/rate = 1/(K r_SM) + 1/R.
    """
    (few, slow), (many, fast) = sweep.points[0], sweep.points[-1]
    per_sm = (1 / few - 1 / many) / (1 / slow - 1 / fast)
    drain_s_per_byte = 1 / fast - 1 / (many * per_sm)
    return 1 / (1 / (n_sms * per_sm) + drain_s_per_byte)


def _simulated(sweep: Sweep) -> SimulatedDevice:
    """Return the sweep's machine with the two numbers the law has, and supposed capacities."""
    machine = catalog.with_parameters(
        catalog.machine(sweep.machine), drain_bytes_per_s=sweep.drain_bytes_per_s,
        per_sm_bytes_per_s=sweep.per_sm_bytes_per_s)
    return SimulatedDevice(catalog.with_assumptions(machine))


def _saturated_rate(device: SimulatedDevice, n_sms: int) -> float:
    """Measure the rate of back-to-back bursts of `n_sms` producers."""
    train = BurstTrain(n_producers=n_sms, burst_bytes=BURST_BYTES, gap_s=0.0, n_bursts=N_BURSTS)
    period = device.measure(build(train, device.machine)).summary["period_s"]
    return math.nan if math.isnan(period) else train.volume_bytes / period


def _notes(untested: list[str]) -> tuple[str, ...]:
    return (
        f"What is tested are the points below {BELOW_PLATEAU_RATIO:.0%} of a sweep's best rate "
        "other than the first; on the plateau the law says R whatever K is. No such point in "
        f"{', '.join(untested)}: their first point is all that is below.",
        "Loads are kept apart. They are no posted stores, and the law claims nothing for them: a "
        "load is bound by how many an SM can have outstanding over their latency, which grows "
        "with the traffic. Register loads bend before their plateau, where the completion-coupled "
        "form is nearer, as it should be for what waits for its data; TMA loads hardly do.",
        "The completion-coupled form, 1/rate = 1/(K r_SM) + 1/R, goes through the same two points "
        "and bends from the start; posted stores rise in a straight line.",
        "The simulated device has the same two numbers and no others of the sweep; its Q and "
        "credits are ASSUMED. It shows that the mechanisms make min(K r_SM, R), not more.",
        "H100 rates count bytes for the local rank, so that the rate over the link is an eighth "
        "lower; that changes r_SM and R alike and no error. Its register stores fall by 8 % from "
        "24 to 32 SMs, which the law has no reason for.")
