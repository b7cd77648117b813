"""JSON objects of the wire, read with checked types: what is missing or misshapen is a ``bad_answer``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from lllm3090ctl.failures import bad_answer

EXCERPT_CHARACTERS = 60

_T = TypeVar("_T")


class Document:
    """A JSON object. Members the client does not know are kept and ignored, as ``/v1`` asks of clients."""

    __slots__ = ("members",)

    def __init__(self, members: Mapping[str, object]) -> None:
        self.members = members

    def has(self, key: str) -> bool:
        """Whether the member is there and not null."""
        return self.members.get(key) is not None

    def text(self, key: str) -> str:
        """A string member."""
        value = self.members.get(key)
        if not isinstance(value, str):
            raise _misshapen(key, "a string")
        return value

    def maybe_text(self, key: str) -> str | None:
        """A string member, None where it is null or missing."""
        return self.text(key) if self.has(key) else None

    def whole(self, key: str) -> int:
        """An integer member."""
        value = self.members.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _misshapen(key, "an integer")
        return value

    def maybe_whole(self, key: str) -> int | None:
        """An integer member, None where it is null or missing."""
        return self.whole(key) if self.has(key) else None

    def real(self, key: str) -> float:
        """A number member."""
        value = self.members.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _misshapen(key, "a number")
        return float(value)

    def truth(self, key: str) -> bool:
        """A boolean member."""
        value = self.members.get(key)
        if not isinstance(value, bool):
            raise _misshapen(key, "true or false")
        return value

    def child(self, key: str) -> Document:
        """An object member."""
        value = self.members.get(key)
        if not isinstance(value, dict):
            raise _misshapen(key, "an object")
        return Document(value)

    def maybe_child(self, key: str) -> Document | None:
        """An object member, None where it is null or missing."""
        return self.child(key) if self.has(key) else None

    def children(self, key: str) -> tuple[Document, ...]:
        """A member that is an array of objects."""
        return tuple(Document(value) for value in self._array(key, dict, "an array of objects"))

    def texts(self, key: str) -> tuple[str, ...]:
        """A member that is an array of strings."""
        return tuple(self._array(key, str, "an array of strings"))

    def wholes(self, key: str) -> tuple[int, ...]:
        """A member that is an array of integers."""
        return tuple(self._array(key, int, "an array of integers"))

    def _array(self, key: str, kind: type[_T], expected: str) -> list[_T]:
        value = self.members.get(key)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise _misshapen(key, expected)
        return value


def parse(raw: bytes) -> Document:
    """The JSON object in the bytes.

    Raises:
        Failure: ``bad_answer``, for anything else.
    """
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise bad_answer(f"The answer is not JSON; it begins with {excerpt(raw)}.") from None
    if not isinstance(value, dict):
        raise bad_answer(f"The answer is not a JSON object; it begins with {excerpt(raw)}.")
    return Document(value)


def excerpt(raw: bytes) -> str:
    """The beginning of an answer, quoted for a message."""
    text = raw[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "backslashreplace")
    return repr(text[:EXCERPT_CHARACTERS]) if text else "nothing"


def _misshapen(key: str, expected: str) -> Exception:
    return bad_answer(f"The answer's member {key!r} is not {expected}.")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
