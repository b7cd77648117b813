"""Other programs' published formulas beside ours, held against the engine's own dry runs.

    python -m bench.rivals

Every formula is written down here from what its program publishes, with the state it was in; given the same file and
the same values, it says how many bytes of the card a context takes and what a launch takes in total. The truth is
every recorded dry run with all layers on a stand-in card, flash attention on, and the outputs of a server. The total is
weights, context and compute buffer; what the process holds beside them is in no dry run, so our own total is without
it too. Ours is what is charged: the graph with its margin.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lllm3090d.checkpoints.facts import Graph, LayerFacts, LayerKind
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, compute, placement
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.quote import MIB
from tests.unit.engine_truth import TruthRow, truth_rows

F16_BYTES = 2
Q8_0_BITS = 8
KNOWN_TYPES = (CacheType.F16, CacheType.Q8_0, CacheType.Q4_0)  # that all formulas tell apart


@dataclass(frozen=True, slots=True)
class Case:
    """What a formula is given.

    Attributes:
        file_bytes: size of the file.
        blocks: ``block_count``.
        heads, kv_heads: of the widest layer, where they differ.
        embedding_length: values.
        key_length: values of a head of the cache.
        context_tokens: of all slots together.
        cache_bits: of a value, without scales: 4, 8 or 16.
        full_layers: those whose cache grows with the context.
        has_latent: it has latent attention.
        has_mtp: blocks for multi-token prediction are loaded.
        backend: of the card.
    """

    file_bytes: int
    blocks: int
    heads: int
    kv_heads: int
    embedding_length: int
    key_length: int
    context_tokens: int
    cache_bits: int
    full_layers: int
    has_latent: bool = False
    has_mtp: bool = False
    backend: Backend = Backend.VULKAN


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes; the context is None where a formula gives only the total."""

    context: int | None
    total: int


@dataclass(frozen=True, slots=True)
class Rival:
    """A program, the state of its formula, and the formula, which gives None where it does not apply."""

    name: str
    state: str
    estimate: Callable[[Case], Estimate | None]


def ollama(case: Case) -> Estimate:
    """The file and an f16 cache: every block attends to everything, heads are embedding / heads wide."""
    values = case.kv_heads * (case.embedding_length // case.heads)
    context = case.context_tokens * case.blocks * 2 * values * F16_BYTES
    return Estimate(context, case.file_bytes + context)


def localai(case: Case) -> Estimate:
    """The file, bytes of a value x embedding x KV heads x tokens, 4 % of the file, 0.15 GB."""
    value_bytes = max(1, case.cache_bits // 8)
    context = value_bytes * case.embedding_length * case.kv_heads * case.context_tokens
    return Estimate(context, case.file_bytes + context + int(0.04 * case.file_bytes + 0.15e9))


def textgen(case: Case) -> Estimate:
    """A curve fitted to measurements, in MiB; knows no terms, only a total."""
    each = case.file_bytes / MIB / case.blocks - 17.99552795246051
    each += 3.148552680382576e-05 * case.kv_heads * case.cache_bits * case.context_tokens
    bend = math.floor(50.77817218646521 * case.embedding_length / case.context_tokens) + 9.987899908205632
    more = max(0.9690636483914102, case.cache_bits - bend)
    return Estimate(None, int((each * (case.blocks + more) + 1516.522943869404) * MIB))


def lllm3090(case: Case) -> Estimate | None:
    """The file and a linear price of a token for layers that grow; states and windows cost nothing.

    Only for q8_0, and not for latent attention. The total has its workspace of 1 GiB for the compute buffer.
    """
    if case.cache_bits != Q8_0_BITS or case.has_latent:
        return None
    layer = 2 * case.kv_heads * case.key_length * F16_BYTES * 0.53125
    price = layer * case.full_layers + (layer * 1.25 if case.has_mtp else 0)
    price *= 1.0541176470588236 * (1.136 if case.backend is Backend.CUDA else 1)
    context = int(price * case.context_tokens)
    return Estimate(context, case.file_bytes + context + 1024 * MIB)


RIVALS = (
    Rival("Ollama", "August 2026", ollama),
    Rival("LocalAI", "pkg/vram, commit 032039b", localai),
    Rival("text-generation-webui", "fitted formula as published", textgen),
    Rival("lllm3090", "September 2026, catalogue price", lllm3090),
)


def case_of(row: TruthRow) -> Case:
    """What the formulas are given for a recorded dry run."""
    facts = row.facts
    attending = [layer for layer in facts.layers if layer.k_values] or list(facts.layers)
    growing = [layer for layer in facts.trunk if layer.kind in (LayerKind.FULL, LayerKind.LATENT)]
    widest = max(growing or attending, key=lambda layer: layer.k_values)
    return Case(
        file_bytes=facts.file_bytes,
        blocks=len(facts.layers),
        heads=max(1, *(layer.head_count for layer in facts.layers)),
        kv_heads=max(1, *map(_kv_heads, facts.layers)),
        embedding_length=facts.embedding_length,
        key_length=max(1, widest.key_length),
        context_tokens=row.n_ctx,
        cache_bits={4: 4, 8: 8}.get(
            int(8 * row.cache_type_k.block_bytes / row.cache_type_k.block_values), 16
        ),
        full_layers=len(growing),
        has_latent=facts.latent is not None,
        has_mtp=row.mtp,
        backend=row.backend,
    )


def _kv_heads(layer: LayerFacts) -> int:
    return layer.k_values // layer.key_length if layer.key_length else 0


def ours(row: TruthRow) -> Estimate:
    """Our own context and total for a recorded dry run."""
    facts, shape, types = row.facts, row.shape, row.cache_types
    context = cache.context_bytes(facts, shape, *types, memory=placement.memory_of(row.backend))
    weights = placement.weights(facts, row.placement, row.backend).card
    graph = compute.card_compute_bytes(facts, shape, *types, row.backend, outputs=row.graph_outputs)
    return Estimate(context, weights + context + graph + compute.compute_margin_bytes(facts, shape, graph))


def compared_rows() -> tuple[TruthRow, ...]:
    """The dry runs of a launch as a server makes it, with everything on a card."""
    return tuple(
        row
        for row in truth_rows()
        if row.backend in (Backend.CUDA, Backend.VULKAN)
        and row.outputs
        and row.flash_attention
        and row.cache_type_k is row.cache_type_v
        and row.cache_type_k in KNOWN_TYPES
        and not (row.refused or row.draft_context or row.embeddings)
        and row.context_bytes
        and row.facts.rule.graph is not Graph.NONE
    )


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one formula: below 0 too little."""

    name: str
    context: tuple[float, ...]
    total: tuple[float, ...]


def errors(rows: Sequence[TruthRow]) -> list[Errors]:
    """Of every rival, and ours last."""

    def of(name: str, formula: Callable[[TruthRow], Estimate | None]) -> Errors:
        found = [(row, estimate) for row in rows if (estimate := formula(row)) is not None]
        return Errors(
            name,
            tuple(each.context / row.context_bytes - 1 for row, each in found if each.context is not None),
            tuple(each.total / total_bytes(row) - 1 for row, each in found),
        )

    def guess(rival: Rival) -> Callable[[TruthRow], Estimate | None]:
        return lambda row: rival.estimate(case_of(row))

    rivals = [of(f"{rival.name} ({rival.state})", guess(rival)) for rival in RIVALS]
    return [*rivals, of("lllm3090d", ours)]


def group_of(row: TruthRow) -> str:
    """How a model keeps its context, in the words of the table."""
    facts = row.facts
    if facts.latent is not None:
        return "latent attention"
    if facts.keeps_state:
        return "with recurrent states"
    return "with sliding windows" if facts.sliding_window_tokens else "full attention"


def total_bytes(row: TruthRow) -> int:
    """What the engine puts on the card."""
    return row.weights_card_bytes + row.context_bytes + row.compute_card_bytes


def _columns(found: tuple[float, ...]) -> str:
    if not found:
        return f"{'-':>7} {'-':>8} {'-':>9}"
    median = statistics.median(map(abs, found))
    return f"{median:>7.1%} {min(found):>+8.1%} {max(found):>+9.0%}"


def print_errors(title: str, rows: Sequence[TruthRow]) -> None:
    """Print one table."""
    models = len({row.model for row in rows})
    print(f"\n{title}: {len(rows)} dry runs of {models} models")
    print(f"{'':58}{'context':>26} | {'total':>26}")
    heads = f"{'median':>7} {'lowest':>8} {'highest':>9}"
    print(f"{'formula':52} {'rows':>5} {heads} | {heads}")
    for found in errors(rows):
        print(f"{found.name:52} {len(found.total):>5} {_columns(found.context)} | {_columns(found.total)}")


def main() -> int:
    """Print a table of all rows, and one for each way of keeping context."""
    rows = compared_rows()
    print_errors("all", rows)
    for group in sorted({group_of(row) for row in rows}):
        print_errors(group, [row for row in rows if group_of(row) == group])
    print("\nmedian: of the absolute errors; lowest and highest: below 0 the formula says too little.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
