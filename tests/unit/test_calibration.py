"""Calibration: what was seen changes the next quote and plan as promised, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import Pooling, Purpose
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.calibration import (
    EXCESS,
    PEAK,
    SHORT_KEPT_S,
    Calibration,
    CalibrationKey,
    CalibrationScope,
    Measurement,
    Seen,
    calibrated,
    comparable_bytes,
    deviation,
    launch_text,
    slack_bytes,
)
from lllm3090d.planning.devices import DeviceRoom
from lllm3090d.planning.launch import Draft, Launch
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.quote import Evidence, LineItem, Place, Quote
from lllm3090d.planning.request import Drafting, PlanRequest, Room, SlotPolicy
from lllm3090d.planning.units import MIB
from lllm3090d.serving.plan_views import weakest
from tests.unit.engine_truth import POLICY, facts_of
from tests.unit.plans import (
    BACKENDS,
    CARDS,
    DRAFTING,
    GEMMA_27B,
    LLAMA_8B,
    PLENTY,
    QWEN3_8B,
    launch_of,
    on_card,
    plan_of,
    planner_of,
    projector_of,
    refusal,
    served,
    total_served,
)

pytestmark = pytest.mark.unit

NOW_S = 1_800_000_000.0
GIB = 1024 * MIB


def scope_of(backend: Backend = Backend.CUDA) -> CalibrationScope:
    return CalibrationScope("s1-abc", "digest", backend, "GPU-1")


def nothing(backend: Backend = Backend.CUDA) -> Calibration:
    return Calibration(scope_of(backend))


def measurement(
    launch: str, peak: int, *, backend: Backend = Backend.CUDA, probe: int = 2048, at_s: float = NOW_S
) -> Measurement:
    return Measurement(CalibrationKey(scope_of(backend), launch), peak, peak, probe, at_s)


def after(
    made: Plan,
    peak: int,
    *,
    backend: Backend = Backend.CUDA,
    probe: int = 2048,
    known: Calibration | None = None,
) -> Calibration:
    """What is known once a plan was loaded and measured."""
    text = launch_text(made.launch)
    quoted = comparable_bytes(made.first_quote, backend)
    return (known or nothing(backend)).measured(
        measurement(text, peak, backend=backend, probe=probe), quoted
    )


def quote_of(*items: tuple[str, int], host: int = 0) -> Quote:
    lines = [LineItem(name, Place.CARD, size, Evidence.HEADER, "") for name, size in items]
    return Quote((*lines, LineItem("process", Place.HOST, host, Evidence.HEADER, "")))


# --- the text of a launch -----------------------------------------------------------------------------------

OTHERS: dict[str, Any] = {
    "context_tokens": 8192,
    "parallel": 3,
    "batch_tokens": 512,
    "micro_batch_tokens": 256,
    "context_checkpoints": 1,
    "prompt_cache_mib": 0,
    "unified": True,
    "swa_full": True,
    "layers": Placement(layers_on_card=3),
    "draft": Draft(2),
    "projector_on_card": False,
    "image_max_tokens": 64,
    "slot_tokens": 512,
    "checkpoint_min_step_tokens": 1,
    "line_tokens": 256,
    "tail_draft_tokens": 1,
    "purpose": Purpose.EMBEDDING,
    "pooling": Pooling.MEAN,
}


@pytest.mark.parametrize("name", [each.name for each in fields(Launch)])
def test_every_value_of_a_launch_is_in_its_text(name: str) -> None:
    """But for those that say what host memory may hold later: no peak shows them, on a card or in host memory."""
    launch = launch_of(4096)
    if name == "cache_type_k":
        other = replace(launch, cache_type_k=CacheType.F16)
    elif name == "cache_type_v":
        other = replace(launch, cache_type_v=CacheType.F16)
    elif name == "drafter":
        other = replace(launch, drafter=facts_of(LLAMA_8B))
        assert launch_text(other) != launch_text(replace(launch, drafter=facts_of(QWEN3_8B)))
    else:
        other = replace(launch, **{name: OTHERS[name]})
    assert other != launch
    for_later = name in {"context_checkpoints", "prompt_cache_mib", "checkpoint_min_step_tokens"}
    assert (launch_text(other) == launch_text(launch)) is for_later
    assert launch_text(replace(other)) == launch_text(other)


def test_projector_and_arguments_are_in_the_text() -> None:
    launch = launch_of(4096)
    texts = [
        launch_text(launch),
        launch_text(launch, projector_of(100)),
        launch_text(launch, projector_of(200)),
        launch_text(launch, arguments=("--threads", "8")),
        launch_text(launch, arguments=("8", "--threads")),
        launch_text(launch, arguments=("--threads 8",)),
    ]
    assert len(set(texts)) == len(texts)


# --- what is learnt --------------------------------------------------------------------------------------------


def test_the_price_of_a_measured_launch_is_its_peak_and_a_slack() -> None:
    quote = quote_of(("weights", 5 * GIB), ("workspace floor", GIB), ("slack", 128 * MIB), host=7)
    # The floor falls with the first measurement, so nothing may count on it.
    assert comparable_bytes(quote, Backend.CUDA) == 5 * GIB + 128 * MIB
    known = nothing().measured(measurement("a", 4 * GIB), comparable_bytes(quote, Backend.CUDA))
    found = calibrated(quote, "a", known)
    assert on_card(found) == 4 * GIB + 128 * MIB
    assert {item.evidence for item in found.items if item.place is Place.CARD} == {Evidence.MEASURED}
    assert [item for item in found.items if item.place is Place.HOST] == list(quote.items[-1:])
    assert "2027-01-15" in found.item(PEAK).formula
    assert calibrated(quote, "b", known) == quote
    assert (weakest(found), weakest(quote)) == (Evidence.MEASURED, Evidence.HEADER)


@pytest.mark.parametrize(
    ("peak", "slack"), [(1, 128 * MIB), (12800 * MIB, 128 * MIB), (20_000 * MIB, 200 * MIB)]
)
def test_slack(peak: int, slack: int) -> None:
    assert slack_bytes(peak) == slack


def test_a_peak_without_a_prompt_raises_and_never_lowers() -> None:
    quote = quote_of(("weights", 5 * GIB))
    low = nothing().measured(measurement("a", 4 * GIB, probe=0), 5 * GIB)
    assert calibrated(quote, "a", low) == quote
    assert not low.has_measured_build
    high = nothing().measured(measurement("a", 6 * GIB, probe=0), 5 * GIB)
    for launch in ("a", "b"):
        found = calibrated(quote, launch, high)
        assert on_card(found) == 6 * GIB + 128 * MIB
        assert found.item(EXCESS).evidence is Evidence.MEASURED


def test_host_memory_never_lowers_a_price() -> None:
    quote = quote_of(("weights", 5 * GIB), ("prompt cache", GIB))
    quoted = comparable_bytes(quote, Backend.CPU)
    assert quoted == 5 * GIB
    low, high = (
        nothing(Backend.CPU).measured(measurement("a", peak, backend=Backend.CPU), quoted)
        for peak in (4 * GIB, 5 * GIB)
    )
    assert calibrated(quote, "a", low) == quote
    assert on_card(calibrated(quote, "a", high)) == 6 * GIB + 128 * MIB


def test_peaks_never_fall_and_the_last_quote_counts() -> None:
    known = nothing().measured(measurement("a", 4 * GIB), 3 * GIB)
    known = known.measured(measurement("a", 2 * GIB, probe=0, at_s=NOW_S + 1), 5 * GIB)
    assert known.seen == (Seen("a", 5 * GIB, 4 * GIB, 4 * GIB, 2048, 0, NOW_S + 1),)
    assert known.excess_bytes == 0


@pytest.mark.parametrize(("peak", "quoted"), [(0, 1), (-1, 1), (1, -1)])
def test_what_cannot_be_is_not_learnt(peak: int, quoted: int) -> None:
    with pytest.raises(ValueError, match="nothing takes"):
        nothing().measured(measurement("a", peak), quoted)


def test_another_scope_teaches_nothing() -> None:
    other = Measurement(CalibrationKey(replace(scope_of(), card="GPU-2"), "a"), 1, 1, 1, NOW_S)
    with pytest.raises(ValueError, match="another"):
        nothing().measured(other, 1)


# --- out of memory ---------------------------------------------------------------------------------------------


def test_each_out_of_memory_charges_a_step_more_up_to_a_quarter() -> None:
    known, excesses = nothing(), []
    for attempt in range(7):
        known = known.out_of_memory(f"launch {attempt}", 4 * GIB, NOW_S)
        excesses.append(known.excess_bytes // MIB)
    assert excesses == [256, 512, 768, 1024, 1024, 1024, 1024]
    item = known.excess_item
    assert item is not None
    assert "ran out of memory" in item.formula
    assert not known.has_measured_build


def test_out_of_memory_is_forgotten_after_a_while_and_when_it_was_not_so() -> None:
    known = nothing().out_of_memory("a", 4 * GIB, NOW_S)
    assert known.at(NOW_S + SHORT_KEPT_S) == known
    assert known.at(NOW_S + SHORT_KEPT_S + 1) == nothing()
    assert known.measured(measurement("a", 3 * GIB), 4 * GIB).excess_bytes == 0


def test_out_of_memory_after_a_measurement_is_charged_beyond_the_peak() -> None:
    quote = quote_of(("weights", 5 * GIB))
    known = nothing().measured(measurement("a", 5 * GIB), 5 * GIB).out_of_memory("a", 5 * GIB, NOW_S)
    assert on_card(calibrated(quote, "a", known)) == (5 * 1024 + 128 + 256) * MIB
    # A measurement at the same early moment takes nothing back: it was there before.
    again = known.measured(measurement("a", 5 * GIB), 5 * GIB)
    assert calibrated(quote, "a", again) == calibrated(quote, "a", known)
    assert calibrated(quote, "b", known).total_bytes(Place.CARD) == (5 * 1024 + 128 + 256) * MIB


# --- deviations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak_mib", "probe", "backend", "difference_mib"),
    [
        (10_000, 2048, Backend.CUDA, None),
        (10_256, 2048, Backend.CUDA, None),
        (10_257, 2048, Backend.CUDA, 257),
        (9_616, 2048, Backend.CUDA, None),  # the slack of 128 MiB may be left
        (9_615, 2048, Backend.CUDA, -257),
        (9_615, 0, Backend.CUDA, None),
        (10_257, 0, Backend.CUDA, 257),
        (1_000, 2048, Backend.CPU, None),
        (10_257, 2048, Backend.CPU, 257),
    ],
)
def test_deviation(peak_mib: int, probe: int, backend: Backend, difference_mib: int | None) -> None:
    quote = quote_of(("weights", 9_872 * MIB), ("slack", 128 * MIB))
    found = deviation(quote, measurement("a", peak_mib * MIB, backend=backend, probe=probe))
    assert (found and found.difference_bytes // MIB) == difference_mib
    if found is not None:
        assert "257" in found.text
        assert ("more" if peak_mib > 10_000 else "less") in found.text


def test_two_percent_of_a_large_quote() -> None:
    quote = quote_of(("weights", 20_000 * MIB))
    assert deviation(quote, measurement("a", 20_400 * MIB)) is None
    assert deviation(quote, measurement("a", 20_401 * MIB)) is not None


# --- plans ----------------------------------------------------------------------------------------------------------

shares = st.integers(0, 40)
cases = st.fixed_dictionaries(
    {
        "model": st.sampled_from([LLAMA_8B, QWEN3_8B, GEMMA_27B, DRAFTING]),
        "backend": st.sampled_from(BACKENDS),
        "slots": st.sampled_from([None, 1, 3]),
    }
)


def question(case: dict[str, Any], room: int, known: Calibration | None) -> Any:
    request = PlanRequest(parallel=case["slots"], slot_policy=SlotPolicy.BALANCED, drafting=Drafting.OFF)
    made = planner_of(case["model"], request, room=room, backend=case["backend"])
    return replace(made, calibration=known)


@st.composite
def histories(draw: Any, case: dict[str, Any]) -> Calibration:
    """Loads of plans for various rooms, each measured below or above its quote, or out of memory."""
    known = nothing(case["backend"])
    for _ in range(draw(st.integers(0, 3))):
        made = served(question(case, draw(st.integers(4, 40)) * GIB, known.at(NOW_S)))
        if made is None:
            continue
        quoted = comparable_bytes(made.first_quote, case["backend"])
        if draw(st.booleans()):
            peak = max(1, quoted + draw(st.integers(-4000, 4000)) * MIB)
            known = after(
                made, peak, backend=case["backend"], probe=draw(st.sampled_from([0, 2048])), known=known
            )
        else:
            known = known.out_of_memory(launch_text(made.launch), quoted, NOW_S)
    return known


@settings(deadline=None, max_examples=60)
@given(case=cases, data=st.data(), room=shares, more=st.integers(1, 8000))
def test_more_memory_serves_no_less_whatever_was_seen(
    case: dict[str, Any], data: Any, room: int, more: int
) -> None:
    known = data.draw(histories(case))
    small, large = (question(case, size, known) for size in (room * GIB, room * GIB + more * MIB))
    assert total_served(small) <= total_served(large)


@settings(deadline=None, max_examples=60)
@given(case=cases, data=st.data(), room=shares)
def test_no_plan_is_beyond_the_room_or_below_what_was_seen(
    case: dict[str, Any], data: Any, room: int
) -> None:
    known = data.draw(histories(case))
    made = served(question(case, room * GIB, known))
    if made is None:
        return
    assert on_card(made.quote) <= room * GIB
    seen = known.of(launch_text(made.launch))
    if seen is not None and seen.peak_bytes:
        assert on_card(made.quote) >= seen.peak_bytes + slack_bytes(seen.peak_bytes)
    if seen is None or not seen.is_whole:
        assert on_card(made.quote) == on_card(made.first_quote) + known.excess_bytes


@settings(deadline=None, max_examples=40)
@given(case=cases, room=st.integers(8, 40), beyond=st.integers(1, 4000))
def test_a_launch_that_took_more_is_planned_smaller_or_charged_more(
    case: dict[str, Any], room: int, beyond: int
) -> None:
    before = served(question(case, room * GIB, None))
    if before is None:
        return
    floor = sum(item.bytes for item in before.quote.items if item.name == "workspace floor")
    peak = comparable_bytes(before.quote, case["backend"]) + floor + beyond * MIB
    next_time = served(question(case, room * GIB, after(before, peak, backend=case["backend"])))
    if next_time is None:
        return
    if next_time.launch == before.launch:
        assert on_card(next_time.quote) > max(peak, on_card(before.quote))
    else:
        assert next_time.window_tokens * next_time.parallel <= before.window_tokens * before.parallel


@pytest.mark.parametrize("model", [LLAMA_8B, GEMMA_27B])
@pytest.mark.parametrize("backend", CARDS)
def test_the_same_question_settles(model: str, backend: Backend) -> None:
    """What is measured is planned again, at evidence measured, and from then on nothing changes."""
    first = plan_of(model, room=24 * GIB, backend=backend)
    peak = comparable_bytes(first.quote, backend) - 300 * MIB
    known = after(first, peak, backend=backend)
    asked = planner_of(model, room=24 * GIB, backend=backend)
    second = replace(asked, calibration=known).plan()
    if second.launch != first.launch:  # without the floor a longer window fits: once
        known = after(second, peak, backend=backend, known=known)
        second = replace(asked, calibration=known).plan()
    assert second.quote.item(PEAK).bytes == peak
    third = replace(asked, calibration=after(second, peak, backend=backend, known=known)).plan()
    assert third.launch == second.launch
    assert third.quote.total_bytes(Place.CARD) == on_card(second.quote)


def test_a_measured_build_has_no_floor() -> None:
    request = PlanRequest(4096, 1)
    assert POLICY.workspace_reserve_mib == 1024
    for model in (LLAMA_8B, QWEN3_8B):
        asked = planner_of(model, request, backend=Backend.VULKAN)
        with_floor = asked.plan().quote
        known = replace(nothing(Backend.VULKAN), has_measured_build=True)
        without = replace(asked, calibration=known).plan().quote
        floors = [item for item in with_floor.items if item.name == "workspace floor"]
        assert floors
        assert on_card(without) == on_card(with_floor) - sum(item.bytes for item in floors)
        assert "workspace floor" not in {item.name for item in without.items}


def test_a_window_asked_for_is_admitted_by_its_peak() -> None:
    request = PlanRequest(32_768, 1)
    made = plan_of(LLAMA_8B, request, backend=Backend.CUDA)
    peak = comparable_bytes(made.quote, Backend.CUDA) - 600 * MIB
    known = after(made, peak)
    room = peak + slack_bytes(peak)
    assert refusal(LLAMA_8B, request, room=room, backend=Backend.CUDA).code is ErrorCode.INSUFFICIENT_MEMORY
    asked = planner_of(LLAMA_8B, request, room=room, backend=Backend.CUDA)
    assert on_card(replace(asked, calibration=known).plan().quote) == room
    short = replace(asked, calibration=known, room=Room(room - 1))
    assert served(short) is None
    # Other arguments are another launch.
    assert served(replace(asked, calibration=replace(known, arguments=("--threads", "8")))) is None


def test_a_release_that_quotes_less_charges_the_difference() -> None:
    """The excess was worked out with the quote of then; the plan keeps to the room all the same."""
    made = plan_of(LLAMA_8B, room=12 * GIB, backend=Backend.CUDA)
    seen = Seen(launch_text(made.launch), PLENTY, 13 * GIB, 13 * GIB, 2048, 0, NOW_S)
    known = Calibration(scope_of(), (seen,))
    assert known.excess_bytes == 0
    asked = planner_of(LLAMA_8B, room=12 * GIB, backend=Backend.CUDA)
    less = replace(asked, calibration=known).plan()
    assert less.window_tokens < made.window_tokens
    assert on_card(less.quote) <= 12 * GIB


def test_several_cards_are_charged_the_excess_each() -> None:
    cards = tuple(DeviceRoom(13 * GIB, 12 * GIB, f"CUDA{index}") for index in range(2))
    asked = planner_of(GEMMA_27B, room=Room(0, cards=cards), backend=Backend.CUDA)
    plain = asked.plan()
    known = Calibration(scope_of(), (Seen("x", 0, short_bytes=512 * MIB, short_s=NOW_S),))
    careful = replace(asked, calibration=known).plan()
    assert plain.split is not None
    assert careful.split is not None
    assert len(careful.split.ledgers) == len(plain.split.ledgers) == 2
    for ledger in careful.split.ledgers:
        assert ledger.item(EXCESS).bytes == 512 * MIB
        assert on_card(ledger) <= 12 * GIB
    assert careful.window_tokens < plain.window_tokens
    assert on_card(careful.quote) == on_card(careful.first_quote) + GIB


def test_a_refusal_names_what_was_seen() -> None:
    known = nothing().out_of_memory("a", 5 * GIB, NOW_S)
    asked = planner_of(LLAMA_8B, PlanRequest(131_072, 1), room=8 * GIB, backend=Backend.CUDA)
    with pytest.raises(Exception, match=f"{EXCESS} 256.0"):
        replace(asked, calibration=known).plan()
