"""The daemon: its parts put together, its face to whoever asks, and what the one writer does with each event.

The writer feeds events to the scheduler and hands on the effects it returns. Everything slow (systemd jobs, waiting
for an engine, for memory, for the journal) runs in tasks beside the writer and comes back as an event, so one model's
trouble never blocks another's request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lllm3090d.bus.systemd import BusBack, BusLost, Relist, SystemdManager, UnitChanged, UnitGone
from lllm3090d.bus.systemd import Event as BusEvent
from lllm3090d.bus.thread import BusThread
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardReader
from lllm3090d.serving.accounts import Accounts
from lllm3090d.serving.activity import ActivityWatch, in_flight
from lllm3090d.serving.actors import DAEMON
from lllm3090d.serving.announcing import Announcing
from lllm3090d.serving.answers import Answer, Answers
from lllm3090d.serving.autoload import Autoload
from lllm3090d.serving.bus_loss import BusLoss
from lllm3090d.serving.card_health import CardHealth
from lllm3090d.serving.chronicle import Chronicle
from lllm3090d.serving.desktop_wait import DesktopWait, Seats, no_wait
from lllm3090d.serving.disk_rates import DiskRates
from lllm3090d.serving.draining import Draining
from lllm3090d.serving.effects import Effects
from lllm3090d.serving.engine_logs import DIRECTORY as LOGS
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.event_table import Bounds, EventTable, bounds_of
from lllm3090d.serving.events import (
    CancelDone,
    CancelRequested,
    Event,
    Failed,
    HoldLoads,
    LeaseAsked,
    LeaseGiven,
    LeaseReturned,
    LoadRequested,
    Looked,
    Observation,
    PinDone,
    PinRequested,
    ReleaseDone,
    ReleaseRequested,
    ResetDone,
    ResetRequested,
    ResumeDone,
    ResumeRequested,
    UnitSeen,
    UnitVanished,
    UnloadDone,
    UnloadRequested,
)
from lllm3090d.serving.foreign_units import ForeignUnits
from lllm3090d.serving.history import History, now_text
from lllm3090d.serving.holding import Holding
from lllm3090d.serving.holds import Holds
from lllm3090d.serving.instance import ENDED
from lllm3090d.serving.lessons import Lessons
from lllm3090d.serving.load_lookup import LoadLookup
from lllm3090d.serving.loaded_names import LoadedNames
from lllm3090d.serving.log_keeper import LogKeeper
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.observer import Observer
from lllm3090d.serving.offering import Offers
from lllm3090d.serving.performing import Performer
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.policy import environment_of, policy_of
from lllm3090d.serving.reconcile import Reconciler
from lllm3090d.serving.refusals import stopping
from lllm3090d.serving.restoring import Restoring
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.side_tasks import SideTasks
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
from lllm3090d.serving.writer import Writer
from lllm3090d.setting_table import NEEDS_RESTART
from lllm3090d.settings import Settings, load_settings
from lllm3090d.wire import EventKind, ForeignUnitView

log = logging.getLogger(__name__)


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
        seats: Seats | None = None,
    ) -> None:
        self.bus = bus
        self.settings = settings
        self.config_file = config_file
        self.readers = tuple(readers)
        self.cards_problem: LlmError | None = None  # why nobody knows whether there was a card before
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
        self._answers = Answers(self._chronicle, self._accounts)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bus_loss = BusLoss(self.history, self._fail)
        self._tasks = SideTasks(self._task_failed)
        self._writer = Writer(self._apply, self.failed)
        self._stopping = False
        # Called after each change of an instance's state.
        self.on_change: Callable[[], None] = lambda: None
        # Called after each event, when all that follows from it at once is done.
        self.on_event: Callable[[], None] = lambda: None
        self.foreign_units = ForeignUnits(lambda unit: self.scheduler.by_unit(unit) is not None)
        self._observer = Observer(
            readers=self.readers,
            scheduler=self.scheduler,
            foreign_units=self.foreign_units,
            card_health=self.card_health,
            desktop=lambda: self.settings.desktop,
            units=manager,
            sessions=logind,
        )
        announcing = Announcing(
            scheduler=self.scheduler,
            answers=self._answers,
            chronicle=self._chronicle,
            telling=self._telling,
            spawn=self._tasks.spawn,
            on_change=self._changed,
        )
        self.since = announcing.since  # run -> time of its last change of state
        # One for both: each look resets what the engine tells of the time since the last.
        activity = ActivityWatch()
        effects = Effects(
            manager=manager,
            scheduler=self.scheduler,
            settings=lambda: self.settings,
            observe=self.observe,
            ask=activity.of,
            submit=self.submit,
            on_progress=announcing.progress,
            fence=self._fence,
            logs=self.logs,
            card_evidence=self._observer.evidence_of,
            disk_rates=DiskRates(self.lookup.store),
        )
        self._reconcile = Reconciler(
            manager=manager,
            scheduler=self.scheduler,
            readers=self.readers,
            history=self.history,
            submit=self.submit,
            units=UnitReader(
                self.lookup,
                lambda: self._observer.cards,
                lambda: self.scheduler.policy.plan,
            ),
            foreign=self.foreign_units,
        )
        self._holding = Holding(Holds(self.lookup.store), self._chronicle)
        self._loads = LoadLookup(
            lookup=self.lookup,
            offers=self.offers,
            scheduler=self.scheduler,
            observer=self._observer,
            log_keeper=self.log_keeper,
            environment=manager.manager_environment,
            settings=lambda: self.settings,
        )
        self._sleep_store = SleepStore(self.lookup.store)
        self.sleep = Sleep(
            house=self,
            source=logind,
            store=self._sleep_store,
            spawn=self._tasks.spawn,
            left_alone=lambda: self.foreign_units.names,
        )
        self._restoring = Restoring(
            load=self.load,
            withdraw=self._loads.withdraw,
            scheduler=self.scheduler,
            history=self.history,
            submit=self.submit,
            spawn=self._tasks.spawn,
        )
        self._wanted_store = WantedStore(self.lookup.store)
        self.desktop_wait = DesktopWait(
            settings=lambda: self.settings,
            card_kind=lambda: self.card.kind,
            units=manager,
            seats=seats,
            foreign_bytes=self._observer.foreign_bytes,
            excuse=lambda: no_wait(self.scheduler, is_owed=self.wanted.waits_for_desktop),
            history=self.history,
        )
        self.wanted = WantedSet(
            scheduler=self.scheduler,
            restoring=self._restoring,
            store=self._wanted_store,
            history=self.history,
            spawn=self._tasks.spawn,
            configured=lambda: self.settings.autoload_names,
            named=lambda name: self.lookup.resolve(name).name,
            settled=self.desktop_wait.settled,
            unsettled=lambda: self.desktop_wait.why,
        )
        self._names = LoadedNames(
            self.scheduler,
            nowhere=lambda: (*self.sleep.pending, *(each.name for each in self.wanted.wants)),
            aliases=lambda: self.settings.aliases,
        )
        self._autoload = Autoload(self.lookup, self.wanted, lambda: self.settings, config_file)
        self._performer = Performer(
            answers=self._answers,
            announcing=announcing,
            telling=self._telling,
            effects=effects,
            draining=Draining(self.scheduler, in_flight, self.submit),
            restoring=self._restoring,
            wanted=self.wanted,
            observer=self._observer,
            holding=self._holding,
            lessons=Lessons(self.lookup.learning, self.statistics, self.scheduler, self.observe),
            tasks=self._tasks,
            submit=self.submit,
        )
        self._watching = Watching(
            scheduler=self.scheduler,
            observe=self.observe,
            ask=activity.of,
            submit=self.submit,
            tell=self._telling.pressure,
            settings=lambda: self.settings,
            spawn=self._tasks.spawn,
        )

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen to systemd, adopt what runs, begin to write."""
        self.manager.set_listener(self._on_bus_event)
        inherited = environment_of(await self.manager.manager_environment())
        self.scheduler.policy = policy_of(self.settings, inherited)
        self.log_keeper.start(self._tasks.spawn, self._journal_probed)
        numbers = await self.history.open()
        self._chronicle.started(numbers)
        await self.look_for_desktop()
        released, pinned = await self._holding.remembered()
        self.scheduler.released = released
        # Before the writer: what comes of a unit that has failed depends on what came before.
        remembered = await asyncio.to_thread(self._wanted_store.remembered)
        await self._reconcile.adopt(self._apply, pinned, {each.name: each.run for each in remembered.wants})
        # Before anybody can pin anything.
        await self._holding.keep_only(frozenset(each.run for each in self.scheduler.instances))
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
        self._writer.start()
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
        self._answers.fail_all(stopping())
        self._tasks.cancel()
        self._writer.cancel()
        await self._tasks.ended()
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
        await self._writer.answers()

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
        if token in self._answers or token in self._loads:
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"the token {token} belongs to another load",
                hint="Choose a token of its own for every load.",
            )
        if self._stopping:
            raise stopping()
        event = await self._loads.event(token, name, wish)
        if self._stopping:  # since the look-up began: nobody would answer any more
            raise stopping()
        self._answers.expect(token)
        self._accounts.begin(token, event.checkpoint.name)
        self.submit(event)
        first = await self._answers.next(token)
        if isinstance(first, Failed):
            self._answers.forget(token)
            raise first.error
        return token, self._answers.follow(token, first)

    def forget(self, token: str) -> None:
        """Nobody listens to the answers of this load any more; the load goes on."""
        self._answers.forget(token)

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
        found = name if self.scheduler.is_to_come_back(name) else self._names.loaded_or_waiting(name)
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

    async def release(self, *, until_resume: bool) -> ReleaseDone:
        """Unload everything at once. Raises LlmError STOP_FAILED."""
        await self.sleep.forget()
        token = secrets.token_hex(8)
        self._restoring.forget()
        self._loads.refuse_all()
        problem = None
        if until_resume:
            problem = await self._holding.keep_released()
        else:
            self.wanted.forget()
        answer = await self._ask(token, ReleaseRequested(token, until_resume))
        if not isinstance(answer, ReleaseDone):
            raise TypeError(f"release answered with {answer!r}")
        return replace(answer, problem=problem or self.wanted.problem)

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
            await self._autoload.mark(name)
        else:
            await self._autoload.unmark(name)

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

    async def cancel(self, load_token: str) -> CancelDone:
        """Withdraw a load by its token. Raises LlmError NO_SUCH_LOAD."""
        token = secrets.token_hex(8)
        if load_token in self._loads:
            self._loads.withdraw(load_token)
            return CancelDone(token, load_token, stopped=True)
        answer = await self._ask(token, CancelRequested(token, load_token))
        if not isinstance(answer, CancelDone):
            raise TypeError(f"cancel answered with {answer!r}")
        return answer

    def wish_as_it_was(self, name: str) -> LoadWish | None:
        """How a model is loaded that is wanted, or slept: as it was asked for. None of any other; an exact name."""
        return self.wanted.wish(name) or self.sleep.wish(name)

    def loaded(self, name: str) -> Instance:
        """The instance a name means, by the same rules as for models. Raises LlmError NOT_LOADED, AMBIGUOUS_MODEL."""
        return self._names.loaded(name)

    @property
    def card(self) -> Card:
        """The card with the most memory, or host memory in its place."""
        return self._observer.card

    def observe(self) -> Observation:
        """All cards now; one that cannot be read says why.

        Raises:
            LlmError: CARD_UNREADABLE for host memory, FILES_EXHAUSTED.
        """
        return self._observer.observe()

    async def look_for_desktop(self) -> None:
        """Find out whether a desktop session is on the card; what observe() says from now on."""
        await self._observer.look_for_desktop()

    def look_at_cards(self) -> None:
        """Judge the cards anew where models run, so that what is said of those is true now."""
        self._observer.look_at_cards()

    def risk_of(self, instance: Instance) -> str | None:
        """Why a card that a model runs on cannot be trusted, as it was judged last; None where all can."""
        return self._observer.risk_of(instance)

    def foreign_unit_views(self) -> tuple[ForeignUnitView, ...]:
        """Units that are left alone, with what they hold now where that can be read."""
        return self._observer.foreign_unit_views()

    def tell_shortage(self, text: str) -> None:
        """Remember that clients could not be taken."""
        self.history.add(EventKind.DAEMON, message=text, actor=DAEMON)

    async def _ask(self, token: str, event: Event) -> Answer:
        if not self._writer.is_at_work:
            raise stopping()
        self._answers.expect(token)
        try:
            self.submit(event)
            answer = await self._answers.next(token)
        finally:
            self._answers.forget(token)
        if isinstance(answer, Failed):
            raise answer.error
        return answer

    # --- the writer ---------------------------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Hand an event to the writer."""
        self._chronicle.actors.asked(event)
        self._writer.submit(event)

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
                self._performer.perform(effect)
        self.wanted.follow()  # before any of what was spawned has begun
        self.desktop_wait.nudge()
        if freed := self._reconcile.freed():
            self._tasks.spawn(self._reconcile.look_at_all(freed))
        self._watching.arm()
        self.on_event()

    def _undecided(self, event: LoadRequested | Looked, error: LlmError) -> None:
        """Nothing is decided without a reading; who waits is looked at again later."""
        if isinstance(event, LoadRequested):
            self._answers.reply(event.token, Failed(event.token, error))
        else:
            log.warning("host memory cannot be read", extra={"reason": error.message})
            self._watching.arm()

    def _fence(self, instance: Instance) -> None:
        if self.settings.device_memory_limit:
            self._telling.fenced(instance, self.scheduler.ledger, self._observer.cards)

    def _changed(self) -> None:
        self.on_change()

    def _task_failed(self, error: BaseException) -> None:
        if not self.failed.done():
            log.critical("a task ended unexpectedly", exc_info=error)
            self.failed.set_exception(error)

    # --- systemd's news -----------------------------------------------------------------------------------------

    def _on_bus_event(self, event: BusEvent) -> None:
        match event:
            case UnitChanged():
                self.submit(UnitSeen(event.status))
                if self._reconcile.is_news(event.status):
                    self._tasks.spawn(self._reconcile.look_at(event.status.name))
            case UnitGone():
                self.submit(UnitVanished(event.name, event.last))
                self._reconcile.vanished(event.name)
            case Relist():
                self._tasks.spawn(self._reconcile.compare())
            case BusLost():
                self.bus_loss.lost()
            case BusBack():
                self.bus_loss.back()

    def _fail(self, error: LlmError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
