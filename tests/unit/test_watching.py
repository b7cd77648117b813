"""Looks at cards and engines: when there is one, what is fed with it, and that there is none without need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.serving.events import (
    Activity,
    Event,
    LeaseAsked,
    LeaseReturned,
    Looked,
    Observation,
    PinRequested,
    UnloadRequested,
    YieldWanted,
)
from lllm3090d.serving.idle import idle_since_s
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.observation import CardState
from lllm3090d.serving.pressure import Over, Unload, Warn
from lllm3090d.serving.running import Instance
from lllm3090d.serving.watching import LOOK_AT_BUSY_EVERY_S, LOOK_EVERY_S, Watching
from lllm3090d.settings import PressurePolicy
from tests.fakes.scheduler_world import CARD, GIB, World

pytestmark = pytest.mark.unit

GRACE_S = 30.0


@dataclass
class Timer:
    """One that a loop was asked for."""

    delay_s: float
    work: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Watch:
    """A world that is watched; a look is carried out when the test says so."""

    world: World
    policy: PressurePolicy = PressurePolicy.YIELD
    answers: Mapping[str, Activity] = field(default_factory=dict)
    timers: list[Timer] = field(default_factory=list)
    work: list[Coroutine[Any, Any, None]] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    told: list[Warn | Over | Unload] = field(default_factory=list)
    idle_ttl_of: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = SimpleNamespace(
            pressure_policy=self.policy,
            pressure_grace_s=GRACE_S,
            desktop_reserve_mib=2400,
            hang_patience_s=120.0,
            idle_ttl_s=0.0,
            idle_ttl_of=self.idle_ttl_of,
        )
        self.observe: Callable[[], Observation] = self.world.observation
        self.watching = Watching(
            scheduler=self.world.scheduler,
            observe=self.seen,
            ask=self.ask,
            submit=self.events.append,
            tell=self.told.append,
            settings=cast("Any", lambda: settings),
            spawn=self.work.append,
        )

    def seen(self) -> Observation:
        """What the test has put there last."""
        return self.observe()

    async def ask(self, instances: Sequence[Instance]) -> Mapping[str, Activity]:
        self.asked.append([each.name for each in instances])
        return self.answers

    def call_later(self, delay_s: float, work: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay_s, work))
        return self.timers[-1]

    @property
    def armed(self) -> list[float]:
        """Delays of the timers that are set."""
        return [timer.delay_s for timer in self.timers if not timer.is_cancelled]

    def look(self) -> None:
        """The timer fires, and the look is carried out."""
        (timer,) = [each for each in self.timers if not each.is_cancelled]
        self.world.now_s += timer.delay_s
        timer.is_cancelled = True
        timer.work()
        asyncio.run(self.work.pop())

    def watch_for(self, seconds: float) -> None:
        """Looks for so long, each fed to the scheduler as the daemon does."""
        until_s = self.world.now_s + seconds
        while self.world.now_s < until_s:
            self.watching.arm()
            self.look()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch(World())
    monkeypatch.setattr("lllm3090d.serving.watching.asyncio", SimpleNamespace(get_running_loop=lambda: made))
    return made


# --- when ----------------------------------------------------------------------------------------------------------


def test_a_daemon_without_models_has_no_timer(watch: Watch) -> None:
    watch.watching.arm()
    assert watch.timers == []


def test_a_loading_model_alone_needs_none(watch: Watch) -> None:
    """Its own watch looks more often."""
    watch.world.load("a", "t")
    watch.watching.arm()
    assert watch.timers == []


def test_the_first_look_at_a_model_is_at_once_and_the_next_ones_later(watch: Watch) -> None:
    watch.world.bring_up("a")
    watch.watching.arm()
    assert watch.armed == [0.0]
    watch.look()
    watch.watching.arm()
    assert watch.armed == [LOOK_EVERY_S]
    watch.world.now_s += 2.0
    watch.watching.arm()
    assert watch.armed == [LOOK_EVERY_S - 2.0]


def test_a_busy_model_is_looked_at_more_often(watch: Watch) -> None:
    watch.world.bring_up("a")
    watch.watching.arm()
    watch.look()
    watch.world.look({"a": Activity(True, 1)})
    watch.watching.arm()
    assert watch.armed == [LOOK_AT_BUSY_EVERY_S]


def test_there_is_one_timer_and_the_latest_state_counts(watch: Watch) -> None:
    watch.world.bring_up("a")
    for _ in range(3):
        watch.watching.arm()
    assert len(watch.armed) == 1
    instance = watch.world.get("a")
    watch.world.do(UnloadRequested("u", "a"))
    watch.world.bring_down(instance)
    watch.watching.arm()
    assert watch.armed == []


def test_who_waits_is_looked_at_every_second_and_at_his_deadline(watch: Watch) -> None:
    world = watch.world
    world.bring_up("a", gib=13)
    watch.watching.arm()
    watch.look()
    world.do(LeaseAsked("l", "a", "lease"))
    world.load("b", "t", 13)
    watch.watching.arm()
    assert watch.armed == [1.0]
    world.now_s += 119.75
    watch.watching.arm()
    assert watch.armed == [0.0]  # the model was not looked at for long
    watch.look()
    watch.watching.arm()
    assert watch.armed == [0.25]


def test_there_is_one_look_at_a_time(watch: Watch) -> None:
    watch.world.bring_up("a")
    watch.watching.arm()
    watch.timers.pop().work()
    watch.watching.arm()
    assert watch.timers == []
    asyncio.run(watch.work.pop())
    watch.watching.arm()
    assert watch.armed == [LOOK_EVERY_S]


def test_after_the_end_there_are_no_more_looks(watch: Watch) -> None:
    watch.world.bring_up("a")
    watch.watching.arm()
    watch.watching.stop()
    watch.watching.arm()
    assert watch.armed == []


# --- what ----------------------------------------------------------------------------------------------------------


def test_a_look_tells_what_engines_that_serve_are_doing(watch: Watch) -> None:
    first = watch.world.bring_up("a", gib=3)
    watch.world.load("b", "t", 3)
    watch.answers = {first.run: Activity(True, 7)}
    watch.watching.arm()
    watch.look()
    assert watch.asked == [["a"]]
    assert watch.events == [Looked({first.run: Activity(True, 7)})]


def test_nobody_is_asked_where_nothing_serves(watch: Watch) -> None:
    world = watch.world
    world.bring_up("a", gib=13)
    world.do(LeaseAsked("l", "a", "lease"))
    world.load("b", "t", 13)
    world.do(UnloadRequested("u", "a"))
    watch.watching.arm()
    watch.look()
    assert (watch.asked, watch.events) == ([], [Looked({})])


def test_a_look_that_fails_is_none_and_the_next_one_comes(watch: Watch) -> None:
    watch.world.bring_up("a")
    watch.watching.arm()

    def fail() -> Observation:
        raise LlmError(ErrorCode.CARD_UNREADABLE, "host memory cannot be read")

    watch.observe = fail
    watch.look()
    assert watch.events == [Looked({})]
    watch.watching.arm()
    assert watch.armed == [LOOK_EVERY_S]


# --- strangers -----------------------------------------------------------------------------------------------------


def grown(watch: Watch) -> Instance:
    """An idle model, and a stranger who has just taken almost all that was free."""
    instance = watch.world.bring_up("a", gib=13)
    watch.world.rest()
    watch.watch_for(10)
    watch.world.foreign_bytes = watch.world.observation().reading.free_bytes - GIB // 2
    return instance


def test_who_grows_is_told_of_and_idle_models_yield(watch: Watch) -> None:
    instance = grown(watch)
    watch.watch_for(GRACE_S - 5)
    assert watch.told == []
    watch.watch_for(10)
    assert [type(each) for each in watch.told][-1] is Unload
    (wanted,) = [each for each in watch.events if isinstance(each, YieldWanted)]
    assert wanted.runs == (instance.run,)
    assert "Other programs hold" in wanted.reason


@pytest.mark.parametrize("state", ["busy", "silent", "leased", "pinned"])
def test_nothing_is_to_yield_that_is_needed(watch: Watch, state: str) -> None:
    grown(watch)
    match state:
        case "busy":
            watch.world.look({"a": Activity(True, 1)})
        case "silent":
            watch.world.look({"a": Activity(None, None)})
        case "leased":
            watch.world.do(LeaseAsked("l", "a", "lease"))
        case "pinned":
            watch.world.do(PinRequested("p", "a", True))
    watch.watch_for(2 * GRACE_S)
    assert [type(each) for each in watch.told] == [Warn]
    assert not any(isinstance(each, YieldWanted) for each in watch.events)


def test_memory_of_an_ended_engine_is_no_stranger(watch: Watch) -> None:
    """Off the list and not given back: it is ours until it comes back."""
    world = watch.world
    world.bring_up("a", gib=3)
    gone = world.bring_up("b", gib=8)
    world.rest()
    watch.watch_for(10)
    world.do(UnloadRequested("u", "b"))
    world.scheduler.ledger.releasing(gone.run)

    def unlisted() -> Observation:
        seen = world.observation()
        listed = {run: size for run, size in seen.main.resident.items() if run != gone.run}
        processes = tuple(
            each
            for each, run in zip(seen.reading.processes, seen.main.resident, strict=True)
            if run in listed
        )
        reading = replace(seen.reading, processes=processes)
        return replace(seen, cards=(replace(seen.main, reading=reading, resident=listed, in_use=listed),))

    watch.observe = unlisted
    watch.watch_for(2 * GRACE_S)
    assert watch.told == []


def test_where_host_memory_is_the_card_nobody_is_a_stranger(watch: Watch) -> None:
    grown(watch)
    host = Card(CardKind.CPU, CARD.uuid, "host memory", None)

    def on_host() -> Observation:
        seen = watch.world.observation()
        return replace(seen, cards=(replace(seen.main, card=host),))

    watch.observe = on_host
    watch.watch_for(2 * GRACE_S)
    assert watch.told == []


@pytest.mark.parametrize("change", ["unread", "not told"])
def test_what_cannot_be_read_is_not_judged(watch: Watch, change: str) -> None:
    grown(watch)

    def changed() -> Observation:
        seen = watch.world.observation()
        error = LlmError(ErrorCode.CARD_UNREADABLE, "it has fallen off the bus")
        state = (
            CardState(seen.card, None, error)
            if change == "unread"
            else replace(seen.main, attributed=False, resident={}, in_use={})
        )
        return replace(seen, cards=(state,))

    watch.observe = changed
    watch.watch_for(2 * GRACE_S)
    assert watch.told == []
    assert all(isinstance(each, Looked) for each in watch.events)


# --- idle -----------------------------------------------------------------------------------------------------------


def expired_after_s(watch: Watch, most_s: float) -> float | None:
    """When the first model is to go because nobody uses it, seconds from now."""
    began_s = watch.world.now_s
    while watch.world.now_s < began_s + most_s:
        watch.watch_for(LOOK_EVERY_S)
        if any(isinstance(each, YieldWanted) and each.cause == "idle" for each in watch.events):
            return watch.world.now_s - began_s
    return None


def test_who_is_not_used_goes_after_its_time(watch: Watch) -> None:
    instance = watch.world.bring_up("a")
    watch.world.rest()
    since_s = idle_since_s(instance)
    assert since_s is not None
    watch.idle_ttl_of["a"] = watch.world.now_s - since_s + 60.0
    after_s = expired_after_s(watch, 120)
    assert after_s is not None and 60 - LOOK_EVERY_S <= after_s <= 60 + 2 * LOOK_EVERY_S
    (wanted,) = [each for each in watch.events if isinstance(each, YieldWanted)]
    watch.world.do(wanted)
    assert instance.state is InstanceState.STOPPING


def test_a_use_begins_the_time_anew_and_may_say_how_long_it_is(watch: Watch) -> None:
    instance = watch.world.bring_up("a")
    watch.world.rest()
    since_s = idle_since_s(instance)
    assert since_s is not None
    watch.idle_ttl_of["a"] = watch.world.now_s - since_s + 60.0
    watch.watch_for(50)
    watch.world.do(LeaseAsked("t", "a", "lease"))
    assert expired_after_s(watch, 300) is None
    watch.world.do(LeaseReturned("lease", keep_alive_s=200.0))
    assert expired_after_s(watch, 190) is None
    after_s = expired_after_s(watch, 30)
    assert after_s is not None
    # Somebody was quicker: it stays.
    watch.world.do(LeaseAsked("t", "a", "other"))
    (wanted, *_) = [each for each in watch.events if isinstance(each, YieldWanted)]
    watch.world.do(wanted)
    assert instance.state is InstanceState.READY
