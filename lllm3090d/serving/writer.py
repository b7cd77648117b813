"""The one writer: takes events in the order of their coming, each to its end before the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from lllm3090d.serving.events import Event

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A question to the writer: are you alive?"""

    answer: asyncio.Future[None]


class Writer:
    """Applies events, once it has been started.

    Args:
        apply: what is done with an event; at once, without waiting for anything.
        failed: set to what ended the writer, unless it was cancelled, or something else has failed before.
    """

    def __init__(self, apply: Callable[[Event], None], failed: asyncio.Future[None]) -> None:
        self._apply = apply
        self._failed = failed
        self._queue: asyncio.Queue[Event | Heartbeat] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_at_work(self) -> bool:
        """It was started, and nobody has asked it to end."""
        return self._task is not None and not self._task.cancelling()

    def submit(self, event: Event) -> None:
        """Put an event behind all that wait; also before the start."""
        self._queue.put_nowait(event)

    async def answers(self) -> None:
        """Return once the writer has come to a question that is put behind all that waits for it."""
        beat = Heartbeat(asyncio.get_running_loop().create_future())
        self._queue.put_nowait(beat)
        await beat.answer

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._write(), name="writer")
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Ask it to end; what waits for it is not applied any more."""
        if self._task is not None:
            self._task.cancel()

    async def _write(self) -> None:
        while True:
            item = await self._queue.get()
            if isinstance(item, Heartbeat):
                if not item.answer.done():
                    item.answer.set_result(None)
                continue
            self._apply(item)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._failed.done():
            error = task.exception()
            # A scheduler that contradicts itself must not go on: end, be restarted, and adopt what runs.
            log.critical("the writer ended", exc_info=error)
            self._failed.set_exception(error or RuntimeError("the writer returned"))
