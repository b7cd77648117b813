"""Those who wait for a dry run: served one after the other, apart from everything else, and not too many."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from lllm3090d.engines.dry_run import DryRun, DryRuns
from lllm3090d.planning.projection import Projection

MOST_WAITING = 4  # beside the one that is made


class DryRunQueue:
    """A thread of its own for dry runs, so that one that hangs holds up nothing but other dry runs. Thread-safe.

    Args:
        runs: makes them.
        most_waiting: how many may wait beside the one that is made.
    """

    def __init__(self, runs: DryRuns, *, most_waiting: int = MOST_WAITING) -> None:
        self._runs = runs
        self._most = most_waiting + 1
        self._lock = threading.Lock()
        self._open = 0  # waiting or made
        self._executor = ThreadPoolExecutor(1, "dry-run")

    def submit(self, run: DryRun) -> Future[Projection] | None:
        """Ask for a projection; None where too many wait.

        What the future raises is that of :meth:`DryRuns.project`. While it waits it can be cancelled, which makes room
        at once; one that is made goes on, and its result is remembered.
        """
        with self._lock:
            if self._open >= self._most:
                return None
            self._open += 1
        future = self._executor.submit(self._runs.project, run)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Projection]) -> None:
        with self._lock:
            self._open -= 1
