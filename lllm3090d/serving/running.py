"""Instance: what the scheduler knows of one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lllm3090d.errors import LlmError
from lllm3090d.planning.cache import cache_shape
from lllm3090d.planning.planner import Plan
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
    request = event.request
    context = request.context_tokens
    if context is not None:
        # Asked for 8000, the engine has 8192: compare what it would make of the request.
        context = cache_shape(
            event.facts,
            context_tokens=context,
            parallel=request.parallel or current.parallel,
            batch_tokens=current.batch_tokens,
            micro_batch_tokens=current.micro_batch_tokens,
        ).context_tokens
    wanted: Mapping[str, tuple[object, object]] = {
        "context": (context, current.context_tokens),
        "slots": (request.parallel, current.parallel),
        "K cache": (request.cache_type_k, current.cache_type_k),
        "V cache": (request.cache_type_v, current.cache_type_v),
    }
    differences = [
        f"{what} {has} instead of {want}" for what, (want, has) in wanted.items() if want not in {None, has}
    ]
    return ", ".join(differences) or None
