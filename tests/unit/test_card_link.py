"""The link between host and card, from the reading to the plan of a tiered cache."""

from __future__ import annotations

import pytest

from lllm3090d.engines.arguments import features
from lllm3090d.engines.capabilities import Backend, Capabilities
from lllm3090d.gpus.readings import Card, CardKind, PcieLink
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.planning.tier_speed import LinkSpeed

pytestmark = pytest.mark.unit

FORK = Capabilities("11434 (0000000)", frozenset({"-c", "--kv-vram-cells"}), Backend.CUDA, ("CUDA0",))
HOST = HostMemory(48 << 30, 64 << 30)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (PcieLink(4, 16), LinkSpeed(23_700_000_000, "measured on PCIe 4.0 x16")),
        (PcieLink(3, 4), LinkSpeed(2_953_800_000, "derived: 75 % of PCIe 3.0 x4, not measured")),
        (PcieLink(9, 16), None),
        (None, None),
    ],
)
def test_the_link_of_the_card_is_what_a_tier_is_predicted_with(
    link: PcieLink | None, expected: LinkSpeed | None
) -> None:
    card = Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95.05", link=link)
    room = features(FORK, card, HOST).tier
    assert room is not None
    assert room.link == expected
