"""The control that says what Measure and Sweep run on: what works here is offered, the rest named.

Devices that measure live have the machine of this computer, which choosing the device chooses too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ipywidgets as w

from xstage_lab.devices.base import Device
from xstage_lab.devices.recorded import RecordedDevice
from xstage_lab.doctor_gpus import cuda_measures
from xstage_lab.errors import XStageError
from xstage_lab.lab import controls, style
from xstage_lab.record import Record
from xstage_lab.spec import MachineSpec


@functools.cache
def live_machines() -> dict[str, MachineSpec]:
    """Return the machine of every device that measures live on this computer, by device."""
    found = {}
    measures, facts = cuda_measures()
    if not measures["sockets"]:
        from xstage_lab.devices.sockets import this_computer

        found["sockets"] = this_computer()
    for destination in ("peer", "host", "local"):
        if facts and not measures[f"cuda:{destination}"]:
            from xstage_lab.devices.cuda_gpus import machine_of

            found[f"cuda:{destination}"] = machine_of(facts, destination)
    return found


def device_controls(others: Sequence[str] = ("simulated", "recorded")) -> dict[str, w.Widget]:
    """Return the drop-down list of devices that work here, and the folder of recorded runs."""
    made = {"device": controls.choice("device", "device", others[0],
                                      [*others, *live_machines()],
                                      "what Measure and Sweep run on")}
    if "recorded" in others:
        made["records"] = controls.words("records", "records", "",
                                         "folder of a recording; empty: published figures")
    return made


def not_offered() -> w.HTML:
    """Return in words which devices do not work here, and why."""
    reasons = {name: why for name, why in cuda_measures()[0].items() if why}
    return w.HTML("".join(style.note(f"{name} is not offered: {why}")
                          for name, why in reasons.items()))


def follow_device(made: dict[str, w.Widget]) -> None:
    """Choose the machine of this computer whenever a device is chosen that measures live."""
    def follow(change: Any) -> None:
        machine = live_machines().get(change["new"])
        if machine is not None:
            made["machine"].value = machine.name

    made["device"].observe(follow, names="value")


def maker(
    device: str, machine: MachineSpec | None, records: str | Sequence[Record] = ()
) -> Callable[[], Device]:
    """Return a picklable maker of a device.

    Parameters
    ----------
    device : str
        `simulated`, `recorded`, or a device of `live_machines`.
    machine : MachineSpec or None
        What it is to measure; None is the live device's own.
    records : str or sequence of Record
        Folder of recorded runs, or the runs.

    Raises
    ------
    XStageError
        If the device measures another machine, or has nothing recorded.
    """
    if device == "recorded":
        RecordedDevice(records, machine)  # says here and now if nothing is recorded of it
        return partial(RecordedDevice, records, machine)
    local = live_machines().get(device)
    if local is None:
        from xstage_lab.devices.simulated import SimulatedDevice

        if machine is None:
            raise XStageError("the simulated device needs a machine.")
        return partial(SimulatedDevice, machine)
    if machine is not None and machine.name != local.name:
        raise XStageError(f"the device {device} measures {local.name}, not {machine.name}; choose "
                          "that machine, or the simulated device.")
    if device == "sockets":
        from xstage_lab.devices.sockets import SocketsDevice

        return partial(SocketsDevice, machine or local)
    from xstage_lab.devices.cuda import CudaDevice

    return partial(CudaDevice, machine or local, destination=device.partition(":")[2])
