"""Several cards: which take part, which one is the main one, and how layers are shared out among them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

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


def tensor_split(capacities_bytes: Sequence[int], fixed_bytes: Sequence[int]) -> tuple[Fraction, ...] | None:
    """Shares of the layers in the order of the cards (``--tensor-split``); None where no card has room.

    A share is in proportion to what is left of a card once its fixed costs are paid. Shares are exact and add up to
    1; rounding is for the command line.

    Args:
        capacities_bytes: what each card can give.
        fixed_bytes: what each takes whatever its layers: the runtime of a process and, on the main card, compute
            buffers, draft and projector.

    Raises:
        ValueError: the lists differ in length.
    """
    rooms = [max(0, room - fixed) for room, fixed in zip(capacities_bytes, fixed_bytes, strict=True)]
    together = sum(rooms)
    return tuple(Fraction(room, together) for room in rooms) if together else None
