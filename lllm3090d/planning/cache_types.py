"""Which types K and V of a cache get from what was asked for. Pure."""

from __future__ import annotations

from lllm3090d.planning.cache import CacheType

# With a fast kernel of flash attention in a CUDA build of llama.cpp with default options, where both sides are of the
# same type. Other types work, but are computed by the CPU or refused.
FAST_CACHE_TYPES = frozenset({CacheType.F16, CacheType.BF16, CacheType.Q8_0, CacheType.Q4_0})


def resolve_cache_types(
    type_k: CacheType | None, type_v: CacheType | None, default: CacheType
) -> tuple[CacheType, CacheType]:
    """Types of K and V: where one side was asked for, the other is the same; both sides exactly as asked.

    Args:
        type_k, type_v: what was asked for; None where nothing was.
        default: where neither was.
    """
    return type_k or type_v or default, type_v or type_k or default


def has_fast_kernel(type_k: CacheType, type_v: CacheType) -> bool:
    """Both sides are of one type that every build computes fast; see :data:`FAST_CACHE_TYPES`."""
    return type_k is type_v and type_k in FAST_CACHE_TYPES
