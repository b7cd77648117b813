"""How fast the disks are that models lie on, as loads have read from them. Blocking, for threads.

Kept by where the file system is mounted: device numbers change with the boot, and two models on one disk tell of the
same. Only what came from the disk counts; a load from the page cache tells nothing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from lllm3090d.store import Store


def mount_of(path: Path) -> Path:
    """Where the file system of a path is mounted; of a path that is not there, that of the nearest one above it."""
    place = Path(os.path.realpath(path))
    while not os.path.ismount(place) and place != place.parent:
        place = place.parent
    return place


class DiskRates:
    """Remembers them.

    Args:
        store: gives the place where they are kept.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store

    def of(self, path: Path) -> float | None:
        """Bytes a second of the disk that a file is on; None where nothing was read from it yet."""
        mount = os.fsencode(mount_of(path))
        rows = self._store().rows("SELECT bytes_per_s FROM disk_rates WHERE mount = ?", (mount,))
        return float(rows[0][0]) if rows and rows[0][0] > 0 else None

    def saw(self, path: Path, bytes_per_s: float) -> None:
        """A load has read so much from the disk that a file is on.

        A slower one counts at once: what it bounds is patience. A faster one counts by half, so that one load by
        which half of the file was cached does not end the next one.
        """
        if bytes_per_s <= 0:
            return
        before = self.of(path)
        kept = bytes_per_s if before is None or bytes_per_s < before else (before + bytes_per_s) / 2
        row = (os.fsencode(mount_of(path)), kept)

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO disk_rates VALUES (?, ?)", row)

        self._store().change(work)
