"""The verbs about tiles' own times: traces out, timings of others in."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from xstage_lab import analysis, timings
from xstage_lab import trace as traces
from xstage_lab.command import (
    Result,
    beside,
    measured,
    record_path,
    stored_calibration,
    supplied,
)
from xstage_lab.command_workloads import WORKLOAD_DEFAULTS
from xstage_lab.device_choice import machine_of
from xstage_lab.errors import XStageError
from xstage_lab.record import Record


def trace(options: argparse.Namespace) -> Result:
    """Write the trace of a file of timings, of a record, or of a workload run for it."""
    if not options.out:
        raise XStageError("trace needs a file to write to: --out FILE.json or FILE.json.gz.")
    record = _stored(options) or measured(options)
    path = traces.write(record, options.out)
    badge, source = (record.provenance.get(name) for name in ("badge", "source"))
    result = {"file": str(path), "n_bytes": path.stat().st_size, "provenance": record.provenance}
    return result, [f"{badge}: {source}.", f"Wrote {path}; open it in https://ui.perfetto.dev "
                    "or chrome://tracing."]


def _stored(options: argparse.Namespace) -> Record | None:
    """Return the record that a file holds; None where a workload is to be run."""
    files = {name: getattr(options, name) for name in ("timings", "record")
             if getattr(options, name)}
    if not files:
        return None
    dropped = [name for defaults in WORKLOAD_DEFAULTS.values() for name in defaults
               if getattr(options, name) is not None and not (
                   name == "depth" and options.timings)]
    if len(files) > 1 or dropped:
        other = "--record" if len(files) > 1 else f"--{dropped[0].replace('_', '-')}"
        raise XStageError(f"--{next(iter(files))} says what to trace; leave {other} out.")
    if options.timings:
        return timings.read(options.timings, issue_depth=options.depth)
    return Record.load(options.record)


def explain(options: argparse.Namespace) -> Result:
    """Set the times of somebody's own kernel beside the law, with the reasons in words."""
    record = timings.read(options.timings, machine=options.machine, source=options.source,
                          issue_depth=options.depth, n_gpus=options.gpus)
    options.machine = record.provenance.get("machine")
    if not options.machine:
        raise XStageError(f"say what {Path(options.timings).name} ran on: --machine NAME, or a "
                          "line '# machine: NAME' in the file.")
    machine = machine_of(options)
    record = dataclasses.replace(record, provenance=record.provenance | {"machine": machine.name})
    cal = stored_calibration(options, machine) or supplied(
        options, analysis.published(machine, record.parameters["n_ctas"]))
    result, lines = beside(analysis.predict_timings(record, machine, cal),
                           analysis.explain_timings(record, machine, cal), machine)
    result["summary"] = record.summary
    if options.out:
        lines += [f"Saved to {record.save(record_path(options.out))}.", ""]
    return result, [*lines, *result["explain"]]
