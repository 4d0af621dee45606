"""The panel of notebook 01: bursts, gaps, and when a posted store pushes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xstage_lab import analysis, plots
from xstage_lab.devices.base import Device
from xstage_lab.devices.recorded import RecordedDevice
from xstage_lab.errors import NotMeasured
from xstage_lab.lab import burst_figures as draw
from xstage_lab.lab import controls
from xstage_lab.lab.burst_figures import ISOLATED, SATURATED, BurstPicture
from xstage_lab.lab.controls import Controls, section
from xstage_lab.lab.device import device_controls, follow_device, maker, not_offered
from xstage_lab.lab.machine import (
    calibration_of,
    chosen_machine,
    machine_controls,
    path_fields,
    show_published,
)
from xstage_lab.lab.panel import Panel, Planned, Tab
from xstage_lab.lab.picture import Point, Values
from xstage_lab.schedule import build
from xstage_lab.spec import SYNCS, BurstTrain, MachineSpec

_TRAIN = ("n_producers", "burst_bytes", "gap_s", "n_bursts", "sync")


class BurstGap(Panel):
    """When do posted stores push back? Sliders, the law, and measurements beside it.

    Sweep varies what the visible figure has on its horizontal axis: the gap, the size of an
    isolated burst, or the number of SMs.

    Parameters
    ----------
    **settings
        Any control by name, SI: `device`, `records`, `machine`, `n_producers`, `burst_bytes`,
        `gap_s`, `n_bursts`, `sync`; and `drain_bytes_per_s`, `capacity_bytes`,
        `per_sm_bytes_per_s`, `issue_latency_s` in place of what is published of the machine.

    Raises
    ------
    UnknownName, InvalidValue
        If a setting is unknown, or no number where one is needed.
    """

    workload = BurstTrain.__name__

    def __init__(self, **settings: Any) -> None:
        made = machine_controls(settings.get("machine", "B200-SXM")) | device_controls() | {
            "n_producers": controls.whole("n_producers", "producers K", 148, 1, 320,
                                          hint="CTAs that store, one per SM"),
            "burst_bytes": controls.log("burst_bytes", "burst B", 32 * 1024, 1, 1024,
                                        "bytes of one producer's burst"),
            "gap_s": controls.real("gap_s", "gap G", 3e-6, 0.0, 20.0, 0.05,
                                   "other work between two bursts"),
            "n_bursts": controls.whole("n_bursts", "bursts N", 50, 1, 100,
                                       hint="bursts of each producer"),
            "sync": controls.choice("sync", "sync", "free", SYNCS,
                                    "lockstep: a barrier between bursts"),
        }
        show_published(made)
        made["machine"].observe(lambda _: show_published(made), names="value")
        follow_device(made)
        super().__init__(
            Controls(**made),
            [section("burst train"), *(made[name] for name in _TRAIN),
             section("device"), made["device"], not_offered(), made["records"], made["machine"],
             path_fields(made)],
            {"Issue time": Tab(plots.IssueGap(), draw.issue_time),
             "Period": Tab(plots.PeriodGap(), draw.period),
             "Backlog": Tab(plots.Backlog(), draw.backlog),
             "One burst": Tab(plots.IsolatedBurst(), draw.isolated_burst),
             "Rate": Tab(plots.RateAgainstSms(), draw.rate),
             "Completion": Tab(plots.IssueAgainstCompletion(), draw.completion)},
            settings)

    def picture(self, values: Values) -> BurstPicture:
        """Predict the train of `values`."""
        machine = chosen_machine(values)
        train = BurstTrain(**{name: values[name] for name in _TRAIN},
                           n_gpus=machine.full_rate_gpus)
        prediction = analysis.predict(train, machine, calibration_of(machine, train.n_producers))
        here = self.points_at(values)
        comparison = analysis.compare(prediction, here[-1].record) if here else None
        return BurstPicture(values=values, machine=machine, train=train, prediction=prediction,
                            comparison=comparison, points_at=self.points_at, overlaid=self.overlaid)

    def points_at(self, values: Values, *free: str) -> list[Point]:
        """Return the points measured with `values`, on whichever device."""
        return super().points_at(values, *free, "device", "records")

    def device(self, values: Values) -> Callable[[], Device]:
        """Return the chosen device."""
        return maker(values["device"], chosen_machine(values), values["records"])

    def plan_measure(self, values: Values) -> Iterator[Planned]:
        """Plan the train of `values`."""
        picture = self.picture(values)
        yield Planned(values, build(picture.train, picture.machine))

    def plan_sweep(self, values: Values) -> Iterator[Planned]:
        """Plan a sweep of what the visible figure has on its horizontal axis."""
        picture = self.picture(values)
        k = picture.train.n_producers
        sweeps: dict[str, list[Values]] = {
            "One burst": [
                ISOLATED | {"burst_bytes": int(size)}
                for size in np.unique((draw.volumes(picture, 16)[1:] / k).astype(int))],
            "Rate": [
                SATURATED | {"n_producers": int(n)}
                for n in np.unique(np.geomspace(1, picture.machine.n_sms, 14).round())],
        }
        gaps = [{"gap_s": float(gap)} for gap in draw.gaps(picture, 21)]
        for varied in (_recorded(values, picture.machine, self.visible)
                       if values["device"] == "recorded" else
                       [values | changed for changed in sweeps.get(self.visible, gaps)]):
            yield Planned(varied, build(self.picture(varied).train, picture.machine))


def _recorded(values: Values, machine: MachineSpec, figure: str) -> list[Values]:
    """Return the settings of recorded trains that lie on the horizontal axis of a figure.

    Raises
    ------
    NotMeasured
        If there is none.
    """
    fixed, axis = {"One burst": (ISOLATED, "burst_bytes"), "Rate": (SATURATED, "n_producers")}.get(
        figure, ({}, "gap_s"))
    device = RecordedDevice(values["records"], machine)
    on_axis = {record.parameters[axis] for record in device.records()
               if record.parameters["workload"] == BurstTrain.__name__}
    found = []
    for value in sorted(on_axis):
        varied = values | fixed | {axis: value}
        train = BurstTrain(**{name: varied[name] for name in _TRAIN}, n_gpus=machine.full_rate_gpus)
        if device.holds(build(train, machine)):
            found.append(varied)
    if not found:
        raise NotMeasured(f"no trains in {values['records']} differ from these settings in {axis} "
                          "alone; index.json there says what was recorded.")
    return found
