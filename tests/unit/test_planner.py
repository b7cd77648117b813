"""The planner: what was asked for exactly, and the best that fits for what was left open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Draft
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.planner import CappedBy, PlanRequest, plan
from lllm3090d.planning.quote import Place, price
from lllm3090d.planning.request import (
    Drafting,
    Features,
    Offload,
    ProjectorPlace,
    Room,
    SlotPolicy,
    option_of,
)
from lllm3090d.planning.rope import RopeScaling
from lllm3090d.planning.slots import MAX_AUTO_PARALLEL
from lllm3090d.planning.stretch import Stretch
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from tests.unit.engine_truth import POLICY, facts_of, priced_models
from tests.unit.plans import (
    BACKENDS,
    DRAFTING,
    GEMMA_27B,
    LLAMA_8B,
    PLENTY,
    QWEN3_8B,
    SMOLLM2,
    launch_of,
    need_of,
    odd_heads,
    on_card,
    plan_of,
    planner_of,
    projector_of,
    refusal,
    served,
)

pytestmark = pytest.mark.unit

# --- the automatic plan ---


@pytest.mark.parametrize("model", priced_models())
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", SlotPolicy)
def test_with_plenty_of_memory_every_slot_has_all_that_was_trained(
    model: str, backend: Backend, policy: SlotPolicy
) -> None:
    made, facts = plan_of(model, PlanRequest(slot_policy=policy), backend=backend), facts_of(model)
    assert made.window_tokens == facts.trained_context_tokens
    assert made.context_tokens == MAX_AUTO_PARALLEL * made.window_tokens
    assert (made.parallel, made.capped_by) == (MAX_AUTO_PARALLEL, CappedBy.MODEL)
    assert made.on_card is (backend is not Backend.CPU)
    sizes = made.launch
    assert sizes.cache_types == (CacheType.Q8_0, CacheType.Q8_0)
    assert (sizes.batch_tokens, sizes.micro_batch_tokens) == (2048, 512)
    assert (sizes.context_checkpoints, sizes.prompt_cache_mib) == (8, 1024)
    assert (sizes.layers, sizes.unified, sizes.line_tokens) == (Placement(), False, 0)
    assert (sizes.draft is not None) is (facts.has_mtp and backend is not Backend.CPU)
    assert (made.with_projector, made.rope, made.tier, made.notes) == (False, None, None, ())


def test_a_trained_context_that_is_no_whole_page_is_reached_exactly() -> None:
    odd = replace(facts_of(SMOLLM2), trained_context_tokens=5000)
    made = plan_of(odd, PlanRequest(parallel=1))
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
    policy=st.sampled_from(SlotPolicy),
    grantable_mib=st.integers(0, 60_000),
)
def test_an_automatic_plan_fits_and_the_next_page_would_not(
    *,
    model: str,
    backend: Backend,
    cache_type: CacheType,
    parallel: int | None,
    policy: SlotPolicy,
    grantable_mib: int,
) -> None:
    request = PlanRequest(
        parallel=parallel,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        slot_policy=policy,
        drafting=Drafting.OFF,
    )
    facts, room = facts_of(model), grantable_mib * MIB
    made = served(planner_of(model, request, room=room, backend=backend))
    if made is None:
        error = refusal(model, request, room=room, backend=backend)
        slots = parallel or 1
        least = price(facts, launch_of(PAGE_TOKENS * slots, slots, cache_type), backend, POLICY)
        assert on_card(least) == error.details["needed_bytes"] == error.details["smallest_bytes"] > room
        return
    assert on_card(made.quote) <= room
    assert made.parallel == parallel or (parallel is None and 1 <= made.parallel <= MAX_AUTO_PARALLEL)
    assert made.context_tokens == made.window_tokens * made.parallel
    assert made.window_tokens % PAGE_TOKENS == 0
    assert made.quote == price(
        facts, launch_of(made.context_tokens, made.parallel, cache_type), backend, POLICY
    )
    if made.capped_by is CappedBy.MODEL:
        assert made.window_tokens == facts.trained_context_tokens
    else:
        assert made.capped_by is CappedBy.MEMORY
        more = launch_of((made.window_tokens + PAGE_TOKENS) * made.parallel, made.parallel, cache_type)
        assert on_card(price(facts, more, backend, POLICY)) > room


def test_the_last_byte_decides() -> None:
    request = PlanRequest(parallel=1)
    need = need_of(LLAMA_8B, PlanRequest(context_tokens=16_384, parallel=1))
    assert plan_of(LLAMA_8B, request, room=need).context_tokens == 16_384
    assert plan_of(LLAMA_8B, request, room=need - 1).context_tokens == 15_360


def test_slots_are_added_by_policy() -> None:
    """SmolLM2 has windows of 8192 tokens: each policy adds slots once there is more room than one needs."""
    for slots in range(1, MAX_AUTO_PARALLEL + 1):
        need = need_of(SMOLLM2, PlanRequest(context_tokens=8192 * slots, parallel=slots))
        for policy in SlotPolicy:
            made = plan_of(SMOLLM2, PlanRequest(slot_policy=policy), room=need)
            assert (made.parallel, made.window_tokens) == (slots, 8192)
    below = need_of(SMOLLM2, PlanRequest(context_tokens=16_384, parallel=2)) - 1
    split, whole = (plan_of(SMOLLM2, PlanRequest(slot_policy=each), room=below) for each in SlotPolicy)
    assert (split.parallel, split.window_tokens) == (2, 7168)  # 1.75 times what one slot has
    assert (whole.parallel, whole.window_tokens) == (1, 8192)


def test_the_settings_decide_what_nobody_asked_for() -> None:
    below = need_of(SMOLLM2, PlanRequest(context_tokens=16_384, parallel=2)) - 1
    policy = replace(POLICY, slot_policy=SlotPolicy.WINDOW, checkpoint_min_step_tokens=4096)
    made = plan_of(SMOLLM2, room=below, policy=policy)
    assert (made.parallel, made.launch.checkpoint_min_step_tokens) == (1, 4096)
    assert (
        plan_of(SMOLLM2, PlanRequest(slot_policy=SlotPolicy.BALANCED), room=below, policy=policy).parallel
        == 2
    )


# --- explicit requests ---


def test_a_request_is_honoured_exactly_or_padded_up() -> None:
    made = plan_of(LLAMA_8B, PlanRequest(context_tokens=10_000, parallel=3))
    assert (made.context_tokens, made.parallel, made.window_tokens) == (10_752, 3, 3584)
    assert made.capped_by is CappedBy.REQUEST
    assert plan_of(LLAMA_8B, PlanRequest(context_tokens=8192)).context_tokens == 8192
    whole = plan_of(SMOLLM2, PlanRequest(context_tokens=8192 * 4, parallel=4))
    assert (whole.context_tokens, whole.window_tokens, whole.notes) == (32_768, 8192, ())


def test_a_context_without_slots_is_shared_by_two_where_they_have_a_page_and_fit() -> None:
    made = plan_of(LLAMA_8B, PlanRequest(context_tokens=8192))
    assert (made.parallel, made.window_tokens) == (2, 4096)
    assert made.notes == ("2 slots, as no number was asked for",)
    small = plan_of(LLAMA_8B, PlanRequest(context_tokens=2047))
    assert (small.parallel, small.context_tokens) == (1, 2048)
    assert small.notes == ("2,048 tokens instead of 2,047: whole cells for each slot",)
    assert plan_of(LLAMA_8B, PlanRequest(context_tokens=2048)).parallel == 2
    # A state-space model keeps a state for every slot.
    one, two = (need_of("mamba-2.8b", PlanRequest(context_tokens=4096, parallel=n)) for n in (1, 2))
    assert one < two
    tight = plan_of("mamba-2.8b", PlanRequest(context_tokens=4096), room=two - 1)
    assert (tight.parallel, tight.context_tokens, tight.notes) == (1, 4096, ())
    assert plan_of("mamba-2.8b", PlanRequest(context_tokens=4096), room=two).parallel == 2


def test_one_given_side_of_the_cache_is_mirrored() -> None:
    for request in (
        PlanRequest(4096, cache_type_k=CacheType.F16),
        PlanRequest(4096, cache_type_v=CacheType.F16),
    ):
        made = plan_of(LLAMA_8B, request)
        assert made.launch.cache_types == (CacheType.F16, CacheType.F16)
        assert made.quote.item("kv cache").bytes == 32 * 4096 * (2048 + 2048)
    both = PlanRequest(4096, cache_type_k=CacheType.F16, cache_type_v=CacheType.Q8_0)
    made = plan_of(LLAMA_8B, both)
    assert (made.cache_type_k, made.cache_type_v) == (CacheType.F16, CacheType.Q8_0)
    assert made.quote.item("kv cache").bytes == 32 * 4096 * (2048 + 1088)


def test_a_default_cache_type_that_the_model_cannot_have_gives_way() -> None:
    odd = odd_heads(SMOLLM2)
    made = plan_of(odd)
    assert made.launch.cache_types == (CacheType.F16, CacheType.F16)
    (note,) = made.notes
    assert note.startswith("cache type f16 instead of q8_0: ") and "80 values" in note
    assert plan_of(odd, policy=replace(POLICY, cache_type=CacheType.BF16)).notes == ()


def test_a_cache_type_that_was_asked_for_does_not() -> None:
    odd = odd_heads(SMOLLM2)
    for request in (PlanRequest(cache_type_k=CacheType.Q8_0), PlanRequest(cache_type_v=CacheType.Q4_0)):
        assert refusal(odd, request).code is ErrorCode.UNSUPPORTED_COMBINATION
    plan_of(odd, PlanRequest(cache_type_k=CacheType.F16))


def test_batches_as_asked() -> None:
    made = plan_of(LLAMA_8B, PlanRequest(8192, batch_tokens=1024, micro_batch_tokens=256)).launch
    assert (made.batch_tokens, made.micro_batch_tokens) == (1024, 256)
    made = plan_of(LLAMA_8B, PlanRequest(8192, micro_batch_tokens=4096)).launch
    assert (made.batch_tokens, made.micro_batch_tokens) == (4096, 4096)  # a micro batch is part of a batch
    made = plan_of(LLAMA_8B, PlanRequest(8192, batch_tokens=100)).launch
    assert (made.batch_tokens, made.micro_batch_tokens) == (100, 100)


def test_one_pool_and_whole_sliding_caches_as_asked() -> None:
    made = plan_of(GEMMA_27B, PlanRequest(16_384, 2, unified=True, swa_full=True))
    assert (made.launch.unified, made.launch.swa_full, made.window_tokens) == (True, True, 16_384)
    assert on_card(made.quote) > need_of(GEMMA_27B, PlanRequest(16_384, 2))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (PlanRequest(parallel=0), "parallel"),
        (PlanRequest(parallel=-3), "parallel"),
        (PlanRequest(context_tokens=0), "context_tokens"),
        (PlanRequest(context_tokens=-4096), "context_tokens"),
        (PlanRequest(batch_tokens=0), "batch_tokens"),
        (PlanRequest(micro_batch_tokens=-1), "micro_batch_tokens"),
        (PlanRequest(draft_tokens=0), "draft_tokens"),
        (PlanRequest(gpu_layers=-1), "gpu_layers"),
        (PlanRequest(cpu_experts=-1), "cpu_experts"),
    ],
)
def test_zero_is_not_unset(request_: PlanRequest, field: str) -> None:
    error = refusal(SMOLLM2, request_)
    assert error.code is ErrorCode.INVALID_REQUEST
    assert field in error.details and option_of(field) in error.message


def test_stretching_without_a_longer_window_says_that_nothing_is_stretched() -> None:
    for request in (
        PlanRequest(rope_scaling=RopeScaling.YARN),
        PlanRequest(8192, 1, rope_scaling=RopeScaling.YARN),
    ):
        made = plan_of(SMOLLM2, request)
        assert made.rope is None
        assert any("more than 8,192 tokens for each slot" in note for note in made.notes)
    longer = plan_of(SMOLLM2, PlanRequest(16_384, 1, rope_scaling=RopeScaling.YARN))
    assert longer.rope is not None and longer.notes == ()


def test_the_policy_window_tells_what_it_leaves() -> None:
    policy = PlanRequest(slot_policy=SlotPolicy.WINDOW)
    four = PlanRequest(4 * 8192, 4)
    six = need_of(SMOLLM2, PlanRequest(6 * 8192, 6))
    made = plan_of(SMOLLM2, policy, room=six)
    assert (made.parallel, made.window_tokens) == (4, 8192)
    (note,) = made.notes
    unused = int(note.split()[0].replace(",", ""))
    assert 2 * 8192 - PAGE_TOKENS * 4 <= unused <= 2 * 8192 + PAGE_TOKENS * 4
    assert plan_of(SMOLLM2, policy, room=need_of(SMOLLM2, four)).notes == ()


def test_a_window_beyond_the_training_is_refused() -> None:
    error = refusal(SMOLLM2, PlanRequest(context_tokens=20_000, parallel=1))
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert "trained for 8,192" in error.message
    assert error.hint == "Ask for at most --context 8192, or for --parallel 3."
    assert error.details["largest_context_tokens"] == 8192
    plan_of(SMOLLM2, PlanRequest(context_tokens=20_000, parallel=3))
    unasked = refusal(SMOLLM2, PlanRequest(context_tokens=20_000))
    assert unasked.hint == error.hint.replace("8192", "16384")
    assert "in 2 slots, as no number was asked for, are 10,000 in each" in unasked.message


def test_a_window_below_a_page_is_refused() -> None:
    error = refusal(SMOLLM2, PlanRequest(context_tokens=4096, parallel=5))
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert error.hint == "Ask for at least --context 5120, or for at most --parallel 4."
    plan_of(SMOLLM2, PlanRequest(context_tokens=4096, parallel=4))
    plan_of(SMOLLM2, PlanRequest(context_tokens=5120, parallel=5))
    alone = refusal(SMOLLM2, PlanRequest(context_tokens=1023))
    assert alone.hint == "Ask for at least --context 1024."


def test_more_slots_than_the_engine_has_are_refused() -> None:
    error = refusal(SMOLLM2, PlanRequest(parallel=cache.MAX_SLOTS + 1))
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION


def test_an_engine_of_a_gpu_serves_from_host_memory_like_any_other() -> None:
    made = plan(
        facts_of(SMOLLM2),
        PlanRequest(),
        POLICY,
        features=Features(Backend.CUDA),
        card_kind=CardKind.CPU,
        room=Room(PLENTY),
    )
    assert made == plan_of(SMOLLM2, backend=Backend.CPU)
    assert not made.on_card


# --- drafting ---


def test_a_model_that_can_drafts_for_itself() -> None:
    made = plan_of(DRAFTING, backend=Backend.CUDA)
    assert made.launch.draft == Draft(
        POLICY.draft_tokens
    )  # f16: converting q8_0 costs more in a long context
    short = plan_of(DRAFTING, PlanRequest(4096, 1), backend=Backend.CUDA)
    assert short.launch.draft == Draft(POLICY.draft_tokens, CacheType.Q8_0, CacheType.Q8_0)
    assert {"draft cache", "draft compute"} <= {item.name for item in made.quote.items}
    longer = plan_of(DRAFTING, PlanRequest(draft_tokens=7), policy=replace(POLICY, draft_tokens=5))
    assert longer.launch.draft is not None and longer.launch.draft.tokens == 7
    usual = plan_of(DRAFTING, policy=replace(POLICY, draft_tokens=5)).launch.draft
    assert usual is not None and usual.tokens == 5


def test_drafting_is_off_where_it_is_not_wanted_or_offered() -> None:
    off = plan_of(DRAFTING, PlanRequest(drafting=Drafting.OFF))
    assert (off.launch.draft, off.notes) == (None, ())
    assert plan_of(DRAFTING, policy=replace(POLICY, drafting=Drafting.OFF)) == off
    old = Features(Backend.VULKAN, drafts_itself=False)
    assert plan_of(DRAFTING, features=old) == off
    assert plan_of(LLAMA_8B, policy=replace(POLICY, drafting=Drafting.ON)).launch.draft is None
    assert plan_of(DRAFTING, backend=Backend.CPU).launch.draft is None
    asked = plan_of(DRAFTING, PlanRequest(drafting=Drafting.ON), backend=Backend.CPU)
    assert asked.launch.draft is not None


def test_a_window_in_which_an_agent_can_work_comes_before_drafting() -> None:
    request = PlanRequest(40_960, 1, drafting=Drafting.ON)
    need = need_of(DRAFTING, request)
    made = plan_of(DRAFTING, room=need)
    assert made.launch.draft is not None
    assert (made.parallel, made.window_tokens, made.notes) == (1, 40_960, ())
    without = plan_of(DRAFTING, room=need - 1)
    assert without.launch.draft is None
    assert without.window_tokens > 40_960
    assert without.notes == ("without drafting: with it no window of 40,960 tokens would fit",)
    insisting = plan_of(DRAFTING, PlanRequest(drafting=Drafting.ON), room=need - 1)
    assert insisting.launch.draft is not None
    assert insisting.window_tokens == 39_936
    short = replace(facts_of(DRAFTING), trained_context_tokens=8192)
    need = need_of(short, PlanRequest(8192, 1, drafting=Drafting.ON))
    assert plan_of(short, room=need).launch.draft is not None
    assert plan_of(short, room=need - 1).launch.draft is None


def test_a_context_that_was_asked_for_comes_before_drafting() -> None:
    need = need_of(DRAFTING, PlanRequest(8192, 1, drafting=Drafting.ON))
    assert plan_of(DRAFTING, PlanRequest(8192, 1), room=need).launch.draft is not None
    made = plan_of(DRAFTING, PlanRequest(8192, 1), room=need - 1)
    assert (made.launch.draft, made.notes) == (None, ("without drafting: with it nothing would fit",))
    assert refusal(DRAFTING, PlanRequest(8192, 1, drafting=Drafting.ON), room=need - 1)
    nothing = refusal(DRAFTING, room=1 << 30)
    assert nothing.code is ErrorCode.INSUFFICIENT_MEMORY


@pytest.mark.parametrize(
    ("model", "question", "why"),
    [
        (LLAMA_8B, {}, "neither this model nor a file beside it drafts with this engine"),
        (
            DRAFTING,
            {"features": Features(Backend.VULKAN, drafts_itself=False)},
            "neither this model nor a file beside it drafts with this engine",
        ),
        (DRAFTING, {"policy": replace(POLICY, drafting=Drafting.OFF)}, "drafting is off"),
        (DRAFTING, {"backend": Backend.CPU}, "nothing drafts here unless it is asked for (--draft on)"),
    ],
)
def test_a_length_of_drafts_without_a_draft_is_not_passed_over(
    model: str, question: dict[str, Any], why: str
) -> None:
    made = plan_of(model, PlanRequest(8192, 1, draft_tokens=5), **question)
    assert made.launch.draft is None
    assert made.notes == (f"--draft-tokens 5 is without effect: {why}",)
    plain = plan_of(model, PlanRequest(8192, 1), **question)
    assert plain == replace(made, notes=())


def test_a_length_of_drafts_says_that_drafting_was_given_up() -> None:
    need = need_of(DRAFTING, PlanRequest(8192, 1, drafting=Drafting.ON, draft_tokens=5))
    request = PlanRequest(8192, 1, draft_tokens=5)
    assert plan_of(DRAFTING, request, room=need).notes == ()
    made = plan_of(DRAFTING, request, room=need - 1)
    assert made.notes == (
        "without drafting: with it nothing would fit",
        "--draft-tokens 5 is without effect: drafting was given up",
    )


# --- projector ---


def test_a_projector_is_on_the_card_where_that_costs_little() -> None:
    projector = projector_of(800)
    made = plan_of(LLAMA_8B, projector=projector)
    assert (made.with_projector, made.launch.projector_on_card, made.notes) == (True, True, ())
    assert made.quote.item("projector").place is Place.CARD
    host = plan_of(LLAMA_8B, PlanRequest(projector=ProjectorPlace.HOST), projector=projector)
    assert not host.launch.projector_on_card
    assert host.quote.item("projector").place is Place.HOST
    off = plan_of(LLAMA_8B, PlanRequest(projector=ProjectorPlace.OFF), projector=projector)
    assert off == plan_of(LLAMA_8B)
    settings_off = replace(POLICY, projector=ProjectorPlace.OFF)
    assert plan_of(LLAMA_8B, projector=projector, policy=settings_off) == off
    old = Features(Backend.VULKAN, projects=False)
    left_out = plan_of(LLAMA_8B, projector=projector, features=old)
    assert (left_out.with_projector, left_out.launch) == (False, off.launch)
    assert left_out.notes == ("without the projector: this engine takes none",)


def test_a_projector_that_costs_too_much_of_the_window_is_in_host_memory() -> None:
    projector, one = projector_of(800), PlanRequest(parallel=1)
    for window, on_host in ((8192, True), (65_536, False)):
        room = need_of(LLAMA_8B, PlanRequest(window, 1))
        made = plan_of(LLAMA_8B, one, projector=projector, room=room)
        assert made.with_projector
        assert made.launch.projector_on_card is not on_host
        assert bool(made.notes) is on_host
        if not on_host:
            card = replace(one, projector=ProjectorPlace.CARD)
            kept = plan_of(LLAMA_8B, card, projector=projector, room=room).window_tokens
            assert 3 * window <= 4 * kept < 4 * window
    room = need_of(LLAMA_8B, PlanRequest(8192, 1))
    (note,) = plan_of(LLAMA_8B, one, projector=projector, room=room).notes
    assert note.startswith("projector in host memory: on the card ")
    assert refusal(LLAMA_8B, replace(one, projector=ProjectorPlace.CARD), projector=projector, room=room)
    asked = PlanRequest(8192, 1)
    (note,) = plan_of(LLAMA_8B, asked, projector=projector, room=room).notes
    assert note == "projector in host memory: on the card it would not fit"


def test_without_a_card_a_projector_has_one_place() -> None:
    made = plan_of(
        LLAMA_8B,
        PlanRequest(projector=ProjectorPlace.HOST),
        projector=projector_of(800),
        backend=Backend.CPU,
    )
    assert made.with_projector
    assert made.quote.item("projector").place is Place.CARD
    assert made.notes == ()
    on_card = PlanRequest(projector=ProjectorPlace.CARD)
    other = plan_of(LLAMA_8B, on_card, projector=projector_of(800), backend=Backend.CPU)
    assert other == replace(made, notes=("projector in host memory: there is no card",))
    assert plan_of(LLAMA_8B, projector=projector_of(800), backend=Backend.CPU).notes == ()


def test_the_largest_image_is_that_of_the_settings() -> None:
    policy = replace(POLICY, image_max_tokens=4096)
    small, large = (
        plan_of(LLAMA_8B, PlanRequest(8192), projector=projector_of(100), policy=each).quote
        for each in (POLICY, policy)
    )
    assert small.item("projector graph").bytes < large.item("projector graph").bytes


# --- longer than trained ---


def test_a_window_beyond_the_training_on_request() -> None:
    request = PlanRequest(81_920, 1, rope_scaling=RopeScaling.YARN)
    made = plan_of(QWEN3_8B, request)
    assert facts_of(QWEN3_8B).trained_context_tokens == 40_960
    assert made.rope == Stretch(RopeScaling.YARN, 2.0, 40_960, 81_920)
    assert (made.window_tokens, made.context_tokens, made.parallel) == (81_920, 81_920, 1)
    assert refusal(QWEN3_8B, PlanRequest(81_920, 1)).code is ErrorCode.UNSUPPORTED_COMBINATION


def test_what_is_stretched_for_one_window_is_not_shared() -> None:
    """Two slots would have windows of 40,960 tokens, for which nothing needs to be stretched."""
    made = plan_of(QWEN3_8B, PlanRequest(81_920, rope_scaling=RopeScaling.YARN))
    assert (made.parallel, made.window_tokens, made.notes) == (1, 81_920, ())
    assert plan_of(QWEN3_8B, PlanRequest(32_768, rope_scaling=RopeScaling.YARN)).parallel == 2
    shared = plan_of(QWEN3_8B, PlanRequest(163_840, 2, rope_scaling=RopeScaling.YARN))
    assert (shared.parallel, shared.window_tokens) == (2, 81_920)
    assert shared.rope == made.rope


def test_nothing_is_stretched_that_nobody_named() -> None:
    made = plan_of(QWEN3_8B, PlanRequest(rope_scaling=RopeScaling.YARN))
    assert (made.rope, made.window_tokens) == (None, 40_960)


# --- always ---


@settings(deadline=None)
@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(BACKENDS),
    context=st.one_of(st.none(), st.integers(1, 200_000)),
    parallel=st.one_of(st.none(), st.integers(1, 5)),
    drafting=st.sampled_from(Drafting),
    offload=st.sampled_from(Offload),
    projector_mib=st.sampled_from([None, 20, 900]),
    card_mib=st.integers(0, 80_000),
    host_mib=st.one_of(st.none(), st.integers(0, 80_000)),
)
def test_a_plan_never_exceeds_its_budget_and_is_always_the_same(
    *,
    model: str,
    backend: Backend,
    context: int | None,
    parallel: int | None,
    drafting: Drafting,
    offload: Offload,
    projector_mib: int | None,
    card_mib: int,
    host_mib: int | None,
) -> None:
    if drafting is Drafting.ON and not facts_of(model).has_mtp:
        drafting = Drafting.AUTO
    planner = planner_of(
        model,
        PlanRequest(context, parallel, drafting=drafting, offload=offload),
        room=Room(card_mib * MIB, None if host_mib is None else host_mib * MIB),
        backend=backend,
        projector=None if projector_mib is None else projector_of(projector_mib),
    )
    try:
        made = planner.plan()
    except LlmError as error:
        assert error.code in {ErrorCode.INSUFFICIENT_MEMORY, ErrorCode.UNSUPPORTED_COMBINATION}
        with pytest.raises(LlmError) as again:
            planner.plan()
        assert again.value.problem() == error.problem()
        return
    assert made == planner.plan()
    assert on_card(made.quote) <= card_mib * MIB
    if host_mib is not None and not made.launch.layers.is_full:
        assert made.quote.total_bytes(Place.HOST) <= host_mib * MIB
    assert made.quote == price(
        facts_of(model), made.launch, backend, POLICY, planner.projector if made.with_projector else None
    )
    assert made.launch.shape(facts_of(model)).context_tokens == made.context_tokens
    if context is not None:
        assert context <= made.context_tokens < context + 256 * (made.parallel + 1)
    assert parallel in {None, made.parallel}


def test_a_context_that_only_two_slots_can_hold_is_refused_for_memory_and_not_for_one() -> None:
    """With the second slot nobody asked for; a single one would be beyond what the model was trained for."""
    trained = facts_of(QWEN3_8B).trained_context_tokens
    error = refusal(QWEN3_8B, PlanRequest(context_tokens=trained + 1024), room=6000 * MIB)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    assert error.details["parallel"] == 2
