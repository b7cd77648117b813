"""Requests to the gateway as text."""

from __future__ import annotations

from collections.abc import Iterable

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, Column, Table, clean

COLUMNS = (
    Column("ENDED"),
    Column("MODEL"),
    Column("ROUTE", drop=5),
    Column("STATUS"),
    Column("PROMPT", right=True, drop=6),
    Column("ANSWER", right=True, drop=7),
    Column("TOKENS/S", right=True, drop=4),
    Column("LOAD", right=True, drop=2),
    Column("LINE", right=True, drop=3),
    Column("FIRST", right=True),
    Column("TOTAL", right=True),
    Column("REQUEST", drop=1),
)


def table(lines: Iterable[Document]) -> list[Block]:
    """All of a list."""
    rows = tuple(_row(line) for line in lines)
    return [Table(COLUMNS, rows)] if rows else ["No requests are remembered."]


def text(line: Document) -> str:
    """One of them, for those who follow."""
    titles = (column.title.lower() for column in COLUMNS)
    told = [(title, cell) for title, cell in zip(titles, _row(line), strict=True) if cell != "-"]
    return "  ".join(cell if title in _PLAIN else f"{title} {cell}" for title, cell in told)


_PLAIN = frozenset({"ended", "model", "route", "status", "request"})


def _row(line: Document) -> tuple[str, ...]:
    return (
        clean(line.text("at")),
        clean(line.maybe_text("model") or "-"),
        clean(line.text("route")),
        _status(line),
        _count(line, "prompt_tokens"),
        _count(line, "generated_tokens"),
        f"{line.real('tokens_per_s'):,.1f}" if line.has("tokens_per_s") else "-",
        _waited(line.real("load_s")),
        _waited(line.real("line_s")),
        _seconds(line.real("first_byte_s")) if line.has("first_byte_s") else "-",
        _seconds(line.real("total_s")),
        clean(line.text("request_id")),
    )


def _status(line: Document) -> str:
    """What the client was told, and why that was no answer of the engine."""
    status, outcome = line.maybe_whole("status"), line.text("outcome")
    why = line.maybe_text("code") or ("" if outcome == "served" else outcome)
    return clean(" ".join(part for part in (str(status or ""), why) if part))


def _count(line: Document, key: str) -> str:
    number = line.maybe_whole(key)
    return "-" if number is None else f"{number:,}"


def _waited(seconds: float) -> str:
    return _seconds(seconds) if seconds >= 0.001 else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
