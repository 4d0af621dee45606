"""The simulated device: a store path and a tile pipeline that obey the laws of queues.

Where a byte is 1 B/s or so, stores of up to 16 bytes are cut into chunks of one byte, so that
every event can be worked out, or handed to another simulator.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import KIB, MIB, burst_trains, gemms, machine_of, machines, tunings

from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import InvalidValue, UnknownFact, XStageError
from xstage_lab.record import TILE, Record, Tiles
from xstage_lab.schedule import Program, build
from xstage_lab.spec import BurstTrain, FusedGemm, LinkSpec, MachineSpec, Tuning

TIMES = [name for name in TILE.names if name.endswith("_s")]


def simulate(workload: BurstTrain | FusedGemm, machine: MachineSpec,
             tuning: Tuning | None = None, stores: str = "remote", **options: object) -> Record:
    """Build and simulate in one."""
    return SimulatedDevice(machine, **options).measure(build(workload, machine, tuning, stores))


def tiles_of(record: Record) -> Tiles:
    """Return the tiles of GPU 0 in issue order."""
    return record.tiles[record.tiles["gpu"] == 0]


# --- worked out by hand -------------------------------------------------------------------------

# One SM computes two tiles of 4 bytes in 4 s each and issues 1 B/s after 1 s of start-up; the path
# holds 2 bytes and drains one in 3 s. All tiles go to GPU 1.
BY_HAND = machine_of(n_sms=1, max_gpus=2, flop_per_s=1.0, egress_bytes_per_s=1 / 3,
                     ingress_bytes_per_s=math.inf, per_sm_bytes_per_s=1.0, issue_latency_s=1.0,
                     path_capacity_bytes=2.0)
TWO_TILES = FusedGemm(m=1, n=4, k=1, n_gpus=2, destinations="hot:0.0")


def by_hand(depth: int, machine: MachineSpec = BY_HAND) -> Record:
    return simulate(TWO_TILES, machine, Tuning(tile_m=1, tile_n=2, issue_depth=depth))


def test_two_tiles_at_depth_2() -> None:
    """At depth 2 the second MMA runs beside the first tile's stores; a full path admits a byte
    whenever one has left, three seconds apart."""
    # bytes of tile 0 accepted at 5.5, 6.5, 8.5, 11.5; of tile 1 at 14.5, 17.5, 20.5, 23.5
    first, second = tiles_of(by_hand(2))
    assert [first[name] for name in TIMES] == pytest.approx([0, 4, 4, 12, 17.5, 0])
    assert [second[name] for name in TIMES] == pytest.approx([4, 8, 12, 24, 29.5, 0])


def test_two_tiles_at_depth_1() -> None:
    """At depth 1 the second MMA waits until the first tile's last store is accepted."""
    # bytes of tile 1 accepted at 17.5, 18.5, 20.5, 23.5
    first, second = tiles_of(by_hand(1))
    assert [first[name] for name in TIMES] == pytest.approx([0, 4, 4, 12, 17.5, 0])
    assert [second[name] for name in TIMES] == pytest.approx([12, 16, 16, 24, 29.5, 8])


def test_backlog_by_hand() -> None:
    """The backlog steps up with every acceptance and down when a byte has left the link."""
    time, held = by_hand(2).backlog
    # a byte leaves, and at the same moment a waiting one is admitted
    assert time == pytest.approx([5.5, 6.5, 8.5, 8.5, 11.5, 11.5, 14.5, 14.5, 17.5, 17.5, 20.5,
                                  20.5, 23.5, 23.5, 26.5, 29.5])
    assert held == pytest.approx([1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 0])


def test_summary_by_hand() -> None:
    """The summary follows from the tiles: last acceptance, last arrival, mean span, waits."""
    summary = by_hand(1).summary
    assert summary["accepted_s"] == pytest.approx(24)
    assert summary["total_s"] == pytest.approx(29.5)
    assert summary["t_mma_s"] == pytest.approx(4)
    assert math.isnan(summary["period_s"])  # far fewer than 8 tiles per SM
    # GPU 1 keeps its tiles: 5 s each, and waits 5 s for its slot; GPU 0 issues 8 s each, waits 8
    assert summary["issue_s"] == pytest.approx((8 + 8 + 5 + 5) / 4)
    assert summary["stall_ratio"] == pytest.approx((8 + 5) / (2 * 24))


def test_credits_by_hand() -> None:
    """With one credit, the link waits for ingress and latency of the byte before."""
    machine = dataclasses.replace(BY_HAND, link=dataclasses.replace(
        BY_HAND.link, credit_bytes=1.0, credit_latency_s=2.0, ingress_bytes_per_s=1.0,
        path_capacity_bytes=100.0))
    first, second = tiles_of(by_hand(2, machine))
    # the first byte is accepted at 5.5; each takes 3 s of link, 1 s of ingress, 2 s for the credit
    assert first["issue_end_s"] == pytest.approx(9)  # an empty path blocks nobody
    assert first["arrived_s"] == pytest.approx(5.5 + 3 * 6 + 4)
    assert second["arrived_s"] == pytest.approx(5.5 + 7 * 6 + 4)


def test_weights_that_miss_l2_are_fetched_at_the_hbm_rate() -> None:
    """A tile whose weight panel is not in L2 takes as long as the fetch, one that finds it only
    computes."""
    link = dataclasses.replace(BY_HAND.link, credit_bytes=100.0)
    machine = dataclasses.replace(BY_HAND, hbm_bytes_per_s=0.1, l2_bytes=8.0, link=link)
    gemm = dataclasses.replace(TWO_TILES, m=2)  # two rows over two panels of 4 bytes: 40 s each
    tiles = tiles_of(simulate(gemm, machine, Tuning(tile_m=1, tile_n=2), stores="off"))
    assert (tiles["mma_end_s"] - tiles["mma_start_s"]).tolist() == pytest.approx([40, 40, 4, 4])
    small = dataclasses.replace(machine, l2_bytes=7.0)
    tiles = tiles_of(simulate(gemm, small, Tuning(tile_m=1, tile_n=2), stores="off"))
    assert (tiles["mma_end_s"] - tiles["mma_start_s"]).tolist() == pytest.approx([40] * 4)


# --- against SimPy ------------------------------------------------------------------------------


class Reference:
    """The same machine in SimPy, a byte at a time."""

    def __init__(self, program: Program, machine: MachineSpec) -> None:
        self.program, self.machine, self.link = program, machine, machine.link
        self.env = simpy.Environment()
        self.interval = 1 / self.link.per_sm_bytes_per_s
        self.issue_end: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[int, int], float] = {}
        self.credits = [self.room(self.link.credit_bytes) for _ in program.tasks]
        self.arriving = [simpy.Store(self.env) for _ in program.tasks]
        for gpu, tasks in enumerate(program.tasks):
            path, queue = self.room(self.link.path_capacity_bytes), simpy.Store(self.env)
            self.env.process(self.wire(path, queue))
            self.env.process(self.destination(gpu))
            for sm in range(program.n_ctas):
                rows = range(sm, tasks.size, program.n_ctas)
                slots, done = self.room(program.issue_depth), simpy.Store(self.env)
                self.env.process(self.mma_role(gpu, rows, slots, done))
                self.env.process(self.store_role(gpu, len(rows), slots, done, path, queue))
        self.env.run()

    def room(self, size: float) -> simpy.Container:
        return simpy.Container(self.env, size, init=size)

    def mma_role(self, gpu, rows, slots, done):
        for row in rows:
            yield slots.get(1)
            task = self.program.tasks[gpu][row]
            compute = task["flop"] * self.machine.n_sms / self.machine.bf16_flop_per_s
            yield self.env.timeout(task["gap_s"] + compute)
            yield done.put(row)

    def store_role(self, gpu, n_rows, slots, done, path, queue):
        own = self.room(self.link.per_sm_capacity_bytes)
        for _ in range(n_rows):
            row = yield done.get()
            task = self.program.tasks[gpu][row]
            size, owner = int(task["store_bytes"]), int(task["owner"])
            yield self.env.timeout(self.link.issue_latency_s + self.interval / 2)
            for i in range(size):
                if i:
                    yield self.env.timeout(self.interval)
                if owner != gpu:
                    yield own.get(1)
                    yield path.get(1)
                    yield queue.put((own, (gpu, row), owner))
            yield self.env.timeout(self.interval / 2)
            self.issue_end[gpu, row] = self.env.now
            yield slots.put(1)

    def wire(self, path, queue):
        while True:
            own, tile, owner = yield queue.get()
            yield self.credits[owner].get(1)
            yield self.env.timeout(1 / self.link.egress_bytes_per_s)
            yield own.put(1)
            yield path.put(1)
            yield self.arriving[owner].put(tile)

    def destination(self, gpu):
        while True:
            tile = yield self.arriving[gpu].get()
            yield self.env.timeout(1 / self.link.ingress_bytes_per_s)
            self.arrived[tile] = self.env.now
            self.env.process(self.give_back(gpu))

    def give_back(self, gpu):
        yield self.env.timeout(self.link.credit_latency_s)
        yield self.credits[gpu].put(1)


def byte_machine(rng: np.random.Generator, credit_bytes: float) -> MachineSpec:
    """Return a machine that moves a few bytes a second, where everything may bind."""
    return machine_of(
        n_sms=int(rng.integers(1, 7)), flop_per_s=rng.uniform(50, 500) * 1e9,
        egress_bytes_per_s=rng.uniform(1, 10), ingress_bytes_per_s=rng.uniform(1, 20),
        per_sm_bytes_per_s=rng.uniform(0.5, 5), issue_latency_s=rng.uniform(0, 1),
        path_capacity_bytes=float(rng.integers(1, 40)),
        per_sm_capacity_bytes=float(rng.integers(1, 10)),
        credit_bytes=credit_bytes, credit_latency_s=rng.uniform(0, 3))


def agree(record: Record, reference: Reference) -> None:
    """Assert that every tile's last acceptance and arrival agree to nine digits."""
    for tile in record.tiles:
        key = int(tile["gpu"]), int(tile["row"])
        assert tile["issue_end_s"] == pytest.approx(reference.issue_end[key], rel=1e-9)
        if key in reference.arrived:
            assert tile["arrived_s"] == pytest.approx(reference.arrived[key], rel=1e-9)


@pytest.mark.parametrize(("n_gpus", "credit_bytes"),
                         [(2, 6.0), (2, 25.0), (3, math.inf), (4, math.inf)])
@pytest.mark.parametrize("seed", range(6))
def test_any_program_against_simpy(n_gpus: int, credit_bytes: float, seed: int) -> None:
    """Tiles of random size, work and owner end and arrive when SimPy says, tile by tile."""
    rng = np.random.default_rng([seed, n_gpus])
    machine = byte_machine(rng, credit_bytes)
    gemm = FusedGemm(m=int(rng.integers(4, 40)), n=int(rng.integers(2, 10)), k=1, n_gpus=n_gpus)
    tuning = Tuning(tile_m=4, tile_n=2, issue_depth=int(rng.integers(1, 4)))
    program = build(gemm, machine, tuning)
    for tasks in program.tasks:  # random work leaves no two events at one time
        tasks["flop"] = rng.integers(1, 2 * 10**12, tasks.size)
        tasks["owner"] = rng.integers(0, n_gpus, tasks.size)
    record = SimulatedDevice(machine, mirror=False).measure(program)
    agree(record, Reference(program, machine))


@pytest.mark.parametrize("seed", range(12))
def test_bursts_against_simpy(seed: int) -> None:
    """Free-running trains, mirrored, are accepted when SimPy says, whatever bounds them."""
    rng = np.random.default_rng(seed)
    machine = byte_machine(rng, float(rng.integers(1, 40)))
    train = BurstTrain(n_producers=machine.n_sms, burst_bytes=int(rng.integers(1, 17)),
                       gap_s=float(rng.choice([0, 0.5, 5, 10])), n_bursts=int(rng.integers(1, 12)))
    program = build(train, machine)
    record, reference = SimulatedDevice(machine).measure(program), Reference(program, machine)
    ends = [reference.issue_end[0, row] for row in range(program.tasks[0].size)]
    # producers are alike: which of them goes first at a tie does not matter
    assert np.sort(tiles_of(record)["issue_end_s"]) == pytest.approx(np.sort(ends), rel=1e-9)
    assert record.summary["total_s"] == pytest.approx(
        max(*reference.arrived.values(), *ends), rel=1e-9)


def test_small_chunks_do_not_overtake() -> None:
    """First come, first served: a small chunk that would fit waits behind a large one that does
    not yet."""
    machine = machine_of(2, egress_bytes_per_s=1.0, per_sm_bytes_per_s=100.0,
                         path_capacity_bytes=33.0)
    program = build(BurstTrain(n_producers=2, burst_bytes=1, gap_s=0.0, n_bursts=1), machine)
    for tasks in program.tasks:
        tasks["store_bytes"] = 512, 256  # in 256 chunks each, of 2 bytes and of 1
        tasks["gap_s"] = 0.0, 1.0
    time, held = SimulatedDevice(machine, chunks_per_tile=256).measure(program).backlog
    # 16 large chunks are in within 0.4 s and the next one waits; the first is out at 2.01
    assert held[time < 2].max() == 32
    assert held[time < 2.1].tolist()[-3:] == [30, 32, 33]


# --- laws of queues -----------------------------------------------------------------------------

workloads = st.one_of(burst_trains(n_sms=1), gemms(max_gpus=3, max_edge=700))


@given(machine=st.one_of(machines(), machines(topology="full mesh")), workload=workloads,
       tuning=tunings())
def test_nothing_is_lost(
    machine: MachineSpec, workload: BurstTrain | FusedGemm, tuning: Tuning
) -> None:
    """Every store is accepted after it was issued and arrives after that; the backlog is never
    negative, never above the path's capacity and a chunk, and empty at the end."""
    record = simulate(workload, machine, None if isinstance(workload, BurstTrain) else tuning)
    tiles = record.tiles
    assert (tiles["mma_start_s"] <= tiles["mma_end_s"]).all()
    assert (tiles["mma_end_s"] <= tiles["issue_start_s"]).all()
    free = machine.link.issue_latency_s + tiles["store_bytes"] / machine.link.per_sm_bytes_per_s
    last = record.summary["total_s"]
    assert (tiles["issue_end_s"] - tiles["issue_start_s"] >= free - 1e-12 * last).all()
    half = 0.5 * tiles["store_bytes"] / machine.link.per_sm_bytes_per_s  # of one chunk at most
    assert (tiles["arrived_s"] >= tiles["issue_end_s"] - half).all()
    time, held = record.backlog
    assert (np.diff(time) >= 0).all()
    largest = tiles["store_bytes"].max(initial=0)
    assert (held > -1e-6 * largest).all()
    assert (held <= max(machine.link.path_capacity_bytes, largest) * (1 + 1e-9)).all()
    assert held.size == 0 or abs(held[-1]) <= largest


@given(machine=machines(max_sms=4), train=burst_trains(n_sms=1, max_gpus=2))
def test_what_enters_the_path_leaves_it(machine: MachineSpec, train: BurstTrain) -> None:
    """The backlog's steps up add up to the bytes that the GPU stores, and so do its steps down."""
    train = dataclasses.replace(train, n_bursts=min(train.n_bursts, 3), burst_bytes=256)
    program = build(train, machine)
    held = np.append(0.0, SimulatedDevice(machine).measure(program).backlog[1])
    steps = np.diff(held)
    assert steps[steps > 0].sum() == pytest.approx(program.remote_bytes(0))
    assert -steps[steps < 0].sum() == pytest.approx(program.remote_bytes(0))


@given(n_sms=st.integers(1, 24), size=st.integers(1, 256 * KIB), gap_s=st.sampled_from([0, 1e-6]),
       latency=st.sampled_from([0.0, 0.3e-6]))
def test_zero_load_never_blocks(n_sms: int, size: int, gap_s: float, latency: float) -> None:
    """On a link that is faster than all SMs together every span is T_iss0 exactly."""
    machine = machine_of(n_sms, egress_bytes_per_s=1e12, per_sm_bytes_per_s=0.9e12 / n_sms,
                         issue_latency_s=latency)
    train = BurstTrain(n_producers=n_sms, burst_bytes=size, gap_s=gap_s, n_bursts=5)
    tiles = simulate(train, machine).tiles
    free = latency + size / (0.9e12 / n_sms)
    np.testing.assert_allclose(tiles["issue_end_s"] - tiles["issue_start_s"], free, rtol=1e-9)
    assert tiles["issue_end_s"].max() == pytest.approx(5 * free + 4 * gap_s)


@given(n_sms=st.integers(4, 24), size=st.integers(1 * KIB, 128 * KIB),
       bottleneck=st.sampled_from(["egress", "ingress"]),
       capacity=st.sampled_from([64.0 * KIB, 1.0 * MIB, math.inf]))
def test_saturation_drains_at_the_link_rate(
    n_sms: int, size: int, bottleneck: str, capacity: float
) -> None:
    """Without gaps the slowest link is never idle: the last byte arrives after N V / R and what
    the first chunk takes to get there."""
    rates = {"egress_bytes_per_s": 50e9, "ingress_bytes_per_s": 80e9}
    if bottleneck == "ingress":
        rates = {"egress_bytes_per_s": 80e9, "ingress_bytes_per_s": 50e9}
    machine = machine_of(n_sms, path_capacity_bytes=capacity, **rates)
    train = BurstTrain(n_producers=n_sms, burst_bytes=size, gap_s=0.0, n_bursts=8)
    total = simulate(train, machine).summary["total_s"]
    chunk = size / 16
    busy = 8 * n_sms * size / 50e9
    assert busy < total < busy + chunk * (0.5 / 20e9 + 2 / 50e9)


def test_littles_law_on_the_path() -> None:
    """The time-average backlog is the throughput times the mean time a byte spends in the path."""
    rng = np.random.default_rng(7)
    machine = machine_of(20, egress_bytes_per_s=10.0, ingress_bytes_per_s=math.inf,
                         per_sm_bytes_per_s=2.0, path_capacity_bytes=12.0)
    train = BurstTrain(n_producers=20, burst_bytes=1, gap_s=0.0, n_bursts=40, n_gpus=2)
    program = build(train, machine)
    for tasks in program.tasks:  # loads the link at random, and fills the path now and then
        tasks["gap_s"] = rng.exponential(1.3, tasks.size)
    record = SimulatedDevice(machine, mirror=False).measure(program)
    tiles = tiles_of(record)
    accepted = tiles["issue_end_s"] - 0.5 / 2.0
    residence = tiles["arrived_s"] - accepted  # one chunk a tile, ingress takes no time
    time, held = record.backlog
    duration = time[-1] - time[0]
    average = (held[:-1] * np.diff(time)).sum() / duration
    assert time.size == 2 * tiles.size  # every event was sampled
    assert held.max() == 12
    assert average == pytest.approx(tiles.size / duration * residence.mean(), rel=1e-9)


@pytest.mark.parametrize("exponent", [-3, 1, 10])
@given(machine=machines(), workload=workloads)
@settings(max_examples=20)
def test_time_has_no_scale(
    exponent: int, machine: MachineSpec, workload: BurstTrain | FusedGemm
) -> None:
    """All rates times a and all latencies over a give all times over a, to the last bit for a
    power of two."""
    a = 2.0**exponent
    link = dataclasses.replace(machine.link, **{
        name: getattr(machine.link, name) * (a if name.endswith("_per_s") else 1 / a)
        for name in ("egress_bytes_per_s", "ingress_bytes_per_s", "per_sm_bytes_per_s",
                     "issue_latency_s", "credit_latency_s")})
    fast = dataclasses.replace(machine, link=link, bf16_flop_per_s=machine.bf16_flop_per_s * a,
                               fp8_flop_per_s=machine.fp8_flop_per_s * a)
    quick = workload
    if isinstance(workload, BurstTrain):
        quick = dataclasses.replace(workload, gap_s=workload.gap_s / a)
    here, there = simulate(workload, machine).tiles, simulate(quick, fast).tiles
    for name in TIMES:
        np.testing.assert_array_equal(here[name], there[name] * a)


# --- chunks, mirrors, seeds ---------------------------------------------------------------------

NODE = machine_of(24, egress_bytes_per_s=100e9, ingress_bytes_per_s=100e9,
                  per_sm_bytes_per_s=12e9, path_capacity_bytes=600e3, per_sm_capacity_bytes=64e3,
                  credit_bytes=400e3, credit_latency_s=2e-6, flop_per_s=50e12)
FUSED = FusedGemm(m=2048, n=4096, k=512)


@pytest.mark.parametrize("destinations",
                         ["round-robin", "row-owner", "row-owner-unrotated", "hot:0.3"])
@pytest.mark.parametrize("k", [64, 512, 4096])
def test_half_the_chunk_changes_little(destinations: str, k: int) -> None:
    """Chunks half as large move the totals of a fused GEMM by less than 1 %, in every regime."""
    gemm = dataclasses.replace(FUSED, destinations=destinations, k=k)
    coarse, fine = (simulate(gemm, NODE, chunks_per_tile=n).summary for n in (16, 32))
    assert fine["total_s"] == pytest.approx(coarse["total_s"], rel=0.01)
    assert fine["accepted_s"] == pytest.approx(coarse["accepted_s"], rel=0.01)


@pytest.mark.parametrize("topology", ["switch", "full mesh"])
@pytest.mark.parametrize("destinations", ["round-robin", "row-owner"])
@pytest.mark.parametrize("k", [64, 512, 4096])
def test_one_gpu_stands_for_all(destinations: str, k: int, topology: str) -> None:
    """Where all GPUs do the same, one mirrored is all of them to within 1 %."""
    gemm = dataclasses.replace(FUSED, destinations=destinations, k=k)
    machine = dataclasses.replace(NODE, link=dataclasses.replace(NODE.link, topology=topology))
    one, all_of_them = (simulate(gemm, machine, mirror=m) for m in (True, False))
    assert one.provenance["n_gpus_simulated"] == 1
    assert all_of_them.provenance["n_gpus_simulated"] == 8
    for name in ("accepted_s", "total_s"):
        assert one.summary[name] == pytest.approx(all_of_them.summary[name], rel=0.01)


def test_uneven_owners_are_not_mirrored() -> None:
    """Nine rows of tiles over eight owners make one of them a hot spot, mirroring or not."""
    gemm = dataclasses.replace(FUSED, m=9 * 128, k=256, destinations="row-owner")
    one, all_of_them = (simulate(gemm, NODE, mirror=m).summary for m in (True, False))
    assert one["total_s"] == pytest.approx(all_of_them["total_s"], rel=0.01)


@pytest.mark.parametrize("train", [
    BurstTrain(n_producers=21, burst_bytes=32 * KIB, gap_s=1e-6, n_gpus=8, n_bursts=20),
    BurstTrain(n_producers=20, burst_bytes=8 * KIB, gap_s=0.0, n_gpus=3, sync="lockstep"),
])
def test_bursts_of_all_gpus_are_alike(train: BurstTrain) -> None:
    """Bursts rotate over the peers, so that one GPU stands for all of them."""
    one, all_of_them = (simulate(train, NODE, mirror=m).summary for m in (True, False))
    for name in ("accepted_s", "total_s"):
        assert one[name] == pytest.approx(all_of_them[name], rel=0.01)


def test_a_seed_repeats_a_run() -> None:
    """The same seed gives the same record to the last bit, another seed another one; without
    jitter the seed does not matter."""
    def tiles(seed: int | None, ratio: float) -> bytes:
        device = SimulatedDevice(NODE, mma_jitter_ratio=ratio, issue_jitter_ratio=ratio)
        return device.measure(build(FUSED, NODE), seed).tiles.tobytes()

    assert tiles(3, 0.1) == tiles(3, 0.1) != tiles(4, 0.1)
    assert tiles(3, 0.0) == tiles(4, 0.0) == tiles(None, 0.0)


def test_jitter_keeps_the_mean() -> None:
    """Jitter spreads compute and issue times by the ratio asked for and keeps their means."""
    gemm = dataclasses.replace(FUSED, m=16384)
    device = SimulatedDevice(NODE, mma_jitter_ratio=0.3, issue_jitter_ratio=0.2)
    exact = simulate(gemm, NODE, stores="local")
    rough = device.measure(build(gemm, NODE, stores="local"), seed=1)
    for begin, end, ratio in (("mma_start_s", "mma_end_s", 0.3),
                              ("issue_start_s", "issue_end_s", 0.2)):
        times = rough.tiles[end] - rough.tiles[begin]
        mean = (exact.tiles[end] - exact.tiles[begin]).mean()
        assert times.mean() == pytest.approx(mean, rel=0.02)
        assert times.std() / times.mean() == pytest.approx(ratio, rel=0.05)


# --- the pipeline -------------------------------------------------------------------------------

# Storing is cheap here and computing is not: k = 4096 takes 8 us a tile, its stores 3 us.
PIPELINE = machine_of(16, egress_bytes_per_s=1e13, per_sm_bytes_per_s=11e9, issue_latency_s=0.1e-6)
T_ISS0 = 0.1e-6 + 128 * 128 * 2 / 11e9


@pytest.mark.parametrize("k", [512, 8192])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_serialises_or_hides(k: int, depth: int) -> None:
    """Depth 1 takes T_mma + T_iss0 a tile, depth 2 and more the larger of the two."""
    t_mma = 2 * 128 * 128 * k * 16 / 1e15
    gemm = FusedGemm(m=2048, n=2048, k=k, destinations="row-owner")
    record = simulate(gemm, PIPELINE, Tuning(issue_depth=depth))
    period = t_mma + T_ISS0 if depth == 1 else max(t_mma, T_ISS0)
    assert record.summary["period_s"] == pytest.approx(period, rel=1e-9)
    assert record.summary["t_mma_s"] == pytest.approx(t_mma)
    assert record.summary["issue_s"] == pytest.approx(T_ISS0)
    fill = T_ISS0 if depth == 1 or t_mma > T_ISS0 else t_mma
    makespan = 16 * period + (0 if depth == 1 else fill)
    assert record.summary["accepted_s"] == pytest.approx(makespan, rel=1e-9)


def test_depth_absorbs_jitter() -> None:
    """Under jitter every further slot helps a little, and none ever hurts."""
    times = [simulate(FusedGemm(m=8192, n=2048, k=6000), PIPELINE, Tuning(issue_depth=depth),
                      mma_jitter_ratio=0.4).summary["accepted_s"] for depth in (1, 2, 3, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[1] > 1.02 * times[-1]


def test_one_gpu_stores_nothing_remote() -> None:
    """With a single GPU all is accepted and there at once: the path and the link stay idle."""
    alone = simulate(dataclasses.replace(FUSED, n_gpus=1), NODE)
    local = simulate(FUSED, NODE, stores="local")
    assert alone.summary["remote_bytes"] == 0
    assert alone.backlog.shape == (2, 0)
    assert alone.summary["total_s"] == alone.summary["accepted_s"]
    np.testing.assert_array_equal(alone.tiles["issue_end_s"], tiles_of(local)["issue_end_s"])


def test_stores_off_is_compute_alone() -> None:
    """With stores off a GPU takes its waves of MMAs and nothing else."""
    record = simulate(FUSED, NODE, stores="off")
    waves = math.ceil(16 * 32 / 24)
    assert record.summary["accepted_s"] == pytest.approx(waves * 2 * 128 * 128 * 512 * 24 / 50e12)
    assert math.isnan(record.summary["issue_s"])


@pytest.mark.parametrize("unbounded", ["path_capacity_bytes", "credit_bytes"])
def test_nothing_remote_on_an_unbounded_path(unbounded: str) -> None:
    """A path of unbounded capacity that nothing is stored to is no trouble."""
    link = dataclasses.replace(NODE.link, **{unbounded: math.inf})
    record = simulate(FUSED, dataclasses.replace(NODE, link=link), stores="off")
    assert record.summary["remote_bytes"] == 0


# --- destinations and topology ------------------------------------------------------------------

DRAIN_BOUND = dataclasses.replace(FUSED, k=64)
V_OVER_R = FUSED.store_bytes / 100e9


def test_a_moving_incast_is_slower() -> None:
    """When all GPUs store to the same owner at a time they share its ingress and take much
    longer than when they are rotated."""
    rotated, unrotated = (
        simulate(dataclasses.replace(DRAIN_BOUND, destinations=d), NODE).summary["total_s"]
        for d in ("row-owner", "row-owner-unrotated"))
    assert rotated == pytest.approx(7 / 8 * V_OVER_R, rel=0.05)
    assert unrotated > 2.5 * rotated


def test_a_hot_gpu_sets_the_pace() -> None:
    """The ingress of a GPU that gets a share of everybody's tiles is busy all the time."""
    hot = dataclasses.replace(DRAIN_BOUND, n_gpus=4, destinations="hot:0.6")
    total = simulate(hot, NODE).summary["total_s"]
    assert total == pytest.approx(3 * 0.6 * V_OVER_R, rel=0.05)
    cold = dataclasses.replace(hot, destinations="round-robin")
    assert simulate(cold, NODE).summary["total_s"] < 0.5 * total


@pytest.mark.parametrize("n_gpus", [2, 4, 8])
def test_a_full_mesh_gives_a_pair_its_lane(n_gpus: int) -> None:
    """In a full mesh of 8 a GPU stores to each peer at a seventh of its rate, no more."""
    mesh = dataclasses.replace(NODE, link=dataclasses.replace(NODE.link, topology="full mesh"))
    train = BurstTrain(n_producers=21, burst_bytes=32 * KIB, gap_s=0.0, n_bursts=30, n_gpus=n_gpus)
    record = simulate(train, mesh)
    lanes = (n_gpus - 1) / 7
    assert train.volume_bytes / record.summary["period_s"] == pytest.approx(
        100e9 * lanes, rel=0.01)


@pytest.mark.parametrize("credit_bytes", [50e3, 100e3, 150e3, 300e3])
def test_credits_over_latency_limit_the_rate(credit_bytes: float) -> None:
    """A destination that takes C bytes and gives their room back after L is fed at C / L."""
    link = dataclasses.replace(NODE.link, credit_bytes=credit_bytes, ingress_bytes_per_s=1e15)
    train = BurstTrain(n_producers=24, burst_bytes=32 * KIB, gap_s=0.0, n_bursts=30)
    record = simulate(train, dataclasses.replace(NODE, link=link))
    rate = train.volume_bytes / record.summary["period_s"]
    assert rate == pytest.approx(min(100e9, credit_bytes / 2e-6), rel=0.03)


# --- dependencies -------------------------------------------------------------------------------


def test_lockstep_waits_for_the_slowest() -> None:
    """In lockstep nobody starts a gap before the last producer's burst is accepted."""
    train = BurstTrain(n_producers=24, burst_bytes=64 * KIB, gap_s=1e-6, n_bursts=6,
                       sync="lockstep", n_gpus=2)
    bursts = tiles_of(simulate(train, NODE)).reshape(6, 24)
    ended = bursts["issue_end_s"].max(axis=1)
    np.testing.assert_allclose(bursts["issue_start_s"][1:], (ended[:-1] + 1e-6)[:, None]
                               * np.ones(24), rtol=1e-12)
    assert (bursts["issue_end_s"].max(axis=1) > bursts["issue_end_s"].min(axis=1)).all()


def rewired(**columns: object) -> Program:
    """Return a train of two bursts of two producers whose dependencies are `columns`."""
    train = BurstTrain(n_producers=2, burst_bytes=64, gap_s=1e-6, n_bursts=2, sync="lockstep")
    program = build(train, NODE)
    for tasks in program.tasks:
        for name, values in columns.items():
            tasks[name] = values
    return program


@pytest.mark.parametrize(("waits_for", "signals", "wait_count"), [
    ([1, -1, -1, -1], [0, 0, 1, 1], 2),  # burst 0 waits for burst 1 of the same producer
    ([1, 0, -1, -1], [0, 1, -1, -1], 1),  # each waits for the other
])
def test_a_cycle_is_told(waits_for: list[int], signals: list[int], wait_count: int) -> None:
    """Tasks that wait for each other end in an error, not in a hang."""
    program = rewired(waits_for=waits_for, signals=signals, wait_count=wait_count)
    with pytest.raises(XStageError, match="cycle"):
        SimulatedDevice(NODE).measure(program)


@pytest.mark.parametrize(("waits_for", "wait_count"), [
    ([-1, -1, 1, 1], 1),  # a counter that nobody raises
    ([-1, -1, 0, 0], 3),  # more than its two signals
    ([-1, -1, 0, 0], 1),  # fewer: which of the two?
])
def test_a_count_that_is_not_its_signals(waits_for: list[int], wait_count: int) -> None:
    """A task waits for all that raise its counter: another count is refused, with both numbers."""
    program = rewired(waits_for=waits_for, signals=[0, 0, -1, -1], wait_count=wait_count)
    with pytest.raises(XStageError, match=f"to reach {wait_count}, but (no|2) tasks raise it"):
        SimulatedDevice(NODE).measure(program)


def test_dependencies_across_producers() -> None:
    """A task starts when the task that raises its counter is accepted, on whatever SM that was."""
    program = rewired(waits_for=[-1, -1, 0, -1], signals=[-1, 0, -1, -1], wait_count=1,
                      gap_s=[0.0, 1e-3, 0.0, 0.0])
    tiles = tiles_of(SimulatedDevice(NODE).measure(program))
    assert tiles["mma_start_s"][2] == pytest.approx(tiles["issue_end_s"][1])
    assert tiles["mma_start_s"][2] > 1e-3 > tiles["issue_end_s"][0]


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [
    "egress_bytes_per_s", "ingress_bytes_per_s", "per_sm_bytes_per_s", "issue_latency_s",
    "path_capacity_bytes", "per_sm_capacity_bytes", "credit_bytes", "credit_latency_s"])
def test_unknown_link_fields_are_told(field: str) -> None:
    """A store path with a field nobody knows is not simulated; the field is named."""
    link = dataclasses.replace(NODE.link, **{field: math.nan})
    with pytest.raises(UnknownFact, match=f"{field} of test machine is not known"):
        SimulatedDevice(dataclasses.replace(NODE, link=link))


def test_unknown_compute_rate_is_told() -> None:
    """Bursts need no FLOP rate; a GEMM on a machine without one says which is missing."""
    machine = MachineSpec(name="mystery", n_sms=4, max_gpus=2, link=NODE.link)
    train = BurstTrain(n_producers=4, burst_bytes=64, gap_s=0.0)
    assert simulate(train, machine).summary["accepted_s"] > 0
    with pytest.raises(UnknownFact, match="bf16_flop_per_s of mystery"):
        simulate(FusedGemm(m=64, n=64, k=64, n_gpus=2), machine)


@pytest.mark.parametrize(("option", "value"), [
    ("mma_jitter_ratio", -0.1), ("mma_jitter_ratio", 1.5), ("issue_jitter_ratio", math.nan),
    ("issue_jitter_ratio", "a bit"), ("chunks_per_tile", 0), ("chunks_per_tile", 1.5),
    ("chunks_per_tile", 10**6)])
def test_bad_options_are_refused(option: str, value: object) -> None:
    """An option out of range is refused by name."""
    with pytest.raises(InvalidValue, match=option):
        SimulatedDevice(NODE, **{option: value})


def test_extreme_link_of_one_byte() -> None:
    """A path, an SM and a destination that hold less than a chunk still pass it, alone."""
    link = LinkSpec(name="tiny", egress_bytes_per_s=1e9, ingress_bytes_per_s=1e9,
                    per_sm_bytes_per_s=1e9, issue_latency_s=0.0, path_capacity_bytes=1.0,
                    per_sm_capacity_bytes=1.0, credit_bytes=1.0, credit_latency_s=0.0)
    train = BurstTrain(n_producers=4, burst_bytes=100_000, gap_s=0.0, n_bursts=2)
    record = simulate(train, dataclasses.replace(NODE, link=link))
    assert record.summary["total_s"] == pytest.approx(8 * 100_000 / 0.5e9, rel=0.01)
