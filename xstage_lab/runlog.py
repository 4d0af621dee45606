"""The run log: every measurement as it arrives, in one SQLite file that loses nothing.

Several notebooks may write and read it at once. A run whose id `RunLog.add` has returned is on
the disk.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from xstage_lab import __version__
from xstage_lab.database import Database
from xstage_lab.errors import FileRejected, InvalidValue, require_number
from xstage_lab.record import SUMMARY_KEYS, Record, replayed_badge, to_plain, write_atomic

#: Environment variable that says where the log lies instead of `default_path`.
RUNLOG_VARIABLE = "XSTAGE_RUNLOG"
SCHEMA = 1
_APPLICATION_ID = 0x58535447  # "XSTG"

_TABLES = (
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given again, even after a deletion
        uuid TEXT NOT NULL UNIQUE,
        date TEXT NOT NULL,        -- ISO 8601, UTC
        device TEXT NOT NULL,
        badge TEXT NOT NULL,
        machine TEXT NOT NULL,
        workload TEXT NOT NULL,
        version TEXT NOT NULL,     -- of the code
        total_s REAL, accepted_s REAL, period_s REAL, issue_s REAL, stall_ratio REAL,
        parameters TEXT NOT NULL,  -- JSON
        provenance TEXT NOT NULL   -- JSON
    )""",
    # Apart, so that listing runs does not read past their raw samples.
    """CREATE TABLE samples (
        run INTEGER PRIMARY KEY,
        record BLOB NOT NULL       -- a whole record file (.npz)
    )""",
)
_COLUMNS = ("id", "uuid", "date", "device", "badge", "machine", "workload", "version",
            *SUMMARY_KEYS, "parameters", "provenance")
_INSERT = (f"INSERT INTO runs ({', '.join(_COLUMNS[1:])}) "  # noqa: S608  (our own names)
           f"VALUES ({', '.join('?' * len(_COLUMNS[1:]))})")
_LIST = (f"SELECT {', '.join(_COLUMNS)} FROM runs "  # noqa: S608
         "WHERE ifnull(device = :device, 1) AND ifnull(badge = :badge, 1) "
         "AND ifnull(machine = :machine, 1) AND ifnull(workload = :workload, 1) "
         "AND ifnull(date >= :since, 1) ORDER BY id DESC LIMIT :limit")
_WITH_RECORD = (f"SELECT {', '.join(_COLUMNS)}, record FROM runs "  # noqa: S608
                "JOIN samples ON run = id WHERE id = ?")


def default_path() -> Path:
    """Return where the log lies: `XSTAGE_RUNLOG`, else the user's folder for application data."""
    if given := os.environ.get(RUNLOG_VARIABLE):
        return Path(given)
    home = Path.home()
    folder = {"win32": Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"),
              "darwin": home / "Library" / "Application Support"}.get(
        sys.platform, Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share"))
    return folder / "xstage-lab" / "runs.sqlite"


@functools.cache
def code_version() -> str:
    """Return the version of this package, with the git commit where it runs from a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # git itself would look further up, into other projects
        return __version__
    command = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--dirty",
               "--exclude=*", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10.0)
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+{found.stdout.strip()}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the log knows of a run without its raw samples.

    Attributes
    ----------
    id : int
        Its number in this log; never given to another run.
    uuid : str
        Its name across logs.
    date : str
        When it was measured, ISO 8601, UTC.
    device, badge, machine, workload : str
    version : str
        Version and git commit of the code that logged it.
    total_s, accepted_s, period_s, issue_s, stall_ratio : float or None
        The summary; None where the device could not observe it.
    parameters, provenance : dict
        As in its record.
    """

    id: int
    uuid: str
    date: str
    device: str
    badge: str
    machine: str
    workload: str
    version: str
    total_s: float | None
    accepted_s: float | None
    period_s: float | None
    issue_s: float | None
    stall_ratio: float | None
    parameters: dict[str, Any]
    provenance: dict[str, Any]


class Entry(NamedTuple):
    """A record as the log keeps it: the columns of its run but the id, and its file."""

    columns: tuple[Any, ...]
    content: bytes


def entry(record: Record) -> Entry:
    """Return what the log keeps of `record`.

    Making it takes longer than writing it: a worker process makes it where it measures.
    """
    origin = record.provenance
    date = origin.get("date") or datetime.now(UTC).isoformat(timespec="seconds")
    named = (str(date), str(origin.get("device", "")),
             str(origin.get("badge", "")), str(origin.get("machine", "")),
             str(record.parameters.get("workload", "")))
    summary = to_plain({key: record.summary.get(key) for key in SUMMARY_KEYS})
    columns = (str(uuid.uuid4()), *named, code_version(), *summary.values(),
               json.dumps(to_plain(record.parameters)), json.dumps(to_plain(origin)))
    return Entry(columns, record.to_bytes())


class RunLog:
    """A run log, made where there is none yet; may be used from any thread.

    Parameters
    ----------
    path : str or Path, optional
        On a local disk; `default_path` if left out.

    Raises
    ------
    FileRejected
        Here and later: if the file is no run log, is of a newer version, is damaged or cannot be
        used. What was logged before stays.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = default_path() if path is None else Path(path)
        self._database = Database(
            self.path, "run log", _APPLICATION_ID, SCHEMA, _TABLES,
            f"Set {RUNLOG_VARIABLE} to a file on a local disk that you may write.")
        with self._database.reading():
            pass  # opened, so that a file that is of no use is told now

    def add(self, records: Record | Iterable[Record | Entry]) -> list[int]:
        """Log records: all of them are on the disk when this returns, or none where it raises.

        Parameters
        ----------
        records : Record, or iterable of Record or Entry
            Many at once are faster than one after another.

        Returns
        -------
        list of int
            Their ids, in order.

        Raises
        ------
        FileRejected
            For instance because the disk is full.
        """
        many = [records] if isinstance(records, Record) else records
        entries = [each if isinstance(each, Entry) else entry(each) for each in many]
        ids: list[int] = []
        with self._database.writing() as db:
            for columns, content in entries:
                number = db.execute(_INSERT, columns).lastrowid or 0
                db.execute("INSERT INTO samples (run, record) VALUES (?, ?)", (number, content))
                ids.append(number)
        return ids

    def runs(
        self,
        *,
        device: str | None = None,
        badge: str | None = None,
        machine: str | None = None,
        workload: str | None = None,
        since: str | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        """List runs, the newest first.

        Parameters
        ----------
        device, badge, machine, workload : str, optional
            Only runs of these.
        since : str, optional
            Only runs of this date (UTC) or later: ``"2026-09"``, ``"2026-09-30T12:00"``.
        limit : int, optional
            At most so many.

        Raises
        ------
        InvalidValue
            If an argument is of another type.
        """
        asked: dict[str, Any] = {"device": device, "badge": badge, "machine": machine,
                                 "workload": workload, "since": since}
        for name, value in asked.items():
            if value is not None and not isinstance(value, str):
                raise InvalidValue(name, value, "text")
        if limit is not None:
            limit = _whole("limit", limit)
        with self._database.reading() as db:
            rows = db.execute(_LIST, asked | {"limit": -1 if limit is None else limit}).fetchall()
        return [self._run(row) for row in rows]

    def record(self, run_id: int) -> Record:
        """Return the record of a run as it was measured, raw samples and all.

        Raises
        ------
        InvalidValue
            If there is no such run.
        FileRejected
            If its samples are damaged.
        """
        return self._stored(run_id)[1]

    def export(self, ids: Iterable[int], folder: str | Path) -> list[Path]:
        """Write runs to files that other programs read.

        Parameters
        ----------
        ids : iterable of int
        folder : str or Path
            Made if need be. The recorded device replays the runs in it.

        Returns
        -------
        list of Path
            `runs.csv` (a row per run, SI units), `runs.json` (the same and the provenance), and
            a record file `run-ID.npz` with the raw samples for each run.

        Raises
        ------
        InvalidValue
            If there is no such run.
        FileRejected
            If the folder cannot be written.
        """
        files, exported = [], []
        for number in dict.fromkeys(ids):
            run, record = self._stored(number)
            files.append(record.save(Path(folder) / f"run-{run.id}.npz"))
            exported.append(_plain_run(run, record))
        texts = {"runs.csv": _csv(exported),
                 "runs.json": json.dumps({"runs": exported}, indent=1)}
        for name, text in texts.items():
            write_atomic(Path(folder) / name, text.encode())
        return [*(Path(folder) / name for name in texts), *files]

    def delete(self, ids: Iterable[int]) -> int:
        """Delete runs for good and return how many there were; unknown ids change nothing."""
        chosen = [(_whole("run", number),) for number in ids]
        with self._database.writing() as db:
            db.executemany("DELETE FROM samples WHERE run = ?", chosen)
            return db.executemany("DELETE FROM runs WHERE id = ?", chosen).rowcount

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self._database.close()

    def _stored(self, run_id: int) -> tuple[Run, Record]:
        with self._database.reading() as db:
            found = db.execute(_WITH_RECORD, (_whole("run", run_id),)).fetchone()
        if found is None:
            raise InvalidValue("run", run_id, f"the ids of the runs in {self.path}")
        return self._run(found[:-1]), Record.from_bytes(found[-1], f"{self.path}, run {run_id}")

    def _run(self, row: tuple[Any, ...]) -> Run:
        try:
            parsed = (*row[:-2], json.loads(row[-2]), json.loads(row[-1]))
        except ValueError as error:
            raise FileRejected(self.path, f"its entry is damaged ({error}). Restore the file "
                               "from a copy, or delete this run.", f"run {row[0]}") from None
        return Run(**dict(zip(_COLUMNS, parsed, strict=True)))


def as_logged(run: Run, record: Record) -> Record:
    """Return a record of the log as what it is today, and where it comes from."""
    origin = {"badge": replayed_badge(run.badge), "recorded_badge": run.badge, "run": run.uuid,
              "source": f"run log, {run.device} on {run.machine}"}
    return dataclasses.replace(record, provenance=record.provenance | origin)


def _whole(field: str, value: int) -> int:
    require_number(field, value, low=0, high=2**62, integer=True)
    return int(value)


def _plain_run(run: Run, record: Record) -> dict[str, Any]:
    """Return a run with its whole summary, fit for JSON."""
    about = {name: getattr(run, name) for name in _COLUMNS if name not in SUMMARY_KEYS}
    return about | {"summary": to_plain(record.summary)}


def _csv(runs: list[dict[str, Any]]) -> str:
    """Return runs as a table: a row each, every summary value and parameter a column."""
    rows = []
    for run in runs:
        about = {k: v for k, v in run.items() if not isinstance(v, dict)}
        rows.append(about | run["summary"] | {k: v for k, v in run["parameters"].items()
                                              if k not in about})
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
