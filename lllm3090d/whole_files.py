"""Small files that are replaced as a whole: whatever fails, the old one stays."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_whole(file: Path, content: bytes) -> None:
    """Put a new file in the place of an old one, in one step; blocking.

    Raises:
        OSError: it could not be written; the old one is as it was.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
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
