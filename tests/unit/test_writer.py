"""The writer: one event after the other, a question behind them, and its end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from lllm3090d.serving.events import Event, LeaseReturned, Looked
from lllm3090d.serving.writer import Writer
from tests.fakes.simulated_loop import simulate

pytestmark = pytest.mark.unit


def test_events_are_applied_in_order_also_those_from_before_the_start_and_from_within() -> None:
    applied: list[Event] = []
    first, second, third = LeaseReturned("a"), LeaseReturned("b"), LeaseReturned("c")

    async def scenario() -> None:
        def apply(event: Event) -> None:
            applied.append(event)
            if event is first:
                writer.submit(third)

        writer = Writer(apply, asyncio.get_running_loop().create_future())
        writer.submit(first)
        writer.submit(second)
        at_work = [writer.is_at_work]
        writer.start()
        at_work.append(writer.is_at_work)
        await writer.answers()
        await writer.answers()  # whatever the first events have brought is before this one
        writer.cancel()
        assert [*at_work, writer.is_at_work] == [False, True, False]

    simulate(scenario())
    assert applied == [first, second, third]


def test_who_gives_up_asking_keeps_nobody_else_from_an_answer() -> None:
    async def scenario() -> None:
        writer = Writer(lambda _: None, asyncio.get_running_loop().create_future())
        impatient = asyncio.ensure_future(writer.answers())
        await asyncio.sleep(0)
        impatient.cancel()
        writer.start()
        await writer.answers()
        assert impatient.cancelled()

    simulate(scenario())


def test_an_event_that_cannot_be_applied_ends_it_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    broken = ValueError("a scheduler that contradicts itself")

    async def scenario() -> None:
        def apply(event: Event) -> None:
            raise broken

        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        writer = Writer(apply, failed)
        writer.start()
        writer.submit(Looked())
        await asyncio.wait([failed])
        assert failed.exception() is broken

    with caplog.at_level(logging.CRITICAL):
        simulate(scenario())
    assert [each.message for each in caplog.records] == ["the writer ended"]


def test_one_that_is_asked_to_end_has_not_failed() -> None:
    async def scenario() -> None:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        writer = Writer(lambda _: None, failed)
        writer.cancel()  # before the start: nothing
        writer.start()
        await writer.answers()
        writer.cancel()
        await asyncio.sleep(1.0)
        assert not failed.done()

    simulate(scenario())
