"""The daemon: one writer that feeds events to the scheduler and carries out the effects it returns.

Everything slow (systemd jobs, waiting for an engine, for memory, for the journal) runs in tasks beside the writer and
comes back as an event, so one model's trouble never blocks another's request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lllm3090d.bus.systemd import BusBack, BusLost, Relist, SystemdManager, UnitChanged, UnitGone
from lllm3090d.bus.systemd import Event as BusEvent
from lllm3090d.bus.thread import BusThread
from lllm3090d.checkpoints.library import resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardReader
from lllm3090d.planning.planner import PlanRequest
from lllm3090d.serving.desktop import desktop_active
from lllm3090d.serving.effects import Effects, LoadProgress
from lllm3090d.serving.events import (
    Admitted,
    Announce,
    CancelDone,
    CancelRequested,
    CheckTier,
    Effect,
    Event,
    Failed,
    ForgetUnit,
    Joined,
    LoadDone,
    LoadRequested,
    Observation,
    Queued,
    ReadPostMortem,
    Resubmit,
    StartUnit,
    StopUnit,
    TellTier,
    UnitSeen,
    UnitVanished,
    UnloadDone,
    UnloadRequested,
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.history import History, now_text
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.measure import observe
from lllm3090d.serving.policy import policy_of
from lllm3090d.serving.reconcile import Reconciler
from lllm3090d.serving.refusals import not_loaded, stopping
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.settings import Settings, load_settings
from lllm3090d.wire import EventKind

log = logging.getLogger(__name__)

BUS_LOSS_LIMIT_S = 60.0
# These cannot change under running models.
NEEDS_RESTART = ("runtime_dir", "card")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A question to the writer: are you alive?"""

    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Moved:
    """The instance a load waits for changed its state."""

    state: InstanceState


Answer = Effect | LoadProgress | Moved


class Daemon:
    """Owns the state of everything that runs, and the tasks around it."""

    def __init__(
        self,
        *,
        settings: Settings,
        config_file: Path,
        reader: CardReader,
        bus: BusThread,
        manager: SystemdManager,
    ) -> None:
        self.bus = bus
        self.settings = settings
        self.config_file = config_file
        self.reader = reader
        self.manager = manager
        self.history = History()
        self.started = now_text()
        self.lookup = Lookup(lambda: self.settings)
        self.scheduler = Scheduler(policy_of(settings, {}))
        self.since: dict[str, str] = {}  # run -> time of its last change of state
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue: asyncio.Queue[Event | Heartbeat] = asyncio.Queue()
        self._answers: dict[str, asyncio.Queue[Answer]] = {}
        self._looking_up: dict[str, bool] = {}  # token of a load not yet submitted -> it was cancelled
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._bus_timer: asyncio.TimerHandle | None = None
        self._desktop_active: bool | None = None
        self._stopping = False
        # Called after each change of an instance's state.
        self.on_change: Callable[[], None] = lambda: None
        self._effects = Effects(
            manager=manager,
            scheduler=self.scheduler,
            settings=lambda: self.settings,
            reader=reader,
            submit=self.submit,
            on_progress=self._tell_progress,
        )

        self._reconcile = Reconciler(
            manager=manager,
            scheduler=self.scheduler,
            reader=reader,
            history=self.history,
            submit=self.submit,
        )

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen to systemd, adopt what runs, begin to write."""
        self.manager.set_listener(self._on_bus_event)
        assignments = (item.partition("=") for item in await self.manager.manager_environment())
        inherited = {key: value for key, _, value in assignments}
        self.scheduler.policy = policy_of(self.settings, inherited)
        await self.look_for_desktop()
        await self._reconcile.adopt(self._apply)
        self.lookup.watch()
        self._writer = asyncio.create_task(self._write(), name="writer")
        self._writer.add_done_callback(self._writer_ended)

    async def stop(self) -> None:
        """End the tasks; the models go on unless the settings say otherwise."""
        self._stopping = True
        if self.settings.stop_models_on_exit:
            await self._stop_all()
        self.history.close()
        error = stopping()
        for token in tuple(self._answers):
            self._answer(token, Failed(token, error))
        for task in (*self._tasks, self._writer):
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.lookup.close()

    async def _stop_all(self) -> None:
        names = [instance.name for instance in self.scheduler.instances]
        results = await asyncio.gather(*(self.unload(name) for name in names), return_exceptions=True)
        for name, result in zip(names, results, strict=True):
            if isinstance(result, BaseException):
                log.error("a model could not be stopped", extra={"model": name, "reason": str(result)})

    async def alive(self) -> None:
        """Return once the writer and the bus thread have answered."""
        beat = Heartbeat(asyncio.get_running_loop().create_future())
        self._queue.put_nowait(beat)
        await beat.answer
        await self.bus.ping()

    def reload(self) -> LlmError | None:
        """Read the settings again; a bad file keeps the old ones, and its error is returned."""
        try:
            new = load_settings(self.config_file)
        except LlmError as error:
            log.error("settings kept: %s", error.message)
            self.history.add(EventKind.SETTINGS, message=f"kept: {error.message}", details=error.problem())
            return error
        ignored = [key for key in NEEDS_RESTART if getattr(new, key) != getattr(self.settings, key)]
        self.settings = new.model_copy(update={key: getattr(self.settings, key) for key in ignored})
        self.scheduler.policy = policy_of(self.settings, self.scheduler.policy.inherited_environment)
        self.lookup.watch()
        logging.getLogger().setLevel(new.log_level.upper())
        message = "read again" + (f"; {', '.join(ignored)} take effect at the next start" if ignored else "")
        log.info("settings %s", message)
        self.history.add(EventKind.SETTINGS, message=message)
        return None

    # --- requests -----------------------------------------------------------------------------------------------

    async def load(
        self, name: str, request: PlanRequest, token: str | None, arguments: tuple[str, ...] = ()
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        """Ask for a model; returns once it is admitted, joined, queued or served, with the answers that follow.

        Raises:
            LlmError: refused, unknown, damaged, no engine, cancelled, ...
        """
        token = token or secrets.token_hex(8)
        if token in self._answers or token in self._looking_up:
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"the token {token} belongs to another load",
                hint="Choose a token of its own for every load.",
            )
        if self._stopping:
            raise stopping()
        self._looking_up[token] = False
        try:
            found = await self.lookup.find(name)
            await self.look_for_desktop()
        finally:
            cancelled = self._looking_up.pop(token)
        if cancelled:
            raise LlmError(ErrorCode.LOAD_CANCELLED, f"the load of {name} was cancelled by its client")
        if self._stopping:  # since the look-up began: nobody would answer any more
            raise stopping()
        self._answers[token] = asyncio.Queue()
        self.submit(
            LoadRequested(
                token=token,
                run=secrets.token_hex(4),
                checkpoint=found.checkpoint,
                facts=found.facts,
                request=request,
                build=found.build,
                capabilities=found.capabilities,
                projector=found.projector,
                drafter=found.drafter,
                arguments=arguments,
            )
        )
        first = await self._answers[token].get()
        if isinstance(first, Failed):
            del self._answers[token]
            self.history.add(
                EventKind.REFUSED,
                model=found.checkpoint.name,
                message=first.error.message,
                details=first.error.problem(),
            )
            raise first.error
        return token, self._follow(token, first)

    async def _follow(self, token: str, first: Answer) -> AsyncGenerator[Answer, None]:
        try:
            answer = first
            yield answer
            while not isinstance(answer, LoadDone | Failed):
                answer = await self._answers[token].get()
                yield answer
        finally:
            self._answers.pop(token, None)

    def forget(self, token: str) -> None:
        """Nobody listens to the answers of this load any more; the load goes on."""
        self._answers.pop(token, None)

    async def unload(self, name: str) -> UnloadDone:
        """Unload a model; returns when its memory is back. Raises LlmError NOT_LOADED, STOP_FAILED."""
        token = secrets.token_hex(8)
        answer = await self._ask(token, UnloadRequested(token, self.loaded(name).name))
        if not isinstance(answer, UnloadDone):
            raise TypeError(f"unload answered with {answer!r}")
        return answer

    async def cancel(self, load_token: str) -> CancelDone:
        """Withdraw a load by its token. Raises LlmError NO_SUCH_LOAD."""
        token = secrets.token_hex(8)
        if load_token in self._looking_up:
            self._looking_up[load_token] = True
            return CancelDone(token, load_token, stopped=True)
        answer = await self._ask(token, CancelRequested(token, load_token))
        if not isinstance(answer, CancelDone):
            raise TypeError(f"cancel answered with {answer!r}")
        return answer

    def loaded(self, name: str) -> Instance:
        """The instance a name means, by the same rules as for models. Raises LlmError NOT_LOADED, AMBIGUOUS_MODEL."""
        instances = self.scheduler.instances
        if not instances:
            raise not_loaded(name, ())
        try:
            chosen = resolve(name, tuple(i.record.checkpoint() for i in instances), self.settings.aliases)
        except LlmError as error:
            if error.code is ErrorCode.AMBIGUOUS_MODEL:
                raise
            raise not_loaded(name, (i.name for i in instances)) from error
        found = self.scheduler.instance(chosen.name)
        if found is None:
            raise not_loaded(name, (i.name for i in instances))
        return found

    def observe(self) -> Observation:
        """The card now. Raises LlmError CARD_UNREADABLE."""
        pids = {i.run: i.main_pid for i in self.scheduler.instances if i.main_pid}
        return observe(self.reader, pids, self._desktop_active)

    async def look_for_desktop(self) -> None:
        """Find out whether a desktop session is on the card; what observe() says from now on."""
        self._desktop_active = await desktop_active(
            self.settings.desktop, self.reader.card.kind, self.manager
        )

    async def _ask(self, token: str, event: Event) -> Answer:
        if self._writer is None or self._writer.cancelling():
            raise stopping()
        self._answers[token] = asyncio.Queue()
        try:
            self.submit(event)
            answer = await self._answers[token].get()
        finally:
            del self._answers[token]
        if isinstance(answer, Failed):
            raise answer.error
        return answer

    # --- the writer ---------------------------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Hand an event to the writer."""
        self._queue.put_nowait(event)

    async def _write(self) -> None:
        while True:
            item = await self._queue.get()
            if isinstance(item, Heartbeat):
                if not item.answer.done():
                    item.answer.set_result(None)
                continue
            self._apply(item)

    def _apply(self, event: Event) -> None:
        observation = None
        if isinstance(event, LoadRequested):
            try:
                observation = self.observe()
            except LlmError as error:
                self._answer(event.token, Failed(event.token, error))
                return
        for effect in self.scheduler.handle(event, observation):
            self._perform(effect)

    def _writer_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self.failed.done():
            error = task.exception()
            # A scheduler that contradicts itself must not go on: end, be restarted, and adopt what runs.
            log.critical("the writer ended", exc_info=error)
            self.failed.set_exception(error or RuntimeError("the writer returned"))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartUnit():
                self._spawn(self._effects.start_unit(effect))
            case WatchLoading():
                self._watches[effect.run] = self._spawn(self._effects.watch(effect.run))
            case StopUnit():
                self._spawn(self._effects.stop_unit(effect))
            case ReadPostMortem():
                self._spawn(self._effects.post_mortem(effect))
            case WaitForMemory():
                self._spawn(self._effects.wait_for_memory(effect.run))
            case ForgetUnit():
                self._spawn(self._effects.forget(effect))
            case Resubmit():
                self.submit(effect.event)
            case Announce():
                self._announce(effect)
            case CheckTier():
                self._spawn(self._effects.check_tier(effect.run))
            case TellTier():
                self._tell_tier(effect)
            case Admitted() | Joined() | Queued() | LoadDone() | UnloadDone() | CancelDone() | Failed():
                self._answer(effect.token, effect)

    def _answer(self, token: str, answer: Answer) -> None:
        queue = self._answers.get(token)
        if queue is not None:  # else the client has left
            queue.put_nowait(answer)

    def _announce(self, change: Announce) -> None:
        self.since[change.run] = now_text()
        log.info(
            "%s is %s",
            change.name,
            change.state,
            extra={"model": change.name, "run": change.run, "was": change.previous, "reason": change.reason},
        )
        self.history.add(
            EventKind.STATE,
            model=change.name,
            run=change.run,
            state=change.state,
            previous=change.previous,
            message=change.reason,
        )
        if change.previous is InstanceState.LOADING:
            watch = self._watches.pop(change.run, None)
            if watch is not None:
                watch.cancel()
        instance = self.scheduler.by_run(change.run)
        for token in instance.waiters if instance else ():
            self._answer(token, Moved(change.state))
        if change.state is InstanceState.GONE:
            self.since.pop(change.run, None)
        self.on_change()

    def _tell_tier(self, told: TellTier) -> None:
        level = logging.INFO if told.in_force else logging.ERROR
        log.log(level, "%s: %s", told.name, told.reason, extra={"model": told.name, "run": told.run})
        self.history.add(
            EventKind.TIER,
            model=told.name,
            run=told.run,
            message=told.reason,
            details={"in_force": told.in_force},
        )

    def _tell_progress(self, load: LoadProgress) -> None:
        instance = load.instance
        for token in instance.waiters:
            self._answer(token, load)
        self.history.add(
            EventKind.PROGRESS,
            model=instance.name,
            run=instance.run,
            details={"resident_bytes": load.resident_bytes, "expected_bytes": load.expected_bytes},
        )

    # --- tasks beside the writer --------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            log.critical("a task ended unexpectedly", exc_info=error)
            self.failed.set_exception(error)

    # --- systemd's news -----------------------------------------------------------------------------------------

    def _on_bus_event(self, event: BusEvent) -> None:
        match event:
            case UnitChanged():
                self.submit(UnitSeen(event.status))
            case UnitGone():
                self.submit(UnitVanished(event.name, event.last))
            case Relist():
                self._spawn(self._reconcile.compare())
            case BusLost():
                log.error("the connection to the user's bus is lost; models go on")
                loop = asyncio.get_running_loop()
                self._bus_timer = loop.call_later(BUS_LOSS_LIMIT_S, self._bus_stays_lost)
            case BusBack():
                log.info("the connection to the user's bus is back")
                if self._bus_timer is not None:
                    self._bus_timer.cancel()

    def _bus_stays_lost(self) -> None:
        if not self.failed.done():
            self.failed.set_exception(
                LlmError(
                    ErrorCode.BUS_UNAVAILABLE,
                    f"the user's bus did not come back within {BUS_LOSS_LIMIT_S:g} s",
                    hint="See: systemctl --user status dbus.socket",
                )
            )
