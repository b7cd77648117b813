"""Values that somebody else may have written: what no launch has is found before anything is done with it. Pure.

A unit's environment and the state file are open to everybody who is this user. A number that no machine has, or a text
with a NUL, is an error wherever it is used first: in a path, a sum, a D-Bus message. So it is looked for once, here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from lllm3090d.errors import LlmError

# More bytes than any machine has, more seconds than any clock counts.
MOST = 1 << 50
MOST_CHARACTERS = 100_000
MOST_WHY_CHARACTERS = 300
# Whatever goes wrong while one unit, or one row, is understood: it is that unit's fault, and nobody else is to suffer.
# Anything else is our own mistake or the machine's trouble, and is not hidden.
NOT_UNDERSTOOD = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    OSError,
    RecursionError,
    struct.error,
    LlmError,
)

M = TypeVar("M", bound=BaseModel)


def why(error: Exception) -> str:
    """What went wrong while something was understood, for the end of a sentence; bounded."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    elif isinstance(error, LlmError):
        text = error.message
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror
    else:
        text = str(error) or type(error).__name__
    return bounded(text)


def bounded(text: str) -> str:
    """A reason that may hold what somebody else wrote, no longer than a person reads."""
    return text if len(text) <= MOST_WHY_CHARACTERS else text[: MOST_WHY_CHARACTERS - 1] + "…"


def oddity(value: object) -> str:
    """What there is in a value, however deep, that no launch has; empty where there is nothing."""
    match value:
        case None | bool():
            return ""
        case int():
            return "" if -MOST <= value <= MOST else "a number that is too large"
        case float():
            return "" if math.isfinite(value) and abs(value) <= MOST else "a number that is none"
        case str() | PurePath():
            return _odd_text(str(value))
        case BaseModel():
            parts = [getattr(value, name) for name in type(value).model_fields]
        case Mapping():
            parts = [*value, *value.values()]
        case tuple() | list() | set() | frozenset():
            parts = list(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, each.name) for each in fields(value)]
        case _:
            return ""
    return next((found for each in parts if (found := oddity(each))), "")


def _odd_text(text: str) -> str:
    if "\0" in text:
        return "a text with a NUL"
    return "a text that is too long" if len(text) > MOST_CHARACTERS else ""


def read_row(kind: type[M], body: object) -> M:
    """A row of the state file. Raises ValueError where it is none that this release writes."""
    if not isinstance(body, str | bytes):
        raise ValueError("it is no text")  # one kind of error for all that cannot be read
    try:
        row = kind.model_validate_json(body)
    except NOT_UNDERSTOOD as error:
        raise ValueError(why(error)) from error
    if odd := oddity(row):
        raise ValueError(f"it holds {odd}")
    return row


def round_trip(model: M) -> None:
    """Raises ValueError where a model would not be read back as what it is: what is written down must be."""
    try:
        again = type(model).model_validate_json(model.model_dump_json(warnings="error"))
    except NOT_UNDERSTOOD as error:
        raise ValueError(why(error)) from error
    if again != model:
        raise ValueError("it cannot be written down as it is")
