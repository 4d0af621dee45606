"""The figures of the Ulysses panel: its modes, one SM, and what is hidden along a setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xstage_lab import plots
from xstage_lab.analysis.attention import hidden_ratio
from xstage_lab.analysis.ulysses_step import UlyssesStep, losing_per_peer_s
from xstage_lab.errors import XStageError
from xstage_lab.lab.picture import Picture, Point, Values
from xstage_lab.plots.ulysses import HiddenCurve
from xstage_lab.record import Record
from xstage_lab.spec import Tuning, UlyssesAttention
from xstage_lab.spec.attention import MODES
from xstage_lab.units import text

SEQUENCES = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
COSTS = ("sync_s", "per_peer_s", "launch_s")


@dataclass(frozen=True, kw_only=True)
class UlyssesPicture(Picture):
    """What the figures show of one attention.

    Attributes
    ----------
    step : UlyssesStep
        The attention with its other all-to-alls.
    at : callable
        Takes settings and returns their picture.
    alone_s : callable
        Takes settings and returns the measured time of the attention alone, NaN where there is
        none.
    """

    attention: UlyssesAttention
    tuning: Tuning
    step: UlyssesStep
    at: Callable[[Values], UlyssesPicture]
    alone_s: Callable[[Values], float]

    def compute_source(self) -> str:
        """Return in words where a tile's compute time comes from."""
        if self.prediction.t_mma_source == "measured":
            return f", compute time of a {self.values['device']} run"
        return ", compute time from the FLOP rate"

    def assumed(self) -> list[str]:
        """Return the parameters that nobody measured, those of the step included."""
        return [*super().assumed(), *(name.removesuffix("_s") for name in COSTS)]

    def explanation(self) -> list[str]:
        """Return what the law says of the attention, and what the step around it costs."""
        return [*super().explanation(), *self._step_words()]

    def hidden_measured_ratio(self, point: Point) -> float:
        """Return the hidden share of a measured point; NaN until its other runs are there."""
        serial = self.points_at(point.values | {"mode": "serial"})
        if not serial:
            return math.nan
        return hidden_ratio(serial[-1].record.summary["total_s"], point.record.summary["total_s"],
                            self.alone_s(point.values))

    def _step_words(self) -> list[str]:
        step, n_gpus = self.step, self.attention.n_gpus
        if n_gpus == 1:
            return []
        words = (f"The whole step takes {text('_s', step.total_s)}: inputs "
                 f"{text('_s', step.input_s)}, attention {text('_s', step.attention_s)}, output "
                 f"{text('_s', step.output_s)}, fixed costs {text('_s', step.fixed_s)}.")
        fewer = max(n for n in range(1, n_gpus) if self.attention.heads % n == 0)
        before = self.at(self.values | {"n_gpus": fewer}).step
        gain = before.total_s / step.total_s
        if gain <= 1.0:
            return [f"{words} {fewer} GPUs are faster, {text('_s', before.total_s)}."]
        limit = text("_s", losing_per_peer_s(before, step, n_gpus - fewer))
        return [f"{words} That is {gain:.2f} times as fast as on {fewer} GPUs, and slower once an "
                f"all-to-all costs {limit} more for each further GPU."]


def gpu_counts(picture: UlyssesPicture) -> list[Values]:
    """Return GPU counts to compare: all of a small node, powers of two of a large one."""
    most = picture.machine.max_gpus
    counts = range(1, most + 1) if most <= 8 else [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most]
    return [{"n_gpus": n} for n in counts]


def sequences(picture: UlyssesPicture) -> list[Values]:
    """Return sequence lengths to compare, the one of these settings among them."""
    return [{"sequence": n} for n in sorted({*SEQUENCES, picture.attention.sequence})]


def modes(plot: plots.ModeTimes, picture: UlyssesPicture) -> list[Record]:
    """Draw each mode of these settings, predicted and measured."""
    columns: dict[str, list[Any]] = {name: [] for name in ("row", "total_s", "low_s", "high_s",
                                                            "reason")}
    points: list[tuple[str, Record]] = []
    for mode in MODES:
        values = picture.values | {"mode": mode}
        points += [(mode, point.record) for point in picture.points_at(values)[-1:]]
        try:
            found = picture.at(values).prediction
        except XStageError as error:
            row = (mode, *[math.nan] * 3, str(error))
        else:
            row = (mode, *(each["total_s"] for each in (found.summary, found.low, found.high)), "")
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    unfused = picture.prediction.unfused["total_s"]
    for column, value in zip(columns.values(), (plots.ModeTimes.ROWS[0], *[unfused] * 3, ""),
                             strict=True):
        column.append(value)
    shown = [record for _, record in points]
    plot.update(columns, picture.prediction.terms["compute_only_s"],
                {"row": [mode for mode, _ in points],
                 "total_s": [record.summary["total_s"] for record in shown],
                 "badge": [str(record.provenance["badge"]) for record in shown]},
                badges=picture.badge_text(shown))
    return shown


def timeline(plot: plots.Timeline, picture: UlyssesPicture) -> list[Record]:
    """Draw one SM and the backlog of the last overlaid run, else of the last measurement here."""
    shown = [record for record in picture.records()[-1:] if record.tiles is not None]
    plot.update(shown[0] if shown else None, sm=picture.values["sm"],
                capacity_bytes=picture.prediction.terms["capacity_bytes"],
                badges=picture.badge_text(shown) if shown else "Measure shows the run here")
    return shown


def along(series: Callable[[UlyssesPicture], list[Values]]
          ) -> Callable[[HiddenCurve, UlyssesPicture], list[Record]]:
    """Return what draws times and hidden share along a series."""
    def draw(plot: HiddenCurve, picture: UlyssesPicture) -> list[Record]:
        changes = series(picture)
        setting = next(iter(changes[0]))
        names = ("step_s", "step_unfused_s", "total_s", "compute_only_s", "hidden_ratio",
                 "idle_ratio")
        rows, reasons = [], []
        for changed in changes:
            try:
                rows.append(_row(picture.at(picture.values | changed)))
                reasons.append("")
            except XStageError as error:
                rows.append((math.nan,) * len(names))
                reasons.append(str(error))
        labels = [str(changed[setting]) for changed in changes]
        points = [point for point in picture.points(setting)
                  if str(point.values[setting]) in labels]
        shown = [point.record for point in points]
        over = [record for record in picture.overlaid
                if str(record.parameters.get(setting)) in labels]
        plot.update({"setting": labels, "reason": reasons,
                     **dict(zip(names, zip(*rows, strict=True), strict=True))},
                    _measured(setting, [*shown, *over], [
                        *map(picture.hidden_measured_ratio, points), *[math.nan] * len(over)]),
                    badges=picture.badge_text([*shown, *over]))
        return [*shown, *over]

    return draw


def _row(picture: UlyssesPicture) -> tuple[float, ...]:
    found, step = picture.prediction, picture.step
    return (step.total_s, step.unfused_s, found.summary["total_s"],
            *(found.terms[name] for name in ("compute_only_s", "hidden_ratio", "idle_ratio")))


def _measured(setting: str, records: Sequence[Record],
              hidden: Sequence[float]) -> dict[str, list[str] | list[float]]:
    return {"setting": [str(record.parameters[setting]) for record in records],
            "total_s": [record.summary["total_s"] for record in records],
            "hidden_ratio": list(hidden),
            "badge": [str(record.provenance["badge"]) for record in records]}
