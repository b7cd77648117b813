"""Policy: what the settings say to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lllm3090d.engines.tier_flags import ReasoningRules
from lllm3090d.model_settings import ModelSettings
from lllm3090d.planning.compute import Margins
from lllm3090d.planning.planner import PlanPolicy
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.serving.restarts import RestartPolicy
from lllm3090d.settings import HangPolicy, Settings


@dataclass(frozen=True, slots=True)
class Policy:
    """What the settings say to the scheduler.

    Attributes:
        plan: what the planner may choose.
        reserves: what is kept free.
        stop_timeout_s: from SIGTERM to SIGKILL.
        engine_sockets_dir: where engines listen.
        inherited_environment: the user manager's own environment, from which units start.
        extra_arguments: of a person for the engine, by name of a model.
        queue_timeout_s: how long a load waits for room.
        least_residency_s: how long a model stays at least once it is ready.
        restarts: how patient to be with models that end by themselves; None where nothing is started again.
        serve_smaller: a context that was asked for and does not fit may be smaller, down to an agent's window.
        least_idle_s: how long a model must have been idle before it may go for another one.
        reasoning: what engines that can do with what clients say about it.
        log_files_dir: where each engine writes its log; None for the journal.
        drain_s: how long requests in flight may take when a model is unloaded.
        models: defaults of single models, by name.
        restart_hung: a model that is stalled for long is stopped and started again.
    """

    plan: PlanPolicy
    reserves: ReservePolicy
    stop_timeout_s: float
    engine_sockets_dir: Path
    inherited_environment: Mapping[str, str]
    extra_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    queue_timeout_s: float = 120.0
    least_residency_s: float = 30.0
    least_idle_s: float = 5.0
    serve_smaller: bool = False
    restarts: RestartPolicy | None = None
    reasoning: ReasoningRules = field(default_factory=ReasoningRules)
    log_files_dir: Path | None = None
    drain_s: float = 0.0
    restart_hung: bool = False
    models: Mapping[str, ModelSettings] = field(default_factory=dict)


def environment_of(assignments: Iterable[str]) -> Mapping[str, str]:
    """``NAME=value`` texts as a mapping."""
    parts = (item.partition("=") for item in assignments)
    return {name: value for name, _, value in parts}


def policy_of(
    settings: Settings, inherited_environment: Mapping[str, str], log_files_dir: Path | None = None
) -> Policy:
    """What the settings say to the scheduler."""
    return Policy(
        plan=PlanPolicy(
            cache_type=settings.cache_type,
            batch_tokens=settings.batch_tokens,
            micro_batch_tokens=settings.micro_batch_tokens,
            context_checkpoints=settings.context_checkpoints,
            prompt_cache_mib=settings.prompt_cache_mib,
            workspace_reserve_mib=settings.workspace_reserve_mib,
            checkpoint_min_step_tokens=settings.checkpoint_min_step_tokens,
            slot_policy=settings.slot_policy,
            offload=settings.offload,
            drafting=settings.drafting,
            draft_tokens=settings.draft_tokens,
            projector=settings.projector,
            image_max_tokens=settings.image_max_tokens,
            margins=Margins(compute_buffer_factor=settings.compute_buffer_factor),
        ),
        reserves=ReservePolicy(
            driver_reserve_mib=settings.driver_reserve_mib, desktop_reserve_mib=settings.desktop_reserve_mib
        ),
        stop_timeout_s=settings.stop_timeout_s,
        engine_sockets_dir=settings.engine_sockets_dir,
        inherited_environment=inherited_environment,
        extra_arguments=settings.extra_arguments,
        queue_timeout_s=settings.queue_timeout_s,
        least_residency_s=settings.least_residency_s,
        least_idle_s=settings.least_idle_s,
        serve_smaller=settings.serve_smaller,
        restarts=RestartPolicy(base_s=settings.restart_pause_s) if settings.restart_failed else None,
        reasoning=settings.reasoning,
        log_files_dir=log_files_dir,
        drain_s=settings.drain_s,
        restart_hung=settings.hang_policy is HangPolicy.RESTART,
        models=settings.models,
    )
