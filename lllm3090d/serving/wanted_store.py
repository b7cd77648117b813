"""The wanted set and the marks of ``autoload`` in the state file. Blocking, for threads."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
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
    name: str
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
        wants = []
        for (body,) in store.rows("SELECT body FROM wanted ORDER BY position"):
            try:
                wants.append(Want.model_validate_json(body))
            except ValidationError as error:  # by another release
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
        for (body,) in self._store().rows("SELECT body FROM autoload ORDER BY position"):
            try:
                marks.append(Mark.model_validate_json(body))
            except ValidationError as error:  # by another release
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


def _write_life(connection: sqlite3.Connection, life: Life) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO wanted_life VALUES (1, ?, ?, ?)", (life.boot, life.session, life.ended)
    )
