"""The daemon: one writer that feeds events to the scheduler and carries out the effects it returns.

Everything slow (systemd jobs, waiting for an engine, for memory, for the journal) runs in tasks beside the writer and
comes back as an event, so one model's trouble never blocks another's request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lllm3090d.bus.systemd import BusBack, BusLost, Relist, SystemdManager, UnitChanged, UnitGone
from lllm3090d.bus.systemd import Event as BusEvent
from lllm3090d.bus.thread import BusThread
from lllm3090d.checkpoints.library import Checkpoint, resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.files import exhausted
from lllm3090d.gpus.readings import Card, CardReader, normal_pci_address
from lllm3090d.model_settings import is_pinned
from lllm3090d.planning.calibration import deviation_limit_bytes
from lllm3090d.serving.accounts import Accounts
from lllm3090d.serving.activity import ActivityWatch, in_flight
from lllm3090d.serving.actors import DAEMON
from lllm3090d.serving.admission import foreign_bytes
from lllm3090d.serving.bus_loss import BusLoss
from lllm3090d.serving.card_health import EVIDENCE_S, CardHealth
from lllm3090d.serving.chronicle import Chronicle
from lllm3090d.serving.desktop import desktop_active
from lllm3090d.serving.disk_rates import DiskRates
from lllm3090d.serving.draining import Draining
from lllm3090d.serving.effects import Effects, LoadProgress
from lllm3090d.serving.engine_logs import DIRECTORY as LOGS
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.event_table import Bounds, EventTable, bounds_of
from lllm3090d.serving.events import (
    Announce,
    CancelDone,
    CancelRequested,
    CheckIdle,
    CheckTier,
    DrainUnit,
    Effect,
    Event,
    Failed,
    ForgetUnit,
    HoldLoads,
    KeepPin,
    KeepReleased,
    Learn,
    LearnOutOfMemory,
    LeaseAsked,
    LeaseGiven,
    LeaseReturned,
    LoadDone,
    LoadRequested,
    LookAgain,
    Looked,
    Observation,
    PinDone,
    PinRequested,
    ReadPostMortem,
    ReleaseDone,
    ReleaseRequested,
    Reply,
    ResetDone,
    ResetRequested,
    Restore,
    Resubmit,
    ResumeDone,
    ResumeRequested,
    StartUnit,
    StopUnit,
    TellDeviation,
    TellDrain,
    TellEviction,
    TellTier,
    UnitSeen,
    UnitVanished,
    UnloadDone,
    UnloadRequested,
    Verify,
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.foreign_units import ForeignUnits
from lllm3090d.serving.history import History, now_text
from lllm3090d.serving.holds import Holds
from lllm3090d.serving.instance import ENDED, InstanceState
from lllm3090d.serving.kernel_journal import recent_xids
from lllm3090d.serving.learning import learnt
from lllm3090d.serving.log_keeper import LogKeeper
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.measure import observe
from lllm3090d.serving.observation import HOST, RunProcesses
from lllm3090d.serving.offering import Offers
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.policy import environment_of, policy_of
from lllm3090d.serving.reconcile import Reconciler
from lllm3090d.serving.refusals import no_such_card, not_loaded, stopping
from lllm3090d.serving.restoring import Restoring
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.sleep import Sleep, SleepSource
from lllm3090d.serving.sleep_set import SleepStore, kernel_boot_id
from lllm3090d.serving.statistics import Statistics
from lllm3090d.serving.telling import Telling
from lllm3090d.serving.unit_reader import UnitReader
from lllm3090d.serving.unit_spec import identifier, unit_name
from lllm3090d.serving.unrecorded import Unrecorded
from lllm3090d.serving.wanted import Life
from lllm3090d.serving.wanted_set import WantedSet
from lllm3090d.serving.wanted_store import WantedStore
from lllm3090d.serving.watching import Watching
from lllm3090d.setting_table import NEEDS_RESTART
from lllm3090d.settings import Settings, load_settings
from lllm3090d.wire import EventKind, ForeignUnitView

log = logging.getLogger(__name__)

ENVIRONMENT_LIMIT_S = 0.5


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
        readers: Sequence[CardReader],
        bus: BusThread,
        manager: SystemdManager,
        logind: SleepSource | None = None,
    ) -> None:
        self.bus = bus
        self.settings = settings
        self.config_file = config_file
        self.readers = tuple(readers)
        self.manager = manager
        self.statistics = Statistics()
        self.started = now_text()
        self.lookup = Lookup(lambda: self.settings)
        self.history = History(
            EventTable(self.lookup.store, self._history_bounds), Unrecorded(settings.runtime_dir)
        )
        self.scheduler = Scheduler(policy_of(settings, {}))
        self.offers = Offers(self.lookup)
        self.logs = EngineLogs(self._log_files_dir)
        self.log_keeper = LogKeeper(self._log_files_dir, self._logging)
        self._chronicle = Chronicle(self.history, self.scheduler, self.logs, self.scheduler.clock)
        self._telling = Telling(self.history, self.statistics)
        self.card_health = CardHealth(self._telling.card, self.scheduler.clock)
        self._accounts = Accounts(self.statistics, self.history, self.scheduler.clock)
        self.since: dict[str, str] = {}  # run -> time of its last change of state
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bus_loss = BusLoss(self.history, self._fail)
        self._queue: asyncio.Queue[Event | Heartbeat] = asyncio.Queue()
        self._answers: dict[str, asyncio.Queue[Answer]] = {}
        self._looking_up: dict[str, bool] = {}  # token of a load not yet submitted -> it was cancelled
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._desktop_active: bool | None = None
        self._stopping = False
        # Called after each change of an instance's state.
        self.on_change: Callable[[], None] = lambda: None
        # Called after each event, when all that follows from it at once is done.
        self.on_event: Callable[[], None] = lambda: None
        self._seen: dict[str, Observation] = {}  # run -> the cards when it was last seen to hold something
        self._ended: dict[str, RunProcesses] = {}  # runs whose memory is not back yet
        activity = (
            ActivityWatch()
        )  # one for both: each look resets what the engine tells of the time since the last
        self._effects = Effects(
            manager=manager,
            scheduler=self.scheduler,
            settings=lambda: self.settings,
            observe=self.observe,
            ask=activity.of,
            submit=self.submit,
            on_progress=self._tell_progress,
            fence=self._fence,
            logs=self.logs,
            card_evidence=self._evidence_of,
            disk_rates=DiskRates(self.lookup.store),
        )

        self.foreign_units = ForeignUnits(lambda unit: self.scheduler.by_unit(unit) is not None)
        self._reconcile = Reconciler(
            manager=manager,
            scheduler=self.scheduler,
            readers=self.readers,
            history=self.history,
            submit=self.submit,
            units=UnitReader(
                self.lookup,
                lambda: tuple(reader.card for reader in self.readers),
                lambda: self.scheduler.policy.plan,
            ),
            foreign=self.foreign_units,
        )
        self._holds = Holds(self.lookup.store)
        self._sessions = logind
        self._sleep_store = SleepStore(self.lookup.store)
        self.sleep = Sleep(
            house=self,
            source=logind,
            store=self._sleep_store,
            spawn=self._spawn,
            left_alone=lambda: self.foreign_units.names,
        )
        self._draining = Draining(self.scheduler, in_flight, self.submit)
        self._restoring = Restoring(
            load=self.load,
            withdraw=self._withdraw,
            scheduler=self.scheduler,
            history=self.history,
            submit=self.submit,
            spawn=self._spawn,
        )
        self._wanted_store = WantedStore(self.lookup.store)
        self.wanted = WantedSet(
            scheduler=self.scheduler,
            restoring=self._restoring,
            store=self._wanted_store,
            history=self.history,
            spawn=self._spawn,
            configured=lambda: self.settings.autoload_names,
            named=lambda name: self.lookup.resolve(name).name,
        )
        self._watching = Watching(
            scheduler=self.scheduler,
            observe=self.observe,
            ask=activity.of,
            submit=self.submit,
            tell=self._telling.pressure,
            settings=lambda: self.settings,
            spawn=self._spawn,
        )

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen to systemd, adopt what runs, begin to write."""
        self.manager.set_listener(self._on_bus_event)
        inherited = environment_of(await self.manager.manager_environment())
        self.scheduler.policy = policy_of(self.settings, inherited)
        self.log_keeper.start(self._spawn, self._journal_probed)
        numbers = await self.history.open()
        self._chronicle.started(numbers)
        await self.look_for_desktop()
        released, pinned = await asyncio.to_thread(self._held)
        self.scheduler.released = released
        # Before the writer: what comes of a unit that has failed depends on what came before.
        remembered = await asyncio.to_thread(self._wanted_store.remembered)
        await self._reconcile.adopt(self._apply, pinned, {each.name: each.run for each in remembered.wants})
        # Before anybody can pin anything.
        await self._keep_only(frozenset(each.run for each in self.scheduler.instances))
        asleep = {each.name for each in await asyncio.to_thread(self._sleep_store.kept)}
        # A unit that nobody understands runs on, whatever was known of its model.
        left_alone = frozenset(self.foreign_units.names)
        asleep |= {each.name for each in remembered.wants if unit_name(each.name, each.run) in left_alone}
        self.wanted.begin(
            remembered,
            Life(kernel_boot_id(), await self.manager.session()),
            self._apply,
            asleep,
            is_behind=numbers is not None and numbers.is_behind,
        )
        self.lookup.watch()
        self._writer = asyncio.create_task(self._write(), name="writer")
        self._writer.add_done_callback(self._writer_ended)
        await self.sleep.start()
        self.wanted.go_on()

    def _history_bounds(self) -> Bounds:
        return bounds_of(self.settings.history_days, self.settings.history_mib)

    def _log_files_dir(self) -> Path:
        return self.settings.state_dir / LOGS

    def _logging(self) -> frozenset[str]:
        """Identifiers of what may write to a log still."""
        return frozenset(
            identifier(each.unit) for each in self.scheduler.instances if each.state not in ENDED
        )

    def _journal_probed(self) -> None:
        self.scheduler.policy = replace(self.scheduler.policy, log_files_dir=self.log_keeper.files_dir)

    def _held(self) -> tuple[bool, frozenset[str]]:
        """What was remembered beyond the daemon's life; blocking. Without the state file: nothing."""
        try:
            return self._holds.released(), self._holds.pinned_runs()
        except LlmError as error:
            log.error("what was released or pinned is not known", extra={"reason": error.message})
            return False, frozenset()

    async def stop(self) -> None:
        """End the tasks; the models go on unless the settings say otherwise."""
        self._stopping = True
        self._chronicle.stopping()
        self._watching.stop()
        if self.settings.stop_models_on_exit:
            await self._stop_all()
            self.wanted.forget()
        await self.wanted.end()
        self.history.close()
        error = stopping()
        for token in tuple(self._answers):
            self._answer(token, Failed(token, error))
        for task in (*self._tasks, self._writer):
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.history.end()
        await self.lookup.close()

    async def _stop_all(self) -> None:
        names = [instance.name for instance in self.scheduler.instances]
        # The daemon's own stop is not kept up by requests.
        results = await asyncio.gather(
            *(self.unload(name, drain_s=0.0) for name in names), return_exceptions=True
        )
        for name, result in zip(names, results, strict=True):
            if isinstance(result, BaseException):
                log.error("a model could not be stopped", extra={"model": name, "reason": str(result)})

    async def writer_answers(self, _: float) -> None:
        """Return once the writer has come to a question that is put behind all that waits for it."""
        beat = Heartbeat(asyncio.get_running_loop().create_future())
        self._queue.put_nowait(beat)
        await beat.answer

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
        inherited = self.scheduler.policy.inherited_environment
        self.scheduler.policy = policy_of(self.settings, inherited, self.log_keeper.files_dir)
        self.lookup.watch()
        self.sleep.settings_changed()
        logging.getLogger().setLevel(new.log_level.upper())
        message = "read again" + (f"; {', '.join(ignored)} take effect at the next start" if ignored else "")
        log.info("settings %s", message)
        self.history.add(EventKind.SETTINGS, message=message)
        return None

    # --- requests -----------------------------------------------------------------------------------------------

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
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
            await self._look_at_environment()
            await self.log_keeper.probed()
            event = LoadRequested(
                token=token,
                run=secrets.token_hex(4),
                checkpoint=found.checkpoint,
                facts=found.facts,
                request=wish.request,
                build=found.build,
                capabilities=found.capabilities,
                projector=found.projector,
                drafter=found.drafter,
                speeds=found.speeds,
                arguments=wish.arguments,
                card=self._card_named(wish.card),
                least_context_tokens=wish.least_context_tokens,
                lease=wish.lease,
                pinned=wish.pinned or is_pinned(self.settings.models, found.checkpoint.name),
                may_evict=wish.may_evict,
                may_wait=wish.may_wait,
                attempt=wish.attempt,
                idle_s=wish.idle_s,
            )
            event = await learnt(event, self.lookup.learning, self.scheduler.policy, self.observe())
            event = await self.offers.offered(event, self.scheduler, self.observe)
        finally:
            cancelled = self._looking_up.pop(token)
        if cancelled:
            raise LlmError(ErrorCode.LOAD_CANCELLED, f"the load of {name} was cancelled by its client")
        if self._stopping:  # since the look-up began: nobody would answer any more
            raise stopping()
        self._answers[token] = asyncio.Queue()
        self._accounts.begin(token, found.checkpoint.name)
        self.submit(event)
        first = await self._answers[token].get()
        if isinstance(first, Failed):
            del self._answers[token]
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

    async def unload(self, name: str, *, drain_s: float | None = None, force: bool = False) -> UnloadDone:
        """Unload a model; returns when its memory is back.

        Args:
            name: of a model that runs or waits.
            drain_s: how long its requests may go on; None as the settings say.
            force: kill it at once.

        Raises:
            LlmError: NOT_LOADED, STOP_FAILED.
        """
        token = secrets.token_hex(8)
        self._restoring.forget(name)
        found = name if self.scheduler.is_to_come_back(name) else self._loaded_or_waiting(name)
        self._restoring.forget(found)
        sleeper = await self.sleep.forget(found)
        runs = self.scheduler.instance(found) is not None
        waits = any(each.name == found for each in self.scheduler.pending)
        is_nowhere = not runs and not waits and not self.scheduler.is_to_come_back(found)
        want = self.wanted.forget(found) if is_nowhere else None
        if is_nowhere and (sleeper is not None or want is not None):
            run = sleeper.run if sleeper is not None else want.run if want is not None else ""
            problem = await self.wanted.written()
            return UnloadDone(token, found, run, 0, waited=sleeper is None, problem=problem)
        answer = await self._ask(token, UnloadRequested(token, found, drain_s, force))
        if not isinstance(answer, UnloadDone):
            raise TypeError(f"unload answered with {answer!r}")
        # Had it been admitted meanwhile, it would have given something back.
        waited = waits and not runs and not answer.released_bytes
        return replace(answer, waited=waited, problem=self.wanted.problem)

    def _card_named(self, wanted: str | None) -> str | None:
        """The UUID of a card by its UUID, its PCI address or its number here. Raises LlmError INVALID_REQUEST."""
        if wanted is None:
            return None
        cards = tuple(reader.card for reader in self.readers)
        for number, card in enumerate(cards):
            if wanted.lower() in {str(number), card.uuid.lower()} or (
                card.pci_address and normal_pci_address(wanted) == card.pci_address
            ):
                return card.uuid
        raise no_such_card(wanted, cards)

    async def release(self, *, until_resume: bool) -> ReleaseDone:
        """Unload everything at once. Raises LlmError STOP_FAILED."""
        await self.sleep.forget()
        token = secrets.token_hex(8)
        self._restoring.forget()
        for looked_up in self._looking_up:
            self._looking_up[looked_up] = True
        problem = None
        if until_resume:
            problem = await self._keep_released()
        else:
            self.wanted.forget()
        answer = await self._ask(token, ReleaseRequested(token, until_resume))
        if not isinstance(answer, ReleaseDone):
            raise TypeError(f"release answered with {answer!r}")
        return replace(answer, problem=problem or self.wanted.problem)

    async def _keep_released(self) -> LlmError | None:
        """Remember first that the card is given away; why that does not outlive the daemon, None where it does."""
        try:
            await asyncio.to_thread(self._holds.set_released, True)
        except LlmError as error:
            return error
        return None

    async def hold_loads(self, *, held: bool) -> None:
        """Have loads wait for the return of the machine, or no longer so."""
        token = secrets.token_hex(8)
        await self._ask(token, HoldLoads(token, held))

    async def unload_for_sleep(self) -> None:
        """Unload everything; loads that wait go on waiting. Raises LlmError STOP_FAILED."""
        token = secrets.token_hex(8)
        await self._ask(token, ReleaseRequested(token, until_resume=False, for_sleep=True))

    async def kill_unit(self, unit: str, number: int) -> None:
        """Send a signal to all processes of a unit. Raises LlmError UNIT_REFUSED, BUS_UNAVAILABLE."""
        await self.manager.kill(unit, number)

    async def resume(self) -> bool:
        """Take the card back; whether it was given away."""
        token = secrets.token_hex(8)
        answer = await self._ask(token, ResumeRequested(token))
        if not isinstance(answer, ResumeDone):
            raise TypeError(f"resume answered with {answer!r}")
        if answer.was_released:
            self.wanted.resumed()
        return answer.was_released

    async def pin(self, name: str, *, pinned: bool) -> Instance:
        """Keep a model from being evicted, or no longer so. Raises LlmError NOT_LOADED."""
        token = secrets.token_hex(8)
        answer = await self._ask(token, PinRequested(token, self.loaded(name).name, pinned))
        instance = self.scheduler.by_run(answer.run) if isinstance(answer, PinDone) else None
        if instance is None:
            raise TypeError(f"pin answered with {answer!r}")
        return instance

    async def autoload(self, name: str, *, marked: bool) -> None:
        """Load a model at every login, as it is loaded now where it is; or no longer.

        Raises:
            LlmError: UNKNOWN_MODEL, AMBIGUOUS_MODEL; INVALID_REQUEST where the settings say so; STATE_UNUSABLE.
        """
        if marked:
            found = await asyncio.to_thread(self.lookup.resolve, name)
            await self.wanted.mark(self.wanted.mark_of(found.name))
            return
        by_name = {each.mark.name: each for each in await self.wanted.marked()}
        known = tuple(Checkpoint(each, Path(each), (), 0) for each in by_name)
        try:
            found = resolve(name, known, self.settings.aliases)
        except LlmError as error:
            if error.code is ErrorCode.AMBIGUOUS_MODEL:
                raise
            await asyncio.to_thread(self.lookup.resolve, name)  # unknown, or only not marked
            return
        await self.wanted.unmark(found.name)
        if by_name[found.name].by_setting:
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"{found.name} is loaded at every login because the setting autoload names it",
                hint=f"Take it out of autoload in {self.config_file} (or LLLM3090_AUTOLOAD).",
            )

    async def reset(self, name: str) -> ResetDone:
        """Start a model again that failed or stays down, and forget what happened to it.

        Raises:
            LlmError: NOT_LOADED, AMBIGUOUS_MODEL.
        """
        token = secrets.token_hex(8)
        answer = await self._ask(token, ResetRequested(token, self.loaded(name).name))
        if not isinstance(answer, ResetDone):
            raise TypeError(f"reset answered with {answer!r}")
        return answer

    async def lease(self, name: str, lease: str) -> str:
        """Keep a model that serves from being unloaded for another one; its run. Raises LlmError NOT_LOADED."""
        token = secrets.token_hex(8)
        answer = await self._ask(token, LeaseAsked(token, name, lease))
        if not isinstance(answer, LeaseGiven):
            raise TypeError(f"a wish for a lease was answered with {answer!r}")
        return answer.run

    def give_back(self, lease: str, keep_alive_s: float | None = None) -> None:
        """A lease is no longer needed; an unknown one is no fault. See LeaseReturned."""
        self.submit(LeaseReturned(lease, keep_alive_s))

    def _withdraw(self, load_token: str) -> None:
        """Give up a load that is being looked up; nothing where it is not."""
        if load_token in self._looking_up:
            self._looking_up[load_token] = True
            self.offers.withdraw(load_token)

    async def cancel(self, load_token: str) -> CancelDone:
        """Withdraw a load by its token. Raises LlmError NO_SUCH_LOAD."""
        token = secrets.token_hex(8)
        if load_token in self._looking_up:
            self._withdraw(load_token)
            return CancelDone(token, load_token, stopped=True)
        answer = await self._ask(token, CancelRequested(token, load_token))
        if not isinstance(answer, CancelDone):
            raise TypeError(f"cancel answered with {answer!r}")
        return answer

    def loaded(self, name: str) -> Instance:
        """The instance a name means, by the same rules as for models. Raises LlmError NOT_LOADED, AMBIGUOUS_MODEL."""
        instances = self.scheduler.instances
        chosen = self._named(name, tuple(each.record.checkpoint() for each in instances))
        found = self.scheduler.instance(chosen)
        if found is None:
            raise not_loaded(name, (each.name for each in instances))
        return found

    def _loaded_or_waiting(self, name: str) -> str:
        """The same of what runs or waits for room, or to be loaded again after a sleep."""
        running = tuple(each.record.checkpoint() for each in self.scheduler.instances)
        names = {each.name for each in running}
        nowhere = (*self.sleep.pending, *(each.name for each in self.wanted.wants))
        waiting = {each: Checkpoint(each, Path(each), (), 0) for each in nowhere}
        waiting |= {each.name: each.event.checkpoint for each in self.scheduler.pending}
        return self._named(name, (*running, *(waiting[each] for each in waiting.keys() - names)))

    def _named(self, name: str, checkpoints: tuple[Checkpoint, ...]) -> str:
        if not checkpoints:
            raise not_loaded(name, ())
        try:
            return resolve(name, checkpoints, self.settings.aliases).name
        except LlmError as error:
            if error.code is ErrorCode.AMBIGUOUS_MODEL:
                raise
            raise not_loaded(name, (each.name for each in checkpoints)) from error

    def observe(self) -> Observation:
        """All cards now; one that cannot be read says why.

        Raises:
            LlmError: CARD_UNREADABLE for host memory, FILES_EXHAUSTED.
        """
        # A driver may list a process that has ended: what it holds is that run's for as long as it is charged.
        self._ended = {run: each for run, each in self._ended.items() if self.scheduler.ledger.of(run)}
        runs = self._ended | {
            each.run: RunProcesses(each.main_pid, each.control_group) for each in self.scheduler.instances
        }
        try:
            seen = observe(self.readers, runs, self._desktop_active, foreign=self.foreign_units.processes)
        except (OSError, LlmError) as error:
            shortage = exhausted(error)
            if shortage is None:
                raise
            raise shortage from error
        seen = self.card_health.judge(seen, self.readers)
        for state in seen.cards:
            for run, held in state.resident.items():
                if held and run not in self._ended and run in runs:
                    self._seen[run] = seen
        return seen

    def foreign_unit_views(self) -> tuple[ForeignUnitView, ...]:
        """Units that are left alone, with what they hold now where that can be read."""
        if not self.foreign_units.all:
            return ()
        observation = None
        try:
            observation = self.observe()
        except LlmError as error:
            log.warning("host memory cannot be read", extra={"reason": error.message})
        return self.foreign_units.views(observation)

    def tell_shortage(self, text: str) -> None:
        """Remember that clients could not be taken."""
        self.history.add(EventKind.DAEMON, message=text, actor=DAEMON)

    def look_at_cards(self) -> None:
        """Judge the cards anew where models run, so that what is said of those is true now."""
        if any(each.state not in ENDED for each in self.scheduler.instances):
            try:
                self.observe()
            except LlmError as error:
                log.warning("host memory cannot be read", extra={"reason": error.message})

    def risk_of(self, instance: Instance) -> str | None:
        """Why a card that a model runs on cannot be trusted, as it was judged last; None where all can."""
        if instance.state in ENDED:
            return None
        cards = (each.where for each in self.scheduler.ledger.of(instance.run))
        return next((risk for card in cards if (risk := self.card_health.risk(card)) is not None), None)

    async def _evidence_of(self, instance: Instance) -> str | None:
        """What a card of a model that has just ended has reported a moment ago."""
        try:
            self.observe()
        except LlmError as error:
            log.warning("host memory cannot be read", extra={"reason": error.message})
        if self.card_health.is_deaf:
            told = await recent_xids(EVIDENCE_S)
            self.card_health.hear(told, (reader.card for reader in self.readers))
        pids = frozenset(() if instance.main_pid is None else (instance.main_pid,))
        # Its memory may be back already, and the ledger has forgotten it.
        cards = {each.where for each in instance.record.shares(self.card.uuid)} - {HOST}
        found = (self.card_health.evidence(card, pids) for card in sorted(cards))
        return next((each for each in found if each is not None), None)

    def _remember_processes(self, run: str) -> None:
        instance = self.scheduler.by_run(run)
        if instance is not None:
            self._ended[run] = RunProcesses(instance.main_pid, instance.control_group)

    @property
    def card(self) -> Card:
        """The card with the most memory, or host memory in its place."""
        return self.readers[0].card

    async def look_for_desktop(self) -> None:
        """Find out whether a desktop session is on the card; what observe() says from now on."""
        self._desktop_active = await desktop_active(
            self.settings.desktop, self.card.kind, self.manager, self._sessions
        )

    async def _look_at_environment(self) -> None:
        """A session that has begun since may have exported more for all units; what is not answered soon stays."""
        try:
            async with asyncio.timeout(ENVIRONMENT_LIMIT_S):
                assignments = await self.manager.manager_environment()
        except (LlmError, TimeoutError) as error:
            log.info("the environment of units is taken as it was", extra={"reason": str(error)})
            return
        inherited, policy = environment_of(assignments), self.scheduler.policy
        if inherited != policy.inherited_environment:
            self.scheduler.policy = replace(policy, inherited_environment=inherited)

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
        self._chronicle.actors.asked(event)
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
        if isinstance(event, LoadRequested | Looked):
            try:
                observation = self.observe()
            except LlmError as error:
                self._undecided(event, error)
                return
        with self._chronicle.caused_by(event):
            for effect in self.scheduler.handle(event, observation):
                self._perform(effect)
        self.wanted.follow()  # before any of what was spawned has begun
        if freed := self._reconcile.freed():
            self._spawn(self._reconcile.look_at_all(freed))
        self._watching.arm()
        self.on_event()

    def _undecided(self, event: LoadRequested | Looked, error: LlmError) -> None:
        """Nothing is decided without a reading; who waits is looked at again later."""
        if isinstance(event, LoadRequested):
            self._answer(event.token, Failed(event.token, error))
        else:
            log.warning("host memory cannot be read", extra={"reason": error.message})
            self._watching.arm()

    def _writer_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self.failed.done():
            error = task.exception()
            # A scheduler that contradicts itself must not go on: end, be restarted, and adopt what runs.
            log.critical("the writer ended", exc_info=error)
            self.failed.set_exception(error or RuntimeError("the writer returned"))

    def _perform(self, effect: Effect) -> None:
        work = self._work_of(effect)
        if work is not None:
            task = self._spawn(work)
            if isinstance(effect, WatchLoading):
                self._watches[effect.run] = task
        elif isinstance(effect, Reply):
            self._answer(effect.token, effect)
        else:
            self._tell(effect)

    def _tell(self, effect: Effect) -> None:
        """What is done at once, and not to answer anybody."""
        match effect:
            case Resubmit():
                self.submit(effect.event)
            case LookAgain():
                self.submit(Looked())
            case Announce():
                self._announce(effect)
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
                return self.wanted.after_writing(lambda: self._effects.stop_unit(effect))
            case DrainUnit():
                return self._draining.drain(effect.run)
            case ReadPostMortem():
                return self._effects.post_mortem(effect)
            case WaitForMemory():
                self._remember_processes(effect.run)
                return self._effects.wait_for_memory(effect.run, self._seen.pop(effect.run, None))
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
                self._chronicle.hold(effect)
                return self._keep(effect)
            case Learn():
                self.statistics.measured(effect.name, effect.quoted_bytes, effect.measurement.peak_bytes)
                return asyncio.to_thread(self.lookup.learning.learn, effect.measurement, effect.quoted_bytes)
            case LearnOutOfMemory():
                return self._learn_out_of_memory(effect)
        return None

    def _answer(self, token: str, answer: Reply) -> None:
        with self._chronicle.answering(token):
            self._accounts.answered(token, answer)
        self._pass_on(token, answer)

    def _pass_on(self, token: str, answer: Answer) -> None:
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
        self._chronicle.change(change)
        if change.state in {InstanceState.GONE, InstanceState.FAILED}:
            self._spawn(self._chronicle.keep_memory(change.name, change.run))
        if change.previous is InstanceState.LOADING:
            watch = self._watches.pop(change.run, None)
            if watch is not None:
                watch.cancel()
        instance = self.scheduler.by_run(change.run)
        for token in instance.waiters if instance else ():
            self._pass_on(token, Moved(change.state))
        if change.state is InstanceState.GONE:
            self.since.pop(change.run, None)
        self.on_change()

    async def _keep(self, effect: KeepPin | KeepReleased) -> None:
        try:
            if isinstance(effect, KeepPin):
                await asyncio.to_thread(self._holds.set_pinned, effect.run, effect.pinned)
            else:
                await asyncio.to_thread(self._holds.set_released, effect.released)
        except LlmError as error:
            log.error("it is forgotten with the daemon's end", extra={"reason": error.message})

    async def _keep_only(self, runs: frozenset[str]) -> None:
        """Pins of what has ended while nobody looked are no longer remembered."""
        try:
            await asyncio.to_thread(self._holds.forget_all_but, runs)
        except LlmError as error:
            log.warning("old pins stay remembered", extra={"reason": error.message})

    async def _learn_out_of_memory(self, effect: LearnOutOfMemory) -> None:
        """Nothing is learnt of an engine from whom a stranger took the memory."""
        try:
            state = self.observe().of(effect.key.scope.card)
        except LlmError:
            return  # nobody can tell who has the memory
        if state is None or state.reading is None:
            return
        grown = foreign_bytes(state, self.scheduler.ledger) - effect.foreign_bytes
        if grown > deviation_limit_bytes(effect.foreign_bytes):
            log.info(
                "an engine ran out of memory that others have taken",
                extra={"model": effect.name, "grown_bytes": grown},
            )
            return
        await asyncio.to_thread(self.lookup.learning.learn_out_of_memory, effect.key, effect.quoted_bytes)

    def _fence(self, instance: Instance) -> None:
        if self.settings.device_memory_limit:
            cards = [reader.card for reader in self.readers]
            self._telling.fenced(instance, self.scheduler.ledger, cards)

    def _tell_progress(self, load: LoadProgress) -> None:
        instance = load.instance
        for token in instance.waiters:
            self._pass_on(token, load)
        self._telling.progress(load)

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
                if self._reconcile.is_news(event.status):
                    self._spawn(self._reconcile.look_at(event.status.name))
            case UnitGone():
                self.submit(UnitVanished(event.name, event.last))
                self._reconcile.vanished(event.name)
            case Relist():
                self._spawn(self._reconcile.compare())
            case BusLost():
                self.bus_loss.lost()
            case BusBack():
                self.bus_loss.back()

    def _fail(self, error: LlmError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
