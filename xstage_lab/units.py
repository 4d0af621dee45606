"""Unit suffixes of field names -> axis labels and display scales.

Inside the package every number is SI; microseconds, GB/s and KiB exist only where people read.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Display(NamedTuple):
    """How a quantity is shown: SI value times `scale`, then `unit`."""

    scale: float
    unit: str


# Longest suffix first: "_bytes_per_s" must not be taken for "_s".
_DISPLAYS: tuple[tuple[str, Display], ...] = (
    ("_flop_per_s", Display(1e-12, "TFLOP/s")),
    ("_bytes_per_s", Display(1e-9, "GB/s")),
    ("_bytes", Display(1 / 1024, "KiB")),
    ("_flop", Display(1e-9, "GFLOP")),
    ("_ratio", Display(100.0, "%")),
    ("_hz", Display(1e-6, "MHz")),
    ("_s", Display(1e6, "us")),
)


def display(name: str) -> Display:
    """Return how a field called `name` is shown, by its suffix.

    >>> display("accepted_s")
    Display(scale=1000000.0, unit='us')
    """
    for suffix, shown in _DISPLAYS:
        if name.endswith(suffix):
            return shown
    return Display(1.0, "")


def words(name: str) -> str:
    """Return what a field called `name` is, less its unit, as words.

    >>> words("law_wave_s")
    'law wave'
    """
    for suffix, _ in _DISPLAYS:
        if name.endswith(suffix):
            name = name.removesuffix(suffix)
            break
    return name.replace("_", " ")


def text(name: str, value: float | None, digits: int = 3) -> str:
    """Return `value` of field `name` as text with its unit; unknown values say so.

    >>> text("issue_s", 7.6e-7)
    '0.76 us'
    """
    if value is None or math.isnan(value):
        return "not known"
    shown = display(name)
    if math.isinf(value):
        return "unbounded"
    scaled = value * shown.scale
    if abs(scaled) < 1e-9:  # rounding left over from a difference, maybe with a sign
        scaled = 0.0
    if shown.unit == "KiB" and abs(scaled) >= 1024**2:
        return f"{scaled / 1024**2:.{digits}g} GiB"
    if shown.unit == "KiB" and abs(scaled) >= 1024:
        return f"{scaled / 1024:.{digits}g} MiB"
    if shown.unit == "us" and abs(scaled) >= 10_000:
        return f"{scaled / 1000:.{digits + 1}g} ms"
    plain = f"{scaled:.{digits}g}"
    if "e" in plain:
        plain = f"{scaled:,.0f}"
    return f"{plain} {shown.unit}".rstrip()
