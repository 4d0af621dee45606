"""One SQLite file of ours: made where there is none, checked before it is written, never damaged.

Several processes may read and write it at once. What a transaction has committed survives a
killed process and a power cut: the write-ahead log is flushed to the disk at every commit.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from xstage_lab.errors import FileRejected

#: A writer waits this long for another one to finish.
BUSY_LIMIT_S = 30.0


class Database:
    """A SQLite file with tables of its own kind; may be used from any thread.

    Parameters
    ----------
    path : Path
        On a local disk: SQLite's write-ahead log does not work between computers.
    kind : str
        What the file is, in words, for messages.
    application_id, schema : int
        Mark the file as ours, and which tables it has.
    tables : sequence of str
        Statements that make them.
    remedy : str
        How to choose another file, a sentence for messages.
    """

    def __init__(self, path: Path, kind: str, application_id: int, schema: int,
                 tables: Sequence[str], remedy: str) -> None:
        self.path, self._kind, self._remedy = path, kind, remedy
        self._application_id, self._schema, self._tables = application_id, schema, tables
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection to this thread; every statement sees the state it began in.

        Raises
        ------
        FileRejected
            If the file is not ours, is of a newer schema, is damaged or cannot be used.
        """
        with self._lock, self._told():
            yield self._opened()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection for one transaction: all of it is on the disk at the end, or none.

        Raises
        ------
        FileRejected
            As from `reading`, and if the disk is full; what was committed before stays.
        """
        with self._lock, self._told():
            connection = self._opened()
            with connection:  # commits, or rolls back if anything goes wrong
                connection.execute("BEGIN IMMEDIATE")
                yield connection

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            self._close()

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None and self._file != _identity(self.path):
            self._close()  # deleted or replaced meanwhile: what we wrote would be in no file
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # No isolation level: transactions begin where we say so.
            connection = sqlite3.connect(self.path, timeout=BUSY_LIMIT_S, isolation_level=None,
                                         check_same_thread=False)
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._file = connection, _identity(self.path)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Check that the file is ours before writing to it; make the tables if it is new."""
        self._check(connection)
        journal, = connection.execute("PRAGMA journal_mode = wal").fetchone()
        if journal != "wal":
            raise FileRejected(self.path, "SQLite cannot keep a write-ahead log there. "
                               f"{self._remedy}")
        connection.execute("PRAGMA synchronous = full")
        connection.execute("PRAGMA fullfsync = on")  # else macOS leaves it in the drive's cache
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if self._check(connection):  # else another process was first
                for table in self._tables:
                    connection.execute(table)
                connection.execute(f"PRAGMA application_id = {self._application_id}")
                connection.execute(f"PRAGMA user_version = {self._schema}")

    def _check(self, connection: sqlite3.Connection) -> bool:
        """Return whether the file is new; raise unless it is ours."""
        application, schema, n_tables = connection.execute(
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
            "FROM pragma_application_id, pragma_user_version").fetchone()
        if (application, schema, n_tables) == (0, 0, 0):
            return True
        if application != self._application_id:
            raise FileRejected(self.path, f"this is another program's SQLite file, no "
                               f"{self._kind}; it was left as it is. {self._remedy}")
        if schema > self._schema:
            raise FileRejected(self.path, f"{self._kind} of schema {schema}; this version reads "
                               f"{self._schema}. Update xstage-lab to open it.")
        return False

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Say what went wrong with the file in words."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake of the caller, not of the file
        except (sqlite3.Error, OSError) as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest says where it happened
            known = {
                sqlite3.SQLITE_FULL: "the disk is full; what was written before is safe. Free "
                                     "some space, then try again.",
                sqlite3.SQLITE_BUSY: f"another program has kept it locked for {BUSY_LIMIT_S:g} s. "
                                     "End that program, then try again.",
                sqlite3.SQLITE_NOTADB: f"this is no {self._kind}; it was left as it is. "
                                       f"{self._remedy}",
                sqlite3.SQLITE_CORRUPT: "the file is damaged. Restore it from a copy, or move it "
                                        "away; `sqlite3 FILE .recover` saves what can be read.",
            }
            raise FileRejected(self.path, known.get(
                code, f"cannot be read and written ({error}). {self._remedy}")) from None


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells the file at `path` from any other, None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
