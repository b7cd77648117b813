"""A window that does not fit: the candidates and their order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.tier import LEAST_LINE_TOKENS, TierLayout, tier_layouts, tier_sizes
from lllm3090d.planning.tier_choice import Candidate, Cost, Offer, Way, Wish, candidates
from lllm3090d.planning.tier_conditions import Condition, HostMemory, Unmet
from lllm3090d.planning.tier_speed import DecodeStep, link_speed
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from tests.fakes import published_tier
from tests.fakes.published_tier import PublishedLaunch, published_line
from tests.unit.engine_truth import facts_of

pytestmark = pytest.mark.unit

FACTS = facts_of("qwen3.5-27b-mtp")
WINDOW = 262_144
GIB = 1024 * MIB
BONSAI = PublishedLaunch(6_400_000_000 - 265 * MIB, packed_mask=True, draft_micro_batch_tokens=256)
MIRAI = replace(BONSAI, weights_bytes=8227 * MIB)
RICH = HostMemory(48 * GIB, 64 * GIB)
HOST_BYTES = 6 * GIB  # embedding, checkpoints, prompt cache
STEP = DecodeStep(2.45, 0.036, "Mirai S on an RTX 4070, published")


def layouts(cache_type: CacheType, context: int = WINDOW) -> tuple[TierLayout, ...]:
    shape = cache.cache_shape(
        FACTS, context_tokens=context, parallel=1, batch_tokens=2048, micro_batch_tokens=512
    )
    return tier_layouts(FACTS, shape, cache_type)


def none_unmet(cache_type: CacheType) -> tuple[Unmet, ...]:
    del cache_type
    return ()


@dataclass
class Prices:
    """The published model as a price, with everything it was asked."""

    launch: PublishedLaunch = BONSAI
    refused: tuple[CacheType, ...] = ()
    extra_bytes: int = 0  # what this price has beyond the sizes that the line is found with
    asked: list[Offer] = field(default_factory=list)

    def __call__(self, offer: Offer) -> Cost | None:
        self.asked.append(offer)
        if offer.cache_type in self.refused:
            return None
        launch = replace(
            self.launch,
            cache_type=offer.cache_type,
            context_tokens=offer.context_tokens,
            tail_tokens=offer.draft_tail_tokens,
        )
        own = layouts(offer.cache_type, offer.context_tokens)
        sizes = tier_sizes(own, offer.line_tokens or offer.context_tokens)
        extra = self.extra_bytes * offer.line_tokens // 256
        card = published_tier.fixed_bytes(FACTS, launch) + sizes.card_bytes + extra
        return Cost(card, HOST_BYTES + sizes.host_bytes)


def wish(free_mib: int, **changes: object) -> Wish:
    made = Wish(
        context_tokens=WINDOW,
        cache_type=CacheType.Q8_0,
        card_bytes=free_mib * MIB - published_tier.LINUX_RESERVE_BYTES,
        host=RICH,
        layouts=layouts,
        unmet=none_unmet,
        draft_tokens=2,
        offers_tail=True,
        step=STEP,
        link=link_speed(4, 16),
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # fields by name, checked by the dataclass


def ways(found: tuple[Candidate, ...]) -> list[Way]:
    return [each.way for each in found if each.fits]


def test_where_all_fits_as_wanted_there_is_nothing_to_choose() -> None:
    (only,) = candidates(wish(24_000), Prices())
    assert only.way is Way.VRAM and only.fits
    assert only.offer == Offer(CacheType.Q8_0, WINDOW)
    assert only.end_tokens_per_s == only.half_tokens_per_s == STEP.tokens_per_s
    assert only.speed == f"Speed predicted from {STEP.evidence}."


def test_on_12_gb_the_tier_comes_first_with_long_drafts_beyond_its_line() -> None:
    """The published choice: q8_0 with a line near 126k; q4_0 would fit with drafts of two only."""
    found = candidates(wish(11_975), Prices())
    first = found[0]
    assert first.way is Way.TIER
    assert first.offer.draft_tail_tokens == 4
    published = published_line(FACTS, BONSAI, 11_975 * MIB)
    assert published - 2560 <= first.offer.line_tokens <= published == 126_464
    assert ways(found)[1:] == [Way.Q4_0, Way.SMALLER]
    assert first.sizes is not None and first.cost is not None
    assert first.sizes.host_bytes == pytest.approx((WINDOW - first.offer.line_tokens) * 34_816, rel=0.02)
    assert "expected to be in use" in first.reasons[0]
    assert first.speed == f"Speed predicted from {STEP.evidence}; bus 23.7 GB/s, measured on PCIe 4.0 x16."
    # 23.7 GB/s: half of the window is just beyond the line, its end far beyond.
    assert first.half_tokens_per_s is not None and first.end_tokens_per_s is not None
    assert STEP.tokens_per_s > first.half_tokens_per_s > 50
    assert 8 < first.end_tokens_per_s < 12


def test_on_10_gb_of_a_larger_model_the_smaller_type_wins() -> None:
    """Mirai at 10.9 GB: the line of q8_0 would be short, and q4_0 has about twice the cells."""
    found = candidates(wish(10_900), Prices(MIRAI))
    assert ways(found) == [Way.Q4_0_TIER, Way.TIER, Way.SMALLER]
    q4, q8 = found[:2]
    assert q8.offer.line_tokens < 32_768
    assert 1.9 <= q4.offer.line_tokens / q8.offer.line_tokens <= 3
    assert q4.offer.draft_tail_tokens == 0
    assert "fewer cells" in q4.reasons[0]
    assert any("one word in 48" in reason for reason in q4.reasons)


def test_in_between_the_fastest_at_the_windows_end_comes_first() -> None:
    found = candidates(wish(11_400), Prices(MIRAI))
    lines = {each.way: each.offer.line_tokens for each in found}
    assert 32_768 <= lines[Way.TIER] < 49_152
    possible = [each for each in found if each.fits]
    speeds = [each.end_tokens_per_s or 0.0 for each in possible[:-1]]
    assert all(speeds)
    assert speeds == sorted(speeds, reverse=True)
    assert possible[-1].way is Way.SMALLER
    lower = candidates(wish(11_400, working_depth_tokens=32_768), Prices(MIRAI))
    assert lower[0].way is Way.TIER


def test_on_8_gb_nothing_is_worth_it() -> None:
    found = candidates(wish(7733), Prices())
    tier = next(each for each in found if each.way is Way.TIER)
    assert not tier.fits and f"fewer than {LEAST_LINE_TOKENS}" in tier.reasons[0]
    assert Way.VRAM not in ways(found)


def test_without_speed_or_bus_nothing_is_predicted() -> None:
    for changes, why in (
        ({"step": "nobody was there"}, "Speed not predicted: nobody was there."),
        ({"link": None}, "Speed not predicted: the link between host and card is not known."),
    ):
        tier = candidates(wish(11_975, **changes), Prices())[0]
        assert tier.way is Way.TIER
        assert tier.end_tokens_per_s is None and tier.half_tokens_per_s is None
        assert tier.speed == why


def test_conditions_that_do_not_hold_are_the_reasons() -> None:
    def unmet(cache_type: CacheType) -> tuple[Unmet, ...]:
        return (Unmet(Condition.DRIVER, f"No driver for {cache_type}."),)

    found = candidates(wish(11_975, unmet=unmet), Prices())
    assert ways(found) == [Way.Q4_0, Way.SMALLER]
    reasons = {each.way: each.reasons for each in found if not each.fits}
    assert reasons[Way.TIER] == ("No driver for q8_0.",)
    smaller = {each.way: each.reasons for each in candidates(wish(9900, unmet=unmet), Prices())}
    assert smaller[Way.Q4_0_TIER] == ("No driver for q4_0.",)


def test_a_host_without_room_has_no_tier() -> None:
    found = candidates(wish(11_975, host=HostMemory(12 * GIB, 16 * GIB)), Prices())
    tier = next(each for each in found if each.way is Way.TIER)
    assert not tier.fits and "available" in tier.reasons[0]
    assert tier.cost is not None and tier.sizes is not None


def test_a_type_that_the_model_cannot_have() -> None:
    found = candidates(wish(11_975), Prices(refused=(CacheType.Q4_0,)))
    assert ways(found) == [Way.TIER, Way.SMALLER]
    assert all("q4_0" in each.reasons[0] for each in found if each.way in {Way.Q4_0, Way.Q4_0_TIER})
    nothing = candidates(wish(11_975), Prices(refused=tuple(CacheType)))
    assert ways(nothing) == []
    assert {each.way for each in nothing} == set(Way)
    reasons = {each.way: each.reasons[0] for each in nothing}
    assert "q4_0" in reasons[Way.Q4_0] and "q4_0" in reasons[Way.Q4_0_TIER] and "q8_0" in reasons[Way.TIER]


def test_who_wants_q4_0_is_offered_nothing_smaller() -> None:
    found = candidates(wish(9900, cache_type=CacheType.Q4_0, offers_tail=False), Prices())
    assert [each.way for each in found] == [Way.TIER, Way.SMALLER, Way.VRAM]
    assert 147_712 - 4096 <= found[0].offer.line_tokens <= 147_712


def test_a_small_window_is_not_split() -> None:
    small = wish(6400, context_tokens=LEAST_LINE_TOKENS)
    tier = next(each for each in candidates(small, Prices()) if each.way is Way.TIER)
    assert not tier.fits and "not worth splitting" in tier.reasons[0]


def test_the_smaller_window_is_the_largest_that_fits() -> None:
    prices, wanted = Prices(), wish(11_975)
    smaller = next(each for each in candidates(wanted, prices) if each.way is Way.SMALLER)
    assert smaller.fits and smaller.offer.context_tokens % PAGE_TOKENS == 0
    more = prices(replace(smaller.offer, context_tokens=smaller.offer.context_tokens + PAGE_TOKENS))
    assert more is not None and more.card_bytes > wanted.card_bytes
    nothing = next(each for each in candidates(wish(0), prices) if each.way is Way.SMALLER)
    assert not nothing.fits and nothing.reasons == ("No window fits into VRAM.",)


def test_the_price_has_the_last_word() -> None:
    """A price that knows more than the sizes lowers the line until it agrees."""
    plain = candidates(wish(11_975), Prices())[0]
    prices = Prices(extra_bytes=4 * MIB)
    dearer = candidates(wish(11_975), prices)[0]
    assert dearer.way is Way.TIER and dearer.offer.line_tokens < plain.offer.line_tokens
    assert dearer.cost is not None and dearer.cost.card_bytes <= wish(11_975).card_bytes
    assert len(prices.asked) < 200


def test_a_tier_costs_few_prices() -> None:
    prices = Prices()
    candidates(wish(11_975), prices)
    assert len(prices.asked) <= 30


@settings(deadline=None)  # some hundred prices, on a shared machine
@given(free=st.integers(0, 24_000), more=st.integers(0, 3000), mirai=st.booleans())
def test_more_memory_never_lowers_a_line_and_nothing_exceeds_its_room(
    free: int, more: int, mirai: bool
) -> None:
    prices = Prices(MIRAI if mirai else BONSAI)
    before, after = (
        {each.way: each for each in candidates(wish(mib, offers_tail=False), prices)}
        for mib in (free, free + more)
    )
    for way, each in before.items():
        if each.fits:
            assert each.cost is not None
            assert each.cost.card_bytes <= wish(free).card_bytes
            # What has come to fit into VRAM is split no more.
            whole = after.get(Way.VRAM), after.get(Way.Q4_0) if way is Way.Q4_0_TIER else None
            if not any(other is not None and other.fits for other in whole):
                assert after[way].fits
                assert after[way].offer.line_tokens >= each.offer.line_tokens
        else:
            assert each.reasons
