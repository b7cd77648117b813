"""Manual pages in the man(7) macros, as groff and mandoc read them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Page:
    """A page that is written from its beginning to its end; all text is literal.

    Args:
        name: of what it describes.
        section: of the manual.
        source: the program and its release.
        manual: the title of the whole.
    """

    def __init__(self, name: str, section: int, source: str, manual: str) -> None:
        self._lines = [
            '.\\" Made from the program itself by: make generated',
            f'.TH {_argument(name)} {section} "" {_argument(source)} {_argument(manual)}',
            ".nh",
            ".ad l",
        ]

    def section(self, title: str) -> None:
        """A heading."""
        self._lines.append(f".SH {_argument(title)}")

    def part(self, title: str) -> None:
        """A heading below the last one."""
        self._lines.append(f".SS {_argument(title)}")

    def paragraph(self, text: str) -> None:
        """Running text; words between backticks are bold."""
        self._lines += [".PP", _text(text)]

    def term(self, term: str, text: str) -> None:
        """Something with its meaning; the term as in :func:`marked`."""
        self._lines += [".TP", marked(term), _text(text) or "\\&"]

    def terms_end(self, texts: Iterable[str]) -> None:
        """More paragraphs of the last term."""
        for text in texts:
            self._lines += [".IP", _text(text)]

    def line(self, marked_text: str) -> None:
        """A line of a synopsis, as in :func:`marked`."""
        self._lines += [".PP", marked(marked_text)]

    def literal(self, lines: Iterable[str]) -> None:
        """Lines as they are, set in."""
        self._lines += [".PP", ".RS 4", ".nf", *(_guarded(escaped(line)) for line in lines), ".fi", ".RE"]

    def text(self) -> str:
        """The whole file."""
        return "\n".join(self._lines) + "\n"


def escaped(text: str) -> str:
    """Text that means itself: a hyphen is one that can be copied, a quote is straight."""
    replaced = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return replaced.replace("^", "\\(ha").replace("~", "\\(ti")


def marked(text: str) -> str:
    """One line with marks: ``**bold**`` and ``//italic//``."""
    parts = re.split(r"(\*\*.+?\*\*|//.+?//)", text)
    shown = []
    for part in parts:
        if part.startswith("**") and len(part) > 4:
            shown.append(f"\\fB{escaped(part[2:-2])}\\fP")
        elif part.startswith("//") and len(part) > 4:
            shown.append(f"\\fI{escaped(part[2:-2])}\\fP")
        else:
            shown.append(escaped(part))
    return _guarded("".join(shown))


def _text(text: str) -> str:
    """Running text, one sentence's words after another."""
    joined = " ".join(text.split())
    parts = re.split(r"`([^`]+)`", joined)
    shown = [f"\\fB{escaped(part)}\\fP" if odd % 2 else escaped(part) for odd, part in enumerate(parts)]
    return _guarded("".join(shown))


def _guarded(line: str) -> str:
    """A line is no request, whatever it begins with."""
    return "\\&" + line if line.startswith((".", "\\(aq")) else line


def _argument(text: str) -> str:
    return '"' + escaped(text).replace('"', '""') + '"'
