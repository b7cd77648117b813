"""Plans of models that no rule describes: priced by the engine's dry runs alone. Pure.

A search asks for the projection of one launch after the other and is sent what the engine says; who drives it makes the
dry runs (:mod:`lllm3090d.serving.offering`). Only what a dry run can be told may be asked of such a model; everything
else that has a price is refused.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning import cache, checks
from lllm3090d.planning.cache_types import resolve_cache_types
from lllm3090d.planning.engine_quote import no_shares, unruled_quote
from lllm3090d.planning.launch import Launch, PlanPolicy, batches
from lllm3090d.planning.planner import CacheType, CappedBy, Plan
from lllm3090d.planning.projection import Projection, Where
from lllm3090d.planning.quote import Place, Quote
from lllm3090d.planning.refusal import item_details, slots_text, sum_in_mib
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, ProjectorPlace, Room, option_of
from lllm3090d.planning.search import asking_last_within
from lllm3090d.planning.split import DeviceSplit
from lllm3090d.planning.units import MIB, PAGE_TOKENS, mib_tenths, round_up, tenths_text

# A dry run takes 0.1 to 3 s. Memory is nearly a straight line in the context, for which five are usual.
MOST_RUNS = 10
MOST_WINDOWS = 256  # among which a search chooses, so that a long context does not take more runs

Steps = Generator[Launch, Projection, Plan]


@dataclass(frozen=True, slots=True)
class UnruledQuestion:
    """What is asked of a model without a rule.

    Attributes:
        model: what its header says.
        request: what was asked for, further arguments of the engine included.
        policy: what the settings decide, as far as a dry run can be told.
        backend: what the plan counts on; cpu where host memory takes the card's place.
        card_kind: whose memory is managed.
        where: on what dry runs are made.
        context_checkpoints: of one slot, where somebody asked for them; they are charged like whole contexts.
        left_out: what lies beside the model and has no price without a rule, such as a projector.
        most_tokens: context of all slots that is not exceeded where none is asked for; None for no such limit.
    """

    model: UnruledModel
    request: PlanRequest
    policy: PlanPolicy
    backend: Backend
    card_kind: CardKind
    where: Where
    context_checkpoints: int = 0
    left_out: tuple[str, ...] = ()
    most_tokens: int | None = None

    @property
    def on_card(self) -> bool:
        """There is a card."""
        return self.card_kind is not CardKind.CPU

    def steps(self, room_bytes: int) -> Steps:
        """Ask for projections, and return the plan: of the size that was asked for, or of the largest that fits.

        Whether what was asked for fits is for :func:`fitted` to say; where nothing fits, the plan is the smallest.

        Args:
            room_bytes: what the card can give, or host memory in its place.

        Raises:
            LlmError: INVALID_REQUEST and UNSUPPORTED_COMBINATION for what cannot be asked; ENGINE_UNUSABLE as
                :func:`lllm3090d.planning.engine_quote.unruled_quote`; what the driver throws in.
        """
        self.check()
        notes = [
            f"architecture {self.model.architecture} has no rule here ({self.model.reason}): priced by a dry run of"
            " this engine alone, an upper bound"
        ]
        notes += self._left_out()
        template = self._template(notes)
        slots, context = template.parallel, self.request.context_tokens
        if context is not None:
            limit, asked = self.model.trained_context_tokens, self.request.parallel is not None
            checks.check_context(context, slots, limit, self.model, was_asked=asked)
            launch = self._sized(template, context)
            if launch.context_tokens != context:
                notes.append(
                    f"{launch.context_tokens:,} tokens instead of {context:,}: whole cells for each slot"
                )
            launch, projection = yield from self._first(launch, notes)
            return self._plan(launch, self._quote(launch, projection), CappedBy.REQUEST, notes)
        launch, quote = yield from self._largest(template, room_bytes, notes)
        capped_by = CappedBy.MEMORY
        if self._window(launch) >= self.model.trained_context_tokens:
            capped_by = CappedBy.MODEL
        elif self.most_tokens is not None and launch.context_tokens >= self.most_tokens:
            capped_by = CappedBy.REQUEST
        return self._plan(launch, quote, capped_by, notes)

    def check(self) -> None:
        """Refuse what has no price without a rule, and what nothing can have.

        Raises:
            LlmError: INVALID_REQUEST, UNSUPPORTED_COMBINATION, ENGINE_UNUSABLE.
        """
        request = self.request
        checks.check_engine(self.backend, self.card_kind)
        checks.check_numbers(request)
        unpriced = (
            ("drafting", request.drafting is Drafting.ON),
            ("projector", request.projector in {ProjectorPlace.CARD, ProjectorPlace.HOST}),
            ("offload", request.offload is Offload.ALLOWED),
            ("gpu_layers", request.gpu_layers is not None),
            ("cpu_experts", request.cpu_experts is not None),
            ("cache_on_host", request.cache_on_host),
            ("tiered", request.tiered),
            ("rope_scaling", request.rope_scaling is not None),
            ("unified", request.unified and (request.parallel or 1) > 1),
        )
        for field, asked in unpriced:
            if asked:
                raise LlmError(
                    ErrorCode.UNSUPPORTED_COMBINATION,
                    f"{self.model.title} has the architecture {self.model.architecture}, which has no rule here, and a"
                    f" dry run of the engine does not tell what {option_of(field)} takes.",
                    hint=f"Leave {option_of(field)} out.",
                    architecture=self.model.architecture,
                    field=field,
                )
        batch, micro_batch = request.batch_tokens or 0, request.micro_batch_tokens or 0
        if 0 < batch < micro_batch:
            raise LlmError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"--micro-batch {micro_batch} is above --batch {batch}, and a micro batch is a part of a batch.",
                hint=f"Ask for at most --micro-batch {batch}, or for a larger batch.",
            )

    # --- the launch ---------------------------------------------------------------------------------------------

    def _template(self, notes: list[str]) -> Launch:
        """Everything but the context."""
        request, policy = self.request, self.policy
        batch, micro_batch = batches(request, policy)
        type_k, type_v = self._cache_types(notes)
        slots = request.parallel or 1
        cache.check_slots(slots, request.context_tokens, batch)
        if policy.context_checkpoints and not self.context_checkpoints:
            notes.append("without context checkpoints: a dry run does not tell what one takes")
        return Launch(
            context_tokens=0,  # replaced
            parallel=slots,
            cache_type_k=type_k,
            cache_type_v=type_v,
            batch_tokens=batch,
            micro_batch_tokens=micro_batch,
            context_checkpoints=self.context_checkpoints,
            prompt_cache_mib=policy.prompt_cache_mib,
            checkpoint_min_step_tokens=policy.checkpoint_min_step_tokens,
            unified=request.unified,
            swa_full=request.swa_full,
        )

    def _cache_types(self, notes: list[str]) -> tuple[CacheType, CacheType]:
        """As asked, else the setting's; f16 where the card needs more for another that no dry run tells."""
        request = self.request
        types = resolve_cache_types(request.cache_type_k, request.cache_type_v, self.policy.cache_type)
        told = self.where is Where.DEVICE or self.backend is not Backend.CUDA
        if told or types == (CacheType.F16, CacheType.F16):
            return types
        if self._asks_for_type:
            raise no_shares(self.backend)
        notes.append(
            f"cache type {CacheType.F16} instead of {types[0]}: the dry run is made without the card, and does not"
            f" tell what {self.backend} adds for another type"
        )
        return CacheType.F16, CacheType.F16

    @property
    def _asks_for_type(self) -> bool:
        return self.request.cache_type_k is not None or self.request.cache_type_v is not None

    def _left_out(self) -> list[str]:
        request = self.request
        notes = [f"without {what}: nothing tells what it takes" for what in self.left_out]
        if request.draft_tokens is not None:
            notes.append(f"--draft-tokens {request.draft_tokens} is without effect: nothing drafts here")
        if request.slot_policy is not None and request.parallel is None:
            notes.append(
                "--slot-policy is without effect: there is 1 slot, where --parallel asks for no more"
            )
        if self.on_card and self.where is Where.HOST:
            notes.append("the dry run is made without the card, so all of it is charged to the card")
        return notes

    @staticmethod
    def _sized(template: Launch, context_tokens: int) -> Launch:
        """With such a context, padded as the engine pads it."""
        return replace(template, context_tokens=padded_context(template, context_tokens))

    @staticmethod
    def _stream(launch: Launch) -> int:
        streams = 1 if launch.unified else launch.parallel
        return cache.stream_cells(launch.context_tokens, streams)

    def _window(self, launch: Launch) -> int:
        return min(self._stream(launch), self.model.trained_context_tokens)

    # --- the search -----------------------------------------------------------------------------------------------

    def _first(
        self, launch: Launch, notes: list[str]
    ) -> Generator[Launch, Projection, tuple[Launch, Projection]]:
        """The first projection; with an f16 cache where the engine gives up on a type that nobody asked for."""
        try:
            return launch, (yield launch)
        except LlmError as error:
            quantised = any(kind.is_quantised for kind in launch.cache_types)
            gave_up = error.code is ErrorCode.ENGINE_FAILED and not error.details.get("timed_out")
            if not (gave_up and quantised) or self._asks_for_type:
                raise
        plain = replace(launch, cache_type_k=CacheType.F16, cache_type_v=CacheType.F16)
        projection = yield plain
        notes.append(
            f"cache type {CacheType.F16} instead of {launch.cache_type_k}: the engine's dry run fails with that"
        )
        return plain, projection

    def _largest(
        self, template: Launch, room_bytes: int, notes: list[str]
    ) -> Generator[Launch, Projection, tuple[Launch, Quote]]:
        """The largest window that fits, of those that were projected; the smallest where none does."""
        limit = self.model.trained_context_tokens
        if self.most_tokens is not None:
            limit = min(limit, max(1, self.most_tokens // template.parallel))
        pages = -(-limit // PAGE_TOKENS)
        step = -(-pages // MOST_WINDOWS)
        last = -(-pages // step)
        found: dict[int, tuple[Launch, Quote]] = {}
        asking = asking_last_within(last)
        number = next(asking)
        while len(found) < MOST_RUNS:
            window = min(number * step * PAGE_TOKENS if number > 1 else PAGE_TOKENS, limit)
            launch = self._sized(template, round_up(window, cache.CELL_PADDING_TOKENS) * template.parallel)
            if found:
                projection = yield launch
            else:
                launch, projection = yield from self._first(launch, notes)
                template = replace(
                    template, cache_type_k=launch.cache_type_k, cache_type_v=launch.cache_type_v
                )
            found[number] = launch, self._quote(launch, projection)
            try:
                number = asking.send(found[number][1].total_bytes(Place.CARD) - room_bytes)
            except StopIteration:
                break
        fits = [n for n, (_, quote) in found.items() if quote.total_bytes(Place.CARD) <= room_bytes]
        return found[max(fits) if fits else min(found)]

    def _quote(self, launch: Launch, projection: Projection) -> Quote:
        return unruled_quote(projection, launch, self.backend, self.policy, self.model.vocabulary_size)

    def _plan(self, launch: Launch, quote: Quote, capped_by: CappedBy, notes: list[str]) -> Plan:
        return Plan(
            launch=launch,
            window_tokens=self._window(launch),
            on_card=self.on_card,
            capped_by=capped_by,
            quote=quote,
            notes=tuple(notes),
        )


def padded_context(launch: Launch, context_tokens: int) -> int:
    """What the engine makes of a context: whole cells for each slot, or for the pool that they share."""
    streams = 1 if launch.unified else launch.parallel
    return cache.stream_cells(context_tokens, streams) * streams


def most_room_bytes(room: Room) -> int:
    """What one card can give: a model without a rule is never shared out among several."""
    if len(room.cards) > 1:
        return max(0, *(card.free_bytes for card in room.cards))
    return max(0, room.card)


def fitted(plan: Plan, model: UnruledModel, room: Room, card_kind: CardKind) -> Plan:
    """The plan, on the card with the most room where there are several.

    Raises:
        LlmError: INSUFFICIENT_MEMORY with its ledger, where it does not fit.
    """
    free, needed = most_room_bytes(room), plan.quote.total_bytes(Place.CARD)
    if needed > free:
        raise _too_large(plan, model, room, free, card_kind)
    if len(room.cards) < 2 or not plan.on_card:
        return plan
    card = max(room.cards, key=lambda each: each.free_bytes)
    on_card, on_host = (
        Quote(tuple(item for item in plan.quote.items if item.place is place))
        for place in (Place.CARD, Place.HOST)
    )
    # Layers are not counted here; with one card the engine is given no shares.
    return replace(plan, split=DeviceSplit((card.name,), (0,), (on_card,), on_host))


def _too_large(plan: Plan, model: UnruledModel, room: Room, free: int, card_kind: CardKind) -> LlmError:
    needed = plan.quote.total_bytes(Place.CARD)
    where = "host memory" if card_kind is CardKind.CPU else "the card"
    gives = f"{room.giver} can give" if room.giver else f"{where} can give"
    need, grant = mib_tenths(needed), free * 10 // MIB
    now = "" if room.giver else " now"
    if plan.capped_by is CappedBy.REQUEST:
        hint = f"See what would fit: lllm3090ctl plan '{model.title}', without --context."
    elif plan.window_tokens > PAGE_TOKENS:
        hint = "There was more room when it was planned: ask again."
    else:
        hint = "This is the smallest context there is: choose a smaller model, or make room."
    return LlmError(
        ErrorCode.INSUFFICIENT_MEMORY,
        f"{model.title} with {plan.context_tokens:,} tokens of context in {slots_text(plan.parallel)} needs"
        f" {tenths_text(need)} MiB ({sum_in_mib(plan.quote, Place.CARD)}); {gives} {tenths_text(grant)} MiB{now}, so"
        f" {tenths_text(need - grant)} MiB are missing.",
        hint=hint,
        items=item_details(plan.quote),
        context_tokens=plan.context_tokens,
        parallel=plan.parallel,
        cache_type_k=str(plan.cache_type_k),
        cache_type_v=str(plan.cache_type_v),
        needed_bytes=needed,
        grantable_bytes=free,
        missing_bytes=needed - free,
        place=str(Place.CARD),
    )
