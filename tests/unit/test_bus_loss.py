"""What is said while systemd cannot be reached, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from lllm3090ctl import doctor, render
from lllm3090ctl.documents import Document
from lllm3090ctl.text import Prose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.bus_loss import BusLoss
from lllm3090d.serving.history import History
from lllm3090d.wire import EventKind
from tests.fakes.control_server import STATUS

pytestmark = pytest.mark.unit


class Scene:
    def __init__(self, limit_s: float) -> None:
        self.history = History()
        self.failures: list[LlmError] = []
        self.failed = asyncio.Event()
        self.loss = BusLoss(self.history, self._fail, limit_s)

    def _fail(self, error: LlmError) -> None:
        self.failures.append(error)
        self.failed.set()

    def problem(self) -> LlmError | None:
        return self.loss.problem

    def told(self) -> list[str]:
        assert {each.kind for each in self.history.since(0)} <= {EventKind.BUS}
        return [each.message for each in self.history.since(0)]


def play(scenario: Callable[[Scene], object], limit_s: float = 60.0) -> Scene:
    async def run() -> Scene:
        scene = Scene(limit_s)
        scenario(scene)
        return scene

    return asyncio.run(run())


def test_loss_and_return_are_told_once_each() -> None:
    def scenario(scene: Scene) -> None:
        scene.loss.back()  # at start, nothing was lost
        assert scene.problem() is None
        scene.loss.lost()
        scene.loss.lost()
        problem = scene.problem()
        assert problem is not None and problem.code is ErrorCode.BUS_UNAVAILABLE
        assert "states of models are those of then" in problem.message and problem.hint
        scene.loss.back()
        scene.loss.back()
        assert scene.problem() is None

    lost, back = play(scenario).told()
    assert lost == "the user's systemd cannot be reached over D-Bus; models go on"
    assert back.startswith("the user's systemd is reached again, after 0.")


def test_a_loss_that_lasts_ends_the_daemon_and_a_return_in_time_does_not() -> None:
    async def run() -> Scene:
        scene = Scene(0.01)
        scene.loss.lost()
        scene.loss.back()
        await asyncio.sleep(0.03)  # past the limit of the loss that is over
        assert scene.failures == []
        scene.loss.lost()
        await asyncio.wait_for(scene.failed.wait(), 10)
        return scene

    (failure,) = asyncio.run(run()).failures
    assert failure.code is ErrorCode.BUS_UNAVAILABLE
    assert "could not be reached over D-Bus for 0.01 s" in failure.message


def test_a_client_shows_it() -> None:
    scenes: list[LlmError | None] = []

    def scenario(scene: Scene) -> None:
        scene.loss.lost()
        scenes.append(scene.problem())

    play(scenario)
    (problem,) = scenes
    assert problem is not None
    view = STATUS.model_copy(update={"bus_problem": problem.problem()})
    document = Document(json.loads(view.model_dump_json()))
    shown = [block.text for block in render.status(document, "/run/x.sock") if isinstance(block, Prose)]
    assert f"systemd: The user's systemd cannot be reached: {problem.message}" in shown
    assert "bus_problem" in doctor.PROBLEMS
