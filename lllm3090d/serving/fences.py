"""Hard limits on what a unit takes of its cards, where kernel and driver offer them (:mod:`lllm3090d.gpus.dmem`).

A second fence behind admission: it stops an engine that runs away, and never one that is healthy. So it lies above the
price by what a unit's ``MemoryMax`` has above the price of its host memory, which is more than the difference from
which a measured deviation is told; an engine that needs that much is measured, told and charged long before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.gpus import dmem
from lllm3090d.gpus.readings import Card
from lllm3090d.serving.ledger import Reservation
from lllm3090d.serving.unit_spec import with_slack


@dataclass(frozen=True, slots=True)
class Fence:
    """A limit in force.

    Attributes:
        card: UUID.
        limit_bytes: of that card, for all processes of the unit together.
    """

    card: str
    limit_bytes: int


def fence(
    control_group: str,
    promised: Iterable[Reservation],
    cards: Iterable[Card],
    cgroup: Path = dmem.CGROUP,
) -> tuple[Fence, ...]:
    """Limit a unit to its shares of the cards; those limits that are in force now.

    Args:
        control_group: of the unit.
        promised: what the unit's run was promised.
        cards: of this machine.
        cgroup: where control groups are mounted.
    """
    by_uuid = {card.uuid: card for card in cards}
    made = []
    for share in promised:
        card = by_uuid.get(share.where)
        region = dmem.region_of(card, cgroup) if card is not None else None
        if region is None or share.charged_bytes <= 0:
            continue
        size = with_slack(share.charged_bytes)
        if dmem.limit(control_group, region, size, cgroup):
            made.append(Fence(share.where, size))
    return tuple(made)


def limits(
    control_group: str | None, cards: Iterable[Card], cgroup: Path = dmem.CGROUP
) -> Mapping[str, int]:
    """The limits of a unit that are in force, bytes by UUID."""
    if not control_group:
        return {}
    found = {}
    for card in cards:
        region = dmem.region_of(card, cgroup)
        size = None if region is None else dmem.limit_of(control_group, region, cgroup)
        if size is not None:
            found[card.uuid] = size
    return found
