"""Requests that have ended, recorded beside the event loop, and told to those who follow.

They wait in memory and go to the state file in batches, from a thread of their own. While that fails they go on
waiting, up to a bound; the oldest beyond it are lost and counted. No request waits for any of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.record import Outcome, Record
from lllm3090d.gateway.request_table import Ended, RequestTable, Wanted, view_of
from lllm3090d.serving.moments import now_us
from lllm3090d.wire_requests import RequestView

log = logging.getLogger(__name__)
T = TypeVar("T")

BATCH_S = 0.5  # what a killed daemon may lose
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
CLOSE_S = 3.0  # for a disk that does not answer
WAITING_MOST = 10_000
# A follower that does not read is cut off, so that it cannot hold the daemon's memory.
FOLLOWER_BACKLOG = 1000


class RequestLog:
    """Takes records on the loop and writes them beside it. Needs a running loop from the first record on.

    Args:
        table: where they are written.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Ended] = deque()
        self._writing: tuple[Ended, ...] = ()
        self._lost = 0
        self._failures = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._followers: set[asyncio.Queue[Ended | None]] = set()
        self._closed = False

    def take(self, record: Record) -> None:
        """Record a request that has ended, soon. What loaded nothing and asked no model is left out if it went well."""
        if self._closed or (record.outcome is Outcome.SERVED and not record.model):
            return
        ended = Ended(now_us(), record)
        self._waiting.append(ended)
        self._lose_what_is_beyond()
        for queue in tuple(self._followers):
            if queue.qsize() < FOLLOWER_BACKLOG:
                queue.put_nowait(ended)
            else:
                self._followers.discard(queue)
                queue.put_nowait(None)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="requests")
            self._task.add_done_callback(self._ended)
        self._wake.set()

    def problem(self) -> LlmError | None:
        """Why requests are not recorded now; None where they are."""
        if not self._failures:
            return None
        lost = f" {self._lost} are lost." if self._lost else ""
        return LlmError(
            ErrorCode.STATE_UNUSABLE,
            f"Requests are answered and not recorded: {self._table.problem} {len(self._waiting)} wait for that.{lost}",
            hint="Check the space on the disk of state_dir, and its permissions.",
            waiting=len(self._waiting),
            lost=self._lost,
        )

    async def past(self, wanted: Wanted) -> tuple[RequestView, ...]:
        """The last that have ended, oldest first, those that wait to be written among them."""
        unwritten = (*self._writing, *self._waiting)
        written = await self._beside(lambda: self._table.newest(wanted))
        known = {view.request_id for view in written}
        views = (
            view_of(each) for each in unwritten if wanted.takes(each) and each.record.request_id not in known
        )
        return (*written, *views)[-wanted.last :] if wanted.last else ()

    async def follow(self, wanted: Wanted) -> AsyncGenerator[RequestView, None]:
        """The same, then others as they end, until the log is closed."""
        queue: asyncio.Queue[Ended | None] = asyncio.Queue()
        if self._closed:
            queue.put_nowait(None)
        else:
            self._followers.add(queue)
        try:
            past = await self.past(wanted)
            for view in past:
                yield view
            told = {view.request_id for view in past}
            while (new := await queue.get()) is not None:
                if wanted.takes(new) and new.record.request_id not in told:
                    yield view_of(new)
        finally:
            self._followers.discard(queue)

    async def models(self) -> tuple[str, ...]:
        """Names of all models that recorded requests were for."""
        unwritten = {each.record.model for each in (*self._writing, *self._waiting) if each.record.model}
        return tuple(sorted(unwritten.union(await self._beside(self._table.models))))

    async def flush(self) -> None:
        """Write what waits, once; what cannot be written goes on waiting."""
        if self._waiting:
            await self._write()

    def end_following(self) -> None:
        """End every stream of those who follow, and take no more."""
        self._closed = True
        for queue in self._followers:
            queue.put_nowait(None)

    async def close(self) -> None:
        """Write what waits; what cannot be written now is lost."""
        self.end_following()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        if self._waiting:
            log.error(
                "requests could not be recorded",
                extra={"count": len(self._waiting), "reason": self._table.problem},
            )
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            retry_s = min(FIRST_RETRY_S * 2.0 ** max(0, self._failures - 1), LAST_RETRY_S)
            await asyncio.sleep(retry_s if self._failures else BATCH_S)
            await self._write()

    async def _write(self) -> None:
        self._wake.clear()
        self._writing = tuple(self._waiting)
        self._waiting.clear()
        written = False
        try:
            written = await self._beside(lambda: self._table.write(self._writing))
        finally:
            batch, self._writing = self._writing, ()
            if not written:  # also when cancelled
                self._waiting.extendleft(reversed(batch))
                self._lose_what_is_beyond()
                self._wake.set()
        if written and self._failures:
            log.info("requests are recorded again")
            if self._lost:
                log.error("%d requests were not recorded", self._lost)
            self._failures = self._lost = 0
        elif not written:
            self._failures += 1
            if self._failures == 1:
                log.error("requests are not recorded", extra={"reason": self._table.problem})

    def _lose_what_is_beyond(self) -> None:
        while len(self._waiting) > WAITING_MOST:
            self._waiting.popleft()
            self._lost += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nothing of this may end the daemon, and nothing may be hidden."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures += 1
            self._table.problem = f"The daemon made a mistake: {error}."
            log.critical("requests are no longer recorded", exc_info=error)

    async def _beside(self, work: Callable[[], T]) -> T:
        # Made when it is needed: most daemons that start are not asked anything for a while.
        self._thread = self._thread or ThreadPoolExecutor(1, "requests")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
