"""One command for a machine: check it, calibrate it, sweep it, and keep everything as records.

Every record is a file of its own as soon as it is measured, so that a recording that is cut short
keeps what it has; `index.json` comes last and says what there is. Needs NumPy, Numba and SciPy, and
for the cuda device CuPy.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xstage_lab import analysis, doctor
from xstage_lab import recording_plan as plan
from xstage_lab.analysis import Calibration, Comparison
from xstage_lab.devices.base import Device
from xstage_lab.errors import DeviceUnavailable, Infeasible, XStageError, require_number
from xstage_lab.experiment import Logged
from xstage_lab.record import Record, provenance, to_plain, write_atomic
from xstage_lab.schedule import build
from xstage_lab.spec import FusedGemm, MachineSpec, Tuning
from xstage_lab.units import text
from xstage_lab.worker import Worker

SCHEMA = 1
#: Shares of the time that is left when a part begins; what a part does not need, later ones get.
CALIBRATION_SHARE, LAST_SHARE = 0.4, 1.0
SWEEP_SHARES = {"gap": 0.2, "producers": 0.15, "k": 0.3, "tiles": 0.75, "gpus": LAST_SHARE}
FIRST_K = 1024  # of the GEMM that tells how fast the machine computes
_SEED = 1


class Target(NamedTuple):
    """A device to record.

    Attributes
    ----------
    name : str
        In names of files: `host`, `simulated`, ...
    make : callable
        Makes the device in a worker process; picklable.
    """

    name: str
    make: Callable[[], Device]


class Recording:
    """Records in a folder, and what is known of them.

    Parameters
    ----------
    folder : str or Path
    minutes : float
        Time for all of it.
    tell : callable
        Takes a line about what is being done.

    Raises
    ------
    InvalidValue, FileRejected
        If the time is no time, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path, minutes: float, tell: Callable[[str], None]) -> None:
        require_number("minutes", minutes, low=0.0, high=1e4, open_low=True, unit="min")
        self.folder, self.tell = Path(folder), tell
        self._began = time.monotonic()
        self._ends = self._began + 60.0 * minutes
        self._target = self._part = ""
        self._workers: dict[str, Worker] = {}
        self._calibrated: dict[str, tuple[MachineSpec, Calibration]] = {}
        #: By target: the GEMM whose tiles take as long to compute as to drain.
        self.gemms: dict[str, FusedGemm] = {}
        self.comparisons: dict[str, list[Comparison]] = {}
        self.index: dict[str, Any] = {
            "schema": SCHEMA, "minutes": minutes, "targets": {}, "points": [], "not_measured": {},
            "provenance": provenance("", "record", "python -m xstage_lab record")}
        self.index["doctor"] = doctor.report()
        self._write("doctor.json", self.index["doctor"])

    @property
    def left_s(self) -> float:
        """Time that is left."""
        return max(self._ends - time.monotonic(), 0.0)

    def add(self, record: Record) -> None:
        """Keep a record as a file, at once."""
        points = self.index["points"]
        file = f"{self._target}-{self._part}-{len(points):04d}.npz"
        record.save(self.folder / file)
        points.append({"file": file, "target": self._target, "part": self._part,
                       "accepted_s": record.summary.get("accepted_s")})

    def worker(self, target: Target) -> Worker:
        """Return the process that measures on a target; it ends with `finish`."""
        return self._workers.setdefault(target.name, Worker(target.make))

    def device(self, target: Target) -> Device:
        """Return the target's device; every record it gives is kept."""
        return Logged(self.worker(target), self)

    def calibrate(self, target: Target, share_ratio: float = 1.0) -> None:
        """Calibrate a target, in about a share of the time that is left."""
        self.enter(target.name, "calibration")
        with self._noting(target):
            self._calibrate(target, self.device(target), share_ratio)

    def sweep(self, target: Target, share_ratio: float = 1.0) -> None:
        """Sweep a target that was calibrated, in a share of the time that is left."""
        if target.name not in self._calibrated:
            return
        with self._noting(target):
            self._sweep(target, self.device(target), share_ratio * self.left_s)

    @contextlib.contextmanager
    def _noting(self, target: Target) -> Iterator[None]:
        """Note what fails; what was measured stays."""
        try:
            yield
        except DeviceUnavailable as error:
            self.missing(target.name, str(error))
        except XStageError as error:
            self.missing(f"{target.name}: {self._part}", str(error))

    def missing(self, what: str, why: str) -> None:
        """Note what was not measured."""
        self.index["not_measured"][what] = why
        self.tell(f"not measured: {what}: {why}")

    def enter(self, target: str, part: str) -> None:
        """Say what the next records belong to."""
        self._target, self._part = target, part
        self.tell(f"{target}: {part}")

    def _calibrate(self, target: Target, device: Device, share_ratio: float) -> None:
        machine = device.machine
        self.index["targets"][target.name] = {"machine": machine.name, "badge": device.badge,
                                              "device": device.name}
        cal = analysis.calibrate(device,
                                 limit_s=CALIBRATION_SHARE * share_ratio * self.left_s)
        cal.save(self.folder / f"calibration-{target.name}.json")
        self._calibrated[target.name] = (machine, cal)
        write_atomic(self.folder / "machines.csv",
                     machine_file(list(self._calibrated.values())).encode())
        self.index["targets"][target.name] |= {
            "calibration": f"calibration-{target.name}.json", "notes": cal.notes,
            "faults": cal.faults,
            **{name: getattr(cal, name) for name in analysis.PARAMETERS}}

    def _sweep(self, target: Target, device: Device, within_s: float) -> None:
        machine, cal = self._calibrated[target.name]
        t_mma, ends = _ComputeTimes(device), time.monotonic() + within_s

        def steps(part: str, planned: Iterator[plan.Step]) -> None:
            self.enter(target.name, part)
            now = time.monotonic()
            self._steps(target, device, planned, t_mma, now + SWEEP_SHARES[part] * (ends - now))

        steps("gap", plan.gap_sweep(machine, cal))
        steps("producers", plan.producer_sweep(machine, cal))
        self.enter(target.name, "compute")
        first = plan.balanced_gemm(machine, cal, machine.n_sms)  # whatever its k
        t_first = t_mma.of(FusedGemm(m=first.m, n=first.n, k=FIRST_K, n_gpus=1), Tuning())
        flop_per_s = 2.0 * 128 * 128 * FIRST_K * machine.n_sms / t_first
        gemm = self.gemms[target.name] = plan.balanced_gemm(machine, cal, flop_per_s)
        steps("k", plan.k_sweep(machine, gemm))
        steps("tiles", plan.tile_sweep(machine, gemm))
        steps("gpus", plan.gpu_sweep(machine, gemm))

    def _steps(self, target: Target, device: Device, steps: Iterator[plan.Step],
               t_mma: _ComputeTimes, ends: float) -> None:
        """Measure the steps of a sweep, as many as there is time for."""
        n_left_out = 0
        for step in steps:
            if time.monotonic() >= ends:
                n_left_out += 1
                continue
            try:
                self._step(target, device, step, t_mma)
            except Infeasible as error:
                self.tell(f"not possible: {error}")
        if n_left_out:
            self.missing(f"{target.name}: {self._part}",
                         f"{n_left_out} points: the time was over.")

    def _step(self, target: Target, device: Device, step: plan.Step,
              t_mma: _ComputeTimes) -> None:
        (machine, cal), workload = self._calibrated[target.name], step.workload
        time_s = t_mma.of(workload, step.tuning or Tuning()) if isinstance(
            workload, FusedGemm) else None
        prediction = analysis.predict(workload, machine, cal, step.tuning, time_s)
        record = device.measure(build(workload, machine, step.tuning), seed=_SEED)
        found = analysis.compare(prediction, record)
        self.comparisons.setdefault(target.name, []).append(found)
        coupled = plan.coupled_s(step, prediction.terms, prediction.unfused)
        measured = found.measured["accepted_s"]
        self.index["points"][-1] |= {
            "predicted_s": found.predicted["accepted_s"], "coupled_s": coupled,
            "error_ratio": found.error_ratio["accepted_s"],
            "coupled_error_ratio": coupled / measured - 1.0, "regime": found.regime,
            "regime_measured": found.regime_measured}

    def median_error(self, target: str) -> float:
        """Return the median size of the law's errors on a target, NaN where there are none."""
        return median_size([found.error_ratio["accepted_s"]
                            for found in self.comparisons.get(target, [])])

    def finish(self) -> list[str]:
        """End the workers, write the index and return a short table."""
        for worker in self._workers.values():
            worker.close()
        judged: dict[str, Any] = {}
        for target, comparisons in self.comparisons.items():
            try:
                judged[target] = dataclasses.asdict(analysis.judge(comparisons))
            except XStageError as error:
                judged[target] = {"words": str(error)}
        self.index |= {"judgement": judged, "taken_s": time.monotonic() - self._began}
        self._write("index.json", self.index)
        return table(self.index)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_atomic(self.folder / name, json.dumps(to_plain(content), indent=1).encode())


class _ComputeTimes:
    """Compute times of tiles, each measured once, with stores off."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._found: dict[tuple[FusedGemm, Tuning], float] = {}

    def of(self, gemm: FusedGemm, tuning: Tuning) -> float:
        """Return the compute time of a tile (s)."""
        key = (gemm, tuning)
        if key not in self._found:
            self._found[key] = analysis.measure_t_mma(self._device, gemm, tuning, _SEED)
        return self._found[key]


def machine_file(known: Sequence[tuple[MachineSpec, Calibration]]) -> str:
    """Return machines as a machine file, their store path as it was calibrated.

    Such a file opens the records of a recording on another computer.
    """
    rows = [_machine_row(machine, cal) for machine, cal in known]
    out = io.StringIO(newline="")
    table = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return out.getvalue()


def _machine_row(machine: MachineSpec, cal: Calibration) -> dict[str, Any]:
    held = cal.capacity_bytes
    numbers = {
        "sms": machine.n_sms, "max_gpus": machine.max_gpus, "clock_mhz": machine.clock_hz / 1e6,
        "smem_per_cta_kib": machine.smem_per_cta_bytes / 1024,
        "bf16_tflops_vendor": machine.bf16_flop_per_s / 1e12,
        "fp8_tflops_vendor": machine.fp8_flop_per_s / 1e12,
        "hbm_tb_per_s": machine.hbm_bytes_per_s / 1e12, "l2_mib": machine.l2_bytes / 2**20,
        "store_gb_per_s_measured": cal.drain_bytes_per_s / 1e9,
        "per_sm_gb_per_s": cal.per_sm_bytes_per_s / 1e9,
        "issue_latency_us": cal.issue_latency_s * 1e6, "path_capacity_mib": held / 2**20,
        "per_sm_capacity_kib": held / machine.n_sms / 1024}
    known = {name: repr(value) if math.isfinite(value) else "" for name, value in numbers.items()}
    assumed = [name for name in ("bf16_tflops_vendor", "per_sm_capacity_kib") if known[name]]
    return {"machine": machine.name, "topology": machine.link.topology,
            "link": machine.link.name, **known, "measured_by": cal.source,
            "assumed": " ".join(assumed), "source": machine.source}


def table(index: dict[str, Any]) -> list[str]:
    """Return what a recording found, in a few lines."""
    lines = []
    for name, found in index["targets"].items():
        lines.append(f"{name} ({found['badge']}, {found['machine']})")
        if "calibration" in found:
            lines.append("  " + ", ".join(f"{label} {text(key, found[key])}" for label, key in zip(
                ("t0", "r_SM", "R", "Q"), analysis.PARAMETERS, strict=True)))
        lines += [f"  do not trust it: {fault}." for fault in found.get("faults", ())]
        lines += _errors(index, name)
        if "words" in index["judgement"].get(name, {}):
            lines.append(f"  {index['judgement'][name]['words']}")
    if "checks" in index:
        lines.append(_told_checks(index["checks"]))
        lines += [f"  WRONG: {c['case']}: {c['words']}" for c in index["checks"]
                  if c["outcome"] == "wrong"]
    lines += [f"{line['what']}: {line['words']}" for line in
              (*index.get("paths", ()), *index.get("good", ()))]
    lines += [f"not measured: {what}: {why}" for what, why in index["not_measured"].items()]
    n_files = len(index["points"])
    return [*lines, f"{n_files} records in {index['taken_s']:.0f} s."]


def _errors(index: dict[str, Any], target: str) -> list[str]:
    """Return the errors of each sweep: the law's, and those of the completion-coupled form."""
    lines = []
    for part in SWEEP_SHARES:
        points = [p for p in index["points"] if (p["target"], p["part"]) == (target, part)
                  and "error_ratio" in p]
        if points:
            law, coupled = (median_size([p[key] for p in points if p[key] is not None])
                            for key in ("error_ratio", "coupled_error_ratio"))
            lines.append(f"  {part:<10}{len(points):>3} points, law off by {law:6.1%} in the "
                         f"median, completion-coupled form by {coupled:6.1%}")
    return lines


def median_size(errors: Sequence[float]) -> float:
    """Return the median of the sizes of errors; those that are not known do not count."""
    sizes = sorted(abs(e) for e in errors if not math.isnan(e))
    middle = len(sizes) // 2
    if not sizes:
        return math.nan
    return sizes[middle] if len(sizes) % 2 else (sizes[middle - 1] + sizes[middle]) / 2


def _told_checks(checks: Sequence[dict[str, Any]]) -> str:
    counted = {name: sum(c["outcome"] == name for c in checks)
               for name in ("right", "not possible", "wrong")}
    return "kernels: " + ", ".join(f"{n} {name}" for name, n in counted.items() if n)
