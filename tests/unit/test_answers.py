"""Answers find those who have asked, in their order, and nobody who has left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import cast

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.accounts import Accounts
from lllm3090d.serving.answers import Answer, Answers, Moved
from lllm3090d.serving.chronicle import Chronicle
from lllm3090d.serving.events import Effect, Failed, PinDone
from lllm3090d.serving.instance import InstanceState
from tests.fakes.simulated_loop import simulate

pytestmark = pytest.mark.unit

ENDED = Failed("t", LlmError(ErrorCode.SHUTTING_DOWN, "the daemon ends"))


class Books:
    """In the place of chronicle and accounts: who was answered, and whether the cause was known then."""

    def __init__(self) -> None:
        self.answered_in_name_of: list[tuple[str | None, str]] = []
        self._cause: str | None = None

    @contextlib.contextmanager
    def answering(self, token: str) -> Iterator[None]:
        self._cause = token
        yield
        self._cause = None

    def answered(self, token: str, answer: Effect) -> None:
        self.answered_in_name_of.append((self._cause, token))


def answers(books: Books) -> Answers:
    return Answers(cast(Chronicle, books), cast(Accounts, books))


def test_a_load_is_followed_to_its_end() -> None:
    async def scenario() -> None:
        made = answers(Books())
        made.expect("t")
        for state in (InstanceState.LOADING, InstanceState.READY):
            made.pass_on("t", Moved(state))
        made.reply("t", ENDED)
        first = await made.next("t")
        seen: list[Answer] = [each async for each in made.follow("t", first)]
        assert seen == [Moved(InstanceState.LOADING), Moved(InstanceState.READY), ENDED]
        assert "t" not in made

    simulate(scenario())


def test_who_has_left_is_counted_and_hears_nothing() -> None:
    books = Books()

    async def scenario() -> None:
        made = answers(books)
        made.expect("gone")
        made.expect("stays")
        made.forget("gone")
        made.forget("never")
        made.reply("gone", PinDone("gone", "run"))
        made.reply("stays", PinDone("stays", "run"))
        assert await made.next("stays") == PinDone("stays", "run")
        with pytest.raises(KeyError):
            await made.next("gone")

    simulate(scenario())
    assert books.answered_in_name_of == [("gone", "gone"), ("stays", "stays")]


def test_at_the_end_everybody_who_waits_is_told() -> None:
    async def scenario() -> None:
        made = answers(Books())
        waiting = {}
        for token in ("a", "b"):
            made.expect(token)
            waiting[token] = asyncio.ensure_future(made.next(token))
        made.fail_all(ENDED.error)
        assert await waiting["a"] == Failed("a", ENDED.error)
        assert await waiting["b"] == Failed("b", ENDED.error)

    simulate(scenario())
