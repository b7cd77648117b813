"""Keeping the wanted set, and loading again what is wanted and does not run: at a start, at a login, at a resumption.

The set follows from what the scheduler says, after every event. It is written beside the event loop; a unit is not
stopped before that is done, unless the disk is slower than a sleep or an eviction can wait for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lllm3090d.errors import LlmError
from lllm3090d.serving.events import EndWasAsked, Event, FailureRecalled, Restore, VictimsOwed
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import ON_THE_WAY_UP, SERVING
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.restoring import Restoring
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.wanted import (
    Beginning,
    Life,
    Lot,
    Occasion,
    Scene,
    Want,
    beginning,
    failure_of,
    followed,
    occasion,
)
from lllm3090d.serving.wanted_store import Mark, Remembered, WantedStore
from lllm3090d.wire import EventKind

log = logging.getLogger(__name__)

# A stop waits so long for the set to be written: more than the commit of one small transaction takes.
WRITE_LIMIT_S = 0.5
REASONS: Mapping[Occasion, str] = {
    Occasion.CONTINUED: "the daemon was ended before its engine was started",
    Occasion.LOGIN: "loaded at every login",
    Occasion.MANAGER_DIED: "the user manager died",
}
RESUMED = "the card is no longer released"


@dataclass(frozen=True, slots=True)
class Marked:
    """A model that is loaded at every login.

    Attributes:
        mark: under its name; under what the settings call it, where no model has that name.
        by_setting: the settings say so; else a command.
        problem: why there is no such model.
    """

    mark: Mark
    by_setting: bool
    problem: LlmError | None = None


async def at_once() -> None:
    """Nothing has to settle before models are loaded at a login."""


class WantedSet:
    """The wanted set of a daemon.

    Args:
        scheduler: read, never changed.
        restoring: asks for models.
        store: keeps the set.
        history: told what becomes of it.
        spawn: runs a coroutine beside the writer.
        configured: names that the settings mark autoload, in their order.
        named: the name of a model by what a person calls it; blocking, raises LlmError.
        settled: returns once what a login starts has taken its memory.
        unsettled: what is waited for until then, as the end of a sentence; empty where nothing is.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        restoring: Restoring,
        store: WantedStore,
        history: History,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        configured: Callable[[], Sequence[str]] = tuple,
        named: Callable[[str], str] = str,
        settled: Callable[[], Awaitable[None]] = at_once,
        unsettled: Callable[[], str] = str,
    ) -> None:
        self._scheduler = scheduler
        self._restoring = restoring
        self._store = store
        self._history = history
        self._spawn = spawn
        self._configured = configured
        self._named = named
        self._settled = settled
        self._unsettled = unsettled
        restoring.on_settled = self.follow
        self._wants: dict[str, Want] = {}
        self._marks: tuple[Mark, ...] = ()  # made by command
        self._life = Life("", "")
        self._follows = False
        self._begun: Beginning | None = None
        self._occasion = Occasion.CONTINUED
        self._is_beginning = False  # under another user manager, until what is due then is asked for
        self._due: tuple[Want, ...] = ()  # what waits for the desktop to settle
        self._version = self._written_version = 0
        # Called after each change of the set.
        self.on_change: Callable[[], None] = lambda: None
        self._writing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        # Why the set does not outlive the daemon; None where it does.
        self.problem: LlmError | None = None

    # --- reading ------------------------------------------------------------------------------------------------

    @property
    def wants(self) -> tuple[Want, ...]:
        """All that are wanted, in the order in which they came to be."""
        return tuple(self._wants.values())

    def wish(self, name: str) -> LoadWish | None:
        """How one that is wanted is loaded; None of any other."""
        want = self._wants.get(name)
        return None if want is None else want.wish()

    def mark_of(self, name: str) -> Mark:
        """How a model would be loaded at a login, were it marked now: as it is wanted, else as the settings say."""
        want = self._wants.get(name)
        if want is None:
            return Mark(name=name)
        return Mark(
            name=name, request=want.request, arguments=want.arguments, card=want.card, pinned=want.pinned
        )

    async def marked(self) -> tuple[Marked, ...]:
        """All that are loaded at a login: those of the settings in their order, then by command, the oldest first."""
        by_command = {each.name: each for each in self._marks}
        configured = tuple(self._configured())
        found: dict[str, Marked] = {}
        for told in configured:
            try:
                name = await asyncio.to_thread(self._named, told)
            except LlmError as error:
                found.setdefault(told, Marked(Mark(name=told), by_setting=True, problem=error))
            else:
                found.setdefault(name, Marked(by_command.get(name) or Mark(name=name), by_setting=True))
        for name, mark in by_command.items():
            found.setdefault(name, Marked(mark, by_setting=False))
        return tuple(found.values())

    def why_down(self, want: Want) -> str:
        """Why one does not run, for a person; empty where it does, or an instance says so."""
        name = want.name
        if self._scheduler.instance(name) is not None:
            return ""
        match want.lot:
            case Lot.RELEASED:
                return "the card is released: it is loaded again after a resumption"
            case Lot.EVICTED:
                return "it made room for a load that has not come to its end"
        for each in self._scheduler.pending:
            if each.name == name:
                return f"it waits for {each.why}"
        is_coming = name in self._restoring.coming
        problem = self._restoring.problems.get(name)
        if problem is not None:
            later = ", and is tried later" if is_coming else ""
            return f"it could not be loaded again{later}: {problem.message}"
        return "it is being loaded again" if is_coming else self._why_not_yet(name)

    def _why_not_yet(self, name: str) -> str:
        unsettled = self._unsettled()
        waits = unsettled and any(each.name == name for each in self._due)
        return f"it waits for the desktop to settle: {unsettled}" if waits else "its turn has not come"

    @property
    def waits_for_desktop(self) -> bool:
        """Whether anything that waits for the desktop to settle is still to be loaded."""
        return any(self._is_due(each.name) for each in self._due)

    def problem_of(self, name: str) -> LlmError | None:
        """Why the last try to load one came to nothing."""
        return self._restoring.problems.get(name)

    # --- the start ----------------------------------------------------------------------------------------------

    def begin(
        self,
        remembered: Remembered,
        life: Life,
        apply: Callable[[Event], None],
        asleep: Collection[str],
        *,
        is_behind: bool = False,
    ) -> None:
        """Take up what the daemon's last life has left, once units were adopted; nothing is loaded yet.

        Args:
            remembered: what was kept.
            life: the present one.
            apply: carries out an event.
            asleep: models that were unloaded for a sleep.
            is_behind: the last life could not write, so that what is not among what was kept may be wanted.
        """
        self._life = life
        self._occasion = occasion(life, remembered.life, has_units=bool(self._scheduler.instances))
        begun = self._begun = beginning(
            remembered.wants,
            self._scene(),
            self._occasion,
            asleep=asleep,
            is_known=remembered.life is not None and not is_behind,
        )
        self._wants = dict(begun.kept)
        for run, is_wanted in begun.ended.items():
            apply(EndWasAsked(run, is_wanted))
        for want in begun.failed:
            apply(_recalled(want))
        for run, wants in begun.owed.items():
            apply(VictimsOwed(run, tuple(each.evicted() for each in wants)))
        why = "it was stopped while no daemon was there"
        if is_behind:
            why = "it does not run, and what became of it could not be recorded"
        for name in begun.lost:
            text = f"no longer wanted: {why}"
            log.info("%s: %s", name, text)
            self._history.add(EventKind.RESTORE, model=name, message=text)
        # Also where the daemon was killed in the midst of that, and something runs that was loaded meanwhile.
        self._is_beginning = not _is_same(life, remembered.life)
        self._follows = True
        self._changed()
        self.follow()

    def go_on(self) -> None:
        """Load what is wanted and does not run; the writer runs."""
        self._spawn(self._go_on())

    async def _go_on(self) -> None:
        self._marks = await asyncio.to_thread(self._store.marks)
        begun, what = self._begun, self._occasion
        if begun is None:
            return
        due = begun.load
        if what is Occasion.LOGIN:
            # Before the desktop is waited for: what a person gives up meanwhile is not loaded then.
            due = self._want_marked(await self.marked())
        try:
            if self._is_beginning and due:
                due = await self._once_settled(due)
            # A daemon that is killed, or stopped, before this begins the login anew.
            await self._live(self._life)
        finally:
            self._due = ()
        self._is_beginning = False
        await self._load(due, REASONS[what])

    async def _once_settled(self, due: tuple[Want, ...]) -> tuple[Want, ...]:
        """What of this is still to be loaded once the desktop has settled."""
        self._due = due
        await self._settled()
        await self._let_go_unmarked()
        if self._scheduler.released:
            for name in (each.name for each in due if self._is_due(each.name)):
                self._wants[name] = self._wants[name].model_copy(update={"lot": Lot.RELEASED})
        self._changed()
        self._due = tuple(each for each in due if self._is_due(each.name))
        return self._due

    async def _let_go_unmarked(self) -> None:
        """What waits only because it was marked, for it never ran, is not wanted any more where it is not marked."""
        if not self._due:
            return
        marked = {each.mark.name for each in await self.marked()}
        for name in (each.name for each in self._due if not each.run and each.name not in marked):
            if self._is_due(name):
                del self._wants[name]
        self._changed()

    def _want_marked(self, marked: Sequence[Marked]) -> tuple[Want, ...]:
        """From now on these are wanted, but what a person has loaded meanwhile is as it is."""
        lot = Lot.RELEASED if self._scheduler.released else Lot.COMING
        due = []
        for each in marked:
            mark, problem = each.mark, each.problem
            if problem is not None:
                text = f"not loaded ({REASONS[Occasion.LOGIN]}): {problem.message}"
                log.warning("%s: %s", mark.name, text)
                details = {"problem": problem.problem()}
                self._history.add(EventKind.RESTORE, model=mark.name, message=text, details=details)
            elif mark.name not in self._wants and self._scheduler.instance(mark.name) is None:
                want = self._wants[mark.name] = mark.want().model_copy(update={"lot": lot})
                due.append(want)
        self._changed()
        return tuple(due)

    async def _load(self, wants: Sequence[Want], reason: str) -> None:
        if not wants or self._scheduler.released:
            return
        names = ", ".join(each.name for each in wants)
        log.info("loading again: %s", names, extra={"reason": reason})
        self._history.add(
            EventKind.RESTORE,
            message=f"to be loaded again ({reason}): {names}",
            details={"models": [each.name for each in wants]},
        )
        await self._restoring.one_after_another((_restore(each, reason) for each in wants), self._is_due)

    def _is_due(self, name: str) -> bool:
        want, instance = self._wants.get(name), self._scheduler.instance(name)
        is_up = instance is not None and instance.state in SERVING | ON_THE_WAY_UP
        return want is not None and want.lot is Lot.COMING and not is_up

    # --- later --------------------------------------------------------------------------------------------------

    def resumed(self) -> None:
        """The card is no longer given away: what was wanted comes back."""
        back = []
        for name, want in tuple(self._wants.items()):
            is_there = self._scheduler.instance(name) is not None or name in self._restoring.coming
            if want.lot in {Lot.RELEASED, Lot.COMING} and not is_there:
                back.append(want.model_copy(update={"lot": Lot.COMING}))
                self._wants[name] = back[-1]
        if back:
            self._changed()
        awaited = {each.name for each in self._due}  # these come by themselves
        due = [each for each in back if each.name not in awaited]
        if due:
            self._spawn(self._load(due, RESUMED))

    def forget(self, name: str | None = None) -> Want | None:
        """A person wants a model that does not run gone, or everything; what was remembered of it."""
        names = tuple(self._wants) if name is None else (name,)
        gone = [self._wants.pop(each) for each in names if each in self._wants]
        if gone:
            self._changed()
        return gone[0] if gone else None

    def follow(self) -> None:
        """Something has happened: the set as it follows from that."""
        if not self._follows:
            return
        after = followed(self._wants, self._scene())
        if after != self._wants:
            self._wants = after
            self._changed()

    async def mark(self, mark: Mark) -> None:
        """Load a model at every login. Raises LlmError STATE_UNUSABLE."""
        await asyncio.to_thread(self._store.mark, mark)
        self._marks = await asyncio.to_thread(self._store.marks)

    async def unmark(self, name: str) -> bool:
        """No longer; whether it was marked by command. Raises LlmError STATE_UNUSABLE."""
        was_marked = any(each.name == name for each in self._marks)
        await asyncio.to_thread(self._store.unmark, name)
        self._marks = await asyncio.to_thread(self._store.marks)
        await self._let_go_unmarked()
        return was_marked

    def _scene(self) -> Scene:
        scheduler = self._scheduler
        return Scene(
            instances=scheduler.instances,
            evicted=scheduler.evicted_for(),
            coming=self._restoring.coming,
            released=scheduler.released,
            ends=scheduler.ends(),
        )

    # --- what is written ----------------------------------------------------------------------------------------

    async def written(self) -> LlmError | None:
        """Wait until the set is written as it is now, but not for long; why it is not kept, None where it is."""
        deadline_s = asyncio.get_running_loop().time() + WRITE_LIMIT_S
        version = self._version
        while self._written_version < version and self._writing is not None:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0 or self._writing.done():
                break
            await asyncio.wait({self._writing}, timeout=left_s)
        return self.problem

    async def after_writing(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do what must not be done before the set is written."""
        await self.written()
        await work()

    async def end(self) -> None:
        """The daemon ends in order, and says so to the next one."""
        if self._follows:
            await self.written()
            if not self._is_beginning:
                await self._live(Life(self._life.boot, self._life.session, ended=True))

    async def _live(self, life: Life) -> None:
        self._tell_problem(await self._keep(life))

    async def _keep(self, life: Life | None = None) -> LlmError | None:
        async with self._lock:  # what was decided last is written last
            return await asyncio.to_thread(self._store.keep, tuple(self._wants.values()), life)

    def _changed(self) -> None:
        self.on_change()
        self._version += 1
        if self._writing is None or self._writing.done():
            self._writing = self._spawn(self._write())

    async def _write(self) -> None:
        while self._written_version < self._version:
            version = self._version
            self._tell_problem(await self._keep())
            self._written_version = version

    def _tell_problem(self, problem: LlmError | None) -> None:
        """Once for each trouble."""
        if problem is not None and self.problem is None:
            log.error("%s", problem.message, extra={"hint": problem.hint})
        self.problem = problem


def _is_same(life: Life, before: Life | None) -> bool:
    """Whether both are under the same user manager."""
    return before is not None and (life.boot, life.session) == (before.boot, before.session)


def _restore(want: Want, reason: str) -> Restore:
    return Restore(
        want.name,
        want.request,
        want.arguments,
        want.pinned,
        want.card,
        reason,
        least_context_tokens=want.least_context_tokens,
    )


def _recalled(want: Want) -> FailureRecalled:
    is_down = want.lot in {Lot.FAILED, Lot.LATCHED}
    return FailureRecalled(
        name=want.name,
        ends=want.ends,
        record=want.record if is_down else None,
        arguments=want.arguments,
        card=want.card,
        pinned=want.pinned,
        failure=failure_of(want),
        retry_at_s=want.retry_at_s if want.lot is Lot.FAILED else None,
        next_attempt=want.next_attempt,
        latch_reason=want.latch_reason,
        way_out=want.way_out,
    )
