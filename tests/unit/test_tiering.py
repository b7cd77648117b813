"""A tier in a plan: only on request, only where the engine would split, and the price is that of its sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import CappedBy, Plan, PlanRequest, plan
from lllm3090d.planning.quote import MIB, Place
from lllm3090d.planning.request import Drafting, Features, Room, TierRoom
from lllm3090d.planning.tier import LEAST_LINE_TOKENS, TierOffer, rollback_tokens
from lllm3090d.planning.tier_conditions import HostMemory, TierMachine
from tests.unit.engine_truth import POLICY, facts_of

pytestmark = pytest.mark.unit

GIB = 1 << 30
MODEL = "qwen3.5-27b-mtp"
OFFER = TierOffer(tier=True, draft_window=True, draft_tail=True)
TIER = TierRoom(
    TierMachine(True, Backend.CUDA, 1, virtual_memory=True, driver_version="590.48"),
    OFFER,
    HostMemory(48 * GIB, 64 * GIB),
)


def plan_of(
    request: PlanRequest,
    card_bytes: int,
    tier: TierRoom | None = TIER,
    facts: CheckpointFacts | None = None,
) -> Plan:
    return plan(
        facts or facts_of(MODEL),
        request,
        POLICY,
        features=Features(Backend.CUDA, tier=tier),
        card_kind=CardKind.NVIDIA,
        room=Room(card_bytes, 40 * GIB),
    )


def refusal(
    request: PlanRequest, card_bytes: int, tier: TierRoom | None = TIER, model: str = MODEL
) -> LlmError:
    with pytest.raises(LlmError) as caught:
        plan_of(request, card_bytes, tier, facts_of(model))
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    return caught.value


def test_no_tier_unless_asked_for() -> None:
    made = plan_of(PlanRequest(), 20 * GIB)
    assert (made.tier, made.launch.line_tokens) == (None, 0)


@pytest.mark.parametrize("gib", [20, 21, 22, 24])
def test_the_whole_window_with_a_part_in_host_memory(gib: int) -> None:
    made = plan_of(PlanRequest(tiered=True), gib * GIB)
    tier, launch = made.tier, made.launch
    assert tier is not None
    assert made.capped_by is CappedBy.MODEL
    assert made.window_tokens == facts_of(MODEL).trained_context_tokens
    assert LEAST_LINE_TOKENS <= launch.line_tokens == tier.line_tokens < made.context_tokens
    items = {item.name: item.bytes for item in made.quote.items}
    assert items["kv cache"] + items["kv staging"] == tier.sizes.card_bytes
    assert items["pinned cache"] == tier.sizes.host_bytes
    assert made.quote.total_bytes(Place.CARD) <= gib * GIB
    # The next line up would not fit: nothing of the card is left unused but a step.
    step = 256 * 34816
    assert gib * GIB - made.quote.total_bytes(Place.CARD) < step + 32 * 2 * MIB
    assert launch.draft is not None and launch.draft.window_tokens == tier.draft_window_tokens > 0
    assert tier.draft_context_tokens == 20_736
    assert any("pinned" in note for note in made.notes)


def test_the_line_rises_with_the_card() -> None:
    lines = [plan_of(PlanRequest(tiered=True), gib * GIB).launch.line_tokens for gib in (20, 21, 22, 23, 24)]
    assert lines == sorted(lines) and len(set(lines)) == len(lines)


def test_a_longer_draft_beyond_a_far_line_is_priced_from_the_start() -> None:
    made = plan_of(PlanRequest(tiered=True), 24 * GIB)
    assert made.launch.tail_draft_tokens == 4
    planes = made.launch.shape(facts_of(MODEL)).state_planes
    assert made.launch.draft is not None
    assert planes == 1 + rollback_tokens(made.launch.draft.tokens, 4)


def test_where_everything_fits_nothing_is_split() -> None:
    made = plan_of(PlanRequest(tiered=True), 40 * GIB)
    assert (made.tier, made.launch.line_tokens) == (None, 0)
    assert made.notes[-1] == "no tier: the whole cache fits on the card"


def test_a_size_that_was_asked_for_is_kept() -> None:
    made = plan_of(PlanRequest(context_tokens=131_072, tiered=True, drafting=Drafting.OFF), 18 * GIB)
    assert (made.context_tokens, made.capped_by) == (131_072, CappedBy.REQUEST)
    assert made.tier is not None and made.tier.batch_invariant is False


@pytest.mark.parametrize(
    ("request_", "tier", "model", "says"),
    [
        (PlanRequest(tiered=True), None, MODEL, "--kv-vram-cells"),
        (PlanRequest(tiered=True, parallel=2), TIER, MODEL, "one pool"),
        (PlanRequest(tiered=True), TIER, "gemma-3-27b", "sliding window"),
        (PlanRequest(tiered=True), TIER, "glm-4.7-flash", "latent attention"),
        (PlanRequest(tiered=True, cache_type_k=CacheType.Q5_1), TIER, MODEL, "one type for K and V"),
        (PlanRequest(tiered=True, cpu_experts=4), TIER, "qwen3-30b-a3b", "all layers on the card"),
        (
            PlanRequest(tiered=True),
            replace(TIER, machine=replace(TIER.machine, virtual_memory=None)),
            MODEL,
            "virtual memory",
        ),
        (
            PlanRequest(tiered=True),
            replace(TIER, machine=replace(TIER.machine, driver_version="550.1")),
            MODEL,
            "580 or later",
        ),
        (PlanRequest(tiered=True), replace(TIER, host=HostMemory(8 * GIB, 16 * GIB)), MODEL, "host memory"),
    ],
)
def test_where_the_engine_would_not_split_it_is_refused_with_the_reason(
    request_: PlanRequest, tier: TierRoom | None, model: str, says: str
) -> None:
    card = 14 * GIB if model in ("gemma-3-27b", "qwen3-30b-a3b") else 20 * GIB
    error = refusal(request_, card, tier, model)
    assert says in error.message


def test_a_card_too_small_for_a_line_is_refused_with_the_line() -> None:
    assert f"fewer than {LEAST_LINE_TOKENS}" in refusal(PlanRequest(tiered=True), 18 * GIB).message
