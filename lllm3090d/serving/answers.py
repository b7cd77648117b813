"""Answers of the writer on their way to those who have asked, by the token of the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from lllm3090d.errors import LlmError
from lllm3090d.serving.accounts import Accounts
from lllm3090d.serving.chronicle import Chronicle
from lllm3090d.serving.effects import LoadProgress
from lllm3090d.serving.events import Effect, Failed, LoadDone, Reply
from lllm3090d.serving.instance import InstanceState


@dataclass(frozen=True, slots=True)
class Moved:
    """The instance a load waits for changed its state."""

    state: InstanceState


Answer = Effect | LoadProgress | Moved


class Answers:
    """Who waits for an answer, and what has come for them.

    Args:
        chronicle: knows who has asked.
        accounts: counts what became of loads, whether anybody listens or not.
    """

    def __init__(self, chronicle: Chronicle, accounts: Accounts) -> None:
        self._chronicle = chronicle
        self._accounts = accounts
        self._waiting: dict[str, asyncio.Queue[Answer]] = {}

    def __contains__(self, token: str) -> bool:
        return token in self._waiting

    def expect(self, token: str) -> None:
        """Somebody waits from now on."""
        self._waiting[token] = asyncio.Queue()

    def forget(self, token: str) -> None:
        """Nobody waits any more."""
        self._waiting.pop(token, None)

    async def next(self, token: str) -> Answer:
        """The next one. Raises KeyError where nobody has said that they wait."""
        return await self._waiting[token].get()

    async def follow(self, token: str, first: Answer) -> AsyncGenerator[Answer, None]:
        """All of a load, of which the first has come already, to its end."""
        try:
            answer = first
            yield answer
            while not isinstance(answer, LoadDone | Failed):
                answer = await self._waiting[token].get()
                yield answer
        finally:
            self._waiting.pop(token, None)

    def reply(self, token: str, answer: Reply) -> None:
        """The writer has answered a request."""
        with self._chronicle.answering(token):
            self._accounts.answered(token, answer)
        self.pass_on(token, answer)

    def pass_on(self, token: str, answer: Answer) -> None:
        """Something is to be known of a request that is answered later."""
        queue = self._waiting.get(token)
        if queue is not None:  # else the client has left
            queue.put_nowait(answer)

    def fail_all(self, error: LlmError) -> None:
        """Nobody will be answered any more."""
        for token in tuple(self._waiting):
            self.reply(token, Failed(token, error))
