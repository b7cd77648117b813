"""The quote: what a launch costs, as a ledger of named line items."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MIB = 1 << 20


class Evidence(enum.StrEnum):
    """Where a number comes from, best first; clients must treat an unknown value as the weakest."""

    MEASURED = "measured"  # the peak this machine saw for the same key
    ENGINE = "engine"  # a dry run of this engine build
    HEADER = "header"  # exact layout arithmetic from the GGUF header
    CATALOGUE = "catalogue"  # linear per-token pricing of a model not downloaded yet


class Place(enum.StrEnum):
    """Which memory a line item occupies."""

    CARD = "card"  # memory of the card; host memory where the card is the host (backend cpu)
    HOST = "host"  # memory of the process beside a real card


@dataclass(frozen=True, slots=True)
class LineItem:
    """One term of a quote.

    Attributes:
        name: short and stable, e.g. ``weights`` or ``kv cache``.
        place: which memory.
        bytes: the price; never negative.
        evidence: where the number comes from.
        formula: the arithmetic or constant behind it with its figures, for a person.
    """

    name: str
    place: Place
    bytes: int
    evidence: Evidence
    formula: str


@dataclass(frozen=True, slots=True)
class Quote:
    """The price of one launch, line by line. Preview, admission, launch and display all use this object."""

    items: tuple[LineItem, ...]

    def total_bytes(self, place: Place) -> int:
        """Sum of the items in one place, in bytes."""
        return sum(item.bytes for item in self.items if item.place is place)

    def item(self, name: str) -> LineItem:
        """The item of that name; KeyError when there is none."""
        for item in self.items:
            if item.name == name:
                return item
        raise KeyError(name)
