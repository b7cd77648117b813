"""From what the daemon knows to what it says: domain objects as wire models. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lllm3090d.checkpoints.badges import Badge
from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card, MemoryReading
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.costs import ContextCost, context_cost, state_bytes_per_slot
from lllm3090d.planning.reserves import Budget
from lllm3090d.serving.ledger import Ledger
from lllm3090d.serving.running import Instance
from lllm3090d.wire import CardView, InstanceView, ModelView


def path_text(path: Path) -> str:
    """A path as JSON can carry it: bytes that are no UTF-8 become escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def instance_view(instance: Instance, ledger: Ledger, since: str) -> InstanceView:
    """An instance as clients see it."""
    reservation = ledger.get(instance.run)
    return InstanceView(
        name=instance.name,
        run=instance.run,
        state=instance.state,
        since=since,
        unit=instance.unit,
        invocation_id=instance.invocation_id,
        main_pid=instance.main_pid,
        endpoint=str(instance.record.socket),
        path=path_text(instance.record.path),
        context_tokens=instance.plan.context_tokens,
        parallel=instance.plan.parallel,
        window_tokens=instance.plan.window_tokens,
        cache_type_k=instance.plan.cache_type_k,
        cache_type_v=instance.plan.cache_type_v,
        reserved_bytes=reservation.reserved_bytes if reservation else 0,
        measured_bytes=reservation.measured_bytes if reservation else None,
        engine_version=instance.record.engine_version,
        adopted=instance.adopted,
        tier_in_force=instance.tier_in_force,
        failure=instance.failure.problem() if instance.failure else None,
    )


def model_view(
    checkpoint: Checkpoint,
    aliases: Mapping[str, str],
    facts: CheckpointFacts | None,
    problem: LlmError | None,
    instance: Instance | None,
    *,
    badges: tuple[Badge, ...] = (),
    cache_type: CacheType = CacheType.Q8_0,
) -> ModelView:
    """A checkpoint as clients see it; ``cache_type`` is what the price of a token is told for."""
    cost = None
    if facts is not None and facts.keeps_context:
        # Where the engine refuses that type for this model, a plan has f16 instead, and so has its price here.
        cost = _cost(facts, cache_type)
        if cost is None:
            cache_type = CacheType.F16
            cost = _cost(facts, cache_type)
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
        problem=problem.problem() if problem else None,
        kind=checkpoint.kind,
        badges=badges,
        cache_type=cache_type if cost else None,
        kv_bytes_per_token=cost.bytes_per_token if cost else None,
        window_bytes_per_token=cost.window_bytes_per_token if cost else None,
        sliding_window_tokens=facts.sliding_window_tokens if facts else None,
        state_bytes_per_slot=state_bytes_per_slot(facts) if facts else None,
        projector=path_text(checkpoint.projector.path) if checkpoint.projector else None,
        drafter=path_text(checkpoint.drafter.path) if checkpoint.drafter else None,
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
