"""The panel of notebook 03: which tile, which depth, how many GPUs, and whether to fuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as w

from xstage_lab import analysis, plots
from xstage_lab.analysis import Choice, Space
from xstage_lab.devices.base import Device
from xstage_lab.devices.recorded import RecordedDevice, published_gemm_rs
from xstage_lab.errors import NotMeasured, XStageError
from xstage_lab.lab import controls
from xstage_lab.lab import tune_figures as draw
from xstage_lab.lab.controls import Controls, section
from xstage_lab.lab.device import device_controls, follow_device, maker, not_offered
from xstage_lab.lab.machine import (
    calibration_of,
    chosen_machine,
    machine_controls,
    path_fields,
    show_published,
)
from xstage_lab.lab.panel import Planned, Tab
from xstage_lab.lab.picture import Point, Values
from xstage_lab.lab.search import Asked, SearchingPanel
from xstage_lab.lab.tune_figures import SERIES, TunePicture
from xstage_lab.record import Record
from xstage_lab.schedule import build
from xstage_lab.spec import FusedGemm, Tuning

_TUNING = ("tile_m", "tile_n", "tile_k", "issue_depth", "n_stages")
_GEMM = ("m", "n", "k", "n_gpus", "destinations", "out_dtype")
_DESTINATIONS = ("round-robin", "row-owner", "row-owner-unrotated", "hot:0.25", "hot:0.5")
_PUBLISHED = {"m": 32768, "n": 32768, "n_gpus": 8, "destinations": "row-owner"}
#: Shapes of each GPU's GEMM by name, and what else belongs to a published one.
SHAPES: dict[str, Values] = {
    "8192 × 8192 × 4096": {"m": 8192, "n": 8192, "k": 4096},
    "8192 × 7168 × 2048": {"m": 8192, "n": 7168, "k": 2048},
    "4096 × 16384 × 8192": {"m": 4096, "n": 16384, "k": 8192},
    **{f"GEMM + RS, K = {k}": _PUBLISHED | {"k": k} for k in (512, 1024, 2048, 4096, 8192)},
}


class Tune(SearchingPanel):
    """Choose tile, depth, GPU count and destinations of a fused GEMM; see what binds it.

    Sweep varies what `series` says; Find the best searches tile and depth. Before a tile's first
    measurement its compute time is measured with stores off, and predictions use it from then on.

    Parameters
    ----------
    **settings
        Any control by name, SI: `device`, `records`, `machine`, `m`, `n`, `k`, `n_gpus`,
        `destinations`, `out_dtype`, `tile_m`, `tile_n`, `tile_k`, `issue_depth`, `n_stages`,
        `series`; and `drain_bytes_per_s`, `capacity_bytes`, `per_sm_bytes_per_s`,
        `issue_latency_s` in place of what is published of the machine.

    Raises
    ------
    UnknownName, InvalidValue
        If a setting is unknown, or no number where one is needed.
    """

    workload = FusedGemm.__name__
    sweep_figure, search_figure = "Series", "Tile × depth"

    def __init__(self, **settings: Any) -> None:
        machine = machine_controls(settings.get("machine", "B200-SXM"))
        made = machine | device_controls() | _gemm_controls() | tuning_controls() | {
            "series": controls.choice("series", "sweep over", "issue depth", SERIES,
                                      "what Sweep varies, and the axis of the figure Series"),
        }
        show_published(machine)
        machine["machine"].observe(lambda _: show_published(machine), names="value")
        follow_device(made)
        #: Compute times measured with stores off, by what they depend on.
        self.t_mma_s: dict[tuple[Any, ...], float] = {}
        self._comparisons: list[tuple[analysis.Comparison, str]] = []
        self.shape = controls.choice("shape", "shape", controls.OTHER,
                                     [*SHAPES, controls.OTHER])
        super().__init__(
            Controls(**made),
            [section("tile and staging"), *(made[name] for name in _TUNING),
             section("GEMM of each GPU"), self.shape, *(made[name] for name in _GEMM),
             section("device"), made["device"], not_offered(), made["records"], made["series"],
             made["machine"], path_fields(made)],
            {"Times": Tab(plots.TotalTimes(), draw.times),
             "One SM": Tab(plots.Timeline(), draw.timeline),
             "Tile × depth": Tab(plots.TileMap(), draw.tile_map),
             "Series": Tab(plots.TotalCurve(), draw.total_curve),
             "Residuals": Tab(plots.Residuals(), draw.residuals),
             "Published": Tab(plots.GemmReduceScatter(), draw.published)},
            settings)
        controls.tie_names(self.shape, self.controls, SHAPES)

    def picture(self, values: Values) -> TunePicture:
        """Predict the fused GEMM of `values`."""
        machine = chosen_machine(values)
        gemm = FusedGemm(**{name: values[name] for name in _GEMM})
        tuning = Tuning(**{name: values[name] for name in _TUNING})
        prediction = analysis.predict(gemm, machine, calibration_of(machine, machine.n_sms),
                                      tuning, self._compute_s(values, machine.n_sms))
        here = self.points_at(values)
        comparison = analysis.compare(prediction, here[-1].record) if here else None
        return TunePicture(values=values, machine=machine, gemm=gemm, tuning=tuning,
                           prediction=prediction, comparison=comparison,
                           points_at=self.points_at, overlaid=self.overlaid,
                           at=self.picture,
                           measured_t_mma_s=lambda changed: self._compute_s(
                               values | changed, machine.n_sms),
                           comparisons=self._comparisons)

    def _compute_s(self, values: Values, n_sms: int) -> float | None:
        """Compute time of a tile with stores off: as measured here, or as others published it."""
        key = _compute_key(values)
        if key in self.t_mma_s or values["device"] != "recorded" or values["records"]:
            return self.t_mma_s.get(key)
        n_tiles = -(-values["m"] // values["tile_m"]) * -(-values["n"] // values["tile_n"])
        alone = (r.summary["unfused_gemm_s"] for r in published_gemm_rs()
                 if all(r.parameters[name] == values[name] for name in ("m", "n", "k"))
                 and r.provenance["machine"] == values["machine"])
        return next((found / -(-n_tiles // n_sms) for found in alone), None)

    def points_at(self, values: Values, *free: str) -> list[Point]:
        """Return the points measured with `values`, on whichever device."""
        return super().points_at(values, *free, "device", "records", "series")

    def device(self, values: Values) -> Callable[[], Device]:
        """Return the chosen device."""
        return maker(values["device"], chosen_machine(values),
                     values["records"] or published_gemm_rs())

    def plan_measure(self, values: Values) -> Iterator[Planned]:
        """Plan one run, and the compute-only run before it where its tile was not timed yet."""
        yield from self._plan([values])

    def plan_sweep(self, values: Values) -> Iterator[Planned]:
        """Plan the runs of a series that the machine can run."""
        series = SERIES[values["series"]](self.picture(values))
        if values["device"] == "recorded" and not values["records"]:
            if values["series"] != "k":
                raise XStageError("published runs differ in k alone. Choose k to sweep over, or "
                                  "the simulated device.")
            series = [{"k": record.parameters["k"]} for record in published_gemm_rs()]
        yield from self._plan([values | changed for changed in series])

    def plan_search(self, values: Values) -> Asked:
        """Search tile and depth, what is set among them; the rest as the controls say."""
        machine = chosen_machine(values)
        gemm = FusedGemm(**{name: values[name] for name in _GEMM})
        usual = {"tile_m": draw.TILES, "tile_n": draw.TILES, "issue_depth": draw.DEPTHS,
                 "tile_k": (), "n_stages": ()}
        space = Space(**{name: (*some, values[name]) for name, some in usual.items()})
        return Asked(gemm, machine, calibration_of(machine, machine.n_sms), space)

    def settings_of(self, choice: Choice) -> Values:
        """Return tile and depth of a candidate."""
        return {name: getattr(choice.tuning, name) for name in ("tile_m", "tile_n", "issue_depth")}

    def _plan(self, series: list[Values]) -> Iterator[Planned]:
        timed, n_planned = set(self.t_mma_s), 0
        for values, picture in self.possible(series):
            key = _compute_key(values)
            whole, alone = (build(picture.gemm, picture.machine, picture.tuning, stores)
                            for stores in ("remote", "off"))
            if values["device"] == "recorded":
                held = RecordedDevice(values["records"] or published_gemm_rs(), picture.machine)
                if len(series) > 1 and not held.holds(whole):
                    continue
                if not (values["records"] and held.holds(alone)):
                    timed.add(key)  # by nobody here
            if key not in timed:
                timed.add(key)
                yield Planned(values, alone)
            n_planned += 1
            yield Planned(values, whole)
        if not n_planned:
            raise NotMeasured("nothing of this series was recorded.")

    def take(self, values: Values, record: Record) -> None:
        """Keep a measurement; one with stores off is the tile's compute time."""
        if record.parameters.get("stores") == "off":
            n_waves = self.picture(values).prediction.terms["n_waves"]
            self.t_mma_s[_compute_key(values)] = record.summary["accepted_s"] / n_waves
            return
        super().take(values, record)
        found = self.picture(values)
        if found.comparison is not None:
            self._comparisons.append((found.comparison, found.label()))


def _compute_key(values: Values) -> tuple[Any, ...]:
    """Return what a tile's compute time depends on."""
    return tuple(values[name] for name in ("device", "machine", "m", "n", "k", "tile_m", "tile_n",
                                           "tile_k"))


def tuning_controls() -> dict[str, w.Widget]:
    """Return the sliders of tile and staging."""
    tile = controls.whole
    return {
        "tile_m": tile("tile_m", "tile m", 128, 16, 512, 16),
        "tile_n": tile("tile_n", "tile n", 128, 16, 512, 16),
        "tile_k": tile("tile_k", "tile k", 64, 16, 256, 16, "depth of one operand stage"),
        "issue_depth": tile("issue_depth", "issue depth", 2, 1, 8,
                            hint="output tiles an SM may hold; D needs D - 1 staging slots"),
        "n_stages": tile("n_stages", "operand stages", 3, 1, 8),
    }


def _gemm_controls() -> dict[str, w.Widget]:
    shape = next(iter(SHAPES.values()))
    return {
        **{name: controls.field(name, name, shape[name]) for name in ("m", "n", "k")},
        "n_gpus": controls.whole("n_gpus", "GPUs", 8, 1, 16),
        "destinations": controls.choice("destinations", "destinations", "round-robin",
                                        _DESTINATIONS, "who owns an output tile"),
        "out_dtype": controls.choice("out_dtype", "output type", "bf16", ("bf16", "fp32")),
    }
