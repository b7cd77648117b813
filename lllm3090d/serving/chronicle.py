"""What the scheduler decides and what comes of it, told to the history with time, cause and actor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from lllm3090d.engines.memory_log import read_memory_log
from lllm3090d.errors import LlmError
from lllm3090d.serving.actors import DAEMON, ENGINE, Actors
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.event_table import Numbers
from lllm3090d.serving.events import Announce, Event, KeepPin, KeepReleased
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import ENDED, InstanceState
from lllm3090d.serving.journal import LINES_MAX
from lllm3090d.serving.ledger import Ledger
from lllm3090d.serving.moments import now_text
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.unit_spec import unit_name
from lllm3090d.version import VERSION
from lllm3090d.wire import EngineMemory, EventKind
from lllm3090d.wire_history import EngineBufferView

log = logging.getLogger(__name__)
S = InstanceState


class Chronicle:
    """Writes down the lives of models.

    Args:
        history: where.
        scheduler: read, never changed.
        logs: of engines.
        clock: monotonic, seconds.
    """

    def __init__(
        self, history: History, scheduler: Scheduler, logs: EngineLogs, clock: Callable[[], float]
    ) -> None:
        self._history = history
        self._scheduler = scheduler
        self._logs = logs
        self._clock = clock
        self._admitted_s: dict[str, float] = {}  # by run
        self._cause = DAEMON
        self.actors = Actors()

    def started(self, numbers: Numbers | None) -> None:
        """The daemon begins; what the last one left says whether anything may be missing."""
        # A full disk: what the one before could not write is lost, and how much nobody can tell.
        if numbers is None or not (numbers.ended or numbers.last_at):
            self._history.add(
                EventKind.DAEMON,
                message=f"started, version {VERSION}; what the one before left cannot be read, and the last of what"
                " happened then may be missing",
                details={"to": now_text()},
            )
            return
        if numbers.ended:
            self._history.add(EventKind.DAEMON, message=f"started, version {VERSION}")
            return
        how = "could not record what happened" if numbers.is_behind else "was killed or crashed"
        self._history.add(
            EventKind.DAEMON,
            message=f"started, version {VERSION}; the one before {how}, and what happened after"
            f" {numbers.last_at} may be missing",
            details={"from": numbers.last_at, "to": now_text()},
        )

    def stopping(self) -> None:
        """The daemon is being stopped."""
        self._history.add(EventKind.DAEMON, message="is stopped")

    def caused_by(self, event: Event) -> AbstractContextManager[None]:
        """Whatever is told meanwhile follows from this event."""
        self._cause = self.actors.cause_of(event)
        return self._history.caused_by(self._cause)

    def answering(self, token: str) -> AbstractContextManager[None]:
        """Whatever is told meanwhile is about a request."""
        return self._history.caused_by(self.actors.of_token(token) or self._cause)

    def change(self, change: Announce) -> None:
        """An instance has changed its state."""
        instance = self._scheduler.by_run(change.run)
        if change.state is S.RESERVED:
            self._admitted_s[change.run] = self._clock()
        self._history.add(
            EventKind.STATE,
            model=change.name,
            run=change.run,
            state=change.state,
            previous=change.previous,
            message=change.reason,
            actor=self.actors.of_change(change, self._cause),
            details=self._details(change, instance),
        )
        if change.state is S.RELEASING:
            self._admitted_s.pop(change.run, None)

    def _details(self, change: Announce, instance: Instance | None) -> dict[str, object]:
        if change.failure is not None:
            return dict(change.failure.problem())
        if instance is None:
            return {}
        match change.state:
            case S.RESERVED:
                return _launch(instance, self._scheduler.ledger)
            case S.READY if change.previous in {S.LOADING, S.STARTING}:
                return self._load(instance)
            case S.STALLED | S.STOPPING:
                return _progress(instance)
        return {}

    def _load(self, instance: Instance) -> dict[str, object]:
        measured = [
            each.measured_bytes
            for each in self._scheduler.ledger.of(instance.run)
            if each.where != HOST and each.measured_bytes is not None
        ]
        told: dict[str, object] = {"measured_bytes": sum(measured)} if measured else {}
        began = self._admitted_s.get(instance.run)
        return told | ({"load_s": round(self._clock() - began, 3)} if began is not None else {})

    def hold(self, effect: KeepPin | KeepReleased) -> None:
        """A person's hold is given or taken back."""
        if isinstance(effect, KeepReleased):
            told = "the cards are released" if effect.released else "the cards are no longer released"
            self._history.add(EventKind.HOLD, message=told)
            return
        instance = self._scheduler.by_run(effect.run)
        if instance is None or instance.state in ENDED:
            return  # a pin ends with its run, and nobody took it away
        self._history.add(
            EventKind.HOLD,
            model=instance.name,
            run=effect.run,
            message="pinned" if effect.pinned else "no longer pinned",
        )

    async def keep_memory(self, name: str, run: str) -> None:
        """What the engine of a run that has ended said of its memory, where it said anything."""
        try:
            lines = await self._logs.tail(unit_name(name, run), LINES_MAX)
        except LlmError as error:
            log.info("what an engine said of its memory is not kept", extra={"reason": error.message})
            return
        found = await asyncio.to_thread(read_memory_log, [line.message for line in lines])
        if not found.buffers:
            return
        buffers = tuple(
            EngineBufferView(device=each.device, part=each.part, bytes=each.bytes) for each in found.buffers
        )
        told = EngineMemory(buffers=buffers, is_summary=found.is_summary)
        self._history.add(
            EventKind.MEMORY,
            model=name,
            run=run,
            message="what its engine said of its memory",
            details=told.model_dump(mode="json"),
            actor=ENGINE,
        )


def _progress(instance: Instance) -> dict[str, object]:
    """Of one that gets nowhere, or may finish what it does."""
    if instance.state is S.STALLED and instance.stall is not None:
        stall = instance.stall
        return {"stalled_s": round(stall.idle_s, 3), "patience_s": round(stall.patience_s, 3)}
    return {"drain_s": instance.drain.limit_s} if instance.drain is not None else {}


def _launch(instance: Instance, ledger: Ledger) -> dict[str, object]:
    held = ledger.of(instance.run)
    on_cards = [each for each in held if each.where != HOST] or held
    return {
        "unit": instance.unit,
        "engine": instance.record.engine_version,
        "context_tokens": instance.plan.context_tokens,
        "parallel": instance.plan.parallel,
        "reserved_bytes": sum(each.reserved_bytes for each in on_cards),
    }
