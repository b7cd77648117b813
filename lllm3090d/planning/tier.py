"""Tiered KV cache: the first cells of a cache in VRAM, the rest in pinned host memory. Sizes. Pure.

Engines of the PrismML line of llama.cpp offer it as ``--kv-vram-cells N``; upstream b11434 does not. Each layer's K
and V lie in one range of memory whose pages are VRAM up to cell N of each part and host memory beyond. Two VRAM
buffers as large as the host part of one layer (staging) are shared by all layers. The layout is that of the fork's
source as published; no build of it was at hand to check it against.

N is the *line*: a slot whose tokens lie below it never touches host memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerFacts
from lllm3090d.planning.cache import CELL_PADDING_TOKENS, CacheShape, CacheType
from lllm3090d.planning.units import MIB, round_up

# Attention reads whole groups of cells, so a line between two groups would gain nothing.
LINE_STEP_TOKENS = CELL_PADDING_TOKENS
# Below this the published launchers refuse: nearly every conversation would be beyond the line.
LEAST_LINE_TOKENS = 16_384
# Granularity of CUDA's virtual memory on every card seen; the engine asks its driver.
DEVICE_PAGE_BYTES = 2 * MIB
PARTS = 2  # K and V of a layer
# From here on a line is rarely crossed, and drafting more tokens beyond it costs little (published: +26 % on code).
LONG_LINE_TOKENS = 100_000
LONG_TAIL_TOKENS = 4
DRAFT_WINDOW_TOKENS = 16_384  # published: as many drafts are accepted as with the whole history at 131k


@dataclass(frozen=True, slots=True)
class TierOffer:
    """What of a tier an engine build offers; see :func:`lllm3090d.engines.tier_flags.tier_offer`.

    Attributes:
        tier: ``--kv-vram-cells``.
        draft_window: ``--spec-draft-window``, of the same fork.
        draft_tail: ``--spec-draft-n-max-tail``.
        packed_mask: ``--kq-mask-packed``.
        shared_pool: a shared pool is known to be safe there.
        draft_micro_batch: the draft's micro batch can be set on its own. Nothing proves that it is honoured, so
            no price may count on it.
    """

    tier: bool = False
    draft_window: bool = False
    draft_tail: bool = False
    packed_mask: bool = False
    shared_pool: bool = False
    draft_micro_batch: bool = False


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Where the bytes of a tiered cache are.

    Attributes:
        head_bytes: in VRAM, whole pages.
        staging_bytes: buffers in VRAM for what is read from the host.
        host_bytes: pinned host memory.
        layers: that are split.
    """

    head_bytes: int
    staging_bytes: int
    host_bytes: int
    layers: int

    @property
    def card_bytes(self) -> int:
        """All of it in VRAM."""
        return self.head_bytes + self.staging_bytes

    def __add__(self, other: TierSizes) -> TierSizes:
        """Of two caches."""
        return TierSizes(
            self.head_bytes + other.head_bytes,
            self.staging_bytes + other.staging_bytes,
            self.host_bytes + other.host_bytes,
            self.layers + other.layers,
        )


@dataclass(frozen=True, slots=True)
class TierLayout:
    """One cache that can be split.

    Attributes:
        context_tokens: cells of its pool.
        rows: bytes of K of one cell (V takes as many) and the number of layers that have such rows.
        page_bytes: granularity of the device's memory.
    """

    context_tokens: int
    rows: tuple[tuple[int, int], ...]
    page_bytes: int = DEVICE_PAGE_BYTES

    @property
    def layers(self) -> int:
        """Layers with a cache."""
        return sum(count for _, count in self.rows)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell in all layers."""
        return PARTS * sum(row * count for row, count in self.rows)

    @property
    def staging_cell_bytes(self) -> int:
        """Bytes of staging for one cell in host memory: of the widest layer."""
        return PARTS * max((row for row, _ in self.rows), default=0)

    def sizes(self, line_tokens: int) -> TierSizes:
        """Bytes with the line at so many cells; at the end of the cache or beyond, the engine splits nothing.

        Raises:
            ValueError: the line is not positive.
        """
        if line_tokens < 1:
            raise ValueError("a tier keeps at least one cell in VRAM")
        if line_tokens >= self.context_tokens:
            return TierSizes(self.context_tokens * self.cell_bytes, 0, 0, 0)
        head = host = 0
        staging = (0, 0)
        for row, count in self.rows:
            part, split = self.context_tokens * row, line_tokens * row
            # A page is VRAM when it begins below the line of its part. The second part begins where the first
            # one ends, which need not be the beginning of a page.
            first, second = self._pages(split), self._pages(part + split) - self._pages(part)
            tails = (self._pages(part) - first, self._pages(PARTS * part) - self._pages(part + split))
            head += (first + second) * count
            host += sum(tails) * count
            staging = (max(staging[0], tails[0]), max(staging[1], tails[1]))
        page = self.page_bytes
        return TierSizes(head * page, sum(staging) * page, host * page, self.layers)

    def _pages(self, size_bytes: int) -> int:
        return -(-size_bytes // self.page_bytes)


def tier_layout(
    layers: tuple[LayerFacts, ...],
    context_tokens: int,
    cache_type: CacheType,
    page_bytes: int = DEVICE_PAGE_BYTES,
) -> TierLayout:
    """The layout of a cache of these layers; those without attention have no part in it.

    Args:
        layers: of one context.
        context_tokens: cells of its pool.
        cache_type: of K and V alike; anything else is never split.
        page_bytes: granularity of the device's memory.
    """
    rows = Counter(cache_type.row_bytes(layer.k_values) for layer in layers if layer.owns_kv)
    return TierLayout(context_tokens, tuple(sorted(rows.items())), page_bytes)


def tier_layouts(
    facts: CheckpointFacts,
    shape: CacheShape,
    cache_type: CacheType,
    *,
    whole_draft: tuple[CacheType, CacheType] | None = None,
) -> tuple[TierLayout, ...]:
    """The layouts of all caches that a line divides.

    A draft context as long as the main one inherits the line, and has staging buffers of its own in later builds;
    a windowed one lies in VRAM whole, and so does one of two types.

    Args:
        facts: the checkpoint.
        shape: of the main context.
        cache_type: of its K and V.
        whole_draft: types of a draft context without a window; None for a windowed one, or without drafting.
    """
    main = tier_layout(facts.context_layers, shape.context_tokens, cache_type)
    if whole_draft is None or whole_draft[0] is not whole_draft[1]:
        return (main,)
    return main, tier_layout(facts.mtp_layers, shape.context_tokens, whole_draft[0])


def tier_sizes(layouts: tuple[TierLayout, ...], line_tokens: int) -> TierSizes:
    """Bytes of all caches with the line at so many cells; raises as :meth:`TierLayout.sizes`."""
    return sum((layout.sizes(line_tokens) for layout in layouts), TierSizes(0, 0, 0, 0))


def unpaged_line(budget_bytes: int, context_tokens: int, cell_bytes: int, staging_cell_bytes: int) -> int:
    """The line that a budget allows, without the rounding to pages: the published additive formula.

    N cells take N c and the staging of the others takes (n - N) s, so N = (budget - n s) / (c - s), rounded down
    to whole groups of 256 cells.

    Returns:
        cells: 0 where not even the staging fits, the whole context where everything fits into VRAM.
    """
    if budget_bytes >= context_tokens * cell_bytes:
        return context_tokens
    left = budget_bytes - context_tokens * staging_cell_bytes
    gain = cell_bytes - staging_cell_bytes
    if left < 0 or gain <= 0:  # of a single layer, staging is as large as what it saves
        return 0
    return min(left // gain, context_tokens - 1) // LINE_STEP_TOKENS * LINE_STEP_TOKENS


def largest_line(layouts: tuple[TierLayout, ...], budget_bytes: int) -> int:
    """The highest line with which all caches take no more than a budget of VRAM, in whole pages.

    Returns:
        cells, a multiple of 256, or the whole context where no tier is needed; 0 where nothing fits.
    """
    if not layouts:
        return 0
    context = layouts[0].context_tokens
    cell_bytes = sum(layout.cell_bytes for layout in layouts)
    staging_bytes = sum(layout.staging_cell_bytes for layout in layouts)
    # Pages can also be fewer than the formula says: by at most one in each layer and in each staging buffer.
    slack = sum((layout.layers + PARTS) * layout.page_bytes for layout in layouts)
    if budget_bytes >= context * cell_bytes:
        return context
    line = unpaged_line(budget_bytes + slack, context, cell_bytes, staging_bytes)
    if line >= context:
        line = (context - 1) // LINE_STEP_TOKENS * LINE_STEP_TOKENS
    # The price is no monotone function of the line, for staging shrinks while the pages stay: so no bisection, but
    # from above, where the formula says that the answer is a few steps away.
    while line > 0 and tier_sizes(layouts, line).card_bytes > budget_bytes:
        line -= LINE_STEP_TOKENS
    return line


def tail_tokens(line_tokens: int, draft_tokens: int) -> int:
    """Draft length beyond the line, where a build offers one of its own; 0 for the same as below it.

    Longer drafts cost copies of the recurrent state from the start, so only where the line is far away.
    """
    worth_it = line_tokens >= LONG_LINE_TOKENS and 0 < draft_tokens < LONG_TAIL_TOKENS
    return LONG_TAIL_TOKENS if worth_it else 0


def rollback_tokens(draft_tokens: int, draft_tail_tokens: int) -> int:
    """The longest draft of a launch: state copies, outputs and the drafter are made for it at start."""
    return max(draft_tokens, draft_tail_tokens)


@dataclass(frozen=True, slots=True)
class Tier:
    """The tier of a plan: what the command line must carry and what the engine must report.

    Attributes:
        line_tokens: cells in VRAM, ``--kv-vram-cells``.
        context_tokens: cells of the pool.
        sizes: of all caches that the line divides.
        draft_window_tokens: ``--spec-draft-window``; 0 without.
        draft_tail_tokens: ``--spec-draft-n-max-tail``; 0 for the length below the line.
        draft_context_tokens: cells of the draft's own context as the engine must report it; 0 where it is not
            windowed.
        draft_micro_batch_tokens: of the draft; 0 for the main one. Without effect on the price.
        batch_invariant: the same arithmetic whatever the batch; published launchers set it whenever they draft.
        packed_mask: ``--kq-mask-packed``.
        shared_pool: one pool of transient memory for both contexts.
    """

    line_tokens: int
    context_tokens: int
    sizes: TierSizes
    draft_window_tokens: int = 0
    draft_tail_tokens: int = 0
    draft_context_tokens: int = 0
    draft_micro_batch_tokens: int = 0
    batch_invariant: bool = False
    packed_mask: bool = False
    shared_pool: bool = False

    def __post_init__(self) -> None:
        """The engine would silently put everything into VRAM."""
        if not 0 < self.line_tokens < self.context_tokens:
            raise ValueError(f"a line at {self.line_tokens} of {self.context_tokens} cells divides nothing")
        draft = (self.draft_window_tokens, self.draft_tail_tokens, self.draft_context_tokens)
        if min(*draft, self.draft_micro_batch_tokens) < 0:
            raise ValueError(f"tokens of a draft cannot be negative: {self}")

    @property
    def expected_mib(self) -> tuple[int, int, int]:
        """Head, staging and host memory in MiB, rounded up."""
        sizes = self.sizes
        parts = (sizes.head_bytes, sizes.staging_bytes, sizes.host_bytes)
        head, staging, host = (round_up(part, MIB) // MIB for part in parts)
        return head, staging, host
