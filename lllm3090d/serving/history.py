"""The events: numbered, kept in memory and recorded, and told to subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticSerializationError

from lllm3090d.errors import LlmError
from lllm3090d.serving.event_table import EventTable, Numbers, row_of
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.moments import now_text, now_us, time_text
from lllm3090d.serving.recorder import Gap, Recorder
from lllm3090d.serving.unrecorded import Unrecorded
from lllm3090d.wire import Actor, ActorKind, Event, EventKind

__all__ = ["History", "Since", "now_text", "time_text"]

KEPT_EVENTS = 2000
# A subscriber that does not read is cut off, so that it cannot hold the daemon's memory.
SUBSCRIBER_BACKLOG = 1000
PAGE = 500
MODEL_EVENTS = 5000  # of one model, that its runs are read from
LONGEST_MESSAGE = 4000  # characters
MOST_DETAILS_CHARACTERS = 32_000
DAEMON = Actor(kind=ActorKind.DAEMON)


@dataclass(frozen=True, slots=True)
class Since:
    """Which of the past are wanted.

    Attributes:
        seq: only greater numbers.
        from_us: none older, microseconds since 1970.
        last: how many at most, the newest of them; None for all.
    """

    seq: int = 0
    from_us: int = 0
    last: int | None = None


EVERYTHING = Since()


class History:
    """Numbered events, newest last. Those of earlier daemons are in the table alone.

    Args:
        table: where they are recorded; None keeps them in memory alone.
        unrecorded: tells the next daemon where they could not be recorded.
    """

    def __init__(self, table: EventTable | None = None, unrecorded: Unrecorded | None = None) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._subscribers: set[asyncio.Queue[Event | None]] = set()
        self._closed = False
        self._seq = 0
        self._cause = DAEMON
        self._table = table
        self._unrecorded = unrecorded
        self._recorder: Recorder | None = None

    async def open(self) -> Numbers | None:
        """Go on behind what was recorded, and record from now on; what the last daemon left."""
        if self._table is None:
            return None
        self._recorder = Recorder(self._table, self._tell_gap, self._unrecorded)
        numbers = await self._recorder.open()
        self._seq = numbers.next - 1
        return numbers

    @contextlib.contextmanager
    def caused_by(self, actor: Actor) -> Iterator[None]:
        """Who causes what is added meanwhile; for code that does not await."""
        previous, self._cause = self._cause, actor
        try:
            yield
        finally:
            self._cause = previous

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
        actor: Actor | None = None,
    ) -> Event:
        """Number an event, keep it, record it, tell the subscribers; never waits."""
        self._seq += 1
        at_us = now_us()
        event = Event(
            seq=self._seq,
            at=time_text(at_us),
            kind=kind,
            model=model,
            run=run,
            state=state,
            previous=previous,
            actor=actor or self._cause,
            message=message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + "...",
            details=_bounded(details or {}),
        )
        event = _sendable(event)
        # Progress is news only while it happens; kept, it would push out what matters.
        if kind is not EventKind.PROGRESS:
            self._events.append(event)
            if self._recorder is not None:
                self._recorder.take(row_of(event, at_us))
        elif self._recorder is not None:
            self._recorder.numbered(event.seq)
        for queue in tuple(self._subscribers):
            if queue.qsize() < SUBSCRIBER_BACKLOG:
                queue.put_nowait(event)
            else:
                # What it has is without a gap, so it can come back for what follows its last number.
                self._subscribers.discard(queue)
                queue.put_nowait(None)
        return event

    # --- reading ------------------------------------------------------------------------------------------------

    def since(self, seq: int) -> tuple[Event, ...]:
        """Events in memory with a greater number."""
        return tuple(event for event in self._events if event.seq > seq)

    async def past(self, since: Since = EVERYTHING) -> AsyncGenerator[Event, None]:
        """What has happened, as far as it is kept, oldest first."""
        async with contextlib.aclosing(self._bounded_past(since, tuple(self._events))) as events:
            async for event in events:
                yield event

    async def follow(self, since: Since | int = EVERYTHING) -> AsyncGenerator[Event, None]:
        """What has happened, then new events as they come, until the history is closed."""
        wanted = Since(seq=since) if isinstance(since, int) else since
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        in_memory = tuple(self._events)
        if self._closed:
            queue.put_nowait(None)
        else:
            self._subscribers.add(queue)
        try:
            async with contextlib.aclosing(self._bounded_past(wanted, in_memory)) as events:
                async for event in events:
                    yield event
            while (new := await queue.get()) is not None:
                yield new
        finally:
            self._subscribers.discard(queue)

    async def follow_on(self, since: Since) -> AsyncGenerator[Event, None]:
        """As :meth:`follow`; where it is cut off because its reader was slow, it goes on where it was."""
        seq = -1
        while True:
            before = seq
            async with contextlib.aclosing(self.follow(since)) as events:
                async for event in events:
                    seq = event.seq
                    yield event
            if seq == before:  # the history has ended
                return
            since = Since(seq=seq)

    async def of_model(self, model: str) -> tuple[Event, ...]:
        """The events of a model, as far as they are kept, but changes between ready and busy in older ones."""
        recorded = await self._read(lambda table: table.of_model(model, MODEL_EVENTS))
        found = {event.seq: event for event in recorded}
        found |= {event.seq: event for event in self._events if event.model == model}
        return tuple(found[seq] for seq in sorted(found))

    async def models(self) -> tuple[str, ...]:
        """Names of all models that events are kept of."""
        names = set(await self._read(lambda table: table.models()))
        return tuple(sorted(names | {event.model for event in self._events if event.model is not None}))

    def problem(self) -> LlmError | None:
        """Why what happens is not recorded now; None where it is, or is not meant to be."""
        return self._recorder.problem() if self._recorder is not None else None

    async def _bounded_past(self, since: Since, in_memory: tuple[Event, ...]) -> AsyncGenerator[Event, None]:
        if since.last is None:
            async with contextlib.aclosing(self._whole_past(since, in_memory)) as events:
                async for event in events:
                    yield event
            return
        before = in_memory[0].seq if in_memory else self._seq + 1
        newest = _wanted(in_memory, since)[-since.last :] if since.last else []
        missing = since.last - len(newest)
        if missing and since.seq < before - 1:
            recorded = await self._read(
                lambda table: table.newest(missing, since.seq, before, since.from_us)
            )
            newest = [*recorded, *newest]
        for event in newest:
            yield event

    async def _whole_past(self, since: Since, in_memory: tuple[Event, ...]) -> AsyncGenerator[Event, None]:
        before = in_memory[0].seq if in_memory else self._seq + 1
        seq = since.seq
        while page := await self._page(seq, before, since.from_us):
            for event in page:
                yield event
            seq = page[-1].seq
        for event in _wanted(in_memory, since):
            yield event

    async def _page(self, seq: int, before: int, from_us: int) -> tuple[Event, ...]:
        if seq >= before - 1:
            return ()
        return await self._read(lambda table: table.after(seq, before, from_us, PAGE))

    async def _read(self, work: Callable[[EventTable], tuple[Any, ...]]) -> tuple[Any, ...]:
        if self._recorder is None or self._table is None:
            return ()
        return await self._recorder.read(work, self._table)

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every subscription, and those that are still to come after the kept events."""
        self._closed = True
        for queue in self._subscribers:
            queue.put_nowait(None)

    async def end(self) -> None:
        """Record what is not yet recorded, and nothing from now on."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            await recorder.close()

    def _tell_gap(self, gap: Gap) -> None:
        self.add(
            EventKind.GAP,
            actor=DAEMON,
            message=gap.text,
            details={
                "count": gap.count,
                "first_seq": gap.first_seq,
                "last_seq": gap.last_seq,
                "from": time_text(gap.first_us),
                "to": time_text(gap.last_us),
            },
        )


def _wanted(events: Iterable[Event], since: Since) -> list[Event]:
    earliest = time_text(since.from_us)
    return [event for event in events if event.seq > since.seq and event.at >= earliest]


def _sendable(event: Event) -> Event:
    """The event as JSON can carry it: a name that is no UTF-8 must not end the writer, nor a follower's stream."""
    try:
        event.model_dump_json()
    except PydanticSerializationError:
        details = json.dumps(event.details, ensure_ascii=False, default=str, skipkeys=True)
        changed = {
            "model": _escaped(event.model) if event.model is not None else None,
            "message": _escaped(event.message),
            "details": json.loads(details.encode("utf-8", "replace")),
        }
        return event.model_copy(update=changed)
    return event


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _bounded(details: dict[str, Any]) -> dict[str, Any]:
    """Details that no event makes too large to keep; of those that would be, what is small."""
    if len(repr(details)) <= MOST_DETAILS_CHARACTERS:
        return details
    small = {
        key: value for key, value in details.items() if len(repr(value)) <= MOST_DETAILS_CHARACTERS // 16
    }
    return {**small, "left_out": sorted(details.keys() - small.keys())}
