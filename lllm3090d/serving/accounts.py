"""What became of each load, for the counters and the history, whether its client still listens or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving import held_back
from lllm3090d.serving.events import Admitted, Effect, Failed, Joined, LoadDone, Queued
from lllm3090d.serving.history import History
from lllm3090d.serving.statistics import QueueOutcome, Statistics
from lllm3090d.wire import EventKind

_OUTCOMES = {
    ErrorCode.QUEUE_TIMED_OUT: QueueOutcome.TIMED_OUT,
    ErrorCode.LOAD_CANCELLED: QueueOutcome.CANCELLED,
}


@dataclass(slots=True)
class _Load:
    name: str
    queued_s: float | None = None
    admitted_s: float | None = None
    is_shared: bool = False  # another load of the same model is counted


class Accounts:
    """Follows loads from their request to their end.

    Args:
        statistics: counts.
        history: tells of refusals.
        clock: monotonic, seconds.
    """

    def __init__(self, statistics: Statistics, history: History, clock: Callable[[], float]) -> None:
        self._statistics = statistics
        self._history = history
        self._clock = clock
        self._loads: dict[str, _Load] = {}

    def begin(self, token: str, name: str) -> None:
        """A load is handed to the scheduler."""
        self._loads[token] = _Load(name)

    def answered(self, token: str, answer: Effect) -> None:
        """The scheduler has answered it; answers to other requests are none of this."""
        load = self._loads.get(token)
        if load is None:
            return
        match answer:
            case Queued() if load.queued_s is None:
                load.queued_s = self._clock()
                self._statistics.queued()
            case Admitted():
                self._leave_queue(load, QueueOutcome.SERVED)
                load.admitted_s = self._clock()
            case Joined():
                self._leave_queue(load, QueueOutcome.SERVED)
                load.is_shared = True
            case LoadDone():
                self._leave_queue(load, QueueOutcome.SERVED)
                if load.admitted_s is not None:
                    self._statistics.loaded(load.name, self._clock() - load.admitted_s)
                del self._loads[token]
            case Failed(error=error):
                self._failed(load, error)
                del self._loads[token]

    def _failed(self, load: _Load, error: LlmError) -> None:
        self._leave_queue(load, _OUTCOMES.get(error.code, QueueOutcome.REFUSED))
        if load.admitted_s is not None:
            self._statistics.failed()
        elif not load.is_shared:
            self._statistics.refused(error.code)
            if error.code in held_back.CODES:
                return  # by programs, again and again; what became of the model has been told
            self._history.add(
                EventKind.REFUSED, model=load.name, message=error.message, details=error.problem()
            )

    def _leave_queue(self, load: _Load, outcome: QueueOutcome) -> None:
        if load.queued_s is not None:
            self._statistics.dequeued(self._clock() - load.queued_s, outcome)
            load.queued_s = None
