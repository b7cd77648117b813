"""Units of planning: bytes are integers everywhere, these are the multiples."""

from __future__ import annotations

MIB = 1 << 20  # bytes
PAGE_TOKENS = 1024  # windows chosen by the planner are multiples of this many tokens


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple


def mib_ceil(size_bytes: int) -> int:
    """A need in MiB, rounded up so that it is never shown smaller than it is."""
    return -(-size_bytes // MIB)
