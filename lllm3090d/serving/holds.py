"""Holds: what a person wants kept as it is, beyond the daemon's life: the card given away, models that stay."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Collection

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.store import Store

RELEASED, PINNED = "released", "pinned"
# One row more than there are holds: without it nobody could tell an empty table from one that cannot be read.
_SELECT = "SELECT kind, subject FROM holds UNION ALL SELECT 'read', ''"


class Holds:
    """The flag that loads are refused, and the runs that are pinned. Blocking, for threads; any may call.

    What was said last is in force for as long as the daemon lives, also where the state file fails; the error then says
    that it would not outlive the daemon, and the next change is another attempt to write everything.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        """Nothing is read yet.

        Args:
            store: gives the place where it is kept.
        """
        self._store = store
        self._lock = threading.Lock()
        self._held: set[tuple[str, str]] | None = None
        self._is_kept = True

    def released(self) -> bool:
        """Loads are refused until somebody resumes. Raises LlmError STATE_UNUSABLE where nobody can tell."""
        with self._lock:
            return (RELEASED, "") in self._known()

    def set_released(self, released: bool) -> None:
        """Refuse loads, or no longer so. Raises LlmError STATE_UNUSABLE where that is not kept."""
        self._set((RELEASED, ""), released)

    def pinned_runs(self) -> frozenset[str]:
        """Runs that are never unloaded to make room. Raises LlmError STATE_UNUSABLE where nobody can tell."""
        with self._lock:
            return frozenset(subject for kind, subject in self._known() if kind == PINNED)

    def set_pinned(self, run: str, pinned: bool) -> None:
        """Pin a run, or no longer so. Raises LlmError STATE_UNUSABLE where that is not kept."""
        self._set((PINNED, run), pinned)

    def forget(self, run: str) -> None:
        """A run has ended. Raises LlmError STATE_UNUSABLE where that is not kept."""
        self._set((PINNED, run), False)

    def forget_all_but(self, runs: Collection[str]) -> None:
        """Only these runs are there still. Raises LlmError STATE_UNUSABLE where that is not kept."""
        with self._lock:
            known = self._known()
            gone = {(kind, subject) for kind, subject in known if kind == PINNED and subject not in runs}
            if gone or not self._is_kept:
                self._keep(known - gone)

    def _set(self, hold: tuple[str, str], wanted: bool) -> None:
        with self._lock:
            try:
                known = self._known()
            except LlmError:
                if not wanted:
                    raise  # what else is held is not known, so nothing may be written
                known = self._held = set()
            if (hold in known) is not wanted or not self._is_kept:
                self._keep(known | {hold} if wanted else known - {hold})

    def _known(self) -> set[tuple[str, str]]:
        if self._held is None:
            store = self._store()
            rows = store.rows(_SELECT)
            if not rows:
                raise self._problem(store, "cannot be read")
            self._held = {
                (kind, subject)
                for kind, subject in rows
                if kind in {RELEASED, PINNED} and isinstance(subject, str)
            }
        return self._held

    def _keep(self, held: set[tuple[str, str]]) -> None:
        """Put these in force, and write all of them: the file may be another one than last time."""
        self._held = held

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM holds")
            connection.executemany("INSERT INTO holds VALUES (?, ?)", sorted(held))

        store = self._store()
        self._is_kept = store.change(write) and store.path is not None
        if not self._is_kept:
            raise self._problem(store, "is not kept beyond the daemon's life")

    @staticmethod
    def _problem(store: Store, what: str) -> LlmError:
        problem = store.problem
        why = problem.message if problem else "The state file is closed."
        return LlmError(
            ErrorCode.STATE_UNUSABLE,
            f"What is pinned or released {what}: {why}",
            hint=problem.hint if problem else "Start the daemon: systemctl --user start lllm3090d",
            **(dict(problem.details) if problem else {}),
        )
