"""A refusal for lack of memory as text for a person. Pure; :mod:`output` writes it.

Four questions in their order: why not; what is needed; what can be given and who holds the rest; what would help.
"""

from __future__ import annotations

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, Column, Prose, Style, Table, clean, mib, mib_up

HOST_KIND = "cpu"
COMMAND_INDENT = "       "
NEEDED_COLUMNS = (Column("NEEDED"), Column("MIB", right=True))
HOLDER_COLUMNS = (Column("HELD BY", least=20), Column("MIB", right=True), Column("WHO", least=24))
CARD_COLUMNS = (Column("ON"), Column("NEEDED MIB", right=True), Column("CAN GIVE MIB", right=True))


def is_refusal(details: Document) -> bool:
    """The details are those of a refusal for lack of memory; those of older daemons have no cause."""
    return details.has("cause") and details.has("summary")


def page(problem: Document, details: Document) -> list[Block]:
    """The whole refusal.

    Raises:
        Failure: ``bad_answer`` for details of another shape.
    """
    return [
        Prose(clean(details.text("summary")), style=Style.BAD),
        *_needed(details),
        *_given(details),
        *_missing(details),
        *_holders(details),
        *_remedies(problem, details),
    ]


def _needed(details: Document) -> list[Block]:
    """The lines of the price; of several cards, what each would take."""
    if details.has("cards"):
        rows = tuple(
            (
                clean(card.text("name")),
                mib_up(card.whole("needed_bytes")),
                mib(card.whole("grantable_bytes")),
            )
            for card in details.children("cards")
        )
        return ["", Table(CARD_COLUMNS, rows)]
    lines = details.children("needed")
    if not lines:
        return []
    terms = tuple((clean(line.text("name")), mib(line.whole("bytes"))) for line in lines)
    return ["", Table(NEEDED_COLUMNS, (*terms, ("sum", mib(sum(line.whole("bytes") for line in lines)))))]


def _given(details: Document) -> list[Block]:
    lines = details.children("budget")
    title = "MEMORY" if details.maybe_text("card_kind") == HOST_KIND else "THE CARD"
    columns = (Column(title), Column("MIB", right=True), Column("ORIGIN", least=24))
    rows = [
        (clean(line.text("name")), _signed(line.whole("bytes")), clean(line.text("origin")))
        for line in lines
    ]
    left = max(0, sum(line.whole("bytes") for line in lines))
    return ["", Table(columns, (*rows, ("can give", mib(left), "")))]


def _missing(details: Document) -> list[Block]:
    """In one line; of several cards the fullest."""
    missing = details.maybe_whole("missing_bytes")
    if missing is None or missing <= 0:
        return []
    return ["", Prose(f"Missing: {mib_up(missing)} MiB", style=Style.BAD)]


def _holders(details: Document) -> list[Block]:
    rows = [
        (
            clean(stranger.text("name")) or "a process",
            "unknown" if not stranger.has("bytes") else mib(stranger.whole("bytes")),
            _whose(stranger),
        )
        for stranger in details.children("strangers")
    ]
    rows += [
        (clean(unit.text("name")), mib(unit.whole("bytes")), "a foreign unit, left alone")
        for unit in (details.children("foreign_units") if details.has("foreign_units") else ())
    ]
    unlisted = details.maybe_whole("unlisted_bytes")
    if unlisted:
        rows.append(("others", mib(unlisted), "the driver names no program for it"))
    for key in ("ours", "quarantine"):
        rows += [
            (
                clean(model.text("name")),
                mib(model.whole("bytes")),
                ", ".join(filter(None, ("our model", clean(model.text("doing"))))),
            )
            for model in details.children(key)
        ]
    return ["", Table(HOLDER_COLUMNS, tuple(rows))] if rows else []


def _whose(stranger: Document) -> str:
    """Number and owner of a process; older daemons tell neither of models nor why there is no owner."""
    user, pid = stranger.text("user"), f"pid {stranger.whole('pid')}"
    model, unseen = (stranger.text(key) if stranger.has(key) else "" for key in ("model", "unseen"))
    if unseen:
        return clean(f"{pid}, owner unknown: {unseen}")
    if model:
        return clean(f"{pid}, the model {model} of {user}")
    return clean(f"{pid} of {user}" if user else pid)


def _remedies(problem: Document, details: Document) -> list[Block]:
    """Numbered, with the command for each in a line of its own that is never folded, to be copied; else the hint."""
    remedies = details.children("remedies")
    if not any(remedy.truth("verified") for remedy in remedies):
        hint = problem.maybe_text("hint")
        return ["", Prose(clean(hint), "Hint: ")] if hint else []
    blocks: list[Block] = ["", Prose("What would help, the easiest first:", style=Style.GOOD)]
    width = len(str(len(remedies)))
    for number, remedy in enumerate(remedies, 1):
        blocks.append(Prose(f"{clean(remedy.text('text'))}.", f"  {number:>{width}}. "))
        command = remedy.text("command")
        if command:
            blocks.append(f"{COMMAND_INDENT}{clean(command)}")
    return blocks


def _signed(size_bytes: int) -> str:
    return f"+{mib(size_bytes)}" if size_bytes > 0 else mib(size_bytes)
