"""What happened since the daemon started, counted. Plain numbers; :mod:`lllm3090d.serving.metrics` tells them."""

from __future__ import annotations

import enum
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lllm3090d.errors import ErrorCode

# Upper bounds, seconds: a small model from memory takes one, a large one from a slow disk minutes.
LOAD_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
WAIT_SECONDS = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class LoadOutcome(enum.StrEnum):
    """How a load ended; what was refused is counted by its code instead."""

    READY = "ready"
    FAILED = "failed"


class QueueOutcome(enum.StrEnum):
    """What became of a load that waited for room."""

    SERVED = "served"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Histogram:
    """How often a duration was at most so long.

    Attributes:
        bounds: upper bounds, seconds, ascending; above the last there is one bucket more.
        counts: of each bucket, not added up.
        sum_s: of all durations.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        """No bucket is missing."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        """One duration more; a negative one, of a clock that was set, counts as none."""
        seconds = max(0.0, seconds)
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """Of all durations."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bound as text, and how many durations are at most so long; the last is ``+Inf``."""
        reached, rows = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            reached += count
            rows.append((bound, reached))
        return rows


class Statistics:
    """Counters of one daemon process; only the writer's side changes them.

    Attributes:
        started_s: seconds since 1970.
        loads: by outcome.
        refusals: by code.
        evictions: by model and cause.
        load_seconds: from admission to ready, by model.
        waits: of loads that waited for room, by outcome.
        waiting: loads that wait now, by what was counted here; the scheduler's own list is what counts.
        estimate_errors: of each model that was measured the last measured/quoted - 1.
    """

    def __init__(self, started_s: float | None = None) -> None:
        self.started_s = time.time() if started_s is None else started_s
        self.loads: Counter[LoadOutcome] = Counter()
        self.refusals: Counter[ErrorCode] = Counter()
        self.evictions: Counter[tuple[str, str]] = Counter()
        self.load_seconds: dict[str, Histogram] = {}
        self.waits: dict[QueueOutcome, Histogram] = {}
        self.waiting = 0
        self.estimate_errors: dict[str, float] = {}

    def refused(self, code: ErrorCode) -> None:
        """A load was refused before anything was started."""
        self.refusals[code] += 1

    def loaded(self, name: str, seconds: float) -> None:
        """A model became ready so long after it was admitted."""
        self.loads[LoadOutcome.READY] += 1
        self.load_seconds.setdefault(name, Histogram(LOAD_SECONDS)).add(seconds)

    def failed(self) -> None:
        """A load that had been admitted did not come up."""
        self.loads[LoadOutcome.FAILED] += 1

    def evicted(self, name: str, cause: str) -> None:
        """A model was unloaded for another one, or for somebody else.

        Args:
            name: of the model.
            cause: a short stable word such as ``load``, ``pressure`` or ``release``: it becomes a label.
        """
        self.evictions[name, cause] += 1

    def queued(self) -> None:
        """A load began to wait for room."""
        self.waiting += 1

    def dequeued(self, seconds: float, outcome: QueueOutcome) -> None:
        """A load has waited so long, and is decided."""
        self.waiting = max(0, self.waiting - 1)
        self.waits.setdefault(outcome, Histogram(WAIT_SECONDS)).add(seconds)

    def measured(self, name: str, quoted: int, measured: int) -> None:
        """A model was seen to take so many bytes of what was quoted; without a quote there is no error to tell."""
        if quoted > 0:
            self.estimate_errors[name] = measured / quoted - 1
