"""Further arguments of a load and of the settings, together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lllm3090d.engines.extra_arguments import (
    ExtraArguments,
    check_asked_once,
    chosen_for,
    extra_arguments,
    merged,
)
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.running import mismatch


def extra_of(event: LoadRequested, table: Mapping[str, Sequence[str]]) -> ExtraArguments:
    """All that a launch gets: those for every model, those for this one, those of this load.

    Args:
        event: the load.
        table: of the settings.

    Raises:
        LlmError: INVALID_REQUEST for arguments that cannot be, or that contradict what else was asked for.
    """
    check_asked_once(event.request, _own(event))
    set_ones = chosen_for(event.checkpoint.name, table)
    return extra_arguments((*set_ones, *event.arguments), event.capabilities, event.facts)


def asked_of(event: LoadRequested, extra: ExtraArguments) -> PlanRequest:
    """The question to the planner: what was asked for, and where that is open what the arguments say."""
    return merged(event.request, extra.request)


def lacking(plan: Plan, given: Sequence[str], event: LoadRequested) -> str | None:
    """What a running launch lacks of a load, in words; None where it has all. The settings ask for nothing here.

    Args:
        plan: of what runs.
        given: its further arguments, as :attr:`ExtraArguments.shown`.
        event: the load.

    Raises:
        LlmError: as :func:`extra_of`.
    """
    own = _own(event)
    check_asked_once(event.request, own)
    differences = mismatch(plan, replace(event, request=merged(event.request, own.request)))
    settings = {
        "context checkpoints": (own.context_checkpoints, plan.launch.context_checkpoints),
        "step of checkpoints": (own.checkpoint_min_step_tokens, plan.launch.checkpoint_min_step_tokens),
        "prompt cache": (own.prompt_cache_mib, plan.launch.prompt_cache_mib),
        "tokens of an image": (own.image_max_tokens, plan.launch.image_max_tokens),
    }
    parts = [differences] if differences else []
    parts += [
        f"{what} {has} instead of {want}"
        for what, (want, has) in settings.items()
        if want not in {None, has}
    ]
    parts += [f"not started with {text}" for text in own.shown if text not in given]
    return ", ".join(parts) or None


def _own(event: LoadRequested) -> ExtraArguments:
    return extra_arguments(event.arguments, event.capabilities, event.facts)
