"""The gateway's keys, for a person. Pure."""

from __future__ import annotations

from lllm3090ctl.documents import Document
from lllm3090ctl.text import Block, Column, Prose, Table, clean

COLUMNS = (Column("KEY"), Column("MADE"))
NOTHING = "There is no key, so none is asked for: every program of this computer may use the gateway."


def listed(listing: Document) -> list[Block]:
    """What ``key list`` shows."""
    keys = listing.children("keys")
    if not keys:
        return [Prose(NOTHING), Prose("Make one: lllm3090ctl key add NAME")]
    return [Table(COLUMNS, tuple((clean(each.text("name")), clean(each.text("made"))) for each in keys))]


def made(answer: Document) -> list[Block]:
    """What ``key add`` shows: the key on a line of its own, to be copied."""
    return [
        Prose(clean(answer.text("key"))),
        Prose(
            f"This is the key {clean(answer.text('name'))}. It is shown this once: nobody can tell it later. From now "
            "on the gateway asks everybody for one; clients send it as Authorization: Bearer KEY or as x-api-key."
        ),
    ]


def removed(listing: Document, name: str) -> list[Block]:
    """What ``key remove`` shows."""
    return [Prose(f"The key {clean(name)} lets nobody in any more."), *listed(listing)]
