"""What a real notification socket receives."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator

import pytest

from lllm3090d.notify import Notifier, watchdog_limit_s
from tests.fakes.notify_socket import VARIABLES, notifying, received, receiving

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with receiving(monkeypatch) as end:
        yield end


@pytest.fixture
def notifier(systemd: socket.socket) -> Iterator[Notifier]:
    with notifying(systemd) as made:
        yield made


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


def test_a_start_that_takes_long_asks_for_time_until_it_has_had_enough(
    systemd: socket.socket, notifier: Notifier
) -> None:
    asyncio.run(notifier.starting(extension_s=0.03, most_s=0.035))
    notifier.feed()  # whatever comes before it was sent before
    said = list(iter(lambda: received(systemd), ["WATCHDOG=1"]))
    assert said[0] == ["STATUS=starting"]
    assert 1 <= len(said) - 1 <= 4 and all(each == ["EXTEND_TIMEOUT_USEC=30000"] for each in said[1:])


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


def test_a_trouble_comes_before_the_status_until_it_is_over(
    systemd: socket.socket, notifier: Notifier
) -> None:
    notifier.status("qwen ready")
    notifier.trouble("a part is stuck")
    notifier.status("qwen busy")
    notifier.trouble(None)
    said = [received(systemd) for _ in range(4)]
    assert said == [
        ["STATUS=qwen ready"],
        ["STATUS=a part is stuck; qwen ready"],
        ["STATUS=a part is stuck; qwen busy"],
        ["STATUS=qwen busy"],
    ]


def test_feeding(systemd: socket.socket, notifier: Notifier) -> None:
    notifier.feed()
    assert received(systemd) == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    ("usec", "pid", "limit_s"),
    [
        (None, None, None),
        ("", None, None),
        ("0", None, None),
        ("soon", None, None),
        ("-5", None, None),
        ("20000", "1", None),
        ("20000", None, 0.02),
        ("30000000", "ours", 30.0),
    ],
)
def test_the_limit_is_that_of_our_own_unit(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, limit_s: float | None
) -> None:
    for variable, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        if value is not None:
            monkeypatch.setenv(variable, str(os.getpid()) if value == "ours" else value)
    assert watchdog_limit_s() == limit_s
