"""Where a plan lies on a machine with several cards: part by part, and what those cards can give together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lllm3090d.gpus.readings import Card
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.quote import Place
from lllm3090d.planning.reserves import Budget
from lllm3090d.wire_plans import CardPartView


@dataclass(frozen=True, slots=True)
class Placed:
    """Of one plan.

    Attributes:
        parts: of each of its cards, in the order of the engine's devices; () on a machine with one card.
        budget: what these cards can give together.
        environment: variables by which the engine is kept to them, as ``NAME=value``.
    """

    parts: tuple[CardPartView, ...]
    budget: Budget
    environment: tuple[str, ...] = ()


def number_name(cards: Sequence[Card], uuid: str) -> str:
    """A card by its number on this machine, which ``--gpu`` takes; so plans name it, whatever an engine calls it."""
    return f"GPU{[card.uuid for card in cards].index(uuid)}"


def parts_of(plan: Plan, cards: Sequence[Card], uuids: Sequence[str]) -> tuple[CardPartView, ...]:
    """What a plan takes of each of its cards; () on a machine with one card.

    Args:
        plan: the plan.
        cards: of the machine, in the order of their numbers.
        uuids: of the plan's cards, in the order of its devices.
    """
    if len(cards) < 2:
        return ()
    known = {card.uuid: card for card in cards}
    sizes: tuple[int, ...] = (plan.quote.total_bytes(Place.CARD),)
    layers: tuple[int | None, ...] = (None,)
    if plan.split is not None and len(plan.split.devices) == len(uuids) > 1:
        sizes, layers = plan.split.needs_bytes, plan.split.shares
    return tuple(
        CardPartView(
            uuid=uuid, name=number_name(cards, uuid), card=known[uuid].name, layers=count, bytes=size
        )
        for uuid, size, count in zip(uuids, sizes, layers, strict=True)
        if uuid in known
    )


def together(named: Sequence[tuple[str, Budget]]) -> Budget:
    """What several cards can give, line by line, each line with the name of its card; of one card its own lines."""
    if len(named) == 1:
        return named[0][1]
    lines = tuple(
        replace(line, name=f"{name} {line.name}") for name, budget in named for line in budget.deciding_lines
    )
    budgets = [budget for _, budget in named]
    return Budget(
        lines=lines,
        live_lines=lines,
        desktop_bytes=sum(budget.desktop_bytes for budget in budgets),
        foreign_bytes=sum(budget.foreign_bytes for budget in budgets),
    )
