"""The KV cache: from the command line's values to cells, and from cells to bytes, as the engine lays it out.

Formulas are those of llama.cpp b11434, read in its source and equal to the byte to its own dry runs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lllm3090d.checkpoints.facts import (
    CheckpointFacts,
    LayerFacts,
    LayerKind,
    Memory,
    aligned,
    row_padding_bytes,
)
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.layer_groups import (
    LayerGroup,
    all_groups,
    context_groups,
    mtp_groups,
    trunk_groups,
)
from lllm3090d.planning.units import round_up

CELL_PADDING_TOKENS = 256  # the engine pads every cache to this many cells
MAX_TOKENS = (1 << 31) - 1  # the engine reads its options as signed 32-bit numbers
MAX_SLOTS = 256  # sequences one context can hold, a constant of the engine (LLAMA_MAX_SEQ)
DRAFT_WINDOW_PADDING_TOKENS = 256  # what a windowed draft context keeps beside its window and batches
STATE_VALUE_BYTES = 4  # states are f32, whatever the type of the cache


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
    """What the engine makes of ``-c``, ``--parallel``, ``-b``, ``-ub`` and the options of its pool.

    Attributes:
        context_tokens: cells of all streams, what the engine reports as ``n_ctx``.
        slots: sequences it serves at once.
        streams: pools; one for each slot, or a single one that they share (``--kv-unified``).
        stream_cells: cells of one stream in a layer with full attention, ``n_ctx_seq``.
        sliding_cells: cells of one stream in a sliding-window layer; 0 without such layers.
        window_tokens: what one slot can hold.
        micro_batch_tokens: tokens computed at once.
        state_planes: copies of a recurrent state for each slot: 1, and one for each token that may be
            taken back.
    """

    context_tokens: int
    slots: int
    streams: int
    stream_cells: int
    sliding_cells: int
    window_tokens: int
    micro_batch_tokens: int
    state_planes: int = 1

    def cells(self, kind: LayerKind) -> int:
        """Cells of one stream in a layer of this kind."""
        match kind:
            case LayerKind.SLIDING:
                return self.sliding_cells
            case LayerKind.FULL | LayerKind.LATENT:
                return self.stream_cells
        return 0


def cache_shape(
    facts: CheckpointFacts,
    *,
    context_tokens: int | None,
    parallel: int,
    batch_tokens: int,
    micro_batch_tokens: int,
    unified: bool = False,
    swa_full: bool = False,
    rollback_tokens: int = 0,
    slot_tokens: int = 0,
) -> CacheShape:
    """The engine's own arithmetic from arguments to cells.

    The micro batch is limited by the context as given, before padding. Each slot gets its share of the
    padded context, padded up again, or all slots share one pool. A sliding layer keeps the windows of the
    sequences in its pool and one micro batch, never more than the stream.

    Args:
        facts: the checkpoint.
        context_tokens: ``-c``; 0 for the trained length, None where the option is left out, which gives each slot
            ``slot_tokens``, or all of them the trained length.
        parallel: ``--parallel``, 1 to 256.
        batch_tokens: ``-b``.
        micro_batch_tokens: ``-ub``.
        unified: ``--kv-unified``.
        swa_full: ``--swa-full``, which gives sliding layers the whole context.
        rollback_tokens: longest draft that must be taken back; without effect on models that cannot.
        slot_tokens: ``--kv-unified-per-slot``, the longest window of a slot, whatever the pool; 0 where it is not
            given.

    Raises:
        ValueError: a number that no option can have: negative, 0 where that has no meaning, or beyond 2^31.
        LlmError: UNSUPPORTED_COMBINATION for more slots than the engine has, and for a context or a batch with
            less than a token for each slot; BAD_CHECKPOINT for sliding layers without a window.
    """
    asked = 0 if context_tokens is None else context_tokens
    if context_tokens is None and slot_tokens:
        asked = parallel * slot_tokens
    if min(parallel, batch_tokens, micro_batch_tokens) < 1:
        raise ValueError("slots and batches are positive numbers")
    if min(asked, rollback_tokens, slot_tokens) < 0:
        raise ValueError("a context, a draft and a slot's window are no negative numbers")
    if max(asked, batch_tokens, micro_batch_tokens, slot_tokens) > MAX_TOKENS:
        raise ValueError(f"the engine has no context or batch of more than {MAX_TOKENS} tokens")
    context = asked or facts.trained_context_tokens
    check_slots(parallel, context, batch_tokens)
    micro_batch = min(context, batch_tokens, micro_batch_tokens)
    streams = 1 if unified else parallel
    stream = stream_cells(context, streams)
    sliding = 0
    if any(group.layer.kind is LayerKind.SLIDING for group in all_groups(facts)):
        if facts.sliding_window_tokens < 1:
            raise LlmError(
                ErrorCode.BAD_CHECKPOINT,
                f"The {facts.architecture} model has sliding-window layers but no window size.",
                hint="Download the model again, or choose another file.",
            )
        windows = facts.sliding_window_tokens * (parallel if unified else 1)
        sliding = stream if swa_full else round_up(min(stream, windows + micro_batch), CELL_PADDING_TOKENS)
    return CacheShape(
        context_tokens=stream * streams,
        slots=parallel,
        streams=streams,
        stream_cells=stream,
        sliding_cells=sliding,
        window_tokens=min(stream, slot_tokens or stream, facts.trained_context_tokens),
        micro_batch_tokens=micro_batch,
        state_planes=1 + (rollback_tokens if facts.rolls_back else 0),
    )


def stream_cells(context_tokens: int, streams: int) -> int:
    """Cells of each of so many pools: its share of the padded context, padded up again."""
    return round_up(round_up(context_tokens, CELL_PADDING_TOKENS) // streams, CELL_PADDING_TOKENS)


def check_slots(parallel: int, context_tokens: int | None = None, batch_tokens: int | None = None) -> None:
    """Refuse slots that the engine has no sequence or no token of a batch for.

    It computes one token of every slot at once: with a smaller batch its own assertion ends it. A batch is never
    larger than the context, so with a smaller context the library ends in the same way (its dry run does).
    """
    reason = None
    if parallel > MAX_SLOTS:
        reason = f"the engine serves at most {MAX_SLOTS}"
        hint = f"Ask for {MAX_SLOTS} slots or fewer."
    elif context_tokens is not None and context_tokens < parallel:
        reason = f"a context of {context_tokens} tokens has less than one for each"
        hint = f"Ask for a context of at least {parallel} tokens, or for fewer slots."
    elif batch_tokens is not None and batch_tokens < parallel:
        reason = f"a batch of {batch_tokens} tokens has less than one for each, and the engine aborts"
        hint = f"Ask for a batch of at least {parallel} tokens, or for fewer slots."
    if reason is not None:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{parallel} slots were asked for; {reason}.",
            hint=hint,
            parallel=parallel,
            largest_parallel=min(MAX_SLOTS, context_tokens or MAX_SLOTS, batch_tokens or MAX_SLOTS),
        )


def layer_row_bytes(layer: LayerFacts, type_k: CacheType, type_v: CacheType) -> int:
    """Bytes of one cell of one layer: K, V and, with a sparse-attention indexer, its keys."""
    return (
        type_k.row_bytes(layer.k_values)
        + type_v.row_bytes(layer.v_values)
        + type_k.row_bytes(layer.index_values)
    )


def layer_kv_bytes(
    facts: CheckpointFacts,
    layer: LayerFacts,
    shape: CacheShape,
    types: tuple[CacheType, CacheType],
    *,
    memory: Memory = Memory.HOST,
    flash_attention: bool = True,
) -> int:
    """Bytes of the KV cache of one layer: its row times its cells times the streams.

    CUDA lengthens each quantised tensor to rows of 512 values. Without flash attention every V row is as
    wide as the widest.

    Args:
        facts: the checkpoint the layer belongs to.
        layer: one of its layers.
        shape: of the context.
        types: of K and V.
        memory: where the layer is.
        flash_attention: ``-fa on``, as every launch has it.
    """
    cells = shape.cells(layer.kind) * shape.streams
    v_values = layer.v_values if flash_attention or not layer.v_values else facts.widest_v_values
    rows = ((types[0], layer.k_values), (types[1], v_values), (types[0], layer.index_values))
    return sum(
        aligned(kind.row_bytes(values) * cells + _padding(kind, values, memory), memory)
        for kind, values in rows
        if values and cells
    )


def _padding(cache_type: CacheType, values: int, memory: Memory) -> int:
    if memory is not Memory.CUDA:
        return 0
    return row_padding_bytes(values, cache_type.block_values, cache_type.block_bytes)


def layer_state_bytes(layer: LayerFacts, shape: CacheShape, *, memory: Memory = Memory.HOST) -> int:
    """Bytes of the recurrent state of one layer: all slots, all planes; independent of the context."""
    rows = shape.slots * shape.state_planes * STATE_VALUE_BYTES
    return aligned(layer.conv_values * rows, memory) + aligned(layer.state_values * rows, memory)


def kv_cache_bytes(
    facts: CheckpointFacts,
    shape: CacheShape,
    type_k: CacheType,
    type_v: CacheType,
    *,
    memory: Memory = Memory.HOST,
    flash_attention: bool = True,
) -> int:
    """Bytes of the KV cache of the trunk; see :func:`layer_kv_bytes`."""
    return groups_kv_bytes(
        facts, context_groups(facts), shape, (type_k, type_v), memory=memory, flash_attention=flash_attention
    )


def groups_kv_bytes(
    facts: CheckpointFacts,
    groups: Iterable[LayerGroup],
    shape: CacheShape,
    types: tuple[CacheType, CacheType],
    *,
    memory: Memory = Memory.HOST,
    flash_attention: bool = True,
) -> int:
    """Bytes of the KV cache of some layers; see :func:`layer_kv_bytes`."""
    return sum(
        group.count
        * layer_kv_bytes(facts, group.layer, shape, types, memory=memory, flash_attention=flash_attention)
        for group in groups
    )


def state_bytes(facts: CheckpointFacts, shape: CacheShape, *, memory: Memory = Memory.HOST) -> int:
    """Bytes of all recurrent states of the trunk; see :func:`layer_state_bytes`."""
    return groups_state_bytes(trunk_groups(facts), shape, memory=memory)


def groups_state_bytes(
    groups: Iterable[LayerGroup], shape: CacheShape, *, memory: Memory = Memory.HOST
) -> int:
    """Bytes of the recurrent states of some layers; see :func:`layer_state_bytes`."""
    return sum(group.count * layer_state_bytes(group.layer, shape, memory=memory) for group in groups)


def context_bytes(
    facts: CheckpointFacts,
    shape: CacheShape,
    type_k: CacheType,
    type_v: CacheType,
    *,
    memory: Memory = Memory.HOST,
    flash_attention: bool = True,
) -> int:
    """What the engine reports as context: cache and states of the trunk."""
    kv = kv_cache_bytes(facts, shape, type_k, type_v, memory=memory, flash_attention=flash_attention)
    return kv + state_bytes(facts, shape, memory=memory)


def draft_shape(shape: CacheShape, *, window_tokens: int, batch_tokens: int) -> CacheShape:
    """The shape of the draft context of a model that drafts for itself: that of the main one, or a window.

    With ``--spec-draft-window W`` it keeps the last W tokens of each slot and, padded to whole cells, two
    batches and 256 tokens more, where that is less than the main context. llama.cpp b11434 does not have
    that flag, so it always is as large as the main context there.

    Args:
        shape: of the main context.
        window_tokens: W; 0 for the whole context.
        batch_tokens: ``-b``.

    Raises:
        ValueError: a negative window, or a batch that is not positive.
    """
    if window_tokens < 0 or batch_tokens < 1:
        raise ValueError("a draft window is not negative and a batch is positive")
    if window_tokens == 0:
        return shape
    kept = window_tokens + 2 * max(batch_tokens, shape.micro_batch_tokens) + DRAFT_WINDOW_PADDING_TOKENS
    context = round_up(kept, CELL_PADDING_TOKENS) * shape.slots
    if context >= shape.context_tokens:
        return shape
    stream = context // shape.streams
    return replace(
        shape,
        context_tokens=context,
        stream_cells=stream,
        sliding_cells=min(shape.sliding_cells, stream),
    )


def draft_context_bytes(
    facts: CheckpointFacts,
    shape: CacheShape,
    type_k: CacheType,
    type_v: CacheType,
    *,
    memory: Memory = Memory.HOST,
    flash_attention: bool = True,
) -> int:
    """Bytes of the draft context of a model that drafts for itself (``--spec-type draft-mtp``).

    Only its own blocks have a cache, and it has no states. ``shape`` is its own, see :func:`draft_shape`;
    without a window it is that of the main context. Its types are ``-ctkd`` and ``-ctvd``, f16 unless given.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION for a model without blocks for multi-token prediction.
    """
    if not facts.has_mtp:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{facts.title or facts.architecture} cannot draft for itself: its file has no blocks for"
            " multi-token prediction that the engine would load.",
            hint="Leave drafting off, or choose a file with such blocks.",
        )
    return groups_kv_bytes(
        facts, mtp_groups(facts), shape, (type_k, type_v), memory=memory, flash_attention=flash_attention
    )


def check_cache_types(
    facts: CheckpointFacts, type_k: CacheType, type_v: CacheType, *, flash_attention: bool = True
) -> None:
    """Refuse the cache types with which the engine would give no context.

    Raises:
        LlmError: UNSUPPORTED_COMBINATION when a head is no whole number of quantisation blocks, when latent
            attention has two types, and for a quantised V without flash attention.
    """
    if facts.latent is not None and type_k is not type_v:
        raise LlmError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"The cache cannot be {type_k} for K and {type_v} for V: this {facts.architecture} model has latent"
            " attention, which keeps both in one row.",
            hint=f"Ask for {type_k} on both sides.",
            cache_type_k=str(type_k),
            cache_type_v=str(type_v),
        )
    if not flash_attention:
        if type_v.is_quantised:
            raise LlmError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"The V cache cannot be {type_v} without flash attention.",
                hint=f"Ask for cache type {CacheType.F16}.",
                cache_type=str(type_v),
            )
        return
    for layer in (group.layer for group in trunk_groups(facts)):
        heads = (("K", type_k, layer.key_length), ("V", type_v, layer.value_length))
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
