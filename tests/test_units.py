"""How quantities are shown, from the suffixes of their names."""

from __future__ import annotations

import math

import pytest

from xstage_lab import units


@pytest.mark.parametrize(("name", "value", "shown"), [
    ("accepted_s", 7.6e-7, 0.76),
    ("drain_bytes_per_s", 717e9, 717.0),
    ("capacity_bytes", 4.25 * 2**20, 4352.0),
    ("bf16_flop_per_s", 1.745e15, 1745.0),
    ("stall_ratio", 0.25, 25.0),
    ("clock_hz", 1.965e9, 1965.0),
    ("tile_flop", 2e9, 2.0),
    ("n_sms", 148.0, 148.0),
])
def test_scale_follows_the_suffix(name: str, value: float, shown: float) -> None:
    """A value times its display scale is what people read on an axis."""
    assert value * units.display(name).scale == pytest.approx(shown)


def test_rates_are_not_taken_for_times() -> None:
    """Suffixes that end alike keep their own units."""
    names = ("x_s", "x_bytes_per_s", "x_flop_per_s", "x_bytes", "x_flop", "x_hz", "x_ratio", "n_x")
    shown = [units.display(name).unit for name in names]
    assert shown == ["us", "GB/s", "TFLOP/s", "KiB", "GFLOP", "MHz", "%", ""]


@pytest.mark.parametrize(("name", "value", "text"), [
    ("issue_s", 7.6e-7, "0.76 us"),
    ("total_s", 0.0, "0 us"),
    ("total_s", 0.0123, "12.3 ms"),
    ("total_s", 1.5e-3, "1,500 us"),
    ("drain_bytes_per_s", 717e9, "717 GB/s"),
    ("burst_bytes", 32 * 1024, "32 KiB"),
    ("capacity_bytes", 4.25 * 2**20, "4.25 MiB"),
    ("capacity_bytes", math.inf, "unbounded"),
    ("capacity_bytes", math.nan, "not known"),
    ("capacity_bytes", None, "not known"),
    ("n_waves", 12.0, "12"),
])
def test_text_reads_as_people_write(name: str, value: float | None, text: str) -> None:
    """Numbers are printed with their unit, rounded, and what is unknown says so."""
    assert units.text(name, value) == text
