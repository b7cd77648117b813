"""Sleep of the machine: models are unloaded before it and loaded again after it.

What a card holds may be lost in a suspend, and a context on it may be broken for good, so by default nothing of ours is
on an NVIDIA card then. logind waits for our lock, but not long (5 s unless set otherwise): within that time systemd
sends SIGTERM, then we SIGKILL, and what is not back when it is over is said in the history. After the return a card
is read before anything is loaded on it; while it is in error nothing is, and it is read again at growing intervals.

One task takes the news of logind in order; another loads what is to be loaded again, one model after the other.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from lllm3090d.bus.logind import SleepNews
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.units import mib_text
from lllm3090d.serving.desktop import Sessions
from lllm3090d.serving.events import Failed
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import ENDED, ON_THE_WAY_UP, SERVING, InstanceState
from lllm3090d.serving.observation import Observation
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.sleep_set import Sleeper, SleepStore, merged, sleepers
from lllm3090d.settings import Settings, SuspendPolicy
from lllm3090d.wire import EventKind
from lllm3090d.wire_sleep import SuspendPhase, SuspendView

log = logging.getLogger(__name__)

WHY = "models are unloaded from the graphics card"  # shown by systemd-inhibit --list
# Of the time that logind gives, kept for the release of the lock to be noticed.
MARGIN_S = 0.5
# Of the rest, the part after which engines that do not end are killed.
GRACE_SHARE = 0.5
# More than the commit of one small transaction takes; the sleep is not kept up by a disk.
KEEP_LIMIT_S = 0.5
# While asleep, which lasts seconds on a clock that stands still in a suspend: has the signal of the return been missed?
ASK_EVERY_S = 5.0
CARD_FIRST_S, CARD_LAST_S = 1.0, 30.0
_AGAIN_LATER = frozenset({ErrorCode.CARD_UNREADABLE, ErrorCode.CARD_AT_RISK, ErrorCode.SHUTTING_DOWN})


class SleepSource(Sessions, Protocol):
    """Who tells of sleep and waits for us; see :class:`lllm3090d.bus.logind.Logind`."""

    delay_s: float

    @property
    def problem(self) -> LlmError | None:
        """Why nobody tells, or would wait; None where all is well."""
        ...

    @property
    def delays(self) -> bool:
        """Whether it waits for us."""
        ...

    def set_listener(self, listener: Callable[[SleepNews], None]) -> None:
        """Have ``listener`` called with all news."""
        ...

    async def look(self) -> bool | None:
        """Whether a sleep is being prepared; None where nobody can tell."""
        ...

    async def take_lock(self, why: str) -> None:
        """Have it wait for us."""
        ...

    def release_lock(self) -> None:
        """It need not wait any more."""
        ...


class House(Protocol):
    """What of the daemon is needed here."""

    scheduler: Scheduler
    history: History
    settings: Settings

    @property
    def card(self) -> Card:
        """The card with the most memory, or host memory in its place."""
        ...

    def observe(self) -> Observation:
        """All cards now. Raises LlmError CARD_UNREADABLE for host memory."""
        ...

    async def hold_loads(self, *, held: bool) -> None:
        """Have loads wait, or no longer so."""
        ...

    async def unload_for_sleep(self) -> None:
        """Unload everything; returns when the memory is back. Raises LlmError STOP_FAILED."""
        ...

    async def kill_unit(self, unit: str, number: int) -> None:
        """Send a signal to all processes of a unit. Raises LlmError."""
        ...

    async def load(self, name: str, wish: LoadWish) -> tuple[str, AsyncGenerator[Any, None]]:
        """Load a model. Raises LlmError."""
        ...


class Sleep:
    """Unloads before the machine sleeps, and loads again after.

    Args:
        house: the daemon.
        source: who tells of sleep; None where nobody does.
        store: keeps what is to be loaded again.
        spawn: runs a coroutine beside the writer.
        left_alone: units that hold memory and are not stopped.
    """

    def __init__(
        self,
        *,
        house: House,
        source: SleepSource | None,
        store: SleepStore,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        left_alone: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._house = house
        self._left_alone = left_alone
        self._source = source
        self._store = store
        self._spawn = spawn
        self._news: asyncio.Queue[SleepNews] = asyncio.Queue()
        self._phase = SuspendPhase.AWAKE  # of the machine; what is loaded again is told by the rest
        self._set: tuple[Sleeper, ...] = ()
        self._problem: LlmError | None = None  # of a card, while something is to be loaded on it
        self._sleeps = 0  # a load that was begun before the last one tells nothing of now
        self._writing = asyncio.Lock()
        self._unloading: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self._unanswered = 0

    # --- for the daemon -------------------------------------------------------------------------------------------

    @property
    def policy(self) -> SuspendPolicy:
        """What the settings say, auto decided: NVIDIA's driver alone does not keep all that a card holds by itself."""
        wanted = self._house.settings.suspend
        if wanted is not SuspendPolicy.AUTO:
            return wanted
        on_nvidia = self._house.card.kind is CardKind.NVIDIA
        return SuspendPolicy.UNLOAD if on_nvidia else SuspendPolicy.KEEP

    @property
    def pending(self) -> tuple[str, ...]:
        """Models that are to be loaded again."""
        return tuple(each.name for each in self._set)

    def wish(self, name: str) -> LoadWish | None:
        """How a model is loaded again after the sleep; None of one that is not."""
        return next((each.wish() for each in self._set if each.name == name), None)

    async def start(self) -> None:
        """Take up what the daemon's last life has left; the news of logind are taken from now on."""
        self._set = await asyncio.to_thread(self._store.kept)
        going = None
        if self._source is not None:
            self._source.set_listener(self._news.put_nowait)
            going = await self._source.look()
            if going:
                await self._house.hold_loads(held=True)  # before anybody can ask for one
                self._news.put_nowait(SleepNews.GOING)
            else:
                await self._arm()
            self._spawn(self._listen())
        if self._set and not going:
            self._tell(EventKind.RESUME, f"loading again what was unloaded for a sleep: {_names(self._set)}")
            self._restore_soon()

    def settings_changed(self) -> None:
        """The policy may be another one: have logind wait for us, or no longer so."""
        if self._phase is SuspendPhase.AWAKE and self._source is not None:
            self._spawn(self._arm())

    async def forget(self, name: str | None = None) -> Sleeper | None:
        """A person has unloaded a model, or all: it is not loaded again. What was remembered of it."""
        gone = [each for each in self._set if name in {None, each.name}]
        if not gone:
            return None
        self._set = tuple(each for each in self._set if each not in gone)
        self._nudge.set()
        await self._keep()
        return gone[0]

    def view(self) -> SuspendView:
        """What is shown of all this."""
        source, phase = self._source, self._phase
        if phase is SuspendPhase.AWAKE and self._set:
            phase = SuspendPhase.RESTORING if self._problem is None else SuspendPhase.BLOCKED
        lacking = source.problem if source is not None else None
        return SuspendView(
            policy=self.policy,
            phase=phase,
            delays=source is not None and source.delays,
            delay_s=source.delay_s if source is not None else 0.0,
            restoring=self.pending,
            problem=self._problem.problem() if self._problem else None,
            logind_problem=lacking.problem() if lacking else None,
        )

    # --- the news -------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            limit = None if self._phase is SuspendPhase.AWAKE else ASK_EVERY_S
            try:
                async with asyncio.timeout(limit):
                    news = await self._news.get()
            except TimeoutError:
                news = SleepNews.UNSURE
            match news:
                case SleepNews.GOING:
                    await self._go_to_sleep()
                case SleepNews.AWAKE:
                    await self._wake_up()
                case SleepNews.UNSURE:
                    await self._find_out()

    async def _find_out(self) -> None:
        """News may have been missed."""
        source = self._source
        going = await source.look() if source is not None else None
        self._unanswered = self._unanswered + 1 if going is None else 0
        if self._phase is SuspendPhase.AWAKE:
            if going:
                await self._go_to_sleep()
            else:
                await self._arm()
        elif going is False or self._unanswered > 1:  # we run, and nobody prepares a sleep
            await self._wake_up()

    async def _arm(self) -> None:
        """Have logind wait for us, where there is a reason to."""
        if self._source is None:
            return
        if self.policy is SuspendPolicy.KEEP:
            self._source.release_lock()
        else:
            await self._source.take_lock(WHY)

    # --- going to sleep -------------------------------------------------------------------------------------------

    async def _go_to_sleep(self) -> None:
        self._sleeps += 1
        self._phase = SuspendPhase.GOING
        policy = self.policy
        try:
            if policy is SuspendPolicy.KEEP:
                loaded = ", ".join(each.name for each in sleepers(self._house.scheduler))
                kept = f"stay loaded: {loaded}" if loaded else "none is loaded"
                self._tell(EventKind.SUSPEND, f"the machine goes to sleep; models: {kept}", policy=policy)
            else:
                await self._unload(policy)
        finally:
            self._phase = SuspendPhase.ASLEEP
            if self._source is not None:
                self._source.release_lock()

    async def _unload(self, policy: SuspendPolicy) -> None:
        clock = self._house.scheduler.clock
        began_s = clock()
        delay_s = self._source.delay_s if self._source is not None else 0.0
        ends_s = began_s + max(delay_s - MARGIN_S, delay_s / 2)
        # From here on nothing is begun, so what is there now is all there is.
        await self._house.hold_loads(held=True)
        present = sleepers(self._house.scheduler)
        self._set = merged(present, self._set) if policy is SuspendPolicy.UNLOAD else ()
        self._problem = None
        names = _names(present)
        what = f"unloading {names}" if names else "no model is loaded"
        after = f"; to be loaded again: {_names(self._set)}" if self._set else ""
        units = ", ".join(self._left_alone())
        after += f"; left alone, with what they hold: {units}" if units else ""
        self._tell(
            EventKind.SUSPEND,
            f"the machine goes to sleep; {what}{after}",
            policy=policy,
            models=[each.name for each in self._set],
        )
        # Written first, so that a daemon that dies from now on knows what it has unloaded.
        await asyncio.wait({self._spawn(self._keep())}, timeout=KEEP_LIMIT_S)
        problems: list[LlmError] = []
        self._unloading = self._spawn(self._unload_everything(problems))
        grace_s = (ends_s - clock()) * GRACE_SHARE
        await asyncio.wait({self._unloading}, timeout=max(0.0, grace_s))
        if not self._unloading.done():
            self._spawn(self._kill_the_rest())
            await asyncio.wait({self._unloading}, timeout=max(0.0, ends_s - clock()))
        self._tell_unloaded(names, clock() - began_s, problems, complete=self._unloading.done())

    async def _unload_everything(self, problems: list[LlmError]) -> None:
        try:
            await self._house.unload_for_sleep()
        except LlmError as error:
            problems.append(error)

    async def _kill_the_rest(self) -> None:
        """Engines that have not ended by SIGTERM; systemd would wait longer than the machine does."""
        for each in self._house.scheduler.instances:
            if each.state is InstanceState.STOPPING:
                log.warning("killed, for the machine goes to sleep", extra={"unit": each.unit})
                try:
                    await self._house.kill_unit(each.unit, signal.SIGKILL)
                except LlmError as error:
                    log.error("it cannot be killed", extra={"unit": each.unit, "reason": error.message})

    def _tell_unloaded(self, names: str, took_s: float, problems: list[LlmError], *, complete: bool) -> None:
        scheduler = self._house.scheduler
        there = [each.name for each in scheduler.instances if each.state not in ENDED]
        left_bytes = sum(each.charged_bytes for each in scheduler.ledger)
        complete = complete and not problems and not there and not left_bytes
        details: dict[str, Any] = {
            "complete": complete,
            "took_s": round(took_s, 3),
            "left_bytes": left_bytes,
        }
        if complete and not names:
            return
        if complete:
            text = f"unloaded before the sleep: {names}, in {took_s:.1f} s; all memory is back"
            log.info("%s", text)
        else:
            rest = f"; still there: {', '.join(there)}" if there else ""
            why = f"; {problems[0].message}" if problems else ""
            text = (
                f"not all is unloaded before the sleep, after {took_s:.1f} s:"
                f" {mib_text(left_bytes)} MiB are not back{rest}{why}"
            )
            log.error("%s", text)
            if problems:
                details["problem"] = problems[0].problem()
        self._house.history.add(EventKind.SUSPEND, message=text, details=details)

    # --- the return -----------------------------------------------------------------------------------------------

    async def _wake_up(self) -> None:
        self._phase = SuspendPhase.AWAKE
        self._unanswered = 0
        await self._house.hold_loads(held=False)
        text = "the machine is awake"
        if self._set:
            text += f"; to be loaded again: {_names(self._set)}"
        self._tell(EventKind.RESUME, text, models=[each.name for each in self._set])
        self._restore_soon()
        await self._arm()

    def _restore_soon(self) -> None:
        self._nudge.set()
        if self._set and (self._restoring is None or self._restoring.done()):
            self._restoring = self._spawn(self._restore())

    async def _restore(self) -> None:
        """Load what is to be loaded again, one after the other, for as long as the machine is awake."""
        if self._unloading is not None:
            # What comes back late is counted first; it is bounded by itself.
            await asyncio.wait({self._unloading})
        pause_s = CARD_FIRST_S
        while self._set and self._phase is SuspendPhase.AWAKE:
            if self._house.scheduler.released:
                names, self._set = _names(self._set), ()
                self._tell(EventKind.RESUME, f"not loaded again, for the card is released: {names}")
                await self._keep()
                return
            sleeper, problem = self._next()
            if sleeper is not None:
                problem = await self._load(sleeper)
            if problem is None:
                pause_s = CARD_FIRST_S
                continue
            if problem.code is ErrorCode.SHUTTING_DOWN:
                return  # the next life goes on with it
            self._blocked(problem)
            self._nudge.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._nudge.wait()
            except TimeoutError:
                pause_s = min(pause_s * 2, CARD_LAST_S)
        self._problem = None

    def _next(self) -> tuple[Sleeper | None, LlmError | None]:
        """The first whose cards can be used, or why there is none."""
        try:
            seen = self._house.observe()
            self._house.scheduler.rooms(seen)
        except LlmError as error:
            return None, error
        problem = None
        for sleeper in self._set:
            own = [each for each in seen.cards if each.card.uuid in sleeper.cards] or list(seen.cards)
            errors = [each.problem for each in own if each.problem is not None]
            if not errors:
                return sleeper, None
            problem = problem or errors[0]
        return None, problem

    def _blocked(self, problem: LlmError) -> None:
        """Said once for each trouble, shown for as long as it lasts."""
        if self._problem is None or self._problem.message != problem.message:
            text = f"nothing is loaded again, for the card is in error: {problem.message}"
            log.error("%s", text)
            details = {"models": list(self.pending), "problem": problem.problem()}
            self._house.history.add(EventKind.RESUME, message=text, details=details)
        self._problem = problem

    async def _load(self, sleeper: Sleeper) -> LlmError | None:
        """Load one again; an error where it is to be tried again later."""
        if self._problem is not None:
            self._problem = None
            self._tell(EventKind.RESUME, "the card can be read again")
        running = self._house.scheduler.instance(sleeper.name)
        if running is not None and running.state in SERVING | ON_THE_WAY_UP:
            await self._done_with(sleeper)
            return None
        sleeps, error = self._sleeps, await self._ask_for(sleeper)
        if sleeps != self._sleeps or sleeper not in self._set:
            return None  # interrupted by the next sleep, or nobody wants it any more
        if error is not None and error.code in _AGAIN_LATER:
            return error
        await self._done_with(sleeper)
        if error is None:
            self._tell(
                EventKind.RESUME,
                f"loaded again: {sleeper.name}",
                models=[sleeper.name],
                loaded=[sleeper.name],
            )
        else:
            text = f"not loaded again: {sleeper.name}: {error.message}"
            log.warning("%s", text)
            details = {"models": [sleeper.name], "problem": error.problem()}
            self._house.history.add(EventKind.RESUME, model=sleeper.name, message=text, details=details)
        return None

    async def _ask_for(self, sleeper: Sleeper) -> LlmError | None:
        try:
            _, answers = await self._house.load(sleeper.name, sleeper.wish())
            last = None
            async for answer in answers:
                last = answer
        except LlmError as error:
            return error
        return last.error if isinstance(last, Failed) else None

    async def _done_with(self, sleeper: Sleeper) -> None:
        self._set = tuple(each for each in self._set if each != sleeper)
        await self._keep()

    # --- what is kept and told ------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        async with self._writing:  # what was decided last is written last
            if not await asyncio.to_thread(self._store.keep, self._set):
                log.error("what is to be loaded again after a sleep is forgotten with the daemon's end")

    def _tell(self, kind: EventKind, text: str, **details: Any) -> None:
        log.info("%s", text)
        self._house.history.add(kind, message=text, details=details)


def _names(members: Iterable[Sleeper]) -> str:
    return ", ".join(each.name for each in members)
