"""Tasks beside the writer: whatever takes time runs in one of them, and one that fails ends the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class SideTasks:
    """Those that run now, kept for as long as they do: the loop itself only refers to them weakly.

    Args:
        on_failure: told what a task ended with; whatever can be expected is caught in the task itself.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have something done; it begins once the caller lets the loop go on."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Ask all of them to end."""
        for task in self._running:
            task.cancel()

    async def ended(self) -> None:
        """Wait until those that run now have ended, however they do."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
