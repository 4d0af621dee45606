"""How near the law, calibrated once, comes to live periods over this computer's sockets."""

from __future__ import annotations

import os
import time
from itertools import product
from typing import NamedTuple

import numpy as np

from bench.figures import Figure, print_table
from xstage_lab.analysis import Calibration, calibrate, predict
from xstage_lab.devices.sockets import SocketsDevice, this_computer
from xstage_lab.law import completion_coupled_period
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain

N_PRODUCERS, N_BURSTS = 4, 60
PRODUCERS, BURST_KIB = (1, 2, 4), (48, 128)
#: Gaps as shares of V/R, on both sides of the knee near 1.
GAPS_RATIO = (0.0, 0.25, 0.5, 0.75, 0.95, 1.05, 1.25, 1.75)
SYNCS = ("free", "lockstep")
NEAR_KNEE_RATIO = 0.1


class Point(NamedTuple):
    """One train, V/R and T_iss0 + G, and how far the two forms are from the measured period."""

    train: BurstTrain
    drain_s: float
    chain_s: float
    period_s: float
    error_ratio: float
    additive_error_ratio: float


def measure() -> list[Figure]:
    """Calibrate the sockets, then predict trains that the calibration never saw."""
    device = SocketsDevice(this_computer(N_PRODUCERS))
    try:
        began = time.perf_counter()
        cal = calibrate(device)
        took_s = time.perf_counter() - began
        points = [measure_point(device, cal, *setting)
                  for setting in product(PRODUCERS, BURST_KIB, GAPS_RATIO, SYNCS)]
        scheduling = device.measure(build(points[0].train, device.machine)).provenance[
            "scheduling"]
    finally:
        device.close()
    print_table(("sync", "K", "B KiB", "gap us", "(T_iss0 + G) R/V", "period us", "law",
                 "additive"), [_row(p) for p in points])
    for fault in cal.faults:
        print(f"  calibration: {fault}")
    sides = {"before": [p for p in points if p.chain_s < p.drain_s],
             "past": [p for p in points if p.chain_s >= p.drain_s]}
    near = [p.additive_error_ratio for p in points
            if abs(p.chain_s / p.drain_s - 1) <= NEAR_KNEE_RATIO]
    load = f"{scheduling} scheduling, load {os.getloadavg()[0]:.1f}"
    return [
        *(_error(f"period over sockets {side} the knee, median error", some, load)
          for side, some in sides.items()),
        Figure(what="additive form where T_iss0 + G is about V/R, median error",
               value=100 * float(np.median(near)), asked=30, unit="%", at_least=True,
               note=f"{len(near)} points, least {min(near):.1%}; {load}"),
        Figure(what="calibrating the sockets", value=took_s, asked=60, unit="s", note=load),
    ]


def _error(what: str, points: list[Point], load: str) -> Figure:
    error = np.abs([p.error_ratio for p in points])
    return Figure(what=what, value=100 * float(np.median(error)), asked=10, unit="%",
                  note=f"{len(points)} points, p95 {np.quantile(error, 0.95):.1%}, "
                       f"worst {error.max():.1%}; {load}")


def measure_point(device: SocketsDevice, cal: Calibration, k: int, burst_kib: int,
                  gap_ratio: float, sync: str) -> Point:
    """Measure one train and set both forms beside it."""
    size = burst_kib * 1024
    drain_s = k * size / cal.drain_bytes_per_s
    train = BurstTrain(n_producers=k, burst_bytes=size, gap_s=gap_ratio * drain_s,
                       n_bursts=N_BURSTS, sync=sync)
    period_s = device.measure(build(train, device.machine)).summary["period_s"]
    predicted_s = predict(train, device.machine, cal).summary["period_s"]
    additive_s = float(completion_coupled_period(train.gap_s, k * size, cal.drain_bytes_per_s))
    return Point(train, drain_s, cal.issue_free_s(size) + train.gap_s, period_s,
                 predicted_s / period_s - 1, additive_s / period_s - 1)


def _row(p: Point) -> tuple[str, ...]:
    return (p.train.sync, str(p.train.n_producers), f"{p.train.burst_bytes // 1024}",
            f"{p.train.gap_s * 1e6:,.0f}", f"{p.chain_s / p.drain_s:.2f}",
            f"{p.period_s * 1e6:,.0f}", f"{p.error_ratio:+.1%}",
            f"{p.additive_error_ratio:+.1%}")
