"""Requests that have ended in the state file: written in batches, bounded by age and number. Blocking, for threads."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from lllm3090d.gateway.record import Outcome, Record
from lllm3090d.serving.moments import now_us, time_text
from lllm3090d.store import Store
from lllm3090d.wire_requests import RequestView

log = logging.getLogger(__name__)

DAY_US = 86_400 * 1_000_000
# By age is looked through all of them, so only when so many of those that are kept were written anew.
PRUNE_FRACTION = 0.05
LEAST_TO_PRUNE = 100
# Half a millisecond of work, then a pause in which the interpreter is another thread's.
ROWS_AT_A_TIME = 32
PAUSE_S = 0.0005


@dataclass(frozen=True, slots=True)
class Kept:
    """How much is kept.

    Attributes:
        days: older ones go.
        count: of all; the oldest go.
    """

    days: int
    count: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which are wanted.

    Attributes:
        model: name; None for all.
        from_us: none that ended earlier, microseconds since 1970.
        last: how many at most, the newest of them.
    """

    model: str | None = None
    from_us: int = 0
    last: int = 100

    def takes(self, row: Ended) -> bool:
        """It is one of them, but for the number."""
        return row.at_us >= self.from_us and self.model in {None, row.record.model}


@dataclass(frozen=True, slots=True)
class Ended:
    """A request and when it ended, microseconds since 1970."""

    at_us: int
    record: Record


def view_of(ended: Ended) -> RequestView:
    """What is told of a request."""
    record = ended.record
    has_left = record.outcome is Outcome.CLIENT_CLOSED
    return RequestView(
        request_id=record.request_id,
        at=time_text(ended.at_us),
        route=record.path.encode("utf-8", "backslashreplace").decode(),
        model=record.model or None,
        run=record.run or None,
        priority=record.priority.name.lower(),
        status=None if has_left else record.status or None,
        outcome=str(record.outcome),
        code=record.code or None,
        streamed=record.streamed,
        prompt_tokens=record.prompt_tokens,
        generated_tokens=record.generated_tokens,
        tokens_per_s=_rounded(record.tokens_per_s()),
        load_s=round(record.load_s, 4),
        line_s=round(record.line_s, 4),
        first_byte_s=_rounded(record.first_byte_s),
        total_s=round(record.total_s, 4),
        sent_bytes=record.sent_bytes,
    )


class RequestTable:
    """Reads and writes the requests; never raises for what is wrong with the file.

    Args:
        store: gives the place where they are kept.
        kept: as the settings are now.
    """

    def __init__(self, store: Callable[[], Store], kept: Callable[[], Kept]) -> None:
        self._store = store
        self._kept = kept
        self._unpruned: int | None = None  # written since; None where nothing was removed yet
        self.problem = ""  # why the last write failed, for a person

    def write(self, rows: Sequence[Ended]) -> bool:
        """Write all or none of them; whether that is on the disk's way now."""
        store = self._store()
        store.check()  # tells a file that was removed or can be used again
        if store.path is None:
            self.problem = _reason(store)
            return False
        kept = self._kept()
        values = _values(rows[-kept.count :] if kept.count else ())
        unpruned = len(values) if self._unpruned is None else self._unpruned + len(values)
        prunes = self._unpruned is None or unpruned >= max(LEAST_TO_PRUNE, kept.count * PRUNE_FRACTION)

        def work(connection: sqlite3.Connection) -> None:
            # Whoever is cancelled while it writes writes again.
            connection.executemany(
                "INSERT OR IGNORE INTO requests (request_id, at_us, model, body) VALUES (?, ?, ?, ?)", values
            )
            if prunes:
                _prune(connection, kept)

        if not store.change(work):
            self.problem = _reason(store)
            return False
        self._unpruned = 0 if prunes else unpruned
        return True

    def newest(self, wanted: Wanted) -> tuple[RequestView, ...]:
        """The last ones, oldest first."""
        kept = self._kept()
        from_us = max(wanted.from_us, now_us() - kept.days * DAY_US)
        query = "SELECT body FROM requests WHERE at_us >= ? AND (? IS NULL OR model = ?) ORDER BY id DESC LIMIT ?"
        most = min(wanted.last, kept.count)
        rows = self._store().rows(query, (from_us, wanted.model, wanted.model, most))
        found = []
        for (body,) in reversed(rows):
            try:
                found.append(RequestView.model_validate_json(body))
            except ValidationError as error:  # of another release
                log.debug("a recorded request is not understood", extra={"reason": str(error)})
        return tuple(found)

    def models(self) -> tuple[str, ...]:
        """Names of all models that requests were for."""
        rows = self._store().rows(
            "SELECT DISTINCT model FROM requests WHERE model IS NOT NULL ORDER BY model"
        )
        return tuple(name for (name,) in rows)


def _values(rows: Sequence[Ended]) -> list[tuple[str, int, str | None, str]]:
    """What is written, made with pauses: for as long as it takes this thread, the event loop does nothing else."""
    values = []
    for number, each in enumerate(rows, 1):
        body = view_of(each).model_dump_json(exclude_none=True)
        values.append((each.record.request_id, each.at_us, each.record.model or None, body))
        if number % ROWS_AT_A_TIME == 0:
            time.sleep(PAUSE_S)
    return values


def _prune(connection: sqlite3.Connection, kept: Kept) -> None:
    connection.execute("DELETE FROM requests WHERE at_us < ?", (now_us() - kept.days * DAY_US,))
    connection.execute(
        "DELETE FROM requests WHERE id <= (SELECT id FROM requests ORDER BY id DESC LIMIT 1 OFFSET ?)",
        (kept.count,),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _reason(store: Store) -> str:
    problem = store.problem
    return problem.message if problem is not None else "The state file cannot be written."
