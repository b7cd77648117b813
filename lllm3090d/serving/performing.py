"""Carrying out the effects that the scheduler returns: what is done at once, and what is done beside the writer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from lllm3090d.serving.announcing import Announcing
from lllm3090d.serving.answers import Answers
from lllm3090d.serving.draining import Draining
from lllm3090d.serving.effects import Effects
from lllm3090d.serving.events import (
    Announce,
    CheckIdle,
    CheckTier,
    DrainUnit,
    Effect,
    Event,
    ForgetUnit,
    KeepPin,
    KeepReleased,
    Learn,
    LearnOutOfMemory,
    LookAgain,
    Looked,
    ReadPostMortem,
    Reply,
    Restore,
    Resubmit,
    StartUnit,
    StopUnit,
    TellDeviation,
    TellDrain,
    TellEviction,
    TellTier,
    Verify,
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.holding import Holding
from lllm3090d.serving.lessons import Lessons
from lllm3090d.serving.observer import Observer
from lllm3090d.serving.restoring import Restoring
from lllm3090d.serving.side_tasks import SideTasks
from lllm3090d.serving.telling import Telling
from lllm3090d.serving.wanted_set import WantedSet


class Performer:
    """Hands each effect to the part whose work it is; called by the writer alone, and never waits.

    Args:
        answers: to requests.
        announcing: tells of changes of state.
        telling: tells of everything else.
        effects: what is done with units and engines.
        draining: waits for requests in flight.
        restoring: loads what went for nothing, or failed.
        wanted: is written before a unit is stopped.
        observer: remembers whose memory is waited for.
        holding: keeps what a person holds.
        lessons: learns from measurements.
        tasks: beside the writer.
        submit: hands an event to the writer.
    """

    def __init__(
        self,
        *,
        answers: Answers,
        announcing: Announcing,
        telling: Telling,
        effects: Effects,
        draining: Draining,
        restoring: Restoring,
        wanted: WantedSet,
        observer: Observer,
        holding: Holding,
        lessons: Lessons,
        tasks: SideTasks,
        submit: Callable[[Event], None],
    ) -> None:
        self._answers = answers
        self._announcing = announcing
        self._telling = telling
        self._effects = effects
        self._draining = draining
        self._restoring = restoring
        self._wanted = wanted
        self._observer = observer
        self._holding = holding
        self._lessons = lessons
        self._tasks = tasks
        self._submit = submit

    def perform(self, effect: Effect) -> None:
        """Carry out one effect; what takes time of it has not begun when this returns."""
        work = self._work_of(effect)
        if work is not None:
            task = self._tasks.spawn(work)
            if isinstance(effect, WatchLoading):
                self._announcing.watched_by(effect.run, task)
        elif isinstance(effect, Reply):
            self._answers.reply(effect.token, effect)
        else:
            self._tell(effect)

    def _tell(self, effect: Effect) -> None:
        """What is done at once, and not to answer anybody."""
        match effect:
            case Resubmit():
                self._submit(effect.event)
            case LookAgain():
                self._submit(Looked())
            case Announce():
                self._announcing.change(effect)
            case TellEviction():
                self._telling.eviction(effect)
            case TellDrain():
                self._telling.drain(effect)
            case TellDeviation():
                self._telling.deviation(effect)
            case TellTier():
                self._telling.tier(effect)

    def _work_of(  # noqa: PLR0911, PLR0912  # one line for each kind
        self, effect: Effect
    ) -> Coroutine[Any, Any, None] | None:
        """What takes time of an effect, and so is done beside the writer."""
        match effect:
            case StartUnit():
                return self._effects.start_unit(effect)
            case WatchLoading():
                return self._effects.watch(effect.run)
            case StopUnit():
                return self._wanted.after_writing(lambda: self._effects.stop_unit(effect))
            case DrainUnit():
                return self._draining.drain(effect.run)
            case ReadPostMortem():
                return self._effects.post_mortem(effect)
            case WaitForMemory():
                return self._effects.wait_for_memory(effect.run, self._observer.has_ended(effect.run))
            case ForgetUnit():
                return self._effects.forget(effect)
            case CheckIdle():
                return self._effects.check_idle(effect)
            case Verify():
                return self._effects.verify(effect)
            case CheckTier():
                return self._effects.check_tier(effect.run)
            case Restore():
                return self._restoring.restore(effect)
            case KeepPin() | KeepReleased():
                return self._holding.keep(effect)
            case Learn():
                return self._lessons.measured(effect)
            case LearnOutOfMemory():
                return self._lessons.out_of_memory(effect)
        return None
