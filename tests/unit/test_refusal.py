"""Refusals for want of memory: the arithmetic, and changes with which it really would fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, ProjectorPlace, Room
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from tests.unit.engine_truth import POLICY, facts_of, priced_models
from tests.unit.plans import (
    BACKENDS,
    DRAFTING,
    GEMMA_27B,
    LLAMA_8B,
    QWEN3_8B,
    SMOLLM2,
    need_of,
    odd_heads,
    on_card,
    plan_of,
    planner_of,
    projector_of,
    refusal,
    remedies,
)

pytestmark = pytest.mark.unit


def f16(context: int, parallel: int | None = 1) -> PlanRequest:
    return PlanRequest(context, parallel, cache_type_k=CacheType.F16, cache_type_v=CacheType.F16)


def tenths(text: str) -> int:
    return int(text.replace(",", "").replace(".", ""))


def test_a_refusal_shows_the_arithmetic() -> None:
    error = refusal(QWEN3_8B, PlanRequest(context_tokens=32_768), room=6000 * MIB)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    details = error.details
    assert details["needed_bytes"] - details["grantable_bytes"] == details["missing_bytes"] > 0
    assert details["grantable_bytes"] == 6000 * MIB
    card = [item["bytes"] for item in details["items"] if item["place"] == "card"]
    assert sum(card) == details["needed_bytes"]
    assert details["smallest_bytes"] < details["needed_bytes"]
    found = re.search(
        r"needs ([\d,.]+) MiB \((.*)\); the card can give ([\d,.]+) MiB now, so ([\d,.]+) MiB", error.message
    )
    assert found is not None
    needed, terms, gives, missing = found.groups()
    assert sum(tenths(term.rsplit(" ", 1)[1]) for term in terms.split(" + ")) == tenths(needed)
    assert tenths(needed) == -(-details["needed_bytes"] * 10 // MIB)
    assert tenths(needed) - tenths(gives) == tenths(missing)


def test_a_refusal_names_the_largest_context_that_fits() -> None:
    nine = PlanRequest(9 * PAGE_TOKENS, 1)
    need = need_of(QWEN3_8B, nine)
    error = refusal(QWEN3_8B, PlanRequest(32_768, 1), room=need + MIB)
    assert error.details["largest_context_tokens"] == 9 * PAGE_TOKENS
    assert (
        error.hint is not None
        and "9,216 tokens of context would fit in 1 slot (--context 9216)." in error.hint
    )
    assert "fits_with_q8_0" not in error.details  # the cache is q8_0 already
    assert plan_of(QWEN3_8B, nine, room=need + MIB).context_tokens == 9 * PAGE_TOKENS


def test_a_refusal_names_the_largest_number_of_slots_that_fits() -> None:
    three = need_of(QWEN3_8B, PlanRequest(3072, 3))
    error = refusal(QWEN3_8B, PlanRequest(parallel=6), room=three)
    assert error.details["largest_context_tokens"] is None
    assert error.details["largest_parallel"] == 3
    assert error.hint is not None and "3 slots would fit (--parallel 3)." in error.hint
    assert plan_of(QWEN3_8B, PlanRequest(parallel=3), room=three).parallel == 3


def test_slots_are_named_for_the_context_that_was_asked_for() -> None:
    """Where no number of slots holds it, the hint names a context beside the slots."""
    asked = PlanRequest(200_000, 40)
    error = refusal(QWEN3_8B, asked, room=need_of(QWEN3_8B, PlanRequest(3072, 3)))
    assert error.hint is not None and "3 slots would fit (--parallel 3 --context 3072)." in error.hint
    for remedy in remedies(asked, error.details, by_hand=False):
        if remedy.offload is None:
            assert remedy == replace(asked, context_tokens=3072, parallel=3)


def test_a_quantised_cache_is_offered_where_it_would_do() -> None:
    need = need_of(QWEN3_8B, PlanRequest(32_768, 1))
    error = refusal(QWEN3_8B, f16(32_768), room=need)
    assert error.details["fits_with_q8_0"] is True
    assert error.hint is not None and "(--cache-type q8_0) it would fit as asked." in error.hint
    error = refusal(QWEN3_8B, f16(32_768), room=need - 1)
    assert error.details["fits_with_q8_0"] is False
    assert error.details["largest_context_tokens_with_q8_0"] == 31_744
    assert error.details["largest_context_tokens"] < 31_744


def test_no_quantised_cache_is_offered_that_the_model_cannot_have() -> None:
    error = refusal(odd_heads(QWEN3_8B), f16(32_768), room=1000 * MIB)
    assert "fits_with_q8_0" not in error.details


def test_a_prompt_cache_in_host_memory_can_be_given_up() -> None:
    """On a real card it lies elsewhere and would give nothing back."""
    quote = plan_of(SMOLLM2, PlanRequest(8192, 1), backend=Backend.CPU).quote
    without = on_card(quote) - 1024 * MIB
    error = refusal(SMOLLM2, room=without, backend=Backend.CPU)
    assert error.details["fits_without_prompt_cache"] is True
    assert error.hint is not None and "prompt_cache_mib = 0" in error.hint
    off = replace(POLICY, prompt_cache_mib=0)
    assert plan_of(SMOLLM2, room=without, backend=Backend.CPU, policy=off).window_tokens == 8192
    card = refusal(SMOLLM2, room=1024 * MIB, backend=Backend.CUDA)
    assert "fits_without_prompt_cache" not in card.details


def test_drafting_can_be_given_up() -> None:
    on = PlanRequest(8192, 1, drafting=Drafting.ON)
    need = need_of(DRAFTING, on)
    error = refusal(DRAFTING, on, room=need - 1)
    assert error.details["fits_without_drafting"] is True
    assert error.hint is not None and "Without drafting (--draft off) it would fit as asked." in error.hint
    assert plan_of(DRAFTING, replace(on, drafting=Drafting.OFF), room=need - 1).context_tokens == 8192
    off = PlanRequest(8192, 1, drafting=Drafting.OFF)
    assert "fits_without_drafting" not in refusal(DRAFTING, off, room=need_of(DRAFTING, off) - 1).details


def test_the_projectors_place_can_be_given_up() -> None:
    projector = projector_of(900)
    card = PlanRequest(8192, 1, projector=ProjectorPlace.CARD)
    need = need_of(LLAMA_8B, card, projector=projector)
    error = refusal(LLAMA_8B, card, room=need - 1, projector=projector)
    assert error.details["fits_with_projector_on_host"] is True
    assert error.hint is not None and "(--projector host) it would fit as asked." in error.hint
    host = replace(card, projector=ProjectorPlace.HOST)
    assert not plan_of(LLAMA_8B, host, room=need - 1, projector=projector).launch.projector_on_card
    far = refusal(LLAMA_8B, host, room=1 << 30, projector=projector)
    assert "fits_with_projector_on_host" not in far.details


def test_the_models_place_can_be_given_up() -> None:
    request = PlanRequest(8192, 1)
    need = need_of(LLAMA_8B, request)
    error = refusal(LLAMA_8B, request, room=need - 1)
    assert error.details["fits_with_offload"] is True
    assert error.hint is not None and "(--offload allowed), slower, it would fit as asked." in error.hint
    made = plan_of(LLAMA_8B, replace(request, offload=Offload.ALLOWED), room=need - 1)
    assert (made.context_tokens, made.launch.layers.is_full) == (8192, False)
    alone = refusal(LLAMA_8B, PlanRequest(parallel=1), room=1 << 31)
    assert alone.details["fits_with_offload"] is True
    assert "fits_with_offload" not in refusal(LLAMA_8B, request, room=1 << 31, backend=Backend.CPU).details


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_twice_the_memory_is_refused_with_its_least_need(backend: Backend) -> None:
    """Without room in host memory for a part of it there is no remedy."""
    room = Room(facts_of(GEMMA_27B).weight_bytes // 2, 0)
    error = refusal(GEMMA_27B, room=room, backend=backend)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    assert error.details["largest_context_tokens"] is None
    assert error.details["largest_parallel"] is None
    assert error.hint is not None and error.hint.startswith("Even the smallest launch needs")
    where = "host memory" if backend is Backend.CPU else "the card"
    assert f"{where} can give" in error.message


def test_where_the_host_is_too_small_its_arithmetic_is_shown() -> None:
    request = PlanRequest(8192, 1, gpu_layers=10)
    host = plan_of(LLAMA_8B, request).quote.total_bytes(Place.HOST)
    error = refusal(LLAMA_8B, request, room=Room(1 << 40, host - 1), keeps_host_caches=True)
    assert (error.details["needed_bytes"], error.details["missing_bytes"]) == (host, 1)
    assert "host memory can give" in error.message
    parts = [item["bytes"] for item in error.details["items"] if item["place"] == "host"]
    assert sum(parts) == host
    assert plan_of(LLAMA_8B, request, room=Room(1 << 40, host)).context_tokens == 8192


def test_memory_below_nothing_is_nothing() -> None:
    error = refusal(SMOLLM2, room=-5)
    assert error.details["grantable_bytes"] == 0


@settings(deadline=None)
@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(BACKENDS),
    types=st.one_of(
        st.none(), st.sampled_from([CacheType.F32, CacheType.F16, CacheType.Q8_0, CacheType.Q4_0])
    ),
    pages=st.one_of(st.none(), st.integers(1, 131)),
    parallel=st.one_of(st.none(), st.integers(1, 6)),
    drafting=st.sampled_from(Drafting),
    place=st.sampled_from([None, *ProjectorPlace]),
    offload=st.sampled_from(Offload),
    gpu_layers=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 80)),
    share=st.one_of(st.integers(0, 999), st.integers(950, 999)),
    host_mib=st.one_of(st.none(), st.integers(0, 40_000)),
)
def test_remedies_work(
    *,
    model: str,
    backend: Backend,
    types: CacheType | None,
    pages: int | None,
    parallel: int | None,
    drafting: Drafting,
    place: ProjectorPlace | None,
    offload: Offload,
    gpu_layers: int | None,
    share: int,
    host_mib: int | None,
) -> None:
    """Whatever a refusal recommends is granted when it is asked for, and is what was recommended."""
    facts = facts_of(model)
    slots = parallel or 1
    context = None if pages is None else min(pages * PAGE_TOKENS, facts.trained_context_tokens) * slots
    request = PlanRequest(
        context_tokens=context,
        parallel=parallel,
        cache_type_k=types,
        cache_type_v=types,
        drafting=drafting if facts.has_mtp or drafting is not Drafting.ON else None,
        projector=place,
        offload=offload,
        gpu_layers=None
        if gpu_layers is None or backend is Backend.CPU
        else min(gpu_layers, len(facts.layers) + 1),
    )
    projector = projector_of(700)
    least = PlanRequest(PAGE_TOKENS * slots, slots, drafting=Drafting.OFF) if context is None else request
    need = need_of(model, least, backend=backend, projector=projector)
    room = Room(need * share // 1000, None if host_mib is None else host_mib * MIB)
    planner = planner_of(model, request, room=room, backend=backend, projector=projector)
    try:
        made = planner.plan()
    except LlmError as error:
        assert error.code is ErrorCode.INSUFFICIENT_MEMORY
        for asked in remedies(request, error.details, by_hand=request.places_by_hand):
            other = replace(planner, request=asked).plan()
            assert on_card(other.quote) <= room.card
            assert asked.parallel in {None, other.parallel}
            assert asked.context_tokens is None or other.context_tokens >= asked.context_tokens
        return
    assert on_card(made.quote) <= room.card
