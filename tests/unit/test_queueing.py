"""Loads that find no room: eviction step by step, the queue, and what becomes of those that went for nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.events import (
    Activity,
    Admitted,
    CancelDone,
    CancelRequested,
    CheckIdle,
    Effect,
    EngineReady,
    Failed,
    ForgetUnit,
    IdleChecked,
    Joined,
    LeaseAsked,
    LeaseReturned,
    LoadDone,
    LoadStalled,
    LookAgain,
    Looked,
    MemoryReleased,
    PinRequested,
    PostMortemRead,
    Queued,
    Restore,
    Resubmit,
    StartFinished,
    StartUnit,
    StopFinished,
    StopUnit,
    TellEviction,
    UnitAdopted,
    UnitSeen,
    UnitVanished,
    UnloadDone,
    UnloadRequested,
    WaitForMemory,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.observation import CardState, Observation
from lllm3090d.serving.running import Instance
from tests.fakes.scheduler_world import CARD, GIB, World, error_of, kinds, of_kind, status, the
from tests.unit.test_command_line import build_named

pytestmark = pytest.mark.unit

WISH = PlanRequest(8192, 1)


@pytest.fixture
def world() -> World:
    """A model of 13 GiB serves and is idle; another one does not fit beside it."""
    made = World()
    made.bring_up("a", gib=13, request=WISH)
    made.rest()
    return made


def agree(world: World, effects: list[Effect], *busy: Instance) -> list[Effect]:
    """The victims were asked; these are busy."""
    check = the(effects, CheckIdle)
    return world.do(IdleChecked(check.token, frozenset(each.run for each in busy)))


def make_way(world: World, token: str = "t", name: str = "b", **wishes: object) -> Instance:
    """A load that evicts the model that is there, up to the stop of its unit; the victim."""
    victim = world.get("a")
    effects = agree(world, world.load(name, token, 13, WISH, **wishes))
    assert of_kind(effects, StopUnit) == [StopUnit(victim.run, victim.unit)]
    return victim


def queued_names(world: World) -> list[str]:
    return [each.token for each in world.scheduler.pending]


# --- an eviction ---------------------------------------------------------------------------------------------------


def test_an_eviction_step_by_step(world: World) -> None:
    """Asked, stopped, its memory seen to be back, and only then is the load admitted."""
    victim = world.get("a")
    effects = world.load("b", "t", 13)
    assert kinds(effects) == [Queued, CheckIdle]
    assert the(effects, Queued).why == "a to be unloaded"
    assert the(effects, CheckIdle) == CheckIdle("t", (victim.run,))
    assert victim.state is InstanceState.READY
    effects = world.do(IdleChecked("t", frozenset()))
    assert kinds(effects) == [TellEviction, StopUnit, LookAgain]
    told = the(effects, TellEviction)
    assert (told.name, told.run, told.cause, told.reason) == ("a", victim.run, "load", "makes room for b")
    assert world.look() == []
    assert kinds(world.do(StopFinished(victim.run, None))) == [WaitForMemory]
    assert world.look() == []
    assert kinds(world.do(MemoryReleased(victim.run, {}))) == [ForgetUnit, LookAgain]
    effects = world.look()
    assert kinds(effects) == [Admitted, StartUnit]
    assert world.scheduler.instance("a") is None
    assert queued_names(world) == []
    world.finish_load("b")


def test_one_that_has_become_busy_stays(world: World) -> None:
    effects = agree(world, world.load("b", "t", 13), world.get("a"))
    assert of_kind(effects, StopUnit) == []
    assert world.get("a").state is InstanceState.READY
    assert the(world.look(), Queued).why == "a, which is busy"
    # Idle again, and for long enough: it is asked once more.
    world.rest(1)
    assert of_kind(world.look(), CheckIdle) == []
    assert len(of_kind(world.look(after_s=5), CheckIdle)) == 1


def pin(world: World) -> None:
    world.do(PinRequested("p", "a", True))


def lease(world: World) -> None:
    world.do(LeaseAsked("l", "a", "lease"))


def die(world: World) -> None:
    instance = world.get("a")
    world.do(UnitSeen(status(instance, active_state="failed", result="signal", main_pid=0)))


@pytest.mark.parametrize("meanwhile", [pin, lease, die])
def test_what_happens_while_it_is_asked_counts(world: World, meanwhile: Callable[[World], None]) -> None:
    effects = world.load("b", "t", 13)
    meanwhile(world)
    assert {StopUnit, TellEviction}.isdisjoint(kinds(agree(world, effects)))


def test_all_or_nobody(world: World) -> None:
    """Where one of two victims is needed after all, the other one would go for nothing."""
    world = World()
    for name in ("a", "b"):
        world.bring_up(name, gib=8)
    world.rest()
    effects = world.load("c", "t", 18)
    assert len(the(effects, CheckIdle).runs) == 2
    effects = agree(world, effects, world.get("b"))
    assert of_kind(effects, StopUnit) == []


def test_an_answer_for_a_load_that_has_left_evicts_nobody(world: World) -> None:
    check = the(world.load("b", "t", 13), CheckIdle)
    world.do(CancelRequested("c", "t"))
    assert world.do(IdleChecked(check.token, frozenset())) == []


def test_two_victims_are_both_waited_for() -> None:
    world = World()
    first, second = (world.bring_up(name, gib=8) for name in ("a", "b"))
    world.rest()
    agree(world, world.load("c", "t", 18))
    world.bring_down(first)
    assert world.look() == []
    world.bring_down(second)
    assert kinds(world.look()) == [Admitted, StartUnit]


def test_memory_that_does_not_come_back_may_cost_another_one() -> None:
    """What is quarantined is decided with; those that went already are not asked again."""
    world = World()
    world.bring_up("a", gib=8)
    world.bring_up("b", gib=8)
    world.rest()
    world.do(LeaseAsked("l", "b", "lease"))
    world.do(LeaseReturned("lease"))
    world.rest()
    effects = world.load("c", "t", 8)
    victim = world.get("a")
    agree(world, effects)
    world.do(StopFinished(victim.run, None))
    world.do(MemoryReleased(victim.run, {CARD.uuid: 6 * GIB}))
    effects = world.look()
    assert the(effects, CheckIdle).runs == (world.get("b").run,)


def test_a_victim_that_does_not_stop_is_not_waited_for(world: World) -> None:
    victim = make_way(world)
    world.do(StopFinished(victim.run, LlmError(ErrorCode.STOP_FAILED, "it did not die")))
    effects = world.look()
    assert error_of(effects, "t").code is ErrorCode.INSUFFICIENT_VRAM
    assert world.get("a").state is InstanceState.STUCK


# --- in line -------------------------------------------------------------------------------------------------------


def test_first_come_first_served(world: World) -> None:
    """What comes later waits its turn, even where it would fit, and even where the first one is not served yet."""
    world.look({"a": Activity(True, 1)})
    assert the(world.load("b", "t1", 13), Queued).why == "a, which is busy"
    assert the(world.load("c", "t2", 1), Queued).why == "its turn, after b"
    assert the(world.load("d", "t3", 1), Queued).why == "its turn, after b"
    assert queued_names(world) == ["t1", "t2", "t3"]
    assert world.look() == []
    world.look({"a": Activity(False, 2)})
    effects = world.look(after_s=5)
    victim = world.get("a")
    agree(world, effects)
    world.bring_down(victim)
    assert [each.token for each in of_kind(world.look(), Admitted)] == ["t1", "t2", "t3"]


def test_what_could_not_fit_even_then_is_refused_at_once(world: World) -> None:
    world.look({"a": Activity(True, 1)})
    world.load("b", "t1", 13)
    assert error_of(world.load("c", "t2", 40), "t2").code is ErrorCode.INSUFFICIENT_VRAM
    assert queued_names(world) == ["t1"]


def test_what_serves_needs_no_turn(world: World) -> None:
    world.look({"a": Activity(True, 1)})
    world.load("b", "t1", 13)
    assert kinds(world.load("a", "t2", 13, WISH)) == [LoadDone]


def test_loads_of_one_model_share_one_place(world: World) -> None:
    """The followers join when the first of them is admitted, wherever they stand, and all are served with it."""
    world.look({"a": Activity(True, 1)})
    for name, token in (("b", "t1"), ("c", "t2"), ("b", "t3")):
        world.load(name, token, 13 if name == "b" else 8, WISH)
    world.look({"a": Activity(False, 2)})
    effects = world.look(after_s=5)
    victim = world.get("a")
    agree(world, effects)
    world.bring_down(victim)
    effects = world.look()
    assert [each.token for each in of_kind(effects, Admitted)] == ["t1"]
    assert [each.token for each in of_kind(effects, Joined)] == ["t3"]
    assert queued_names(world) == ["t2"]
    instance = world.get("b")
    world.do(StartFinished(instance.run, None))
    assert [e.token for e in of_kind(world.do(EngineReady(instance.run, {})), LoadDone)] == ["t1", "t3"]


def test_a_model_that_has_come_back_otherwise_serves_those_who_wait(world: World) -> None:
    """A unit of it was found: it is adopted, and nobody needs room for it any more."""
    other = World()
    other.runs = 100
    found = other.bring_up("b", gib=1, request=WISH)
    world.look({"a": Activity(True, 1)})
    world.load("b", "t1", 13, WISH)
    shares = found.record.shares(CARD.uuid)
    assert LookAgain in kinds(world.do(UnitAdopted(status(found), found.record, True, shares)))
    effects = world.look()
    assert (kinds(effects), the(effects, LoadDone).token) == ([LoadDone], "t1")
    assert queued_names(world) == []


def test_one_that_must_not_wait_is_refused_where_it_would_have_to(world: World) -> None:
    world.look({"a": Activity(True, 1)})
    error = error_of(world.load("b", "t1", 13, may_wait=False), "t1")
    assert error.code is ErrorCode.QUEUE_TIMED_OUT and "a, which is busy" in error.message
    world.load("b", "t2", 13)
    error = error_of(world.load("c", "t3", 1, may_wait=False), "t3")
    assert error.code is ErrorCode.QUEUE_TIMED_OUT and "others wait for room" in error.message
    assert queued_names(world) == ["t2"]


def test_one_that_must_not_wait_may_still_evict(world: World) -> None:
    make_way(world, may_wait=False)
    world.bring_down(world.get("a"))
    assert kinds(world.look()) == [Admitted, StartUnit]


def test_who_waits_is_told_what_for_and_only_news(world: World) -> None:
    world.look({"a": Activity(True, 1)})
    world.load("b", "t", 13)
    assert world.look({"a": Activity(True, 2)}) == []
    assert the(world.look({"a": Activity(False, 3)}), Queued).why.startswith(
        "a, which has been idle for less"
    )
    assert world.look(after_s=1) == []


def test_everybody_is_told_at_once_that_he_waits(world: World) -> None:
    """Also where one model must go and another one's memory must come back."""
    world = World()
    going, _ = (world.bring_up(name, gib=8) for name in ("a", "b"))
    world.rest()
    world.do(UnloadRequested("u", "a"))
    effects = world.load("c", "t", 18)
    assert the(effects, Queued).why == "the memory of a to come back"
    world.bring_down(going)
    assert the(world.look(), CheckIdle).runs == (world.get("b").run,)


def test_waiting_ends_in_time(world: World) -> None:
    world.look({"a": Activity(True, 1)})
    world.load("b", "t1", 13)
    world.now_s += 60
    world.load("c", "t2", 1)
    assert world.scheduler.next_attention_s() == world.now_s + 1
    world.now_s += 59.5
    assert world.scheduler.next_attention_s() == world.now_s + 0.5
    assert world.look({"a": Activity(True, 2)}) == []
    effects = world.look({"a": Activity(True, 3)}, after_s=0.5)
    error = error_of(effects, "t1")
    assert error.code is ErrorCode.QUEUE_TIMED_OUT
    assert "waited 120 s for a, which is busy" in error.message
    # The next one is served at once: it fits.
    assert [each.token for each in of_kind(effects, Admitted)] == ["t2"]
    assert world.scheduler.next_attention_s() is None


def test_a_load_while_its_model_goes_is_decided_again_when_it_is_gone(world: World) -> None:
    victim = make_way(world)
    assert the(world.load("a", "t2", 13, WISH), Queued).why == "its previous engine to end"
    effects = world.bring_down(victim)
    again = the(effects, Resubmit)
    # Somebody waits for the room already.
    assert the(world.do(again.event), Queued).why == "its turn, after b"
    assert [each.token for each in of_kind(world.look(), Admitted)] == ["t"]


# --- cancelled -----------------------------------------------------------------------------------------------------


def restored(effects: list[Effect]) -> list[tuple[str, PlanRequest]]:
    return [(each.name, each.request) for each in of_kind(effects, Restore)]


def test_a_load_that_is_cancelled_while_it_waits(world: World) -> None:
    world.look({"a": Activity(True, 1)})
    world.load("b", "t1", 13)
    world.load("c", "t2", 1)
    effects = world.do(CancelRequested("x", "t1"))
    assert error_of(effects, "t1").code is ErrorCode.LOAD_CANCELLED
    assert the(effects, CancelDone).stopped
    assert restored(effects) == []
    # Whoever stood behind it is looked at at once.
    assert LookAgain in kinds(effects)
    assert [each.token for each in of_kind(world.look(), Admitted)] == ["t2"]
    assert error_of(world.do(CancelRequested("x2", "t1")), "x2").code is ErrorCode.NO_SUCH_LOAD


def test_a_load_that_is_cancelled_while_its_victim_stops(world: World) -> None:
    """What goes cannot be kept any more, so it is loaded again, as it was."""
    victim = make_way(world)
    effects = world.do(CancelRequested("x", "t"))
    assert error_of(effects, "t").code is ErrorCode.LOAD_CANCELLED
    assert restored(effects) == [("a", WISH)]
    again = the(effects, Restore)
    assert again.reason == "the load of b was cancelled"
    assert kinds(world.load("a", "t3", 13, again.request, may_evict=False)) == [Queued]
    resubmitted = the(world.bring_down(victim), Resubmit)
    assert kinds(world.do(resubmitted.event)) == [Admitted, StartUnit]


def test_a_load_that_is_cancelled_while_it_loads(world: World) -> None:
    victim = make_way(world)
    world.bring_down(victim)
    world.look()
    effects = world.do(CancelRequested("x", "t"))
    assert restored(effects) == [("a", WISH)]
    assert StopUnit in kinds(effects)
    # Once: the end of the load does not bring another one.
    assert restored(world.bring_down(world.get("b"))) == []


def test_a_cancelled_load_that_somebody_shares_keeps_its_room(world: World) -> None:
    victim = make_way(world)
    world.load("b", "t2", 13, WISH)
    world.bring_down(victim)
    world.look()
    effects = world.do(CancelRequested("x", "t"))
    assert (restored(effects), the(effects, CancelDone).stopped) == ([], False)


def test_what_went_in_time_is_not_missed_once_the_other_serves(world: World) -> None:
    victim = make_way(world)
    world.bring_down(victim)
    world.look()
    instance = world.finish_load("b")
    world.do(UnitSeen(status(instance, active_state="failed", result="signal", main_pid=0)))
    world.do(MemoryReleased(instance.run, {}))
    ended = world.do(PostMortemRead(instance.run, LlmError(ErrorCode.ENGINE_FAILED, "why")))
    assert restored(ended) == []


# --- gone for nothing ------------------------------------------------------------------------------------------------


def refuse_start(world: World, run: str) -> list[Effect]:
    error = LlmError(ErrorCode.UNIT_REFUSED, "no")
    return [*world.do(StartFinished(run, error)), *world.do(MemoryReleased(run, {}))]


def crash(world: World, run: str) -> list[Effect]:
    instance = world.get("b")
    effects = world.do(UnitSeen(status(instance, active_state="failed", result="exit-code", main_pid=0)))
    effects += world.do(PostMortemRead(run, LlmError(ErrorCode.ENGINE_FAILED, "out of memory")))
    return effects + world.do(MemoryReleased(run, {}))


def stall(world: World, run: str) -> list[Effect]:
    world.do(StartFinished(run, None))
    effects = world.do(LoadStalled(run, LlmError(ErrorCode.LOAD_TIMED_OUT, "slow")))
    return effects + world.bring_down(world.get("b"))


@pytest.mark.parametrize("fail", [refuse_start, crash, stall])
def test_what_went_for_one_that_does_not_come_up_is_loaded_again(
    world: World, fail: Callable[[World, str], list[Effect]]
) -> None:
    victim = make_way(world)
    world.bring_down(victim)
    world.look()
    effects = fail(world, world.get("b").run)
    assert restored(effects) == [("a", WISH)]
    assert the(effects, Restore).reason == "b did not come up"
    assert world.get("b").state is InstanceState.FAILED


def test_what_went_for_one_that_waited_too_long_is_loaded_again() -> None:
    """The memory of the victim did not come back, and another one is busy."""
    world = World()
    victim = world.bring_up("a", gib=8, request=WISH)
    world.bring_up("b", gib=8, request=WISH)
    world.rest()
    agree(world, world.load("c", "t", 8))
    world.do(StopFinished(victim.run, None))
    world.do(MemoryReleased(victim.run, {CARD.uuid: 6 * GIB}))
    world.look({"b": Activity(True, 5)})
    effects = world.look({"b": Activity(True, 6)}, after_s=120)
    assert error_of(effects, "t").code is ErrorCode.QUEUE_TIMED_OUT
    assert restored(effects) == [("a", WISH)]


def test_what_went_for_one_that_is_refused_then_is_loaded_again(world: World) -> None:
    victim = make_way(world)
    world.bring_down(victim)
    world.foreign_bytes = 20 * GIB  # a stranger was faster
    effects = world.look()
    assert error_of(effects, "t").code is ErrorCode.INSUFFICIENT_VRAM
    assert restored(effects) == [("a", WISH)]


ARGUMENTS = ("--threads", "4", "--cache-ram", "512", "-np", "2", "--no-warmup")


@pytest.mark.parametrize("adopted", [False, True])
def test_what_comes_back_is_what_went(adopted: bool) -> None:
    """Its arguments included, word by word; of an adopted one those that its record tells."""
    world = World()
    world.capabilities = replace(build_named("b11434", Backend.VULKAN), devices=("Vulkan0",))
    victim = world.bring_up("a", gib=13, arguments=ARGUMENTS)
    before = victim.record
    if adopted:
        victim.arguments = None
    world.rest()
    victim = make_way(world)
    again = the(world.do(CancelRequested("x", "t")), Restore)
    world.bring_down(victim)
    effects = world.load(again.name, "t2", 13, again.request, arguments=again.arguments, may_evict=False)
    assert kinds(effects) == [Admitted, StartUnit]
    after = world.get("a").record
    assert (after.arguments, after.asked) == (before.arguments, before.asked)
    if not adopted:
        assert world.get("a").plan == victim.plan


def test_one_that_ends_by_itself_while_it_is_evicted_makes_room_all_the_same(world: World) -> None:
    victim = make_way(world)
    world.do(UnitVanished(victim.unit, None))
    world.do(MemoryReleased(victim.run, {}))
    assert kinds(world.do(Looked())) == [Admitted, StartUnit]


# --- what cannot be helped now -------------------------------------------------------------------------------------


def test_memory_of_a_victim_that_comes_back_late_is_waited_for(world: World) -> None:
    """Refused at once, the load would be lost, and its victim with it."""
    victim = make_way(world)
    world.do(StopFinished(victim.run, None))
    world.do(MemoryReleased(victim.run, {CARD.uuid: 13 * GIB}))
    effects = world.look()
    assert the(effects, Queued).why == "the memory of a to come back, which is late"
    assert queued_names(world) == ["t"]
    world.do(MemoryReleased(victim.run, {}))
    assert kinds(world.look()) == [Admitted, StartUnit]


def test_of_another_load_late_memory_is_counted_and_not_waited_for(world: World) -> None:
    victim = make_way(world)
    world.do(StopFinished(victim.run, None))
    world.do(MemoryReleased(victim.run, {CARD.uuid: 13 * GIB}))
    world.do(CancelRequested("c", "t"))
    assert error_of(world.load("c", "t2", 13, WISH), "t2").code is ErrorCode.INSUFFICIENT_VRAM


def test_an_engine_that_never_tells_whether_it_is_idle_is_asked_once(world: World) -> None:
    """Its load is refused in the end rather than left to ask for as long as it may wait."""
    instance = world.get("a")
    world.do(Looked({instance.run: Activity(None, None)}))
    check = the(world.load("b", "t", 13), CheckIdle)
    runs = frozenset({instance.run})
    assert of_kind(world.do(IdleChecked(check.token, runs, runs)), StopUnit) == []
    assert instance.is_silent
    world.now_s += 60
    effects = world.do(Looked({instance.run: Activity(None, None)}))
    assert of_kind(effects, CheckIdle) == []
    assert error_of(effects, "t").code is ErrorCode.INSUFFICIENT_VRAM
    # One that has found its tongue may go again.
    world.do(Looked({instance.run: Activity(busy=False, served_tokens=1)}))
    world.rest()
    assert len(of_kind(world.load("b", "t2", 13), CheckIdle)) == 1


def test_an_engine_that_was_never_looked_at_before_it_was_busy_is_waited_for(world: World) -> None:
    """It was loaded a moment ago and is asked directly already: that it does not tell is not said by that."""
    instance = world.get("a")
    instance.busy = None
    agree(world, world.load("b", "t", 13), instance)
    assert not instance.is_silent
    world.look({"a": Activity(busy=True, served_tokens=1)})
    assert queued_names(world) == ["t"]


def test_a_reading_that_fails_sends_nobody_away_who_waits(world: World) -> None:
    world.do(PinRequested("p", "a", True))
    world.do(PinRequested("q", "a", False))
    world.get("a").busy = True
    assert queued_names(world) == []
    world.do(Looked({world.get("a").run: Activity(busy=True, served_tokens=1)}))
    world.load("b", "t", 13)
    assert queued_names(world) == ["t"]
    error = LlmError(ErrorCode.CARD_UNREADABLE, "lost")
    lost = Observation((CardState(CARD, None, error),), False)
    effects = world.scheduler.handle(Looked(), lost)
    assert the(effects, Queued).why == "the card to be readable again"
    assert queued_names(world) == ["t"]
    # Who comes now is told at once.
    refused = world.scheduler.handle(replace(world.request("c", "t2", 1), may_wait=True), lost)
    assert error_of(refused, "t2").code is ErrorCode.CARD_UNREADABLE


def test_a_person_who_unloads_a_victim_does_not_get_it_back(world: World) -> None:
    victim = make_way(world)
    world.do(UnloadRequested("u", "a"))
    world.do(StopFinished(victim.run, None))
    world.do(MemoryReleased(victim.run, {}))
    effects = world.do(CancelRequested("c", "t"))
    assert of_kind(effects, Restore) == []


def test_of_one_that_has_gone_for_a_load_as_well(world: World) -> None:
    victim = make_way(world)
    world.do(StopFinished(victim.run, None))
    world.do(MemoryReleased(victim.run, {}))
    world.look()
    assert world.scheduler.is_to_come_back("a")
    assert len(of_kind(world.do(UnloadRequested("u", "a")), UnloadDone)) == 1
    assert not world.scheduler.is_to_come_back("a")
    world.do(StartFinished(world.get("b").run, LlmError(ErrorCode.UNIT_REFUSED, "no")))
    assert of_kind(world.do(MemoryReleased(world.get("b").run, {})), Restore) == []


def test_a_model_on_another_card_is_not_the_one_that_was_asked_for(world: World) -> None:
    event = replace(world.request("a", "t", 13, WISH), card="GPU-other")
    assert error_of(world.do(event), "t").code is ErrorCode.LOADED_DIFFERENTLY
    there = replace(world.request("a", "t2", 13, WISH), card=CARD.uuid)
    assert len(of_kind(world.do(there), LoadDone)) == 1


def test_many_that_are_refused_are_not_refused_all_at_once(world: World) -> None:
    world.do(Looked({world.get("a").run: Activity(busy=True, served_tokens=1)}))
    for number in range(50):
        world.load(f"m{number}", f"t{number}", 13, WISH)
    assert len(queued_names(world)) == 50
    world.do(PinRequested("p", "a", True))
    effects = world.look()
    assert 0 < len(of_kind(effects, Failed)) < 50
    assert len(of_kind(effects, LookAgain)) == 1
    while queued_names(world):
        world.look()


def test_a_card_at_risk_gives_nothing_and_sends_nobody_away_who_waits(world: World) -> None:
    fault = LlmError(ErrorCode.CARD_AT_RISK, "Xid 79")
    state = replace(world.observation().main, fault=fault)
    broken = Observation((state,), False)
    assert world.scheduler.budgets(broken) == {}
    effects = world.scheduler.handle(world.request("c", "c"), broken)
    assert error_of(effects, "c").code is ErrorCode.CARD_AT_RISK
    effects = world.scheduler.handle(world.request("d", "d", card=CARD.uuid), broken)
    assert error_of(effects, "d").code is ErrorCode.CARD_AT_RISK
    # What runs is joined, for it needs no room.
    effects = world.scheduler.handle(world.request("a", "a2"), broken)
    assert the(effects, LoadDone).run == world.get("a").run
    world.do(Looked({world.get("a").run: Activity(busy=True, served_tokens=1)}))
    world.load("b", "t", 13)
    effects = world.scheduler.handle(Looked(), broken)
    assert the(effects, Queued).why == "the card to be well again"
