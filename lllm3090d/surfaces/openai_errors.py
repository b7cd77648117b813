"""A failure as clients of the OpenAI API expect it. Pure.

They look at the HTTP status first, then at ``type`` and ``code``, and show ``message`` to a person; other members are
left alone. So the message carries the way out too, and code, hint and details are those of every other surface.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lllm3090d.errors import ErrorCode, LlmError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
# Statuses that the API has a type of its own for; of others those below 500 are the caller's fault.
TYPES: Mapping[int, str] = MappingProxyType(
    {
        HTTPStatus.UNAUTHORIZED: "authentication_error",
        HTTPStatus.FORBIDDEN: "permission_error",
        HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    }
)
# Codes that are about the model that was asked for.
ABOUT_THE_MODEL = frozenset(
    {
        ErrorCode.UNKNOWN_MODEL,
        ErrorCode.AMBIGUOUS_MODEL,
        ErrorCode.NO_MODELS,
        ErrorCode.NOT_LOADED,
        ErrorCode.MODEL_LATCHED,
        ErrorCode.LOADED_DIFFERENTLY,
        ErrorCode.BAD_CHECKPOINT,
        ErrorCode.INCOMPLETE_CHECKPOINT,
        ErrorCode.UNSUPPORTED_ARCHITECTURE,
        ErrorCode.UNSUPPORTED_COMBINATION,
        ErrorCode.INSUFFICIENT_VRAM,
        ErrorCode.INSUFFICIENT_MEMORY,
    }
)


class OpenAiError(BaseModel):
    """What is in ``error``."""

    model_config = ConfigDict(frozen=True)

    message: str = Field(description="what happened, and what to do next")
    type: str
    param: str | None = Field(description="member of the request that is at fault")
    code: str = Field(description="of the taxonomy")
    hint: str | None = Field(default=None, description="what to do next")
    details: dict[str, Any] | None = Field(default=None, description="facts for programs, sizes in bytes")


class OpenAiErrorBody(BaseModel):
    """The body of an answer that failed; its HTTP status is that of the error's kind."""

    model_config = ConfigDict(frozen=True)

    error: OpenAiError


def openai_error(error: LlmError) -> OpenAiErrorBody:
    """The body for a failure."""
    status = error.kind.http_status
    usual = SERVER_ERROR if status >= HTTPStatus.INTERNAL_SERVER_ERROR else INVALID_REQUEST
    return OpenAiErrorBody(
        error=OpenAiError(
            message=" ".join(part for part in (_sentence(error.message), error.hint) if part),
            type=TYPES.get(status, usual),
            param=_param(error),
            code=str(error.code),
            hint=error.hint,
            details=dict(error.details) or None,
        )
    )


def _param(error: LlmError) -> str | None:
    field = error.details.get("field")
    if isinstance(field, str):
        return field
    return "model" if error.code in ABOUT_THE_MODEL else None


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
