"""logind on the system bus: what it tells of sleep, and the lock that makes it wait for us a moment.

The lock is an open file that logind hands out: closed, it is released, also by the end of this process. logind waits
for it at most ``InhibitDelayMaxSec=`` (5 s unless its settings say otherwise) and then sleeps all the same. While a
sleep is being prepared nobody gets a new lock, so the next one is taken after the return.

A machine without system bus or logind, such as a container, is no fault: nobody tells of sleep there, which
:attr:`Logind.problem` says and one line in the log does. Both are taken up when they come, and when they come back.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Callable
from typing import Any, Self

from gi.repository import GLib

from lllm3090d.bus.messages import Match, RemoteError, Signal, Target, timed_out
from lllm3090d.bus.seats import GRAPHICAL_TYPES, NAME, PATH, SeatScene, seat_scene
from lllm3090d.bus.thread import BusState, BusThread
from lllm3090d.errors import ErrorCode, LlmError

log = logging.getLogger(__name__)

MANAGER_INTERFACE = NAME + ".Manager"
MANAGER = Target(NAME, PATH, MANAGER_INTERFACE)
PROPERTIES = Target(NAME, PATH, "org.freedesktop.DBus.Properties")
WHO = "lllm3090d"
DEFAULT_DELAY_S = 5.0  # InhibitDelayMaxSec= of logind
CALL_TIMEOUT_S = 3.0
LOST = "the system bus is lost"
# A logind that is there and does not answer is asked again, first and last pause.
AGAIN_FIRST_S, AGAIN_LAST_S = 2.0, 60.0


class SleepNews(enum.Enum):
    """What a listener is told."""

    GOING = enum.auto()  # the machine is about to sleep
    AWAKE = enum.auto()  # it has slept, or will not
    UNSURE = enum.auto()  # logind or the bus was away: news may be missed; ask


def system_bus_address() -> str:
    """``$DBUS_SYSTEM_BUS_ADDRESS``, else the usual socket."""
    return os.environ.get("DBUS_SYSTEM_BUS_ADDRESS") or "unix:path=/run/dbus/system_bus_socket"


class Logind:
    """What logind tells of sleep, and our lock. Made by :meth:`connect`.

    Attributes:
        delay_s: how long logind waits for a lock at most, as far as was known last.
    """

    def __init__(self, bus: BusThread) -> None:
        self._bus = bus
        self._listener: Callable[[SleepNews], None] | None = None
        self._backlog: list[SleepNews] = []
        self._lock: int | None = None
        self._doubted = False  # logind was away: one that was restarted may know nothing of our lock
        self._closed = False
        self._absence: LlmError | None = None
        self._is_silent = False  # it is there, and did not answer when it was asked last
        self._refusal: LlmError | None = None
        self._again: asyncio.TimerHandle | None = None
        self._pause_s = AGAIN_FIRST_S
        self.delay_s = DEFAULT_DELAY_S

    @classmethod
    async def connect(cls, address: str | None = None) -> Self:
        """Listen to logind, from now on and after it was away. Never raises: see :attr:`problem`.

        Args:
            address: of the bus; None for the system bus.
        """
        bus = BusThread(address or system_bus_address())
        logind = cls(bus)
        missing = await bus.start_anyway()
        if missing is not None:
            logind._absent(missing.message)
        # Subscribed before asking: no signal falls between.
        await bus.subscribe(
            Match(NAME, MANAGER_INTERFACE, "PrepareForSleep", path=PATH), logind._on_prepare_for_sleep
        )
        await bus.subscribe(
            Match("org.freedesktop.DBus", "org.freedesktop.DBus", "NameOwnerChanged", arg0=NAME),
            logind._on_owner,
        )
        bus.add_state_handler(logind._on_bus_state)
        await logind.look()
        return logind

    @property
    def problem(self) -> LlmError | None:
        """Why nobody tells of sleep, or why logind would not wait for us; None where all is well."""
        return self._absence or self._refusal

    @property
    def delays(self) -> bool:
        """Whether logind waits for us before it sleeps."""
        return self._lock is not None

    def set_listener(self, listener: Callable[[SleepNews], None]) -> None:
        """Have ``listener`` called with all news, in order, on the asyncio loop; earlier ones follow."""
        self._listener = listener
        backlog, self._backlog = self._backlog, []
        for news in backlog:
            listener(news)

    async def look(self) -> bool | None:
        """Ask whether a sleep is being prepared or under way; None where nobody can tell, which is said once."""
        if self._is_lost():
            if self._absence is None:
                self._absent(LOST)
            return None
        try:
            going = await _property(self._bus, "PreparingForSleep")
            delay_us = await _property(self._bus, "InhibitDelayMaxUSec")
        except RemoteError as error:
            self._absent(LOST if self._is_lost() else f"logind does not answer: {error.message}")
            return None
        except LlmError as error:
            self._absent(LOST if self._is_lost() else error.message)
            self._is_silent = timed_out(error) and not self._is_lost()
            self._ask_again(error)
            return None
        if self._is_lost():  # since it has answered: that was told, and stays true
            return None
        self.delay_s = int(delay_us) / 1e6
        self._present()
        return bool(going)

    async def graphical_session(self) -> bool | None:
        """Whether somebody's graphical session, or the greeter, is in front on a seat; None where nobody can tell."""
        if self._absence is not None:
            return None
        try:
            (sessions,) = await self._bus.method(MANAGER, "ListSessions", timeout_s=CALL_TIMEOUT_S)
            seated = [path for _, _, _, seat, path in sessions if seat]
            return any([await self._is_in_front(path) for path in seated])
        except (RemoteError, LlmError) as error:
            log.info("logind does not tell of sessions", extra={"reason": error.message})
            return None

    async def seats(self) -> SeatScene | None:
        """What there is of desktops on this machine; None where nobody can tell.

        Raises:
            LlmError: BUS_UNAVAILABLE where logind is there and does not answer, as on a machine that is just starting.
        """
        if self._absence is not None and not self._is_silent:
            return None
        try:
            return await seat_scene(self._bus, os.getuid(), CALL_TIMEOUT_S)
        except (RemoteError, LlmError) as error:
            if isinstance(error, LlmError) and timed_out(error):
                raise
            log.info("logind does not tell of sessions", extra={"reason": error.message})
            return None

    async def _is_in_front(self, path: str) -> bool:
        """Of one that has ended meanwhile: no. Raises LlmError BUS_UNAVAILABLE."""
        session = Target(NAME, path, "org.freedesktop.DBus.Properties")
        arguments = GLib.Variant("(s)", (NAME + ".Session",))
        try:
            (told,) = await self._bus.method(session, "GetAll", arguments, timeout_s=CALL_TIMEOUT_S)
        except RemoteError:
            return False
        return (
            told.get("Active") is True
            and told.get("Type") in GRAPHICAL_TYPES
            and told.get("Class") in {"user", "greeter"}
        )

    async def take_lock(self, why: str) -> None:
        """Have logind wait for us before it sleeps, until :meth:`release_lock`; a lock that is held is kept.

        Where logind refuses, :attr:`problem` says why: it will sleep without waiting, and still tell.
        """
        held = self._lock is not None and not self._doubted
        if held or await self.look() is None:
            return
        arguments = GLib.Variant("(ssss)", ("sleep", WHO, why, "delay"))
        try:
            files = await self._bus.method_for_files(MANAGER, "Inhibit", arguments, timeout_s=CALL_TIMEOUT_S)
        except RemoteError as error:
            self._refused(error.message)
            return
        except LlmError as error:
            self._refused(error.message)
            self._ask_again(error)
            return
        for file in files[1:]:
            os.close(file)
        if not files:
            self._refused("its answer holds no file")
        elif self._closed:
            os.close(files[0])
        else:
            self.release_lock()  # one that was doubted
            self._lock, self._refusal = files[0], None

    def release_lock(self) -> None:
        """logind need not wait for us any more."""
        lock, self._lock, self._doubted = self._lock, None, False
        if lock is not None:
            os.close(lock)

    async def answers(self, limit_s: float) -> None:
        """Return once our thread has answered, whatever logind and its bus do.

        Raises:
            LlmError: BUS_UNAVAILABLE when it does not within ``limit_s``.
        """
        await self._bus.answers(limit_s)

    @property
    def thread_id(self) -> int | None:
        """Of our thread; None where it does not run."""
        return self._bus.thread_id

    async def close(self) -> None:
        """Release the lock and listen no more."""
        self._closed = True
        self.release_lock()
        if self._again is not None:
            self._again.cancel()
        await self._bus.close()

    # --- what is wrong ---

    def _is_lost(self) -> bool:
        """The bus is not there, as far as was heard; it may have gone while somebody was asked."""
        return not self._bus.connected

    def _absent(self, why: str) -> None:
        self._is_silent = False
        said, self._absence = (
            self._absence,
            _problem(
                f"nobody tells when this machine goes to sleep, so models stay loaded then: {why}",
                "On a desktop: systemctl status systemd-logind dbus. In a container there is nothing to do.",
            ),
        )
        _say_once(self._absence, said)

    def _present(self) -> None:
        if self._absence is not None:
            log.info("logind answers")
        self._absence, self._pause_s = None, AGAIN_FIRST_S

    def _refused(self, why: str) -> None:
        said, self._refusal = (
            self._refusal,
            _problem(
                f"logind would not wait for models to be unloaded before it sleeps: {why}",
                "See: systemd-inhibit --list, and journalctl -u systemd-logind",
            ),
        )
        _say_once(self._refusal, said)

    def _ask_again(self, error: LlmError) -> None:
        """One that is there and silent gives no signal of its return, unlike one that is not there."""
        if timed_out(error) and not self._closed and self._again is None:
            self._again = asyncio.get_running_loop().call_later(self._pause_s, self._ask_now)
            self._pause_s = min(self._pause_s * 2, AGAIN_LAST_S)

    def _ask_now(self) -> None:
        self._again = None
        self._away()

    # --- signals, all on the asyncio loop and in order ---

    def _tell(self, news: SleepNews) -> None:
        if self._closed:
            return
        if self._listener is None:
            self._backlog.append(news)
        else:
            self._listener(news)

    def _on_prepare_for_sleep(self, signal: Signal) -> None:
        self._tell(SleepNews.GOING if signal.arguments[0] else SleepNews.AWAKE)

    def _on_owner(self, signal: Signal) -> None:
        if signal.arguments[2]:
            self._away()

    def _on_bus_state(self, state: BusState) -> None:
        if state is BusState.BACK:
            self._away()
        elif not self._closed:
            self._absent(LOST)

    def _away(self) -> None:
        """logind was away; the listener takes another lock in place of the one that it may have forgotten."""
        self._doubted = True
        self._tell(SleepNews.UNSURE)


async def _property(bus: BusThread, name: str) -> Any:
    arguments = GLib.Variant("(ss)", (MANAGER_INTERFACE, name))
    (value,) = await bus.method(PROPERTIES, "Get", arguments, timeout_s=CALL_TIMEOUT_S)
    return value


def _problem(message: str, hint: str) -> LlmError:
    return LlmError(ErrorCode.LOGIND_UNAVAILABLE, message, hint=hint)


def _say_once(problem: LlmError, said: LlmError | None) -> None:
    """Logged once, not again at every attempt."""
    if said is None or said.message != problem.message:
        log.info("%s", problem.message, extra={"hint": problem.hint})
