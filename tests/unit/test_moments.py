"""Moments: texts and numbers say the same, and what is no moment is refused."""

from __future__ import annotations

import pytest

from lllm3090d.serving.moments import now_us, realtime_us, seconds_between, time_text

pytestmark = pytest.mark.unit


def test_a_moment_is_the_same_as_text_and_as_number() -> None:
    now = now_us() // 1000 * 1000
    assert realtime_us(time_text(now)) == now
    assert time_text(0) == "1970-01-01T00:00:00.000Z"
    assert realtime_us("2026-11-30T12:00:00.5+01:00") == realtime_us("2026-11-30T11:00:00.500Z")
    assert seconds_between("2026-11-30T11:00:00Z", "2026-11-30T11:01:00.250Z") == 60.25


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2026-11-30T11:00:00",  # in which zone?
        "2026-13-30T11:00:00Z",
        "1969-12-31T23:59:59Z",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        "9" * 100_000,
        "2026-11-30T11:00:00Z" + "0" * 100,
        "\x1b[31m",
    ],
)
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        realtime_us(text)
