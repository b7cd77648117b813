"""Waiting until the desktop has settled before a login's models are loaded: the slow half of it.

Whoever asks for a model meanwhile is served at once: only what loads by itself waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lllm3090d.bus.seats import SeatScene
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.serving.desktop import SESSION_TARGET, UnitStates
from lllm3090d.serving.desktop_settled import POLL_S, Ending, Over, Seen, Settling, Target, Waiting
from lllm3090d.serving.history import History
from lllm3090d.serving.moments import now_text
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.settings import Desktop, Settings
from lllm3090d.wire import EventKind
from lllm3090d.wire_wanted import AutoloadWaitView

log = logging.getLogger(__name__)

# What desktops start before they start the target of the session.
EARLIER_TARGET = "graphical-session-pre.target"
UP = frozenset({"active", "activating", "reloading"})
# systemd and logind are asked so long at most; without an answer what was known before counts.
ASK_LIMIT_S = 2.0
# While nothing is known, for a machine that has just started may be slow to answer.
MAY_COME = SeatScene(display_manager=True)


class Units(UnitStates, Protocol):
    """Who knows how units of the user stand."""

    async def unit_has_job(self, name: str) -> bool:
        """Whether a job of a unit waits or is under way. Raises LlmError BUS_UNAVAILABLE."""
        ...


class Seats(Protocol):
    """Who knows whether a desktop is there or may come."""

    async def seats(self) -> SeatScene | None:
        """What there is now; None where nobody can tell. Raises LlmError where somebody can, and is silent."""
        ...


def no_wait(scheduler: Scheduler, *, is_owed: bool) -> Over | None:
    """Why there is no reason to wait any more; None while there is one.

    Args:
        scheduler: read only.
        is_owed: something that waits is still to be loaded.
    """
    if scheduler.released:
        return Over(Ending.RELEASED, "the card is released")
    if scheduler.asleep:
        return Over(Ending.SLEEP, "the machine goes to sleep")
    if not is_owed:
        return Over(Ending.DONE, "what waited was loaded, or is not wanted any more")
    return None


@dataclass(frozen=True, slots=True)
class _Present:
    """A wait that is under way."""

    since: str
    began_s: float
    state: Waiting


class DesktopWait:
    """Waits at a login; does nothing at other times.

    Args:
        settings: the present settings.
        card_kind: of the card with the most memory.
        units: the user's systemd.
        seats: logind; None where there is none.
        foreign_bytes: what others hold of each card that can be read now, by its UUID.
        excuse: why there is no reason to wait any more; None while there is one.
        history: told of beginning and end.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        card_kind: Callable[[], CardKind],
        units: Units,
        seats: Seats | None,
        foreign_bytes: Callable[[], Mapping[str, int]],
        excuse: Callable[[], Over | None],
        history: History,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._card_kind = card_kind
        self._units = units
        self._seats = seats
        self._foreign_bytes = foreign_bytes
        self._excuse = excuse
        self._history = history
        self._clock = clock
        self._target = Target.ABSENT
        self._scene: SeatScene | None = MAY_COME
        self._nudge = asyncio.Event()
        self._present: _Present | None = None

    # --- for the daemon ---------------------------------------------------------------------------------------------

    def nudge(self) -> None:
        """Something has happened: there may be no reason to wait any more."""
        self._nudge.set()

    @property
    def why(self) -> str:
        """What models wait for, as the end of a sentence; empty while none does."""
        return "" if self._present is None else self._present.state.why

    def view(self) -> AutoloadWaitView | None:
        """What is shown of it; None while nothing waits."""
        present = self._present
        if present is None:
            return None
        waiting_s = self._clock() - present.began_s
        return AutoloadWaitView(
            awaited=present.state.awaited,
            why=present.state.why,
            since=present.since,
            waiting_s=round(waiting_s, 3),
            remaining_s=round(max(0.0, self._settings().autoload_wait_s - waiting_s), 3),
        )

    async def settled(self) -> None:
        """Return once the desktop has settled, or there is no reason to wait for it."""
        began_s = self._clock()
        try:
            over = await self._wait(began_s)
        finally:
            waited, self._present = self._present is not None, None
        self._tell_end(over, self._clock() - began_s, waited=waited)

    # --- the wait ---------------------------------------------------------------------------------------------------

    async def _wait(self, began_s: float) -> Over:
        settling = Settling(began_s)
        while True:
            settings = self._settings()
            over = self._off(settings) or self._excuse()
            if over is not None:
                return over
            looked_s = self._clock()
            seen = await self._see(settings, began_s + settings.autoload_wait_s)
            found = settling.look(self._clock(), seen, settings.autoload_wait_s)
            if isinstance(found, Over):
                return found
            self._now(found, began_s)
            over = await self._pause(min(looked_s + POLL_S, self._clock() + found.remaining_s))
            if over is not None:
                return over

    def _off(self, settings: Settings) -> Over | None:
        if not settings.autoload_wait_s:
            return Over(Ending.OFF, "the setting autoload_wait_s is 0")
        if settings.desktop is Desktop.INACTIVE:
            return Over(Ending.OFF, 'the setting desktop is "inactive"')
        if self._card_kind() is CardKind.CPU:
            return Over(Ending.OFF, "no desktop takes memory of a card")
        return None

    async def _see(self, settings: Settings, until_s: float) -> Seen:
        """What there is now; what is not answered in time is as it was."""
        limit_s = min(ASK_LIMIT_S, max(POLL_S, until_s - self._clock()))
        try:
            async with asyncio.timeout(limit_s):
                self._target = await self._ask_target()
                self._scene = None if self._seats is None else await self._seats.seats()
        except TimeoutError:
            log.info("nobody has told in time what there is of a desktop")
        except LlmError as error:
            log.info("nobody tells what there is of a desktop", extra={"reason": error.message})
        is_certain = settings.desktop is Desktop.ACTIVE
        return Seen(self._target, self._scene, self._foreign_bytes(), is_certain)

    async def _ask_target(self) -> Target:
        """Raises LlmError BUS_UNAVAILABLE."""
        state = await self._units.unit_active_state(SESSION_TARGET)
        if state == "active":
            return Target.ACTIVE
        # Until what it waits for is there, a target is inactive, and only has a job.
        is_coming = (
            state in UP
            or await self._units.unit_has_job(SESSION_TARGET)
            or await self._units.unit_active_state(EARLIER_TARGET) in UP
        )
        return Target.COMING if is_coming else Target.ABSENT

    async def _pause(self, until_s: float) -> Over | None:
        """Until the next look; sooner, and why, where there is no reason to wait any more."""
        while (left_s := until_s - self._clock()) > 0:
            self._nudge.clear()
            over = self._excuse()
            if over is not None:
                return over
            try:
                async with asyncio.timeout(left_s):
                    await self._nudge.wait()
            except TimeoutError:
                break
        return None

    # --- what is told -----------------------------------------------------------------------------------------------

    def _now(self, state: Waiting, began_s: float) -> None:
        before = self._present
        self._present = _Present(before.since if before else now_text(), began_s, state)
        if before is None:
            text = (
                "what is to be loaded at this login waits for the desktop to settle, for"
                f" {state.remaining_s:.0f} s at most: {state.why}"
            )
            log.info("%s", text)
            details = {"awaited": state.awaited, "limit_s": round(state.remaining_s, 3)}
            self._history.add(EventKind.RESTORE, message=text, details=details)
        elif before.state.awaited is not state.awaited:
            log.info("waiting for the desktop: %s", state.why)

    def _tell_end(self, over: Over, waited_s: float, *, waited: bool) -> None:
        if not waited:
            log.info("the desktop is not waited for: %s", over.why)
            return
        match over.ending:
            case Ending.SETTLED:
                text = f"the desktop has settled after {waited_s:.1f} s: {over.why}"
            case Ending.LIMIT:
                text = f"loaded although the desktop has not settled within {waited_s:.0f} s: {over.why}"
            case _:
                text = f"the desktop is not waited for any longer, after {waited_s:.1f} s: {over.why}"
        log.log(logging.WARNING if over.ending is Ending.LIMIT else logging.INFO, "%s", text)
        details = {"ending": over.ending, "waited_s": round(waited_s, 3)}
        self._history.add(EventKind.RESTORE, message=text, details=details)
