"""A comparison that can fail: the law passes on the simulated device, a wrong one does not."""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np
import pytest

from xstage_lab import catalog, law
from xstage_lab.analysis import Comparison, calibrate, compare, judge, predict
from xstage_lab.devices.base import Device
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.devices.sockets import SocketsDevice, this_computer
from xstage_lab.errors import XStageError
from xstage_lab.lab import BurstGap
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain

NODE = catalog.with_assumptions(catalog.machine("A100-SXM"))


def sweep(device: Device, burst_bytes: int) -> list[Comparison]:
    """Trains on both sides of the recovery gap, each predicted and measured."""
    machine = device.machine
    calibration = calibrate(device)
    k = machine.n_sms
    drain_s = k * burst_bytes / calibration.drain_bytes_per_s
    found = []
    for gap in np.linspace(0, 2.5, 11) * drain_s:
        train = BurstTrain(n_producers=k, burst_bytes=burst_bytes, gap_s=float(gap), n_bursts=60)
        record = device.measure(build(train, machine))
        found.append(compare(predict(train, machine, calibration), record))
    return found


@pytest.fixture(scope="module")
def gap_sweep() -> list[Comparison]:
    return sweep(SimulatedDevice(NODE), 32 * 1024)


@pytest.fixture(scope="module")
def live_sweep() -> list[Comparison]:
    if os.name != "posix":
        pytest.skip("needs Unix stream sockets")
    device = SocketsDevice(this_computer(2))
    try:
        return sweep(device, 128 * 1024)
    finally:
        device.close()


def completion_coupled(comparison: Comparison, drain_s: float) -> Comparison:
    """The same comparison had the additive form predicted the period."""
    gap = comparison.measured["period_s"] - comparison.measured["issue_s"]
    period = float(law.completion_coupled_period(gap, drain_s, 1.0))
    error = comparison.error_ratio | {"period_s": period / comparison.measured["period_s"] - 1}
    return dataclasses.replace(comparison, error_ratio=error)


def test_the_law_explains_the_simulated_device(gap_sweep: list[Comparison]) -> None:
    """The law passes on trains of both regimes and names their regimes right."""
    verdict = judge(gap_sweep, "period_s")
    assert verdict.explained
    assert verdict.median_ratio < 0.02
    assert abs(verdict.bias_ratio) < 0.02
    assert verdict.regimes_right_ratio > 0.8
    assert "explains" in verdict.words


@pytest.mark.parametrize("device", ["gap_sweep", "live_sweep"])
def test_a_planted_wrong_law_is_rejected(device: str, request: pytest.FixtureRequest) -> None:
    """The completion-coupled form, which measurements refute, is refuted on every device that has
    times of its own."""
    found = request.getfixturevalue(device)
    drain_s = min(c.measured["period_s"] for c in found)
    wrong = judge([completion_coupled(c, drain_s) for c in found], "period_s")
    assert not wrong.explained
    assert wrong.bias_ratio > 0.2
    assert wrong.median_ratio > judge(found, "period_s").median_ratio
    assert "does not explain" in wrong.words


def test_measurements_lie_in_the_band_or_are_counted_out(gap_sweep: list[Comparison]) -> None:
    """Coverage is the share of measurements between low and high."""
    def between(low: float, high: float) -> list[Comparison]:
        return [dataclasses.replace(c, low=dict.fromkeys(c.low, low),
                                    high=dict.fromkeys(c.high, high)) for c in gap_sweep]

    assert judge(between(0.0, 1e9)).coverage_ratio == 1.0
    assert judge(between(1e8, 1e9)).coverage_ratio == 0.0


def test_too_few_runs_judge_nothing(gap_sweep: list[Comparison]) -> None:
    """A handful of runs, or runs without the key, give no verdict but a reason."""
    with pytest.raises(XStageError, match="at least 5"):
        judge(gap_sweep[:4])
    blank = [dataclasses.replace(c, error_ratio=dict.fromkeys(c.error_ratio, math.nan))
             for c in gap_sweep]
    with pytest.raises(XStageError, match="only 0 runs"):
        judge(blank)


def test_a_panel_judges_its_runs() -> None:
    """After a sweep the panel says whether the law explains its runs, and before it does not."""
    panel = BurstGap(machine="A100-SXM", n_producers=16, n_bursts=20)
    try:
        assert "law explains" not in panel.words.value
        panel.sweep()
        assert "The law explains these" in panel.words.value
    finally:
        panel.close()
