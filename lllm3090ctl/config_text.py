"""Change one value in the text of a TOML file and leave the rest of it as it is, comments and order included. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Table

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


def with_value(text: str, path: Sequence[str], value: Any) -> str:
    """The text with a value put in place of what was there, else added to the end of its table.

    Raises:
        UnclearError: the text is no TOML, or written so that it cannot be changed without changing more.
    """
    wanted = _values(text)
    inner = wanted
    for name in path[:-1]:
        below = inner.setdefault(name, {})
        if not isinstance(below, dict):
            raise UnclearError(f"{name} is no table.")
        inner = below
    inner[path[-1]] = value
    return _checked(lambda: _put(text, path, value), wanted)


def without(text: str, path: Sequence[str]) -> str:
    """The text without a value; as it is where the value is not in it.

    Raises:
        UnclearError: as :func:`with_value`.
    """
    wanted = _values(text)
    inner = found_in(wanted, path[:-1]) if len(path) > 1 else wanted
    if not isinstance(inner, dict) or path[-1] not in inner:
        return text
    del inner[path[-1]]

    def removed() -> str:
        document = tomlkit.parse(text)
        holder: Any = document
        for name in path[:-1]:
            holder = holder[name]
        del holder[path[-1]]
        return tomlkit.dumps(document)

    return _checked(removed, wanted)


def _values(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnclearError(f"It is no TOML: {error}") from error


def _checked(change: Any, wanted: Mapping[str, Any]) -> str:
    """A change that comes to what was meant, and nothing else."""
    try:
        changed = str(change())
        comes_to = tomllib.loads(changed)
    # tomlkit's own, and what its containers raise for what is written in ways they do not follow.
    except (TOMLKitError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnclearError("It is written in a way that only a person can change.") from error
    if comes_to != wanted:
        raise UnclearError("It is written in a way that only a person can change.")
    return changed


def _put(text: str, path: Sequence[str], value: Any) -> str:
    document = tomlkit.parse(text)
    holder: Any = document
    for number, name in enumerate(path[:-1]):
        if name not in holder:
            return _with_table(text, path[: number + 1], path[number + 1 :], value, holder)
        holder = holder[name]
    name = path[-1]
    if holder is document and name not in document and (at := _before_tables(text)) is not None:
        lines = text.split("\n")
        return "\n".join([*lines[:at], _line(name, value), *lines[at:]])
    if name not in holder:
        if not (isinstance(holder, Table | Container) and _add_line(holder, name, value)):
            holder[name] = value
    elif isinstance(held := holder[name], Table) and isinstance(value, Mapping):
        for key in [key for key in held if key not in value]:
            del held[key]
        for key, each in value.items():
            if key in held or not _add_line(held, key, each):
                held[key] = each
    else:
        holder[name] = _inline(value)
    return tomlkit.dumps(document)


def _before_tables(text: str) -> int | None:
    """Where a line can stand in a text that begins with a table: before the comments that are about that; else None."""
    lines = text.split("\n")
    written = (number for number, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#"))
    first = next(written, None)
    if first is None or not lines[first].lstrip().startswith("["):
        return None
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return first


def _with_table(
    text: str, table: Sequence[str], path: Sequence[str], value: Any, holder: Any
) -> str:
    """The text with a table that was not there; where its own table is written in one line, within that."""
    nested = value
    for name in reversed(path):
        nested = {name: nested}
    if len(table) > 1 and not isinstance(holder, Table):
        document = tomlkit.parse(text)
        inner: Any = document
        for name in table[:-1]:
            inner = inner[name]
        inner[table[-1]] = _inline(nested)
        return tomlkit.dumps(document)
    header = ".".join(tomlkit.key(name).as_string() for name in (*table, *path[:-1]))
    end = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    return f"{text}{end}[{header}]\n{_line(path[-1], value)}"


def _add_line(holder: Table | Container, name: str, value: Any) -> bool:
    """Add a line behind the last one of a table, before comments that may be about what follows; whether it could."""
    if isinstance(holder, Table) and holder.is_super_table():  # it has no line of its own
        return False
    body = holder.value.body if isinstance(holder, Table) else holder.body
    lines = [item for key, item in body if key is not None and not isinstance(item, Table)]
    if lines:
        _behind(lines[-1], name, value)
        return True
    if isinstance(holder, Table):
        _behind(holder, name, value)
        return True
    return False


def _behind(item: Item, name: str, value: Any) -> None:
    """What is written behind an item, up to the end of its line, gets another line."""
    item.trivia.trail = (item.trivia.trail or "\n") + item.trivia.indent + _line(name, value)


def _line(name: str, value: Any) -> str:
    return f"{tomlkit.key(name).as_string()} = {tomlkit.item(_inline(value)).as_string()}\n"


def _inline(value: Any) -> Any:
    """A value as it is written in one line."""
    if not isinstance(value, Mapping):
        return value
    table = tomlkit.inline_table()
    for name, each in value.items():
        table[name] = _inline(each)
    return table


def _number(text: str, kind: str) -> int | float | str:
    readers: Iterator[Any] = iter((int, float) if kind == "number" else (int,))
    for read in readers:
        try:
            return read(text)  # type: ignore[no-any-return]  # either of the two
        except ValueError:
            continue
    return text
