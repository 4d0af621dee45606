"""The verb `tune`: the best configuration of a workload, and whether to fuse at all."""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

from xstage_lab import analysis, catalog
from xstage_lab.command import (
    Result,
    calibration_of,
    row,
    say_on_stderr,
    seed_of,
    stored_calibration,
    supplied,
)
from xstage_lab.command_workloads import workload_of
from xstage_lab.device_choice import device_name, device_of, machine_of
from xstage_lab.devices.base import Device
from xstage_lab.errors import InvalidValue, require_number
from xstage_lab.experiment import Logged
from xstage_lab.spec import MachineSpec, Tuning
from xstage_lab.units import text

#: Where the kernels may store by: `tune` compares them where none is asked for.
STORE_PATHS = ("registers", "bulk")


def tune(options: argparse.Namespace) -> Result:
    """Predict every configuration, measure the promising few, and say which is best and why."""
    for name in ("budget", "max_sms", "smem_bytes"):
        if getattr(options, name) is not None:
            require_number(name, getattr(options, name), low=float(name != "budget"),
                           high=2.0**40, integer=True)
    seed, counts, given = seed_of(options), _counts(options.gpu_counts), _given(options)
    machine = machine_of(options)
    workload, tuning = workload_of(options, machine)
    devices, calibrations = _measured_by(options, machine)
    space = analysis.Space.of(workload, machine, **_kept(given, tuning, options), **counts)
    logs = [each.log for each in devices.values() if isinstance(each, Logged)]
    answer = analysis.tune(
        workload, machine, calibrations, space, options.budget,
        device={path: each.device if isinstance(each, Logged) else each
                for path, each in devices.items()},
        log=logs[0] if logs else None, seed=seed, max_sms=options.max_sms,
        smem_limit_bytes=math.inf if options.smem_bytes is None else options.smem_bytes,
        progress=None if options.json else lambda done, what: say_on_stderr(f"{done:4.0%} {what}"))
    result = _plain(answer)
    result["explain"] += catalog.flags(machine)
    return result, [*_table(answer), "", *result["explain"], answer.fuse]


def _given(options: argparse.Namespace) -> set[str]:
    """Return what was asked for of the tiling, before defaults are filled in."""
    return {name for name in ("tile", "depth", "order") if getattr(options, name, None) is not None}


def _kept(given: set[str], tuning: Tuning | None, options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a space that the options fix."""
    kept: dict[str, Any] = {}
    if tuning is not None and "tile" in given:
        kept |= {name: (getattr(tuning, name),) for name in ("tile_m", "tile_n", "tile_k")}
    if tuning is not None and "depth" in given:
        kept["issue_depth"] = (tuning.issue_depth,)
    if "order" in given:
        kept["order"] = (options.order,)
    return kept


def _counts(asked: str | None) -> dict[str, tuple[int, ...]]:
    if asked is None:
        return {}
    parts = asked.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise InvalidValue("gpu_counts", asked, "whole numbers with commas between",
                           remedy="For example 2,4,8.")
    return {"n_gpus": tuple(map(int, parts))}


def _measured_by(
    options: argparse.Namespace, machine: MachineSpec
) -> tuple[dict[str, Device], dict[str, analysis.Calibration]]:
    """Return the device of each store path and its calibration; no device for the law alone."""
    if options.budget == 0:
        cal = stored_calibration(options, machine) or supplied(options, analysis.published(machine))
        return {}, {"": cal}
    paths = [options.store_path or ""]
    if device_name(options)[0] == "cuda" and not (options.store_path or options.calibration):
        paths = list(STORE_PATHS)
    devices, refusals = {}, []
    for path in paths:
        chosen = copy.copy(options)
        chosen.store_path = path or None
        try:
            devices[path] = device_of(chosen, machine)
        except InvalidValue as error:  # a GPU without bulk copies
            refusals.append(error)
    if not devices:
        raise refusals[0]
    return devices, {path: calibration_of(options, each) for path, each in devices.items()}


def _plain(answer: analysis.Answer) -> dict[str, Any]:
    def outcome(of: analysis.Outcome | None) -> dict[str, Any] | None:
        return None if of is None else {
            "parameters": of.prediction.parameters, "store_path": of.choice.store_path,
            "predicted_s": of.predicted_s, "measured_s": of.measured_s, "badge": of.badge,
            "regime": of.prediction.regime}

    return {"best": outcome(answer.best), "runner_up": outcome(answer.runner_up),
            **{name: getattr(answer, name) for name in (
                "margin_ratio", "fuse_gain_ratio", "fuse", "explain", "n_measured",
                "n_candidates", "excluded", "badges", "provenance")}}


def _table(answer: analysis.Answer) -> list[str]:
    """Best and runner-up side by side."""
    both = [of for of in (answer.best, answer.runner_up) if of is not None]
    tunings = [of.choice.tuning for of in both]
    lines = [row("", *("best", "runner-up")[:len(both)])]
    lines.append(row("tile", *(f"{t.tile_m}x{t.tile_n}x{t.tile_k}" for t in tunings)))
    for name, values in (
        ("issue_depth", [str(t.issue_depth) for t in tunings]),
        ("n_stages", [str(t.n_stages) for t in tunings]),
        ("n_gpus", [str(of.choice.workload.n_gpus) for of in both]),
        ("order", [getattr(of.choice.workload, "order", "") for of in both]),
        ("store_path", [of.choice.store_path for of in both]),
        ("n_ctas", ["" if t.n_ctas is None else str(t.n_ctas) for t in tunings]),
        ("regime", [of.prediction.regime for of in both]),
    ):
        if any(values):
            lines.append(row(name, *values))
    lines.append(row("PREDICTED", *(text("_s", of.predicted_s) for of in both)))
    if answer.best.record is not None:
        lines.append(row(answer.best.badge, *(
            "not measured" if math.isnan(of.measured_s) else text("_s", of.measured_s)
            for of in both)))
    return lines
