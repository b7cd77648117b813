"""The scheduler before a sleep: everything goes, nothing is begun, and who asks waits for the return."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lllm3090d.errors import ErrorCode
from lllm3090d.serving.events import (
    Activity,
    Admitted,
    CancelRequested,
    CheckIdle,
    Effect,
    Failed,
    HoldLoads,
    IdleChecked,
    LoadDone,
    LoadsHeld,
    LookAgain,
    Looked,
    Queued,
    ReleaseDone,
    ReleaseRequested,
    Resubmit,
    StartUnit,
    StopUnit,
    UnloadRequested,
    YieldWanted,
)
from lllm3090d.serving.instance import InstanceState
from tests.fakes.scheduler_world import World, error_of, of_kind, the

pytestmark = pytest.mark.unit


def tokens(effects: Sequence[Effect], kind: type[LoadsHeld] | type[Admitted] | type[Queued]) -> list[str]:
    return [each.token for each in of_kind(effects, kind)]


HELD, FREE = HoldLoads("t-hold", held=True), HoldLoads("t-free", held=False)
GO = ReleaseRequested("t-sleep", until_resume=False, for_sleep=True)


def test_a_load_waits_for_the_return_and_is_decided_then() -> None:
    world = World()
    assert tokens(world.do(HELD), LoadsHeld) == ["t-hold"]
    queued = the(world.load("a", "t-a"), Queued)
    assert queued.why == "the machine to wake up"
    assert world.scheduler.next_attention_s() is None  # nothing can help it before
    assert of_kind(world.look(after_s=5), Admitted) == []
    woken = world.do(FREE)
    assert of_kind(woken, LookAgain)
    assert tokens(world.look(), Admitted) == ["t-a"]


def test_its_time_begins_anew_with_the_return() -> None:
    world = World(queue_timeout_s=60.0)
    world.bring_up("busy", gib=15.0)
    world.look({"busy": Activity(True, 1)})
    assert of_kind(world.load("a", "t-a", gib=15.0), Queued)
    world.do(HELD)
    assert of_kind(world.look(after_s=100), Failed) == []
    world.do(FREE)
    assert of_kind(world.look(after_s=59), Failed) == []
    assert error_of(world.look(after_s=2), "t-a").code is ErrorCode.QUEUE_TIMED_OUT


def test_one_that_is_not_to_wait_is_refused_and_one_may_be_cancelled() -> None:
    world = World()
    world.do(HELD)
    assert "wake up" in error_of(world.load("a", "t-a", may_wait=False), "t-a").message
    world.load("b", "t-b")
    assert error_of(world.do(CancelRequested("t-c", "t-b")), "t-b").code is ErrorCode.LOAD_CANCELLED
    assert world.scheduler.pending == ()


def test_what_serves_still_is_not_promised_to_anybody() -> None:
    world = World()
    world.bring_up("a")
    world.do(HELD)
    effects = world.load("a", "t-again")
    assert of_kind(effects, LoadDone) == []
    assert tokens(effects, Queued) == ["t-again"]


def test_everything_goes_whatever_it_does_and_who_waits_goes_on_waiting() -> None:
    world = World()
    world.bring_up("pinned", gib=4.0, pinned=True)
    world.bring_up("served", gib=4.0)
    world.load("loading", "t-loading", gib=4.0)
    world.do(HELD)
    world.load("later", "t-later", gib=4.0)
    effects = world.do(GO)
    assert len(of_kind(effects, StopUnit)) == 3
    error = error_of(effects, "t-loading")
    assert error.code is ErrorCode.LOAD_CANCELLED and "goes to sleep" in error.message
    assert [each.token for each in world.scheduler.pending] == ["t-later"]
    last = [
        effect for name in ("pinned", "served", "loading") for effect in world.bring_down(world.get(name))
    ]
    assert set(the(last, ReleaseDone).names) == {"pinned", "served", "loading"}
    assert world.scheduler.instances == ()
    world.do(FREE)
    assert tokens(world.look(), Admitted) == ["t-later"]


def test_who_waits_for_a_predecessor_to_end_waits_for_the_return_as_well() -> None:
    world = World()
    instance = world.bring_up("a")
    world.do(UnloadRequested("t-unload", "a"))
    world.load("a", "t-successor")
    world.do(HELD)
    effects = world.do(GO)
    assert of_kind(effects, Failed) == []
    again = the(world.bring_down(instance), Resubmit)
    assert the(world.do(again.event), Queued).why == "the machine to wake up"


def test_nothing_is_evicted_any_more() -> None:
    """A model that went for another one now would not be loaded again."""
    world = World()
    world.bring_up("idle", gib=15.0)
    world.rest()
    asked = the(world.load("a", "t-a", gib=15.0), CheckIdle)
    world.do(HELD)
    assert of_kind(world.do(IdleChecked(asked.token, frozenset())), StopUnit) == []
    assert of_kind(world.do(YieldWanted((world.get("idle").run,), "pressure")), StopUnit) == []
    assert of_kind(world.look(), CheckIdle) == []
    assert world.get("idle").state is InstanceState.READY


def test_nothing_is_left_of_it_after_the_return() -> None:
    world = World()
    world.do(HELD)
    world.do(GO)
    world.do(FREE)
    assert the(world.load("a", "t-a"), StartUnit)
    assert of_kind(world.do(Looked()), Queued) == []


def test_a_model_that_is_loaded_again_is_as_idle_as_it_was() -> None:
    """Else the one that was used last, and so loaded first, would be the first to be evicted."""
    world = World()
    world.bring_up("used-last", gib=6.0, idle_s=10.0)
    world.now_s += 5
    world.bring_up("used-before", gib=6.0, idle_s=900.0)
    world.rest()
    asked = the(world.load("new", "t-new", gib=12.0), CheckIdle)
    assert asked.runs == (world.get("used-before").run,)
