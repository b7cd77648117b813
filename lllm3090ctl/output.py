"""The one place that writes: results and failures, as text or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

import click

from lllm3090ctl import render
from lllm3090ctl.bars import widths
from lllm3090ctl.documents import Document
from lllm3090ctl.failures import Failure
from lllm3090ctl.tables import align, cells, fit, fold
from lllm3090ctl.text import Bar, Block, Prose, Style, Table

USUAL_WIDTH = 80
LEAST_BAR = 20
WIDEST_BAR = 160
COLOURS = {Style.BAD: "red", Style.DOUBTFUL: "yellow", Style.GOOD: "green"}


class Screen:
    """Where the results of one command go.

    Results go to stdout, failures to stderr; with JSON both go to stdout, so that a program reads one
    stream.

    Args:
        as_json: write the documents of the wire instead of text.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def result(self, document: Mapping[str, object], blocks: Sequence[Block]) -> None:
        """Write a result: the document, or the blocks that render it."""
        if self.as_json:
            click.echo(json.dumps(document, indent=2))
        else:
            self._blocks(blocks, sys.stdout)

    def line(self, document: Mapping[str, object], text: str) -> None:
        """Write one element of a stream, at once: a line of NDJSON, or of text."""
        click.echo(json.dumps(document) if self.as_json else text)

    def failure(self, failure: Failure, streaming: bool) -> None:
        """Write a failure.

        Args:
            failure: what happened.
            streaming: the command's JSON is NDJSON, so the problem document takes one line.
        """
        if self.as_json:
            click.echo(json.dumps(failure.problem, indent=None if streaming else 2))
        else:
            first, *rest = render.failure(Document(failure.problem))
            if isinstance(first, Prose):
                first = first._replace(text=f"lllm3090ctl: {first.text}")
            else:
                click.echo("lllm3090ctl: ", nl=False, err=True)
            self._blocks([first, *rest], sys.stderr)

    def _blocks(self, blocks: Sequence[Block], stream: TextIO) -> None:
        for block in blocks:
            if isinstance(block, Table):
                _table(block, stream)
            elif isinstance(block, Prose):
                _prose(block, stream)
            elif isinstance(block, Bar):
                _bar(block, stream)
            else:
                click.echo(block, file=stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person watches; a closed stream is None."""
    return stream is not None and stream.isatty()


def folded(text: str, stream: TextIO) -> str:
    """A line as lines of at most the width of a terminal, broken between words; elsewhere as it is."""
    return "\n".join(fold(text, _width(stream))) if is_terminal(stream) else text


def _table(table: Table, stream: TextIO) -> None:
    """Draw a table: fitted to the width of a terminal, elsewhere plain and whole, for grep and awk."""
    if not is_terminal(stream):
        click.echo(align(table), file=stream)
        return
    text, left_out = fit(table, _width(stream))
    head, _, rows = text.partition("\n")
    click.echo(_bold(head), file=stream)
    click.echo(rows, file=stream)
    if left_out:
        told = ", ".join(left_out)
        _prose(Prose(f"(Left out for want of width: {told}. A wider terminal or a pipe shows all.)"), stream)


def _prose(prose: Prose, stream: TextIO) -> None:
    """Write sentences: folded and coloured on a terminal, elsewhere whole and plain."""
    if not is_terminal(stream):
        click.echo(prose.lead + prose.text, file=stream)
        return
    width = max(1, _width(stream) - cells(prose.lead))
    lines = fold(prose.text, width)
    for number, line in enumerate(lines):
        told = (" " * cells(prose.lead) if number else prose.lead) + line
        colour = COLOURS.get(prose.style)
        click.echo(told if colour is None or _is_plain() else click.style(told, fg=colour), file=stream)


def _bar(bar: Bar, stream: TextIO) -> None:
    """Draw a bar between brackets: coloured on a terminal, elsewhere by its marks alone."""
    watched = is_terminal(stream)
    inside = max(LEAST_BAR, min(_width(stream) if watched else USUAL_WIDTH, WIDEST_BAR)) - 2
    counts = widths([each.weight for each in bar.segments], inside)
    parts = []
    for segment, count in zip(bar.segments, counts, strict=True):
        drawn, is_coloured = segment.mark * count, watched and segment.colour and not _is_plain()
        parts.append(click.style(drawn, fg=segment.colour) if is_coloured else drawn)
    click.echo(f"[{''.join(parts)}]", file=stream)


def _width(stream: TextIO) -> int:
    """Of the terminal, in cells; ``COLUMNS`` decides where it is set."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL_WIDTH
    except OSError:
        return USUAL_WIDTH


def _bold(text: str) -> str:
    return text if _is_plain() else click.style(text, bold=True)


def _is_plain() -> bool:
    """Nobody wants colours, or the terminal has none."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") == "dumb"
