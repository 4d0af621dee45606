"""The figures of the tune panel: one configuration, its neighbours, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xstage_lab import analysis, plots
from xstage_lab.analysis import Comparison
from xstage_lab.devices.recorded import published_gemm_rs
from xstage_lab.errors import XStageError
from xstage_lab.lab.picture import Picture, Values
from xstage_lab.record import Record
from xstage_lab.spec import FusedGemm, Tuning
from xstage_lab.units import text

TILES = (64, 128, 192, 256)
DEPTHS = range(1, 9)


@dataclass(frozen=True, kw_only=True)
class TunePicture(Picture):
    """What the figures show of one fused GEMM.

    Attributes
    ----------
    at : callable
        Takes settings and returns their picture.
    measured_t_mma_s : callable
        Takes changed settings and returns the tile's measured compute time, or None.
    comparisons : list of (Comparison, str)
        Every measurement of the panel beside its prediction, and what it was.
    """

    gemm: FusedGemm
    tuning: Tuning
    at: Callable[[Values], TunePicture]
    measured_t_mma_s: Callable[[Values], float | None]
    comparisons: list[tuple[Comparison, str]]

    def label(self) -> str:
        """Return the configuration in a few words."""
        g, t = self.gemm, self.tuning
        return (f"{g.m}×{g.n}×{g.k} on {g.n_gpus} {self.machine.name}, tile {t.tile_m}×{t.tile_n}, "
                f"depth {t.issue_depth}, {g.destinations}")

    def compute_source(self) -> str:
        """Return in words where a tile's compute time comes from."""
        if self.prediction.t_mma_source == "measured":
            return f", compute time of a {self.values['device']} run"
        return ", compute time from FLOP and memory rates"


#: Series by name: the settings that change, one after the other.
SERIES: dict[str, Callable[[TunePicture], list[Values]]] = {
    "issue depth": lambda _: [{"issue_depth": depth} for depth in DEPTHS],
    "tile": lambda _: [{"tile_m": m, "tile_n": n}
                       for m, n in ((64, 64), (64, 128), (128, 128), (128, 192), (128, 256),
                                    (192, 256), (256, 256))],
    "GPUs": lambda picture: [{"n_gpus": n} for n in range(1, min(picture.machine.max_gpus, 16) + 1)
                             if n & (n - 1) == 0],
    "k": lambda _: [{"k": k} for k in (256, 512, 1024, 2048, 4096, 8192, 16384)],
}


def times(plot: plots.TotalTimes, picture: TunePicture) -> list[Record]:
    """Draw predicted, measured and unfused total time."""
    found, shown = picture.prediction, _here(picture)
    measured = shown[0].summary["total_s"] if shown else math.nan
    plot.update(
        found.summary["total_s"], low_s=found.low["total_s"], high_s=found.high["total_s"],
        measured_s=measured, badge=str(shown[0].provenance["badge"]) if shown else "",
        unfused=found.unfused,
        bounds={f"{name}_s": found.terms[f"{name}_bound_s"]
                for name in ("compute", "issue", "drain")},
        badges=picture.badge_text(shown))
    return shown


def timeline(plot: plots.Timeline, picture: TunePicture) -> list[Record]:
    """Draw one SM and the backlog of the last overlaid run, else of the last measurement here."""
    shown = [record for record in picture.records()[-1:] if record.tiles is not None]
    plot.update(shown[0] if shown else None,
                capacity_bytes=picture.prediction.terms["capacity_bytes"],
                badges=picture.badge_text(shown) if shown else "Measure shows the run here")
    return shown


def tile_map(plot: plots.TileMap, picture: TunePicture) -> list[Record]:
    """Draw the predicted total over tile and depth, from measured compute times if there are."""
    m, n, depth = (a.ravel() for a in np.meshgrid(TILES, TILES, DEPTHS, indexing="ij"))
    t_mma = analysis.t_mma_roofline(picture.gemm, picture.machine, m, n, picture.tuning.n_ctas)
    for i, (tile_m, tile_n) in enumerate(zip(m.tolist(), n.tolist(), strict=True)):
        timed = picture.measured_t_mma_s({"tile_m": tile_m, "tile_n": tile_n})
        t_mma[i] = t_mma[i] if timed is None else timed
    found = analysis.predict_map(picture.gemm, picture.machine, picture.calibration, m, n, depth,
                                 picture.tuning, t_mma)
    limit = picture.machine.smem_per_cta_bytes
    reason = [f"needs {text('_bytes', needed)} of shared memory, {text('_bytes', limit)} allowed"
              if not fits else "" for needed, fits in
              zip(found.needed_bytes, found.feasible, strict=True)]
    here = [point for point in picture.points("tile_m", "tile_n", "issue_depth")
            if {point.values["tile_m"], point.values["tile_n"]} <= set(TILES)
            and point.values["issue_depth"] in DEPTHS]
    shown = [point.record for point in here]
    plot.update(m, n, depth, found.total_s, reason, {
        **{name: [point.values[name] for point in here]
           for name in ("tile_m", "tile_n", "issue_depth")},
        "total_s": [record.summary["total_s"] for record in shown],
        "badge": [str(record.provenance["badge"]) for record in shown],
    }, badges=picture.badge_text(shown))
    return shown


def total_curve(plot: plots.TotalCurve, picture: TunePicture) -> list[Record]:
    """Draw the total time along the chosen series, and the points measured on it."""
    name = picture.values["series"]
    series = SERIES[name](picture)
    columns: dict[str, list[float]] = {key: [] for key in ("total_s", "low_s", "high_s",
                                                           "unfused_s")}
    for changed in series:
        try:
            found = picture.at(picture.values | changed).prediction
        except XStageError:
            row = [math.nan] * 4
        else:
            row = [found.summary["total_s"], found.low["total_s"], found.high["total_s"],
                   found.unfused["total_s"]]
        for key, value in zip(columns, row, strict=True):
            columns[key].append(value)
    labels = [_setting(changed) for changed in series]
    runs = [(point.values, point.record) for point in picture.points(*series[0])]
    runs += [(record.parameters, record) for record in picture.overlaid]
    here = [(_setting({key: settings.get(key) for key in series[0]}), record)
            for settings, record in runs]
    here = [(label, record) for label, record in here if label in labels]
    shown = [record for _, record in here]
    plot.update({"setting": labels, **columns},
                {"setting": [label for label, _ in here],
                 "total_s": [record.summary["total_s"] for record in shown],
                 "badge": [str(record.provenance["badge"]) for record in shown]},
                setting=name, badges=picture.badge_text(shown))
    return shown


def residuals(plot: plots.Residuals, picture: TunePicture) -> list[Record]:
    """Draw the error of every prediction that was measured in this panel."""
    found = [comparison for comparison, _ in picture.comparisons]
    origins = [comparison.provenance["measured"] for comparison in found]
    plot.update(found, [str(origin["badge"]) for origin in origins],
                labels=[label for _, label in picture.comparisons],
                badges="; ".join([f"{len(found)} runs of this panel",
                                  *dict.fromkeys(str(origin["badge"]) for origin in origins)]))
    return []


def published(plot: plots.GemmReduceScatter, _picture: TunePicture) -> list[Record]:
    """Draw published GEMM + reduce-scatter times; R comes from the shortest K alone."""
    from xstage_lab.paper.gemm_rs import plain_forms
    records = published_gemm_rs()
    found = plain_forms(records)
    plot.update({"k": found.k, "gemm_s": found.gemm_s, "law_s": found.law_s,
                 "completion_s": found.completion_coupled_s},
                {"k": found.k, "gemm_s": found.gemm_s, "fused_s": found.fused_s,
                 "badge": [str(record.provenance["badge"]) for record in records]},
                badges=f"RECORDED; R = {text('_bytes_per_s', found.drain_bytes_per_s)} from "
                       f"K = {found.k[0]} alone")
    return records


def _here(picture: Picture) -> list[Record]:
    return [point.record for point in picture.points()[-1:]]


def _setting(changed: Values) -> str:
    return "×".join(str(value) for value in changed.values())
