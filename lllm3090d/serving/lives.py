"""The lives of all instances: what systemd, engines and cards report, and what follows from it.

The half of the scheduler that decides nothing about memory: it follows what happens to units that were started. It
touches nothing but its own state; every change of an instance's state goes through :meth:`Lives._move`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.engines.crash_causes import OUT_OF_DEVICE_MEMORY
from lllm3090d.errors import LlmError
from lllm3090d.planning.calibration import Measurement, comparable_bytes, deviation, deviation_limit_bytes
from lllm3090d.planning.units import mib_text
from lllm3090d.serving import refusals
from lllm3090d.serving.adoption import is_dead
from lllm3090d.serving.events import (
    Announce,
    CheckTier,
    DrainUnit,
    Effect,
    EngineReady,
    Failed,
    ForgetUnit,
    KeepPin,
    Learn,
    LearnOutOfMemory,
    LoadDone,
    LoadStalled,
    MemoryReleased,
    PostMortemRead,
    ReadPostMortem,
    ReleaseDone,
    Resubmit,
    StartFinished,
    StopFinished,
    StopUnit,
    TellDeviation,
    TellTier,
    TierChecked,
    UnitAdopted,
    UnitVanished,
    UnloadDone,
    Verified,
    Verify,
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.instance import (
    ENDED,
    ON_THE_WAY_UP,
    SERVING,
    TRANSITIONS,
    InstanceState,
)
from lllm3090d.serving.ledger import Ledger
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.running import Instance, Releasing

S = InstanceState


class Lives:
    """State of everything that runs."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self.clock = clock
        self.ledger = Ledger()
        self._instances: dict[str, Instance] = {}  # by model name
        self._releases: list[Releasing] = []
        self._effects: list[Effect] = []
        self._has_changed = False  # something that those who wait may profit from

    # --- reading ------------------------------------------------------------------------------------------------

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, in order of their launch."""
        return tuple(self._instances.values())

    def instance(self, name: str) -> Instance | None:
        """The instance of a model."""
        return self._instances.get(name)

    def by_run(self, run: str) -> Instance | None:
        """The instance of a run."""
        return next((i for i in self._instances.values() if i.run == run), None)

    def by_unit(self, unit: str) -> Instance | None:
        """The instance of a unit."""
        return next((i for i in self._instances.values() if i.unit == unit), None)

    # --- the way up ---------------------------------------------------------------------------------------------

    def _on_start_finished(self, event: StartFinished) -> None:
        instance = self.by_run(event.run)
        if instance is None or instance.state is not S.STARTING:
            return  # the unit's own signals were faster, or it is being stopped
        if event.error is None:
            self._move(instance, S.LOADING, "engine executed")
            self._do(WatchLoading(instance.run))
        else:
            self._end(instance, None, event.error)

    def _on_unit_seen(self, status: UnitStatus) -> None:
        instance = self.by_unit(status.name)
        if instance is None or instance.state in ENDED:
            return
        renewed = bool(status.invocation_id) and instance.invocation_id not in {None, status.invocation_id}
        instance.invocation_id = status.invocation_id or instance.invocation_id
        instance.main_pid = status.main_pid or instance.main_pid
        instance.control_group = status.control_group or instance.control_group
        if status.is_failed or status.is_gone:
            self._unit_ended(instance, status)
        elif status.active_state == "deactivating" and instance.state in SERVING | ON_THE_WAY_UP:
            self._interrupt(instance, refusals.stopped_by_somebody(instance.name))
            instance.unwanted = True
            self._move(instance, S.STOPPING, "systemd stops the unit")
        elif status.active_state == "active" and instance.state is S.STARTING:
            self._move(instance, S.LOADING, "engine executed")
            self._do(WatchLoading(instance.run))
        elif renewed and instance.state in {S.STOPPING, S.STUCK}:
            # Somebody restarted it (systemctl restart). What is on its way down never serves again: without another
            # stop it would run on, and be waited for, for ever.
            instance.drain = None
            self._do(StopUnit(instance.run, instance.unit))

    def _on_engine_ready(self, event: EngineReady) -> None:
        instance = self.by_run(event.run)
        if instance is None or instance.state is not S.LOADING:
            return
        instance.load_peak = event.measured
        self.ledger.confirm(instance.run, event.measured, self.clock())
        self._move(instance, S.READY, "engine answers")
        self._is_ready(instance)
        self._do(Verify(instance.run, computes=not instance.is_measured))
        for token in instance.waiters:
            self._do(LoadDone(token, instance.run))
        instance.waiters.clear()
        instance.evicted.clear()  # what went for it will not be missed

    def _on_verified(self, event: Verified) -> None:
        instance = self.by_run(event.run)
        if instance is None or instance.state not in SERVING:
            return
        self.ledger.confirm(instance.run, event.peak, self.clock())
        key, first = instance.key, instance.plan.first_quote
        peak = event.peak.get(key.scope.card, 0) if key is not None else 0
        if key is None or not peak:
            self._tell_much_more(instance, event.peak)
            return
        load_peak = instance.load_peak.get(key.scope.card, 0)
        # Whoever keeps it gives it the time of day.
        seen = Measurement(key, max(peak, load_peak), load_peak, event.prompt_tokens, 0.0)
        apart = deviation(first, seen)
        if apart is not None:
            self._do(
                TellDeviation(
                    instance.name,
                    instance.run,
                    key.scope.card,
                    apart.quoted_bytes,
                    apart.measured_bytes,
                    f"{instance.name} {apart.text}",
                )
            )
        self._do(Learn(instance.name, seen, comparable_bytes(first, key.scope.backend)))

    def _tell_much_more(self, instance: Instance, measured: Mapping[str, int]) -> None:
        """Of a launch whose measurements cannot be remembered: where it takes much more than was promised."""
        for each in self.ledger.of(instance.run):
            seen, expected = measured.get(each.where, 0), each.reserved_bytes
            if seen > expected + deviation_limit_bytes(expected):
                text = f"{instance.name} took {mib_text(seen)} MiB instead of {mib_text(expected)}"
                self._do(TellDeviation(instance.name, instance.run, each.where, expected, seen, text))

    def _is_ready(self, instance: Instance) -> None:
        instance.ready_since_s = self.clock()
        # What a sleep interrupted was not used by being loaded again.
        instance.last_used_s = instance.ready_since_s - instance.idle_before_s
        self._ask_for_tier(instance)
        self._has_changed = True  # a model that serves may be evicted, one that loads may not

    def _on_load_stalled(self, event: LoadStalled) -> None:
        instance = self.by_run(event.run)
        if instance is None or instance.state is not S.LOADING:
            return
        instance.failure = event.error
        self._stop(instance, "no progress", event.error)

    def _ask_for_tier(self, instance: Instance) -> None:
        """Also of an adopted model: the daemon may have been killed before it had looked."""
        if instance.plan.tier is not None:
            self._do(CheckTier(instance.run))

    def _on_tier_checked(self, event: TierChecked) -> None:
        instance = self.by_run(event.run)
        if instance is not None:
            instance.tier_in_force = event.in_force
            self._do(TellTier(instance.name, instance.run, event.in_force, event.reason))

    def _on_adopted(self, event: UnitAdopted) -> None:
        record, status = event.record, event.status
        known = self._instances.get(record.name)
        is_here = known is not None and (known.state not in ENDED or is_dead(status))
        if is_here or self.ledger.of(record.run):
            return
        if known is not None:  # only the memory of a failure, and here is one that runs
            self._forget_unit(known)
            for successor in known.successors:
                self._do(Resubmit(successor))
        instance = Instance(
            record=record,
            plan=record.plan(),
            state=S.STARTING,
            adopted=True,
            invocation_id=status.invocation_id or None,
            main_pid=status.main_pid or None,
            control_group=status.control_group or None,
            found_unit=status.name,
            reconstructed=event.reconstructed,
            # What failed and was to be started again is wanted, whoever has done so.
            is_known=event.is_known or (known is not None and bool(known.next_attempt)),
            file_note=event.file_note,
        )
        self._instances[record.name] = instance
        instance.pinned = event.pinned
        self.ledger.hold(record.run, record.name, event.shares, self.clock())
        if is_dead(status):
            self._unit_ended(instance, status)
        elif status.active_state == "deactivating":
            self._move(instance, S.STOPPING, "found stopping")
            # Whoever asked for it may be gone: somebody has to notice an engine that does not end.
            self._do(StopUnit(instance.run, instance.unit))
        elif status.is_active and event.drain is not None:
            instance.drain, instance.unwanted = event.drain, True
            self._move(instance, S.STOPPING, "found draining")
            self._do(DrainUnit(instance.run))
        elif status.is_active and event.healthy:
            self.ledger.confirm(record.run, event.measured, self.clock())
            self._move(instance, S.READY, "found running")
            self._is_ready(instance)
        elif status.is_active:
            self._move(instance, S.LOADING, "found loading")
            self._do(WatchLoading(instance.run))

    # --- the way down -------------------------------------------------------------------------------------------

    def _stop(
        self, instance: Instance, reason: str, waiters_are_told: LlmError | None, *, kill: bool = False
    ) -> None:
        if waiters_are_told is not None:
            self._interrupt(instance, waiters_are_told)
        self._move(instance, S.STOPPING, reason)
        self._do(StopUnit(instance.run, instance.unit, kill))

    def _interrupt(self, instance: Instance, error: LlmError) -> None:
        for token in instance.waiters:
            self._do(Failed(token, error))
        instance.waiters.clear()

    def _on_stop_finished(self, event: StopFinished) -> None:
        instance = self.by_run(event.run)
        if instance is None or instance.state not in {S.STOPPING, S.STUCK}:
            return
        if event.error is None:
            self._end(instance, None, None)
            return
        if instance.state is not S.STUCK:
            self._move(instance, S.STUCK, "did not stop")
        for token in (*instance.unloaders, *(successor.token for successor in instance.successors)):
            self._do(Failed(token, event.error))
        instance.unloaders.clear()
        instance.successors.clear()
        self._has_changed = True  # whoever waits for its memory must know
        for each in tuple(self._releases):
            if instance.run in each.runs:
                self._releases.remove(each)
                self._do(Failed(each.token, event.error))

    def _on_unit_vanished(self, event: UnitVanished) -> None:
        instance = self.by_unit(event.unit)
        if instance is not None and instance.state not in ENDED | {S.RELEASING}:
            self._unit_ended(instance, event.last)

    def _unit_ended(self, instance: Instance, status: UnitStatus | None) -> None:
        """The unit is dead: by request, by somebody else's, or by itself."""
        if instance.state is S.RELEASING:
            return
        asked_for = instance.state in {S.STOPPING, S.STUCK}
        # A serving engine that ends with success was told to by somebody (systemctl stop); one that loads was not.
        ended_well = status is None or status.result == "success"
        if asked_for or (ended_well and instance.state in SERVING):
            instance.unwanted = instance.unwanted or not asked_for
            self._end(instance, status, None)
        else:
            self._end(instance, status, None, post_mortem=True)

    def _end(
        self,
        instance: Instance,
        status: UnitStatus | None,
        error: LlmError | None,
        *,
        post_mortem: bool = False,
    ) -> None:
        """Nothing of the unit runs any more: give its memory back and find out why it ended."""
        instance.failure = error or instance.failure
        if instance.drain is not None:  # it has ended before its requests
            instance.unfinished = instance.drain.in_flight
            instance.drain = None
        self._move(instance, S.RELEASING, "unit ended")
        self.ledger.releasing(instance.run, self.clock())
        instance.memory_pending = True
        self._do(WaitForMemory(instance.run))
        if post_mortem:
            instance.post_mortem_pending = instance.ended_by_itself = True
            self._do(ReadPostMortem(instance.run, instance.unit, status))

    def _on_post_mortem(self, event: PostMortemRead) -> None:
        instance = self.by_run(event.run)
        if instance is None or not instance.post_mortem_pending:
            return
        instance.post_mortem_pending = False
        instance.failure = event.error
        if instance.key is not None and event.error.details.get("cause") == OUT_OF_DEVICE_MEMORY:
            quoted = comparable_bytes(instance.plan.first_quote, instance.key.scope.backend)
            self._do(LearnOutOfMemory(instance.name, instance.key, quoted, instance.foreign_bytes))
        self._settle(instance)

    def _on_memory_released(self, event: MemoryReleased) -> None:
        held = self.ledger.of(event.run)
        if not held:
            return
        instance = self.by_run(event.run)
        self.ledger.settle(event.run, event.missing, self.clock())
        self._has_changed = True
        if instance is not None and instance.memory_pending:
            instance.memory_pending = False
            # Beside a card, host memory is a limit that was hardly ever taken.
            counted = [each for each in held if each.where != HOST] or held
            instance.released_bytes = sum(
                max(0, each.charged_bytes - event.missing.get(each.where, 0)) for each in counted
            )
            self._settle(instance)

    def _settle(self, instance: Instance) -> None:
        """The end of an instance, once its memory is back and the reason of its end is known."""
        if instance.memory_pending or instance.post_mortem_pending:
            return
        if instance.failure is not None:
            self._move(instance, S.FAILED, instance.failure.message)
            self._interrupt(instance, instance.failure)
        else:
            self._move(instance, S.GONE, "nothing is left")
            self._interrupt(instance, refusals.stopped_by_somebody(instance.name))
            del self._instances[instance.name]
        instance.unit_kept = True
        self._after_the_end(instance)
        if instance.retry_at_s is None:
            self._forget_unit(instance)
        for token in instance.unloaders:
            done = UnloadDone(token, instance.name, instance.run, instance.released_bytes)
            self._do(replace(done, unfinished=instance.unfinished))
        if instance.unloaders:
            self._instances.pop(instance.name, None)
        instance.unloaders.clear()
        successors, instance.successors = instance.successors, []
        for successor in successors:
            self._do(Resubmit(successor))
        self._released(instance)

    def _forget_unit(self, instance: Instance) -> None:
        """Nothing is to come of it any more: nobody who reads systemd's list is to find it."""
        if instance.unit_kept:
            instance.unit_kept = False
            self._do(ForgetUnit(instance.run, instance.unit, instance.record.socket))
            if instance.pinned:
                self._do(KeepPin(instance.run, pinned=False))

    def _after_the_end(self, instance: Instance) -> None:
        """For those who build on this: an instance has just ended."""

    def _released(self, instance: Instance) -> None:
        """Answer those who wanted the whole card, once everything that they waited for has ended."""
        for each in tuple(self._releases):
            if instance.run in each.runs:
                each.runs.discard(instance.run)
                each.released_bytes += instance.released_bytes
            if not each.runs:
                self._releases.remove(each)
                self._do(ReleaseDone(each.token, each.names, each.released_bytes))

    def _cancel_successors(self, instance: Instance, error: LlmError | None = None) -> None:
        for successor in instance.successors:
            told = error or refusals.unloaded_while_loading(instance.name)
            self._do(Failed(successor.token, told))
        instance.successors.clear()

    # --- the choke points ---------------------------------------------------------------------------------------

    def _move(self, instance: Instance, state: InstanceState, reason: str) -> None:
        if state not in TRANSITIONS[instance.state]:
            raise ValueError(f"{instance.name}: {instance.state} cannot become {state}")
        previous, instance.state = instance.state, state
        failure = instance.failure if state is S.FAILED else None
        self._do(Announce(instance.name, instance.run, previous, state, reason, failure))

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)
