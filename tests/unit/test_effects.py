"""The slow half against a systemd that does not always answer: what it says must not be guessed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.tier import Tier, TierSizes
from lllm3090d.serving import effects as module
from lllm3090d.serving.effects import Effects
from lllm3090d.serving.events import (
    Event,
    StartFinished,
    StartUnit,
    StopFinished,
    StopUnit,
    TierChecked,
    UnitSeen,
)
from lllm3090d.serving.journal import LINES_MAX, JournalLine
from lllm3090d.serving.unit_spec import UnitSpec

pytestmark = pytest.mark.unit

UNIT = "lllm3090-a-00000001.service"
RUN = "00000001"
LOST = LlmError(ErrorCode.BUS_UNAVAILABLE, "nobody answers")


def running(name: str) -> UnitStatus:
    return UnitStatus.from_properties(name, {"ActiveState": "active"}, {"MainPID": 7})


class LostManager:
    """A systemd whose first answers are lost; it may have done what it was asked all the same."""

    def __init__(self, *, lost_answers: int, started: bool) -> None:
        self.lost_answers = lost_answers
        self.started = started
        self.stops = 0

    def _answer(self) -> None:
        if self.lost_answers > 0:
            self.lost_answers -= 1
            raise LOST

    async def start(self, _name: str, _properties: Mapping[str, Any]) -> str:
        self._answer()
        return "done"

    async def status(self, name: str) -> UnitStatus | None:
        self._answer()
        return running(name) if self.started else None

    async def stop(self, _name: str, _timeout_s: float) -> None:
        self.stops += 1
        self._answer()


def effects(manager: LostManager, told: list[Event], sockets_dir: Path = Path("/")) -> Effects:
    settings = SimpleNamespace(stop_timeout_s=1.0, engine_sockets_dir=sockets_dir)
    return Effects(
        manager=cast("Any", manager),
        scheduler=cast("Any", None),
        settings=cast("Any", lambda: settings),
        reader=cast("Any", None),
        submit=told.append,
        on_progress=lambda _: None,
    )


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUS_POLL_S", 0.0)


def start(manager: LostManager, sockets_dir: Path = Path("/")) -> list[Event]:
    told: list[Event] = []
    asyncio.run(effects(manager, told, sockets_dir).start_unit(StartUnit(RUN, UnitSpec(UNIT, {}))))
    return told


def test_a_start_without_an_answer_is_not_taken_for_a_failure() -> None:
    """The unit runs, so its memory must stay charged."""
    assert start(LostManager(lost_answers=3, started=True)) == [UnitSeen(running(UNIT))]


def test_a_start_that_never_arrived_has_failed() -> None:
    assert start(LostManager(lost_answers=2, started=False)) == [StartFinished(RUN, LOST)]


def test_a_stop_without_an_answer_is_asked_for_again() -> None:
    told: list[Event] = []
    manager = LostManager(lost_answers=2, started=True)
    asyncio.run(effects(manager, told).stop_unit(StopUnit(RUN, UNIT)))
    assert told == [StopFinished(RUN, None)]
    assert manager.stops == 3


def test_a_start_makes_the_directory_of_the_sockets_again(tmp_path: Path) -> None:
    manager = LostManager(lost_answers=0, started=True)
    missing = tmp_path / "lllm3090d" / "engines"
    assert start(manager, missing)[-1] == StartFinished(RUN, None)
    assert missing.is_dir()
    missing.rmdir()
    missing.touch()
    (finished,) = start(manager, missing)
    assert isinstance(finished, StartFinished)
    assert finished.error is not None
    assert finished.error.code is ErrorCode.RUNTIME_DIR_UNUSABLE


MIB = 1 << 20
TIER = Tier(256, 1024, TierSizes(4 * MIB, 2 * MIB, 12 * MIB, layers=1))
SPLIT = (
    "ggml_backend_cuda_tier_alloc: CUDA0_tier_kv_l0_256_1024 16.00 MiB: 4.00 MiB VRAM + 12.00 MiB host"
    " (4 runs, 2 parts)"
)


def watched(
    monkeypatch: pytest.MonkeyPatch, tier: Tier | None, log: tuple[str, ...] | LlmError
) -> list[Event]:
    """What comes of a look at an engine's log that says that."""

    async def tail(_identifier: str, _lines: int) -> tuple[JournalLine, ...]:
        if isinstance(log, LlmError):
            raise log
        return tuple(JournalLine(0, line) for line in log)

    monkeypatch.setattr("lllm3090d.serving.journal.tail", tail)
    told: list[Event] = []
    made = effects(LostManager(lost_answers=0, started=True), told)
    instance = SimpleNamespace(run=RUN, unit=UNIT, plan=SimpleNamespace(tier=tier))
    made._scheduler = cast("Any", SimpleNamespace(by_run=lambda _: instance))
    asyncio.run(made.check_tier(RUN))
    return told


def test_a_divided_cache_is_looked_for_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    (checked,) = watched(monkeypatch, TIER, ("loading", SPLIT))
    assert isinstance(checked, TierChecked) and checked.in_force
    assert "All 1 layers are split" in checked.reason
    (checked,) = watched(
        monkeypatch, TIER, ("tiered KV: cells [0, 256) in VRAM, [256, 1024) in host memory",)
    )
    assert isinstance(checked, TierChecked) and not checked.in_force


def test_without_a_tier_or_a_log_nothing_is_said_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, None, (SPLIT,)) == []
    unreadable = LlmError(ErrorCode.LOGS_UNAVAILABLE, "closed")
    assert watched(monkeypatch, TIER, unreadable) == []


def test_a_log_whose_beginning_is_out_of_reach_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adopted engine may have said much since its start."""
    assert watched(monkeypatch, TIER, ("a request",) * LINES_MAX) == []
