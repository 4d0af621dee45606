"""The Burst-Gap law: against numbers worked out by hand, its own limits, and the simulated device,
which knows nothing of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import KIB, MIB, log_floats, machine_of

from xstage_lab import law
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.record import Record
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain, FusedGemm, MachineSpec, Tuning

# The machine of the paper: 148 producers of 32 KiB.
R, Q, T_ISS0, V = 717e9, 4.25 * MIB, 0.76e-6, 148 * 32 * KIB


def rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def test_published_numbers() -> None:
    """V/R, G*, the backlog without gap and the knee are as worked out for the paper's machine."""
    assert rounded(V / 1e6, 3) == 4.85
    assert rounded(V / R * 1e6, 3) == 6.76
    assert rounded(law.recovery_gap(T_ISS0, V, R) * 1e6, 3) == 6.00
    assert rounded(law.peak_backlog(T_ISS0, V, R) / MIB, 4) == 4.105
    knee = Q + R * T_ISS0  # where the backlog of an isolated burst is just Q
    assert law.peak_backlog(T_ISS0, knee, R) == pytest.approx(Q)
    assert rounded(knee / 148 / KIB, 3) == 33.0
    assert rounded(knee / MIB, 3) == 4.77
    assert law.isolated_issue_time(T_ISS0, knee, R, Q) == pytest.approx(T_ISS0)
    assert law.isolated_issue_time(T_ISS0, 1.01 * knee, R, Q) > T_ISS0


def test_relations_of_the_paper() -> None:
    """Period, issue time and recovery gap hang together as the paper states them."""
    gap = np.linspace(0, 20e-6, 101)
    issue = law.issue_time(gap, T_ISS0, V, R)
    np.testing.assert_allclose(issue, np.maximum(T_ISS0, V / R - gap), rtol=1e-9)
    np.testing.assert_allclose(law.period(gap, T_ISS0, V, R), gap + issue, rtol=1e-12)
    blocked = issue > T_ISS0 * (1 + 1e-9)
    assert (blocked == (gap < law.recovery_gap(T_ISS0, V, R))).all()
    assert (law.is_free(gap, T_ISS0, V, R, Q) == ~blocked).all()
    assert not law.is_free(gap, T_ISS0, V, R, 4.1 * MIB).any()  # one burst alone no longer fits


def test_free_issue_and_rate() -> None:
    """T_iss0 grows with the burst from its latency; SMs add up until the path is full."""
    size = np.array([0.0, 32 * KIB])
    np.testing.assert_allclose(law.issue_free_time(size, 43e9, 1e-7), [1e-7, 1e-7 + 32768 / 43e9])
    assert law.issue_rate([1, 10, 148], 43e9, R).tolist() == [43e9, 430e9, R]
    assert law.unfused_time(10e-6, 717e3, R) == pytest.approx(11e-6)


# --- bursts, against the simulated device -------------------------------------------------------


class Case(NamedTuple):
    """A burst train, its measurement, and what the law needs to know of it."""

    train: BurstTrain
    record: Record
    free_s: float
    drain: float
    held: float
    latency: float

    @property
    def bounds(self) -> tuple[float, float]:
        least, lockstep = law.train_bounds(
            self.train.n_bursts, self.train.gap_s, self.free_s, self.train.volume_bytes,
            self.drain, self.held, self.latency)
        return float(least), float(lockstep)


def random_case(seed: int, sync: str) -> Case:
    """Draw N from 1 to 100, V from 0.1 to 5 Q, gaps to 3 V/R, with and without latency."""
    rng = np.random.default_rng(seed)
    k, drain = int(rng.integers(8, 48)), 10 ** rng.uniform(10.5, 12)
    held, latency = 10 ** rng.uniform(5.2, 6.8), rng.choice([0, 10 ** rng.uniform(-7, -5.5)])
    per_sm = drain / k * 10 ** rng.uniform(-0.1, 1.2)
    size = max(int(held / k * 10 ** rng.uniform(-1, math.log10(5))), 16)
    gap = rng.choice([0.0, rng.uniform(0, 3) * k * size / drain])
    machine = machine_of(k, egress_bytes_per_s=drain, per_sm_bytes_per_s=per_sm,
                         path_capacity_bytes=held, issue_latency_s=latency)
    train = BurstTrain(n_producers=k, burst_bytes=size, gap_s=gap, sync=sync,
                       n_bursts=int(np.exp(rng.uniform(0, np.log(100)))))
    record = SimulatedDevice(machine).measure(build(train, machine))
    return Case(train, record, latency + size / per_sm, drain, held, latency)


@pytest.mark.parametrize("seed", range(60))
def test_lockstep_trains(seed: int) -> None:
    """A lockstep train is accepted, and done, when the law says, to within 2 %."""
    case = random_case(seed, "lockstep")
    assert case.record.summary["accepted_s"] == pytest.approx(case.bounds[1], rel=0.02)
    total = law.train_total(case.bounds[1], case.train.n_bursts, case.train.gap_s,
                            case.train.volume_bytes, case.drain, case.latency)
    assert case.record.summary["total_s"] == pytest.approx(float(total), rel=0.02)


@pytest.mark.parametrize("seed", range(60))
def test_free_trains(seed: int) -> None:
    """A free-running train lies within its bracket, and once the path has filled it keeps the
    steady period to within 2 %."""
    case = random_case(seed, "free")
    least, most = case.bounds
    assert least * 0.995 < case.record.summary["accepted_s"] < most * 1.005
    train = case.train
    surplus = train.volume_bytes - case.drain * (case.free_s + train.gap_s)
    filled = case.held / surplus if surplus > 0 else 0.0
    if train.n_bursts >= 40 and filled < train.n_bursts / 2:  # drifted apart, and full
        steady = law.period(train.gap_s, case.free_s, train.volume_bytes, case.drain)
        assert case.record.summary["period_s"] == pytest.approx(float(steady), rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_steady_lockstep_issue_time(seed: int) -> None:
    """In lockstep only what the path holds can drain in a gap, in the steady state as well."""
    rng = np.random.default_rng(seed)
    held, latency = 1.0 * MIB, rng.choice([0.0, 1e-6])
    machine = machine_of(16, issue_latency_s=latency)
    size, gap = int(rng.uniform(0.3, 4) * held / 16), rng.uniform(0, 3) * held / 100e9
    train = BurstTrain(n_producers=16, burst_bytes=size, gap_s=gap, n_bursts=60, sync="lockstep")
    record = SimulatedDevice(machine).measure(build(train, machine))
    issue = law.lockstep_issue_time(gap, latency + size / 20e9, 16 * size, 100e9, held, latency)
    assert record.summary["period_s"] == pytest.approx(gap + float(issue), rel=0.02)


@pytest.mark.parametrize("free_share", [0.05, 0.3, 0.65])
def test_the_additive_form_is_refuted(free_share: float) -> None:
    """Where issue and gap just cover V/R the measured period is V/R, and issue that waited for
    completion would take at least 30 % longer."""
    k, size, drain = 16, 64 * KIB, 100e9
    drain_s = k * size / drain
    machine = machine_of(k, per_sm_bytes_per_s=size / (free_share * drain_s),
                         path_capacity_bytes=math.inf)
    train = BurstTrain(n_producers=k, burst_bytes=size, gap_s=(1 - free_share) * drain_s)
    measured = SimulatedDevice(machine).measure(build(train, machine)).summary["period_s"]
    assert measured == pytest.approx(
        float(law.period(train.gap_s, free_share * drain_s, k * size, drain)), rel=0.002)
    additive = float(law.completion_coupled_period(train.gap_s, k * size, drain))
    assert additive > 1.3 * measured


@pytest.mark.parametrize("latency", [0.0, 2e-6])
def test_isolated_bursts(latency: float) -> None:
    """A single burst is issued freely up to the knee and at the drain rate past it; into an
    unbounded path it leaves the backlog that the law says."""
    machine = machine_of(16, issue_latency_s=latency)
    endless = dataclasses.replace(machine, link=dataclasses.replace(
        machine.link, path_capacity_bytes=math.inf))
    for share in (0.1, 0.5, 1.0, 1.3, 1.5, 2.0, 5.0):
        size = int(share * MIB / 16)
        train = BurstTrain(n_producers=16, burst_bytes=size, gap_s=0.0, n_bursts=1)
        free = latency + size / 20e9
        record = SimulatedDevice(machine).measure(build(train, machine))
        span = law.isolated_issue_time(free, 16 * size, 100e9, MIB, latency)
        assert record.summary["accepted_s"] == pytest.approx(float(span), rel=0.01)
        record = SimulatedDevice(endless).measure(build(train, endless))
        peak = float(law.peak_backlog(free, 16 * size, 100e9, latency))
        assert record.backlog[1].max() == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_when_bursts_are_free(seed: int) -> None:
    """Bursts are blocked just where the path cannot keep up or a burst does not fit."""
    rng = np.random.default_rng(seed)
    machine = machine_of(16)
    size, gap = int(10 ** rng.uniform(3, 5.5)), 10 ** rng.uniform(-7, -4)
    free, volume = size / 20e9, 16 * size
    pace = 100e9 * (free + gap) / volume
    room = MIB / float(law.peak_backlog(free, volume, 100e9))
    if abs(pace - 1) < 0.05 or abs(room - 1) < 0.05:
        pytest.skip("too near to the boundary for chunks to decide")
    train = BurstTrain(n_producers=16, burst_bytes=size, gap_s=gap, n_bursts=100, sync="lockstep")
    tiles = SimulatedDevice(machine).measure(build(train, machine)).tiles
    longest = (tiles["issue_end_s"] - tiles["issue_start_s"]).max()
    assert law.is_free(gap, free, volume, 100e9, MIB) == (longest < 1.001 * free)


@pytest.mark.parametrize("k", [1, 2, 4, 5, 8, 16])
def test_rate_against_the_number_of_sms(k: int) -> None:
    """SMs add up to min(K r_SM, R)."""
    machine = machine_of(16)
    train = BurstTrain(n_producers=k, burst_bytes=256 * KIB, gap_s=0.0, n_bursts=40)
    record = SimulatedDevice(machine).measure(build(train, machine))
    rate = train.volume_bytes / record.summary["period_s"]
    assert rate == pytest.approx(float(law.issue_rate(k, 20e9, 100e9)), rel=0.01)


positive = {"free_s": log_floats(1e-8, 1e-4), "volume": log_floats(1e3, 1e8),
            "drain": log_floats(1e9, 1e12), "held": log_floats(1e3, 1e8)}


@given(n=st.integers(1, 100), gap=st.floats(0, 1e-4), share=st.floats(0, 0.9), **positive)
def test_bounds_of_a_train_are_ordered(
    n: int, gap: float, share: float, free_s: float, volume: float, drain: float, held: float
) -> None:
    """Lockstep is never faster than free-running, one burst has no slack, nothing beats the
    issue or the drain, and all is there a full path later at most."""
    latency = share * free_s
    least, lockstep = law.train_bounds(n, gap, free_s, volume, drain, held, latency)
    assert lockstep >= least
    assert least >= n * free_s + (n - 1) * gap
    total = law.train_total(lockstep, n, gap, volume, drain, latency)
    assert total >= max(lockstep, latency + n * volume / drain) * (1 - 1e-12)
    assert total <= (lockstep + min(held, n * volume) / drain) * (1 + 1e-9)
    alone = law.train_bounds(1, gap, free_s, volume, drain, held, latency)
    isolated = law.isolated_issue_time(free_s, volume, drain, held, latency)
    np.testing.assert_allclose(alone, isolated, rtol=1e-12)


@given(gap=st.floats(0, 1e-4), **positive)
def test_lockstep_holds_the_other_forms(
    gap: float, free_s: float, volume: float, drain: float, held: float
) -> None:
    """In lockstep a gap that the path outlasts gives the paper's form, a longer one the isolated
    burst."""
    issue = law.lockstep_issue_time(gap, free_s, volume, drain, held)
    other = (law.issue_time(gap, free_s, volume, drain) if gap <= held / drain else
             law.isolated_issue_time(free_s, volume, drain, held))
    np.testing.assert_allclose(issue, other, rtol=1e-6, atol=1e-18)


# --- staged tiles -------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> law.TileRun:
    """Runs of tiles in every regime."""
    k, n = draw(st.integers(1, 200)), draw(st.integers(1, 4000))
    size = draw(log_floats(1e3, 1e6))
    storing = draw(st.one_of(st.just(n), st.integers(0, n)))
    drain = draw(log_floats(1e9, 1e12))
    return law.TileRun(
        n_tiles=n, n_storing=storing, n_sms=k, t_mma_s=draw(log_floats(1e-7, 1e-3)),
        tile_bytes=size, remote_bytes=storing * size * draw(st.floats(0, 1)),
        issue_depth=draw(st.integers(1, 5)), per_sm_bytes_per_s=drain * draw(log_floats(0.01, 10)),
        issue_latency_s=draw(st.sampled_from([0.0, 1e-7, 1e-5])), drain_bytes_per_s=drain,
        capacity_bytes=draw(log_floats(1e3, 1e8)))


SINGLE_TILE = law.TileRun(1, 1, 2, 1e-3, 1e4, 1e4, 1, 1e10, 0.0, 1e10, 1e4)


@pytest.mark.parametrize("field", [
    "drain_bytes_per_s", "capacity_bytes", "issue_depth", "per_sm_bytes_per_s"])
@given(run=runs(), factor=st.integers(2, 10))
@example(run=SINGLE_TILE, factor=2)
def test_more_is_never_slower(field: str, run: law.TileRun, factor: int) -> None:
    """More R, Q, depth or issue rate never make a run slower."""
    better = run._replace(**{field: getattr(run, field) * factor})
    before, after = law.staged_tiles(run), law.staged_tiles(better)
    for name in ("accepted_s", "total_s"):
        assert getattr(after, name) <= getattr(before, name) * (1 + 1e-12)


@given(run=runs())
def test_bounds_and_shares_make_sense(run: law.TileRun) -> None:
    """Acceptance is the largest bound and after every MMA; all arrives at the drain rate at best;
    a stall is a share of the time."""
    staged = law.staged_tiles(run)
    waves = math.ceil(run.n_tiles / run.n_sms)
    assert staged.accepted_s == staged.bounds_s.max()
    assert staged.accepted_s >= waves * run.t_mma_s
    assert staged.total_s >= staged.accepted_s
    if run.remote_bytes > 0:  # nothing drains before the first tile is computed
        first = run.t_mma_s + run.issue_latency_s
        assert staged.total_s >= (first + run.remote_bytes / run.drain_bytes_per_s) * (1 - 1e-12)
    assert 0 <= staged.stall_ratio < 1
    free = law.issue_free_time(run.tile_bytes, run.per_sm_bytes_per_s, run.issue_latency_s)
    assert staged.issue_s >= free * (1 - 1e-12)
    which, margin = law.regime(run, staged.bounds_s)
    assert 0 <= which < len(law.REGIMES)
    assert margin >= 0 or math.isnan(margin)


@given(run=runs())
@example(run=SINGLE_TILE)
def test_limits_of_rate_and_capacity(run: law.TileRun) -> None:
    """An infinitely fast link leaves compute and issue alone, and so does a path that holds all."""
    waves = math.ceil(run.n_tiles / run.n_sms)
    mma = run.t_mma_s
    issue = float(law.issue_free_time(run.tile_bytes, run.per_sm_bytes_per_s,
                                      run.issue_latency_s))
    chain = waves * (mma + issue) if run.issue_depth == 1 else (
        max(waves * mma + issue, mma + waves * issue))
    fast = law.staged_tiles(run._replace(drain_bytes_per_s=math.inf))
    roomy = law.staged_tiles(run._replace(capacity_bytes=math.inf))
    assert fast.accepted_s == pytest.approx(chain, rel=1e-9)
    assert fast.total_s == fast.accepted_s
    assert roomy.accepted_s == pytest.approx(chain, rel=1e-9)
    alone = law.staged_tiles(run._replace(remote_bytes=0.0))
    assert alone.total_s == pytest.approx(chain, rel=1e-9)


@given(run=runs())
def test_without_capacity_acceptance_is_arrival(run: law.TileRun) -> None:
    """A path that holds nothing accepts no faster than it drains."""
    staged = law.staged_tiles(run._replace(capacity_bytes=0.0))
    assert staged.accepted_s >= run.remote_bytes / run.drain_bytes_per_s
    if run.n_storing == run.n_tiles and run.remote_bytes > 0:
        assert staged.total_s == staged.accepted_s


@pytest.mark.parametrize(("t_mma_s", "size", "depth", "regime"), [
    (10e-6, 1e4, 2, "compute-bound"),
    (10e-6, 1e4, 1, "compute-bound"),
    (0.1e-6, 1e4, 2, "issue-bound"),
    (0.1e-6, 1e4, 1, "issue-bound"),
])
def test_regimes_of_a_fast_link(t_mma_s: float, size: float, depth: int, regime: str) -> None:
    """Without a link to wait for, the longer of compute and issue names the regime."""
    run = law.TileRun(1000, 1000, 10, t_mma_s, size, 1e7, depth, 20e9, 0.0, 1e15, 1e6)
    which, margin = law.regime(run, law.staged_tiles(run).bounds_s)
    assert law.REGIMES[int(which)] == regime
    assert margin > 0.5


def test_regimes_of_a_slow_link() -> None:
    """A link below the pace of the tiles bounds the run; one that only the last wave overfills is
    capacity-bound."""
    slow = law.TileRun(1000, 1000, 10, 1e-6, 1e4, 1e7, 2, 20e9, 0.0, 10e9, 1e4)
    which, margin = law.regime(slow, law.staged_tiles(slow).bounds_s)
    assert law.REGIMES[int(which)] == "drain-bound"
    assert margin == pytest.approx(1e7 / 10e9 / 100e-6 - 1, rel=0.02)
    ending = law.TileRun(100, 100, 10, 10e-6, 1e6, 1e8, 2, 1e12, 0.0, 1.2e12, 1e6)
    staged = law.staged_tiles(ending)
    assert law.REGIMES[int(law.regime(ending, staged.bounds_s)[0])] == "capacity-bound"
    assert staged.accepted_s == pytest.approx(100e-6 + 9e6 / 1.2e12)


SMALL, LARGE = 0.1 * MIB, 8.0 * MIB  # a wave stores 0.9 MiB
GEMM_CASES = [(destinations, k, m, depth, capacity)
              for destinations in ("round-robin", "row-owner")
              for k in (128, 1024, 2048, 6000)
              for m in (1024, 8192)
              for depth in (1, 2, 3)
              for capacity in (SMALL, 1.0 * MIB, LARGE)]


def node(**link: float) -> MachineSpec:
    """Return a machine on which T_mma reaches V/R at k = 1750 or so."""
    return machine_of(32, flop_per_s=100e12, per_sm_bytes_per_s=9e9, issue_latency_s=0.2e-6,
                      **link)


def tile_run(gemm: FusedGemm, tuning: Tuning, machine: MachineSpec) -> law.TileRun:
    """Describe a fused GEMM by what is known of the simulated machine."""
    n = math.ceil(gemm.m / tuning.tile_m) * math.ceil(gemm.n / tuning.tile_n)
    remote = 1 - 1 / gemm.n_gpus
    link = machine.link
    return law.TileRun(
        n_tiles=n, n_storing=n if gemm.destinations == "round-robin" else round(n * remote),
        n_sms=machine.n_sms,
        t_mma_s=2 * tuning.tile_m * tuning.tile_n * gemm.k * machine.n_sms
        / machine.bf16_flop_per_s,
        tile_bytes=2 * tuning.tile_m * tuning.tile_n, remote_bytes=gemm.store_bytes * remote,
        issue_depth=tuning.issue_depth, per_sm_bytes_per_s=link.per_sm_bytes_per_s,
        issue_latency_s=link.issue_latency_s, drain_bytes_per_s=link.egress_bytes_per_s,
        capacity_bytes=link.path_capacity_bytes)


def agree(gemm: FusedGemm, depth: int, capacity: float, tolerance: float = 0.08) -> None:
    """Assert that law and simulated device agree on when all is accepted and when all is there."""
    machine, tuning = node(path_capacity_bytes=capacity), Tuning(issue_depth=depth)
    measured = SimulatedDevice(machine).measure(build(gemm, machine, tuning)).summary
    staged = law.staged_tiles(tile_run(gemm, tuning, machine))
    assert staged.accepted_s == pytest.approx(measured["accepted_s"], rel=tolerance)
    assert staged.total_s == pytest.approx(measured["total_s"], rel=tolerance)


@pytest.mark.parametrize(("destinations", "k", "m", "depth", "capacity"),
                         GEMM_CASES)
def test_fused_gemms(destinations: str, k: int, m: int, depth: int, capacity: float) -> None:
    """A fused GEMM without jitter is accepted and done when the law says, to within 8 %, also
    where its SMs, still in step, find a path far smaller than a wave."""
    agree(FusedGemm(m=m, n=2048, k=k, destinations=destinations), depth, capacity)


@pytest.mark.parametrize("depth", [2, 4, 16])
def test_deep_staging_before_a_local_end(depth: int) -> None:
    """Tiles staged while the path is full need no computing once it has room: after the last
    remote tile a deep pipeline has only to issue what it holds."""
    agree(FusedGemm(m=8192, n=2048, k=800, n_gpus=2, destinations="row-owner"), depth, 1.0 * MIB)


@pytest.mark.parametrize("depth", [1, 2])
def test_less_than_a_wave(depth: int) -> None:
    """Fewer tiles than SMs take one MMA and one issue."""
    agree(FusedGemm(m=256, n=1024, k=6000), depth, 1.0 * MIB, tolerance=0.02)


def test_arrays_are_their_elements() -> None:
    """A whole grid at once gives what every configuration gives alone."""
    fields = law.TileRun(*np.meshgrid([10, 500], [5, 10], [16], [1e-6, 9e-6], [3e4], [1e5, 9e6],
                                      [1, 2], [2e10], [1e-7], [1e11], [1e5, 1e7], indexing="ij"))
    grid = law.staged_tiles(fields)
    flat = [np.ravel(f) for f in fields]
    for i in range(flat[0].size):
        alone = law.staged_tiles(law.TileRun(*(f[i] for f in flat)))
        for one, many in zip(alone[:5], grid[:5], strict=True):
            assert one == np.ravel(many)[i]


# --- incast -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compute", "drain", "held"), [
    (1.0, 0.5, 0.2), (1.0, 0.01, 10.0), (1.0, 2.0, 0.9), (1.0, 5.0, 0.0), (1.0, 2.0, 0.2)])
def test_two_gpus_see_no_incast(compute: float, drain: float, held: float) -> None:
    """Between two GPUs only one at a time stores to an owner, so that nothing is shared: one
    drains its second phase, the other its first."""
    accepted, drained = law.incast(2, compute, drain, held)
    blocked = drain * (1 - held)  # until all but Q of the remote phase is drained
    assert accepted[0] == pytest.approx(max(2 * compute, compute + blocked))
    assert accepted[1] == pytest.approx(max(compute, blocked) + compute)
    assert drained == pytest.approx(max(2 * compute, compute + drain, drain), rel=1e-6)


@pytest.mark.parametrize("n_gpus", [2, 4, 8])
def test_incast_limits(n_gpus: int) -> None:
    """A link far faster than the compute hides the incast; one far slower is at the mercy of the
    owners' ingress, which P - 1 senders share in the first phase."""
    accepted, drained = law.incast(n_gpus, 1.0, 1e-3, 0.1)
    np.testing.assert_allclose(accepted, n_gpus, rtol=1e-3)
    np.testing.assert_allclose(drained, n_gpus, rtol=2e-3)
    _, drained = law.incast(n_gpus, 1e-3, 1.0, 1e-3)
    assert n_gpus - 1 <= drained <= n_gpus * (n_gpus - 1) * 1.01
