"""When the desktop that a login starts has taken its memory: a state machine over what is seen once a second. Pure.

A desktop takes its memory over some seconds, and the daemon is started before it. A model that is planned meanwhile
gets room that the desktop takes a moment later. So a login's models wait: for a graphical session where one may come,
for its target where it has one, and then until what other programs hold of the cards stands still. None of that is
waited for without end: a desktop may have no target, and a browser that restores its windows never stands still.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lllm3090d.bus.seats import SeatScene
from lllm3090d.planning.units import MIB, mib_text
from lllm3090d.serving.desktop import SESSION_TARGET
from lllm3090d.wire_wanted import Awaited

# Between two looks.
POLL_S = 1.0
# So long the memory has to stand still. Between a compositor's start and that of the panels and programs that a session
# starts with it lie one to three seconds.
STEADY_S = 5.0
# A change below this is none: cursors, menus and redrawn windows of a desktop at rest take and give back less.
TOLERANCE_BYTES = 64 * MIB
# A machine that is so busy that it is looked at less often tells nothing of the time between the looks.
LEAST_SAMPLES = 4
# A greeter or a desktop shows itself within this of the start of what it comes of, and of the end of one before it.
GRACE_S = 15.0
# So long a graphical session may take until its target is active; some desktops have none.
TARGET_S = 20.0
NOBODY = SeatScene()


class Target(enum.Enum):
    """How it stands with the target of the user's graphical session."""

    ABSENT = enum.auto()
    COMING = enum.auto()  # what comes before it is there
    ACTIVE = enum.auto()


class Ending(enum.StrEnum):
    """Why nothing is waited for any more."""

    OFF = "off"  # the settings say so, or there is no card that a desktop could be on
    NO_DESKTOP = "no-desktop"  # none is there, and none has come
    SETTLED = "settled"
    LIMIT = "limit"  # it took too long
    RELEASED = "released"  # the cards were given away
    SLEEP = "sleep"  # the machine goes to sleep
    DONE = "done"  # a person has loaded, or given up, all that waited


@dataclass(frozen=True, slots=True)
class Seen:
    """What is seen at one moment.

    Attributes:
        target: of the user's graphical session.
        seats: what logind tells of sessions; None where nobody tells.
        foreign_bytes: what others hold of each card that can be read, by its UUID; empty where none can.
        is_certain: the settings say that a desktop is there.
    """

    target: Target
    seats: SeatScene | None
    foreign_bytes: Mapping[str, int]
    is_certain: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """Models have to wait.

    Attributes:
        awaited: for what.
        why: that in words, as the end of a sentence.
        remaining_s: how long still at most.
    """

    awaited: Awaited
    why: str
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing is waited for any more.

    Attributes:
        ending: why.
        why: for a person.
    """

    ending: Ending
    why: str


class Settling:
    """One login.

    Args:
        began_s: when it was first looked at, on the monotonic clock.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._session_since_s: float | None = None  # a graphical session of this user has been there
        self._last_there_s: float | None = None  # any desktop was
        self._samples: deque[tuple[float, Mapping[str, int]]] = deque()

    def look(self, now_s: float, seen: Seen, limit_s: float) -> Waiting | Over:
        """What follows from what is seen now.

        Args:
            now_s: on the monotonic clock, never less than before.
            seen: at this moment.
            limit_s: how long models wait at most, from the beginning.
        """
        awaited = self._awaited(now_s, seen)
        if awaited is None:
            return Over(Ending.NO_DESKTOP, "no desktop is there, and none has come")
        if awaited is Awaited.MEMORY:
            self._remember(now_s, seen.foreign_bytes)
            if self._is_steady(now_s):
                held = mib_text(sum(seen.foreign_bytes.values()))
                return Over(Ending.SETTLED, f"other programs hold {held} MiB, unchanged for {STEADY_S:g} s")
        else:
            self._samples.clear()
        remaining_s = self._began_s + limit_s - now_s
        why = self._why(now_s, awaited)
        return Waiting(awaited, why, remaining_s) if remaining_s > 0 else Over(Ending.LIMIT, why)

    def _awaited(self, now_s: float, seen: Seen) -> Awaited | None:
        """What has to come next; None where there is no desktop and none will come."""
        seats = seen.seats or NOBODY
        if not seats.own_desktop:
            self._session_since_s = None
        elif seats.desktop_since_s is not None:  # the daemon may be started hours after the login
            self._session_since_s = min(seats.desktop_since_s, now_s)
        elif self._session_since_s is None:
            self._session_since_s = now_s
        if seats.own_desktop or seats.in_front or seen.target is not Target.ABSENT:
            self._last_there_s = now_s
        if seen.target is Target.ACTIVE:
            return Awaited.MEMORY
        if seen.target is Target.COMING:
            return Awaited.TARGET
        if self._session_since_s is not None:
            return Awaited.TARGET if now_s - self._session_since_s < TARGET_S else Awaited.MEMORY
        if seats.in_front:
            return Awaited.MEMORY  # somebody else's, or the greeter: its target is not ours to know
        if (seats.may_come or seen.is_certain) and now_s - self._chance_since_s(now_s, seats) < GRACE_S:
            return Awaited.SESSION
        return Awaited.MEMORY if seen.is_certain else None

    def _chance_since_s(self, now_s: float, seats: SeatScene) -> float:
        """Since when a desktop that is not there may come: a greeter, for one, goes a moment before it does."""
        told_s = seats.chance_since_s
        since_s = self._began_s if told_s is None else min(told_s, now_s)
        return since_s if self._last_there_s is None else max(since_s, self._last_there_s)

    def _remember(self, now_s: float, foreign_bytes: Mapping[str, int]) -> None:
        samples = self._samples
        if samples and samples[-1][1].keys() != foreign_bytes.keys():
            samples.clear()  # a card has come or gone, and with it what was known of the time before
        if foreign_bytes:
            samples.append((now_s, dict(foreign_bytes)))
        while len(samples) > 1 and now_s - samples[1][0] >= STEADY_S:
            samples.popleft()

    def _is_steady(self, now_s: float) -> bool:
        samples = self._samples
        return (
            len(samples) >= LEAST_SAMPLES
            and now_s - samples[0][0] >= STEADY_S
            and self._range_bytes() <= TOLERANCE_BYTES
        )

    def _range_bytes(self) -> int:
        """Between the least and the most that others held, of the card where that is most."""
        cards = self._samples[-1][1]
        held = ([each[card] for _, each in self._samples] for card in cards)
        return max((max(each) - min(each) for each in held), default=0)

    def _why(self, now_s: float, awaited: Awaited) -> str:
        match awaited:
            case Awaited.SESSION:
                return "no graphical session has begun yet"
            case Awaited.TARGET:
                return f"{SESSION_TARGET} is not active yet"
        if not self._samples:
            return "no card can be read"
        moved = self._range_bytes()
        if moved > TOLERANCE_BYTES:
            within_s = round(now_s - self._samples[0][0])
            return f"what other programs hold of the card has changed by {mib_text(moved)} MiB within {within_s} s"
        return f"what other programs hold of the card has to stand still for {STEADY_S:g} s"
