"""Shorthand for plans, prices and refusals in tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lllm3090d.checkpoints.facts import CheckpointFacts, WeightBytes
from lllm3090d.checkpoints.projector import ProjectorFacts, ProjectorWeights, VisionFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import Plan, Planner
from lllm3090d.planning.quote import Launch, Place, PlanPolicy, Quote
from lllm3090d.planning.request import (
    Drafting,
    Features,
    Offload,
    PlanRequest,
    ProjectorPlace,
    Room,
)
from lllm3090d.planning.search import Variant
from lllm3090d.planning.units import MIB
from tests.unit.engine_truth import POLICY, facts_of

SMOLLM2 = "smollm2-135m"
LLAMA_8B = "llama-3.1-8b"
QWEN3_8B = "qwen3-8b"
GEMMA_27B = "gemma-3-27b"
MIXTURE = "qwen3-30b-a3b"
DRAFTING = "qwen3.5-27b-mtp"
DRAFTING_MIXTURE = "qwen3.5-35b-a3b-mtp"
PLENTY = 1 << 50
BACKENDS = [Backend.CPU, Backend.CUDA, Backend.VULKAN]
CARDS = [Backend.CUDA, Backend.VULKAN]


def kind_of(backend: Backend) -> CardKind:
    """The card that a backend computes on."""
    return CardKind.CPU if backend is Backend.CPU else CardKind.NVIDIA


def planner_of(
    model: str | CheckpointFacts,
    request: PlanRequest | None = None,
    *,
    room: int | Room = PLENTY,
    backend: Backend = Backend.VULKAN,
    policy: PlanPolicy = POLICY,
    projector: ProjectorFacts | None = None,
    features: Features | None = None,
    keeps_host_caches: bool = False,
) -> Planner:
    """A question; ``room`` is of the card where it is a number."""
    return Planner(
        facts_of(model) if isinstance(model, str) else model,
        request or PlanRequest(),
        policy,
        features or Features(backend),
        kind_of(backend),
        room if isinstance(room, Room) else Room(room),
        projector,
        keeps_host_caches=keeps_host_caches,
    )


def plan_of(model: str | CheckpointFacts, request: PlanRequest | None = None, **question: Any) -> Plan:
    """Its answer; see :func:`planner_of`."""
    return planner_of(model, request, **question).plan()


def refusal(model: str | CheckpointFacts, request: PlanRequest | None = None, **question: Any) -> LlmError:
    """Why there is none; a surface can say it."""
    with pytest.raises(LlmError) as caught:
        plan_of(model, request, **question)
    assert caught.value.hint
    json.dumps(caught.value.problem())
    return caught.value


def total_served(planner: Planner) -> int:
    """Tokens of all slots together; 0 where nothing fits."""
    made = served(planner)
    return 0 if made is None else made.window_tokens * made.parallel


def served(planner: Planner) -> Plan | None:
    """The plan; None where it does not fit."""
    try:
        return planner.plan()
    except LlmError as error:
        assert error.code is ErrorCode.INSUFFICIENT_MEMORY
        return None


def on_card(quote: Quote) -> int:
    """Bytes of the card."""
    return quote.total_bytes(Place.CARD)


def need_of(model: str | CheckpointFacts, request: PlanRequest, **question: Any) -> int:
    """Bytes of the card that a request takes."""
    return on_card(plan_of(model, request, **question).quote)


def launch_of(context: int, parallel: int = 1, cache_type: CacheType = CacheType.Q8_0) -> Launch:
    """A launch with the sizes of the tests' policy."""
    return Launch(context, parallel, cache_type, cache_type, 2048, 512, 8, 1024)


def variant_of(
    model: str | CheckpointFacts,
    *,
    room: int | Room = PLENTY,
    backend: Backend = Backend.CUDA,
    **template: Any,
) -> Variant:
    """What the planner searches."""
    facts = facts_of(model) if isinstance(model, str) else model
    return Variant(
        facts=facts,
        template=replace(launch_of(0), **template),
        policy=POLICY,
        backend=backend,
        room=room if isinstance(room, Room) else Room(room),
        limit_tokens=facts.trained_context_tokens,
    )


def projector_of(mib: int) -> ProjectorFacts:
    """A projector of so many MiB, with a graph of a few."""
    size = mib * MIB
    sees = VisionFacts(
        image_size=448, patch_size=14, embedding_length=1152, feed_forward_length=4304, head_count=16
    )
    weights = ProjectorWeights(vision=WeightBytes(size, size, size, size, size))
    return ProjectorFacts("gemma3", 4096, weights, sees, hears=False, file_bytes=size)


def odd_heads(model: str) -> CheckpointFacts:
    """The model with heads of 80 values, which no quantised cache of 32 values a block can hold."""
    facts = facts_of(model)
    layers = (
        replace(layer, key_length=80, value_length=80, k_values=240, v_values=240) for layer in facts.layers
    )
    return replace(facts, layers=tuple(layers))


def remedies(request: PlanRequest, details: Mapping[str, Any], *, by_hand: bool) -> Iterator[PlanRequest]:
    """What a refusal recommends, as requests; without what only a setting can do."""
    if "largest_context_tokens" not in details:
        # It fits on the card, and not beside it: nothing is recommended but to make room there.
        assert details["place"] == "host"
        assert not any(key.startswith("fits_") for key in details)
        return
    if details["largest_context_tokens"] is not None:
        yield replace(
            request, context_tokens=details["largest_context_tokens"], parallel=details["parallel"]
        )
    if details["largest_parallel"] is not None:
        tokens = details.get("context_tokens_with_largest_parallel", request.context_tokens)
        yield replace(request, context_tokens=tokens, parallel=details["largest_parallel"])
    q8_0 = replace(request, cache_type_k=CacheType.Q8_0, cache_type_v=CacheType.Q8_0)
    if details.get("fits_with_q8_0"):
        yield q8_0
    if details.get("largest_context_tokens_with_q8_0"):
        context = details["largest_context_tokens_with_q8_0"]
        yield replace(q8_0, context_tokens=context, parallel=details["parallel"])
    if details.get("fits_without_drafting"):
        yield replace(request, drafting=Drafting.OFF)
    if details.get("fits_with_projector_on_host"):
        yield replace(request, projector=ProjectorPlace.HOST)
    if details.get("fits_with_offload"):
        assert not by_hand
        yield replace(request, offload=Offload.ALLOWED)
