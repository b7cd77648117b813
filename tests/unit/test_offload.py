"""What is left in host memory for a useful window: the least that suffices, experts first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode
from lllm3090d.planning.offload import (
    CROSSOVER_PERCENT,
    MIXTURE_MICRO_BATCH_TOKENS,
    USEFUL_DENSE_TOKENS,
    USEFUL_MIXTURE_TOKENS,
    least_offload,
    useful_window,
)
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, Room
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from tests.unit.engine_truth import POLICY, facts_of, priced_models
from tests.unit.plans import (
    CARDS,
    DRAFTING,
    DRAFTING_MIXTURE,
    LLAMA_8B,
    MIXTURE,
    PLENTY,
    QWEN3_8B,
    SMOLLM2,
    need_of,
    on_card,
    plan_of,
    refusal,
    variant_of,
)

pytestmark = pytest.mark.unit

ALLOWED = PlanRequest(offload=Offload.ALLOWED)
MIXTURES = [name for name in priced_models() if facts_of(name).expert_count]


def test_what_is_useful_depends_on_the_kind_of_model() -> None:
    assert useful_window(variant_of(LLAMA_8B)) == USEFUL_DENSE_TOKENS
    assert useful_window(variant_of(MIXTURE)) == USEFUL_MIXTURE_TOKENS
    assert useful_window(variant_of(SMOLLM2)) == facts_of(SMOLLM2).trained_context_tokens == 8192


@pytest.mark.parametrize("backend", CARDS)
def test_a_dense_model_leaves_its_first_layers(backend: Backend) -> None:
    need = need_of(LLAMA_8B, PlanRequest(USEFUL_DENSE_TOKENS, 1), backend=backend)
    assert plan_of(LLAMA_8B, ALLOWED, room=need, backend=backend).launch.layers == Placement()
    made = plan_of(LLAMA_8B, ALLOWED, room=need - 500 * MIB, backend=backend)
    on_device = made.launch.layers.layers_on_card
    assert on_device is not None
    assert made.launch.layers == Placement(layers_on_card=on_device)
    assert (made.window_tokens, made.parallel) == (USEFUL_DENSE_TOKENS, 1)
    assert made.notes == ("a part of the model in host memory, for a window of 32,768 tokens",)
    assert made.launch.micro_batch_tokens == POLICY.micro_batch_tokens
    # One layer more on the card would be too many.
    variant = variant_of(LLAMA_8B, room=need - 500 * MIB, backend=backend)
    fuller = variant.placed(Placement(layers_on_card=on_device + 1))
    assert not fuller.fits(fuller.launch(USEFUL_DENSE_TOKENS, 1))
    items = {item.name: item.place for item in made.quote.items}
    assert items["host weights"] is items["host cache"] is Place.HOST


def test_nothing_is_left_where_that_is_not_allowed() -> None:
    need = need_of(LLAMA_8B, PlanRequest(USEFUL_DENSE_TOKENS, 1))
    made = plan_of(LLAMA_8B, room=need - 500 * MIB)
    assert made.launch.layers == Placement()
    assert made.window_tokens < USEFUL_DENSE_TOKENS
    by_setting = replace(POLICY, offload=Offload.ALLOWED)
    assert plan_of(LLAMA_8B, room=need - 500 * MIB, policy=by_setting) == plan_of(
        LLAMA_8B, ALLOWED, room=need - 500 * MIB
    )
    resident = PlanRequest(offload=Offload.RESIDENT)
    assert plan_of(LLAMA_8B, resident, room=need - 500 * MIB, policy=by_setting).launch == made.launch


def test_nothing_is_left_where_one_slot_has_a_useful_window() -> None:
    """Two slots of 30,720 tokens serve more than one of 32,768: the window of each does not count."""
    need = need_of(QWEN3_8B, PlanRequest(61_440, 2))
    made = plan_of(QWEN3_8B, ALLOWED, room=need)
    assert (made.parallel, made.window_tokens, made.launch.layers) == (2, 30_720, Placement())
    assert made.notes == ()


@pytest.mark.parametrize("model", MIXTURES)
def test_a_mixture_leaves_experts_and_then_whole_layers(model: str) -> None:
    facts = facts_of(model)
    window, blocks = useful_window(variant_of(model)), len(facts.trunk)
    request = replace(ALLOWED, drafting=Drafting.OFF)
    whole = need_of(model, PlanRequest(window, 1, drafting=Drafting.OFF))
    seen = set()
    for percent in range(96, 20, -4):
        room = whole * percent // 100
        made = plan_of(model, request, room=room)
        layers = made.launch.layers
        experts = layers.expert_layers_on_host
        assert (made.window_tokens, made.parallel) == (window, 1)
        assert on_card(made.quote) <= room
        if experts:
            assert layers == Placement(expert_layers_on_host=experts)
            assert experts * 100 <= blocks * CROSSOVER_PERCENT
            assert made.launch.micro_batch_tokens == MIXTURE_MICRO_BATCH_TOKENS
            assert made.launch.batch_tokens >= MIXTURE_MICRO_BATCH_TOKENS
            fuller = variant_of(model, room=room, backend=Backend.VULKAN).placed(
                Placement(expert_layers_on_host=experts - 1), MIXTURE_MICRO_BATCH_TOKENS
            )
            assert not fuller.fits(fuller.launch(window, 1))
            assert "layers" not in seen  # less memory never leads back from layers to experts
            seen.add("experts")
        else:
            assert layers == Placement(layers_on_card=layers.layers_on_card)
            assert made.launch.micro_batch_tokens == POLICY.micro_batch_tokens
            seen.add("layers")
    assert seen == {"experts", "layers"}


def test_the_micro_batch_of_experts_is_as_asked() -> None:
    room = need_of(MIXTURE, PlanRequest(USEFUL_MIXTURE_TOKENS, 1)) * 8 // 10
    asked = plan_of(MIXTURE, replace(ALLOWED, micro_batch_tokens=256), room=room).launch
    assert (asked.micro_batch_tokens, asked.layers.expert_layers_on_host > 0) == (256, True)
    larger = replace(POLICY, micro_batch_tokens=2048)
    assert plan_of(MIXTURE, ALLOWED, room=room, policy=larger).launch.micro_batch_tokens == 2048


def test_a_context_that_was_asked_for_may_be_offloaded_too() -> None:
    request = PlanRequest(8192, 2, offload=Offload.ALLOWED)
    need = need_of(LLAMA_8B, request)
    made = plan_of(LLAMA_8B, request, room=need - 1)
    assert (made.context_tokens, made.parallel) == (8192, 2)
    assert not made.launch.layers.is_full
    assert made.notes == ("a part of the model in host memory",)


def test_where_nothing_fits_otherwise_a_short_window_is_better_than_none() -> None:
    """For a useful window too much would be in host memory."""
    card = need_of(LLAMA_8B, PlanRequest(PAGE_TOKENS, 1)) - 1
    refusal(LLAMA_8B, room=card)
    useful = plan_of(LLAMA_8B, ALLOWED, room=card)
    assert useful.window_tokens == USEFUL_DENSE_TOKENS
    host = useful.quote.total_bytes(Place.HOST)
    made = plan_of(LLAMA_8B, ALLOWED, room=Room(card, host - 1), keeps_host_caches=True)
    assert (made.window_tokens, made.launch.layers.is_full) == (PAGE_TOKENS, False)
    assert made.quote.total_bytes(Place.HOST) < host


def test_what_the_host_cannot_take_is_not_left_there() -> None:
    need = need_of(LLAMA_8B, PlanRequest(USEFUL_DENSE_TOKENS, 1))
    made = plan_of(LLAMA_8B, ALLOWED, room=need - 500 * MIB)
    host = made.quote.total_bytes(Place.HOST)
    assert plan_of(LLAMA_8B, ALLOWED, room=Room(need - 500 * MIB, host)) == made
    resident = plan_of(LLAMA_8B, ALLOWED, room=Room(need - 500 * MIB, host - 1), keeps_host_caches=True)
    assert (resident.launch.layers, resident.notes) == (Placement(), ())
    assert resident.window_tokens < USEFUL_DENSE_TOKENS
    error = refusal(
        LLAMA_8B, replace(ALLOWED, context_tokens=USEFUL_DENSE_TOKENS), room=Room(need // 2, host // 8)
    )
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    assert "fits_with_offload" not in error.details


def test_a_draft_goes_with_its_model() -> None:
    for model in (DRAFTING, DRAFTING_MIXTURE):
        need = need_of(model, PlanRequest(PAGE_TOKENS, 1, drafting=Drafting.ON))
        made = plan_of(model, replace(ALLOWED, drafting=Drafting.ON), room=need * 9 // 10)
        assert made.launch.draft is not None
        assert not made.launch.layers.is_full
        assert made.window_tokens == useful_window(variant_of(model))


# --- by hand ---


def test_layers_by_hand() -> None:
    made = plan_of(LLAMA_8B, PlanRequest(8192, 1, gpu_layers=20))
    assert made.launch.layers == Placement(layers_on_card=20)
    assert plan_of(LLAMA_8B, PlanRequest(8192, 1, gpu_layers=0)).launch.layers == Placement(layers_on_card=0)
    assert plan_of(LLAMA_8B, PlanRequest(8192, 1, gpu_layers=33)).launch.layers == Placement()
    assert plan_of(LLAMA_8B, PlanRequest(8192, 1, gpu_layers=32)).launch.layers == Placement(
        layers_on_card=32
    )


def test_experts_by_hand() -> None:
    blocks = len(facts_of(MIXTURE).trunk)
    made = plan_of(MIXTURE, PlanRequest(8192, 1, cpu_experts=blocks))
    assert made.launch.layers == Placement(expert_layers_on_host=blocks)
    assert plan_of(MIXTURE, PlanRequest(8192, 1, cpu_experts=0)).launch.layers == Placement()
    assert refusal(MIXTURE, PlanRequest(cpu_experts=blocks + 1)).hint == f"Ask for --cpu-experts {blocks}."


def test_the_cache_by_hand() -> None:
    made = plan_of(LLAMA_8B, PlanRequest(8192, 1, cache_on_host=True))
    assert made.launch.layers == Placement(cache_on_host=True)
    names = {item.name: item.place for item in made.quote.items}
    assert "kv cache" not in names
    assert names["host cache"] is Place.HOST
    both = plan_of(LLAMA_8B, PlanRequest(8192, 1, cache_on_host=True, gpu_layers=10))
    assert both.launch.layers == Placement(layers_on_card=10, cache_on_host=True)


def test_a_window_is_searched_for_a_placement_by_hand() -> None:
    """And nothing else is moved, whatever may be offloaded."""
    request = PlanRequest(parallel=1, gpu_layers=20, offload=Offload.ALLOWED)
    need = need_of(LLAMA_8B, replace(request, context_tokens=8192))
    made = plan_of(LLAMA_8B, request, room=need)
    assert (made.window_tokens, made.launch.layers) == (8192, Placement(layers_on_card=20))
    host = made.quote.total_bytes(Place.HOST)
    less = plan_of(LLAMA_8B, request, room=Room(PLENTY, host), keeps_host_caches=True)
    assert less.window_tokens == 8192
    error = refusal(LLAMA_8B, request, room=Room(1 << 30))
    assert "fits_with_offload" not in error.details
    everything = refusal(LLAMA_8B, replace(request, gpu_layers=33, offload=None), room=Room(1 << 30))
    assert "fits_with_offload" not in everything.details


@settings(deadline=None)
@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(CARDS),
    pages=st.integers(1, 64),
    slots=st.integers(1, 3),
    card_mib=st.integers(0, 60_000),
    host_mib=st.one_of(st.none(), st.integers(0, 60_000)),
)
def test_the_least_that_suffices_fits_and_less_does_not(
    *, model: str, backend: Backend, pages: int, slots: int, card_mib: int, host_mib: int | None
) -> None:
    variant = variant_of(
        model,
        room=Room(card_mib * MIB, None if host_mib is None else host_mib * MIB),
        backend=backend,
    )
    window = min(pages * PAGE_TOKENS, variant.limit_tokens)
    found = least_offload(variant, window, slots, None)
    if found is None:
        return
    launch = found.launch(window, slots)
    layers = launch.layers
    assert found.fits(launch)
    if layers.layers_on_card is not None:
        count = layers.layers_on_card + 1
        blocks = len(variant.facts.layers) + 1
        fuller = variant.placed(Placement(layers_on_card=count) if count < blocks else Placement())
        assert not fuller.fits_card(fuller.launch(window, slots))
    elif layers.expert_layers_on_host:
        count = layers.expert_layers_on_host - 1
        larger = MIXTURE_MICRO_BATCH_TOKENS if count else None
        fuller = variant.placed(Placement(expert_layers_on_host=count), larger)
        assert not fuller.fits_card(fuller.launch(window, slots))


# --- the prompt cache gives way ---


def test_what_is_kept_only_to_be_quick_makes_room_for_a_part_of_the_model() -> None:
    """The prompt cache is given up before the window is, and as much of it is kept as there is room for."""
    card = need_of(LLAMA_8B, PlanRequest(PAGE_TOKENS, 1)) - 1
    useful = plan_of(LLAMA_8B, ALLOWED, room=card)
    host = useful.quote.total_bytes(Place.HOST)
    made = plan_of(LLAMA_8B, ALLOWED, room=Room(card, host - 1))
    assert (made.window_tokens, made.launch.layers) == (useful.window_tokens, useful.launch.layers)
    kept = useful.launch.prompt_cache_mib
    assert made.launch.prompt_cache_mib == kept - 1
    assert made.notes[-1] == f"prompt cache of {kept - 1} MiB instead of {kept}: host memory is short"
    assert made.quote.total_bytes(Place.HOST) <= host - 1


def test_a_size_that_was_asked_for_is_not_refused_for_the_prompt_cache() -> None:
    request = PlanRequest(8192, 2, offload=Offload.ALLOWED)
    card = need_of(LLAMA_8B, request) - 1
    host = plan_of(LLAMA_8B, request, room=card).quote.total_bytes(Place.HOST)
    made = plan_of(LLAMA_8B, request, room=Room(card, host - 200 * MIB))
    assert (made.context_tokens, made.parallel) == (8192, 2)
    assert made.quote.total_bytes(Place.HOST) <= host - 200 * MIB
    error = refusal(LLAMA_8B, request, room=Room(card, host - 200 * MIB), keeps_host_caches=True)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
