"""The additive VRAM model published for one fork and one family of models, with its constants. Pure.

These are measurements of PrismML's fork of llama.cpp with Qwen3.8-27B and its kin (Bonsai 2, Mirai S) on an RTX 4070,
an RTX 3090 and an RTX 2060 SUPER. They show how far the terms of this planner are from a real tiered launch, and
serve as evidence for that fork alone: nothing else is priced with them. In particular its measured totals leave no
room for the f16 copies of a quantised cache that upstream makes and :mod:`lllm3090d.planning.compute` charges.

Cache, states and draft come from :mod:`lllm3090d.planning.cache`; only what no header shows is a constant here.
"""

from __future__ import annotations

from dataclasses import dataclass

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.compute import F16_BYTES
from lllm3090d.planning.tier import rollback_tokens, tier_layout, unpaged_line
from lllm3090d.planning.units import MIB

REFERENCE_TOKENS = 512  # micro batch at which the compute buffers were measured; they grow in proportion
MAIN_COMPUTE_BYTES = 139 * MIB  # without the mask
DRAFT_COMPUTE_BYTES = 118 * MIB  # of the context for multi-token prediction, without the mask
SHARED_POOL_BYTES = 14 * MIB  # what GGML_CUDA_SHARED_POOL saved
PACKED_MASK_DIVISOR = 16  # one bit in place of an f16 value
# CUDA contexts and pools at load, measured on Windows, and what covers Linux and other hosts.
RUNTIME_BYTES = 125 * MIB
DRAFTING_RUNTIME_BYTES = 240 * MIB
COVERING_RUNTIME_BYTES = 235 * MIB
COVERING_DRAFTING_RUNTIME_BYTES = 350 * MIB
# Growth under traffic and rounding to pages, from the published soaks.
LINUX_RESERVE_BYTES = 300 * MIB


@dataclass(frozen=True, slots=True)
class PublishedLaunch:
    """A launch as the fork's documents describe one.

    Attributes:
        weights_bytes: in VRAM: the file without the token embedding.
        cache_type: of K and V, the draft's included.
        context_tokens: ``-c``.
        draft_tokens: ``--spec-draft-n-max``; 0 without drafting.
        tail_tokens: ``--spec-draft-n-max-tail``.
        window_tokens: ``--spec-draft-window``.
        batch_tokens, micro_batch_tokens: ``-b`` and ``-ub``.
        draft_micro_batch_tokens: of the draft.
        packed_mask: ``--kq-mask-packed``.
        shared_pool: ``GGML_CUDA_SHARED_POOL=1``.
        runtime_bytes: contexts and pools.
    """

    weights_bytes: int
    cache_type: CacheType = CacheType.Q8_0
    context_tokens: int = 262_144
    draft_tokens: int = 2
    tail_tokens: int = 4
    window_tokens: int = 16_384
    batch_tokens: int = 2048
    micro_batch_tokens: int = 512
    draft_micro_batch_tokens: int = 512
    packed_mask: bool = False
    shared_pool: bool = False
    runtime_bytes: int = COVERING_DRAFTING_RUNTIME_BYTES

    def shape(self, facts: CheckpointFacts) -> CacheShape:
        """Of its main context, one slot."""
        return cache.cache_shape(
            facts,
            context_tokens=self.context_tokens,
            parallel=1,
            batch_tokens=self.batch_tokens,
            micro_batch_tokens=self.micro_batch_tokens,
            rollback_tokens=rollback_tokens(self.draft_tokens, self.tail_tokens) if self.draft_tokens else 0,
        )


def fixed_bytes(facts: CheckpointFacts, launch: PublishedLaunch) -> int:
    """VRAM of a launch without its KV cache and staging, by the published model."""
    shape = launch.shape(facts)
    size = launch.weights_bytes + cache.state_bytes(facts, shape) + launch.runtime_bytes
    size += MAIN_COMPUTE_BYTES * launch.micro_batch_tokens // REFERENCE_TOKENS
    masks = shape.context_tokens * launch.micro_batch_tokens
    if launch.draft_tokens:
        draft = cache.draft_shape(
            shape, window_tokens=launch.window_tokens, batch_tokens=launch.batch_tokens
        )
        size += cache.draft_context_bytes(facts, draft, launch.cache_type, launch.cache_type)
        size += DRAFT_COMPUTE_BYTES * launch.draft_micro_batch_tokens // REFERENCE_TOKENS
        masks += draft.context_tokens * launch.draft_micro_batch_tokens
    size += masks * F16_BYTES // (PACKED_MASK_DIVISOR if launch.packed_mask else 1)
    return size - (SHARED_POOL_BYTES if launch.shared_pool else 0)


def published_line(
    facts: CheckpointFacts,
    launch: PublishedLaunch,
    free_bytes: int,
    reserve_bytes: int = LINUX_RESERVE_BYTES,
) -> int:
    """Cells in VRAM by the published formula; the whole context where all fits, 0 where nothing does.

    Pages are not rounded up here: that is inside the published reserve.
    """
    layout = tier_layout(facts.context_layers, launch.context_tokens, launch.cache_type)
    budget = free_bytes - reserve_bytes - fixed_bytes(facts, launch)
    return unpaged_line(budget, layout.context_tokens, layout.cell_bytes, layout.staging_cell_bytes)


def used_bytes(facts: CheckpointFacts, launch: PublishedLaunch, line_tokens: int) -> int:
    """VRAM in use after a load with the line at so many cells, without what others hold."""
    layout = tier_layout(facts.context_layers, launch.context_tokens, launch.cache_type)
    staging = (launch.context_tokens - line_tokens) * layout.staging_cell_bytes
    return fixed_bytes(facts, launch) + line_tokens * layout.cell_bytes + staging
