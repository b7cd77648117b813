"""What is asked about models that run, wait or have failed, and what comes back by itself. Pure.

Between the lives of instances and the decisions on loads: nothing here needs a reading of the cards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lllm3090d.serving import refusals
from lllm3090d.serving.comebacks import Comebacks
from lllm3090d.serving.events import (
    CancelDone,
    CancelRequested,
    ComebackRefused,
    EndWasAsked,
    Failed,
    FailureRecalled,
    HoldLoads,
    KeepPin,
    KeepReleased,
    LeaseAsked,
    LeaseGiven,
    LeaseReturned,
    LoadsHeld,
    PinDone,
    PinRequested,
    ReleaseDone,
    ReleaseRequested,
    ResetDone,
    ResetRequested,
    Restore,
    Resubmit,
    ResumeDone,
    ResumeRequested,
    TellEviction,
    UnloadDone,
    UnloadRequested,
    VictimsOwed,
    YieldWanted,
)
from lllm3090d.serving.idle import idle_since_s
from lllm3090d.serving.instance import ENDED, ON_THE_WAY_DOWN, ON_THE_WAY_UP, SERVING, InstanceState
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.restarts import End, Latch
from lllm3090d.serving.running import Evicted, Instance, Releasing
from lllm3090d.serving.stopping import Stopping
from lllm3090d.serving.waiting import Waiting

S = InstanceState


class Standing(Stopping):
    """State of everything that runs, waits or failed."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(policy, clock)
        self.released = False  # the card was given away until somebody resumes
        self._comebacks = Comebacks(lambda: self.policy.restarts, clock)
        self.asleep = False  # the machine goes to sleep, or sleeps: loads wait
        self._waiting: list[Waiting] = []

    @property
    def pending(self) -> tuple[Waiting, ...]:
        """Loads that wait for room, the next one first."""
        return tuple(self._waiting)

    def is_to_come_back(self, name: str) -> bool:
        """It was unloaded for a load that may still fail."""
        return any(gone.name == name for each in self._evictors() for gone in each.evicted)

    def evicted_for(self) -> dict[str, str]:
        """The launch that a model was unloaded for, by the model's name, while that has not come to its end."""
        return {
            gone.name: each.event.run if isinstance(each, Waiting) else each.run
            for each in self._evictors()
            for gone in each.evicted
        }

    def ends(self) -> dict[str, tuple[End, ...]]:
        """Ends by themselves since the last reset, oldest first, by model."""
        return self._comebacks.ends()

    def _evictors(self) -> tuple[Waiting | Instance, ...]:
        """All for whom others may have gone."""
        return (*self._waiting, *self._instances.values())

    # --- going, and being left in peace -----------------------------------------------------------------------------

    def _on_unload(self, event: UnloadRequested) -> None:
        instance = self._instances.get(event.name)
        waited = self._cancel_waiting(event.name)
        self._comebacks.forget(event.name)
        waited = self._forget_evicted(event.name) or waited
        if instance is None:
            if waited is None:
                self._do(Failed(event.token, refusals.not_loaded(event.name, self._instances)))
            else:
                self._do(UnloadDone(event.token, event.name, waited, 0))
            return
        self._cancel_successors(instance)
        if instance.state in ENDED:
            # Only the memory of a failure is left: forgetting it is all there is to do.
            self._forget_unit(instance)
            del self._instances[event.name]
            self._do(UnloadDone(event.token, event.name, instance.run, 0))
            return
        instance.unloaders.append(event.token)
        instance.unwanted = True
        if instance.state in ON_THE_WAY_DOWN:
            self._hurry(instance, event)
        else:
            self._unload(instance, event, refusals.unloaded_while_loading(instance.name))

    def _cancel_waiting(self, name: str) -> str | None:
        """Nobody is to wait for this model any more; the run that would have come of it, None where nobody waited."""
        run = None
        for entry in [each for each in self._waiting if each.name == name]:
            self._leave(entry)
            self._do(Failed(entry.token, refusals.unloaded_while_loading(name)))
            self._restore(entry.evicted, f"{name} was unloaded")
            run = entry.event.run
        return run

    def _forget_evicted(self, name: str) -> str | None:
        """It is not loaded again for anybody; a run that it went for, None where it went for none."""
        found = None
        for each in self._evictors():
            kept = [gone for gone in each.evicted if gone.name != name]
            if len(kept) < len(each.evicted):
                each.evicted = kept
                found = each.event.run if isinstance(each, Waiting) else each.run
        return found

    def _on_cancel(self, event: CancelRequested) -> None:
        for entry in self._waiting:
            if entry.token == event.load_token:
                self._leave(entry)
                self._do(Failed(event.load_token, refusals.cancelled(entry.name)))
                self._restore(entry.evicted, f"the load of {entry.name} was cancelled")
                self._do(CancelDone(event.token, event.load_token, stopped=True))
                return
        for instance in self._instances.values():
            waiting = [s for s in instance.successors if s.token == event.load_token]
            if waiting:
                instance.successors.remove(waiting[0])
                self._do(Failed(event.load_token, refusals.cancelled(instance.name)))
                self._do(CancelDone(event.token, event.load_token, stopped=True))
                return
            if event.load_token in instance.waiters:
                instance.waiters.remove(event.load_token)
                instance.leases.discard(event.load_token)
                self._do(Failed(event.load_token, refusals.cancelled(instance.name)))
                alone = not instance.waiters and instance.state in ON_THE_WAY_UP
                if alone:
                    instance.unwanted = True
                    self._restore(instance.evicted, f"the load of {instance.name} was cancelled")
                    self._stop(instance, "load cancelled", None)
                self._do(CancelDone(event.token, event.load_token, stopped=alone))
                return
        self._do(Failed(event.token, refusals.no_such_load(event.load_token)))

    def _leave(self, entry: Waiting) -> None:
        self._waiting.remove(entry)
        self._has_changed = True

    def _on_lease_asked(self, event: LeaseAsked) -> None:
        instance = self._instances.get(event.name)
        if instance is None or instance.state not in SERVING:
            self._do(Failed(event.token, refusals.not_loaded(event.name, self._instances)))
            return
        instance.leases.add(event.lease)
        self._used(instance)
        self._do(LeaseGiven(event.token, instance.run))

    def _on_lease_returned(self, event: LeaseReturned) -> None:
        for instance in self._instances.values():
            if event.lease in instance.leases:
                instance.leases.discard(event.lease)
                if event.keep_alive_s is not None:
                    instance.keep_alive_s = event.keep_alive_s
                self._used(instance)
                self._has_changed = True

    def _used(self, instance: Instance) -> None:
        instance.last_used_s = self.clock()

    def _on_pin(self, event: PinRequested) -> None:
        instance = self._instances.get(event.name)
        if instance is not None and instance.state in ENDED:
            self._do(Failed(event.token, refusals.has_failed(event.name)))
            return
        if instance is None:
            self._do(Failed(event.token, refusals.not_loaded(event.name, self._instances)))
            return
        if instance.state not in SERVING | ON_THE_WAY_UP:
            self._do(Failed(event.token, refusals.on_its_way_down(event.name)))
            return
        self._pin(instance, pinned=event.pinned)
        self._do(PinDone(event.token, instance.run))

    def _pin(self, instance: Instance, *, pinned: bool) -> None:
        if instance.pinned is not pinned:
            instance.pinned = pinned
            self._has_changed = True
            self._do(KeepPin(instance.run, pinned))

    def _on_release(self, event: ReleaseRequested) -> None:
        """Unload everything, whatever it does, and if so asked refuse what comes until somebody resumes."""
        if event.until_resume and not self.released:
            self.released = True
            self._do(KeepReleased(released=True))
        error = refusals.card_released() if event.until_resume else refusals.released_meanwhile()
        reason = "the card was asked for"
        if event.for_sleep:
            error, reason = refusals.asleep(), "the machine goes to sleep"
        for entry in () if event.for_sleep else tuple(self._waiting):
            self._waiting.remove(entry)
            self._do(Failed(entry.token, error))
        for instance in self._instances.values():
            if not event.for_sleep:
                self._cancel_successors(instance, error)
            instance.evicted.clear()
            # What went to sleep is remembered by its own set.
            instance.unwanted = instance.unwanted or event.for_sleep or not event.until_resume
            if instance.state in SERVING | ON_THE_WAY_UP:
                self._stop(instance, reason, error)
            elif instance.state is S.STOPPING:
                self._stop_drained(instance)
                if not (event.until_resume or event.for_sleep):
                    instance.failure = None  # one that was to be restarted is not
            elif instance.state is S.FAILED and not (event.until_resume or event.for_sleep):
                self._stay_down(instance)
            elif event.until_resume and instance.next_attempt and instance.retry_at_s is None:
                self._start_is_withdrawn(instance)
        going = [i for i in self._instances.values() if i.state in ON_THE_WAY_DOWN - {S.STUCK}]
        if going:
            names = tuple(instance.name for instance in going)
            self._releases.append(Releasing(event.token, {i.run for i in going}, names))
        else:
            self._do(ReleaseDone(event.token, (), 0))

    def _on_resume(self, event: ResumeRequested) -> None:
        was = self.released
        if was:
            self.released = False
            self._do(KeepReleased(released=False))
        self._do(ResumeDone(event.token, was))

    def _on_hold_loads(self, event: HoldLoads) -> None:
        self.asleep = event.held
        for entry in self._waiting:  # their time begins anew
            entry.deadline_s = max(entry.deadline_s, self.clock() + self.policy.queue_timeout_s)
        self._has_changed = True
        self._do(LoadsHeld(event.token))

    def _on_yield(self, event: YieldWanted) -> None:
        for run in () if self.asleep else event.runs:  # before a sleep all go, and are to come back
            instance = self.by_run(run)
            if instance is None or instance.busy is not False or not self._may_go(instance, frozenset()):
                continue
            if event.idle_since_s is None or idle_since_s(instance) == event.idle_since_s:
                instance.unwanted = True
                self._go(instance, event.cause, event.reason)

    # --- what goes for others, and comes back -----------------------------------------------------------------------

    def _may_go(self, victim: Instance, busy: frozenset[str]) -> bool:
        """Nothing has happened since that speaks for it."""
        may = SERVING - {S.STALLED}
        return victim.state in may and not victim.pinned and not victim.leases and victim.run not in busy

    def _go(self, victim: Instance, cause: str, reason: str) -> None:
        self._do(TellEviction(victim.name, victim.run, cause, reason))
        self._stop(victim, reason, None)

    def _restore(self, evicted: list[Evicted], reason: str) -> None:
        for each in evicted:
            self._do(Restore(each.name, each.request, each.arguments, each.pinned, each.card, reason))
        evicted.clear()

    def _after_the_end(self, instance: Instance) -> None:
        if instance.state is S.FAILED and not instance.unloaders:
            self._latch(instance, self._comebacks.ended(instance))
        # What went for it and was of use is no longer remembered.
        self._restore(instance.evicted, f"{instance.name} did not come up")

    def _latch(self, instance: Instance, latch: Latch | None) -> None:
        if latch is not None:
            instance.latch_reason, instance.way_out = latch.reason, latch.way_out
            instance.next_attempt = 0
            self._move(instance, S.LATCHED, latch.reason)
            self._forget_unit(instance)

    def _start_again(self, instance: Instance, reason: str) -> None:
        asked = instance.record.asked
        if asked is not None:
            attempt = max(1, instance.next_attempt)
            self._do(
                Restore(
                    instance.name, asked, instance.words, instance.pinned, instance.card, reason, attempt
                )
            )

    def _on_failure_recalled(self, event: FailureRecalled) -> None:
        self._comebacks.recall(event.name, event.ends)
        if event.record is None or event.name in self._instances:
            return
        self._instances[event.name] = Instance(
            record=event.record,
            plan=event.record.plan(),
            state=S.LATCHED if event.latch_reason else S.FAILED,
            failure=event.failure,
            pinned=event.pinned,
            card=event.card,
            arguments=event.arguments,
            retry_at_s=event.retry_at_s,
            # A reset of what stays down that was under way has ended with the daemon.
            next_attempt=0 if event.latch_reason else event.next_attempt,
            latch_reason=event.latch_reason,
            way_out=event.way_out,
        )

    def _on_end_was_asked(self, event: EndWasAsked) -> None:
        instance = self.by_run(event.run)
        if instance is not None and instance.post_mortem_pending:
            instance.post_mortem_pending = instance.ended_by_itself = False
            instance.unwanted = not event.wanted
            self._settle(instance)

    def _on_victims_owed(self, event: VictimsOwed) -> None:
        instance = self.by_run(event.run)
        if instance is not None and instance.state in ON_THE_WAY_UP:
            instance.evicted = list(event.evicted)

    def _on_comeback_refused(self, event: ComebackRefused) -> None:
        instance = self._instances.get(event.name)
        if instance is None:
            return
        if instance.state is S.FAILED:
            self._latch(instance, self._comebacks.refused(instance, event.error))
        elif instance.state is S.LATCHED:  # somebody has reset it, in vain
            instance.failure, instance.next_attempt = event.error, 0
        else:
            return
        held, instance.successors = instance.successors, []
        for each in held:
            is_down = instance.state is S.LATCHED
            self._do(Resubmit(each) if is_down else Failed(each.token, event.error))

    def _on_reset(self, event: ResetRequested) -> None:
        instance = self._instances.get(event.name)
        if instance is None or instance.record.asked is None:
            self._do(Failed(event.token, refusals.nothing_to_reset(event.name)))
            return
        if self.released:
            self._do(Failed(event.token, refusals.card_released()))
            return
        self._comebacks.forget(event.name)
        starts = instance.state in ENDED
        if starts:
            instance.retry_at_s, instance.next_attempt = None, 1
            self._start_again(instance, "reset by a person")
        self._do(ResetDone(event.token, event.name, instance.run, starts))

    def _start_is_withdrawn(self, instance: Instance) -> None:
        """Its start was under way when the card was given away: it is made after, or a person resets it again."""
        if instance.state is S.FAILED:
            instance.retry_at_s = self.clock()
        elif instance.state is S.LATCHED:
            instance.next_attempt = 0

    def _stay_down(self, instance: Instance) -> None:
        """What failed is not started again by itself."""
        instance.retry_at_s, instance.next_attempt = None, 0
        self._comebacks.forget(instance.name)
        self._forget_unit(instance)
