"""The daemon's scheduler, its watch and the gateway's seats in simulated time, around a systemd that takes its time.

Everything that decides is real: ``Scheduler``, ``Watching``, ``Seating`` and ``DaemonHouse``. Played are engines, units
and the card, each with a delay of its own; so an unload of an idle model can be met by a request wherever it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from lllm3090d.gateway.daemon_house import DaemonHouse
from lllm3090d.gateway.record import Record
from lllm3090d.gateway.routes import Duty
from lllm3090d.gateway.seating import Seating
from lllm3090d.gateway.turns import Priority
from lllm3090d.serving.answers import Answer
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.events import (
    Activity,
    CancelDone,
    CancelRequested,
    CheckIdle,
    Effect,
    EngineReady,
    Event,
    Failed,
    IdleChecked,
    LeaseAsked,
    LeaseGiven,
    LeaseReturned,
    LoadDone,
    LookAgain,
    Looked,
    MemoryReleased,
    Reply,
    Resubmit,
    StartFinished,
    StartUnit,
    StopFinished,
    StopUnit,
    TellEviction,
    UnitSeen,
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.idle import CAUSE, expired, ttl_s
from lllm3090d.serving.instance import SERVING
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.running import Instance
from lllm3090d.serving.side_tasks import SideTasks
from lllm3090d.serving.watching import Watching
from lllm3090d.settings import Settings
from tests.fakes.scheduler_world import CARD, GIB, World, status

# Somebody has asked an engine directly between two looks, and is gone.
DIRECTLY = 0.1


class LateWorld(World):
    """A scheduler on the clock of the event loop."""

    @property
    def now_s(self) -> float:
        """The scheduler's clock."""
        return asyncio.get_running_loop().time()

    @now_s.setter
    def now_s(self, value: float) -> None:
        """It goes by itself."""


class IdleWorld:
    """Models that go when nobody asks for them; see the module.

    Attributes:
        met: what a request found of its model when it came, counted: its state, "looked at" for one that serves while
            a look is under way, None where nothing of it was there.
        evictions: of models that nobody had used.

    Args:
        sizes_gib: of each model, by name.
        seed: of every delay.
        ttl_s: after which an idle one goes.
    """

    def __init__(self, sizes_gib: Mapping[str, float], seed: int, ttl_s: float) -> None:
        self.random = random.Random(seed)  # noqa: S311  # a simulation
        self.settings = Settings.model_validate({"idle_ttl_s": ttl_s, "gateway_port": 0})
        self.world = LateWorld(stop_timeout_s=15)
        self.scheduler = self.world.scheduler
        self.sizes_gib = sizes_gib
        self.alive: set[str] = set()  # runs whose engine answers
        self.at_work: dict[str, int] = dict.fromkeys(sizes_gib, 0)
        self.met: dict[str | None, int] = {}
        self.evictions = 0
        self.direct: dict[str, int] = {}  # tokens for those who ask an engine directly, by run
        self.looks = asyncio.Condition()
        self.looking = False
        self._look_ends = asyncio.Event()
        self._numbers = itertools.count(1)
        self._answers: dict[str, asyncio.Queue[Any]] = {}
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks = SideTasks(_raise)
        self.spawn = self._tasks.spawn
        self._watching = Watching(
            scheduler=self.scheduler,
            observe=self.world.observation,
            ask=self._ask_engines,
            submit=self.submit,
            tell=lambda _: None,
            settings=lambda: self.settings,
            spawn=self.spawn,
        )
        self.seating = Seating(DaemonHouse(cast(Daemon, self)), asyncio.get_running_loop().time)
        self.spawn(self._write())

    def wish_as_it_was(self, name: str) -> None:
        """Nothing is loaded again by itself here."""

    # --- clients --------------------------------------------------------------------------------------------------

    async def request(self, name: str, work_s: float, keep_alive_s: float | None = None) -> str:
        """One through the gateway's seat; the run that has answered it.

        Raises:
            AssertionError: its engine was stopped while it answered.
            LlmError: it was not answered.
        """
        record = Record(f"req-{next(self._numbers)}", "/v1/chat/completions", 0.0)
        record.keep_alive_s = keep_alive_s
        instance = self.scheduler.instance(name)
        found = None if instance is None else str(instance.state)
        if self.looking and instance is not None and instance.state in SERVING:
            found = "looked at"
        self.met[found] = self.met.get(found, 0) + 1
        async with self.seating.seat(
            name, record, duty=Duty.WORK, load=True, priority=Priority.NORMAL
        ) as served:
            self.at_work[name] += 1
            try:
                assert served.run in self.alive, f"{name} was handed out without an engine"
                await asyncio.sleep(work_s)
                assert served.run in self.alive, f"{name} was stopped in the middle of an answer"
            finally:
                self.at_work[name] -= 1
        return served.run

    async def until_due(self, within_s: float) -> list[str]:
        """Wait until engines are asked what they are doing while the time of idle models is over; which these are."""
        due: list[str] = []

        def found() -> list[str]:
            wanted = expired(self.scheduler.instances, self.world.now_s, *self._ttl())
            runs = {run for each in wanted for run in each.runs}
            due[:] = [each.name for each in self.scheduler.instances if each.run in runs]
            return due

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self.looks:
                await self.looks.wait_for(found)
        return due

    async def end_of_look(self) -> None:
        """Wait until engines have answered, and nothing was decided upon it."""
        await self._look_ends.wait()

    def _ttl(self) -> tuple[float, Mapping[str, float]]:
        return self.settings.idle_ttl_s, self.settings.idle_ttl_of

    # --- the daemon, as the gateway's house uses it ----------------------------------------------------------------

    async def lease(self, name: str, lease: str) -> str:
        """A lease on a model that serves; its run."""
        answer = await self._ask(LeaseAsked(token := self._token(), name, lease), token)
        assert isinstance(answer, LeaseGiven)
        return answer.run

    def give_back(self, lease: str, keep_alive_s: float | None = None) -> None:
        """It is no longer needed."""
        self.submit(LeaseReturned(lease, keep_alive_s))

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        """A load, after a look-up that takes a moment."""
        token = token or self._token()
        await asyncio.sleep(self._delay(0.02))
        event = self.world.request(name, token, self.sizes_gib[name], lease=wish.lease)
        first = await self._ask(event, token, keep=True)
        return token, self._follow(token, first)

    async def _follow(self, token: str, answer: Any) -> AsyncGenerator[Answer, None]:
        try:
            yield answer
            while not isinstance(answer, LoadDone | Failed):
                answer = await self._answers[token].get()
                yield answer
        finally:
            self._answers.pop(token, None)

    async def cancel(self, load_token: str) -> CancelDone:
        """A load is withdrawn."""
        answer = await self._ask(CancelRequested(token := self._token(), load_token), token)
        assert isinstance(answer, CancelDone)
        return answer

    async def _ask(self, event: Event, token: str, *, keep: bool = False) -> Any:
        self._answers[token] = asyncio.Queue()
        self.submit(event)
        answer = await self._answers[token].get()
        if isinstance(answer, Failed):
            del self._answers[token]
            raise answer.error
        if not keep:
            del self._answers[token]
        return answer

    def _token(self) -> str:
        return f"t-{next(self._numbers)}"

    # --- the writer and what it has done ---------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Hand an event to the writer."""
        self._events.put_nowait(event)

    async def close(self) -> None:
        """Nothing more."""
        self._watching.stop()
        self._tasks.cancel()
        await self._tasks.ended()

    async def _write(self) -> None:
        while True:
            for effect in self.world.do(await self._events.get()):
                self._perform(effect)
            self._watching.arm()

    async def _ask_engines(self, serving: Sequence[Instance]) -> Mapping[str, Activity]:
        """What they are doing at the moment in which they answer; that takes a while."""
        async with self.looks:
            self.looks.notify_all()
        self.looking = True
        await asyncio.sleep(self._delay(0.02))
        self.looking = False
        self._look_ends.set()
        self._look_ends = asyncio.Event()
        await asyncio.sleep(0)  # whoever waited for that has asked, and the writer has not heard of it yet
        for each in serving:
            if self.random.random() < DIRECTLY:
                self.direct[each.run] = self.direct.get(each.run, 0) + 1
        return {
            each.run: Activity(self.at_work[each.name] > 0, self.direct.get(each.run, 0)) for each in serving
        }

    def _delay(self, most_s: float) -> float:
        return self.random.choice([0.0, self.random.uniform(0.0, most_s)])

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartUnit():
                instance = self.world.scheduler.by_run(effect.run)
                assert instance is not None
                seen = UnitSeen(status(instance))
                self._later(0.05, seen, StartFinished(effect.run, None))
            case WatchLoading():
                self.spawn(self._come_up(effect.run))
            case StopUnit():
                self.spawn(self._go_down(effect.run))
            case WaitForMemory():
                self._later(0.05, MemoryReleased(effect.run, {}))
            case CheckIdle():
                by_run = ((run, self.scheduler.by_run(run)) for run in effect.runs)
                busy = frozenset(run for run, each in by_run if each and self.at_work[each.name])
                self._later(0.01, IdleChecked(effect.token, busy))
            case LookAgain():
                self.submit(Looked())
            case Resubmit():
                self.submit(effect.event)
            case TellEviction():
                self._has_evicted(effect)
        if isinstance(effect, Reply) and effect.token in self._answers:
            self._answers[effect.token].put_nowait(effect)

    def _has_evicted(self, effect: TellEviction) -> None:
        if effect.cause != CAUSE:
            return
        self.evictions += 1
        instance = self.scheduler.by_run(effect.run)
        assert instance is not None
        used_s = instance.last_used_s if instance.last_used_s is not None else instance.ready_since_s
        assert used_s is not None
        idle_s, most_s = self.world.now_s - used_s, ttl_s(instance, *self._ttl())
        assert idle_s >= most_s, f"{effect.name} was used {idle_s} s ago, and may stay for {most_s} s"

    def _later(self, most_s: float, *events: Event) -> None:
        async def work() -> None:
            await asyncio.sleep(self._delay(most_s))
            for event in events:
                self.submit(event)

        self.spawn(work())

    async def _come_up(self, run: str) -> None:
        await asyncio.sleep(self._delay(0.05))
        self.alive.add(run)
        self.submit(EngineReady(run, {CARD.uuid: GIB}))

    async def _go_down(self, run: str) -> None:
        self.alive.discard(run)  # from the first moment it may answer nobody
        await asyncio.sleep(self._delay(0.05))
        self.submit(StopFinished(run, None))


def _raise(failure: BaseException) -> None:
    raise failure  # in a callback: the loop's handler has it
