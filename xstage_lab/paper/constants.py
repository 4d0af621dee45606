"""X-Stage's constants: do they follow from each other, and does the simulated device show them?"""

from __future__ import annotations

from typing import Any

from xstage_lab import analysis, catalog, law
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.paper.table import X_STAGE, Compared, Table, error_ratio, spread
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain
from xstage_lab.units import text

# What the published constants were measured with; the columns `condition` of their table say so.
N_PRODUCERS, BURST_BYTES = 148, 32 * 1024
#: Machine of 148 SMs that the constants are taken to describe.
MACHINE = "B200-SXM"

Values = dict[str, float]


def constants_table() -> Table:
    """Set what follows from R, Q and T_iss0 beside what was published and what is simulated."""
    known = catalog.constants()
    published = {
        "issue_free_time_s": known["issue_free_time_s"],
        "drain_rate_bytes_per_s": known["drain_rate_bytes_per_s"],
        "outstanding_capacity_bytes": known["outstanding_capacity_bytes"],
        "knee_per_producer_bytes": known["isolated_knee_per_producer_bytes"],
        "knee_bytes": N_PRODUCERS * known["isolated_knee_per_producer_bytes"],
    }
    derived, simulated = _derived(known), _simulated()
    rows: list[dict[str, Any]] = []
    for quantity in {**published, **derived}:
        said, by_law, found = (of.get(quantity) for of in (published, derived, simulated))
        against = said if by_law is None else by_law
        rows.append({
            "quantity": quantity, "published": said, "law": by_law, "simulated": found,
            "error_ratio": None if said is None or by_law is None else error_ratio(by_law, said),
            "simulated_error_ratio": (
                None if found is None or against is None else error_ratio(found, against))})
    bound, reached = (known[f"{name}_ratio"] for name in
                      ("completion_coupled_speedup_bound", "megamoe_speedup_reported"))
    rows.append({"quantity": "megamoe_speedup", "published": reached,
                 "completion_coupled": bound, "error_ratio": error_ratio(bound, reached)})
    growing = float(law.isolated_knee(
        N_PRODUCERS, BURST_BYTES / known["issue_free_time_s"], known["drain_rate_bytes_per_s"],
        known["outstanding_capacity_bytes"]))
    checked = [row["error_ratio"] for row in rows[:-1] if row["error_ratio"] is not None]
    return Table(
        name="constants", compared=(
            Compared("published", ("law", "simulated", "completion_coupled")),),
        title="X-Stage's constants, and what follows from three of them",
        source=X_STAGE, rows=rows,
        fitted_on={"R, Q and T_iss0": "their own rows; nothing else is taken from the table"},
        summary=spread("error_ratio", checked) | spread("simulated_error_ratio", (
            row["simulated_error_ratio"] for row in rows
            if row.get("simulated_error_ratio") is not None)),
        notes=(
            "V, V/R, the recovery gap G* and the zero-gap peak backlog have no published figure "
            "in the lab's table; the law's is what R and T_iss0 make of them.",
            "The law's knee takes T_iss0 as measured at 32 KiB, as the published one does. T_iss0 "
            f"grows with the burst; then the knee is at "
            f"{text('_bytes', growing / N_PRODUCERS, 4)} per producer, which is where the "
            "simulated machine has it.",
            f"The simulated machine is {MACHINE} with R, r_SM = B/T_iss0 and Q of X-Stage as "
            "rates and limits of its mechanisms; calibration gives R, Q and T_iss0 back, and the "
            "other figures are measured on it, none by the law.",
            "A completion-coupled reading of the stage times allows a speed-up of 1.5 at most; "
            "1.56 is reported. Both are X-Stage's; the stage times were not published, so that "
            "the law has no figure of its own here."))


def _derived(known: Values) -> Values:
    """What the law makes of R, Q and T_iss0 alone."""
    drain, free = known["drain_rate_bytes_per_s"], known["issue_free_time_s"]
    volume = N_PRODUCERS * BURST_BYTES
    knee = known["outstanding_capacity_bytes"] + drain * free  # where (V - R T_iss0)+ = Q
    return {
        "volume_bytes": float(volume),
        "drain_time_s": float(law.period(0.0, free, volume, drain)),
        "recovery_gap_s": float(law.recovery_gap(free, volume, drain)),
        "peak_backlog_bytes": float(law.peak_backlog(free, volume, drain)),
        "knee_per_producer_bytes": knee / N_PRODUCERS,
        "knee_bytes": knee,
    }


def _simulated() -> Values:
    """Calibrate the simulated machine, then measure on it what the law derives."""
    device = SimulatedDevice(catalog.with_assumptions(catalog.machine(MACHINE)))

    def train(size: int, gap_s: float = 0.0, n_bursts: int = 1) -> Any:
        return device.measure(build(BurstTrain(
            n_producers=N_PRODUCERS, burst_bytes=size, gap_s=gap_s, n_bursts=n_bursts),
            device.machine))

    calibration = analysis.calibrate(device, n_producers=N_PRODUCERS, burst_bytes=BURST_BYTES)
    alone = train(BURST_BYTES)
    gap_s = 3e-6  # short of the recovery gap, so that what blocking adds tells the rest of it
    in_gap = train(BURST_BYTES, gap_s, 200).summary["period_s"]
    spans = {share: train(int(share * BURST_BYTES)).summary["issue_s"]
             for share in (0.25, 0.5, 1.5, 2.0)}
    slope_free, slope_blocked = (spans[0.5] - spans[0.25]) / 0.25, (spans[2.0] - spans[1.5]) / 0.5
    at_none = spans[0.25] - 0.25 * slope_free, spans[1.5] - 1.5 * slope_blocked
    knee = BURST_BYTES * (at_none[0] - at_none[1]) / (slope_blocked - slope_free)
    return {
        "issue_free_time_s": calibration.issue_free_s(BURST_BYTES),
        "drain_rate_bytes_per_s": calibration.drain_bytes_per_s,
        "outstanding_capacity_bytes": calibration.capacity_bytes,
        "drain_time_s": train(BURST_BYTES, 0.0, 200).summary["period_s"],
        "recovery_gap_s": in_gap - alone.summary["issue_s"],
        "peak_backlog_bytes": float(alone.backlog[1].max()),
        "knee_per_producer_bytes": knee,
        "knee_bytes": N_PRODUCERS * knee,
    }
