"""Engines that get nowhere, watched second by second: shown, restarted once, and left down when they hang again.

A made-up engine says what the real one would, the real watch and the real scheduler make of it what they do; time is
simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lllm3090d.engines.crash_causes import CrashCause
from lllm3090d.gpus.readings import CardProcess
from lllm3090d.serving.drains import Purpose
from lllm3090d.serving.events import (
    Activity,
    Announce,
    DrainEnded,
    DrainUnit,
    Effect,
    Failed,
    Looked,
    Observation,
    ReleaseRequested,
    ResetRequested,
    Restore,
    ResumeRequested,
    StopUnit,
    UnloadDone,
    UnloadRequested,
    YieldWanted,
)
from lllm3090d.serving.hangs import (
    LEAST_S,
    LEAST_UNMEASURED_S,
    MARGIN,
    RESTART_AT,
    SPINNING_LEAST_S,
    CardLook,
    EngineWork,
    SlotLook,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.observation import CardState, Stranger
from lllm3090d.serving.restarts import RestartPolicy
from lllm3090d.serving.running import Instance
from lllm3090d.serving.stalls import IMAGE_ON_HOST_S, StallWatch, card_look
from tests.fakes.scheduler_world import CARD, CUDA, SECOND, TWO_CARDS, World, kinds, of_kind, the

pytestmark = pytest.mark.unit

S = InstanceState
BATCH = 2048
QUICK = 2000.0  # tokens a second: one batch takes a second, and the least patience counts
POLICY = RestartPolicy()


@dataclass
class Scene:
    """A model, its engine, and a look a second.

    Attributes:
        does: what the engine does at each moment, from the seconds since the test began.
        world: with the scheduler.
        watch: remembers the looks.
        patience_s: the setting.
        effects: everything that came of the looks.
    """

    does: Callable[[float], EngineWork | None]
    world: World = field(default_factory=lambda: World(drain_s=10.0, restart_hung=True, restarts=POLICY))
    watch: StallWatch = field(default_factory=StallWatch)
    patience_s: float = LEAST_S
    effects: list[Effect] = field(default_factory=list)
    began_s: float = 0.0

    def __post_init__(self) -> None:
        self.world.bring_up("a")
        self.began_s = self.world.now_s

    def observation(self) -> Observation:
        return self.world.observation()

    def look(self) -> list[Effect]:
        """One second later."""
        world = self.world
        world.now_s += 1.0
        serving = [each for each in world.scheduler.instances if each.state in {S.READY, S.BUSY, S.STALLED}]
        work = self.does(world.now_s - self.began_s)
        busy = None if work is None else work.slots is None or work.waiting > 0 or bool(work.slots)
        activity = {each.run: Activity(busy, 1, work) for each in serving}
        verdicts = self.watch.look(
            world.now_s, serving, activity, self.observation(), least_s=self.patience_s
        )
        effects = world.do(Looked(activity, verdicts))
        self.effects += effects
        return effects

    def until(self, what: Callable[[], bool], limit_s: float) -> float:
        """Look until something is so; the seconds from the beginning of the test."""
        while not what():
            assert self.world.now_s - self.began_s < limit_s, "it never came"
            self.look()
        return self.world.now_s - self.began_s

    @property
    def state(self) -> InstanceState:
        return self.world.get("a").state

    def states(self) -> list[InstanceState]:
        return [each.state for each in of_kind(self.effects, Announce)]


def slot(computed: int, generated: int = 0, task: int = 1) -> tuple[SlotLook, ...]:
    return (SlotLook(0, task, True, computed + BATCH, computed, generated),)


def work(slots: tuple[SlotLook, ...] | None, speed: float | None = QUICK, waiting: int = 0) -> EngineWork:
    return EngineWork(slots, waiting, None, speed, 0.02)


def frozen(_: float) -> EngineWork:
    return work(slot(4096))


def idle(_: float) -> EngineWork:
    return work(())


def silent(now_s: float) -> EngineWork:
    """It answers for a while, and then no more; what is known of its speed is what it said before."""
    return work(()) if now_s < 10 else EngineWork()


# --- found, and not found ------------------------------------------------------------------------------------------


def test_a_prompt_of_100_000_tokens_that_progresses_slowly_is_never_stalled() -> None:
    """A batch of it takes from 20 s to 300 s, at a speed that was measured on a short prompt; an answer follows."""
    ends: list[float] = []
    at_s = 0.0
    for number in range(49):
        at_s += 20 + 280 * number / 48
        ends.append(at_s)

    def does(now_s: float) -> EngineWork:
        done = sum(end <= now_s for end in ends)
        # In a batch it does not answer, but now and then.
        answers = done == len(ends) or int(now_s) % 7 == 0
        tokens = max(0, int(now_s - ends[-1]))
        return work(slot(BATCH * done, tokens) if answers else None, 100.0)

    scene = Scene(does)
    while scene.world.now_s < scene.began_s + ends[-1] + 100:
        scene.look()
    assert ends[-1] > 7000
    assert set(scene.states()) == {S.BUSY}


@pytest.mark.parametrize(("does", "said"), [(frozen, "no slot computes"), (silent, "it does not answer")])
def test_a_frozen_one_is_found_in_the_stated_time(does: Callable[[float], EngineWork], said: str) -> None:
    scene = Scene(does)
    found_s = scene.until(lambda: scene.state is S.STALLED, 1000)
    began_s = 10 if does is silent else 1
    assert LEAST_S < found_s - began_s <= LEAST_S + 2
    instance = scene.world.get("a")
    assert instance.stall is not None
    assert (instance.stall.patience_s, said in instance.stall.reason) == (LEAST_S, True)
    (told,) = [each for each in of_kind(scene.effects, Announce) if each.state is S.STALLED]
    assert told.reason == instance.stall.reason or said in told.reason
    assert f"for {found_s - began_s:.0f} s" in told.reason


@pytest.mark.parametrize(
    ("speed", "setting_s", "patience_s"),
    [
        (QUICK, LEAST_S, LEAST_S),
        (QUICK, 30.0, 30.0),
        (50.0, LEAST_S, MARGIN * BATCH / 50.0),
        (None, LEAST_S, LEAST_UNMEASURED_S),
        (None, 12.0, LEAST_UNMEASURED_S / 10),
    ],
)
def test_the_stated_time_follows_from_speed_and_setting(
    speed: float | None, setting_s: float, patience_s: float
) -> None:
    scene = Scene(lambda _: work(slot(0), speed), patience_s=setting_s)
    found_s = scene.until(lambda: scene.state is S.STALLED, 3000)
    assert patience_s < found_s <= patience_s + 3


def test_a_speed_is_remembered_while_it_does_not_answer() -> None:
    scene = Scene(lambda now_s: work((), 50.0) if now_s < 5 else EngineWork())
    scene.until(lambda: scene.state is S.STALLED, 3000)
    stall = scene.world.get("a").stall
    assert stall is not None
    assert stall.patience_s == MARGIN * BATCH / 50.0


def test_an_idle_one_and_one_that_does_not_tell_are_no_matter() -> None:
    for does in (idle, lambda _: None):
        scene = Scene(does)
        for _ in range(3000):
            scene.look()
        assert scene.state is S.READY


def test_one_that_gets_on_is_well_again() -> None:
    scene = Scene(lambda now_s: work(slot(4096)) if now_s < 200 else work(slot(4096, int(now_s))))
    scene.until(lambda: scene.state is S.STALLED, 1000)
    scene.until(lambda: scene.state is S.BUSY, 210)
    assert scene.world.get("a").stall is None
    # And one whose client has left.
    scene = Scene(lambda now_s: work(slot(4096)) if now_s < 200 else work(()))
    scene.until(lambda: scene.state is S.STALLED, 1000)
    scene.until(lambda: scene.state is S.READY, 210)


def test_nobody_looked_for_a_while() -> None:
    """The machine slept, on a clock that goes on."""
    scene = Scene(frozen)
    scene.look()
    scene.world.now_s += 10_000
    scene.look()
    assert scene.state is S.BUSY


def test_an_image_in_host_memory_may_take_its_time() -> None:
    scene = Scene(frozen)
    instance = scene.world.get("a")
    launch = replace(instance.plan.launch, projector_on_card=False)
    instance.plan = replace(instance.plan, with_projector=True, launch=launch)
    found_s = scene.until(lambda: scene.state is S.STALLED, 1000)
    assert found_s > LEAST_S + IMAGE_ON_HOST_S


# --- what becomes of it --------------------------------------------------------------------------------------------


def stopped(scene: Scene) -> tuple[Instance, list[Effect]]:
    """Hung for so long that it is drained, and then stopped; its memory is back."""
    scene.until(lambda: scene.state is S.STOPPING, 10_000)
    instance = scene.world.get("a")
    effects = [*scene.world.do(DrainEnded(instance.run)), *scene.world.bring_down(instance)]
    return instance, effects


def test_it_is_restarted_once_and_then_left_down() -> None:
    scene = Scene(frozen)
    world = scene.world
    found_s = scene.until(lambda: scene.state is S.STALLED, 1000)
    first, _ = stopped(scene)
    assert RESTART_AT * LEAST_S < world.now_s - scene.began_s <= RESTART_AT * LEAST_S + 3
    assert found_s < world.now_s - scene.began_s
    drained = [each for each in scene.effects if isinstance(each, DrainUnit)]
    assert drained == [DrainUnit(first.run)]
    assert first.state is S.FAILED
    assert first.failure is not None
    assert first.failure.details["cause"] == CrashCause.HUNG
    assert first.failure.details["stalled_s"] > RESTART_AT * LEAST_S
    # It comes back as it was.
    again = the([*world.look(after_s=POLICY.base_s + 1)], Restore)
    assert (again.name, again.request, again.attempt) == ("a", first.record.asked, 1)
    world.load("a", "t2", request=again.request, attempt=again.attempt)
    second = world.finish_load("a")
    assert second.run != first.run
    # And hangs again.
    stopped(scene)
    assert second.state is S.LATCHED
    assert "so it had before its last start" in second.latch_reason
    assert second.way_out.endswith("lllm3090ctl reset a")
    assert of_kind(world.look(after_s=1000), Restore) == []
    # The way out.
    assert the(world.do(ResetRequested("r", "a")), Restore).name == "a"


def test_one_that_served_well_for_long_after_its_restart_is_restarted_again() -> None:
    scene = Scene(lambda now_s: work(slot(4096, task=1 + int(min(now_s, 5000)))))
    world = scene.world
    scene.began_s = world.now_s - 5000  # hangs from the beginning
    stopped(scene)
    again = the(world.look(after_s=POLICY.base_s + 1), Restore)
    world.load("a", "t2", request=again.request, attempt=again.attempt)
    second = world.finish_load("a")
    scene.began_s = world.now_s - 5000 + POLICY.healthy_s + 60  # gets on for so long
    stopped(scene)
    assert second.state is S.FAILED
    assert second.retry_at_s is not None


@pytest.mark.parametrize("policy", [{"restart_hung": False, "restarts": POLICY}, {"restart_hung": True}])
def test_it_is_only_reported_where_that_is_wanted_or_nothing_is_started_again(
    policy: dict[str, Any],
) -> None:
    scene = Scene(frozen, World(**policy))
    assert not scene.world.scheduler.restarts_hung
    for _ in range(2000):
        scene.look()
    assert scene.states() == [S.BUSY, S.STALLED]


def test_before_a_sleep_nothing_is_restarted() -> None:
    scene = Scene(frozen)
    scene.world.scheduler.asleep = True
    for _ in range(1000):
        scene.look()
    assert scene.state is S.STALLED


def test_an_unload_meanwhile_is_what_counts() -> None:
    scene = Scene(frozen)
    scene.until(lambda: scene.state is S.STOPPING, 1000)
    instance = scene.world.get("a")
    assert instance.drain is not None
    assert instance.drain.purpose is Purpose.RESTART
    assert kinds(scene.world.do(UnloadRequested("u", "a"))) == []
    effects = [*scene.world.do(DrainEnded(instance.run)), *scene.world.bring_down(instance)]
    assert [each.token for each in of_kind(effects, UnloadDone)] == ["u"]
    assert scene.world.scheduler.instances == ()
    assert of_kind(scene.world.look(after_s=1000), Restore) == []


@pytest.mark.parametrize(
    ("event", "comes_back"),
    [
        (ReleaseRequested("r", until_resume=False), False),
        (ReleaseRequested("r", until_resume=True), True),
        (ReleaseRequested("r", until_resume=False, for_sleep=True), True),
    ],
)
def test_a_release_or_a_sleep_meanwhile(event: ReleaseRequested, comes_back: bool) -> None:
    """Who frees the card once does not want it back a second later; who lends it away gets the rest after."""
    scene = Scene(frozen)
    world = scene.world
    scene.until(lambda: scene.state is S.STOPPING, 1000)
    instance = world.get("a")
    assert StopUnit in kinds(world.do(event))
    world.bring_down(instance)
    world.do(ResumeRequested("back"))
    assert bool(of_kind(world.look(after_s=10), Restore)) is comes_back


def test_without_a_drain_it_is_stopped_at_once() -> None:
    scene = Scene(frozen, World(restart_hung=True, restarts=POLICY))
    scene.until(lambda: scene.state is S.STOPPING, 1000)
    assert StopUnit in kinds(scene.effects)


def test_a_stalled_one_is_no_victim() -> None:
    """Even where it is said not to be busy, as between two looks."""
    scene = Scene(frozen, World(drain_s=10.0))
    world = scene.world
    scene.until(lambda: scene.state is S.STALLED, 1000)
    instance = world.get("a")
    instance.busy, instance.last_used_s = False, 0.0
    assert world.scheduler.evictable(world.observation()) == frozenset()
    assert kinds(world.do(YieldWanted((instance.run,), "strangers"))) == []
    (failed,) = of_kind(world.load("b", "tb", 22), Failed)
    assert failed.error.code == "insufficient_vram"
    # But whoever wants the whole card gets it.
    assert StopUnit in kinds(world.do(ReleaseRequested("r", until_resume=False)))


# --- the card ------------------------------------------------------------------------------------------------------


def with_load(seen: Observation, busy: int | None, memory: int | None) -> Observation:
    cards = []
    for state in seen.cards:
        reading = None
        if state.reading is not None:
            reading = replace(state.reading, busy_percent=busy, memory_busy_percent=memory)
        cards.append(replace(state, reading=reading))
    return replace(seen, cards=tuple(cards))


def test_a_card_that_spins_shortens_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scene, "observation", lambda self: with_load(self.world.observation(), 100, 0))
    scene = Scene(frozen)
    found_s = scene.until(lambda: scene.state is S.STALLED, 1000)
    assert SPINNING_LEAST_S < found_s <= SPINNING_LEAST_S + 3
    stall = scene.world.get("a").stall
    assert stall is not None
    assert "the card is at 100 % without touching its memory" in stall.reason


def test_a_card_tells_of_an_engine_that_has_it_for_itself() -> None:
    world = World(TWO_CARDS)
    world.capabilities = CUDA
    run = world.bring_up("a", gib=3, card=CARD.uuid).run
    seen = with_load(world.observation(), 97, 40)
    assert card_look(seen, run) == CardLook(97, 40)
    assert card_look(seen, "another") is None
    assert card_look(with_load(seen, None, 40), run) is None
    assert card_look(with_load(seen, 97, None), run) is None
    main, second = seen.cards
    game = replace(main, strangers=(Stranger(9, "game", "", 1),))
    assert card_look(replace(seen, cards=(game, second)), run) is None
    shared = replace(main, resident={**main.resident, "b": 1})
    assert card_look(replace(seen, cards=(shared, second)), run) is None
    both = replace(second, resident={run: 1})
    assert card_look(replace(seen, cards=(main, both)), run) is None
    assert second.card is SECOND
    unread = CardState(CARD, None, None, {run: 1})
    assert card_look(replace(seen, cards=(unread, second)), run) is None
    assert isinstance(seen.reading.processes[0], CardProcess)
