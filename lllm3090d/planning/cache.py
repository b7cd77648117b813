"""The KV cache: from the command line's values to cells, and from cells to bytes, as the engine lays it out.

Formulas are those of llama.cpp b11434, read in its source and equal to the byte to its own dry runs on CPU
and Vulkan; CUDA rounds some quantised tensors up by less than 40 kB per model, which is left out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerFacts, LayerKind
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.units import round_up

CELL_PADDING_TOKENS = 256  # the engine pads every cache to this many cells
MAX_SLOTS = 256  # sequences one context can hold, a constant of the engine (LLAMA_MAX_SEQ)
CHECKPOINT_CELL_BYTES = 12  # position and sequence of a saved cell, beside its K and V rows


class CacheType(enum.StrEnum):
    """Types of the KV cache, as the engine names them."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"

    @property
    def block_values(self) -> int:
        """Values that share a scale; 1 where nothing is quantised."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, scales included."""
        return _BLOCKS[self][1]

    @property
    def is_quantised(self) -> bool:
        """Values are stored in blocks."""
        return self.block_values > 1

    def row_bytes(self, values: int) -> int:
        """Bytes of one row of so many values, a multiple of the block."""
        return values // self.block_values * self.block_bytes


# Values and bytes of a block of ggml; 34 = 32 one-byte values and an f16 scale, and so on.
_BLOCKS: Mapping[CacheType, tuple[int, int]] = MappingProxyType(
    {
        CacheType.F32: (1, 4),
        CacheType.F16: (1, 2),
        CacheType.BF16: (1, 2),
        CacheType.Q8_0: (32, 34),
        CacheType.Q5_1: (32, 24),
        CacheType.Q5_0: (32, 22),
        CacheType.Q4_1: (32, 20),
        CacheType.Q4_0: (32, 18),
        CacheType.IQ4_NL: (32, 18),
    }
)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the engine makes of ``-c``, ``--parallel``, ``-b`` and ``-ub``: a stream of cells for each slot.

    Attributes:
        context_tokens: cells of all streams, what the engine reports as ``n_ctx``.
        streams: slots; each has a cache of its own, because ``--parallel`` is always given explicitly.
        stream_cells: cells of one stream in a layer with full attention.
        sliding_cells: cells of one stream in a sliding-window layer; 0 without such layers.
        window_tokens: what one slot can hold.
        micro_batch_tokens: tokens computed at once.
    """

    context_tokens: int
    streams: int
    stream_cells: int
    sliding_cells: int
    window_tokens: int
    micro_batch_tokens: int

    def cells(self, kind: LayerKind) -> int:
        """Cells of one stream in a layer of this kind."""
        return self.sliding_cells if kind is LayerKind.SLIDING else self.stream_cells


def cache_shape(
    facts: CheckpointFacts, *, context_tokens: int, parallel: int, batch_tokens: int, micro_batch_tokens: int
) -> CacheShape:
    """The engine's own arithmetic from arguments to cells.

    The micro batch is limited by the context as given, before padding. Each slot gets its share of the
    padded context, padded up again. A sliding layer keeps its window and one micro batch, never more than
    the stream.

    Args:
        facts: the checkpoint.
        context_tokens: ``-c``, at least 1.
        parallel: ``--parallel``, 1 to 256.
        batch_tokens: ``-b``.
        micro_batch_tokens: ``-ub``.

    Raises:
        ValueError: an argument is not positive.
        LlmError: UNSUPPORTED_COMBINATION for more slots than the engine has; BAD_CHECKPOINT for sliding
            layers without a window.
    """
    if min(context_tokens, parallel, batch_tokens, micro_batch_tokens) < 1:
        raise ValueError("context, slots and batches are positive numbers")
    if parallel > MAX_SLOTS:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{parallel} slots were asked for; the engine serves at most {MAX_SLOTS}.",
            hint=f"Ask for {MAX_SLOTS} slots or fewer.",
            parallel=parallel,
            largest_parallel=MAX_SLOTS,
        )
    micro_batch = min(context_tokens, batch_tokens, micro_batch_tokens)
    stream = round_up(round_up(context_tokens, CELL_PADDING_TOKENS) // parallel, CELL_PADDING_TOKENS)
    sliding = 0
    if any(layer.kind is LayerKind.SLIDING for layer in facts.layers):
        if facts.sliding_window_tokens < 1:
            raise LlmError(
                ErrorCode.BAD_CHECKPOINT,
                f"The {facts.architecture} model has sliding-window layers but no window size.",
                hint="Download the model again, or choose another file.",
            )
        sliding = round_up(min(stream, facts.sliding_window_tokens + micro_batch), CELL_PADDING_TOKENS)
    return CacheShape(
        context_tokens=stream * parallel,
        streams=parallel,
        stream_cells=stream,
        sliding_cells=sliding,
        window_tokens=min(stream, facts.trained_context_tokens),
        micro_batch_tokens=micro_batch,
    )


def value_length(layer: LayerFacts) -> int:
    """Values of one V head: K and V have the same number of heads."""
    return layer.v_values // max(1, layer.k_values // layer.key_length)


def layer_row_bytes(layer: LayerFacts, type_k: CacheType, type_v: CacheType) -> int:
    """Bytes of one cell of one layer, K and V together."""
    return type_k.row_bytes(layer.k_values) + type_v.row_bytes(layer.v_values)


def kv_cache_bytes(facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType) -> int:
    """Bytes of the whole KV cache: the row of every layer times its cells times the streams."""
    return sum(
        layer_row_bytes(layer, type_k, type_v) * shape.cells(layer.kind) * shape.streams
        for layer in facts.layers
    )


def context_checkpoint_bytes(
    facts: CheckpointFacts, shape: CacheShape, type_k: CacheType, type_v: CacheType
) -> int:
    """Bytes of one context checkpoint of one slot; 0 for a model without sliding layers, which makes none.

    The engine saves the cells of the window of every sliding layer, with 12 bytes of bookkeeping for each
    cell. Measured on Gemma-3-270M at q8_0: 3.991 MiB, formula 3.990.
    """
    rows = sum(
        layer_row_bytes(layer, type_k, type_v) for layer in facts.layers if layer.kind is LayerKind.SLIDING
    )
    if rows == 0:
        return 0
    return min(shape.stream_cells, facts.sliding_window_tokens) * (rows + CHECKPOINT_CELL_BYTES)


def check_cache_types(facts: CheckpointFacts, type_k: CacheType, type_v: CacheType) -> None:
    """Refuse the cache types with which the engine would give no context.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION when a head is no whole number of quantisation blocks.
    """
    for layer in facts.layers:
        heads = (("K", type_k, layer.key_length), ("V", type_v, value_length(layer)))
        for side, cache_type, head_values in heads:
            if head_values % cache_type.block_values:
                raise LlmError(
                    ErrorCode.UNSUPPORTED_COMBINATION,
                    f"The {side} cache cannot be {cache_type}: heads of this {facts.architecture} model have"
                    f" {head_values} values, no multiple of {cache_type.block_values}.",
                    hint=f"Ask for cache type {CacheType.F16}.",
                    cache_type=str(cache_type),
                    head_values=head_values,
                    block_values=cache_type.block_values,
                )
