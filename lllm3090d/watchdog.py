"""Feeding systemd's watchdog for as long as the parts that must live are alive, and saying which one is not.

A ping from a timer proves nothing, so each is the answer of all parts, asked side by side: the writer, each thread that
talks to a bus, each surface. What waits for something outside is no part: a disk, a driver, an engine and a bus that is
gone are waited for beside the loop, or with a limit of their own, and a new daemon would wait for them just the same.

systemd counts on CLOCK_MONOTONIC, and so does everything here: a jump of the wall clock changes nothing, and a suspend,
in which that clock stands still, takes nothing from the limit.

Of the limit a round is a third, and a part has one round to answer. One that gets stuck is so noticed after two
thirds of it at the latest, while there is still somebody to say so. Where it is the event loop that stands still, a
thread of its own says it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.errors import LlmError
from lllm3090d.notify import Notifier

log = logging.getLogger(__name__)

ROUNDS = 3  # in the limit that systemd sets
EVENT_LOOP = "the event loop"
OWN_SHARE = 0.9  # of a round, for a part to say itself that it does not answer, and why
FRAMES = 4  # innermost calls of a thread that are told


class CannotAskError(Exception):
    """A part cannot be asked, for a reason that a new daemon would meet too: said, and the feeding goes on."""


@dataclass(frozen=True, slots=True)
class Part:
    """What must live.

    Attributes:
        name: for a person, to be followed by "is stuck".
        ask: returns once the part has answered. Takes the seconds in which it should; must not block. Raises LlmError
            where the part does not answer, CannotAskError where nobody can tell.
        thread: identifier of the thread that it lives on; None for the event loop's.
    """

    name: str
    ask: Callable[[float], Awaitable[None]]
    thread: Callable[[], int | None] = lambda: None


class Life(enum.Enum):
    """What is found of a part."""

    ALIVE = enum.auto()
    UNASKED = enum.auto()  # nobody can tell, and a new daemon would not help
    STUCK = enum.auto()


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a part, and why it is not alive."""

    part: str
    life: Life
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What becomes of a round.

    Attributes:
        feed: whether the watchdog is fed.
        trouble: what is said; None where all is well.
    """

    feed: bool
    trouble: str | None


def judge(findings: Iterable[Finding]) -> Judgement:
    """One part that is stuck stops the feeding; one that cannot be asked is only told."""
    stuck, unasked = [], []
    for each in findings:
        if each.life is Life.STUCK:
            stuck.append(f"{each.part} is stuck ({each.reason})")
        elif each.life is Life.UNASKED:
            unasked.append(f"{each.part} cannot be asked ({each.reason})")
    if stuck:
        after = ", and will be restarted by systemd unless that ends; models go on"
        return Judgement(feed=False, trouble="; ".join([*stuck, *unasked]) + after)
    return Judgement(feed=True, trouble="; ".join(unasked) or None)


async def look(part: Part, limit_s: float) -> Finding:
    """Ask a part, and wait no longer than the limit."""
    try:
        async with asyncio.timeout(limit_s):
            await part.ask(limit_s * OWN_SHARE)
    except TimeoutError:
        return Finding(part.name, Life.STUCK, f"no answer within {limit_s:g} s")
    except LlmError as error:
        return Finding(part.name, Life.STUCK, error.message)
    except CannotAskError as error:
        return Finding(part.name, Life.UNASKED, str(error))
    return Finding(part.name, Life.ALIVE)


def where(thread: int | None) -> str:
    """What a thread is doing: its innermost calls, the last one first; empty if there is none."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    calls: list[str] = []
    while frame is not None and len(calls) < FRAMES:
        code = frame.f_code
        calls.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(calls)


class LoopWitness:
    """A thread that says when the event loop stands still, which the loop itself cannot.

    Args:
        patience_s: after a beat.
        tell: called on that thread, once for each standstill, with what the loop's thread is doing.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        patience_s: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience_s = patience_s
        self._tell = tell
        self._clock = clock
        self._loop_thread = threading.get_ident()
        self._beat_s = clock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch; on the loop's thread."""
        self._thread.start()

    def beat(self) -> float:
        """The loop turns. Seconds since the beat before."""
        now_s = self._clock()
        since_s, self._beat_s = now_s - self._beat_s, now_s
        return since_s

    def stop(self) -> None:
        """Watch no more; returns at once."""
        self._stopped.set()

    def _watch(self) -> None:
        told_s: float | None = None
        wait_s = self._patience_s
        while not self._stopped.wait(wait_s):
            beat_s = self._beat_s
            wait_s = beat_s + self._patience_s - self._clock()
            if wait_s > 0:
                continue
            if told_s != beat_s:
                told_s = beat_s
                self._tell(where(self._loop_thread))
            wait_s = self._patience_s


class Watchdog:
    """Asks the parts and feeds systemd's watchdog.

    Args:
        parts: what must live.
        notifier: tells systemd.
        limit_s: ``WatchdogSec``; without a ping for so long systemd ends the daemon.
        tell: called on the event loop with what is new to say, for the history.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        notifier: Notifier,
        limit_s: float,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._parts = tuple(parts)
        self._notifier = notifier
        self._round_s = limit_s / ROUNDS
        self._tell = tell
        self._trouble: str | None = None
        self._stood_still = False

    async def run(self) -> None:
        """Feed until cancelled."""
        witness = LoopWitness(2 * self._round_s, self._loop_stands_still)
        witness.start()
        loop = asyncio.get_running_loop()
        try:
            while True:
                begun_s = loop.time()
                self._back(witness.beat())
                findings = await asyncio.gather(*(look(part, self._round_s) for part in self._parts))
                self._conclude(judge(findings), findings)
                await asyncio.sleep(max(0.0, begun_s + self._round_s - loop.time()))
        finally:
            witness.stop()

    def _conclude(self, judgement: Judgement, findings: Sequence[Finding]) -> None:
        if judgement.feed:
            self._notifier.feed()
        if judgement.trouble == self._trouble:
            return
        self._trouble = judgement.trouble
        self._notifier.trouble(judgement.trouble)
        if judgement.trouble is None:
            log.info("all parts of the daemon answer again")
            self._tell("all parts of the daemon answer again")
            return
        doing = {
            finding.part: where(part.thread() or threading.get_ident())
            for part, finding in zip(self._parts, findings, strict=True)
            if finding.life is Life.STUCK
        }
        level = logging.WARNING if judgement.feed else logging.CRITICAL
        log.log(level, "%s", judgement.trouble, extra={"doing": doing} if doing else {})
        self._tell(judgement.trouble)

    def _loop_stands_still(self, doing: str) -> None:
        """On the witness's thread."""
        self._stood_still = True
        reason = f"it has not turned for {2 * self._round_s:g} s"
        trouble = judge((Finding(EVENT_LOOP, Life.STUCK, reason),)).trouble
        self._notifier.trouble(trouble)
        log.critical("%s", trouble, extra={"doing": doing})

    def _back(self, since_s: float) -> None:
        if self._stood_still:
            self._stood_still = False
            self._notifier.trouble(self._trouble)
            text = f"{EVENT_LOOP} stood still for {since_s:.1f} s"
            log.error("%s", text)
            self._tell(text)
