"""The planner: the largest useful context that fits, and its quote."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lllm3090d.planning.quote import Quote


class CacheType(enum.StrEnum):
    """Types of the KV cache, as the engine names them."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"


class CappedBy(enum.StrEnum):
    """Why the window is not larger."""

    MODEL = "model"  # the trained context
    MEMORY = "memory"  # what the card can give
    REQUEST = "request"  # somebody asked for this size


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a person asked for; None leaves the choice to the planner.

    Attributes:
        context_tokens: total context of all slots (``-c``).
        parallel: slots.
        cache_type_k, cache_type_v: type of the cache.
    """

    context_tokens: int | None = None
    parallel: int | None = None
    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How to launch a checkpoint, and what it costs.

    Attributes:
        context_tokens: total context, a multiple of parallel (``-c``).
        parallel: slots (``--parallel``).
        window_tokens: what one slot can hold.
        cache_type_k, cache_type_v: type of the cache.
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        on_card: all layers on a real card (``-ngl`` all); False for backend cpu.
        context_checkpoints: ``--ctx-checkpoints``.
        prompt_cache_mib: ``--cache-ram``.
        capped_by: why the window is not larger.
        quote: the price.
    """

    context_tokens: int
    parallel: int
    window_tokens: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    batch_tokens: int
    micro_batch_tokens: int
    on_card: bool
    context_checkpoints: int
    prompt_cache_mib: int
    capped_by: CappedBy
    quote: Quote
