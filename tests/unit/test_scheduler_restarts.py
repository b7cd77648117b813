"""The scheduler with models that end by themselves: started again, kept back, latched, reset, taken by a person."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.crash_causes import CrashCause
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.events import (
    Announce,
    ComebackRefused,
    Effect,
    Failed,
    ForgetUnit,
    HoldLoads,
    KeepPin,
    LoadDone,
    LoadRequested,
    MemoryReleased,
    PostMortemRead,
    ReleaseRequested,
    ResetDone,
    ResetRequested,
    Restore,
    ResumeRequested,
    StartFinished,
    StartUnit,
    StopFinished,
    UnitAdopted,
    UnitSeen,
    UnloadDone,
    UnloadRequested,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.restarts import RestartPolicy
from lllm3090d.serving.running import Instance
from tests.fakes.scheduler_world import (
    CARD,
    CUDA,
    HOST,
    SECOND,
    TWO_CARDS,
    World,
    error_of,
    of_kind,
    status,
    the,
)
from tests.unit.test_command_line import build_named

pytestmark = pytest.mark.unit

S = InstanceState
POLICY = RestartPolicy(base_s=2.0, factor=4.0, cap_s=300.0, most_ends=3)
WISH = PlanRequest(context_tokens=4096, parallel=2)
WORDS = ("--threads", "4")


class Restarting(World):
    """A world in which what ended is started again."""

    def __init__(self, **policy: Any) -> None:
        super().__init__(**({"restarts": POLICY} | policy))

    def die(self, name: str = "a", cause: CrashCause = CrashCause.ENGINE_FAULT) -> list[Effect]:
        """Its engine ends by itself, its memory comes back, and the reason is known."""
        instance = self.get(name)
        error = LlmError(ErrorCode.ENGINE_FAILED, "it died", cause=cause)
        ended = status(instance, active_state="failed", result="signal", main_pid=0)
        effects = self.do(UnitSeen(ended))
        effects += self.do(MemoryReleased(instance.run, {}))
        return effects + self.do(PostMortemRead(instance.run, error))

    def restored(self, effects: list[Effect], token: str = "t-again", **changes: Any) -> LoadRequested:
        """The load that the daemon makes of a Restore."""
        wish = the(effects, Restore)
        values: dict[str, Any] = {
            "arguments": wish.arguments,
            "card": wish.card,
            "pinned": wish.pinned,
            "may_evict": False,
            "attempt": wish.attempt,
        }
        return self.request(wish.name, token, 8.0, wish.request, **(values | changes))

    def come_back(self, after_s: float = 2.0) -> Instance:
        """The start that is due, to its end."""
        before = self.get("a").run
        self.do(self.restored(self.look(after_s=after_s)))
        instance = self.finish_load("a")
        assert instance.run != before
        return instance


@pytest.fixture
def world() -> Restarting:
    return Restarting()


def test_it_is_loaded_again_as_it_was_after_a_pause(world: Restarting) -> None:
    world.capabilities = replace(build_named("b11434", Backend.VULKAN), devices=("Vulkan0",))
    instance = world.bring_up("a", request=WISH, pinned=True, arguments=WORDS, card=CARD.uuid)
    ended = world.die()
    assert of_kind(ended, Restore) == [] and instance.state is S.FAILED
    assert world.scheduler.next_attention_s() == world.now_s + 2.0
    assert of_kind(world.look(after_s=1.9), Restore) == []
    wish = the(world.look(after_s=0.1), Restore)
    assert (wish.request, wish.arguments, wish.pinned, wish.card) == (WISH, WORDS, True, CARD.uuid)
    assert wish.attempt == 1
    assert of_kind(world.look(after_s=100.0), Restore) == []  # it is told once
    assert world.scheduler.next_attention_s() is None


def test_on_two_cards_it_stays_on_the_one_that_was_asked_for() -> None:
    world = Restarting()
    world.cards, world.capabilities = TWO_CARDS, CUDA
    world.load("a", "t", card=SECOND.uuid)
    first = world.finish_load("a")
    world.die()
    looked = world.look(after_s=2.0)
    assert the(looked, Restore).card == SECOND.uuid
    world.do(world.restored(looked))
    again = world.get("a")
    assert again.run != first.run
    assert [each.where for each in world.scheduler.ledger.of(again.run) if each.where != HOST] == [
        SECOND.uuid
    ]


def test_the_pauses_grow_until_it_stays_down(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    second = world.come_back(2.0)
    assert (second.attempt, second.next_attempt) == (1, 0)
    world.die()
    assert of_kind(world.look(after_s=7.9), Restore) == []
    third = world.come_back(0.1)
    assert third.attempt == 2
    effects = world.die()
    down = world.get("a")
    assert down.state is S.LATCHED and "ended 3 times" in down.latch_reason and "reset a" in down.way_out
    assert the(effects, ForgetUnit).unit == down.unit
    assert world.scheduler.next_attention_s() is None
    assert of_kind(world.look(after_s=1e6), Restore) == []


def test_a_start_that_does_not_come_up_counts_as_an_end(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    world.do(world.restored(world.look(after_s=2.0)))
    run = world.get("a").run
    world.do(StartFinished(run, LlmError(ErrorCode.UNIT_REFUSED, "no")))
    world.do(MemoryReleased(run, {}))
    now = world.get("a")
    assert (now.state, now.next_attempt, now.retry_at_s) == (S.FAILED, 2, world.now_s + 8.0)


def test_a_load_that_never_served_is_not_repeated(world: Restarting) -> None:
    world.load("a", "t")
    effects = world.die()
    assert error_of(effects, "t").code is ErrorCode.ENGINE_FAILED
    assert world.get("a").retry_at_s is None
    assert the(effects, ForgetUnit)
    assert of_kind(world.look(after_s=1e4), Restore) == []


def test_without_the_policy_nothing_comes_back() -> None:
    world = Restarting(restarts=None)
    world.bring_up("a", pinned=True)
    effects = world.die()
    assert the(effects, ForgetUnit) and the(effects, KeepPin).pinned is False
    assert of_kind(world.look(after_s=1e4), Restore) == []


# --- the unit that is kept -------------------------------------------------------------------------------------------


def test_the_failed_unit_and_its_pin_stay_until_the_successor_is_admitted(world: Restarting) -> None:
    first = world.bring_up("a", pinned=True)
    ended = world.die()
    assert of_kind(ended, ForgetUnit) == [] and of_kind(ended, KeepPin) == []
    looked = world.look(after_s=2.0)
    assert of_kind(looked, ForgetUnit) == []
    admitted = world.do(world.restored(looked))
    assert the(admitted, ForgetUnit).unit == first.unit
    second = world.get("a")
    assert of_kind(admitted, KeepPin) == [KeepPin(first.run, False), KeepPin(second.run, True)]


def test_a_unit_that_was_found_failed_is_started_again(world: Restarting) -> None:
    dead = World().bring_up("a")
    shares = dead.record.shares(CARD.uuid)
    found = status(dead, active_state="failed", result="signal", main_pid=0)
    world.do(UnitAdopted(found, dead.record, False, shares, {}, True))
    world.do(MemoryReleased(dead.run, {}))
    error = LlmError(ErrorCode.ENGINE_FAILED, "it died", cause=CrashCause.KILLED)
    assert of_kind(world.do(PostMortemRead(dead.run, error)), ForgetUnit) == []
    wish = the(world.look(after_s=2.0), Restore)
    assert (wish.name, wish.request, wish.pinned, wish.attempt) == ("a", dead.record.asked, True, 1)


def test_what_nobody_loaded_here_is_not_started_again_unless_somebody_asks_for_it(world: Restarting) -> None:
    """A unit of somebody who has systemd restart it: the daemon must not start one of its own beside it."""
    error = LlmError(ErrorCode.ENGINE_FAILED, "it died", cause=CrashCause.KILLED)
    for asked in (False, True):
        here = Restarting()
        there = World().bring_up("a")
        shares = there.record.shares(CARD.uuid)
        here.do(UnitAdopted(status(there), there.record, True, shares, is_known=False))
        if asked:
            assert the(here.load("a", "t"), LoadDone).run == there.run
        here.do(UnitSeen(status(there, active_state="failed", result="signal", main_pid=0)))
        here.do(MemoryReleased(there.run, {}))
        here.do(PostMortemRead(there.run, error))
        assert len(of_kind(here.look(after_s=1e4), Restore)) == int(asked)
    # One that takes the place of what was to be started again is wanted like that.
    first = world.bring_up("a")
    world.die()
    assert world.get("a").next_attempt
    twin = first.record.model_copy(update={"run": "0000beef"})
    unit = replace(status(first), name="lllm3090-twin.service")
    world.do(UnitAdopted(unit, twin, True, twin.shares(CARD.uuid), is_known=False))
    assert world.get("a").is_known and world.get("a").unit == unit.name


# --- people ----------------------------------------------------------------------------------------------------------


def test_an_unload_cancels_the_start(world: Restarting) -> None:
    first = world.bring_up("a", pinned=True)
    world.die()
    effects = world.do(UnloadRequested("u", "a"))
    assert the(effects, UnloadDone).name == "a"
    assert the(effects, ForgetUnit).unit == first.unit and the(effects, KeepPin).pinned is False
    assert world.scheduler.instances == ()
    assert of_kind(world.look(after_s=1e4), Restore) == []


def test_an_unload_while_the_start_is_looked_up_is_the_last_word(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    coming = world.restored(world.look(after_s=2.0))
    world.do(UnloadRequested("u", "a"))
    effects = world.do(coming)
    assert error_of(effects, "t-again").code is ErrorCode.LOAD_CANCELLED
    assert of_kind(effects, StartUnit) == [] and world.scheduler.instances == ()
    assert world.do(ComebackRefused("a", error_of(effects, "t-again"))) == []


def test_a_persons_load_takes_its_place_and_forgets_what_was(world: Restarting) -> None:
    first = world.bring_up("a")
    world.die()
    world.come_back(2.0)
    world.die()
    looked = world.look(after_s=8.0)
    coming = world.restored(looked)
    effects = world.load("a", "t-person", request=WISH)
    assert the(effects, ForgetUnit).unit != first.unit
    mine = world.finish_load("a")
    assert mine.attempt == 0
    world.do(coming)  # too late: another one serves
    assert world.get("a") is mine
    world.die()
    assert mine.next_attempt == 1


def test_a_load_of_an_evicted_model_is_no_start_in_a_row(world: Restarting) -> None:
    """It may come back though nothing is left of it."""
    assert of_kind(world.load("a", "t"), StartUnit)
    assert world.get("a").attempt == 0


# --- refused ---------------------------------------------------------------------------------------------------------


def test_a_start_for_which_there_is_no_room_is_tried_again_later(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    world.look(after_s=2.0)
    world.do(ComebackRefused("a", LlmError(ErrorCode.QUEUE_TIMED_OUT, "no room")))
    assert world.get("a").state is S.FAILED
    assert of_kind(world.look(after_s=299.0), Restore) == []
    assert the(world.look(after_s=1.0), Restore).attempt == 1


@pytest.mark.parametrize("code", [ErrorCode.CARD_UNREADABLE, ErrorCode.CARD_AT_RISK])
def test_a_lost_card_is_not_waited_for_as_long_as_a_full_one(world: Restarting, code: ErrorCode) -> None:
    world.bring_up("a")
    world.die()
    world.look(after_s=2.0)
    world.do(ComebackRefused("a", LlmError(code, "lost")))
    assert of_kind(world.look(after_s=9.0), Restore) == []
    assert the(world.look(after_s=1.0), Restore).attempt == 1


def test_a_start_that_can_never_be_is_latched(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    world.look(after_s=2.0)
    error = LlmError(ErrorCode.UNKNOWN_MODEL, "it was deleted", hint="Download it.")
    effects = world.do(ComebackRefused("a", error))
    down = world.get("a")
    assert (down.state, down.way_out) == (
        S.LATCHED,
        "Download it.",
    ) and "it was deleted" in down.latch_reason
    assert the(effects, ForgetUnit).unit == down.unit


@pytest.mark.parametrize("name", ["a", "never heard of"])
def test_a_refusal_of_what_runs_or_is_gone_changes_nothing(world: Restarting, name: str) -> None:
    instance = world.bring_up("a")
    assert world.do(ComebackRefused(name, LlmError(ErrorCode.LOADED_DIFFERENTLY, "no"))) == []
    assert instance.state is S.READY


# --- given away, asleep ----------------------------------------------------------------------------------------------


def test_a_card_that_is_given_away_keeps_starts_back(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    world.do(ReleaseRequested("r", until_resume=True))
    assert world.scheduler.next_attention_s() is None
    assert of_kind(world.look(after_s=100.0), Restore) == []
    world.do(ResumeRequested("r"))
    assert world.scheduler.next_attention_s() is not None
    assert the(world.look(), Restore).attempt == 1


def test_a_start_under_way_when_the_card_is_given_away_is_made_after(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    coming = world.restored(world.look(after_s=2.0))
    world.do(ReleaseRequested("r", until_resume=True))
    error = error_of(world.do(coming), "t-again")
    assert error.code is ErrorCode.CARD_RELEASED
    world.do(ComebackRefused("a", error))
    assert world.get("a").state is S.FAILED
    assert of_kind(world.look(after_s=1e3), Restore) == []
    world.do(ResumeRequested("r"))
    assert the(world.look(), Restore).name == "a"


def test_a_machine_that_sleeps_keeps_starts_back(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    world.do(HoldLoads("h", held=True))
    world.do(ReleaseRequested("r", until_resume=False, for_sleep=True))
    assert world.scheduler.next_attention_s() is None
    assert of_kind(world.look(after_s=1e3), Restore) == []
    world.do(HoldLoads("h", held=False))
    assert the(world.look(), Restore).name == "a"


# --- reset -----------------------------------------------------------------------------------------------------------


def test_reset_starts_what_stays_down_and_forgets_what_was(world: Restarting) -> None:
    world.bring_up("a", request=WISH)
    world.die(cause=CrashCause.UNKNOWN_FLAG)
    assert world.get("a").state is S.LATCHED
    effects = world.do(ResetRequested("x", "a"))
    assert the(effects, ResetDone) == ResetDone("x", "a", world.get("a").run, starts=True)
    wish = the(effects, Restore)
    assert (wish.request, wish.attempt) == (WISH, 1)
    world.do(world.restored(effects))
    again = world.finish_load("a")
    assert (again.latch_reason, again.way_out) == ("", "")
    world.die()
    assert again.next_attempt == 1  # what was before does not count


def test_reset_makes_the_start_that_was_due_at_once(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    assert the(world.do(ResetRequested("x", "a")), Restore)
    assert of_kind(world.look(after_s=1e3), Restore) == []


def test_reset_of_one_that_never_served(world: Restarting) -> None:
    world.load("a", "t")
    world.die()
    assert the(world.do(ResetRequested("x", "a")), Restore).attempt == 1


def test_reset_of_what_runs_forgets_only(world: Restarting) -> None:
    world.bring_up("a")
    world.die()
    instance = world.come_back(2.0)
    effects = world.do(ResetRequested("x", "a"))
    assert effects == [ResetDone("x", "a", instance.run, starts=False)]
    world.die()
    assert instance.next_attempt == 1


def test_reset_in_vain_says_why(world: Restarting) -> None:
    world.bring_up("a")
    world.die(cause=CrashCause.BAD_FILE)
    world.do(ResetRequested("x", "a"))
    error = LlmError(ErrorCode.INSUFFICIENT_VRAM, "too large now")
    assert world.do(ComebackRefused("a", error)) == []
    assert (world.get("a").state, world.get("a").failure) == (S.LATCHED, error)


def test_reset_of_what_is_not_there_or_while_the_card_is_given_away(world: Restarting) -> None:
    assert error_of(world.do(ResetRequested("x", "a")), "x").code is ErrorCode.NOT_LOADED
    world.bring_up("a")
    world.die()
    world.do(ReleaseRequested("r", until_resume=True))
    effects = world.do(ResetRequested("y", "a"))
    assert error_of(effects, "y").code is ErrorCode.CARD_RELEASED
    assert [type(each) for each in effects] == [Failed]
    assert world.get("a").retry_at_s is not None  # the start that was due is still


def test_an_unload_of_what_has_just_ended_leaves_its_reason_told(world: Restarting) -> None:
    """It is gone from the list when its end is written down, so the news must carry the reason."""
    instance = world.bring_up("a")
    error = LlmError(ErrorCode.ENGINE_FAILED, "it died", cause=CrashCause.ENGINE_FAULT)
    world.do(UnitSeen(status(instance, active_state="failed", result="signal", main_pid=0)))
    world.do(UnloadRequested("u", "a"))
    world.do(PostMortemRead(instance.run, error))
    effects = world.do(MemoryReleased(instance.run, {}))
    told = the(effects, Announce)
    assert (told.state, told.failure) == (S.FAILED, error)
    the(effects, UnloadDone)
    assert world.scheduler.instance("a") is None


def test_an_unload_under_way_is_no_failure(world: Restarting) -> None:
    """The engine is killed while it is being stopped."""
    instance = world.bring_up("a")
    world.do(UnloadRequested("u", "a"))
    world.do(UnitSeen(status(instance, active_state="failed", result="signal", main_pid=0)))
    world.do(StopFinished(instance.run, None))
    assert the(world.do(MemoryReleased(instance.run, {})), UnloadDone)
    assert of_kind(world.look(after_s=1e3), Restore) == []


def test_a_release_cancels_what_is_due() -> None:
    """Whoever frees the card does not want a model back a second later."""
    world = Restarting()
    world.bring_up("a", request=WISH)
    world.die()
    assert world.get("a").retry_at_s is not None
    effects = world.do(ReleaseRequested("r", until_resume=False))
    assert len(of_kind(effects, ForgetUnit)) == 1
    world.now_s += 400
    assert of_kind(world.look(), Restore) == []
    assert world.get("a").state is S.FAILED
