"""Several cards: which take part, and which one is the main one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Bytes of memory below which a card takes no part: what a process holds there is a large share of it, and every
# boundary between cards costs time. Judgement, as in sizing by others.
LEAST_CARD_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """One card.

    Attributes:
        total_bytes: of its memory.
        free_bytes: what a launch may take of it; negative where more is promised than there is.
        name: by which the engine knows it, as its ``--list-devices`` prints it; for a launch on it.
    """

    total_bytes: int
    free_bytes: int
    name: str = ""

    @property
    def takes_part(self) -> bool:
        """It is large enough to be worth its boundary."""
        return self.total_bytes >= LEAST_CARD_BYTES


def pooled_free_bytes(devices: Sequence[DeviceRoom]) -> int:
    """What all cards that take part can give together; a card that owes memory takes nothing from the others.

    A sum is only a first look: layers are not divisible, so each card must be checked on its own.
    """
    return sum(max(0, device.free_bytes) for device in devices if device.takes_part)


def main_device(capacities_bytes: Sequence[int]) -> int:
    """Index of the main card: the one with the most capacity, the first of equal ones.

    It is named last in ``--device``, because the last one gets the output weights, whatever ``--main-gpu`` says.

    Raises:
        ValueError: there is no card.
    """
    if not capacities_bytes:
        raise ValueError("without a card there is no main one")
    return max(range(len(capacities_bytes)), key=lambda index: (capacities_bytes[index], -index))
