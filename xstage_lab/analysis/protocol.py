"""Four experiments with bursts that calibrate the law on any device.

What is fitted comes from bursts alone. Nothing is refitted to a workload afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xstage_lab.analysis.calibration import PARAMETERS, Calibration, Sample
from xstage_lab.analysis.fit import Floats, checks, fit, free_issue, intervals
from xstage_lab.devices.base import Device
from xstage_lab.errors import XStageError, require_number
from xstage_lab.record import Record
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain

Progress = Callable[[float, str], None]
Trains = Generator[Sample, None, float]
T = TypeVar("T")

N_ZERO_GAP_BURSTS = 40   # drift apart for half of them, then measure
MOST_ZERO_GAP_BURSTS, STEADY_RATIO = 640, 1.003
N_PLATEAU_BURSTS = 8
MOST_DOUBLINGS = 20
LONGEST_BURST_S, LARGEST_BURST_BYTES = 1.0, 2**30  # no path holds more
STORE_BYTES = 16         # kernels store so many bytes at a time
SETTLED_RATIO = 1.02     # a backlog that grows less per doubling has met the capacity
EXPECTED_SAMPLES = 120    # for the progress alone


def calibrate(
    device: Device,
    *,
    n_producers: int | None = None,
    burst_bytes: int = 32 * 1024,
    repeats: int = 3,
    limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Calibration:
    """Measure t0, r_SM, R and Q on a device.

    Takes what `experiments` takes; `progress` is called with the share done and what was
    measured.

    Raises
    ------
    XStageError
        If the device cannot run bursts.
    """
    running = experiments(device, n_producers=n_producers, burst_bytes=burst_bytes,
                          repeats=repeats, limit_s=limit_s)
    done = 0
    while True:
        try:
            sample = next(running)
        except StopIteration as end:
            calibration: Calibration = end.value
            return calibration
        done += 1
        if progress is not None:
            progress(min(done / EXPECTED_SAMPLES, 0.99), sample.experiment)


def experiments(
    device: Device,
    *,
    n_producers: int | None = None,
    burst_bytes: int = 32 * 1024,
    repeats: int = 3,
    limit_s: float = 60.0,
) -> Generator[Sample, None, Calibration]:
    """Yield the samples of a calibration as they are measured, and return the calibration.

    Zero-gap trains at several splits of one V into K and B give R. Isolated bursts of growing V
    give Q from those past the knee, each as V - R (span - t0); the knee is looked for, then
    sampled. Trains below the knee with gaps that outlast the backlog give t0 and r_SM from their
    plateau. The same with local stores is the control.

    Parameters
    ----------
    device : Device
        Must have times and run any program.
    n_producers : int, optional
        K, the device's SM count if left out.
    burst_bytes : int
        B of the zero-gap trains; also where `issue_free_s` is quoted.
    repeats : int
        Runs of each train that is fitted to.
    limit_s : float
        No further repeats are begun after so long.

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
    require_number("repeats", repeats, low=1, high=1000, integer=True)
    protocol = _Protocol(device, int(k), repeats, limit_s)
    yield from protocol.run(int(burst_bytes))
    samples = protocol.samples
    found = fit(samples)
    notes, faults = checks(samples, found, device.machine.link.vendor_bytes_per_s)
    return Calibration(
        name=f"{device.name} {device.machine.name}", device=device.name,
        machine=device.machine.name, badge=device.badge,
        issue_latency_s=found.issue_latency_s, per_sm_bytes_per_s=found.per_sm_bytes_per_s,
        drain_bytes_per_s=found.drain_bytes_per_s, capacity_bytes=found.capacity_bytes,
        n_producers=int(k), burst_bytes=int(burst_bytes),
        intervals=dict(zip(PARAMETERS, intervals(samples), strict=True)),
        capacity_curve_bytes=found.capacity_curve_bytes, notes=notes, faults=faults,
        samples=tuple(samples),
        source=f"four burst experiments on {device.name} {device.machine.name}")


class _Protocol:
    """Runs the trains of a calibration in an order that adapts to what is found."""

    def __init__(self, device: Device, n_producers: int, repeats: int, limit_s: float) -> None:
        self.device, self.k, self.repeats = device, n_producers, repeats
        self.ends = time.monotonic() + limit_s
        self.samples: list[Sample] = []
        self.n_trains = 0
        self.path_share = math.nan  # r_SM / R once both are known
        self.early_s = 0.0          # by which the path is busy before t0
        self.starts: list[float] = []

    def run(self, burst_bytes: int) -> Iterator[Sample]:
        """Yield every sample of the four experiments."""
        k, splits = self.k, []
        # In a full mesh every peer has a link of its own, and needs as many producers as others.
        peers = max(self.device.machine.full_rate_gpus - 1, 1)
        whole, half = (max(n // peers, 1) * peers if k >= peers else max(n, 1) for n in (k, k // 2))
        for k_split, b in ((whole, burst_bytes), (whole, 4 * burst_bytes),
                           (half, burst_bytes * whole // half)):
            splits.append((k_split, b, (yield from self.bursts_to_fill(k_split, b))))
        for k_split, b, n in self.repeated(splits):
            yield from self.train("zero-gap", k_split, b, 0.0, n)
        # Splits that do not fill the path are slower, and none is faster than it drains.
        drain = max(s.n_producers * s.burst_bytes / s.value_s for s in self.samples)
        largest, knee = yield from self.find_knee(max(burst_bytes // 64, 64), drain)
        gap = 3 * k * knee / drain
        below = min(0.4 * knee, burst_bytes)  # t0 is lost in the spans of much larger ones
        for b in self.repeated([int(below * share) for share in (0.25, 0.5, 0.75, 1.0)]):
            yield from self.train("plateau", k, b, gap, N_PLATEAU_BURSTS)
        latency, per_sm = free_issue(self.samples)
        self.path_share = per_sm / drain
        self.early_s = latency * (1 - float(np.mean(self.starts)))
        past = sorted({int(b) for b in (1.5 * knee, 2 * knee, 3 * knee, largest)})
        for b in self.repeated(past):
            yield from self.train("isolated", k, b, 0.0, 1)
        for wait in (0.0, gap):
            yield from self.train("control", k, int(knee), wait, N_PLATEAU_BURSTS, "local")
        for fewer in sorted({max(k * share // 8, 1) for share in (6, 4, 2, 1)} - {k}, reverse=True):
            for times in (2.5, 3.5):
                b = int(times * knee * k / fewer)
                yield from self.train("fewer producers", fewer, b, 0.0, 1)
        # The first train once more shows drift.
        yield from self.train("zero-gap", whole, burst_bytes, 0.0, splits[0][2])

    def bursts_to_fill(self, k: int, b: int) -> Generator[Sample, None, int]:
        """Double a zero-gap train until its second half no longer sees buffers fill.

        While the path and the destination's buffer fill up, bursts are accepted faster than R.
        """
        n = N_ZERO_GAP_BURSTS
        period = yield from self.train("filling", k, b, 0.0, n)
        while n < MOST_ZERO_GAP_BURSTS:
            longer = yield from self.train("filling", k, b, 0.0, 2 * n)
            if longer < STEADY_RATIO * period:
                break
            n, period = 2 * n, longer
        return n

    def repeated(self, settings: Sequence[T]) -> Iterator[T]:
        """Yield the settings once for each repeat the time limit allows."""
        for repeat in range(self.repeats):
            if repeat == 0 or time.monotonic() < self.ends:
                yield from settings

    def find_knee(
        self, b: int, drain: float
    ) -> Generator[Sample, None, tuple[int, float]]:
        """Double an isolated burst until its backlog stops growing.

        The backlog V - R span grows with V up to Q and then stays. Returns the last B, and B at
        the knee, where the line through the first bursts meets the last backlog.
        """
        sizes: list[int] = []
        spans: list[float] = []
        backlog: list[float] = []
        for _ in range(MOST_DOUBLINGS):
            sizes.append(b)
            span = yield from self.train("isolated", self.k, b, 0.0, 1)
            held = self.k * b - drain * span
            if held < SETTLED_RATIO * max(backlog, default=0.0):  # full, or it was disturbed
                span = yield from self.train("isolated", self.k, b, 0.0, 1)
                held = max(held, self.k * b - drain * span)
            spans.append(span)
            backlog.append(held)
            self.path_share = _fastest(sizes, spans) / drain
            grows = backlog[-1] >= SETTLED_RATIO * max(backlog[:-1], default=0.0)
            settled = len(sizes) > 3 and backlog[-2] > 0 and not grows
            if (settled or self.samples[-1].value_s > LONGEST_BURST_S
                    or self.k * b > LARGEST_BURST_BYTES):
                break
            b *= 2
        # A disturbance delays, so that the steepest growth is the one that was disturbed least.
        growth = max((held - backlog[0]) / (size - sizes[0])
                     for size, held in zip(sizes[1:], backlog[1:], strict=True))
        if growth <= 0 or max(backlog) <= backlog[0]:
            return sizes[-1], float(sizes[len(sizes) // 2])  # never blocked
        knee = sizes[0] + (max(backlog) - backlog[0]) / growth
        return sizes[-1], float(min(max(knee, sizes[0]), sizes[-1]))

    def train(self, experiment: str, k: int, b: int, gap: float, n: int,
              stores: str = "remote") -> Trains:
        """Run one train, keep and yield its sample, and return its value."""
        machine = self.device.machine
        size = max(int(b) // STORE_BYTES, 1) * STORE_BYTES
        workload = BurstTrain(n_producers=k, burst_bytes=size, gap_s=min(gap, 10.0),
                              n_bursts=n, n_gpus=machine.full_rate_gpus)
        record = self.device.measure(build(workload, machine, stores=stores), seed=self.n_trains)
        self.n_trains += 1
        key = "period_s" if experiment in ("filling", "zero-gap") else "issue_s"
        value = record.summary[key]
        if not (math.isfinite(value) and value > 0):
            raise XStageError(f"calibration: {experiment} trains of {k} x {b} bytes have no "
                              f"{key}; the device must report it.")
        found = [Sample(experiment, k, workload.burst_bytes, workload.gap_s, value)]
        if experiment == "plateau":
            self.starts.append(first_starts(record, self.path_share))
        if experiment in ("isolated", "fewer producers") and self.path_share > 0:
            ends = {"mean": value, "last": filled_span(record, self.path_share)}
            found += [found[0]._replace(experiment=f"{experiment}, {end}",
                                        value_s=span + self.early_s) for end, span in ends.items()]
        self.samples += found
        yield from found
        return found[-1].value_s


def _fastest(sizes: Sequence[int], spans: Sequence[float]) -> float:
    """One SM's issue rate as the growth of spans shows it; bursts that were blocked show less."""
    rates = [(b - sizes[0]) / (span - spans[0])
             for b, span in zip(sizes, spans, strict=True) if span > spans[0]]
    return max(rates, default=math.inf)


def filled_span(record: Record, path_share: float) -> float:
    """Time to the last acceptance of a burst, less what its last producers left the path idle.

    Parameters
    ----------
    record : Record
        Of one burst, with times per tile.
    path_share : float
        Share of the path that one producer fills, r_SM / R.
    """
    if record.tiles is None:
        return record.summary["accepted_s"]
    bursts = record.tiles[record.tiles["gpu"] == 0]
    ends = np.sort(bursts["issue_end_s"])
    left = np.arange(ends.size - 1, 0, -1)  # producers still issuing after each but the last
    return float(ends[-1] - bursts["issue_start_s"].min() - _idle(ends, left, path_share))


def first_starts(record: Record, path_share: float) -> float:
    """When the path is filled, over the mean start-up of a producer: 1 unless some are earlier.

    Producers' spans of free bursts vary as their start-ups do. The path drains as fast as it can
    once enough of them have started.

    Parameters
    ----------
    record : Record
        Of a train of free bursts, with times per tile.
    path_share : float
        Share of the path that one producer fills, r_SM / R.
    """
    if record.tiles is None:
        return 1.0
    bursts = record.tiles[record.tiles["gpu"] == 0]
    spans = (bursts["issue_end_s"] - bursts["issue_start_s"]).reshape(N_PLATEAU_BURSTS, -1)
    spans = np.sort(spans, axis=1) / spans.mean(axis=1, keepdims=True)
    started = np.arange(1, spans.shape[1])
    return float((spans[:, 0] + _idle(spans, started, path_share)).mean())


def _idle(times: Floats, n_between: NDArray[np.int64], path_share: float) -> Floats:
    """Time that the path is idle between `times`, filled by so many producers from each on."""
    idle: Floats = np.diff(times) * (1 - np.minimum(n_between * path_share, 1.0))
    return np.asarray(idle.sum(axis=-1))
