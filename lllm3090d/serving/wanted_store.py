"""The wanted set and the marks of ``autoload`` in the state file. Blocking, for threads."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.plausible import read_row
from lllm3090d.serving.unit_spec import MOST_NAME_CHARACTERS
from lllm3090d.serving.wanted import Life, Lot, Want
from lllm3090d.store import Store

log = logging.getLogger(__name__)


class Mark(BaseModel):
    """A model that is loaded at every login, and how; marked by command.

    Attributes:
        name: of the model.
        request: what its load asks for.
        arguments: further ones of a person, word by word.
        card: the only card that it may be on; None leaves the choice.
        pinned: never to be evicted.
    """

    model_config = ConfigDict(frozen=True)
    name: str = Field(min_length=1, max_length=MOST_NAME_CHARACTERS)
    request: PlanRequest = PlanRequest()
    arguments: tuple[str, ...] = ()
    card: str | None = None
    pinned: bool = False

    def want(self) -> Want:
        """As a wanted model that is to be loaded."""
        return Want(
            name=self.name,
            lot=Lot.COMING,
            request=self.request,
            arguments=self.arguments,
            card=self.card,
            pinned=self.pinned,
        )


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the daemon's last life has left; life is None where none is known."""

    life: Life | None = None
    wants: tuple[Want, ...] = ()


class WantedStore:
    """Keeps the wanted set, the daemon's life and the marks.

    Args:
        store: gives the place where they are kept.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store

    def remembered(self) -> Remembered:
        """What was kept; nothing where it cannot be read."""
        store = self._store()
        lives = store.rows("SELECT boot, session, ended FROM wanted_life")
        life = Life(str(lives[0][0]), str(lives[0][1]), bool(lives[0][2])) if lives else None
        wants: list[Want] = []
        for name, body in store.rows("SELECT name, body FROM wanted ORDER BY position"):
            try:
                wants.append(_want(name, body, wants))
            except ValueError as error:  # by another release, or by somebody else
                log.warning("a wanted model is not understood, and forgotten", extra={"why": str(error)})
        return Remembered(life, tuple(wants))

    def keep(self, wants: Iterable[Want], life: Life | None = None) -> LlmError | None:
        """Remember these and no others, and with them the daemon's life where it is given.

        Returns:
            Why that does not outlive the daemon; None where it does.
        """
        rows = [(number, each.name, each.model_dump_json()) for number, each in enumerate(wants)]

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM wanted")
            connection.executemany("INSERT INTO wanted VALUES (?, ?, ?)", rows)
            if life is not None:
                _write_life(connection, life)

        return self._change(write, "Which models are wanted")

    def live(self, life: Life) -> LlmError | None:
        """Remember the daemon's life alone; returns as :meth:`keep`."""
        return self._change(lambda connection: _write_life(connection, life), "That the daemon has lived")

    def marks(self) -> tuple[Mark, ...]:
        """Those made by command, the oldest first; none where they cannot be read."""
        marks = []
        for name, body in self._store().rows("SELECT name, body FROM autoload ORDER BY position"):
            try:
                mark = read_row(Mark, body)
                if mark.name != name:
                    raise ValueError("it is another model's")
                marks.append(mark)
            except ValueError as error:  # by another release, or by somebody else
                log.warning("a mark of autoload is not understood, and ignored", extra={"why": str(error)})
        return tuple(marks)

    def mark(self, mark: Mark) -> None:
        """Mark a model, or change how it is loaded; its age stays. Raises LlmError STATE_UNUSABLE."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO autoload (name, body) VALUES (?, ?)"
                " ON CONFLICT (name) DO UPDATE SET body = excluded.body",
                (mark.name, mark.model_dump_json()),
            )

        self._must(self._change(write, f"That {mark.name} is loaded at every login"))

    def unmark(self, name: str) -> None:
        """Take a mark away; one that is not there is no error. Raises LlmError STATE_UNUSABLE."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM autoload WHERE name = ?", (name,))

        self._must(self._change(write, f"That {name} is no longer loaded at every login"))

    def _change(self, write: Callable[[sqlite3.Connection], None], what: str) -> LlmError | None:
        store = self._store()
        if store.change(write) and store.path is not None:
            return None
        problem = store.problem
        return LlmError(
            ErrorCode.STATE_UNUSABLE,
            f"{what} is not kept beyond the daemon's life: "
            + (problem.message if problem else "The state file is closed."),
            hint=problem.hint if problem else "Start the daemon: systemctl --user start lllm3090d",
        )

    @staticmethod
    def _must(problem: LlmError | None) -> None:
        if problem is not None:
            raise problem


def _want(name: object, body: object, before: Iterable[Want]) -> Want:
    """A row of the set, after those before it. Raises ValueError where it contradicts itself or one of those."""
    want = read_row(Want, body)
    if want.name != name:
        raise ValueError("it is another model's")
    if want.record is not None and (want.record.name, want.record.run) != (want.name, want.run):
        raise ValueError("its record is that of another launch")
    for other in before:
        if other.name == want.name or (want.run and other.run == want.run):
            raise ValueError(f"{other.name} is that launch already")
    return want


def _write_life(connection: sqlite3.Connection, life: Life) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO wanted_life VALUES (1, ?, ?, ?)", (life.boot, life.session, life.ended)
    )
