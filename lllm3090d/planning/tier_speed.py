"""How fast a tiered cache is beyond its line: a prediction with its evidence. Pure.

Beyond the line every step reads all used host cells once over the bus:

    tokens/s = a / (t0 + (depth - N) c / B)

with a tokens per step (1 and the accepted drafts), t0 the time of a step within VRAM, N the line, c bytes of a cell in
all layers and B bytes/s of the bus. Against published measurements of three cards it is within 7 %, with longer
drafts beyond the line within 20 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lllm3090d.gpus.readings import LANE_BYTES_PER_S

GB = 10**9
WIDTHS = (1, 2, 4, 8, 16)
# What copying host cells reached, by generation and width: RTX 4070; RTX 3090 and 2060 SUPER (12.5 to 13).
MEASURED_LINKS: Mapping[tuple[int, int], int] = MappingProxyType(
    {(4, 16): 23_700_000_000, (3, 16): 12_500_000_000, (4, 8): 12_500_000_000}
)
WITHOUT_DRAFTS = "none"  # how a catalogue names it
LINK_PERCENT = 75  # of the nominal rate that the measured links reach (75 and 79)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What a bus gives when host cells are copied: bytes/s, and whether somebody measured it."""

    bytes_per_s: int
    evidence: str


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step of generation while everything it reads is in VRAM.

    Attributes:
        tokens: per step, 1 without drafting.
        seconds: of a step.
        evidence: who measured it, on what.
    """

    tokens: float
    seconds: float
    evidence: str

    def __post_init__(self) -> None:
        """A step yields at least its own token and takes time."""
        if not (self.tokens >= 1 and self.seconds > 0):
            raise ValueError(f"no such step: {self}")

    @classmethod
    def from_speed(cls, tokens_per_s: float, tokens: float, evidence: str) -> DecodeStep:
        """From a speed measured within VRAM, best near the line.

        Raises:
            ValueError: the speed is not positive, or a step yields less than one token.
        """
        if not tokens_per_s > 0:
            raise ValueError("a speed is positive")
        return cls(tokens, tokens / tokens_per_s, evidence)

    @property
    def tokens_per_s(self) -> float:
        """Within VRAM."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What is known of steps within VRAM of one model on one card, by how it drafts.

    Attributes:
        known: name of the speculation and the step, or why its measurement is of no use here.
        otherwise: why there is no step for any other speculation; a clause for a person.
    """

    known: tuple[tuple[str, DecodeStep | str], ...] = ()
    otherwise: str = "nobody has measured the model on this card"

    def of(self, speculation: str) -> DecodeStep | str:
        """The step with this speculation, ``none`` or as in ``mtp``; why there is none, where there is none."""
        return dict(self.known).get(speculation, self.otherwise)


def link_speed(generation: int, width: int) -> LinkSpeed | None:
    """What a PCIe link of this generation and width gives; None for one that does not exist or is unknown."""
    measured = MEASURED_LINKS.get((generation, width))
    if measured is not None:
        return LinkSpeed(measured, f"measured on PCIe {generation}.0 x{width}")
    lane = LANE_BYTES_PER_S.get(generation)
    if lane is None or width not in WIDTHS:
        return None
    nominal = f"{LINK_PERCENT} % of PCIe {generation}.0 x{width}"
    return LinkSpeed(lane * width * LINK_PERCENT // 100, f"derived: {nominal}, not measured")


def tokens_per_s(
    step: DecodeStep, link: LinkSpeed, *, depth_tokens: int, line_tokens: int, cell_bytes: int
) -> float:
    """Predicted speed of one conversation at a depth; up to the line, that within VRAM.

    With several slots the depth is that of the pool: the highest cell in use, whoever owns it.

    Args:
        step: within VRAM.
        link: between host and card.
        depth_tokens: cells in use.
        line_tokens: cells in VRAM.
        cell_bytes: of one cell in all layers.
    """
    beyond = max(0, depth_tokens - line_tokens)
    return step.tokens / (step.seconds + beyond * cell_bytes / link.bytes_per_s)
