"""Card and MemoryReading: what is known of a card and what its memory looked like at one moment. Plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class CardKind(enum.StrEnum):
    """Who answers for the card's memory."""

    NVIDIA = "nvidia"  # the driver, through NVML
    CPU = "cpu"  # no card: host memory takes its place


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card, or host memory in its place.

    Attributes:
        kind: who answers for its memory.
        uuid: the driver's UUID; ``host`` for host memory.
        name: product name.
        driver_version: e.g. ``580.95.05``; None for host memory.
    """

    kind: CardKind
    uuid: str
    name: str
    driver_version: str | None


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A process that holds memory of the card; used_bytes is None where the driver does not tell."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The card's memory at one moment, bytes.

    Attributes:
        taken_monotonic_s: when, on the monotonic clock.
        total_bytes: nameplate.
        reserved_bytes: what the driver keeps for itself, live; None where it does not tell (never read as
            0).
        used_bytes: used by processes (without the driver's own).
        free_bytes: the driver's own free figure (MemAvailable for host memory).
        processes: who holds memory.
        processes_known: False where nobody tells who holds memory; ``processes`` may then lack some or all.
    """

    taken_monotonic_s: float
    total_bytes: int
    reserved_bytes: int | None
    used_bytes: int
    free_bytes: int
    processes: tuple[CardProcess, ...]
    processes_known: bool = True


class CardReader(Protocol):
    """Reads one card. Implementations never open a compute context."""

    @property
    def card(self) -> Card:
        """The card that is read."""
        ...

    def read(self) -> MemoryReading:
        """Read the memory now; takes about a millisecond. Raises LlmError CARD_UNREADABLE, never returns a guess."""
        ...

    def close(self) -> None:
        """Release the driver's library."""
        ...
