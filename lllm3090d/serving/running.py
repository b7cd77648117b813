"""Instance: what the scheduler knows of one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from lllm3090d.errors import LlmError
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import Drafting, ProjectorPlace
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.unit_spec import Record, unit_name


@dataclass(slots=True)
class Instance:
    """One launch of a model. Mutable, and changed by the scheduler alone."""

    record: Record
    plan: Plan
    state: InstanceState
    adopted: bool = False
    invocation_id: str | None = None
    main_pid: int | None = None
    control_group: str | None = None
    # Requests that are answered when the load ends, by token.
    waiters: list[str] = field(default_factory=list)
    # Requests that are answered when nothing is left.
    unloaders: list[str] = field(default_factory=list)
    # Loads of the same model that came while this instance was on its way down.
    successors: list[LoadRequested] = field(default_factory=list)
    # Why it ended, once known; None for an end that was asked for.
    failure: LlmError | None = None
    # It ended by itself and the reason is still being read.
    post_mortem_pending: bool = False
    memory_pending: bool = False
    # Whether a cache that was to be divided is; None where none was to be, or nobody has looked.
    tier_in_force: bool | None = None
    released_bytes: int = 0

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.record.name

    @property
    def run(self) -> str:
        """Identity of the launch."""
        return self.record.run

    @property
    def unit(self) -> str:
        """Name of its unit."""
        return unit_name(self.record.name, self.record.run)


def mismatch(current: Plan, event: LoadRequested) -> str | None:
    """What a running plan lacks of a request, in words; None when it serves."""
    request, sizes = event.request, current.launch
    context = request.context_tokens
    if context is not None:
        # Asked for 8000, the engine has 8192: compare what it would make of the request.
        context = (
            replace(sizes, context_tokens=context, parallel=request.parallel or current.parallel)
            .shape(event.facts)
            .context_tokens
        )
    draft_tokens = sizes.draft.tokens if sizes.draft else None
    wanted: Mapping[str, tuple[object, object]] = {
        "context": (context, current.context_tokens),
        "slots": (request.parallel, current.parallel),
        "K cache": (request.cache_type_k, current.cache_type_k),
        "V cache": (request.cache_type_v, current.cache_type_v),
        "drafting": (_choice(request.drafting, Drafting.AUTO), Drafting.ON if sizes.draft else Drafting.OFF),
        "draft tokens": (request.draft_tokens, draft_tokens),
        "projector": (_choice(request.projector, ProjectorPlace.AUTO), _projector_place(current)),
        "layers on the card": (_layers(event), sizes.layers.layers_on_card),
        "experts in host memory": (request.cpu_experts, sizes.layers.expert_layers_on_host),
        "batch": (request.batch_tokens, sizes.batch_tokens),
        "micro batch": (request.micro_batch_tokens, sizes.micro_batch_tokens),
        "cache in host memory": (request.cache_on_host or None, sizes.layers.cache_on_host),
        "unified pool": (request.unified or None, sizes.unified),
        "full sliding cache": (request.swa_full or None, sizes.swa_full),
        "tier": (request.tiered or None, sizes.line_tokens > 0),
    }
    differences = [
        f"{what} {has} instead of {want}" for what, (want, has) in wanted.items() if want not in {None, has}
    ]
    return ", ".join(differences) or None


def _choice(asked: StrEnum | None, open_choice: StrEnum) -> StrEnum | None:
    return None if asked is open_choice else asked


def _projector_place(current: Plan) -> ProjectorPlace:
    if not current.with_projector:
        return ProjectorPlace.OFF
    return ProjectorPlace.CARD if current.launch.projector_on_card else ProjectorPlace.HOST


def _layers(event: LoadRequested) -> int | None:
    """Layers asked for; all of them are no number in a plan, and then nothing is compared."""
    asked = event.request.gpu_layers
    return None if asked is None or asked > len(event.facts.layers) else asked
