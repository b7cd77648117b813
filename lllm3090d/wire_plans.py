"""The wire models of plans: what may be asked of one, and what it says. The rules of :mod:`lllm3090d.wire` hold."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lllm3090d.checkpoints.badges import Badge
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.launch import SpecType
from lllm3090d.planning.planner import CacheType, CappedBy
from lllm3090d.planning.projection import Where
from lllm3090d.planning.quote import Evidence, Place
from lllm3090d.planning.request import Drafting, Offload, ProjectorPlace, RopeScaling, SlotPolicy
from lllm3090d.planning.tier_choice import Way
from lllm3090d.planning.verdict import Verdict
from lllm3090d.wire_types import Name, Request, Response, Slots, Token, Tokens

MOST_ARGUMENTS = 200
MOST_ARGUMENT_CHARACTERS = 16_384  # a grammar or a template, and far below what a unit can carry
Layers = Annotated[int, Field(ge=0, le=10_000)]
DraftTokens = Annotated[int, Field(ge=1, le=64)]
BatchTokens = Annotated[int, Field(ge=32, le=65_536)]
MicroBatchTokens = Annotated[int, Field(ge=32, le=8192)]
EngineArguments = Annotated[
    tuple[Annotated[str, Field(max_length=MOST_ARGUMENT_CHARACTERS)], ...], Field(max_length=MOST_ARGUMENTS)
]
CardWord = Annotated[str, Field(min_length=1, max_length=100)]


class PlanOptions(Request):
    """What may be asked of a plan; left out means: the planner and the settings decide."""

    model: Name = Field(description="name, alias, or unambiguous parts of a name")
    context_tokens: Tokens | None = Field(default=None, description="total context of all slots")
    parallel: Slots | None = Field(default=None, description="slots, conversations served at once")
    cache_type: CacheType | None = Field(default=None, description="type of K and V of the cache")
    slot_policy: SlotPolicy | None = Field(default=None, description="how slots are chosen")
    offload: Offload | None = Field(
        default=None, description="whether layers or experts may be left in host memory"
    )
    gpu_layers: Layers | None = Field(
        default=None, description="exactly so many layers on the card, the output counting as one"
    )
    cpu_experts: Layers | None = Field(
        default=None, description="the experts of exactly so many layers in host memory"
    )
    cache_on_host: bool = Field(default=False, description="the cache in host memory")
    drafting: Drafting | None = Field(default=None, description="whether the model drafts for itself")
    draft_tokens: DraftTokens | None = Field(default=None, description="longest draft")
    projector: ProjectorPlace | None = Field(default=None, description="where the projector is")
    unified: bool = Field(default=False, description="all slots share one pool")
    swa_full: bool = Field(default=False, description="sliding layers keep the whole context")
    batch_tokens: BatchTokens | None = Field(default=None, description="tokens accepted at once")
    micro_batch_tokens: MicroBatchTokens | None = Field(default=None, description="tokens computed at once")
    rope_scaling: RopeScaling | None = Field(
        default=None, description="how positions are stretched for a window beyond the trained one"
    )
    tiered: bool = Field(
        default=False, description="a part of the cache in pinned host memory, where the engine offers that"
    )
    purpose: Purpose | None = Field(
        default=None,
        description="what it is to serve: text, vectors or scores; null: what it was made for",
    )
    arguments: EngineArguments = Field(
        default=(),
        description="further arguments for the engine; those with a price change the plan",
    )


class PlanBody(PlanOptions):
    """Body of ``POST /v1/plan``. With any of the four about a card the plan is made for one with nothing on it."""

    check: bool = Field(
        default=False, description="also ask the engine what it would take (a dry run), and compare"
    )

    card: CardWord | None = Field(default=None, description="a known card, such as rtx-4090")
    vram: CardWord | None = Field(default=None, description="any card of that memory, such as 12GiB")
    desktop: bool | None = Field(
        default=None, description="a desktop session is on the card; null: as on this machine"
    )
    backend: Literal["cuda", "vulkan", "cpu"] | None = Field(
        default=None, description="what the engine computes on; cpu: host memory in place of a card"
    )


class LoadBody(PlanOptions):
    """Body of ``POST /v1/load``."""

    token: Token | None = Field(default=None, description="chosen by the client, to cancel this load by it")
    gpu: CardWord | None = Field(
        default=None,
        description="the only card it may be on: its UUID, PCI address or number in GET /v1/gpus",
    )
    least_context_tokens: Tokens | None = Field(
        default=None,
        description="with context: what will do where that does not fit; the largest that fits is taken",
    )
    pin: bool = Field(default=False, description="never unload it for another model")
    evict: bool = Field(default=True, description="idle models may be unloaded for it")
    wait: bool = Field(default=True, description="it may wait for room, at most the setting queue_timeout_s")

    @model_validator(mode="after")
    def _least_is_least(self) -> Self:
        least, asked = self.least_context_tokens, self.context_tokens
        if least is not None and (asked is None or least > asked):
            raise ValueError("least_context_tokens stands beside a context_tokens that is not smaller")
        return self


class LineItemView(Response):
    """One line of a quote or a budget; a deduction is negative."""

    name: str
    place: Place
    bytes: int
    evidence: Evidence
    formula: str


class BudgetLineView(Response):
    """One line of what the card can give; deductions are negative."""

    name: str
    bytes: int
    origin: str = Field(description="reading, constant or owner behind it")


class PlannedCardView(Response):
    """The card that a plan was made for."""

    id: str = Field(
        description="of its profile; detected where it is none of the known cards, no-gpu without a card, synthetic"
        " where only the memory was given"
    )
    name: str
    total_bytes: int
    compute_capability: str | None = Field(default=None, description="null where nobody says")
    backend: Backend = Field(description="what the plan assumes the engine computes on")
    present: bool = Field(description="it is the card of this machine")
    empty: bool = Field(description="planned as if nothing but a desktop were on it")
    desktop: bool | None = Field(
        default=None, description="a desktop is counted on it; null: nobody knows, which counts as one"
    )


class CardPartView(Response):
    """What of a plan lies on one of several cards."""

    uuid: str
    name: str = Field(description="GPU and its number, which --gpu takes")
    card: str = Field(description="product name")
    layers: int | None = Field(default=None, description="the output counting as one; null for all")
    bytes: int = Field(description="what it takes of this card")


class LimitView(Response):
    """Why the window is not larger."""

    by: CappedBy
    line: BudgetLineView | None = Field(default=None, description="of memory: the largest deduction, or all")
    text: str = Field(description="the same for a person")


class PlacementView(Response):
    """What of the model is on the card."""

    layers_on_card: int | None = Field(default=None, description="the output counting as one; null for all")
    expert_layers_on_host: int = Field(description="layers whose experts are in host memory")
    cache_on_host: bool


class DraftView(Response):
    """How the model drafts for itself."""

    spec_type: SpecType
    tokens: int = Field(description="longest draft")
    cache_type_k: CacheType
    cache_type_v: CacheType
    window_tokens: int = Field(description="of each slot that its context keeps; 0 for all")


class StretchView(Response):
    """How positions are stretched beyond the trained context."""

    scaling: RopeScaling
    factor: float
    original_tokens: int = Field(description="context before any stretching")
    window_tokens: int


class TierWayView(Response):
    """One way to have a context that does not fit on the card."""

    way: Way
    fits: bool
    cache_type: CacheType
    context_tokens: int
    card_tokens: int = Field(description="cells on the card; 0 for all")
    card_bytes: int | None = Field(default=None, description="null where there is no price")
    host_bytes: int | None = None
    end_tokens_per_s: float | None = Field(
        default=None, description="predicted with the whole context in use"
    )
    half_tokens_per_s: float | None = Field(default=None, description="with half of it in use")
    speed: str | None = Field(default=None, description="what that is predicted from, or why it is not")
    reasons: tuple[str, ...]


class TierView(Response):
    """Which part of the cache is where."""

    card_tokens: int = Field(description="cells on the card; the others are in pinned host memory")
    host_bytes: int = Field(description="of that part")
    tail_draft_tokens: int = Field(description="longest draft beyond them; 0 for the same everywhere")
    end_tokens_per_s: float | None = Field(
        default=None, description="predicted with the whole context in use; null: not predicted"
    )
    half_tokens_per_s: float | None = Field(default=None, description="with half of it in use")
    speed: str | None = Field(
        default=None, description="what that is predicted from, or why it is not; null where nobody knows"
    )
    ways: tuple[TierWayView, ...] = Field(
        default=(),
        description="the ways to have this context, the best first, those that cannot be had last",
    )


class AgentView(Response):
    """What a plan means for an agent with subagents."""

    ready: bool = Field(description="its prompt fits into a window and leaves something")
    concurrent_subagents: int = Field(
        description="that can work without evicting what their parent had read"
    )
    remarks: tuple[str, ...] = ()


class SmallestCardView(Response):
    """The smallest card on which an agent can work with this model."""

    gib: int = Field(description="rounded up")
    total_bytes: int
    window_tokens: int = Field(description="that it would hold, in one slot")
    evidence: Evidence


class AlternativeView(Response):
    """Another plan for the same model and memory."""

    ask: str = Field(description="options of lllm3090ctl that give it")
    window_tokens: int
    parallel: int
    card_bytes: int
    gain: str = Field(description="what is better, and what is given up")


class SpeedView(Response):
    """A measured decoding speed. It is never scaled: the qualifier says what differs here."""

    tokens_per_s: float
    qualifier: str = Field(description="measured, measured on BACKEND, other card, or the last two")
    card: str
    backend: str
    speculation: str
    workload: str | None = None
    build: str | None = None


class DownloadView(Response):
    """Where a model of the catalogue can be had."""

    id: str = Field(description="of the catalogue")
    repository: str = Field(description="on Hugging Face")
    file: str
    file_bytes: int
    projector_file: str | None = None
    projector_bytes: int = 0


class EngineCheckView(Response):
    """Our arithmetic beside the engine's own dry run, both for the main context alone."""

    where: Where = Field(description="on what the dry run was made")
    agrees: bool | None = Field(
        default=None, description="no place differs by more than 1 %; null where it is not known"
    )
    text: str = Field(description="the result for a person, or why there is none")
    ours: tuple[str, ...] = Field(default=(), description="by place")
    engine: tuple[str, ...] = Field(
        default=(), description="by place, its outputs corrected to the server's"
    )


class PlanView(Response):
    """How a model would be or is launched, and the arithmetic of its admission.

    Of a model that is not on disk it is a preview at evidence ``catalogue``: ``download`` is there, and ``path``,
    ``architecture``, ``placement`` and the command line are not.
    """

    model: str
    path: str | None = None
    architecture: str | None = None
    quantisation: str
    context_tokens: int
    parallel: int
    window_tokens: int
    trained_context_tokens: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    capped_by: CappedBy
    fits: bool
    card_kind: CardKind = Field(description="whose memory the items at place `card` take")
    items: tuple[LineItemView, ...]
    card_bytes: int = Field(description="sum of the items on the card")
    host_bytes: int = Field(description="sum of the items in host memory beside the card")
    budget: tuple[BudgetLineView, ...]
    available_bytes: int = Field(description="what the card can give now, or empty")
    argv: tuple[str, ...] = Field(
        description="the engine's command line; empty where no engine of this machine could carry the plan out"
    )
    environment: tuple[str, ...] = Field(
        default=(), description="variables, NAME=value, by which the engine is kept to its cards of several"
    )
    cards: tuple[CardPartView, ...] = Field(
        default=(),
        description="of several cards those that it is on, in the order of the engine's devices, the main one last",
    )
    verdict: Verdict | None = Field(default=None, description="what becomes of the model, in a word")
    given_back_bytes: int | None = Field(
        default=None,
        description="of a model that is loaded: what it is charged on the cards, counted as given back before it is"
        " loaded anew; null where it is not loaded",
    )
    evidence: Evidence | None = Field(
        default=None,
        description="the weakest of the items on the card; engine where a dry run alone priced it",
    )
    limit: LimitView | None = None
    notes: tuple[str, ...] = Field(default=(), description="what was decided against the usual, and why")
    agent: AgentView | None = None
    batch_tokens: int | None = None
    micro_batch_tokens: int | None = None
    unified: bool | None = None
    swa_full: bool | None = None
    purpose: Purpose | None = Field(default=None, description="what it serves: chat, embedding or rerank")
    placement: PlacementView | None = None
    draft: DraftView | None = Field(default=None, description="null where nothing is drafted")
    projector: ProjectorPlace | None = Field(default=None, description="null where the model has none")
    rope: StretchView | None = Field(default=None, description="null where nothing is stretched")
    tier: TierView | None = Field(default=None, description="null where the cache is in one memory")
    card: PlannedCardView | None = None
    alternatives: tuple[AlternativeView, ...] = Field(
        default=(), description="plans that differ in one choice; only POST /v1/plan looks for them"
    )
    engine_check: EngineCheckView | None = Field(default=None, description="null where nobody asked for it")
    smallest_card: SmallestCardView | None = Field(
        default=None, description="null where no card helps, or there is no card to speak of"
    )
    speed: SpeedView | None = Field(default=None, description="null where nothing was measured")
    download: DownloadView | None = Field(default=None, description="null for a model on disk")
    badges: tuple[Badge, ...] = Field(default=(), description="of a preview: what kind of model it is")
