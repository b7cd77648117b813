"""A window that does not fit into VRAM: which ways there are to have it, and which is best. Pure.

Nothing is priced here. The planner gives a callable that prices a launch as it prices every other; only the place of
the line is found with :mod:`lllm3090d.planning.tier`, whose sizes the price itself uses, and then checked by the
price. A tier is never the default: the planner offers these candidates, a person asks for one.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.tier import (
    LEAST_LINE_TOKENS,
    LINE_STEP_TOKENS,
    TierLayout,
    TierSizes,
    largest_line,
    tail_tokens,
    tier_sizes,
)
from lllm3090d.planning.tier_conditions import HostMemory, Unmet, host_conditions
from lllm3090d.planning.tier_speed import GB, DecodeStep, LinkSpeed, tokens_per_s
from lllm3090d.planning.units import MIB, PAGE_TOKENS, mib_ceil

# A line this high is rarely crossed in ordinary work, so the better cache wins; the least of what is advised.
WORKING_DEPTH_TOKENS = 49_152
# Below, a q4_0 cache wins: twice as many cells before generation slows down (published: 32 against 14 tokens/s).
SHORT_LINE_TOKENS = 32_768


class Way(enum.StrEnum):
    """How a window can be had."""

    VRAM = "vram"  # all of it in VRAM
    TIER = "tier"  # a part in host memory
    Q4_0 = "q4_0"  # all in VRAM, with a smaller type
    Q4_0_TIER = "q4_0+tier"
    SMALLER = "smaller-context"  # all in VRAM, but less of it


@dataclass(frozen=True, slots=True)
class Offer:
    """A launch to be priced.

    Attributes:
        cache_type: of K and V.
        context_tokens: of the pool.
        line_tokens: cells in VRAM; 0 for all of them.
        draft_tail_tokens: draft length beyond the line; 0 for the one below it.
    """

    cache_type: CacheType
    context_tokens: int
    line_tokens: int = 0
    draft_tail_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a launch takes, bytes: of the card, and of the host with what is pinned."""

    card_bytes: int
    host_bytes: int


# The price of an offer; None where the model cannot have such a cache.
Price = Callable[[Offer], Cost | None]


@dataclass(frozen=True, slots=True)
class Wish:
    """The window that is wanted, and the room for it.

    Attributes:
        context_tokens: of the pool, a multiple of 256.
        cache_type: wanted for K and V.
        card_bytes: of VRAM that may be taken.
        host: memory of the machine.
        layouts: all caches that a line would divide, for a type and the whole window.
        unmet: why there can be no tier of a type; empty where there can.
        draft_tokens: length of a draft, 0 without drafting.
        offers_tail: the engine can draft more beyond the line.
        step: a step within VRAM; why there is none, where nobody has measured one.
        link: between host and card; None where unknown.
        working_depth_tokens: how deep conversations are expected to be.
    """

    context_tokens: int
    cache_type: CacheType
    card_bytes: int
    host: HostMemory
    layouts: Callable[[CacheType], tuple[TierLayout, ...]]
    unmet: Callable[[CacheType], tuple[Unmet, ...]]
    draft_tokens: int = 0
    offers_tail: bool = False
    step: DecodeStep | str = "nobody has measured a step"
    link: LinkSpeed | None = None
    working_depth_tokens: int = WORKING_DEPTH_TOKENS


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to have a window.

    Attributes:
        way: which one.
        offer: the launch; what of it was not found out is as wanted.
        cost: its price; None where it has none.
        sizes: of the tier; None without one.
        end_tokens_per_s, half_tokens_per_s: predicted with the whole and with half of the offered window in use;
            None where nothing is known.
        speed: what they are predicted from, or why they are not; a sentence.
        fits: it can be launched.
        reasons: why it is there, what it costs, or why it cannot be; sentences for a person.
    """

    way: Way
    offer: Offer
    cost: Cost | None
    sizes: TierSizes | None
    end_tokens_per_s: float | None
    half_tokens_per_s: float | None
    fits: bool
    reasons: tuple[str, ...]
    speed: str = ""


def candidates(wish: Wish, price: Price) -> tuple[Candidate, ...]:
    """The ways to have a window, the best first, those that cannot be had last.

    Where all fits into VRAM as wanted, that is the only one. Otherwise a tier of the wanted type comes first where
    its line is at least as high as the expected depth, the smaller type where it is short, and in between whatever
    is predicted to be fastest at the window's end; a smaller window comes last.
    """
    whole = _in_vram(wish, price, Way.VRAM, Offer(wish.cache_type, wish.context_tokens))
    if whole.fits:
        return (whole,)
    found = [_tiered(wish, price, Way.TIER, wish.cache_type)]
    if wish.cache_type.row_bytes(32) > CacheType.Q4_0.row_bytes(32):
        q4_0 = _in_vram(wish, price, Way.Q4_0, Offer(CacheType.Q4_0, wish.context_tokens))
        # What fits into VRAM need not be split.
        found += [q4_0] if q4_0.fits else [q4_0, _tiered(wish, price, Way.Q4_0_TIER, CacheType.Q4_0)]
    found.append(_smaller(wish, price))
    possible = _ordered(wish, [each for each in found if each.fits])
    return (*possible, whole, *(each for each in found if not each.fits))


def _ordered(wish: Wish, found: list[Candidate]) -> list[Candidate]:
    tier = next((each for each in found if each.way is Way.TIER), None)
    line = 0 if tier is None else tier.offer.line_tokens
    if tier is not None and line >= wish.working_depth_tokens:
        order = [Way.TIER, Way.Q4_0, Way.Q4_0_TIER, Way.SMALLER]
        why = f"Its line is no lower than the {wish.working_depth_tokens} tokens that are expected to be in use."
    elif line < SHORT_LINE_TOKENS:
        order = [Way.Q4_0, Way.Q4_0_TIER, Way.TIER, Way.SMALLER]
        why = "The wanted type would have fewer cells in VRAM, or none."
    else:
        # Stable, so what has no prediction keeps the order of the short line.
        order = [Way.Q4_0, Way.Q4_0_TIER, Way.TIER]
        speeds = {each.way: each.end_tokens_per_s or 0.0 for each in found}
        order = [*sorted(order, key=lambda way: -speeds.get(way, 0.0)), Way.SMALLER]
        why = "It is predicted to be the fastest at the window's end, as far as that is known."
    ordered = sorted(found, key=lambda each: order.index(each.way))
    if ordered and ordered[0].way is not Way.SMALLER:
        ordered[0] = replace(ordered[0], reasons=(why, *ordered[0].reasons))
    return ordered


def _in_vram(wish: Wish, price: Price, way: Way, offer: Offer) -> Candidate:
    cost = price(offer)
    if cost is None:
        return _impossible(way, offer, f"The model cannot have a cache of type {offer.cache_type}.")
    fits = cost.card_bytes <= wish.card_bytes
    reasons = [_room(wish, cost)]
    if offer.cache_type is not wish.cache_type and fits:
        reasons.append(_quality(wish))
    end, half = _speeds(wish, offer) if fits else (None, None)
    speed = speed_text(wish.step, wish.link, is_tiered=False) if fits else ""
    return Candidate(way, offer, cost, None, end, half, fits, tuple(reasons), speed)


def _tiered(wish: Wish, price: Price, way: Way, cache_type: CacheType) -> Candidate:
    offer = Offer(cache_type, wish.context_tokens)
    unmet = wish.unmet(cache_type)
    if unmet:
        return _impossible(way, offer, *(each.reason for each in unmet))
    if wish.context_tokens <= LEAST_LINE_TOKENS:
        return _impossible(
            way, offer, f"A window of {LEAST_LINE_TOKENS} tokens or less is not worth splitting."
        )
    layouts = wish.layouts(cache_type)
    found = _with_tail(wish, price, layouts, replace(offer, line_tokens=LEAST_LINE_TOKENS))
    if found is None:
        return _impossible(way, offer, f"The model cannot have a cache of type {cache_type}.")
    split, cost = found
    if split.line_tokens < LEAST_LINE_TOKENS:
        reason = f"Only {split.line_tokens} cells would be in VRAM; fewer than {LEAST_LINE_TOKENS} are not worth it."
        return _impossible(way, offer, reason)
    sizes = tier_sizes(layouts, split.line_tokens)
    unmet = host_conditions(sizes.host_bytes, cost.host_bytes - sizes.host_bytes, wish.host)
    if unmet:
        reasons = tuple(each.reason for each in unmet)
        return Candidate(way, split, cost, sizes, None, None, False, reasons)
    reasons = (
        _room(wish, cost),
        f"{split.line_tokens} of {split.context_tokens} cells are in VRAM; {mib_ceil(sizes.host_bytes)} MiB of host"
        f" memory are pinned, and {mib_ceil(sizes.staging_bytes)} MiB of VRAM are for copying from there.",
        *((_quality(wish),) if cache_type is not wish.cache_type else ()),
    )
    speed = speed_text(wish.step, wish.link, is_tiered=True)
    return Candidate(way, split, cost, sizes, *_speeds(wish, split), True, reasons, speed)


def _with_tail(
    wish: Wish, price: Price, layouts: tuple[TierLayout, ...], start: Offer
) -> tuple[Offer, Cost] | None:
    """The highest line, with longer drafts beyond it where it is far away all the same."""
    found = _line(wish, price, layouts, start)
    if found is None or not wish.offers_tail:
        return found
    tail = tail_tokens(found[0].line_tokens, wish.draft_tokens)
    if not tail:
        return found
    longer = _line(wish, price, layouts, replace(start, draft_tail_tokens=tail))
    # A line that only shorter drafts allow is not far away.
    kept = longer is not None and tail_tokens(longer[0].line_tokens, wish.draft_tokens)
    return longer if kept else found


def _line(
    wish: Wish, price: Price, layouts: tuple[TierLayout, ...], start: Offer
) -> tuple[Offer, Cost] | None:
    """The offer with the highest line that the price allows; line 0 where none does, None without a price.

    What the launch takes beside the divided caches does not depend on the line, so one price tells the budget of
    those. The price of the result is asked all the same, and where it disagrees the line is lowered.
    """
    cost = price(start)
    if cost is None:
        return None
    highest = (start.context_tokens - 1) // LINE_STEP_TOKENS * LINE_STEP_TOKENS
    budget = wish.card_bytes - cost.card_bytes + tier_sizes(layouts, start.line_tokens).card_bytes
    line = min(largest_line(layouts, budget), highest)
    while line > 0:
        offer = replace(start, line_tokens=line)
        cost = price(offer)
        if cost is None:
            return None
        over = cost.card_bytes - wish.card_bytes
        if over <= 0:
            return offer, cost
        budget -= over
        line = min(largest_line(layouts, budget), line - LINE_STEP_TOKENS)
    return replace(start, line_tokens=0), cost


def _smaller(wish: Wish, price: Price) -> Candidate:
    """The largest window of the wanted type that fits into VRAM, in whole pages."""

    def taken(pages: int) -> int:
        cost = price(Offer(wish.cache_type, pages * PAGE_TOKENS))
        return wish.card_bytes + 1 if cost is None else cost.card_bytes

    sizes = range(1, (wish.context_tokens - 1) // PAGE_TOKENS + 1)
    pages = bisect_right(sizes, wish.card_bytes, key=taken)
    offer = Offer(wish.cache_type, pages * PAGE_TOKENS)
    if not pages:
        return _impossible(
            Way.SMALLER, replace(offer, context_tokens=wish.context_tokens), "No window fits into VRAM."
        )
    found = _in_vram(wish, price, Way.SMALLER, offer)
    share = f"{offer.context_tokens} of the {wish.context_tokens} tokens that are wanted, all in VRAM."
    return replace(found, reasons=(share, *found.reasons))


def _impossible(way: Way, offer: Offer, *reasons: str) -> Candidate:
    return Candidate(way, offer, None, None, None, None, False, reasons)


def _speeds(wish: Wish, offer: Offer) -> tuple[float | None, float | None]:
    """Predicted at the end and at half of the window; within VRAM the speed of a step, whatever the depth."""
    if isinstance(wish.step, str):
        return None, None
    if not offer.line_tokens:
        return wish.step.tokens_per_s, wish.step.tokens_per_s
    if wish.link is None:
        return None, None
    cell_bytes = sum(layout.cell_bytes for layout in wish.layouts(offer.cache_type))
    end, half = (
        tokens_per_s(
            wish.step, wish.link, depth_tokens=depth, line_tokens=offer.line_tokens, cell_bytes=cell_bytes
        )
        for depth in (offer.context_tokens, offer.context_tokens // 2)
    )
    return end, half


def _room(wish: Wish, cost: Cost) -> str:
    needed, room = mib_ceil(cost.card_bytes), wish.card_bytes // MIB
    if cost.card_bytes <= wish.card_bytes:
        return f"It takes {needed} MiB of the {room} MiB of VRAM that it may have."
    return f"It would take {needed} MiB of VRAM, and may have {room} MiB."


def _quality(wish: Wish) -> str:
    return (
        f"A {CacheType.Q4_0} cache changes more answers than {wish.cache_type}: published for Qwen3.8-27B, one word in"
        " 48 differs from an f16 cache, with q8_0 one in 160."
    )


def speed_text(step: DecodeStep | str, link: LinkSpeed | None, *, is_tiered: bool) -> str:
    """What a prediction rests on, or why there is none."""
    if isinstance(step, str):
        return f"Speed not predicted: {step}."
    if not is_tiered:
        return f"Speed predicted from {step.evidence}."
    if link is None:
        return "Speed not predicted: the link between host and card is not known."
    return f"Speed predicted from {step.evidence}; bus {link.bytes_per_s / GB:.1f} GB/s, {link.evidence}."
