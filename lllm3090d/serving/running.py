"""Instance: what the scheduler knows of one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.errors import LlmError
from lllm3090d.planning.calibration import CalibrationKey
from lllm3090d.planning.launch import Launch
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import Drafting, PlanRequest, ProjectorPlace, RopeScaling
from lllm3090d.planning.stretch import Stretch, stretch
from lllm3090d.planning.unruled import padded_context
from lllm3090d.serving.drains import Drain
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.hangs import Verdict
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.unit_spec import Record, unit_name

HOST_CACHE = "its cache in host memory"
ONE_POOL = "a pool that its slots share"


@dataclass(slots=True)
class Instance:
    """One launch of a model. Mutable, and changed by the scheduler alone."""

    record: Record
    plan: Plan
    state: InstanceState
    adopted: bool = False
    # Its unit as it was found; None for the name that a launch gives it.
    found_unit: str | None = None
    # Why its record was made from its command line; empty where it is its own.
    reconstructed: str = ""
    # Somebody loaded it here; else it was found, and nothing but its command line tells of it.
    is_known: bool = True
    # What is to be said of the files that it was loaded from; empty where they are as they were.
    file_note: str = ""
    invocation_id: str | None = None
    main_pid: int | None = None
    control_group: str | None = None
    # Requests that are answered when the load ends, by token.
    waiters: list[str] = field(default_factory=list)
    # Requests that are answered when nothing is left.
    unloaders: list[str] = field(default_factory=list)
    # Loads of the same model that came while this instance was on its way down, or wait for its start after an end.
    successors: list[LoadRequested] = field(default_factory=list)
    # Why it ended, once known; None for an end that was asked for.
    failure: LlmError | None = None
    # It ended by itself and the reason is still being read.
    post_mortem_pending: bool = False
    # It ended by itself: nobody had asked for it.
    ended_by_itself: bool = False
    memory_pending: bool = False
    # Whether a cache that was to be divided is; None where none was to be, or nobody has looked.
    tier_in_force: bool | None = None
    released_bytes: int = 0
    # Never a victim of an eviction.
    pinned: bool = False
    # The only card that it may be on, by UUID; None where that was left open, or nobody remembers.
    card: str | None = None
    # How long it had not been used when it was unloaded for a sleep.
    idle_before_s: float = 0.0
    # Who uses it or is about to: never a victim while there is one.
    leases: set[str] = field(default_factory=set)
    # For how long it may stay without use, by the last request that said so; None for what the settings say.
    keep_alive_s: float | None = None
    # Whether a request was in flight when it was last asked; None where it does not tell.
    busy: bool | None = None
    # It was asked whether it is idle, and did not tell.
    is_silent: bool = False
    served_tokens: int | None = None
    # On the scheduler's clock; None before it was ready.
    ready_since_s: float | None = None
    last_used_s: float | None = None
    # The launch as measurements of it are remembered, where it is on one card; None where nobody can tell.
    key: CalibrationKey | None = None
    # A launch like this was used to the full before.
    is_measured: bool = False
    # What it held until it was ready, by memory.
    load_peak: Mapping[str, int] = field(default_factory=dict)
    # What strangers held of its card when it was admitted.
    foreign_bytes: int = 0
    # Further ones of its load, word by word as they were given; None of one that was adopted.
    arguments: tuple[str, ...] | None = None
    # Which start in a row this is after an end that nobody wanted; 0 for one that somebody asked for.
    attempt: int = 0
    # Of one that failed: when it is started again, on the scheduler's clock, and as which attempt.
    retry_at_s: float | None = None
    next_attempt: int = 0
    # Its last start was refused, for lack of room and the like: what it waits for since is no pause after an end.
    start_refused: bool = False
    # Of one that stays down: why, and what a person can do.
    latch_reason: str = ""
    way_out: str = ""
    # It failed and is to be started again: until then its unit stays with systemd, for a daemon that comes after this.
    unit_kept: bool = False
    # While it is stopping and its requests may still end.
    drain: Drain | None = None
    # Requests that a drain has not waited for; None where nobody counted.
    unfinished: int | None = None
    # Of one that is stalled, or was when it was stopped for that.
    stall: Verdict | None = None
    # Somebody wants it gone: it is not to come back by itself.
    unwanted: bool = False
    # What was unloaded for it, and is loaded again should it not come up.
    evicted: list[Evicted] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.record.name

    @property
    def run(self) -> str:
        """Identity of the launch."""
        return self.record.run

    @property
    def words(self) -> tuple[str, ...]:
        """Further arguments with which it can be asked for again; of an adopted one as its record tells them."""
        if self.arguments is not None:
            return self.arguments
        return tuple(word for text in self.record.arguments for word in text.split(" ", 1))

    @property
    def comes_back(self) -> bool:
        """It has failed, and is to be started again as it was."""
        return self.state is InstanceState.FAILED and self.next_attempt > 0

    @property
    def unit(self) -> str:
        """Name of its unit."""
        return self.found_unit or unit_name(self.record.name, self.record.run)


@dataclass(frozen=True, slots=True)
class Evicted:
    """A model that was unloaded for another one, and what it takes to load it again as it was."""

    name: str
    request: PlanRequest
    arguments: tuple[str, ...]
    pinned: bool = False
    card: str | None = None


@dataclass(slots=True)
class Releasing:
    """Somebody waits for the whole card: these runs are still to end."""

    token: str
    runs: set[str]
    names: tuple[str, ...]
    released_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a running plan lacks of a request, in words; empty where it serves.

    Attributes:
        other: what it has, and what was asked for instead.
        missing: what it does without.
    """

    other: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def mismatch(current: Plan, event: LoadRequested, *, asked: PlanRequest | None = None) -> Mismatch:
    """What a running plan lacks of a request. What would be without effect on it is not lacking.

    Args:
        current: the plan.
        event: the request.
        asked: the request that the plan was made for; None where nobody knows. The same again is satisfied.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION for sizes that no launch of the model can have.
    """
    request, sizes = event.request, current.launch
    if request == asked:
        return Mismatch()
    context = request.context_tokens
    if context is not None:
        # Asked for 8000, the engine has 8192: compare what it would make of the request.
        asked_sizes = replace(sizes, context_tokens=context, parallel=request.parallel or current.parallel)
        context = _engine_context(asked_sizes, event.facts)
    # Of no draft any length will do.
    draft_tokens = sizes.draft.tokens if sizes.draft else request.draft_tokens
    experts = request.cpu_experts
    if experts is None and request.gpu_layers is not None:
        experts = 0  # a placement by hand is the whole of it
    wanted: Mapping[str, tuple[object, object]] = {
        "purpose": (request.purpose, sizes.purpose),
        "context": (context, current.context_tokens),
        "slots": (request.parallel, current.parallel),
        "K cache": (request.cache_type_k, current.cache_type_k),
        "V cache": (request.cache_type_v, current.cache_type_v),
        "drafting": (_choice(request.drafting, Drafting.AUTO), Drafting.ON if sizes.draft else Drafting.OFF),
        "draft tokens": (request.draft_tokens, draft_tokens),
        "projector": _projector(current, request),
        "scaling of positions": _scaling(current, event),
        "layers on the card": (request.gpu_layers, _layers_on_card(current, event)),
        "experts in host memory": (experts, sizes.layers.expert_layers_on_host),
        "batch": (request.batch_tokens, sizes.batch_tokens),
        "micro batch": (request.micro_batch_tokens, sizes.micro_batch_tokens),
    }
    # Where the whole cache fits on the card, the planner made no tier of the same wish.
    is_tiered = sizes.line_tokens > 0 or (asked is not None and asked.tiered)
    switches: Mapping[str, tuple[bool, bool]] = {
        HOST_CACHE: (request.cache_on_host, sizes.layers.cache_on_host),
        ONE_POOL: (request.unified, sizes.unified),
        "the whole context in sliding layers": (request.swa_full, sizes.swa_full),
        "a tiered cache": (request.tiered, is_tiered),
    }
    return Mismatch(
        other=tuple(
            f"{what} {shown(has)} instead of {shown(want)}"
            for what, (want, has) in wanted.items()
            if want not in {None, has}
        ),
        missing=tuple(what for what, (want, has) in switches.items() if want and not has),
    )


def shown(value: object) -> str:
    """A value for a person."""
    match value:
        case None:
            return "none"
        case int():
            return f"{value:,}"
    return str(value)


def _engine_context(sizes: Launch, facts: CheckpointFacts | UnruledModel) -> int:
    """What the engine makes of a context; raises as :meth:`Launch.shape`."""
    if isinstance(facts, UnruledModel):
        return padded_context(sizes, sizes.context_tokens)
    return sizes.shape(facts).context_tokens


def _choice(asked: StrEnum | None, open_choice: StrEnum) -> StrEnum | None:
    return None if asked is open_choice else asked


def _projector(current: Plan, request: PlanRequest) -> tuple[ProjectorPlace | None, ProjectorPlace]:
    """The place asked for, and the one it has; without a card there is one place only."""
    asked = None if request.projector is ProjectorPlace.AUTO else request.projector
    if not current.with_projector:
        return asked, ProjectorPlace.OFF
    if not current.on_card and asked is ProjectorPlace.CARD:
        asked = ProjectorPlace.HOST
    on_card = current.on_card and current.launch.projector_on_card
    return asked, ProjectorPlace.CARD if on_card else ProjectorPlace.HOST


def _scaling(current: Plan, event: LoadRequested) -> tuple[str | None, str]:
    """What would come of the scaling that is asked for, and what the plan has."""
    request = event.request
    scaling, context = request.rope_scaling, request.context_tokens
    has = _scaling_text(current.rope)
    if isinstance(event.facts, UnruledModel):
        return scaling, has  # without a rule positions are never stretched
    if scaling is None or (scaling is RopeScaling.YARN and context is None):
        return None, has  # whatever the window is, it is what YaRN makes of it
    share = None if context is None else context // (request.parallel or 1)  # as the planner takes it
    return _scaling_text(stretch(event.facts, scaling, share)), has


def _scaling_text(made: Stretch | None) -> str:
    return "none" if made is None else f"{made.scaling} to {made.window_tokens:,} tokens"


def _layers_on_card(current: Plan, event: LoadRequested) -> int | str:
    """Layers on the card, the output counting as one."""
    if not current.on_card:
        return 0
    layers = current.launch.layers.layers_on_card
    if isinstance(event.facts, UnruledModel):
        return "all" if layers is None else layers
    return len(event.facts.layers) + 1 if layers is None else layers
