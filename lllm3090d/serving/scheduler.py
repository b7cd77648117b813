"""The scheduler: events in, effects out. It decides; it touches nothing but its own state.

Only the one writer calls it, so between reading its state and changing it nothing can happen. Every entry point
admits through :meth:`Scheduler._admit`; every change of an instance's state goes through :meth:`Scheduler._move`.
"""

from __future__ import annotations

from pathlib import Path

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.engines.arguments import features
from lllm3090d.engines.arguments import launch as engine_launch
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.planner import Plan, Planner, Room
from lllm3090d.planning.reserves import Budget, Claims, budget
from lllm3090d.serving import refusals
from lllm3090d.serving.events import (
    Admitted,
    Announce,
    CancelDone,
    CancelRequested,
    CheckTier,
    Effect,
    EngineReady,
    Event,
    Failed,
    ForgetUnit,
    Joined,
    LoadDone,
    LoadRequested,
    LoadStalled,
    MemoryReleased,
    Observation,
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
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.extras import asked_of, extra_of, lacking, wish_of
from lllm3090d.serving.instance import (
    ENDED,
    ON_THE_WAY_DOWN,
    ON_THE_WAY_UP,
    SERVING,
    TRANSITIONS,
    InstanceState,
)
from lllm3090d.serving.ledger import Ledger
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.running import Instance
from lllm3090d.serving.unit_spec import Record, memory_max_bytes, socket_path, unit_spec

S = InstanceState


class Scheduler:
    """State of everything that runs, and the decisions on it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.ledger = Ledger()
        self._instances: dict[str, Instance] = {}  # by model name
        self._effects: list[Effect] = []

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

    def budget(self, observation: Observation) -> Budget:
        """What the card can give now, line by line."""
        claims = Claims(
            charged_bytes=self.ledger.charged_bytes(),
            still_to_come_bytes=self.ledger.still_to_come_bytes(observation.resident),
            held_bytes=sum(observation.in_use.values()),
            quarantined_bytes=self.ledger.quarantined_bytes(),
        )
        return budget(
            observation.card, observation.reading, claims, observation.desktop_active, self.policy.reserves
        )

    # --- deciding -----------------------------------------------------------------------------------------------

    def handle(  # noqa: PLR0912  # one branch for each kind of event
        self, event: Event, observation: Observation | None = None
    ) -> list[Effect]:
        """Take one event, change the state, return what is to be done, in order.

        Args:
            event: what happened.
            observation: the card at this moment; needed for a LoadRequested only.
        """
        self._effects = []
        match event:
            case LoadRequested():
                if observation is None:
                    raise ValueError("a load is decided on a reading")
                self._on_load(event, observation)
            case UnloadRequested():
                self._on_unload(event)
            case CancelRequested():
                self._on_cancel(event)
            case StartFinished():
                self._on_start_finished(event)
            case UnitSeen():
                self._on_unit_seen(event.status)
            case UnitVanished():
                self._on_unit_vanished(event)
            case EngineReady():
                self._on_engine_ready(event)
            case LoadStalled():
                self._on_load_stalled(event)
            case TierChecked():
                self._on_tier_checked(event)
            case StopFinished():
                self._on_stop_finished(event)
            case PostMortemRead():
                self._on_post_mortem(event)
            case MemoryReleased():
                self._on_memory_released(event)
            case UnitAdopted():
                self._on_adopted(event)
        return self._effects

    def _on_load(self, event: LoadRequested, observation: Observation) -> None:
        """Decide a load.

        1. The model serves or is on its way up: answer, or join, if it has what was asked for; else refuse.
        2. It is on its way down: wait until it is gone, then decide again; one that does not stop is not waited for.
        3. Otherwise admit it against the reading, or refuse with the arithmetic.
        """
        current = self._instances.get(event.checkpoint.name)
        if current is not None and current.state in SERVING | ON_THE_WAY_UP:
            try:
                missing = lacking(current.plan, current.record.arguments, event, asked=current.record.asked)
            except LlmError as error:
                self._do(Failed(event.token, error))
                return
            if missing is not None:
                self._do(Failed(event.token, refusals.loaded_differently(current.name, missing)))
            elif current.state in SERVING:
                self._do(LoadDone(event.token, current.run))
            else:
                current.waiters.append(event.token)
                self._do(Joined(event.token, current.run))
            return
        if current is not None and current.state is S.STUCK:
            # Its end may never come, so nobody waits for it.
            self._do(Failed(event.token, refusals.stuck(current.name, current.unit)))
            return
        if current is not None and current.state in ON_THE_WAY_DOWN:
            current.successors.append(event)
            self._do(Queued(event.token, current.name))
            return
        self._admit(event, observation)

    def _admit(self, event: LoadRequested, observation: Observation) -> None:
        try:
            available = self.budget(observation)
            extra = extra_of(event, self.policy.extra_arguments)
            chosen = self._plan(event, observation, available)
            socket = socket_path(self.policy.engine_sockets_dir, event.checkpoint.name, event.run)
            launch = engine_launch(
                event.build,
                event.capabilities,
                event.checkpoint.path,
                chosen,
                socket,
                event.checkpoint.name,
                projector_path=event.checkpoint.projector.path if event.checkpoint.projector else None,
                drafter_path=_drafter_path(event, chosen),
                extra=extra,
                inherited=self.policy.inherited_environment,
            )
        except LlmError as error:
            self._do(Failed(event.token, error))
            return
        record = Record.of(
            run=event.run,
            checkpoint=event.checkpoint,
            plan=chosen,
            socket=socket,
            engine_version=event.capabilities.version,
            engine_server=event.build.server,
            arguments=extra.shown,
            asked=wish_of(event),
        )
        spec = unit_spec(
            record=record,
            launch=launch,
            memory_max=memory_max_bytes(chosen, observation.card.kind),
            stop_timeout_s=self.policy.stop_timeout_s,
            inherited=self.policy.inherited_environment,
        )
        self.ledger.hold(event.run, event.checkpoint.name, chosen.quote)
        # A failed predecessor is only a memory of why it failed; it makes room for its successor here.
        self._instances.pop(event.checkpoint.name, None)
        instance = Instance(record=record, plan=chosen, state=S.PLANNED, waiters=[event.token])
        self._instances[instance.name] = instance
        self._do(Admitted(event.token, event.run, event.facts, available, launch.argv))
        self._move(instance, S.RESERVED, "admitted")
        self._move(instance, S.STARTING, "unit requested")
        self._do(StartUnit(event.run, spec))

    def planner(self, event: LoadRequested, observation: Observation, available: Budget) -> Planner:
        """The question that a load puts to the planner. Raises LlmError INVALID_REQUEST for its arguments."""
        extra = extra_of(event, self.policy.extra_arguments)
        return Planner(
            facts=event.facts,
            request=asked_of(event, extra),
            policy=extra.policy(self.policy.plan),
            features=features(event.capabilities, observation.card, observation.host),
            card_kind=observation.card.kind,
            room=Room(available.grantable_bytes, observation.host_room_bytes),
            projector=event.projector,
            drafter=event.drafter,
        )

    def _plan(self, event: LoadRequested, observation: Observation, available: Budget) -> Plan:
        try:
            return self.planner(event, observation, available).plan()
        except LlmError as error:
            if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
                raise
            raise refusals.with_budget(error, available, observation.card.kind, self.ledger) from error

    def _on_unload(self, event: UnloadRequested) -> None:
        instance = self._instances.get(event.name)
        if instance is None:
            self._do(Failed(event.token, refusals.not_loaded(event.name, self._instances)))
            return
        self._cancel_successors(instance)
        if instance.state in ENDED:
            # Only the memory of a failure is left: forgetting it is all there is to do.
            del self._instances[event.name]
            self._do(UnloadDone(event.token, event.name, instance.run, 0))
            return
        instance.unloaders.append(event.token)
        if instance.state not in ON_THE_WAY_DOWN:
            self._stop(instance, "unload requested", refusals.unloaded_while_loading(instance.name))
        elif instance.state is S.STUCK:
            self._do(StopUnit(instance.run, instance.unit))  # nobody else would ask systemd again

    def _on_cancel(self, event: CancelRequested) -> None:
        for instance in self._instances.values():
            waiting = [s for s in instance.successors if s.token == event.load_token]
            if waiting:
                instance.successors.remove(waiting[0])
                self._do(Failed(event.load_token, refusals.cancelled(instance.name)))
                self._do(CancelDone(event.token, event.load_token, stopped=True))
                return
            if event.load_token in instance.waiters:
                instance.waiters.remove(event.load_token)
                self._do(Failed(event.load_token, refusals.cancelled(instance.name)))
                alone = not instance.waiters and instance.state in ON_THE_WAY_UP
                if alone:
                    self._stop(instance, "load cancelled", None)
                self._do(CancelDone(event.token, event.load_token, stopped=alone))
                return
        self._do(Failed(event.token, refusals.no_such_load(event.load_token)))

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
            self._move(instance, S.STOPPING, "systemd stops the unit")
        elif status.active_state == "active" and instance.state is S.STARTING:
            self._move(instance, S.LOADING, "engine executed")
            self._do(WatchLoading(instance.run))
        elif renewed and instance.state in {S.STOPPING, S.STUCK}:
            # Somebody restarted it (systemctl restart). What is on its way down never serves again: without another
            # stop it would run on, and be waited for, for ever.
            self._do(StopUnit(instance.run, instance.unit))

    def _on_engine_ready(self, event: EngineReady) -> None:
        instance = self.by_run(event.run)
        if instance is None or instance.state is not S.LOADING:
            return
        self.ledger.confirm(instance.run, event.measured_bytes)
        self._move(instance, S.READY, "engine answers")
        self._ask_for_tier(instance)
        for token in instance.waiters:
            self._do(LoadDone(token, instance.run))
        instance.waiters.clear()

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
        record = event.record
        if record.name in self._instances:
            return
        status = event.status
        instance = Instance(
            record=record,
            plan=record.plan(),
            state=S.STARTING,
            adopted=True,
            invocation_id=status.invocation_id or None,
            main_pid=status.main_pid or None,
            control_group=status.control_group or None,
        )
        self._instances[record.name] = instance
        self.ledger.hold(record.run, record.name, instance.plan.quote)
        if status.is_failed or status.is_gone:
            self._unit_ended(instance, status)
        elif status.active_state == "deactivating":
            self._move(instance, S.STOPPING, "found stopping")
        elif status.active_state == "active" and event.healthy:
            self.ledger.confirm(record.run, event.measured_bytes)
            self._move(instance, S.READY, "found running")
            self._ask_for_tier(instance)
        elif status.active_state == "active":
            self._move(instance, S.LOADING, "found loading")
            self._do(WatchLoading(instance.run))

    # --- the way down -------------------------------------------------------------------------------------------

    def _stop(self, instance: Instance, reason: str, waiters_are_told: LlmError | None) -> None:
        if waiters_are_told is not None:
            self._interrupt(instance, waiters_are_told)
        self._move(instance, S.STOPPING, reason)
        self._do(StopUnit(instance.run, instance.unit))

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
        self._move(instance, S.RELEASING, "unit ended")
        self.ledger.releasing(instance.run)
        instance.memory_pending = True
        self._do(WaitForMemory(instance.run))
        if post_mortem:
            instance.post_mortem_pending = True
            self._do(ReadPostMortem(instance.run, instance.unit, status))

    def _on_post_mortem(self, event: PostMortemRead) -> None:
        instance = self.by_run(event.run)
        if instance is None or not instance.post_mortem_pending:
            return
        instance.post_mortem_pending = False
        instance.failure = event.error
        self._settle(instance)

    def _on_memory_released(self, event: MemoryReleased) -> None:
        reservation = self.ledger.get(event.run)
        if reservation is None:
            return
        instance = self.by_run(event.run)
        if event.missing_bytes > 0:
            self.ledger.quarantine(event.run, event.missing_bytes)
        else:
            self.ledger.release(event.run)
        if instance is not None and instance.memory_pending:
            instance.memory_pending = False
            instance.released_bytes = reservation.charged_bytes - event.missing_bytes
            self._settle(instance)

    def _settle(self, instance: Instance) -> None:
        """The end of an instance, once its memory is back and the reason of its end is known."""
        if instance.memory_pending or instance.post_mortem_pending:
            return
        self._do(ForgetUnit(instance.run, instance.unit, instance.record.socket))
        if instance.failure is not None:
            self._move(instance, S.FAILED, instance.failure.message)
            self._interrupt(instance, instance.failure)
        else:
            self._move(instance, S.GONE, "nothing is left")
            self._interrupt(instance, refusals.stopped_by_somebody(instance.name))
            del self._instances[instance.name]
        for token in instance.unloaders:
            self._do(UnloadDone(token, instance.name, instance.run, instance.released_bytes))
        if instance.unloaders:
            self._instances.pop(instance.name, None)
        instance.unloaders.clear()
        successors, instance.successors = instance.successors, []
        for successor in successors:
            self._do(Resubmit(successor))

    def _cancel_successors(self, instance: Instance) -> None:
        for successor in instance.successors:
            self._do(Failed(successor.token, refusals.unloaded_while_loading(instance.name)))
        instance.successors.clear()

    # --- the choke points ---------------------------------------------------------------------------------------

    def _move(self, instance: Instance, state: InstanceState, reason: str) -> None:
        if state not in TRANSITIONS[instance.state]:
            raise ValueError(f"{instance.name}: {instance.state} cannot become {state}")
        previous, instance.state = instance.state, state
        self._do(Announce(instance.name, instance.run, previous, state, reason))

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)


def _drafter_path(event: LoadRequested, chosen: Plan) -> Path | None:
    drafter = event.checkpoint.drafter
    return drafter.path if drafter is not None and chosen.launch.drafter is not None else None
