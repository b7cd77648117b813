"""Compute buffers on a card, ours beside the recorded dry runs of the engine; see :mod:`bench.planning_truth`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from bench._support import table
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache as context
from lllm3090d.planning import compute, placement
from lllm3090d.planning.units import MIB
from tests.unit.engine_truth import TruthRow, priced_models, truth_rows

# What a formula may differ from the engine: the larger of both.
GRAPH_PERCENT, GRAPH_BYTES = 5, 16 * MIB
# What the total of a card may be above the engine's once the margin is added; never below.
TOTAL_PERCENT, TOTAL_BYTES = 3, 96 * MIB

# Architectures whose formula is a bound and no estimate, with the reason.
BOUNDS: Mapping[str, str] = {
    "falcon-h1": "attention and Mamba-2 side by side in every layer: how the engine's allocator packs both changes by"
    " jumps with micro batch, context and cache type; the formula is the worst of them"
}


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """One recorded dry run with everything on a card; bytes.

    Attributes:
        row: the dry run.
        graph: our formula for its compute buffer.
        margin: what a quote adds to it.
        total: weights, context, graph and margin of a quote on the card.
    """

    row: TruthRow
    graph: int
    margin: int
    total: int

    @property
    def error(self) -> int:
        """Of the formula; negative where it is short."""
        return self.graph - self.row.compute_card_bytes

    @property
    def is_close(self) -> bool:
        """The formula is within 5 % or 16 MiB."""
        return abs(self.error) <= max(GRAPH_BYTES, self.row.compute_card_bytes * GRAPH_PERCENT / 100)

    @property
    def engine_total(self) -> int:
        """Weights, context and compute buffer of the engine on the card."""
        return self.row.weights_card_bytes + self.row.context_bytes + self.row.compute_card_bytes

    @property
    def above(self) -> int:
        """By how much the total is above the engine's; negative where it is short."""
        return self.total - self.engine_total

    @property
    def is_covered(self) -> bool:
        """The total is not below the engine's, and at most 3 % or 96 MiB above it."""
        return 0 <= self.above <= max(TOTAL_BYTES, self.engine_total * TOTAL_PERCENT / 100)

    @property
    def reason(self) -> str:
        """Why it need not be close; empty where it has to be."""
        return BOUNDS.get(self.row.facts.architecture, "")


def _check(row: TruthRow) -> GraphCheck:
    facts, shape, types = row.facts, row.shape, row.cache_types
    graph = compute.card_compute_bytes(facts, shape, *types, row.backend, outputs=row.graph_outputs)
    margin = compute.compute_margin_bytes(facts, shape, graph)
    weights = placement.weights(facts, row.placement, row.backend).card
    kept = context.context_bytes(facts, shape, *types, memory=placement.memory_of(row.backend))
    return GraphCheck(row, graph, margin, weights + kept + graph + margin)


@cache
def graph_checks() -> tuple[GraphCheck, ...]:
    """All recorded dry runs of the main context on the stand-ins for cards, flash attention on."""
    return tuple(
        _check(row)
        for row in truth_rows()
        if row.backend is not Backend.CPU
        and row.flash_attention
        and row.model in priced_models()
        and not (row.refused or row.draft_context or row.embeddings)
    )


def graph_table(checks: Iterable[GraphCheck]) -> str:
    """By architecture: errors of the formula with the worst row, and what the total with its margin is above."""
    by_architecture: dict[str, list[GraphCheck]] = {}
    for check in checks:
        by_architecture.setdefault(check.row.facts.architecture, []).append(check)
    heads = (
        "architecture",
        "rows",
        "outside",
        "formula lowest MiB",
        "highest MiB",
        "highest %",
        "total lowest MiB",
        "highest MiB",
        "highest %",
        "of the worst row",
    )
    rows = []
    for architecture, found in sorted(by_architecture.items()):
        worst = max(found, key=lambda check: abs(check.error))
        rows.append(
            (
                architecture,
                str(len(found)),
                str(sum(not check.is_close for check in found)),
                f"{min(check.error for check in found) / MIB:.1f}",
                f"{max(check.error for check in found) / MIB:.1f}",
                f"{max(abs(check.error) / check.row.compute_card_bytes for check in found):.1%}",
                f"{min(check.above for check in found) / MIB:.1f}",
                f"{max(check.above for check in found) / MIB:.1f}",
                f"{max(check.above / check.engine_total for check in found):.1%}",
                str(worst.row),
            )
        )
    return table(heads, rows)
