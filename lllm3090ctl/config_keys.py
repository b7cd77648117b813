"""Keys and values on a command line: what they name and mean in the settings. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lllm3090ctl.documents import Document

_WORD = re.compile(r"""[^\s."'=#\[\]{},]+|"[^"\\\n]*"|'[^'\n]*'""")
FLAGS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


class UnclearError(Exception):
    """A key, a value or a file that cannot be understood, or not be changed; the message says which and why."""


class Shape(NamedTuple):
    """How a value is written, as the daemon tells it.

    Attributes:
        kind: of the value: ``flag``, ``whole number``, ``number``, ``words``, ``table``; anything else is a text.
        element: of a table with free names.
        members: of a table with fixed names.
    """

    kind: str
    element: Shape | None = None
    members: Mapping[str, Shape] | None = None

    @classmethod
    def of(cls, told: Document) -> Shape:
        """From the daemon's JSON."""
        element, members = told.maybe_child("element"), told.child("members").members
        return cls(
            told.text("kind"),
            cls.of(element) if element else None,
            {name: cls.of(told.child("members").child(name)) for name in members} or None,
        )

    def below(self, path: Sequence[str]) -> Shape:
        """Of what a path leads to. What is not known is a text: the daemon's rules will say what they think of it."""
        if not path:
            return self
        found = (self.members or {}).get(path[0], self.element)
        return (found or Shape("text")).below(path[1:])


def path_of(text: str, depth: int) -> tuple[str, ...]:
    """What a key on the command line names: the setting, and names within its table.

    Names of models have dots, so a dot divides only where there is something to divide, and never within quotes.

    Args:
        text: such as ``cache_type``, ``aliases.qwen``, ``idle_ttl_of.Qwen3.8-27B`` or ``aliases."a b"``.
        depth: the number of names that a value of this setting can be below it.

    Raises:
        UnclearError: it names nothing.
    """
    setting, dot, rest = text.partition(".")
    if not setting or (dot and not rest) or "\n" in text:
        raise UnclearError(f"{text!r} is no key.")
    if not dot:
        return (setting,)
    if rest[0] in "\"'":
        words = _WORD.findall(rest)
        if ".".join(words) != rest:
            raise UnclearError(f"{text!r} is no key.")
        return (setting, *(word[1:-1] if word[0] in "\"'" else word for word in words))
    if depth <= 1:
        return setting, rest
    name, dot, member = rest.rpartition(".")
    return (setting, name, member) if dot and name and member else (setting, rest)


def value_of(words: Sequence[str], shape: Shape) -> Any:
    """What words on the command line mean. What is none of its kind stays a text, for the daemon's rules to refuse.

    Raises:
        UnclearError: several words for one value, or a table that is no TOML.
    """
    if shape.kind == "words":
        return list(words)
    if len(words) != 1:
        raise UnclearError("Give one value; put quotes around one with blanks.")
    (text,) = words
    if shape.kind == "table":
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except ValueError as error:
            raise UnclearError(
                f'{text!r} is no table such as {{ name = "value" }}, or name one: KEY.NAME VALUE ({error}).'
            ) from error
    if shape.kind == "flag":
        return FLAGS.get(text.lower(), text)
    if shape.kind in {"whole number", "number"}:
        return _number(text, shape.kind)
    return text


def found_in(values: Mapping[str, Any], path: Sequence[str]) -> Any:
    """What a path leads to; None where it leads nowhere."""
    inner: Any = values
    for name in path:
        if not isinstance(inner, Mapping) or name not in inner:
            return None
        inner = inner[name]
    return inner


def _number(text: str, kind: str) -> int | float | str:
    readers: Iterator[Any] = iter((int, float) if kind == "number" else (int,))
    for read in readers:
        try:
            return read(text)  # type: ignore[no-any-return]  # either of the two
        except ValueError:
            continue
    return text
