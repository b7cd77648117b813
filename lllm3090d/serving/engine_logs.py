"""The log of an engine, wherever it is: in the journal, or in the file of its run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import journal, log_files
from lllm3090d.serving.unit_spec import LOG_FILE_PROPERTY, UnitSpec, identifier

if TYPE_CHECKING:  # the table of signatures needs GLib
    from lllm3090d.bus.properties import PropertyValue

log = logging.getLogger(__name__)

DIRECTORY = "logs"  # below state_dir
FOLLOW_POLL_S = 0.2
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line.

    Attributes:
        at_realtime_us: microseconds since 1970 at which it was received; None in a file, which does not tell.
        message: its text.
    """

    at_realtime_us: int | None
    message: str


class EngineLogs:
    """Reads logs of engines by the names of their units.

    Args:
        directory: of log files; a run with a file there has its log in it, any other in the journal.
    """

    def __init__(self, directory: Callable[[], Path | None] = lambda: None) -> None:
        self._directory = directory

    def file_of(self, unit: str) -> Path | None:
        """The file of a run; None where its log is in the journal."""
        directory = self._directory()
        path = log_files.log_file(directory, identifier(unit)) if directory is not None else None
        return path if path is not None and path.exists() else None

    def check_time(self, unit: str, since_us: int | None) -> None:
        """Raise LlmError INVALID_REQUEST for a time where lines have none, before a stream begins."""
        if self.file_of(unit) is not None:
            _refuse_time(since_us)

    async def tail(self, unit: str, lines: int, since_us: int | None = None) -> tuple[LogEntry, ...]:
        """The last lines of a unit, oldest first.

        Args:
            unit: its name.
            lines: how many at most.
            since_us: none older, microseconds since 1970.

        Raises:
            LlmError: LOGS_UNAVAILABLE; INVALID_REQUEST for a time where lines have none.
            ValueError: ``lines`` out of range.
        """
        path = self.file_of(unit)
        if path is not None:
            _refuse_time(since_us)
            return await _file_tail(path, lines)
        if since_us is None:
            found = await journal.tail(identifier(unit), lines)
        else:
            found = await journal.tail(identifier(unit), lines, since_us=since_us)
        return tuple(LogEntry(line.at_realtime_us, line.message) for line in found)

    async def follow(
        self, unit: str, lines: int = 0, since_us: int | None = None
    ) -> AsyncGenerator[LogEntry, None]:
        """The same, then each further line as it is written, until the iterator is closed. Raises as :meth:`tail`."""
        path = self.file_of(unit)
        if path is not None:
            _refuse_time(since_us)
            async with contextlib.aclosing(_file_follow(path, lines)) as entries:
                async for entry in entries:
                    yield entry
            return
        async with contextlib.aclosing(journal.follow(identifier(unit), lines, since_us=since_us)) as found:
            async for line in found:
                yield LogEntry(line.at_realtime_us, line.message)

    async def last_words(self, unit: str, lines: int) -> tuple[LogEntry, ...]:
        """The last lines of a unit that has just ended. Raises as :meth:`tail`."""
        path = self.file_of(unit)
        if path is not None:  # what a process wrote before its end is in the file
            return await _file_tail(path, lines)
        found = await journal.last_lines_after_death(identifier(unit), unit, lines)
        return tuple(LogEntry(line.at_realtime_us, line.message) for line in found)


def with_log_file(spec: UnitSpec) -> Mapping[str, PropertyValue]:
    """The properties of a unit whose log file is there; without one that cannot be made: the model matters more.

    Blocking.
    """
    path = spec.properties.get(LOG_FILE_PROPERTY)
    if not isinstance(path, str):
        return spec.properties
    try:
        log_files.make(Path(path))
    except OSError as error:
        log.error("an engine has no log file", extra={"unit": spec.name, "reason": str(error)})
        return {key: value for key, value in spec.properties.items() if value != path}
    return spec.properties


def _refuse_time(since_us: int | None) -> None:
    if since_us is not None:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            "The log of this run is a file, whose lines have no times, because the journal could not be read when it"
            " was started.",
            hint="Ask for a number of lines instead. Why the journal cannot be read: lllm3090ctl status",
        )


def _check(lines: int) -> None:
    if not 0 <= lines <= journal.LINES_MAX:
        raise ValueError(f"lines = {lines} is not within 0 to {journal.LINES_MAX}")


async def _file_tail(path: Path, lines: int) -> tuple[LogEntry, ...]:
    _check(lines)
    try:
        found = await asyncio.to_thread(log_files.last_lines, path, lines)
    except OSError as error:
        raise _unreadable(path, error) from error
    return tuple(LogEntry(None, line) for line in found)


async def _file_follow(path: Path, lines: int) -> AsyncGenerator[LogEntry, None]:
    _check(lines)
    try:
        whole, unfinished, at = await asyncio.to_thread(log_files.lines_now, path)
        for line in whole[-lines:] if lines else ():
            yield LogEntry(None, log_files.decoded(line))
        while True:
            piece, at = await asyncio.to_thread(_piece, path, at)
            *whole, unfinished = (unfinished + piece).split(b"\n")
            for line in whole:
                yield LogEntry(None, log_files.decoded(line))
            if not piece:
                await asyncio.sleep(FOLLOW_POLL_S)
    except OSError as error:
        raise _unreadable(path, error) from error


def _piece(path: Path, at: int) -> tuple[bytes, int]:
    """What a file holds from a place on, and where that ends; blocking."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        start = at if os.fstat(descriptor).st_size >= at else 0  # less than before: it was cut to nothing
        piece = os.pread(descriptor, READ_BYTES, start)
        return piece, start + len(piece)
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError) -> LlmError:
    return LlmError(
        ErrorCode.LOGS_UNAVAILABLE,
        f"The log file {path} cannot be read: {error.strerror}.",
        hint="Check its permissions and its disk.",
        path=str(path),
    )
