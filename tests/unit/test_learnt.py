"""What is looked up of a running model's earlier launches: a real file, a real store, builds of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lllm3090d.engines.capabilities import Backend, Build
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.calibration import CalibrationKey, Measurement
from lllm3090d.planning.units import MIB
from lllm3090d.serving.calibrations import Calibrations
from lllm3090d.serving.learnt import NO_BUILD, learnt_of
from lllm3090d.serving.running import Instance
from tests.fakes.card_scenes import QWEN, instance
from tests.fakes.model_files import published, write
from tests.fakes.plan_desk import CAPABILITIES, Desk

pytestmark = pytest.mark.unit

MODEL = "smollm2-135m"


class Engines:
    """The builds that are here."""

    def __init__(self, *states: Any) -> None:
        self.states = states

    def all(self) -> tuple[Any, ...]:
        """Each with what it can do."""
        return self.states

    def digest(self, build: Build) -> str:
        """As of its binaries."""
        return f"digest of {build.server.name}"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    write(made.settings.models_dir / MODEL / "model.gguf", published()[MODEL])
    server = tmp_path / "llama-server"
    state = SimpleNamespace(build=Build(server, (), "test", False), capabilities=CAPABILITIES)
    made.lookup.engines = Engines(SimpleNamespace(build=None, capabilities=None), state)  # type: ignore[assignment]  # of the test
    yield made
    asyncio.run(made.lookup.close())


def running(desk: Desk, server: Path | None = None) -> Instance:
    made = instance(MODEL, "r1", QWEN)
    path = desk.settings.models_dir / MODEL / "model.gguf"
    made.record = made.record.model_copy(
        update={"path": path, "shards": (path,), "engine_server": str(server) if server else None}
    )
    return made


def test_a_launch_that_was_measured_is_known(desk: Desk, tmp_path: Path) -> None:
    made = running(desk, tmp_path / "llama-server")
    first = learnt_of(made, desk.lookup, "GPU-1")
    assert first.calibration is not None
    assert (first.calibration.seen, first.calibration.scope.backend) == ((), Backend.VULKAN)
    assert first.note.startswith("Nothing was measured")
    key = CalibrationKey(first.calibration.scope, first.launch)
    measured = Measurement(key, 700 * MIB, 650 * MIB, 512, 1000.0)
    assert Calibrations(desk.lookup.store).add(measured, 600 * MIB) is None
    second = learnt_of(made, desk.lookup, "GPU-1")
    assert second.note == ""
    assert second.calibration is not None
    seen = second.calibration.of(second.launch)
    assert seen is not None and seen.peak_bytes == 700 * MIB
    other = learnt_of(made, desk.lookup, "GPU-2")
    assert other.calibration is not None and other.calibration.seen == ()


def test_another_launch_of_the_same_model_is_told_apart(desk: Desk, tmp_path: Path) -> None:
    made = running(desk, tmp_path / "llama-server")
    wider = running(desk, tmp_path / "llama-server")
    wider.plan = replace(wider.plan, launch=replace(wider.plan.launch, context_tokens=16384))
    assert learnt_of(made, desk.lookup, "c").launch != learnt_of(wider, desk.lookup, "c").launch


def test_without_its_engine_nothing_is_looked_up(desk: Desk) -> None:
    for server in (None, Path("/gone/llama-server")):
        found = learnt_of(running(desk, server), desk.lookup, "GPU-1")
        assert (found.calibration, found.note) == (None, NO_BUILD)


def test_a_file_that_is_gone_is_told(desk: Desk, tmp_path: Path) -> None:
    made = running(desk, tmp_path / "llama-server")
    made.record.path.unlink()
    found = learnt_of(made, desk.lookup, "GPU-1")
    assert found.calibration is None
    assert found.note.startswith("Nothing is looked up: ")


def test_builds_that_cannot_be_found_are_told(desk: Desk) -> None:
    class NoBuilds(Engines):
        def all(self) -> tuple[Any, ...]:
            raise LlmError(ErrorCode.ENGINE_NOT_FOUND, "There is none.")

    desk.lookup.engines = NoBuilds()  # type: ignore[assignment]  # of the test
    assert learnt_of(running(desk), desk.lookup, "GPU-1").note == "Nothing is looked up: There is none."
