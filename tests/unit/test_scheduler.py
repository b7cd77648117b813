"""The scheduler: lists of effects for lists of events, and what must never happen in any history."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lllm3090d.engines.capabilities import Backend, Capabilities
from lllm3090d.engines.tier_flags import TIER_VARIABLES
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.planner import CacheType, PlanRequest
from lllm3090d.planning.quote import MIB, Place
from lllm3090d.planning.tier import Tier, TierSizes
from lllm3090d.serving.events import (
    Admitted,
    CancelDone,
    CancelRequested,
    CheckIdle,
    CheckTier,
    EngineReady,
    Event,
    Failed,
    ForgetUnit,
    IdleChecked,
    Joined,
    LoadDone,
    LoadRequested,
    LoadStalled,
    Looked,
    MemoryReleased,
    PostMortemRead,
    Queued,
    ReadPostMortem,
    Resubmit,
    StartFinished,
    StartUnit,
    StopFinished,
    StopUnit,
    TellTier,
    TierChecked,
    UnitAdopted,
    UnitSeen,
    UnitVanished,
    UnloadDone,
    UnloadRequested,
    Verify,
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.instance import ENDED, ON_THE_WAY_UP, SERVING, InstanceState
from tests.fakes.scheduler_world import CARD, GIB, World, error_of, kinds, status
from tests.fakes.simulated_machine import FLAGS

pytestmark = pytest.mark.unit


def test_a_load_is_admitted_before_its_unit_is_started() -> None:
    world = World()
    effects = world.load("a", "t1")
    assert kinds(effects) == [Admitted, StartUnit]
    (start,) = [e for e in effects if isinstance(e, StartUnit)]
    assert start.spec.name.startswith("lllm3090-a-")
    assert start.spec.properties["UnsetEnvironment"] == tuple(
        sorted({"LLAMA_ARG_CTX_SIZE", *TIER_VARIABLES})
    )
    assert world.charged_bytes == world.get("a").plan.quote.total_bytes(Place.CARD)


def test_the_way_up_ends_with_an_answer() -> None:
    world = World()
    world.load("a", "t1")
    run = world.get("a").run
    assert kinds(world.do(StartFinished(run, None))) == [WatchLoading]
    assert kinds(world.do(UnitSeen(status(world.get("a"))))) == []
    effects = world.do(EngineReady(run, {CARD.uuid: 5 * GIB}))
    assert kinds(effects) == [Verify, LoadDone]
    assert world.get("a").state is InstanceState.READY
    assert world.do(EngineReady(run, {CARD.uuid: 5 * GIB})) == []


def test_two_loads_of_one_model_share_one_engine() -> None:
    world = World()
    world.load("a", "t1")
    assert kinds(world.load("a", "t2")) == [Joined]
    run = world.get("a").run
    world.do(StartFinished(run, None))
    effects = world.do(EngineReady(run, {}))
    assert [e.token for e in effects if isinstance(e, LoadDone)] == ["t1", "t2"]
    assert kinds(world.load("a", "t3")) == [LoadDone]


@pytest.mark.parametrize(
    "request_",
    [PlanRequest(context_tokens=16384), PlanRequest(parallel=3), PlanRequest(cache_type_k=CacheType.F16)],
)
def test_a_running_model_is_not_changed_silently(request_: PlanRequest) -> None:
    world = World()
    world.bring_up("a")
    error = error_of(world.load("a", "t2", request=request_), "t2")
    assert error.code is ErrorCode.LOADED_DIFFERENTLY
    assert "unload" in (error.hint or "")


def test_a_request_that_the_engine_pads_to_what_runs_is_served() -> None:
    world = World()
    world.bring_up("a")
    assert kinds(world.load("a", "t2", request=PlanRequest(context_tokens=8000))) == [LoadDone]


def test_what_does_not_fit_is_refused_and_holds_nothing() -> None:
    world = World()
    effects = world.load("big", "t1", gib=48)
    assert kinds(effects) == [Failed]
    error = error_of(effects, "t1")
    assert error.code is ErrorCode.INSUFFICIENT_VRAM
    assert error.details["missing_bytes"] > 0
    assert world.scheduler.instances == ()
    assert world.charged_bytes == 0


def test_a_stranger_on_the_card_counts() -> None:
    world = World()
    world.foreign_bytes = 20 * GIB
    assert error_of(world.load("a", "t1"), "t1").code is ErrorCode.INSUFFICIENT_VRAM


def test_an_engine_without_a_needed_flag_is_refused_and_holds_nothing() -> None:
    world = World()
    event = world.request("a", "t1")
    old = Capabilities("1", FLAGS - {"--parallel"}, Backend.VULKAN, ("Vulkan0",))
    effects = world.do(
        LoadRequested("t1", event.run, event.checkpoint, event.facts, event.request, event.build, old)
    )
    assert error_of(effects, "t1").code is ErrorCode.ENGINE_UNUSABLE
    assert world.charged_bytes == 0


def test_unload_gives_memory_back_only_when_the_card_shows_it() -> None:
    world = World()
    instance = world.bring_up("a")
    assert kinds(world.do(UnloadRequested("u1", "a"))) == [StopUnit]
    held = world.charged_bytes
    assert kinds(world.do(StopFinished(instance.run, None))) == [WaitForMemory]
    assert world.charged_bytes == held > 0
    assert kinds(world.do(UnitVanished(instance.unit, None))) == []
    effects = world.do(MemoryReleased(instance.run, {}))
    assert kinds(effects) == [ForgetUnit, UnloadDone]
    assert world.charged_bytes == 0
    assert world.scheduler.instances == ()


def test_memory_that_does_not_come_back_is_quarantined_until_it_does() -> None:
    world = World()
    instance = world.bring_up("a")
    world.do(UnloadRequested("u1", "a"))
    world.do(StopFinished(instance.run, None))
    assert UnloadDone in kinds(world.do(MemoryReleased(instance.run, {CARD.uuid: 3 * GIB})))
    assert world.scheduler.ledger.quarantined_bytes(CARD.uuid) == 3 * GIB
    assert world.do(MemoryReleased(instance.run, {})) == []
    assert world.scheduler.ledger.quarantined_bytes(CARD.uuid) == 0


def test_unload_while_loading_tells_those_who_wait() -> None:
    world = World()
    world.load("a", "t1")
    effects = world.do(UnloadRequested("u1", "a"))
    assert error_of(effects, "t1").code is ErrorCode.LOAD_CANCELLED
    assert StopUnit in kinds(effects)


def test_load_while_unloading_waits_and_is_decided_again() -> None:
    world = World()
    instance = world.bring_up("a")
    world.do(UnloadRequested("u1", "a"))
    assert kinds(world.load("a", "t2")) == [Queued]
    world.do(StopFinished(instance.run, None))
    (again,) = [e for e in world.do(MemoryReleased(instance.run, {})) if isinstance(e, Resubmit)]
    assert kinds(world.do(again.event)) == [Admitted, StartUnit]


def test_a_stop_that_fails_is_visible_and_holds_the_memory() -> None:
    world = World()
    instance = world.bring_up("a")
    world.do(UnloadRequested("u1", "a"))
    effects = world.do(StopFinished(instance.run, LlmError(ErrorCode.STOP_FAILED, "it did not die")))
    assert error_of(effects, "u1").code is ErrorCode.STOP_FAILED
    assert instance.state is InstanceState.STUCK
    assert world.charged_bytes > 0
    assert kinds(world.do(UnitVanished(instance.unit, None))) == [WaitForMemory]


def test_what_is_stuck_is_stopped_again_when_asked_and_keeps_nobody_waiting() -> None:
    world = World()
    instance = world.bring_up("a")
    world.do(UnloadRequested("u1", "a"))
    assert kinds(world.load("a", "t1")) == [Queued]
    failure = LlmError(ErrorCode.STOP_FAILED, "it did not die")
    effects = world.do(StopFinished(instance.run, failure))
    assert {e.token for e in effects if isinstance(e, Failed)} == {"u1", "t1"}
    assert error_of(world.load("a", "t2"), "t2").code is ErrorCode.STOP_FAILED
    assert kinds(world.do(UnloadRequested("u2", "a"))) == [StopUnit]
    assert error_of(world.do(StopFinished(instance.run, failure)), "u2") is failure
    assert kinds(world.do(UnloadRequested("u3", "a"))) == [StopUnit]
    world.do(StopFinished(instance.run, None))
    assert UnloadDone in kinds(world.do(MemoryReleased(instance.run, {})))


def test_a_unit_that_somebody_restarts_is_stopped_again() -> None:
    """`systemctl restart`: the same unit in another invocation, which nobody else would ever stop."""
    world = World()
    instance = world.bring_up("a")
    world.do(UnitSeen(status(instance, active_state="deactivating")))
    assert kinds(world.load("a", "t1")) == [Queued]
    world.do(UnitSeen(status(instance, active_state="inactive", job_pending=True)))
    assert instance.state is InstanceState.STOPPING
    # What was true before the stop and is heard late says nothing new.
    assert world.do(UnitSeen(status(instance))) == []
    assert kinds(world.do(UnitSeen(status(instance, invocation_id="cd" * 16)))) == [StopUnit]
    world.do(StopFinished(instance.run, None))
    assert Resubmit in kinds(world.do(MemoryReleased(instance.run, {})))


def test_cancelling_one_of_two_waiters_leaves_the_load_to_the_other() -> None:
    world = World()
    world.load("a", "t1")
    world.load("a", "t2")
    effects = world.do(CancelRequested("c1", "t1"))
    assert error_of(effects, "t1").code is ErrorCode.LOAD_CANCELLED
    assert [e.stopped for e in effects if isinstance(e, CancelDone)] == [False]
    effects = world.do(CancelRequested("c2", "t2"))
    assert [e.stopped for e in effects if isinstance(e, CancelDone)] == [True]
    assert StopUnit in kinds(effects)
    assert error_of(world.do(CancelRequested("c3", "t2")), "c3").code is ErrorCode.NO_SUCH_LOAD


def test_an_engine_that_dies_while_loading_is_explained() -> None:
    world = World()
    world.load("a", "t1")
    instance = world.get("a")
    world.do(StartFinished(instance.run, None))
    dead = status(instance, active_state="failed", result="exit-code", main_pid=0)
    assert kinds(world.do(UnitSeen(dead))) == [WaitForMemory, ReadPostMortem]
    world.do(MemoryReleased(instance.run, {}))
    effects = world.do(PostMortemRead(instance.run, LlmError(ErrorCode.ENGINE_FAILED, "why")))
    assert error_of(effects, "t1").message == "why"
    assert ForgetUnit in kinds(effects)
    assert world.get("a").state is InstanceState.FAILED
    assert world.charged_bytes == 0
    # A failure does not stand in the way of the next try, and can be forgotten.
    assert kinds(world.load("a", "t2")) == [Admitted, StartUnit]


def test_a_failed_start_job_reaches_the_person() -> None:
    world = World()
    world.load("a", "t1")
    run = world.get("a").run
    world.do(StartFinished(run, LlmError(ErrorCode.UNIT_REFUSED, "no")))
    effects = world.do(MemoryReleased(run, {}))
    assert error_of(effects, "t1").code is ErrorCode.UNIT_REFUSED
    assert kinds(world.do(UnloadRequested("u1", "a"))) == [UnloadDone]


def test_a_stalled_load_is_stopped_and_says_why() -> None:
    world = World()
    world.load("a", "t1")
    run = world.get("a").run
    world.do(StartFinished(run, None))
    effects = world.do(LoadStalled(run, LlmError(ErrorCode.LOAD_TIMED_OUT, "slow")))
    assert error_of(effects, "t1").code is ErrorCode.LOAD_TIMED_OUT
    world.do(StopFinished(run, None))
    world.do(MemoryReleased(run, {}))
    assert world.get("a").state is InstanceState.FAILED


def test_systemctl_stop_by_a_person_is_no_failure() -> None:
    world = World()
    instance = world.bring_up("a")
    world.do(UnitSeen(status(instance, active_state="deactivating")))
    assert instance.state is InstanceState.STOPPING
    world.do(UnitVanished(instance.unit, None))
    world.do(MemoryReleased(instance.run, {}))
    assert world.scheduler.instances == ()


@pytest.mark.parametrize(
    ("active", "healthy", "expected", "follow_up"),
    [
        ("active", True, InstanceState.READY, []),
        ("active", False, InstanceState.LOADING, [WatchLoading]),
        ("activating", False, InstanceState.STARTING, []),
        ("reloading", True, InstanceState.READY, []),
        ("refreshing", False, InstanceState.LOADING, [WatchLoading]),
        ("deactivating", False, InstanceState.STOPPING, [StopUnit]),
        ("failed", False, InstanceState.RELEASING, [WaitForMemory, ReadPostMortem]),
    ],
)
def test_adoption_in_every_state(
    active: str, healthy: bool, expected: InstanceState, follow_up: list[type]
) -> None:
    before = World()
    before.load("a", "t1")
    original = before.get("a")
    world = World()
    result = "exit-code" if active == "failed" else "success"
    found = status(original, active_state=active, result=result)
    effects = world.do(
        UnitAdopted(found, original.record, healthy, original.record.shares(CARD.uuid), {CARD.uuid: 5 * GIB})
    )
    assert kinds(effects) == follow_up
    adopted = world.get("a")
    assert adopted.state is expected
    assert adopted.plan == original.plan
    assert world.charged_bytes > 0
    # What was adopted is not started twice.
    assert StartUnit not in kinds(world.load("a", "t2"))


def test_units_of_somebody_else_change_nothing() -> None:
    world = World()
    instance = world.bring_up("a")
    assert world.do(UnitSeen(status(instance, name="lllm3090-x-1.service", active_state="failed"))) == []
    assert world.do(UnitVanished("lllm3090-x-1.service", None)) == []


NAMES = st.sampled_from(["a", "b", "c", "d"])


class Histories(RuleBasedStateMachine):
    """Random histories of requests, and of a systemd that obeys, crashes, or is stopped by strangers."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.open: dict[str, str] = {}  # token -> kind, for each request not answered yet
        self.count = 0
        self.pending_memory: set[str] = set()
        self.pending_post_mortem: set[str] = set()
        self.resubmit: list[LoadRequested] = []
        self.to_check: list[tuple[str, tuple[str, ...]]] = []

    def feed(self, event: Event) -> None:
        granted_before = self.world.scheduler.budget(self.world.observation()).grantable_bytes
        for effect in self.world.do(event):
            match effect:
                case Admitted(run=run):
                    held = self.world.scheduler.ledger.get(run, CARD.uuid)
                    assert held is not None
                    assert held.reserved_bytes <= granted_before, "over-committed"
                case (
                    LoadDone(token=token)
                    | UnloadDone(token=token)
                    | CancelDone(token=token)
                    | Failed(token=token)
                ):
                    assert token in self.open, f"{token} was answered twice"
                    del self.open[token]
                case WaitForMemory(run=run):
                    self.pending_memory.add(run)
                case ReadPostMortem(run=run):
                    self.pending_post_mortem.add(run)
                case Resubmit(event=again):
                    self.resubmit.append(again)
                case CheckIdle(token=token, runs=runs):
                    self.to_check.append((token, runs))
                case _:
                    pass

    def token(self, kind: str) -> str:
        self.count += 1
        token = f"{kind}-{self.count}"
        self.open[token] = kind
        return token

    @rule(name=NAMES, gib=st.sampled_from([2.0, 6.0, 9.0, 30.0]))
    def load(self, name: str, gib: float) -> None:
        self.feed(self.world.request(name, self.token("load"), gib))

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        self.feed(UnloadRequested(self.token("unload"), name))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        loads = [token for token, kind in self.open.items() if kind == "load"]
        self.feed(CancelRequested(self.token("cancel"), data.draw(st.sampled_from([*loads, "never-was"]))))

    @rule(data=st.data())
    def systemd_says(self, data: st.DataObject) -> None:
        instances = [i for i in self.world.scheduler.instances if i.state not in ENDED]
        if not instances:
            return
        instance = data.draw(st.sampled_from(instances))
        news = data.draw(
            st.sampled_from(
                ["active", "deactivating", "failed", "gone", "started", "refused", "stopped", "not stopped"]
            )
        )
        match news:
            case "gone":
                self.feed(UnitVanished(instance.unit, None))
            case "started":
                self.feed(StartFinished(instance.run, None))
            case "refused":
                self.feed(StartFinished(instance.run, LlmError(ErrorCode.UNIT_REFUSED, "no")))
            case "stopped":
                if instance.state in {InstanceState.STOPPING, InstanceState.STUCK}:
                    self.feed(StopFinished(instance.run, None))
            case "not stopped":
                if instance.state in {InstanceState.STOPPING, InstanceState.STUCK}:
                    self.feed(StopFinished(instance.run, LlmError(ErrorCode.STOP_FAILED, "no")))
            case _:
                result = "exit-code" if news == "failed" else "success"
                self.feed(UnitSeen(status(instance, active_state=news, result=result)))

    @rule(data=st.data())
    def engine_ready(self, data: st.DataObject) -> None:
        instances = [i for i in self.world.scheduler.instances if i.state in ON_THE_WAY_UP]
        if instances:
            self.feed(EngineReady(data.draw(st.sampled_from(instances)).run, {CARD.uuid: GIB}))

    @rule(data=st.data(), late=st.booleans())
    def memory_back(self, data: st.DataObject, late: bool) -> None:
        if self.pending_memory:
            run = data.draw(st.sampled_from(sorted(self.pending_memory)))
            if late:
                self.feed(MemoryReleased(run, {CARD.uuid: MIB}))
            self.pending_memory.discard(run)
            self.feed(MemoryReleased(run, {}))

    @rule(data=st.data())
    def post_mortem(self, data: st.DataObject) -> None:
        if self.pending_post_mortem:
            run = data.draw(st.sampled_from(sorted(self.pending_post_mortem)))
            self.pending_post_mortem.discard(run)
            self.feed(PostMortemRead(run, LlmError(ErrorCode.ENGINE_FAILED, "died")))

    @rule()
    def decide_again(self) -> None:
        if self.resubmit:
            self.feed(self.resubmit.pop(0))

    @rule(seconds=st.sampled_from([0, 1, 40, 200]))
    def look(self, seconds: int) -> None:
        self.world.now_s += seconds
        self.feed(Looked())

    @rule(data=st.data())
    def idle_checked(self, data: st.DataObject) -> None:
        if self.to_check:
            token, runs = self.to_check.pop(0)
            self.feed(IdleChecked(token, data.draw(st.frozensets(st.sampled_from(runs)))))

    @invariant()
    def what_runs_is_charged_and_nothing_else(self) -> None:
        scheduler = self.world.scheduler
        # One whose memory is back may still wait for the reason of its end.
        back = {
            i.run for i in scheduler.instances if i.state is InstanceState.RELEASING and not i.memory_pending
        }
        live = {i.run for i in scheduler.instances if i.state not in ENDED} - back
        charged = {r.run for r in scheduler.ledger}
        assert live <= charged
        assert all(r.run in live or r.run in self.pending_memory for r in scheduler.ledger)

    @invariant()
    def serving_instances_leave_nobody_waiting(self) -> None:
        for instance in self.world.scheduler.instances:
            if instance.state in SERVING | ENDED:
                assert instance.waiters == []

    def teardown(self) -> None:
        """Let everything end: every request must then have been answered."""
        for _ in range(40):
            for instance in self.world.scheduler.instances:
                if instance.state not in ENDED:
                    self.feed(UnitSeen(status(instance, active_state="failed", result="signal")))
            for run in sorted(self.pending_memory):
                self.pending_memory.discard(run)
                self.feed(MemoryReleased(run, {}))
            for run in sorted(self.pending_post_mortem):
                self.pending_post_mortem.discard(run)
                self.feed(PostMortemRead(run, LlmError(ErrorCode.ENGINE_FAILED, "died")))
            while self.resubmit:
                self.feed(self.resubmit.pop(0))
            while self.to_check:
                token, _ = self.to_check.pop(0)
                self.feed(IdleChecked(token, frozenset()))
            self.world.now_s += 1000
            self.feed(Looked())
        assert self.open == {}, "somebody was never answered"
        assert list(self.world.scheduler.ledger) == []


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis_settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_divided_cache_is_looked_for_after_every_start_and_every_adoption() -> None:
    """The daemon may have been killed between the start and the look."""
    world = World()
    world.load("a", "t1")
    instance = world.get("a")
    assert CheckTier not in kinds(world.do(UnitSeen(status(instance))))
    tier = Tier(256, 1024, TierSizes(4 * MIB, 2 * MIB, 12 * MIB, layers=1))
    instance.plan = replace(instance.plan, tier=tier)
    world.do(StartFinished(instance.run, None))
    assert CheckTier(instance.run) in world.do(EngineReady(instance.run, {CARD.uuid: 5 * GIB}))
    more = instance.record.launch
    assert more is not None
    record = instance.record.model_copy(update={"launch": more.model_copy(update={"tier": tier})})
    effects = World().do(UnitAdopted(status(instance), record, True, record.shares(CARD.uuid)))
    assert CheckTier(instance.run) in effects


def test_whether_a_cache_is_divided_is_told() -> None:
    world = World()
    instance = world.bring_up("a")
    told = world.do(TierChecked(instance.run, False, "It is not."))
    assert told == [TellTier("a", instance.run, False, "It is not.")]
    assert instance.tier_in_force is False
    assert world.do(TierChecked("ffffffff", True, "Of nobody.")) == []
