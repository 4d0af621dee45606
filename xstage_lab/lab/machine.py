"""The controls that say which machine, and what replaces its published store path."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ipywidgets as w

from xstage_lab import analysis, catalog
from xstage_lab.analysis import Calibration
from xstage_lab.errors import UnknownFact, XStageError
from xstage_lab.lab import controls
from xstage_lab.lab.device import live_machines
from xstage_lab.spec import MachineSpec
from xstage_lab.units import display

#: Settings that replace what is published of the store path, and their labels.
PATH = {
    "drain_bytes_per_s": "drain rate R",
    "capacity_bytes": "capacity Q",
    "per_sm_bytes_per_s": "SM rate r_SM",
    "issue_latency_s": "latency t0",
}


def machine_controls(chosen: str) -> dict[str, w.Widget]:
    """Return the machine's drop-down list and the fields of its store path.

    Parameters
    ----------
    chosen : str
        Name of a machine, or path of a machine file of the user's own.

    Raises
    ------
    UnknownName, FileRejected
        If there is no such machine.
    """
    machine_named(chosen)
    local = (machine.name for machine in live_machines().values())
    names = dict.fromkeys([*catalog.machines(), *local, chosen])
    fields = {name: controls.optional(name, words, "empty: as published, or ASSUMED")
              for name, words in PATH.items()}
    return {"machine": controls.choice("machine", "machine", chosen, names), **fields}


def machine_named(name: str) -> MachineSpec:
    """Return a machine of the catalog, of a machine file, or of this computer's live devices."""
    local = {machine.name: machine for machine in live_machines().values()}
    return local[name] if name in local else catalog.machine(name)


def path_fields(widgets: dict[str, w.Widget]) -> w.Accordion:
    """Return the fields of the store path, folded away."""
    folded = w.Accordion([w.VBox([widgets[name] for name in PATH])], titles=["store path"])
    folded.add_class("xstage-folded")
    return folded


def chosen_machine(values: dict[str, Any]) -> MachineSpec:
    """Return the machine with what was entered of its path; the rest as published or ASSUMED.

    Raises
    ------
    UnknownFact
        If nobody published its drain rate and none was entered.
    """
    machine = machine_named(values["machine"])
    drain, capacity = values["drain_bytes_per_s"], values["capacity_bytes"]
    given: dict[str, float] = {}
    if drain is not None:
        given |= {"egress_bytes_per_s": drain, "ingress_bytes_per_s": drain}
    if capacity is not None:  # of all SMs together: one SM's limit must not cut it
        known = machine.link.per_sm_capacity_bytes
        one_sm = 64 * 1024.0 if math.isnan(known) else known
        given |= {"path_capacity_bytes": capacity,
                  "per_sm_capacity_bytes": max(one_sm, capacity / machine.n_sms)}
    for name in ("per_sm_bytes_per_s", "issue_latency_s"):
        if values[name] is not None:
            given[name] = values[name]
    link = machine.link.replace(**given) if given else machine.link
    if math.isnan(link.egress_bytes_per_s) and machine in live_machines().values():
        raise UnknownFact("drain_bytes_per_s", machine.name, "calibrate its device (notebook 02) "
                          "and enter what it finds under store path; or choose the machine from "
                          "the machines.csv of a recording.")
    return catalog.with_assumptions(dataclasses.replace(machine, link=link))


def calibration_of(machine: MachineSpec, n_producers: int) -> Calibration:
    """Return the machine's figures as a calibration, Q for `n_producers` of its SMs."""
    whole = analysis.published(machine)
    fewer = n_producers * machine.link.per_sm_capacity_bytes
    return whole if fewer >= whole.capacity_bytes else whole.override(capacity_bytes=fewer)


def show_published(widgets: dict[str, w.Widget]) -> None:
    """Show in each empty field of the path what is taken for it."""
    try:
        machine = chosen_machine({"machine": widgets["machine"].value, **dict.fromkeys(PATH)})
    except XStageError:
        for name in PATH:
            widgets[name].placeholder = "not known"
        return
    taken = analysis.published(machine)
    for name in PATH:
        kind = "ASSUMED" if name in taken.assumed else "published"
        value = getattr(taken, name) * display(name).scale
        widgets[name].placeholder = f"{value:.4g}, {kind}"
