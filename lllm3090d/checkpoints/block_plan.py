"""What the metadata say of all blocks, before it is laid out block by block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Head counts, widths and kinds of all blocks.

    Attributes:
        heads, kv_heads: query heads and KV heads of each block.
        feed_forward: width of the dense network of each block.
        slides: which blocks have a sliding window.
        recurrent: which keep a state.
        lengths: values of a key head and of a value head.
        sliding_lengths: the same of the blocks that slide.
    """

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    feed_forward: tuple[int, ...]
    slides: tuple[bool, ...]
    recurrent: tuple[bool, ...]
    lengths: tuple[int, int]
    sliding_lengths: tuple[int, int]

    def head_lengths(self, index: int) -> tuple[int, int]:
        """Values of a key head and of a value head of a block."""
        return self.sliding_lengths if self.slides[index] else self.lengths
