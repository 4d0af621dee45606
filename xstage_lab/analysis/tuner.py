"""The tuner: predict every candidate, measure the promising few, answer with the best.

Which one is measured next is a matter of the law's own error. What was measured says how far off
the law is near there and in general (a Gaussian process over the logarithm of measured over
predicted), and the candidate with the largest expected gain over the best so far comes next.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab import experiment
from xstage_lab.analysis.advice import Answer, Found, answer, measured_times
from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.candidates import Candidates, Choice, candidates
from xstage_lab.analysis.space import Space
from xstage_lab.devices.base import Device, settings
from xstage_lab.errors import (
    Infeasible,
    InvalidValue,
    NotMeasured,
    UnknownName,
    XStageError,
    require_number,
)
from xstage_lab.record import Record, to_plain
from xstage_lab.runlog import Run, RunLog, as_logged, code_version
from xstage_lab.schedule import build
from xstage_lab.spec import MachineSpec, Workload

Floats = NDArray[np.float64]

BUDGET_RATIO, LEAST_BUDGET = 0.05, 8
# What the bench finds the law to be off by, and the measurements that such knowledge counts as.
LAW_ERROR_RATIO, INCAST_ERROR_RATIO, KNOWLEDGE = 0.08, 0.20, 4
LEAST_ERROR_RATIO = 0.01
REACH_OCTAVES = 2.0      # how far apart in tile or depth the law's errors have little in common
SHARED = 0.3             # the part of its error that is common to all
NOISE = 1e-4
FEWEST, SURE_SIGMAS, GAIN_RATIO = 4, 3.0, 0.005  # when nobody is expected to be faster
# What says that a device does not run a candidate, and not that something went wrong.
REFUSALS = (Infeasible, InvalidValue, UnknownName, NotMeasured)


class Trial(NamedTuple):
    """A measurement of the search.

    Attributes
    ----------
    choice : Choice
    record : Record
        With stores to its own memory (`local`) it is the compute of compute-then-copy.
    n_measured, budget : int
        So far, this one included, and at most.
    from_log : bool
        Whether it was measured by an earlier search, and taken from the log.
    """

    choice: Choice
    record: Record
    n_measured: int
    budget: int
    from_log: bool


def tune(
    workload: Workload,
    machine: MachineSpec,
    calibration: Calibration | Mapping[str, Calibration],
    space: Space | None = None,
    budget: int | None = None,
    *,
    progress: Callable[[float, str], None] | None = None,
    **options: Any,
) -> Answer:
    """Find the fastest configuration; takes what `search` takes.

    `progress` is called with the share of the budget spent and a few words.
    """
    running = search(workload, machine, calibration, space, budget, **options)
    while True:
        try:
            trial = next(running)
        except StopIteration as end:
            found: Answer = end.value
            return found
        if progress is not None:
            progress(trial.n_measured / trial.budget,
                     f"{trial.choice.label()}{' (from the run log)' if trial.from_log else ''}")


def search(
    workload: Workload,
    machine: MachineSpec,
    calibration: Calibration | Mapping[str, Calibration],
    space: Space | None = None,
    budget: int | None = None,
    *,
    device: Device | Mapping[str, Device] | None = None,
    smem_limit_bytes: float = math.inf,
    max_sms: int | None = None,
    seed: int = 0,
    log: RunLog | None = None,
    stop: Callable[[], bool] | None = None,
) -> Generator[Trial, None, Answer]:
    """Yield the measurements of a search as they are made, and return its answer.

    Parameters
    ----------
    workload : FusedGemm, MoELayer or UlyssesAttention
    calibration : Calibration, or mapping of str to Calibration
        A mapping searches over store paths, by name.
    space : Space, optional
        `Space.of` the workload and the machine if left out.
    budget : int, optional
        Measurements at most, 5 % of the candidates if left out; one for each measures them all.
        One of them is compute-then-copy's compute.
    device : Device, or mapping of str to Device, optional
        As calibrations are; without one the answer is PREDICTED.
    smem_limit_bytes : float
        Shared memory of a CTA that is allowed, besides what the machine allows (bytes).
    max_sms : int, optional
        SMs that are allowed.
    log : RunLog, optional
        Every point goes into it; what it already holds of this device, at these parameters and
        this seed, by this version of the code, is taken from it.
    stop : callable, optional
        Asked between points; once it says true, the answer is made of what there is.

    Raises
    ------
    Infeasible
        If nothing in the space can run, saying which limit excludes how many.
    XStageError
        If an argument is out of range; whatever the device or the log raises.
    """
    calibrations = calibration if isinstance(calibration, Mapping) else {"": calibration}
    devices = device if isinstance(device, Mapping) else {"": device} if device else {}
    if devices and devices.keys() != calibrations.keys():
        raise XStageError("calibrations and devices must be of the same store paths.")
    of = candidates(workload, machine, calibrations, space or Space.of(workload, machine),
                    smem_limit_bytes=smem_limit_bytes, max_sms=max_sms)
    if budget is None:
        budget = min(max(LEAST_BUDGET, int(BUDGET_RATIO * len(of))), len(of) + 1)
    require_number("budget", budget, low=0, high=10**9, integer=True, unit="measurements")
    made = _Search(of, machine, devices, int(budget), seed, log, stop or (lambda: False))
    if devices and budget:
        yield from made.run()
    return answer(of, machine, calibrations, made.found())


class _Search:
    """What was measured of the candidates so far."""

    def __init__(self, of: Candidates, machine: MachineSpec, devices: Mapping[str, Device],
                 budget: int, seed: int, log: RunLog | None, stop: Callable[[], bool]) -> None:
        self.of, self.machine, self.devices, self.budget = of, machine, devices, budget
        self.seed, self.log, self.stop = seed, log, stop
        self.features = of.features()
        incast = getattr(of.choice(0).workload, "destinations", "") == "row-owner-unrotated"
        self.law_error = INCAST_ERROR_RATIO if incast else LAW_ERROR_RATIO
        self.preference = of.preference()
        self.open = np.ones(len(of), bool)  # may still be measured
        self.records: dict[int, Record] = {}
        self.local: tuple[int, Record] | None = None
        self.refused: dict[int, str] = {}
        self.logged = {path: _logged(log, each, seed) for path, each in devices.items()}

    def run(self) -> Generator[Trial, None, None]:
        """Measure until nobody is expected to be faster, or the budget is spent."""
        copies = self.of.choice(0).workload.n_gpus > 1
        kept = 1 if copies and 3 <= self.budget < len(self.of) else 0  # for compute-then-copy
        while len(self.records) < self.budget - kept and not self.stop():
            chosen = self.next()
            if chosen is None:
                break
            self.open[chosen] = False
            try:
                trial = self.measure(self.of.choice(chosen))
            except REFUSALS as error:
                self.refused[chosen] = str(error)
                continue
            if trial is not None:
                self.records[chosen] = trial.record
                yield trial
        if not copies or not 0 < len(self.records) < self.budget:
            return
        for chosen in np.lexsort((self.preference, self.of.unfused_s.round(12))).tolist():
            with contextlib.suppress(*REFUSALS):
                trial = None if self.stop() else self.measure(self.of.choice(chosen), "local")
                if trial is not None:
                    self.local = chosen, trial.record
                    yield trial
                return

    def found(self) -> Found:
        """Return what was found so far; raises where the device runs nothing of it."""
        if len(self.refused) == len(self.of):
            raise Infeasible(f"the device runs none of the {len(self.of):,} configurations: "
                             f"{self.refused[0]}")
        expected = np.exp(self.expected()[0])
        hopeful = self.hopes()[1] if self.records else self.open
        return Found(self.records, self.local, self.refused, expected, int(np.sum(hopeful)))

    def next(self) -> int | None:
        """Return the candidate to measure next, or None where it is not worth while.

        Equals are told apart by their tiles, never by the order in which a space was written.
        """
        left = np.flatnonzero(self.open)
        if not left.size:
            return None
        if not self.records:
            merit = -np.log(self.of.total_s)
        else:
            merit, hopeful = self.hopes()
            everything = self.budget >= len(self.of)
            if not (everything or hopeful.any() or len(self.records) < FEWEST):
                return None
        return int(left[np.lexsort((self.preference[left], -merit[left].round(9)))[0]])

    def hopes(self) -> tuple[Floats, NDArray[np.bool_]]:
        """Expected gain of measuring each candidate, and whether it may be faster at all.

        The gain is the mean of what it is faster than the best, as a logarithm.
        """
        from scipy.special import ndtr
        expected, sigma = self.expected()
        ahead = np.log(np.nanmin(measured_times(self.of, self.records))) - expected
        score = ahead / sigma
        gain = ahead * ndtr(score) + sigma * np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi)
        return gain, self.open & (ahead + SURE_SIGMAS * sigma > GAIN_RATIO)

    def expected(self) -> tuple[Floats, Floats]:
        """Logarithm of each candidate's expected time, and its standard deviation."""
        known, predicted = list(self.records), np.log(self.of.total_s)
        if not known:
            return predicted, np.full(predicted.size, self.law_error)
        error = np.log(measured_times(self.of, self.records))[known] - predicted[known]
        size = math.sqrt((float(error @ error) + KNOWLEDGE * self.law_error**2)
                         / (len(known) + KNOWLEDGE))
        mean, share = _regress(self.features, known, error)
        return predicted + mean, share * max(size, LEAST_ERROR_RATIO)

    def measure(self, choice: Choice, stores: str = "remote") -> Trial | None:
        """Measure a candidate or take it from the log; None where stopped."""
        device = self.devices[choice.store_path]
        n = len(self.records) + 1
        program = build(choice.workload, self.machine, choice.tuning, stores)
        known = self.logged[choice.store_path].get(_key(program.parameters()))
        if known is not None and self.log is not None:
            record = as_logged(known, self.log.record(known.id))
            return Trial(choice, record, n, self.budget, True)
        for record in experiment.run(device, [program], seed=self.seed, log=self.log,
                                     stop=self.stop):
            return Trial(choice, record, n, self.budget, False)
        return None


def _regress(features: Floats, known: list[int], error: Floats) -> tuple[Floats, Floats]:
    """Mean of a Gaussian process through `error`, and its standard deviation over the prior's."""
    def kernel(a: Floats, b: Floats) -> Floats:
        apart = np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=-1))
        near: Floats = SHARED + (1 - SHARED) * np.exp(-apart / REACH_OCTAVES)
        return near

    here = features[known]
    across = kernel(features, here)
    solved = np.linalg.solve(kernel(here, here) + NOISE * np.eye(len(known)),
                             np.column_stack([error, across.T]))
    explained = (across * solved[:, 1:].T).sum(axis=1)
    return across @ solved[:, 0], np.sqrt(np.clip(1 - explained, 1e-9, None))


def _logged(log: RunLog | None, device: Device, seed: int) -> dict[str, Run]:
    """Return the runs of a device that a log holds at a seed, by their parameters."""
    if log is None:
        return {}
    about = {"badge": device.badge, "seed": seed, **settings(device)}
    runs = log.runs(device=device.name, machine=device.machine.name)
    return {_key(run.parameters): run for run in reversed(runs)
            if run.version == code_version()
            and all(run.provenance.get(name) == value for name, value in about.items())}


def _key(parameters: Mapping[str, Any]) -> str:
    return json.dumps(to_plain(parameters), sort_keys=True)
