"""How a measured speed may be shown on another card or backend. Pure.

A speed is a measurement of one card, one backend and one way of drafting; it is never scaled. What differs is said
beside the figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lllm3090d.checkpoints.catalogue import MeasuredSpeed
from lllm3090d.engines.capabilities import Backend
from lllm3090d.gpus.profiles import CardProfile
from lllm3090d.planning.request import Features
from lllm3090d.planning.tier_speed import WITHOUT_DRAFTS, DecodeStep, MeasuredSteps

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


def measured_steps(speeds: Sequence[MeasuredSpeed], card: CardProfile, backend: Backend) -> MeasuredSteps:
    """Steps within VRAM, from speeds measured with this very model on this very card and backend; never scaled.

    Of several speeds with the same speculation the first counts, as where one is shown. Without drafts a step is a
    token; with them a speed is of use only where somebody noted how many tokens a step yielded.

    Args:
        speeds: of one model.
        card: the card it would run on.
        backend: of the engine.
    """
    known: dict[str, DecodeStep | str] = {}
    for speed in speeds:
        if not qualify(speed, card, backend).on_this_card or speed.backend != backend:
            continue
        tokens = 1.0 if speed.speculation == WITHOUT_DRAFTS else speed.tokens_per_step
        found = _step(speed, tokens)
        before = known.setdefault(speed.speculation, found)
        if isinstance(before, str) and isinstance(found, DecodeStep):
            known[speed.speculation] = found
    if not speeds:
        return MeasuredSteps(otherwise="nobody has noted a speed of this very file")
    where = f"on {card.name} with {backend}" if card.present else "without a card"
    other = " with this kind of drafts" if known else ""
    return MeasuredSteps(tuple(known.items()), f"nobody has noted a speed of this very file {where}{other}")


def predicting(features: Features, speeds: Sequence[MeasuredSpeed], card: CardProfile) -> Features:
    """The same offer, with what a tier's speed can be predicted from; see :func:`measured_steps`."""
    if features.tier is None:
        return features
    steps = measured_steps(speeds, card, features.backend)
    return replace(features, tier=replace(features.tier, steps=steps))


def _step(speed: MeasuredSpeed, tokens: float | None) -> DecodeStep | str:
    circumstances = ShownSpeed(speed, on_this_card=True, on_this_backend=True).circumstances
    measured = f"{speed.tokens_per_s:g} tokens/s measured ({circumstances})"
    if tokens is None:
        return f"{measured}, and nobody has noted how many tokens a step yielded"
    drafted = "" if speed.speculation == WITHOUT_DRAFTS else f", {tokens:g} tokens a step"
    return DecodeStep.from_speed(speed.tokens_per_s, tokens, f"{measured}{drafted}")
