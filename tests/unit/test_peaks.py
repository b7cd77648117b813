"""The most that a run was seen to hold, memory by memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import MemoryReading
from lllm3090d.serving.observation import HOST, CardState, Observation
from lllm3090d.serving.peaks import Peaks
from tests.fakes.scheduler_world import CARD, GIB, SECOND

pytestmark = pytest.mark.unit

READING = MemoryReading(0.0, 24 * GIB, 0, 0, 24 * GIB, ())


def seen(
    first: Mapping[str, int], second: Mapping[str, int] | None = None, host: Mapping[str, int] | None = None
) -> Observation:
    cards = (
        CardState(CARD, READING, resident=first),
        CardState(SECOND, READING, resident=second or {}),
    )
    return Observation(cards, False, host_in_use=host or {})


def test_each_memory_has_a_peak_of_its_own() -> None:
    peaks = Peaks("a")
    assert peaks.look(seen({"a": 5, "b": 100}, {"a": 3}, {"a": 40})) == 8
    assert peaks.look(seen({"a": 7}, {"a": 1}, {"a": 50})) == 8
    assert peaks.look(seen({"a": 2}, {"a": 2})) == 4
    assert peaks.highest == {CARD.uuid: 7, SECOND.uuid: 3, HOST: 50}


def test_of_what_nothing_is_known_nothing_is_said() -> None:
    """Not 0: a launch that was never seen has no measurement."""
    peaks = Peaks("a")
    error = LlmError(ErrorCode.CARD_UNREADABLE, "it has fallen off the bus")
    assert peaks.look(Observation((CardState(CARD, None, error),), False)) == 0
    assert peaks.look(seen({"b": 9})) == 0
    assert peaks.highest == {}
    peaks.look(seen({"a": 0}))
    assert peaks.highest == {CARD.uuid: 0}


def test_what_was_seen_outlives_a_card_in_error() -> None:
    peaks = Peaks("a")
    peaks.look(seen({"a": 5}))
    peaks.look(Observation((CardState(CARD, None),), False))
    assert peaks.highest == {CARD.uuid: 5}
