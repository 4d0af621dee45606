"""MoE layers on the host device: both layers right, in either order, and what the kernel lacks."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest

from xstage_lab.devices.host import HostDevice
from xstage_lab.errors import InvalidValue, XStageError
from xstage_lab.reference import WrongResult
from xstage_lab.schedule import LINEAR_2, Program, build
from xstage_lab.spec import MoELayer, Tuning

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

LAYER = MoELayer(tokens=50, hidden=88, intermediate=40, experts=4, top_k=2, n_gpus=2,
                 routing="zipf:0.7", dtype="bf16")  # ragged everywhere, experts uneven
TILE = Tuning(tile_m=64, tile_n=64, tile_k=32, n_stages=2)


def program(device: HostDevice, depth: int = 2, **fields: Any) -> Program:
    return build(dataclasses.replace(LAYER, **fields), device.machine,
                 dataclasses.replace(TILE, issue_depth=depth))


@pytest.mark.parametrize("order", ["wave", "interleaved"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("store_path", ["registers", "bulk"])
def test_both_layers_come_out_right(order: str, depth: int, store_path: str) -> None:
    """Every tile of both layers is right in either order, and its flag raised at its owner."""
    device = HostDevice(n_sms=3, store_path=store_path, signal="release")
    record = device.measure(program(device, depth, order=order), seed=depth)
    assert record.summary["remote_bytes"] > 0
    assert record.parameters["order"] == order


def test_linear_2_waits_for_linear_1() -> None:
    """Linear-2 that does not wait for its Linear-1 is found out."""
    device = HostDevice(n_sms=2)
    given = program(device, order="interleaved")
    hasty = []
    for rows in given.tasks:
        first = rows[::-1].copy()  # Linear-2 comes first
        first["waits_for"], first["wait_count"] = -1, 0
        assert first[0]["kind"] == LINEAR_2
        hasty.append(first)
    with pytest.raises(WrongResult):
        device.measure(dataclasses.replace(given, tasks=tuple(hasty)), seed=0)


def test_an_expert_without_rows_has_no_tiles() -> None:
    """A GPU whose experts are idle stores nothing, and the others' results stand."""
    device = HostDevice(n_sms=2)
    given = program(device, routing=(100, 100, 0, 0))
    assert given.tasks[1].size == given.remote_bytes(1) == 0
    assert device.measure(given, seed=3).summary["remote_bytes"] == given.remote_bytes(0) / 2


@pytest.mark.parametrize(("fields", "told"), [
    ({"dtype": "fp8"}, "fp8"), ({"experts": 18}, "9 experts"), ({"out_dtype": "fp32"}, "bf16"),
    ({"tokens": 20_000, "hidden": 4096}, "allowed"),
])
def test_layers_the_kernel_lacks_are_refused(fields: dict[str, Any], told: str) -> None:
    """What the kernel cannot do is said before anything runs."""
    device = HostDevice()
    with pytest.raises((XStageError, InvalidValue), match=told):
        device.measure(program(device, **fields))
