"""CheckpointFacts: what planning needs to know of a checkpoint, from its metadata and tensor infos."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LayerKind(enum.StrEnum):
    """How a layer keeps its context."""

    FULL = "full"  # attention over the whole context
    SLIDING = "sliding"  # attention over a window


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One transformer block.

    Attributes:
        kind: how it keeps its context.
        head_count: query heads.
        key_length: values per key head.
        k_values: values of one K row of the cache, KV heads times key length.
        v_values: values of one V row of the cache.
        feed_forward_length: width of the gated feed-forward network, values.
        weight_bytes: bytes of all tensors of the block.
    """

    kind: LayerKind
    head_count: int
    key_length: int
    k_values: int
    v_values: int
    feed_forward_length: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint as planning sees it; all sizes of all shards together.

    Attributes:
        architecture: ``general.architecture``.
        title: ``general.name``, or None.
        quantisation: label of the file type, e.g. ``Q4_1``.
        trained_context_tokens: ``context_length``.
        embedding_length: values.
        vocabulary_size: rows of the token embedding.
        sliding_window_tokens: 0 without sliding layers.
        layers: the blocks in order.
        token_embedding_bytes: bytes of ``token_embd.weight``.
        output_bytes: bytes of ``output.weight``, 0 where it is tied to the token embedding.
        other_bytes: every other tensor outside the blocks (norms, RoPE factors).
        file_bytes: size of all shards on disk.
        has_chat_template: a template is embedded.
    """

    architecture: str
    title: str | None
    quantisation: str
    trained_context_tokens: int
    embedding_length: int
    vocabulary_size: int
    sliding_window_tokens: int
    layers: tuple[LayerFacts, ...]
    token_embedding_bytes: int
    output_bytes: int
    other_bytes: int
    file_bytes: int
    has_chat_template: bool

    @property
    def output_is_tied(self) -> bool:
        """The output matrix is the token embedding."""
        return self.output_bytes == 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        blocks = sum(layer.weight_bytes for layer in self.layers)
        return blocks + self.token_embedding_bytes + self.output_bytes + self.other_bytes
