"""Plans as clients see them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lllm3090d.checkpoints.catalogue import CatalogueEntry
from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.alternatives import Alternative
from lllm3090d.planning.limits import Limit, limit
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.quote import Evidence, Place, Quote
from lllm3090d.planning.request import ProjectorPlace
from lllm3090d.planning.reserves import Budget
from lllm3090d.planning.smallest_card import SmallestCard
from lllm3090d.planning.speeds import ShownSpeed
from lllm3090d.planning.tier_choice import Candidate
from lllm3090d.planning.tiering import chosen_of
from lllm3090d.planning.verdict import agent_ready, agent_remarks, concurrent_subagents, verdict
from lllm3090d.serving.empty_card import EmptyCard
from lllm3090d.serving.views import path_text
from lllm3090d.wire_plans import (
    AgentView,
    AlternativeView,
    BudgetLineView,
    CardPartView,
    DownloadView,
    DraftView,
    EngineCheckView,
    LimitView,
    LineItemView,
    PlacementView,
    PlannedCardView,
    PlanView,
    SmallestCardView,
    SpeedView,
    StretchView,
    TierView,
    TierWayView,
)

_WORST_FIRST = tuple(reversed(Evidence))


@dataclass(frozen=True, slots=True)
class Insight:
    """What was found out about a plan beyond its price.

    Attributes:
        card: the card it was made for.
        has_projector: the model has one.
        card_can_compute: its compute capability is not below the model's least, or nobody knows.
        notes: what a person should know of how it was made.
        alternatives: other plans.
        smallest: the smallest card for an agent; None where none helps.
        speed: measured with this very file; None where nothing was.
        engine_check: what the engine projects; None where nobody asked.
        given_back_bytes: what a model that is loaded gives back first; None of one that is not.
    """

    card: PlannedCardView
    has_projector: bool
    card_can_compute: bool = True
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    smallest: SmallestCard | None = None
    speed: ShownSpeed | None = None
    engine_check: EngineCheckView | None = None
    given_back_bytes: int | None = None


def plan_view(
    checkpoint: Checkpoint,
    facts: CheckpointFacts | UnruledModel,
    plan: Plan,
    budget: Budget,
    *,
    argv: Iterable[str],
    card_kind: CardKind,
    insight: Insight | None = None,
    parts: tuple[CardPartView, ...] = (),
    environment: tuple[str, ...] = (),
) -> PlanView:
    """A plan with the arithmetic of its admission; without an insight what that would tell is left out."""
    card_bytes = plan.quote.total_bytes(Place.CARD)
    sizes, rope = plan.launch, plan.rope
    reach = rope.window_tokens if rope else facts.trained_context_tokens
    has_projector = insight.has_projector if insight else checkpoint.projector is not None
    return PlanView(
        model=checkpoint.name,
        path=path_text(checkpoint.path),
        architecture=facts.architecture,
        quantisation=facts.quantisation,
        context_tokens=plan.context_tokens,
        parallel=plan.parallel,
        window_tokens=plan.window_tokens,
        trained_context_tokens=facts.trained_context_tokens,
        cache_type_k=plan.cache_type_k,
        cache_type_v=plan.cache_type_v,
        capped_by=plan.capped_by,
        fits=card_bytes <= budget.grantable_bytes,
        card_kind=card_kind,
        items=item_views(plan.quote),
        card_bytes=card_bytes,
        host_bytes=plan.quote.total_bytes(Place.HOST),
        budget=budget_views(budget),
        available_bytes=budget.grantable_bytes,
        argv=tuple(argv),
        environment=environment,
        cards=parts,
        verdict=verdict(
            plan.window_tokens,
            purpose=sizes.purpose,
            card_can_compute=insight.card_can_compute if insight else True,
        ),
        # What else there is beside a dry run (slack, the process) is the same for all models.
        evidence=Evidence.ENGINE if isinstance(facts, UnruledModel) else weakest(plan.quote),
        limit=limit_view(
            limit(
                plan.capped_by,
                budget.deciding_lines,
                budget.grantable_bytes,
                reach,
                stretched=rope is not None,
            )
        ),
        notes=(*plan.notes, *(insight.notes if insight else ())),
        agent=agent_view(plan.window_tokens, plan.parallel) if sizes.purpose is Purpose.CHAT else None,
        batch_tokens=sizes.batch_tokens,
        micro_batch_tokens=sizes.micro_batch_tokens,
        unified=sizes.unified,
        swa_full=sizes.swa_full,
        purpose=sizes.purpose,
        placement=_placement_view(plan),
        draft=_draft_view(plan),
        projector=_projector_place(plan) if has_projector else None,
        rope=StretchView(
            scaling=rope.scaling,
            factor=rope.factor,
            original_tokens=rope.original_tokens,
            window_tokens=rope.window_tokens,
        )
        if rope
        else None,
        tier=_tier_view(plan),
        card=insight.card if insight else None,
        alternatives=tuple(map(_alternative_view, insight.alternatives)) if insight else (),
        smallest_card=_smallest_view(insight.smallest) if insight and insight.smallest else None,
        speed=speed_view(insight.speed) if insight else None,
        engine_check=insight.engine_check if insight else None,
        given_back_bytes=insight.given_back_bytes if insight else None,
    )


def item_views(quote: Quote) -> tuple[LineItemView, ...]:
    """The lines of a price."""
    return tuple(
        LineItemView(name=i.name, place=i.place, bytes=i.bytes, evidence=i.evidence, formula=i.formula)
        for i in quote.items
    )


def budget_views(budget: Budget) -> tuple[BudgetLineView, ...]:
    """The lines of the side of a budget that decides."""
    return tuple(BudgetLineView(name=b.name, bytes=b.bytes, origin=b.origin) for b in budget.deciding_lines)


def weakest(quote: Quote) -> Evidence:
    """The weakest evidence of any line on the card: a sum is no better than that. Of host memory where that is all.

    What stays in host memory beside a card is never measured; nobody asks for the evidence of both together.
    """
    on_card = tuple(item for item in quote.items if item.place is Place.CARD)
    found = {item.evidence for item in on_card or quote.items}
    return next(evidence for evidence in _WORST_FIRST if evidence in found)


def limit_view(found: Limit) -> LimitView:
    """Why a window is not larger."""
    line = found.line
    return LimitView(
        by=found.by,
        line=BudgetLineView(name=line.name, bytes=line.bytes, origin=line.origin) if line else None,
        text=found.text,
    )


def agent_view(window_tokens: int, slots: int) -> AgentView:
    """What a plan means for an agent."""
    return AgentView(
        ready=agent_ready(window_tokens),
        concurrent_subagents=concurrent_subagents(slots),
        remarks=agent_remarks(window_tokens, slots),
    )


def card_view_of(card: EmptyCard, *, empty: bool = True) -> PlannedCardView:
    """The card of a plan."""
    profile = card.profile
    return PlannedCardView(
        id=profile.id,
        name=profile.name,
        total_bytes=card.total_bytes,
        compute_capability=profile.compute_capability,
        backend=card.backend,
        present=card.present,
        empty=empty,
        desktop=None if card.kind is CardKind.CPU else card.desktop_active,
    )


def speed_view(shown: ShownSpeed | None) -> SpeedView | None:
    """A speed with what must be said beside it."""
    if shown is None:
        return None
    speed = shown.speed
    return SpeedView(
        tokens_per_s=speed.tokens_per_s,
        qualifier=shown.qualifier,
        card=speed.card,
        backend=speed.backend,
        speculation=speed.speculation,
        workload=speed.workload,
        build=speed.build,
    )


def download_view(entry: CatalogueEntry) -> DownloadView:
    """Where a model can be had."""
    return DownloadView(
        id=entry.id,
        repository=entry.repository,
        file=entry.file,
        file_bytes=entry.file_bytes,
        projector_file=entry.projector_file,
        projector_bytes=entry.projector_bytes,
    )


def _placement_view(plan: Plan) -> PlacementView:
    layers = plan.launch.layers
    return PlacementView(
        layers_on_card=layers.layers_on_card,
        expert_layers_on_host=layers.expert_layers_on_host,
        cache_on_host=layers.cache_on_host,
    )


def _tier_view(plan: Plan) -> TierView | None:
    """Where the cache is divided, and what is predicted of it; of an adopted launch nothing is."""
    if plan.tier is None:
        return None
    way = chosen_of(plan.ways)
    return TierView(
        card_tokens=plan.tier.line_tokens,
        host_bytes=plan.tier.sizes.host_bytes,
        tail_draft_tokens=plan.tier.draft_tail_tokens,
        end_tokens_per_s=way.end_tokens_per_s if way else None,
        half_tokens_per_s=way.half_tokens_per_s if way else None,
        speed=way.speed if way else None,
        ways=tuple(map(_way_view, plan.ways)),
    )


def _way_view(way: Candidate) -> TierWayView:
    return TierWayView(
        way=way.way,
        fits=way.fits,
        cache_type=way.offer.cache_type,
        context_tokens=way.offer.context_tokens,
        card_tokens=way.offer.line_tokens,
        card_bytes=way.cost.card_bytes if way.cost else None,
        host_bytes=way.cost.host_bytes if way.cost else None,
        end_tokens_per_s=way.end_tokens_per_s,
        half_tokens_per_s=way.half_tokens_per_s,
        speed=way.speed or None,
        reasons=way.reasons,
    )


def _draft_view(plan: Plan) -> DraftView | None:
    draft = plan.launch.draft
    if draft is None:
        return None
    return DraftView(
        spec_type=draft.spec_type,
        tokens=draft.tokens,
        cache_type_k=draft.cache_type_k,
        cache_type_v=draft.cache_type_v,
        window_tokens=draft.window_tokens,
    )


def _projector_place(plan: Plan) -> ProjectorPlace:
    if not plan.with_projector:
        return ProjectorPlace.OFF
    on_card = plan.launch.projector_on_card and plan.on_card
    return ProjectorPlace.CARD if on_card else ProjectorPlace.HOST


def _alternative_view(other: Alternative) -> AlternativeView:
    return AlternativeView(
        ask=other.ask,
        window_tokens=other.window_tokens,
        parallel=other.slots,
        card_bytes=other.card_bytes,
        gain=other.gain,
    )


def _smallest_view(card: SmallestCard) -> SmallestCardView:
    return SmallestCardView(
        gib=card.gib,
        total_bytes=card.total_bytes,
        window_tokens=card.window_tokens,
        evidence=Evidence.HEADER,
    )
