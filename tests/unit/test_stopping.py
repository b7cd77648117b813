"""Unloading: drained, hurried, by force; what a release, a sleep, a load or the engine's own end make of a drain."""

from __future__ import annotations

from typing import Any

import pytest

from lllm3090d.serving.drains import Drain, Purpose
from lllm3090d.serving.events import (
    Activity,
    DrainEnded,
    DrainSeen,
    DrainUnit,
    Effect,
    Failed,
    HoldLoads,
    LeaseAsked,
    Looked,
    Queued,
    ReleaseDone,
    ReleaseRequested,
    Resubmit,
    StopFinished,
    StopUnit,
    TellDrain,
    UnitAdopted,
    UnitSeen,
    UnloadDone,
    UnloadRequested,
    WaitForMemory,
)
from lllm3090d.serving.hangs import Verdict
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.running import Instance
from tests.fakes.scheduler_world import CARD, World, error_of, kinds, of_kind, status, the

pytestmark = pytest.mark.unit

S = InstanceState
LIMIT_S = 10.0
STALLED = Verdict(True, 121.0, 120.0, "no slot computes")


@pytest.fixture
def world() -> World:
    made = World(drain_s=LIMIT_S)
    made.bring_up("a")
    return made


def unload(world: World, token: str = "u", **how: Any) -> list[Effect]:
    return world.do(UnloadRequested(token, "a", **how))


def draining(world: World, **how: Any) -> Instance:
    """One with two requests in flight."""
    instance = world.get("a")
    assert kinds(unload(world, **how)) == [DrainUnit]
    world.do(DrainSeen(instance.run, 2))
    return instance


def test_requests_in_flight_may_end_and_then_it_is_stopped(world: World) -> None:
    instance = world.get("a")
    assert kinds(unload(world)) == [DrainUnit]
    assert (instance.state, instance.drain) == (S.STOPPING, Drain(LIMIT_S, world.now_s + LIMIT_S))
    told = the(world.do(DrainSeen(instance.run, 2)), TellDrain)
    assert (told.in_flight, told.limit_s) == (2, LIMIT_S)
    assert told.text == "waits for 2 requests to end, for 10 s at most"
    world.now_s += 4
    assert kinds(world.do(DrainSeen(instance.run, 1))) == []  # what is shown changes, no further event
    assert instance.drain is not None
    assert instance.drain.in_flight == 1
    world.do(DrainSeen(instance.run, 0))
    effects = world.do(DrainEnded(instance.run))
    assert the(effects, StopUnit) == StopUnit(instance.run, instance.unit)
    assert the(effects, TellDrain).text == "all requests have ended"
    done = the(world.bring_down(instance), UnloadDone)
    assert (done.token, done.unfinished) == ("u", 0)


def test_one_without_requests_is_stopped_and_nothing_is_told_of_it(world: World) -> None:
    instance = world.get("a")
    unload(world)
    assert kinds(world.do(DrainSeen(instance.run, 0))) == []
    assert kinds(world.do(DrainEnded(instance.run))) == [StopUnit]


@pytest.mark.parametrize(
    ("in_flight", "text"),
    [
        (1, "1 request had not ended and may be cut off"),
        (None, "requests of an engine that does not tell how many had not ended and may be cut off"),
    ],
)
def test_what_has_not_ended_in_time_is_counted(world: World, in_flight: int | None, text: str) -> None:
    instance = world.get("a")
    unload(world)
    world.do(DrainSeen(instance.run, in_flight))
    effects = world.do(DrainEnded(instance.run))
    assert the(effects, TellDrain).text == text
    assert the(world.bring_down(instance), UnloadDone).unfinished == in_flight


@pytest.mark.parametrize(("how", "kill"), [({"drain_s": 0.0}, False), ({"force": True}, True)])
def test_at_once_and_by_force(world: World, how: dict[str, Any], kill: bool) -> None:
    instance = world.get("a")
    effects = unload(world, **how)
    assert the(effects, StopUnit) == StopUnit(instance.run, instance.unit, kill)
    assert kinds(effects) == [StopUnit]
    assert instance.drain is None


def test_force_kills_one_that_loads(world: World) -> None:
    world.load("b", "t", 3)
    effects = world.do(UnloadRequested("u", "b", force=True))
    assert the(effects, StopUnit).kill
    assert error_of(effects, "t").code == "load_cancelled"


def test_a_drain_is_for_one_that_serves(world: World) -> None:
    world.load("b", "t", 3)
    assert kinds(world.do(UnloadRequested("u", "b", drain_s=60.0))) == [Failed, StopUnit]


def test_a_stalled_one_is_waited_for_only_if_somebody_says_so(world: World) -> None:
    run = world.get("a").run
    world.do(Looked({run: Activity(True, 1)}, {run: STALLED}))
    assert world.get("a").state is S.STALLED
    assert kinds(unload(world)) == [StopUnit]
    again = World(drain_s=LIMIT_S)
    run = again.bring_up("a").run
    again.do(Looked({run: Activity(True, 1)}, {run: STALLED}))
    assert kinds(unload(again, drain_s=5.0)) == [DrainUnit]


# --- meanwhile -----------------------------------------------------------------------------------------------------


def test_a_second_unload_waits_for_the_same_end(world: World) -> None:
    instance = draining(world, drain_s=600.0)
    assert kinds(unload(world, "second")) == []
    assert instance.drain is not None
    assert instance.drain.deadline_s == world.now_s + 600.0
    world.do(DrainEnded(instance.run))
    assert [each.token for each in of_kind(world.bring_down(instance), UnloadDone)] == ["u", "second"]


def test_the_shortest_wish_counts(world: World) -> None:
    instance = draining(world)
    assert kinds(unload(world, "longer", drain_s=600.0)) == []
    assert instance.drain is not None
    assert instance.drain.deadline_s == world.now_s + LIMIT_S
    unload(world, "shorter", drain_s=3.0)
    assert instance.drain.deadline_s == world.now_s + 3.0
    assert kinds(unload(world, "at once", drain_s=0.0)) == [TellDrain, StopUnit]
    assert kinds(world.do(DrainEnded(instance.run))) == []  # it was too late


def test_force_ends_a_drain_and_kills_what_does_not_stop(world: World) -> None:
    instance = draining(world)
    effects = unload(world, "now", force=True)
    assert the(effects, StopUnit).kill
    assert the(effects, TellDrain).in_flight == 2
    assert the(unload(world, "again", force=True), StopUnit).kill  # it was asked to stop, and does not
    done = of_kind(world.bring_down(instance), UnloadDone)
    assert [(each.token, each.unfinished) for each in done] == [("u", 2), ("now", 2), ("again", 2)]


def test_force_kills_one_that_is_stuck(world: World) -> None:
    instance = world.get("a")
    unload(world, drain_s=0.0)
    world.do(StopFinished(instance.run, error_of(unload(World(), "x"), "x")))
    assert instance.state is S.STUCK
    assert the(unload(world, "now", force=True), StopUnit).kill


def test_a_load_of_the_same_model_waits_and_is_decided_after(world: World) -> None:
    instance = draining(world)
    queued = the(world.load("a", "again"), Queued)
    assert queued.why == "its previous engine to finish its requests and end"
    world.do(DrainEnded(instance.run))
    assert [each.event.token for each in of_kind(world.bring_down(instance), Resubmit)] == ["again"]


def test_another_model_waits_for_its_memory_and_no_lease_is_given(world: World) -> None:
    world.bring_up("b", "tb", 6)
    draining(world)
    assert "the memory of a to come back" in the(world.load("c", "t", 13), Queued).why
    assert error_of(world.do(LeaseAsked("l", "a", "lease")), "l").code == "not_loaded"
    assert world.get("a").run not in world.scheduler.evictable(world.observation())


@pytest.mark.parametrize("for_sleep", [False, True])
def test_who_wants_the_whole_card_waits_for_no_request(world: World, for_sleep: bool) -> None:
    instance = draining(world, drain_s=600.0)
    if for_sleep:
        world.do(HoldLoads("h", held=True))
    effects = world.do(ReleaseRequested("r", until_resume=False, for_sleep=for_sleep))
    assert the(effects, StopUnit) == StopUnit(instance.run, instance.unit)
    assert instance.drain is None
    effects = world.bring_down(instance)
    assert the(effects, ReleaseDone).names == ("a",)
    assert the(effects, UnloadDone).unfinished == 2


def test_an_engine_that_ends_meanwhile_has_ended_as_asked(world: World) -> None:
    instance = draining(world)
    effects = world.do(UnitSeen(status(instance, active_state="failed", result="signal", main_pid=0)))
    assert kinds(effects) == [WaitForMemory]
    assert instance.drain is None
    assert kinds(world.do(DrainEnded(instance.run))) == []
    assert kinds(world.do(DrainSeen(instance.run, 1))) == []


def test_a_unit_that_somebody_restarts_meanwhile_is_stopped(world: World) -> None:
    instance = draining(world)
    assert kinds(world.do(UnitSeen(status(instance, invocation_id="cd" * 16)))) == [StopUnit]
    assert instance.drain is None


# --- the next daemon -----------------------------------------------------------------------------------------------


def adopted(
    world: World, *, active: str = "active", drain: Drain | None = None
) -> tuple[World, list[Effect]]:
    before = world.get("a")
    after = World(drain_s=LIMIT_S)
    shares = before.record.shares(CARD.uuid)
    found = status(before, active_state=active)
    # Its door is shut, so it does not answer where a healthy one would.
    return after, after.do(UnitAdopted(found, before.record, False, shares, drain=drain))


def test_the_next_daemon_goes_on_with_it(world: World) -> None:
    left = Drain(7.0, world.now_s + 7.0)
    after, effects = adopted(world, drain=left)
    instance = after.get("a")
    assert kinds(effects) == [DrainUnit]
    assert (instance.state, instance.drain) == (S.STOPPING, left)
    after.do(DrainEnded(instance.run))
    after.bring_down(instance)
    assert after.scheduler.instances == ()


def test_one_that_systemd_stops_already_is_drained_no_more(world: World) -> None:
    after, effects = adopted(world, active="deactivating", drain=Drain(7.0, world.now_s + 7.0))
    assert DrainUnit not in kinds(effects)
    assert after.get("a").drain is None


def test_an_unload_makes_a_drain_for_a_restart_one_of_its_own() -> None:
    world = World(drain_s=LIMIT_S)
    instance = world.bring_up("a")
    world.scheduler._drain(instance, "stalled", None, LIMIT_S, Purpose.RESTART)
    unload(world)
    assert instance.drain is not None
    assert instance.drain.purpose is Purpose.UNLOAD
