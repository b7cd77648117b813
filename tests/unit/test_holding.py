"""Holds beside the writer: told at once, written after, and no obstacle where the state file fails."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

import pytest

from lllm3090d.errors import ErrorCode
from lllm3090d.serving.chronicle import Chronicle
from lllm3090d.serving.events import Effect, KeepPin, KeepReleased
from lllm3090d.serving.holding import Holding
from lllm3090d.serving.holds import Holds
from lllm3090d.store import Store

pytestmark = pytest.mark.unit


class Told:
    """What the chronicle was told."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def hold(self, effect: KeepPin | KeepReleased) -> None:
        self.effects.append(effect)


def holding(store: Store, told: Told) -> Holding:
    return Holding(Holds(lambda: store), cast(Chronicle, told))


def test_a_hold_is_told_at_once_and_written_when_its_turn_comes(tmp_path: Path) -> None:
    store, told = Store(tmp_path / "state.db"), Told()
    first = holding(store, told)

    async def scenario() -> None:
        pin = first.keep(KeepPin("a", pinned=True))
        assert told.effects == [KeepPin("a", pinned=True)]
        assert await first.remembered() == (False, frozenset())
        await pin
        await first.keep(KeepPin("b", pinned=True))
        await first.keep_only({"b"})
        assert await first.keep_released() is None
        assert await holding(store, told).remembered() == (True, frozenset({"b"}))
        await first.keep(KeepReleased(released=False))
        assert await holding(store, told).remembered() == (False, frozenset({"b"}))

    asyncio.run(scenario())
    store.close()


def test_without_the_state_file_nothing_is_held_up_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "state.db")
    store.close()

    async def scenario() -> None:
        broken = holding(store, Told())
        assert await broken.remembered() == (False, frozenset())
        await broken.keep(KeepPin("a", pinned=True))
        await broken.keep(KeepReleased(released=False))
        problem = await broken.keep_released()
        assert problem is not None
        assert problem.code is ErrorCode.STATE_UNUSABLE

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    said = [each.message for each in caplog.records if each.name == "lllm3090d.serving.holding"]
    assert said[0] == "what was released or pinned is not known"
    assert set(said[1:]) == {"it is forgotten with the daemon's end"}
