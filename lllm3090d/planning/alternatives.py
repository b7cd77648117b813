"""What else could be had: other slots, caches and places, with what each gains and how to ask for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lllm3090d.errors import LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import Plan, Planner
from lllm3090d.planning.quote import Place
from lllm3090d.planning.refusal import slots_text
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, ProjectorPlace, SlotPolicy

SMALLER_CACHE = CacheType.Q4_0


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan for the same model and memory.

    Attributes:
        ask: options of the client that give it.
        window_tokens, slots: what it serves.
        card_bytes: what it takes of the card.
        gain: what is better, and what is given up, in words.
    """

    ask: str
    window_tokens: int
    slots: int
    card_bytes: int
    gain: str


def alternatives(planner: Planner, plan: Plan) -> tuple[Alternative, ...]:
    """Plans that differ in one choice and serve another window or number of slots; the plan itself is left out.

    Only what was open is varied: where a choice was asked for, it is not put into question.

    Args:
        planner: the question that was answered.
        plan: its answer.
    """
    found = []
    for ask, given_up, request in _variations(planner, plan):
        try:
            other = replace(planner, request=request).plan()
        except LlmError:
            continue  # it cannot be had: no alternative
        gain = _gain(plan, other)
        if gain:
            found.append(
                Alternative(
                    ask=ask,
                    window_tokens=other.window_tokens,
                    slots=other.parallel,
                    card_bytes=other.quote.total_bytes(Place.CARD),
                    gain=f"{gain}{given_up}",
                )
            )
    return tuple(found)


def _variations(planner: Planner, plan: Plan) -> Iterator[tuple[str, str, PlanRequest]]:  # noqa: PLR0912
    """How to ask, what is given up, and the request; in order of how little is given up."""
    request, policy = planner.request, planner.policy
    if request.parallel is None:
        counts = (1, plan.parallel + 1) if plan.parallel > 1 else (2,)
        for count in counts:
            yield f"--parallel {count}", "", replace(request, parallel=count)
        chosen = request.slot_policy or policy.slot_policy
        other = SlotPolicy.WINDOW if chosen is SlotPolicy.BALANCED else SlotPolicy.BALANCED
        if request.slot_policy is None and request.context_tokens is None:
            yield f"--slot-policy {other}", "", replace(request, slot_policy=other)
    if request.cache_type_k is None and request.cache_type_v is None:
        for kind in (CacheType.F16, SMALLER_CACHE):
            if kind not in {plan.cache_type_k, plan.cache_type_v}:
                given_up = "; quality falls" if kind is SMALLER_CACHE else "; a more exact cache"
                yield (
                    f"--cache-type {kind}",
                    given_up,
                    replace(request, cache_type_k=kind, cache_type_v=kind),
                )
    if request.drafting is None and _can_draft(planner):
        if plan.launch.draft is not None:
            yield "--draft off", "; slower answers", replace(request, drafting=Drafting.OFF)
        else:
            yield "--draft on", "; faster answers", replace(request, drafting=Drafting.ON)
    if request.projector is None and plan.with_projector and plan.on_card:
        if plan.launch.projector_on_card:
            yield (
                "--projector host",
                "; images take longer",
                replace(request, projector=ProjectorPlace.HOST),
            )
        else:
            yield "--projector card", "; images are quicker", replace(request, projector=ProjectorPlace.CARD)
    if request.offload is None and not request.places_by_hand and plan.on_card:
        allowed = policy.offload is Offload.ALLOWED
        other_offload = Offload.RESIDENT if allowed else Offload.ALLOWED
        given_up = "; quicker answers" if allowed else "; slower answers"
        yield f"--offload {other_offload}", given_up, replace(request, offload=other_offload)


def _can_draft(planner: Planner) -> bool:
    features, drafter = planner.features, planner.drafter
    itself = planner.facts.has_mtp and features.drafts_itself
    return itself or (drafter is not None and drafter.spec_type in features.drafts_from)


def _gain(plan: Plan, other: Plan) -> str:
    """What another plan serves beside this one; empty where it serves the same."""
    if (other.window_tokens, other.parallel) == (plan.window_tokens, plan.parallel):
        saved = plan.quote.total_bytes(Place.CARD) - other.quote.total_bytes(Place.CARD)
        less = f"less {'of the card' if plan.on_card else 'memory'}"
        return f"the same window and {saved >> 20:,} MiB {less}" if saved >> 20 > 0 else ""
    parts = []
    window, total = other.window_tokens - plan.window_tokens, other.context_tokens - plan.context_tokens
    if window:
        parts.append(f"{abs(window):,} tokens of window {'more' if window > 0 else 'less'}")
    if other.parallel != plan.parallel:
        parts.append(f"{slots_text(other.parallel)} instead of {plan.parallel}")
    if total and other.parallel != plan.parallel:
        parts.append(f"{abs(total):,} tokens of context {'more' if total > 0 else 'less'} in all")
    return ", ".join(parts)
