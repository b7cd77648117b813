"""Moments as texts and numbers: RFC 3339 in UTC, and microseconds since 1970."""

from __future__ import annotations

import time
from datetime import UTC, datetime

LONGEST_MOMENT = 40  # characters; no RFC 3339 text that is meant is longer
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_US = (
    datetime(9999, 12, 31, tzinfo=UTC) - _EPOCH
).days * 86_400_000_000  # a text in UTC has four digits


def time_text(realtime_us: int) -> str:
    """A moment in UTC, RFC 3339 with milliseconds; microseconds since 1970."""
    moment = datetime.fromtimestamp(realtime_us / 1_000_000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def now_us() -> int:
    """The wall clock, microseconds since 1970."""
    return time.time_ns() // 1000


def now_text() -> str:
    """The wall clock in UTC, RFC 3339 with milliseconds."""
    return time_text(now_us())


def realtime_us(text: str) -> int:
    """Microseconds since 1970 of an RFC 3339 moment.

    Raises:
        ValueError: it is none, says nothing of its time zone, or lies before 1970.
    """
    if len(text) > LONGEST_MOMENT:
        raise ValueError("too long for a moment")
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError(f"{text!r} has no time zone")
        passed = moment - _EPOCH
    except OverflowError as error:
        raise ValueError(f"{text!r} is out of range") from error
    found = (passed.days * 86400 + passed.seconds) * 1_000_000 + passed.microseconds
    if found < 0:
        raise ValueError(f"{text!r} lies before 1970")
    if found > _LATEST_US:
        raise ValueError(f"{text!r} is out of range")
    return found


def seconds_between(first: str, second: str) -> float:
    """From one moment to another, by their texts; raises ValueError as :func:`realtime_us`."""
    return round((realtime_us(second) - realtime_us(first)) / 1_000_000, 3)
