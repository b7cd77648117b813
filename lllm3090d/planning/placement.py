"""Which tensors of a checkpoint are on the card and which in host memory, and where its context is. Pure.

As the engine does it: ``-ngl N`` puts the last N layers on the card, the output counting as one of them;
caches and states follow their layer; tables that are only looked up always stay in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerFacts, Memory, WeightBytes, total
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.layer_groups import context_groups_from

# Sums over all tensors, which a search asks for again and again: a placement for each layer of a few checkpoints.
REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Placement:
    """How a checkpoint is shared out between a card and the host.

    Attributes:
        layers_on_card: ``-ngl``, from the last layer, the output included; None for all of them.
        expert_layers_on_host: ``--n-cpu-moe``, from the first layer.
        cache_on_host: ``--no-kv-offload``.
        with_mtp: the blocks for multi-token prediction are loaded.
    """

    layers_on_card: int | None = None
    expert_layers_on_host: int = 0
    cache_on_host: bool = False
    with_mtp: bool = False

    @property
    def is_full(self) -> bool:
        """Everything that can be on the card is there."""
        return self.layers_on_card is None and not self.expert_layers_on_host and not self.cache_on_host

    def first_on_card(self, facts: CheckpointFacts) -> int:
        """Index of the first block on the card; the number of blocks stands for the output."""
        if self.layers_on_card is None:
            return 0
        return max(0, len(facts.layers) + 1 - self.layers_on_card)


EVERYTHING = Placement()
_MEMORY: Mapping[Backend, Memory] = MappingProxyType(
    {Backend.CPU: Memory.HOST, Backend.VULKAN: Memory.VULKAN}
)


@dataclass(frozen=True, slots=True)
class Split:
    """Bytes on the card and in host memory; with backend cpu the host is the card, and ``host`` is 0."""

    card: int
    host: int


def memory_of(backend: Backend) -> Memory:
    """The kind of buffer a backend has on its device; a backend without a known one rounds like CUDA."""
    return _MEMORY.get(backend, Memory.CUDA)


def check_placement(facts: CheckpointFacts, placement: Placement, backend: Backend) -> None:
    """Refuse what cannot be done.

    Raises:
        ValueError: a number is negative.
        LlmError: UNSUPPORTED_COMBINATION for layers on a card without a card, experts of a dense model and
            drafting blocks that are not there.
    """
    if (placement.layers_on_card or 0) < 0 or placement.expert_layers_on_host < 0:
        raise ValueError("numbers of layers are not negative")
    name = facts.title or facts.architecture
    reason = None
    if backend is Backend.CPU and not placement.is_full:
        reason = "without a card there is nothing to share out"
    elif placement.expert_layers_on_host and not facts.expert_count:
        reason = f"{name} has no experts to keep in host memory"
    elif placement.with_mtp and not facts.has_mtp:
        reason = f"{name} has no blocks for multi-token prediction that the engine would load"
    if reason is not None:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"This placement is impossible: {reason}.",
            hint="Leave the placement out to put everything on the card.",
        )


@lru_cache(maxsize=REMEMBERED)
def weights(facts: CheckpointFacts, placement: Placement, backend: Backend) -> Split:
    """Bytes of the weights, as the engine's buffers hold them; raises as :func:`check_placement`."""
    check_placement(facts, placement, backend)
    card, host = _shares(facts, placement, backend)
    if backend is Backend.CPU:
        return Split(card.host + host.host, 0)
    return Split(card.in_memory(memory_of(backend)), host.host)


@lru_cache(maxsize=REMEMBERED)
def largest_host_tensor_bytes(facts: CheckpointFacts, placement: Placement) -> int:
    """The largest matrix of a block in host memory: large batches copy it to the card to compute there."""
    first = placement.first_on_card(facts)
    sizes = [0]
    for index, layer in _loaded(facts, placement):
        if index < first:
            sizes.append(layer.weights.all.largest)
        elif index < placement.expert_layers_on_host:
            sizes.append(layer.weights.experts.largest)
    return max(sizes)


def context(
    facts: CheckpointFacts,
    placement: Placement,
    backend: Backend,
    shape: CacheShape,
    types: tuple[CacheType, CacheType],
) -> Split:
    """Bytes of cache and states of the main context: each where its layer is."""
    first = len(facts.layers) if placement.cache_on_host else placement.first_on_card(facts)
    card, host = (
        cache.groups_kv_bytes(facts, groups, shape, types, memory=where)
        + cache.groups_state_bytes(
            (group for group in groups if not group.layer.is_mtp), shape, memory=where
        )
        for groups, where in zip(
            context_groups_from(facts, first), (memory_of(backend), Memory.HOST), strict=True
        )
    )
    return Split(card + host, 0) if backend is Backend.CPU else Split(card, host)


def _loaded(facts: CheckpointFacts, placement: Placement) -> Iterator[tuple[int, LayerFacts]]:
    """The blocks that are loaded, with their index."""
    for index, layer in enumerate(facts.layers):
        if placement.with_mtp or not layer.is_mtp:
            yield index, layer


def _shares(
    facts: CheckpointFacts, placement: Placement, backend: Backend
) -> tuple[WeightBytes, WeightBytes]:
    """What is on the card and what in host memory; without a card everything is in host memory."""
    tables = facts.tables
    blocks = len(facts.layers)
    first = blocks + 1 if backend is Backend.CPU else placement.first_on_card(facts)
    card: list[WeightBytes] = []
    host = [tables.token_embedding, tables.per_layer_embeddings, tables.input]
    for index, layer in _loaded(facts, placement):
        if index < first:
            host.append(layer.weights.all)
        elif index < placement.expert_layers_on_host:
            host.append(layer.weights.experts)
            card.append(layer.weights.without_experts)
        else:
            card.append(layer.weights.all)
    # RoPE factors have one copy in each memory that has a block.
    if first > 0:
        host.append(tables.rope)
    if first < blocks:
        card.append(tables.rope)
    output = card if first <= blocks else host
    output += [tables.output, tables.output_other]
    if facts.output_is_copied and (first <= blocks or facts.rule.doubles_tied):
        # The output needs its own copy on a card; with some models even beside the embedding.
        output.append(tables.token_embedding)
    return total(card), total(host)
