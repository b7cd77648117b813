"""The compute buffer of encoders, which keep no context: of BERT, Nomic BERT and Embedding Gemma. Pure.

Their attention sees all tokens of a micro batch at once, so the mask has T x T values, f16 with flash attention, one of
each kind of layer. Upper bounds, held against the engine's own dry run (b11434) in ``tests/engine``.
"""

from __future__ import annotations

from lllm3090d.checkpoints.facts import CheckpointFacts

F16_BYTES, F32_BYTES = 2, 4
CARD_RESIDUALS, CPU_RESIDUALS = 4, 5  # rows as wide as the embedding that are alive at once
HOST_RESIDUALS = 5  # positions have rows of their own beside those of other models
ATTENTION_RESIDUALS = 4  # queries, keys and values, and what attention gives
POSITION_VALUES = 8  # of each token: its number, its position, its type, its place in the pool


def card_bytes(facts: CheckpointFacts, tokens: int, slots: int) -> int:
    """On a card: M + 4 E U + max(feed-forward, 4 E U) + (8 + slots) U.

    Args:
        facts: of an encoder.
        tokens: of the graph, T; U = 4 T bytes, and M the masks.
        slots: each has a row of the matrix that pools.
    """
    return _bytes(facts, tokens, slots, CARD_RESIDUALS, _widest_values(facts))


def cpu_bytes(facts: CheckpointFacts, tokens: int, slots: int) -> int:
    """Without a card: the same with 5 E U."""
    return _bytes(facts, tokens, slots, CPU_RESIDUALS, _widest_values(facts))


def host_bytes(facts: CheckpointFacts, tokens: int, slots: int) -> int:
    """Pinned host memory beside a card: M + 5 E U + (8 + slots) U."""
    return _bytes(facts, tokens, slots, HOST_RESIDUALS, 0)


def _bytes(facts: CheckpointFacts, tokens: int, slots: int, residuals: int, more_values: int) -> int:
    masks = 1 if facts.rule.sliding is None else 2
    values = residuals * facts.embedding_length + more_values + POSITION_VALUES + slots
    return masks * F16_BYTES * tokens * tokens + values * F32_BYTES * tokens


def _widest_values(facts: CheckpointFacts) -> int:
    widest = 0
    for layer in facts.layers:
        feed_forward = (3 if layer.feed_forward_gated else 1) * layer.feed_forward_length
        heads = layer.head_count * (layer.key_length + layer.value_length) + facts.embedding_length
        widest = max(widest, feed_forward, heads, ATTENTION_RESIDUALS * facts.embedding_length)
    return widest
