"""Options of the command line -> the machine and the device they mean."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from xstage_lab import analysis, catalog
from xstage_lab.devices.base import Device
from xstage_lab.errors import XStageError, require_choice
from xstage_lab.experiment import Logged
from xstage_lab.runlog import RunLog
from xstage_lab.spec import MachineSpec

if TYPE_CHECKING:
    from xstage_lab.devices.cuda import CudaDevice

DEVICES = ("simulated", "sockets", "cuda", "recorded")


def machine_of(options: argparse.Namespace) -> MachineSpec:
    """Build the machine with its link, supplied parameters and assumptions."""
    name, destination = device_name(options)
    if name == "sockets":
        return _sockets_machine(options)
    if name == "cuda":
        return _cuda(destination, *_kernel_options(options)).machine
    machine = catalog.machine(options.machine)
    if options.link:
        machine = catalog.with_link(machine, catalog.link(options.link))
    return catalog.with_assumptions(catalog.with_parameters(
        machine, drain_bytes_per_s=options.drain_bytes_per_s,
        capacity_bytes=options.capacity_bytes, per_sm_bytes_per_s=options.per_sm_bytes_per_s,
        issue_latency_s=options.issue_latency_s))


def device_of(options: argparse.Namespace, machine: MachineSpec) -> Device:
    """Construct the device asked for; what it measures goes into the run log."""
    name, detail = device_name(options)
    if name == "recorded":
        from xstage_lab.devices.recorded import RecordedDevice
        if not detail:
            raise XStageError("device recorded needs the folder of its records: "
                              "--device recorded:FOLDER.")
        return RecordedDevice(detail, machine=machine)
    if name == "cuda":
        return Logged(_cuda(detail, *_kernel_options(options)), RunLog())
    return Logged(maker_of(options, machine)(), RunLog())


def maker_of(options: argparse.Namespace, machine: MachineSpec) -> Callable[[], Device]:
    """Return a picklable maker of the simulated or the sockets device asked for."""
    name, _ = device_name(options)
    require_choice("device", name, ("simulated", "sockets"))
    if name == "sockets":
        from xstage_lab.devices.sockets import SocketsDevice
        return functools.partial(SocketsDevice, machine)
    from xstage_lab.devices.simulated import SimulatedDevice
    return functools.partial(SimulatedDevice, machine)


def device_name(options: argparse.Namespace) -> tuple[str, str]:
    """Return the name of the device asked for, and what stands behind its colon."""
    name, _, detail = options.device.partition(":")
    require_choice("device", name, DEVICES)
    if detail and name in ("simulated", "sockets"):
        raise XStageError(f"device {name} takes nothing behind a colon, {detail!r} was given.")
    if name != "cuda" and (options.store_path or options.signal):
        raise XStageError("--store-path and --signal are of the kernels that the device cuda runs; "
                          f"{name} has none. Leave them out.")
    return name, detail


def _kernel_options(options: argparse.Namespace) -> tuple[str, str]:
    return options.store_path or "registers", options.signal or "none"


@functools.cache
def _cuda(destination: str, store_path: str, signal: str) -> CudaDevice:
    """Make the cuda device once: machine and measurements are of the same one."""
    from xstage_lab.devices.cuda import CudaDevice
    return CudaDevice(destination=destination or None, store_path=store_path, signal=signal)


def _sockets_machine(options: argparse.Namespace) -> MachineSpec:
    """Build the machine of this computer's sockets: what the options set is made so, live."""
    from xstage_lab.devices.sockets import this_computer
    for name in set(analysis.PARAMETERS) - {"drain_bytes_per_s"}:
        if getattr(options, name) is not None and not options.calibration:
            raise XStageError(f"{name} cannot be set on sockets, it is what calibrating finds; "
                              "leave it out, or override a stored --calibration.")
    asked = {"n_producers": options.producers, "drain_bytes_per_s": options.drain_bytes_per_s}
    gpus = getattr(options, "gpus", None)
    if isinstance(gpus, int) and gpus > 1:
        asked["n_destinations"] = gpus - 1
    return this_computer(**{name: value for name, value in asked.items() if value is not None})
