"""Headers that were read before: in SQLite, valid while path, size, time, inode and reader are what they were.

Digests, which a scan of the library needs of every file, are apart from the headers, which only planning needs.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.checkpoints.classify import Digest, digest
from lllm3090d.checkpoints.cursor import FileStamp
from lllm3090d.checkpoints.gguf_format import format_version
from lllm3090d.checkpoints.header import READER_VERSION, GgufHeader, read_header
from lllm3090d.checkpoints.header_codec import BadEntryError, pack, unpack
from lllm3090d.errors import LlmError
from lllm3090d.store import Store

log = logging.getLogger(__name__)

# Raised whenever the same header would be digested differently.
DIGEST_VERSION = 1
_BATCH = 64  # headers held until they are written in one transaction

_SELECT_BODY = """SELECT body FROM headers JOIN header_bodies USING (id)
    WHERE path = ? AND size_bytes = ? AND mtime_ns = ? AND inode = ? AND reader = ?"""
_SELECT_DIGESTS = "SELECT path, size_bytes, mtime_ns, inode, digest FROM headers WHERE reader = ?"
_INSERT = (
    """INSERT INTO headers (path, size_bytes, mtime_ns, inode, reader, digest) VALUES (?, ?, ?, ?, ?, ?)"""
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One row, before it is written."""

    path: Path
    stamp: FileStamp
    digest: Digest
    body: bytes


def reader_version() -> str:
    """Everything that decides how a file is read."""
    return f"{READER_VERSION}.{DIGEST_VERSION}.{format_version()}"


class HeaderCache:
    """Reads headers and remembers them; thread-safe. Where the store fails, files are read each time.

    Args:
        store: where they are kept.
        read: reads a file that is not known.
    """

    def __init__(self, store: Store, read: Callable[[Path], GgufHeader] = read_header) -> None:
        self._store = store
        self._read = read
        self._lock = threading.Lock()  # over the digests in memory
        self._digests: dict[Path, tuple[FileStamp, Digest]] | None = None

    def header(self, path: Path) -> GgufHeader:
        """The header of a file as it is now; blocks and raises as :func:`read_header`."""
        try:
            stamp = FileStamp.of(path.stat())
        except OSError:
            return self._read(path)  # which says what is wrong
        key = (os.fsencode(path), stamp.size_bytes, _signed(stamp.mtime_ns), _signed(stamp.inode))
        for (body,) in self._store.rows(_SELECT_BODY, (*key, reader_version())):
            try:
                return unpack(path, stamp, body)
            except BadEntryError as error:
                log.warning("a cached header cannot be used", extra={"reason": str(error)})
        header = self._read(path)
        if header.stamp is not None:
            with self._lock:
                self._keep([_Entry(path, header.stamp, digest(header), pack(header))])
        return header

    def digests(self, files: Mapping[Path, FileStamp]) -> dict[Path, Digest | LlmError]:
        """The digest of each file, or why it cannot be read; what is not known is read, and kept."""
        found: dict[Path, Digest | LlmError] = {}
        fresh: list[_Entry] = []
        with self._lock:
            known = self._known()
            for path, stamp in files.items():
                entry = known.get(path)
                if entry is not None and entry[0] == stamp:
                    found[path] = entry[1]
                    continue
                try:
                    header = self._read(path)
                except LlmError as error:
                    found[path] = error
                    continue
                found[path] = read = digest(header)
                fresh.append(_Entry(path, header.stamp or stamp, read, pack(header)))
                if len(fresh) == _BATCH:
                    self._keep(fresh)
                    fresh = []
            self._keep(fresh)
        return found

    def prune(self, root: Path, present: Mapping[Path, FileStamp]) -> None:
        """Forget files below ``root`` that a scan of it did not find, and others that no longer exist."""
        with self._lock:
            known = self._known()
            gone = [
                path
                for path in known
                if path not in present and (path.is_relative_to(root) or not os.path.lexists(path))
            ]
            for path in gone:
                del known[path]
            if gone:
                self._store.change(
                    lambda connection: connection.executemany(
                        "DELETE FROM headers WHERE path = ?", [(os.fsencode(path),) for path in gone]
                    )
                )

    def _known(self) -> dict[Path, tuple[FileStamp, Digest]]:
        """All digests of this reader, read once; those of others are dropped."""
        if self._digests is None:
            reader = reader_version()
            self._digests = {}
            for path, size, mtime, inode, text in self._store.rows(_SELECT_DIGESTS, (reader,)):
                try:
                    stamp = FileStamp(size, mtime, inode % _U64_LIMIT)
                    self._digests[Path(os.fsdecode(path))] = (stamp, Digest.from_json(text))
                except (ValueError, TypeError, KeyError) as error:
                    log.warning("a cached digest cannot be used", extra={"reason": str(error)})
            if self._store.rows("SELECT 1 FROM headers WHERE reader != ? LIMIT 1", (reader,)):
                self._store.change(
                    lambda connection: connection.execute("DELETE FROM headers WHERE reader != ?", (reader,))
                )
        return self._digests

    def _keep(self, entries: Sequence[_Entry]) -> None:
        if not entries:
            return
        known = self._known()
        known.update((entry.path, (entry.stamp, entry.digest)) for entry in entries)
        reader = reader_version()

        def write(connection: sqlite3.Connection) -> None:
            for entry in entries:
                path, stamp = os.fsencode(entry.path), entry.stamp
                connection.execute("DELETE FROM headers WHERE path = ?", (path,))
                values = (path, stamp.size_bytes, _signed(stamp.mtime_ns), _signed(stamp.inode))
                row = connection.execute(_INSERT, (*values, reader, entry.digest.to_json()))
                connection.execute("INSERT INTO header_bodies VALUES (?, ?)", (row.lastrowid, entry.body))

        self._store.change(write)


_U64_LIMIT = 1 << 64


def _signed(number: int) -> int:
    """An unsigned 64-bit number as SQLite keeps it; some file systems use all bits of an inode."""
    return number - _U64_LIMIT if number >= _U64_LIMIT >> 1 else number
