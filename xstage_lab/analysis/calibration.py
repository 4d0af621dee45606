"""The law's parameters, as published of a machine or as fitted to bursts; stored as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xstage_lab.errors import FileRejected, UnknownFact, XStageError, require_number
from xstage_lab.record import to_plain, write_atomic
from xstage_lab.spec import MachineSpec

PARAMETERS = ("issue_latency_s", "per_sm_bytes_per_s", "drain_bytes_per_s", "capacity_bytes")


class Sample(NamedTuple):
    """One train of a calibration.

    Attributes
    ----------
    experiment : str
        `filling` (not fitted), `zero-gap`, `isolated`, `plateau`, `control`, `fewer producers`;
        single bursts also as `..., last` and `..., mean`.
    value_s : float
        Steady period (filling, zero-gap), else mean issue span. `last` and `mean` are the last
        acceptance and the mean span as they would be had all producers started at t0 and filled
        the path to the end.
    """

    experiment: str
    n_producers: int
    burst_bytes: int
    gap_s: float
    value_s: float


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
        90 % interval of each parameter, or the range different sources measured.
    capacity_curve_bytes : tuple of (n_producers, capacity)
        Q(K) at fewer producers.
    assumed : frozenset of str
        Parameters nobody measured.
    notes, faults : tuple of str
        In words: what to know before using it, and what voids it.
    samples : tuple of Sample
        What it was fitted to; empty for published figures.
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
    capacity_curve_bytes: tuple[tuple[int, float], ...] = ()
    assumed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    source: str = ""
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        require_number("issue_latency_s", self.issue_latency_s, low=0.0, unit="s")
        for name in ("per_sm_bytes_per_s", "drain_bytes_per_s"):
            require_number(name, getattr(self, name), low=0.0, open_low=True, unit="B/s")
        if self.capacity_bytes != math.inf:
            require_number("capacity_bytes", self.capacity_bytes, low=0.0, unit="B")

    def issue_free_s(self, burst_bytes: float) -> float:
        """T_iss0 of a burst of `burst_bytes` (s)."""
        return self.issue_latency_s + burst_bytes / self.per_sm_bytes_per_s

    def capacity_at(self, n_producers: int) -> float:
        """Q of `n_producers`: along the measured curve, else as it is (bytes)."""
        if not self.capacity_curve_bytes or n_producers >= self.n_producers:
            return self.capacity_bytes
        points = sorted({(0, 0.0), *self.capacity_curve_bytes,
                         (self.n_producers, self.capacity_bytes)})
        k, held = zip(*points, strict=True)
        return float(np.interp(n_producers, k, held))

    def ends(self) -> tuple[Calibration, Calibration]:
        """The fastest and the slowest calibration that the intervals allow.

        An ASSUMED capacity is anything from unbounded to nothing.
        """
        def end(fast: bool) -> dict[str, float]:
            found = {}
            for name, (low, high) in self.intervals.items():
                best = low if name == "issue_latency_s" else high
                found[name] = best if fast else (high if best == low else low)
            if "capacity_bytes" in self.assumed:
                found["capacity_bytes"] = math.inf if fast else 0.0
            return found
        changes = {"capacity_curve_bytes": ()} if "capacity_bytes" in self.assumed else {}
        return (dataclasses.replace(self, **end(True), **changes),  # type: ignore[arg-type]
                dataclasses.replace(self, **end(False), **changes))  # type: ignore[arg-type]

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
            plain["faults"] = tuple(plain["faults"])
            plain["samples"] = tuple(Sample(*sample) for sample in plain["samples"])
            plain["capacity_curve_bytes"] = tuple(
                (int(k), float(q)) for k, q in plain["capacity_curve_bytes"])
            plain["intervals"] = {  # JSON has no infinity, null stands for it
                name: (math.inf if low is None else low, math.inf if high is None else high)
                for name, (low, high) in plain["intervals"].items()}
            return cls(**plain)
        except OSError as error:
            raise FileRejected(path, f"cannot be read ({error.strerror}).") from None
        except XStageError as error:
            raise FileRejected(path, str(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
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
    slower = ("egress" if link.egress_bytes_per_s <= link.ingress_bytes_per_s else "ingress")
    fields = {"issue_latency_s": "issue_latency_s", "per_sm_bytes_per_s": "per_sm_bytes_per_s",
              f"{slower}_bytes_per_s": "drain_bytes_per_s",
              "path_capacity_bytes": "capacity_bytes"}
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
