"""A tier for a plan: asked for by a person, never a default, and only where the engine would really split. Pure."""

from __future__ import annotations

from dataclasses import replace

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType, draft_shape
from lllm3090d.planning.launch import Launch, SpecType
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import TierRoom
from lllm3090d.planning.search import Variant
from lllm3090d.planning.tier import (
    DRAFT_WINDOW_TOKENS,
    Tier,
    TierLayout,
    TierOffer,
    tier_layouts,
    tier_sizes,
)
from lllm3090d.planning.tier_choice import Candidate, Cost, Offer, Way, Wish, candidates
from lllm3090d.planning.tier_conditions import Unmet, unmet_conditions
from lllm3090d.planning.tier_speed import WITHOUT_DRAFTS


def tiered(
    variant: Variant, room: TierRoom, context_tokens: int, slots: int
) -> tuple[Variant, Launch, tuple[Candidate, ...]]:
    """The launch with a tier that holds such a context; without one where all of it fits into VRAM.

    With it come all ways to have the context, the best first; :func:`chosen_of` is the one of the launch.

    Args:
        variant: everything resident.
        room: the machine.
        context_tokens: of all slots.
        slots: more than one only with a unified pool.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION with everything that keeps the engine from splitting this cache, or
            that keeps the host's part from being pinned.
    """
    if room.offer.draft_window and _drafts_itself(variant.template):
        variant = variant.changed(template=_windowed(variant.template))
    found = ways(variant, room, context_tokens, slots)
    chosen = chosen_of(found)
    if chosen is None:
        reasons = " ".join(reason for each in found if each.way is Way.TIER for reason in each.reasons)
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"A tiered cache of {context_tokens} tokens cannot be had. {reasons}",
            hint=_other_way(found),
            context_tokens=context_tokens,
        )
    return variant, launch_of(variant, chosen.offer, slots), found


def chosen_of(found: tuple[Candidate, ...]) -> Candidate | None:
    """The way that a tier asked for is had: all in VRAM where that fits, else divided; None where neither can be."""
    return next((each for each in found if each.fits and each.way in {Way.VRAM, Way.TIER}), None)


def _other_way(found: tuple[Candidate, ...]) -> str:
    """How to ask for the best of the other ways that can be had."""
    best = next((each for each in found if each.fits), None)
    if best is None:
        return "Leave the tier out, or ask for a smaller context."
    if best.way is Way.SMALLER:
        return (
            f"Leave the tier out, and ask for --context {best.offer.context_tokens}, which fits on the card."
        )
    kind = f"--context {best.offer.context_tokens} --cache-type {best.offer.cache_type}"
    return f"Ask for {kind} --tier." if best.offer.line_tokens else f"Ask for {kind} without a tier."


def ways(variant: Variant, room: TierRoom, context_tokens: int, slots: int) -> tuple[Candidate, ...]:
    """The ways to have such a context, the best first; see :func:`lllm3090d.planning.tier_choice.candidates`."""
    template, facts = variant.template, variant.facts
    first = variant.with_context(context_tokens, slots)

    def with_type(kind: CacheType) -> Launch:
        return replace(first, cache_type_k=kind, cache_type_v=kind)

    def layouts(kind: CacheType) -> tuple[TierLayout, ...]:
        return _layouts(with_type(kind), facts)

    def unmet(kind: CacheType) -> tuple[Unmet, ...]:
        launch = with_type(kind)
        return unmet_conditions(facts, room.machine, launch.layers, launch.shape(facts), launch.cache_types)

    def price(offer: Offer) -> Cost | None:
        try:
            quote = variant.price(launch_of(variant, offer, slots))
        except LlmError:
            return None  # the model cannot have such a cache
        return Cost(quote.total_bytes(Place.CARD), quote.total_bytes(Place.HOST))

    return candidates(
        Wish(
            context_tokens=first.context_tokens,
            cache_type=template.cache_type_k,
            card_bytes=variant.room.card,
            host=room.host,
            layouts=layouts,
            unmet=unmet,
            draft_tokens=template.draft.tokens if template.draft else 0,
            offers_tail=room.offer.draft_tail,
            step=room.steps.of(_speculation(template)),
            link=room.link,
        ),
        price,
    )


def launch_of(variant: Variant, offer: Offer, slots: int) -> Launch:
    """The launch of an offer; the draft's cache has the type of the main one, as published recipes have."""
    template = replace(
        variant.template,
        cache_type_k=offer.cache_type,
        cache_type_v=offer.cache_type,
        line_tokens=offer.line_tokens,
        tail_draft_tokens=offer.draft_tail_tokens,
    )
    return variant.changed(template=template).with_context(offer.context_tokens, slots)


def tier_of(launch: Launch, variant: Variant, offer: TierOffer) -> Tier | None:
    """What the command line carries and the engine must report; None without a line."""
    if not launch.line_tokens:
        return None
    facts, draft = variant.facts, launch.draft
    shape = launch.shape(facts)
    window = draft.window_tokens if draft is not None else 0
    drafted = draft_shape(shape, window_tokens=window, batch_tokens=launch.batch_tokens).context_tokens
    return Tier(
        line_tokens=launch.line_tokens,
        context_tokens=shape.context_tokens,
        sizes=tier_sizes(_layouts(launch, facts), launch.line_tokens),
        draft_window_tokens=window if offer.draft_window else 0,
        draft_tail_tokens=launch.tail_draft_tokens,
        draft_context_tokens=drafted if drafted < shape.context_tokens else 0,
        batch_invariant=draft is not None,
    )


def _layouts(launch: Launch, facts: CheckpointFacts) -> tuple[TierLayout, ...]:
    """All caches that a line of this launch divides: that of the draft too, where it is as long as the main one."""
    draft = launch.draft
    whole = None
    if draft is not None and _drafts_itself(launch) and not draft.window_tokens:
        whole = (draft.cache_type_k, draft.cache_type_v)
    return tier_layouts(facts, launch.shape(facts), launch.cache_type_k, whole_draft=whole)


def _drafts_itself(launch: Launch) -> bool:
    return launch.draft is not None and launch.draft.spec_type is SpecType.MTP and launch.drafter is None


def _speculation(launch: Launch) -> str:
    """How it drafts, as a catalogue names it."""
    draft = launch.draft
    return WITHOUT_DRAFTS if draft is None else draft.spec_type.value.removeprefix("draft-")


def _windowed(template: Launch) -> Launch:
    draft = template.draft
    return (
        template
        if draft is None
        else replace(template, draft=replace(draft, window_tokens=DRAFT_WINDOW_TOKENS))
    )
