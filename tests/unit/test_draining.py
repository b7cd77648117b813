"""Waiting for the requests of a model that goes, in simulated time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lllm3090d.serving import draining as module
from lllm3090d.serving.activity import EngineSocket
from lllm3090d.serving.draining import LOOK_EVERY_S, QUIET_LOOKS, QUIET_PAUSE_S, Draining
from lllm3090d.serving.drains import Drain
from lllm3090d.serving.events import (
    DrainEnded,
    DrainSeen,
    Event,
    LeaseAsked,
    LeaseReturned,
    ReleaseRequested,
    UnloadRequested,
)
from tests.fakes.scheduler_world import World
from tests.fakes.simulated_loop import simulate

pytestmark = pytest.mark.unit

LIMIT_S = 10.0


@dataclass
class Scene:
    """An engine that has requests in flight as the test says, by the seconds since the drain began.

    Attributes:
        in_flight: what it answers.
        at: what else happens, when first asked after so many seconds.
        asked: when, and on which socket.
    """

    in_flight: Callable[[float], int | None]
    at: dict[float, Event] = field(default_factory=dict)
    world: World = field(default_factory=lambda: World(drain_s=LIMIT_S))
    asked: list[tuple[float, Path]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def submit(self, event: Event) -> None:
        self.events.append(event)
        self.world.do(event)

    async def ask(self, engine: EngineSocket, timeout_s: float) -> int | None:
        assert timeout_s > 0
        assert engine.control_group.endswith(".service")
        now_s = asyncio.get_running_loop().time()
        self.asked.append((now_s, engine.path))
        for moment in [each for each in self.at if each <= now_s]:
            self.world.do(self.at.pop(moment))
        found = self.in_flight(now_s)
        if found is None:
            await asyncio.sleep(timeout_s)  # it does not answer
        return found

    def drain(self, lease: str | None = None, drain_s: float | None = None) -> float:
        """Until it ends; the seconds that took."""
        instance = self.world.bring_up("a")
        if lease is not None:
            self.world.do(LeaseAsked("l", "a", lease))

        async def scenario() -> float:
            loop = asyncio.get_running_loop()
            self.world.scheduler.clock = loop.time
            self.world.do(UnloadRequested("u", "a", drain_s))
            await Draining(self.world.scheduler, self.ask, self.submit).drain(instance.run)
            return loop.time()

        return simulate(scenario())

    @property
    def seen(self) -> list[int | None]:
        return [each.in_flight for each in self.events if isinstance(each, DrainSeen)]


@pytest.fixture(autouse=True)
def door(monkeypatch: pytest.MonkeyPatch) -> list[Drain]:
    """Nobody listens; what would be renamed is noted."""
    shut: list[Drain] = []

    def rename(socket: Path, drain: Drain) -> Path:
        shut.append(drain)
        return socket.with_suffix(drain.purpose)

    monkeypatch.setattr(module, "shut", rename)
    return shut


def ended(scene: Scene) -> bool:
    return isinstance(scene.events[-1], DrainEnded)


def test_an_idle_one_is_let_go_when_it_was_idle_twice(door: list[Drain]) -> None:
    scene = Scene(lambda _: 0)
    assert scene.drain() == pytest.approx(QUIET_PAUSE_S)
    assert ended(scene)
    assert scene.seen == [0]
    assert len(scene.asked) == QUIET_LOOKS
    assert {path.suffix for _, path in scene.asked} == {".shut"}
    assert len(door) == 1


def test_it_goes_when_the_last_request_has_ended() -> None:
    scene = Scene(lambda now_s: 2 if now_s < 3 else 1 if now_s < 5 else 0)
    assert 5.0 <= scene.drain() <= 5.0 + LOOK_EVERY_S + QUIET_PAUSE_S
    assert ended(scene)
    assert scene.seen == [2, 1, 0]  # changes only


def test_a_request_that_comes_late_is_seen() -> None:
    """It was on its way when the door was shut."""
    scene = Scene(lambda now_s: 1 if 0 < now_s < 2 else 0)
    assert scene.drain() >= 2.0
    assert scene.seen == [0, 1, 0]


@pytest.mark.parametrize("answer", [3, None])
def test_it_waits_no_longer_than_it_may(answer: int | None) -> None:
    scene = Scene(lambda _: answer)
    assert scene.drain() == pytest.approx(LIMIT_S)
    assert ended(scene)
    assert scene.seen == [answer]


def test_a_shorter_wish_is_heeded_and_written_down(door: list[Drain]) -> None:
    scene = Scene(lambda _: 1, {2.0: UnloadRequested("hurry", "a", 1.0)})
    assert 3.0 <= scene.drain(drain_s=600.0) <= 3.0 + LOOK_EVERY_S
    assert ended(scene)
    assert [round(each.deadline_s) for each in door] == [600, 3]


@pytest.mark.parametrize(
    "event",
    [
        UnloadRequested("now", "a", force=True),
        UnloadRequested("now", "a", 0.0),
        ReleaseRequested("r", until_resume=False),
    ],
)
def test_what_others_have_ended_is_over(event: Event) -> None:
    scene = Scene(lambda _: 1, {2.0: event})
    assert scene.drain(drain_s=600.0) <= 2.0 + 2 * LOOK_EVERY_S
    assert not any(isinstance(each, DrainEnded) for each in scene.events)


def test_a_lease_is_a_request_that_the_engine_has_not_seen() -> None:
    scene = Scene(lambda _: 0, {4.0: LeaseReturned("lease")})
    assert scene.drain("lease") >= 4.0
    assert scene.seen == [1, 0]


def test_a_door_that_cannot_be_shut_is_said_and_the_requests_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Path, __: Drain) -> Path:
        raise PermissionError(13, "no")

    monkeypatch.setattr(module, "shut", refuse)
    scene = Scene(lambda now_s: 1 if now_s < 1 else 0)
    with caplog.at_level(logging.WARNING):
        assert scene.drain() >= 1.0
    assert "new requests cannot be refused" in caplog.text
    assert {path.suffix for _, path in scene.asked} == {".sock"}
