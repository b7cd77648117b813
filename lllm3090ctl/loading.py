"""The load of a model as its client sees it: the stream, and what an interrupt means."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import NamedTuple

from lllm3090ctl.client import Client
from lllm3090ctl.documents import Document
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, bad_answer, own_failure
from lllm3090ctl.progress import Display

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CANCEL_EVERY_S = 0.1
CANCEL_FOR_S = 2.0


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception, so that nothing on the way handles it by mistake."""


class Outcome(NamedTuple):
    """How a load ended.

    Attributes:
        last: the last line of the stream, ``ready`` or ``failed``.
        loaded_before: the first line was the last: the model answers already, and nothing was started.
    """

    last: Document
    loaded_before: bool


def new_token() -> str:
    """A token by which this load can be cancelled."""
    return os.urandom(16).hex()


def load(client: Client, body: Mapping[str, object], display: Display, cancel_on_interrupt: bool) -> Outcome:
    """Load a model; returns how that ended.

    Args:
        client: the daemon.
        body: of ``POST /v1/load``, with ``model`` and ``token``.
        display: shows each line as it arrives.
        cancel_on_interrupt: an interrupt aborts the load; otherwise the daemon goes on with it.

    Raises:
        Failure: the load was refused, the daemon went away, or ``interrupted``.
    """
    attempt = _Attempt(client, body, cancel_on_interrupt)
    with _signals_raise():
        try:
            return attempt.run(display)
        except Interrupted:
            raise attempt.interrupted() from None


class _Attempt:
    """One load: how far it came decides what an interrupt has to say."""

    def __init__(self, client: Client, body: Mapping[str, object], cancel_on_interrupt: bool) -> None:
        self._client = client
        self._body = body
        self._cancel_on_interrupt = cancel_on_interrupt
        self._name = str(body["model"])
        self._known = False  # the daemon has said something about this load, so it knows the token

    def run(self, display: Display) -> Outcome:
        """Follow the stream to its last line."""
        with self._client.load(self._body) as stream:
            for line in stream:
                is_first, self._known = not self._known, True
                display.show(line)
                kind = line.text("kind")
                if kind in {"ready", "failed"}:
                    return Outcome(line, loaded_before=is_first and kind == "ready")
        raise self._broken_off()

    def interrupted(self) -> Failure:
        """What came of the load after an interrupt; cancels it first when that was asked for."""
        if not self._cancel_on_interrupt:
            return self._failure(
                f"The daemon goes on loading {self._name}."
                if self._known
                else f"The daemon had not answered yet; once it has the request, it loads {self._name}.",
                f"Watch it: {self._client.command} ps\nAbort it: {self._unload()}",
                cancelled=False,
            )
        try:
            return self._cancel()
        except Interrupted:
            return self._failure(
                f"Interrupted again before the daemon confirmed that the load of {self._name} is cancelled.",
                f"See whether it goes on: {self._client.command} ps",
                cancelled=None,
            )

    def _cancel(self) -> Failure:
        try:
            answer = self._ask_to_cancel()
        except Failure as failure:
            why = failure.problem.get("detail") or failure.problem.get("title")
            return self._failure(
                f"The load of {self._name} could not be cancelled: {why}",
                f"See whether it goes on: {self._client.command} ps\nAbort it: {self._unload()}",
                cancelled=None,
            )
        if answer.truth("stopped"):
            return self._failure(f"The load of {self._name} was cancelled.", None, cancelled=True)
        return self._failure(
            f"The load of {self._name} goes on, because somebody else waits for it.",
            f"Watch it: {self._client.command} ps\nAbort it for all: {self._unload()}",
            cancelled=False,
        )

    def _ask_to_cancel(self) -> Document:
        """Cancel on a connection of its own.

        As long as the daemon has said nothing about this load, it may not have read the request yet and not
        know the token; then the question is repeated for a while.
        """
        deadline_s = time.monotonic() + CANCEL_FOR_S
        while True:
            try:
                return self._client.cancel(str(self._body["token"]))
            except Failure as failure:
                unknown = failure.problem.get("code") == "no_such_load"
                if not unknown or self._known or time.monotonic() >= deadline_s:
                    raise
            time.sleep(CANCEL_EVERY_S)

    def _broken_off(self) -> Failure:
        if not self._known:
            return bad_answer("The daemon accepted the load but said nothing about it.")
        lost = self._client.lost()
        hint = f"The engine may go on without the daemon. See what runs: {self._client.command} ps"
        return Failure({**lost.problem, "hint": f"{hint}\n{lost.problem['hint']}"}, lost.exit_status)

    def _unload(self) -> str:
        return f"{self._client.command} unload {shlex.quote(self._name)}"

    def _failure(self, detail: str, hint: str | None, cancelled: bool | None) -> Failure:
        return own_failure(
            "interrupted",
            "Interrupted",
            detail,
            exit_status=ExitStatus.INTERRUPTED,
            hint=hint,
            details={"model": self._name, "token": self._body["token"], "cancelled": cancelled},
        )


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise :class:`Interrupted`; an ignored signal (``nohup``) stays ignored."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
