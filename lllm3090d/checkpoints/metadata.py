"""Typed access to a header's metadata: a missing or malformed key is an error that names it, not a guess."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.header import GgufHeader, Unread, Value
from lllm3090d.errors import ErrorCode, LlmError

MAX_NUMBER = (1 << 32) - 1  # the engine reads sizes as u32


class Keys:
    """The metadata of one header."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header

    def fail(self, key: str, reason: str) -> NoReturn:
        """Raise BAD_CHECKPOINT for this key."""
        path = printable(self._header.path)
        raise LlmError(
            ErrorCode.BAD_CHECKPOINT,
            f"{path} is not a usable model file: the metadata key {printable(key)} {reason}.",
            hint="Fetch another conversion of the model.",
            path=path,
            key=printable(key),
        )

    def value(self, key: str) -> Value | None:
        """The raw value; None when the key is missing."""
        return self._header.metadata.get(key)

    def type_name(self, key: str) -> str | None:
        """Type of the value as the engine calls it, e.g. ``u32`` or ``[u32]``; None when the key is missing."""
        return self._header.types.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; ``default`` when the key is missing, None makes it required."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.fail(key, "is missing")
        if not isinstance(value, str):
            self.fail(key, "is not a text" if not isinstance(value, Unread) else "is too long")
        return value

    def number(self, key: str, default: int | None = None, *, least: int = 0, most: int = MAX_NUMBER) -> int:
        """A whole number in ``least..most``; ``default`` when the key is missing, None makes it required."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.fail(key, "is missing")
        return self._whole(key, value, least, most)

    def real(self, key: str, default: float) -> float:
        """A number, whole or not; ``default`` when the key is missing."""
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"is {printable(repr(value)[:60])}, not a number")
        if not math.isfinite(value):
            self.fail(key, f"is {value}, not a finite number")
        return float(value)

    def flags(self, key: str, layers: Sequence[int]) -> tuple[bool, ...]:
        """An array of flags (booleans, or 0 and 1) with one of the lengths ``layers``."""
        items = self.array(key, *layers)
        if not all(isinstance(item, int) and item in (0, 1) for item in items):
            self.fail(key, "is an array of something else than flags")
        return tuple(bool(item) for item in items)

    def some_flags(self, key: str, most: int) -> tuple[bool, ...]:
        """An array of flags (booleans, or numbers of which 0 is false) with at most so many elements."""
        length = self.length(key)
        if length is not None and length > most:
            self.fail(key, f"has {length} elements, at most {most} are allowed")
        items = self.array(key, *range(most + 1))
        if not all(isinstance(item, int) for item in items):
            self.fail(key, "is an array of something else than flags")
        return tuple(bool(item) for item in items)

    def per_layer(
        self, key: str, layers: int, default: tuple[int, ...] | None = None, *, least: int = 1
    ) -> tuple[int, ...]:
        """Whole numbers from ``least``, one for each of ``layers``; the file has one for all or an array."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.fail(key, "is missing")
        if isinstance(value, tuple | Unread):
            # The engine takes flags for 0 and 1 there.
            items = (int(item) if isinstance(item, bool) else item for item in self.array(key, layers))
            return tuple(self._whole(key, item, least, MAX_NUMBER) for item in items)
        return (self._whole(key, value, least, MAX_NUMBER),) * layers

    def array(self, key: str, *layers: int) -> tuple[Value, ...]:
        """An array with exactly so many elements, or with one of several numbers of them."""
        value = self.value(key)
        if not isinstance(value, tuple | Unread):
            self.fail(key, "is not an array")
        length = value.count if isinstance(value, Unread) else len(value)
        if length not in layers:
            self.fail(key, f"has {length} elements for {layers[0]} layers")
        if isinstance(value, Unread):
            self.fail(key, "is an array of texts")
        return value

    def length(self, key: str) -> int | None:
        """Elements of an array, read or not; None when the key is missing or no array."""
        value = self.value(key)
        if isinstance(value, Unread):
            return value.count
        return len(value) if isinstance(value, tuple) else None

    def _whole(self, key: str, value: Value, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            shown = printable(repr(value)[:60])
            self.fail(key, f"is {shown}, not a whole number")
        if not least <= value <= most:
            self.fail(key, f"is {value}, outside {least}..{most}")
        return value
