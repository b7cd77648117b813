"""Events in the state file: written in batches, bounded by age and size, read in order. Blocking, for threads."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from lllm3090d.planning.units import MIB
from lllm3090d.serving.instance import InstanceState
from lllm3090d.store import Store
from lllm3090d.wire import Event, EventKind

log = logging.getLogger(__name__)

# Beside the text of an event: its other columns, both indexes, and the page it shares.
OVERHEAD_BYTES = 150
DAY_US = 86_400 * 1_000_000
# By age no more than what happened in so long goes at once: a clock that is set forward by years makes everything old
# in a moment, and what is removed does not come back with the right time.
AT_ONCE_US = 2 * DAY_US
# Pruning reads the sizes of all events, so it is done when this part of what is allowed has been written anew.
PRUNE_FRACTION = 0.05
ROUTINE_SHARE = 0.5
MOST_SEQ = (1 << 63) - 1  # SQLite has no greater one
_ROUTINE = frozenset({InstanceState.READY, InstanceState.BUSY})
_OLDEST_BEYOND = """DELETE FROM events WHERE seq IN (
    SELECT seq FROM (
        SELECT seq, sum(size_bytes) OVER (ORDER BY seq DESC) AS kept FROM events WHERE is_routine >= ?
    ) WHERE kept > ?
)"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept.

    Attributes:
        days: older ones go.
        size_bytes: of all events together; the oldest go.
    """

    days: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """An event as it is written.

    Attributes:
        at_us: microseconds since 1970.
        is_routine: one of the many changes between ready and busy, which must not push out the others.
        body: JSON.
    """

    seq: int
    at_us: int
    model: str | None
    is_routine: bool
    body: str

    @property
    def size_bytes(self) -> int:
        """Roughly what it takes in the file."""
        return len(self.body.encode()) + OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the last daemon left.

    Attributes:
        next: the number to begin with, above all that were ever told.
        ended: it had ended in order, with all its events written.
        last_at: time of its last event that was written; None where there is none.
        is_behind: it could not write what happened, so this is what one before it left.
    """

    next: int
    ended: bool
    last_at: str | None
    is_behind: bool = False


def row_of(event: Event, at_us: int) -> Row:
    """The row of an event."""
    routine = event.kind is EventKind.STATE and {event.state, event.previous} == _ROUTINE
    return Row(event.seq, at_us, event.model, routine, event.model_dump_json(exclude_none=True))


MOST_NUMBERS = 1 << 60  # beyond lies what no daemon has counted to


class EventTable:
    """Reads and writes the events; never raises for what is wrong with the file.

    Args:
        store: gives the place where they are kept.
        bounds: as the settings are now.
    """

    def __init__(self, store: Callable[[], Store], bounds: Callable[[], Bounds]) -> None:
        self._store = store
        self._bounds = bounds
        self._unpruned_bytes = 0
        self._why = ""

    def numbers(self) -> Numbers | None:
        """What the last daemon left; None where nobody can tell."""
        store = self._store()
        # One row more than there may be: without it nobody could tell an empty table from one that cannot be read.
        rows = store.rows("SELECT next, ended FROM event_numbers UNION ALL SELECT 0, -1")
        if not rows or store.path is None:
            return None
        told = {bool(ended): number for number, ended in rows if ended >= 0 and 0 <= number < MOST_NUMBERS}
        highest = store.rows("SELECT coalesce(max(seq), 0) FROM events")
        written = highest[0][0] if highest and highest[0][0] < MOST_NUMBERS else 0
        last = self._events("SELECT body FROM events ORDER BY seq DESC LIMIT 1", ())
        first = max(1, written + 1, *told.values())
        return Numbers(first, ended=False not in told, last_at=last[0].at if last else None)

    def write(self, rows: Sequence[Row], next_number: int, *, ended: bool) -> bool:
        """Write all or none of them, and the number for the next daemon; whether that is on the disk's way now."""
        store = self._store()
        store.check()  # tells a file that was removed or can be used again
        if store.path is None:
            self._why = _reason(store)
            return False

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (each.seq, each.at_us, each.model, each.is_routine, each.size_bytes, each.body)
                    for each in rows
                ],
            )
            connection.execute("INSERT OR REPLACE INTO event_numbers VALUES (1, ?, ?)", (next_number, ended))

        if not store.change(work):
            self._why = _reason(store)
            return False
        self._unpruned_bytes += sum(each.size_bytes for each in rows)
        return True

    def prune(self, now_us: int, *, at_once: bool = False) -> None:
        """Remove what is beyond the bounds; unless at once, only when enough was written to be worth it."""
        bounds = self._bounds()
        if not at_once and self._unpruned_bytes < bounds.size_bytes * PRUNE_FRACTION:
            return

        def work(connection: sqlite3.Connection) -> None:
            (oldest_us,) = connection.execute("SELECT coalesce(min(at_us), 0) FROM events").fetchone()
            until_us = min(now_us - bounds.days * DAY_US, oldest_us + AT_ONCE_US)
            connection.execute("DELETE FROM events WHERE at_us < ?", (until_us,))
            connection.execute(_OLDEST_BEYOND, (1, int(bounds.size_bytes * ROUTINE_SHARE)))
            connection.execute(_OLDEST_BEYOND, (0, bounds.size_bytes))

        if self._store().change(work):
            self._unpruned_bytes = 0

    def problem(self) -> str:
        """Why the last write that failed did, for a person."""
        return self._why

    # --- reading ------------------------------------------------------------------------------------------------

    def after(self, seq: int, before: int, from_us: int, limit: int) -> tuple[Event, ...]:
        """The oldest ones between two numbers, exclusive, that are not older than a moment."""
        query = "SELECT body FROM events WHERE seq > ? AND seq < ? AND at_us >= ? ORDER BY seq LIMIT ?"
        return self._events(query, (seq, before, from_us, limit))

    def newest(
        self, limit: int, seq: int = 0, before: int = MOST_SEQ, from_us: int = 0
    ) -> tuple[Event, ...]:
        """The last ones between two numbers, exclusive, that are not older than a moment; oldest first."""
        query = "SELECT body FROM events WHERE seq > ? AND seq < ? AND at_us >= ? ORDER BY seq DESC LIMIT ?"
        return self._events(query, (seq, before, from_us, limit))[::-1]

    def of_model(self, model: str, limit: int) -> tuple[Event, ...]:
        """The last ones of a model but the routine, oldest first."""
        query = "SELECT body FROM events WHERE model = ? AND NOT is_routine ORDER BY seq DESC LIMIT ?"
        return self._events(query, (model, limit))[::-1]

    def models(self) -> tuple[str, ...]:
        """Names of all models that events are about."""
        rows = self._store().rows("SELECT DISTINCT model FROM events WHERE model IS NOT NULL ORDER BY model")
        return tuple(name for (name,) in rows)

    def _events(self, query: str, parameters: Sequence[str | int]) -> tuple[Event, ...]:
        found = []
        for (body,) in self._store().rows(query, parameters):
            try:
                found.append(Event.model_validate_json(body))
            except ValidationError as error:  # of another release
                log.debug("a recorded event is not understood", extra={"reason": str(error)})
        return tuple(found)


def _reason(store: Store) -> str:
    problem = store.problem
    return problem.message if problem is not None else "The state file cannot be written."


def bounds_of(days: int, mib: int) -> Bounds:
    """The bounds that settings say."""
    return Bounds(days, mib * MIB)
