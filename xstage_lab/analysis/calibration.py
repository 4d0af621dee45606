"""The law's parameters: as published, or measured on a device by four experiments.

What is fitted here comes from bursts alone. Nothing is refitted to a workload afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from xstage_lab.devices.base import Device
from xstage_lab.errors import FileRejected, UnknownFact, XStageError, require_number
from xstage_lab.record import Record, to_plain, write_atomic
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain, MachineSpec

Progress = Callable[[float, str], None]

PARAMETERS = ("issue_latency_s", "per_sm_bytes_per_s", "drain_bytes_per_s", "capacity_bytes")
ISSUE_BOUND_NOTE = ("zero-gap trains never filled the path: the drain rate is at least this, the "
                    "producers limit")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The law's parameters on one device.

    Attributes
    ----------
    issue_latency_s, per_sm_bytes_per_s : float
        t0 and r_SM of T_iss0(B) = t0 + B / r_SM.
    drain_bytes_per_s : float
        R, payload bytes of one GPU's stores to others.
    capacity_bytes : float
        Q at `n_producers`; inf where no knee was found.
    n_producers, burst_bytes : int
        The K and B they hold for.
    intervals : dict of str to (low, high)
        Range of each parameter.
    assumed : frozenset of str
        Parameters nobody measured.
    notes : tuple of str
        What to know before trusting it, in words.
    """

    name: str
    device: str
    machine: str
    badge: str
    issue_latency_s: float
    per_sm_bytes_per_s: float
    drain_bytes_per_s: float
    capacity_bytes: float
    n_producers: int
    burst_bytes: int
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        require_number("issue_latency_s", self.issue_latency_s, low=0.0, unit="s")
        for name in ("per_sm_bytes_per_s", "drain_bytes_per_s"):
            require_number(name, getattr(self, name), low=0.0, open_low=True, unit="B/s")
        if self.capacity_bytes != math.inf:
            require_number("capacity_bytes", self.capacity_bytes, low=0.0, unit="B")

    def issue_free_s(self, burst_bytes: float) -> float:
        """T_iss0 of a burst of `burst_bytes` (s)."""
        return self.issue_latency_s + burst_bytes / self.per_sm_bytes_per_s

    def override(self, **values: float) -> Calibration:
        """Return a copy with supplied parameters, which become ASSUMED."""
        return dataclasses.replace(self, **values,  # type: ignore[arg-type]
                                   assumed=self.assumed | frozenset(values))

    def save(self, path: str | Path) -> Path:
        """Write the calibration as JSON, atomically."""
        plain = to_plain(dataclasses.asdict(self))
        plain["capacity_bytes"] = None if math.isinf(self.capacity_bytes) else self.capacity_bytes
        write_atomic(path, json.dumps(plain, indent=1).encode())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a calibration written by `save`; raises `FileRejected` with the reason."""
        try:
            plain: dict[str, Any] = json.loads(Path(path).read_text())
            if plain["capacity_bytes"] is None:
                plain["capacity_bytes"] = math.inf
            plain["assumed"], plain["notes"] = frozenset(plain["assumed"]), tuple(plain["notes"])
            plain["intervals"] = {k: (v[0], v[1]) for k, v in plain["intervals"].items()}
            return cls(**plain)
        except OSError as error:
            raise FileRejected(path, f"cannot be read ({error.strerror}).") from None
        except XStageError as error:
            raise FileRejected(path, str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileRejected(path, f"not a calibration ({error}); calibrate again.") from None


def published(machine: MachineSpec, n_producers: int | None = None) -> Calibration:
    """Take a machine's published figures as a calibration; what is supposed is named so.

    `n_producers` is the K for which Q is wanted, all SMs if left out.

    Raises
    ------
    UnknownFact
        If a parameter is not known; `catalog.with_assumptions` supplies what may be supposed.
    """
    link, k = machine.link, n_producers or machine.n_sms
    values = {
        "issue_latency_s": link.issue_latency_s,
        "per_sm_bytes_per_s": link.per_sm_bytes_per_s,
        "drain_bytes_per_s": min(link.egress_bytes_per_s, link.ingress_bytes_per_s),
        "capacity_bytes": min(k * link.per_sm_capacity_bytes,
                              link.path_capacity_bytes),
    }
    for name, value in values.items():
        if math.isnan(value):
            raise UnknownFact(name, machine.name, "enter one, or calibrate a device.")
    fields = {"issue_latency_s": "issue_latency_s", "per_sm_bytes_per_s": "per_sm_bytes_per_s",
              "egress_bytes_per_s": "drain_bytes_per_s", "path_capacity_bytes": "capacity_bytes"}
    if k * link.per_sm_capacity_bytes < link.path_capacity_bytes:
        del fields["path_capacity_bytes"]  # the producers' own limits decide
        fields["per_sm_capacity_bytes"] = "capacity_bytes"
    assumed = frozenset(fields[name] for name in link.assumed if name in fields)
    low, high = link.egress_low_bytes_per_s, link.egress_high_bytes_per_s
    intervals = {} if math.isnan(low) else {"drain_bytes_per_s": (low, high)}
    return Calibration(
        name=f"published {machine.name}", device="published", machine=machine.name,
        badge="ASSUMED" if assumed == set(PARAMETERS) else "RECORDED",
        issue_latency_s=values["issue_latency_s"],
        per_sm_bytes_per_s=values["per_sm_bytes_per_s"],
        drain_bytes_per_s=values["drain_bytes_per_s"], capacity_bytes=values["capacity_bytes"],
        n_producers=k, burst_bytes=32 * 1024, intervals=intervals, assumed=assumed,
        source=link.source or machine.source)


def calibrate(
    device: Device,
    *,
    n_producers: int | None = None,
    burst_bytes: int = 32 * 1024,
    progress: Progress | None = None,
) -> Calibration:
    """Measure t0, r_SM, R and Q on a device with bursts.

    Four experiments: zero-gap trains at several splits of one V into K and B give R; isolated
    bursts of growing V give Q from those past the knee, each as Q = V - R (span - t0); trains
    below the knee with large gaps give t0 and r_SM from their plateaus; the same with local
    stores is the control.

    Parameters
    ----------
    device : Device
        Must have times and run any program.
    n_producers : int, optional
        K, the device's SM count if left out.
    burst_bytes : int
        B of the zero-gap trains; also where `issue_free_s` is quoted.
    progress : callable, optional
        Called with the share done and what is being measured.

    Raises
    ------
    XStageError
        If the device cannot run bursts.
    """
    if not (device.capabilities.times and device.capabilities.any_program):
        raise XStageError(f"the device {device.name} cannot be calibrated: it replays or has no "
                          "times. Use the calibration stored with its records.")
    k = device.machine.n_sms if n_producers is None else n_producers
    require_number("n_producers", k, low=1, high=device.machine.n_sms, integer=True, unit="CTAs")
    require_number("burst_bytes", burst_bytes, low=1024, high=2**30, integer=True, unit="B")
    bench = _Bench(device, int(k), progress or (lambda _, __: None))
    drains = bench.zero_gap_rates(burst_bytes)
    drain = float(np.mean(drains))
    free = bench.isolated_spans(burst_bytes, drain)
    latency, per_sm = bench.plateau(free, drain)
    held = _capacities(free, drain, latency, per_sm, bench.k)
    control = bench.local_control(free)
    notes = _notes(bench.k, drain, drains, per_sm, held, control)
    intervals = {"drain_bytes_per_s": (min(drains), max(drains))}
    if held:
        intervals["capacity_bytes"] = (min(held), max(held))
    return Calibration(
        name=f"{device.name} {device.machine.name}", device=device.name,
        machine=device.machine.name, badge=device.badge, issue_latency_s=latency,
        per_sm_bytes_per_s=per_sm, drain_bytes_per_s=drain,
        capacity_bytes=float(np.median(held)) if held else math.inf,
        n_producers=bench.k, burst_bytes=burst_bytes, intervals=intervals, notes=notes,
        source=f"four burst experiments on {device.name} {device.machine.name}")


class _Bench:
    """Runs the trains of a calibration and counts them for the progress."""

    def __init__(self, device: Device, n_producers: int, progress: Progress) -> None:
        self.device, self.k, self.progress = device, n_producers, progress
        self.done = 0

    def train(self, what: str, k: int, size: int, gap: float, n: int,
              stores: str = "remote") -> Record:
        self.progress(min(self.done / 24, 1.0), what)
        self.done += 1
        machine = self.device.machine
        workload = BurstTrain(n_producers=k, burst_bytes=max(int(size), 1), gap_s=gap, n_bursts=n,
                              n_gpus=machine.full_rate_gpus)
        return self.device.measure(build(workload, machine, stores=stores), seed=self.done)

    def zero_gap_rates(self, size: int) -> list[float]:
        """Steady store rate of one GPU for splits of V into K and B (B/s)."""
        rates = []
        for k, b in ((self.k, size), (self.k, 4 * size), (max(self.k // 2, 1), 2 * size)):
            record = self.train("zero-gap trains: drain rate", k, b, 0.0, 40)
            rates.append(k * b / record.summary["period_s"])
        return rates if min(rates) > 0.97 * max(rates) else [max(rates)]

    def isolated_spans(self, size: int, drain: float) -> dict[int, float]:
        """Time to accept a single burst, by B, from far below the knee to well past it."""
        spans: dict[int, float] = {}
        for b in self._growing(size):
            record = self.train("isolated bursts: capacity", self.k, b, 0.0, 1)
            spans[b] = record.summary["accepted_s"]
            first = min(spans)
            free = spans[first] / first * b
            if len(spans) > 4 and spans[b] > 2 * free and self._past(spans, drain) >= 4:
                break
        return spans

    def _growing(self, size: int) -> Iterator[int]:
        b = max(size // 64, 16)
        for _ in range(16):
            yield b
            b = int(b * 1.6) if b < 2**34 else b

    def _past(self, spans: dict[int, float], drain: float) -> int:
        """How many of the spans grow at the drain rate."""
        sizes = sorted(spans)
        slopes = [(spans[b] - spans[a]) / (b - a) for a, b in pairwise(sizes)]
        return sum(slope > 0.9 * self.k / drain for slope in slopes)

    def plateau(self, spans: dict[int, float], drain: float) -> tuple[float, float]:
        """Fit t0 and r_SM through mean spans of trains whose gaps outlast the path's backlog."""
        sizes = sorted(spans)
        free = [b for b in sizes if spans[b] < 1.05 * spans[sizes[0]] / sizes[0] * b] or sizes[:1]
        largest = max(free[-1] // 2, 16)
        points = []
        for b in (largest, largest * 3 // 4, largest // 2, largest // 4):
            gap = 4 * self.k * largest / drain + spans[sizes[0]]
            record = self.train("large gaps: free issue time", self.k, b, gap, 12)
            points.append((b, record.summary["issue_s"]))
        b, span = np.array(points, dtype=float).T
        slope, latency = np.polyfit(b, span, 1)
        if latency < 0:
            slope, latency = float((b * span).sum() / (b * b).sum()), 0.0
        return float(latency), float(1 / slope)

    def local_control(self, spans: dict[int, float]) -> float:
        """Issue time at zero gap over that at a large gap, with stores to own memory."""
        b = sorted(spans)[len(spans) // 2]
        tight, loose = (self.train("local stores: control", self.k, b, gap, 12, "local")
                        .summary["issue_s"] for gap in (0.0, 4 * spans[b]))
        return tight / loose


def _capacities(spans: dict[int, float], drain: float, latency: float, per_sm: float,
                k: int) -> list[float]:
    """Q from each isolated burst past the knee, V - R (span - t0) (bytes)."""
    past = [b for b, span in spans.items() if span > 1.2 * (latency + b / per_sm)]
    return [k * b - drain * (spans[b] - latency) for b in past[-5:]]


def _notes(k: int, drain: float, drains: list[float], per_sm: float, held: list[float],
           control: float) -> tuple[str, ...]:
    notes = []
    if k * per_sm < 1.02 * drain:
        notes.append(ISSUE_BOUND_NOTE)
    if len(drains) == 1:
        notes.append("splits of one volume disagree on the drain rate; the highest was taken")
    if not held:
        notes.append("no burst was blocked: the capacity is larger than any burst tried")
    if control > 1.1:
        notes.append(f"the local-store control is sensitive to the gap (x {control:.2f}): what "
                     "is measured is not the remote path alone")
    return tuple(notes)
