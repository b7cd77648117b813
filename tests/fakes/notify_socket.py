"""The end of systemd of a notification socket: a real one, bound as systemd binds it."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.notify import Notifier

RECEIVE_TIMEOUT_S = 60.0
VARIABLES = ("WATCHDOG_USEC", "WATCHDOG_PID", "NOTIFY_SOCKET")


@contextlib.contextmanager
def receiving(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The receiving end, in NOTIFY_SOCKET."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        path = Path(directory, "notify")
        end.bind(str(path))
        end.settimeout(RECEIVE_TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield end


@contextlib.contextmanager
def notifying(systemd: socket.socket) -> Iterator[Notifier]:
    """A notifier that is connected to it."""
    assert systemd.getsockname() == os.environ["NOTIFY_SOCKET"]
    made = Notifier()
    yield made
    assert made._systemd is not None
    made._systemd.socket.close()


def received(systemd: socket.socket) -> list[str]:
    """The next message, its lines."""
    return systemd.recv(4096).decode().split("\n")


def is_silent(systemd: socket.socket) -> bool:
    """Whether nothing has come that was not received."""
    systemd.setblocking(False)
    try:
        systemd.recv(4096)
    except BlockingIOError:
        return True
    finally:
        systemd.settimeout(RECEIVE_TIMEOUT_S)
    return False
