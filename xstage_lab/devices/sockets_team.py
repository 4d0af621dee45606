"""The processes of the sockets device, seen from the parent: started once, asked often, all ended.

Every process holds its own ends of its sockets and no others, so that the death of any of them,
the parent's included, is seen by all that wait for it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from xstage_lab.devices.sockets_processes import Delivery, Job, Receipt, Work, now_ns
from xstage_lab.errors import DeviceUnavailable, WorkerFailed

#: From the last "ready" to the common start; every process must have read the start time by then.
START_LEAD_S = 0.004
#: A process that does not answer this long after it was started, or after its deadline, hangs.
PATIENCE_S = 15.0
#: Burst of each producer when the unpaced rate is measured.
PROBE_BYTES = 2 * 2**20
#: Run by the child: nothing but this package's own folder is added to the standard library.
_ENTRY = ("import sys; sys.path.append(sys.argv[1]); "
          "from xstage_lab.devices.sockets_processes import main; main(sys.argv[2:])")


class _Member(NamedTuple):
    what: str
    process: subprocess.Popen[bytes]
    control: Connection


class Team:
    """K producers, a paced receiver per destination, and one unpaced receiver for local stores.

    Parameters
    ----------
    n_producers, n_destinations : int
    buffer_bytes : int
        Asked of the operating system for each socket pair.

    Raises
    ------
    DeviceUnavailable
        If this computer cannot start them or their clocks differ.
    """

    def __init__(self, n_producers: int, n_destinations: int, buffer_bytes: int) -> None:
        self.n_producers, self.n_lanes = n_producers, n_destinations + 1
        self._owner_pid = os.getpid()
        self._members: list[_Member] = []
        began_ns = now_ns()
        try:
            self._start_all(buffer_bytes)
            self._check_clocks(began_ns)
        except OSError as error:
            self.end()
            raise DeviceUnavailable(
                f"the processes of the sockets device cannot be started ({error.strerror}); take "
                "fewer producers, or close other programs.") from None
        except BaseException:
            self.end()
            raise

    def _start_all(self, buffer_bytes: int) -> None:
        """Start every process with its ends of the sockets, and close ours."""
        with contextlib.ExitStack() as ours:
            pairs = [[_pair(buffer_bytes, ours) for _ in range(self.n_lanes)]
                     for _ in range(self.n_producers)]
            source, sink = pairs[0][0]
            self.buffers = {
                "send_buffer_bytes": source.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
                "receive_buffer_bytes": sink.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)}
            accepted = ours.enter_context(tempfile.TemporaryFile())
            accepted.truncate(8 * self.n_producers)
            self._accepted = mmap.mmap(accepted.fileno(), 0)
            for k, lanes in enumerate(pairs):
                self._start(f"producer {k + 1}", ["producer", str(k)], accepted.fileno(),
                            [source for source, _ in lanes])
            for lane in range(self.n_lanes):
                what = (f"receiver {lane + 1}" if lane < self.n_lanes - 1
                        else "the receiver of local stores")
                self._start(what, ["receiver", str(lane)], accepted.fileno(),
                            [lanes[lane][1] for lanes in pairs])

    def run(
        self, jobs: Sequence[Job], deliveries: Sequence[Delivery]
    ) -> tuple[list[Work], list[Receipt]]:
        """Run jobs on the first producers and deliveries on the receivers; return their stamps.

        Returns
        -------
        works : list of Work, one per job
        receipts : list of Receipt, one per delivery

        Raises
        ------
        WorkerFailed
            If a process ended, gave up or did not answer; all of them are ended then.
        """
        asked = [*zip(self._members, jobs, strict=False),
                 *zip(self._members[self.n_producers:], deliveries, strict=True)]
        members = [member for member, _ in asked]
        deadline_ns = max(job.deadline_ns for job in jobs)
        try:
            self._accepted[:] = bytes(len(self._accepted))
            for member, job in asked:
                self._send(member, job)
            self._answers(members, deadline_ns)
            start_ns = now_ns() + int(START_LEAD_S * 1e9)
            for member in members:
                self._send(member, start_ns)
            answers = self._answers(members, deadline_ns)
        except BaseException:  # an interrupt too: nobody knows what still lies in the sockets
            self.end()
            raise
        return answers[:len(jobs)], answers[len(jobs):]

    def unpaced_rate(self) -> float:
        """Bytes per second that all producers get through to the receiver of local stores."""
        deadline_ns = now_ns() + int(PATIENCE_S * 1e9)
        one, none = array("q", [PROBE_BYTES]), array("q")
        job = Job(work_ns=array("q", [0]), n_bytes=one, lane=array("q", [self.n_lanes - 1]),
                  depth=1, needs=none, spin=False, deadline_ns=deadline_ns)
        deliveries = [Delivery(ends=(burst,) * self.n_producers, pace_bytes_per_s=0.0,
                               deadline_ns=deadline_ns)
                      for burst in [none] * (self.n_lanes - 1) + [one]]
        works, receipts = self.run([job] * self.n_producers, deliveries)
        began_ns = min(work.issue_start_ns[0] for work in works)
        took_s = (max(arrived[0] for arrived in receipts[-1].arrived_ns) - began_ns) * 1e-9
        return self.n_producers * PROBE_BYTES / took_s

    @property
    def alive(self) -> bool:
        """Whether all processes run; unasked, a control socket has nothing to say but its end."""
        return bool(self._members) and not wait([m.control for m in self._members], timeout=0)

    @property
    def scheduling(self) -> str:
        """`real-time` where the system let the processes go before others, else `normal`."""
        if not hasattr(os, "sched_getscheduler"):
            return "normal"
        first = os.sched_getscheduler(self.pids[0])
        return "real-time" if first == os.SCHED_RR else "normal"

    @property
    def pids(self) -> list[int]:
        """Process ids: the producers, the paced receivers, the receiver of local stores."""
        return [member.process.pid for member in self._members]

    def end(self) -> None:
        """End all processes now; harmless when they have ended, or in a fork of the parent."""
        if os.getpid() != self._owner_pid:
            return
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.wait()
            member.control.close()
        self._members = []

    def _start(self, what: str, role: list[str], accepted_fd: int,
               data: list[socket.socket]) -> None:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), accepted_fd, *(one.fileno() for one in data)]
        root = str(Path(__file__).resolve().parents[2])
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _ENTRY, root, *role, *map(str, fds)],
                pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._members.append(_Member(what, process, Connection(ours.detach())))

    def _check_clocks(self, began_ns: int) -> None:
        """Raise unless every process's first stamp lies between two readings of our clock."""
        stamps = self._answers(self._members, began_ns)
        if not began_ns <= min(stamps) <= max(stamps) <= now_ns():
            raise DeviceUnavailable(
                "this computer's processes do not share one clock (time.perf_counter), so that "
                "sending and arriving cannot be compared; use the simulated device.")

    def _send(self, member: _Member, what: object) -> None:
        try:
            member.control.send(what)
        except OSError:
            self._fail(f"{member.what} was gone")

    def _answers(self, members: list[_Member], deadline_ns: int) -> list[Any]:
        """Collect one answer of each member, in their order."""
        got: dict[Connection, Any] = {}
        missing = {member.control: member for member in members}
        while missing:
            left_s = (deadline_ns - now_ns()) * 1e-9 + PATIENCE_S
            ready = wait(list(missing), timeout=max(left_s, 0.0))
            if not ready:
                self._fail(f"{next(iter(missing.values())).what} gave no answer")
            for control in [control for control in missing if control in ready]:
                member = missing.pop(control)
                try:
                    got[control] = control.recv()
                except (EOFError, OSError):
                    self._fail(f"{member.what} ended")
                if isinstance(got[control], str) and got[control] != "ready":
                    self._fail(f"{member.what}: {got[control]}")
        return [got[member.control] for member in members]

    def _fail(self, what: str) -> None:
        """End everything and say what happened, naming the processes that were dead before."""
        time.sleep(0.05)  # who saw the end of a socket may be faster than the exit status
        dead = [f"{member.what} {_how(member.process.returncode)}" for member in self._members
                if member.process.poll() is not None]
        self.end()
        told = "; ".join([what, *dead])
        raise WorkerFailed(f"the measurement over sockets broke off: {told}. All its processes "
                           "were ended. Measure again: new ones start by themselves.")


def _pair(buffer_bytes: int, ours: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a stream, (producer's, receiver's), with buffers of that size."""
    source, sink = map(ours.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    source.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    return source, sink


def _how(exit_code: int | None) -> str:
    """Say in words how a process ended."""
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit status {exit_code}"
