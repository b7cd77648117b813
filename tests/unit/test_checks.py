"""What cannot be planned, whatever the memory; and windows beyond the trained one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.checks import RANGES, check_context, check_request
from lllm3090d.planning.request import Drafting, Features, PlanRequest, ProjectorPlace
from lllm3090d.planning.rope import MAX_ROPE_FACTOR, RopeScaling
from lllm3090d.planning.stretch import Stretch, stretch
from tests.unit.engine_truth import facts_of
from tests.unit.plans import DRAFTING, LLAMA_8B, MIXTURE, QWEN3_8B, kind_of, plan_of, projector_of, refusal

pytestmark = pytest.mark.unit

CUDA = Features(Backend.CUDA)
PROJECTOR = projector_of(500)
MAMBA = "mamba-2.8b"


@pytest.mark.parametrize(
    ("model", "request_", "features", "projector", "reason"),
    [
        (
            LLAMA_8B,
            PlanRequest(gpu_layers=3),
            Features(Backend.CPU),
            None,
            "without a card there is nothing to place",
        ),
        (LLAMA_8B, PlanRequest(cache_on_host=True), Features(Backend.CPU), None, "nothing to place"),
        (MIXTURE, PlanRequest(cpu_experts=0), Features(Backend.CPU), None, "nothing to place"),
        (MIXTURE, PlanRequest(gpu_layers=3, cpu_experts=2), CUDA, None, "both layers and experts"),
        (LLAMA_8B, PlanRequest(cpu_experts=1), CUDA, None, "no experts to keep in host memory"),
        (MIXTURE, PlanRequest(cpu_experts=49), CUDA, None, "48 layers, and so many with experts"),
        (
            LLAMA_8B,
            PlanRequest(gpu_layers=34),
            CUDA,
            None,
            "--gpu-layers 34 is more than the 33 layers of llama-3.1-8b",
        ),
        (MIXTURE, PlanRequest(gpu_layers=10_000), CUDA, None, "more than the 49 layers"),
        (MIXTURE, PlanRequest(cpu_experts=1), replace(CUDA, places_experts=False), None, "--n-cpu-moe"),
        (
            LLAMA_8B,
            PlanRequest(cache_on_host=True),
            replace(CUDA, keeps_cache_on_host=False),
            None,
            "cannot keep its cache in host memory",
        ),
        (LLAMA_8B, PlanRequest(drafting=Drafting.ON), CUDA, None, "cannot draft for itself"),
        (
            DRAFTING,
            PlanRequest(drafting=Drafting.ON),
            replace(CUDA, drafts_itself=False),
            None,
            "no --spec-type draft-mtp",
        ),
        (LLAMA_8B, PlanRequest(projector=ProjectorPlace.CARD), CUDA, None, "no projector was found beside"),
        (LLAMA_8B, PlanRequest(projector=ProjectorPlace.HOST), CUDA, None, "no projector was found beside"),
        (
            LLAMA_8B,
            PlanRequest(projector=ProjectorPlace.HOST),
            replace(CUDA, projects=False),
            PROJECTOR,
            "takes no projector (--mmproj)",
        ),
        (LLAMA_8B, PlanRequest(unified=True), replace(CUDA, shares_pool=False), None, "no unified pool"),
        (
            QWEN3_8B,
            PlanRequest(81_920, 1, rope_scaling=RopeScaling.YARN),
            replace(CUDA, stretches=False),
            None,
            "cannot stretch positions",
        ),
        (
            LLAMA_8B,
            PlanRequest(batch_tokens=100, micro_batch_tokens=200),
            CUDA,
            None,
            "--micro-batch 200 is above --batch 100",
        ),
        (LLAMA_8B, PlanRequest(tiered=True), CUDA, None, "does not offer --kv-vram-cells"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(
    model: str, request_: PlanRequest, features: Features, projector: object, reason: str
) -> None:
    error = refusal(model, request_, features=features, backend=features.backend, projector=projector)
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert reason.casefold() in error.message.casefold()
    # Nothing of it stands in the way of a plan without it, on the same engine.
    plan_of(model, features=features, backend=features.backend)


@pytest.mark.parametrize(
    "request_",
    [
        PlanRequest(gpu_layers=3, cpu_experts=0),
        PlanRequest(cpu_experts=48),
        PlanRequest(gpu_layers=49),
        PlanRequest(cache_on_host=True, gpu_layers=0),
        PlanRequest(projector=ProjectorPlace.OFF, drafting=Drafting.OFF),
        PlanRequest(projector=ProjectorPlace.AUTO, drafting=Drafting.AUTO),
    ],
)
def test_what_is_possible_is_let_through(request_: PlanRequest) -> None:
    check_request(facts_of(MIXTURE), request_, CUDA, CardKind.NVIDIA, projector=None)


@pytest.mark.parametrize("model", [LLAMA_8B, DRAFTING])
def test_the_largest_number_of_layers_is_told(model: str) -> None:
    """Blocks for multi-token prediction count, as the engine counts them; what is told is accepted, and is all."""
    facts = facts_of(model)
    error = refusal(model, PlanRequest(gpu_layers=10_000))
    most = len(facts.layers) + 1
    assert error.hint == f"Ask for at most --gpu-layers {most}."
    assert plan_of(model, PlanRequest(gpu_layers=most)).launch == plan_of(model).launch


@pytest.mark.parametrize("kind", [kind for kind in CardKind if kind is not CardKind.CPU])
def test_an_engine_without_gpu_support_cannot_use_a_card(kind: CardKind) -> None:
    with pytest.raises(LlmError, match="CPU only") as caught:
        check_request(facts_of(LLAMA_8B), PlanRequest(), Features(Backend.CPU), kind, projector=None)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE
    check_request(facts_of(LLAMA_8B), PlanRequest(), Features(Backend.CPU), CardKind.CPU, projector=None)
    assert kind_of(Backend.CPU) is CardKind.CPU


def test_the_share_of_a_slot_is_within_a_page_and_the_longest_window() -> None:
    facts = facts_of(QWEN3_8B)
    for context, parallel in ((1024, 1), (40_960, 1), (81_920, 2), (3 * 1024, 3)):
        check_context(context, parallel, 40_960, facts)
    check_context(81_920, 1, 81_920, facts)
    with pytest.raises(LlmError, match="trained for 40,960 and stretched to 81,920") as caught:
        check_context(90_000, 1, 81_920, facts)
    assert caught.value.hint == "Ask for at most --context 81920, or for --parallel 2."
    short = replace(facts, trained_context_tokens=512)
    check_context(1024, 2, 512, short)
    with pytest.raises(LlmError, match="a slot needs 512 at least"):
        check_context(1022, 2, 512, short)


# --- beyond the trained window ---


def test_yarn_stretches_to_the_window_that_was_asked_for() -> None:
    facts = facts_of(QWEN3_8B)  # trained for 40,960 tokens
    made = stretch(facts, RopeScaling.YARN, 100_000)
    assert made == Stretch(
        RopeScaling.YARN, 2.5, 40_960, 102_400
    )  # a factor is in halves; so far it reaches
    ceiling = MAX_ROPE_FACTOR * 40_960
    assert stretch(facts, RopeScaling.YARN, ceiling) == Stretch(RopeScaling.YARN, 8.0, 40_960, ceiling)


def test_the_engines_own_rounding_is_not_promised_away() -> None:
    """It divides in 32 bits: 2048 tokens stretched by 3.5 are 7167 (seen in /props)."""
    facts = facts_of(QWEN3_8B)
    assert facts.rope is not None
    short = replace(
        facts, trained_context_tokens=2048, rope=replace(facts.rope, original_context_tokens=2048)
    )
    assert stretch(short, RopeScaling.YARN, 7000) == Stretch(RopeScaling.YARN, 3.5, 2048, 7167)
    assert stretch(short, RopeScaling.YARN, 7168) == Stretch(RopeScaling.YARN, 4.0, 2048, 8192)


@pytest.mark.parametrize(
    ("scaling", "window"),
    [
        (RopeScaling.YARN, None),
        (RopeScaling.YARN, 40_960),
        (RopeScaling.NONE, 81_920),
        (RopeScaling.LINEAR, 40_960),
        (RopeScaling.LINEAR, None),
    ],
)
def test_what_needs_no_stretching_is_not_stretched(scaling: RopeScaling, window: int | None) -> None:
    assert stretch(facts_of(QWEN3_8B), scaling, window) is None


@pytest.mark.parametrize(
    ("model", "scaling", "window", "reason", "hint"),
    [
        (QWEN3_8B, RopeScaling.LINEAR, 81_920, "with linear scaling", "--rope-scaling yarn"),
        (QWEN3_8B, RopeScaling.YARN, 8 * 40_960 + 1, "more than 8 times", "at most 327,680 tokens"),
        (MAMBA, RopeScaling.YARN, 1 << 21, "no rotary positions", "smaller context"),
    ],
)
def test_what_cannot_be_stretched_is_refused(
    model: str, scaling: RopeScaling, window: int, reason: str, hint: str
) -> None:
    with pytest.raises(LlmError, match=reason) as caught:
        stretch(facts_of(model), scaling, window)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert caught.value.hint is not None and hint in caught.value.hint
    assert refusal(model, PlanRequest(window, 1, rope_scaling=scaling)).message == caught.value.message


def test_a_model_that_was_stretched_in_training_is_stretched_from_its_origin() -> None:
    """The factor is relative to the context before any stretching, as the engine takes it."""
    facts = facts_of(QWEN3_8B)
    assert facts.rope is not None
    longer = replace(
        facts,
        trained_context_tokens=131_072,
        rope=replace(facts.rope, scaling="yarn", factor=4.0, original_context_tokens=32_768),
    )
    assert stretch(longer, RopeScaling.YARN, 131_072) is None
    assert stretch(longer, RopeScaling.YARN, 196_608) == Stretch(RopeScaling.YARN, 6.0, 32_768, 196_608)
    with pytest.raises(LlmError, match="more than 8 times the 32,768") as caught:
        stretch(longer, RopeScaling.YARN, 262_145)
    assert caught.value.hint == "Ask for at most 262,144 tokens in each slot."
    assert stretch(longer, RopeScaling.YARN, 262_144) is not None


@pytest.mark.parametrize("parallel", [257, 1 << 20, (1 << 31) - 1])
def test_slots_beyond_the_engines_are_refused_however_many(parallel: int) -> None:
    with pytest.raises(LlmError, match="at most 256") as caught:
        check_request(
            facts_of(LLAMA_8B), PlanRequest(parallel=parallel), CUDA, CardKind.NVIDIA, projector=None
        )
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION


@pytest.mark.parametrize(("field", "limits"), RANGES.items())
def test_numbers_beyond_their_range_are_refused(field: str, limits: tuple[int, int]) -> None:
    for value in (limits[0] - 1, limits[1] + 1):
        with pytest.raises(LlmError, match=f"{limits[0]} to {limits[1]}") as caught:
            asked: Any = {field: value}
            check_request(facts_of(LLAMA_8B), PlanRequest(**asked), CUDA, CardKind.NVIDIA, projector=None)
        assert caught.value.code is ErrorCode.INVALID_REQUEST
