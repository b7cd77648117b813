"""Whether what this user's units write to the journal can be read again: found out by writing and reading a line."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from dataclasses import dataclass

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import journal

JOURNAL_SOCKET = "/run/systemd/journal/socket"
PROBE_IDENTIFIER = "lllm3090d-probe"
PROBE_TIMEOUT_S = 3.0

_HINT = (
    "Engines write their logs to files in state_dir until then. To have them in the journal: see that"
    " systemd-journald runs, keep it on disk (sudo mkdir -p /var/log/journal && sudo systemctl restart"
    " systemd-journald), or join the group systemd-journal and log in anew; then restart lllm3090d."
)


@dataclass(frozen=True, slots=True)
class JournalAccess:
    """What became of the probe.

    Attributes:
        problem: why the journal cannot be read, with what to do; None where it can.
    """

    problem: LlmError | None = None

    @property
    def is_readable(self) -> bool:
        """Lines of this user's units can be read."""
        return self.problem is None


async def probe_journal(timeout_s: float = PROBE_TIMEOUT_S) -> JournalAccess:
    """Write a line as this user and look for it, for ``timeout_s`` at most; one line of the journal each time.

    A directory or a group would not tell: without a persistent journal the lines of users are in the system's files,
    which only members of some groups may read, and journalctl then says nothing and finds nothing.
    """
    identifier = f"{PROBE_IDENTIFIER}-{secrets.token_hex(4)}"
    try:
        _say(identifier)
    except OSError as error:
        return _closed(f"journald does not take a line: {error.strerror}")
    try:
        async with asyncio.timeout(timeout_s):
            async with contextlib.aclosing(journal.follow(identifier, 1)) as lines:
                async for _ in lines:
                    return JournalAccess()
    except LlmError as error:
        return _closed(error.message)
    except TimeoutError:
        pass
    return _closed("what this user's programs write to it does not show")


def _say(identifier: str) -> None:
    """One entry by journald's native protocol; raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        channel.connect(JOURNAL_SOCKET)
        text = "lllm3090d looks whether it can read the journal"
        channel.send(f"SYSLOG_IDENTIFIER={identifier}\nPRIORITY=7\nMESSAGE={text}\n".encode())


def _closed(reason: str) -> JournalAccess:
    return JournalAccess(
        LlmError(ErrorCode.LOGS_UNAVAILABLE, f"The journal cannot be read: {reason}", hint=_HINT)
    )
