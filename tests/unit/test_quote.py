"""The quote: every term of a launch, where it lies, and that it never falls as a launch grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Draft
from lllm3090d.planning.quote import Evidence, Place, Quote, draft_need_bytes, price
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from tests.unit.engine_truth import POLICY, facts_of, priced_models
from tests.unit.plans import BACKENDS, DRAFTING, GEMMA_27B, LLAMA_8B, SMOLLM2, launch_of, on_card

pytestmark = pytest.mark.unit

GEMMA_270M = "gemma-3-270m"
CPU_ITEMS = ["weights", "kv cache", "compute", "slack", "output buffer", "prompt cache", "process"]


def test_without_a_card_everything_lies_in_host_memory() -> None:
    quote = price(facts_of(SMOLLM2), launch_of(8192), Backend.CPU, POLICY)
    assert [item.name for item in quote.items] == CPU_ITEMS
    assert {item.place for item in quote.items} == {Place.CARD}
    assert quote.item("weights").bytes == facts_of(SMOLLM2).weight_bytes
    assert quote.item("kv cache").bytes == 8192 * 30 * 2 * 204
    assert quote.item("output buffer").bytes == 49_152 * 4
    assert quote.item("prompt cache").bytes == 1024 * MIB
    assert quote.item("process").bytes == 300 * MIB
    assert quote.item("slack").bytes == 128 * MIB


def test_a_card_holds_the_model_and_the_host_its_process() -> None:
    quote = price(facts_of(GEMMA_27B), launch_of(8192), Backend.CUDA, POLICY)
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
    big = replace(launch_of(131_072), micro_batch_tokens=2048)
    quote = price(facts_of(LLAMA_8B), big, Backend.CUDA, POLICY)
    assert "workspace floor" not in [item.name for item in quote.items]
    none = replace(POLICY, workspace_reserve_mib=0)
    small = price(facts_of(LLAMA_8B), launch_of(4096), Backend.CUDA, none)
    assert "workspace floor" not in [item.name for item in small.items]


def test_checkpoints_are_charged_for_every_slot() -> None:
    facts = facts_of(GEMMA_270M)
    one, four = (price(facts, launch_of(8192 * n, n), Backend.CPU, POLICY) for n in (1, 4))
    each = 512 * (15 * 544 + 12)
    assert one.item("context checkpoints").bytes == 8 * each
    assert four.item("context checkpoints").bytes == 32 * each
    none = price(facts, replace(launch_of(8192), context_checkpoints=0), Backend.CPU, POLICY)
    assert "context checkpoints" not in [item.name for item in none.items]


def test_a_prompt_cache_that_is_off_has_no_item() -> None:
    quote = price(facts_of(SMOLLM2), replace(launch_of(8192), prompt_cache_mib=0), Backend.CPU, POLICY)
    assert "prompt cache" not in [item.name for item in quote.items]
    with pytest.raises(KeyError, match="prompt cache"):
        quote.item("prompt cache")


@pytest.mark.parametrize("model", priced_models())
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_item_says_what_it_is(model: str, backend: Backend) -> None:
    quote = price(facts_of(model), launch_of(16_384, 2), backend, POLICY)
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
        price(facts_of(SMOLLM2), launch_of(4096), Backend.METAL, POLICY)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


windows = st.integers(2, 131_072)  # of a single token the engine makes no context


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
            launch_of(context, parallel, cache_type), batch_tokens=8192, micro_batch_tokens=micro_batch
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
        price(facts_of(model), launch_of(window * n, n, cache_type), backend, POLICY)
        for n in (parallel, parallel + 1)
    )
    assert on_card(fewer) < on_card(more)


@given(
    backend=st.sampled_from(BACKENDS),
    types=st.tuples(*[st.sampled_from([CacheType.F32, CacheType.F16, CacheType.Q8_0, CacheType.Q4_0])] * 2),
    parallel=st.integers(1, 4),
    pages=st.integers(1, 64),
)
def test_the_choice_of_a_drafts_cache_is_that_of_whole_prices(
    *, backend: Backend, types: tuple[CacheType, CacheType], parallel: int, pages: int
) -> None:
    launches = [
        replace(
            launch_of(pages * PAGE_TOKENS * parallel, parallel),
            draft=Draft(3, cache_type_k=kind, cache_type_v=kind),
        )
        for kind in types
    ]
    facts = facts_of(DRAFTING)
    whole = [on_card(price(facts, launch, backend, POLICY)) for launch in launches]
    parts = [draft_need_bytes(facts, launch, backend, POLICY) for launch in launches]
    assert whole[0] - whole[1] == parts[0] - parts[1]
