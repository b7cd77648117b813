"""Change one value in the text of a TOML file and leave the rest of it as it is, comments and order included. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Table

from lllm3090ctl.config_keys import UnclearError, found_in


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
    """The text without a value, and without the tables that are empty then; as it is where the value is not in it.

    A table with a comment in it or just above it stays, for that is a person's.

    Raises:
        UnclearError: as :func:`with_value`.
    """
    if not has(text, path):
        return text
    shorter = _less(text, path)
    for depth in range(len(path) - 1, 0, -1):
        table = path[:depth]
        if not has(shorter, table):
            continue
        if found_in(_values(shorter), table) != {}:
            break
        emptied = _less(shorter, table)
        if _comments(emptied) != _comments(shorter) or _has_comment_above(shorter, emptied):
            break
        shorter = emptied
    return shorter


def has(text: str, path: Sequence[str]) -> bool:
    """Whether the text has a value there, a table included.

    Raises:
        UnclearError: it is no TOML.
    """
    inner = found_in(_values(text), path[:-1])
    return isinstance(inner, Mapping) and path[-1] in inner


def _comments(text: str) -> int:
    return sum("#" in line for line in text.splitlines())


def _has_comment_above(text: str, shorter: str) -> bool:
    """Whether a comment stands just before what was taken out."""
    at = _first_difference(text.splitlines(), shorter.splitlines())
    return at > 0 and text.splitlines()[at - 1].lstrip().startswith("#")


def _first_difference(before: Sequence[str], after: Sequence[str]) -> int:
    pairs = enumerate(zip(before, after, strict=False))
    return next((number for number, (old, new) in pairs if old != new), min(len(before), len(after)))


def _less(text: str, path: Sequence[str]) -> str:
    """The text without one value or table."""
    wanted = _values(text)
    del found_in(wanted, path[:-1])[path[-1]]
    # A table that is only there by what is below it, as [models] by [models.x], goes with the last of that.
    without_empty = _values(text)
    for depth in range(len(path), 0, -1):
        del found_in(without_empty, path[: depth - 1])[path[depth - 1]]
        if found_in(without_empty, path[: depth - 1]) != {}:
            break

    def removed() -> str:
        document = tomlkit.parse(text)
        holder: Any = document
        for name in path[:-1]:
            holder = holder[name]
        rest = _what_follows(holder[path[-1]])
        del holder[path[-1]]
        return _put_back(rest, text, tomlkit.dumps(document))

    return _checked(removed, wanted, without_empty)


def _what_follows(item: Any) -> str:
    """Comments behind the last line of a table, after an empty line: they are about what comes next."""
    if not isinstance(item, Table):
        return ""
    lines = item.as_string().split("\n")
    at = len(lines)
    while at > 0 and (not lines[at - 1].strip() or lines[at - 1].lstrip().startswith("#")):
        at -= 1
    blank = next((number for number in range(at, len(lines)) if not lines[number].strip()), len(lines))
    rest = "\n".join(lines[blank + 1 :])
    return rest if "#" in rest else ""


def _put_back(rest: str, before: str, after: str) -> str:
    """``rest`` where a text became shorter."""
    if not rest:
        return after
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    at = _first_difference(old, new)
    return "".join([*new[:at], rest, *new[at:]])


def _values(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnclearError(f"It is no TOML: {error}") from error


def _checked(change: Callable[[], str], *wanted: Mapping[str, Any]) -> str:
    """A change that comes to what was meant (one of these), and nothing else."""
    try:
        changed = change()
        comes_to = tomllib.loads(changed)
    # tomlkit's own, and what its containers raise for what is written in ways they do not follow.
    except (TOMLKitError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnclearError("It is written in a way that only a person can change.") from error
    if comes_to not in wanted:
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
    written = (
        number for number, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")
    )
    first = next(written, None)
    if first is None or not lines[first].lstrip().startswith("["):
        return None
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return first


def _with_table(text: str, table: Sequence[str], path: Sequence[str], value: Any, holder: Any) -> str:
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
