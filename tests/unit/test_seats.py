"""What logind and the system's systemd tell of desktops, whatever sessions there are and whoever does not answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from gi.repository import GLib

from lllm3090d.bus.logind import Logind
from lllm3090d.bus.messages import RemoteError, Target, unavailable
from lllm3090d.bus.seats import SeatScene, seat_scene
from lllm3090d.bus.thread import BusThread
from lllm3090d.errors import LlmError

pytestmark = pytest.mark.unit

ME, OTHER = 1000, 1001


@dataclass
class Session:
    """A session of logind; one without properties has ended meanwhile."""

    uid: int = ME
    seat: str = "seat0"
    told: dict[str, Any] | None = field(default_factory=dict)


def session(uid: int = ME, seat: str = "seat0", kind: str = "wayland", **told: Any) -> Session:
    usual = {"Type": kind, "Class": "user", "Active": True, "State": "active"}
    return Session(uid, seat, usual | told)


@dataclass
class Bus:
    """A system bus with logind and systemd."""

    sessions: tuple[Session, ...] = ()
    display_manager: dict[str, Any] | Exception | None = None
    asked: list[str] = field(default_factory=list)

    async def method(
        self, target: Target, member: str, arguments: GLib.Variant | None = None, *, timeout_s: float
    ) -> tuple[Any, ...]:
        assert timeout_s == 3.0
        self.asked.append(member)
        if member == "ListSessions":
            rows = [(str(at), each.uid, "somebody", each.seat, f"/session/{at}") for at, each in self.each()]
            return (rows,)
        if member == "GetUnit":
            assert arguments is not None and arguments.unpack() == ("display-manager.service",)
            if isinstance(self.display_manager, Exception):
                raise self.display_manager
            if self.display_manager is None:
                raise RemoteError("org.freedesktop.systemd1.NoSuchUnit", "not loaded")
            return ("/unit",)
        assert member == "GetAll"
        told = (
            self.display_manager
            if target.path == "/unit"
            else self.sessions[int(target.path.removeprefix("/session/"))].told
        )
        if told is None:
            raise RemoteError("org.freedesktop.DBus.Error.UnknownObject", "gone")
        return (told,)

    def each(self) -> list[tuple[int, Session]]:
        return list(enumerate(self.sessions))


def scene(bus: Bus) -> SeatScene:
    return asyncio.run(seat_scene(cast(BusThread, bus), ME, 3.0))


@pytest.mark.parametrize(
    ("sessions", "expected"),
    [
        ((), SeatScene()),
        ((session(),), SeatScene(own_desktop=True, in_front=True)),
        # As at the moment at which the user manager starts: the greeter is still in front.
        (
            (session(990, Class="greeter"), session(kind="x11", Active=False, State="online")),
            SeatScene(own_desktop=True, in_front=True),
        ),
        ((session(990, Class="greeter"),), SeatScene(in_front=True)),
        ((session(OTHER),), SeatScene(in_front=True)),
        ((session(OTHER, Active=False, State="online"),), SeatScene()),
        ((session(kind="tty"),), SeatScene(own_console=True)),
        ((session(OTHER, kind="tty"),), SeatScene()),
        ((session(seat="", kind="tty"),), SeatScene()),  # through ssh
        ((session(seat="", Active=False),), SeatScene(own_desktop=True)),  # a remote desktop of this user
        (
            (session(seat="", kind="unspecified", Class="manager"),),
            SeatScene(),
        ),  # of the user manager itself
        ((session(Active=False, State="closing"),), SeatScene()),  # what is left of the login before
        ((Session(),), SeatScene()),
        ((Session(told=None), session(kind="tty")), SeatScene(own_console=True)),
    ],
)
def test_sessions(sessions: tuple[Session, ...], expected: SeatScene) -> None:
    assert scene(Bus(sessions)) == expected


@pytest.mark.parametrize(
    ("display_manager", "expected"),
    [
        ({"ActiveState": "active", "Job": (0, "/")}, True),
        ({"ActiveState": "activating", "Job": (7, "/job/7")}, True),
        ({"ActiveState": "inactive", "Job": (7, "/job/7")}, True),  # the machine starts
        ({"ActiveState": "inactive", "Job": (0, "/")}, False),
        ({"ActiveState": "failed", "Job": (0, "/")}, False),
        ({}, False),
        (None, False),
        (RemoteError("org.freedesktop.DBus.Error.AccessDenied", "no"), False),
        (unavailable("systemd was not answered within 3 s"), False),
    ],
)
def test_a_display_manager(display_manager: dict[str, Any] | Exception | None, expected: bool) -> None:
    found = scene(Bus(display_manager=display_manager))
    assert found == SeatScene(display_manager=expected) and found.may_come is expected


def test_of_a_display_manager_nobody_asks_where_a_desktop_is_there() -> None:
    bus = Bus((session(),))
    scene(bus)
    assert "GetUnit" not in bus.asked


@pytest.mark.parametrize(
    ("sessions", "display_manager", "expected"),
    [
        ((session(TimestampMonotonic=5_500_000),), None, (5.5, None)),
        # The later of two; somebody else's is of no interest.
        (
            (
                session(TimestampMonotonic=9_000_000, Active=False),
                session(TimestampMonotonic=7_000_000),
                session(OTHER, TimestampMonotonic=11_000_000),
            ),
            None,
            (9.0, None),
        ),
        # One of unknown age may be young.
        ((session(TimestampMonotonic=9_000_000), session()), None, (None, None)),
        ((session(TimestampMonotonic=0),), None, (None, None)),
        ((session(TimestampMonotonic="soon"),), None, (None, None)),
        ((session(kind="tty", TimestampMonotonic=3_000_000),), None, (None, 3.0)),
        ((), {"ActiveState": "active", "ActiveEnterTimestampMonotonic": 8_000_000}, (None, 8.0)),
        (
            (session(kind="tty", TimestampMonotonic=3_000_000),),
            {"ActiveState": "active", "ActiveEnterTimestampMonotonic": 2_000_000},
            (None, 3.0),
        ),
        (
            (session(kind="tty", TimestampMonotonic=3_000_000),),
            {"ActiveState": "activating", "ActiveEnterTimestampMonotonic": 0},
            (None, None),
        ),
    ],
)
def test_since_when(
    sessions: tuple[Session, ...],
    display_manager: dict[str, Any] | None,
    expected: tuple[float | None, float | None],
) -> None:
    found = scene(Bus(sessions, display_manager))
    assert (found.desktop_since_s, found.chance_since_s) == expected


def test_a_logind_that_is_there_and_silent_is_told_from_one_that_is_not() -> None:
    """The one may have a desktop to tell of; the other never will."""

    class Unheard(Bus):
        connected = True
        error: Exception = unavailable("logind was not answered within 3 s", timed_out=True)

        async def method(self, *_: Any, **__: Any) -> tuple[Any, ...]:
            raise self.error

    async def test() -> None:
        bus = Unheard()
        logind = Logind(cast(BusThread, bus))
        for _ in range(2):  # at once, and after it was found out
            with pytest.raises(LlmError, match="not answered"):
                await logind.seats()
            assert await logind.look() is None
        for error in (
            unavailable("the bus is lost"),
            RemoteError("org.freedesktop.DBus.Error.ServiceUnknown", ""),
        ):
            bus.error = error
            assert await logind.seats() is None
            assert await logind.look() is None and await logind.seats() is None
        bus.connected = False
        assert await logind.look() is None and await logind.seats() is None
        assert logind._again is not None
        logind._again.cancel()

    asyncio.run(test())


def test_a_logind_that_does_not_answer_is_told() -> None:
    class Silent(Bus):
        async def method(self, *_: Any, **__: Any) -> tuple[Any, ...]:
            raise unavailable("logind was not answered within 3 s", timed_out=True)

    with pytest.raises(Exception, match="not answered"):
        scene(Silent())
