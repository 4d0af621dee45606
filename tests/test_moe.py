"""MoE layers: the law against the simulated device, the verdict on orders, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import MIB, machine_of
from xstage_lab import analysis, catalog, law
from xstage_lab.__main__ import main
from xstage_lab.analysis.moe import moe_tiles
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.devices.weight_cache import missed_bytes
from xstage_lab.errors import InvalidValue, XStageError
from xstage_lab.record import SUMMARY_KEYS, Record
from xstage_lab.schedule import build
from xstage_lab.spec import MachineSpec, MoELayer, Tuning

SMALL = MoELayer(tokens=700, hidden=512, intermediate=384, experts=16, top_k=4, n_gpus=4)
TILE = Tuning(tile_m=64, tile_n=64)


def machine(**fields: Any) -> MachineSpec:
    """A small machine whose memory matters."""
    return dataclasses.replace(machine_of(), **({"hbm_bytes_per_s": 2e12,
                                                 "l2_bytes": float(MIB)} | fields))


@st.composite
def layers(draw: st.DrawFn) -> MoELayer:
    """Layers of any shape, routing and order, ragged edges and idle experts included."""
    n_gpus = draw(st.sampled_from((1, 2, 4)))
    experts = n_gpus * draw(st.integers(1, 4))
    return MoELayer(
        tokens=draw(st.integers(1, 400)), hidden=draw(st.integers(40, 400)),
        intermediate=draw(st.integers(20, 300)), experts=experts,
        top_k=draw(st.integers(1, min(experts, 3))), n_gpus=n_gpus,
        routing=draw(st.sampled_from(("balanced", "zipf:0.6", "zipf:1.5"))),
        order=draw(st.sampled_from(("wave", "interleaved"))),
        dtype=draw(st.sampled_from(("fp8", "bf16"))))


tilings = st.builds(Tuning, tile_m=st.sampled_from((16, 64, 96)),
                    tile_n=st.sampled_from((32, 64, 100)), issue_depth=st.integers(1, 3))


@settings(deadline=None)
@given(moe=layers(), tuning=tilings, l2_bytes=st.sampled_from((1e5, 3e5, 1e6, 1e12)))
def test_reuse_distances_miss_what_the_cache_misses(
    moe: MoELayer, tuning: Tuning, l2_bytes: float
) -> None:
    """The closed form fetches as many bytes of weights as a least-recently-used cache."""
    node = machine(l2_bytes=l2_bytes)
    for gpu, tasks in enumerate(build(moe, node, tuning).tasks):
        if tasks.size:
            expected = missed_bytes(tasks["panel"], tasks["panel_bytes"], 1, l2_bytes).sum()
            assert moe_tiles(moe, node, tuning, gpu).missed_bytes == pytest.approx(expected)


@settings(deadline=None)
@given(moe=layers(), tuning=tilings, per_sm=st.sampled_from((1e8, 2e9, 1e12)))
def test_the_critical_path_is_the_run_with_local_stores(
    moe: MoELayer, tuning: Tuning, per_sm: float
) -> None:
    """Where no store waits for room the simulated device follows the critical path exactly."""
    node = machine(l2_bytes=2e5, link=machine_of(per_sm_bytes_per_s=per_sm,
                                                 issue_latency_s=1e-7).link)
    record = SimulatedDevice(node).measure(build(moe, node, tuning, stores="local"))
    ends, waits = [], 0.0
    for gpu in np.flatnonzero(moe.gpu_rows):
        kind = moe_tiles(moe, node, tuning, int(gpu))
        path = law.critical_path(kind.pieces, kind.n_sms, kind.t_mma_s,
                                 1e-7 + kind.tile_bytes / per_sm, tuning.issue_depth)
        ends.append(path.end_s)
        waits += path.slot_wait_s * kind.n_sms
    assert record.tiles is not None
    assert max(ends) == pytest.approx(record.summary["accepted_s"], rel=1e-9)
    assert waits == pytest.approx(float(record.tiles["slot_wait_s"].sum()), rel=1e-6, abs=1e-12)


def rounds(**fields: Any) -> law.Rounds:
    """Ten rounds of 1 us each that issue for 0.1 us, with `fields` of the store path."""
    given = {"compute_s": np.full(10, 1e-6), "issue_s": np.full(10, 1e-7),
             "store_bytes": np.zeros(10), "spread_s": np.zeros(10), "tail_s": 0.0,
             "issue_depth": 2, "drain_bytes_per_s": 1e11, "capacity_bytes": 1e5}
    return law.staged_rounds(law.RoundRun(**(given | fields)))


def test_rounds_keep_their_limits() -> None:
    """Idle paths add nothing, saturated ones set the time, and depth 1 adds each issue."""
    assert rounds().accepted_s == pytest.approx(10.1e-6)
    assert rounds(issue_depth=1).accepted_s == pytest.approx(11e-6)
    assert rounds(tail_s=2e-6).accepted_s == pytest.approx(12.1e-6)
    full = rounds(store_bytes=np.full(10, 4e5))  # 4 us a round
    assert full.total_s == pytest.approx(1e-6 + 40e-6)
    assert full.total_s - full.accepted_s == pytest.approx(1e-6)  # Q / R
    assert full.room_wait_s > 0 == rounds().room_wait_s


@given(volume=st.lists(st.floats(0, 1e6), min_size=10, max_size=10),
       held=st.floats(0, 1e6), depth=st.integers(1, 4), factor=st.floats(1, 10))
def test_a_better_path_never_delays_rounds(
    volume: list[float], held: float, depth: int, factor: float
) -> None:
    """More capacity, a faster drain or deeper staging never make the last acceptance later."""
    given = {"store_bytes": np.array(volume), "capacity_bytes": held, "issue_depth": depth}
    least = rounds(**given).accepted_s * (1 + 1e-12)
    assert rounds(**given | {"capacity_bytes": held * factor}).accepted_s <= least
    assert rounds(**given, drain_bytes_per_s=1e11 * factor).accepted_s <= least
    assert rounds(**given | {"issue_depth": depth + 1}).accepted_s <= least


def test_padding_and_batches_change_nothing() -> None:
    """Programs of different lengths side by side come out as they do alone."""
    volume = np.linspace(0, 5e5, 10)
    alone = [rounds(store_bytes=volume, issue_depth=depth) for depth in (1, 3)]
    padded = np.zeros((2, 14))
    padded[:, :10] = volume
    work, issue = (np.where(np.arange(14) < 10, value, 0.0) for value in (1e-6, 1e-7))
    both = rounds(compute_s=work, issue_s=issue, store_bytes=padded, spread_s=np.zeros(14),
                  issue_depth=[1, 3])
    for key in ("accepted_s", "total_s", "slot_wait_s"):
        assert getattr(both, key) == pytest.approx([float(getattr(each, key)) for each in alone])


@pytest.fixture(scope="module")
def calibrated() -> tuple[SimulatedDevice, analysis.Calibration]:
    device = SimulatedDevice(machine(hbm_bytes_per_s=1e13))
    return device, analysis.calibrate(device)


@pytest.mark.parametrize("order", ["wave", "interleaved"])
@pytest.mark.parametrize("routing", ["balanced", "zipf:0.8"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("flop_per_s", [2e14, 1e15, 8e15])
def test_the_law_predicts_moe_layers(
    calibrated: tuple[SimulatedDevice, analysis.Calibration], order: str, routing: str,
    depth: int, flop_per_s: float,
) -> None:
    """From bursts alone, times of MoE layers are within 5 % of the simulated ones."""
    node = dataclasses.replace(calibrated[0].machine, fp8_flop_per_s=flop_per_s)
    moe = dataclasses.replace(SMALL, order=order, routing=routing)
    tuning = dataclasses.replace(TILE, issue_depth=depth)
    record = SimulatedDevice(node).measure(build(moe, node, tuning))
    found = analysis.compare(analysis.predict(moe, node, calibrated[1], tuning), record)
    assert set(found.error_ratio) == set(SUMMARY_KEYS)
    for key in ("accepted_s", "total_s"):
        assert abs(found.error_ratio[key]) < 0.05
        assert found.low[key] <= found.predicted[key] * (1 + 1e-9)
        assert found.high[key] >= found.predicted[key] * (1 - 1e-9)
    assert abs(found.error_ratio["stall_ratio"]) < 0.05
    assert found.regime_measured.endswith("-bound")


def test_regimes_of_moe_layers(
    calibrated: tuple[SimulatedDevice, analysis.Calibration]
) -> None:
    """What is slow names the regime, and the explanation says so with numbers."""
    device, cal = calibrated
    for flop_per_s, per_sm, regime in ((1e14, 2e10, "compute-bound"), (1e17, 5e9, "issue-bound"),
                                       (1e17, 1e11, "drain-bound")):
        node = dataclasses.replace(device.machine, fp8_flop_per_s=flop_per_s)
        issuing = dataclasses.replace(cal, per_sm_bytes_per_s=per_sm, intervals={})
        prediction = analysis.predict(SMALL, node, issuing, TILE)
        assert prediction.regime == regime
        words = analysis.explain(prediction)
        assert words[0].startswith(regime.capitalize())
        assert " us" in words[0]
        assert any("nterleaved" in sentence for sentence in words)


def test_a_measured_compute_time_scales_both_layers(
    calibrated: tuple[SimulatedDevice, analysis.Calibration]
) -> None:
    """A run with stores off on the modelled machine changes nothing; twice as slow, twice T."""
    device, cal = calibrated
    timed = analysis.measure_t_mma(device, SMALL, TILE)
    plain, same, slow = (analysis.predict(SMALL, device.machine, cal, TILE, t_mma)
                         for t_mma in (None, timed, 2 * timed))
    assert (plain.t_mma_source, same.t_mma_source) == ("roofline", "measured")
    assert same.summary == pytest.approx(plain.summary, rel=1e-6, nan_ok=True)
    for name in ("t_mma_1_s", "t_mma_2_s"):
        assert slow.terms[name] == pytest.approx(2 * plain.terms[name])


def test_a_grid_is_its_single_predictions(
    calibrated: tuple[SimulatedDevice, analysis.Calibration]
) -> None:
    """A grid over tiles, depths and orders holds what each prediction says; NaN where too big."""
    device, cal = calibrated
    node = dataclasses.replace(device.machine, smem_per_cta_bytes=30e3)
    found = analysis.predict_moe_map(SMALL, node, cal, [[64], [128]], 64, [1, 4],
                                     "interleaved")
    assert found.feasible.tolist() == [[True, False], [False, False]]
    one = analysis.predict(dataclasses.replace(SMALL, order="interleaved"), node, cal,
                           dataclasses.replace(TILE, issue_depth=1))
    assert found.total_s[0, 0] == pytest.approx(one.summary["total_s"])
    assert np.isnan(found.total_s[~found.feasible]).all()


@pytest.mark.parametrize(("model", "name", "tokens", "decision"), [
    ("DSv4-Pro", "H100-SXM", 2048, "wave"),       # both layers' weights outgrow its L2
    ("GLM-5.2", "B200-SXM", 4096, "interleaved"),
])
def test_the_verdict_is_what_the_simulated_device_does(
    model: str, name: str, tokens: int, decision: str
) -> None:
    """The verdict picks the order that is faster in simulation, and says why in numbers."""
    node = catalog.with_assumptions(catalog.machine(name))
    moe, tuning = catalog.moe_layer(model, tokens), Tuning(issue_depth=1)
    told = analysis.verdict(moe, node, analysis.published(node), tuning)
    device = SimulatedDevice(node)
    wave, interleaved = (device.measure(build(dataclasses.replace(moe, order=order), node,
                                              tuning)).summary["total_s"]
                         for order in ("wave", "interleaved"))
    assert told.decision == decision
    assert (wave / interleaved > 1) == (decision == "interleaved")
    assert told.gain_ratio == pytest.approx(wave / interleaved - 1, abs=0.05)
    t = told.terms
    parts = (t["locality_s"] + t["schedule_s"] + t["stall_interleaved_s"] - t["stall_wave_s"])
    assert parts == pytest.approx(t["interleaved_s"] - t["wave_s"])
    assert (t["locality_s"] > 0.1 * t["wave_s"]) == (decision == "wave")
    assert any("MiB" in sentence for sentence in told.sentences)


LAYERS = law.TwoLayers(*law.floats(
    64, 8, 16, 12, 4, 4, 16, 4e-6, 2e-6, 2e-7, 2e-7, 2, 1e-6, 1e-6, 4e6, 2e6, 1e7, 2e12))


@given(span_s=st.floats(0, 2e-5), l2_bytes=st.floats(1e6, 1e7), held_s=st.floats(0, 1e-4))
def test_the_rule_of_interleaving_in_its_limits(
    span_s: float, l2_bytes: float, held_s: float
) -> None:
    """Free stores leave nothing to gain, what the path holds no stall, and room in L2 no loss."""
    def rule(**fields: float) -> law.Orders:
        return law.compare_orders(LAYERS._replace(
            **{name: np.float64(value) for name, value in fields.items()}))

    free = rule(span_s=0.0, l2_bytes=l2_bytes)
    assert free.stall_wave_s == free.stall_interleaved_s == 0
    assert free.gain_ratio <= 1e-12
    assert rule(span_s=span_s).locality_s == pytest.approx(0.0, abs=1e-12)  # all weights fit
    here = rule(span_s=span_s, l2_bytes=l2_bytes, held_s=held_s)
    assert here.locality_s >= -1e-12
    assert rule(span_s=span_s, l2_bytes=l2_bytes, held_s=2 * held_s).stall_wave_s <= (
        here.stall_wave_s + 1e-12)
    assert rule(span_s=span_s, l2_bytes=2 * l2_bytes).interleaved_s <= (
        rule(span_s=span_s, l2_bytes=l2_bytes).interleaved_s + 1e-12)


def test_an_explicit_routing_survives_a_record(
    calibrated: tuple[SimulatedDevice, analysis.Calibration], tmp_path: Path
) -> None:
    """A saved record of counted rows is compared like the one that was measured."""
    device, cal = calibrated
    moe = dataclasses.replace(SMALL, tokens=4, n_gpus=1, experts=4, routing=(4, 4, 4, 4))
    record = device.measure(build(moe, device.machine, TILE))
    stored = Record.load(record.save(tmp_path / "moe.npz"))
    found = analysis.compare(analysis.predict(moe, device.machine, cal, TILE), stored)
    assert found.measured["total_s"] == record.summary["total_s"]


@pytest.mark.parametrize(("fields", "named"), [
    ({"experts": 10}, "n_gpus"), ({"top_k": 17}, "top_k"), ({"routing": ()}, "routing"),
    ({"routing": ""}, "routing"), ({"routing": (1,) * 16}, "routing"),
    ({"routing": (2801, *(0,) * 15)}, "routing[0]"), ({"routing": "zipf:-1"}, "routing"),
    ({"min_lead_rows": 2801}, "min_lead_rows"), ({"min_lead_rows": 0}, "min_lead_rows"),
    ({"wave_experts": 5}, "wave_experts"), ({"order": "random"}, "order"),
    ({"tokens": 0}, "tokens"), ({"intermediate": math.nan}, "intermediate"),
])
def test_impossible_layers_are_refused(fields: dict[str, Any], named: str) -> None:
    """Bad input names the field and what is allowed."""
    with pytest.raises(XStageError, match=r"allowed|Known") as refusal:
        dataclasses.replace(SMALL, **fields)
    assert named in str(refusal.value)


def test_a_lead_of_every_row_is_the_wave_of_all_experts() -> None:
    """The longest lead that is allowed puts all of Linear-1 first."""
    rows = int(SMALL.gpu_rows.max())
    whole = dataclasses.replace(SMALL, order="interleaved", min_lead_rows=rows)
    waves = dataclasses.replace(SMALL, order="wave", wave_experts=4)
    node = machine()
    for one, other in zip(build(whole, node, TILE).tasks, build(waves, node, TILE).tasks,
                          strict=True):
        assert np.array_equal(one, other)
    with pytest.raises(InvalidValue):
        dataclasses.replace(SMALL, min_lead_rows=rows + 1)


@pytest.mark.parametrize("options", [
    ("--gpus", "5"), ("--model", "GLM"), ("--routing", "1,2,3"), ("--routing", "zipf:much"),
    ("--tokens", "0"), ("--tokens", "many"), ("--order", "any"), ("--mode", "fused"),
    ("--depth", "0"), ("--model", "DiT-MoE-XL", "--tokens", "1", "--routing", "9,1,1,1,1,1,1,1"),
    ("--device", "sockets", "--routing", "zipf:1"),
])
def test_the_command_line_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """Impossible layers end with status 2 and say what is possible."""
    assert main(["measure", "--workload", "moe", *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1


def test_the_command_line_takes_moe_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """Predict, measure and compare take a model, its tokens, a routing and an order."""
    layer = ("--workload", "moe", "--model", "DiT-MoE-XL", "--tokens", "256", "--order",
             "interleaved", "--routing", ",".join(["512"] * 8), "--json")
    for verb in ("predict", "measure", "compare"):
        assert main([verb, *layer]) == 0
        assert '"total_s"' in capsys.readouterr().out
