"""The panel of notebook 04: in which order the tiles of an MoE layer should run, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets as w

from xstage_lab import analysis, plots
from xstage_lab.devices.base import Device
from xstage_lab.devices.recorded import RecordedDevice, published_wave_lag
from xstage_lab.errors import NotMeasured
from xstage_lab.lab import controls
from xstage_lab.lab import moe_figures as draw
from xstage_lab.lab.controls import Controls, section
from xstage_lab.lab.device import device_controls, follow_device, maker, not_offered
from xstage_lab.lab.machine import (
    calibration_of,
    chosen_machine,
    machine_controls,
    path_fields,
    show_published,
)
from xstage_lab.lab.moe_figures import SHAPE, SHAPES, TOKENS, MoEPicture
from xstage_lab.lab.panel import Panel, Planned, Tab
from xstage_lab.lab.picture import Point, Values
from xstage_lab.lab.tune import tuning_controls
from xstage_lab.schedule import build
from xstage_lab.schedule import moe as schedule
from xstage_lab.spec import MachineSpec, MoELayer, Tuning, check_feasible
from xstage_lab.spec.moe import ORDERS

_LAYER = ("tokens", *SHAPE, "n_gpus", "dtype", "order", "min_lead_rows", "wave_experts")
_TUNING = ("tile_m", "tile_n", "tile_k", "issue_depth", "n_stages")


class MoESchedule(Panel):
    """Choose a layer and an order of its tiles; see which order is faster, by what and how much.

    Measure runs both orders, Sweep both at several numbers of tokens.

    Parameters
    ----------
    rows : sequence of int, optional
        Rows routed to each expert, for the routing `given`; they add up to
        tokens x n_gpus x top_k.
    **settings
        Any control by name, SI: `device`, `records`, `machine`, `tokens`, `hidden`,
        `intermediate`, `experts`, `top_k`, `n_gpus`, `dtype`, `routing` (`balanced`, `zipf`,
        `given`), `zipf_exponent`, `order`, `min_lead_rows`, `wave_experts`, `tile_m`, `tile_n`,
        `tile_k`, `issue_depth`, `n_stages`; and `drain_bytes_per_s`, `capacity_bytes`,
        `per_sm_bytes_per_s`, `issue_latency_s` in place of what is published of the machine.

    Raises
    ------
    UnknownName, InvalidValue
        If a setting is unknown, or no number where one is needed.
    """

    workload = MoELayer.__name__
    sweep_figure = "Speed-up"
    figure_height = 520  # two orders over time need more than the figures of other panels

    def __init__(self, *, rows: Sequence[int] | None = None, **settings: Any) -> None:
        #: Rows of each expert, where they were given.
        self.rows = None if rows is None else tuple(rows)
        machine = machine_controls(settings.get("machine", "B200-SXM"))
        made = (_layer_controls(self.rows is not None) | tuning_controls() | machine
                | device_controls())
        follow_device(made)
        show_published(machine)
        machine["machine"].observe(lambda _: show_published(machine), names="value")
        self.shape = controls.choice("shape", "model", controls.OTHER,
                                     [*SHAPES, controls.OTHER])
        super().__init__(
            Controls(**made),
            [section("layer"), self.shape,
             *(made[name] for name in ("tokens", *SHAPE, "routing", "zipf_exponent", "n_gpus",
                                       "dtype")),
             section("order"), *(made[name] for name in ("order", "min_lead_rows",
                                                         "wave_experts")),
             section("tile and staging"), *(made[name] for name in _TUNING),
             section("device"), made["device"], not_offered(), made["records"],
             made["machine"], path_fields(made)],
            {"Orders": Tab(plots.OrdersOverTime(), draw.orders),
             "One SM": Tab(plots.Timeline(), draw.timeline),
             "Speed-up": Tab(plots.SpeedUp(), draw.speed_up),
             "Map": Tab(plots.OrderMap(), draw.order_map),
             "Times": Tab(plots.OrderTimes(), draw.times)},
            settings)
        controls.tie_names(self.shape, self.controls, SHAPES)

    def picture(self, values: Values) -> MoEPicture:
        """Predict both orders of the layer of `values`."""
        machine, moe = chosen_machine(values), self.layer(values)
        tuning = Tuning(**{name: values[name] for name in _TUNING})
        verdict = analysis.verdict(moe, machine, calibration_of(machine, machine.n_sms), tuning)
        comparisons = {}
        for order in ORDERS:
            if here := self.points_at(values | {"order": order}):
                comparisons[order] = analysis.compare(verdict.predictions[order], here[-1].record)
        given = {} if self.rows is None else {"rows": self.rows}
        return MoEPicture(values=values | given, machine=machine, moe=moe, tuning=tuning,
                          verdict=verdict, prediction=verdict.predictions[moe.order],
                          comparison=comparisons.get(moe.order), by_order=comparisons,
                          points_at=self.points_at, overlaid=self.overlaid,
                          layer_at=lambda changed: self._layer_on(
                              machine, tuning, values | changed))

    def _layer_on(self, machine: MachineSpec, tuning: Tuning, values: Values) -> MoELayer:
        """Return the layer of `values`; raises `XStageError` where `machine` cannot run it."""
        moe = self.layer(values)
        check_feasible(moe, machine, tuning)
        return moe

    def layer(self, values: Values) -> MoELayer:
        """Return the layer of `values`; raises `XStageError` where there can be none."""
        routing: str | tuple[int, ...] = values["routing"]
        if routing == "zipf":
            routing = f"zipf:{values['zipf_exponent']:g}"
        elif routing == "given" and self.rows is not None:
            routing = self.rows
        return MoELayer(routing=routing, **{name: values[name] for name in _LAYER})

    def points_at(self, values: Values, *free: str) -> list[Point]:
        """Return the points measured with `values`, on whichever device."""
        return super().points_at(values, *free, "device", "records", "rows")

    def device(self, values: Values) -> Callable[[], Device]:
        """Return the chosen device."""
        return maker(values["device"], chosen_machine(values),
                     values["records"] or published_wave_lag())

    def plan_measure(self, values: Values) -> Iterator[Planned]:
        """Plan a run of each order."""
        yield from self._plan([values])

    def plan_sweep(self, values: Values) -> Iterator[Planned]:
        """Plan both orders at every number of tokens that the machine can run."""
        yield from self._plan([values | {"tokens": n} for n in TOKENS])

    def _plan(self, series: list[Values]) -> Iterator[Planned]:
        n_planned = 0
        for values, picture in self.possible(series):
            programs = {order: build(dataclasses.replace(picture.moe, order=order),
                                     picture.machine, picture.tuning) for order in ORDERS}
            if values["device"] == "recorded" and len(series) > 1:
                held = RecordedDevice(values["records"] or published_wave_lag(), picture.machine)
                programs = {order: program for order, program in programs.items()
                            if held.holds(program)}
            for order, program in programs.items():
                n_planned += 1
                yield Planned(values | {"order": order}, program)
        if not n_planned:
            raise NotMeasured("nothing of this series was recorded.")

    def _draw(self) -> None:
        super()._draw()
        if isinstance(self.shown, MoEPicture):
            self._show_automatic(self.shown.moe, self.shown.tuning, self.shown.machine.n_sms)

    def _show_automatic(self, moe: MoELayer, tuning: Tuning, n_sms: int) -> None:
        """Show in the empty fields of the order what is taken for them."""
        automatic = dataclasses.replace(moe, min_lead_rows=None, wave_experts=None)
        for name, taken in (("min_lead_rows", schedule.lead_rows),
                            ("wave_experts", schedule.wave_experts)):
            self.controls[name].placeholder = f"{taken(automatic, tuning, n_sms)}, automatic"


def _layer_controls(rows_given: bool) -> dict[str, w.Widget]:
    routings = ("balanced", "zipf", "given") if rows_given else ("balanced", "zipf")
    shape = SHAPES["MiMo-V2.5"]
    labels = {"hidden": "hidden", "intermediate": "intermediate", "experts": "experts",
              "top_k": "top k"}
    return {
        "tokens": controls.whole("tokens", "tokens per GPU", 1024, 64, 8192, 64),
        **{name: controls.field(name, words, shape[name]) for name, words in labels.items()},
        "routing": controls.choice("routing", "routing", "balanced", routings,
                                   "how many rows each expert gets"),
        "zipf_exponent": controls.real("zipf_exponent", "zipf exponent", 0.8, 0.0, 2.0, 0.05,
                                       "the r-th most popular expert gets a share ~ r^-exponent"),
        "n_gpus": controls.whole("n_gpus", "GPUs", 8, 1, 16),
        "dtype": controls.choice("dtype", "operand type", "fp8", ("fp8", "bf16")),
        "order": controls.choice("order", "order", "wave", ORDERS,
                                 "of the figure One SM; Measure runs both"),
        "min_lead_rows": controls.optional(
            "min_lead_rows", "min. lead rows", "interleaved: rows that Linear-1 is ahead"),
        "wave_experts": controls.optional(
            "wave_experts", "experts per wave", "wave: experts whose Linear-1 goes first"),
    }
