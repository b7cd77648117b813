"""What a checkpoint costs whatever its launch: bytes for a token of context, for a slot, and by place. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind, total
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import LlmError
from lllm3090d.planning.cache import (
    CELL_PADDING_TOKENS,
    CacheShape,
    CacheType,
    cache_shape,
    check_cache_types,
    layer_row_bytes,
    state_bytes,
)
from lllm3090d.planning.compute import card_compute_bytes


@dataclass(frozen=True, slots=True)
class ContextCost:
    """What a token of context takes with one type of cache.

    Attributes:
        bytes_per_token: in the layers whose cache grows with the context.
        window_bytes_per_token: in the sliding layers, for each token in their window.
    """

    bytes_per_token: int
    window_bytes_per_token: int


def context_cost(facts: CheckpointFacts, cache_type: CacheType) -> ContextCost:
    """Bytes of one token with this type for K and V.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION where the engine refuses the type for this model.
    """
    check_cache_types(facts, cache_type, cache_type)
    rows = [
        (layer.kind is LayerKind.SLIDING, layer_row_bytes(layer, cache_type, cache_type))
        for layer in facts.context_layers
    ]
    return ContextCost(
        bytes_per_token=sum(row for slides, row in rows if not slides),
        window_bytes_per_token=sum(row for slides, row in rows if slides),
    )


def state_bytes_per_slot(facts: CheckpointFacts) -> int:
    """Bytes of the recurrent states of one slot, whatever its context; 0 without any."""
    return state_bytes(facts, _least_shape(facts))


def weights_by_place(facts: CheckpointFacts) -> Mapping[str, int]:
    """Bytes of all tensors in the file by use; together :attr:`CheckpointFacts.weight_bytes`."""
    tables, blocks = facts.tables, [layer.weights for layer in facts.trunk]
    others = (tables.input, tables.output_other, tables.rope, *(block.other for block in blocks))
    return {
        "token embedding": tables.token_embedding.stored,
        "per-layer embeddings": tables.per_layer_embeddings.stored,
        "output": tables.output.stored,
        "attention": total(block.attention for block in blocks).stored,
        "feed-forward": total(block.feed_forward for block in blocks).stored,
        "experts": total(block.experts for block in blocks).stored,
        "recurrent": total(block.recurrent for block in blocks).stored,
        "mtp": sum(layer.weight_bytes for layer in facts.mtp_layers),
        "other": total(others).stored,
    }


def unpriced(facts: CheckpointFacts) -> LlmError | None:
    """Why no plan can be made for this model whatever is asked; None where one can."""
    shape = _least_shape(facts)
    try:
        card_compute_bytes(facts, shape, CacheType.F16, CacheType.F16, Backend.CUDA)
    except LlmError as error:
        return error
    return None


def _least_shape(facts: CheckpointFacts) -> CacheShape:
    tokens = CELL_PADDING_TOKENS
    return cache_shape(
        facts, context_tokens=tokens, parallel=1, batch_tokens=tokens, micro_batch_tokens=tokens
    )
