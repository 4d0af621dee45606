"""The tuner: what it answers is feasible, measured as said, and as good as measuring everything."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from strategies import KIB, machine_of

from xstage_lab.analysis import (
    Answer,
    Calibration,
    Space,
    Trial,
    predict,
    published,
    search,
    tune,
)
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import Infeasible, InvalidValue, XStageError
from xstage_lab.record import Record
from xstage_lab.runlog import RunLog
from xstage_lab.schedule import Program, build
from xstage_lab.spec import (
    BurstTrain,
    FusedGemm,
    MoELayer,
    Tuning,
    UlyssesAttention,
    Workload,
    check_feasible,
)

NODE = dataclasses.replace(
    machine_of(16, flop_per_s=50e12, per_sm_bytes_per_s=9e9, issue_latency_s=0.2e-6),
    smem_per_cta_bytes=128 * KIB)
LAW = published(NODE)
GEMM = FusedGemm(m=1024, n=1280, k=512)
MOE = MoELayer(tokens=64, hidden=512, intermediate=256, experts=16, top_k=4)
ATTENTION = UlyssesAttention(sequence=2048, heads=16, head_dim=64)
SMALL = Space(tile_m=(64, 128, 192), tile_n=(64, 128), issue_depth=(1, 2, 4), n_stages=(2,))


class Counted:
    """The simulated device, with everything it was asked for."""

    name, badge, machine = SimulatedDevice.name, SimulatedDevice.badge, NODE
    capabilities = SimulatedDevice.capabilities

    def __init__(self, **settings: float) -> None:
        self.device = SimulatedDevice(NODE, **settings)
        self.settings = self.device.settings
        self.asked: list[str] = []

    def measure(self, program: Program, seed: int | None = None) -> Record:
        self.asked.append(json.dumps(program.parameters(), sort_keys=True))
        return self.device.measure(program, seed)


def found(workload: Workload = GEMM, space: Space = SMALL, budget: int | None = None,
          **options: Any) -> Answer:
    return tune(workload, NODE, LAW, space, budget, **{"device": Counted()} | options)


def every_time(workload: FusedGemm | MoELayer, space: Space) -> dict[Tuning, float]:
    """Measure the whole space, one configuration after the other."""
    device, times = SimulatedDevice(NODE), {}
    names = ("tile_m", "tile_n", "tile_k", "issue_depth", "n_stages")
    for values in itertools.product(*(getattr(space, name) for name in names)):
        tuning = Tuning(**dict(zip(names, values, strict=True)))
        try:
            program = build(workload, NODE, tuning)
        except Infeasible:
            continue
        times[tuning] = device.measure(program, 0).summary["total_s"]
    return times


@pytest.mark.parametrize("workload", [GEMM, MOE, ATTENTION], ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("budget", [0, 4])
def test_the_best_is_feasible(workload: Workload, budget: int) -> None:
    """Best and runner-up can run, and carry the prediction of their own configuration."""
    answer = found(workload, Space.of(workload, NODE), budget)
    assert answer.runner_up is not None
    for outcome in (answer.best, answer.runner_up):
        check_feasible(outcome.choice.workload, NODE, outcome.choice.tuning)
        assert outcome.prediction.summary["total_s"] == pytest.approx(outcome.predicted_s)
    assert answer.n_measured <= budget
    assert answer.badges[-1] == ("SIMULATED" if budget else "PREDICTED")
    assert len(answer.explain) >= 4


@pytest.mark.parametrize("destinations", ["round-robin", "row-owner-unrotated"])
def test_a_budget_for_everything_is_exhaustive_search(destinations: str) -> None:
    """With a measurement for each candidate the best is that of measuring them all."""
    gemm = dataclasses.replace(GEMM, destinations=destinations)
    times = every_time(gemm, SMALL)
    answer = found(gemm, budget=len(times) + 1)
    assert answer.n_measured == len(times) + 1  # and compute-then-copy's compute
    assert answer.n_candidates == len(times)
    assert answer.best.measured_s <= 1.001 * min(times.values())
    assert times[answer.best.choice.tuning] == answer.best.measured_s
    slower = [time for time in times.values() if time > 1.001 * answer.best.measured_s]
    assert answer.runner_up is not None
    assert answer.runner_up.measured_s == min(slower)
    assert answer.margin_ratio == pytest.approx(min(slower) / answer.best.measured_s - 1)


def test_a_measurement_for_each_leaves_none_out() -> None:
    """As many measurements as candidates go to the candidates, none to compute-then-copy."""
    device = Counted()
    answer = found(budget=found(budget=0).n_candidates, device=device)
    assert answer.n_measured == answer.n_candidates == len(set(device.asked))
    assert all(json.loads(asked)["stores"] == "remote" for asked in device.asked)


def test_measuring_corrects_the_law() -> None:
    """A law that is wrong in the same way all over still leads to the fastest of the space."""
    times = every_time(GEMM, SMALL)
    slow = dataclasses.replace(NODE, bf16_flop_per_s=NODE.bf16_flop_per_s / 3)
    answer = tune(GEMM, slow, LAW, SMALL, 9, device=Counted())
    assert answer.best.measured_s < 1.01 * min(times.values())


def test_a_search_that_is_stopped_answers() -> None:
    """Stop ends with an answer of what there is."""
    device, stop = Counted(), False
    running = search(GEMM, NODE, LAW, SMALL, 8, device=device, stop=lambda: stop)
    trials = [next(running), next(running)]
    stop = True
    with pytest.raises(StopIteration) as end:
        next(running)
    answer = end.value.value
    assert answer.n_measured == len(device.asked) == 2
    assert answer.best.measured_s == min(t.record.summary["total_s"] for t in trials)


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    """A search over the same log measures what the stopped one did not, and ends alike."""
    whole = Counted()
    expected = found(budget=9, device=whole)
    log = RunLog(tmp_path / "runs.sqlite")
    first, second = Counted(), Counted()
    running = search(GEMM, NODE, LAW, SMALL, 9, device=first, log=log)
    for _ in range(4):
        next(running)
    running.close()
    trials: list[Trial] = []
    resumed = search(GEMM, NODE, LAW, SMALL, 9, device=second, log=log)
    while True:
        try:
            trials.append(next(resumed))
        except StopIteration as end:
            answer = end.value
            break
    assert [trial.from_log for trial in trials] == [True] * 4 + [False] * (len(trials) - 4)
    assert first.asked + second.asked == whole.asked
    assert len(log.runs()) == len(whole.asked)
    assert answer.best.choice == expected.best.choice
    log.close()


@pytest.mark.parametrize("other", [
    {"seed": 1}, {"device": Counted(mma_jitter_ratio=0.1)},
    {"calibration": LAW, "machine": dataclasses.replace(
        NODE, link=NODE.link.replace(per_sm_bytes_per_s=8e9))},
], ids=["seed", "settings", "figures"])
def test_only_runs_of_the_same_device_are_taken_from_the_log(
    tmp_path: Path, other: Mapping[str, Any]
) -> None:
    """A run at another seed, with other settings or other figures of the machine is no match."""
    log = RunLog(tmp_path / "runs.sqlite")
    found(budget=4, log=log)
    machine = other.get("machine", NODE)
    device = SimulatedDevice(machine) if machine is not NODE else other.get("device", Counted())
    running = search(GEMM, machine, LAW, SMALL, 4, device=device, seed=other.get("seed", 0),
                     log=log)
    assert not any(trial.from_log for trial in running)
    log.close()


def test_the_order_of_the_space_does_not_matter() -> None:
    """A space written backwards, with values twice, is measured and answered alike."""
    backwards = Space(**{field.name: tuple(reversed(getattr(SMALL, field.name))) * 2
                         for field in dataclasses.fields(SMALL)})
    forth, back = Counted(), Counted()
    ahead = found(device=forth, budget=6)
    behind = found(device=back, budget=6, space=backwards)
    assert forth.asked == back.asked
    assert (ahead.best.choice, ahead.explain) == (behind.best.choice, behind.explain)


@pytest.mark.parametrize("budget", [0, 5])
def test_budgets_of_memory_and_sms_hold(budget: int) -> None:
    """What may use so much shared memory and so many SMs uses no more."""
    answer = found(budget=budget, smem_limit_bytes=48 * KIB, max_sms=10)
    for outcome in (answer.best, answer.runner_up):
        assert outcome is not None
        assert outcome.choice.tuning.smem_bytes(GEMM) <= 48 * KIB
        assert outcome.choice.tuning.n_ctas == 10
    free = found(budget=budget)
    assert free.n_candidates > answer.n_candidates
    assert free.best.time_s < answer.best.time_s


@pytest.mark.parametrize(("space", "options", "said"), [
    (Space(tile_m=(512,), tile_n=(512,)), {}, ("6 by more than 128 KiB of shared memory",
                                               "smaller tiles")),
    (SMALL, {"smem_limit_bytes": 16 * KIB}, ("18 by more than 16 KiB", "needs 32 KiB")),
    (dataclasses.replace(SMALL, n_ctas=(12,)), {"max_sms": 8}, ("18 by more CTAs than the 8 SMs",)),
    (dataclasses.replace(SMALL, n_ctas=(17,)), {}, ("18 by n_ctas = 17", "1 to 16")),
    (dataclasses.replace(SMALL, n_gpus=(16,)), {}, ("18 by n_gpus = 16", "1 to 8")),
    (dataclasses.replace(SMALL, order=("wave",)), {}, ("FusedGemm has no order",)),
])
def test_a_space_without_a_feasible_point_names_the_limit(
    space: Space, options: dict[str, Any], said: tuple[str, ...]
) -> None:
    """Where nothing fits, each limit says how many it excludes, and the way out is told."""
    with pytest.raises(Infeasible) as raised:
        found(space=space, **options)
    for words in said:
        assert words in str(raised.value)


def test_more_gpus_are_compared_at_equal_work() -> None:
    """GPUs that do as much each do more together: times are those of the work asked for."""
    space = dataclasses.replace(SMALL, n_gpus=(2, 4, 8))
    answer = found(dataclasses.replace(GEMM, n_gpus=2, k=8192), space, 6)
    chosen = answer.best.choice
    assert chosen.workload.n_gpus == 8  # compute-bound: nothing is lost
    own = predict(chosen.workload, NODE, LAW, chosen.tuning).summary["total_s"]
    assert answer.best.predicted_s == pytest.approx(own / 4)


def test_orders_of_moe_layers_are_searched() -> None:
    """Both orders are candidates, and a space of one of them keeps to it."""
    both = found(MOE, Space.of(MOE, NODE), 0)
    one = found(MOE, Space.of(MOE, NODE, order=("wave",)), 0)
    assert both.n_candidates == 2 * one.n_candidates
    assert one.best.choice.workload == dataclasses.replace(MOE, order="wave")
    assert both.best.predicted_s <= one.best.predicted_s


def test_store_paths_are_searched() -> None:
    """Each store path is predicted from its own calibration and measured on its own device."""
    fast = dataclasses.replace(LAW, drain_bytes_per_s=2 * LAW.drain_bytes_per_s)
    gemm = dataclasses.replace(GEMM, k=64)
    law = {"registers": LAW, "bulk": fast}
    answer = tune(gemm, NODE, law, SMALL)
    assert answer.best.choice.store_path == "bulk"
    devices = {"registers": Counted(), "bulk": Counted(mma_jitter_ratio=0.1)}
    tune(gemm, NODE, law, SMALL, 4, device=devices)
    assert devices["bulk"].asked
    with pytest.raises(XStageError, match="store paths"):
        tune(gemm, NODE, law, SMALL, 4, device=Counted())


def test_compute_then_copy_is_measured_once() -> None:
    """Whether to fuse is said against the kernel measured with stores to its own memory."""
    drained = dataclasses.replace(GEMM, k=64, destinations="row-owner-unrotated")
    device = Counted()
    answer = found(drained, budget=6, device=device)
    local = [asked for asked in device.asked if json.loads(asked)["stores"] == "local"]
    assert len(local) == 1
    assert answer.n_measured == len(device.asked) <= 6
    assert "SIMULATED" in answer.fuse
    assert (answer.fuse_gain_ratio > 0.02) == answer.fuse.startswith("Fusing pays")
    assert (answer.fuse_gain_ratio < -0.02) == answer.fuse.startswith("Do not fuse")


def test_one_gpu_has_nothing_to_fuse() -> None:
    """On one GPU no measurement goes to compute-then-copy, and the words say why."""
    device = Counted()
    answer = found(dataclasses.replace(GEMM, n_gpus=1), budget=5, device=device)
    assert not any(json.loads(asked)["stores"] == "local" for asked in device.asked)
    assert math.isnan(answer.fuse_gain_ratio)
    assert "nothing to fuse" in answer.fuse


def test_what_a_device_refuses_is_no_candidate() -> None:
    """Tiles that a device does not run cost no measurement, are counted, and never win."""
    class Picky(Counted):
        def measure(self, program: Program, seed: int | None = None) -> Record:
            if program.tuning is not None and program.tuning.tile_m != 192:
                raise InvalidValue("tile_m", program.tuning.tile_m, "192")
            return super().measure(program, seed)

    device = Picky()
    answer = found(device=device, budget=5)
    assert any(json.loads(asked)["stores"] == "local" for asked in device.asked)
    assert answer.best.choice.tuning.tile_m == 192
    assert answer.n_measured == len(device.asked)
    assert answer.runner_up is not None
    assert answer.runner_up.choice.tuning.tile_m == 192
    assert sum(n for reason, n in answer.excluded.items() if "tile_m" in reason) > 0
    assert answer.n_candidates < found(budget=0).n_candidates
    with pytest.raises(Infeasible, match="runs none of the 11 configurations: tile_m = "):
        found(device=device, space=dataclasses.replace(SMALL, tile_m=(64, 128)))


@pytest.mark.parametrize(("options", "said"), [
    ({"budget": -1}, "budget = -1"),
    ({"budget": 2.5}, "budget = 2.5"),
    ({"smem_limit_bytes": 0}, "smem_limit_bytes = 0"),
    ({"max_sms": 0}, "max_sms = 0"),
    ({"workload": BurstTrain(n_producers=1, burst_bytes=1, gap_s=0.0)}, "no tiles to tune"),
])
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    """An argument out of range is named, with its value."""
    with pytest.raises(XStageError, match=said):
        found(**options)


@pytest.mark.parametrize(("values", "said"), [
    ({"tile_m": ()}, "tile_m"), ({"tile_m": 128}, "tile_m"), ({"tile_n": (0,)}, "tile_n = 0"),
    ({"issue_depth": (65,)}, "issue_depth = 65"), ({"n_ctas": (0,)}, "n_ctas = 0"),
    ({"n_gpus": (0,)}, "n_gpus = 0"), ({"order": ("both",)}, "both"),
])
def test_bad_spaces_are_refused(values: dict[str, Any], said: str) -> None:
    """A space of no or impossible values is refused, naming the field."""
    with pytest.raises(XStageError, match=said):
        Space(**values)


def test_a_calibration_alone_says_predicted() -> None:
    """Without a device the answer is the law's, and says so."""
    law: Calibration = dataclasses.replace(LAW, assumed=frozenset({"capacity_bytes"}))
    answer = tune(GEMM, NODE, law, SMALL)
    assert answer.badges == ["PREDICTED", "ASSUMED"]
    assert answer.n_measured == 0
    assert answer.best.record is None
    assert set(answer.provenance) == {"predicted"}
    fastest = min(
        predict(GEMM, NODE, law, Tuning(tile_m=m, tile_n=n, issue_depth=d, n_stages=2))
        .summary["total_s"] for m in SMALL.tile_m for n in SMALL.tile_n
        for d in SMALL.issue_depth if Tuning(tile_m=m, tile_n=n, issue_depth=d, n_stages=2)
        .smem_bytes(GEMM) <= NODE.smem_per_cta_bytes)
    assert fastest <= answer.best.predicted_s <= 1.01 * fastest


def test_equals_do_not_win_by_a_small_tile() -> None:
    """Of what the law takes for equally fast the largest tile at the least depth is named."""
    gemm = dataclasses.replace(GEMM, m=3072, n=3072, k=8192)
    roomy = dataclasses.replace(NODE, smem_per_cta_bytes=math.nan)
    space = Space(tile_m=(64, 128, 192), tile_n=(64, 128), issue_depth=(2, 3))
    best = tune(gemm, roomy, LAW, space).best.choice.tuning
    times = {(m * n, -depth): predict(
        gemm, roomy, LAW, Tuning(tile_m=m, tile_n=n, issue_depth=depth)).summary["total_s"]
        for m, n, depth in itertools.product(space.tile_m, space.tile_n, space.issue_depth)}
    near = [size for size, time in times.items() if time <= 1.01 * min(times.values())]
    assert len(near) > 1
    assert (best.tile_m * best.tile_n, -best.issue_depth) == max(near)
