"""The events: numbers without gaps, bounded memory, followers that miss nothing or are told that they do."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

from lllm3090d.serving.event_table import Bounds, EventTable
from lllm3090d.serving.history import (
    KEPT_EVENTS,
    MOST_DETAILS_CHARACTERS,
    SUBSCRIBER_BACKLOG,
    History,
    Since,
    now_text,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.moments import realtime_us
from lllm3090d.store import Store
from lllm3090d.wire import Actor, ActorKind, Event, EventKind

pytestmark = pytest.mark.unit

TIMEOUT_S = 60.0
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
        actor=Actor(kind=ActorKind.DAEMON),
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


# --- who, how much, and across restarts ---------------------------------------------------------------------

CLIENT = Actor(kind=ActorKind.CLIENT, uid=1000, pid=42, program="lllm3090ctl")


def test_a_cause_holds_for_what_is_added_meanwhile() -> None:
    history = History()
    with history.caused_by(CLIENT):
        assert history.add(EventKind.STATE).actor == CLIENT
        with history.caused_by(Actor(kind=ActorKind.ENGINE)):
            assert history.add(EventKind.STATE).actor == Actor(kind=ActorKind.ENGINE)
        assert history.add(EventKind.STATE, actor=Actor(kind=ActorKind.SYSTEMD)).actor != CLIENT
        assert history.add(EventKind.STATE).actor == CLIENT
    with pytest.raises(ZeroDivisionError), history.caused_by(CLIENT):
        _ = 1 // 0
    assert history.add(EventKind.STATE).actor == Actor(kind=ActorKind.DAEMON)


def test_an_event_that_nobody_could_keep_is_cut() -> None:
    event = History().add(
        EventKind.REFUSED,
        message="x" * 100_000,
        details={"code": "c", "many": ["x" * 100] * 1000, "few": [1, 2]},
    )
    assert len(event.message) < 5000
    assert event.details == {"code": "c", "few": [1, 2], "left_out": ["many"]}
    assert len(event.model_dump_json()) < 2 * MOST_DETAILS_CHARACTERS


def test_what_json_cannot_carry_is_told_all_the_same(tmp_path: Path) -> None:
    """Names of files may be any bytes."""

    async def scenario() -> None:
        store, history = kept(tmp_path)
        await history.open()
        event = history.add(
            EventKind.REFUSED,
            model="caf\udce9",
            message="no caf\udce9",
            details={"path": Path("/caf\udce9"), "odd": object(), "fine": [1, "\udce9"]},
        )
        assert (event.model, event.message) == ("caf\\udce9", "no caf\\udce9")
        assert event.details["path"] == "/caf?"
        assert event.details["fine"] == [1, "?"]
        assert history._recorder is not None
        await history._recorder.flush()
        assert await history.of_model("caf\\udce9") == (event,)
        await history.end()
        store.close()

    run(scenario())


def kept(path: Path, days: int = 90, size_bytes: int = 16 << 20) -> tuple[Store, History]:
    """The history of a daemon, on a state file."""
    store = Store(path / "state.db")
    return store, History(EventTable(lambda: store, lambda: Bounds(days, size_bytes)))


def seqs_of(history: History, since: Since) -> list[int]:
    async def scenario() -> list[int]:
        return [event.seq async for event in history.past(since)]

    return run(scenario())


def test_a_follower_goes_on_where_the_last_daemon_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, first = kept(tmp_path)
        await first.open()
        add(first, 5)
        await first.end()
        store.close()
        store, second = kept(tmp_path)
        numbers = await second.open()
        assert numbers is not None
        assert (numbers.next, numbers.ended) == (6, True)
        stream = second.follow(3)
        assert await take(stream, 2) == [4, 5]
        add(second, 2)
        assert await take(stream, 2) == [6, 7]
        await stream.aclose()
        await second.end()
        store.close()

    run(scenario())


def test_after_a_kill_numbers_are_above_all_that_were_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, killed = kept(tmp_path)
        await killed.open()
        add(killed, 3)
        recorder = killed._recorder
        assert recorder is not None
        await recorder.flush()
        told = killed.add(EventKind.STATE, message="told, and never written").seq
        recorder._waiting.clear()  # what dies with the process
        assert recorder._task is not None
        recorder._task.cancel()
        store.close()
        store, second = kept(tmp_path)
        numbers = await second.open()
        assert numbers is not None
        assert not numbers.ended
        assert numbers.last_at == killed.since(2)[0].at
        assert second.add(EventKind.STATE).seq > told
        async with contextlib.aclosing(second.past()) as past:
            assert [event.seq async for event in past] == [1, 2, 3, numbers.next]
        await second.end()
        store.close()

    run(scenario())


def test_what_no_longer_fits_into_memory_is_read_from_the_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, history = kept(tmp_path)
        await history.open()
        add(history, KEPT_EVENTS)
        assert history._recorder is not None
        await history._recorder.flush()
        add(history, 700)
        assert history.since(0)[0].seq == 701
        async with contextlib.aclosing(history.past(Since(seq=10))) as past:
            assert [event.seq async for event in past] == list(range(11, KEPT_EVENTS + 701))
        async with contextlib.aclosing(history.past(Since(last=KEPT_EVENTS + 1))) as past:
            assert [event.seq async for event in past] == list(range(700, KEPT_EVENTS + 701))
        assert len(await history.of_model("qwen")) == KEPT_EVENTS + 700
        assert await history.models() == ("qwen",)
        await history.end()
        store.close()

    run(scenario())


@pytest.mark.parametrize("last", [0, 1, 3, 99])
def test_the_last_ones_are_the_newest(last: int) -> None:
    history = History()
    add(history, 3)
    assert seqs_of(history, Since(last=last)) == list(range(1, 4))[max(0, 3 - last) :]


def test_a_moment_leaves_out_what_was_before() -> None:
    history = History()
    add(history, 2)
    at = history.since(1)[0].at
    assert seqs_of(history, Since(from_us=realtime_us(at)))[-1] == 2
    assert seqs_of(history, Since(from_us=realtime_us(at) + 1_000_000)) == []


def test_without_a_file_the_daemon_has_its_history_in_memory(tmp_path: Path) -> None:
    """Numbers begin above all that a daemon that could write may have told."""

    async def scenario() -> None:
        (tmp_path / "state.db").mkdir()  # no database
        store, history = kept(tmp_path)
        numbers = await history.open()
        assert numbers is not None
        assert numbers.next > 1_700_000_000_000
        add(history, 3)
        assert [event.seq for event in history.since(0)] == [numbers.next + n for n in range(3)]
        problem = history.problem()
        assert problem is not None
        assert "not recorded" in problem.message
        await history.end()
        store.close()

    run(scenario())
