"""What a panel shows at one setting of its controls, in numbers and words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xstage_lab import analysis
from xstage_lab.analysis import Calibration, Comparison, Prediction
from xstage_lab.lab import style
from xstage_lab.record import SUMMARY_KEYS, Record
from xstage_lab.spec import MachineSpec
from xstage_lab.units import text

Values = dict[str, Any]

#: Keys of a summary in words.
NAMES = {"total_s": "total", "accepted_s": "accepted", "period_s": "period",
          "issue_s": "issue time", "stall_ratio": "stalled"}


class Point(NamedTuple):
    """A measurement and the settings it was made with."""

    values: Values
    record: Record


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A prediction, and the points measured so far.

    Attributes
    ----------
    values : dict
        The settings.
    comparison : Comparison or None
        With the last measurement of these very settings.
    points_at : callable
        Takes settings and the names of those that may differ, returns points.
    overlaid : list of Record
        Runs of the log to be drawn whatever their settings.
    """

    values: Values
    machine: MachineSpec
    prediction: Prediction
    comparison: Comparison | None
    points_at: Callable[..., list[Point]]
    overlaid: list[Record] = field(default_factory=list)

    @property
    def calibration(self) -> Calibration:
        """The law's parameters."""
        return self.prediction.calibration

    def points(self, *free: str, **fixed: Any) -> list[Point]:
        """Return the points measured with these settings, `free` ones at any value."""
        return self.points_at(self.values | fixed, *free)

    def records(self, *free: str, **fixed: Any) -> list[Record]:
        """Return the records of `points`, and of the overlaid runs that have the `fixed` ones."""
        return [point.record for point in self.points(*free, **fixed)] + [
            record for record in self.overlaid
            if all(record.parameters.get(name) == value for name, value in fixed.items())]

    def table(self) -> str:
        """Return the summary as an HTML table: predicted, its band if there is one, measured."""
        columns = {"": [NAMES[key] for key in SUMMARY_KEYS],
                   "PREDICTED": [text(key, self.prediction.summary[key]) for key in SUMMARY_KEYS]}
        band = [self._band(key) for key in SUMMARY_KEYS]
        if any(band):
            columns["band"] = band
        if self.comparison is not None:
            badge = str(self.comparison.provenance["measured"]["badge"])
            columns[badge] = [text(key, self.comparison.measured[key]) for key in SUMMARY_KEYS]
            columns["error"] = [analysis.error_text(key, self.comparison) for key in SUMMARY_KEYS]
        return style.table(list(columns), zip(*columns.values(), strict=True))

    def _band(self, key: str) -> str:
        low, high = self.prediction.low[key], self.prediction.high[key]
        return f"{text(key, low)} to {text(key, high)}" if high > low * 1.001 else ""

    def explanation(self) -> list[str]:
        """Return what the law says, and how far off it was."""
        found = self.comparison
        return analysis.explain(self.prediction) if found is None else found.explain

    def badges(self, shown: Iterable[Record]) -> list[tuple[str, str]]:
        """Return badges and what each stands for: the law, what is ASSUMED, records shown."""
        found = [("PREDICTED", f"{self.calibration.name}{self.compute_source()}")]
        if supposed := self.assumed():
            found.append(("ASSUMED", ", ".join(supposed)))
        return found + list(dict.fromkeys(
            (str(r.provenance["badge"]), str(r.provenance["source"])) for r in shown))

    def compute_source(self) -> str:
        """Return in words where the compute time comes from; empty where there is none."""
        return ""

    def badge_text(self, shown: Iterable[Record]) -> str:
        """Return the badges as one short line for a figure."""
        supposed = self.assumed()
        names = f"{len(supposed)} parameters" if len(supposed) > 2 else ", ".join(supposed)
        found = dict.fromkeys(["PREDICTED", *(str(r.provenance["badge"]) for r in shown)])
        return "; ".join([", ".join(found)] + [f"ASSUMED: {names}"] * bool(supposed))

    def assumed(self) -> list[str]:
        """Return the parameters that nobody measured, without their units."""
        return sorted(name.rsplit("_bytes", 1)[0].removesuffix("_s")
                      for name in self.calibration.assumed)
