"""A tier in a plan: only on request, only where the engine would split, and the price is that of its sizes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import CappedBy, Plan, PlanRequest, plan
from lllm3090d.planning.quote import MIB, Place
from lllm3090d.planning.request import Drafting, Features, Room, TierRoom
from lllm3090d.planning.reserves import Budget, BudgetLine
from lllm3090d.planning.tier import LEAST_LINE_TOKENS, TierOffer, rollback_tokens
from lllm3090d.planning.tier_choice import Way
from lllm3090d.planning.tier_conditions import HostMemory, TierMachine
from lllm3090d.planning.tier_speed import DecodeStep, MeasuredSteps, link_speed
from lllm3090d.serving.plan_views import plan_view
from lllm3090d.wire_plans import TierView
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


# --- speed ---

PLAIN = DecodeStep(1, 1 / 43.2, "43.2 tokens/s measured (a card)")
FAST = replace(
    TIER, link=link_speed(3, 16), steps=MeasuredSteps((("none", PLAIN), ("mtp", "nobody counted")))
)


def tier_view(made: Plan) -> TierView:
    checkpoint = Checkpoint(MODEL, Path("/models/m/m.gguf"), (), 1)
    lines = (BudgetLine("total", 24 * GIB, "test"),)
    view = plan_view(
        checkpoint, facts_of(MODEL), made, Budget(lines, lines), argv=(), card_kind=CardKind.NVIDIA
    )
    assert view.tier is not None
    json.dumps(view.model_dump(mode="json"))
    return view.tier


def test_the_speed_at_the_windows_end_is_predicted_from_a_measured_step() -> None:
    made = plan_of(PlanRequest(tiered=True, drafting=Drafting.OFF), 20 * GIB, FAST)
    view = tier_view(made)
    cell, line, context = 34_816, made.launch.line_tokens, made.context_tokens
    for depth, told in ((context, view.end_tokens_per_s), (context // 2, view.half_tokens_per_s)):
        seconds = 1 / 43.2 + max(0, depth - line) * cell / 12.5e9
        assert told == pytest.approx(1 / seconds)
    assert view.speed == (
        "Speed predicted from 43.2 tokens/s measured (a card); bus 12.5 GB/s, measured on PCIe 3.0 x16."
    )
    assert view.speed in made.notes
    possible = [way.fits for way in view.ways]
    assert possible == sorted(possible, reverse=True)  # those that cannot be had come last
    assert {way.way for way in view.ways} >= {Way.VRAM, Way.TIER, Way.Q4_0, Way.SMALLER}
    tier = next(way for way in view.ways if way.way is Way.TIER)
    assert (tier.card_tokens, tier.end_tokens_per_s) == (line, view.end_tokens_per_s)
    whole = next(way for way in view.ways if way.way is Way.VRAM)
    assert not whole.fits and whole.end_tokens_per_s is None


@pytest.mark.parametrize(
    ("tier", "request_", "why"),
    [
        (FAST, PlanRequest(tiered=True), "nobody counted"),
        (TIER, PlanRequest(tiered=True), "nobody has measured the model on this card"),
        (
            replace(FAST, link=None),
            PlanRequest(tiered=True, drafting=Drafting.OFF),
            "the link between host and card is not known",
        ),
    ],
)
def test_where_nothing_is_known_no_speed_is_told(tier: TierRoom, request_: PlanRequest, why: str) -> None:
    made = plan_of(request_, 20 * GIB, tier)
    view = tier_view(made)
    assert (view.end_tokens_per_s, view.half_tokens_per_s) == (None, None)
    assert view.speed == f"Speed not predicted: {why}."
    assert view.speed in made.notes


def test_of_an_adopted_launch_nothing_is_predicted() -> None:
    made = replace(plan_of(PlanRequest(tiered=True, drafting=Drafting.OFF), 20 * GIB, FAST), ways=())
    view = tier_view(made)
    assert (view.end_tokens_per_s, view.speed, view.ways) == (None, None, ())


def test_speeds_never_change_the_launch_that_was_asked_for() -> None:
    request = PlanRequest(tiered=True, drafting=Drafting.OFF)
    assert (
        plan_of(request, 20 * GIB, FAST).launch
        == plan_of(request, 20 * GIB, replace(TIER, link=None)).launch
    )


@pytest.mark.parametrize(
    ("context", "mib", "says"),
    [
        (65_536, 16_384, "Ask for --context 65536 --cache-type q4_0 --tier."),
        (98_304, 16_384, "Leave the tier out, and ask for --context"),
        (196_608, 17_408, "Ask for --context 196608 --cache-type q4_0 --tier."),
        (262_144, 14_336, "Leave the tier out, or ask for a smaller context."),
    ],
)
def test_a_refusal_says_how_to_ask_for_the_best_of_the_other_ways(context: int, mib: int, says: str) -> None:
    """What it says can be had: a smaller type, or a smaller window."""
    asked = PlanRequest(context_tokens=context, parallel=1, drafting=Drafting.OFF, tiered=True)
    hint = refusal(asked, mib * MIB).hint or ""
    assert hint.startswith(says)
    found = re.search(r"--context (\d+)(?: --cache-type (\w+))?( --tier)?", hint)
    if found is None:
        return
    kind = CacheType(found[2]) if found[2] else None
    other = replace(asked, context_tokens=int(found[1]), cache_type_k=kind, tiered=bool(found[3]))
    assert plan_of(other, mib * MIB).context_tokens == int(found[1])
