"""Interruptions: machines are unplugged and directories removed before a run ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest


@pytest.fixture(scope="session", autouse=True)
def cleanly_interrupted() -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run as Ctrl-C does; those that follow do not cut its cleaning short.

    Two come at once where a terminal interrupts ``make`` and what runs tests beside each other stops the rest.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)
