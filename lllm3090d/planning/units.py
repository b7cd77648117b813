"""Units of planning: bytes are integers everywhere, these are the multiples."""

from __future__ import annotations

MIB = 1 << 20  # bytes
PAGE_TOKENS = 1024  # windows chosen by the planner are multiples of this many tokens


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple


def mib_text(size_bytes: int) -> str:
    """A need in MiB with one decimal, rounded up so that it is never shown smaller than it is."""
    return tenths_text(mib_tenths(size_bytes))


def mib_tenths(size_bytes: int) -> int:
    """A need in tenths of a MiB, rounded up."""
    return -(-size_bytes * 10 // MIB)


def tenths_text(tenths: int) -> str:
    """Tenths with one decimal, exactly."""
    sign, tenths = "-" if tenths < 0 else "", abs(tenths)
    return f"{sign}{tenths // 10:,}.{tenths % 10}"


def mib_ceil(size_bytes: int) -> int:
    """A need in MiB, rounded up so that it is never shown smaller than it is."""
    return -(-size_bytes // MIB)
