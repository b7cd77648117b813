"""Moments that a person gives, and what happened as text: events, log lines, the runs of a model."""

from __future__ import annotations

from collections.abc import Sequence

import click

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, Column, Table, clean, count, duration, mib, pairs

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_DIGITS = 9
HOW = (
    "a time (2026-11-30T11:42:07Z; without a zone the time here, such as '2026-11-30 12:42'), or how long ago"
    " (90s, 10m, 2h, 3d)"
)


def moment(text: str) -> str:
    """A moment that a person gives, as the API takes it: RFC 3339 in UTC.

    Raises:
        click.BadParameter: it is none.
    """
    from datetime import UTC, datetime, timedelta  # noqa: PLC0415 - only needed here

    try:
        ago, unit = text[:-1], text[-1:]
        if unit in UNITS_S and ago.isascii() and ago.isdecimal() and len(ago) <= MOST_DIGITS:
            found = datetime.now(UTC) - timedelta(seconds=int(ago) * UNITS_S[unit])
        else:
            found = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(f"'{clean(text)}' is neither {HOW}.") from None
    if found.year < 1970:
        raise click.BadParameter(f"'{clean(text)}' lies before 1970.")
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log_moment(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """A callback for an option."""
    return None if text is None else moment(text)


def event_start(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """The same of an option that takes the number of an event as well."""
    if text is None:
        return None
    return text if text.isascii() and text.isdecimal() and len(text) <= 2 * MOST_DIGITS else moment(text)


def event(line: Document) -> str:
    """One event."""
    state, previous = line.maybe_text("state"), line.maybe_text("previous")
    actor = line.maybe_child("actor")
    parts = (
        str(line.whole("seq")),
        line.text("at"),
        line.text("kind"),
        line.maybe_text("model") or "",
        f"{previous} -> {state}" if previous and state else state or "",
        line.maybe_text("message") or "",
        f"[{actor_text(actor)}]" if actor else "",
    )
    return "  ".join(clean(part) for part in parts if part)


def actor_text(actor: Document) -> str:
    """Who caused something."""
    program, pid = actor.maybe_text("program"), actor.maybe_whole("pid")
    who = program or actor.text("kind")
    return clean(f"{who} {pid}" if pid is not None else who)


def log_line(line: Document) -> str:
    """One line of an engine's log; those of a file have no time."""
    message = clean(line.text("message"), keep=chr(9))
    at = line.maybe_text("at")
    return f"{clean(at)}  {message}" if at else message


def runs(view: Document) -> list[Block]:
    """What ``history`` shows."""
    found = view.children("runs")
    name = clean(view.text("name"))
    if not found:
        return [f"Nothing is remembered of {name}."]
    columns = (
        Column("RUN"),
        Column("ASKED FOR"),
        Column("BY", drop=3),
        Column("LOADED IN", right=True, drop=4),
        Column("SERVED", right=True, drop=5),
        Column("CONTEXT", right=True, drop=2),
        Column("MEASURED", right=True, drop=1),
        Column("STATE"),
        Column("WHY", least=24),
    )
    blocks: list[Block] = [f"{name}, the last one first:", Table(columns, tuple(map(_run_row, found)))]
    for run in found:
        blocks += _more(run)
    return blocks


def _run_row(run: Document) -> tuple[str, ...]:
    by, ended_by = run.maybe_child("asked_by"), run.maybe_child("ended_by")
    why = run.text("why")
    if why and ended_by and not run.has("problem"):
        why += f" [{actor_text(ended_by)}]"
    return (
        clean(run.text("run")),
        clean(run.maybe_text("requested_at") or "-"),
        actor_text(by) if by else "-",
        f"{run.real('load_s'):.1f} s" if run.has("load_s") else "-",
        duration(run.real("served_s")) if run.has("served_s") else "-",
        f"{run.whole('context_tokens'):,}" if run.has("context_tokens") else "-",
        f"{mib(run.whole('measured_bytes'))} MiB" if run.has("measured_bytes") else "-",
        clean(run.text("state")),
        clean(why) or "-",
    )


def _more(run: Document) -> list[Block]:
    """The last lines of a run that failed, and what its engine said of its memory."""
    blocks: list[Block] = []
    name, lines = clean(run.text("run")), run.texts("last_lines")
    if lines:
        blocks += ["", f"The last {count(len(lines), 'line')} of {name}:"]
        blocks += ["  " + clean(line, keep=chr(9)) for line in lines]
    memory = run.maybe_child("memory")
    if memory:
        blocks += [
            "",
            f"What the engine of {name} said of its memory:",
            pairs(_memory(memory.children("buffers"))),
        ]
    return blocks


def _memory(buffers: Sequence[Document]) -> list[tuple[str, str]]:
    return [
        (clean(f"  {each.text('device')} {each.text('part')}"), f"{mib(each.whole('bytes'))} MiB")
        for each in buffers
    ]
