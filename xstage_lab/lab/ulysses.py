"""The panel of notebook 05: what of Ulysses' all-to-all can be hidden, and on how many GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as w

from xstage_lab import analysis, catalog, plots
from xstage_lab.analysis.attention import busiest_sm_tiles
from xstage_lab.analysis.ulysses_step import StepCosts, ulysses_step
from xstage_lab.devices.base import Device
from xstage_lab.devices.recorded import RecordedDevice
from xstage_lab.lab import controls
from xstage_lab.lab import ulysses_figures as draw
from xstage_lab.lab.controls import Controls, section
from xstage_lab.lab.device import maker
from xstage_lab.lab.machine import (
    calibration_of,
    chosen_machine,
    machine_controls,
    path_fields,
    show_published,
)
from xstage_lab.lab.panel import Panel, Planned, Tab
from xstage_lab.lab.picture import Point, Values
from xstage_lab.lab.tune import tuning_controls
from xstage_lab.lab.ulysses_figures import COSTS, UlyssesPicture
from xstage_lab.record import Record
from xstage_lab.schedule import build
from xstage_lab.spec import MachineSpec, Tuning, UlyssesAttention
from xstage_lab.spec.attention import MODES

_TUNING = ("tile_m", "tile_n", "issue_depth", "n_stages")
_SHAPE = ("sequence", "heads", "head_dim")
_ATTENTION = (*_SHAPE, "n_gpus", "mode", "n_comm_sms")
_MASKS = ("full", "causal")
#: Settings that change what is shown of a run, and not the run.
_SHOWN = ("device", "records", "sm", *COSTS)
#: What Sweep varies, by the figure that is shown.
_SERIES = {"GPUs": draw.gpu_counts, "Sequence": draw.sequences}
SHAPES: dict[str, Values] = {
    model: {name: getattr(attention, name) for name in _SHAPE}
    for model, attention in catalog.attention_models().items()}


class Ulysses(Panel):
    """How much of the all-to-all hides behind the attention, by mode, GPUs and sequence.

    Measure also runs, once each, what it is compared with: the tiles with their stores off, the
    attention alone, and the all-to-all after it. Sweep varies what the visible figure has on its
    axis.

    Parameters
    ----------
    **settings
        Any control by name, SI: `device`, `records`, `machine`, `sequence`, `heads`, `head_dim`,
        `n_gpus`, `mode`, `n_comm_sms`, `mask`, `tile_m`, `tile_n`, `issue_depth`, `n_stages`,
        `sync_s`, `per_peer_s`, `launch_s`, `sm`; and `drain_bytes_per_s`, `capacity_bytes`,
        `per_sm_bytes_per_s`, `issue_latency_s` in place of what is published of the machine.

    Raises
    ------
    UnknownName, InvalidValue
        If a setting is unknown, or no number where one is needed.
    """

    workload = UlyssesAttention.__name__
    figure_height = 480  # times and hidden shares, one above the other

    def __init__(self, **settings: Any) -> None:
        machine = machine_controls(settings.get("machine", "B200-SXM"))
        tuning = tuning_controls()
        made = machine | _attention_controls() | _cost_controls() | {
            **{name: tuning[name] for name in _TUNING},
            "device": controls.choice(
                "device", "device", "simulated", ("simulated", "recorded"),
                "what Measure and Sweep run on; attention has no CUDA kernel here yet"),
            "records": controls.words("records", "records", "", "folder of a recording"),
        }
        made["n_stages"].value = 2
        show_published(machine)
        machine["machine"].observe(lambda _: show_published(machine), names="value")
        #: Compute times of a full tile and times of the attention alone, by what they depend on.
        self.t_mma_s: dict[tuple[Any, ...], float] = {}
        self.alone_s: dict[tuple[Any, ...], float] = {}
        self.model = controls.choice("model", "model", controls.OTHER, [*SHAPES, controls.OTHER])
        super().__init__(
            Controls(**made),
            [section("attention"), self.model, *(made[name] for name in (*_SHAPE, "mask")),
             section("all-to-all"), *(made[name] for name in ("n_gpus", "mode", "n_comm_sms")),
             section("tile and staging"), *(made[name] for name in _TUNING),
             section("fixed costs of the step, ASSUMED"), *(made[name] for name in COSTS),
             section("device"), made["device"], made["records"], made["sm"],
             made["machine"], path_fields(made)],
            {"Modes": Tab(plots.ModeTimes(), draw.modes),
             "GPUs": Tab(plots.HiddenOverGpus(), draw.along(draw.gpu_counts)),
             "Sequence": Tab(plots.HiddenOverTokens(), draw.along(draw.sequences)),
             "One SM": Tab(plots.Timeline(), draw.timeline)},
            settings)
        controls.tie_names(self.model, self.controls, SHAPES)

    def picture(self, values: Values) -> UlyssesPicture:
        """Predict the attention of `values`, and the step around it."""
        machine = chosen_machine(values)
        attention = UlyssesAttention(**{name: values[name] for name in _ATTENTION},
                                     causal=values["mask"] == "causal")
        tuning = Tuning(**{name: values[name] for name in _TUNING})
        prediction = _predicted(attention, machine, tuning, self.t_mma_s.get(_tile_key(values)))
        step = ulysses_step(attention, prediction,
                            StepCosts(**{name: values[name] for name in COSTS}))
        here = self.points_at(values)
        comparison = analysis.compare(prediction, here[-1].record) if here else None
        return UlyssesPicture(
            values=values, machine=machine, attention=attention, tuning=tuning,
            prediction=prediction, step=step, comparison=comparison, points_at=self.points_at,
            overlaid=self.overlaid, at=self.picture,
            alone_s=lambda at: self.alone_s.get(_alone_key(at), float("nan")))

    def points_at(self, values: Values, *free: str) -> list[Point]:
        """Return the points measured with `values`, on whichever device."""
        return super().points_at(values, *free, *_SHOWN)

    def device(self, values: Values) -> Callable[[], Device]:
        """Return the chosen device."""
        return maker(values["device"], chosen_machine(values), values["records"])

    def plan_measure(self, values: Values) -> Iterator[Planned]:
        """Plan these settings, and what they are compared with where it was not run yet."""
        yield from self._plan([values])

    def plan_sweep(self, values: Values) -> Iterator[Planned]:
        """Plan what the visible figure has on its axis: modes, GPUs or sequences."""
        series = _SERIES.get(self.visible)
        changes = ([{"mode": mode} for mode in MODES] if series is None
                   else series(self.picture(values)))
        yield from self._plan([values | changed for changed in changes])

    def _plan(self, series: list[Values]) -> Iterator[Planned]:
        done = {*self.t_mma_s, *self.alone_s}
        for values, picture in self.possible(series):
            whole = build(picture.attention, picture.machine, picture.tuning)
            if values["device"] == "recorded":
                if len(series) == 1 or RecordedDevice(values["records"], picture.machine).holds(
                        whole):
                    yield Planned(values, whole)
                continue
            for key, mode, stores in ((_tile_key(values), values["mode"], "off"),
                                      (_alone_key(values), "fused", "local")):
                if key not in done:
                    done.add(key)
                    at = self.picture(values | {"mode": mode})
                    yield Planned(at.values, build(at.attention, at.machine, at.tuning, stores))
            after = values | {"mode": "serial"}
            if values["mode"] != "serial" and after not in series and not self.points_at(after):
                yield Planned(after, build(self.picture(after).attention, picture.machine,
                                           picture.tuning))
            yield Planned(values, whole)

    def take(self, values: Values, record: Record) -> None:
        """Keep a measurement; without stores to others it is what others are compared with."""
        stores = record.parameters.get("stores")
        if stores == "local":
            self.alone_s[_alone_key(values)] = record.summary["total_s"]
        elif stores == "off":
            at = self.picture(values)
            program = build(at.attention, at.machine, at.tuning, "off")
            self.t_mma_s[_tile_key(values)] = record.summary["accepted_s"] / busiest_sm_tiles(
                program, at.attention, at.tuning)
        else:
            super().take(values, record)


@functools.lru_cache(maxsize=256)  # figures show many settings, of which few change at a time
def _predicted(attention: UlyssesAttention, machine: MachineSpec, tuning: Tuning,
               t_mma_s: float | None) -> analysis.Prediction:
    return analysis.predict(attention, machine, calibration_of(machine, machine.n_sms), tuning,
                            t_mma_s)


def _tile_key(values: Values) -> tuple[Any, ...]:
    """Return what the compute time of a full tile depends on."""
    return tuple(values[name] for name in ("device", "machine", *_SHAPE, "mask", "n_gpus",
                                           "tile_m", "tile_n", "n_stages"))


def _alone_key(values: Values) -> tuple[Any, ...]:
    """Return what the time of the attention alone depends on."""
    return (*_tile_key(values), "alone", values["issue_depth"],
            *(values[name] for name in ("per_sm_bytes_per_s", "issue_latency_s")))


def _attention_controls() -> dict[str, w.Widget]:
    shape = next(iter(SHAPES.values()))
    return {
        "sequence": controls.field("sequence", "tokens", shape["sequence"],
                                   "of the whole sequence"),
        "heads": controls.field("heads", "heads", shape["heads"], "on all GPUs together"),
        "head_dim": controls.field("head_dim", "head dimension", shape["head_dim"]),
        "mask": controls.choice("mask", "mask", "full", _MASKS,
                                "causal: queries see the keys up to their own"),
        "n_gpus": controls.whole("n_gpus", "GPUs", 8, 1, 16, hint="each computes heads / GPUs"),
        "mode": controls.choice("mode", "mode", "fused", MODES,
                                "who sends the output: the role that owns the tile, SMs that do "
                                "nothing else, or all SMs after the attention"),
        "n_comm_sms": controls.whole("n_comm_sms", "sending SMs", 16, 1, 64,
                                     hint="of mode dedicated"),
        "sm": controls.whole("sm", "SM shown", 0, 0, 160, hint="in the figure One SM"),
    }


def _cost_controls() -> dict[str, w.Widget]:
    given = StepCosts()
    return {
        "sync_s": controls.real("sync_s", "sync", given.sync_s, 0.0, 50.0, 0.1,
                                "synchronisation of each of the four all-to-alls"),
        "per_peer_s": controls.real("per_peer_s", "more per peer", given.per_peer_s, 0.0, 20.0,
                                    0.1, "of each all-to-all, for every other GPU"),
        "launch_s": controls.real("launch_s", "launch", given.launch_s, 0.0, 20.0, 0.1,
                                  "from one kernel to the next"),
    }
