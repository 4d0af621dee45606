"""Errors: each says what was wrong, what would be right, and what to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import JUNK

from xstage_lab import errors
from xstage_lab.errors import InvalidValue, UnknownName, XStageError, require_choice, require_number


def test_every_error_is_one_of_ours_and_a_value_error() -> None:
    """Whoever catches XStageError, or only ValueError, catches all of them."""
    classes = [each for each in vars(errors).values()
               if isinstance(each, type) and issubclass(each, Exception)]
    assert len(classes) > 6
    assert all(issubclass(each, XStageError) and issubclass(each, ValueError) for each in classes)


def test_invalid_value_names_everything() -> None:
    """The message of a bad value holds field, value, unit, allowed range and remedy."""
    with pytest.raises(InvalidValue) as raised:
        require_number("gap_s", -3.5, low=0.0, high=10.0, unit="s", remedy="Take a longer gap.")
    for part in ("gap_s", "-3.5", " s", "from 0 to 10", "Take a longer gap."):
        assert part in str(raised.value)


@given(value=st.floats(), low=st.floats(-1e300, 1e300), width=st.floats(0, 1e300))
def test_number_is_accepted_just_when_in_range(value: float, low: float, width: float) -> None:
    """A number passes if and only if it is finite and within the bounds, both included."""
    good = math.isfinite(value) and low <= value <= low + width
    if good:
        require_number("x", value, low=low, high=low + width)
        if value == low:
            with pytest.raises(InvalidValue):
                require_number("x", value, low=low, high=low + width, open_low=True)
    else:
        with pytest.raises(InvalidValue):
            require_number("x", value, low=low, high=low + width)


@given(value=st.one_of(st.integers(-1000, 1000), st.floats(-1000, 1000)))
def test_counts_are_whole_numbers(value: float) -> None:
    """Where a count is wanted, a fraction is refused and a whole number is not."""
    if value == int(value):
        require_number("n", value, integer=True)
    else:
        with pytest.raises(InvalidValue, match="whole numbers"):
            require_number("n", value, integer=True)


@pytest.mark.parametrize("value", [*(v for v in JUNK if v not in (-1, 10**30)), b"3", 3j,
                                   np.True_, np.array([3.0])], ids=repr)
def test_junk_is_no_number(value: object) -> None:
    """Text, nothing, truth values, lists, NaN and infinity are no numbers, whatever the range."""
    with pytest.raises(InvalidValue):
        require_number("x", value)


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(3), np.float64(2.0), 7], ids=repr)
def test_numpy_numbers_are_numbers(value: object) -> None:
    """Scalars that come out of arrays are as good as Python's own."""
    require_number("x", value, low=0.0)


def test_unknown_name_suggests_the_nearest() -> None:
    """A misspelt name is answered with the names nearest to it, whatever their case."""
    with pytest.raises(UnknownName, match="did you mean round-robin") as raised:
        require_choice("destinations", "Round_Robin", ("round-robin", "row-owner"))
    assert "Known: round-robin, row-owner" in str(raised.value)
    with pytest.raises(UnknownName) as raised:
        require_choice("destinations", "zzz", ("round-robin", "row-owner"))
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_is_no_choice(junk: object) -> None:
    """Anything that is not one of the choices is refused, of whatever type."""
    with pytest.raises(UnknownName):
        require_choice("sync", junk, ("free", "lockstep"))
