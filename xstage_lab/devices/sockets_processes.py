"""What runs in the processes of the sockets device: producers that burst, receivers that pace.

It needs the standard library alone, so that a process is there in some 30 ms. The parent sends a
job, hears "ready", sends the start time, and gets the stamps. All stamps are
`time.perf_counter_ns`, which counts from the same origin in every process.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

#: Bytes of one send and of one read: the grain in which the buffers fill and empty.
CHUNK_BYTES = 8192
#: A process that nobody has asked anything for this long ends.
IDLE_LIMIT_S = 900.0
#: A full buffer, or the progress of others, is looked at again after this long.
RETRY_S = 20e-6
#: Waking up takes about this long: a timed wait sleeps that much less and is exact all the same.
WAKE_S = 15e-6
#: A receiver that was held up may catch up on this much; its token bucket holds no more.
BUCKET_NS = 5_000_000

now_ns = time.perf_counter_ns


class Job(NamedTuple):
    """What a producer does in a run: tasks in issue order, and whom they wait for.

    Attributes
    ----------
    work_ns, n_bytes, lane : array of int
        Per task: work before its stores, bytes, and the socket they go to.
    depth : int
        Tasks between the start of their work and the acceptance of their last byte.
    needs : array of int
        Per task and producer, how many of that producer's first tasks must have been accepted
        before the task's work may start; empty if none waits.
    spin : bool
        Whether work keeps the core busy instead of sleeping.
    deadline_ns : int
        When to give up.
    """

    work_ns: array[int]
    n_bytes: array[int]
    lane: array[int]
    depth: int
    needs: array[int]
    spin: bool
    deadline_ns: int


class Delivery(NamedTuple):
    """What a receiver awaits in a run.

    Attributes
    ----------
    ends : tuple of array of int
        Per producer, the byte counts at which its bursts end; empty if none of them comes here.
    pace_bytes_per_s : float
        Pace; 0 reads as fast as it can.
    deadline_ns : int
        When to give up.
    """

    ends: tuple[array[int], ...]
    pace_bytes_per_s: float
    deadline_ns: int


class Work(NamedTuple):
    """Stamps of a producer: per task, and per chunk accepted for another GPU (time and bytes)."""

    work_start_ns: array[int]
    work_end_ns: array[int]
    issue_start_ns: array[int]
    issue_end_ns: array[int]
    chunk_ns: array[int]
    chunk_bytes: array[int]


class Receipt(NamedTuple):
    """Stamps of a receiver: arrivals per producer and burst, chunks if paced, its busy time."""

    arrived_ns: tuple[array[int], ...]
    chunk_ns: array[int]
    chunk_bytes: array[int]
    busy_ns: int


class LostPartner(Exception):
    """The other end of a socket is gone, or somebody did not move until the deadline."""


class Producer:
    """Does work and sends bursts, over one socket per destination."""

    def __init__(self, number: int, lanes: list[socket.socket], accepted: memoryview) -> None:
        self.number, self.lanes, self.accepted = number, lanes, accepted
        self.payload = memoryview(bytes(CHUNK_BYTES))

    def run(self, job: Job, start_ns: int) -> Work:
        """Do all tasks of `job` from `start_ns` on."""
        n = len(job.n_bytes)
        times = [array("q", bytes(8 * n)) for _ in range(4)]
        work = Work(times[0], times[1], times[2], times[3], array("q"), array("q"))
        wait_until(start_ns, spin=False)
        if job.depth == 1:
            for task in range(n):
                self._compute(job, work, task)
                self._store(job, work, task)
        else:
            self._run_staged(job, work)
        return work

    def _run_staged(self, job: Job, work: Work) -> None:
        """Compute here and store in a second thread, with `depth` tasks between the two."""
        slots: queue.SimpleQueue[bool] = queue.SimpleQueue()
        staged: queue.SimpleQueue[int] = queue.SimpleQueue()
        failed: list[LostPartner] = []
        for _ in range(job.depth):
            slots.put(True)

        def store_all() -> None:
            try:
                for _ in job.n_bytes:
                    self._store(job, work, staged.get())
                    slots.put(True)
            except LostPartner as error:
                failed.append(error)
                slots.put(False)

        storing = threading.Thread(target=store_all, daemon=True)
        storing.start()
        for task in range(len(job.n_bytes)):
            if not slots.get():
                break
            self._compute(job, work, task)
            staged.put(task)
        storing.join()
        if failed:
            raise failed[0]

    def _wait_for_others(self, job: Job, task: int) -> None:
        """Wait until what `task` needs is accepted; each producer writes its own count only."""
        k = len(job.needs) // len(job.n_bytes)
        for other, needed in enumerate(job.needs[task * k:(task + 1) * k]):
            while self.accepted[other] < needed:
                if now_ns() > job.deadline_ns:
                    raise LostPartner(
                        f"task {task * k + self.number} waited for task "
                        f"{(needed - 1) * k + other}, of producer {other + 1}, whose stores were "
                        "not accepted in time")
                time.sleep(RETRY_S)

    def _compute(self, job: Job, work: Work, task: int) -> None:
        self._wait_for_others(job, task)
        work.work_start_ns[task] = began = now_ns()
        if job.work_ns[task]:
            wait_until(began + job.work_ns[task], job.spin)
        work.work_end_ns[task] = now_ns()

    def _store(self, job: Job, work: Work, task: int) -> None:
        """Send a burst; it ends when the operating system has accepted its last byte."""
        left, lane = job.n_bytes[task], self.lanes[job.lane[task]]
        work.issue_start_ns[task] = now_ns()
        while left:
            try:
                sent = lane.send(self.payload[:left] if left < CHUNK_BYTES else self.payload)
            except BlockingIOError:  # backpressure
                if now_ns() > job.deadline_ns:
                    raise LostPartner(f"destination {job.lane[task] + 1} did not take the bytes "
                                      "in time") from None
                time.sleep(RETRY_S)
                continue
            except OSError as error:
                raise LostPartner(f"destination {job.lane[task] + 1} is gone "
                                  f"({error.strerror})") from None
            left -= sent
            if lane is not self.lanes[-1]:
                work.chunk_ns.append(now_ns())
                work.chunk_bytes.append(sent)
        work.issue_end_ns[task] = now_ns()
        self.accepted[self.number] = task + 1


class Receiver:
    """Reads from all producers in turn, no faster than a token bucket lets it."""

    def __init__(self, sources: list[socket.socket]) -> None:
        self.sources = sources
        self.buffer = memoryview(bytearray(CHUNK_BYTES))

    def run(self, delivery: Delivery, start_ns: int) -> Receipt:
        """Read until every burst of `delivery` is here.

        Tokens come at the pace while there is something to read and are not saved up while
        there is nothing: an idle link does not carry more later.
        """
        ends = delivery.ends
        ns_per_byte = 1e9 / delivery.pace_bytes_per_s if delivery.pace_bytes_per_s else 0.0
        receipt = Receipt(tuple(array("q") for _ in ends), array("q"), array("q"), 0)
        number = {source.fileno(): k for k, source in enumerate(self.sources)}
        poller = select.poll()
        for source, awaited in zip(self.sources, ends, strict=False):  # some may have no job
            if awaited:
                poller.register(source, select.POLLIN)
        got, n_left = [0] * len(ends), sum(map(len, ends))
        link_ns = came = start_ns
        idle_ns = 0
        while n_left:
            ready = poller.poll(0)
            if not ready:
                ready = _await(poller, delivery.deadline_ns)
                link_ns = max(link_ns, now_ns())
                idle_ns += link_ns - came
            for fd, _ in ready:
                k = number[fd]
                n = self._read(k)
                link_ns = max(link_ns + int(n * ns_per_byte), now_ns() - BUCKET_NS)
                sleep_until(link_ns)
                came = now_ns()
                got[k] += n
                if ns_per_byte:
                    receipt.chunk_ns.append(came)
                    receipt.chunk_bytes.append(n)
                arrived = receipt.arrived_ns[k]
                while len(arrived) < len(ends[k]) and got[k] >= ends[k][len(arrived)]:
                    arrived.append(came)
                    n_left -= 1
        return receipt._replace(busy_ns=came - start_ns - idle_ns)

    def _read(self, k: int) -> int:
        try:
            n = self.sources[k].recv_into(self.buffer)
        except OSError:
            n = 0
        if not n:
            raise LostPartner(f"producer {k + 1} closed its socket")
        return n


def _await(poller: select.poll, deadline_ns: int) -> list[tuple[int, int]]:
    ready = poller.poll(max((deadline_ns - now_ns()) / 1e6, 1.0))
    if not ready:
        raise LostPartner("the producers sent nothing more until the deadline")
    return ready


def sleep_until(end_ns: int) -> None:
    """Sleep until about `end_ns`; return at once if that is past."""
    left_ns = end_ns - now_ns()
    if left_ns > 0:
        time.sleep(left_ns * 1e-9)


def wait_until(end_ns: int, spin: bool) -> None:
    """Return at `end_ns`: busy all the time, or asleep but for the last moment."""
    if not spin:
        sleep_until(end_ns - int(WAKE_S * 1e9))
    while now_ns() < end_ns:
        pass


def main(arguments: list[str]) -> None:
    """Serve jobs until the parent's end of the control socket closes.

    Arguments: `producer NUMBER` or `receiver 0`, the control socket, the shared counts of what
    each producer has had accepted, and the data sockets, as inherited file descriptors.
    """
    role, number, control_fd, accepted_fd, *data = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # "interrupt the kernel" reaches its children
    with contextlib.suppress(OSError):  # Linux rounds sleeps up by 50 us unless told otherwise
        Path("/proc/self/timerslack_ns").write_text("1")
    with contextlib.suppress(OSError, AttributeError):
        # Where it is allowed, other programs then hardly disturb; these processes mostly sleep.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()
    sockets = [socket.socket(fileno=int(fd)) for fd in data]
    for one in sockets:
        one.setblocking(False)
    control = Connection(int(control_fd))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(control, requests), daemon=True).start()
    control.send(now_ns())
    worker: Producer | Receiver
    if role == "producer":
        accepted = memoryview(mmap.mmap(int(accepted_fd), 0)).cast("q")
        worker = Producer(int(number), sockets, accepted)
    else:
        worker = Receiver(sockets)
    while True:
        try:
            job = requests.get(timeout=IDLE_LIMIT_S)
        except queue.Empty:
            return
        control.send("ready")
        start_ns = requests.get()
        try:
            control.send(worker.run(job, start_ns))
        except LostPartner as lost:
            control.send(str(lost))


def _listen(control: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Pass requests on; end the process when the parent is gone, whatever it is doing."""
    while True:
        try:
            requests.put(control.recv())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
