"""Ulysses attention: the law of tiles that queue, its three modes, and the step around them."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import JUNK, MIB, log_floats, machine_of

from xstage_lab import catalog, law, trace
from xstage_lab.__main__ import main
from xstage_lab.analysis import (
    Calibration,
    calibrate,
    compare,
    explain,
    measure_t_mma,
    predict,
    published,
)
from xstage_lab.analysis.ulysses_step import (
    StepCosts,
    UlyssesStep,
    losing_per_peer_s,
    ulysses_step,
)
from xstage_lab.devices.base import is_balanced
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import Infeasible, InvalidValue, UnknownName, XStageError
from xstage_lab.law import queues
from xstage_lab.schedule import COPY, NOTHING, build
from xstage_lab.spec import MachineSpec, Tuning, UlyssesAttention, check_feasible, default_tuning

MACHINE = machine_of(n_sms=24)
TUNING = Tuning(tile_m=64, tile_n=64, n_stages=1)
MODES = ("fused", "dedicated", "serial")
NO_LIMIT = {"capacity_bytes": math.inf, "drain_bytes_per_s": 1e18, "per_sm_bytes_per_s": 1e18}


@st.composite
def attentions(draw: st.DrawFn, max_gpus: int = 8) -> UlyssesAttention:
    """Attention of any mode, whose rows may not divide evenly."""
    n_gpus = draw(st.integers(1, max_gpus))
    return UlyssesAttention(
        sequence=draw(st.integers(n_gpus, 1500)), heads=n_gpus * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from((64, 128))), n_gpus=n_gpus, causal=draw(st.booleans()),
        mode=draw(st.sampled_from(MODES)), n_comm_sms=draw(st.integers(1, 12)))


@st.composite
def calibrations(draw: st.DrawFn) -> Calibration:
    """Calibrations that may be limited by anything."""
    drain = draw(log_floats(1e9, 1e12))
    return published(MACHINE).override(
        drain_bytes_per_s=drain, per_sm_bytes_per_s=drain * draw(log_floats(0.02, 2.0)),
        capacity_bytes=draw(log_floats(1e4, 1e7)),
        issue_latency_s=draw(st.sampled_from((0.0, 2e-7))))


def total(attention: UlyssesAttention, calibration: Calibration, tuning: Tuning = TUNING) -> float:
    return predict(attention, MACHINE, calibration, tuning).summary["total_s"]


# The queues of the law.

jobs = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), min_size=1, max_size=30)


@given(jobs=jobs)
def test_a_server_takes_jobs_one_at_a_time(jobs: list[tuple[float, float]]) -> None:
    """Each job starts when it is ready and the one before has ended, and lasts as long as it is."""
    end, expected = 0.0, []
    for ready, service in jobs:
        end = max(end, ready) + service
        expected.append(end)
    ready_s, service_s = np.array(jobs).T
    assert queues.served(ready_s, service_s) == pytest.approx(expected)


@given(volume=log_floats(1e5, 1e8), held=log_floats(1e4, 1e7), rate=log_floats(1e9, 1e12))
def test_one_wave_is_an_isolated_burst(volume: float, held: float, rate: float) -> None:
    """Equal tiles that end together are accepted and drained as a burst of the Burst-Gap law."""
    k, compute, r_sm = 16, 1e-5, 20e9
    shape = (1, 1, k)
    tiles = queues.TileList(np.full(shape, compute), np.full(shape, volume / k),
                            np.full(shape, 1), np.full(shape, -1), np.full(shape, -1))
    times = queues.tile_times(tiles, queues.StorePath(2, r_sm, 0.0, rate, held, rate))
    free = volume / k / r_sm
    alone = float(law.isolated_issue_time(free, volume, rate, held))
    assert times.accepted_s.max() == pytest.approx(compute + alone)
    assert times.arrived_s.max() == pytest.approx(compute + max(volume / rate, free))


@given(depth=st.integers(1, 4), work=log_floats(1e-7, 1e-4), size=log_floats(1e3, 1e6))
def test_an_unlimited_path_leaves_the_pipeline_of_an_sm(depth: int, work: float,
                                                        size: float) -> None:
    """Without a limit behind it, an SM takes max(T_mma, T_iss0) a tile, their sum at depth 1."""
    n, issue = 40, 1e-7 + size / 20e9
    shape = (1, n, 4)
    tiles = queues.TileList(np.full(shape, work), np.full(shape, size), np.full(shape, 1),
                            np.full(shape, -1), np.full(shape, -1))
    times = queues.tile_times(tiles, queues.StorePath(depth, 20e9, 1e-7, 1e18, math.inf, 1e18))
    step = work + issue if depth == 1 else max(work, issue)
    last = work + issue - step if depth > 1 else 0.0
    assert times.accepted_s.max() == pytest.approx(n * step + last)


# What the law says of attention.

@settings(max_examples=30)
@given(attention=attentions(), depth=st.integers(1, 3))
def test_fused_is_never_slower_than_serial_where_it_need_not_wait(
    attention: UlyssesAttention, depth: int
) -> None:
    """Where stores are accepted at once, storing while computing is no slower than afterwards."""
    free = published(MACHINE).override(**NO_LIMIT)
    tuning = dataclasses.replace(TUNING, issue_depth=depth)
    fused, serial = (total(dataclasses.replace(attention, mode=mode), free, tuning)
                     for mode in ("fused", "serial"))
    assert fused <= serial * (1 + 1e-9)


@settings(max_examples=40)
@given(attention=attentions(), calibration=calibrations())
def test_times_keep_their_order(attention: UlyssesAttention, calibration: Calibration) -> None:
    """Nothing is there before it is accepted, and no bound exceeds the time it bounds."""
    found = predict(attention, MACHINE, calibration, TUNING)
    accepted = found.summary["accepted_s"]
    assert found.summary["total_s"] >= accepted
    for name in ("compute", "issue", "drain"):
        assert found.terms[f"{name}_bound_s"] <= accepted * (1 + 1e-9)
    drained = found.terms["remote_bytes"] / found.terms["drain_bytes_per_s"]
    assert drained <= found.summary["total_s"]
    assert found.low["total_s"] <= found.high["total_s"] * (1 + 1e-9)


@settings(max_examples=40)
@given(attention=attentions(), calibration=calibrations(), faster=st.floats(1.0, 4.0))
def test_a_faster_link_is_never_slower(attention: UlyssesAttention, calibration: Calibration,
                                       faster: float) -> None:
    """More drain rate never lengthens the time, in any mode."""
    fast = calibration.override(drain_bytes_per_s=faster * calibration.drain_bytes_per_s)
    assert total(attention, fast) <= total(attention, calibration) * (1 + 1e-9)


@settings(max_examples=30)
@given(attention=attentions(), calibration=calibrations())
def test_one_gpu_hides_nothing_and_sends_nothing(attention: UlyssesAttention,
                                                 calibration: Calibration) -> None:
    """On one GPU all modes take the time of the attention, and no share of nothing is named."""
    alone = dataclasses.replace(attention, n_gpus=1, mode="fused")
    found = [predict(dataclasses.replace(alone, mode=mode), MACHINE, calibration, TUNING)
             for mode in ("fused", "serial")]
    for each in found:
        assert each.summary["total_s"] == pytest.approx(each.terms["compute_only_s"])
        assert math.isnan(each.terms["hidden_ratio"])
        assert each.terms["remote_bytes"] == 0
        assert each.fuse_gain_ratio == pytest.approx(0)


def test_a_link_without_limit_hides_everything() -> None:
    """With unlimited link and SMs the fused kernel takes the time of the attention alone."""
    attention = UlyssesAttention(sequence=4096, heads=8, n_gpus=4)
    cal = published(MACHINE).override(capacity_bytes=math.inf, drain_bytes_per_s=1e18)
    found = predict(attention, MACHINE, cal, TUNING)
    assert found.terms["hidden_ratio"] == pytest.approx(1)
    assert found.regime == "compute-bound"


def test_hidden_share_is_not_clamped() -> None:
    """SMs set aside to send make it slower than serial, and the share says so below zero."""
    attention = UlyssesAttention(sequence=4096, heads=8, n_gpus=4, mode="dedicated", n_comm_sms=12)
    found = predict(attention, MACHINE, published(MACHINE), TUNING)
    assert found.terms["hidden_ratio"] < 0
    serial = predict(dataclasses.replace(attention, mode="serial"), MACHINE, published(MACHINE),
                     TUNING)
    assert serial.summary["total_s"] < found.summary["total_s"]
    assert serial.terms["hidden_ratio"] == pytest.approx(0)


def test_a_slow_link_bounds_a_short_sequence() -> None:
    """Too few keys per stored byte make the link the bound; sending SMs may be one earlier."""
    short = UlyssesAttention(sequence=2048, heads=64, n_gpus=8)
    slow = published(MACHINE).override(drain_bytes_per_s=2e9)
    assert predict(short, MACHINE, slow, TUNING).regime == "drain-bound"
    few = dataclasses.replace(short, mode="dedicated", n_comm_sms=1)
    slow_sm = published(MACHINE).override(per_sm_bytes_per_s=2e9)
    assert predict(few, MACHINE, slow_sm, TUNING).regime == "issue-bound"


@pytest.mark.parametrize(("mode", "n_comm_sms", "link", "regime"), [
    ("fused", 4, {}, "compute-bound"),
    ("dedicated", 8, {}, "compute-bound"),
    ("serial", 4, {}, "compute-bound"),
    ("fused", 4, {"egress_bytes_per_s": 2e9}, "drain-bound"),
    ("dedicated", 4, {"egress_bytes_per_s": 2e9}, "drain-bound"),
    ("serial", 4, {"egress_bytes_per_s": 2e9}, "drain-bound"),
    ("dedicated", 1, {"per_sm_bytes_per_s": 1e9}, "issue-bound"),
])
def test_law_and_record_name_the_same_regime(mode: str, n_comm_sms: int, link: dict[str, float],
                                             regime: str) -> None:
    """What bounds a run is what its record's own shares say, also where other tasks send."""
    machine = machine_of(n_sms=24, **link)
    attention = UlyssesAttention(sequence=4096, heads=64, n_gpus=8, mode=mode,
                                 n_comm_sms=n_comm_sms)
    record = SimulatedDevice(machine).measure(build(attention, machine, TUNING))
    found = compare(predict(attention, machine, published(machine), TUNING), record)
    assert (found.regime, found.regime_measured) == (regime, regime)


@given(n_sms=st.integers(1, 40), heads=st.integers(1, 6), rows=st.integers(1, 40))
def test_partial_waves_count_whole(n_sms: int, heads: int, rows: int) -> None:
    """Equal query tiles on K SMs take as long as ceil(tiles / K) of them."""
    machine = dataclasses.replace(machine_of(n_sms=n_sms), bf16_flop_per_s=1e12)
    attention = UlyssesAttention(sequence=64 * rows, heads=heads, n_gpus=1)
    found = predict(attention, machine, published(machine).override(**NO_LIMIT), TUNING)
    waves = math.ceil(heads * rows / n_sms)
    assert found.summary["accepted_s"] == pytest.approx(waves * found.terms["t_mma_s"], rel=1e-6)
    assert found.terms["n_waves"] == waves
    assert found.terms["idle_ratio"] == pytest.approx(1 - heads * rows / (waves * n_sms))


@settings(max_examples=15)
@given(attention=attentions(4), depth=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_law_is_the_simulation_where_nothing_is_random(attention: UlyssesAttention, depth: int,
                                                           seed: int) -> None:
    """From published figures of the machine the law foretells the simulated times, also where
    nothing but the link matters; the bench says how well."""
    machine = machine_of(n_sms=24, ingress_bytes_per_s=100e9, path_capacity_bytes=0.5 * MIB)
    tuning = dataclasses.replace(TUNING, issue_depth=depth)
    record = SimulatedDevice(machine).measure(build(attention, machine, tuning), seed)
    found = compare(predict(attention, machine, published(machine), tuning), record)
    for key in ("accepted_s", "total_s"):
        assert abs(found.error_ratio[key]) < 0.15


def test_a_measured_compute_time_replaces_the_roofline() -> None:
    """Stores off, the device's makespan gives back the time of a tile that sees all keys."""
    attention = UlyssesAttention(sequence=3000, heads=8, n_gpus=4, causal=True)
    t_mma = measure_t_mma(SimulatedDevice(MACHINE), attention, TUNING)
    roofline = predict(attention, MACHINE, published(MACHINE), TUNING)
    assert t_mma == pytest.approx(roofline.terms["t_mma_s"], rel=1e-6)
    twice = predict(attention, MACHINE, published(MACHINE), TUNING, 2 * t_mma)
    assert (twice.t_mma_source, roofline.t_mma_source) == ("measured", "roofline")
    assert twice.terms["compute_bound_s"] > 1.8 * roofline.terms["compute_bound_s"]


@pytest.mark.parametrize("mode", MODES)
def test_words_name_what_is_hidden(mode: str) -> None:
    """Two or three sentences hold the loop over keys, the idle SMs, and what is exposed."""
    attention = UlyssesAttention(sequence=4608, heads=24, n_gpus=8, mode=mode)
    words = explain(predict(attention, MACHINE, published(MACHINE), TUNING))
    assert 2 <= len(words) <= 3
    assert "64 queries loop over 4608 keys" in words[0]
    assert "idle" in words[0]
    told = " ".join(words[1:])
    assert ("exposed" if mode == "serial" else "hidden") in told
    assert ("only send" in told) == (mode == "dedicated")


# The step around it.

def step(n_gpus: int, costs: StepCosts | None = None, mode: str = "fused") -> UlyssesStep:
    attention = UlyssesAttention(sequence=4608, heads=24, n_gpus=n_gpus, mode=mode)
    return ulysses_step(attention, predict(attention, MACHINE, published(MACHINE), TUNING), costs)


@pytest.mark.parametrize("n_gpus", [1, 2, 8])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_adds_up(n_gpus: int, mode: str) -> None:
    """Inputs, attention, output and fixed costs are the step; one GPU exchanges nothing."""
    found = step(n_gpus, mode=mode)
    assert found.total_s == pytest.approx(sum(found[:4]))
    assert (found.input_s == 0) == (n_gpus == 1)
    if n_gpus == 1:
        assert found.fixed_s == StepCosts().launch_s
        assert found.total_s == found.unfused_s


def test_inputs_are_three_times_the_output() -> None:
    """Queries, keys and values are three times the output's bytes, where rows divide evenly."""
    attention = UlyssesAttention(sequence=4608, heads=24, n_gpus=8)
    found = predict(attention, MACHINE, published(MACHINE), TUNING)
    assert ulysses_step(attention, found).input_s == pytest.approx(3 * found.unfused["copy_s"])


def test_costs_that_grow_with_peers_turn_the_curve() -> None:
    """A cost common to all all-to-alls never makes more GPUs lose, one per peer does, from the
    value on that is named."""
    def totals(**costs: float) -> list[float]:
        return [step(n, StepCosts(**costs)).total_s for n in (4, 8)]

    plain, dear = totals(sync_s=0.0), totals(sync_s=1e-3)
    assert plain[1] - plain[0] == pytest.approx(dear[1] - dear[0])
    limit = losing_per_peer_s(step(4), step(8), 4)
    assert limit > 0
    below, above = totals(per_peer_s=0.99 * limit), totals(per_peer_s=1.01 * limit)
    assert below[1] < below[0]
    assert above[1] > above[0]


def test_what_the_model_says_of_the_published_report() -> None:
    """FLUX.1 on B200, nothing fitted: fewer of its stores hide on 8 GPUs than on 4, the step is
    faster all the same, and the cost per peer that would turn it is below that of NCCL."""
    machine = catalog.with_assumptions(catalog.machine("B200-SXM"))
    found = {}
    for n_gpus in (2, 4, 8):
        attention = catalog.attention("FLUX.1-1024", n_gpus=n_gpus)
        prediction = predict(attention, machine, published(machine))
        found[n_gpus] = prediction, ulysses_step(attention, prediction)
    hidden = {n_gpus: each.terms["hidden_ratio"] for n_gpus, (each, _) in found.items()}
    assert hidden[8] < 0.5 < min(hidden[2], hidden[4])
    assert found[8][0].fuse_gain_ratio < found[4][0].fuse_gain_ratio
    assert found[8][1].total_s < found[4][1].total_s
    measured = {int(row["gpus"]): float(row["nccl_s"]) for row in catalog.table("all_to_all")
                if int(row["message_bytes"]) == 64 * 1024}
    nccl_per_peer_s = (measured[8] - measured[4]) / 4
    assert losing_per_peer_s(found[4][1], found[8][1], 4) < nccl_per_peer_s


@pytest.mark.parametrize("field", ["sync_s", "per_peer_s", "launch_s"])
@pytest.mark.parametrize("value", [v for v in JUNK if v != 10**30], ids=repr)
def test_bad_costs_are_refused(field: str, value: object) -> None:
    """A fixed cost is a time from 0 to a second."""
    with pytest.raises(InvalidValue, match=rf"{field} .* s is not possible"):
        StepCosts(**{field: value})  # type: ignore[arg-type]


# The device.

@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sequence", [2048, 2049])
def test_mirroring_one_gpu_changes_nothing(mode: str, causal: bool, sequence: int) -> None:
    """Simulating one GPU for all, where that is done, gives the times of all of them."""
    attention = UlyssesAttention(sequence=sequence, heads=8, n_gpus=4, mode=mode, causal=causal,
                                 n_comm_sms=4)
    machine = machine_of(n_sms=24, ingress_bytes_per_s=100e9)
    program = build(attention, machine, TUNING)
    assert is_balanced(program) == (not causal and sequence == 2048)
    alone, together = (SimulatedDevice(machine, mirror=mirror).measure(program).summary
                       for mirror in (True, False))
    for key in ("accepted_s", "total_s", "issue_s"):
        assert alone[key] == pytest.approx(together[key], rel=0.02)


def test_tasks_that_only_send_are_no_tiles() -> None:
    """Mean compute time, period and stalls of a record are those of tiles, not of copies."""
    base = UlyssesAttention(sequence=4096, heads=32, n_gpus=2)
    records = {mode: SimulatedDevice(MACHINE).measure(
        build(dataclasses.replace(base, mode=mode), MACHINE, TUNING)) for mode in MODES}
    t_mma = predict(base, MACHINE, published(MACHINE), TUNING).terms["t_mma_s"]
    for record in records.values():
        assert record.summary["t_mma_s"] == pytest.approx(t_mma)
        assert record.summary["period_s"] == pytest.approx(t_mma, rel=0.05)
    program = build(dataclasses.replace(base, mode="dedicated"), MACHINE, TUNING)
    kinds = program.tasks[0]["kind"][records["dedicated"].tiles["row"]]
    assert np.isin(kinds, (COPY, NOTHING)).any()
    idle = records["dedicated"].tiles[kinds == NOTHING]
    assert (idle["mma_end_s"] == idle["mma_start_s"]).all()
    assert (idle["slot_wait_s"] == 0).all()


def test_a_trace_shows_what_sending_sms_do() -> None:
    """An SM that only sends has its stores in the trace, and neither MMA nor empty spans."""
    attention = UlyssesAttention(sequence=1024, heads=8, n_gpus=2, mode="dedicated", n_comm_sms=4)
    record = SimulatedDevice(MACHINE).measure(build(attention, MACHINE, TUNING))
    spans = [event for event in trace.events(record) if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in trace.events(record)
             if event["name"] == "thread_name"}
    sending = [event for event in spans if int(names[event["tid"]].split()[1]) >= 20]
    assert {event["cat"] for event in sending} <= {"issue", "stall"}
    assert sum(event["args"]["store_bytes"] for event in sending if event["cat"] == "issue") == (
        build(attention, MACHINE, TUNING).remote_bytes(0))
    assert min(event["dur"] for event in spans) > 0


# What cannot be.

@pytest.mark.parametrize(("fields", "said"), [
    ({"heads": 30, "n_gpus": 4}, ("n_gpus = 4", "heads = 30", "1, 2, 3, 5, 6, 10, 15, 30")),
    ({"heads": 8, "n_gpus": 8, "sequence": 7}, ("sequence = 7 tokens", "from 8", "a token")),
    ({"sequence": 0}, ("sequence = 0",)),
    ({"head_dim": 4}, ("head_dim = 4", "from 8")),
    ({"n_comm_sms": 0}, ("n_comm_sms = 0 SMs", "from 1")),
    ({"causal": 1}, ("causal = 1", "True or False")),
])
def test_impossible_attention_is_refused(fields: dict[str, int], said: tuple[str, ...]) -> None:
    """What cannot be is refused with field, value, range and the way out."""
    with pytest.raises(InvalidValue) as raised:
        UlyssesAttention(**({"sequence": 1024, "heads": 8, "n_gpus": 8} | fields))
    assert all(words in str(raised.value) for words in said)


def test_a_misspelt_mode_names_the_nearest() -> None:
    """An unknown mode is answered with the one that was meant."""
    with pytest.raises(UnknownName, match="did you mean dedicated"):
        UlyssesAttention(sequence=1024, heads=8, mode="dedicate")


@pytest.mark.parametrize("n_comm_sms", [24, 30])
def test_some_sms_must_compute(n_comm_sms: int) -> None:
    """As many sending SMs as there are SMs, or more, are refused by law and program alike."""
    attention = UlyssesAttention(sequence=1024, heads=8, mode="dedicated", n_comm_sms=n_comm_sms)
    for refuse in (lambda: predict(attention, MACHINE, published(MACHINE), TUNING),
                   lambda: build(attention, MACHINE, TUNING)):
        with pytest.raises(InvalidValue, match=f"n_comm_sms = {n_comm_sms} SMs .* 1 to 23"):
            refuse()


def test_the_default_tuning_fits_every_machine() -> None:
    """Where no tuning is given every published model runs on every machine with known memory."""
    for machine in catalog.machines().values():
        for attention in catalog.attention_models().values():
            check_feasible(attention, machine)
            tuning = default_tuning(attention, machine)
            assert not tuning.smem_bytes(attention) > machine.smem_per_cta_bytes


def test_a_tile_that_does_not_fit_is_refused() -> None:
    """Three stages of 128 keys and values do not fit beside the queries, and it is said."""
    machine = catalog.machine("B200-SXM")
    with pytest.raises(Infeasible, match=r"256 KiB of shared memory.*allows 227"):
        check_feasible(catalog.attention("Wan2-14B-480p", n_gpus=8), machine, Tuning())


@pytest.mark.parametrize("n_gpus", [4, 8])
def test_heads_of_a_published_model_that_do_not_divide(n_gpus: int) -> None:
    """A model of 30 heads is refused on 4 and 8 GPUs, and runs on 2."""
    with pytest.raises(XStageError, match="divisors of heads = 30"):
        catalog.attention("Z-Image", n_gpus=n_gpus)
    assert catalog.attention("Z-Image", n_gpus=2).heads == 30


def test_a_calibrated_device_is_foretold() -> None:
    """From its own bursts alone a device with jitter is predicted within a few percent."""
    machine: MachineSpec = machine_of(n_sms=24, ingress_bytes_per_s=100e9)
    device = SimulatedDevice(machine, mma_jitter_ratio=0.02, issue_jitter_ratio=0.02)
    attention = UlyssesAttention(sequence=4000, heads=8, n_gpus=4, causal=True)
    t_mma = measure_t_mma(device, attention, TUNING, seed=1)
    found = predict(attention, machine, calibrate(device), TUNING, t_mma)
    record = device.measure(build(attention, machine, TUNING), 2)
    assert abs(compare(found, record).error_ratio["total_s"]) < 0.05


# The command line.

FLUX = ("--workload", "ulysses", "--model", "FLUX.1-1024")


@pytest.mark.parametrize("mode", MODES)
def test_compare_on_the_command_line(capsys: pytest.CaptureFixture[str], mode: str) -> None:
    """Prediction, measurement, their error and what is hidden are printed for every mode."""
    assert main(["compare", *FLUX, "--gpus", "4", "--tokens", "2000", "--mode", mode, "--causal",
                 "--depth", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found["error_ratio"]["total_s"]) < 0.05
    assert found["t_mma_source"] == "measured"
    assert found["provenance"]["measured"]["badge"] == "SIMULATED"
    assert "hidden_ratio" in found["terms"]


def test_predict_takes_model_and_tile(capsys: pytest.CaptureFixture[str]) -> None:
    """The shape is that of the model unless tokens say otherwise, the tile what was asked for."""
    assert main(["predict", *FLUX, "--tile", "64x128x64"]) == 0
    told = capsys.readouterr().out
    assert "sequence = 4608, heads = 24" in told
    assert "tile_m = 64, tile_n = 128" in told
    assert "64 queries loop over 4608 keys" in told


@pytest.mark.parametrize(("arguments", "said"), [
    (("--model", "Z-Image"), ("n_gpus = 8", "divisors of heads = 30")),
    (("--model", "FLUX"), ("FLUX.1-1024",)),
    (("--gpus", "5"), ("n_gpus = 5", "24")),
    (("--tokens", "7"), ("sequence = 7 tokens", "from 8")),
    (("--tokens", "some"), ("sequence = 'some'",)),
    (("--mode", "dedicated", "--comm-sms", "148"), ("n_comm_sms = 148 SMs", "1 to 147")),
    (("--mode", "fast"), ("fast", "fused")),
    (("--tile", "256x256x64"), ("256x256x64", "KiB", "227")),
    (("--m", "512"), ("--m is an option of --workload fused-gemm", "ulysses")),
    (("--machine", "RTX-PRO-5000"), ("bf16_flop_per_s", "RTX-PRO-5000")),
], ids=lambda value: " ".join(value))
def test_impossible_options_end_with_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    """Whatever cannot be ends with status 2 and one line that says why."""
    assert main(["predict", *FLUX, *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert all(words in told.err for words in said)
