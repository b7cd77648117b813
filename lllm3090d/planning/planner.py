"""The planner: the largest useful context that fits, and its quote. Pure.

What was asked for is honoured exactly or refused. What was left open is decided in a fixed order, so that the same
inputs give the same plan: type of the cache, drafting, place of the projector, placement, slots, window. Everything
is found by the quote itself (:mod:`lllm3090d.planning.search`); there is no second formula.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts, Purpose
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning import cache, checks, offload, refusal
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.cache_types import resolve_cache_types
from lllm3090d.planning.calibration import Calibration, calibrated_policy
from lllm3090d.planning.drafting import draft_context
from lllm3090d.planning.launch import Draft, Drafter, Launch, PlanPolicy, SpecType, batches
from lllm3090d.planning.placement import EVERYTHING, Placement
from lllm3090d.planning.projector_place import ProjectorTrial, belongs_on_host
from lllm3090d.planning.quote import Place, Quote
from lllm3090d.planning.request import (
    Drafting,
    Features,
    Offload,
    PlanRequest,
    ProjectorPlace,
    Room,
    RopeScaling,
    SlotPolicy,
    TierRoom,
)
from lllm3090d.planning.search import Variant
from lllm3090d.planning.several_cards import on_fewest_cards
from lllm3090d.planning.slots import (
    DEFAULT_PARALLEL,
    SlotPlan,
    automatic_slots,
    unasked_slots_note,
    unused_note,
)
from lllm3090d.planning.split import DeviceSplit, division_of
from lllm3090d.planning.split_search import TwoCards
from lllm3090d.planning.stretch import Stretch, stretch
from lllm3090d.planning.tier import Tier
from lllm3090d.planning.tier_choice import Candidate
from lllm3090d.planning.tier_conditions import shared_line_caution
from lllm3090d.planning.tiering import chosen_of, tier_of, tiered
from lllm3090d.planning.units import MIB, PAGE_TOKENS, mib_ceil, round_up
from lllm3090d.planning.vectors import for_vectors, longest_text_tokens
from lllm3090d.planning.verdict import AGENT_PROMPT_FLOOR_TOKENS

# Least window for which drafting is automatic: the smallest in which an agent can work, in whole pages.
LEAST_DRAFTED_WINDOW_TOKENS = round_up(AGENT_PROMPT_FLOOR_TOKENS + 1, PAGE_TOKENS)

__all__ = ["CacheType", "CappedBy", "Features", "Plan", "PlanPolicy", "PlanRequest", "Room", "plan"]


class CappedBy(enum.StrEnum):
    """Why the window is not larger."""

    MODEL = "model"  # the trained context
    MEMORY = "memory"  # what the card can give
    REQUEST = "request"  # somebody asked for this size


@dataclass(frozen=True, slots=True)
class Plan:
    """How to launch a checkpoint, and what it costs.

    Attributes:
        launch: all values that have a price; the same ones reach the command line.
        window_tokens: what one slot can hold.
        on_card: the engine may use the card; False for backend cpu.
        capped_by: why the window is not larger.
        quote: the price.
        with_projector: the model's projector is loaded.
        rope: how positions are stretched; None where they are not.
        tier: how the cache is divided between card and host; None where it is not.
        split: the cards of a machine with several that it is for, and what each takes; None where there is one.
        notes: what was decided against the usual, and why; for a person.
        uncalibrated: the price without anything that was learnt here; None where that changes nothing.
        ways: where a tier was asked for, the ways to have such a window, the best first; () where none was.
    """

    launch: Launch
    window_tokens: int
    on_card: bool
    capped_by: CappedBy
    quote: Quote
    with_projector: bool = False
    rope: Stretch | None = None
    tier: Tier | None = None
    split: DeviceSplit | None = None
    notes: tuple[str, ...] = ()
    uncalibrated: Quote | None = None
    ways: tuple[Candidate, ...] = ()

    @property
    def first_quote(self) -> Quote:
        """What a measurement of this launch is held against."""
        return self.uncalibrated or self.quote

    @property
    def context_tokens(self) -> int:
        """Total context of all slots (``-c``)."""
        return self.launch.context_tokens

    @property
    def parallel(self) -> int:
        """Slots (``--parallel``)."""
        return self.launch.parallel

    @property
    def cache_type_k(self) -> CacheType:
        """Type of K of the cache."""
        return self.launch.cache_type_k

    @property
    def cache_type_v(self) -> CacheType:
        """Type of V of the cache."""
        return self.launch.cache_type_v


def plan(
    facts: CheckpointFacts,
    request: PlanRequest,
    policy: PlanPolicy,
    *,
    features: Features,
    card_kind: CardKind,
    room: Room,
    projector: ProjectorFacts | None = None,
    drafter: Drafter | None = None,
    calibration: Calibration | None = None,
) -> Plan:
    """Plan a launch: what was asked for exactly, and the best that fits for what was left open.

    The context of the plan is what the engine will report: a request is padded up to whole cache cells, 256
    for each slot, never down.

    Args:
        facts: the checkpoint.
        request: what a person asked for.
        policy: what the settings decide.
        features: what the engine build computes on and offers.
        card_kind: whose memory is managed. With CPU the engine must be kept off any card.
        room: what that memory, and the host's beside it, can give now.
        projector: of the model; None without.
        drafter: in a file of its own; None without.
        calibration: what was seen of the model with this build on this card; None for nothing.

    Raises:
        LlmError: INSUFFICIENT_MEMORY with the arithmetic and remedies; INVALID_REQUEST for numbers below 1;
            UNSUPPORTED_COMBINATION for what the engine, the model or both cannot serve; ENGINE_UNUSABLE for an
            engine that cannot use the card.
    """
    question = Planner(facts, request, policy, features, card_kind, room, projector, drafter, calibration)
    return question.plan()


@dataclass(frozen=True, slots=True)
class Planner:
    """One question to the planner; see :func:`plan` for the fields."""

    facts: CheckpointFacts
    request: PlanRequest
    policy: PlanPolicy
    features: Features
    card_kind: CardKind
    room: Room
    projector: ProjectorFacts | None
    drafter: Drafter | None = None
    calibration: Calibration | None = None
    keeps_host_caches: bool = False  # sizes of what is kept in host memory were asked for
    explains: bool = (
        True  # what does not fit is refused with the arithmetic, which takes longer than finding out
    )

    is_checked: bool = False  # nothing is wrong with it but for room, as an earlier answer has shown
    fits_on_none: bool = False  # no single card is enough, as was seen before

    def plan(self) -> Plan:
        """The plan; see :func:`plan`."""
        if not self._host_may_be_short:
            return self._beside_card(self._on_its_cards())
        try:
            made = self._beside_card(self._on_its_cards())
        except LlmError as error:
            better = self._without_host_caches() if error.code is ErrorCode.INSUFFICIENT_MEMORY else None
            if better is None:
                raise
            return better
        if made.capped_by is not CappedBy.MEMORY or self.is_enough(made):
            return made
        better = self._without_host_caches()
        return made if better is None or _served(better) <= _served(made) else better

    @property
    def _host_may_be_short(self) -> bool:
        """A part of the model may be left beside the card, where what is kept only to be quick takes its room."""
        allowed = (self.request.offload or self.policy.offload) is Offload.ALLOWED
        kept = self.policy.prompt_cache_mib > 0 and not self.keeps_host_caches
        return (
            self.room.host is not None
            and self._on_card
            and kept
            and (allowed or self.request.places_by_hand)
        )

    def _without_host_caches(self) -> Plan | None:
        """The plan with as much of the prompt cache as the host has left beside it; None where there is none then."""
        try:
            bare = replace(self, policy=replace(self.policy, prompt_cache_mib=0))
            made = bare._beside_card(bare._on_its_cards())
        except LlmError as error:
            if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
                raise
            return None
        kept = self.policy.prompt_cache_mib
        left = max(0, (self.room.host or 0) - made.quote.total_bytes(Place.HOST)) // MIB
        if left:
            some = replace(self, policy=replace(bare.policy, prompt_cache_mib=min(kept, left)))
            again = some._on_its_cards()
            if again.launch == replace(made.launch, prompt_cache_mib=again.launch.prompt_cache_mib):
                made = again
        size = made.launch.prompt_cache_mib
        note = f"prompt cache of {size} MiB instead of {kept}: host memory is short"
        return replace(made, notes=(*made.notes, note)) if size < kept else made

    def _beside_card(self, made: Plan) -> Plan:
        """The plan, where host memory is short with less of what is kept there only to be quick.

        Raises:
            LlmError: INSUFFICIENT_MEMORY where that does not help.
        """
        room = self.room.host
        if room is None or not self._on_card:
            return made
        short = made.quote.total_bytes(Place.HOST) - room
        if short <= 0:
            return made
        kept = self.policy.prompt_cache_mib
        smaller = replace(self.policy, prompt_cache_mib=max(0, kept - mib_ceil(short)))
        if mib_ceil(short) > kept:
            smaller = replace(smaller, context_checkpoints=0)
        if not self.keeps_host_caches and smaller != self.policy:
            again = replace(self, policy=smaller)._on_its_cards()
            if again.quote.total_bytes(Place.HOST) <= room:
                note = (
                    f"prompt cache of {smaller.prompt_cache_mib} MiB instead of {kept}: host memory is short"
                )
                if not smaller.context_checkpoints and self.policy.context_checkpoints:
                    note = f"no prompt cache ({kept} MiB) and no context checkpoints: host memory is short"
                return replace(again, notes=(*again.notes, note))
        raise refusal.host_too_small(self.facts, made.launch, made.quote, room)

    def _on_its_cards(self) -> Plan:
        if not self.is_checked:
            checks.check_request(
                self.facts,
                self.request,
                self.features,
                self.card_kind,
                projector=self.projector,
                drafter=self.drafter,
            )
        if len(self.room.cards) < 2 or not self._on_card:  # one is like none
            return self._kept_to()
        known = self.calibration
        each = self if known is None else replace(self, calibration=known.for_several_cards())
        return on_fewest_cards(
            self.room,
            self.request,
            lambda room, request: replace(each, room=room, request=request)._planned(),
            self.is_enough,
            skips_single=self.fits_on_none,
        )

    def _kept_to(self) -> Plan:
        """The plan, also where a launch was seen to take more than its quote now knows of.

        A release with another formula quotes less than the one that measured: then all launches are charged the
        difference, and another one is looked for. Each turn charges more, so none meets the same launch again.
        """
        made, known = self._planned(), self.calibration
        if known is None:
            return made
        for _ in known.seen:
            need = made.quote.total_bytes(Place.CARD)
            if need <= max(0, self.room.card):
                break
            beyond = need - made.first_quote.total_bytes(Place.CARD)
            known = replace(known, least_excess_bytes=max(beyond, known.excess_bytes + 1))
            made = replace(self, calibration=known)._planned()
        return made

    def on_two_cards(self, made: Plan) -> TwoCards:
        """The launch of a plan on any two cards, with what this question charges every one of several cards."""
        known, projector = self.calibration, self.projector if made.with_projector else None
        policy = calibrated_policy(self.policy, known)
        division = division_of(self.facts, made.launch, self.features.backend, policy, projector)
        return TwoCards(division, 0 if known is None else known.excess_bytes)

    def is_enough(self, made: Plan) -> bool:
        """More cards would be of no use."""
        mixture = bool(self.facts.expert_count)
        useful = offload.USEFUL_MIXTURE_TOKENS if mixture else offload.USEFUL_DENSE_TOKENS
        return made.capped_by is not CappedBy.MEMORY or made.window_tokens >= useful

    def _planned(self) -> Plan:
        """The plan for this room, and so for all of its cards."""
        notes: list[str] = []
        ways: tuple[Candidate, ...] = ()
        stretched = self._stretch(notes)
        variant = self._drafting(self._base(stretched, notes), notes)
        variant = self._projecting(variant, notes)
        if self.request.tiered and self.features.tier is not None:
            variant, launch, ways = self._with_tier(variant, self.features.tier, notes)
            asked = self.request.context_tokens is not None
            capped_by = CappedBy.REQUEST if asked else CappedBy.MODEL
        elif self.request.context_tokens is not None:
            variant, launch = self._of_that_size(variant, self.request.context_tokens, notes)
            capped_by = CappedBy.REQUEST
        else:
            variant, launch = self._as_large_as_fits(variant, notes)
            whole = launch.shape(self.facts).stream_cells >= variant.limit_tokens
            capped_by = CappedBy.MODEL if whole else CappedBy.MEMORY
        stream = launch.shape(self.facts).stream_cells
        quote = variant.charge(launch)
        return Plan(
            launch=launch,
            window_tokens=longest_text_tokens(self.facts, launch, min(stream, variant.limit_tokens)),
            on_card=self.card_kind is not CardKind.CPU,
            capped_by=capped_by,
            quote=quote,
            with_projector=variant.projector is not None,
            rope=stretched,
            tier=None if self.features.tier is None else tier_of(launch, variant, self.features.tier.offer),
            split=variant.split(launch),
            notes=tuple(notes),
            uncalibrated=None if variant.calibration is None else variant.uncalibrated(launch),
            ways=ways,
        )

    # --- what is decided before the size -------------------------------------------------------------------------

    def _base(self, stretched: Stretch | None, notes: list[str]) -> Variant:
        """Everything resident, without drafting and projector."""
        request, policy = self.request, self.policy
        batch, micro_batch = batches(request, policy)
        type_k, type_v = self._cache_types(notes)
        return Variant(
            facts=self.facts,
            template=for_vectors(
                self.facts,
                request,
                Launch(
                    context_tokens=0,  # replaced by every launch of the search
                    parallel=request.parallel or 1,
                    cache_type_k=type_k,
                    cache_type_v=type_v,
                    batch_tokens=batch,
                    micro_batch_tokens=micro_batch,
                    context_checkpoints=policy.context_checkpoints,
                    prompt_cache_mib=policy.prompt_cache_mib,
                    checkpoint_min_step_tokens=policy.checkpoint_min_step_tokens,
                    unified=request.unified,
                    swa_full=request.swa_full,
                    layers=self._given_placement(),
                ),
            ),
            policy=calibrated_policy(policy, self.calibration),
            backend=Backend.CPU if self.card_kind is CardKind.CPU else self.features.backend,
            room=replace(
                self.room,
                card=max(0, self.room.card),
                cards=self.room.cards if self._on_card else (),
            ),
            limit_tokens=stretched.window_tokens if stretched else self.facts.trained_context_tokens,
            calibration=self.calibration,
        )

    def _cache_types(self, notes: list[str]) -> tuple[CacheType, CacheType]:
        """As asked; one side alone is mirrored; the setting's type only where the model can have it."""
        request = self.request
        types = resolve_cache_types(request.cache_type_k, request.cache_type_v, self.policy.cache_type)
        try:
            cache.check_cache_types(self.facts, *types)
        except LlmError as error:
            if request.cache_type_k or request.cache_type_v:
                raise
            notes.append(f"cache type {CacheType.F16} instead of {types[0]}: {error.message}")
            return CacheType.F16, CacheType.F16
        return types

    def _given_placement(self) -> Placement:
        request = self.request
        if not request.places_by_hand:
            return EVERYTHING
        blocks = len(self.facts.layers) + 1
        layers = (
            request.gpu_layers if request.gpu_layers is not None and request.gpu_layers < blocks else None
        )
        return Placement(
            layers_on_card=layers,
            expert_layers_on_host=request.cpu_experts or 0,
            cache_on_host=request.cache_on_host,
        )

    def _stretch(self, notes: list[str]) -> Stretch | None:
        """How positions are stretched, where that was asked for and the window needs it."""
        request = self.request
        if request.rope_scaling is None:
            return None
        share = None if request.context_tokens is None else request.context_tokens // self._slots_asked()
        found = stretch(self.facts, request.rope_scaling, share)
        if found is None and request.rope_scaling is not RopeScaling.NONE:
            trained = self.facts.trained_context_tokens
            notes.append(
                "positions are not stretched: ask for a context (--context) of more than"
                f" {trained:,} tokens for each slot"
            )
        return found

    def _drafting(self, variant: Variant, notes: list[str]) -> Variant:
        """With a draft where it was asked for, or is open, offered and fits."""
        if variant.template.purpose is not Purpose.CHAT:
            self._note_draft_tokens(f"nothing is generated for {variant.template.purpose}", notes)
            return variant
        choice = self.request.drafting or self.policy.drafting
        automatic = choice is Drafting.AUTO
        template = None
        if choice is Drafting.ON or (automatic and self._on_card):
            template = self._drafted(variant.template, automatic=automatic)
        if template is None:
            self._note_draft_tokens(self._why_undrafted(choice, variant.template), notes)
            return variant
        types = dict.fromkeys((variant.template.cache_type_k, CacheType.F16))
        with_draft = replace(variant.changed(template=template), draft_types=tuple(types))
        why = self._why_without_draft(with_draft, variant) if automatic else None
        if why is None:
            return with_draft
        notes.append(f"without drafting: with it {why}")
        self._note_draft_tokens("drafting was given up", notes)
        return variant

    def _note_draft_tokens(self, why: str, notes: list[str]) -> None:
        """A length of drafts was asked for, and there are none."""
        if self.request.draft_tokens is not None:
            notes.append(f"--draft-tokens {self.request.draft_tokens} is without effect: {why}")

    def _why_undrafted(self, choice: Drafting, template: Launch) -> str:
        """Why nothing drafts, where it was not given up for memory."""
        if choice is Drafting.OFF:
            return "drafting is off"
        if self._drafted(template, automatic=False) is None:
            return "neither this model nor a file beside it drafts with this engine"
        return "nothing drafts here unless it is asked for (--draft on)"

    def _drafted(self, template: Launch, *, automatic: bool) -> Launch | None:
        """The launch with the model's own blocks, else with a file beside it; None where neither can draft.

        Of files only blocks for multi-token prediction are automatic: other drafters can cost more than they give
        (published for DFlash: faster in a short test, far slower in long use), so somebody has to ask.
        """
        tokens = self.request.draft_tokens or self.policy.draft_tokens
        if self.facts.has_mtp and self.features.drafts_itself:
            return replace(template, draft=Draft(tokens))
        drafter = self.drafter
        if drafter is None or drafter.spec_type not in self.features.drafts_from:
            return None
        if automatic and drafter.spec_type is not SpecType.MTP:
            return None
        made = replace(template, draft=Draft(tokens, spec_type=drafter.spec_type), drafter=drafter.facts)
        if automatic:
            least = replace(made, context_tokens=PAGE_TOKENS)
            try:
                draft_context(self.facts, least, least.shape(self.facts))
            except LlmError:
                return None  # made for another model: it is not asked for, so nothing is refused
        return made

    def _why_without_draft(self, with_draft: Variant, without: Variant) -> str | None:
        """What drafting would cost that comes before it: a plan at all, or a window in which an agent can work.

        Beyond that window drafting comes first: it makes every answer faster, and a longer window only the longest.
        """
        slots, enough = self._slots_asked(), min(with_draft.limit_tokens, LEAST_DRAFTED_WINDOW_TOKENS)
        if self.request.context_tokens is None and not self.request.tiered:
            if with_draft.fits(with_draft.launch(enough, slots)):
                return None
            if without.fits(without.launch(without.least_window(), slots)):
                return f"no window of {enough:,} tokens would fit"
        lost = not self._is_possible(with_draft) and self._is_possible(without)
        return "nothing would fit" if lost else None

    def _projecting(self, variant: Variant, notes: list[str]) -> Variant:
        """With the projector, on the card unless that costs too much of the window."""
        choice = self.request.projector or self.policy.projector
        if self.projector is None or choice is ProjectorPlace.OFF:
            return variant
        if variant.template.purpose is not Purpose.CHAT and self.request.projector is None:
            return variant  # texts become vectors; for images somebody has to ask
        if not self.features.projects:
            notes.append("without the projector: this engine takes none")
            return variant
        on_card = variant.changed(
            projector=self.projector,
            template=replace(
                variant.template, projector_on_card=True, image_max_tokens=self.policy.image_max_tokens
            ),
        )
        on_host = on_card.changed(template=replace(on_card.template, projector_on_card=False))
        if choice is ProjectorPlace.HOST and self._on_card:
            return on_host
        if self.request.projector is ProjectorPlace.CARD and not self._on_card:
            notes.append("projector in host memory: there is no card")
        why = (
            self._why_on_host(on_card, on_host) if choice is ProjectorPlace.AUTO and self._on_card else None
        )
        if why is None:
            return on_card
        notes.append(f"projector in host memory: on the card {why}")
        return on_host

    def _why_on_host(self, on_card: Variant, on_host: Variant) -> str | None:
        """What the projector on the card would cost; None where that is bearable."""
        slots, context = self._slots_asked(), self.request.context_tokens
        if context is not None:
            fits = on_card.is_admissible(on_card.with_context(context, slots))
            return None if fits else "it would not fit"
        near, far = (each.largest_window(slots) or 0 for each in (on_card, on_host))
        if far and not belongs_on_host(ProjectorTrial(0, 0, near), ProjectorTrial(0, 0, far)):
            return None
        return f"it would cost {far - near:,} tokens of the window" if near else "nothing would fit"

    # --- size -----------------------------------------------------------------------------------------------------

    def _of_that_size(self, variant: Variant, context: int, notes: list[str]) -> tuple[Variant, Launch]:
        """Exactly the context that was asked for; of slots that nobody gave, two where they fit."""
        given = self.request.parallel
        # Positions are stretched for a window of that size, so it is that of one slot.
        several = context >= DEFAULT_PARALLEL * PAGE_TOKENS and not self._is_stretched(variant)
        candidates: tuple[int, ...] = (given,) if given is not None else (1,)
        if given is None and several:
            # One slot is tried where it could hold all of it, else its refusal would hide that memory is short.
            candidates = (DEFAULT_PARALLEL, 1) if context <= variant.limit_tokens else (DEFAULT_PARALLEL,)
        for slots in candidates:
            checks.check_context(
                context, slots, variant.limit_tokens, self.facts, was_asked=given is not None
            )
            launch = variant.with_context(context, slots)
            if variant.is_admissible(launch):
                if given is None and slots > 1:
                    notes.append(unasked_slots_note(slots))
                _note_padding(launch, context, notes)
                return variant, launch
            offloaded = self._offloaded(variant, -(-context // slots), slots)
            if offloaded is not None:
                notes.append("a part of the model in host memory")
                launch = offloaded.with_context(context, slots)
                _note_padding(launch, context, notes)
                return offloaded, launch
        raise self._too_large(variant, launch)

    def _with_tier(
        self, variant: Variant, room: TierRoom, notes: list[str]
    ) -> tuple[Variant, Launch, tuple[Candidate, ...]]:
        """The context that was asked for, or all there can be, with a part of it in host memory where it must."""
        slots = self._slots_asked()
        context = self.request.context_tokens or variant.limit_tokens * slots
        given = self.request.parallel is not None
        checks.check_context(context, slots, variant.limit_tokens, self.facts, was_asked=given)
        found, launch, ways = tiered(variant, room, context, slots)
        way = chosen_of(ways)
        if launch.line_tokens and way is not None:
            notes += (*way.reasons, way.speed)
            caution = shared_line_caution(launch.shape(self.facts))
            notes += (caution,) if caution else ()
        else:
            notes.append("no tier: the whole cache fits on the card")
        return found, launch, ways

    def _as_large_as_fits(self, variant: Variant, notes: list[str]) -> tuple[Variant, Launch]:
        given, unused = self.request.parallel, list[str]()
        if given is not None:
            window, slots = variant.largest_window(given), given
        else:
            policy = self.request.slot_policy or self.policy.slot_policy
            chosen = self._slots(policy, variant)
            window, slots = chosen.window_tokens or None, chosen.slots or 1
            if chosen.unused_tokens:
                unused = [unused_note(chosen.unused_tokens)]
        resident = variant.largest_window(given or 1)
        useful = offload.useful_window(variant)
        # Where nothing fits otherwise, a window that is not useful is better than none.
        targets = (useful,) if resident is not None else (useful, variant.least_window())
        for target in targets if (resident or 0) < useful else ():
            offloaded = self._offloaded(variant, target, given or 1)
            if offloaded is not None:
                notes.append(f"a part of the model in host memory, for a window of {target:,} tokens")
                return offloaded, offloaded.launch(target, given or 1)
        if window is None:
            raise self._too_large(variant, variant.launch(variant.least_window(), slots))
        notes += unused
        return variant, variant.launch(window, slots)

    @staticmethod
    def _slots(policy: SlotPolicy, variant: Variant) -> SlotPlan:
        limit = variant.limit_tokens
        whole = policy is SlotPolicy.WINDOW and variant.largest_window(1) == limit
        return automatic_slots(
            policy,
            lambda n: variant.largest_window(n) or 0,
            limit,
            holds_limit=lambda n: variant.fits(variant.launch(limit, n)),
            pool=variant.pool_tokens if whole else None,
        )

    def _offloaded(self, variant: Variant, window: int, slots: int) -> Variant | None:
        allowed = (self.request.offload or self.policy.offload) is Offload.ALLOWED
        if not allowed or not self._on_card or self.request.places_by_hand:
            return None
        micro_batch = self.request.micro_batch_tokens
        if self.request.batch_tokens is not None:
            micro_batch = (
                variant.template.micro_batch_tokens
            )  # a larger one would need a larger batch than asked for
        return offload.least_offload(variant, window, slots, micro_batch)

    def _too_large(self, variant: Variant, launch: Launch) -> LlmError:
        if not self.explains:
            return LlmError(ErrorCode.INSUFFICIENT_MEMORY, "it does not fit")
        by_hand = self.request.places_by_hand
        return refusal.too_large(
            variant,
            launch,
            self.card_kind,
            may_offload=not by_hand,
            keeps_host_caches=self.keeps_host_caches,
            asked_tokens=self.request.context_tokens,
        )

    # --- small answers ----------------------------------------------------------------------------------------------

    @property
    def _on_card(self) -> bool:
        return self.card_kind is not CardKind.CPU

    def _is_stretched(self, variant: Variant) -> bool:
        return variant.limit_tokens > self.facts.trained_context_tokens

    def _slots_asked(self) -> int:
        return self.request.parallel or 1

    def _is_possible(self, variant: Variant) -> bool:
        """The launch that was asked for, or the least of an open one, fits as it is or with what may be offloaded."""
        slots, context = self._slots_asked(), self.request.context_tokens
        if context is not None:
            launch = variant.with_context(context, slots)
        else:
            launch = variant.launch(variant.least_window(), slots)
        if variant.is_admissible(launch):
            return True
        return self._offloaded(variant, -(-launch.context_tokens // slots), slots) is not None


def _served(made: Plan) -> int:
    """Tokens of all slots together."""
    return made.window_tokens * made.parallel


def _note_padding(launch: Launch, asked_tokens: int, notes: list[str]) -> None:
    if launch.context_tokens != asked_tokens:
        notes.append(
            f"{launch.context_tokens:,} tokens instead of {asked_tokens:,}: whole cells for each slot"
        )
