"""Text for a terminal: control characters made visible, sizes, labels and values. Pure."""

from __future__ import annotations

import enum
import os
import shlex
from collections.abc import Sequence
from typing import NamedTuple

MIB = 1 << 20
GIB = 1 << 30
GAP = "  "


class Column(NamedTuple):
    """A column of a table; numbers are aligned to the right.

    Attributes:
        title: its head.
        right: aligned to the right.
        drop: how much it matters where a terminal is too narrow for all: 1 is left out first; 0 never.
        least: free text that may be folded to so many cells; 0 for a column that is never folded.
    """

    title: str
    right: bool = False
    drop: int = 0
    least: int = 0


class Table(NamedTuple):
    """Rows of cells below titled columns; every row has a cell for each column, already clean."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


class Style(enum.Enum):
    """What a line says, for a terminal with colours."""

    PLAIN = "plain"
    BAD = "bad"
    DOUBTFUL = "doubtful"
    GOOD = "good"


class Prose(NamedTuple):
    """Sentences, folded between words on a terminal and one line elsewhere; already clean.

    Attributes:
        text: the sentences.
        lead: before the first line; further lines are indented by as much.
        style: of all of it.
    """

    text: str
    lead: str = ""
    style: Style = Style.PLAIN


class Segment(NamedTuple):
    """A part of a bar.

    Attributes:
        mark: the character it is drawn with, by which it is known without colours too.
        weight: its share of the whole, in any unit.
        colour: a name of click's, empty for none.
    """

    mark: str
    weight: int
    colour: str = ""


class Bar(NamedTuple):
    """A whole and its parts, as wide as the terminal allows."""

    segments: tuple[Segment, ...]


Block = str | Table | Prose | Bar


def clean(text: str, keep: str = "") -> str:
    """Make what could steer a terminal visible.

    Control and format characters (escape sequences, text direction, line separators) and lone surrogates are
    written as Python escapes. Text comes from file names, engines and journals, so nobody vouches for it.

    Args:
        text: anything.
        keep: characters to leave, such as a tab or line feed.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def named(text: str) -> str:
    """An argument or path as JSON can carry it and as the daemon names it: bytes that are no UTF-8 as escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    return text


def shell_word(text: str) -> str:
    """An argument as it can be typed again, in bash also where it is no UTF-8."""
    if named(text) == text:
        return shlex.quote(text)
    raw = os.fsencode(text)
    return (
        "$'"
        + "".join(chr(b) if b < 128 and (chr(b).isalnum() or b in b"/._-") else f"\\x{b:02x}" for b in raw)
        + "'"
    )


def count(number: int, noun: str) -> str:
    """A number of things: ``1 slot``, ``2 slots``, ``1,024 slots``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def mib(size_bytes: int) -> str:
    """A size in MiB with one decimal, without the unit."""
    return f"{size_bytes / MIB:,.1f}"


def mib_up(size_bytes: int) -> str:
    """Like :func:`mib`, rounded up: what is missing is never shown as 0.0."""
    tenths = -(-size_bytes * 10 // MIB)
    return f"{tenths / 10:,.1f}"


def size(size_bytes: int) -> str:
    """A size with its unit: GiB from one GiB on, else MiB."""
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes >= GIB else f"{mib(size_bytes)} MiB"


def duration(seconds: float) -> str:
    """A time span for a person: ``3 s``, ``14 min``, ``2 h 5 min``, ``3 d``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d"


def prose_pairs(rows: Sequence[tuple[str, str]]) -> list[Prose]:
    """Labels and values in two aligned columns, the values folded on a terminal."""
    width = max(len(label) for label, _ in rows)
    return [Prose(value, label.ljust(width) + GAP) for label, value in rows]


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Labels and values in two aligned columns, without a trailing line feed."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label.ljust(width)}{GAP}{value}" for label, value in rows)
