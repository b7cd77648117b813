"""Whether a desktop session is on the card."""

from __future__ import annotations

from typing import Protocol

from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.settings import Desktop

SESSION_TARGET = "graphical-session.target"


class Sessions(Protocol):
    """Who knows the sessions on the seats of the machine."""

    async def graphical_session(self) -> bool | None:
        """A graphical one is in front; None where nobody can tell."""
        ...


class UnitStates(Protocol):
    """Who knows the state of a unit."""

    async def unit_active_state(self, name: str) -> str | None:
        """``ActiveState`` of a unit, None when it is not loaded. Raises LlmError BUS_UNAVAILABLE."""
        ...


async def desktop_active(
    choice: Desktop, card_kind: CardKind, units: UnitStates, sessions: Sessions | None = None
) -> bool | None:
    """Whether the desktop is counted on the card: as the settings say, else as systemd or logind says.

    Some desktops start without the target, and a greeter belongs to another user.

    Args:
        choice: the setting.
        card_kind: host memory has no desktop on it.
        units: the user's systemd.
        sessions: logind; None where there is none.

    Returns:
        None when it cannot be told, which counts as active.
    """
    match choice:
        case Desktop.ACTIVE:
            return True
        case Desktop.INACTIVE:
            return False
        case Desktop.AUTO:
            if card_kind is CardKind.CPU:
                return False
            try:
                state = await units.unit_active_state(SESSION_TARGET)
            except LlmError:
                return None
            if state in {"active", "activating"}:
                return True
            return sessions is not None and await sessions.graphical_session() is True
