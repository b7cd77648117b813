"""A bounded file for the log of each run, where the journal cannot be read. Blocking, for threads.

systemd opens the file for appending and the engine writes to it, so the daemon's end takes nothing away. What is older
than the bound is punched out of the file: its blocks go back to the disk, what follows keeps its place, and no line
that is written meanwhile is lost. A file system that cannot do that has the file cut to nothing instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import time
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

ENDING = ".log"
# An engine writes some 30 KB at its start and 0.5 KB for each request; 4 MiB are thousands of requests.
KEPT_BYTES = 4 << 20
MOST_BYTES = 2 * KEPT_BYTES  # on the disk, between two looks
BLOCK_BYTES = 4096
KEPT_FILES = 20  # of runs that have ended
KEPT_DAYS = 30  # and no longer
_PUNCH_HOLE_AND_KEEP_SIZE = 0x02 | 0x01  # linux/falloc.h
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.ENODEV})
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def log_file(directory: Path, identifier: str) -> Path:
    """Where the log of a run is, if it has a file."""
    return directory / f"{identifier}{ENDING}"


def make(path: Path) -> None:
    """Make an empty file, private to the user, so that systemd has only to open it. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))


def trim(path: Path) -> None:
    """Bound what a file takes of the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_blocks * 512 <= MOST_BYTES:
            return
        end = (status.st_size - KEPT_BYTES) // BLOCK_BYTES * BLOCK_BYTES
        if end <= 0:
            return
        try:
            _punch(descriptor, end)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(descriptor, 0)  # who appends goes on at the new end
    finally:
        os.close(descriptor)


def _punch(descriptor: int, end: int) -> None:
    if _libc.fallocate(descriptor, _PUNCH_HOLE_AND_KEEP_SIZE, 0, end) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def tend(directory: Path, running: Collection[str]) -> bool:
    """Bound the files of runs, and remove old ones of those that have ended; what fails is logged.

    Args:
        directory: of the files; there may be none.
        running: identifiers of the runs that have not ended.

    Returns:
        Whether a file may still grow.
    """
    ended: list[tuple[float, Path]] = []
    grows = False
    for path in directory.glob(f"*{ENDING}"):
        try:
            trim(path)
            if path.name.removesuffix(ENDING) in running:
                grows = True
            else:
                ended.append((path.stat().st_mtime, path))
        except FileNotFoundError:
            continue  # somebody has removed it
        except OSError as error:
            log.warning("a log file cannot be bounded", extra={"path": path, "reason": str(error)})
    ended.sort(reverse=True)
    oldest = time.time() - KEPT_DAYS * 86_400
    for number, (written, path) in enumerate(ended):
        if number >= KEPT_FILES or written < oldest:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("an old log file cannot be removed", extra={"path": path, "reason": str(error)})
    return grows


def last_lines(path: Path, count: int) -> tuple[str, ...]:
    """The last lines of a file, oldest first; of one that is being written the unfinished line too.

    Raises:
        OSError: it cannot be read.
    """
    lines, unfinished, _ = lines_now(path)
    if unfinished:
        lines.append(unfinished)
    return tuple(map(decoded, lines[-count:])) if count else ()


def lines_now(path: Path) -> tuple[list[bytes], bytes, int]:
    """The whole lines of a file as it is now, the beginning of one that is not finished, and where that ends.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        text, end = _kept(file.fileno())
    *lines, unfinished = text.split(b"\n")
    return lines, unfinished, end


def decoded(line: bytes) -> str:
    """A line as text: progress that was drawn over itself leaves its last state, bytes that are no text a mark."""
    shown = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
    return shown.decode("utf-8", errors="replace")


def _kept(descriptor: int) -> tuple[bytes, int]:
    """What the file holds behind what was punched out, from the first whole line on, and where that ends."""
    size = os.fstat(descriptor).st_size
    start = 0
    with contextlib.suppress(OSError):  # ENXIO: nothing but a hole, or empty
        start = os.lseek(descriptor, 0, os.SEEK_DATA)
    start = max(start, size - MOST_BYTES - KEPT_BYTES)
    found = os.pread(descriptor, size - start, start)
    text = found.lstrip(b"\0")
    return (text.partition(b"\n")[2] if start > 0 else text), start + len(found)
