"""The wire models: requests, responses and events of every surface, described once.

Sizes are bytes, times are seconds; ``at`` is a wall-clock time in UTC (RFC 3339). New optional fields may
appear in any release; nothing is removed or renamed within ``/v1``. Requests reject unknown fields.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lllm3090d.checkpoints.badges import Badge
from lllm3090d.checkpoints.classify import DraftMethod, Kind
from lllm3090d.checkpoints.facts import LayerKind
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import CacheType, CappedBy
from lllm3090d.planning.quote import Evidence, Place
from lllm3090d.serving.instance import InstanceState

Tokens = Annotated[int, Field(ge=1, le=1 << 28)]
Slots = Annotated[int, Field(ge=1, le=256)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Token = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")]


class Response(BaseModel):
    """Base of everything the daemon says."""

    model_config = ConfigDict(frozen=True)


class Request(BaseModel):
    """Base of everything the daemon is asked: an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanOptions(Request):
    """What may be asked of a plan; left out means: the planner decides."""

    model: Name = Field(description="name, alias, or unambiguous parts of a name")
    context_tokens: Tokens | None = Field(default=None, description="total context of all slots")
    parallel: Slots | None = Field(default=None, description="slots, conversations served at once")
    cache_type: CacheType | None = Field(default=None, description="type of K and V of the cache")


class PlanBody(PlanOptions):
    """Body of ``POST /v1/plan``."""


class LoadBody(PlanOptions):
    """Body of ``POST /v1/load``."""

    token: Token | None = Field(default=None, description="chosen by the client, to cancel this load by it")


class InspectBody(Request):
    """Body of ``POST /v1/inspect``: exactly one of the two."""

    model: Name | None = Field(default=None, description="name, alias, or unambiguous parts of a name")
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="absolute path of any GGUF file; of a split one any shard"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> InspectBody:
        if (self.model is None) is (self.path is None):
            raise ValueError("give either model or path")
        return self


class UnloadBody(Request):
    """Body of ``POST /v1/unload``."""

    model: Name = Field(description="name, alias, or unambiguous parts of the name of a loaded model")


class CancelBody(Request):
    """Body of ``POST /v1/cancel``."""

    token: Token = Field(description="the token given with the load")


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


class PlanView(Response):
    """How a model would be or is launched, and the arithmetic of its admission."""

    model: str
    path: str
    architecture: str
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
    available_bytes: int = Field(description="what the card can give now")
    argv: tuple[str, ...] = Field(description="the engine's command line")


class InstanceView(Response):
    """A model that runs, or is on its way up or down."""

    name: str
    run: str = Field(description="identity of this launch")
    state: InstanceState
    since: str = Field(description="time of the last change of state")
    unit: str
    invocation_id: str | None = None
    main_pid: int | None = None
    endpoint: str = Field(description="Unix socket of the engine's HTTP API")
    path: str
    context_tokens: int
    parallel: int
    window_tokens: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    reserved_bytes: int
    measured_bytes: int | None = None
    engine_version: str
    adopted: bool = Field(description="found running when the daemon started")
    failure: dict[str, Any] | None = Field(default=None, description="problem document of a failed instance")


class Instances(Response):
    """Answer of ``GET /v1/instances``."""

    instances: tuple[InstanceView, ...]


class ModelView(Response):
    """A checkpoint on disk."""

    name: str
    aliases: tuple[str, ...]
    path: str
    size_bytes: int
    shards: int
    architecture: str | None
    quantisation: str | None
    trained_context_tokens: int | None
    state: InstanceState | None = Field(default=None, description="state of its instance, if any")
    problem: dict[str, Any] | None = Field(default=None, description="why it cannot be loaded")
    kind: Kind | None = None
    badges: tuple[Badge, ...] = ()
    cache_type: CacheType | None = Field(default=None, description="the setting, for kv_bytes_per_token")
    kv_bytes_per_token: int | None = Field(
        default=None, description="cache of one more token, in layers that keep the whole context"
    )
    window_bytes_per_token: int | None = Field(
        default=None, description="cache of one token in the window of sliding layers"
    )
    sliding_window_tokens: int | None = Field(default=None, description="0 without sliding layers")
    state_bytes_per_slot: int | None = Field(default=None, description="recurrent states of one slot")
    projector: str | None = Field(default=None, description="file that lets it see or hear")
    drafter: str | None = Field(default=None, description="file that guesses tokens for it")


class Models(Response):
    """Answer of ``GET /v1/models``."""

    models_dir: str
    models: tuple[ModelView, ...]


class LayerView(Response):
    """One block of a checkpoint."""

    kind: LayerKind = Field(description="how it keeps its context")
    keeps_state: bool = Field(description="it keeps a recurrent state, alone or beside its attention")
    is_mtp: bool = Field(description="it predicts a further token and belongs to no trunk")
    head_count: int = Field(description="query heads")
    kv_head_count: int = Field(description="0 without a cache of its own")
    key_length: int
    value_length: int
    experts_used: int = Field(description="experts that compute a token, 0 without experts")
    weight_bytes: int


class WeightView(Response):
    """Bytes of the tensors with one use, as stored in the file."""

    place: str
    bytes: int


class ContextCostView(Response):
    """What a token of context takes with one type of cache."""

    cache_type: CacheType
    bytes_per_token: int | None = Field(
        description="in layers that keep the whole context; null where the engine refuses the type"
    )
    window_bytes_per_token: int | None = Field(description="for each token in the window of sliding layers")


class InspectView(Response):
    """What a GGUF file is, and what its context costs.

    Where no rule is known for the architecture, or the file is no model, ``problem`` says so and what only a
    rule could tell is null or empty.
    """

    path: str = Field(description="the first file")
    name: str | None = Field(default=None, description="of the model in the library, if it is one")
    kind: Kind
    draft_method: DraftMethod | None = Field(default=None, description="how a drafter drafts")
    architecture: str | None
    title: str | None
    quantisation: str | None
    size_bytes: int = Field(description="of all files")
    shards: int
    tensor_count: int
    badges: tuple[Badge, ...] = ()
    reasoning: tuple[str, ...] = Field(default=(), description="switches that the chat template reads")
    trained_context_tokens: int | None = None
    vocabulary_size: int | None = None
    embedding_length: int | None = None
    block_count: int | None = None
    expert_count: int | None = None
    sliding_window_tokens: int | None = Field(default=None, description="0 without sliding layers")
    layers: tuple[LayerView, ...] = Field(default=(), description="in order, those for MTP last")
    output_tied: bool | None = Field(default=None, description="the output is the token embedding")
    weights: tuple[WeightView, ...] = Field(default=(), description="of the trunk and the tables by use")
    weight_bytes: int = Field(description="of all tensors that were found")
    context_costs: tuple[ContextCostView, ...] = ()
    state_bytes_per_slot: int | None = Field(default=None, description="recurrent states of one slot")
    projector: str | None = Field(default=None, description="file that lets it see or hear")
    drafter: str | None = Field(default=None, description="file that guesses tokens for it")
    problem: dict[str, Any] | None = Field(default=None, description="why it cannot be planned or loaded")


class CardView(Response):
    """The card and its memory at one moment."""

    kind: CardKind
    name: str
    uuid: str
    driver_version: str | None
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    reserved_by_driver_bytes: int | None
    reserved_by_us_bytes: int
    available_bytes: int | None
    problem: dict[str, Any] | None = None


class EngineView(Response):
    """The engine that the next load would use."""

    server: str
    source: str
    locked: bool
    version: str | None
    backend: Backend | None
    devices: tuple[str, ...]
    problem: dict[str, Any] | None = None


class Status(Response):
    """Answer of ``GET /v1/status``."""

    version: str
    pid: int
    started: str
    systemd_version: str
    card: CardView
    engine: EngineView | None
    engine_problem: dict[str, Any] | None = None
    state_problem: dict[str, Any] | None = Field(
        default=None, description="why what is learnt is not kept, or what was learnt is lost"
    )
    models_dir: str
    config_file: str
    instances: tuple[InstanceView, ...]


class EventKind(enum.StrEnum):
    """What an event tells; clients must ignore kinds they do not know."""

    STATE = "state"  # an instance changed its state
    PROGRESS = "progress"  # a load advanced
    REFUSED = "refused"  # a load was refused
    SETTINGS = "settings"  # settings were read again, or kept after a bad reload
    RECONCILED = "reconciled"  # the units were listed anew


class Event(Response):
    """One line of ``GET /v1/events``."""

    seq: int
    at: str
    kind: EventKind
    model: str | None = None
    run: str | None = None
    state: InstanceState | None = None
    previous: InstanceState | None = None
    message: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


class LoadLineKind(enum.StrEnum):
    """Kinds of line in the stream of a load; the last one is READY or FAILED."""

    ADMITTED = "admitted"
    JOINED = "joined"  # another load of the same model was under way
    STATE = "state"
    PROGRESS = "progress"
    READY = "ready"
    FAILED = "failed"


class LoadLine(Response):
    """One line of the NDJSON stream of ``POST /v1/load``."""

    kind: LoadLineKind
    elapsed_s: float
    token: str
    state: InstanceState | None = None
    plan: PlanView | None = None
    resident_bytes: int | None = Field(default=None, description="memory the engine holds so far")
    expected_bytes: int | None = Field(default=None, description="memory it is expected to hold")
    instance: InstanceView | None = None
    problem: dict[str, Any] | None = None


class Unloaded(Response):
    """Answer of ``POST /v1/unload``."""

    name: str
    run: str
    released_bytes: int
    elapsed_s: float


class Cancelled(Response):
    """Answer of ``POST /v1/cancel``."""

    token: str
    stopped: bool = Field(description="False when others wait for the same load, which goes on for them")


class LogLine(Response):
    """One line of ``GET /v1/instances/{name}/logs``."""

    at: str
    message: str


class Version(Response):
    """Answer of ``GET /v1/version``."""

    version: str
    api: Literal["v1"] = "v1"
