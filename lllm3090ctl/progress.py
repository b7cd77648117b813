"""How a load in progress is shown: a bar on a terminal, lines elsewhere, NDJSON for programs, or nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import click

from lllm3090ctl import render
from lllm3090ctl.documents import Document
from lllm3090ctl.output import Screen, folded, is_terminal
from lllm3090ctl.text import clean, mib

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 1.0


class Display(Protocol):
    """Shows the lines of a load's stream, one by one, as they arrive."""

    def show(self, line: Document) -> None:
        """Show one line. Kinds of line that are not known are ignored."""
        ...


@contextlib.contextmanager
def display(name: str, screen: Screen, quiet: bool) -> Iterator[Display]:
    """The display that suits the options and the terminal, for the time of one load."""
    if screen.as_json:
        yield _Ndjson(screen, quiet)
    elif quiet:
        yield _Nothing()
    elif is_terminal(sys.stderr):
        from rich.console import Console  # noqa: PLC0415 - only for a bar that somebody watches
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - as above

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(clean(name), total=None, figures="")
            yield _Bar(name, progress, task)
    else:
        yield _Lines(name)


class _Ndjson:
    """Passes the stream on; the quiet one only its last line."""

    def __init__(self, screen: Screen, quiet: bool) -> None:
        self._screen = screen
        self._quiet = quiet

    def show(self, line: Document) -> None:
        if not self._quiet or line.text("kind") in {"ready", "failed"}:
            self._screen.line(line.members, "")


class _Nothing:
    def show(self, line: Document) -> None:
        """Show nothing."""


class _Lines:
    """A line for each new state, and one a second while memory fills, on stderr."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state: str | None = None
        self._why = ""
        self._shown_s = 0.0

    def show(self, line: Document) -> None:
        self._name = _real_name(line) or self._name
        notice = _notice(line, self._name)
        if notice:
            click.echo(notice, err=True)
        elif line.text("kind") in {"state", "progress"}:
            state = line.maybe_text("state") or self._state or "loading"
            elapsed_s = line.real("elapsed_s")
            why = _waits_for(line)
            if (state, why) != (self._state, self._why) or elapsed_s - self._shown_s >= LINE_EVERY_S:
                self._state, self._why, self._shown_s = state, why, elapsed_s
                parts = [f"{self._name}: {state}", why, _figures(line), f"{elapsed_s:.1f} s"]
                click.echo(clean(", ".join(part for part in parts if part)), err=True)


class _Bar:
    """A bar of the memory that the engine holds, on stderr."""

    def __init__(self, name: str, progress: Progress, task: TaskID) -> None:
        self._name = name
        self._progress = progress
        self._task = task

    def show(self, line: Document) -> None:
        self._name = _real_name(line) or self._name
        notice = _notice(line, self._name)
        if notice:
            shown = folded(notice, sys.stderr)
            self._progress.console.print(shown, markup=False, highlight=False, soft_wrap=True)
        elif line.text("kind") in {"state", "progress"}:
            state = line.maybe_text("state")
            if state:
                shown = ", ".join(part for part in (f"{self._name}: {state}", _waits_for(line)) if part)
                self._progress.update(self._task, description=clean(shown))
            resident, expected = line.maybe_whole("resident_bytes"), line.maybe_whole("expected_bytes")
            if resident is not None and expected:
                self._progress.update(
                    self._task, total=expected, completed=min(resident, expected), figures=_figures(line)
                )
        elif line.text("kind") == "ready":
            # However little of its price it took, nothing is to come any more.
            measured = line.child("instance").maybe_whole("measured_bytes")
            self._progress.update(
                self._task,
                total=1.0,
                completed=1.0,
                description=f"{clean(self._name)}: ready",
                figures="" if measured is None else f"{mib(measured)} MiB",
            )


def _real_name(line: Document) -> str | None:
    """The model's name, where the line tells; what was typed may be parts of it."""
    instance = line.maybe_child("instance")
    return instance.maybe_text("name") if instance else None


def _notice(line: Document, name: str) -> str | None:
    """What is said once, in text."""
    kind = line.text("kind")
    if kind == "admitted":
        return render.admitted(line, name)
    if kind == "joined":
        return f"{clean(name)}: is being loaded already, waiting for the same load"
    return None


def _waits_for(line: Document) -> str:
    """What a queued load waits for."""
    why = line.maybe_text("why")
    return f"waits for {why}" if why else ""


def _figures(line: Document) -> str:
    """How much of the memory is filled, where the line says so."""
    resident, expected = line.maybe_whole("resident_bytes"), line.maybe_whole("expected_bytes")
    if resident is None:
        return ""
    return f"{mib(resident)} MiB" if not expected else f"{mib(resident)} of {mib(expected)} MiB"
