"""From what the daemon knows to what it says: domain objects as wire models. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lllm3090d.checkpoints.badges import Badge
from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card, MemoryReading
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.costs import ContextCost, context_cost, state_bytes_per_slot
from lllm3090d.planning.reserves import Budget
from lllm3090d.serving.drains import Drain
from lllm3090d.serving.hangs import RESTART_AT
from lllm3090d.serving.instance import ENDED, SERVING, InstanceState
from lllm3090d.serving.ledger import Ledger, Reservation
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.running import Instance
from lllm3090d.serving.waiting import Waiting
from lllm3090d.wire import CardView, DrainView, InstanceView, ModelView, PendingView, StallView
from lllm3090d.wire_cards import ReservationView


def path_text(path: Path) -> str:
    """A path as JSON can carry it: bytes that are no UTF-8 become escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def instance_view(
    instance: Instance,
    ledger: Ledger,
    since: str,
    now_s: float,
    *,
    at_risk: str | None = None,
    restarts_hung: bool = False,
) -> InstanceView:
    """An instance as clients see it.

    Args:
        instance: the instance.
        ledger: what it was promised.
        since: time of its last change of state.
        now_s: on the scheduler's clock.
        at_risk: why a card that it is on cannot be trusted; None where all can.
        restarts_hung: one that is stalled for long is restarted.
    """
    shares = ledger.of(instance.run)
    # Beside a card, what is kept in host memory is told by itself.
    main = [each for each in shares if each.where != HOST] or list(shares)
    measured = [each.measured_bytes for each in main if each.measured_bytes is not None]
    has_process = instance.state not in ENDED | {InstanceState.RELEASING}
    return InstanceView(
        name=instance.name,
        run=instance.run,
        state=instance.state,
        since=since,
        unit=instance.unit,
        invocation_id=instance.invocation_id,
        main_pid=instance.main_pid if has_process else None,
        endpoint=str(instance.record.socket),
        path=path_text(instance.record.path),
        context_tokens=instance.plan.context_tokens,
        parallel=instance.plan.parallel,
        purpose=instance.plan.launch.purpose,
        window_tokens=instance.plan.window_tokens,
        cache_type_k=instance.plan.cache_type_k,
        cache_type_v=instance.plan.cache_type_v,
        reserved_bytes=sum(each.reserved_bytes for each in main),
        measured_bytes=sum(measured) if measured else None,
        reservations=tuple(_reservation_view(each, instance, now_s) for each in shares),
        pinned=instance.pinned,
        leases=len(instance.leases),
        busy=instance.busy if has_process else None,
        idle_s=_idle_s(instance, now_s),
        drain=_drain_view(instance.drain, now_s),
        stall=_stall_view(instance, restarts_hung),
        engine_version=instance.record.engine_version,
        adopted=instance.adopted,
        reconstructed=instance.reconstructed or None,
        file_note=instance.file_note or None,
        tier_in_force=instance.tier_in_force,
        failure=instance.failure.problem() if instance.failure else None,
        attempt=(instance.state is InstanceState.FAILED and instance.next_attempt) or instance.attempt,
        retry_in_s=None if instance.retry_at_s is None else round(max(0.0, instance.retry_at_s - now_s), 3),
        latch_reason=instance.latch_reason or None,
        way_out=instance.way_out or None,
        at_risk=at_risk,
    )


def _drain_view(drain: Drain | None, now_s: float) -> DrainView | None:
    if drain is None:
        return None
    left_s = max(0.0, drain.deadline_s - now_s)
    return DrainView(in_flight=drain.in_flight, limit_s=drain.limit_s, remaining_s=round(left_s, 3))


def _stall_view(instance: Instance, restarts_hung: bool) -> StallView | None:
    stall = instance.stall
    if stall is None or instance.state is not InstanceState.STALLED:
        return None
    left_s = max(0.0, RESTART_AT * stall.patience_s - stall.idle_s)
    return StallView(
        reason=stall.reason,
        stalled_s=round(stall.idle_s, 3),
        patience_s=round(stall.patience_s, 3),
        restart_in_s=round(left_s, 3) if restarts_hung else None,
    )


def pending_view(waiting: Waiting, now_s: float) -> PendingView:
    """A load that waits for room as clients see it."""
    return PendingView(
        name=waiting.name,
        token=waiting.token,
        why=waiting.why,
        waiting_s=round(max(0.0, now_s - waiting.since_s), 3),
        remaining_s=round(max(0.0, waiting.deadline_s - now_s), 3),
    )


def _reservation_view(share: Reservation, instance: Instance, now_s: float) -> ReservationView:
    return ReservationView(
        model=share.name,
        run=share.run,
        where=share.where,
        state=share.state,
        instance_state=instance.state,
        age_s=round(max(0.0, now_s - share.since_s), 3),
        reserved_bytes=share.reserved_bytes,
        measured_bytes=share.measured_bytes,
        charged_bytes=share.charged_bytes,
    )


def _idle_s(instance: Instance, now_s: float) -> float | None:
    """Since it was last seen in use; of one that never was, since it was ready."""
    since_s = instance.ready_since_s if instance.last_used_s is None else instance.last_used_s
    if instance.state not in SERVING or instance.busy or instance.leases or since_s is None:
        return None
    return round(max(0.0, now_s - since_s), 3)


def model_view(
    checkpoint: Checkpoint,
    aliases: Mapping[str, str],
    facts: CheckpointFacts | UnruledModel | None,
    problem: LlmError | None,
    instance: Instance | None,
    *,
    badges: tuple[Badge, ...] = (),
    cache_type: CacheType = CacheType.Q8_0,
) -> ModelView:
    """A checkpoint as clients see it; ``cache_type`` is what the price of a token is told for."""
    cost, ruled = None, facts if isinstance(facts, CheckpointFacts) else None
    if ruled is not None and ruled.keeps_context:
        # Where the engine refuses that type for this model, a plan has f16 instead, and so has its price here.
        cost = _cost(ruled, cache_type)
        if cost is None:
            cache_type = CacheType.F16
            cost = _cost(ruled, cache_type)
    return ModelView(
        name=checkpoint.name,
        aliases=tuple(sorted(alias for alias, name in aliases.items() if name == checkpoint.name)),
        path=path_text(checkpoint.path),
        size_bytes=checkpoint.size_bytes,
        shards=len(checkpoint.shards),
        architecture=facts.architecture if facts else None,
        quantisation=facts.quantisation if facts else None,
        trained_context_tokens=facts.trained_context_tokens if facts else None,
        state=instance.state if instance else None,
        purpose=instance.plan.launch.purpose if instance else None,
        problem=problem.problem() if problem else None,
        kind=checkpoint.kind,
        badges=badges,
        cache_type=cache_type if cost else None,
        kv_bytes_per_token=cost.bytes_per_token if cost else None,
        window_bytes_per_token=cost.window_bytes_per_token if cost else None,
        sliding_window_tokens=ruled.sliding_window_tokens if ruled else None,
        state_bytes_per_slot=state_bytes_per_slot(ruled) if ruled else None,
        projector=path_text(checkpoint.projector.path) if checkpoint.projector else None,
        drafter=path_text(checkpoint.drafter.path) if checkpoint.drafter else None,
        modified_s=max(0, checkpoint.modified_ns // 1_000_000_000) or None,
    )


def _cost(facts: CheckpointFacts, cache_type: CacheType) -> ContextCost | None:
    """None where the engine refuses this type of cache for this model."""
    try:
        return context_cost(facts, cache_type)
    except LlmError:
        return None


def card_view(
    card: Card,
    reading: MemoryReading | None,
    budget: Budget | None,
    charged_bytes: int,
    problem: LlmError | None,
) -> CardView:
    """The card as clients see it."""
    return CardView(
        kind=card.kind,
        name=card.name,
        uuid=card.uuid,
        driver_version=card.driver_version,
        total_bytes=reading.total_bytes if reading else None,
        used_bytes=reading.used_bytes if reading else None,
        free_bytes=reading.free_bytes if reading else None,
        reserved_by_driver_bytes=reading.reserved_bytes if reading else None,
        reserved_by_us_bytes=charged_bytes,
        available_bytes=budget.grantable_bytes if budget else None,
        problem=problem.problem() if problem else None,
    )
