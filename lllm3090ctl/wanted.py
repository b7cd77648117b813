"""What is wanted and does not run, and what is loaded at every login, for a person. Pure."""

from __future__ import annotations

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, Column, Prose, Table, clean, duration

COLUMNS = (
    Column("AUTOLOAD"),
    Column("MARKED BY"),
    Column("STATE"),
    Column("HOW IT IS LOADED", least=20),
)
AS_SET = "as the settings say"
NOTHING = "No model is loaded at a login. Mark one: lllm3090ctl autoload NAME"


def waits(view: Document) -> list[Block]:
    """That models of a login wait for the desktop, for what, and until when."""
    wait = view.maybe_child("autoload_wait") if view.has("autoload_wait") else None
    if wait is None:
        return []
    for_s, left_s = duration(wait.real("waiting_s")), duration(wait.real("remaining_s"))
    told = "What is to be loaded at this login waits for the desktop to settle"
    since, why = clean(wait.text("since")), clean(wait.text("why"))
    return [Prose(f"{told}, since {since} ({for_s}), for {left_s} more at most: {why}.")]


def lines(view: Document) -> list[Block]:
    """What is wanted, or loaded at every login, and has no instance: a line for each."""
    return [_line(each) for each in view.children("wanted")] if view.has("wanted") else []


def _line(each: Document) -> Block:
    name, why = clean(each.text("name")), clean(each.text("why"))
    kind = "wanted" if each.truth("wanted") else "autoload"
    return Prose(f"{name}: {kind}, and does not run: {why}")


def autoload(listing: Document) -> list[Block]:
    """What ``autoload`` shows."""
    models = listing.children("models")
    if not models:
        return [Prose(NOTHING)]
    rows = tuple(
        (
            clean(each.text("name")),
            clean(each.text("origin")),
            clean(each.maybe_text("state") or "-"),
            clean(_options(each.child("options"))),
        )
        for each in models
    )
    notes = [
        Prose(f"{clean(each.text('name'))}: {clean(each.text('why'))}")
        for each in models
        if each.text("why")
    ]
    return [Table(COLUMNS, rows), *notes]


def _options(options: Document) -> str:
    told = [
        f"{key} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        for key, value in options.members.items()
    ]
    return ", ".join(told) or AS_SET


def marked(listing: Document, name: str, on: bool) -> list[Block]:
    """What ``autoload NAME`` says; what a person called it may be a part of its name.

    Args:
        listing: of all marks, as they are now.
        name: as it was given.
        on: it was marked, and not unmarked.
    """
    how = "is loaded at every login from now on" if on else "is no longer loaded at a login"
    return [Prose(f"{clean(name)} {how}."), *autoload(listing)]
