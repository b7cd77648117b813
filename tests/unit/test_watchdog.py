"""Which parts must live, what is said of one that does not, and when systemd's watchdog is fed."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.bus.thread import BusThread
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.notify import Notifier
from lllm3090d.watchdog import CannotAskError, Finding, Judgement, Life, Part, Watchdog, judge, look, where
from tests.fakes.notify_socket import RECEIVE_TIMEOUT_S, VARIABLES, is_silent, notifying, received, receiving

pytestmark = pytest.mark.unit

LIMIT_S = 2.4  # a machine with other work stands still for moments, and the last third of it is for those
FED = ["WATCHDOG=1"]
AFTER = ", and will be restarted by systemd unless that ends; models go on"


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with receiving(monkeypatch) as end:
        yield end


@pytest.fixture
def notifier(systemd: socket.socket) -> Iterator[Notifier]:
    with notifying(systemd) as made:
        yield made


class Switch:
    """A part that answers, hangs, or fails; set from any thread."""

    def __init__(self) -> None:
        self.hangs = False
        self.failure: Exception | None = None
        self.asked = 0

    async def ask(self, limit_s: float) -> None:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(10 * limit_s)
        if self.failure is not None:
            raise self.failure


class Running:
    """A watchdog on an event loop of its own, so that the test may block that loop."""

    def __init__(self, parts: dict[str, Switch], notifier: Notifier) -> None:
        self.told: list[str] = []
        self.loop = asyncio.new_event_loop()
        asked = [Part(name, switch.ask) for name, switch in parts.items()]
        self._watchdog = Watchdog(asked, notifier, LIMIT_S, self.told.append)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._task = self.loop.create_task(self._watchdog.run())
        try:
            self.loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            return
        finally:
            self.loop.close()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(RECEIVE_TIMEOUT_S)
        assert not self._thread.is_alive()


def until_status(systemd: socket.socket) -> tuple[str, float]:
    """The next status, and the seconds since the watchdog was last fed, as systemd counts them."""
    fed_s = time.monotonic()
    while (message := received(systemd)) == FED:
        fed_s = time.monotonic()
    (line,) = message
    return line.removeprefix("STATUS="), time.monotonic() - fed_s


# --- what is decided ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ({}, Judgement(feed=True, trouble=None)),
        ({"a": Life.ALIVE, "b": Life.ALIVE}, Judgement(feed=True, trouble=None)),
        ({"a": Life.ALIVE, "b": Life.UNASKED}, Judgement(feed=True, trouble="b cannot be asked (why b)")),
        ({"a": Life.STUCK, "b": Life.ALIVE}, Judgement(feed=False, trouble="a is stuck (why a)" + AFTER)),
        (
            {"a": Life.STUCK, "b": Life.UNASKED, "c": Life.STUCK},
            Judgement(
                feed=False,
                trouble="a is stuck (why a); c is stuck (why c); b cannot be asked (why b)" + AFTER,
            ),
        ),
    ],
)
def test_one_stuck_part_stops_the_feeding_and_each_is_named(
    lives: dict[str, Life], expected: Judgement
) -> None:
    assert judge(Finding(name, life, f"why {name}") for name, life in lives.items()) == expected


@pytest.mark.parametrize(
    ("hangs", "failure", "expected"),
    [
        (False, None, Finding("a part", Life.ALIVE)),
        (True, None, Finding("a part", Life.STUCK, "no answer within 0.01 s")),
        (False, LlmError(ErrorCode.BUS_UNAVAILABLE, "broken"), Finding("a part", Life.STUCK, "broken")),
        (False, CannotAskError("no files"), Finding("a part", Life.UNASKED, "no files")),
    ],
)
def test_what_is_found_of_a_part(hangs: bool, failure: Exception | None, expected: Finding) -> None:
    switch = Switch()
    switch.hangs, switch.failure = hangs, failure
    assert asyncio.run(look(Part("a part", switch.ask), 0.01)) == expected


def test_where_a_thread_is() -> None:
    entered, leave = threading.Event(), threading.Event()

    def doing_something() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=doing_something)
    thread.start()
    try:
        assert entered.wait(RECEIVE_TIMEOUT_S)
        assert "doing_something (test_watchdog.py:" in where(thread.ident)
    finally:
        leave.set()
        thread.join()
    assert where(thread.ident) == where(None) == ""


# --- what systemd is told ----------------------------------------------------------------------------------


def test_fed_while_all_answer_and_a_part_that_hangs_is_named_in_time(
    systemd: socket.socket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    writer, bus = Switch(), Switch()
    with (
        caplog.at_level(logging.INFO, "lllm3090d.watchdog"),
        Running({"the writer": writer, "the bus": bus}, notifier) as it,
    ):
        assert received(systemd) == received(systemd) == FED
        assert not caplog.records
        bus.hangs = True
        status, since_s = until_status(systemd)
        assert status.startswith(f"the bus is stuck (no answer within {LIMIT_S / 3:g} s), and")
        assert since_s < LIMIT_S, "systemd would have ended the daemon before it could say why"
        assert is_silent(systemd)
        bus.hangs = False
        messages = [received(systemd), received(systemd)]
        assert sorted(messages) == [["STATUS="], FED]
    assert [each.levelno for each in caplog.records] == [logging.CRITICAL, logging.INFO]
    assert [text.partition(" (")[0] for text in it.told] == [
        "the bus is stuck",
        "all parts of the daemon answer again",
    ]
    assert writer.asked >= 4  # asked side by side: one that hangs keeps nobody from being asked


def test_a_part_that_cannot_be_asked_is_said_once_and_the_feeding_goes_on(
    systemd: socket.socket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    api = Switch()
    api.failure = CannotAskError("no file descriptor is left")
    with caplog.at_level(logging.WARNING, "lllm3090d.watchdog"), Running({"the API": api}, notifier):
        assert received(systemd) == FED
        assert received(systemd) == ["STATUS=the API cannot be asked (no file descriptor is left)"]
        assert received(systemd) == received(systemd) == FED
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


def test_an_event_loop_that_stands_still_is_named_by_another_thread(
    systemd: socket.socket, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    def blocks_the_loop() -> None:
        assert release.wait(RECEIVE_TIMEOUT_S)

    with caplog.at_level(logging.INFO, "lllm3090d.watchdog"), Running({"a part": Switch()}, notifier) as it:
        assert received(systemd) == FED
        it.loop.call_soon_threadsafe(blocks_the_loop)
        status, since_s = until_status(systemd)
        assert status.startswith("the event loop is stuck (it has not turned for ")
        assert since_s < LIMIT_S
        assert is_silent(systemd)
        release.set()
        assert received(systemd) == ["STATUS="]
        assert received(systemd) == FED
        limit = time.monotonic() + RECEIVE_TIMEOUT_S
        while len(caplog.records) < 2:  # the other thread tells systemd first, and then the journal
            assert time.monotonic() < limit
            time.sleep(0.01)
    # Told by two threads, so in either order.
    (stuck,) = [each for each in caplog.records if "doing" in vars(each)]
    (back,) = [each for each in caplog.records if each is not stuck]
    assert "blocks_the_loop (test_watchdog.py:" in vars(stuck)["doing"]
    assert (stuck.levelno, back.levelno) == (logging.CRITICAL, logging.ERROR)
    (told,) = it.told
    assert told.startswith("the event loop stood still for ")


def test_a_mistake_ends_the_watchdog_and_nobody_is_fed(systemd: socket.socket, notifier: Notifier) -> None:
    broken = Switch()
    broken.failure = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        asyncio.run(Watchdog([Part("a part", broken.ask)], notifier, LIMIT_S).run())
    assert is_silent(systemd)


# --- the bus thread ----------------------------------------------------------------------------------------


def test_a_bus_that_is_gone_is_no_stuck_thread_but_a_blocked_thread_is(tmp_path: Path) -> None:
    release = threading.Event()

    async def scenario() -> None:
        bus = BusThread(f"unix:path={tmp_path}/nobody")
        part = Part("the bus", bus.answers, lambda: bus.thread_id)
        missing = await bus.start_anyway()
        assert missing is not None and missing.code is ErrorCode.BUS_UNAVAILABLE
        try:
            assert await look(part, RECEIVE_TIMEOUT_S) == Finding("the bus", Life.ALIVE)
            assert not bus.connected
            bus._invoke(lambda: blocks_the_thread(release))
            found = await look(part, 0.05)
            assert found.life is Life.STUCK
            assert "blocks_the_thread (" in where(bus.thread_id)
            release.set()
            assert await look(part, RECEIVE_TIMEOUT_S) == Finding("the bus", Life.ALIVE)
        finally:
            release.set()
            await bus.close()
        assert bus.thread_id is None

    asyncio.run(scenario())


def blocks_the_thread(release: threading.Event) -> None:
    assert release.wait(RECEIVE_TIMEOUT_S)
