"""Specs: what may be asked for, and what is said where it may not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import JUNK, MIB, gemms, machine_of, tunings

from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import Infeasible, InvalidValue, UnknownFact, UnknownName, XStageError
from xstage_lab.schedule import build
from xstage_lab.spec import (
    BurstTrain,
    FusedGemm,
    LinkSpec,
    MachineSpec,
    MoELayer,
    Tuning,
    check_feasible,
)

TRAIN = BurstTrain(n_producers=4, burst_bytes=4096, gap_s=1e-6)
GEMM = FusedGemm(m=512, n=512, k=512)
MACHINE = machine_of()

COUNTS = [(TRAIN, "n_producers"), (TRAIN, "burst_bytes"), (TRAIN, "n_bursts"), (TRAIN, "n_gpus"),
          (GEMM, "m"), (GEMM, "n"), (GEMM, "k"), (GEMM, "n_gpus"),
          (Tuning(), "tile_m"), (Tuning(), "tile_n"), (Tuning(), "tile_k"),
          (Tuning(), "issue_depth"), (Tuning(), "n_stages"), (Tuning(n_ctas=4), "n_ctas"),
          (MACHINE, "n_sms"), (MACHINE, "max_gpus")]
AMOUNTS = [(MACHINE, field) for field in (
    "clock_hz", "smem_per_cta_bytes", "bf16_flop_per_s", "fp8_flop_per_s", "hbm_bytes_per_s",
    "l2_bytes")]
LINK_FIELDS = [field.name for field in dataclasses.fields(LinkSpec)
               if field.name.endswith(("_s", "_bytes"))]
CHOICES = [(TRAIN, "sync"), (GEMM, "dtype"), (GEMM, "out_dtype"), (MACHINE.link, "topology"),
           (GEMM, "destinations")]

junk_counts = st.one_of(
    st.sampled_from([v for v in JUNK if v is not None]),
    st.integers(max_value=0),
    st.floats().filter(lambda x: not (x >= 1 and x.is_integer())),
    st.text(max_size=5),
)


@pytest.mark.parametrize(("spec", "field"), COUNTS)
@settings(max_examples=25)
@given(value=junk_counts)
def test_bad_counts_are_refused(spec: object, field: str, value: object) -> None:
    """A count that is no positive whole number of sensible size is refused, naming field, value
    and range."""
    with pytest.raises(InvalidValue) as raised:
        dataclasses.replace(spec, **{field: value})
    message = str(raised.value)
    assert field in message
    assert repr(value) in message
    assert "whole numbers from 1" in message


@pytest.mark.parametrize(("spec", "field"), AMOUNTS)
@pytest.mark.parametrize("value", [0.0, *(v for v in JUNK if v == v and v != 10**30)], ids=repr)
def test_bad_amounts_are_refused(spec: object, field: str, value: object) -> None:
    """A machine's rates and sizes are positive numbers, or NaN where nobody knows them."""
    with pytest.raises(InvalidValue, match=field):
        dataclasses.replace(spec, **{field: value})
    assert math.isnan(getattr(dataclasses.replace(spec, **{field: math.nan}), field))


@pytest.mark.parametrize("field", LINK_FIELDS)
@pytest.mark.parametrize("value", [-1.0, -math.inf, "many", "", None, True, [1]], ids=repr)
def test_bad_link_fields_are_refused(field: str, value: object) -> None:
    """A link's quantities are positive numbers; the message says which link, field and unit."""
    with pytest.raises(InvalidValue) as raised:
        LinkSpec(name="my link", **{field: value})
    unit = "B/s" if field.endswith("per_s") else "B" if field.endswith("_bytes") else "s"
    assert f"my link: {field} = {value!r} {unit} is not possible" in str(raised.value)


@pytest.mark.parametrize("field", LINK_FIELDS)
def test_only_a_latency_may_be_zero(field: str) -> None:
    """A rate or capacity of 0 is refused, a latency of 0 is not; NaN and inf stay what they are."""
    if field.endswith("latency_s"):
        assert getattr(LinkSpec(name="x", **{field: 0.0}), field) == 0.0
    else:
        with pytest.raises(InvalidValue, match=field):
            LinkSpec(name="x", **{field: 0.0})
    assert math.isnan(getattr(LinkSpec(name="x"), field))
    assert getattr(LinkSpec(name="x", **{field: math.inf}), field) == math.inf


@pytest.mark.parametrize("value", [-1e-9, 11.0, math.nan, math.inf, "long", None, True], ids=repr)
def test_bad_gaps_are_refused(value: object) -> None:
    """A gap is a time from 0 to 10 seconds."""
    with pytest.raises(InvalidValue, match=r"gap_s .* s is not possible; allowed: from 0 to 10 s"):
        dataclasses.replace(TRAIN, gap_s=value)


@pytest.mark.parametrize(("spec", "field"), CHOICES)
@pytest.mark.parametrize("value", JUNK, ids=repr)
def test_bad_choices_are_refused(spec: object, field: str, value: object) -> None:
    """A name that is no choice is refused, saying which there are."""
    with pytest.raises(UnknownName, match=r"Known: \w+"):
        dataclasses.replace(spec, **{field: value})


@pytest.mark.parametrize("share", ["", "SHARE", "-0.1", "1.5", "nan", "inf", "0,4", "40%"])
def test_bad_hot_shares_are_refused(share: str) -> None:
    """A hot share outside 0 to 1, or that is no number, is refused with an example."""
    with pytest.raises(InvalidValue, match=r"For example hot:0\.4"):
        dataclasses.replace(GEMM, destinations=f"hot:{share}")


def test_misspelt_destinations_name_the_nearest() -> None:
    """A misspelt destination is answered with the one that was meant."""
    with pytest.raises(UnknownName, match="did you mean row-owner"):
        dataclasses.replace(GEMM, destinations="row_owner")


@given(gemm=gemms())
def test_totals_of_a_gemm(gemm: FusedGemm) -> None:
    """FLOPs are 2 m n k and output bytes m n times the element size."""
    assert gemm.flop == 2 * gemm.m * gemm.n * gemm.k
    assert gemm.store_bytes == gemm.m * gemm.n * {"bf16": 2, "fp32": 4}[gemm.out_dtype]
    hot = gemm.destinations.startswith("hot:")
    assert math.isnan(gemm.hot_share_ratio) != hot


def test_volume_of_a_burst() -> None:
    """V is K times B."""
    assert BurstTrain(n_producers=148, burst_bytes=32768, gap_s=0.0).volume_bytes == 4849664


@given(gemm=gemms(), tuning=tunings())
def test_shared_memory_counts_slots_and_stages(gemm: FusedGemm, tuning: Tuning) -> None:
    """Depth D stages D - 1 output tiles, beside the operand stages."""
    out = {"bf16": 2, "fp32": 4}[gemm.out_dtype]
    operand = {"bf16": 2, "fp8": 1}[gemm.dtype]
    deeper = dataclasses.replace(tuning, issue_depth=tuning.issue_depth + 1)
    first = dataclasses.replace(tuning, issue_depth=1)
    slot = deeper.smem_bytes(gemm) - tuning.smem_bytes(gemm)
    assert slot == tuning.tile_m * tuning.tile_n * out
    assert first.smem_bytes(gemm) == (
        tuning.n_stages * tuning.tile_k * (tuning.tile_m + tuning.tile_n) * operand)


def test_too_much_shared_memory_is_infeasible() -> None:
    """Tile x depth over shared memory names need and limit; exactly at the limit it runs."""
    gemm, tuning = GEMM, Tuning(tile_m=128, tile_n=256, issue_depth=3)
    needed = tuning.smem_bytes(gemm)
    assert needed == 272 * 1024
    fits = dataclasses.replace(MACHINE, smem_per_cta_bytes=float(needed))
    small = dataclasses.replace(MACHINE, smem_per_cta_bytes=227 * 1024.0)
    check_feasible(gemm, fits, tuning)
    check_feasible(gemm, MACHINE, tuning)  # nobody knows the limit: it excludes nothing
    with pytest.raises(Infeasible) as raised:
        check_feasible(gemm, small, tuning)
    for part in ("128x256x64", "issue_depth = 3", "272 KiB", "227 KiB", "smaller"):
        assert part in str(raised.value)


@pytest.mark.parametrize(("workload", "tuning", "parts"), [
    (dataclasses.replace(GEMM, n_gpus=9), None, ("n_gpus", "9", "1 to 8")),
    (dataclasses.replace(TRAIN, n_gpus=9), None, ("n_gpus", "9", "1 to 8")),
    (dataclasses.replace(TRAIN, n_producers=17), None, ("n_producers", "17", "1 to 16")),
    (GEMM, Tuning(n_ctas=17), ("n_ctas", "17", "1 to 16", "co-resident")),
])
def test_more_than_the_machine_has(
    workload: BurstTrain | FusedGemm, tuning: Tuning | None, parts: tuple[str, ...]
) -> None:
    """GPUs beyond the node and CTAs beyond the SMs are refused, never clamped."""
    with pytest.raises(InvalidValue) as raised:
        check_feasible(workload, MACHINE, tuning)
    assert all(part in str(raised.value) for part in parts)


def test_unknown_compute_rate_is_told() -> None:
    """A machine without a FLOP rate says so where one is needed, and what to do."""
    machine = MachineSpec(name="mystery", n_sms=4, max_gpus=2, link=MACHINE.link)
    with pytest.raises(UnknownFact, match="bf16_flop_per_s of mystery is not known"):
        machine.flop_per_s("bf16")
    assert MACHINE.flop_per_s("fp8") == 2 * MACHINE.flop_per_s("bf16")


def test_changed_link_fields_become_assumed() -> None:
    """What somebody overrides on a link is ASSUMED from then on; the original is untouched."""
    link = dataclasses.replace(MACHINE.link, assumed=frozenset({"credit_bytes"}))
    changed = link.replace(path_capacity_bytes=2.0 * MIB, source="me")
    assert changed.assumed == {"credit_bytes", "path_capacity_bytes"}
    assert (changed.path_capacity_bytes, link.path_capacity_bytes) == (2 * MIB, MIB)


@pytest.mark.parametrize(("topology", "max_gpus", "fewest"), [
    ("switch", 8, 2), ("switch", 1, 1), ("full mesh", 8, 8), ("host bridge", 2, 2),
])
def test_gpus_that_see_the_whole_rate(topology: str, max_gpus: int, fewest: int) -> None:
    """Behind a switch one peer takes the whole rate; in a full mesh it takes all peers."""
    assert machine_of(max_gpus=max_gpus, topology=topology).full_rate_gpus == fewest


@pytest.mark.parametrize("number", [float, np.int64])
def test_whole_numbers_of_any_type_work(number: type, tmp_path) -> None:
    """A count may come from an array or as 4.0: it runs, and its record can be saved."""
    train = BurstTrain(n_producers=number(4), burst_bytes=number(4096), gap_s=1e-6,
                       n_bursts=number(3), n_gpus=number(2))
    gemm = FusedGemm(m=number(256), n=number(256), k=number(64), n_gpus=number(2))
    tuning = Tuning(tile_m=number(64), issue_depth=number(2), n_ctas=number(4))
    device = SimulatedDevice(MACHINE)
    device.measure(build(train, MACHINE)).save(tmp_path / "train.npz")
    device.measure(build(gemm, MACHINE, tuning)).save(tmp_path / "gemm.npz")


@given(spec=st.sampled_from([TRAIN, GEMM, Tuning()]), data=st.data())
def test_anything_is_taken_or_refused_in_words(spec: object, data: st.DataObject) -> None:
    """Whatever is put into a field, the spec is made or an XStageError says why not."""
    names = [f.name for f in dataclasses.fields(spec) if f.name != "destinations"]
    field = data.draw(st.sampled_from(names))
    value = data.draw(st.one_of(st.sampled_from(JUNK), st.integers(), st.floats(), st.text(),
                                st.binary(), st.complex_numbers(), st.lists(st.integers())))
    message = field
    try:
        dataclasses.replace(spec, **{field: value})
    except XStageError as error:
        message = str(error)
    assert field in message


def test_balanced_routing_is_the_same_on_every_gpu() -> None:
    """Even one token's few rows are spread over the GPUs, and none is lost."""
    for tokens in (1, 3, 64, 1000):
        moe = MoELayer(tokens=tokens, hidden=64, intermediate=64, experts=48, top_k=5)
        held = moe.expert_rows.reshape(moe.n_gpus, -1)
        assert (held == held[0]).all()
        assert held.sum() == tokens * moe.n_gpus * moe.top_k
        assert np.ptp(moe.expert_rows) <= 1
