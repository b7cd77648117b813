"""What clients send, held against the wire models; the same for every surface. Pure."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from lllm3090d.errors import ErrorCode, LlmError

Body = TypeVar("Body", bound=BaseModel)
MOST_PROBLEMS = 20  # that are told


def validated(text: str | bytes, model: type[Body]) -> Body:
    """The body that a JSON document is. Strict: true is no number and "2" is none either.

    Raises:
        LlmError: INVALID_REQUEST naming each field that is wrong.
    """
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False, include_input=False)
        found = [f"{'.'.join(map(_short, item['loc'])) or 'body'}: {item['msg']}" for item in items]
        if len(found) > MOST_PROBLEMS:
            found = [*found[:MOST_PROBLEMS], f"and {len(found) - MOST_PROBLEMS} more"]
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            "; ".join(found),
            hint=f"Known fields: {', '.join(model.model_fields)}.",
            problems=found,
        ) from error


def _short(part: int | str) -> str:
    text = str(part)
    return text if len(text) <= 100 else text[:100] + "..."
