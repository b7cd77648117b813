"""Members of a JSON object that arrives in pieces, found without building the document.

A chat with images is a hundred megabytes, and only its ``model`` decides where it goes. So strings are skipped with one
search each, what is nested is counted but not kept, and a piece is looked at once. The scan is no validation: what the
engine makes of a malformed document is the engine's answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

LONGEST_VALUE_BYTES = 4096
# Characters of which no more than that many bytes can have been sent, however they were escaped.
LONGEST_PLAIN = LONGEST_VALUE_BYTES // 12

Scalar = str | int | float | bool | None

# A short plain string, a quote that begins another one, a bracket. Long ones are for a search, ten times as fast.
_NESTED = re.compile(rb'"[^"\\]{0,200}+"|["{}\[\]]')
_TOKEN = re.compile(rb'["{}\[\],:]|[^\s"{}\[\],:]++')
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


class NotAnObjectError(ValueError):
    """The document does not begin as a JSON object."""


def members_of(document: bytes, wanted: Collection[str]) -> dict[str, Scalar] | None:
    """The same of a document that is there as a whole, by the parser, which is ten times as fast.

    Args:
        document: an object.
        wanted: names of members.

    Returns:
        What the scan would find; None where only the scan can tell: a document with faults, a member of several values,
        a long value, a number.
    """
    try:
        parsed = json.loads(document.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    found = {name: parsed[name] for name in wanted if name in parsed}
    is_plain = all(
        value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= LONGEST_PLAIN)
        for value in found.values()
    )
    return found if is_plain else None


class MemberScan:
    """Finds scalar members at the top of one object.

    Args:
        wanted: names of members.
    """

    def __init__(self, wanted: Collection[str]) -> None:
        self._wanted = frozenset(wanted)
        self._found: dict[str, Scalar] = {}
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the last byte of the piece before was a backslash in a string
        self._kept = bytearray()  # of a string at the top, or of a number or word that a piece may have cut
        self._in_word = False
        self._key: str | None = None  # whose value comes next
        self._value_next = False
        self._ended = False

    @property
    def found(self) -> Mapping[str, Scalar]:
        """Members seen so far, by name; the last of several of one name, as parsers have it."""
        return self._found

    @property
    def complete(self) -> bool:
        """The object has ended."""
        return self._ended

    def feed(self, piece: bytes) -> None:
        """Look at the next piece.

        Raises:
            NotAnObjectError: the document is no object.
        """
        position, size = 0, len(piece)
        while position < size and not self._ended:
            if self._in_string:
                position = self._string(piece, position)
            elif self._depth > 1:
                position = self._nested(piece, position)
            else:
                position = self._top(piece, position)

    def _string(self, piece: bytes, position: int) -> int:
        start = position
        if self._escaped:
            self._escaped = False
            position += 1
        end = piece.find(b'"', position)
        if end < 0:
            end = len(piece)
        if piece.find(b"\\", position, end) >= 0:
            match = _IN_STRING.match(piece, position)
            end = match.end() if match else position
        if (
            end < len(piece) and piece[end] == _BACKSLASH
        ):  # the last byte: what it escapes is in the next piece
            self._escaped = True
            end += 1
        self._keep(piece[start:end])
        if end < len(piece) and piece[end] == _QUOTE:
            self._in_string = False
            if self._depth == 1:
                self._string_ended()
            return end + 1
        return end

    def _nested(self, piece: bytes, position: int) -> int:
        for match in _NESTED.finditer(piece, position):
            first = match[0][:1]
            if first == b'"':
                if match.end() - match.start() == 1:  # not a whole one, for two bytes are the shortest
                    self._in_string = True
                    return match.end()
            elif first in b"{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 1:
                    return match.end()
        return len(piece)

    def _top(self, piece: bytes, position: int) -> int:
        if self._in_word and piece[position] in b' \t\r\n"{}[],:':
            self._word_ended()
        match = _TOKEN.search(piece, position)
        if match is None:
            return len(piece)
        token = match[0]
        if self._depth == 0 and token != b"{":
            raise NotAnObjectError
        if token == b'"':
            self._in_string = True
            self._kept.clear()
        elif token in b"{[":
            self._depth += 1
            if self._depth > 1:
                self._value_ended()
        elif token in b"}]":
            self._depth -= 1
            self._ended = self._depth == 0
        elif token == b":":
            self._value_next = True
        elif token == b",":
            self._value_ended()
        else:
            self._in_word = True
            self._keep(token)
            if match.end() < len(piece):
                self._word_ended()
        return match.end()

    def _keep(self, piece: bytes) -> None:
        if self._depth == 1 and len(self._kept) <= LONGEST_VALUE_BYTES:
            self._kept += piece[: LONGEST_VALUE_BYTES + 1]

    def _string_ended(self) -> None:
        text = self._scalar(b'"' + bytes(self._kept) + b'"')
        if not self._value_next:
            self._key = text if isinstance(text, str) else None
        else:
            self._value(text)
        self._kept.clear()

    def _word_ended(self) -> None:
        self._in_word = False
        self._value(self._scalar(bytes(self._kept)))
        self._kept.clear()

    def _value(self, value: Scalar) -> None:
        if self._key in self._wanted and self._value_next:
            self._found[self._key] = value
        self._value_ended()

    def _value_ended(self) -> None:
        self._key, self._value_next = None, False

    def _scalar(self, text: bytes) -> Scalar:
        """What a value means; None where it is none or too long to be one that anybody wants."""
        if len(self._kept) > LONGEST_VALUE_BYTES:
            return None
        try:
            value = json.loads(text)
        except ValueError:
            return None
        return value if isinstance(value, str | int | float | bool) else None
