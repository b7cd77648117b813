"""Failures in the words of each API: bodies, events of a stream, headers. Pure.

The code of the taxonomy, the hint and the details are in each of them beside what the API knows. The SDKs of OpenAI and
Anthropic try again at any status from 500 on and at 409 and 429; ``x-should-retry`` tells them when that is of no use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.routes import Dialect
from lllm3090d.surfaces.openai_errors import openai_error

# Bytes that a reader of server-sent events passes over.
KEEP_ALIVE = b": waiting\n\n"
RETRY_AFTER_S = 5
# Failures that pass by themselves.
PASSING = frozenset(
    {
        ErrorCode.TOO_MANY_REQUESTS,
        ErrorCode.MODEL_NOT_READY,
        ErrorCode.QUEUE_TIMED_OUT,
        ErrorCode.LOAD_TIMED_OUT,
        ErrorCode.LOAD_CANCELLED,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.BUS_UNAVAILABLE,
        ErrorCode.CARD_UNREADABLE,
    }
)
_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        HTTPStatus.UNAUTHORIZED: "authentication_error",
        HTTPStatus.FORBIDDEN: "permission_error",
        HTTPStatus.NOT_FOUND: "not_found_error",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
        HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
        HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
        HTTPStatus.INSUFFICIENT_STORAGE: "overloaded_error",
    }
)


def body(error: LlmError, dialect: Dialect, request_id: str) -> bytes:
    """The body of an answer that failed."""
    return json.dumps(_document(error, dialect, request_id)).encode() + b"\n"


def event(error: LlmError, dialect: Dialect, request_id: str) -> bytes:
    """The same in a stream of events that has begun."""
    name = "event: error\n" if dialect is Dialect.ANTHROPIC else ""
    return f"{name}data: {json.dumps(_document(error, dialect, request_id))}\n\n".encode()


def headers(error: LlmError) -> dict[str, str]:
    """Headers of such an answer that tell a client what to do next."""
    if error.code in PASSING:
        return {"Retry-After": str(error.details.get("retry_after_s", RETRY_AFTER_S))}
    found = {"x-should-retry": "false"}
    if isinstance(error.details.get("allow"), list):
        found["Allow"] = ", ".join(error.details["allow"])
    return found


def status(error: LlmError) -> int:
    """The HTTP status: a method that an address does not take has its own."""
    return HTTPStatus.METHOD_NOT_ALLOWED if "allow" in error.details else error.kind.http_status


def too_long(prompt_tokens: int, context_tokens: int) -> LlmError:
    """A prompt that a slot of the model cannot hold; Anthropic's clients look for the first words."""
    return LlmError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"prompt is too long: {prompt_tokens} tokens > {context_tokens} maximum",
        hint="Shorten the conversation, or load the model with a larger context: lllm3090ctl plan shows what fits.",
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
        n_prompt_tokens=prompt_tokens,
        n_ctx=context_tokens,
    )


def _document(error: LlmError, dialect: Dialect, request_id: str) -> dict[str, Any]:
    message = openai_error(error).error
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(
            error.kind.http_status,
            "invalid_request_error"
            if error.kind.http_status < HTTPStatus.INTERNAL_SERVER_ERROR
            else "api_error",
        )
        known = {"type": kind, "message": message.message, "code": message.code, "hint": message.hint}
        details = {"details": message.details} if message.details else {}
        return {"type": "error", "error": known | details, "request_id": request_id}
    if dialect is Dialect.LLAMA:
        return {"error": message.model_dump(exclude_none=True) | {"status": error.kind.http_status}}
    return {"error": message.model_dump()}
