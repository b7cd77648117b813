"""What the daemon has learnt, in one SQLite file: the header cache now, calibrations, speeds and history later.

Everything in it can be learnt again, so nothing here ever stops the daemon. A file that is damaged is moved aside;
one that a newer release wrote is left alone; where the file cannot be used at all, memory takes its place until the
daemon ends. :attr:`Store.problem` says so, and a line in the journal does.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lllm3090d.errors import ErrorCode, LlmError

log = logging.getLogger(__name__)

FILE_NAME = "lllm3090.db"
BUSY_TIMEOUT_S = 2.0
# Told by the file itself, so that another program's database is never taken for ours: "l39d".
APPLICATION_ID = 0x6C333964
KEPT_DAMAGED_FILES = 3

# Each is applied once, in order, in a transaction of its own. Published ones are never edited.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE headers (
            id INTEGER PRIMARY KEY,
            path BLOB NOT NULL UNIQUE,
            size_bytes INTEGER NOT NULL,
            mtime_ns INTEGER NOT NULL,
            inode INTEGER NOT NULL,
            reader TEXT NOT NULL,
            digest TEXT NOT NULL
        )""",
        # Apart from the digests: a scan reads all of those and none of these.
        """CREATE TABLE header_bodies (
            id INTEGER PRIMARY KEY REFERENCES headers(id) ON DELETE CASCADE,
            body BLOB NOT NULL
        )""",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)

# The primary result codes that say the file itself is no usable database.
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Where the schema is damaged, SQLite quotes it in its message and Python cannot decode that.
_FAILURES = (sqlite3.Error, UnicodeDecodeError)


class _NewerSchemaError(Exception):
    """A newer release wrote the file."""


class Store:
    """One SQLite database in WAL mode, for one process; every method may be called from any thread.

    Attributes:
        path: the file; None while memory takes its place.
        problem: why what is learnt now is not kept, or what was learnt before is lost; None when all is well.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the database; blocks for the disk, never raises for what is wrong with it."""
        self._lock = threading.RLock()
        self._wanted = path
        self.path: Path | None = path
        self.problem: LlmError | None = None
        self._closed = False
        self._connection = self._open()

    def close(self) -> None:
        """Give the file back; from now on nothing is found and nothing kept."""
        with self._lock:
            self._closed = True
            self._connection.close()

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query; none where the database fails, which :attr:`problem` then says."""
        with self._lock:
            if self._closed:
                return []
            try:
                return self._connection.execute(query, parameters).fetchall()
            except _FAILURES as error:
                self._failed(error, "read")
                return []

    def change(self, work: Callable[[sqlite3.Connection], object]) -> bool:
        """Do ``work`` in one transaction; False when it failed and nothing was changed."""
        with self._lock:
            if self._closed:
                return False
            try:
                with _transaction(self._connection):
                    work(self._connection)
            except _FAILURES as error:
                self._failed(error, "written")
                return False
            if self.problem is not None and self.problem.details.get("passing"):
                log.info("the state file can be written again")
                self.problem = None
                self._wait_when_busy(BUSY_TIMEOUT_S)
            return True

    # --- opening and what can go wrong ---------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            self._wanted.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _opened(str(self._wanted))
        except _NewerSchemaError as error:
            hint = "Update lllm3090, or move the file away to begin anew."
            return self._in_memory(f"was written by a newer release ({error})", hint)
        except _FAILURES as error:
            if _is_damage(error):
                return self._anew(error)
            return self._in_memory(f"cannot be used: {error}", _HINT)
        except OSError as error:
            return self._in_memory(f"cannot be used: {error.strerror}", _HINT)

    def _anew(self, error: Exception) -> sqlite3.Connection:
        """Move the damaged file aside and begin with an empty one."""
        try:
            aside = _move_aside(self._wanted)
            connection = _opened(str(self._wanted))
        except (OSError, *_FAILURES) as second:
            return self._in_memory(f"is damaged ({error}) and cannot be replaced: {second}", _HINT)
        self._say(f"was damaged ({error}); what was learnt begins anew", f"The damaged file is {aside}.")
        return connection

    def _in_memory(self, reason: str, hint: str) -> sqlite3.Connection:
        self.path = None
        self._say(f"{reason}; what is learnt now is forgotten when the daemon ends", hint)
        return _opened(":memory:")

    def _failed(self, error: Exception, done: str) -> None:
        """Replace a file that turned out to be damaged; let everything else, such as a full disk, pass."""
        if _is_damage(error) and self.path is not None:
            self._connection.close()
            self._connection = self._anew(error)
            return
        if self.problem is None:
            self._say(f"cannot be {done}: {error}", "Check the space on its disk.", passing=True)
            # Whoever holds it may hold it for long, and a list of models writes each file that is new.
            self._wait_when_busy(0)

    def _wait_when_busy(self, seconds: float) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")

    def _say(self, reason: str, hint: str, *, passing: bool = False) -> None:
        self.problem = LlmError(
            ErrorCode.STATE_UNUSABLE,
            f"The state file {self._wanted} {reason}.",
            hint=hint,
            path=str(self._wanted),
            passing=passing,
        )
        log.warning(self.problem.message, extra={"hint": hint})


_HINT = "Correct the permissions or the disk, or set state_dir (LLLM3090_STATE_DIR)."


def _is_damage(error: Exception) -> bool:
    """The file itself is no usable database; errors of the Python binding have no result code of SQLite."""
    code = int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
    return code in _DAMAGED or isinstance(error, UnicodeDecodeError)


def _opened(database: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        database, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # With WAL a power cut may lose the last changes, never the file.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        _migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection) -> None:
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if owner != APPLICATION_ID and tables:
        error = sqlite3.DatabaseError("it is the database of another program")
        error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
        raise error
    with _transaction(connection):
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY, applied_s INTEGER NOT NULL)"
        )
        at = connection.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()[0]
    if at > SCHEMA_VERSION:
        raise _NewerSchemaError(f"its schema is {at}, this release knows {SCHEMA_VERSION}")
    for version, statements in enumerate(MIGRATIONS[at:], at + 1):
        with _transaction(connection):
            for statement in statements:
                connection.execute(statement)
            connection.execute("INSERT INTO migrations VALUES (?, ?)", (version, int(time.time())))


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it already
            connection.execute("ROLLBACK")
        raise


def _move_aside(path: Path) -> Path:
    """Rename a damaged database and its journals; only the last few are kept."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    aside = path.with_name(f"{path.name}.damaged-{stamp}-{time.monotonic_ns() % 1_000_000:06d}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    for old in sorted(path.parent.glob(f"{path.name}.damaged-*"))[:-KEPT_DAMAGED_FILES]:
        old.unlink(missing_ok=True)
    return aside
