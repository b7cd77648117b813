"""The slot rule, the verdict and the ceilings of stretched positions, on windows and numbers made up here."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.rope import MAX_ROPE_FACTOR, RopeScaling, context_ceiling, rope_factor
from lllm3090d.planning.slots import (
    MAX_AUTO_PARALLEL,
    SlotPlan,
    SlotPolicy,
    automatic_slots,
    most_slots,
    requested_slots,
)
from lllm3090d.planning.verdict import (
    Verdict,
    agent_ready,
    agent_remarks,
    concurrent_subagents,
    verdict,
)

pytestmark = pytest.mark.unit

M = 262_144
PAGE = 1024


class Card:
    """A card that holds so many tokens, less what each slot takes for itself; notes what it is asked."""

    def __init__(self, tokens: int, limit: int = M, *, each_slot: int = 0) -> None:
        self.tokens, self.limit, self.each_slot = tokens, limit, each_slot
        self.asked: list[int] = []

    def pool(self, slots: int) -> int:
        return max(0, self.tokens - self.each_slot * slots) // PAGE * PAGE

    def window(self, slots: int) -> int:
        self.asked.append(slots)
        return min(self.limit, self.pool(slots) // slots // PAGE * PAGE)

    def plan(self, policy: SlotPolicy = SlotPolicy.BALANCED) -> SlotPlan:
        return automatic_slots(policy, self.window, self.limit, pool=self.pool)


# --- the worked cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "limit", "balanced", "window"),
    [
        (389_120, M, (1, M), (1, M)),
        (393_216, M, (2, 196_608), (1, M)),
        (465_920, M, (2, 232_448), (1, M)),
        (362_496, 131_072, (3, 120_832), (2, 131_072)),
        (431_104, M, (2, 215_040), (1, M)),
        (565_248, M, (2, M), (2, M)),
        (696_320, 131_072, (4, 131_072), (4, 131_072)),
        (159_744, M, (1, 159_744), (1, 159_744)),
        (PAGE, M, (1, PAGE), (1, PAGE)),
        (PAGE - 1, M, (0, 0), (0, 0)),
        (0, M, (0, 0), (0, 0)),
    ],
)
def test_both_policies(pool: int, limit: int, balanced: tuple[int, int], window: tuple[int, int]) -> None:
    for policy, expected in ((SlotPolicy.BALANCED, balanced), (SlotPolicy.WINDOW, window)):
        found = Card(pool, limit).plan(policy)
        assert (found.slots, found.window_tokens) == expected
        assert found.total_tokens == expected[0] * expected[1]
        assert found.fits is bool(expected[0])
        assert found.is_limited_by_model is (expected[1] == limit)


def test_a_split_plan_states_what_one_slot_would_give() -> None:
    split, whole = Card(465_920).plan(), Card(389_120).plan()
    assert split.one_slot_window_tokens == M
    assert whole.one_slot_window_tokens is None


def test_what_a_plan_leaves_unused_is_told_where_somebody_can_say() -> None:
    assert Card(465_920).plan(SlotPolicy.WINDOW).unused_tokens == 465_920 - M
    assert Card(465_920).plan().unused_tokens == PAGE
    assert Card(100_000).plan().unused_tokens == 0
    card = Card(465_920)
    assert automatic_slots(SlotPolicy.WINDOW, card.window, M).unused_tokens is None


def test_slots_that_take_something_themselves_are_paid_first() -> None:
    free, dear = Card(540_000).plan(), Card(540_000, each_slot=100_000).plan()
    assert (free.slots, free.window_tokens) == (2, M)
    assert (dear.slots, dear.window_tokens) == (1, M)


def test_a_model_of_less_than_a_page_is_served_whole() -> None:
    found = automatic_slots(SlotPolicy.WINDOW, lambda _: 512, 512)
    assert (found.slots, found.window_tokens, found.is_limited_by_model) == (4, 512, True)
    assert automatic_slots(SlotPolicy.BALANCED, lambda _: 512, 512).slots == 2


# --- how often it asks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "policy", "asked"),
    [
        (0, SlotPolicy.BALANCED, [1]),
        (100_000, SlotPolicy.BALANCED, [1, 2]),
        (465_920, SlotPolicy.BALANCED, [1, 2, 3]),
        (4 * M, SlotPolicy.BALANCED, [1, 2, 3, 4]),
        (0, SlotPolicy.WINDOW, [1]),
        (100_000, SlotPolicy.WINDOW, [1]),
        (2 * M, SlotPolicy.WINDOW, [1, 2, 3]),
        (9 * M, SlotPolicy.WINDOW, [1, 2, 3, 4]),
    ],
)
def test_each_number_is_asked_about_once_at_most(pool: int, policy: SlotPolicy, asked: list[int]) -> None:
    card = Card(pool)
    card.plan(policy)
    assert card.asked == asked


def test_a_quicker_question_replaces_windows_that_need_not_be_known() -> None:
    card, questions = Card(2 * M), []

    def holds(slots: int) -> bool:
        questions.append(slots)
        return card.pool(slots) >= slots * M

    found = automatic_slots(SlotPolicy.WINDOW, card.window, M, holds_limit=holds)
    assert (found.slots, found.window_tokens) == (2, M)
    assert (card.asked, questions) == ([1], [2, 3])


# --- explicit numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "window"), [(1, 33_792), (2, 16_384), (3, 11_264), (33, 1024)])
def test_an_explicit_number_is_honoured_beyond_the_automatic_limit(slots: int, window: int) -> None:
    card = Card(33_792)
    found = requested_slots(slots, card.window, M, pool=card.pool)
    assert (found.slots, found.window_tokens) == (slots, window)
    assert found.unused_tokens == 33_792 - slots * window
    assert found.one_slot_window_tokens == (33_792 if slots > 1 else None)


@pytest.mark.parametrize("slots", [34, 64, 1000])
def test_too_many_slots_are_refused_with_the_most_that_fit(slots: int) -> None:
    card = Card(33_792)
    with pytest.raises(LlmError, match=f"{slots} slots of at least 1,024") as caught:
        requested_slots(slots, card.window, M)
    assert caught.value.code is ErrorCode.INSUFFICIENT_MEMORY
    assert caught.value.details["largest_parallel"] == 33
    assert caught.value.hint == "At most 33 slots fit: --parallel 33."
    assert len(card.asked) <= 2 + math.log2(slots)


def test_the_most_that_fit_may_be_one_or_none() -> None:
    for tokens, hint in ((PAGE, "At most 1 slot fits"), (0, "Not even one slot")):
        with pytest.raises(LlmError) as caught:
            requested_slots(2, Card(tokens).window, M)
        assert caught.value.hint is not None
        assert caught.value.hint.startswith(hint)
    with pytest.raises(LlmError, match="1 slot of"):
        requested_slots(1, Card(0).window, M)


def test_a_quicker_question_finds_the_most_that_fit() -> None:
    card = Card(33_792)
    with pytest.raises(LlmError) as caught:
        requested_slots(64, card.window, M, fits=lambda n: n <= 33)
    assert caught.value.details["largest_parallel"] == 33
    assert card.asked == [64]


@pytest.mark.parametrize("count", [0, -1])
def test_no_slots_are_no_request(count: int) -> None:
    card = Card(M)
    with pytest.raises(LlmError, match="at least 1") as caught:
        requested_slots(count, card.window, M)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert card.asked == []


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_not_positive_is_a_mistake_of_the_caller(limit: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        automatic_slots(SlotPolicy.BALANCED, lambda _: 1024, limit)
    with pytest.raises(ValueError, match="positive"):
        requested_slots(1, lambda _: 1024, limit)


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_most_slots_are_found(limit: int, fitting: int) -> None:
    assert most_slots(limit, lambda n: n <= fitting) == min(limit, fitting)


# --- whatever the windows ----------------------------------------------------------------------------------


@given(
    st.integers(0, 5 * M),
    st.sampled_from((1024, 32_768, M)),
    st.integers(0, 50_000),
    st.sampled_from(SlotPolicy),
)
def test_a_plan_is_one_that_the_card_holds(tokens: int, limit: int, each: int, policy: SlotPolicy) -> None:
    card = Card(tokens, limit, each_slot=each)
    found = card.plan(policy)
    assert 0 <= found.slots <= MAX_AUTO_PARALLEL
    assert found.fits is (card.pool(1) >= PAGE)
    if found.fits:
        assert found.window_tokens == card.window(found.slots)
        assert found.total_tokens <= card.pool(found.slots)
        assert found.total_tokens >= card.window(1)  # never less than one slot would give
    if policy is SlotPolicy.WINDOW and found.fits:
        assert found.window_tokens == card.window(1)  # never shorter either


@given(st.integers(0, 5 * M), st.integers(0, M), st.integers(0, 50_000), st.sampled_from(SlotPolicy))
def test_a_larger_card_serves_no_less(tokens: int, more: int, each: int, policy: SlotPolicy) -> None:
    before = Card(tokens, each_slot=each).plan(policy)
    after = Card(tokens + more, each_slot=each).plan(policy)
    assert after.total_tokens >= before.total_tokens - PAGE * after.slots
    if policy is SlotPolicy.WINDOW:
        assert after.total_tokens >= before.total_tokens
        assert after.window_tokens >= before.window_tokens


# --- the verdict -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "can", "expected"),
    [
        (0, True, Verdict.TOO_BIG),
        (0, False, Verdict.CAPABILITY),
        (M, False, Verdict.CAPABILITY),
        (1024, True, Verdict.TIGHT),
        (40_000, True, Verdict.TIGHT),
        (40_001, True, Verdict.OK),
        (M, True, Verdict.OK),
    ],
)
def test_the_first_verdict_that_applies(window: int, can: bool, expected: Verdict) -> None:
    assert verdict(window, card_can_compute=can) is expected
    if can and window:
        assert agent_ready(window) is (expected is Verdict.OK)


def test_no_agent_works_with_vectors_or_scores() -> None:
    for purpose in (Purpose.EMBEDDING, Purpose.RERANK):
        assert verdict(128, purpose=purpose) is Verdict.OK
        assert verdict(0, purpose=purpose) is Verdict.TOO_BIG
        assert verdict(128, purpose=purpose, card_can_compute=False) is Verdict.CAPABILITY


def test_what_an_agent_should_know() -> None:
    assert agent_remarks(M, 2) == ()
    assert [line.split()[0] for line in agent_remarks(M, 1)] == ["There"]
    (short,) = agent_remarks(59_999, 2)
    assert "below 60,000" in short
    assert agent_remarks(60_000, 2) == ()
    floor, alone = agent_remarks(40_000, 1)
    assert "not above the 40,000" in floor
    assert "one slot" in alone
    assert [concurrent_subagents(slots) for slots in (1, 2, 3, 4)] == [1, 1, 2, 3]


# --- stretched positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [RopeScaling.LINEAR, RopeScaling.YARN])
@given(trained=st.integers(1, 1 << 21), requested=st.integers(0, 1 << 26))
def test_a_factor_reaches_every_window_up_to_the_ceiling(
    scaling: RopeScaling, trained: int, requested: int
) -> None:
    ceiling = context_ceiling(trained, scaling, requested)
    assert trained <= ceiling <= MAX_ROPE_FACTOR * trained
    assert ceiling >= min(requested, MAX_ROPE_FACTOR * trained)
    factor = rope_factor(trained, ceiling)
    assert factor == 0 or 1.5 <= factor <= MAX_ROPE_FACTOR
    assert (factor or 1) * trained >= ceiling
    assert factor * 2 == int(factor * 2)
    assert factor == 0 or (factor - 0.5) * trained < ceiling


@given(trained=st.integers(1, 1 << 21), requested=st.integers(0, 1 << 26))
def test_nothing_is_stretched_unasked(trained: int, requested: int) -> None:
    assert context_ceiling(trained, RopeScaling.NONE, requested) == trained
    assert rope_factor(trained, trained) == 0
    assert context_ceiling(trained, RopeScaling.YARN) == trained


def test_an_explicit_factor_wins() -> None:
    assert rope_factor(32_768, 65_536) == 2
    assert rope_factor(32_768, 65_536, 4.0) == 4.0
    assert rope_factor(32_768, 1024, 1.25) == 1.25
    assert rope_factor(32_768, 1 << 30) == 8


@pytest.mark.parametrize(
    "call",
    [
        lambda: context_ceiling(-1, RopeScaling.YARN, 5),
        lambda: context_ceiling(1024, RopeScaling.YARN, -5),
        lambda: rope_factor(-1, 5),
        lambda: rope_factor(1024, -5),
        lambda: rope_factor(1024, 2048, 0.0),
        lambda: rope_factor(1024, 2048, -2.0),
        lambda: rope_factor(1024, 2048, math.nan),
    ],
)
def test_negative_numbers_and_no_factors_are_mistakes_of_the_caller(call: Callable[[], float]) -> None:
    with pytest.raises(ValueError, match=r"negative|positive"):
        call()
