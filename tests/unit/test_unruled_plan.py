"""Plans of models without a rule, with a made-up engine: the search, its number of runs, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.devices import DeviceRoom
from lllm3090d.planning.launch import Launch, PlanPolicy
from lllm3090d.planning.planner import CappedBy, Plan
from lllm3090d.planning.projection import Figures, Projection, Where
from lllm3090d.planning.quote import Evidence, Place
from lllm3090d.planning.request import (
    Drafting,
    Offload,
    PlanRequest,
    ProjectorPlace,
    Room,
    RopeScaling,
    SlotPolicy,
)
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from lllm3090d.planning.unruled import MOST_RUNS, UnruledQuestion, fitted, most_room_bytes

pytestmark = pytest.mark.unit

GIB = 1 << 30
MODEL = UnruledModel("kimi-k9", "kimi", "Q4_K_M", 131_072, 32_000, 4 * GIB, "nobody knows it")
POLICY = PlanPolicy(CacheType.Q8_0, 2048, 512, 8, 1024, 1024)
QUESTION = UnruledQuestion(MODEL, PlanRequest(), POLICY, Backend.CPU, CardKind.CPU, Where.HOST)
Engine = Callable[[Launch], Projection]


def engine(bytes_per_token: int = 40_000) -> Engine:
    """What an engine on the host reports: in whole MiB, rounded down."""

    def project(launch: Launch) -> Projection:
        context = launch.context_tokens * bytes_per_token // MIB * MIB
        return Projection((), Figures(4 * GIB, context, 300 * MIB), Where.HOST)

    return project


def driven(question: UnruledQuestion, room: int, project: Engine = engine()) -> tuple[Plan, list[Launch]]:  # noqa: B008
    asked: list[Launch] = []
    steps = question.steps(room)
    try:
        launch = next(steps)
        while True:
            asked.append(launch)
            try:
                projection = project(launch)
            except LlmError as error:
                launch = steps.throw(error)
            else:
                launch = steps.send(projection)
    except StopIteration as end:
        assert isinstance(end.value, Plan)
        return end.value, asked


def asking(**fields: Any) -> UnruledQuestion:
    return replace(QUESTION, request=PlanRequest(**fields))


# --- sizes -----------------------------------------------------------------------------------------------------


def test_a_context_that_was_asked_for_is_projected_once_padded_as_the_engine_pads() -> None:
    plan, asked = driven(asking(context_tokens=10_000, parallel=3), 64 * GIB)
    assert [launch.context_tokens for launch in asked] == [10_752]  # 10,240 of 3 slots, each in whole cells
    assert (plan.context_tokens, plan.parallel, plan.window_tokens) == (10_752, 3, 3584)
    assert plan.capped_by is CappedBy.REQUEST
    assert any("10,752 tokens instead of 10,000" in note for note in plan.notes)


def test_the_plan_says_that_the_engine_alone_priced_it() -> None:
    plan, _ = driven(asking(context_tokens=8192), 64 * GIB)
    assert plan.notes[0] == (
        "architecture kimi-k9 has no rule here (nobody knows it): priced by a dry run of this engine alone, an upper"
        " bound"
    )
    for name in ("weights", "context", "compute"):
        assert plan.quote.item(name).evidence is Evidence.ENGINE
    launch = plan.launch
    assert (launch.context_checkpoints, launch.prompt_cache_mib, launch.draft) == (0, 1024, None)
    assert launch.cache_types == (CacheType.Q8_0, CacheType.Q8_0)
    assert (plan.with_projector, plan.tier, plan.rope, plan.on_card) == (False, None, None, False)


def test_everything_fits_in_one_run() -> None:
    plan, asked = driven(QUESTION, 64 * GIB)
    assert len(asked) == 1
    assert (plan.window_tokens, plan.capped_by, plan.parallel) == (131_072, CappedBy.MODEL, 1)


def test_a_straight_line_takes_few_runs_and_gives_the_last_page_that_fits() -> None:
    plan, asked = driven(QUESTION, 8 * GIB)
    assert len(asked) <= 6
    assert plan.capped_by is CappedBy.MEMORY
    assert plan.quote.total_bytes(Place.CARD) <= 8 * GIB
    larger, _ = driven(asking(context_tokens=plan.context_tokens + PAGE_TOKENS), 8 * GIB)
    assert larger.quote.total_bytes(Place.CARD) > 8 * GIB


def test_where_nothing_fits_the_smallest_is_offered_and_refused_with_its_ledger() -> None:
    plan, asked = driven(QUESTION, GIB)
    assert len(asked) == 2
    assert (plan.window_tokens, plan.capped_by) == (PAGE_TOKENS, CappedBy.MEMORY)
    with pytest.raises(LlmError) as caught:
        fitted(plan, MODEL, Room(GIB), CardKind.CPU)
    error = caught.value
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    assert "weights 4,097.0" in error.message
    assert "host memory can give 1,024.0 MiB now" in error.message
    assert error.hint is not None
    assert "smallest context there is" in error.hint
    assert error.details["missing_bytes"] == plan.quote.total_bytes(Place.CARD) - GIB
    assert fitted(plan, MODEL, Room(64 * GIB), CardKind.CPU) == plan


def test_a_size_that_was_asked_for_and_does_not_fit() -> None:
    plan, _ = driven(asking(context_tokens=131_072), GIB)
    with pytest.raises(LlmError, match="of context in 1 slot needs") as caught:
        fitted(plan, MODEL, Room(GIB, giver="an RTX 4090"), CardKind.NVIDIA)
    assert "an RTX 4090 can give 1,024.0 MiB, so" in caught.value.message
    assert caught.value.hint == "See what would fit: lllm3090ctl plan 'kimi', without --context."


@given(
    room=st.integers(GIB, 40 * GIB),
    trained=st.integers(300, 4_000_000),
    slots=st.integers(1, 4),
    bytes_per_token=st.integers(0, 400_000),
    bend=st.integers(0, 1 << 22),
)
def test_whatever_the_memory_is_like_the_plan_fits_and_the_runs_are_few(
    room: int, trained: int, slots: int, bytes_per_token: int, bend: int
) -> None:
    """Also where memory is no straight line: growing with the context, and never falling."""

    def project(launch: Launch) -> Projection:
        grown = launch.context_tokens * bytes_per_token + min(launch.context_tokens, bend) * 1000
        return Projection((), Figures(4 * GIB, grown // MIB * MIB, 300 * MIB), Where.HOST)

    question = replace(
        QUESTION,
        model=replace(MODEL, trained_context_tokens=trained),
        request=PlanRequest(parallel=slots),
    )
    plan, asked = driven(question, room, project)
    assert len(asked) <= MOST_RUNS
    assert plan.launch in asked
    need = plan.quote.total_bytes(Place.CARD)
    assert plan.context_tokens % (256 * slots) == 0
    if need > room:
        assert plan.window_tokens == min(trained, PAGE_TOKENS)
    if plan.capped_by is CappedBy.MODEL:
        assert plan.window_tokens == trained


def test_the_search_comes_close_even_where_memory_is_no_straight_line() -> None:
    def project(launch: Launch) -> Projection:
        grown = launch.context_tokens * 2000 + min(launch.context_tokens, 16_384) * 100_000
        return Projection((), Figures(4 * GIB, grown // MIB * MIB, 300 * MIB), Where.HOST)

    room = 4 * GIB + 2800 * MIB
    plan, asked = driven(QUESTION, room, project)
    assert len(asked) <= MOST_RUNS
    assert plan.quote.total_bytes(Place.CARD) <= room
    exact = next(
        n * PAGE_TOKENS
        for n in range(128, 0, -1)
        if driven(asking(context_tokens=n * PAGE_TOKENS), room, project)[0].quote.total_bytes(Place.CARD)
        <= room
    )
    assert plan.window_tokens >= 0.9 * exact


def test_a_limit_of_the_search() -> None:
    plan, asked = driven(replace(asking(parallel=2), most_tokens=20_000), 64 * GIB)
    assert len(asked) == 1
    assert (plan.window_tokens, plan.capped_by) == (10_240, CappedBy.REQUEST)


def test_batches_and_windows_are_told_to_the_engine() -> None:
    question = asking(context_tokens=8192, batch_tokens=256, swa_full=True, cache_type_k=CacheType.F16)
    plan, (launch,) = driven(question, 64 * GIB)
    assert (launch.batch_tokens, launch.micro_batch_tokens, launch.swa_full) == (256, 256, True)
    assert launch.cache_types == (CacheType.F16, CacheType.F16)
    assert plan.launch == launch


def test_context_checkpoints_are_charged_where_somebody_asks_for_them() -> None:
    without, _ = driven(asking(context_tokens=8192), 64 * GIB)
    asked, _ = driven(replace(asking(context_tokens=8192), context_checkpoints=2), 64 * GIB)
    assert asked.launch.context_checkpoints == 2
    assert asked.quote.total_bytes(Place.CARD) > without.quote.total_bytes(Place.CARD) + 500 * MIB
    assert any("without context checkpoints" in note for note in without.notes)
    assert not any("without context checkpoints" in note for note in asked.notes)


# --- types of the cache ------------------------------------------------------------------------------------------


def gives_up(what: str, *, timed_out: bool = False) -> LlmError:
    return LlmError(ErrorCode.ENGINE_FAILED, what, hint="Another.", timed_out=timed_out)


def only_f16(launch: Launch) -> Projection:
    if launch.cache_type_k is not CacheType.F16:
        raise gives_up("V cache quantization requires flash_attn")
    return engine()(launch)


def test_a_type_that_the_engine_refuses_is_given_up_where_nobody_asked_for_it() -> None:
    plan, asked = driven(QUESTION, 8 * GIB, only_f16)
    assert plan.launch.cache_types == (CacheType.F16, CacheType.F16)
    assert asked[0].cache_type_k is CacheType.Q8_0
    assert {launch.cache_type_k for launch in asked[1:]} == {CacheType.F16}
    assert any("cache type f16 instead of q8_0: the engine's dry run fails" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (asking(cache_type_k=CacheType.Q8_0), gives_up("unsupported type")),
        (QUESTION, gives_up("did not answer", timed_out=True)),
        (QUESTION, LlmError(ErrorCode.ENGINE_UNUSABLE, "brings no llama-fit-params", hint="Use another.")),
        (asking(cache_type_k=CacheType.F16), gives_up("unknown model architecture")),
    ],
)
def test_any_other_failure_is_told(question: UnruledQuestion, error: LlmError) -> None:
    runs = []

    def project(launch: Launch) -> Projection:
        runs.append(launch)
        raise error

    with pytest.raises(LlmError) as caught:
        driven(question, 8 * GIB, project)
    assert caught.value is error
    assert len(runs) == 1


def test_an_architecture_that_the_engine_does_not_know_is_told_once_more() -> None:
    def project(launch: Launch) -> Projection:
        raise gives_up(f"unknown model architecture, with {launch.cache_type_k}")

    with pytest.raises(LlmError, match="with f16"):
        driven(QUESTION, 8 * GIB, project)


ON_CUDA = replace(QUESTION, backend=Backend.CUDA, card_kind=CardKind.NVIDIA)


def test_cuda_without_the_card_has_an_f16_cache_unless_another_was_asked_for() -> None:
    plan, asked = driven(ON_CUDA, 64 * GIB)
    assert {launch.cache_type_k for launch in asked} == {CacheType.F16}
    assert plan.on_card
    assert any("cache type f16 instead of q8_0" in note for note in plan.notes)
    assert any("all of it is charged to the card" in note for note in plan.notes)
    with pytest.raises(LlmError) as caught:
        driven(replace(ON_CUDA, request=PlanRequest(cache_type_v=CacheType.Q8_0)), 64 * GIB)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert "what cuda needs" in caught.value.message


def test_on_the_card_itself_any_type_will_do() -> None:
    def project(launch: Launch) -> Projection:
        figures = Figures(3 * GIB, launch.context_tokens * 40_000 // MIB * MIB, 300 * MIB)
        return Projection((("CUDA0", figures),), Figures(GIB, 0, 20 * MIB), Where.DEVICE)

    plan, asked = driven(replace(ON_CUDA, where=Where.DEVICE), 64 * GIB, project)
    assert asked[0].cache_type_k is CacheType.Q8_0
    assert plan.quote.item("host weights").place is Place.HOST
    assert not any("charged to the card" in note for note in plan.notes)


# --- several cards -------------------------------------------------------------------------------------------------


def test_of_several_cards_the_one_with_the_most_room_takes_it_whole() -> None:
    room = Room(0, cards=(DeviceRoom(24 * GIB, 6 * GIB, "CUDA0"), DeviceRoom(24 * GIB, 20 * GIB, "CUDA1")))
    assert most_room_bytes(room) == 20 * GIB
    plan, _ = driven(replace(ON_CUDA, request=PlanRequest(context_tokens=8192)), most_room_bytes(room))
    made = fitted(plan, MODEL, room, CardKind.NVIDIA)
    assert made.split is not None
    assert made.split.devices == ("CUDA1",)
    assert made.split.needs_bytes == (plan.quote.total_bytes(Place.CARD),)
    assert made.split.host.total_bytes(Place.HOST) == plan.quote.total_bytes(Place.HOST)
    assert made.split.quote.total_bytes(Place.CARD) == plan.quote.total_bytes(Place.CARD)


# --- what cannot be asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"drafting": Drafting.ON}, "--draft"),
        ({"projector": ProjectorPlace.CARD}, "--projector"),
        ({"projector": ProjectorPlace.HOST}, "--projector"),
        ({"offload": Offload.ALLOWED}, "--offload"),
        ({"gpu_layers": 10}, "--gpu-layers"),
        ({"cpu_experts": 4}, "--cpu-experts"),
        ({"cache_on_host": True}, "--cache-on-host"),
        ({"tiered": True}, "--tier"),
        ({"rope_scaling": RopeScaling.YARN}, "--rope-scaling"),
        ({"unified": True, "parallel": 2}, "--unified"),
    ],
)
def test_what_a_dry_run_does_not_tell_is_refused_before_one_is_made(
    fields: dict[str, Any], option: str
) -> None:
    with pytest.raises(LlmError) as caught:
        driven(asking(**fields), 64 * GIB, lambda _: pytest.fail("a dry run was made"))
    error = caught.value
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert f"does not tell what {option} takes" in error.message
    assert error.hint == f"Leave {option} out."


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"context_tokens": 0}, ErrorCode.INVALID_REQUEST),
        ({"context_tokens": 200_000}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"context_tokens": 1000, "parallel": 4}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"parallel": 300}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"parallel": 64, "batch_tokens": 32}, ErrorCode.UNSUPPORTED_COMBINATION),
        ({"batch_tokens": 128, "micro_batch_tokens": 256}, ErrorCode.UNSUPPORTED_COMBINATION),
    ],
)
def test_sizes_that_no_launch_has(fields: dict[str, Any], code: ErrorCode) -> None:
    with pytest.raises(LlmError) as caught:
        driven(asking(**fields), 64 * GIB, lambda _: pytest.fail("a dry run was made"))
    assert caught.value.code is code


def test_an_engine_that_cannot_use_the_card() -> None:
    with pytest.raises(LlmError) as caught:
        driven(replace(QUESTION, card_kind=CardKind.NVIDIA), 64 * GIB)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


def test_what_is_usual_elsewhere_and_missing_here_is_noted() -> None:
    question = replace(
        asking(context_tokens=8192, draft_tokens=4, slot_policy=SlotPolicy.BALANCED),
        left_out=("its projector",),
    )
    plan, _ = driven(question, 64 * GIB)
    text = "\n".join(plan.notes)
    assert "without its projector: nothing tells what it takes" in text
    assert "--draft-tokens 4 is without effect" in text
    assert "--slot-policy is without effect" in text
