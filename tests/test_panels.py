"""The panels without a browser: controls, redraws, measuring, stopping and exporting."""

from __future__ import annotations

import asyncio
import time

import pytest

from xstage_lab.errors import InvalidValue, UnknownName
from xstage_lab.lab import controls
from xstage_lab.lab.coalesce import Coalescer


def test_a_flood_of_changes_gives_few_redraws_and_ends_on_the_last():
    """100 changes a second for 2 s redraw rarely, and the last redraw sees the last value."""
    value, drawn = 0, []

    def redraw() -> None:
        time.sleep(0.05)  # a redraw that cannot keep up
        drawn.append(value)

    async def drag() -> None:
        nonlocal value
        ask = Coalescer(redraw)
        for value in range(1, 201):  # noqa: B007 - read by redraw
            ask()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)

    asyncio.run(drag())
    assert drawn[-1] == 200
    assert 2 <= len(drawn) <= 60


def test_a_change_made_while_redrawing_is_drawn():
    """A value that changes in the middle of a redraw gets a redraw of its own."""
    drawn: list[int] = []

    async def main() -> None:
        value = [1]

        def redraw() -> None:
            drawn.append(value[0])
            if value[0] == 1:
                value[0] = 2
                ask()

        ask = Coalescer(redraw)
        ask()
        await asyncio.sleep(0.2)

    asyncio.run(main())
    assert drawn == [1, 2]


def test_a_redraw_that_fails_does_not_block_the_next():
    """After an exception in a redraw, the next change redraws again."""
    calls: list[int] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def redraw() -> None:
            calls.append(1)
            raise ZeroDivisionError

        ask = Coalescer(redraw)
        for _ in range(2):
            ask()
            await asyncio.sleep(0.1)

    asyncio.run(main())
    assert len(calls) == 2


def test_without_a_loop_every_change_redraws_at_once():
    """In a script a change has been drawn when the assignment returns."""
    drawn: list[int] = []
    ask = Coalescer(lambda: drawn.append(1))
    ask()
    ask()
    assert len(drawn) == 2


def _controls() -> controls.Controls:
    return controls.Controls(
        n_producers=controls.whole("n_producers", "producers", 148, 1, 160),
        burst_bytes=controls.log("burst_bytes", "burst", 32 * 1024, 1, 1024),
        gap_s=controls.real("gap_s", "gap", 3e-6, 0.0, 20.0, 0.05),
        m=controls.field("m", "m", 4096),
        sync=controls.choice("sync", "sync", "free", ("free", "lockstep")))


def test_controls_show_units_and_give_si():
    """Widgets hold KiB and us, settings come out in bytes and seconds, counts as integers."""
    made = _controls()
    assert made["burst_bytes"].value == pytest.approx(32)
    assert made["gap_s"].value == pytest.approx(3)
    assert "KiB" in made["burst_bytes"].description
    assert "us" in made["gap_s"].description
    assert made.values() == {"n_producers": 148, "burst_bytes": 32768,
                             "gap_s": pytest.approx(3e-6), "m": 4096, "sync": "free"}


def test_values_beyond_a_slider_are_taken_as_they_are():
    """A setting outside its slider's range widens the slider and is not clamped."""
    made = _controls()
    wanted = {"n_producers": 5000, "burst_bytes": 2**24, "gap_s": 1e-3, "m": -7}
    made.set(**wanted)
    assert {name: made.values()[name] for name in wanted} == {
        **wanted, "gap_s": pytest.approx(1e-3)}


@pytest.mark.parametrize(("setting", "kind", "says"), [
    ({"n_producer": 1}, UnknownName, "n_producers"),
    ({"sync": "locked"}, UnknownName, "lockstep"),
    ({"gap_s": "3us"}, InvalidValue, "gap_s = '3us'"),
    ({"gap_s": float("nan")}, InvalidValue, "gap_s"),
    ({"n_producers": 1.5}, InvalidValue, "whole numbers"),
    ({"burst_bytes": 0}, InvalidValue, "above 0"),
])
def test_bad_settings_are_named(setting, kind, says):
    """A setting that is unknown or no number is refused, with what would be right."""
    with pytest.raises(kind, match=says):
        _controls().set(**setting)
