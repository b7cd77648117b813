"""The one place that writes: results and failures, as text or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

import click

from lllm3090ctl import render
from lllm3090ctl.documents import Document
from lllm3090ctl.failures import Failure
from lllm3090ctl.tables import align, fit
from lllm3090ctl.text import Block, Table

USUAL_WIDTH = 80


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
            click.echo("lllm3090ctl: ", nl=False, err=True)
            self._blocks(render.failure(Document(failure.problem)), sys.stderr)

    def _blocks(self, blocks: Sequence[Block], stream: TextIO) -> None:
        for block in blocks:
            if isinstance(block, Table):
                _table(block, stream)
            else:
                click.echo(block, file=stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person watches; a closed stream is None."""
    return stream is not None and stream.isatty()


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
        click.echo(
            f"(Left out for want of width: {told}. A wider terminal or a pipe shows all.)", file=stream
        )


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
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain else click.style(text, bold=True)
