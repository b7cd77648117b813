"""What systemd is told: readiness, status, reloading, stopping, and that we are alive."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

import sdnotify

from lllm3090d.errors import LlmError

STATUS_CHARACTERS = 500  # systemd takes 4096 bytes in a message
log = logging.getLogger(__name__)


class Notifier:
    """``sd_notify(3)`` through sdnotify; without NOTIFY_SOCKET (in a terminal) it does nothing."""

    def __init__(self) -> None:
        self._systemd = sdnotify.SystemdNotifier() if os.environ.get("NOTIFY_SOCKET") else None

    def ready(self, status: str) -> None:
        """Start-up, or a reload, is complete."""
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """One line for ``systemctl --user status``."""
        self._send(f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        """A reload begins; ready() ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The end begins."""
        self._send("STOPPING=1\nSTATUS=stopping")

    async def feed_watchdog(self, alive: Callable[[], Awaitable[None]]) -> None:
        """Feed the watchdog for as long as alive() returns in time; returns at once without ``WatchdogSec``.

        A ping proves nothing when it comes from a timer, so each is the answer of the parts that must live.
        """
        interval_s = _watchdog_interval_s()
        if interval_s is None:
            return
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    await alive()
            except (TimeoutError, LlmError) as error:
                reason = str(error) or f"no answer within {interval_s:g} s"
                log.error(
                    "a part of the daemon does not answer; the watchdog is not fed", extra={"reason": reason}
                )
            else:
                self._send("WATCHDOG=1")
            await asyncio.sleep(interval_s)

    def _send(self, state: str) -> None:
        if self._systemd is not None:
            # sdnotify encodes as Latin-1 and drops what that cannot hold; systemd wants UTF-8.
            self._systemd.notify(state.encode(errors="backslashreplace").decode("latin-1"))


def _one_line(status: str) -> str:
    """A line break would begin another assignment; a message that is too long is ignored as a whole by systemd."""
    line = " ".join(status.splitlines())
    return line if len(line) <= STATUS_CHARACTERS else f"{line[: STATUS_CHARACTERS - 3]}..."


def _watchdog_interval_s() -> float | None:
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    limit = os.environ.get("WATCHDOG_USEC", "")
    if not limit.isdecimal() or int(limit) == 0 or pid != str(os.getpid()):
        return None
    return int(limit) / 1_000_000 / 2
