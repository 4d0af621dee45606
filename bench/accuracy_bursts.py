"""How true the law is for burst trains, from a calibration of the same simulated machine."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.accuracy_calibration import Truth, draw_machine, truth
from bench.figures import Figure, print_table
from xstage_lab.analysis import Calibration, calibrate, predict
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain

N_MACHINES, N_EACH = 20, 15  # 300 trains, each in lockstep and free
ASKED_RATIO = 0.02
STEADY_BURSTS = 40


class Errors(NamedTuple):
    """How far the law is from one train, in lockstep and free."""

    lockstep: float  # |error| of the last acceptance
    outside: float   # how far the free train's is outside its bracket
    period: float    # |error| of the free train's period; NaN where it is not steady


def measure() -> list[Figure]:
    """Run every train in lockstep and free, and set the last acceptance beside the law."""
    rng = np.random.default_rng(300)
    found: dict[str, list[Errors]] = {"egress": [], "ingress or credits": []}
    regimes: Counter[str] = Counter()
    for _ in range(N_MACHINES):
        device = SimulatedDevice(draw_machine(rng))
        true, calibration = truth(device.machine), calibrate(device)
        limit = "egress" if true.limit == "egress" else "ingress or credits"
        for _ in range(N_EACH):
            train = _draw_train(rng, device.machine.n_sms, true)
            regimes[predict(train, device.machine, calibration).regime] += 1
            found[limit].append(_errors(train, device, calibration, true))
    print(f"  {regimes.total()} trains: " + ", ".join(f"{n} {r}" for r, n in regimes.items()))
    rows, figures = [], []
    for limit, errors in found.items():
        for name, each in _by_name(errors).items():
            what = f"{name}, {limit} limits"
            rows.append((what, str(each.size), f"{np.median(each):.2%}",
                         f"{np.quantile(each, 0.95):.2%}", f"{each.max():.2%}"))
            figures.append(_figure(what, each))
    print_table(("|error|", "trains", "median", "p95", "worst"), rows)
    return figures


def _draw_train(rng: np.random.Generator, n_producers: int, true: Truth) -> BurstTrain:
    """Draw V from 0.1 to 5 Q, N from 1 to 100 and a gap up to 3 V/R."""
    volume = true.capacity_bytes * math.exp(rng.uniform(math.log(0.1), math.log(5)))
    return BurstTrain(
        n_producers=n_producers,
        burst_bytes=round(volume / n_producers),
        gap_s=rng.uniform(0, 3) * volume / true.drain_bytes_per_s,
        n_bursts=int(rng.integers(1, 101)),
        sync="lockstep")


def _errors(train: BurstTrain, device: SimulatedDevice, calibration: Calibration,
            true: Truth) -> Errors:
    free = dataclasses.replace(train, sync="free")
    in_step, on_its_own = (device.measure(build(t, device.machine)).summary for t in (train, free))
    lockstep, bracket = (predict(t, device.machine, calibration) for t in (train, free))
    accepted = on_its_own["accepted_s"]
    outside = max(bracket.low["accepted_s"] / accepted - 1,
                  1 - bracket.high["accepted_s"] / accepted, 0.0)
    return Errors(abs(lockstep.summary["accepted_s"] / in_step["accepted_s"] - 1), outside,
                  abs(bracket.summary["period_s"] / on_its_own["period_s"] - 1)
                  if _is_steady(train, true, calibration) else math.nan)


def _is_steady(train: BurstTrain, true: Truth, calibration: Calibration) -> bool:
    """Whether the path is full by the second half of the train, where periods are taken."""
    chain = calibration.issue_free_s(train.burst_bytes) + train.gap_s
    left = max(train.volume_bytes - true.drain_bytes_per_s * chain, 0.0)  # by every burst
    filled = train.n_bursts / 2 * left >= true.capacity_bytes
    return train.n_bursts >= STEADY_BURSTS and (left == 0.0 or filled)


def _by_name(errors: list[Errors]) -> dict[str, NDArray[np.float64]]:
    lockstep, outside, period = np.array(errors).T
    return {"lockstep, last acceptance": lockstep, "free, outside the bracket": outside,
            "free, steady period": period[~np.isnan(period)]}


def _figure(what: str, errors: NDArray[np.float64]) -> Figure:
    within = (errors <= ASKED_RATIO).sum()
    return Figure(what=f"trains {what}", value=100 * errors.max(), asked=100 * ASKED_RATIO,
                  unit="%", note=f"worst; {within} of {errors.size} within")
