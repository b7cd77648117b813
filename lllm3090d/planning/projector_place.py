"""Whether a projector is worth its place on the card. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

# Share of the window that a projector on the card may cost, as in sizing by others; judgement.
WINDOW_LOSS_LIMIT = Fraction(1, 4)


@dataclass(frozen=True, slots=True)
class ProjectorTrial:
    """What a plan became with the projector in one place.

    Attributes:
        layers_on_host, expert_layers_on_host: what had to leave the card.
        window_tokens: of one slot.
    """

    layers_on_host: int
    expert_layers_on_host: int
    window_tokens: int


def belongs_on_host(on_card: ProjectorTrial, on_host: ProjectorTrial) -> bool:
    """The projector on the card displaces too much: any layer or expert, or more than a quarter of the window.

    Images are rare beside the tokens that follow them, and a projector in host memory only slows images down.
    """
    return (
        on_card.layers_on_host > on_host.layers_on_host
        or on_card.expert_layers_on_host > on_host.expert_layers_on_host
        or on_card.window_tokens < (1 - WINDOW_LOSS_LIMIT) * on_host.window_tokens
    )
