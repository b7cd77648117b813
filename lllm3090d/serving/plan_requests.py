"""From what a client asks of a plan to what the planner is asked. Pure."""

from __future__ import annotations

from lllm3090d.planning.request import PlanRequest
from lllm3090d.wire import PlanOptions


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
    )
