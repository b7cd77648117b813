"""Recording events beside the event loop, which never waits for the disk.

Events wait in memory and go to the state file in batches, from a thread of their own. While that fails they go on
waiting, up to a bound; what is beyond it is lost, counted, and told as an event once the file can be written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.event_table import EventTable, Numbers, Row
from lllm3090d.serving.moments import now_us, time_text
from lllm3090d.serving.unrecorded import Unrecorded

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

BATCH_S = 0.05  # what a killed daemon may lose
BATCH_MOST = 500
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
CLOSE_S = 3.0  # for a disk that does not answer
# What waits for a disk: no more events than the history keeps in memory anyway, so that every one can be told.
WAITING_MOST = 2000
WAITING_MOST_BYTES = 8 << 20
# Numbers are set aside ahead of their use, so that the next daemon begins above all that a killed one told.
NUMBERS_AHEAD = 1000
# The same where they cannot be set aside in the file: more than are given between two attempts to write.
UNRECORDED_AHEAD = 20 * NUMBERS_AHEAD


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that are lost.

    Attributes:
        count: how many.
        first_seq: number of the first.
        last_seq: number of the last.
        first_us: time of the first, microseconds since 1970.
        last_us: time of the last.
    """

    count: int
    first_seq: int
    last_seq: int
    first_us: int
    last_us: int

    @property
    def text(self) -> str:
        """For a person."""
        what = "1 event was" if self.count == 1 else f"{self.count} events were"
        return f"{what} not recorded from {time_text(self.first_us)} to {time_text(self.last_us)}"


class Recorder:
    """Takes events on the loop and writes them beside it.

    Args:
        table: where they are written.
        on_gap: told, on the loop, what was lost, once there is something to record that in.
        unrecorded: tells the next daemon what the table cannot; None tells it nothing.
    """

    def __init__(
        self, table: EventTable, on_gap: Callable[[Gap], None], unrecorded: Unrecorded | None = None
    ) -> None:
        self._table = table
        self._on_gap = on_gap
        self._unrecorded = unrecorded
        self._unrecorded_until = 0  # the number that the next daemon is told; 0 where it is told none
        # Its own, because the threads of look-ups may all be waiting for engines.
        self._thread = ThreadPoolExecutor(1, "history")
        self._waiting: deque[Row] = deque()
        self._waiting_bytes = 0
        self._highest = 0  # number that was given to an event
        self._set_aside = 0  # number that the next daemon would begin with
        self._gap: Gap | None = None
        self._failures = 0
        self._why = ""
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Numbers:
        """What the last daemon left; begins to write."""
        numbers = await self._beside(self._table.numbers)
        if numbers is None:
            # Nobody knows which numbers were told already. Milliseconds since 1970 are above all that were counted.
            numbers = Numbers(now_us() // 1000, ended=False, last_at=None)
        if self._unrecorded is not None and (told := await self._beside(self._unrecorded.read)) is not None:
            # What the table says is from before the daemon that could not write to it.
            numbers = replace(numbers, next=max(numbers.next, told), ended=False, is_behind=True)
            self._unrecorded_until = told
        self._highest = numbers.next - 1
        self._set_aside = numbers.next
        await self._write()
        self._task = asyncio.create_task(self._run(), name="history")
        self._task.add_done_callback(self._ended)
        return numbers

    def take(self, row: Row) -> None:
        """Record an event, soon."""
        self.numbered(row.seq)
        self._waiting.append(row)
        self._waiting_bytes += row.size_bytes
        self._lose_what_is_beyond()
        self._wake.set()

    def numbered(self, seq: int) -> None:
        """A number was given to an event that is not recorded."""
        self._highest = seq
        if seq + NUMBERS_AHEAD // 2 > self._set_aside:
            self._wake.set()

    def problem(self) -> LlmError | None:
        """Why events are not recorded now; None where they are."""
        if not self._failures:
            return None
        waiting = len(self._waiting)
        lost = f" {self._gap.text}." if self._gap is not None else ""
        return LlmError(
            ErrorCode.STATE_UNUSABLE,
            f"What happens is not recorded: {self._why} {waiting} events wait for that.{lost}",
            hint="Check the space on the disk of state_dir, and its permissions.",
            waiting=waiting,
            lost=self._gap.count if self._gap is not None else 0,
        )

    async def read(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Read from the table beside the loop."""
        return await self._beside(lambda: work(*arguments, **named))

    async def flush(self) -> None:
        """Write what waits, once; what cannot be written goes on waiting."""
        await self._write()

    async def close(self) -> None:
        """Write what waits and that this daemon has ended in order; what cannot be written now is lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._write(ended=True)
        if self._waiting:
            log.error(
                "events could not be recorded", extra={"count": len(self._waiting), "reason": self._why}
            )
        self._thread.shutdown(wait=False)

    # --- writing ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        # Not before: it reads the sizes of all, and a start is to be quick.
        await self._beside(lambda: self._table.prune(now_us(), at_once=True))
        while True:
            await self._wake.wait()
            retry_s = min(FIRST_RETRY_S * 2.0 ** max(0, self._failures - 1), LAST_RETRY_S)
            await asyncio.sleep(retry_s if self._failures else BATCH_S)
            await self._write()

    async def _write(self, *, ended: bool = False) -> None:
        async with self._lock:
            is_first = True
            while is_first or self._waiting:
                is_first = False
                batch = self._next_batch()
                is_last = ended and not self._waiting
                next_number = self._highest + 1 + (0 if is_last else NUMBERS_AHEAD)
                written = False
                try:
                    work = functools.partial(self._table.write, batch, next_number, ended=is_last)
                    written = await self._beside(work)
                finally:
                    if not written:  # also when cancelled: written twice is the same as once
                        self._put_back(batch)
                if not written:
                    await self._failed()
                    return
                self._set_aside = next_number
                self._succeeded()
                if self._unrecorded is not None and self._unrecorded_until:
                    self._unrecorded_until = 0
                    await self._beside(self._unrecorded.remove)
            if not self._waiting:
                self._wake.clear()
            await self._beside(lambda: self._table.prune(now_us()))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nothing of this may end the daemon, and nothing may be hidden."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures += 1
            self._why = f"The daemon made a mistake: {error}."
            log.critical("what happens is no longer recorded", exc_info=error)

    def _next_batch(self) -> list[Row]:
        batch = [self._waiting.popleft() for _ in range(min(BATCH_MOST, len(self._waiting)))]
        self._waiting_bytes -= sum(each.size_bytes for each in batch)
        return batch

    def _put_back(self, batch: list[Row]) -> None:
        self._waiting.extendleft(reversed(batch))
        self._waiting_bytes += sum(each.size_bytes for each in batch)
        self._lose_what_is_beyond()

    def _lose_what_is_beyond(self) -> None:
        while len(self._waiting) > WAITING_MOST or self._waiting_bytes > WAITING_MOST_BYTES:
            row = self._waiting.popleft()
            self._waiting_bytes -= row.size_bytes
            gap = self._gap or Gap(0, row.seq, row.seq, row.at_us, row.at_us)
            self._gap = Gap(gap.count + 1, gap.first_seq, row.seq, gap.first_us, row.at_us)

    async def _failed(self) -> None:
        self._why = await self._beside(self._table.problem)
        self._failures += 1
        if self._failures == 1:
            log.error("what happens is not recorded", extra={"reason": self._why})
        if self._unrecorded is None or self._highest + UNRECORDED_AHEAD // 2 <= self._unrecorded_until:
            return
        until = self._highest + UNRECORDED_AHEAD
        if await self._beside(functools.partial(self._unrecorded.write, until)):
            self._unrecorded_until = until

    def _succeeded(self) -> None:
        if self._failures:
            log.info("what happens is recorded again")
        self._failures = 0
        gap, self._gap = self._gap, None
        if gap is not None:
            log.error("%s", gap.text)
            self._on_gap(gap)

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
