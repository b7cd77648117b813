"""The events of this daemon's life: a bounded list with numbers, and subscribers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

from lllm3090d.serving.instance import InstanceState
from lllm3090d.wire import Event, EventKind

KEPT_EVENTS = 2000
# A subscriber that does not read is cut off, so that it cannot hold the daemon's memory.
SUBSCRIBER_BACKLOG = 1000


def time_text(realtime_us: int) -> str:
    """A moment in UTC, RFC 3339 with milliseconds; microseconds since 1970."""
    moment = datetime.fromtimestamp(realtime_us / 1_000_000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def now_text() -> str:
    """The wall clock in UTC, RFC 3339 with milliseconds."""
    return time_text(time.time_ns() // 1000)


class History:
    """Numbered events, newest last."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._subscribers: set[asyncio.Queue[Event | None]] = set()
        self._closed = False
        self._seq = 0

    def add(
        self,
        kind: EventKind,
        *,
        model: str | None = None,
        run: str | None = None,
        state: InstanceState | None = None,
        previous: InstanceState | None = None,
        message: str = "",
        details: dict[str, Any] | None = None,
    ) -> Event:
        """Number an event, keep it, tell the subscribers."""
        self._seq += 1
        event = Event(
            seq=self._seq,
            at=now_text(),
            kind=kind,
            model=model,
            run=run,
            state=state,
            previous=previous,
            message=message,
            details=details or {},
        )
        # Progress is news only while it happens; kept, it would push out what matters.
        if kind is not EventKind.PROGRESS:
            self._events.append(event)
        for queue in tuple(self._subscribers):
            if queue.qsize() < SUBSCRIBER_BACKLOG:
                queue.put_nowait(event)
            else:
                # What it has is without a gap, so it can come back for what follows its last number.
                self._subscribers.discard(queue)
                queue.put_nowait(None)
        return event

    def since(self, seq: int) -> tuple[Event, ...]:
        """Kept events with a greater number."""
        return tuple(event for event in self._events if event.seq > seq)

    async def follow(self, seq: int) -> AsyncGenerator[Event, None]:
        """Kept events with a greater number, then new ones as they come, until the history is closed."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        past = self.since(seq)
        if self._closed:
            queue.put_nowait(None)
        else:
            self._subscribers.add(queue)
        try:
            for event in past:
                yield event
            while (new := await queue.get()) is not None:
                yield new
        finally:
            self._subscribers.discard(queue)

    def close(self) -> None:
        """End every subscription, and those that are still to come after the kept events."""
        self._closed = True
        for queue in self._subscribers:
            queue.put_nowait(None)
