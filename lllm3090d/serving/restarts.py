"""Whether a model that ended by itself is started again, and when. Pure: the caller keeps the history and the clock.

A wanted model is started again after a delay that grows with each end in a row. It is latched, which means that it
stays down until a person resets it, where trying again cannot help, where it has tried often enough, where it hung
again, and where it ran out of device memory once more although the second plan was smaller. A run that served for long
begins a new row.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from lllm3090d.engines.crash_causes import KINDS, CrashCause, Retry
from lllm3090d.serving.commands import CTL


@dataclass(frozen=True, slots=True)
class End:
    """A run of a model that ended by itself.

    Attributes:
        at_s: when, on one clock for the whole history, such as CLOCK_BOOTTIME.
        cause: why.
        served_s: for how long it was ready; 0 where it never was.
        run: the launch that ended; empty where that does not matter.
    """

    at_s: float
    cause: CrashCause
    served_s: float = 0.0
    run: str = ""


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again.

    Attributes:
        delay_s: seconds from the end, and not before its memory is back.
        attempt: which start in a row this is, from 1.
        smaller: with a plan that is smaller than the one that failed.
    """

    delay_s: float
    attempt: int
    smaller: bool = False


@dataclass(frozen=True, slots=True)
class Latch:
    """Leave it down.

    Attributes:
        reason: why, a sentence without its full stop.
        way_out: what a person can do.
    """

    reason: str
    way_out: str


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patient to be.

    Attributes:
        base_s: seconds before the first start.
        factor: by which each next delay of a row is longer.
        cap_s: longest delay.
        most_ends: so many ends within the window latch it.
        window_s: seconds; ends before it do not count, but those of starts that never served do.
        healthy_s: a run that served for so long begins a new row.
    """

    base_s: float = 1.0
    factor: float = 4.0
    cap_s: float = 300.0
    most_ends: int = 5
    window_s: float = 1800.0
    healthy_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what would never wait, or never end."""
        if not (0 < self.base_s <= self.cap_s and self.factor >= 1 and math.isfinite(self.cap_s)):
            raise ValueError(f"delays must be above 0 and must not shrink: {self}")
        if self.most_ends < 1 or self.window_s <= 0 or self.healthy_s <= 0:
            raise ValueError(f"a window of ends must hold at least one: {self}")

    def after(self, name: str, history: Sequence[End], end: End) -> Again | Latch:
        """What follows from an end.

        Args:
            name: of the model, for the way out.
            history: earlier ends since the last reset, oldest first.
            end: the one that has just come; its time is now.
        """
        kind = KINDS[end.cause]
        reset = shlex.join([CTL, "reset", name])
        if kind.retry is Retry.NEVER:
            return Latch(
                f"the engine {kind.title}, which trying again does not change",
                f"{kind.advice} Then: {reset}",
            )
        row = self._row(history, end)
        if kind.retry is Retry.SMALLER_ONCE:
            if any(each.cause is end.cause for each in row[:-1]):
                return Latch(
                    f"the engine {kind.title} again, with the smaller plan too",
                    f"{kind.advice} Then: {reset}",
                )
            return Again(self._delay_s(len(row)), len(row), smaller=True)
        if kind.retry is Retry.ONCE and any(each.cause is end.cause for each in row[:-1]):
            return Latch(
                f"the engine {kind.title}, and so it had before its last start",
                f"{kind.advice} Then: {reset}",
            )
        counted = sum(1 for each in row if each.served_s <= 0 or end.at_s - each.at_s < self.window_s)
        if counted >= self.most_ends:
            return Latch(
                f"the engine ended {counted} times; the last time it {kind.title}",
                f"{kind.advice} Then: {reset}",
            )
        return Again(self._delay_s(len(row)), len(row))

    def _row(self, history: Sequence[End], end: End) -> Sequence[End]:
        """The ends in a row, this one last: from the last run that served for long, which is its first."""
        row = [*history, end]
        for index in range(len(row) - 1, -1, -1):
            if row[index].served_s >= self.healthy_s:
                return row[index:]
        return row

    def _delay_s(self, attempt: int) -> float:
        # Beyond this exponent every delay is the longest, and a power would overflow.
        steps = min(attempt - 1, 64)
        return float(min(self.cap_s, self.base_s * self.factor**steps)) if self.factor > 1 else self.base_s
