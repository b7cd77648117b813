"""The planner and the quote: what fits, exactly, and what is said where it does not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import CappedBy, Plan, PlanRequest, plan
from lllm3090d.planning.quote import Evidence, Launch, Place, PlanPolicy, Quote, price
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from tests.unit.engine_truth import POLICY, facts_of, priced_models

pytestmark = pytest.mark.unit

SMOLLM2 = "smollm2-135m"
LLAMA_8B = "llama-3.1-8b"
QWEN3_8B = "qwen3-8b"
GEMMA_270M = "gemma-3-270m"
GEMMA_27B = "gemma-3-27b"
PLENTY = 1 << 40
BACKENDS = [Backend.CPU, Backend.CUDA, Backend.VULKAN]
CPU_ITEMS = ["weights", "kv cache", "compute", "slack", "output buffer", "prompt cache", "process"]


def kind_of(backend: Backend) -> CardKind:
    return CardKind.CPU if backend is Backend.CPU else CardKind.NVIDIA


def plan_of(
    model: str | CheckpointFacts,
    request: PlanRequest | None = None,
    *,
    grantable_bytes: int = PLENTY,
    backend: Backend = Backend.VULKAN,
    policy: PlanPolicy = POLICY,
) -> Plan:
    return plan(
        facts_of(model) if isinstance(model, str) else model,
        request or PlanRequest(),
        policy,
        backend=backend,
        card_kind=kind_of(backend),
        grantable_bytes=grantable_bytes,
    )


def refusal(*args: Any, **kwargs: Any) -> LlmError:
    with pytest.raises(LlmError) as caught:
        plan_of(*args, **kwargs)
    assert caught.value.hint
    json.dumps(caught.value.problem())  # a surface can say it
    return caught.value


def launch(context: int, parallel: int = 1, cache_type: CacheType = CacheType.Q8_0) -> Launch:
    return Launch(context, parallel, cache_type, cache_type, 2048, 512, 8, 1024)


def on_card(quote: Quote) -> int:
    return quote.total_bytes(Place.CARD)


# --- the quote ---


def test_without_a_card_everything_lies_in_host_memory() -> None:
    quote = price(facts_of(SMOLLM2), launch(8192), Backend.CPU, POLICY)
    assert [item.name for item in quote.items] == CPU_ITEMS
    assert {item.place for item in quote.items} == {Place.CARD}
    assert quote.item("weights").bytes == facts_of(SMOLLM2).weight_bytes
    assert quote.item("kv cache").bytes == 8192 * 30 * 2 * 204
    assert quote.item("output buffer").bytes == 49_152 * 4
    assert quote.item("prompt cache").bytes == 1024 * MIB
    assert quote.item("process").bytes == 300 * MIB
    assert quote.item("slack").bytes == 128 * MIB


def test_a_card_holds_the_model_and_the_host_its_process() -> None:
    quote = price(facts_of(GEMMA_27B), launch(8192), Backend.CUDA, POLICY)
    places = {item.name: item.place for item in quote.items}
    card = {name for name, place in places.items() if place is Place.CARD}
    host = {name for name, place in places.items() if place is Place.HOST}
    assert card == {"weights", "kv cache", "compute", "runtime", "slack", "workspace floor"}
    assert host == {
        "token embedding",
        "host compute",
        "output buffer",
        "context checkpoints",
        "prompt cache",
        "process",
    }
    assert quote.item("token embedding").bytes == facts_of(GEMMA_27B).token_embedding_bytes
    floor = sum(quote.item(name).bytes for name in ("compute", "runtime", "workspace floor"))
    assert floor == 1024 * MIB


def test_the_workspace_floor_is_gone_where_the_terms_reach_it() -> None:
    """A 32k context of the 8B on CUDA needs more than 1024 MiB by itself at a micro batch of 2048."""
    big = replace(launch(131_072), micro_batch_tokens=2048)
    quote = price(facts_of(LLAMA_8B), big, Backend.CUDA, POLICY)
    assert "workspace floor" not in [item.name for item in quote.items]
    none = replace(POLICY, workspace_reserve_mib=0)
    small = price(facts_of(LLAMA_8B), launch(4096), Backend.CUDA, none)
    assert "workspace floor" not in [item.name for item in small.items]


def test_checkpoints_are_charged_for_every_slot() -> None:
    facts = facts_of(GEMMA_270M)
    one, four = (price(facts, launch(8192 * n, n), Backend.CPU, POLICY) for n in (1, 4))
    each = 512 * (15 * 544 + 12)
    assert one.item("context checkpoints").bytes == 8 * each
    assert four.item("context checkpoints").bytes == 32 * each
    none = price(facts, replace(launch(8192), context_checkpoints=0), Backend.CPU, POLICY)
    assert "context checkpoints" not in [item.name for item in none.items]


def test_a_prompt_cache_that_is_off_has_no_item() -> None:
    quote = price(facts_of(SMOLLM2), replace(launch(8192), prompt_cache_mib=0), Backend.CPU, POLICY)
    assert "prompt cache" not in [item.name for item in quote.items]
    with pytest.raises(KeyError, match="prompt cache"):
        quote.item("prompt cache")


@pytest.mark.parametrize("model", priced_models())
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_item_says_what_it_is(model: str, backend: Backend) -> None:
    quote = price(facts_of(model), launch(16_384, 2), backend, POLICY)
    names = [item.name for item in quote.items]
    assert len(set(names)) == len(names)
    for item in quote.items:
        assert item.bytes > 0
        assert item.formula
        assert item.evidence is Evidence.HEADER
    total = sum(item.bytes for item in quote.items)
    assert total == quote.total_bytes(Place.CARD) + quote.total_bytes(Place.HOST)


def test_a_backend_nobody_measured_has_no_price() -> None:
    with pytest.raises(LlmError) as caught:
        price(facts_of(SMOLLM2), launch(4096), Backend.METAL, POLICY)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


windows = st.integers(1, 131_072)


@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(BACKENDS),
    cache_type=st.sampled_from(CacheType),
    parallel=st.integers(1, 9),
    micro_batch=st.sampled_from([32, 300, 512, 2048, 8192]),
    small=windows,
    large=windows,
)
def test_a_longer_context_never_costs_less(
    *,
    model: str,
    backend: Backend,
    cache_type: CacheType,
    parallel: int,
    micro_batch: int,
    small: int,
    large: int,
) -> None:
    """On both sides; this is what lets the planner bisect."""
    small, large = sorted((small * parallel, large * parallel))

    def quote(context: int) -> Quote:
        one = replace(
            launch(context, parallel, cache_type), batch_tokens=8192, micro_batch_tokens=micro_batch
        )
        return price(facts_of(model), one, backend, POLICY)

    for place in Place:
        assert quote(small).total_bytes(place) <= quote(large).total_bytes(place)


@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(BACKENDS),
    cache_type=st.sampled_from(CacheType),
    parallel=st.integers(1, 32),
    pages=st.integers(1, 8),
)
def test_one_more_slot_of_the_same_window_never_costs_less(
    *, model: str, backend: Backend, cache_type: CacheType, parallel: int, pages: int
) -> None:
    """Rounding the graph to whole tokens per slot moves it by less than the slot's cache takes."""
    window = pages * PAGE_TOKENS
    fewer, more = (
        price(facts_of(model), launch(window * n, n, cache_type), backend, POLICY)
        for n in (parallel, parallel + 1)
    )
    assert on_card(fewer) < on_card(more)


# --- the automatic plan ---


@pytest.mark.parametrize("model", priced_models())
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_plenty_of_memory_the_window_is_all_that_was_trained(model: str, backend: Backend) -> None:
    made = plan_of(model, backend=backend)
    assert made.window_tokens == made.context_tokens == facts_of(model).trained_context_tokens
    assert (made.parallel, made.capped_by) == (1, CappedBy.MODEL)
    assert made.on_card is (backend is not Backend.CPU)
    assert (made.cache_type_k, made.cache_type_v) == (CacheType.Q8_0, CacheType.Q8_0)
    assert (made.batch_tokens, made.micro_batch_tokens) == (2048, 512)
    assert (made.context_checkpoints, made.prompt_cache_mib) == (8, 1024)


def test_a_trained_context_that_is_no_whole_page_is_reached_exactly() -> None:
    odd = replace(facts_of(SMOLLM2), trained_context_tokens=5000)
    made = plan_of(odd)
    assert (made.window_tokens, made.context_tokens, made.capped_by) == (5000, 5120, CappedBy.MODEL)
    short = replace(facts_of(SMOLLM2), trained_context_tokens=700)
    made = plan_of(short, PlanRequest(parallel=2))
    assert (made.window_tokens, made.context_tokens) == (700, 1536)


@settings(deadline=None)
@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(BACKENDS),
    cache_type=st.sampled_from(CacheType),
    parallel=st.one_of(st.none(), st.integers(1, 8)),
    grantable_mib=st.integers(0, 60_000),
)
def test_an_automatic_plan_fits_and_the_next_page_would_not(
    *, model: str, backend: Backend, cache_type: CacheType, parallel: int | None, grantable_mib: int
) -> None:
    request = PlanRequest(parallel=parallel, cache_type_k=cache_type, cache_type_v=cache_type)
    facts, grantable = facts_of(model), grantable_mib * MIB
    slots = parallel or 1
    try:
        made = plan_of(model, request, grantable_bytes=grantable, backend=backend)
    except LlmError as error:
        assert error.code is ErrorCode.INSUFFICIENT_MEMORY
        least = price(facts, launch(PAGE_TOKENS * slots, slots, cache_type), backend, POLICY)
        assert on_card(least) == error.details["needed_bytes"] == error.details["smallest_bytes"] > grantable
        return
    assert made == plan_of(model, request, grantable_bytes=grantable, backend=backend)
    assert on_card(made.quote) <= grantable
    assert made.parallel == slots
    assert made.context_tokens == made.window_tokens * slots
    assert made.window_tokens % PAGE_TOKENS == 0
    as_planned = launch(made.context_tokens, slots, cache_type)
    assert made.quote == price(facts, as_planned, backend, POLICY)
    if made.capped_by is CappedBy.MODEL:
        assert made.window_tokens == facts.trained_context_tokens
    else:
        assert made.capped_by is CappedBy.MEMORY
        next_page = launch((made.window_tokens + PAGE_TOKENS) * slots, slots, cache_type)
        assert on_card(price(facts, next_page, backend, POLICY)) > grantable


def test_the_last_byte_decides() -> None:
    need = on_card(plan_of(LLAMA_8B, PlanRequest(context_tokens=16_384)).quote)
    assert plan_of(LLAMA_8B, grantable_bytes=need).context_tokens == 16_384
    assert plan_of(LLAMA_8B, grantable_bytes=need - 1).context_tokens == 15_360


# --- explicit requests ---


def test_a_request_is_honoured_exactly_or_padded_up() -> None:
    made = plan_of(LLAMA_8B, PlanRequest(context_tokens=10_000, parallel=3))
    assert (made.context_tokens, made.parallel, made.window_tokens) == (10_752, 3, 3584)
    assert made.capped_by is CappedBy.REQUEST
    assert plan_of(LLAMA_8B, PlanRequest(context_tokens=8192)).context_tokens == 8192
    whole = plan_of(SMOLLM2, PlanRequest(context_tokens=8192 * 4, parallel=4))
    assert (whole.context_tokens, whole.window_tokens) == (32_768, 8192)


def test_each_side_of_the_cache_can_be_chosen() -> None:
    made = plan_of(LLAMA_8B, PlanRequest(context_tokens=4096, cache_type_k=CacheType.F16))
    assert (made.cache_type_k, made.cache_type_v) == (CacheType.F16, CacheType.Q8_0)
    assert made.quote.item("kv cache").bytes == 32 * 4096 * (2048 + 1088)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (PlanRequest(parallel=0), "parallel"),
        (PlanRequest(parallel=-3), "parallel"),
        (PlanRequest(context_tokens=0), "context_tokens"),
        (PlanRequest(context_tokens=-4096), "context_tokens"),
    ],
)
def test_zero_is_not_unset(request_: PlanRequest, field: str) -> None:
    error = refusal(SMOLLM2, request_)
    assert error.code is ErrorCode.INVALID_REQUEST
    assert field in error.message


def test_a_window_beyond_the_training_is_refused() -> None:
    error = refusal(SMOLLM2, PlanRequest(context_tokens=20_000))
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert "8192" in error.message
    assert error.hint == "Ask for at most 8192 tokens, or for 3 slots."
    assert error.details["largest_context_tokens"] == 8192
    plan_of(SMOLLM2, PlanRequest(context_tokens=20_000, parallel=3))


def test_a_window_below_a_page_is_refused() -> None:
    error = refusal(SMOLLM2, PlanRequest(context_tokens=4096, parallel=5))
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert error.hint == "Ask for at least 5120 tokens, or for 4 slots at most."
    plan_of(SMOLLM2, PlanRequest(context_tokens=4096, parallel=4))
    plan_of(SMOLLM2, PlanRequest(context_tokens=5120, parallel=5))
    alone = refusal(SMOLLM2, PlanRequest(context_tokens=1023))
    assert alone.hint == "Ask for at least 1024 tokens."


def test_more_slots_than_the_engine_has_are_refused() -> None:
    error = refusal(SMOLLM2, PlanRequest(parallel=cache.MAX_SLOTS + 1))
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION


def test_cache_types_the_model_cannot_have_are_refused() -> None:
    odd = replace(
        facts_of(SMOLLM2),
        layers=tuple(
            replace(layer, key_length=80, value_length=80, k_values=240, v_values=240)
            for layer in facts_of(SMOLLM2).layers
        ),
    )
    assert refusal(odd).code is ErrorCode.UNSUPPORTED_COMBINATION
    plan_of(odd, PlanRequest(cache_type_k=CacheType.F16, cache_type_v=CacheType.F16))


def test_an_engine_without_gpu_support_cannot_use_a_card() -> None:
    with pytest.raises(LlmError, match="CPU only") as caught:
        plan(
            facts_of(SMOLLM2),
            PlanRequest(),
            POLICY,
            backend=Backend.CPU,
            card_kind=CardKind.NVIDIA,
            grantable_bytes=PLENTY,
        )
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


def test_an_engine_of_a_gpu_serves_from_host_memory_like_any_other() -> None:
    made = plan(
        facts_of(SMOLLM2),
        PlanRequest(),
        POLICY,
        backend=Backend.CUDA,
        card_kind=CardKind.CPU,
        grantable_bytes=PLENTY,
    )
    assert made == plan_of(SMOLLM2, backend=Backend.CPU)
    assert not made.on_card


# --- refusals for want of memory ---


def test_a_refusal_shows_the_arithmetic() -> None:
    request = PlanRequest(context_tokens=32_768)
    error = refusal(QWEN3_8B, request, grantable_bytes=6000 * MIB)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    details = error.details
    assert details["needed_bytes"] - details["grantable_bytes"] == details["missing_bytes"] > 0
    assert details["grantable_bytes"] == 6000 * MIB
    card = [item["bytes"] for item in details["items"] if item["place"] == "card"]
    assert sum(card) == details["needed_bytes"]
    assert details["smallest_bytes"] < details["needed_bytes"]
    found = re.search(
        r"needs (\d+) MiB \((.*)\); the card can give (\d+) MiB now, so (\d+) MiB", error.message
    )
    assert found is not None
    needed, terms, gives, missing = found.groups()
    assert sum(int(term.rsplit(" ", 1)[1]) for term in terms.split(" + ")) == int(needed)
    assert int(needed) == -(-details["needed_bytes"] // MIB)
    assert int(needed) - int(gives) == int(missing)


def test_a_refusal_names_the_largest_context_that_fits() -> None:
    need = on_card(plan_of(QWEN3_8B, PlanRequest(context_tokens=9 * PAGE_TOKENS)).quote)
    error = refusal(QWEN3_8B, PlanRequest(context_tokens=32_768), grantable_bytes=need + MIB)
    assert error.details["largest_context_tokens"] == 9 * PAGE_TOKENS
    assert error.hint is not None and "9216 tokens of context would fit in 1 slot." in error.hint
    assert "fits_with_q8_0" not in error.details  # the cache is q8_0 already
    plan_of(QWEN3_8B, PlanRequest(context_tokens=9 * PAGE_TOKENS), grantable_bytes=need + MIB)


def test_a_refusal_names_the_largest_number_of_slots_that_fits() -> None:
    three = on_card(plan_of(QWEN3_8B, PlanRequest(context_tokens=3072, parallel=3)).quote)
    error = refusal(QWEN3_8B, PlanRequest(parallel=6), grantable_bytes=three)
    assert error.details["largest_context_tokens"] is None
    assert error.details["largest_parallel"] == 3
    assert error.hint is not None and "3 slots would fit." in error.hint
    plan_of(QWEN3_8B, PlanRequest(parallel=3), grantable_bytes=three)


def f16(context: int | None = None) -> PlanRequest:
    return PlanRequest(context_tokens=context, cache_type_k=CacheType.F16, cache_type_v=CacheType.F16)


def test_a_quantised_cache_is_offered_where_it_would_do() -> None:
    need = on_card(plan_of(QWEN3_8B, PlanRequest(context_tokens=32_768)).quote)
    error = refusal(QWEN3_8B, f16(32_768), grantable_bytes=need)
    assert error.details["fits_with_q8_0"] is True
    assert error.hint is not None and "With cache type q8_0 it would fit as asked." in error.hint
    error = refusal(QWEN3_8B, f16(32_768), grantable_bytes=need - 1)
    assert error.details["fits_with_q8_0"] is False
    assert error.details["largest_context_tokens_with_q8_0"] == 31_744
    assert error.details["largest_context_tokens"] < 31_744


def test_a_prompt_cache_in_host_memory_can_be_given_up() -> None:
    """On a real card it lies elsewhere and would give nothing back."""
    quote = plan_of(SMOLLM2, PlanRequest(context_tokens=8192), backend=Backend.CPU).quote
    without = on_card(quote) - 1024 * MIB
    error = refusal(SMOLLM2, grantable_bytes=without, backend=Backend.CPU)
    assert error.details["fits_without_prompt_cache"] is True
    assert error.hint is not None and "prompt_cache_mib = 0" in error.hint
    off = replace(POLICY, prompt_cache_mib=0)
    assert plan_of(SMOLLM2, grantable_bytes=without, backend=Backend.CPU, policy=off).window_tokens == 8192
    card = refusal(SMOLLM2, grantable_bytes=1024 * MIB, backend=Backend.CUDA)
    assert "fits_without_prompt_cache" not in card.details


def test_no_quantised_cache_is_offered_that_the_model_cannot_have() -> None:
    odd = replace(
        facts_of(QWEN3_8B),
        layers=tuple(
            replace(layer, key_length=80, value_length=80, k_values=640, v_values=640)
            for layer in facts_of(QWEN3_8B).layers
        ),
    )
    error = refusal(odd, f16(32_768), grantable_bytes=1000 * MIB)
    assert "fits_with_q8_0" not in error.details


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_twice_the_memory_is_refused_with_its_least_need(backend: Backend) -> None:
    error = refusal(GEMMA_27B, grantable_bytes=facts_of(GEMMA_27B).weight_bytes // 2, backend=backend)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    assert error.details["largest_context_tokens"] is None
    assert error.details["largest_parallel"] is None
    assert error.hint is not None and error.hint.startswith("Even the smallest launch needs")
    where = "host memory" if backend is Backend.CPU else "the card"
    assert f"{where} can give" in error.message


def test_memory_below_nothing_is_nothing() -> None:
    error = refusal(SMOLLM2, grantable_bytes=-5)
    assert error.details["grantable_bytes"] == 0


@settings(deadline=None)
@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(BACKENDS),
    cache_type=st.sampled_from([CacheType.F32, CacheType.F16, CacheType.Q8_0, CacheType.Q4_0]),
    context=st.integers(1024, 131_072),
    parallel=st.integers(1, 6),
    grantable_mib=st.integers(0, 40_000),
)
def test_remedies_work(
    *, model: str, backend: Backend, cache_type: CacheType, context: int, parallel: int, grantable_mib: int
) -> None:
    """Whatever a refusal recommends is granted when it is asked for."""
    grantable = grantable_mib * MIB
    share = context // parallel
    assume(PAGE_TOKENS <= share <= facts_of(model).trained_context_tokens)
    request = PlanRequest(context, parallel, cache_type, cache_type)
    try:
        made = plan_of(model, request, grantable_bytes=grantable, backend=backend)
    except LlmError as error:
        details = error.details
        if details["largest_context_tokens"] is not None:
            smaller = replace(request, context_tokens=details["largest_context_tokens"])
            plan_of(model, smaller, grantable_bytes=grantable, backend=backend)
        if details["largest_parallel"] is not None:
            fewer = replace(request, context_tokens=None, parallel=details["largest_parallel"])
            plan_of(model, fewer, grantable_bytes=grantable, backend=backend)
        if details.get("fits_with_q8_0"):
            q8_0 = replace(request, cache_type_k=CacheType.Q8_0, cache_type_v=CacheType.Q8_0)
            plan_of(model, q8_0, grantable_bytes=grantable, backend=backend)
        return
    assert on_card(made.quote) <= grantable
    assert context <= made.context_tokens < context + 256 * (parallel + 1)
