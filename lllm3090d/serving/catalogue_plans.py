"""Previews of models that are not on disk, as clients see them. Pure."""

from __future__ import annotations

from typing import Any

from lllm3090d.checkpoints.catalogue import CatalogueEntry
from lllm3090d.checkpoints.classify import Kind
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.catalogue_price import (
    Preview,
    PreviewCard,
    advised_gib,
    preview,
    startup_need_bytes,
)
from lllm3090d.planning.limits import limit
from lllm3090d.planning.planner import CappedBy
from lllm3090d.planning.quote import Evidence, Place, PlanPolicy
from lllm3090d.planning.request import ProjectorPlace, SlotPolicy, option_of
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.planning.slots import unasked_slots_note, unused_note
from lllm3090d.planning.smallest_card import agent_window_tokens
from lllm3090d.planning.speeds import shown_speed
from lllm3090d.planning.units import MIB, mib_text, tenths_text
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving.empty_card import EmptyCard, giver_text
from lllm3090d.serving.plan_views import (
    agent_view,
    budget_views,
    card_view_of,
    download_view,
    item_views,
    limit_view,
    speed_view,
)
from lllm3090d.wire import ModelView
from lllm3090d.wire_plans import AlternativeView, PlanOptions, PlanView, SmallestCardView

# What a linear price can answer; the card's own fields are no part of the launch.
KNOWN_FIELDS = frozenset({"model", "context_tokens", "parallel", "slot_policy", "cache_type"})
CARD_FIELDS = frozenset({"card", "vram", "desktop", "backend"})


def catalogue_plan(
    entry: CatalogueEntry,
    card: EmptyCard,
    options: PlanOptions,
    policy: PlanPolicy,
    reserves: ReservePolicy,
    *,
    notes: tuple[str, ...] = (),
) -> PlanView:
    """What a model of the catalogue would get on a card with nothing on it, at evidence ``catalogue``.

    ``notes`` are what a person should know of the card and the engine.

    Raises:
        LlmError: INSUFFICIENT_VRAM, or INSUFFICIENT_MEMORY where host memory is the card, with the ledger, verdict and
            download; UNSUPPORTED_COMBINATION for what only a header can answer; UNSUPPORTED_ARCHITECTURE
            where there is no linear price.
    """
    _check(entry, options)
    shown = _preview_card(card, policy, reserves)
    try:
        found = preview(
            entry,
            shown,
            options.slot_policy or policy.slot_policy,
            parallel=options.parallel,
            context_tokens=options.context_tokens,
        )
    except LlmError as error:
        if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
            raise
        raise _too_big(entry, card, error, _verdict_of_nothing(entry, card), hint=error.hint) from error
    if not found.slots.fits:
        need = mib_text(found.quote.total_bytes(Place.CARD))
        grant = tenths_text(card.budget.grantable_bytes * 10 // MIB)
        giver = giver_text(card) or card.profile.name
        message = (
            f"{entry.name}, which is not on disk, would need about {need} MiB for its least window;"
            f" {giver} can give {grant} MiB."
        )
        nothing = LlmError(ErrorCode.INSUFFICIENT_MEMORY, message, **_ledger(found))
        raise _too_big(entry, card, nothing, found.verdict, hint=found.advice)
    policy_used = options.slot_policy or policy.slot_policy
    return _view(found, card, options, (*_slot_notes(found, options, policy_used), *notes))


def catalogue_row(
    entry: CatalogueEntry, card: EmptyCard, policy: PlanPolicy, reserves: ReservePolicy
) -> ModelView:
    """A line of the list of models for one that is not on disk."""
    row = ModelView(
        name=entry.name,
        aliases=(entry.id,),
        path=None,
        size_bytes=entry.weight_bytes,
        shards=1,
        architecture=None,
        quantisation=entry.quantisation,
        trained_context_tokens=entry.trained_context_tokens,
        kind=Kind.MODEL,
        badges=entry.badges,
        on_disk=False,
        download=download_view(entry),
        speed=speed_view(shown_speed(entry.speeds, card.profile, card.backend)),
    )
    try:
        found = preview(entry, _preview_card(card, policy, reserves), policy.slot_policy)
    except LlmError as error:
        return row.model_copy(update={"plan_problem": error.problem()})
    planned: dict[str, object] = {"verdict": found.verdict, "evidence": Evidence.CATALOGUE}
    if found.slots.fits:
        planned |= {"parallel": found.slots.slots, "window_tokens": found.slots.window_tokens}
    return row.model_copy(update=planned)


def _preview_card(card: EmptyCard, policy: PlanPolicy, reserves: ReservePolicy) -> PreviewCard:
    """The same card in whole MiB, nowhere more than there is."""
    kept = card.kept_mib
    return PreviewCard(
        profile=card.profile.model_copy(update={"vram_mib": max(1, card.total_bytes // MIB)}),
        backend=card.backend,
        driver_reserve_mib=reserves.driver_reserve_mib if kept is None else kept,
        desktop_active=False if card.kind is CardKind.CPU else card.desktop_active,
        desktop_reserve_mib=reserves.desktop_reserve_mib,
        workspace_reserve_mib=policy.workspace_reserve_mib,
    )


def _check(entry: CatalogueEntry, options: PlanOptions) -> None:
    """Refuse what cannot be told without a header: nothing that was asked for is ignored."""
    fields = type(options).model_fields
    asked = [
        name
        for name in fields
        if name not in KNOWN_FIELDS | CARD_FIELDS and getattr(options, name) != fields[name].default
    ]
    if options.cache_type not in {None, CacheType.Q8_0}:
        asked.append("cache_type")
    if asked:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{entry.name} is not on disk, and without its header nobody can tell what"
            f" {', '.join(map(option_of, asked))} would change: a preview knows context, slots and a {CacheType.Q8_0}"
            " cache.",
            hint=f"Leave it out, or download the model first: {entry.repository}, {entry.file}.",
            model=entry.id,
            fields=asked,
        )


def _view(found: Preview, card: EmptyCard, options: PlanOptions, notes: tuple[str, ...]) -> PlanView:
    entry, slots = found.entry, found.slots
    by = CappedBy.MODEL if slots.is_limited_by_model else CappedBy.MEMORY
    if options.context_tokens is not None:
        by = CappedBy.REQUEST
    card_bytes, available = found.quote.total_bytes(Place.CARD), card.budget.grantable_bytes
    return PlanView(
        model=entry.name,
        quantisation=entry.quantisation,
        context_tokens=slots.total_tokens,
        parallel=slots.slots,
        window_tokens=slots.window_tokens,
        trained_context_tokens=entry.trained_context_tokens,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.Q8_0,
        capped_by=by,
        fits=card_bytes <= available,
        card_kind=card.kind,
        items=item_views(found.quote),
        card_bytes=card_bytes,
        host_bytes=found.quote.total_bytes(Place.HOST),
        budget=budget_views(card.budget),
        available_bytes=available,
        argv=(),
        verdict=found.verdict,
        evidence=Evidence.CATALOGUE,
        limit=limit_view(
            limit(by, card.budget.deciding_lines, available, entry.trained_context_tokens, stretched=False)
        ),
        notes=(
            "a preview of a model that is not on disk, at the weakest evidence; its header will tell more",
            *notes,
        ),
        agent=agent_view(slots.window_tokens, slots.slots),
        projector=ProjectorPlace.CARD if entry.has_projector else None,
        card=card_view_of(card),
        alternatives=_one_slot(found),
        smallest_card=_smallest(found, card),
        speed=speed_view(shown_speed(entry.speeds, card.profile, card.backend)),
        download=download_view(entry),
        badges=entry.badges,
    )


def _slot_notes(found: Preview, options: PlanOptions, policy: SlotPolicy) -> tuple[str, ...]:
    """As a plan by the header has them."""
    slots = found.slots
    if options.context_tokens is not None and options.parallel is None and slots.slots > 1:
        return (unasked_slots_note(slots.slots),)
    chosen = options.context_tokens is None and options.parallel is None and policy is SlotPolicy.WINDOW
    if chosen and slots.is_limited_by_model and slots.unused_tokens:
        return (unused_note(slots.unused_tokens),)
    return ()


def _one_slot(found: Preview) -> tuple[AlternativeView, ...]:
    """What one slot would give, where the plan has several of shorter windows."""
    window = found.slots.one_slot_window_tokens
    if window is None or window <= found.slots.window_tokens:
        return ()
    more, less = window - found.slots.window_tokens, found.slots.total_tokens - window
    other = AlternativeView(
        ask="--parallel 1",
        window_tokens=window,
        parallel=1,
        card_bytes=startup_need_bytes(found.entry, found.card, window, 1),
        gain=f"{more:,} tokens of window more, {less:,} tokens of context less in all",
    )
    return (other,)


def _smallest(found: Preview, card: EmptyCard) -> SmallestCardView | None:
    least, window = found.least_vram_mib, agent_window_tokens(found.entry.trained_context_tokens)
    if least is None or window is None or card.kind is CardKind.CPU:
        return None
    return SmallestCardView(
        gib=advised_gib(least), total_bytes=least * MIB, window_tokens=window, evidence=Evidence.CATALOGUE
    )


def _verdict_of_nothing(entry: CatalogueEntry, card: EmptyCard) -> Verdict:
    can = card.profile.can_compute(entry.least_compute_capability)
    return Verdict.TOO_BIG if can else Verdict.CAPABILITY


def _ledger(found: Preview) -> dict[str, Any]:
    return {
        "items": [item.model_dump(mode="json") for item in item_views(found.quote)],
        "needed_bytes": found.quote.total_bytes(Place.CARD),
    }


def _too_big(
    entry: CatalogueEntry, card: EmptyCard, error: LlmError, verdict: Verdict, *, hint: str | None
) -> LlmError:
    budget = card.budget
    on_host = card.kind is CardKind.CPU
    return LlmError(
        ErrorCode.INSUFFICIENT_MEMORY if on_host else ErrorCode.INSUFFICIENT_VRAM,
        error.message,
        hint=hint,
        **dict(error.details)
        | {
            "budget": [line.model_dump(mode="json") for line in budget_views(budget)],
            "grantable_bytes": budget.grantable_bytes,
            "card_kind": str(card.kind),
            "verdict": str(verdict),
            "card": card_view_of(card).model_dump(mode="json"),
            "download": download_view(entry).model_dump(mode="json"),
        },
    )
