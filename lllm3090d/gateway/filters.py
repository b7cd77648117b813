"""What is changed of a request on its way to an engine that does not apply the rules for reasoning itself. Pure.

A template may take few words for an effort and fail at any other, and a client's small limit of tokens may be used up
by thinking alone. Some engines have options against both. For those that have not, the same is done here, as these
engines do it: words are compared exactly, ``none`` at the top of a chat means no thinking and stays, and a limit is
raised only where it was sent, is positive, and the model thinks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lllm3090d.engines.tier_flags import (
    EFFORT_ALLOW,
    EFFORT_FALLBACK,
    EFFORT_SWITCH,
    EFFORT_WORD,
    TOKENS_FLOOR,
    ReasoningRules,
)
from lllm3090d.planning.units import MIB

CHANGED = "x-lllm3090-changed"
# A document beyond it is passed on as it is: to parse it would hold up every other request.
LARGEST_CHANGED_BYTES = 8 * MIB
TOO_LARGE = f"nothing (the body is larger than {LARGEST_CHANGED_BYTES // MIB} MiB)"
NO_THINKING = "none"
KWARGS = "chat_template_kwargs"
THINKING_SWITCH = "enable_thinking"
BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")
_THINKS_NOT = (("--reasoning", "off"), ("-rea", "off"), ("--reasoning-budget", "0"))


class ReasoningOf(BaseModel):
    """The rules of one model in the settings; what is left out is as for all.

    Attributes:
        efforts: words that may reach its template, with commas between them.
        fallback: which of them stands in for any other.
        floor_tokens: least limit of generated tokens while it thinks; 0 for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    efforts: str | None = Field(default=None, max_length=1000)
    fallback: str | None = Field(default=None, max_length=100)
    floor_tokens: int | None = Field(default=None, ge=0, le=1 << 30)


@dataclass(frozen=True, slots=True)
class ReasoningFilter:
    """What is to be changed of requests for one launch.

    Attributes:
        rules: those that its engine does not apply itself.
        thinks: unless a request says otherwise.
    """

    rules: ReasoningRules
    thinks: bool = True


@dataclass(frozen=True, slots=True)
class Filtered:
    """A body as it goes on.

    Attributes:
        body: the one that came where nothing was changed.
        changes: what was, such as ``reasoning_effort=high->medium``.
    """

    body: bytes
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Members:
    """Where a kind of request says it.

    Attributes:
        efforts: paths of members; the last of each is the word.
        limits: members that limit generated tokens.
    """

    efforts: tuple[tuple[str, ...], ...]
    limits: tuple[str, ...] = ()


_TOP, _IN_KWARGS = (EFFORT_SWITCH,), (KWARGS, EFFORT_SWITCH)
_CHAT = _Members((_TOP, _IN_KWARGS), ("max_tokens", "max_completion_tokens", "n_predict"))
_RESPONSES = _Members(
    (("reasoning", "effort"), _TOP, _IN_KWARGS), ("max_output_tokens", "max_tokens", "n_predict")
)
# llama-server takes no effort from a message of Anthropic's API but that for the template.
_MESSAGES = _Members((_IN_KWARGS,), ("max_tokens",))
# What renders a template without generating fails at the same words.
_RENDERED = replace(_CHAT, limits=())
_KINDS: Mapping[str, _Members] = MappingProxyType(
    {
        "/v1/chat/completions": _CHAT,
        "/chat/completions": _CHAT,
        "/v1/responses": _RESPONSES,
        "/responses": _RESPONSES,
        "/v1/messages": _MESSAGES,
        "/v1/chat/completions/input_tokens": _RENDERED,
        "/chat/completions/input_tokens": _RENDERED,
        "/v1/responses/input_tokens": replace(_RESPONSES, limits=()),
        "/responses/input_tokens": replace(_RESPONSES, limits=()),
        "/v1/messages/count_tokens": replace(_MESSAGES, limits=()),
        "/apply-template": _RENDERED,
    }
)


def rules_of(general: ReasoningRules, own: ReasoningOf) -> ReasoningRules:
    """The rules of a model.

    Args:
        general: those for all.
        own: its own, which go before them.

    Raises:
        LlmError: SETTINGS_INVALID for rules that cannot be.
    """
    allowed = general.allowed_efforts
    if own.efforts is not None:
        allowed = tuple(word.strip() for word in own.efforts.split(",") if word.strip())
    floor = general.tokens_floor if own.floor_tokens is None else own.floor_tokens
    fallback = general.fallback_effort if own.fallback is None else own.fallback or None
    return ReasoningRules(allowed, fallback if allowed else None, floor)


def left_to_do(
    rules: ReasoningRules, argv: Sequence[str], environment: Mapping[str, str]
) -> ReasoningFilter:
    """What an engine with this command line leaves to be done; never what it does itself.

    Args:
        rules: of its model.
        argv: that it was started with.
        environment: likewise; each of its options may be a variable too.
    """
    does_efforts = any(_was_given(flag, argv, environment) for flag in (EFFORT_ALLOW, EFFORT_FALLBACK))
    does_floor = _was_given(TOKENS_FLOOR, argv, environment)
    left = ReasoningRules(
        () if does_efforts else rules.allowed_efforts,
        None if does_efforts else rules.fallback_effort,
        0 if does_floor else rules.tokens_floor,
    )
    pairs = set(itertools.pairwise(argv))
    return ReasoningFilter(left, thinks=not pairs & set(_THINKS_NOT))


def is_changed(path: str, wanted: ReasoningFilter | None) -> bool:
    """Something of a request to this address may have to be changed."""
    if wanted is None or path not in _KINDS:
        return False
    return bool(wanted.rules.allowed_efforts or (wanted.rules.tokens_floor and _KINDS[path].limits))


def filtered(body: bytes, path: str, wanted: ReasoningFilter) -> Filtered:
    """A body with what the rules change of it; what is no JSON object goes on as it came.

    Args:
        body: the whole.
        path: for which :func:`is_changed`.
        wanted: what is to be done.
    """
    kind = _KINDS[path]
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return Filtered(body)
    if not isinstance(document, dict):
        return Filtered(body)
    thinks = _thinks(document, wanted, kind)  # before a word is replaced
    changes: list[str] = []
    rules = wanted.rules
    if rules.allowed_efforts and rules.fallback_effort is not None:
        for place in kind.efforts:
            changes += _effort(document, place, rules.allowed_efforts, rules.fallback_effort)
    if rules.tokens_floor and thinks:
        for name in kind.limits:
            limit = document.get(name)
            if isinstance(limit, int) and not isinstance(limit, bool) and 0 < limit < rules.tokens_floor:
                document[name] = rules.tokens_floor
                changes.append(f"{name}={limit}->{rules.tokens_floor}")
    if not changes:
        return Filtered(body)
    return Filtered(json.dumps(document, separators=(",", ":")).encode(), tuple(changes))


def _effort(
    document: dict[str, Any], place: tuple[str, ...], allowed: Sequence[str], fallback: str
) -> list[str]:
    holder: Any = document
    for name in place[:-1]:
        holder = holder.get(name) if isinstance(holder, dict) else None
    word = holder.get(place[-1]) if isinstance(holder, dict) else None
    if not isinstance(word, str) or not word or word in allowed:
        return []
    if word == NO_THINKING and place != _IN_KWARGS:
        return []
    holder[place[-1]] = fallback
    # It is a client's: as it is only where it is a word, for it goes into a header.
    shown = word if EFFORT_WORD.match(word) else "?"
    return [f"{'.'.join(place)}={shown}->{fallback}"]


def _thinks(document: Mapping[str, Any], wanted: ReasoningFilter, kind: _Members) -> bool:
    """As the engine decides it."""
    efforts = [place for place in kind.efforts if place != _IN_KWARGS]
    if any(_at(document, place) == NO_THINKING for place in efforts):
        return False
    # Bools count as numbers, and False is no budget.
    if any(document.get(name) == 0 and document.get(name) is not False for name in BUDGETS):
        return False
    said = _at(document, (KWARGS, THINKING_SWITCH))
    return said if isinstance(said, bool) else wanted.thinks


def _at(document: Mapping[str, Any], place: tuple[str, ...]) -> object:
    holder: Any = document
    for name in place:
        holder = holder.get(name) if isinstance(holder, dict) else None
    return holder


def _was_given(flag: str, argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    variable = "LLAMA_ARG_" + flag.removeprefix("--").upper().replace("-", "_")
    return flag in argv or any(word.startswith(f"{flag}=") for word in argv) or variable in environment
