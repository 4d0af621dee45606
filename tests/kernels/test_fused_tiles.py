"""The fused-tile kernel on emulated GPUs: right for every shape, depth, path and signal."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import two_layers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from xstage_lab import reference
from xstage_lab.devices.host import HostDevice, TileRun
from xstage_lab.errors import Infeasible, InvalidValue, UnknownName, XStageError
from xstage_lab.kernels.failures import KernelFailed
from xstage_lab.kernels.fused_tiles import SIGNALS, STORE_PATHS, TILE_TIMES, Variant
from xstage_lab.kernels.host import compile_kernel
from xstage_lab.kernels.source import Source
from xstage_lab.record import SUMMARY_KEYS
from xstage_lab.schedule import Program, build
from xstage_lab.spec import DESTINATIONS, BurstTrain, FusedGemm, Tuning

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

DEPTHS, N_GPUS = (1, 2, 3, 4), (1, 2, 3, 4)
DESTINATION_NAMES = (*DESTINATIONS[:-1], "hot:0.6")
TILES = [(m, n) for m, n in itertools.product((64, 128, 256), repeat=2) if (m, n) != (256, 256)]


class Case(NamedTuple):
    """A variant of the kernel, and the shape, tuning and GPU count it runs."""

    store_path: str
    signal: str
    tuning: Tuning
    gemm: FusedGemm


def cases() -> list[Case]:
    """Every depth with every path and signal; tiles, stages, dtypes, shapes and GPUs vary along.

    Shapes leave a ragged edge in m, n and k, and more tiles for a CTA than it may hold.
    """
    found = []
    for i, (depth, path, signal) in enumerate(itertools.product(DEPTHS, STORE_PATHS, SIGNALS)):
        dtype, n_ctas, n_columns = ("bf16", "fp32")[i // 4 % 2], 1 + i % 2, 2 if i % 3 else 3
        tunings = (Tuning(tile_m=m, tile_n=n, tile_k=(32, 64)[i // 2 % 2], issue_depth=depth,
                          n_stages=(2, 3, 4)[i // 5 % 3], n_ctas=n_ctas)
                   for m, n in TILES[5 * i % len(TILES):] + TILES)
        tuning = next(t for t in tunings if fits(t, dtype))
        n_rows = max(2, -(-(depth + 1) * n_ctas // n_columns))
        gemm = FusedGemm(m=tuning.tile_m * n_rows - 5 - i,
                         n=tuning.tile_n * n_columns - 3 - 2 * (i % 4),
                         k=7 + 11 * i % 90, n_gpus=N_GPUS[i % 4], out_dtype=dtype,
                         destinations=DESTINATION_NAMES[i // 3 % 4])
        found.append(Case(path, signal, tuning, gemm))
    return found


def fits(tuning: Tuning, out_dtype: str) -> bool:
    """Whether the tile with its slots fits in the shared memory of an emulated SM."""
    gemm = FusedGemm(m=1, n=1, k=1, out_dtype=out_dtype)
    variant = Variant.of(gemm, tuning, store_path="registers", signal="none")
    return variant.shared_bytes <= HostDevice().machine.smem_per_cta_bytes


CASES = cases()


def name_of(case: Case) -> str:
    """What varies, for the test's name."""
    t, g = case.tuning, case.gemm
    return (f"{t.tile_m}x{t.tile_n}x{t.tile_k}-depth{t.issue_depth}-{case.store_path}-{case.signal}"
            f"-{g.out_dtype}-{g.n_gpus}gpus")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build all variants before the first test, on all cores."""
    sources = [Variant.of(c.gemm, c.tuning, store_path=c.store_path, signal=c.signal).source
               for c in CASES]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_kernel, sources))


def program_of(case: Case, device: HostDevice, stores: str = "remote") -> Program:
    """The tile program of a case."""
    return build(case.gemm, device.machine, case.tuning, stores=stores)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_variant(case: Case) -> None:
    """Each element of each tile is right at its owner, flagged as asked, and nothing else is."""
    device = HostDevice(store_path=case.store_path, signal=case.signal)
    for seed in (0, 1):
        device.measure(program_of(case, device), seed=seed)


def test_cases_cover_what_they_claim() -> None:
    """The cases hold all tiles, stage counts, dtypes, GPU counts and kinds of destinations."""
    assert {(c.tuning.tile_m, c.tuning.tile_n) for c in CASES} == set(TILES)
    assert {(c.tuning.issue_depth, c.store_path, c.signal) for c in CASES} == set(
        itertools.product(DEPTHS, STORE_PATHS, SIGNALS))
    assert {c.gemm.n_gpus for c in CASES} == set(N_GPUS)
    assert {c.gemm.destinations for c in CASES} == set(DESTINATION_NAMES)
    assert {(c.gemm.out_dtype, c.tuning.tile_k) for c in CASES} == set(
        itertools.product(("bf16", "fp32"), (32, 64)))
    assert {c.tuning.n_stages for c in CASES} == {2, 3, 4}
    for c in CASES:
        assert c.gemm.m % c.tuning.tile_m
        assert c.gemm.n % 4
        n_tiles = -(-c.gemm.m // c.tuning.tile_m) * -(-c.gemm.n // c.tuning.tile_n)
        assert n_tiles > c.tuning.issue_depth * (c.tuning.n_ctas or 0)


@pytest.mark.parametrize("stores", ["off", "local"])
@pytest.mark.parametrize("case", CASES[1:4], ids=name_of)
def test_stores_off_or_local(case: Case, stores: str) -> None:
    """Compute only writes and flags nothing, and the local control stores to nobody else."""
    device = HostDevice(store_path=case.store_path, signal=case.signal)
    record = device.measure(program_of(case, device, stores), seed=2)
    assert record.summary["remote_bytes"] == 0


SMALL = next(c for c in CASES if (c.tuning.tile_m, c.tuning.tile_n) == (64, 64))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(m=st.integers(1, 140), n=st.integers(1, 140), k=st.integers(1, 90),
       n_gpus=st.integers(1, 4), n_ctas=st.integers(1, 3), seed=st.integers(0, 2**20))
def test_any_shape(m: int, n: int, k: int, n_gpus: int, n_ctas: int, seed: int) -> None:
    """Whatever the shape, the number of GPUs and of CTAs, the result is right."""
    device = HostDevice(store_path=SMALL.store_path, signal=SMALL.signal)
    gemm = FusedGemm(m=m, n=n, k=k, n_gpus=n_gpus, out_dtype=SMALL.gemm.out_dtype)
    tuning = Tuning(**{**vars(SMALL.tuning), "n_ctas": n_ctas})
    device.measure(build(gemm, device.machine, tuning), seed=seed)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("store_path", STORE_PATHS)
def test_tasks_wait_for_what_they_read(store_path: str, interleaved: bool) -> None:
    """A layer that reads another's output is right in either order, whichever thread runs first."""
    variant = two_layers.variant(store_path=store_path, signal="release")
    for seed in range(3):
        for n_ctas in (1, 3):
            two_layers.run(variant, variant.source, interleaved=interleaved, n_ctas=n_ctas,
                           seed=seed)


def of_each_cta(times: NDArray[np.void], n_ctas: int) -> list[NDArray[np.void]]:
    """A CTA's tiles in order."""
    return [times[cta::n_ctas] for cta in range(n_ctas)]


def two_layers_at_depth(depth: int, store_path: str) -> TileRun:
    """The two-layer program at an issue depth, on two CTAs of each of two GPUs."""
    variant = two_layers.variant(issue_depth=depth, store_path=store_path, signal="release")
    return two_layers.run(variant, variant.source, n_ctas=2, seed=1)


@pytest.mark.parametrize(
    ("depth", "store_path"), [(1, "registers"), (2, "bulk"), (3, "registers")]
)
def test_depth_bounds_tiles_in_flight(depth: int, store_path: str) -> None:
    """A tile takes a slot once the tile `depth - 1` before it is accepted, at depth 1 the MMA."""
    for times in two_layers_at_depth(depth, store_path).tile_times:
        for tiles in of_each_cta(times, 2):
            accepted = tiles["issue_end_cycles"].max(axis=1)
            if depth == 1:
                assert (tiles["mma_start_cycles"][1:] > accepted[:-1]).all()
            else:
                entered = tiles["mma_end_cycles"] + tiles["slot_wait_cycles"]
                assert (entered[depth - 1 :] > accepted[: -(depth - 1)]).all()


def test_times_are_in_order() -> None:
    """Every tile is computed, handed over, issued and signalled, in this order, by all warps."""
    for times in two_layers_at_depth(2, "bulk").tile_times:
        assert times.dtype == TILE_TIMES
        assert (times["mma_start_cycles"] > 0).all()
        assert (times["mma_end_cycles"] > times["mma_start_cycles"]).all()
        assert (times["handed_over_cycles"] > times["mma_end_cycles"]).all()
        assert (times["slot_wait_cycles"] >= 0).all()
        assert (times["issue_start_cycles"] > times["mma_end_cycles"][:, None]).all()
        assert (times["issue_end_cycles"] > times["issue_start_cycles"]).all()
        assert (times["signal_end_cycles"] > times["issue_end_cycles"]).all()


def test_record_has_no_times() -> None:
    """The device claims no times and gives none, names the kernel, and takes a seed."""
    device = HostDevice(store_path=SMALL.store_path, signal=SMALL.signal)
    program = program_of(SMALL, device)
    record = device.measure(program, seed=5)
    assert not device.capabilities.times
    assert all(math.isnan(record.summary[key]) for key in SUMMARY_KEYS)
    assert record.tiles is None
    variant = Variant.of(SMALL.gemm, SMALL.tuning, store_path=SMALL.store_path,
                         signal=SMALL.signal)
    assert record.provenance["kernel"] == variant.source.digest
    assert record.provenance["seed"] == 5
    assert record.parameters == program.parameters()


@pytest.mark.parametrize("store_path", STORE_PATHS)
@pytest.mark.parametrize("sync", ["free", "lockstep"])
@pytest.mark.parametrize("n_gpus", [1, 2, 3])
def test_burst_trains(store_path: str, sync: str, n_gpus: int) -> None:
    """Every burst of every producer arrives whole at its owner and nowhere else."""
    device = HostDevice(store_path=store_path)
    train = BurstTrain(n_producers=3, burst_bytes=1040, gap_s=1e-6, n_bursts=4, sync=sync,
                       n_gpus=n_gpus)
    for stores in ("remote", "local"):
        device.measure(build(train, device.machine, stores=stores), seed=3)


def edited(old: str, new: str) -> Callable[[Source], Source]:
    """An edit of a kernel."""
    return lambda source: source.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("destinations[cta % n_destinations] +", "destinations[0] +", r"GPU 0, CTA 1.*word 0 is"),
        ("i < n_vectors; i += N_THREADS)\n            st_global",
         "i < n_vectors - 1; i += N_THREADS)\n            st_global", r"burst 0: word 256 is"),
    ],
)
def test_wrong_burst_is_named(old: str, new: str, told: str) -> None:
    """A burst that went elsewhere or arrived in part is told with GPU, CTA, burst and word."""
    device = HostDevice(edit=edited(old, new))
    train = BurstTrain(n_producers=3, burst_bytes=1040, gap_s=0.0, n_bursts=2, n_gpus=3)
    with pytest.raises(reference.WrongResult, match=told):
        device.measure(build(train, device.machine))


GEMM, SMALL_TILE = FusedGemm(m=64, n=64, k=32, n_gpus=1), Tuning(tile_m=64, tile_n=64, tile_k=32)


@pytest.mark.parametrize(
    ("workload", "tuning", "told"),
    [
        (FusedGemm(m=64, n=64, k=32, n_gpus=1, dtype="fp8"), SMALL_TILE, "dtype = 'fp8'.*bf16"),
        (GEMM, Tuning(tile_m=32, tile_n=64), "tile_m = 32.*64 or 128 or 256"),
        (GEMM, Tuning(tile_m=256, tile_n=256, tile_k=32, n_stages=2), "registers allow 128"),
        (FusedGemm(m=8192, n=8192, k=65, n_gpus=1), SMALL_TILE, "FLOP .*smaller m, n or k"),
        (FusedGemm(m=4096, n=4096, k=1, n_gpus=8), SMALL_TILE, "MiB; allowed.*fewer GPUs"),
        (BurstTrain(n_producers=1, burst_bytes=24, gap_s=0.0), None, "burst_bytes = 24 B.*16"),
        (BurstTrain(n_producers=4, burst_bytes=2**28, gap_s=0.0), None, "MiB; allowed"),
    ],
)
def test_program_the_kernel_does_not_take(
    workload: FusedGemm | BurstTrain, tuning: Tuning | None, told: str
) -> None:
    """A program the kernel or the host cannot run is refused with the value and the limit."""
    device = HostDevice()
    with pytest.raises((InvalidValue, Infeasible), match=told):
        device.measure(build(workload, device.machine, tuning))


def test_bursts_without_stores() -> None:
    """A burst train with its stores off is refused, as nothing would be left of it."""
    device = HostDevice()
    train = BurstTrain(n_producers=1, burst_bytes=16, gap_s=0.0)
    with pytest.raises(InvalidValue, match=r"stores = 'off'.*remote or local"):
        device.measure(build(train, device.machine, stores="off"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"store_path": "multicast"}, "store_path 'multicast'.*registers"),
        ({"signal": "maybe"}, "signal 'maybe'.*release"),
        ({"budget_cycles": 0}, "budget_cycles = 0 .*from 1"),
        ({"n_sms": 0}, "n_sms = 0"),
    ],
)
def test_impossible_device(options: dict[str, Any], told: str) -> None:
    """An option the device does not have is refused with those that it has."""
    with pytest.raises((UnknownName, InvalidValue), match=told):
        HostDevice(**options)


def test_dependency_never_met() -> None:
    """A task that waits for a counter nobody raises is named, and the run ends."""
    device = HostDevice(budget_cycles=100_000)
    program = build(GEMM, device.machine, SMALL_TILE)
    program.tasks[0]["waits_for"], program.tasks[0]["wait_count"] = 3, 2
    with pytest.raises(KernelFailed, match=r"step 0 waited for the tasks it depends on: it saw 0 "
                                           r"and needs 8; its cycle budget was spent"):
        device.measure(program)


def test_reference_rounds_like_the_hardware() -> None:
    """bf16 values are rounded to nearest even and come back unchanged."""
    values = np.array([1.0, 1.00390625, 1.01171875, -3.1415927, 65280.0, 1e-30], np.float32)
    rounded = reference.from_bf16(reference.to_bf16(values))
    assert rounded[:3].tolist() == [1.0, 1.0, 1.015625]  # the two halfway cases go to even
    assert (np.abs(rounded - values) <= 2.0**-9 * np.abs(values) * 2).all()
    bits = np.arange(0x0080, 0x7F80, dtype=np.uint16)
    assert (reference.to_bf16(reference.from_bf16(bits)) == bits).all()


@pytest.mark.parametrize("k", [16, 1024, 8192])
def test_reference_tolerance_tells_a_missing_product(k: int) -> None:
    """fp32 sums in any order stay within tolerance, and a sum that lacks a product does not."""
    rng = np.random.default_rng(k)
    a, b = reference.random_bf16(rng, (8, k)), reference.random_bf16(rng, (16, k))
    expected, tolerance = reference.product(a, b, "fp32")
    left, right = reference.from_bf16(a), reference.from_bf16(b)
    in_order = np.zeros((8, 16), np.float32)
    for i in range(k):
        in_order += np.outer(left[:, i], right[:, i])
    assert (np.abs(in_order - expected) <= tolerance).all()
    lacking = in_order - np.outer(left[:, k // 2], right[:, k // 2])
    assert (np.abs(lacking - expected) > tolerance).mean() > 0.8


def test_wrong_result_names_tile_and_element() -> None:
    """A single wrong element, an element out of place and a NaN are each told where they are."""
    rng = np.random.default_rng(0)
    a, b = reference.random_bf16(rng, (70, 24)), reference.random_bf16(rng, (40, 24))
    expected, tolerance = reference.product(a, b, "fp32")
    tiles = [reference.Tile(0, 1, 0, 0, 64, 40), reference.Tile(1, 0, 64, 0, 6, 40)]

    def stored() -> NDArray[np.float32]:
        out = np.full((2, 72, 40), 0xFFFFFFFF, np.uint32).view(np.float32)
        out[1, :64], out[0, 64:70] = expected[:64], expected[64:]
        return out

    def check(out: NDArray[np.float32]) -> None:
        reference.check_output(out, expected, tolerance, tiles, gpu=3)

    check(stored())
    out = stored()
    out[0, 66, 7] += 0.01
    with pytest.raises(XStageError, match=r"GPU 3, tile in row 1 .*owner GPU 0\): element \(66, 7\)"
                                          r" is .*expected .*; 1 of 240"):
        check(out)
    out = stored()
    out[0, 0, 0] = 0.0
    with pytest.raises(XStageError, match=r"GPU 3 wrote element \(0, 0\) of GPU 0"):
        check(out)
    out = stored()
    out[1, 63, 39] = np.nan
    with pytest.raises(XStageError, match=r"element \(63, 39\) is NaN"):
        check(out)
