"""New messages of the kernel, where this user may read them (``/dev/kmsg``); never waits, needs no process.

With ``kernel.dmesg_restrict = 1``, as most distributions have it, only root may. What was said before the beginning is
not read: it may be of a card that has been reset since.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

KMSG = Path("/dev/kmsg")
RECORD_BYTES = 8192  # the kernel's own limit for one record
MOST_RECORDS = 4096  # of one look


class KernelMessages:
    """Reads on from where it was last.

    Args:
        path: of the device.
    """

    def __init__(self, path: Path = KMSG) -> None:
        self._fd: int | None = None
        self.problem = ""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self.problem = f"{path} cannot be read: {error.strerror}"
            self.close()

    def new(self) -> str:
        """What was said since the last call; empty where nobody may look."""
        texts: list[str] = []
        while self._fd is not None and len(texts) < MOST_RECORDS:
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # some were overwritten before they were read; the next read goes on behind them
            except OSError as error:
                self.problem = f"the kernel's messages cannot be read: {error.strerror}"
                self.close()
                break
            if not record:
                break
            texts.append(record.decode("utf-8", errors="replace"))
        return "".join(texts)

    def close(self) -> None:
        """Read no more."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None
