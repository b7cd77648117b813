"""Search by the quote: numbers found by asking as seldom as can be, and proven."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Draft
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Room
from lllm3090d.planning.search import SPARE_STEPS, first_true, last_within
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from tests.unit.plans import DRAFTING, LLAMA_8B, SMOLLM2, on_card, variant_of

pytestmark = pytest.mark.unit

# Steps that a price may take: none at all, even ones, and leaps of every size.
steps = st.lists(st.one_of(st.just(0), st.integers(90, 110), st.integers(0, 10**9)), max_size=300)


class Asked:
    """A function of a list that knows how often it was asked, and never for what it has not."""

    def __init__(self, values: list[int]) -> None:
        self.values = values
        self.count = 0

    def __call__(self, number: int) -> int:
        self.count += 1
        return self.values[number]


@given(steps, st.data())
def test_the_last_that_is_within_is_found(rises: list[int], data: st.DataObject) -> None:
    sums = list(accumulate(rises, initial=0))
    level = data.draw(st.sampled_from(sums)) + data.draw(st.integers(-1, 1))
    values = [value - level for value in sums]
    last = len(values) - 1
    asked = Asked(values)
    found = last_within(last, asked)
    assert found == max((n for n in range(1, last + 1) if values[n] <= 0), default=0)
    halving = math.ceil(math.log2(last - 1)) if last > 2 else 0
    assert asked.count <= 2 + halving + SPARE_STEPS


def test_a_straight_price_takes_four_questions() -> None:
    for fits in (1, 7, 100, 1023):
        asked = Asked([1000 * number - 1000 * fits - 1 for number in range(1025)])
        assert last_within(1024, asked) == fits
        assert asked.count <= 4
    everything = Asked([-5] * 1025)
    assert (last_within(1024, everything), everything.count) == (1024, 1)


def test_of_nothing_there_is_no_last() -> None:
    assert last_within(0, Asked([])) == 0
    assert last_within(1, Asked([0, 1])) == 0
    assert last_within(1, Asked([0, 0])) == 1
    assert last_within(2, Asked([0, 0, 1])) == 1


@given(st.integers(0, 200), st.integers(0, 201))
def test_the_first_true_is_found(last: int, first: int) -> None:
    asked = Asked([int(number >= first) for number in range(last + 1)])
    found = first_true(last, lambda number: bool(asked(number)))
    assert found == (first if first <= last else None)
    assert asked.count <= 1 + math.ceil(math.log2(last + 1))


@pytest.mark.parametrize("slots", [1, 3])
def test_the_largest_window_fits_and_the_next_page_does_not(slots: int) -> None:
    variant = variant_of(LLAMA_8B, room=9_000 * MIB)
    window = variant.largest_window(slots)
    assert window is not None and window % PAGE_TOKENS == 0
    assert variant.fits(variant.launch(window, slots))
    assert not variant.fits(variant.launch(window + PAGE_TOKENS, slots))
    assert variant.excess_bytes(variant.launch(window, slots)) <= 0
    assert variant_of(LLAMA_8B, room=4_000 * MIB).largest_window(slots) is None


def test_a_window_is_searched_once() -> None:
    variant = variant_of(LLAMA_8B, room=9_000 * MIB)
    assert variant.largest_window(1) is variant.largest_window(1)
    other = variant.changed(room=Room(8_000 * MIB))
    assert (other.largest_window(1) or 0) < (variant.largest_window(1) or 0)


def test_a_launch_has_the_context_that_the_engine_makes_of_it() -> None:
    variant = variant_of(SMOLLM2)
    assert variant.launch(1000, 3).context_tokens == 3 * 1024
    assert variant.with_context(10_000, 3).context_tokens == 10_752
    assert variant.with_context(10_000, 3).parallel == 3


def test_the_host_counts_only_what_was_moved_there() -> None:
    """A launch that is all on the card has its process in host memory too, which nobody plans."""
    resident = variant_of(LLAMA_8B, room=Room(1 << 40, 0))
    launch = resident.launch(4096, 1)
    assert resident.fits(launch)
    moved = resident.placed(Placement(layers_on_card=20))
    quote = moved.price(moved.launch(4096, 1))
    host = quote.total_bytes(Place.HOST)
    assert not moved.fits(moved.launch(4096, 1))
    assert moved.fits_card(moved.launch(4096, 1))
    for room, fits in ((host, True), (host - 1, False)):
        limited = moved.changed(room=Room(on_card(quote), room))
        assert limited.fits(limited.launch(4096, 1)) is fits
    assert moved.changed(room=Room(on_card(quote))).fits(moved.launch(4096, 1))


def test_another_placement_may_have_another_micro_batch() -> None:
    variant = variant_of(LLAMA_8B).placed(Placement(layers_on_card=3), 4096)
    assert variant.template.layers.layers_on_card == 3
    assert (variant.template.micro_batch_tokens, variant.template.batch_tokens) == (4096, 4096)
    same = variant_of(LLAMA_8B).placed(Placement(layers_on_card=3))
    assert (same.template.micro_batch_tokens, same.template.batch_tokens) == (512, 2048)


def test_the_cheapest_cache_of_a_draft_is_taken() -> None:
    """q8_0 takes half of the cells, but where it is converted to f16 the whole is dearer in long contexts."""
    base = variant_of(DRAFTING, draft=Draft(3))
    variant = replace(base, draft_types=(CacheType.Q8_0, CacheType.F16))
    chosen = set()
    for window in (1024, 4096, 65_536, 262_144):
        made = variant.launch(window, 1)
        assert made.draft is not None
        needs = {
            kind: variant.need_bytes(
                replace(made, draft=replace(made.draft, cache_type_k=kind, cache_type_v=kind))
            )
            for kind in (CacheType.Q8_0, CacheType.F16)
        }
        assert variant.need_bytes(made) == min(needs.values())
        assert needs[made.draft.cache_type_k] == min(needs.values())
        chosen.add(made.draft.cache_type_k)
    assert chosen == {CacheType.Q8_0, CacheType.F16}
    assert base.launch(1024, 1).draft == Draft(3)
