"""The scheduler: events in, effects out. It decides; it touches nothing but its own state.

Only the one writer calls it, so between reading its state and changing it nothing can happen. Every load is decided by
:meth:`Scheduler._decide`, whoever asks: it is admitted, or takes the place of idle models, or waits, or is refused.
Those who wait are served in the order of their coming; what serves already needs no room and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.planner import Planner
from lllm3090d.planning.reserves import Budget
from lllm3090d.serving import refusals
from lllm3090d.serving.admission import Rooms, foreign_bytes, rooms
from lllm3090d.serving.admitting import Admit, Decider, Evict, Refuse, Wait
from lllm3090d.serving.events import (
    Activity,
    Admitted,
    CancelRequested,
    CheckIdle,
    ComebackRefused,
    DrainEnded,
    DrainSeen,
    Effect,
    EndWasAsked,
    EngineReady,
    Event,
    Failed,
    FailureRecalled,
    HoldLoads,
    IdleChecked,
    Joined,
    LeaseAsked,
    LeaseReturned,
    LoadDone,
    LoadRequested,
    LoadStalled,
    LookAgain,
    Looked,
    MemoryReleased,
    Observation,
    PinRequested,
    PostMortemRead,
    Queued,
    ReleaseRequested,
    ResetRequested,
    ResumeRequested,
    StartFinished,
    StartUnit,
    StopFinished,
    TakesMore,
    TierChecked,
    UnitAdopted,
    UnitSeen,
    UnitVanished,
    UnloadRequested,
    Verified,
    VictimsOwed,
    YieldWanted,
)
from lllm3090d.serving.extras import asked_of, extra_of, lacking, wish_of
from lllm3090d.serving.fitting import room_for, usable_cards
from lllm3090d.serving.held_back import as_it_comes
from lllm3090d.serving.instance import ENDED, ON_THE_WAY_DOWN, ON_THE_WAY_UP, SERVING, InstanceState
from lllm3090d.serving.launching import calibration_for, key_of, launched, was_measured
from lllm3090d.serving.ledger import ReservationState
from lllm3090d.serving.load_features import load_features
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.running import Evicted, Instance
from lllm3090d.serving.stalling import Stalling
from lllm3090d.serving.unruled import OfferedPlan
from lllm3090d.serving.waiting import Waiting

S = InstanceState
COMING_BACK = frozenset({ReservationState.RELEASING, ReservationState.QUARANTINED})
# How often those who wait are looked at while only time, or somebody outside, can help them.
LOOK_INTERVAL_S = 1.0
MOST_AT_ONCE = 20
WAKING = "the machine to wake up"


class Scheduler(Stalling):
    """State of everything that runs, and the decisions on it."""

    # --- reading ------------------------------------------------------------------------------------------------

    def rooms(self, observation: Observation, gone: frozenset[str] = frozenset()) -> Rooms:
        """What each memory can give now, had these runs gone.

        Raises:
            LlmError: CARD_UNREADABLE for a reading that cannot be true.
        """
        return rooms(observation, self.ledger, self.policy.reserves, gone)

    def budgets(self, observation: Observation) -> dict[str, Budget]:
        """What each card can give now, by UUID; without those in error."""
        return dict(self.rooms(observation).cards)

    def host_budget(self, observation: Observation) -> Budget | None:
        """What host memory can give beside the cards; None where it is the card."""
        return self.rooms(observation).host

    def budget(self, observation: Observation) -> Budget:
        """What the card with the most memory can give. Raises LlmError CARD_UNREADABLE, CARD_AT_RISK."""
        observation.main.usable()
        return self.budgets(observation)[observation.card.uuid]

    def next_attention_s(self) -> float | None:
        """When those who wait or have failed must be looked at again, on the clock; None where there is none."""
        if self.asleep:
            return None
        comeback = None if self.released else self._comebacks.next_s(self._instances.values())
        moments = [] if comeback is None else [comeback]
        if self._waiting:
            moments += [self.clock() + LOOK_INTERVAL_S, *(each.deadline_s for each in self._waiting)]
        return min(moments, default=None)

    def planner(self, event: LoadRequested, observation: Observation, room: Rooms | None = None) -> Planner:
        """The question that a load puts to the planner, for all cards that it may be on.

        Raises:
            LlmError: INVALID_REQUEST for its arguments; CARD_UNREADABLE.
        """
        if isinstance(event.facts, UnruledModel):
            raise ValueError(f"no planner plans {event.checkpoint.name}: no rule describes it")
        extra = extra_of(event, self.policy.extra_arguments)
        given = room or self.rooms(observation)
        return Planner(
            facts=event.facts,
            request=asked_of(event, extra, self.policy.models),
            policy=extra.policy(self.policy.plan),
            features=load_features(event, observation),
            card_kind=observation.card.kind,
            room=room_for(event, observation, given),
            projector=event.projector,
            drafter=event.drafter,
            calibration=calibration_for(event, usable_cards(event, observation, given)),
            keeps_host_caches=extra.prompt_cache_mib is not None or extra.context_checkpoints is not None,
        )

    def question(
        self, event: LoadRequested, observation: Observation, room: Rooms | None = None
    ) -> Planner | OfferedPlan:
        """The same; of a model without a rule whether what it was offered fits. Raises as :meth:`planner`."""
        if not isinstance(event.facts, UnruledModel):
            return self.planner(event, observation, room)
        given = room_for(event, observation, room or self.rooms(observation))
        return OfferedPlan(event.offer, event.facts, observation.card.kind, given)

    def given_back(self, name: str) -> frozenset[str]:
        """The run of a model that is loaded, which gives its memory back before it is loaded anew; () of any other."""
        running = self._instances.get(name)
        is_loaded = running is not None and running.state not in ENDED | {S.STUCK}
        return frozenset([running.run]) if running is not None and is_loaded else frozenset()

    def aimed(
        self, event: LoadRequested, observation: Observation, gone: frozenset[str] = frozenset()
    ) -> LoadRequested:
        """The load, with the one card of several that it would be on now; as it is where it needs more than one.

        Args:
            event: the load.
            observation: the cards now.
            gone: runs that are thought away.
        """
        return self._decider(observation, gone).aimed(event)

    def would_evict(
        self, event: LoadRequested, observation: Observation, gone: frozenset[str] = frozenset()
    ) -> tuple[Instance, ...]:
        """Idle models that a load would be the end of, were it asked for now; some runs thought away."""
        decision = self._decider(observation, gone).decide(event)
        if not isinstance(decision, Evict):
            return ()
        return tuple(each for each in self.instances if each.run in decision.runs)

    def evictable(self, observation: Observation) -> frozenset[str]:
        """Runs that may go for another model now."""
        return frozenset(each.run for each in self._decider(observation).victims())

    # --- events -------------------------------------------------------------------------------------------------

    def handle(self, event: Event, observation: Observation | None = None) -> list[Effect]:
        """Take one event, change the state, return what is to be done, in order.

        Args:
            event: what happened.
            observation: the cards at this moment; needed for LoadRequested and Looked only.
        """
        self._effects = []
        self._has_changed = False
        if isinstance(event, LoadRequested | Looked):
            if observation is None:
                raise ValueError("loads are decided on a reading")
            self._see_memory(observation)
            if isinstance(event, LoadRequested):
                self._on_load(event, observation)
            else:
                self._on_looked(event, observation)
        else:
            self._handlers[type(event)](event)
        if self._has_changed and self._waiting:
            self._do(LookAgain())
        return self._effects

    @cached_property
    def _handlers(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """What is done about each kind of event that needs no reading."""
        return {
            UnloadRequested: self._on_unload,
            CancelRequested: self._on_cancel,
            LeaseAsked: self._on_lease_asked,
            LeaseReturned: self._on_lease_returned,
            PinRequested: self._on_pin,
            ResetRequested: self._on_reset,
            ReleaseRequested: self._on_release,
            ResumeRequested: self._on_resume,
            HoldLoads: self._on_hold_loads,
            IdleChecked: self._on_idle_checked,
            YieldWanted: self._on_yield,
            ComebackRefused: self._on_comeback_refused,
            FailureRecalled: self._on_failure_recalled,
            EndWasAsked: self._on_end_was_asked,
            VictimsOwed: self._on_victims_owed,
            StartFinished: self._on_start_finished,
            UnitSeen: lambda event: self._on_unit_seen(event.status),
            UnitVanished: self._on_unit_vanished,
            EngineReady: self._on_engine_ready,
            TakesMore: lambda event: self.ledger.saw(event.run, event.held),
            Verified: self._on_verified,
            LoadStalled: self._on_load_stalled,
            TierChecked: self._on_tier_checked,
            DrainSeen: self._on_drain_seen,
            DrainEnded: self._on_drain_ended,
            StopFinished: self._on_stop_finished,
            PostMortemRead: self._on_post_mortem,
            MemoryReleased: self._on_memory_released,
            UnitAdopted: self._on_adopted,
        }

    # --- loads --------------------------------------------------------------------------------------------------

    def _on_load(self, event: LoadRequested, observation: Observation) -> None:
        """Decide a load.

        1. The card was given away: refuse. It failed, was to be started again, and was unloaded meanwhile: refuse. The
           machine goes to sleep: wait for its return.
        2. The model serves or is on its way up: answer, or join, if it has what was asked for; else refuse.
        3. It is on its way down: wait until it is gone, then decide again; one that does not stop is not waited for.
           One that has ended is started again: a program's load waits for that, or is refused.
        4. Others wait for room: wait behind them, unless it could never fit.
        5. Otherwise decide it. The start of what has ended makes room where requests wait for it.
        """
        before = self._instances.get(event.checkpoint.name)
        if event.attempt and before is not None and before.state in ENDED and before.successors:
            event = replace(event, may_evict=True)
        if self.released:
            self._do(Failed(event.token, refusals.card_released()))
        elif event.attempt and event.checkpoint.name not in self._instances:
            self._do(Failed(event.token, refusals.unloaded_while_loading(event.checkpoint.name)))
        elif self.asleep:
            self._wait_asleep(event)
        elif not self._served_by_what_runs(event):
            if self._waiting:
                self._wait_in_line(event, observation)
            else:
                self._waiting.append(self._entry(event, ""))
                self._advance(observation)

    def _served_by_what_runs(self, event: LoadRequested) -> bool:
        """Whether what runs of the model answers this load, for good or ill, without any room."""
        current = self._instances.get(event.checkpoint.name)
        if current is None:
            return False
        if current.state in ENDED:
            return self._hold_back(current, event)
        if current.state in SERVING | ON_THE_WAY_UP:
            self._join(current, event)
        elif current.state is S.STUCK:
            # Its end may never come, so nobody waits for it.
            self._do(Failed(event.token, refusals.stuck(current.name, current.unit)))
        elif current.state in ON_THE_WAY_DOWN:
            current.successors.append(event)
            ends = "end" if current.drain is None else "finish its requests and end"
            self._do(Queued(event.token, current.name, f"its previous engine to {ends}"))
        return True

    def _join(self, current: Instance, event: LoadRequested) -> None:
        try:
            missing = lacking(current.plan, current.record.arguments, event, asked=current.record.asked)
        except LlmError as error:
            self._do(Failed(event.token, error))
            return
        on_cards = {each.where for each in self.ledger.of(current.run)} - {HOST}
        if missing is None and event.card is not None and on_cards and on_cards != {event.card}:
            missing = f"on card {', '.join(sorted(on_cards))} instead of {event.card}"
        if missing is not None:
            self._do(Failed(event.token, refusals.loaded_differently(current.name, missing)))
            return
        if event.lease:
            current.leases.add(event.token)
        if event.pinned:
            self._pin(current, pinned=True)
        current.is_known = True
        if current.state in SERVING:
            self._used(current)
            self._do(LoadDone(event.token, current.run))
        else:
            current.waiters.append(event.token)
            self._do(Joined(event.token, current.run))

    def _entry(self, event: LoadRequested, why: str) -> Waiting:
        now = self.clock()
        return Waiting(event, now, now + self.policy.queue_timeout_s, why)

    def _wait_in_line(self, event: LoadRequested, observation: Observation) -> None:
        """Behind those who came first; what could not fit even then is refused at once."""
        refused = self._decider(observation).refusal(event)
        if refused is not None:
            self._do(Failed(event.token, refused.error))
        elif not event.may_wait:
            self._do(
                Failed(event.token, refusals.no_room_now(event.checkpoint.name, "others wait for room"))
            )
        else:
            first = self._waiting[0]
            self._waiting.append(self._entry(event, f"its turn, after {first.name}"))
            self._tell(self._waiting[-1])

    def _wait_asleep(self, event: LoadRequested) -> None:
        """Until the machine wakes up; then it is decided as any other."""
        if not event.may_wait:
            self._do(Failed(event.token, refusals.no_room_now(event.checkpoint.name, WAKING)))
            return
        self._waiting.append(self._entry(event, WAKING))
        self._do(Queued(event.token, event.checkpoint.name, WAKING))

    def _decider(self, observation: Observation, gone: frozenset[str] = frozenset()) -> Decider:
        return Decider(
            observation=observation,
            ledger=self.ledger,
            policy=self.policy,
            instances=self.instances,
            now_s=self.clock(),
            planner=lambda event, room: self.question(event, observation, room),
            gone=gone,
        )

    # --- the queue ----------------------------------------------------------------------------------------------

    def _on_looked(self, event: Looked, observation: Observation) -> None:
        by_run = {each.run: each for each in self._instances.values()}
        for run, seen in event.activity.items():
            instance = by_run.get(run)
            if instance is not None and instance.state in SERVING:
                self._see_activity(instance, seen)
                self._see_verdict(instance, event.verdicts.get(run))
        if not self.asleep:
            self._time_out()
            self._come_back()
        self._advance(observation)

    def _come_back(self) -> None:
        """Start again what failed and is due."""
        for each in () if self.released else self._comebacks.due(self._instances.values()):
            self._start_again(each, f"start {each.next_attempt} in a row after it ended by itself")

    def _see_memory(self, observation: Observation) -> None:
        """Charge what an engine is seen to hold, where that is more than it was promised."""
        for state in observation.cards:
            for run, held in state.resident.items():
                self.ledger.saw(run, {state.card.uuid: held})

    def _see_activity(self, instance: Instance, seen: Activity) -> None:
        grown = None not in {seen.served_tokens, instance.served_tokens} and (
            seen.served_tokens != instance.served_tokens
        )
        if seen.busy or grown or (instance.busy and seen.busy is False):
            self._used(instance)
        instance.busy = seen.busy
        instance.is_silent = instance.is_silent and seen.busy is None
        instance.served_tokens = seen.served_tokens
        if instance.state in {S.READY, S.BUSY}:
            state = S.BUSY if seen.busy else S.READY
            if state is not instance.state:
                self._move(instance, state, "requests in flight" if seen.busy else "idle")

    def _time_out(self) -> None:
        now = self.clock()
        for entry in [each for each in self._waiting if each.deadline_s <= now]:
            self._leave(entry)
            error = refusals.queue_timed_out(entry.name, entry.why, self.policy.queue_timeout_s)
            self._do(Failed(entry.token, error))
            self._restore(entry.evicted, f"{entry.name} did not come up")

    def _advance(self, observation: Observation) -> None:
        """Serve those who wait, in order, for as long as the first one can be served; nobody before a sleep.

        Not all at once where many are refused: each page takes milliseconds, and others are to be answered meanwhile.
        """
        left = MOST_AT_ONCE
        while self._waiting and not self.asleep:
            head = self._waiting[0]
            if self._served_by_what_runs(head.event):
                self._waiting.remove(head)
                self._restore(head.evicted, f"{head.name} was loaded otherwise")
                continue
            head.evicting = {run for run in head.evicting if self._is_on_its_way_down(run)}
            if head.evicting or head.asked:
                return
            if not self._try_head(head, observation):
                return
            left -= 1
            if not left:
                self._has_changed = True
                return

    def _is_on_its_way_down(self, run: str) -> bool:
        instance = self.by_run(run)
        return instance is not None and instance.state in ON_THE_WAY_DOWN - {S.STUCK}

    def _try_head(self, head: Waiting, observation: Observation) -> bool:
        """Decide the first of those who wait; whether the next one may be tried."""
        decision = self._decider(observation).decide(head.event)
        if isinstance(decision, Refuse):
            decision = self._late(head) or self._unseen(head, decision) or decision
        match decision:
            case Admit():
                self._waiting.remove(head)
                self._admit(head, decision, observation)
                self._join_followers(head.name)
                return True
            case Refuse():
                self._waiting.remove(head)
                self._do(Failed(head.token, decision.error))
                self._restore(head.evicted, f"{head.name} was refused")
                return True
            case Evict():
                head.asked = decision.runs
                self._tell_waiting(head, decision.why)
                self._do(CheckIdle(head.token, decision.runs))
            case Wait():
                if not head.event.may_wait:
                    self._waiting.remove(head)
                    self._do(Failed(head.token, refusals.no_room_now(head.name, decision.why)))
                    self._restore(head.evicted, f"{head.name} could not wait")
                    return True
                self._tell_waiting(head, decision.why)
        return False

    @staticmethod
    def _unseen(head: Waiting, refused: Refuse) -> Wait | None:
        """One reading that fails sends nobody away who has waited already."""
        if refused.error.code is ErrorCode.CARD_UNREADABLE and head.why:
            return Wait("the card to be readable again")
        if refused.error.code is ErrorCode.CARD_AT_RISK and head.why:
            return Wait("the card to be well again")
        return None

    def _late(self, head: Waiting) -> Wait | None:
        """What was unloaded for a load and has not given its memory back is waited for: else both would be lost."""
        late = sorted(
            {each.name for each in self.ledger if each.run in head.victims and each.state in COMING_BACK}
        )
        return Wait(f"the memory of {', '.join(late)} to come back, which is late") if late else None

    def _tell_waiting(self, head: Waiting, why: str) -> None:
        if head.why != why:
            head.why = why
            self._tell(head)

    def _tell(self, entry: Waiting) -> None:
        """What it waits for, to all whom its end serves."""
        held = self._instances.get(entry.name)
        others = held.successors if held is not None and held.state in ENDED else ()
        for token in (entry.token, *(each.token for each in others)):
            self._do(Queued(token, entry.name, entry.why))

    def _join_followers(self, name: str) -> None:
        """Others who wait for a model that is coming up now need no room of their own."""
        for entry in [each for each in self._waiting if each.name == name]:
            if self._served_by_what_runs(entry.event):
                self._waiting.remove(entry)

    def _on_idle_checked(self, event: IdleChecked) -> None:
        """Unload those that are to go, if all of them are idle still; else decide anew."""
        head = next((each for each in self._waiting if each.token == event.token), None)
        if head is None:
            return
        runs, head.asked = head.asked, ()
        victims = [each for each in map(self.by_run, runs) if each is not None]
        for victim in victims:
            if victim.run in event.busy:
                victim.is_silent = victim.busy is None and victim.run in event.silent
                victim.busy = True
                self._used(victim)
        if not self.asleep and all(self._may_go(victim, event.busy) for victim in victims):
            for victim in victims:
                self._evict(victim, head)
        self._has_changed = True

    def _evict(self, victim: Instance, head: Waiting) -> None:
        head.evicting.add(victim.run)
        head.victims.add(victim.run)
        asked = victim.record.asked
        if asked is not None:
            head.evicted.append(Evicted(victim.name, asked, victim.words, victim.pinned, victim.card))
        self._go(victim, "load", f"makes room for {head.name}")

    # --- admission ----------------------------------------------------------------------------------------------

    def _admit(self, head: Waiting, decision: Admit, observation: Observation) -> None:
        event = replace(head.event, request=decision.request)
        try:
            made = launched(event, decision, observation, self.policy, wish_of(head.event))
        except LlmError as error:
            self._do(Failed(event.token, error))
            self._restore(head.evicted, f"{head.name} could not be launched")
            return
        self.ledger.hold(event.run, event.checkpoint.name, made.shares, self.clock())
        # A failed predecessor is only a memory of why it failed; it makes room for its successor here.
        before = self._instances.pop(event.checkpoint.name, None)
        if before is not None:
            self._forget_unit(before)
        state = observation.of(decision.cards[0])
        instance = Instance(
            record=made.record,
            plan=decision.plan,
            state=S.PLANNED,
            waiters=[event.token],
            arguments=event.arguments,
            evicted=list(head.evicted),
            attempt=event.attempt,
            card=event.card,
            key=key_of(event, decision, made.record.arguments),
            foreign_bytes=foreign_bytes(state, self.ledger) if state is not None else 0,
        )
        instance.is_measured = was_measured(event, instance.key)
        instance.idle_before_s = event.idle_s
        if event.lease:
            instance.leases.add(event.token)
        if not event.attempt:
            self._comebacks.forget(instance.name)
        self._instances[instance.name] = instance
        self._do(Admitted(event.token, event.run, event.facts, decision.budget, made.argv, made.environment))
        if event.pinned:
            self._pin(instance, pinned=True)
        self._move(instance, S.RESERVED, "admitted")
        self._move(instance, S.STARTING, "unit requested")
        self._do(StartUnit(event.run, made.spec))
        for each in () if before is None else before.successors:
            self._join(instance, as_it_comes(each))
