"""What systemd is told: readiness, status, reloading, stopping, and that we are alive (:mod:`lllm3090d.watchdog`)."""

from __future__ import annotations

import asyncio
import os
import time

import sdnotify

# A start that waits for a slow disk is not ended in the middle of it; one that waits for ever is, in the end.
START_EXTENSION_S = 30.0
START_MOST_S = 600.0
STATUS_CHARACTERS = 500  # systemd takes 4096 bytes in a message


class Notifier:
    """``sd_notify(3)`` through sdnotify; without NOTIFY_SOCKET (in a terminal) it does nothing."""

    def __init__(self) -> None:
        self._systemd = sdnotify.SystemdNotifier() if os.environ.get("NOTIFY_SOCKET") else None
        self._status = ""
        self._trouble: str | None = None

    async def starting(self, extension_s: float = START_EXTENSION_S, most_s: float = START_MOST_S) -> None:
        """Ask for time again and again for as long as the event loop turns; to be cancelled when all is ready."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + most_s
        self.status("starting")
        while loop.time() < ends_s:
            await asyncio.sleep(extension_s / 3)
            self._send(f"EXTEND_TIMEOUT_USEC={round(extension_s * 1e6)}")

    def ready(self, status: str) -> None:
        """Start-up, or a reload, is complete."""
        self._send(f"READY=1\n{self._told(status)}")

    def status(self, status: str) -> None:
        """One line for ``systemctl --user status``."""
        self._send(self._told(status))

    def reloading(self) -> None:
        """A reload begins; ready() ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The end begins."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def trouble(self, text: str | None) -> None:
        """Say what is wrong before everything else, until it is None. From any thread."""
        self._trouble = text
        self.status(self._status)

    def feed(self) -> None:
        """The parts that must live have answered."""
        self._send("WATCHDOG=1")

    def _told(self, status: str) -> str:
        self._status = status
        return f"STATUS={_one_line('; '.join(filter(None, (self._trouble, status))))}"

    def _send(self, state: str) -> None:
        if self._systemd is not None:
            # sdnotify encodes as Latin-1 and drops what that cannot hold; systemd wants UTF-8.
            self._systemd.notify(state.encode(errors="backslashreplace").decode("latin-1"))


def _one_line(status: str) -> str:
    """A line break would begin another assignment; a message that is too long is ignored as a whole by systemd."""
    line = " ".join(status.splitlines())
    return line if len(line) <= STATUS_CHARACTERS else f"{line[: STATUS_CHARACTERS - 3]}..."


def watchdog_limit_s() -> float | None:
    """``WatchdogSec`` of our unit in seconds; None without one, and where it is meant for another process."""
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    limit = os.environ.get("WATCHDOG_USEC", "")
    if not limit.isdecimal() or int(limit) == 0 or pid != str(os.getpid()):
        return None
    return int(limit) / 1_000_000
