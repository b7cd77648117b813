"""What each of several cards needs to compute its part of a graph: upper bounds. Pure.

With ``--split-mode layer`` and everything on cards, llama.cpp b11434 overlaps micro batches, and for that keeps four
copies of every input of a card: masks, rows of the embedding, what the card before hands over. How the allocator packs
a graph around inputs that stay cannot be told from the outside, so the numbers of rows below are those that no dry run
with stand-ins for cards exceeded.
"""

from __future__ import annotations

from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts, Graph
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import compute
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.layer_groups import trunk_groups
from lllm3090d.planning.placement import Placement

INPUT_COPIES = 4  # GGML_SCHED_MAX_COPIES, which nothing but a build of its own changes
# Rows as wide as the embedding beside the graph of a single card. The first card has copies of three kinds of input
# rows (of tokens, given ones, their mixture), the others of the rows that the card before hands over.
FIRST_RESIDUALS = 14
LATER_RESIDUALS = 9
DRAFT_RESIDUALS = 8
HOST_RESIDUALS = 8
HOST_RESIDUALS_IN_STEP = 2  # where micro batches do not overlap
ALTUP_RESIDUALS = 46  # several streams of rows, and what they are mixed from
ALTUP_PER_LAYER_COPIES = (
    6  # of the embeddings of all layers, beside those that the graph has on a single card
)


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """The graph of a launch, of which each card computes a part.

    Attributes:
        facts: the checkpoint.
        shape: of the context.
        types: of K and V.
        backend: of all cards.
        overlaps: micro batches overlap, see :func:`overlaps`.
        states_on_host: the cards read states from there, ``--no-kv-offload``.
    """

    facts: CheckpointFacts
    shape: CacheShape
    types: tuple[CacheType, CacheType]
    backend: Backend
    overlaps: bool
    states_on_host: bool = False

    def bytes(self, outputs: int) -> int:
        """The widest part of the graph, as if a card had all layers; ``outputs`` are 0 without the output."""
        return compute.card_compute_bytes(self.facts, self.shape, *self.types, self.backend, outputs=outputs)

    @property
    def copies(self) -> int:
        """Of each input of a card."""
        return INPUT_COPIES if self.overlaps else 1

    def inputs_bytes(self, *, first: bool, last: bool) -> int:
        """What a card needs beside that for what comes from the host and goes from card to card."""
        copies = self.copies
        size = (copies - 1) * self._masks_bytes + copies * self._handed_states_bytes(first=first, last=last)
        size += (1 + self.states_on_host) * self._state_bytes
        if not self.overlaps:
            return size
        size += (FIRST_RESIDUALS if first else LATER_RESIDUALS) * self._row_bytes
        if self.facts.rule.graph is Graph.ALTUP:
            return size + ALTUP_RESIDUALS * self._row_bytes + ALTUP_PER_LAYER_COPIES * self._per_layer_bytes
        return size + (copies - 1) * self._per_layer_bytes

    def draft_inputs_bytes(self) -> int:
        """The same for the context of the model's own draft, whose blocks are on one card."""
        return (
            (INPUT_COPIES - 1) * self._masks_bytes + DRAFT_RESIDUALS * self._row_bytes
            if self.overlaps
            else 0
        )

    def host_inputs_bytes(self) -> int:
        """What the host keeps of them beside what it has with a single card."""
        if not self.overlaps:
            return HOST_RESIDUALS_IN_STEP * self._row_bytes + self._state_bytes
        return (INPUT_COPIES - 1) * self._masks_bytes + HOST_RESIDUALS * self._row_bytes

    @property
    def _masks_bytes(self) -> int:
        return compute.mask_bytes(self.facts, self.shape, *self.types)

    @property
    def _state_bytes(self) -> int:
        """Of the largest layer with states, those of all slots: a copy of them is in the way of small graphs."""
        rows = self.shape.slots * self.shape.state_planes * compute.F32_BYTES
        return rows * max((group.layer.state_values for group in trunk_groups(self.facts)), default=0)

    @property
    def _row_bytes(self) -> int:
        """One f32 row as wide as the embedding for each token of the graph."""
        return self._values_bytes(self.facts.embedding_length)

    @property
    def _per_layer_bytes(self) -> int:
        return self._values_bytes(self.facts.per_layer_embedding_values * len(self.facts.trunk))

    def _handed_states_bytes(self, *, first: bool, last: bool) -> int:
        """Of a Mamba block that a card begins with: the card before reshapes a half of its input, and hands it back.

        Charged wherever there are such blocks. Linear attention has nothing of that kind.
        """
        widths = self.facts.state_space
        if widths is None or self.facts.rule.graph is Graph.GATED_ATTENTION:
            return 0
        wide = 2 * widths.inner
        if widths.groups:  # Mamba-2
            wide += 2 * widths.groups * widths.state + widths.heads
        return self._values_bytes((0 if last else widths.inner) + (0 if first else wide))

    def _values_bytes(self, values: int) -> int:
        return values * compute.F32_BYTES * compute.graph_tokens(self.shape)


def overlaps(where: Placement) -> bool:
    """Micro batches overlap on several cards: only where nothing is left in host memory."""
    return where.is_full
