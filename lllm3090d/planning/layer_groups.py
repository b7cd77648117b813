"""Layers that are alike for cache, states and graphs, each kind once with its number. Pure.

A model has dozens of layers and two or three kinds of them, and a plan prices them many times. Every size of a layer is
a whole number of bytes, rounded for each tensor by itself, so a sum over kinds is the sum over layers to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from lllm3090d.checkpoints.facts import BlockWeights, CheckpointFacts, LayerFacts

# Checkpoints whose groups are remembered: more than a library of usual size has, as a list of the models goes through
# all of them.
REMEMBERED_CHECKPOINTS = 512
_ANY_WEIGHTS = BlockWeights()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that differ in their weights alone.

    Attributes:
        layer: one of them, without weights.
        count: how many there are.
    """

    layer: LayerFacts
    count: int


def grouped(layers: Iterable[LayerFacts]) -> tuple[LayerGroup, ...]:
    """The kinds of these layers, in the order of their first ones."""
    counts = Counter(replace(layer, weights=_ANY_WEIGHTS) for layer in layers)
    return tuple(LayerGroup(layer, count) for layer, count in counts.items())


@lru_cache(maxsize=REMEMBERED_CHECKPOINTS)
def all_groups(facts: CheckpointFacts) -> tuple[LayerGroup, ...]:
    """Of all blocks."""
    return grouped(facts.layers)


@lru_cache(maxsize=REMEMBERED_CHECKPOINTS)
def trunk_groups(facts: CheckpointFacts) -> tuple[LayerGroup, ...]:
    """Of the blocks without those for multi-token prediction."""
    return grouped(facts.trunk)


@lru_cache(maxsize=REMEMBERED_CHECKPOINTS)
def mtp_groups(facts: CheckpointFacts) -> tuple[LayerGroup, ...]:
    """Of the blocks for multi-token prediction."""
    return grouped(facts.mtp_layers)


@lru_cache(maxsize=REMEMBERED_CHECKPOINTS)
def context_groups(facts: CheckpointFacts) -> tuple[LayerGroup, ...]:
    """Of the blocks with a place in the main context."""
    return grouped(facts.context_layers)


@lru_cache(maxsize=REMEMBERED_CHECKPOINTS)
def context_groups_from(
    facts: CheckpointFacts, first: int
) -> tuple[tuple[LayerGroup, ...], tuple[LayerGroup, ...]]:
    """Of the blocks with a place in the main context: those from an index on, and those before it."""
    behind, before = (
        grouped(layer for layer in part if layer.in_main_context)
        for part in (facts.layers[first:], facts.layers[:first])
    )
    return behind, before
