"""What the verbs of the command line do: options -> specs -> the lab's functions -> results.

Every verb returns an object for `--json` and the lines printed without it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xstage_lab import analysis, catalog
from xstage_lab.command_workloads import workload_of
from xstage_lab.device_choice import device_name, device_of, machine_of, maker_of
from xstage_lab.devices.base import Device
from xstage_lab.errors import InvalidValue, XStageError
from xstage_lab.record import SUMMARY_KEYS, Record
from xstage_lab.schedule import build
from xstage_lab.spec import (
    BurstTrain,
    FusedGemm,
    MachineSpec,
    Tuning,
    UlyssesAttention,
    Workload,
)
from xstage_lab.units import text

if TYPE_CHECKING:
    from xstage_lab.lab.panel import Panel

Result = tuple[dict[str, Any], list[str]]


def predict(options: argparse.Namespace) -> Result:
    """Predict a workload from a calibration file, or from the machine's published figures."""
    machine = machine_of(options)
    workload, tuning = workload_of(options, machine)
    cal = stored_calibration(options, machine) or supplied(options, analysis.published(machine))
    prediction = analysis.predict(workload, machine, cal, tuning)
    result = _predicted(prediction) | {"provenance": prediction.provenance}
    result["explain"] += catalog.flags(machine)
    seed_of(options)
    lines = [*_what(prediction), row("", "PREDICTED"),
             *(row(key, prediction.summary[key]) for key in SUMMARY_KEYS)]
    return result, [*lines, "", *result["explain"]]


def measure(options: argparse.Namespace) -> Result:
    """Run a workload once on a device."""
    record = measured(options)
    result = {"measured": {key: record.summary[key] for key in SUMMARY_KEYS},
              "summary": record.summary, "provenance": record.provenance,
              "regime_measured": analysis.measured_regime(record)}
    badge = record.provenance["badge"]
    lines = [_in_words(record.parameters), f"{badge}: {record.provenance['source']}.",
             row("", badge), *(row(key, record.summary[key]) for key in SUMMARY_KEYS)]
    if options.out:
        lines.append(f"Saved to {record.save(record_path(options.out))}.")
    return result, lines


def measured(options: argparse.Namespace) -> Record:
    """Return the record of a workload run once on a device."""
    machine = machine_of(options)
    workload, tuning = workload_of(options, machine)
    device = device_of(options, machine)
    return device.measure(build(workload, device.machine, tuning), seed_of(options))


def compare(options: argparse.Namespace) -> Result:
    """Measure a workload and set the prediction beside it; calibrates first if need be."""
    machine = machine_of(options)
    workload, tuning = workload_of(options, machine)
    device = device_of(options, machine)
    prediction, record = predict_and_measure(options, device, workload, tuning)
    result, lines = beside(prediction, analysis.compare(prediction, record), machine)
    if options.out:
        lines += [f"Saved to {record.save(record_path(options.out))}.", ""]
    return result, [*lines, *result["explain"]]


def beside(prediction: analysis.Prediction, comparison: analysis.Comparison,
           machine: MachineSpec) -> Result:
    """Return prediction and measurement side by side; the lines are those before the words."""
    result = _predicted(prediction) | {
        "measured": comparison.measured, "error_ratio": comparison.error_ratio,
        "regime_measured": comparison.regime_measured,
        "explain": [*comparison.explain, *catalog.flags(machine)],
        "provenance": comparison.provenance}
    origin = comparison.provenance["measured"]
    badge = origin["badge"]
    lines = [*_what(prediction), f"{badge}: {origin['source']}.",
             row("", "PREDICTED", badge, "error"),
             *(row(key, comparison.predicted[key], comparison.measured[key],
                   analysis.error_text(key, comparison)) for key in SUMMARY_KEYS)]
    return result, [*lines, ""]


def calibrate(options: argparse.Namespace) -> Result:
    """Measure t0, r_SM, R and Q on a device."""
    device = device_of(options, machine_of(options))
    cal = analysis.calibrate(device, n_producers=options.producers, burst_bytes=options.bytes,
                             progress=None if options.json else _progress())
    at = {"n_producers": cal.n_producers, "burst_bytes": cal.burst_bytes}
    result = {"issue_free_s": cal.issue_free_s(cal.burst_bytes), **at,
              **{name: getattr(cal, name) for name in analysis.PARAMETERS},
              "intervals": cal.intervals, "notes": cal.notes, "faults": cal.faults,
              "provenance": {"badge": cal.badge, "device": cal.device, "machine": cal.machine,
                             "source": cal.source, **at}}
    lines = [row("", f"{cal.badge}, K = {cal.n_producers}, B = {text('_bytes', cal.burst_bytes)}"),
             row("issue_free_s", result["issue_free_s"]),
             *(row(name, getattr(cal, name), " to ".join(
                 text(name, end) for end in cal.intervals.get(name, ())))
               for name in analysis.PARAMETERS), *cal.notes,
             *(f"Do not trust it: {fault}." for fault in cal.faults)]
    if options.out:
        lines.append(f"Saved to {cal.save(options.out)}.")
    return result, lines


def record(options: argparse.Namespace) -> Result:
    """Check, calibrate and sweep this machine, and keep everything as records in a folder."""
    from xstage_lab.recording import Recording, Target
    if not options.out:
        raise XStageError("record needs a folder for its records: --out FOLDER.")
    name, _ = device_name(options)
    if name == "cuda":
        from xstage_lab.devices.cuda_gpus import load_cuda
        load_cuda()  # says what is missing before a folder is made
    else:
        make = maker_of(options, machine_of(options))
    recording = Recording(options.out, options.minutes, say_on_stderr)
    try:
        if name == "cuda":
            from xstage_lab.recording_cuda import record_gpus
            record_gpus(recording)
        else:
            target = Target(name, make)
            recording.calibrate(target)
            recording.sweep(target)
    finally:  # also where it is stopped: what was measured is kept and told
        lines = recording.finish()
    return recording.index, [*lines, f"All of it is in {options.out}."]


def paper(options: argparse.Namespace) -> Result:
    """Set published numbers beside what the law and the simulated device give."""
    from xstage_lab.paper.verb import show
    return show(options.table, say_on_stderr)


def doctor(options: argparse.Namespace) -> Result:
    """Say what this computer has and lacks."""
    from xstage_lab import doctor as examination
    return examination.report(), examination.lines()


def export(options: argparse.Namespace) -> Result:
    """Measure a workload and write every figure of its panel, with data and parameters."""
    from xstage_lab.lab import BurstGap, Tune, Ulysses
    machine = machine_of(options)
    if options.link or options.calibration:
        raise XStageError("export draws a machine's own link and published figures; put another "
                          "link into a machine file and give its path as --machine.")
    workload, tuning = workload_of(options, machine)
    supplied_values = {name: getattr(options, name) for name in analysis.PARAMETERS}
    settings = {"machine": options.machine, **supplied_values}
    if isinstance(workload, BurstTrain):
        settings |= {name: getattr(workload, name) for name in
                     ("n_producers", "burst_bytes", "gap_s", "n_bursts", "sync")}
        return _exported(BurstGap(**settings), options.out or "exports")
    if isinstance(workload, UlyssesAttention):
        settings |= {name: getattr(workload, name) for name in
                     ("sequence", "heads", "head_dim", "n_gpus", "mode", "n_comm_sms")}
        settings |= {name: getattr(tuning, name) for name in
                     ("tile_m", "tile_n", "issue_depth", "n_stages")}
        return _exported(Ulysses(mask="causal" if workload.causal else "full", **settings),
                         options.out or "exports")
    if not isinstance(workload, FusedGemm):
        raise XStageError(f"there is no panel to export {options.workload} from yet.")
    settings |= {name: getattr(workload, name) for name in
                 ("m", "n", "k", "n_gpus", "destinations", "out_dtype")}
    settings |= {name: getattr(tuning, name) for name in
                 ("tile_m", "tile_n", "tile_k", "issue_depth")}
    return _exported(Tune(**settings), options.out or "exports")


def demo(options: argparse.Namespace) -> Result:
    """Go the whole way once: sweep, measure, predict, and write every figure."""
    from xstage_lab.lab import BurstGap, Tune
    files: list[str] = []
    lines: list[str] = []
    for panel, name in ((BurstGap(), "burst-gap"), (Tune(k=1024), "tune")):
        panel.sweep()
        result, told = _exported(panel, str(Path(options.out) / name))
        files += result["files"]
        lines += [*analysis.explain(panel.picture(panel.controls.values()).prediction), *told, ""]
    return {"files": files}, lines


def _exported(panel: Panel, folder: str) -> Result:
    try:
        written = panel.export_all(folder)
    finally:
        panel.close()
    files = [str(path) for each in written for path in each.files]
    notes = list(dict.fromkeys(note for each in written for note in each.notes))
    return {"files": files, "notes": notes}, [f"Wrote {len(files)} files in {folder}.", *notes]


def lab(options: argparse.Namespace) -> Result:
    """Open the notebooks in JupyterLab until it is ended."""
    notebooks = Path(__file__).resolve().parent.parent / "notebooks"
    if not notebooks.is_dir():
        raise XStageError("the notebooks are not beside this installation; clone the project and "
                          "run `make lab` there.")
    ended = subprocess.run(
        [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1",
         f"--ServerApp.port={options.port}", f"--ServerApp.root_dir={notebooks.parent}",
         "--LabApp.default_url=/lab/tree/notebooks/03_tune.ipynb"], check=False)
    return {"status": ended.returncode}, []


def predict_and_measure(
    options: argparse.Namespace, device: Device, workload: Workload, tuning: Tuning | None
) -> tuple[analysis.Prediction, Record]:
    """Calibrate unless a calibration is given, measure once with stores off, then with them."""
    machine, cal = device.machine, calibration_of(options, device)
    t_mma_s = None
    if tuning is not None and not isinstance(workload, BurstTrain) and (
            device.capabilities.any_program):
        t_mma_s = analysis.measure_t_mma(device, workload, tuning, seed_of(options))
    prediction = analysis.predict(workload, machine, cal, tuning, t_mma_s)
    return prediction, device.measure(build(workload, machine, tuning), seed_of(options))


def calibration_of(options: argparse.Namespace, device: Device) -> analysis.Calibration:
    """Return the calibration given, else the device's own; published figures where it replays."""
    stored = stored_calibration(options, device.machine)
    if stored is not None:
        return stored
    if device.capabilities.any_program:
        return analysis.calibrate(device)
    return supplied(options, _recorded_calibration(options, device.machine)
                    or analysis.published(device.machine))


def _recorded_calibration(
    options: argparse.Namespace, machine: MachineSpec
) -> analysis.Calibration | None:
    """Return the calibration that stands beside the records, None where there is none."""
    _, path = device_name(options)
    files = sorted(Path(path or "").glob("calibration*.json")) if path else []
    found = {file.name: cal for file in files
             if (cal := analysis.Calibration.load(file)).machine == machine.name}
    if len(found) > 1:
        raise XStageError(f"{path} holds several calibrations of {machine.name}: "
                          f"{', '.join(found)}. Choose one with --calibration.")
    return next(iter(found.values()), None)


def stored_calibration(
    options: argparse.Namespace, machine: MachineSpec
) -> analysis.Calibration | None:
    """Read the calibration file asked for, with supplied parameters on top."""
    if not options.calibration:
        return None
    cal = analysis.Calibration.load(options.calibration)
    if cal.machine != machine.name:
        raise XStageError(f"the calibration {options.calibration} was taken on {cal.machine}, "
                          f"not on {machine.name}; calibrate that machine.")
    return supplied(options, cal)


def supplied(options: argparse.Namespace, cal: analysis.Calibration) -> analysis.Calibration:
    """Override a calibration by the parameters on the command line."""
    given = {name: getattr(options, name) for name in analysis.PARAMETERS}
    if options.device == "sockets":
        del given["drain_bytes_per_s"]  # there it is the pace that was measured at
    given = {name: value for name, value in given.items() if value is not None}
    return cal.override(**given) if given else cal


def seed_of(options: argparse.Namespace) -> int:
    """Return the seed, a whole number."""
    if not isinstance(options.seed, int) or options.seed < 0:
        raise InvalidValue("seed", options.seed, "whole numbers from 0")
    return options.seed


def record_path(out: str) -> Path:
    """Return the file that a record is saved in: `out` itself, or one in that folder."""
    return Path(out) if out.endswith(".npz") else Path(out) / "record.npz"


def _predicted(prediction: analysis.Prediction) -> dict[str, Any]:
    return {"predicted": prediction.summary, "low": prediction.low, "high": prediction.high,
            "regime": prediction.regime, "margin_ratio": prediction.margin_ratio,
            "terms": prediction.terms, "t_mma_source": prediction.t_mma_source,
            "unfused": prediction.unfused, "fuse_gain_ratio": prediction.fuse_gain_ratio,
            "explain": analysis.explain(prediction)}


def _what(prediction: analysis.Prediction) -> list[str]:
    """What was predicted, and from which calibration."""
    cal = prediction.calibration
    return [_in_words(prediction.parameters),
            f"PREDICTED: law, calibration {cal.name} ({cal.badge}: {cal.source})."]


def _in_words(parameters: dict[str, Any]) -> str:
    shown = (f"{name} = {value:g}" if isinstance(value, float) else
             f"{name} = {len(value)} counts" if isinstance(value, list) else f"{name} = {value}"
             for name, value in parameters.items()
             if name not in ("workload", "n_ctas", "stores") and value is not None)
    return f"{parameters.get('workload', 'workload')}: {', '.join(shown)}."


def row(name: str, *values: float | str) -> str:
    """Return a line of a table: a name and its values."""
    shown = (value if isinstance(value, str) else text(name, value) for value in values)
    return f"{name:<22}" + "".join(f"{value:<16}" for value in shown).rstrip()


def _progress() -> Callable[[float, str], None]:
    """Return what says how far a calibration is, a line for each experiment."""
    said = ""

    def say(done: float, what: str) -> None:
        nonlocal said
        if what.partition(",")[0] != said:
            said = what.partition(",")[0]
            say_on_stderr(f"{done:4.0%} {said}")
    return say


def say_on_stderr(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{line}\n")
