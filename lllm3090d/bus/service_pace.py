"""How fast calls over the bus are begun: a few at once, many one after the other, and no client before all others.

Every call takes a millisecond or two of the one event loop that serves all surfaces. So a client that calls without end
must leave most of its time to the others, and to the models' requests that pass through it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

BURST = 64  # calls that are begun at once after a quiet time
INTERVAL_S = 0.01  # then one in this time
Work = Callable[[], None]


class Pace:
    """Begins what is added, in turn for each client.

    Args:
        burst: how much at once, after a time without any.
        interval_s: between two when that is used up.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        burst: int = BURST,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._interval_s = interval_s
        self._clock = clock
        self._allowance, self._counted_s = float(burst), clock()
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()  # by client, the next one first
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def add(self, client: str, work: Work) -> None:
        """Begin ``work`` when it is its turn, at once where nobody waits."""
        self._waiting.setdefault(client, deque()).append(work)
        self._count += 1
        if self._timer is None:
            self._serve()

    def begin_all(self) -> None:
        """Begin whatever waits: the end is near."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        while self._waiting:
            self._next()()

    def _serve(self) -> None:
        self._timer = None
        now_s = self._clock()
        earned = (now_s - self._counted_s) / self._interval_s
        self._allowance, self._counted_s = min(self._burst, self._allowance + earned), now_s
        while self._waiting and self._allowance >= 1:
            self._allowance -= 1
            self._next()()
        if self._waiting:
            missing_s = (1 - self._allowance) * self._interval_s
            self._timer = asyncio.get_running_loop().call_later(missing_s, self._serve)

    def _next(self) -> Work:
        client, works = self._waiting.popitem(last=False)
        self._count -= 1
        work = works.popleft()
        if works:
            self._waiting[client] = works  # behind all others
        return work
