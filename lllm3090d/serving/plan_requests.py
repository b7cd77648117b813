"""From what a client asks of a plan to what the planner is asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from lllm3090d.planning.request import PlanRequest
from lllm3090d.wire import LoadBody, PlanOptions


@dataclass(frozen=True, slots=True)
class LoadWish:
    """How a model is to be loaded; see :class:`lllm3090d.serving.events.LoadRequested`.

    Attributes:
        card: UUID, PCI address or number of the only card that it may be on.
        idle_s: how long it had not been used, of a model that is loaded again after a sleep.
        restart_within_s: of a load by a program: it neither takes the place of a start that is due later than that, nor
            of what stays down; see :mod:`lllm3090d.serving.held_back`. None of a person's.
    """

    request: PlanRequest = field(default_factory=PlanRequest)
    arguments: tuple[str, ...] = ()
    card: str | None = None
    least_context_tokens: int | None = None
    lease: bool = False
    pinned: bool = False
    may_evict: bool = True
    may_wait: bool = True
    attempt: int = 0
    idle_s: float = 0.0
    restart_within_s: float | None = None


def load_wish(body: LoadBody) -> LoadWish:
    """What a client asks for, in the scheduler's terms."""
    return LoadWish(
        request=plan_request(body),
        arguments=body.arguments,
        card=body.gpu,
        least_context_tokens=body.least_context_tokens,
        pinned=body.pin,
        may_evict=body.evict,
        may_wait=body.wait,
    )


def plan_request(options: PlanOptions) -> PlanRequest:
    """The same question in the planner's terms; one type of cache stands for K and V."""
    return PlanRequest(
        context_tokens=options.context_tokens,
        parallel=options.parallel,
        cache_type_k=options.cache_type,
        cache_type_v=options.cache_type,
        slot_policy=options.slot_policy,
        offload=options.offload,
        gpu_layers=options.gpu_layers,
        cpu_experts=options.cpu_experts,
        cache_on_host=options.cache_on_host,
        drafting=options.drafting,
        draft_tokens=options.draft_tokens,
        projector=options.projector,
        unified=options.unified,
        swa_full=options.swa_full,
        batch_tokens=options.batch_tokens,
        micro_batch_tokens=options.micro_batch_tokens,
        rope_scaling=options.rope_scaling,
        tiered=options.tiered,
        purpose=options.purpose,
    )
