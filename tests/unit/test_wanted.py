"""The wanted set: what becomes of it with everything that happens, and what a start makes of it. No clock, no file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from lllm3090d.engines.crash_causes import CrashCause
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.events import (
    Announce,
    CancelRequested,
    Effect,
    FailureRecalled,
    IdleChecked,
    LoadRequested,
    MemoryReleased,
    PostMortemRead,
    ReadPostMortem,
    ReleaseRequested,
    ResetRequested,
    Restore,
    ResumeRequested,
    StopFinished,
    TellEviction,
    UnitAdopted,
    UnitSeen,
    UnloadRequested,
    VictimsOwed,
    YieldWanted,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.restarts import End, RestartPolicy
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
from lllm3090d.serving.wanted_set import _recalled
from tests.fakes.scheduler_world import CARD, World, of_kind, status, the

pytestmark = pytest.mark.unit

S = InstanceState
WISH = PlanRequest(context_tokens=4096, parallel=2)
POLICY = RestartPolicy(base_s=2.0, most_ends=3)


class Keeping(World):
    """A world whose wanted set is followed."""

    def __init__(self, **policy: Any) -> None:
        values: dict[str, Any] = {"restarts": POLICY, "least_residency_s": 0.0, "least_idle_s": 0.0}
        super().__init__(**(values | policy))
        self.wants: dict[str, Want] = {}
        self.coming: set[str] = set()

    def scene(self, names: Iterable[str] | None = None) -> Scene:
        """With all instances, or those of these names."""
        scheduler = self.scheduler
        there = tuple(each for each in scheduler.instances if names is None or each.name in names)
        return Scene(there, scheduler.evicted_for(), self.coming, scheduler.released, scheduler.ends())

    def do(self, event: Any) -> list[Effect]:
        """What comes of an event, and what is wanted then."""
        if isinstance(event, UnloadRequested):
            self.coming.discard(event.name)  # nobody asks for it any more
        effects = super().do(event)
        if isinstance(event, LoadRequested):
            self.coming.discard(event.checkpoint.name)
        self.coming |= {each.name for each in of_kind(effects, Restore)}
        self.wants = followed(self.wants, self.scene())
        return effects

    def lots(self) -> dict[str, Lot]:
        """How it stands with each."""
        return {name: each.lot for name, each in self.wants.items()}

    def killed(self, *alive: str, what: Occasion = Occasion.CONTINUED) -> Beginning:
        """The daemon is killed now, with units of these models alive, and starts again."""
        return beginning(self.wants.values(), Scene(self.scene(alive).instances), what)

    def die(self, name: str, cause: CrashCause = CrashCause.ENGINE_FAULT) -> None:
        """Its engine ends by itself."""
        instance = self.get(name)
        self.do(UnitSeen(status(instance, active_state="failed", result="signal", main_pid=0)))
        self.do(MemoryReleased(instance.run, {}))
        self.do(PostMortemRead(instance.run, LlmError(ErrorCode.ENGINE_FAILED, "it died", cause=cause)))

    def evict(self) -> None:
        """``old`` goes for ``new``: it is asked to stop."""
        self.bring_up("old", gib=14.0, request=WISH, pinned=False)
        self.rest()
        self.load("new", "n", 14.0)
        self.do(IdleChecked("n", frozenset()))
        assert self.get("old").state is S.STOPPING


@pytest.fixture
def world() -> Keeping:
    return Keeping()


def names(wants: Iterable[Want]) -> list[str]:
    return [each.name for each in wants]


# --- what is wanted --------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_wanted_as_it_was_asked_for(world: Keeping) -> None:
    world.load("a", "t", request=WISH, pinned=True, card=CARD.uuid)
    assert world.lots() == {"a": Lot.COMING}  # its unit may not exist yet
    world.finish_load("a")
    want = world.wants["a"]
    assert (want.lot, want.request, want.pinned, want.card) == (Lot.UP, WISH, True, CARD.uuid)
    wish = want.wish()
    assert (wish.request, wish.pinned, wish.may_evict, wish.may_wait) == (WISH, True, False, True)
    assert Want.model_validate_json(want.model_dump_json()) == want
    world.rest()
    assert world.wants["a"] is want  # nothing is written where nothing changes


def test_unloaded_is_not_wanted_before_its_stop_has_ended(world: Keeping) -> None:
    world.bring_up("a")
    world.do(UnloadRequested("u", "a"))
    assert world.get("a").state is S.STOPPING and world.wants == {}


def test_stopped_through_systemd_is_not_wanted(world: Keeping) -> None:
    instance = world.bring_up("a")
    world.do(UnitSeen(status(instance, active_state="deactivating")))
    assert world.wants == {}
    other = world.bring_up("b")
    world.do(UnitSeen(status(other, active_state="inactive", sub_state="dead", main_pid=0)))
    assert world.wants == {}


def test_a_load_that_is_cancelled_or_never_came_up_is_not_wanted(world: Keeping) -> None:
    world.load("a", "t")
    world.do(CancelRequested("c", "t"))
    assert world.wants == {}
    world.load("b", "t2")
    world.die("b")
    assert world.get("b").state is S.FAILED and world.wants == {}


def test_a_failed_one_is_wanted_with_what_it_takes_to_go_on(world: Keeping) -> None:
    world.bring_up("a", request=WISH)
    world.die("a")
    want = world.wants["a"]
    assert (want.lot, want.next_attempt, want.retry_at_s) == (Lot.FAILED, 1, world.now_s + 2.0)
    assert [each.cause for each in want.ends] == [CrashCause.ENGINE_FAULT]
    error = failure_of(want)
    assert error is not None and (error.code, error.message) == (ErrorCode.ENGINE_FAILED, "it died")
    world.look(after_s=2.0)
    assert world.lots() == {"a": Lot.FAILED}  # its start is asked for
    world.load("a", "again", request=WISH, attempt=1)
    want = world.wants["a"]
    assert (want.lot, len(want.ends), want.problem is not None) == (Lot.COMING, 1, True)
    world.finish_load("a")
    assert (world.wants["a"].lot, len(world.wants["a"].ends), world.wants["a"].problem) == (Lot.UP, 1, None)


def test_one_that_has_ended_by_itself_was_not_asked_to_whatever_is_known_of_it_yet(world: Keeping) -> None:
    instance = world.bring_up("a")
    dead = status(instance, active_state="failed", sub_state="failed", main_pid=0, result="signal")
    assert any(isinstance(each, ReadPostMortem) for each in world.do(UnitSeen(dead)))
    assert instance.state is S.RELEASING
    assert world.lots() == {"a": Lot.DIED}  # a daemon that dies now leaves the cause to the next one
    world.do(PostMortemRead(instance.run, LlmError(ErrorCode.ENGINE_FAILED, "it died", cause="killed")))
    assert instance.state is S.RELEASING and world.lots() == {"a": Lot.DIED}
    world.do(MemoryReleased(instance.run, {}))
    assert world.lots() == {"a": Lot.FAILED}


def test_a_latched_one_is_remembered_until_it_is_reset_or_unloaded(world: Keeping) -> None:
    world.bring_up("a")
    world.die("a", CrashCause.BAD_FILE)
    want = world.wants["a"]
    assert want.lot is Lot.LATCHED and want.latch_reason and "reset a" in want.way_out
    world.do(ResetRequested("r", "a"))
    world.load("a", "again", attempt=1)
    world.finish_load("a")
    assert (world.wants["a"].lot, world.wants["a"].ends, world.wants["a"].latch_reason) == (Lot.UP, (), "")
    world.die("a", CrashCause.BAD_FILE)
    world.do(UnloadRequested("u", "a"))
    assert world.wants == {}


def test_what_makes_room_is_wanted_until_the_other_serves(world: Keeping) -> None:
    world.evict()
    run = world.scheduler.pending[0].event.run
    assert (world.wants["old"].lot, world.wants["old"].evicted_for) == (Lot.EVICTED, run)
    world.bring_down(world.get("old"))
    assert world.lots() == {"old": Lot.EVICTED}
    world.look()
    assert world.lots() == {"old": Lot.EVICTED, "new": Lot.COMING} and world.get("new").run == run
    world.finish_load("new")
    assert world.lots() == {"new": Lot.UP}


def test_what_made_room_for_nothing_is_coming(world: Keeping) -> None:
    world.evict()
    world.bring_down(world.get("old"))
    world.look()
    world.die("new")
    assert world.lots() == {"old": Lot.COMING}
    world.coming.clear()  # the last try has come to nothing
    world.look()
    assert world.lots() == {"old": Lot.COMING}
    world.load("old", "t", 14.0, request=WISH)
    world.finish_load("old")
    assert world.lots() == {"old": Lot.UP}


def test_an_unload_takes_the_wish_of_one_that_made_room(world: Keeping) -> None:
    world.evict()
    world.bring_down(world.get("old"))
    world.do(UnloadRequested("u", "old"))
    assert world.wants == {}


def test_what_goes_for_other_programs_is_gone_for_good(world: Keeping) -> None:
    instance = world.bring_up("a")
    world.rest()
    assert the(world.do(YieldWanted((instance.run,), "they need it")), TellEviction).cause == "pressure"
    assert world.wants == {}


def test_a_release_forgets_and_one_until_resume_keeps(world: Keeping) -> None:
    instance = world.bring_up("a")
    world.do(ReleaseRequested("r", until_resume=True))
    assert world.lots() == {"a": Lot.RELEASED}
    world.bring_down(instance)
    assert world.lots() == {"a": Lot.RELEASED}
    world.do(ResumeRequested("s"))
    assert world.lots() == {"a": Lot.RELEASED}  # until it is asked for
    again = world.bring_up("a")
    assert world.lots() == {"a": Lot.UP}
    world.do(ReleaseRequested("r2", until_resume=False))
    assert world.wants == {}
    world.bring_down(again)
    assert world.wants == {}


def test_what_made_room_when_the_card_is_given_away_comes_back_too(world: Keeping) -> None:
    world.evict()
    world.do(ReleaseRequested("r", until_resume=True))
    assert world.lots() == {"old": Lot.RELEASED}
    world.bring_down(world.get("old"))
    assert world.lots() == {"old": Lot.RELEASED}


def test_what_goes_for_a_sleep_is_remembered_by_its_own_set(world: Keeping) -> None:
    world.bring_up("a")
    world.do(ReleaseRequested("r", until_resume=False, for_sleep=True))
    assert world.wants == {}


def test_one_that_is_loaded_while_it_goes_is_wanted_again(world: Keeping) -> None:
    first = world.bring_up("a")
    world.do(UnloadRequested("u", "a"))
    world.load("a", "t")
    assert world.wants == {}
    effects = world.bring_down(first)
    world.do(effects[-1].event if hasattr(effects[-1], "event") else world.request("a", "t3"))
    assert world.lots() == {"a": Lot.COMING}


# --- what a start is -------------------------------------------------------------------------------------------------

HERE = Life("boot-1", "manager-1")


@pytest.mark.parametrize(
    ("before", "has_units", "what"),
    [
        (None, False, Occasion.LOGIN),
        (None, True, Occasion.CONTINUED),
        (Life("boot-1", "manager-1"), False, Occasion.CONTINUED),
        (Life("boot-1", "manager-1", ended=True), False, Occasion.CONTINUED),
        (Life("boot-1", "manager-0"), False, Occasion.MANAGER_DIED),
        (Life("boot-1", "manager-0"), True, Occasion.CONTINUED),
        (Life("boot-1", "manager-0", ended=True), False, Occasion.LOGIN),
        (Life("boot-0", "manager-1"), False, Occasion.LOGIN),
        (Life("boot-0", "manager-1", ended=True), True, Occasion.LOGIN),
    ],
)
def test_what_a_start_is(before: Life | None, has_units: bool, what: Occasion) -> None:
    assert occasion(HERE, before, has_units=has_units) is what


# --- what a start makes of it ----------------------------------------------------------------------------------------


def want(name: str, lot: Lot, **changes: Any) -> Want:
    return Want(name=name, lot=lot, **changes)


@pytest.mark.parametrize(
    ("lot", "what", "loaded"),
    [
        (Lot.UP, Occasion.CONTINUED, False),  # somebody has stopped it while no daemon was there
        (Lot.UP, Occasion.MANAGER_DIED, True),
        (Lot.COMING, Occasion.CONTINUED, True),
        (Lot.COMING, Occasion.MANAGER_DIED, True),
        (Lot.EVICTED, Occasion.CONTINUED, True),
        (Lot.EVICTED, Occasion.MANAGER_DIED, True),
        (Lot.RELEASED, Occasion.CONTINUED, True),  # it was resumed, and the daemon died before it came
        *((each, Occasion.LOGIN, False) for each in Lot),
    ],
)
def test_who_is_loaded_at_a_start_without_units(lot: Lot, what: Occasion, loaded: bool) -> None:
    begun = beginning([want("a", lot, evicted_for="gone")], Scene(), what)
    assert names(begun.load) == (["a"] if loaded else [])
    assert dict(begun.kept) == ({"a": begun.load[0]} if loaded else {})
    assert begun.lost == (("a",) if (lot, what) == (Lot.UP, Occasion.CONTINUED) else ())
    assert all(each.lot is Lot.COMING for each in begun.load)


def test_they_are_loaded_in_the_order_in_which_they_came_to_be_wanted() -> None:
    wants = [want("c", Lot.COMING), want("a", Lot.UP), want("b", Lot.EVICTED, evicted_for="x")]
    begun = beginning(wants, Scene(), Occasion.MANAGER_DIED)
    assert names(begun.load) == ["c", "a", "b"] == list(begun.kept)


def test_while_the_card_is_given_away_nothing_is_loaded_and_all_is_kept() -> None:
    wants = [want("a", Lot.UP), want("b", Lot.RELEASED)]
    begun = beginning(wants, Scene(released=True), Occasion.MANAGER_DIED)
    assert begun.load == () and [each.lot for each in begun.kept.values()] == [Lot.RELEASED] * 2


def test_what_went_to_sleep_is_not_loaded_twice() -> None:
    wants = [want("a", Lot.COMING), want("b", Lot.COMING)]
    begun = beginning(wants, Scene(), Occasion.CONTINUED, asleep={"a"})
    assert list(begun.kept) == ["b"] == names(begun.load)


def test_killed_between_an_eviction_and_its_load(world: Keeping) -> None:
    world.evict()
    # The victim is still stopping: it is loaded when it has ended.
    begun = world.killed("old")
    assert names(begun.load) == ["old"] and begun.load[0].request == WISH
    world.bring_down(world.get("old"))
    assert names(world.killed().load) == ["old"]
    world.look()
    # The other one was never started.
    assert names(world.killed().load) == ["old", "new"]
    # The other one is on its way up: its end decides.
    begun = world.killed("new")
    assert begun.load == () and list(begun.owed) == [world.get("new").run]
    assert list(begun.kept) == ["old", "new"]
    # It had just come up, and nobody had noticed.
    wants = world.wants
    world.finish_load("new")
    begun = beginning(wants.values(), world.scene(), Occasion.CONTINUED)
    assert begun.load == () and list(begun.kept) == ["new"]


def test_victims_that_are_owed_are_loaded_again_where_the_adopted_one_fails(world: Keeping) -> None:
    world.evict()
    world.bring_down(world.get("old"))
    world.look()
    begun, record = world.killed("new"), world.get("new").record
    after = Keeping()
    unit = status(world.get("new"))
    shares = record.shares(CARD.uuid)
    after.do(UnitAdopted(unit, record, healthy=False, shares=shares))
    ((run, victims),) = begun.owed.items()
    after.do(VictimsOwed("not-there", ()))
    after.do(VictimsOwed(run, tuple(each.evicted() for each in victims)))
    assert after.scheduler.evicted_for() == {"old": run}
    after.do(UnitSeen(status(after.get("new"), active_state="failed", result="signal", main_pid=0)))
    after.do(PostMortemRead(run, LlmError(ErrorCode.ENGINE_FAILED, "it died")))
    restored = of_kind(after.do(MemoryReleased(run, {})), Restore)
    assert [(each.name, each.request) for each in restored] == [("old", WISH)]


def test_a_dead_unit_that_had_been_asked_to_end_is_no_failure(world: Keeping) -> None:
    """An engine that ignores SIGTERM fails in systemd's eyes."""
    world.evict()
    wants, victim = world.wants, world.get("old")
    for known, expected in ((wants, True), ({}, False)):
        after = Keeping()
        dead = status(victim, active_state="failed", result="timeout", main_pid=0)
        after.do(UnitAdopted(dead, victim.record, healthy=False, shares=victim.record.shares(CARD.uuid)))
        assert after.get("old").post_mortem_pending
        begun = beginning(known.values(), after.scene(), Occasion.CONTINUED)
        assert dict(begun.ended) == {victim.run: expected}
        assert names(begun.load) == (["old"] if expected else [])
        # Where nothing is known of what was wanted, it counts as one that failed.
        unknown = beginning((), after.scene(), Occasion.CONTINUED, is_known=False)
        assert dict(unknown.ended) == {} and unknown.load == ()


def test_a_dead_unit_that_nobody_here_has_loaded_had_not_been_asked_to_end(world: Keeping) -> None:
    """It never was wanted, so that it is not among those says nothing: its cause is read and told."""
    instance = world.bring_up("a")
    after = Keeping()
    dead = status(instance, active_state="failed", result="signal", main_pid=0)
    shares = instance.record.shares(CARD.uuid)
    after.do(UnitAdopted(dead, instance.record, healthy=False, shares=shares, is_known=False))
    begun = beginning((), after.scene(), Occasion.CONTINUED)
    assert dict(begun.ended) == {} and begun.load == ()
    after.do(
        PostMortemRead(instance.run, LlmError(ErrorCode.ENGINE_FAILED, "it died", cause="engine_fault"))
    )
    effects = after.do(MemoryReleased(instance.run, {}))
    (failed,) = [each for each in of_kind(effects, Announce) if each.state is S.FAILED]
    assert failed.failure is not None and failed.failure.details["cause"] == "engine_fault"
    assert of_kind(effects, Restore) == [] and after.get("a").retry_at_s is None


def test_a_dead_unit_that_was_up_is_the_policys(world: Keeping) -> None:
    instance = world.bring_up("a")
    after = Keeping()
    dead = status(instance, active_state="failed", result="signal", main_pid=0)
    after.do(UnitAdopted(dead, instance.record, healthy=False, shares=instance.record.shares(CARD.uuid)))
    begun = beginning(world.wants.values(), after.scene(), Occasion.CONTINUED)
    assert (begun.load, dict(begun.ended), list(begun.kept)) == ((), {}, ["a"])


def test_what_is_stopping_without_us_is_let_go(world: Keeping) -> None:
    world.bring_up("a")
    wants = world.wants
    world.do(UnitSeen(status(world.get("a"), active_state="deactivating")))
    begun = beginning(wants.values(), world.scene(), Occasion.CONTINUED)
    assert (begun.load, begun.lost) == ((), ("a",))


# --- failures beyond the daemon's life --------------------------------------------------------------------------------


def restarted(world: Keeping, *alive: str) -> Keeping:
    """The next daemon, which knows what was kept and has no units."""
    after = Keeping()
    after.now_s, after.runs = world.now_s, world.runs
    kept = [Want.model_validate_json(each.model_dump_json()) for each in world.wants.values()]
    begun = beginning(kept, after.scene(), Occasion.CONTINUED)
    after.wants = dict(begun.kept)
    for each in begun.failed:
        after.do(_recalled(each))
    return after


def test_a_latch_outlives_the_daemon(world: Keeping) -> None:
    world.bring_up("a", request=WISH)
    world.die("a", CrashCause.BAD_FILE)
    before = world.get("a")
    after = restarted(restarted(world))
    now = after.get("a")
    assert (now.state, now.latch_reason, now.way_out) == (S.LATCHED, before.latch_reason, before.way_out)
    assert now.failure is not None and now.failure.details["cause"] == CrashCause.BAD_FILE
    assert after.scheduler.next_attention_s() is None
    wish = the(after.do(ResetRequested("r", "a")), Restore)
    assert wish.request == WISH
    after.do(UnloadRequested("u", "a"))
    assert after.wants == {} and after.scheduler.instances == ()


def test_the_count_of_attempts_outlives_the_daemon(world: Keeping) -> None:
    world.bring_up("a", request=WISH)
    world.die("a")
    after = restarted(world)
    assert after.get("a").state is S.FAILED
    assert after.scheduler.next_attention_s() == world.now_s + 2.0
    for attempt in (1, 2):
        wish = the(after.look(after_s=100.0), Restore)
        assert wish.attempt == attempt
        # Killed once more, between the start that was asked for and its unit.
        after = restarted(after)
        after.coming.clear()
        wish = the(after.look(after_s=1.0), Restore)
        assert (wish.attempt, wish.request) == (attempt, WISH)
        after.load("a", f"t{attempt}", request=WISH, attempt=attempt)
        after = restarted(after)
        wish = the(after.look(after_s=1.0), Restore)
        assert wish.attempt >= 1
        after.load("a", f"s{attempt}", request=WISH, attempt=attempt)
        after.coming.clear()
        after.finish_load("a")
        after.die("a")
    assert after.get("a").state is S.LATCHED and "ended 3 times" in after.get("a").latch_reason


def test_an_end_is_counted_once_though_two_daemons_have_seen_it(world: Keeping) -> None:
    world.bring_up("a")
    world.die("a")
    instance = world.get("a")
    after = Keeping()
    dead = status(instance, active_state="failed", result="signal", main_pid=0)
    after.do(UnitAdopted(dead, instance.record, healthy=False, shares=instance.record.shares(CARD.uuid)))
    begun = beginning(world.wants.values(), after.scene(), Occasion.CONTINUED)
    for each in begun.failed:
        recalled = _recalled(each)
        after.do(recalled)
        assert isinstance(recalled, FailureRecalled)
    after.do(MemoryReleased(instance.run, {}))
    after.do(PostMortemRead(instance.run, LlmError(ErrorCode.ENGINE_FAILED, "it died")))
    assert len(after.scheduler.ends()["a"]) == 1 and after.get("a").next_attempt == 1


def test_a_problem_that_is_not_understood_is_none() -> None:
    for told in (None, {}, {"code": "of something newer"}, {"code": 7}):
        assert failure_of(want("a", Lot.LATCHED, problem=told)) is None
    error = failure_of(want("a", Lot.LATCHED, problem={"code": "internal", "hint": 7, "details": []}))
    assert error is not None and (error.message, error.hint, dict(error.details)) == ("", None, {})


def test_a_stop_that_a_stuck_one_survives_changes_nothing(world: Keeping) -> None:
    instance = world.bring_up("a")
    world.do(UnloadRequested("u", "a"))
    world.do(StopFinished(instance.run, LlmError(ErrorCode.STOP_FAILED, "it did not die")))
    assert world.get("a").state is S.STUCK and world.wants == {}


def test_ends_are_kept_as_they_are() -> None:
    ends = (End(12.5, CrashCause.DEVICE_LOST, 3.0, "0a"), End(20.0, CrashCause.UNKNOWN))
    kept = want("a", Lot.LATCHED, ends=ends)
    assert Want.model_validate_json(kept.model_dump_json()).ends == ends
