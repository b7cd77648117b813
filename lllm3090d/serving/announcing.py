"""Changes of instances, told to everybody whom they concern: the log, the history, loads that wait, the surfaces."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from lllm3090d.serving.answers import Answers, Moved
from lllm3090d.serving.chronicle import Chronicle
from lllm3090d.serving.effects import LoadProgress
from lllm3090d.serving.events import Announce
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.moments import now_text
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.telling import Telling

log = logging.getLogger(__name__)


class Announcing:
    """Announces.

    Attributes:
        since: time of the last change of state, by run.

    Args:
        scheduler: read, never changed.
        answers: to those who wait for a load.
        chronicle: writes down changes of state.
        telling: writes down progress.
        spawn: runs something beside the writer.
        on_change: called last.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        answers: Answers,
        chronicle: Chronicle,
        telling: Telling,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_change: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._answers = answers
        self._chronicle = chronicle
        self._telling = telling
        self._spawn = spawn
        self._on_change = on_change
        self.since: dict[str, str] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def watched_by(self, run: str, task: asyncio.Task[None]) -> None:
        """What watches a run load; it has no more to do once the run does not load any longer."""
        self._watches[run] = task

    def change(self, change: Announce) -> None:
        """An instance has changed its state."""
        self.since[change.run] = now_text()
        log.info(
            "%s is %s",
            change.name,
            change.state,
            extra={"model": change.name, "run": change.run, "was": change.previous, "reason": change.reason},
        )
        self._chronicle.change(change)
        if change.state in {InstanceState.GONE, InstanceState.FAILED}:
            self._spawn(self._chronicle.keep_memory(change.name, change.run))
        if change.previous is InstanceState.LOADING:
            watch = self._watches.pop(change.run, None)
            if watch is not None:
                watch.cancel()
        instance = self._scheduler.by_run(change.run)
        for token in instance.waiters if instance else ():
            self._answers.pass_on(token, Moved(change.state))
        if change.state is InstanceState.GONE:
            self.since.pop(change.run, None)
        self._on_change()

    def progress(self, load: LoadProgress) -> None:
        """A load has come on."""
        for token in load.instance.waiters:
            self._answers.pass_on(token, load)
        self._telling.progress(load)
