"""A word to the next daemon that what happened could not be recorded, where the state file itself cannot carry it.

A daemon that starts on a full disk may not be able to use the state file at all. Should it end before that is over, the
file would say nothing of its life: the next daemon would give its numbers once more, and tell no gap. So the runtime
directory, which is in memory, keeps which numbers may have been told. It goes with the session, as those who follow do.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lllm3090d.whole_files import read_whole, replace_whole

log = logging.getLogger(__name__)

FILE_NAME = "unrecorded"
# No daemon has counted to what has more digits.
MOST_DIGITS = 18


class Unrecorded:
    """The file, blocking; never raises for what is wrong with it.

    Args:
        directory: that outlives the daemon.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE_NAME

    def read(self) -> int | None:
        """A number above all that were told and not recorded; None where everything was recorded."""
        try:
            text = read_whole(self._file, MOST_DIGITS + 2).strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is ignored: %s", self._file, error)
            return None
        if not text.isdigit() or len(text) > MOST_DIGITS:
            log.warning("%s is ignored: it is no number", self._file)
            return None
        return int(text)

    def write(self, number: int) -> bool:
        """All numbers below may have been told, and are not recorded; whether the next daemon will know."""
        try:
            replace_whole(self._file, f"{number}\n".encode())
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error.strerror or error)
            return False
        return True

    def remove(self) -> None:
        """Everything is recorded again, or the gap is."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", self._file, error.strerror or error)
