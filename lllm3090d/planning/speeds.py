"""How a measured speed may be shown on another card or backend. Pure.

A speed is a measurement of one card, one backend and one way of drafting; it is never scaled. What differs is said
beside the figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lllm3090d.checkpoints.catalogue import MeasuredSpeed
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.profiles import CardProfile

REFERENCE_BACKEND = (
    Backend.VULKAN
)  # of the measurements that are shown first, and the one installed by default
MEASURED = "measured"
OTHER_CARD = "other card"


@dataclass(frozen=True, slots=True)
class ShownSpeed:
    """A speed with what must be said beside it.

    Attributes:
        speed: as it was measured.
        on_this_card: the card is the one it was measured on.
        on_this_backend: the backend is the one it was measured with, or nobody knows which it is.
    """

    speed: MeasuredSpeed
    on_this_card: bool
    on_this_backend: bool

    @property
    def qualifier(self) -> str:
        """The remark: ``measured``, ``measured on vulkan``, ``other card``, or the last two."""
        elsewhere = f"{MEASURED} on {self.speed.backend}"
        if self.on_this_card:
            return MEASURED if self.on_this_backend else elsewhere
        return OTHER_CARD if self.on_this_backend else f"{OTHER_CARD}, {elsewhere}"

    @property
    def circumstances(self) -> str:
        """Where the figure comes from: card, backend, speculation, workload and build, as far as noted."""
        speed = self.speed
        drafted = "no speculation" if speed.speculation == "none" else speed.speculation
        parts = (speed.card, speed.backend, drafted, speed.workload, speed.build and f"build {speed.build}")
        return ", ".join(part for part in parts if part)


def shown_speed(speeds: Sequence[MeasuredSpeed], card: CardProfile, backend: Backend) -> ShownSpeed | None:
    """The speed to show for a model; None where nothing was measured.

    It is the first, which the catalogue means to be shown, unless the same was measured with this backend on
    this card.

    Args:
        speeds: of one model.
        card: the card it would run on.
        backend: of the engine. UNKNOWN could not be asked and counts as the one measured; CPU was asked and has
            no card, so no speed of a card is shown as measured there.
    """
    if not speeds:
        return None
    first = speeds[0]
    alike = (
        speed
        for speed in speeds
        if (speed.speculation, speed.workload) == (first.speculation, first.workload)
        and qualify(speed, card, backend).on_this_card
        and speed.backend == backend
    )
    return qualify(next(alike, first), card, backend)


def qualify(speed: MeasuredSpeed, card: CardProfile, backend: Backend) -> ShownSpeed:
    """What must be said beside one speed; see :func:`shown_speed`.

    A card is the same by its profile, that is by name and not by size. Where there is no card at all, none is.
    """
    return ShownSpeed(
        speed=speed,
        on_this_card=card.present and speed.card == card.id,
        on_this_backend=backend is Backend.UNKNOWN or speed.backend == backend,
    )
