"""Whether a desktop is counted on the card."""

from __future__ import annotations

import asyncio

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.serving.desktop import SESSION_TARGET, desktop_active
from lllm3090d.settings import Desktop

pytestmark = pytest.mark.unit


class Units:
    """A systemd that knows one unit, or does not answer."""

    def __init__(self, state: str | None, *, lost: bool = False) -> None:
        self.state = state
        self.lost = lost

    async def unit_active_state(self, name: str) -> str | None:
        assert name == SESSION_TARGET
        if self.lost:
            raise LlmError(ErrorCode.BUS_UNAVAILABLE, "gone")
        return self.state


class Seat:
    """A logind that tells one thing."""

    def __init__(self, graphical: bool | None) -> None:
        self.graphical = graphical

    async def graphical_session(self) -> bool | None:
        return self.graphical


@pytest.mark.parametrize(
    ("units", "graphical", "expected"),
    [
        (Units("inactive"), True, True),
        (Units("inactive"), False, False),
        (Units("inactive"), None, False),
        (Units("active"), False, True),
        (Units(None, lost=True), False, None),
    ],
)
def test_a_session_that_only_logind_knows(
    units: Units, graphical: bool | None, expected: bool | None
) -> None:
    """Some desktops start without the target, and a greeter belongs to another user."""
    found = desktop_active(Desktop.AUTO, CardKind.NVIDIA, units, Seat(graphical))
    assert asyncio.run(found) is expected


@pytest.mark.parametrize(
    ("choice", "kind", "units", "expected"),
    [
        (Desktop.AUTO, CardKind.NVIDIA, Units("active"), True),
        (Desktop.AUTO, CardKind.NVIDIA, Units("activating"), True),
        (Desktop.AUTO, CardKind.NVIDIA, Units("inactive"), False),
        (Desktop.AUTO, CardKind.NVIDIA, Units(None), False),
        (Desktop.AUTO, CardKind.NVIDIA, Units(None, lost=True), None),
        (Desktop.AUTO, CardKind.CPU, Units("active"), False),
        (Desktop.ACTIVE, CardKind.NVIDIA, Units("inactive"), True),
        (Desktop.INACTIVE, CardKind.NVIDIA, Units("active"), False),
    ],
)
def test_desktop_active(choice: Desktop, kind: CardKind, units: Units, expected: bool | None) -> None:
    assert asyncio.run(desktop_active(choice, kind, units)) is expected
