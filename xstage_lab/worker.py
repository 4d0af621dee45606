"""A device in a warm process of its own: it can be stopped, crash or hang, and the notebook lives.

One request, one answer: the parent sends how to make the device, a program and a seed, and gets
a record or an error. Nothing is queued, so stopping means not to ask again; what does not answer
is ended. The child ends itself when the pipe closes, however its parent died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from xstage_lab.devices.base import Capabilities, Device, settings
from xstage_lab.errors import DeviceLost, WorkerFailed, XStageError
from xstage_lab.record import Record
from xstage_lab.schedule import Program
from xstage_lab.spec import MachineSpec

#: A worker that nobody has asked anything for this long ends; the next request starts another.
IDLE_LIMIT_S = 900.0
#: Time a point that is being measured gets to end by itself after Stop.
STOP_GRACE_S = 0.5


#: What makes the device, the program and the seed; without a program the device is described.
_Request = tuple[bytes, Program | None, int | None]


class _Description(NamedTuple):
    name: str
    badge: str
    machine: MachineSpec
    capabilities: Capabilities
    settings: dict[str, Any]


class Worker:
    """A `Device` whose measurements run in a `spawn` process that stays warm between them.

    Parameters
    ----------
    make_device : callable
        Makes the device in the worker; picklable, for instance
        ``functools.partial(SimulatedDevice, machine)``.
    limit_s : float
        A measurement without an answer for this long counts as hung; seconds.
    """

    def __init__(self, make_device: Callable[[], Device], *, limit_s: float = 120.0) -> None:
        self._limit_s = limit_s
        self._process: Any = None
        self._pipe: Connection | None = None
        self._asking, self._sending = threading.Lock(), threading.Lock()
        self._n_asked = 0
        self.use(make_device)

    def use(self, make_device: Callable[[], Device]) -> None:
        """Measure on another device from now on, in the same warm process."""
        self._make_device = pickle.dumps(make_device)
        self._description: _Description | None = None

    @property
    def name(self) -> str:
        """Name of the device in the worker."""
        return self._describe().name

    @property
    def badge(self) -> str:
        """Badge of the device in the worker."""
        return self._describe().badge

    @property
    def machine(self) -> MachineSpec:
        """Machine of the device in the worker."""
        return self._describe().machine

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the device in the worker."""
        return self._describe().capabilities

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the device in the worker, by which its runs are told apart."""
        return self._describe().settings

    @property
    def pid(self) -> int | None:
        """Process id of the worker while it runs."""
        process = self._process
        return process.pid if process is not None and process.is_alive() else None

    def measure(self, program: Program, seed: int | None = None) -> Record:
        """Run `program` once in the worker.

        Raises
        ------
        WorkerFailed
            If the worker crashed, was ended, or did not answer in time.
        XStageError
            Whatever the device raised, with the same text.
        """
        record: Record = self._ask(program, seed)
        return record

    def stop(self) -> None:
        """Let the point that is being measured end within half a second, then end the worker.

        A device that has `abort` is told first, in the worker. Returns at once. Whoever iterates
        must also be told not to ask again.
        """
        process, pipe, asked = self._process, self._pipe, self._n_asked
        if process is None or pipe is None or not self._asking.locked():
            return
        with self._sending, contextlib.suppress(OSError):  # it may end by itself just now
            pipe.send(None)

        def end() -> None:
            if self._n_asked == asked and self._asking.locked():
                process.kill()

        timer = threading.Timer(STOP_GRACE_S, end)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """End the worker now; a later measurement starts a new one."""
        process = self._process
        if process is not None:
            process.kill()
        with self._asking:  # whoever waits for an answer sees the end of the pipe first
            self._end()

    def _describe(self) -> _Description:
        if self._description is None:
            answer: _Description = self._ask(None, None)
            self._description = answer
        return self._description

    def _ask(self, program: Program | None, seed: int | None) -> Any:
        with self._asking:
            self._n_asked += 1
            process, pipe = self._running()
            try:
                with self._sending:
                    pipe.send((self._make_device, program, seed))
                if not pipe.poll(self._limit_s):
                    self._end()
                    raise WorkerFailed(
                        f"the measuring process gave no answer for {self._limit_s:g} s and was "
                        "ended. Measure again (a new one starts by itself), or try a smaller "
                        "workload.")
                answer = pipe.recv()
            except (EOFError, OSError):
                process.join(STOP_GRACE_S)
                code = process.exitcode
                self._end()
                raise WorkerFailed(
                    f"the measuring process ended before its work did ({_how(code)}). Measure "
                    "again: a new one starts by itself.") from None
            if isinstance(answer, DeviceLost):
                self._end()
        if isinstance(answer, XStageError):
            raise answer
        return answer

    def _running(self) -> tuple[Any, Connection]:
        """Return the process and this end of its pipe, starting it where none runs."""
        if self.pid is None or self._pipe is None:
            self._end()
            spawn = multiprocessing.get_context("spawn")
            self._pipe, child = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(child, self._limit_s),
                                          name="xstage-worker", daemon=True)
            with without_main():
                self._process.start()
            child.close()  # only the worker holds its end, so that its death is seen at once
        return self._process, self._pipe

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keep a child started in here from running the caller's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _how(exit_code: int | None) -> str:
    """Say in words how a process ended."""
    if exit_code is None:
        return "it closed its pipe"
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit status {exit_code}"


def _serve(pipe: Connection, limit_s: float) -> None:
    """Answer requests until the pipe closes; the entry point of the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # "interrupt the kernel" reaches its children
    requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
    in_use: list[Device] = []  # the device that measures, for the listener to abort
    threading.Thread(target=_listen, args=(pipe, requests, in_use), daemon=True).start()
    made_from = b""
    while True:
        try:
            make_device, program, seed = requests.get(timeout=IDLE_LIMIT_S)
        except queue.Empty:
            return
        # A hang that never lets the listener run must not outlive a dead parent either.
        faulthandler.dump_traceback_later(limit_s + 10.0, exit=True)
        try:
            if not in_use or make_device != made_from:
                in_use.clear()
                in_use.append(pickle.loads(make_device)())  # noqa: S301
                made_from = make_device
            pipe.send(_answer(in_use[0], program, seed))
        except DeviceLost as error:
            pipe.send(error)
            os._exit(1)  # whatever would tidy up may wait for the lost device forever
        except XStageError as error:
            pipe.send(error)
        except Exception as error:  # a defect of the device; told in words, and the worker lives
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = (f"the device failed unexpectedly ({type(error).__name__}: {error}; "
                    f"{Path(last.filename).name}, line {last.lineno}). Please report it.")
            pipe.send(WorkerFailed(text))
        faulthandler.cancel_dump_traceback_later()


def _answer(device: Device, program: Program | None, seed: int | None) -> _Description | Record:
    if program is None:
        return _Description(device.name, device.badge, device.machine, device.capabilities,
                            settings(device))
    return device.measure(program, seed=seed)


def _listen(pipe: Connection, requests: queue.SimpleQueue[_Request],
            in_use: list[Device]) -> None:
    """Pass requests on, and Stop to a device that can end what it runs.

    Ends the process when the other end is gone, whatever it is doing.
    """
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        if request is not None:
            requests.put(request)
            continue
        for device in in_use:
            getattr(device, "abort", lambda: None)()
