"""What the engine copies into host memory to be able to go back: context checkpoints, and one for each draft. Pure.

A checkpoint holds what cannot be cut at any token: the states of one sequence without their copies, and the window of
every sliding layer. Beside it lies what the drafter's context gives for the same sequence; of a plain KV cache that is
every cell so far, for the engine has no partial form of it. Read in the source of llama.cpp b11434 and seen in its log.
"""

from __future__ import annotations

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerFacts, LayerKind
from lllm3090d.planning.cache import STATE_VALUE_BYTES, CacheShape, CacheType, layer_row_bytes
from lllm3090d.planning.layer_groups import trunk_groups

CELL_BYTES = 12  # position and sequence of a saved cell, beside its K and V rows
# The same in a drafter's cache: models with positions of several dimensions add three numbers.
DRAFT_CELL_BYTES = 24


def checkpoints_of_slot(limit: int, shape: CacheShape) -> int:
    """Context checkpoints that one slot may hold at once: ``--ctx-checkpoints``.

    The least distance (``--checkpoint-min-step``) spaces those at older messages only: the ones at the last message,
    and 4 tokens and a micro batch before the end of a prompt, are made at any distance, by every request. Crowded ones
    go only once the list is one short of full. Seen with Gemma-3-270M, 14 turns of 60 tokens and a limit of 8: seven
    are held with a distance of 8192, eight with 0. So the distance never lowers what must be held ready, but no two
    checkpoints are of the same position.

    Args:
        limit: ``--ctx-checkpoints``; 0 turns them off.
        shape: of the main context.
    """
    return min(limit, max(0, shape.window_tokens - 1))


def context_checkpoint_bytes(
    facts: CheckpointFacts,
    shape: CacheShape,
    type_k: CacheType,
    type_v: CacheType,
    *,
    swa_full: bool = False,
) -> int:
    """Bytes of one context checkpoint of one slot; 0 for a model that can be cut anywhere, which makes none.

    The states of one sequence without their copies, and the cells of the window of every sliding layer, with 12
    bytes of bookkeeping for each cell. Measured on Gemma-3-270M at q8_0: 3.991 MiB, formula 3.990; on a 0.8B
    hybrid 19.266 MiB, formula 19.266. Without what a drafter adds, see :func:`draft_copy_bytes`.
    """
    rows = _sliding_row_bytes(facts, type_k, type_v)
    if rows == 0 or swa_full:
        return sequence_state_bytes(facts)
    window = min(shape.stream_cells, facts.sliding_window_tokens)
    return sequence_state_bytes(facts) + window * (rows + CELL_BYTES)


def sequence_state_bytes(facts: CheckpointFacts) -> int:
    """Bytes of the states of one sequence, without the copies for going back."""
    return STATE_VALUE_BYTES * sum(
        group.count * (group.layer.conv_values + group.layer.state_values) for group in trunk_groups(facts)
    )


def draft_copy_bytes(
    facts: CheckpointFacts,
    layers: tuple[LayerFacts, ...],
    main: CacheShape,
    shape: CacheShape,
    types: tuple[CacheType, CacheType],
) -> int:
    """Bytes that the drafter's context adds to one checkpoint of every slot, all slots together.

    A drafter with states gives those, one with sliding layers their windows, any other the whole cache of the
    sequence. All slots together have no more cells than the context. Seen with a small hybrid that drafts for
    itself: 536 bytes for each token of the prompt, its row of 512 and 24 of bookkeeping.

    Args:
        facts: the drafter, or the model where it drafts for itself.
        layers: those in the drafter's context.
        main: shape of the main context, which says how long a slot's sequence can be.
        shape: of the drafter's context.
        types: of its K and V.
    """
    if any(layer.keeps_state for layer in layers):
        return main.slots * sequence_state_bytes(facts)
    slides = [layer for layer in layers if layer.kind is LayerKind.SLIDING]
    rows = sum(layer_row_bytes(layer, *types) for layer in slides or layers)
    longest = facts.sliding_window_tokens if slides else main.window_tokens
    kept = min(shape.cells(LayerKind.SLIDING) if slides else shape.stream_cells, longest)
    cells = min(main.slots * kept, shape.streams * shape.stream_cells)
    return cells * (rows + DRAFT_CELL_BYTES) if rows else 0


def _sliding_row_bytes(facts: CheckpointFacts, type_k: CacheType, type_v: CacheType) -> int:
    return sum(
        group.count * layer_row_bytes(group.layer, type_k, type_v)
        for group in trunk_groups(facts)
        if group.layer.kind is LayerKind.SLIDING
    )
