"""The desktop's notification service (org.freedesktop.Notifications 1.2) on the user's bus.

Where there is none, nothing is shown and nothing is said of it. One that D-Bus can start is started by the first
notice, as any program would do it; where it does not come up that is not tried again for a while. Calls go to the
unique name of whoever owns the well-known one, and only the signals of that one count: anybody may send us a signal
that looks like theirs. Calls wait a few seconds at most and block nothing; a service that hangs is let alone for a
while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gi.repository import GLib

from lllm3090d.bus.messages import Match, RemoteError, Signal, Target, timed_out
from lllm3090d.bus.thread import BusState, BusThread
from lllm3090d.errors import LlmError

log = logging.getLogger(__name__)

NAME = "org.freedesktop.Notifications"
PATH = "/org/freedesktop/Notifications"
BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
CALL_TIMEOUT_S = 3.0
START_TIMEOUT_S = 10.0
SILENT_S = 30.0  # for which one that did not answer is let alone
START_AGAIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Message:
    """A notice as the service takes it.

    Attributes:
        summary: plain text.
        body: as the service's capabilities allow.
        actions: keys with the labels of their buttons.
        icon: by its name in the theme.
        urgency: 0 low, 1 normal, 2 critical.
        expires_ms: -1 as the service has it, 0 never.
        is_transient: not to be kept by a service that keeps what has been shown.
    """

    summary: str
    body: str = ""
    actions: Mapping[str, str] = field(default_factory=dict)
    icon: str = ""
    category: str = ""
    urgency: int = 1
    expires_ms: int = -1
    is_transient: bool = False


class NotificationService:
    """Whoever shows notices.

    Args:
        bus: started.
        clock: monotonic, seconds.

    Attributes:
        capabilities: of the one that answered last.
        on_change: called when there is another service, or the one that is there may answer again.
        on_action: called with the number of a notice and the key of what was chosen.
        on_closed: called with the number of a notice that is shown no more.
    """

    def __init__(self, bus: BusThread, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._owner = ""
        self._asked: str | None = None  # the owner whose capabilities are known
        self._silent_until_s = 0.0
        self._start_again_s = 0.0
        self._again: asyncio.TimerHandle | None = None
        self.capabilities: frozenset[str] = frozenset()
        self.on_change: Callable[[], None] = lambda: None
        self.on_action: Callable[[int, str], None] = lambda _, __: None
        self.on_closed: Callable[[int], None] = lambda _: None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and look who is there. Never raises."""
        bus = "org.freedesktop.DBus"
        try:
            await self._bus.subscribe(Match(bus, bus, "NameOwnerChanged", arg0=NAME), self._on_owner)
            for member in ("ActionInvoked", "NotificationClosed"):
                await self._bus.subscribe(Match(NAME, NAME, member, path=PATH), self._on_signal)
        except LlmError as error:
            log.info("no notifications", extra={"reason": error.message})
            return
        self._bus.add_state_handler(self._on_bus_state)
        await self._look()

    def end(self) -> None:
        """Listen no more."""
        self.on_change, self.on_action, self.on_closed = lambda: None, lambda _, __: None, lambda _: None
        if self._again is not None:
            self._again.cancel()

    @property
    def has_asked(self) -> bool:
        """Whether the capabilities are those of the service that is there."""
        return bool(self._owner) and self._asked == self._owner

    async def ready(self) -> bool:
        """Whether one is there and answers, with its capabilities; one that can be started is. Never raises."""
        if self._clock() < self._silent_until_s:
            return False
        if not self._owner and not await self._started():
            return False
        if self._asked == self._owner:
            return True
        owner = self._owner
        try:
            reply = await self._call("GetCapabilities", None)
        except (RemoteError, LlmError) as error:
            self._failed(error)
            return False
        if owner != self._owner:
            return False  # another one has come meanwhile, which on_change has told
        words = reply[0] if reply and isinstance(reply[0], list) else []
        self._asked, self.capabilities = owner, frozenset(str(each) for each in words)
        return True

    async def show(self, message: Message, replaces: int = 0) -> int | None:
        """Show a notice, in place of an earlier one of this service.

        Returns:
            Its number; None where it was not shown.
        """
        hints = {
            "urgency": GLib.Variant("y", message.urgency),
            "category": GLib.Variant("s", message.category),
        }
        if message.is_transient:
            hints["transient"] = GLib.Variant("b", True)
        actions = [word for pair in message.actions.items() for word in pair]
        arguments = GLib.Variant(
            "(susssasa{sv}i)",
            (
                "lllm3090",
                replaces,
                message.icon,
                message.summary,
                message.body,
                actions,
                hints,
                message.expires_ms,
            ),
        )
        owner = self._owner
        try:
            reply = await self._call("Notify", arguments)
        except (RemoteError, LlmError) as error:
            self._failed(error)
            return None
        number = reply[0] if reply else None
        # What another service has shown since has numbers of its own.
        return number if isinstance(number, int) and owner == self._owner else None

    async def withdraw(self, number: int) -> None:
        """Show a notice no more; one that is gone is no error."""
        try:
            await self._call("CloseNotification", GLib.Variant("(u)", (number,)))
        except RemoteError:
            return  # it was closed before
        except LlmError as error:
            self._failed(error)

    async def _call(self, member: str, arguments: GLib.Variant | None) -> tuple[Any, ...]:
        target = Target(self._owner, PATH, NAME)
        return await self._bus.method(target, member, arguments, timeout_s=CALL_TIMEOUT_S)

    def _failed(self, error: RemoteError | LlmError) -> None:
        log.info("a notice is not shown", extra={"reason": error.message})
        if isinstance(error, LlmError) and timed_out(error):
            self._silent_until_s = self._clock() + SILENT_S
            if self._again is not None:
                self._again.cancel()
            self._again = asyncio.get_running_loop().call_later(SILENT_S, self._may_answer)

    def _may_answer(self) -> None:
        self.on_change()

    # --- who is there -----------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        try:
            (owner,) = await self._bus.method(BUS, "GetNameOwner", GLib.Variant("(s)", (NAME,)))
        except (RemoteError, LlmError):
            return  # nobody, which is how a machine without a desktop is
        self._owned_by(str(owner))

    async def _started(self) -> bool:
        """Have D-Bus start one, where it knows how."""
        if self._clock() < self._start_again_s:
            return False
        self._start_again_s = self._clock() + START_AGAIN_S
        try:
            (names,) = await self._bus.method(BUS, "ListActivatableNames")
            if NAME not in names:
                self._start_again_s = 0.0  # to ask costs nothing
                return False
            arguments = GLib.Variant("(su)", (NAME, 0))
            await self._bus.method(BUS, "StartServiceByName", arguments, timeout_s=START_TIMEOUT_S)
        except (RemoteError, LlmError) as error:
            log.info("no notification service comes up", extra={"reason": error.message})
            return False
        await self._look()
        return bool(self._owner)

    def _owned_by(self, owner: str) -> None:
        if owner != self._owner:
            self._owner, self._asked = owner, None
            self._silent_until_s = 0.0
            self.on_change()

    def _on_owner(self, signal: Signal) -> None:
        if signal.sender == "org.freedesktop.DBus":
            self._owned_by(str(signal.arguments[2]))

    def _on_bus_state(self, state: BusState) -> None:
        if state is BusState.LOST:
            self._owned_by("")
        else:
            self._looking = asyncio.get_running_loop().create_task(self._look(), name="notifications")

    def _on_signal(self, signal: Signal) -> None:
        """What somebody else sends, or sends of another shape, is not heard."""
        if not self._owner or signal.sender != self._owner:
            return
        match signal.member, signal.arguments:
            case "ActionInvoked", (int(number), str(key)):
                self.on_action(number, key)
            case "NotificationClosed", (int(number), int()):
                self.on_closed(number)
