"""A device that answers at once, or misbehaves on the program it is told to.

It lives in a module of its own so that a worker process can import it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from xstage_lab.devices.base import Capabilities
from xstage_lab.errors import DeviceLost, Infeasible, InvalidValue, WorkerFailed
from xstage_lab.record import Record, provenance
from xstage_lab.schedule import Program, build
from xstage_lab.spec import BurstTrain, LinkSpec, MachineSpec

MACHINE = MachineSpec(name="fake", n_sms=8, max_gpus=2, link=LinkSpec(name="fake link"))


def programs(n: int) -> list[Program]:
    """Return `n` programs, the i-th with a burst of i + 1 bytes."""
    return [build(BurstTrain(n_producers=1, burst_bytes=i + 1, gap_s=0.0, n_bursts=1), MACHINE)
            for i in range(n)]


class FakeDevice:
    """Its `total_s` is the burst's byte count, its `issue_s` the seed.

    Parameters
    ----------
    bad_bytes : int
        Burst size at which it misbehaves.
    how : str
        `exit`, `hang`, `wait` (until it is aborted), `lost`, `invalid`, `infeasible`, `bug`, or
        nothing.
    log : str
        File to which a line with the process id goes at every start of a measurement.
    """

    name, badge, machine = "fake", "SIMULATED", MACHINE
    capabilities = Capabilities(times=True, per_tile=False, any_program=True)

    def __init__(self, bad_bytes: int = 0, how: str = "", log: str = "") -> None:
        self.bad_bytes, self.how, self.log = bad_bytes, how, log
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def measure(self, program: Program, seed: int | None = None) -> Record:
        if self.log:
            with Path(self.log).open("a") as log:
                log.write(f"{os.getpid()}\n")
        n_bytes = program.workload.burst_bytes
        if n_bytes == self.bad_bytes:
            self._misbehave(n_bytes)
        return Record(summary={"total_s": float(n_bytes), "issue_s": float(seed or 0)},
                      parameters=program.parameters(),
                      provenance=provenance("SIMULATED", "fake", "tests", pid=os.getpid()))

    def _misbehave(self, n_bytes: int) -> None:
        if self.how == "exit":
            os._exit(3)
        if self.how == "hang":
            time.sleep(1000)
        if self.how == "wait":
            while not self.aborted:
                time.sleep(0.02)
            raise WorkerFailed("ended by its abort flag.")
        if self.how == "lost":
            raise DeviceLost("the device is lost.")
        if self.how == "invalid":
            raise InvalidValue("burst_bytes", n_bytes, "other numbers", "B", "Take another.")
        if self.how == "infeasible":
            raise Infeasible("this does not fit.")
        if self.how == "bug":
            raise ZeroDivisionError("a defect")
