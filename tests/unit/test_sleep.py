"""Sleep of the machine in simulated time: a real scheduler, news that the test tells, loads that it scripts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from lllm3090d.bus.logind import SleepNews
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.planner import PlanRequest
from lllm3090d.serving import sleep as module
from lllm3090d.serving.events import (
    Failed,
    HoldLoads,
    LoadDone,
    Observation,
    ReleaseRequested,
    ResumeRequested,
)
from lllm3090d.serving.history import History
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.sleep import Sleep
from lllm3090d.serving.sleep_set import Sleeper, SleepStore
from lllm3090d.settings import Settings, SuspendPolicy, load_settings
from lllm3090d.wire_sleep import SuspendPhase
from tests.fakes.scheduler_world import CARD, CUDA, SECOND, TWO_CARDS, World
from tests.fakes.simulated_loop import simulate

pytestmark = pytest.mark.unit

REFUSED = LlmError(ErrorCode.INSUFFICIENT_VRAM, "it does not fit any more", hint="Unload something.")
UNREADABLE = LlmError(ErrorCode.CARD_UNREADABLE, "the card has fallen off the bus", hint="nvidia-smi")


class Source:
    """logind, as the test wants it."""

    def __init__(self, delay_s: float = 5.0) -> None:
        self.delay_s = delay_s
        self.problem: LlmError | None = None
        self.preparing: bool | None = False
        self.locked = False
        self.taken = 0
        self.released_at_s: float | None = None
        self.on_release: Callable[[], None] = lambda: None
        self._listener: Callable[[SleepNews], None] | None = None

    async def graphical_session(self) -> bool | None:
        return None

    @property
    def delays(self) -> bool:
        return self.locked

    def set_listener(self, listener: Callable[[SleepNews], None]) -> None:
        self._listener = listener

    async def look(self) -> bool | None:
        return self.preparing

    async def take_lock(self, why: str) -> None:
        assert "unloaded" in why
        if not self.preparing and not self.locked:
            self.locked = True
            self.taken += 1

    def release_lock(self) -> None:
        if self.locked:
            self.locked = False
            self.released_at_s = asyncio.get_running_loop().time()
            self.on_release()

    def tell(self, news: SleepNews) -> None:
        assert self._listener is not None
        self.preparing = news is SleepNews.GOING
        self._listener(news)


class Store:
    """Keeps the set in memory; the last of `written` is in force."""

    def __init__(self, kept: tuple[Sleeper, ...] = ()) -> None:
        self.written = [kept]
        self.works = True

    def keep(self, members: tuple[Sleeper, ...]) -> bool:
        if self.works:
            self.written.append(members)
        return self.works

    def kept(self) -> tuple[Sleeper, ...]:
        return self.written[-1]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.kept()]


class House:
    """The daemon: a real scheduler in a world of cards, engines that end as the test says, loads that it scripts."""

    def __init__(self, world: World, policy: SuspendPolicy, kind: CardKind = CardKind.NVIDIA) -> None:
        self.world = world
        self.scheduler: Scheduler = world.scheduler
        self.history = History()
        self.settings: Settings = load_settings(None, {}).model_copy(update={"suspend": policy})
        self._card = replace(CARD, kind=kind)
        self.end_s = 0.2  # from SIGTERM to the end
        self.killed: list[str] = []
        self.never_ends = False
        self.problem: LlmError | None = None
        self.asked: list[tuple[str, LoadWish]] = []
        self.outcomes: dict[str, list[LlmError | None]] = {}
        self.gate: asyncio.Event | None = None  # loads wait for it

    @property
    def card(self) -> Card:
        return self._card

    def observe(self) -> Observation:
        return self.world.observation()

    async def hold_loads(self, *, held: bool) -> None:
        self.world.do(HoldLoads("t-hold", held))

    async def unload_for_sleep(self) -> None:
        self.world.do(ReleaseRequested("t-sleep", until_resume=False, for_sleep=True))
        if self.problem is not None:
            raise self.problem
        for _ in range(1000):
            if not self.never_ends and (self.end_s <= 0 or self.killed):
                break
            await asyncio.sleep(0.05)  # of simulated time
            self.end_s -= 0.05
        for instance in self.scheduler.instances:
            self.world.bring_down(instance)

    async def kill_unit(self, unit: str, number: int) -> None:
        assert number == 9
        self.killed.append(unit)

    async def load(self, name: str, wish: LoadWish) -> tuple[str, AsyncGenerator[Any, None]]:
        self.asked.append((name, wish))
        if self.gate is not None:
            await self.gate.wait()
        outcomes = self.outcomes.get(name) or [None]
        outcome = outcomes.pop(0)
        if outcome is not None and outcome.code is ErrorCode.INSUFFICIENT_VRAM:
            raise outcome  # refused at once; everything else comes later

        async def answers() -> AsyncGenerator[Any, None]:
            yield LoadDone("t-load", "run") if outcome is None else Failed("t-load", outcome)

        if outcome is None:
            self.world.bring_up(name, "t-load", gib=3.0)
        return "t-load", answers()

    def told(self) -> list[str]:
        return [event.message for event in self.history.since(0)]


class Scene:
    """All of it together."""

    def __init__(
        self,
        *loaded: str,
        policy: SuspendPolicy = SuspendPolicy.AUTO,
        kind: CardKind = CardKind.NVIDIA,
        store: Store | None = None,
        source: Source | None = None,
        world: World | None = None,
    ) -> None:
        self.world = world or World()
        self.house = House(self.world, policy, kind)
        self.scheduler.clock = asyncio.get_running_loop().time
        self.source = source or Source()
        self.store = store or Store()
        self.tasks: list[asyncio.Task[None]] = []
        self.sleep = Sleep(
            house=self.house, source=self.source, store=cast(SleepStore, self.store), spawn=self._spawn
        )
        for name in loaded:
            self.world.bring_up(name, gib=3.0)

    @property
    def scheduler(self) -> Scheduler:
        return self.world.scheduler

    @property
    def names(self) -> list[str]:
        """What is loaded."""
        return [each.name for each in self.scheduler.instances]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task

    async def start(self) -> None:
        await self.sleep.start()
        await self.rest(0.01)

    async def rest(self, seconds: float) -> None:
        """So much simulated time passes."""
        await asyncio.sleep(seconds)
        for task in self.tasks:
            if task.done():
                task.result()  # nothing fails unseen

    async def go(self, wait_s: float = 1.0) -> None:
        self.source.tell(SleepNews.GOING)
        await self.rest(wait_s)

    async def wake(self, wait_s: float = 1.0) -> None:
        self.source.tell(SleepNews.AWAKE)
        await self.rest(wait_s)

    @property
    def phase(self) -> SuspendPhase:
        return self.sleep.view().phase


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    yield


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario()

    simulate(run())


# --- policy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "kind", "policy"),
    [
        (SuspendPolicy.AUTO, CardKind.NVIDIA, SuspendPolicy.UNLOAD),
        (SuspendPolicy.AUTO, CardKind.AMD, SuspendPolicy.KEEP),
        (SuspendPolicy.AUTO, CardKind.INTEL, SuspendPolicy.KEEP),
        (SuspendPolicy.AUTO, CardKind.CPU, SuspendPolicy.KEEP),
        (SuspendPolicy.KEEP, CardKind.NVIDIA, SuspendPolicy.KEEP),
        (SuspendPolicy.STOP, CardKind.NVIDIA, SuspendPolicy.STOP),
        (SuspendPolicy.UNLOAD, CardKind.CPU, SuspendPolicy.UNLOAD),
    ],
)
def test_what_auto_is_and_that_a_lock_is_taken_only_where_something_is_done(
    wanted: SuspendPolicy, kind: CardKind, policy: SuspendPolicy
) -> None:
    async def scenario() -> None:
        scene = Scene(policy=wanted, kind=kind)
        await scene.start()
        assert scene.sleep.policy is scene.sleep.view().policy is policy
        assert scene.source.locked is (policy is not SuspendPolicy.KEEP)

    play(scenario)


def test_another_policy_takes_the_lock_or_lets_it_go() -> None:
    async def scenario() -> None:
        scene = Scene(policy=SuspendPolicy.KEEP)
        await scene.start()
        for policy in (SuspendPolicy.STOP, SuspendPolicy.KEEP):
            scene.house.settings = scene.house.settings.model_copy(update={"suspend": policy})
            scene.sleep.settings_changed()
            await scene.rest(0.1)
            assert scene.source.locked is (policy is SuspendPolicy.STOP)

    play(scenario)


def test_keep_touches_nothing_and_tells() -> None:
    async def scenario() -> None:
        scene = Scene("a", policy=SuspendPolicy.KEEP)
        await scene.start()
        await scene.go()
        assert scene.names == ["a"] and not scene.scheduler.asleep
        await scene.wake()
        assert scene.names == ["a"] and scene.house.asked == []
        assert scene.house.told() == [
            "the machine goes to sleep; models: stay loaded: a",
            "the machine is awake",
        ]

    play(scenario)


def test_stop_unloads_and_forgets() -> None:
    async def scenario() -> None:
        scene = Scene("a", policy=SuspendPolicy.STOP)
        await scene.start()
        await scene.go()
        assert scene.names == [] and scene.store.names == []
        await scene.wake()
        assert scene.house.asked == []
        assert scene.source.taken == 2

    play(scenario)


# --- going to sleep -------------------------------------------------------------------------------------------------


def test_everything_is_gone_and_remembered_when_the_lock_is_released() -> None:
    async def scenario() -> None:
        scene = Scene("a", "b")
        await scene.start()
        seen: list[tuple[list[str], list[str], bool]] = []
        scene.source.on_release = lambda: seen.append(
            (scene.names, scene.store.names, bool(list(scene.scheduler.ledger)))
        )
        await scene.go()
        assert seen == [([], scene.store.names, False)]
        assert sorted(scene.store.names) == ["a", "b"]
        assert scene.phase is SuspendPhase.ASLEEP
        assert scene.house.killed == []
        details = scene.house.history.since(0)[-1].details
        assert details["complete"] is True and details["left_bytes"] == 0

    play(scenario)


def test_it_is_written_before_anything_is_stopped() -> None:
    """A daemon that dies in between must know what it has unloaded."""

    async def scenario() -> None:
        scene = Scene("a")
        await scene.start()
        order: list[str] = []
        keep, unload = scene.store.keep, scene.house.unload_for_sleep

        def keeping(members: tuple[Sleeper, ...]) -> bool:
            order.append("written")
            return keep(members)

        scene.store.keep = keeping  # type: ignore[method-assign]  # seen, and done all the same

        async def unloading() -> None:
            order.append("stopped")
            await unload()

        scene.house.unload_for_sleep = unloading  # type: ignore[method-assign]  # the same
        await scene.go()
        assert order == ["written", "stopped"]

    play(scenario)


def test_an_engine_that_does_not_end_is_killed_within_the_time() -> None:
    async def scenario() -> None:
        scene = Scene("a", source=Source(delay_s=5.0))
        scene.house.end_s = 60.0
        await scene.start()
        unit = scene.world.get("a").unit
        began_s = asyncio.get_running_loop().time()
        await scene.go(6.0)
        assert scene.house.killed == [unit]
        assert scene.source.released_at_s is not None
        assert scene.source.released_at_s - began_s < 5.0
        assert scene.names == []
        assert "all memory is back" in scene.house.told()[-1]

    play(scenario)


@pytest.mark.parametrize("delay_s", [0.0, 0.4, 5.0, 30.0])
def test_the_time_is_never_exceeded_and_what_is_left_is_said(
    delay_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        scene = Scene("a", source=Source(delay_s=delay_s))
        scene.house.never_ends = True
        await scene.start()
        began_s = asyncio.get_running_loop().time()
        await scene.go(delay_s + 1)
        assert scene.source.released_at_s is not None
        assert scene.source.released_at_s - began_s <= delay_s
        event = scene.house.history.since(0)[-1]
        assert event.message.startswith("not all is unloaded before the sleep")
        assert "still there: a" in event.message
        assert event.details["complete"] is False and event.details["left_bytes"] > 0
        assert scene.phase is SuspendPhase.ASLEEP

    with caplog.at_level(logging.ERROR):
        play(scenario)
    assert any("not all is unloaded" in each.message for each in caplog.records)


def test_a_unit_that_cannot_be_stopped_is_told_and_the_sleep_is_not_held_up() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        scene.house.problem = LlmError(ErrorCode.STOP_FAILED, "it survives SIGKILL")
        await scene.start()
        await scene.go(0.1)
        assert not scene.source.locked
        event = scene.house.history.since(0)[-1]
        assert "it survives SIGKILL" in event.message
        assert event.details["problem"]["code"] == "stop_failed"

    play(scenario)


def test_a_set_that_cannot_be_kept_is_loaded_again_by_this_life(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        scene = Scene("a")
        scene.store.works = False
        await scene.start()
        await scene.go()
        await scene.wake()
        assert scene.names == ["a"]

    with caplog.at_level(logging.ERROR):
        play(scenario)
    assert "forgotten with the daemon's end" in caplog.text


# --- the return -----------------------------------------------------------------------------------------------------


def test_the_same_set_comes_back_in_the_order_of_its_last_use_one_after_the_other() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.start()
        for name in ("a", "b", "c"):
            scene.world.bring_up(name, gib=3.0, pinned=name == "b")
            await scene.rest(10)
        await scene.go()
        await scene.wake()
        assert [name for name, _ in scene.house.asked] == ["c", "b", "a"]
        wishes = {name: wish for name, wish in scene.house.asked}
        assert wishes["b"].pinned and not wishes["a"].pinned
        assert not any(wish.may_evict or wish.may_wait for wish in wishes.values())
        assert round(wishes["a"].idle_s) == 30
        assert scene.store.names == [] and scene.phase is SuspendPhase.AWAKE
        assert scene.house.told()[-3:] == ["loaded again: c", "loaded again: b", "loaded again: a"]

    play(scenario)


def test_what_is_refused_is_told_and_does_not_hold_up_the_rest() -> None:
    async def scenario() -> None:
        scene = Scene("a", "b")
        scene.house.outcomes = {"a": [REFUSED], "b": [None]}
        await scene.start()
        await scene.go()
        await scene.wake()
        assert scene.names == ["b"] and scene.store.names == []
        (told,) = [each for each in scene.house.history.since(0) if each.model == "a"]
        assert "it does not fit any more" in told.message
        assert told.details["problem"]["code"] == "insufficient_vram"

    play(scenario)


def test_nothing_is_loaded_on_a_card_in_error_until_it_can_be_read() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        await scene.start()
        await scene.go()
        scene.world.failed_cards = {CARD.uuid}
        await scene.wake(100)
        view = scene.sleep.view()
        assert view.phase is SuspendPhase.BLOCKED and view.restoring == ("a",)
        assert view.problem is not None and view.problem["code"] == "card_unreadable"
        assert scene.house.asked == [] and scene.store.names == ["a"]
        assert sum("nothing is loaded again" in each for each in scene.house.told()) == 1
        scene.world.failed_cards = set()
        await scene.rest(module.CARD_LAST_S + 1)
        assert scene.names == ["a"] and scene.store.names == []
        assert scene.sleep.view().problem is None and scene.phase is SuspendPhase.AWAKE
        assert "the card can be read again" in scene.house.told()

    play(scenario)


def test_a_card_that_fails_at_the_load_is_waited_for_as_well() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        scene.house.outcomes = {"a": [UNREADABLE, None]}
        await scene.start()
        await scene.go()
        await scene.wake(0.5)
        assert scene.phase is SuspendPhase.BLOCKED and scene.store.names == ["a"]
        await scene.rest(2)
        assert scene.names == ["a"]

    play(scenario)


def test_of_two_cards_the_good_one_gets_its_models_back() -> None:
    async def scenario() -> None:
        members = tuple(
            Sleeper(name=name, run=name, request=PlanRequest(), cards=cards)
            for name, cards in (("lost", (SECOND.uuid,)), ("good", (CARD.uuid,)))
        )
        world = World(TWO_CARDS)
        world.capabilities = CUDA
        scene = Scene(store=Store(members), world=world)
        scene.world.failed_cards = {SECOND.uuid}
        await scene.start()
        await scene.rest(5)
        assert scene.names == ["good"] and scene.store.names == ["lost"]
        assert scene.phase is SuspendPhase.BLOCKED
        scene.world.failed_cards = set()
        await scene.rest(40)
        assert scene.names == ["good", "lost"]

    play(scenario)


def test_the_next_sleep_interrupts_the_return_and_loses_nothing() -> None:
    async def scenario() -> None:
        scene = Scene("a", "b")
        await scene.start()
        await scene.go()
        scene.house.gate = asyncio.Event()
        scene.house.outcomes = {"a": [LlmError(ErrorCode.LOAD_CANCELLED, "the machine goes to sleep")]}
        await scene.wake()
        assert len(scene.house.asked) == 1
        await scene.go()
        scene.house.gate.set()
        await scene.rest(1)
        assert sorted(scene.store.names) == ["a", "b"] and len(scene.house.asked) == 1
        await scene.wake()
        assert sorted(scene.names) == ["a", "b"] and scene.store.names == []

    play(scenario)


def test_a_card_in_error_does_not_keep_the_next_sleep_from_being_noticed() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        await scene.start()
        await scene.go()
        scene.world.failed_cards = {CARD.uuid}
        await scene.wake(50)
        assert scene.source.delays
        await scene.go()
        assert scene.store.names == ["a"]
        scene.world.failed_cards = set()
        await scene.wake()
        assert scene.names == ["a"]

    play(scenario)


def test_what_a_person_unloads_is_not_loaded_again() -> None:
    async def scenario() -> None:
        scene = Scene("a", "b")
        await scene.start()
        await scene.go()
        wish = scene.sleep.wish("a")
        forgotten = await scene.sleep.forget("a")
        assert forgotten is not None and forgotten.name == "a"
        assert wish == forgotten.wish() and scene.sleep.wish("a") is None
        assert await scene.sleep.forget("a") is None
        await scene.wake()
        assert scene.names == ["b"]
        await scene.go()
        await scene.sleep.forget()
        await scene.wake()
        assert scene.names == []

    play(scenario)


def test_a_card_that_was_given_away_meanwhile_stays_so() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        await scene.start()
        await scene.go()
        scene.world.do(ReleaseRequested("t-release", until_resume=True))
        await scene.wake()
        assert scene.house.asked == [] and scene.store.names == []
        assert "is released" in scene.house.told()[-1]
        scene.world.do(ResumeRequested("t-resume"))
        await scene.rest(100)
        assert scene.house.asked == []

    play(scenario)


def test_what_somebody_loaded_meanwhile_is_not_asked_for_again() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        await scene.start()
        await scene.go()
        scene.world.failed_cards = {CARD.uuid}
        await scene.wake(0.5)
        scene.world.failed_cards = set()
        scene.world.bring_up("a", "t-person", gib=3.0)
        await scene.rest(5)
        assert scene.house.asked == [] and scene.store.names == []

    play(scenario)


# --- news that was missed, and other lives --------------------------------------------------------------------------


def test_the_next_life_loads_what_the_last_one_unloaded() -> None:
    async def scenario() -> None:
        scene = Scene(store=Store((Sleeper(name="a", run="1", request=PlanRequest()),)))
        await scene.start()
        await scene.rest(1)
        assert scene.names == ["a"] and scene.store.names == []

    play(scenario)


def test_a_life_that_begins_while_the_machine_goes_to_sleep_waits_with_it() -> None:
    async def scenario() -> None:
        source = Source()
        source.preparing = True
        left = Sleeper(name="left", run="1", request=PlanRequest())
        scene = Scene("adopted", store=Store((left,)), source=source)
        await scene.sleep.start()
        assert scene.scheduler.asleep  # before anybody could ask for a load
        await scene.rest(1)
        assert scene.names == [] and scene.store.names == ["adopted", "left"]
        await scene.wake()
        assert scene.names == ["adopted", "left"]

    play(scenario)


def test_a_return_whose_signal_was_missed_is_found_out() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        await scene.start()
        await scene.go()
        await scene.rest(module.ASK_EVERY_S * 3)
        assert scene.names == []  # it is being prepared still
        scene.source.preparing = False
        await scene.rest(module.ASK_EVERY_S + 1)
        assert scene.phase is SuspendPhase.AWAKE and scene.names == ["a"]

    play(scenario)


def test_a_logind_that_is_gone_does_not_keep_loads_waiting_for_ever() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        await scene.start()
        await scene.go()
        scene.source.preparing = None
        await scene.rest(module.ASK_EVERY_S * 3)
        assert not scene.scheduler.asleep and scene.names == ["a"]

    play(scenario)


def test_after_a_restart_of_logind_another_lock_is_taken_or_a_missed_sleep_begun() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        await scene.start()
        scene.source.locked = False
        scene.source.tell(SleepNews.UNSURE)
        await scene.rest(0.1)
        assert scene.source.taken == 2
        scene.source.tell(SleepNews.UNSURE)
        scene.source.preparing = True
        await scene.rest(1)
        assert scene.names == [] and not scene.source.locked

    play(scenario)


def test_units_that_nobody_here_understands_are_left_alone_and_it_is_said() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        scene.sleep._left_alone = lambda: ("lllm3090-thing.service",)
        await scene.start()
        await scene.go()
        (told,) = [each for each in scene.house.told() if "goes to sleep" in each]
        assert told.endswith("; left alone, with what they hold: lllm3090-thing.service")
        assert scene.names == []

    play(scenario)


def test_without_anybody_who_tells_nothing_happens() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        sleep = Sleep(house=scene.house, source=None, store=cast(SleepStore, Store()), spawn=scene._spawn)
        await sleep.start()
        sleep.settings_changed()
        view = sleep.view()
        assert (view.phase, view.delays, view.restoring) == (SuspendPhase.AWAKE, False, ())
        assert scene.tasks == []

    play(scenario)
