"""What the SMs do over time in an MoE layer: of a record, and as the law predicts it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from xstage_lab import analysis, catalog
from xstage_lab.analysis import Shares, measured_shares, predicted_shares
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import XStageError
from xstage_lab.record import Record
from xstage_lab.schedule import LINEAR_2, build
from xstage_lab.spec import MoELayer, Tuning

MACHINE = catalog.with_assumptions(catalog.machine("B200-SXM"))
CALIBRATION = analysis.published(MACHINE)
LAYER = MoELayer(tokens=1024, hidden=2048, intermediate=1024, experts=64, top_k=4, wave_experts=8)
RATIOS = ("first_ratio", "second_ratio", "wait_ratio", "issue_ratio")


def run(moe: MoELayer, depth: int = 1) -> Record:
    return SimulatedDevice(MACHINE).measure(build(moe, MACHINE, Tuning(issue_depth=depth)))


def both(moe: MoELayer, depth: int) -> tuple[Record, Shares, Shares]:
    record = run(moe, depth)
    end_s = record.summary["total_s"]
    tuning = Tuning(issue_depth=depth)
    return (record, measured_shares(record, end_s),
            predicted_shares(moe, MACHINE, CALIBRATION, tuning, end_s))


@pytest.mark.parametrize("routing", ["balanced", "zipf:0.8"])
def test_measured_shares_hold_all_the_time_of_the_tiles(routing: str) -> None:
    """Over the run, each share adds up to the time that GPU 0's tiles spent on it."""
    record = run(dataclasses.replace(LAYER, routing=routing))
    end_s, k = record.summary["total_s"], record.parameters["n_ctas"]
    found = measured_shares(record, end_s)
    tiles = record.tiles[record.tiles["gpu"] == 0]
    program = build(dataclasses.replace(LAYER, routing=routing), MACHINE, Tuning(issue_depth=1))
    second = program.tasks[0]["kind"][tiles["row"]] == LINEAR_2
    mma = tiles["mma_end_s"] - tiles["mma_start_s"]
    spent = (mma[~second].sum(), mma[second].sum(), tiles["slot_wait_s"].sum(),
             (tiles["issue_end_s"] - tiles["issue_start_s"]).sum())
    for name, expected in zip(RATIOS, spent, strict=True):
        assert getattr(found, name).mean() * end_s * k == pytest.approx(expected)


@pytest.mark.parametrize("order", ["wave", "interleaved"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_mma_role_does_one_thing_at_a_time(order: str, depth: int) -> None:
    """Measured or predicted, both layers and the wait never take more than all SMs."""
    for found in both(dataclasses.replace(LAYER, order=order), depth)[1:]:
        assert (found.first_ratio + found.second_ratio + found.wait_ratio <= 1 + 1e-9).all()
        assert all((getattr(found, name) >= 0).all() for name in RATIOS)
        assert (found.issue_ratio <= 1 + 1e-9).all()


@pytest.mark.parametrize("order", ["wave", "interleaved"])
@pytest.mark.parametrize("depth", [1, 2])
def test_predicted_shares_are_near_the_simulated_ones(order: str, depth: int) -> None:
    """The law puts as much work of each layer into each quarter of the run as the simulator."""
    _, measured, predicted = both(dataclasses.replace(LAYER, order=order), depth)
    for name in ("first_ratio", "second_ratio"):
        quarters = [getattr(found, name).reshape(4, -1).mean(axis=1)
                    for found in (measured, predicted)]
        np.testing.assert_allclose(*quarters, atol=0.12)


def test_the_predicted_backlog_is_what_the_path_can_hold() -> None:
    """The predicted backlog fills Q in waves, never exceeds it, and is shallower interleaved."""
    held = {order: both(dataclasses.replace(LAYER, order=order), 1)[2].backlog_bytes
            for order in ("wave", "interleaved")}
    capacity = CALIBRATION.capacity_at(MACHINE.n_sms)
    assert held["wave"].max() == pytest.approx(capacity)
    assert held["interleaved"].max() <= capacity
    assert held["interleaved"].mean() < held["wave"].mean()


def test_a_gpu_without_rows_is_idle() -> None:
    """A GPU to whose experts nothing is routed computes and sends nothing."""
    rows = (0,) * 8 + (64 * 8 * 4 // 56,) * 55 + (64 * 8 * 4 - 55 * (64 * 8 * 4 // 56),)
    moe = dataclasses.replace(LAYER, tokens=64, routing=rows)
    found = predicted_shares(moe, MACHINE, CALIBRATION, Tuning(), 1e-4)
    assert all(not getattr(found, name).any() for name in (*RATIOS, "backlog_bytes"))


def test_a_record_without_tiles_is_refused() -> None:
    """What has no per-tile times has no shares."""
    with pytest.raises(XStageError, match="per-tile"):
        measured_shares(dataclasses.replace(run(LAYER), tiles=None), 1e-4)
