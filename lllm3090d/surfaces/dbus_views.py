"""From wire models to what the D-Bus contract says: values of a{sv}, properties, texts of errors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from lllm3090d.bus.service_contract import path_of_model
from lllm3090d.errors import KINDS, ErrorCode
from lllm3090d.planning.units import mib_text
from lllm3090d.serving.instance import ON_THE_WAY_DOWN, ON_THE_WAY_UP, SERVING, InstanceState
from lllm3090d.wire import InstanceView, PendingView
from lllm3090d.wire_cards import Gpus

UNKNOWN = -1  # stands for a number that nobody can tell
UNKNOWN_OWNER = "?"
LONGEST_TEXT = 16_000  # characters


def details(model: BaseModel) -> dict[str, Any]:
    """The members of a wire model that say anything, by their names there; see :mod:`lllm3090d.bus.service_values`."""
    told = model.model_dump(mode="json")
    return {key: value for key, value in told.items() if value is not None}


def error_of(problem: Mapping[str, Any]) -> tuple[str, str]:
    """Name and message of an error, from its problem document."""
    return KINDS[ErrorCode(problem["code"])].dbus_name, text_of(problem)


def text_of(problem: Mapping[str, Any]) -> str:
    """What happened and why, of a refusal for lack of memory its arithmetic, and what to do; one thing a line."""
    told = problem.get("details", {})
    lines = [str(problem["detail"])]
    if isinstance(told.get("budget"), Sequence) and told["budget"]:
        lines.append(f"Can be given: {_sum(told['budget'])}.")
    if problem.get("hint"):
        lines.append(str(problem["hint"]))
    text = "\n".join(lines)
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "..."


def _sum(lines: Sequence[Mapping[str, Any]]) -> str:
    terms = ", ".join(f"{each['name']} {mib_text(each['bytes'])}" for each in lines)
    return f"{terms} = {mib_text(sum(each['bytes'] for each in lines))} MiB"


def model_properties(view: InstanceView) -> dict[str, Any]:
    """The properties of a model's object."""
    return {
        "Name": view.name,
        "Run": view.run,
        "State": view.state,
        "Since": view.since,
        "Unit": view.unit,
        "MainPid": _number(view.main_pid),
        "Endpoint": view.endpoint,
        "Path": view.path,
        "Purpose": view.purpose,
        "ContextTokens": view.context_tokens,
        "Parallel": view.parallel,
        "WindowTokens": view.window_tokens,
        "ReservedBytes": view.reserved_bytes,
        "MeasuredBytes": _number(view.measured_bytes),
        "Pinned": view.pinned,
        "Adopted": view.adopted,
        "EngineVersion": view.engine_version,
        "AtRisk": view.at_risk or "",
        "LatchReason": view.latch_reason or "",
        "Failure": error_of(view.failure) if view.failure is not None else ("", ""),
    }


def manager_state(states: Iterable[InstanceState], waiting: int, *, released: bool) -> str:
    """The whole in a word."""
    found = frozenset(states)
    if released:
        return "released"
    if waiting or found & (ON_THE_WAY_UP | ON_THE_WAY_DOWN):
        return "changing"
    return "serving" if found & SERVING else "idle"


def instances_of(views: Iterable[InstanceView]) -> list[str]:
    """The objects of models."""
    return [path_of_model(each.name) for each in views]


def pending_of(views: Iterable[PendingView]) -> list[tuple[str, str, str]]:
    """Loads that wait."""
    return [(each.name, each.token, each.why) for each in views]


def budget_of(gpus: Gpus) -> list[tuple[str, int, int, int, int]]:
    """What each card can give."""
    return [
        (
            gpu.uuid,
            gpu.reading.total_bytes if gpu.reading else UNKNOWN,
            gpu.reading.used_bytes if gpu.reading else UNKNOWN,
            gpu.charged_bytes,
            _number(gpu.grantable_bytes),
        )
        for gpu in gpus.gpus
    ]


def others_of(gpus: Gpus) -> list[tuple[str, int, str, str, str, int]]:
    """Who else is on the cards."""
    return [
        (
            gpu.uuid,
            each.pid,
            each.name,
            UNKNOWN_OWNER if each.unseen else each.user or "",
            each.model or "",
            _number(each.used_bytes),
        )
        for gpu in gpus.gpus
        for each in gpu.processes
    ]


def _number(value: int | None) -> int:
    return UNKNOWN if value is None else value
