"""The wire models: requests, responses and events of every surface, described once.

Sizes are bytes, times are seconds; ``at`` is a wall-clock time in UTC (RFC 3339). New optional fields may
appear in any release; nothing is removed or renamed within ``/v1``. Requests reject unknown fields.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lllm3090d.checkpoints.badges import Badge
from lllm3090d.checkpoints.classify import DraftMethod, Kind
from lllm3090d.checkpoints.facts import LayerKind
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.engines.capabilities import Backend, BuildKind
from lllm3090d.engines.gpu_code import CodeFit
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import CacheType
from lllm3090d.planning.quote import Evidence
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving.instance import InstanceState
from lllm3090d.wire_cards import ExplainView, ForeignUnitView, Gpus, ReservationView
from lllm3090d.wire_history import Actor, ActorKind, EngineMemory, RunHistory, RunView
from lllm3090d.wire_keys import KeyBody, KeyMade, KeysView, KeyView
from lllm3090d.wire_names import Names, NamesOf
from lllm3090d.wire_plans import (
    BudgetLineView,
    DownloadView,
    LineItemView,
    LoadBody,
    PlanBody,
    PlannedCardView,
    PlanOptions,
    PlanView,
    SpeedView,
)
from lllm3090d.wire_requests import RequestView
from lllm3090d.wire_sleep import SuspendView
from lllm3090d.wire_types import Name, Request, Response, Token
from lllm3090d.wire_wanted import (
    Autoload,
    AutoloadBody,
    AutoloadWaitView,
    Awaited,
    MarkOrigin,
    MarkView,
    WantedView,
)

__all__ = [
    "MOST_URI_CHARACTERS",
    "Actor",
    "ActorKind",
    "Autoload",
    "AutoloadBody",
    "AutoloadWaitView",
    "Awaited",
    "BudgetLineView",
    "CancelBody",
    "Cancelled",
    "CardView",
    "ContextCostView",
    "DownloadView",
    "EngineBuildView",
    "EngineDetails",
    "EngineMemory",
    "EngineOptionView",
    "EngineView",
    "Engines",
    "Event",
    "EventKind",
    "ExplainView",
    "ForeignUnitView",
    "Gpus",
    "InspectBody",
    "InspectView",
    "InstanceView",
    "Instances",
    "KeyBody",
    "KeyMade",
    "KeyView",
    "KeysView",
    "LayerView",
    "LineItemView",
    "LoadBody",
    "LoadLine",
    "LoadLineKind",
    "LogLine",
    "MarkOrigin",
    "MarkView",
    "ModelView",
    "Models",
    "Name",
    "Names",
    "NamesOf",
    "PendingView",
    "PinBody",
    "Pinned",
    "PlanBody",
    "PlanOptions",
    "PlanView",
    "PlannedCardView",
    "ProjectorView",
    "ReleaseBody",
    "Released",
    "Request",
    "RequestView",
    "Response",
    "ResumeBody",
    "Resumed",
    "RopeView",
    "RunHistory",
    "RunView",
    "RunningEngineView",
    "SelectEngineBody",
    "SpeedView",
    "Status",
    "Token",
    "UnloadBody",
    "Unloaded",
    "Version",
    "WantedView",
    "WeightView",
]

# Of a URI of this host: a path has at most 4095 bytes, each of which may take three characters.
MOST_URI_CHARACTERS = len("file://localhost") + 3 * 4096


class InspectBody(Request):
    """Body of ``POST /v1/inspect``: exactly one of the two."""

    model: Name | None = Field(default=None, description="name, alias, or unambiguous parts of a name")
    path: Annotated[str, Field(min_length=1, max_length=MOST_URI_CHARACTERS)] | None = Field(
        default=None,
        description="absolute path of any GGUF file, of a split one any shard; or its file: URI (RFC 8089),"
        " which can name bytes that are no UTF-8",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> InspectBody:
        if (self.model is None) is (self.path is None):
            raise ValueError("give either model or path")
        return self


class UnloadBody(Request):
    """Body of ``POST /v1/unload``."""

    model: Name = Field(description="name, alias, or unambiguous parts of the name of a loaded model")
    drain_s: float | None = Field(
        default=None,
        ge=0,
        le=86400,
        description="seconds that its requests may take, new ones being refused; by default the setting drain_s",
    )
    force: bool = Field(default=False, description="kill it at once, whatever it does")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> UnloadBody:
        if self.force and self.drain_s is not None:
            raise ValueError("force waits for nothing: leave out one of force and drain_s")
        return self


class ReleaseBody(Request):
    """Body of ``POST /v1/release``."""

    until_resume: bool = Field(default=False, description="refuse loads until ``POST /v1/resume``")


class ResumeBody(Request):
    """Body of ``POST /v1/resume``: an empty object."""


class PinBody(Request):
    """Body of ``POST /v1/models/{name}/pin``."""

    pinned: bool = Field(description="true: the model is never unloaded to make room; false: no longer so")


class ResetBody(Request):
    """Body of ``POST /v1/models/{name}/reset``: an empty object."""


class SelectEngineBody(Request):
    """Body of ``POST /v1/engines/select``."""

    engine: Name | None = Field(description="name of an offered build; null leaves it to the ranks")


class CancelBody(Request):
    """Body of ``POST /v1/cancel``."""

    token: Token = Field(description="the token given with the load")


class DrainView(Response):
    """A model that goes takes no new requests, and those in flight may end."""

    in_flight: int | None = Field(
        default=None, description="how many have not ended; null where its engine does not tell"
    )
    limit_s: float = Field(description="how long they may take, from the beginning")
    remaining_s: float = Field(description="until it is stopped all the same")


class StallView(Response):
    """A model that is at work and gets nowhere."""

    reason: str = Field(description="for a person")
    stalled_s: float = Field(description="since its last progress, as far as somebody looked")
    patience_s: float = Field(description="how long it may be without progress")
    restart_in_s: float | None = Field(
        default=None, description="until it is restarted; null where it is only reported"
    )


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
    purpose: Purpose = Field(default=Purpose.CHAT, description="what it serves: chat, embedding or rerank")
    reserved_bytes: int = Field(description="on all cards; of a model that is on none, of host memory")
    measured_bytes: int | None = Field(default=None, description="there, at most so far")
    reservations: tuple[ReservationView, ...] = Field(
        default=(), description="in each memory, without the items of its price"
    )
    pinned: bool = Field(default=False, description="never unloaded to make room")
    leases: int = Field(default=0, description="requests that keep it from being unloaded to make room")
    busy: bool | None = Field(
        default=None, description="a request is in flight; null where the engine does not tell"
    )
    idle_s: float | None = Field(
        default=None, description="since it was last seen in use; null where it is in use, or does not serve"
    )
    drain: DrainView | None = Field(
        default=None, description="of one that is stopping: requests that may still end"
    )
    stall: StallView | None = Field(default=None, description="of one that is stalled")
    engine_version: str
    adopted: bool = Field(description="found running when the daemon started")
    reconstructed: str | None = Field(
        default=None,
        description="why what it was loaded with was read back from its command line; null where its record tells",
    )
    file_note: str | None = Field(
        default=None,
        description="how its files differ from those that it was loaded from; null where they do not",
    )
    tier_in_force: bool | None = Field(
        default=None,
        description="a cache that was to be divided is; null where none was, or nobody could tell",
    )
    failure: dict[str, Any] | None = Field(default=None, description="problem document of a failed instance")
    attempt: int = Field(
        default=0,
        description="which start in a row this is after ends that nobody wanted, and of a failed one the next start;"
        " 0 for one that somebody asked for",
    )
    retry_in_s: float | None = Field(
        default=None,
        description="until a failed one is started again; null where it is not, or its start waits for room",
    )
    latch_reason: str | None = Field(default=None, description="why a latched one stays down")
    way_out: str | None = Field(default=None, description="what can be done about that")
    at_risk: str | None = Field(
        default=None,
        description="why a card that it runs on cannot be trusted: what it computes may be wrong, and it may end",
    )


class PendingView(Response):
    """A load that waits for room."""

    name: str
    token: str = Field(description="to cancel it by")
    why: str = Field(description="what it waits for, for a person")
    waiting_s: float
    remaining_s: float = Field(description="until it is refused")


class Instances(Response):
    """Answer of ``GET /v1/instances``."""

    instances: tuple[InstanceView, ...]
    pending: tuple[PendingView, ...] = Field(
        default=(), description="loads that wait for room, the next one first"
    )
    foreign_units: tuple[ForeignUnitView, ...] = Field(
        default=(), description="units with our prefix that are not understood, and left alone"
    )
    released: bool = Field(default=False, description="the card is released: loads are refused until resume")
    wanted: tuple[WantedView, ...] = Field(
        default=(), description="models that are wanted, or loaded at every login, and have no instance"
    )


class ModelView(Response):
    """A checkpoint on disk, or a model of the catalogue that is not."""

    name: str
    aliases: tuple[str, ...]
    path: str | None = Field(default=None, description="null for a model that is not on disk")
    size_bytes: int
    shards: int
    architecture: str | None
    quantisation: str | None
    trained_context_tokens: int | None
    state: InstanceState | None = Field(default=None, description="state of its instance, if any")
    purpose: Purpose | None = Field(
        default=None, description="what its instance serves, if any: chat, embedding or rerank"
    )
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
    on_disk: bool = Field(default=True, description="false for a model of the catalogue, see `download`")
    modified_s: int | None = Field(
        default=None, description="when its first file was last changed, seconds since 1970"
    )
    download: DownloadView | None = None
    verdict: Verdict | None = Field(
        default=None,
        description="what becomes of it on `planned_for`; dry-run: no rule prices it, so only a plan or a load tells;"
        " null where no plan can be made",
    )
    parallel: int | None = Field(default=None, description="slots of its plan there")
    window_tokens: int | None = Field(default=None, description="of each slot")
    evidence: Evidence | None = Field(default=None, description="of that plan")
    speed: SpeedView | None = Field(default=None, description="measured with this very file")
    plan_problem: dict[str, Any] | None = Field(
        default=None, description="why there is no plan, beyond a lack of memory"
    )


class Models(Response):
    """Answer of ``GET /v1/models``."""

    models_dir: str
    models: tuple[ModelView, ...]
    planned_for: PlannedCardView | None = Field(
        default=None, description="the card that all plans are made for, without the models that are loaded"
    )
    plan_problem: dict[str, Any] | None = Field(default=None, description="why no plan could be made at all")
    catalogue_problem: dict[str, Any] | None = Field(
        default=None, description="why the setting `catalogue_file` is ignored"
    )
    watch_problem: dict[str, Any] | None = Field(
        default=None, description="why the directory is searched anew at each request"
    )


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


class RopeView(Response):
    """Rotary position embedding, as the file tells it; what it leaves out is the engine's own choice or null."""

    base: float = Field(description="frequency base")
    sliding_base: float | None = Field(
        default=None, description="that of sliding layers, where it is another"
    )
    dimensions: int = Field(description="rotated values of a head")
    sections: tuple[int, ...] = Field(default=(), description="pairs for time, height, width and more")
    scaling: str = Field(description="none, linear, yarn, or what else the file says")
    factor: float = Field(description="how far positions are stretched, 1 where they are not")
    original_context_tokens: int | None = Field(default=None, description="context before stretching")
    own_factors: bool = Field(description="the file has factors of its own for each frequency")


class ProjectorView(Response):
    """What lets a model see or hear; what neither the file tells nor the engine has built in is null."""

    type: str | None = Field(description="such as gemma3")
    sees: bool
    hears: bool
    projection_length: int | None = Field(description="values of an embedding, those of its model")
    image_size: int | None = Field(description="pixels of a side of the usual image")
    image_max_pixels: int | None = Field(description="of the largest image, by the file")
    patch_size: int | None = Field(description="pixels of a side of a patch")
    merge_size: int | None = Field(description="patches of a side of what becomes one token")
    image_tokens: int | None = Field(
        description="tokens of an image, or of each tile of a large one; null where it depends on the image"
    )
    embedding_length: int | None = Field(description="values in its image encoder")
    block_count: int | None = Field(description="layers of its image encoder")


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
    rope: RopeView | None = Field(default=None, description="null where the file says nothing of it")
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
    projector_facts: ProjectorView | None = Field(
        default=None, description="of the file if it is a projector, else of the model's"
    )
    drafter: str | None = Field(default=None, description="file that guesses tokens for it")
    problem: dict[str, Any] | None = Field(default=None, description="why it cannot be planned or loaded")
    dry_run_reason: str | None = Field(
        default=None, description="why only a dry run of the engine prices it; null where a rule does"
    )


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
    name: str | None = Field(default=None, description="what it is chosen by")
    tag: str | None = Field(default=None, description="release of llama.cpp; null where nothing tells it")
    stale: bool | None = Field(default=None, description="another release than `engine_pin`; null unknown")


class RunningEngineView(Response):
    """The engine of a model that runs."""

    model: str
    run: str
    server: str | None = Field(description="null where its unit was started by an older release")
    version: str
    is_next: bool = Field(description="a start now would use the same")


class EngineBuildView(Response):
    """A llama-server build on this machine."""

    name: str = Field(description="what it is chosen by")
    kind: BuildKind
    source: str = Field(description="how it was found")
    server: str
    offered: bool = Field(description="it can be chosen")
    next: bool = Field(description="the next start uses it")
    version: str | None
    tag: str | None = Field(description="release of llama.cpp; null where nothing tells it")
    stale: bool | None = Field(description="another release than `pin`; null unknown")
    gpu_architecture: str | None = Field(description="that it was compiled for, such as sm86")
    code_fit: CodeFit | None = Field(
        default=None,
        description="whether such code runs on a card of this machine; maybe: only if it has intermediate code, which"
        " its name does not tell; null unknown",
    )
    backend: Backend | None
    devices: tuple[str, ...]
    dry_run: bool = Field(description="it can project what a launch takes")
    problem: dict[str, Any] | None = Field(description="why it cannot be used")


class Engines(Response):
    """Answer of ``GET /v1/engines`` and ``POST /v1/engines/select``."""

    engines: tuple[EngineBuildView, ...]
    next: str | None = Field(description="name of the build that the next start uses")
    next_problem: dict[str, Any] | None = Field(description="why there is none")
    choice: str | None = Field(description="name that was chosen; null where the ranks decide")
    choice_problem: dict[str, Any] | None = Field(description="why the choice is ignored")
    locked: bool = Field(description="LLLM3090_LLAMA_DIR decides, nothing can be chosen")
    pin: str = Field(description="release of llama.cpp that is expected")
    running: tuple[RunningEngineView, ...]


class EngineOptionView(Response):
    """An option of a build's ``--help``."""

    names: tuple[str, ...] = Field(description="every spelling; a switch and its negation are one option")
    value: str | None = Field(description="placeholder of its value; null for a switch")
    allowed: tuple[str, ...] = Field(description="values that the text lists")
    default: str | None = Field(description="that the text names")
    variables: tuple[str, ...] = Field(description="of the environment that set it")


class EngineDetails(Response):
    """Answer of ``GET /v1/engines/{name}``."""

    engine: EngineBuildView
    library_path: tuple[str, ...] = Field(description="directories of its own libraries")
    digest: str | None = Field(description="of the contents of the server and its libraries")
    digest_problem: dict[str, Any] | None = None
    dry_run_program: str | None
    dry_run_flags: tuple[str, ...]
    options: tuple[EngineOptionView, ...]


class GatewayView(Response):
    """The OpenAI/Anthropic-compatible address."""

    address: str | None = Field(default=None, description="null while it does not listen")
    problem: dict[str, Any] | None = Field(default=None, description="why it does not, though it should")
    in_flight: int = Field(default=0, description="requests that have not ended")
    waiting: int = Field(default=0, description="those of them that wait for a slot")
    records_problem: dict[str, Any] | None = Field(
        default=None, description="why requests are not recorded; they are answered all the same"
    )


class Status(Response):
    """Answer of ``GET /v1/status``."""

    version: str
    pid: int
    started: str
    systemd_version: str
    card: CardView
    cards_problem: dict[str, Any] | None = Field(
        default=None,
        description="why one of the other cards gives nothing, or why nobody knows whether there is a card",
    )
    engine: EngineView | None
    engine_problem: dict[str, Any] | None = None
    engine_choice: str | None = Field(default=None, description="name of the build that was chosen")
    engine_choice_problem: dict[str, Any] | None = Field(default=None, description="why it is ignored")
    running_engines: tuple[RunningEngineView, ...] = ()
    state_problem: dict[str, Any] | None = Field(
        default=None, description="why what is learnt is not kept, or what was learnt is lost"
    )
    watch_problem: dict[str, Any] | None = Field(
        default=None, description="why the models directory is searched anew at each request"
    )
    bus_problem: dict[str, Any] | None = Field(
        default=None, description="why systemd cannot be reached, since when states of models may be old"
    )
    dbus_problem: dict[str, Any] | None = Field(
        default=None, description="why programs cannot call the daemon over D-Bus"
    )
    models_dir: str
    config_file: str
    journal_problem: dict[str, Any] | None = Field(
        default=None, description="why engines write their logs to files instead of the journal"
    )
    history_problem: dict[str, Any] | None = Field(
        default=None, description="why what happens is not recorded now, and how much of it"
    )
    instances: tuple[InstanceView, ...]
    pending: tuple[PendingView, ...] = Field(default=(), description="loads that wait for room")
    foreign_units: tuple[ForeignUnitView, ...] = Field(
        default=(), description="units with our prefix that are not understood, and left alone"
    )
    released: bool = Field(default=False, description="the card is released: loads are refused until resume")
    wanted: tuple[WantedView, ...] = Field(
        default=(), description="models that are wanted, or loaded at every login, and have no instance"
    )
    autoload_wait: AutoloadWaitView | None = Field(
        default=None, description="models of a login wait until the desktop has settled; null: none does"
    )
    suspend: SuspendView | None = Field(
        default=None, description="what becomes of models when the machine is suspended"
    )
    gateway: GatewayView | None = None


class EventKind(enum.StrEnum):
    """What an event tells; clients must ignore kinds they do not know."""

    STATE = "state"  # an instance changed its state
    PROGRESS = "progress"  # a load advanced
    REFUSED = "refused"  # a load was refused
    SETTINGS = "settings"  # settings were read again, or kept after a bad reload
    RECONCILED = "reconciled"  # the units were listed anew
    TIER = "tier"  # whether a divided cache is divided as planned
    DRAIN = "drain"  # a model that goes has requests in flight, and what became of them
    EVICTION = "eviction"  # a model was unloaded for another one, or for other programs
    DEVIATION = "deviation"  # a model takes more or less than it was priced at
    LIMIT = "limit"  # the kernel limits what a model may take of a card
    PRESSURE = "pressure"  # other programs take memory that was counted on, or have given it back
    CARD = "card"  # a card reported an error or cannot be read, or is well again
    SUSPEND = "suspend"  # the machine goes to sleep, and what became of the models
    RESUME = "resume"  # it is awake again, and what becomes of the models
    MEMORY = "memory"  # what an engine that has ended said of its memory
    RESTORE = "restore"  # a model that is wanted and does not run is loaded again, or cannot be
    HOLD = "hold"  # a model was pinned or unpinned, or the cards were released or no longer so
    DAEMON = "daemon"  # the daemon has started or is being stopped
    GAP = "gap"  # events could not be recorded, and are lost
    BUS = "bus"  # the user's systemd cannot be reached, or is reached again


class Event(Response):
    """One line of ``GET /v1/events``."""

    seq: int
    at: str
    kind: EventKind
    model: str | None = None
    run: str | None = None
    state: InstanceState | None = None
    previous: InstanceState | None = None
    actor: Actor | None = Field(default=None, description="who caused it; null in events of older releases")
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
    why: str | None = Field(default=None, description="what a queued load waits for")
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
    waited: bool = Field(default=False, description="nothing ran: a load that waited for room was cancelled")
    unfinished: int | None = Field(
        default=None,
        description="requests that were cut off when their time was over; null where nobody counted",
    )
    problem: dict[str, Any] | None = Field(
        default=None,
        description="why it is not kept that nobody wants it any more, so that the next daemon may load it; null where"
        " it is",
    )


class Released(Response):
    """Answer of ``POST /v1/release``."""

    names: tuple[str, ...] = Field(description="models that were unloaded")
    released_bytes: int
    until_resume: bool = Field(description="loads are refused from now on")
    was_released: bool = Field(
        default=False, description="they were before: without `until_resume` too, they stay refused"
    )
    elapsed_s: float
    foreign_units: tuple[str, ...] = Field(
        default=(), description="units that are not understood: left alone, with what they hold"
    )
    problem: dict[str, Any] | None = Field(
        default=None, description="why the release does not outlive the daemon; null where it does"
    )


class Resumed(Response):
    """Answer of ``POST /v1/resume``."""

    was_released: bool = Field(description="loads were refused until now")


class Pinned(Response):
    """Answer of ``POST /v1/models/{name}/pin``."""

    name: str
    run: str = Field(description="the launch that is pinned; a pin ends with it")
    pinned: bool


class Reset(Response):
    """Answer of ``POST /v1/models/{name}/reset``."""

    name: str
    run: str = Field(description="the launch that had ended, or the one that runs")
    starts: bool = Field(
        description="it is being started again; false where it runs, and only what was is forgotten"
    )


class Cancelled(Response):
    """Answer of ``POST /v1/cancel``."""

    token: str
    stopped: bool = Field(description="False when others wait for the same load, which goes on for them")


class LogLine(Response):
    """One line of ``GET /v1/instances/{name}/logs``."""

    at: str | None = Field(
        default=None, description="null where the log is a file, whose lines have no times"
    )
    message: str


class Version(Response):
    """Answer of ``GET /v1/version``."""

    version: str
    api: Literal["v1"] = "v1"
