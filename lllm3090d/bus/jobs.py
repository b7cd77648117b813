"""Waiting for jobs of systemd, whichever is seen first: the reply naming one or the signal of its end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

FINISHED_JOBS_KEPT = 256


@dataclass(frozen=True, slots=True)
class Job:
    """A job of systemd: object path, unit, and whether it starts the unit or stops it."""

    path: str
    unit: str
    starts: bool


class JobWaits:
    """Results of jobs by object path.

    The bus sends the reply before JobRemoved, but the task that awaits the reply runs after the handler of
    the signal. So every result is kept for a while, whether somebody waits for it or not.
    """

    def __init__(self) -> None:
        self._finished: OrderedDict[str, str] = OrderedDict()
        # systemd makes one job of two wishes for the same, so several may wait for one.
        self._waiting: dict[asyncio.Future[str], Job] = {}

    def removed(self, path: str, result: str) -> None:
        """JobRemoved."""
        for future, job in self._waiting.items():
            if job.path == path and not future.done():
                future.set_result(result)
        self._finished[path] = result
        self._finished.move_to_end(path)
        if len(self._finished) > FINISHED_JOBS_KEPT:
            self._finished.popitem(last=False)

    def doubt(self) -> None:
        """Signals were missed: paths may be used again by another systemd."""
        self._finished.clear()

    async def result(self, job: Job, timeout_s: float) -> str | None:
        """The result of a job, None when it is not known within ``timeout_s``."""
        finished = self._finished.get(job.path)
        if finished is not None:
            return finished
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[future] = job
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return None
        finally:
            del self._waiting[future]

    async def settle(self, infer: Callable[[Job], Awaitable[str | None]]) -> None:
        """Settle, where ``infer`` can, what ended while nobody listened."""
        for future, job in tuple(self._waiting.items()):
            result = await infer(job)
            if result is not None and not future.done():
                future.set_result(result)
