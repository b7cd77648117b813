"""What people and other programs ask of the card beside loads: leases, pins, the whole card, room for strangers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.events import (
    Activity,
    Announce,
    CancelRequested,
    CheckIdle,
    IdleChecked,
    KeepPin,
    KeepReleased,
    LeaseAsked,
    LeaseGiven,
    LeaseReturned,
    LoadStalled,
    LookAgain,
    Looked,
    PinDone,
    PinRequested,
    Queued,
    ReleaseDone,
    ReleaseRequested,
    Restore,
    ResumeDone,
    ResumeRequested,
    StartFinished,
    StartUnit,
    StopFinished,
    StopUnit,
    TellEviction,
    UnloadRequested,
    YieldWanted,
)
from lllm3090d.serving.instance import InstanceState
from tests.fakes.scheduler_world import CARD, GIB, World, error_of, kinds, of_kind, the

pytestmark = pytest.mark.unit


@pytest.fixture
def world() -> World:
    """A model of 13 GiB serves and is idle."""
    made = World()
    made.bring_up("a", gib=13)
    made.rest()
    return made


def evicts(world: World) -> bool:
    """Whether a load would replace the model that is there; the load is withdrawn again."""
    effects = world.load("b", "probe", 13)
    world.do(CancelRequested("withdrawn", "probe"))
    return CheckIdle in kinds(effects)


# --- leases --------------------------------------------------------------------------------------------------------


def test_a_lease_keeps_a_model_until_it_is_returned(world: World) -> None:
    assert evicts(world)
    effects = world.do(LeaseAsked("l", "a", "lease-1"))
    assert effects == [LeaseGiven("l", world.get("a").run)]
    world.rest()
    assert not evicts(world)
    assert world.do(LeaseReturned("lease-1")) == []
    # It has just been used.
    assert not evicts(world)
    world.rest()
    assert evicts(world)


def test_every_lease_counts(world: World) -> None:
    for lease in ("one", "two"):
        world.do(LeaseAsked(f"l-{lease}", "a", lease))
    world.do(LeaseReturned("one"))
    world.do(LeaseReturned("one"))
    world.rest()
    assert world.get("a").leases == {"two"}
    assert not evicts(world)


def test_who_waits_is_looked_at_when_a_lease_ends(world: World) -> None:
    world.do(LeaseAsked("l", "a", "lease"))
    assert the(world.load("b", "t", 13), Queued).why == "a, which is busy"
    assert kinds(world.do(LeaseReturned("lease"))) == [LookAgain]


def test_a_lease_of_what_does_not_serve_is_refused(world: World) -> None:
    assert error_of(world.do(LeaseAsked("l", "b", "x")), "l").code is ErrorCode.NOT_LOADED
    world.do(UnloadRequested("u", "a"))
    assert error_of(world.do(LeaseAsked("l2", "a", "x")), "l2").code is ErrorCode.NOT_LOADED
    assert world.do(LeaseReturned("never-was")) == []


def test_a_load_for_a_request_leases_its_model_from_the_start() -> None:
    """By its own token: nobody may take the model before the request has been served."""
    world = World()
    world.load("a", "t1", 13, lease=True)
    world.finish_load("a")
    world.load("a", "t2", 13, lease=True)
    world.rest()
    assert world.get("a").leases == {"t1", "t2"}
    assert not evicts(world)
    world.do(LeaseReturned("t1"))
    world.do(LeaseReturned("t2"))
    world.rest()
    assert evicts(world)


# --- pins ----------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_a_model_and_is_remembered(world: World) -> None:
    run = world.get("a").run
    assert world.do(PinRequested("p", "a", True)) == [KeepPin(run, True), PinDone("p", run)]
    assert world.do(PinRequested("p2", "a", True)) == [PinDone("p2", run)]
    assert not evicts(world)
    assert world.do(PinRequested("p3", "a", False)) == [KeepPin(run, False), PinDone("p3", run)]
    assert evicts(world)


def test_a_load_can_pin(world: World) -> None:
    effects = world.load("c", "t", 1, pinned=True)
    assert the(effects, KeepPin) == KeepPin(world.get("c").run, True)
    # Also one that joins.
    effects = world.load("a", "t2", 13, pinned=True)
    assert the(effects, KeepPin) == KeepPin(world.get("a").run, True)


def test_a_pin_ends_with_its_launch(world: World) -> None:
    instance = world.get("a")
    world.do(PinRequested("p", "a", True))
    world.do(UnloadRequested("u", "a"))
    effects = world.bring_down(instance)
    assert the(effects, KeepPin) == KeepPin(instance.run, False)
    world.bring_up("a", "t2", 13)
    assert not world.get("a").pinned


def test_what_does_not_run_is_not_pinned(world: World) -> None:
    assert error_of(world.do(PinRequested("p", "b", True)), "p").code is ErrorCode.NOT_LOADED
    world.do(UnloadRequested("u", "a"))
    error = error_of(world.do(PinRequested("p", "a", True)), "p")
    assert error.code is ErrorCode.NOT_LOADED and "is being unloaded" in error.message


# --- the whole card --------------------------------------------------------------------------------------------------


def test_a_release_unloads_everything_whatever_it_does(world: World) -> None:
    world.bring_up("b", gib=3)
    world.do(PinRequested("p", "a", True))
    world.look({"b": Activity(True, 5)})
    world.load("c", "t", 2)
    effects = world.do(ReleaseRequested("r", until_resume=False))
    assert len(of_kind(effects, StopUnit)) == 3
    assert error_of(effects, "t").code is ErrorCode.LOAD_CANCELLED
    assert of_kind(effects, ReleaseDone) == []
    instances = {name: world.get(name) for name in ("a", "b", "c")}
    on_card = world.charged_bytes
    for name in ("a", "b"):
        assert of_kind(world.bring_down(instances[name]), ReleaseDone) == []
    done = the(world.bring_down(instances["c"]), ReleaseDone)
    assert (done.token, done.names, done.released_bytes) == ("r", ("a", "b", "c"), on_card)
    # The next load is welcome.
    assert StartUnit in kinds(world.load("d", "t2"))


def test_a_release_tells_those_who_wait_and_restores_nothing() -> None:
    world = World()
    victim = world.bring_up("a", gib=13)
    world.rest()
    check = the(world.load("b", "t1", 13), CheckIdle)
    world.load("c", "t2", 1)
    world.do(IdleChecked(check.token, frozenset()))
    world.load("a", "t3", 13)  # waits for its previous engine to end
    effects = world.do(ReleaseRequested("r", until_resume=False))
    assert {error_of(effects, token).code for token in ("t1", "t2", "t3")} == {ErrorCode.LOAD_CANCELLED}
    assert world.scheduler.pending == ()
    effects = world.bring_down(victim)
    assert of_kind(effects, Restore) == []
    assert the(effects, ReleaseDone).names == ("a",)


def test_a_release_restores_nothing_for_a_load_that_had_failed_already(world: World) -> None:
    """Its engine is still being stopped; what went for it would be loaded again, onto the card that is wanted."""
    victim = world.get("a")
    check = the(world.load("b", "t1", 13), CheckIdle)
    world.do(IdleChecked(check.token, frozenset()))
    world.bring_down(victim)
    world.look()
    loading = world.get("b")
    world.do(StartFinished(loading.run, None))
    world.do(LoadStalled(loading.run, LlmError(ErrorCode.LOAD_TIMED_OUT, "slow")))
    world.do(ReleaseRequested("r", until_resume=False))
    effects = world.bring_down(loading)
    assert of_kind(effects, Restore) == []
    assert the(effects, ReleaseDone).names == ("b",)


def test_an_empty_card_is_released_at_once() -> None:
    assert World().do(ReleaseRequested("r", until_resume=False)) == [ReleaseDone("r", (), 0)]


def test_until_somebody_resumes_loads_are_refused(world: World) -> None:
    effects = world.do(ReleaseRequested("r", until_resume=True))
    assert the(effects, KeepReleased).released is True
    world.bring_down(world.get("a"))
    error = error_of(world.load("b", "t", 1), "t")
    assert error.code is ErrorCode.CARD_RELEASED
    assert "resume" in (error.hint or "")
    # It is remembered once.
    assert of_kind(world.do(ReleaseRequested("r2", until_resume=True)), KeepReleased) == []
    assert world.do(ResumeRequested("x")) == [KeepReleased(False), ResumeDone("x", True)]
    assert world.do(ResumeRequested("x2")) == [ResumeDone("x2", False)]
    assert StartUnit in kinds(world.load("b", "t2", 1))


def test_a_release_does_not_wait_for_what_does_not_stop(world: World) -> None:
    failure = LlmError(ErrorCode.STOP_FAILED, "it did not die")
    world.do(ReleaseRequested("r", until_resume=False))
    effects = world.do(StopFinished(world.get("a").run, failure))
    assert error_of(effects, "r") is failure
    assert world.do(ReleaseRequested("r2", until_resume=False)) == [ReleaseDone("r2", (), 0)]


def test_two_who_want_the_card_are_both_answered(world: World) -> None:
    world.do(ReleaseRequested("r1", until_resume=False))
    world.do(ReleaseRequested("r2", until_resume=False))
    effects = world.bring_down(world.get("a"))
    assert [each.token for each in of_kind(effects, ReleaseDone)] == ["r1", "r2"]


# --- strangers -------------------------------------------------------------------------------------------------------


def test_what_yields_is_told_and_stopped(world: World) -> None:
    run = world.get("a").run
    effects = world.do(YieldWanted((run,), "steam has taken 9.0 GiB"))
    told = the(effects, TellEviction)
    assert (told.name, told.cause, told.reason) == ("a", "pressure", "steam has taken 9.0 GiB")
    assert the(effects, StopUnit).run == run
    assert of_kind(world.bring_down(world.get("a")), Restore) == []


@pytest.mark.parametrize("state", ["busy", "silent", "pinned", "leased", "gone"])
def test_nothing_yields_that_is_needed(world: World, state: str) -> None:
    instance = world.get("a")
    match state:
        case "busy":
            world.look({"a": Activity(True, 5)})
        case "silent":
            world.look({"a": Activity(None, None)})
        case "pinned":
            world.do(PinRequested("p", "a", True))
        case "leased":
            world.do(LeaseAsked("l", "a", "x"))
        case "gone":
            world.do(UnloadRequested("u", "a"))
            world.bring_down(instance)
    assert of_kind(world.do(YieldWanted((instance.run,), "x")), StopUnit) == []


# --- what engines are doing ------------------------------------------------------------------------------------------


def test_busy_and_idle_are_states_that_are_told(world: World) -> None:
    moves = [
        (each.previous, each.state)
        for activity in (Activity(True, 5), Activity(True, 6), Activity(False, 9))
        for each in of_kind(world.look({"a": activity}), Announce)
    ]
    ready, busy = InstanceState.READY, InstanceState.BUSY
    assert moves == [(ready, busy), (busy, ready)]


def test_use_between_two_looks_counts(world: World) -> None:
    """By what was served, though it was idle at both."""
    world.look({"a": Activity(False, 100)})
    world.now_s += 100
    world.look({"a": Activity(False, 100)})
    assert (world.get("a").last_used_s or 0.0) < world.now_s
    world.look({"a": Activity(False, 101)})
    assert world.get("a").last_used_s == world.now_s


def test_the_end_of_a_request_is_its_last_use(world: World) -> None:
    world.look({"a": Activity(True, None)})
    world.look({"a": Activity(False, None)}, after_s=60)
    assert world.get("a").last_used_s == world.now_s
    world.look({"a": Activity(False, None)}, after_s=60)
    assert world.get("a").last_used_s == world.now_s - 60


def test_news_of_what_does_not_serve_change_nothing(world: World) -> None:
    instance = world.get("a")
    world.do(UnloadRequested("u", "a"))
    assert world.look({"a": Activity(True, 7)}) == []
    assert instance.state is InstanceState.STOPPING


def test_what_an_engine_is_seen_to_hold_is_charged(world: World) -> None:
    """More than it was promised counts from the first look on, before it is ready too."""
    world.load("c", "t", 1)
    run, seen = world.get("c").run, world.observation()
    held = {**seen.main.resident, run: 3 * GIB}
    more = replace(seen, cards=(replace(seen.main, resident=held, in_use=held),))
    world.scheduler.handle(Looked(), more)
    reservation = world.scheduler.ledger.get(run, CARD.uuid)
    assert reservation is not None and reservation.charged_bytes == 3 * GIB
