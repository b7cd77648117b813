"""What a real notification socket receives."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.notify import Notifier

pytestmark = pytest.mark.unit

RECEIVE_TIMEOUT_S = 10.0
INTERVAL_S = 0.01


@pytest.fixture(autouse=True)
def no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WATCHDOG_USEC", "WATCHDOG_PID", "NOTIFY_SOCKET"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The receiving end, as systemd binds it."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        path = Path(directory, "notify")
        end.bind(str(path))
        end.settimeout(RECEIVE_TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield end


@pytest.fixture
def notifier(systemd: socket.socket) -> Iterator[Notifier]:
    assert systemd.getsockname() == os.environ["NOTIFY_SOCKET"]
    made = Notifier()
    yield made
    assert made._systemd is not None
    made._systemd.socket.close()


def received(systemd: socket.socket) -> list[str]:
    return systemd.recv(4096).decode().split("\n")


def is_silent(systemd: socket.socket) -> bool:
    systemd.setblocking(False)
    try:
        systemd.recv(4096)
    except BlockingIOError:
        return True
    finally:
        systemd.settimeout(RECEIVE_TIMEOUT_S)
    return False


def test_ready(systemd: socket.socket, notifier: Notifier) -> None:
    notifier.ready("no models loaded")
    assert received(systemd) == ["READY=1", "STATUS=no models loaded"]


def test_status(systemd: socket.socket, notifier: Notifier) -> None:
    notifier.status("qwen ready")
    assert received(systemd) == ["STATUS=qwen ready"]


def test_a_status_is_short_enough_to_be_taken(systemd: socket.socket, notifier: Notifier) -> None:
    """With a longer message systemd would ignore READY=1 in it too, and wait for ever."""
    notifier.ready("é" * 100_000)
    message = systemd.recv(1 << 20)
    assert message.startswith(b"READY=1\nSTATUS=") and len(message) < 4096


def test_reloading_tells_the_time_as_systemd_needs_it(systemd: socket.socket, notifier: Notifier) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    first, second = received(systemd)
    assert first == "RELOADING=1"
    name, _, microseconds = second.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(microseconds) <= after


def test_stopping(systemd: socket.socket, notifier: Notifier) -> None:
    notifier.stopping()
    assert received(systemd) == ["STOPPING=1", "STATUS=stopping"]


@pytest.mark.parametrize("name", ["Größe", "模型", "🦙", "naïve"])
def test_a_status_is_utf_8(systemd: socket.socket, notifier: Notifier, name: str) -> None:
    notifier.ready(f"{name} ready")
    assert received(systemd) == ["READY=1", f"STATUS={name} ready"]


def test_a_status_that_is_not_unicode_does_not_hold_readiness_back(
    systemd: socket.socket, notifier: Notifier
) -> None:
    notifier.ready(os.fsdecode(b"\xff"))
    assert received(systemd)[0] == "READY=1"


@pytest.mark.parametrize("status", ["a\nSTOPPING=1", "a\r\nSTOPPING=1", "a\rSTOPPING=1"])
def test_a_status_cannot_smuggle_in_an_assignment(
    systemd: socket.socket, notifier: Notifier, status: str
) -> None:
    notifier.status(status)
    assert received(systemd) == ["STATUS=a STOPPING=1"]


def test_in_a_terminal_nothing_is_sent_and_nothing_fails() -> None:
    notifier = Notifier()
    notifier.ready("x")
    notifier.status("x")
    notifier.reloading()
    notifier.stopping()
    assert notifier._systemd is None


# --- the watchdog ------------------------------------------------------------------------------------------


class AliveSwitch:
    """The parts that must live: they answer, hang, or fail."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.failure: LlmError | None = None

    async def alive(self) -> None:
        await self.answers.wait()
        if self.failure is not None:
            raise self.failure


class Complaints(logging.Handler):
    """Counts records in a queue, so that a test can wait for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: asyncio.Queue[logging.LogRecord] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.queue.put_nowait(record)


async def ping(systemd: socket.socket) -> str:
    return (await asyncio.get_running_loop().sock_recv(systemd, 4096)).decode()


async def while_feeding(systemd: socket.socket, notifier: Notifier, *, failure: LlmError | None) -> None:
    """Pings come, stop while the parts do not answer, and come again."""
    systemd.setblocking(False)
    complaints = Complaints()
    log = logging.getLogger("lllm3090d.notify")
    log.addHandler(complaints)
    switch = AliveSwitch()
    feeding = asyncio.create_task(notifier.feed_watchdog(switch.alive))
    try:
        for _ in range(3):
            assert await ping(systemd) == "WATCHDOG=1"
        assert complaints.queue.empty()
        if failure is None:
            switch.answers.clear()
        else:
            switch.failure = failure
        first = await complaints.queue.get()
        assert first.levelno == logging.ERROR
        # What was sent before the first complaint is none of the silence.
        while not is_silent(systemd):
            pass
        await complaints.queue.get()
        await complaints.queue.get()
        assert is_silent(systemd)
        systemd.setblocking(False)
        switch.failure = None
        switch.answers.set()
        assert await ping(systemd) == "WATCHDOG=1"
    finally:
        log.removeHandler(complaints)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


@pytest.mark.parametrize(
    "failure",
    [None, LlmError(ErrorCode.BUS_UNAVAILABLE, "the bus thread did not answer")],
    ids=["hangs", "fails"],
)
@pytest.mark.parametrize("with_pid", [True, False])
def test_the_watchdog_is_fed_only_while_the_parts_answer(
    systemd: socket.socket,
    notifier: Notifier,
    monkeypatch: pytest.MonkeyPatch,
    failure: LlmError | None,
    with_pid: bool,
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", str(int(2 * INTERVAL_S * 1_000_000)))
    if with_pid:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    asyncio.run(asyncio.wait_for(while_feeding(systemd, notifier, failure=failure), RECEIVE_TIMEOUT_S))


@pytest.mark.parametrize(
    ("usec", "pid"),
    [(None, None), ("", None), ("0", None), ("soon", None), ("-5", None), ("20000", "1")],
)
def test_without_a_watchdog_of_ours_nothing_is_fed(
    systemd: socket.socket,
    notifier: Notifier,
    monkeypatch: pytest.MonkeyPatch,
    usec: str | None,
    pid: str | None,
) -> None:
    for variable, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        if value is not None:
            monkeypatch.setenv(variable, value)
    asked = False

    async def alive() -> None:
        nonlocal asked
        asked = True

    asyncio.run(asyncio.wait_for(notifier.feed_watchdog(alive), RECEIVE_TIMEOUT_S))
    assert not asked
    assert is_silent(systemd)


def test_an_error_that_nobody_expected_ends_the_feeding(
    systemd: socket.socket, notifier: Notifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")

    async def alive() -> None:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        asyncio.run(notifier.feed_watchdog(alive))
    assert is_silent(systemd)
