"""Commands of a Markdown page. Pure.

A block marked ``sh`` holds commands, one a line; a line that ends in a backslash, in an open quotation or in an
open here-document goes on. A block marked ``console`` holds commands behind ``$ ``, continued behind ``> ``, and
what they print. Other blocks hold none.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w{}:-]*)")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(?P<word>\w+)\1")
PROMPT, GOES_ON = "$ ", "> "
SHELLS = ("sh", "console")
# What would look like commands and be run by nobody.
MISLEADING = ("bash", "shell", "zsh", "shell-session", "shellsession")


class BadBlockError(Exception):
    """A block that says nothing clear. Its text names page and line."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: number of its first line of text, from 1.
        language: as marked; empty where it is not.
        lines: without the indent of the fence.
    """

    line: int
    language: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: path below the repository.
        line: where it begins, from 1.
        text: all its lines, without prompts.
    """

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}: {self.text}"


def blocks(page: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a page.

    Raises:
        BadBlockError: one is never closed, or code is marked by its indent only, which tells nobody what it is.
    """
    opened: re.Match[str] | None = None
    begin, held, before = 0, list[str](), ""
    for number, line in enumerate(text.splitlines(), 1):
        found = FENCE.match(line)
        if opened is None:
            if found:
                opened, begin, held = found, number + 1, []
            elif line.startswith("    ") and not before.strip() and line.strip():
                raise BadBlockError(f"{page}:{number}: code by indent: put it into a fence with a language")
            else:
                before = line
            continue
        if line.strip() == opened["fence"]:
            yield Block(begin, opened["language"], tuple(held))
            opened, before = None, line
        else:
            held.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise BadBlockError(f"{page}:{begin - 1}: a block that is not closed")


def commands(page: str, text: str) -> Iterator[Command]:
    """The commands of a page, in their order.

    Raises:
        BadBlockError: a block has no language, or one that looks as if it were run; a command does not end; a
            ``console`` block begins with something else than a command.
    """
    for block in blocks(page, text):
        if not block.language or block.language in MISLEADING:
            raise BadBlockError(
                f"{page}:{block.line}: name the language: sh or console for commands, text for what they print"
            )
        if block.language == "sh":
            yield from _joined(page, _plain(block))
        elif block.language == "console":
            yield from _joined(page, _prompted(page, block))


def _plain(block: Block) -> Iterator[tuple[int, str, bool]]:
    for number, line in enumerate(block.lines, block.line):
        yield number, line, False


def _prompted(page: str, block: Block) -> Iterator[tuple[int, str, bool]]:
    if not block.lines or not block.lines[0].startswith(PROMPT):
        raise BadBlockError(f"{page}:{block.line}: a console block begins with '$ ' and a command")
    in_command = False
    for number, line in enumerate(block.lines, block.line):
        if line.startswith(PROMPT):
            in_command = True
            yield number, line.removeprefix(PROMPT), True
        elif in_command and line.startswith(GOES_ON):
            yield number, line.removeprefix(GOES_ON), False
        else:
            in_command = False


def _joined(page: str, lines: Iterator[tuple[int, str, bool]]) -> Iterator[Command]:
    held: list[str] = []
    begin = 0
    for number, line, fresh in lines:
        if held and fresh:
            raise BadBlockError(f"{page}:{begin}: the command does not end: {held[0]}")
        if not held and (not line.strip() or line.lstrip().startswith("#")):
            continue
        if not held:
            begin = number
        held.append(line)
        if not goes_on("\n".join(held)):
            yield Command(page, begin, "\n".join(held))
            held = []
    if held:
        raise BadBlockError(f"{page}:{begin}: the command does not end: {held[0]}")


def goes_on(text: str) -> bool:
    """Does the shell want another line?"""
    if text.endswith("\\"):
        return True
    document = HEREDOC.search(text)
    if document and document["word"] not in text.splitlines()[1:]:
        return True
    if document:
        return False
    try:
        shlex.split(text, comments=True)
    except ValueError:  # an open quotation
        return True
    return False
