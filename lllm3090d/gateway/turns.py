"""Whose turn it is: as many requests of a model at a time as it has slots, the others in the order of their coming.

An engine has a line of its own, but nobody can look into it, leave it, or be let past.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from lllm3090d.errors import ErrorCode, LlmError


class Priority(enum.IntEnum):
    """Classes of requests; within one the order of coming holds."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class Turns:
    """The line of one model.

    Args:
        name: of the model.
        slots: requests that it works on at a time.
    """

    def __init__(self, name: str, slots: int) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._waiting: list[_Waiting] = []
        self._recent_s: deque[float] = deque(maxlen=8)  # how long the last requests held a slot
        self.slots = slots
        self.in_work = 0

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return sum(not each.turn.done() for each in self._waiting)

    @asynccontextmanager
    async def turn(self, priority: Priority, most_waiting: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it.

        Args:
            priority: of the request.
            most_waiting: in the line; one more is refused.

        Raises:
            LlmError: TOO_MANY_REQUESTS.
        """
        await self._wait(priority, most_waiting)
        began = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._recent_s.append(asyncio.get_running_loop().time() - began)
            self._give_on()

    async def _wait(self, priority: Priority, most_waiting: int) -> None:
        if self.in_work < self.slots and not self.waiting:
            self.in_work += 1
            return
        if self.waiting >= most_waiting:
            raise self._full(most_waiting)
        entry = _Waiting(priority, next(self._numbers), asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, entry)
        try:
            await entry.turn
        except asyncio.CancelledError:
            if entry.turn.done() and not entry.turn.cancelled():  # it was given a slot in the same moment
                self._give_on()
            elif entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def resize(self, slots: int) -> None:
        """The model was loaded anew with other slots."""
        self.slots = slots
        while self.in_work < self.slots and self._next():
            self.in_work += 1

    def _give_on(self) -> None:
        """The slot goes to the next in line, if there is one."""
        if self.in_work > self.slots or not self._next():
            self.in_work -= 1

    def _next(self) -> bool:
        while self._waiting:
            entry = heapq.heappop(self._waiting)
            if not entry.turn.done():
                entry.turn.set_result(None)
                return True
        return False

    def _full(self, most_waiting: int) -> LlmError:
        recent = sum(self._recent_s) / len(self._recent_s) if self._recent_s else 5.0
        return LlmError(
            ErrorCode.TOO_MANY_REQUESTS,
            f"{self._name} works on {self.in_work} requests, and {most_waiting} wait for their turn.",
            hint="Try again later, or raise gateway_queue.",
            retry_after_s=max(1, min(60, round(recent))),
            in_work=self.in_work,
            waiting=self.waiting,
        )
