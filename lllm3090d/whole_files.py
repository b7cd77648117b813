"""Small files that are read and replaced as a whole: whatever fails, the old one stays. Blocking."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def read_whole(file: Path, most_bytes: int) -> bytes:
    """What is in a file.

    A FIFO or a device in its place holds up nobody, and one that grows without end fills no memory.

    Args:
        file: the file.
        most_bytes: more is an error.

    Raises:
        OSError: it could not be read; FileNotFoundError and NotADirectoryError where there is none.
        ValueError: it is no regular file, or too long.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as record:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        content = record.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes} bytes")
    return content


def replace_whole(file: Path, content: bytes) -> None:
    """Put a new file in the place of an old one, in one step, and for nobody else to read.

    Raises:
        OSError: it could not be written; the old one is as it was.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # 0600
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as record:
            record.write(content)
            record.flush()
            os.fsync(record.fileno())  # a full disk tells at the latest now
        fresh.replace(file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def settle_names(directory: Path) -> None:
    """Make a renamed or removed name last through a power cut, where the file system can do that."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
