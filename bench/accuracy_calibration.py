"""How near calibration comes to the truth of 20 simulated machines drawn at random."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from bench.figures import Figure, print_table
from xstage_lab.analysis import Calibration, calibrate
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import XStageError
from xstage_lab.spec import LinkSpec, MachineSpec

N_MACHINES, BURST_BYTES = 20, 32 * 1024
ASKED_RATIO = {"R": 0.01, "Q": 0.03, "T_iss0": 0.03}


class Truth(NamedTuple):
    """What the mechanisms of a simulated machine amount to."""

    limit: str
    drain_bytes_per_s: float
    capacity_bytes: float
    issue_free_s: float


def measure() -> list[Figure]:
    """Calibrate each machine and set R, Q and T_iss0 beside their truth."""
    rng = np.random.default_rng(20)
    errors, rows = [], []
    for _ in range(N_MACHINES):
        machine = draw_machine(rng)
        true = truth(machine)
        try:
            found = calibrate(SimulatedDevice(machine), burst_bytes=BURST_BYTES)
            error, notes = _errors(found, true), found.notes
        except XStageError as refusal:  # a machine that cannot be calibrated is infinitely wrong
            error, notes = (math.inf,) * 3, (str(refusal),)
        errors.append(error)
        rows.append(_row(machine, true, error, notes))
    print_table(("limited by", "K", "R GB/s", "error", "Q KiB", "error", "T_iss0 us", "error",
                 "note"), rows)
    worst = np.abs(errors).max(axis=0)
    met = (np.abs(errors) <= list(ASKED_RATIO.values())).sum(axis=0)
    return [
        Figure(what=f"calibrated {name}, worst error of {N_MACHINES} machines",
               value=100 * worst[i], asked=100 * asked, unit="%",
               note=f"{met[i]} of {N_MACHINES} within")
        for i, (name, asked) in enumerate(ASKED_RATIO.items())
    ]


def draw_machine(rng: np.random.Generator) -> MachineSpec:
    """Draw a machine whose producers can fill the path, limited by egress, ingress or credits.

    Its destinations are as fast as the link or slower by a tenth at least: one that is slower by
    a hair takes the volume of dozens of bursts to fill up, and none of them would tell.
    """
    k = int(rng.integers(16, 149))
    egress = float(np.exp(rng.uniform(np.log(20e9), np.log(900e9))))
    ingress = egress * (rng.uniform(0.8, 0.9) if rng.random() < 0.3 else rng.uniform(1.0, 1.5))
    latency = rng.uniform(0.3e-6, 4e-6)
    link = LinkSpec(
        name="drawn",
        egress_bytes_per_s=egress,
        ingress_bytes_per_s=ingress,
        per_sm_bytes_per_s=egress * float(np.exp(rng.uniform(np.log(1.3), np.log(12)))) / k,
        issue_latency_s=rng.uniform(0, 1e-6),
        path_capacity_bytes=egress * rng.uniform(1e-6, 10e-6),
        per_sm_capacity_bytes=rng.uniform(8, 128) * 1024,
        credit_bytes=egress * latency * rng.uniform(0.6, 3.0),
        credit_latency_s=latency,
    )
    return MachineSpec(name="drawn", n_sms=k, max_gpus=8, link=link)


def truth(machine: MachineSpec) -> Truth:
    """R, Q and T_iss0 that follow from the mechanisms.

    Where the destination is slower than the link, its buffer is full as well: what it holds,
    less what is on its way back as credits, adds to Q. Where credits limit, a window of them
    leaves at the link's rate and then waits for its return: on average half of its lead adds.
    """
    link, k = machine.link, machine.n_sms
    rates = {"egress": link.egress_bytes_per_s, "ingress": link.ingress_bytes_per_s,
             "credits": link.credit_bytes / link.credit_latency_s}
    limit = min(rates, key=rates.__getitem__)
    held = min(k * link.per_sm_capacity_bytes, link.path_capacity_bytes)
    if limit == "ingress":
        held += max(link.credit_bytes - rates[limit] * link.credit_latency_s, 0.0)
    elif limit == "credits":
        held += 0.5 * link.credit_bytes * (1 - rates[limit] / link.egress_bytes_per_s)
    return Truth(limit, rates[limit], held,
                 link.issue_latency_s + BURST_BYTES / link.per_sm_bytes_per_s)


def _errors(found: Calibration, true: Truth) -> tuple[float, float, float]:
    return (found.drain_bytes_per_s / true.drain_bytes_per_s - 1,
            found.capacity_bytes / true.capacity_bytes - 1,
            found.issue_free_s(BURST_BYTES) / true.issue_free_s - 1)


def _row(machine: MachineSpec, true: Truth, errors: tuple[float, float, float],
         notes: tuple[str, ...]) -> tuple[str, ...]:
    missed = [name for error, (name, asked) in zip(errors, ASKED_RATIO.items(), strict=True)
              if abs(error) > asked]
    said = ([f"MISSED: {', '.join(missed)}"] if missed else []) + list(notes)
    return (true.limit, str(machine.n_sms), f"{true.drain_bytes_per_s / 1e9:.1f}",
            f"{errors[0]:+.2%}", f"{true.capacity_bytes / 1024:,.0f}", f"{errors[1]:+.2%}",
            f"{true.issue_free_s * 1e6:.3f}", f"{errors[2]:+.2%}", "; ".join(said))
