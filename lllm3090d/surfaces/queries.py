"""Parameters of a request's query, each checked. Pure."""

from __future__ import annotations

from aiohttp import web

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.moments import LONGEST_MOMENT, realtime_us

MOST_DIGITS = 20  # int() refuses thousands of them


def number(request: web.Request, key: str, default: int, highest: int) -> int:
    """A whole number from 0 to a bound. Raises LlmError INVALID_REQUEST."""
    text = request.query.get(key, str(default))
    if not is_number(text) or int(text) > highest:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"{key}={text[: 2 * MOST_DIGITS]} is not a whole number from 0 to {highest}",
            hint=f"Leave {key} out for {default}.",
        )
    return int(text)


def is_number(text: str) -> bool:
    """Digits and nothing else, and not absurdly many."""
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def flag(request: web.Request, key: str) -> bool:
    """0 or 1; 0 without it. Raises LlmError INVALID_REQUEST."""
    return number(request, key, 0, 1) == 1


def moment(request: web.Request, key: str) -> int | None:
    """A moment, microseconds since 1970; None without it. Raises LlmError INVALID_REQUEST."""
    text = request.query.get(key)
    if text is None:
        return None
    try:
        return realtime_us(text)
    except ValueError as error:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"{key}={text[:LONGEST_MOMENT]} is no moment: {error}",
            hint="Give it in RFC 3339 with a time zone, such as 2026-11-30T11:42:07Z; a + is written %2B in a query.",
        ) from error
