"""What is heard of logind, and the lock, on a bus of the test: a stand-in tells of sleep and hands out real locks."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from lllm3090d.bus import logind as logind_module
from lllm3090d.bus import thread as thread_module
from lllm3090d.bus.logind import Logind, SleepNews
from lllm3090d.bus.seats import SeatScene
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.logind import FakeLogind, Session
from tests.system.scenes import EVENT_TIMEOUT_S, PrivateBus

pytestmark = pytest.mark.system
T = TypeVar("T")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that a busy machine answers late is no sign of a silent logind; the test of that one says otherwise."""
    monkeypatch.setattr(logind_module, "CALL_TIMEOUT_S", EVENT_TIMEOUT_S)
    monkeypatch.setattr(thread_module, "CONNECT_TIMEOUT_S", EVENT_TIMEOUT_S)


@pytest.fixture
def fake(private_bus: PrivateBus) -> Iterator[FakeLogind]:
    private_bus.start()
    made = FakeLogind(private_bus.address, delay_s=7.0)
    yield made
    made.close()


def connected(address: str, scenario: Callable[[Logind], Awaitable[T]]) -> T:
    async def run() -> T:
        logind = await Logind.connect(address)
        try:
            return await scenario(logind)
        finally:
            await logind.close()

    return asyncio.run(run())


def heard(logind: Logind) -> asyncio.Queue[SleepNews]:
    news: asyncio.Queue[SleepNews] = asyncio.Queue()
    logind.set_listener(news.put_nowait)
    return news


async def until_lost(logind: Logind) -> LlmError:
    """Until the news of the loss has come: a call that was under way may be refused before it, in other words."""
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        while (found := problem(logind)) is None or "is lost" not in found.message:
            await logind.answers(EVENT_TIMEOUT_S)  # so that its thread gets on
    return found


async def next_of(news: asyncio.Queue[SleepNews]) -> SleepNews:
    return await asyncio.wait_for(news.get(), EVENT_TIMEOUT_S)


def holds(logind: Logind) -> bool:
    return logind.delays


def problem(logind: Logind) -> LlmError | None:
    return logind.problem


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_sleep_and_return_are_heard_in_order_and_the_limit_is_read(
    private_bus: PrivateBus, fake: FakeLogind
) -> None:
    async def scenario(logind: Logind) -> None:
        assert logind.problem is None and not logind.delays
        assert logind.delay_s == 7.0
        fake.sleep()
        fake.wake()
        fake.sleep()
        news = heard(logind)
        assert [await next_of(news) for _ in range(3)] == [
            SleepNews.GOING,
            SleepNews.AWAKE,
            SleepNews.GOING,
        ]
        assert await logind.look() is True
        fake.wake()
        fake.delay_s = 9.5
        assert await next_of(news) is SleepNews.AWAKE
        assert await logind.look() is False
        assert logind.delay_s == 9.5

    connected(private_bus.address, scenario)


def test_the_lock_is_a_delay_that_is_held_until_it_is_released(
    private_bus: PrivateBus, fake: FakeLogind
) -> None:
    async def scenario(logind: Logind) -> None:
        await logind.take_lock("because")
        await logind.take_lock("because")
        assert logind.delays
        (lock,) = fake.locks
        assert (lock.what, lock.who, lock.why, lock.mode) == ("sleep", "lllm3090d", "because", "delay")
        assert not lock.is_closed()
        logind.release_lock()
        logind.release_lock()
        assert lock.is_closed(EVENT_TIMEOUT_S)
        assert not holds(logind)
        await logind.take_lock("again")
        assert len(fake.locks) == 2 and not fake.locks[1].is_closed()

    connected(private_bus.address, scenario)
    assert fake.locks[1].is_closed(EVENT_TIMEOUT_S)  # with the end of the daemon


def test_a_refused_lock_is_said_once_and_tried_again(
    private_bus: PrivateBus, fake: FakeLogind, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(logind: Logind) -> None:
        fake.sleep()
        await logind.take_lock("x")
        await logind.take_lock("x")
        assert not logind.delays
        assert logind.problem is not None
        assert logind.problem.code is ErrorCode.LOGIND_UNAVAILABLE
        assert "would not wait" in logind.problem.message
        fake.wake()
        await logind.take_lock("x")
        assert holds(logind) and problem(logind) is None

    with caplog.at_level(logging.INFO):
        connected(private_bus.address, scenario)
    assert sum("would not wait" in each.message for each in caplog.records) == 1


def test_a_lock_that_nobody_waits_for_any_more_is_closed(private_bus: PrivateBus, fake: FakeLogind) -> None:
    async def scenario(logind: Logind) -> None:
        before = open_files()
        private_bus.pause(paused=True)
        task = asyncio.create_task(logind.take_lock("x"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        private_bus.pause(paused=False)
        await logind.look()
        await logind.look()  # after whatever was asked before
        assert all(lock.is_closed(EVENT_TIMEOUT_S) for lock in fake.locks)
        assert not logind.delays
        assert open_files() <= before + len(fake.locks)  # the stand-in's own ends

    connected(private_bus.address, scenario)


def test_without_a_system_bus_it_is_said_once_and_nothing_else_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(logind: Logind) -> None:
        assert await logind.look() is None
        await logind.take_lock("x")
        assert not logind.delays
        assert logind.problem is not None
        assert "nobody tells when this machine goes to sleep" in logind.problem.message

    with caplog.at_level(logging.INFO):
        connected(f"unix:path={tmp_path}/none", scenario)
    assert sum("nobody tells" in each.message for each in caplog.records) == 1


def test_a_system_bus_that_comes_after_the_daemon_is_found(private_bus: PrivateBus) -> None:
    async def scenario(logind: Logind) -> None:
        assert problem(logind) is not None
        news = heard(logind)
        private_bus.start()
        fake = FakeLogind(private_bus.address)
        try:
            while not holds(logind):  # the bus is there before logind is
                assert await next_of(news) is SleepNews.UNSURE
                await logind.take_lock("x")
            assert problem(logind) is None
        finally:
            fake.close()

    connected(private_bus.address, scenario)


def test_a_silent_logind_is_asked_again(
    private_bus: PrivateBus, fake: FakeLogind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logind_module, "CALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(logind_module, "AGAIN_FIRST_S", 0.05)

    async def scenario(logind: Logind) -> None:
        news = heard(logind)
        private_bus.pause(paused=True)
        await logind.take_lock("x")
        assert not holds(logind)
        silent = problem(logind)
        assert silent is not None and "was not answered within 0.2 s" in silent.message
        monkeypatch.setattr(logind_module, "CALL_TIMEOUT_S", EVENT_TIMEOUT_S)
        private_bus.pause(paused=False)
        while not holds(logind):
            assert await next_of(news) is SleepNews.UNSURE
            await logind.take_lock("x")
        assert problem(logind) is None
        assert not fake.locks[-1].is_closed()

    connected(private_bus.address, scenario)


def test_a_bus_without_logind_and_one_that_comes_later(private_bus: PrivateBus) -> None:
    async def scenario(logind: Logind) -> None:
        assert logind.problem is not None
        news = heard(logind)
        fake = FakeLogind(private_bus.address)
        try:
            assert await next_of(news) is SleepNews.UNSURE
            await logind.take_lock("x")
            assert problem(logind) is None and holds(logind)
        finally:
            fake.close()

    private_bus.start()
    connected(private_bus.address, scenario)


def test_after_a_lost_bus_another_lock_is_taken_and_the_old_one_let_go(private_bus: PrivateBus) -> None:
    async def scenario(logind: Logind) -> None:
        news = heard(logind)
        await logind.take_lock("x")
        old = first.lock()
        private_bus.kill()
        assert await logind.look() is None
        lost = await until_lost(logind)
        assert lost.code is ErrorCode.LOGIND_UNAVAILABLE and "nobody tells" in lost.message
        assert await logind.look() is None and problem(logind) is lost
        private_bus.start()
        second = FakeLogind(private_bus.address)
        try:
            while not second.locks or problem(logind) is not None:
                assert await next_of(news) is SleepNews.UNSURE
                await logind.take_lock("x")
            assert logind.delays and not second.locks[-1].is_closed()
            assert old.is_closed(EVENT_TIMEOUT_S)
            second.sleep()
            while (told := await next_of(news)) is SleepNews.UNSURE:
                pass
            assert told is SleepNews.GOING
        finally:
            second.close()

    private_bus.start()
    first = FakeLogind(private_bus.address)
    try:
        connected(private_bus.address, scenario)
    finally:
        first.close()


@pytest.mark.parametrize(
    ("sessions", "expected"),
    [
        ((), False),
        ((Session("seat0", "wayland"),), True),
        ((Session("seat0", "x11", of="greeter"),), True),
        ((Session("seat0", "tty"),), False),
        ((Session("seat0", "wayland", active=False),), False),
        ((Session("", "wayland"),), False),  # of a remote desktop: no card is driven for it
        (
            (Session("seat0", "wayland", of="manager"), Session("seat0", "tty"), Session("seat0", "x11")),
            True,
        ),
    ],
)
def test_a_graphical_session_in_front_is_a_desktop(
    private_bus: PrivateBus, fake: FakeLogind, sessions: tuple[Session, ...], expected: bool
) -> None:
    fake.sessions = sessions
    assert connected(private_bus.address, Logind.graphical_session) is expected


def test_whose_desktop_is_there_or_on_its_way(private_bus: PrivateBus, fake: FakeLogind) -> None:
    mine = os.getuid()
    fake.sessions = (
        Session("seat0", "wayland", of="greeter"),
        Session("seat0", "wayland", active=False, uid=mine, since_us=7_250_000),
    )
    expected = SeatScene(own_desktop=True, in_front=True, desktop_since_s=7.25)
    assert connected(private_bus.address, Logind.seats) == expected
    # A bus without the system's systemd tells of no display manager.
    fake.sessions = (Session("seat0", "tty", uid=mine), Session("", "tty", uid=mine))
    assert connected(private_bus.address, Logind.seats) == SeatScene(own_console=True)


def test_without_logind_nobody_tells_of_sessions(private_bus: PrivateBus) -> None:
    private_bus.start()
    assert connected(private_bus.address, Logind.graphical_session) is None
    assert connected(private_bus.address, Logind.seats) is None
