"""What there is to know of each setting besides its value: type, unit, range, and when a change takes effect. Pure."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import annotated_types
from pydantic import BaseModel

from lllm3090d.settings import Settings, setting_kind

_UNITS = {"mib": "MiB", "tokens": "tokens", "s": "seconds", "days": "days"}
_NUMBERS = frozenset({"whole number", "number"})


class TakesEffect(enum.StrEnum):
    """When a changed value counts, once the daemon has read it again."""

    NOW = "now"  # for whatever is done next, models that run included
    NEXT_LOAD = "next-load"  # models that run keep what they were started with
    NEXT_LOGIN = "next-login"  # it says what is done at the first start after a login
    NEXT_START = "next-start"  # of the daemon; a reload leaves the old value


_NOW, _LOAD, _START = TakesEffect.NOW, TakesEffect.NEXT_LOAD, TakesEffect.NEXT_START
TAKES_EFFECT: Mapping[str, TakesEffect] = {
    "models_dir": _NOW,
    "state_dir": _START,
    "runtime_dir": _START,
    "llama_dir": _LOAD,
    "engines_dir": _LOAD,
    "catalogue_file": _NOW,
    "engine_pin": _NOW,
    "aliases": _NOW,
    "extra_arguments": _LOAD,
    "autoload": TakesEffect.NEXT_LOGIN,
    "autoload_wait_s": _NOW,
    "card": _START,
    "desktop": _NOW,
    "driver_reserve_mib": _NOW,
    "desktop_reserve_mib": _NOW,
    "workspace_reserve_mib": _LOAD,
    "cache_type": _LOAD,
    "slot_policy": _LOAD,
    "offload": _LOAD,
    "drafting": _LOAD,
    "draft_tokens": _LOAD,
    "projector": _LOAD,
    "image_max_tokens": _LOAD,
    "compute_buffer_factor": _LOAD,
    "micro_batch_tokens": _LOAD,
    "batch_tokens": _LOAD,
    "context_checkpoints": _LOAD,
    "checkpoint_min_step_tokens": _LOAD,
    "prompt_cache_mib": _LOAD,
    "reasoning_efforts": _LOAD,
    "reasoning_effort_fallback": _LOAD,
    "reasoning_floor_tokens": _LOAD,
    "load_timeout_s": _NOW,
    "load_cap_s": _NOW,
    "stop_timeout_s": _LOAD,  # systemd has it from the unit of the model
    "drain_s": _NOW,
    "verify_after_load": _NOW,
    "release_timeout_s": _NOW,
    "pressure_policy": _NOW,
    "pressure_grace_s": _NOW,
    "queue_timeout_s": _NOW,
    "least_residency_s": _NOW,
    "least_idle_s": _NOW,
    "serve_smaller": _LOAD,
    "restart_failed": _NOW,
    "restart_pause_s": _NOW,
    "hang_policy": _NOW,
    "hang_patience_s": _NOW,
    "device_memory_limit": _LOAD,
    "suspend": _NOW,
    "history_days": _NOW,
    "history_mib": _NOW,
    "idle_ttl_s": _NOW,
    "idle_ttl_of": _NOW,
    "models": _LOAD,
    "gateway": _NOW,
    "gateway_address": _NOW,
    "gateway_port": _NOW,
    "gateway_hosts": _NOW,
    "gateway_origins": _NOW,
    "gateway_default_model": _NOW,
    "gateway_models": _NOW,
    "gateway_reasoning": _NOW,
    "gateway_load": _NOW,
    "gateway_wait_s": _NOW,
    "gateway_starvation_s": _NOW,
    "gateway_keepalive_s": _NOW,
    "gateway_queue": _NOW,
    "gateway_body_mib": _NOW,
    "gateway_access_log": _NOW,
    "requests_days": _NOW,
    "requests_kept": _NOW,
    "notifications": _NOW,
    "stop_models_on_exit": _NOW,
    "log_level": _NOW,
}
# A reload leaves them as they are: sockets, records and cards cannot change under running models.
NEEDS_RESTART = tuple(key for key, when in TAKES_EFFECT.items() if when is _START)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a value is written.

    Attributes:
        kind: ``path``, ``text``, ``flag``, ``whole number``, ``number``, ``words`` (a list of texts), ``table``, or the
            words that are allowed, with `` | `` between them.
        element: of a table with free names: what each name stands for; None of others.
        members: of a table with fixed names: what each stands for; empty of others.
    """

    kind: str
    element: Shape | None = None
    members: Mapping[str, Shape] = field(default_factory=dict)


def shape(key: str) -> Shape:
    """How the value of a setting is written."""
    return _shape(Settings.model_fields[key].annotation, setting_kind(key))


def unit(key: str) -> str | None:
    """The unit of a number, which its name ends with; None where it has none."""
    return _UNITS.get(key.rsplit("_", 1)[-1]) if setting_kind(key) in _NUMBERS else None


def allowed(key: str) -> str:
    """The range of a number, such as ``above 0 to 300``; empty for what the type says already."""
    least = greatest = ""
    for bound in Settings.model_fields[key].metadata:
        for part in bound if isinstance(bound, annotated_types.GroupedMetadata) else (bound,):
            if isinstance(part, annotated_types.Ge):
                least = f"{part.ge}"
            elif isinstance(part, annotated_types.Gt):
                least = f"above {part.gt}"
            elif isinstance(part, annotated_types.Le):
                greatest = f"{part.le}"
    return f"{least} to {greatest}" if greatest else ""


def _shape(annotation: Any, kind: str) -> Shape:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _shape(arguments[0], kind)
    if origin in {typing.Union, types.UnionType}:
        (only,) = (each for each in arguments if each is not type(None))
        return _shape(only, _kind(only))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Shape("table", element=_shape(arguments[1], _kind(arguments[1])))
    if origin is tuple:
        return Shape("words")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        members = {
            name: _shape(each.annotation, _kind(each.annotation))
            for name, each in annotation.model_fields.items()
        }
        return Shape("table", members=members)
    return Shape(kind)


def _kind(annotation: Any) -> str:
    """As :func:`lllm3090d.settings.setting_kind`, of a part of a table."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " | ".join(str(member.value) for member in annotation)
    names = {str: "text", bool: "flag", int: "whole number", float: "number"}
    return names.get(annotation, "path")
