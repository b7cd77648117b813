"""The events: numbers without gaps, bounded memory, followers that miss nothing or are told that they do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import pytest

from lllm3090d.serving.history import KEPT_EVENTS, SUBSCRIBER_BACKLOG, History, now_text
from lllm3090d.serving.instance import InstanceState
from lllm3090d.wire import Event, EventKind

pytestmark = pytest.mark.unit

TIMEOUT_S = 10.0
T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


def add(history: History, count: int) -> None:
    for _ in range(count):
        history.add(EventKind.STATE, model="qwen")


async def take(stream: AsyncIterator[Event], count: int) -> list[int]:
    return [(await anext(stream)).seq for _ in range(count)]


async def rest(stream: AsyncIterator[Event]) -> list[int]:
    return [event.seq async for event in stream]


def test_events_are_numbered_from_one_without_gaps() -> None:
    history = History()
    assert [history.add(EventKind.SETTINGS).seq for _ in range(3)] == [1, 2, 3]
    assert [event.seq for event in history.since(0)] == [1, 2, 3]
    assert [event.seq for event in history.since(2)] == [3]
    assert history.since(3) == ()
    assert history.since(99) == ()


def test_an_event_carries_what_it_was_told() -> None:
    event = History().add(
        EventKind.STATE,
        model="qwen",
        run="ab12",
        state=InstanceState.READY,
        previous=InstanceState.LOADING,
        message="engine answers",
        details={"a": 1},
    )
    assert event == Event(
        seq=1,
        at=event.at,
        kind=EventKind.STATE,
        model="qwen",
        run="ab12",
        state=InstanceState.READY,
        previous=InstanceState.LOADING,
        message="engine answers",
        details={"a": 1},
    )


def test_times_are_utc_in_rfc_3339_and_do_not_go_back() -> None:
    first, second = now_text(), now_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first)
    assert first <= second


def test_the_oldest_are_dropped() -> None:
    history = History()
    add(history, KEPT_EVENTS + 5)
    kept = [event.seq for event in history.since(0)]
    assert kept == list(range(6, KEPT_EVENTS + 6))


def test_progress_is_told_but_not_kept() -> None:
    async def scenario() -> None:
        history = History()
        history.add(EventKind.STATE)
        stream = history.follow(0)
        assert await take(stream, 1) == [1]
        history.add(EventKind.PROGRESS)
        history.add(EventKind.STATE)
        assert await take(stream, 2) == [2, 3]
        assert [event.seq for event in history.since(0)] == [1, 3]

    run(scenario())


def test_following_replays_and_goes_on_without_gap() -> None:
    async def scenario() -> None:
        history = History()
        add(history, 5)
        stream = history.follow(2)
        assert await take(stream, 1) == [3]
        add(history, 2)  # while the kept ones are still being read
        assert await take(stream, 4) == [4, 5, 6, 7]
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # lets it wait; nothing depends on how far it gets
        add(history, 1)
        assert (await waiting).seq == 8

    run(scenario())


def test_several_followers_each_get_everything() -> None:
    async def scenario() -> None:
        history = History()
        add(history, 1)
        streams = [history.follow(0) for _ in range(3)]
        assert [await take(stream, 1) for stream in streams] == [[1]] * 3
        add(history, 2)
        assert [await take(stream, 2) for stream in streams] == [[2, 3]] * 3

    run(scenario())


def test_a_slow_follower_is_cut_off_after_an_unbroken_piece_and_can_come_back() -> None:
    async def scenario() -> None:
        history = History()
        add(history, 1)
        slow, quick = history.follow(0), history.follow(0)
        assert await take(slow, 1) == [1]
        assert await take(quick, 1) == [1]
        for number in range(2, SUBSCRIBER_BACKLOG + 11):
            history.add(EventKind.STATE)
            assert await take(quick, 1) == [number]
        got = await rest(slow)
        assert got == list(range(2, SUBSCRIBER_BACKLOG + 2))
        again = history.follow(got[-1])
        assert await take(again, 9) == list(range(SUBSCRIBER_BACKLOG + 2, SUBSCRIBER_BACKLOG + 11))

    run(scenario())


def test_a_follower_that_leaves_is_forgotten() -> None:
    async def scenario() -> None:
        history = History()
        add(history, 1)
        stream = history.follow(0)
        await take(stream, 1)
        assert len(history._subscribers) == 1
        await stream.aclose()
        assert not history._subscribers

    run(scenario())


@pytest.mark.parametrize("unread", [0, 1, SUBSCRIBER_BACKLOG, SUBSCRIBER_BACKLOG + 1])
def test_closing_ends_a_follower_after_what_it_has_not_read(unread: int) -> None:
    async def scenario() -> None:
        history = History()
        add(history, 1)
        stream = history.follow(0)
        await take(stream, 1)
        add(history, unread)
        history.close()
        add(history, 1)  # news after the end reach nobody
        got = await rest(stream)
        assert got[: min(unread, SUBSCRIBER_BACKLOG)] == list(range(2, min(unread, SUBSCRIBER_BACKLOG) + 2))

    run(scenario())


def test_closing_wakes_a_follower_that_waits() -> None:
    async def scenario() -> None:
        history = History()
        waiting = asyncio.ensure_future(rest(history.follow(0)))
        await asyncio.sleep(0)  # lets it subscribe
        history.close()
        assert await waiting == []

    run(scenario())


def test_who_follows_after_the_end_gets_what_was_kept_and_the_end() -> None:
    async def scenario() -> None:
        history = History()
        add(history, 2)
        history.close()
        assert await rest(history.follow(0)) == [1, 2]

    run(scenario())
