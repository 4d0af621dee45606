"""How true the law is for burst trains, from a calibration of the same simulated machine."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np

from bench.accuracy_calibration import Truth, draw_machine, truth
from bench.figures import Figure, print_table
from xstage_lab.analysis import Calibration, calibrate, predict
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain

N_MACHINES, N_EACH = 20, 15  # 300 trains, each in lockstep and free
ASKED_RATIO = 0.02
STEADY_BURSTS = 40


def measure() -> list[Figure]:
    """Run every train in lockstep and free, and set the last acceptance beside the law."""
    rng = np.random.default_rng(300)
    lockstep, outside, steady = [], [], []
    regimes: Counter[str] = Counter()
    for _ in range(N_MACHINES):
        device = SimulatedDevice(draw_machine(rng))
        true, calibration = truth(device.machine), calibrate(device)
        for _ in range(N_EACH):
            train = _draw_train(rng, device.machine.n_sms, true)
            regimes[predict(train, device.machine, calibration).regime] += 1
            lockstep.append(_lockstep_error(train, device, calibration))
            free = dataclasses.replace(train, sync="free")
            excess, period = _free_errors(free, device, calibration)
            outside.append(excess)
            if train.n_bursts >= STEADY_BURSTS:
                steady.append(period)
    print(f"  {regimes.total()} trains: " + ", ".join(f"{n} {r}" for r, n in regimes.items()))
    print_table(("|error|", "trains", "median", "p95", "worst"), [
        _row("lockstep, last acceptance", lockstep),
        _row("free, outside its bracket", outside),
        _row(f"free, period from {STEADY_BURSTS} bursts on", steady)])
    within = sum(error == 0 for error in outside)
    return [
        _figure("lockstep trains, last acceptance", lockstep),
        _figure("free trains, outside the bracket", outside, f"{within} strictly inside; "),
        _figure(f"free trains of {STEADY_BURSTS} bursts and more, period", steady),
    ]


def _draw_train(rng: np.random.Generator, n_producers: int, true: Truth) -> BurstTrain:
    """Draw V from 0.1 to 5 Q, N from 1 to 100 and a gap up to 3 V/R."""
    volume = true.capacity_bytes * math.exp(rng.uniform(math.log(0.1), math.log(5)))
    return BurstTrain(
        n_producers=n_producers,
        burst_bytes=round(volume / n_producers),
        gap_s=rng.uniform(0, 3) * volume / true.drain_bytes_per_s,
        n_bursts=int(rng.integers(1, 101)),
        sync="lockstep")


def _lockstep_error(train: BurstTrain, device: SimulatedDevice,
                    calibration: Calibration) -> float:
    measured = device.measure(build(train, device.machine)).summary
    predicted = predict(train, device.machine, calibration).summary
    return abs(predicted["accepted_s"] / measured["accepted_s"] - 1)


def _free_errors(train: BurstTrain, device: SimulatedDevice,
                 calibration: Calibration) -> tuple[float, float]:
    """How far the last acceptance is outside its bracket, and the error of the period."""
    measured = device.measure(build(train, device.machine)).summary
    predicted = predict(train, device.machine, calibration)
    accepted = measured["accepted_s"]
    excess = max(predicted.low["accepted_s"] / accepted - 1,
                 1 - predicted.high["accepted_s"] / accepted, 0.0)
    return excess, abs(predicted.summary["period_s"] / measured["period_s"] - 1)


def _row(what: str, errors: list[float]) -> tuple[str, ...]:
    return (what, str(len(errors)), f"{np.median(errors):.2%}",
            f"{np.quantile(errors, 0.95):.2%}", f"{max(errors):.2%}")


def _figure(what: str, errors: list[float], note: str = "") -> Figure:
    within = sum(error <= ASKED_RATIO for error in errors)
    return Figure(what=f"{what}, worst of {len(errors)}", value=100 * max(errors),
                  asked=100 * ASKED_RATIO, unit="%", note=f"{note}{within} within")
