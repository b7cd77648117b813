"""What a unit wrote: its lines in the journal, read through ``journalctl``.

Entries are selected by fields (identifier and user), not by ``--user``: that also finds those in
the system journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from lllm3090d.errors import ErrorCode, LlmError

LINES_MAX = 10_000
LINE_BYTES_MAX = 16 << 20  # of JSON; journald itself cuts lines of a stream at 48 KiB
# journald writes what it receives within milliseconds, unless the machine is very busy. Waited for to the end only
# where an engine ends well while it loads: systemd reports all other ends.
DEATH_TIMEOUT_S = 5.0
QUIET_S = 0.1  # silence after the report of an end that counts as "that was all"
MANAGER_LINES = 16  # lines of systemd itself about one unit, beside those asked for
# From systemd/sd-messages.h: UNIT_PROCESS_EXIT, UNIT_SUCCESS, UNIT_FAILURE_RESULT.
_END_OF_UNIT = frozenset(
    {
        "98e322203f7a4ed290d09fe03c09fe15",
        "7ad2d189f7e94e70a38c781354912448",
        "d9b373ed55a64feb8242e02dbe79a49c",
    }
)


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One entry: microseconds since the epoch at which journald got it, and its text."""

    at_realtime_us: int
    message: str


async def tail(
    identifier: str, lines: int, uid: int | None = None, *, since_us: int | None = None
) -> tuple[JournalLine, ...]:
    """The last lines written under a syslog identifier, oldest first.

    Args:
        lines: how many at most, 0 to :data:`LINES_MAX`.
        uid: whose; None for our own user.
        since_us: none older, microseconds since 1970.

    Raises:
        LlmError: LOGS_UNAVAILABLE.
        ValueError: ``lines`` out of range.
    """
    _check(lines)
    if lines == 0:
        return ()
    process = await _journalctl(lines, False, _by_identifier(identifier, uid), since_us)
    try:
        output, errors = await process.communicate()
    finally:
        await _end(process)
    entries = [entry for entry in map(_entry, output.splitlines()) if entry is not None]
    if process.returncode != 0 or (not entries and errors.strip()):
        raise _unavailable(errors)
    return tuple(_line(entry) for entry in entries)


async def follow(
    identifier: str, lines: int = 0, uid: int | None = None, *, since_us: int | None = None
) -> AsyncGenerator[JournalLine, None]:
    """The last lines, then each further one as it is written, until the iterator is closed.

    Args:
        lines: how many of those that are there already, 0 to :data:`LINES_MAX`.
        uid: whose; None for our own user.
        since_us: none older, microseconds since 1970.

    Raises:
        LlmError: LOGS_UNAVAILABLE, also when journalctl ends.
        ValueError: ``lines`` out of range.
    """
    _check(lines)
    matches = _by_identifier(identifier, uid)
    async with contextlib.aclosing(_followed(lines, matches, since_us)) as entries:
        async for entry in entries:
            yield _line(entry)


async def last_lines_after_death(
    identifier: str, unit: str, lines: int, uid: int | None = None, timeout_s: float = DEATH_TIMEOUT_S
) -> tuple[JournalLine, ...]:
    """The last lines of a unit that has just ended, when journald may still be writing them.

    Waits until systemd's own report of the end is in the journal and nothing follows, or for ``timeout_s``. The
    manager of a user reports no good end, only a bad one.

    Args:
        unit: name of the unit, whose end systemd reports.
        lines: how many at most, 0 to :data:`LINES_MAX`.
        uid: whose; None for our own user.

    Raises:
        LlmError: LOGS_UNAVAILABLE.
        ValueError: ``lines`` out of range.
    """
    _check(lines)
    if lines == 0:
        return ()
    found: deque[JournalLine] = deque(maxlen=lines)
    mine = _by_identifier(identifier, uid)
    # The manager of a user reports under USER_UNIT, that of the system under UNIT.
    matches = (*mine, "+", f"USER_UNIT={unit}", mine[1], "+", f"UNIT={unit}", "_UID=0")
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with contextlib.aclosing(_followed(lines + MANAGER_LINES, matches)) as entries:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline) as patience:
                ended = False
                async for entry in entries:
                    if entry.get("SYSLOG_IDENTIFIER") == identifier:
                        found.append(_line(entry))
                    ended = ended or entry.get("MESSAGE_ID") in _END_OF_UNIT
                    if ended:
                        quiet = asyncio.get_running_loop().time() + QUIET_S
                        patience.reschedule(min(deadline, quiet))
    return tuple(found)


def _check(lines: int) -> None:
    if not 0 <= lines <= LINES_MAX:
        raise ValueError(f"lines = {lines} is not within 0 to {LINES_MAX}")


def _by_identifier(identifier: str, uid: int | None) -> tuple[str, str]:
    return f"SYSLOG_IDENTIFIER={identifier}", f"_UID={os.getuid() if uid is None else uid}"


async def _journalctl(
    lines: int, follows: bool, matches: tuple[str, ...], since_us: int | None = None
) -> Process:
    argv = ["journalctl", "--no-pager", "--all", "--output=json", f"--lines={lines}"]
    argv.append("--output-fields=MESSAGE,MESSAGE_ID,SYSLOG_IDENTIFIER")
    if follows:
        argv.append("--follow")
    if since_us is not None:
        argv.append(f"--since=@{since_us // 1_000_000}.{since_us % 1_000_000:06d}")
    try:
        return await asyncio.create_subprocess_exec(
            *argv, *matches, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, limit=LINE_BYTES_MAX
        )
    except OSError as error:
        raise LlmError(
            ErrorCode.LOGS_UNAVAILABLE,
            f"journalctl cannot be run: {error.strerror}.",
            hint="Install the package that contains journalctl (systemd).",
        ) from error


async def _followed(
    lines: int, matches: tuple[str, ...], since_us: int | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    process = await _journalctl(lines, True, matches, since_us)
    assert process.stdout is not None and process.stderr is not None  # noqa: S101 - both are pipes, for mypy
    # journalctl says little there, but a full pipe would stop it.
    errors = asyncio.create_task(process.stderr.read())
    try:
        while raw := await _read_line(process.stdout):
            entry = _entry(raw)
            if entry is not None:
                yield entry
        raise _unavailable(await errors)
    finally:
        await _end(process, errors)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError as error:
        raise _unavailable(f"an entry is larger than {LINE_BYTES_MAX} bytes".encode()) from error


async def _end(process: Process, errors: asyncio.Task[bytes] | None = None) -> None:
    """Leave no journalctl behind, whatever ended the reading."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            process.kill()
    if errors is not None:
        await errors
    # Reads the pipes to their end: with data left in them, wait() alone might never return.
    await process.communicate()


def _entry(raw: bytes) -> dict[str, Any] | None:
    """An entry; None for remarks such as "-- No entries --", and for half an entry of a journalctl that was killed."""
    if not raw.startswith(b"{"):
        return None
    try:
        entry: dict[str, Any] = json.loads(raw)
    except ValueError:
        return None
    return entry if "__REALTIME_TIMESTAMP" in entry else None


def _line(entry: dict[str, Any]) -> JournalLine:
    return JournalLine(int(entry["__REALTIME_TIMESTAMP"]), _text(entry.get("MESSAGE")))


def _text(value: object) -> str:
    """A field of journalctl's JSON: text, its bytes as numbers, a list of either, or null."""
    if value is None:
        return ""
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return bytes(value).decode("utf-8", errors="replace")
        return "\n".join(_text(item) for item in value)
    return str(value)


def _unavailable(errors: bytes) -> LlmError:
    said = errors.decode("utf-8", errors="replace").strip()
    reason = said.splitlines()[-1] if said else "journalctl ended without saying why"
    if "permission" in reason.lower():
        hint = "Your journal is kept in the system's files: join the group systemd-journal and log in anew."
    else:
        hint = "Try `journalctl -n 5` in a terminal."
    return LlmError(ErrorCode.LOGS_UNAVAILABLE, f"The journal cannot be read: {reason}", hint=hint)
