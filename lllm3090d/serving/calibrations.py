"""What engines were seen to take, kept in the store: the memory behind :mod:`lllm3090d.planning.calibration`.

Blocking, for threads. Nothing here can break a load: where the store fails, less is known, and the store says why.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from lllm3090d.errors import LlmError
from lllm3090d.planning.calibration import Calibration, CalibrationKey, CalibrationScope, Measurement, Seen
from lllm3090d.store import Store

log = logging.getLogger(__name__)

KEPT_LAUNCHES = 2000  # of all checkpoints; each has about 700 bytes
KEPT_OF_A_SCOPE = 64  # of one checkpoint with one build and card; read at each load

_SELECT = """SELECT launch, quoted_bytes, peak_bytes, load_peak_bytes, probe_tokens, short_bytes, seen_s, short_s
    FROM calibrations WHERE checkpoint = ? AND engine = ? AND backend = ? AND card = ? ORDER BY id"""
_SELECT_BUILD = """SELECT 1 FROM calibrations
    WHERE engine = ? AND backend = ? AND card = ? AND peak_bytes > 0 AND probe_tokens > 0 LIMIT 1"""
_INSERT = """INSERT OR REPLACE INTO calibrations (checkpoint, engine, backend, card,
    launch, quoted_bytes, peak_bytes, load_peak_bytes, probe_tokens, short_bytes, seen_s, short_s)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_PRUNE = "DELETE FROM calibrations WHERE id <= (SELECT max(id) FROM calibrations) - ?"
_PRUNE_SCOPE = """DELETE FROM calibrations WHERE checkpoint = ? AND engine = ? AND backend = ? AND card = ?
    AND id NOT IN (SELECT id FROM calibrations
        WHERE checkpoint = ? AND engine = ? AND backend = ? AND card = ? ORDER BY id DESC LIMIT ?)"""
_FORGET = "DELETE FROM calibrations WHERE checkpoint = ? AND engine = ? AND backend = ? AND card = ?"
_FORGET_ALL = "DELETE FROM calibrations"


# What no launch takes, and no clock of this century says.
MOST_BYTES = 1 << 44
LATEST_S = 4e9


class Calibrations:
    """Remembers what launches took; thread-safe.

    Args:
        store: gives the place where it is kept.
        now_s: the time, seconds since 1970.
    """

    def __init__(self, store: Callable[[], Store], now_s: Callable[[], float] = time.time) -> None:
        self._store = store
        self._now_s = now_s
        self._lock = threading.Lock()  # from reading what is known to writing what is more

    def of(self, scope: CalibrationScope, arguments: tuple[str, ...] = ()) -> Calibration:
        """What is known now; nothing where the store fails.

        Args:
            scope: checkpoint, build, backend and card.
            arguments: further ones for the engine that the next launch gets.
        """
        rows = self._store().rows(_SELECT, _values(scope))
        seen = tuple(found for found in map(_seen, rows) if found is not None)
        build = self._store().rows(_SELECT_BUILD, (scope.engine, str(scope.backend), scope.card))
        known = Calibration(scope, seen, has_measured_build=bool(build), arguments=arguments)
        return known.at(self._now_s())

    def add(self, measurement: Measurement, quoted_bytes: int) -> LlmError | None:
        """Learn from a run that answers.

        Args:
            measurement: what it took.
            quoted_bytes: its quote, by :func:`lllm3090d.planning.calibration.comparable_bytes`.

        Returns:
            Why it could not be kept; None when it was.

        Raises:
            ValueError: as :meth:`Calibration.measured`.
        """
        with self._lock:
            known = self.of(measurement.key.scope).measured(measurement, quoted_bytes)
            return self._keep(measurement.key, known)

    def out_of_memory(self, key: CalibrationKey, quoted_bytes: int) -> LlmError | None:
        """Learn from a run that died for want of memory after it was admitted; arguments and answer as :meth:`add`.

        Only to be told when nobody else took the memory in the meantime.
        """
        with self._lock:
            known = self.of(key.scope).out_of_memory(key.launch, quoted_bytes, self._now_s())
            return self._keep(key, known)

    def forget(self, scope: CalibrationScope | None = None) -> LlmError | None:
        """Begin anew, of one scope or of all; why it could not be done, None when it was."""
        statement, values = (_FORGET_ALL, ()) if scope is None else (_FORGET, _values(scope))
        return self._change(lambda connection: connection.execute(statement, values))

    def _keep(self, key: CalibrationKey, known: Calibration) -> LlmError | None:
        seen = known.of(key.launch)
        if seen is None:
            raise ValueError("what was just learnt is there")
        scope = _values(key.scope)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(_INSERT, (*scope, *_row(seen)))
            connection.execute(_PRUNE_SCOPE, (*scope, *scope, KEPT_OF_A_SCOPE))
            connection.execute(_PRUNE, (KEPT_LAUNCHES,))

        return self._change(write)

    def _change(self, work: Callable[[sqlite3.Connection], object]) -> LlmError | None:
        store = self._store()
        if store.change(work):
            return None
        problem = store.problem
        log.warning(
            "what a launch took is not kept",
            extra={"reason": problem.message if problem else "it is closed"},
        )
        return problem


def _values(scope: CalibrationScope) -> tuple[str, str, str, str]:
    return scope.checkpoint, scope.engine, str(scope.backend), scope.card


def _row(seen: Seen) -> tuple[str, int, int, int, int, int, float, float]:
    return (
        seen.launch,
        seen.quoted_bytes,
        seen.peak_bytes,
        seen.load_peak_bytes,
        seen.probe_tokens,
        seen.short_bytes,
        seen.seen_s,
        seen.short_s,
    )


def _seen(row: tuple[object, ...]) -> Seen | None:
    """A row as it was written; None for one that says what cannot be, by whatever hand."""
    launch, *figures, seen_s, short_s = row
    if not isinstance(launch, str) or not isinstance(seen_s, float) or not isinstance(short_s, float):
        return None
    sizes = [figure for figure in figures if isinstance(figure, int) and figure >= 0]
    if len(sizes) != len(figures) or not (0 <= seen_s < LATEST_S and 0 <= short_s < LATEST_S):
        return None
    quoted, peak, load_peak, probe_tokens, short = sizes
    if max(sizes) > MOST_BYTES or not quoted:
        return None
    return Seen(launch, quoted, peak, load_peak, probe_tokens, short, seen_s, short_s)
