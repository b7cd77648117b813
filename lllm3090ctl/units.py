"""Units that are no instances, and instances that were made out of units, for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, Column, Prose, Table, clean, mib

FOREIGN_COLUMNS = (
    Column("FOREIGN UNIT", least=20),
    Column("STATE"),
    Column("HOLDS", right=True),
    Column("PID", right=True, drop=1),
    Column("WHY", least=20),
)
LEFT_ALONE = (
    "Foreign units are counted at what they hold, and left alone. To end one: systemctl --user stop UNIT"
)


def foreign_units(listing: Document) -> list[Block]:
    """Those that are left alone; nothing where there are none."""
    units = listing.children("foreign_units") if listing.has("foreign_units") else ()
    if not units:
        return []
    rows = tuple(
        (
            clean(each.text("unit")),
            clean(each.text("active_state")),
            _holds(each),
            str(each.maybe_whole("main_pid") or "-"),
            clean(each.text("why")),
        )
        for each in units
    )
    return ["", Table(FOREIGN_COLUMNS, rows), Prose(LEFT_ALONE)]


def _holds(unit: Document) -> str:
    """Of cards where it holds some of them, else of host memory."""
    held = [(each.text("where"), each.whole("bytes")) for each in unit.children("held")]
    if not held:
        return "-"
    on_cards = sum(size for where, size in held if where != "host")
    return f"{mib(on_cards or sum(size for _, size in held))} MiB"


def left_alone(answer: Document) -> list[Block]:
    """That a release has not ended them."""
    names = answer.texts("foreign_units") if answer.has("foreign_units") else ()
    if not names:
        return []
    return [
        Prose(
            clean(f"Left alone, with what they hold, for nobody here understands them: {', '.join(names)}")
        )
    ]


def notes(views: Sequence[Document]) -> Iterator[Block]:
    """What is to be known of how instances were found."""
    for view in views:
        yield from note(view)


def note(view: Document) -> Iterator[Block]:
    """Of one instance."""
    name = view.text("name")
    if view.has("reconstructed"):
        why = view.text("reconstructed")
        yield Prose(clean(f"{name} was reconstructed from its command line: {why}."))
    if view.has("file_note"):
        yield Prose(clean(f"{name}: {view.text('file_note')}."))
