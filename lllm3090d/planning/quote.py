"""The quote, what a launch costs as a ledger of line items, and the one function that prices a launch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, compute
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.units import MIB

__all__ = ["MIB", "Evidence", "Launch", "LineItem", "Place", "PlanPolicy", "Quote", "price"]


class Evidence(enum.StrEnum):
    """Where a number comes from, best first; clients must treat an unknown value as the weakest."""

    MEASURED = "measured"  # the peak this machine saw for the same key
    ENGINE = "engine"  # a dry run of this engine build
    HEADER = "header"  # exact layout arithmetic from the GGUF header
    CATALOGUE = "catalogue"  # linear per-token pricing of a model not downloaded yet


class Place(enum.StrEnum):
    """Which memory a line item occupies."""

    CARD = "card"  # memory of the card; host memory where the card is the host (backend cpu)
    HOST = "host"  # memory of the process beside a real card


@dataclass(frozen=True, slots=True)
class LineItem:
    """One term of a quote.

    Attributes:
        name: short and stable, e.g. ``weights`` or ``kv cache``.
        place: which memory.
        bytes: the price; never negative.
        evidence: where the number comes from.
        formula: the arithmetic or constant behind it with its figures, for a person.
    """

    name: str
    place: Place
    bytes: int
    evidence: Evidence
    formula: str


@dataclass(frozen=True, slots=True)
class Quote:
    """The price of one launch, line by line. Preview, admission, launch and display all use this object."""

    items: tuple[LineItem, ...]

    def total_bytes(self, place: Place) -> int:
        """Sum of the items in one place, in bytes."""
        return sum(item.bytes for item in self.items if item.place is place)

    def item(self, name: str) -> LineItem:
        """The item of that name; KeyError when there is none."""
        for item in self.items:
            if item.name == name:
                return item
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """What the settings decide about every launch.

    Attributes:
        cache_type: of K and V, where nobody asks for another.
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        context_checkpoints: of one slot, ``--ctx-checkpoints``.
        prompt_cache_mib: ``--cache-ram``.
        workspace_reserve_mib: least MiB for compute buffer and runtime on a real card.
    """

    cache_type: CacheType
    batch_tokens: int
    micro_batch_tokens: int
    context_checkpoints: int
    prompt_cache_mib: int
    workspace_reserve_mib: int


@dataclass(frozen=True, slots=True)
class Launch:
    """The resolved values of one launch that have a price; the same ones reach the command line.

    Attributes:
        context_tokens: ``-c``, all slots together.
        parallel: ``--parallel``.
        cache_type_k, cache_type_v: ``-ctk`` and ``-ctv``.
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        context_checkpoints: of one slot, ``--ctx-checkpoints``.
        prompt_cache_mib: ``--cache-ram``.
    """

    context_tokens: int
    parallel: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    batch_tokens: int
    micro_batch_tokens: int
    context_checkpoints: int
    prompt_cache_mib: int

    def shape(self, facts: CheckpointFacts) -> CacheShape:
        """What the engine makes of it; raises like :func:`lllm3090d.planning.cache.cache_shape`."""
        return cache.cache_shape(
            facts,
            context_tokens=self.context_tokens,
            parallel=self.parallel,
            batch_tokens=self.batch_tokens,
            micro_batch_tokens=self.micro_batch_tokens,
        )


def price(facts: CheckpointFacts, launch: Launch, backend: Backend, policy: PlanPolicy) -> Quote:
    """Price one launch at evidence ``header``. Nothing else in the daemon prices anything.

    With backend cpu the host is the card, so every item lies on the card. With a real card, all layers are
    on it and the rest of the process is priced as host memory. Terms that do not apply have no item.

    Args:
        facts: the checkpoint.
        launch: the resolved values.
        backend: what the engine computes on: cpu, cuda or vulkan.
        policy: for the workspace reserve.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION, BAD_CHECKPOINT or ENGINE_UNUSABLE where the engine would refuse or
            nothing is known of it.
    """
    cache.check_cache_types(facts, launch.cache_type_k, launch.cache_type_v)
    shape = launch.shape(facts)
    if backend is Backend.CPU:
        return Quote((*_cpu_items(facts, launch, shape), *_process_items(facts, launch, shape, Place.CARD)))
    return Quote(
        (
            *_card_items(facts, launch, shape, backend, policy),
            *_pinned_items(facts, launch, shape),
            *_process_items(facts, launch, shape, Place.HOST),
        )
    )


def _item(name: str, place: Place, size_bytes: int, formula: str) -> LineItem:
    return LineItem(name, place, size_bytes, Evidence.HEADER, formula)


def _cpu_items(facts: CheckpointFacts, launch: Launch, shape: CacheShape) -> list[LineItem]:
    graph = compute.cpu_compute_bytes(facts, shape, launch.cache_type_k, launch.cache_type_v)
    return [
        _item("weights", Place.CARD, facts.weight_bytes, "all tensors of the file"),
        _kv_item(facts, launch, shape),
        _compute_item(facts, shape, graph, "masks + 5 E U + widest of feed-forward, attention, logits"),
        _slack_item(shape),
    ]


def _card_items(
    facts: CheckpointFacts, launch: Launch, shape: CacheShape, backend: Backend, policy: PlanPolicy
) -> list[LineItem]:
    graph = _compute_item(
        facts,
        shape,
        compute.card_compute_bytes(facts, shape, launch.cache_type_k, launch.cache_type_v, backend),
        "masks + 4 E U + widest of feed-forward, attention with f16 copies, logits",
    )
    runtime = compute.runtime_bytes(backend)
    weights = "all tensors but the token embedding"
    if facts.output_is_tied:
        weights += ", and its copy as output"
    items = [
        _item("weights", Place.CARD, compute.weights_on_card_bytes(facts), weights),
        _kv_item(facts, launch, shape),
        graph,
        _item("runtime", Place.CARD, runtime, f"context, BLAS and pools of {backend}: {runtime // MIB} MiB"),
        _slack_item(shape),
    ]
    missing = compute.workspace_missing_bytes(graph.bytes + runtime, policy.workspace_reserve_mib)
    if missing:
        formula = (
            f"compute and runtime raised to {policy.workspace_reserve_mib} MiB, until this build is measured"
        )
        items.append(_item("workspace floor", Place.CARD, missing, formula))
    return items


def _pinned_items(facts: CheckpointFacts, launch: Launch, shape: CacheShape) -> list[LineItem]:
    pinned = compute.host_compute_bytes(facts, shape, launch.cache_type_k, launch.cache_type_v)
    return [
        _item("token embedding", Place.HOST, facts.token_embedding_bytes, "stays in host memory"),
        _item("host compute", Place.HOST, pinned, "masks + 4 E U, pinned"),
    ]


def _process_items(
    facts: CheckpointFacts, launch: Launch, shape: CacheShape, place: Place
) -> list[LineItem]:
    items = [
        _item(
            "output buffer",
            place,
            compute.output_buffer_bytes(facts, shape.streams),
            f"{shape.streams} x {facts.vocabulary_size} words x 4 B",
        )
    ]
    each = cache.context_checkpoint_bytes(facts, shape, launch.cache_type_k, launch.cache_type_v)
    checkpoints = each * launch.context_checkpoints * shape.streams
    if checkpoints:
        formula = (
            f"slots {shape.streams} x {launch.context_checkpoints} checkpoints x {each} B of sliding window"
        )
        items.append(_item("context checkpoints", place, checkpoints, formula))
    if launch.prompt_cache_mib:
        formula = f"limit of finished prompts: {launch.prompt_cache_mib} MiB"
        items.append(_item("prompt cache", place, launch.prompt_cache_mib * MIB, formula))
    formula = f"code, heap, vocabulary, threads: {compute.PROCESS_BYTES // MIB} MiB"
    items.append(_item("process", place, compute.PROCESS_BYTES, formula))
    return items


def _kv_item(facts: CheckpointFacts, launch: Launch, shape: CacheShape) -> LineItem:
    size = cache.kv_cache_bytes(facts, shape, launch.cache_type_k, launch.cache_type_v)
    sliding = sum(layer.kind is LayerKind.SLIDING for layer in facts.layers)
    parts = []
    for count, cells in ((len(facts.layers) - sliding, shape.stream_cells), (sliding, shape.sliding_cells)):
        if count:
            parts.append(f"{count} layers x {shape.streams} x {cells} cells")
    formula = f"{' + '.join(parts)}, K {launch.cache_type_k}, V {launch.cache_type_v}"
    return _item("kv cache", Place.CARD, size, formula)


def _compute_item(facts: CheckpointFacts, shape: CacheShape, graph_bytes: int, formula: str) -> LineItem:
    margin = compute.compute_margin_bytes(facts, shape, graph_bytes)
    tokens = compute.graph_tokens(shape)
    text = f"{formula}, {tokens} tokens: {graph_bytes} B; + E U + {compute.MARGIN_PERCENT} % margin"
    return _item("compute", Place.CARD, graph_bytes + margin, text)


def _slack_item(shape: CacheShape) -> LineItem:
    size = compute.slack_bytes(shape.context_tokens)
    return _item(
        "slack", Place.CARD, size, f"unaccounted for, at {shape.context_tokens} tokens: {size // MIB} MiB"
    )
