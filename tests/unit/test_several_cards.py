"""Plans on a machine with several cards: the fewest that will do, each within its room, a refusal card by card."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode
from lllm3090d.planning import offload
from lllm3090d.planning.devices import DeviceRoom
from lllm3090d.planning.planner import CappedBy, Plan
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Offload, PlanRequest, Room
from lllm3090d.planning.split import Division
from lllm3090d.planning.split_search import best_excess_bytes
from tests.unit.engine_truth import POLICY, facts_of
from tests.unit.plans import (
    DRAFTING,
    GEMMA_27B,
    LLAMA_8B,
    MIXTURE,
    SMOLLM2,
    kind_of,
    plan_of,
    planner_of,
    projector_of,
    refusal,
    served,
    variant_of,
)

pytestmark = pytest.mark.unit

GIB = 1 << 30


def _room(*cards_gib: float, host_gib: int = 64) -> Room:
    sizes = [int(size * GIB) for size in cards_gib]
    cards = tuple(DeviceRoom(size, size, f"CUDA{index}") for index, size in enumerate(sizes))
    return Room(0, host_gib * GIB, cards)


def _plan(model: str, request: PlanRequest | None = None, *cards_gib: float) -> Plan:
    return plan_of(model, request, room=_room(*cards_gib), backend=Backend.CUDA)


def _needs(plan: Plan) -> dict[str, int]:
    assert plan.split is not None
    return dict(zip(plan.split.devices, plan.split.needs_bytes, strict=True))


@pytest.mark.parametrize("cards", [(), (10,)])
def test_with_one_card_or_none_nothing_changes(cards: tuple[float, ...]) -> None:
    room = replace(_room(*cards), card=10 * GIB)
    assert plan_of(LLAMA_8B, room=room) == plan_of(LLAMA_8B, room=Room(10 * GIB, 64 * GIB))
    assert plan_of(LLAMA_8B, room=room).split is None


def test_without_a_card_there_is_no_split() -> None:
    room = replace(_room(24, 24), card=32 * GIB)
    made = plan_of(LLAMA_8B, room=room, backend=Backend.CPU)
    assert made.split is None and not made.on_card


def test_what_fits_on_one_card_is_never_shared_out() -> None:
    """It is on the card with most room, with the plan that this card alone would have."""
    made = _plan(LLAMA_8B, None, 12, 24, 24)
    assert made.split is not None and made.split.devices == ("CUDA1",)
    alone = plan_of(LLAMA_8B, room=Room(24 * GIB, 64 * GIB), backend=Backend.CUDA)
    assert replace(made, split=None) == alone
    assert _needs(made) == {"CUDA1": alone.quote.total_bytes(Place.CARD)}


def test_a_useful_window_on_one_card_is_enough() -> None:
    """A second card would give a longer one."""
    made = _plan(GEMMA_27B, None, 22, 22)
    assert made.split is not None and len(made.split.devices) == 1
    assert made.capped_by is CappedBy.MEMORY
    assert made.window_tokens >= offload.USEFUL_DENSE_TOKENS


def test_two_cards_where_one_is_too_small() -> None:
    made = _plan(GEMMA_27B, None, 12, 12)
    assert made.split is not None and made.split.devices == ("CUDA1", "CUDA0")
    assert sum(made.split.shares) == len(facts_of(GEMMA_27B).layers) + 1
    assert all(needs <= 12 * GIB for needs in _needs(made).values())
    assert made.quote == made.split.quote
    # A page more does not fit, whatever the shares.
    more = replace(made.launch, context_tokens=made.launch.context_tokens + 1024)
    division = Division(facts_of(GEMMA_27B), more, Backend.CUDA, POLICY)
    assert best_excess_bytes(division, [12 * GIB, 12 * GIB]) > 0


def test_a_third_card_only_where_two_are_too_small() -> None:
    assert len(_needs(_plan(MIXTURE, None, 10, 10, 10))) == 3
    assert len(_needs(_plan(MIXTURE, None, 14, 14, 14))) == 2
    assert len(_needs(_plan(MIXTURE, PlanRequest(context_tokens=4096), 10, 10, 10))) == 2


def test_a_context_that_was_asked_for_decides() -> None:
    """On one card where it fits, on more where it must, or nowhere."""
    asked = PlanRequest(context_tokens=131_072, parallel=1)
    assert len(_needs(_plan(LLAMA_8B, asked, 24, 16))) == 1
    made = _plan(LLAMA_8B, asked, 10, 8)
    assert len(_needs(made)) == 2 and made.context_tokens == 131_072
    error = refusal(LLAMA_8B, asked, room=_room(7, 5), backend=Backend.CUDA)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY


def test_where_no_set_is_enough_the_most_is_served() -> None:
    """A second card whose process takes more than it gives is left alone."""
    one = _plan(LLAMA_8B, None, 5.8, 3)
    assert one.window_tokens < offload.USEFUL_DENSE_TOKENS
    alone = plan_of(LLAMA_8B, room=Room(int(5.8 * GIB), 64 * GIB), backend=Backend.CUDA)
    assert one.window_tokens * one.parallel >= alone.window_tokens * alone.parallel


def test_a_refusal_tells_of_every_card() -> None:
    error = refusal(GEMMA_27B, None, room=_room(12, 4), backend=Backend.CUDA)
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY
    cards = error.details["cards"]
    assert [card["name"] for card in cards] == ["CUDA1", "CUDA0"]
    assert [card["grantable_bytes"] for card in cards] == [4 * GIB, 12 * GIB]
    for card in cards:
        assert card["needed_bytes"] == sum(item["bytes"] for item in card["items"])
        assert card["name"] in error.message and f"{card['grantable_bytes'] >> 20:,}.0 MiB" in error.message
    over = max(card["needed_bytes"] - card["grantable_bytes"] for card in cards)
    assert error.details["missing_bytes"] == over > 0
    # Together the cards have room enough: it is the second one that is too small for its share.
    assert "--offload allowed" in (error.hint or "")
    assert served(planner_of(GEMMA_27B, PlanRequest(offload=Offload.ALLOWED), room=_room(12, 4))) is not None


def test_nothing_is_left_in_host_memory_before_all_cards_are_used() -> None:
    allowed = PlanRequest(offload=Offload.ALLOWED)
    assert _plan(GEMMA_27B, allowed, 12, 12).launch.layers.is_full
    made = _plan(MIXTURE, allowed, 10, 6)
    assert not made.launch.layers.is_full
    assert made.split is not None and len(made.split.devices) == 2
    for name, needs in _needs(made).items():
        assert needs <= {"CUDA0": 10, "CUDA1": 6}[name] * GIB


def test_drafting_and_projector_come_along() -> None:
    facts, projector = facts_of(DRAFTING), projector_of(900)
    room = _room(14, 13)
    made = plan_of(facts, PlanRequest(), room=room, backend=Backend.CUDA, projector=projector)
    assert made.split is not None and made.split.main == "CUDA0"
    other, main = made.split.ledgers
    assert made.launch.draft is not None and made.with_projector
    names = {item.name for item in main.items}
    assert {"draft cache", "draft compute", "projector"} <= names
    assert not names & {"projector"} & {item.name for item in other.items}


def test_hand_made_placements_are_kept() -> None:
    made = _plan(MIXTURE, PlanRequest(cpu_experts=20, context_tokens=8192), 8, 8)
    assert made.launch.layers.expert_layers_on_host == 20


def test_other_refusals_are_not_for_want_of_cards() -> None:
    error = refusal(LLAMA_8B, PlanRequest(context_tokens=1 << 24), room=_room(24, 24), backend=Backend.CUDA)
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION


def test_a_card_that_owes_memory_takes_no_layer() -> None:
    cards = (DeviceRoom(24 * GIB, -GIB, "CUDA0"), DeviceRoom(24 * GIB, 24 * GIB, "CUDA1"))
    made = plan_of(SMOLLM2, room=Room(0, 64 * GIB, cards), backend=Backend.CUDA)
    assert list(_needs(made)) == ["CUDA1"]
    error = refusal(GEMMA_27B, room=Room(0, 64 * GIB, (cards[0], replace(cards[1], free_bytes=8 * GIB))))
    assert error.code is ErrorCode.INSUFFICIENT_MEMORY


@given(
    st.sampled_from([LLAMA_8B, GEMMA_27B, MIXTURE, DRAFTING]),
    st.lists(st.integers(2, 30), min_size=2, max_size=4),
    st.sampled_from([None, 16_384]),
    st.sampled_from(Offload),
)
def test_no_card_is_ever_overfull(
    model: str, cards: list[int], context: int | None, allowed: Offload
) -> None:
    room = _room(*cards)
    made = served(
        planner_of(
            model, PlanRequest(context_tokens=context, offload=allowed), room=room, backend=Backend.CUDA
        )
    )
    if made is None:
        return
    rooms = {card.name: card.free_bytes for card in room.cards}
    needs = _needs(made)
    assert all(needs[name] <= rooms[name] for name in needs)
    assert made.quote.total_bytes(Place.CARD) == sum(needs.values())
    assert made.split is not None and rooms[made.split.main] == max(rooms[name] for name in needs)
    assert kind_of(Backend.CUDA) is not None and made.on_card


sizes_gib = st.lists(st.sampled_from([0.0, 1.5, 4, 5.5, 8, 12, 16, 20]), min_size=2, max_size=3)


@given(
    st.sampled_from([LLAMA_8B, GEMMA_27B, MIXTURE, DRAFTING, SMOLLM2]),
    sizes_gib,
    st.sampled_from([2048, 8192]),
)
def test_what_fits_on_no_single_card_is_planned_the_same_without_trying(
    model: str, cards_gib: list[float], context: int
) -> None:
    """And what was found sound needs no second look."""
    request = PlanRequest(context, 1)
    alone = Room(int(max(cards_gib) * GIB), 64 * GIB)
    question = planner_of(model, request, room=_room(*cards_gib), backend=Backend.CUDA)
    if served(planner_of(model, request, room=alone, backend=Backend.CUDA)) is None:
        assert served(replace(question, fits_on_none=True)) == served(question)
    assert served(replace(question, is_checked=True)) == served(question)


@given(st.sampled_from([LLAMA_8B, GEMMA_27B, MIXTURE, DRAFTING]), sizes_gib)
def test_cards_that_are_too_small_together_are_told_by_the_weights_alone(
    model: str, cards_gib: list[float]
) -> None:
    """Never where the best shares would fit."""
    room = _room(*cards_gib)
    variant = replace(variant_of(model, room=Room(0, None, room.cards)), limit_tokens=4096)
    launch = variant.launch(4096, 1)
    division = Division(variant.facts, launch, variant.backend, variant.policy)
    best = best_excess_bytes(division, [card.free_bytes for card in room.cards])
    assert variant.fits(launch) == (best <= 0)
