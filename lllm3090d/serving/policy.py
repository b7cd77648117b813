"""Policy: what the settings say to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.planning.planner import PlanPolicy
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.settings import Settings


@dataclass(frozen=True, slots=True)
class Policy:
    """What the settings say to the scheduler.

    Attributes:
        plan: what the planner may choose.
        reserves: what is kept free.
        stop_timeout_s: from SIGTERM to SIGKILL.
        engine_sockets_dir: where engines listen.
        inherited_environment: the user manager's own environment, from which units start.
    """

    plan: PlanPolicy
    reserves: ReservePolicy
    stop_timeout_s: float
    engine_sockets_dir: Path
    inherited_environment: Mapping[str, str]


def policy_of(settings: Settings, inherited_environment: Mapping[str, str]) -> Policy:
    """What the settings say to the scheduler."""
    return Policy(
        plan=PlanPolicy(
            cache_type=settings.cache_type,
            batch_tokens=settings.batch_tokens,
            micro_batch_tokens=settings.micro_batch_tokens,
            context_checkpoints=settings.context_checkpoints,
            prompt_cache_mib=settings.prompt_cache_mib,
            workspace_reserve_mib=settings.workspace_reserve_mib,
        ),
        reserves=ReservePolicy(
            driver_reserve_mib=settings.driver_reserve_mib, desktop_reserve_mib=settings.desktop_reserve_mib
        ),
        stop_timeout_s=settings.stop_timeout_s,
        engine_sockets_dir=settings.engine_sockets_dir,
        inherited_environment=inherited_environment,
    )
