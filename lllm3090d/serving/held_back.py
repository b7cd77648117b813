"""Loads by programs, through the gateway, of a model that has ended by itself. Pure.

A client that tries again is nobody's decision. So such a load neither skips the pause before the next start nor makes
what was forgotten, and what stays down it does not start at all: else one prompt that kills the engine, and a client
that repeats it, would start engines for ever. A person's load takes the place of the failed launch and begins anew.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from lllm3090d.engines.crash_causes import KINDS
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.comebacks import cause_of
from lllm3090d.serving.commands import CTL
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.running import Instance

S = InstanceState
# What such a load is told; true in that moment only.
CODES = frozenset({ErrorCode.MODEL_NOT_READY, ErrorCode.MODEL_LATCHED})


def is_held_back(instance: Instance, *, restarts: bool) -> bool:
    """Whether loads by programs wait for its start, or are refused.

    Args:
        instance: of the model.
        restarts: what ends by itself is started again at all.
    """
    if instance.state is S.LATCHED and not instance.next_attempt:
        return True
    return restarts and instance.state in {S.FAILED, S.LATCHED} and instance.next_attempt > 0


def refusal(instance: Instance, now_s: float, until_s: float) -> LlmError | None:
    """Why a load by a program is refused at once; None where it waits for the start.

    Args:
        instance: one that holds it back.
        now_s: on the scheduler's clock.
        until_s: the load can wait for a start that is made no later than that, on the same clock.
    """
    if instance.state is S.LATCHED:
        return None if instance.next_attempt else _latched(instance)
    # Where there was no room, the pause is none after an end: one that is asked for now may have room made for it.
    if instance.retry_at_s is None or instance.start_refused or instance.retry_at_s <= max(now_s, until_s):
        return None
    in_s = _seconds(instance.retry_at_s - now_s)
    return LlmError(
        ErrorCode.MODEL_NOT_READY,
        f"the engine of {instance.name} {_end(instance)}; it is started again in {in_s} s",
        hint=f"Come again after Retry-After. To start it at once: {_reset(instance)}",
        model=instance.name,
        retry_after_s=in_s,
        **_cause(instance),
    )


def what_for(instance: Instance, now_s: float) -> str:
    """What a load waits for that is not refused, for a person."""
    if instance.retry_at_s is None or instance.retry_at_s <= now_s:
        return "its engine to be started again"
    return (
        f"its engine to be started again in {_seconds(instance.retry_at_s - now_s)} s: it {_end(instance)}"
    )


def as_it_comes(event: LoadRequested) -> LoadRequested:
    """The same, content with the launch that has come: nobody has asked for another one."""
    return replace(
        event, request=PlanRequest(), arguments=(), card=None, least_context_tokens=None, pinned=False
    )


def _latched(instance: Instance) -> LlmError:
    way_out, reset = instance.way_out, _reset(instance)
    if reset not in way_out:
        way_out = f"{way_out} Then: {reset}" if way_out else f"Start it again: {reset}"
    return LlmError(
        ErrorCode.MODEL_LATCHED,
        f"{instance.name} stays down until a person resets it: {instance.latch_reason}",
        hint=way_out,
        model=instance.name,
        **_cause(instance),
    )


def _end(instance: Instance) -> str:
    return KINDS[cause_of(instance.failure)].title if instance.failure is not None else "ended by itself"


def _cause(instance: Instance) -> dict[str, str]:
    return {} if instance.failure is None else {"cause": str(cause_of(instance.failure))}


def _reset(instance: Instance) -> str:
    return shlex.join([CTL, "reset", instance.name])


def _seconds(seconds: float) -> int:
    return max(1, math.ceil(seconds))
