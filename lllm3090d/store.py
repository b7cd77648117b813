"""What the daemon has learnt, in one SQLite file: headers, answers of engines, calibrations, and what happened.

Everything in it but what happened can be learnt again, so nothing here ever stops a daemon that runs. A file that is
damaged is moved aside; one that a newer release wrote is left alone (no daemon starts with it: ``state_schema.py``);
where the file cannot be used at all, memory takes its place until it can be. :meth:`Store.check` says so, and a line in
the journal does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import tempfile
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
# A disk with less is as good as full: 64 headers are written at once, and each may have 100 KiB.
LEAST_ROOM_BYTES = 8 << 20

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
    (
        """CREATE TABLE engine_files (
            path BLOB PRIMARY KEY,
            size_bytes INTEGER NOT NULL,
            mtime_ns INTEGER NOT NULL,
            inode INTEGER NOT NULL,
            digest TEXT NOT NULL
        )""",
        """CREATE TABLE engine_answers (
            server BLOB PRIMARY KEY,
            fingerprint TEXT NOT NULL,
            body BLOB NOT NULL
        )""",
        # Apart: it depends on the machine as well, and is asked anew after each boot.
        """CREATE TABLE engine_devices (
            server BLOB PRIMARY KEY,
            fingerprint TEXT NOT NULL,
            surroundings TEXT NOT NULL,
            devices TEXT NOT NULL
        )""",
        """CREATE TABLE dry_runs (
            id INTEGER PRIMARY KEY,
            key TEXT NOT NULL UNIQUE,
            body TEXT NOT NULL
        )""",
    ),
    (
        """CREATE TABLE calibrations (
            id INTEGER PRIMARY KEY,
            checkpoint TEXT NOT NULL,
            engine TEXT NOT NULL,
            backend TEXT NOT NULL,
            card TEXT NOT NULL,
            launch TEXT NOT NULL,
            quoted_bytes INTEGER NOT NULL,
            peak_bytes INTEGER NOT NULL,
            load_peak_bytes INTEGER NOT NULL,
            probe_tokens INTEGER NOT NULL,
            short_bytes INTEGER NOT NULL,
            seen_s REAL NOT NULL,
            short_s REAL NOT NULL,
            UNIQUE (checkpoint, engine, backend, card, launch)
        )""",
        "CREATE INDEX calibrations_of_builds ON calibrations (engine, backend, card)",
    ),
    (
        # What a person wants kept as it is: kind 'released' with no subject, kind 'pinned' with a run.
        "CREATE TABLE holds (kind TEXT NOT NULL, subject TEXT NOT NULL, PRIMARY KEY (kind, subject)) WITHOUT ROWID",
    ),
    (
        """CREATE TABLE fingerprints (
            id INTEGER PRIMARY KEY,
            stamps TEXT NOT NULL UNIQUE,
            fingerprint TEXT NOT NULL
        )""",
    ),
    (
        """CREATE TABLE events (
            seq INTEGER PRIMARY KEY,
            at_us INTEGER NOT NULL,
            model TEXT,
            is_routine INTEGER NOT NULL,
            size_bytes INTEGER NOT NULL,
            body TEXT NOT NULL
        )""",
        "CREATE INDEX events_of_models ON events (model, seq)",
        "CREATE INDEX events_by_time ON events (at_us)",
        # One row: the number that the next daemon may begin with, and whether the last one has ended in order.
        """CREATE TABLE event_numbers (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            next INTEGER NOT NULL,
            ended INTEGER NOT NULL
        )""",
    ),
    (
        # What is to be loaded again after a sleep, in order.
        "CREATE TABLE sleepers (position INTEGER PRIMARY KEY, boot TEXT NOT NULL, body TEXT NOT NULL)",
    ),
    (
        # What loads have read from each file system, by where it is mounted.
        "CREATE TABLE disk_rates (mount BLOB PRIMARY KEY, bytes_per_s REAL NOT NULL) WITHOUT ROWID",
    ),
    (
        # Models that are to run, in the order in which they came to be wanted.
        "CREATE TABLE wanted (position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL)",
        # One row: under which boot and user manager the daemon lived last, and whether it has ended in order.
        """CREATE TABLE wanted_life (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            boot TEXT NOT NULL,
            session TEXT NOT NULL,
            ended INTEGER NOT NULL
        )""",
        # Marks that were made by command: the oldest has the least position.
        "CREATE TABLE autoload (position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, body TEXT NOT NULL)",
    ),
    (
        # The Vulkan devices by PCI address; NULL where they were not asked for, or could not be told.
        "ALTER TABLE engine_devices ADD COLUMN addressed TEXT",
    ),
    (
        # Requests to the gateway that have ended; nothing of what was asked or answered.
        """CREATE TABLE requests (
            id INTEGER PRIMARY KEY,
            request_id TEXT NOT NULL UNIQUE,
            at_us INTEGER NOT NULL,
            model TEXT,
            body TEXT NOT NULL
        )""",
        "CREATE INDEX requests_of_models ON requests (model, id)",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)

# The primary result codes that say the file itself is no usable database.
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Where the schema is damaged, SQLite quotes it in its message and Python cannot decode that.
_FAILURES = (sqlite3.Error, UnicodeDecodeError)


class _NewerSchemaError(Exception):
    """A newer release wrote the file."""


class _UnusableError(Exception):
    """The file cannot be used; what follows its name in a message, and what to do."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class Store:
    """One SQLite database in WAL mode, for one process; every method may be called from any thread.

    Attributes:
        path: the file; None while memory takes its place.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the database; blocks for the disk, never raises for what is wrong with it."""
        self._lock = threading.RLock()
        self._wanted = path
        self._trouble: LlmError | None = None  # as long as it lasts
        self._loss: LlmError | None = None  # until the daemon ends
        self._identity: tuple[int, int] | None = None
        self._closed = False
        self.path: Path | None = path
        try:
            self._connection = self._open(BUSY_TIMEOUT_S)
        except _UnusableError as error:
            self._connection = self._in_memory(error)

    @property
    def problem(self) -> LlmError | None:
        """Why what is learnt is not kept, else why what was learnt is lost, as far as was known last."""
        return self._trouble or self._loss

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
            if self._trouble is not None and self.path is not None and _obstacle(self.path) is None:
                self._recovered()
            return True

    def check(self) -> LlmError | None:
        """:attr:`problem` as it is now; blocks for the disk.

        Nothing is written as long as nothing is wrong. While something is, whether it still is.
        """
        with self._lock:
            if self._closed:
                return self.problem
            if self.path is None:
                self._return_to_file()
            elif _identity(self.path) != self._identity:
                self._begin_anew()
            elif (obstacle := _obstacle(self.path)) is not None:
                self._say(obstacle, _ROOM_HINT)
            elif self._trouble is not None:
                self._probe(self.path)
            return self.problem

    # --- opening and what can go wrong ---------------------------------------------------------------------

    def _open(self, busy_timeout_s: float) -> sqlite3.Connection:
        """The file, a damaged one replaced. Raises _UnusableError."""
        try:
            self._wanted.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = _opened(str(self._wanted), busy_timeout_s)
        except _NewerSchemaError as error:
            hint = "Update lllm3090, or move the file away to begin anew."
            raise _UnusableError(f"was written by a newer release ({error})", hint) from error
        except _FAILURES as error:
            if not _is_damage(error):
                raise _UnusableError(f"cannot be used: {error}", _HINT) from error
            connection = self._replace(error)
        except OSError as error:
            raise _UnusableError(f"cannot be used: {error.strerror}", _HINT) from error
        self._identity = _identity(self._wanted)
        return connection

    def _replace(self, error: Exception) -> sqlite3.Connection:
        """Move the damaged file aside and begin with an empty one. Raises _UnusableError."""
        try:
            aside = _move_aside(self._wanted)
            connection = _opened(str(self._wanted), BUSY_TIMEOUT_S)
        except (OSError, *_FAILURES) as second:
            raise _UnusableError(f"is damaged ({error}) and cannot be replaced: {second}", _HINT) from second
        self._lost(f"was damaged ({error}); what was learnt begins anew", f"The damaged file is {aside}.")
        return connection

    def _reopen(self, opening: Callable[[], sqlite3.Connection]) -> None:
        """Another connection in place of the present one, which is closed; memory where there is none."""
        self._connection.close()
        try:
            self._connection = opening()
        except _UnusableError as error:
            self._connection = self._in_memory(error)
        else:
            self._trouble = None
            self._identity = _identity(self._wanted)

    def _begin_anew(self) -> None:
        """The file was deleted or replaced under us: what is written to it now, nobody would find again."""
        self._reopen(lambda: self._open(0))
        if self.path is not None:
            self._wait_when_busy(BUSY_TIMEOUT_S)
            self._lost(
                "was removed or replaced while it was in use; what was learnt begins anew",
                "Stop the daemon before you touch it.",
            )

    def _return_to_file(self) -> None:
        """Use the file as soon as it can be used; what memory holds can be learnt again."""
        try:
            connection = self._open(0)
        except _UnusableError as error:
            self._told(error)
            return
        self._connection.close()
        self._connection = connection
        self.path = self._wanted
        self._recovered()

    def _probe(self, path: Path) -> None:
        """What could not be written can be by now, or still cannot, perhaps for another reason."""
        try:
            with tempfile.TemporaryFile(dir=path.parent) as file:
                os.posix_fallocate(file.fileno(), 0, LEAST_ROOM_BYTES)  # tells of quotas too
            with _transaction(self._connection):
                self._connection.execute("PRAGMA user_version = 0")  # which is written, although it was 0
        except OSError as error:
            self._say(f"cannot be written: {error.strerror}", _ROOM_HINT)
        except _FAILURES as error:
            self._failed(error, "written")
        else:
            self._recovered()

    def _failed(self, error: Exception, done: str) -> None:
        """Replace a file that turned out to be damaged; let everything else, such as a full disk, pass."""
        if _is_damage(error) and self.path is not None:
            self._reopen(lambda: self._replace(error))
        elif self.path is not None:
            self._say(f"cannot be {done}: {error}", _ROOM_HINT)
            # Whoever holds it may hold it for long, and a list of models writes each file that is new.
            self._wait_when_busy(0)

    def _in_memory(self, error: _UnusableError) -> sqlite3.Connection:
        connection = _opened(":memory:", BUSY_TIMEOUT_S)
        self.path = None
        self._told(error)
        return connection

    def _wait_when_busy(self, seconds: float) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")

    def _recovered(self) -> None:
        log.info("the state file %s can be used again", self._wanted)
        self._trouble = None
        self._wait_when_busy(BUSY_TIMEOUT_S)

    def _told(self, error: _UnusableError) -> None:
        self._say(f"{error.reason}; what is learnt now is forgotten when the daemon ends", error.hint)

    def _say(self, reason: str, hint: str) -> None:
        """What keeps from writing from now on; logged once."""
        problem = self._problem(reason, hint)
        if self._trouble is None or self._trouble.message != problem.message:
            log.warning(problem.message, extra={"hint": hint})
        self._trouble = problem

    def _lost(self, reason: str, hint: str) -> None:
        self._loss = self._problem(reason, hint)
        log.warning(self._loss.message, extra={"hint": hint})

    def _problem(self, reason: str, hint: str) -> LlmError:
        return LlmError(
            ErrorCode.STATE_UNUSABLE,
            f"The state file {self._wanted} {reason}.",
            hint=hint,
            path=str(self._wanted),
        )


_HINT = "Correct the permissions or the disk, or set state_dir (LLLM3090_STATE_DIR)."
_ROOM_HINT = "Check the space on its disk."


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file is there; None where none is."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _obstacle(path: Path) -> str | None:
    """What is known to keep a file from growing, without writing to it."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    if disk.f_flag & os.ST_RDONLY:
        return "cannot be written: its file system is read-only"
    room_bytes = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and room_bytes < LEAST_ROOM_BYTES:  # some network file systems tell nothing
        return f"can hardly be written: its disk has {room_bytes >> 10} KiB left"
    return None


def _is_damage(error: Exception) -> bool:
    """The file itself is no usable database; errors of the Python binding have no result code of SQLite."""
    code = int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
    return code in _DAMAGED or isinstance(error, UnicodeDecodeError)


def _opened(database: str, busy_timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        database, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
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
