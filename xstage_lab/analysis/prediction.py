"""From a calibration and a workload to what the law says, for one configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from xstage_lab import law
from xstage_lab.analysis.attention import busiest_sm_tiles, predicted_attention
from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.moe import predicted_moe
from xstage_lab.analysis.tilings import lanes_used, staged_gemm, t_mma_roofline, unfused_gemm
from xstage_lab.devices.base import Device
from xstage_lab.errors import require_number
from xstage_lab.record import provenance
from xstage_lab.schedule import build, parameters
from xstage_lab.spec import (
    BurstTrain,
    FusedGemm,
    MachineSpec,
    MoELayer,
    Tuning,
    UlyssesAttention,
    Workload,
    check_feasible,
    default_tuning,
)

DRIFTING_BURSTS = 20  # free-running producers drift apart within 5 to 20 bursts


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the law says of one configuration.

    Attributes
    ----------
    summary : dict
        The keys a record's summary has.
    low, high : dict
        The band: over the calibration's intervals, over Q from unbounded to 0 where Q is
        ASSUMED, and over the bracket of short free trains.
    regime, margin_ratio
        One of `law.REGIMES`, and how far the next bound is below it.
    terms : dict
        The quantities that enter, by name.
    unfused : dict
        Compute-then-copy: `compute_s`, `copy_s`, `total_s`; empty for bursts.
    fuse_gain_ratio : float
        Unfused over fused time, minus 1; NaN for bursts.
    t_mma_source : str
        `measured`, `roofline`, or empty for bursts.
    """

    summary: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    regime: str
    margin_ratio: float
    terms: dict[str, float]
    unfused: dict[str, float]
    fuse_gain_ratio: float
    t_mma_source: str
    calibration: Calibration
    parameters: dict[str, Any]
    provenance: dict[str, Any]


def predict(
    workload: Workload,
    machine: MachineSpec,
    calibration: Calibration,
    tuning: Tuning | None = None,
    t_mma_s: float | None = None,
) -> Prediction:
    """Predict a workload from a calibration, with no refit.

    Parameters
    ----------
    t_mma_s : float, optional
        Compute time of a tile as measured with stores off (`measure_t_mma`); a roofline of the
        machine's FLOP and memory rates is used if left out.

    Raises
    ------
    Infeasible, InvalidValue, UnknownFact
        If the machine cannot run it, or its compute rate is not known.
    """
    check_feasible(workload, machine, tuning)
    if t_mma_s is not None:
        require_number("t_mma_s", t_mma_s, low=0.0, open_low=True, unit="s")
    if isinstance(workload, BurstTrain):
        parts = _burst(workload, machine, calibration)
    elif isinstance(workload, FusedGemm):
        parts = _gemm(workload, machine, calibration, tuning or Tuning(), t_mma_s)
    elif isinstance(workload, MoELayer):
        parts = predicted_moe(workload, machine, calibration, tuning or Tuning(), t_mma_s)
    else:
        tuning = tuning or default_tuning(workload, machine)
        parts = predicted_attention(workload, machine, calibration, tuning, t_mma_s)
    if isinstance(workload, BurstTrain):
        tuning, n_ctas = None, workload.n_producers
    else:
        tuning = tuning or Tuning()
        n_ctas = tuning.n_ctas or machine.n_sms
    return Prediction(
        **parts,
        calibration=calibration,
        parameters=parameters(workload, tuning, n_ctas),
        provenance=provenance(
            "PREDICTED", "law", f"Burst-Gap law, calibration {calibration.name}",
            machine=machine.name, calibration=calibration.name,
            calibration_badge=calibration.badge, assumed=sorted(calibration.assumed)))


def measure_t_mma(device: Device, workload: FusedGemm | MoELayer | UlyssesAttention, tuning: Tuning,
                  seed: int | None = None) -> float:
    """Measure a tile's compute time on `device`, with stores off (s): makespan per wave.

    Of an MoE layer that is the mean over both layers on the busiest GPU, waits for weights and
    for each other's tiles included; of attention it is that of a tile that sees all keys.
    """
    program = build(workload, device.machine, tuning, stores="off")
    accepted = device.measure(program, seed).summary["accepted_s"]
    if isinstance(workload, UlyssesAttention):
        return accepted / busiest_sm_tiles(program, workload, tuning)
    return accepted / math.ceil(max(rows.size for rows in program.tasks) / program.n_ctas)


def _burst(train: BurstTrain, machine: MachineSpec, cal: Calibration) -> dict[str, Any]:
    in_step = train.sync == "lockstep"
    fast, slow = cal.ends()
    drain, volume = _drain_and_volume(train, machine, cal)
    free_s, t0 = cal.issue_free_s(train.burst_bytes), cal.issue_latency_s
    terms = {"issue_free_s": free_s, "drain_s": volume / drain, "gap_s": train.gap_s,
             "volume_bytes": volume, "capacity_bytes": cal.capacity_at(train.n_producers),
             "drain_bytes_per_s": drain,
             "gap_recovery_s": float(law.recovery_gap(free_s, volume, drain)),
             "peak_backlog_bytes": float(law.peak_backlog(free_s, volume, drain, t0))}
    regime, margin = _burst_regime(terms, in_step or train.n_bursts <= DRIFTING_BURSTS)
    return {"summary": _burst_summary(train, machine, cal, in_step),
            "low": _burst_summary(train, machine, fast, in_step),
            "high": _burst_summary(train, machine, slow, True), "regime": regime,
            "margin_ratio": margin, "terms": terms, "unfused": {}, "fuse_gain_ratio": math.nan,
            "t_mma_source": ""}


def _drain_and_volume(train: BurstTrain, machine: MachineSpec,
                      cal: Calibration) -> tuple[float, float]:
    drain = cal.drain_bytes_per_s * lanes_used(machine, train.n_gpus)
    return drain, float(train.volume_bytes if train.n_gpus > 1 else 0)


def _burst_summary(train: BurstTrain, machine: MachineSpec, cal: Calibration,
                   in_step: bool) -> dict[str, float]:
    drain, volume = _drain_and_volume(train, machine, cal)
    free_s, t0 = cal.issue_free_s(train.burst_bytes), cal.issue_latency_s
    held = cal.capacity_at(train.n_producers)
    least, lockstep = law.train_bounds(train.n_bursts, train.gap_s, free_s, volume, drain, held, t0)
    accepted = float(lockstep if in_step else least)
    span = (accepted - (train.n_bursts - 1) * train.gap_s) / train.n_bursts
    if in_step:
        steady = float(law.lockstep_issue_time(train.gap_s, free_s, volume, drain, held, t0))
    else:
        steady = float(law.issue_time(train.gap_s, free_s, volume, drain))
    # Periods are looked at over the second half; until the path is full nothing blocks.
    rising = volume - drain * (free_s + train.gap_s)
    full_at = held / rising / train.n_bursts if rising > 0 else 0.0
    unfilled = min(max(2 * full_at - 1, 0.0), 1.0)
    steady = unfilled * free_s + (1 - unfilled) * steady
    total = law.train_total(accepted, train.n_bursts, train.gap_s, volume, drain, t0)
    return {"total_s": float(total) if volume else accepted, "accepted_s": accepted,
            "period_s": steady + train.gap_s if train.n_bursts >= 8 else math.nan,
            "issue_s": span, "stall_ratio": train.n_bursts * (span - free_s) / accepted}


def _burst_regime(terms: dict[str, float], together: bool) -> tuple[str, float]:
    """Regime of a train: does the path keep up, does a burst fit, is there any gap to hide it.

    Producers that run freely drift apart, and then no burst of all of them need fit.
    """
    chain = terms["issue_free_s"] + terms["gap_s"]
    if terms["drain_s"] > chain:
        return "drain-bound", terms["drain_s"] / chain - 1.0
    if together and terms["peak_backlog_bytes"] > terms["capacity_bytes"]:
        capacity = max(terms["capacity_bytes"], 1.0)
        return "capacity-bound", terms["peak_backlog_bytes"] / capacity - 1.0
    name = "compute-bound" if terms["gap_s"] >= terms["issue_free_s"] else "issue-bound"
    return name, chain / terms["drain_s"] - 1.0 if terms["drain_s"] > 0 else math.inf


def _gemm(gemm: FusedGemm, machine: MachineSpec, cal: Calibration, tuning: Tuning,
          t_mma_s: float | None) -> dict[str, Any]:
    source = "roofline" if t_mma_s is None else "measured"
    t_mma = float(t_mma_roofline(gemm, machine, tuning.tile_m, tuning.tile_n, tuning.n_ctas)
                  if t_mma_s is None else t_mma_s)
    k = tuning.n_ctas or machine.n_sms

    def at(used: Calibration) -> tuple[dict[str, float], law.Staged, law.TileRun]:
        staged, run = staged_gemm(gemm, machine, used, k, tuning.tile_m, tuning.tile_n,
                                  tuning.issue_depth, t_mma, used.capacity_at(k))
        waves = math.ceil(float(np.asarray(run.n_tiles)) / k)
        plain = {name: float(np.asarray(getattr(staged, name)).squeeze())
                 for name in ("total_s", "accepted_s", "period_s", "issue_s", "stall_ratio")}
        return plain | ({} if waves >= 8 else {"period_s": math.nan}), staged, run

    best, staged, run = at(cal)
    fast, slow = cal.ends()
    which, margin = law.regime(run, staged.bounds_s)
    bounds = dict(zip(("compute_bound_s", "issue_bound_s", "drain_bound_s", "capacity_bound_s"),
                      map(float, staged.bounds_s.reshape(4, -1)[:, 0]), strict=True))
    waves = math.ceil(float(np.asarray(run.n_tiles)) / k)
    size = float(np.asarray(run.tile_bytes))
    terms = {"t_mma_s": t_mma, "issue_free_s": cal.issue_free_s(size),
             "drain_s": float(np.asarray(run.remote_bytes)) * k
             / max(float(np.asarray(run.n_storing)), k)
             / float(np.asarray(run.drain_bytes_per_s)),
             "tile_bytes": size, "n_tiles": float(np.asarray(run.n_tiles)),
             "n_waves": float(waves), "remote_bytes": float(np.asarray(run.remote_bytes)),
             "capacity_bytes": cal.capacity_at(k),
             "drain_bytes_per_s": float(np.asarray(run.drain_bytes_per_s)), **bounds}
    compute, copy = (float(part) for part in unfused_gemm(gemm, machine, cal, run))
    unfused = {"compute_s": compute, "copy_s": copy,
               "total_s": float(law.unfused_time(compute, copy, 1.0))}
    return {"summary": best, "low": at(fast)[0], "high": at(slow)[0],
            "regime": law.REGIMES[int(np.asarray(which).squeeze())],
            "margin_ratio": float(np.asarray(margin).squeeze()), "terms": terms,
            "unfused": unfused, "fuse_gain_ratio": unfused["total_s"] / best["total_s"] - 1.0,
            "t_mma_source": source}
