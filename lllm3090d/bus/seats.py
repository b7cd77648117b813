"""Whether a desktop is there or on its way: what logind tells of sessions, and the system's systemd of a greeter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gi.repository import GLib

from lllm3090d.bus.messages import RemoteError, Target
from lllm3090d.bus.thread import BusThread
from lllm3090d.errors import LlmError

NAME = "org.freedesktop.login1"
PATH = "/org/freedesktop/login1"
MANAGER = Target(NAME, PATH, NAME + ".Manager")
PROPERTIES_INTERFACE = "org.freedesktop.DBus.Properties"
GRAPHICAL_TYPES = frozenset({"x11", "wayland", "mir"})
# Of sessions in which somebody works; the user manager has a session of its own, and so have timers.
WORKING = frozenset({"user", "user-early", "user-light"})
SYSTEMD = "org.freedesktop.systemd1"
SYSTEMD_MANAGER = Target(SYSTEMD, "/org/freedesktop/systemd1", SYSTEMD + ".Manager")
DISPLAY_MANAGER = "display-manager.service"  # the alias that every display manager installs


@dataclass(frozen=True, slots=True)
class SeatScene:
    """What there is of desktops on this machine.

    Attributes:
        own_desktop: this user has a graphical session, in front or on its way there.
        in_front: a graphical session, or the greeter, is in front on a seat, whoever's it is.
        own_console: this user is logged in at a seat without one, and may start a desktop there.
        display_manager: one runs, or is about to be started.
        desktop_since_s: when this user's latest graphical session began, on the monotonic clock; None where nobody
            tells.
        chance_since_s: the same of what a desktop may come of: the console session, or the display manager.
    """

    own_desktop: bool = False
    in_front: bool = False
    own_console: bool = False
    display_manager: bool = False
    desktop_since_s: float | None = None
    chance_since_s: float | None = None

    @property
    def may_come(self) -> bool:
        """A desktop may come although none is there yet."""
        return self.own_console or self.display_manager


async def seat_scene(bus: BusThread, uid: int, timeout_s: float) -> SeatScene:
    """What there is now.

    Args:
        bus: the system bus.
        uid: of this user.
        timeout_s: for each call.

    Raises:
        RemoteError: logind answers with an error.
        LlmError: BUS_UNAVAILABLE where it does not answer.
    """
    (sessions,) = await bus.method(MANAGER, "ListSessions", timeout_s=timeout_s)
    in_front = False
    desktops: list[float | None] = []
    chances: list[float | None] = []
    for _, owner, _, seat, path in sessions:
        told = await _properties(bus, Target(NAME, path, PROPERTIES_INTERFACE), NAME + ".Session", timeout_s)
        is_graphical = told.get("Type") in GRAPHICAL_TYPES
        what = told.get("Class")
        if seat and is_graphical and told.get("Active") is True and what in WORKING | {"greeter"}:
            in_front = True
        if owner == uid and what in WORKING and told.get("State") != "closing":
            if is_graphical:
                desktops.append(_seconds(told, "TimestampMonotonic"))
            elif seat:
                chances.append(_seconds(told, "TimestampMonotonic"))
    own_desktop, own_console = bool(desktops), bool(chances)
    manager = None if own_desktop or in_front else await _display_manager(bus, timeout_s)
    if manager is not None:
        chances.append(_seconds(manager, "ActiveEnterTimestampMonotonic"))
    return SeatScene(
        own_desktop, in_front, own_console, manager is not None, _latest(desktops), _latest(chances)
    )


def _seconds(told: Mapping[str, Any], name: str) -> float | None:
    """A time of the monotonic clock, which is told in microseconds; None of what has not been."""
    micros = told.get(name)
    return micros / 1e6 if isinstance(micros, int) and micros > 0 else None


def _latest(times: Sequence[float | None]) -> float | None:
    """None where that is not known."""
    known = [each for each in times if each is not None]
    return max(known) if known and len(known) == len(times) else None


async def _properties(bus: BusThread, target: Target, interface: str, timeout_s: float) -> dict[str, Any]:
    """Of what has ended meanwhile: none. Raises LlmError BUS_UNAVAILABLE."""
    arguments = GLib.Variant("(s)", (interface,))
    try:
        (told,) = await bus.method(target, "GetAll", arguments, timeout_s=timeout_s)
    except RemoteError:
        return {}
    found: dict[str, Any] = told
    return found


async def _display_manager(bus: BusThread, timeout_s: float) -> Mapping[str, Any] | None:
    """A display manager that runs or has been asked for; None of any other, and where systemd does not tell."""
    arguments = GLib.Variant("(s)", (DISPLAY_MANAGER,))
    try:
        (path,) = await bus.method(SYSTEMD_MANAGER, "GetUnit", arguments, timeout_s=timeout_s)
        unit = Target(SYSTEMD, path, PROPERTIES_INTERFACE)
        told = await _properties(bus, unit, SYSTEMD + ".Unit", timeout_s)
    except (RemoteError, LlmError):
        return None
    job, _ = told.get("Job", (0, "/"))
    return told if told.get("ActiveState") in {"active", "activating", "reloading"} or job != 0 else None
