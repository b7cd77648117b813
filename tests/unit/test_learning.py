"""Learning: what was measured of a launch is found again for the next one, and what fails costs no load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from lllm3090d.checkpoints.header import read_header
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.calibration import CalibrationKey, Measurement
from lllm3090d.serving.learning import Learning
from lllm3090d.store import Store
from tests.fakes.gguf_files import write_llama

pytestmark = pytest.mark.unit

CARD = Card(CardKind.NVIDIA, "GPU-1", "NVIDIA GeForce RTX 3090", "580.95")
OTHER = dataclasses.replace(CARD, uuid="GPU-2")
CAPABILITIES = Capabilities("11434", frozenset(), Backend.VULKAN, ("Vulkan0",))
GIB = 1 << 30


class Digests:
    """In place of the engines: one digest, or a failure."""

    def __init__(self) -> None:
        self.failure: LlmError | None = None

    def digest(self, build: Build) -> str:
        """Of any build."""
        if self.failure is not None:
            raise self.failure
        return f"digest of {build.server.name}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint on disk."""
    path = tmp_path / "m.gguf"
    write_llama(path)
    return path


@pytest.fixture
def make(tmp_path: Path) -> Callable[[], tuple[Learning, Digests, list[Path]]]:
    """A fresh one on the same state file, as after a restart, with a list of the headers it reads."""

    def made() -> tuple[Learning, Digests, list[Path]]:
        digests, read = Digests(), list[Path]()

        def header(path: Path) -> object:
            read.append(path)
            return read_header(path)

        store = Store(tmp_path / "state.db")
        return Learning(lambda: store, header, digests), digests, read  # type: ignore[arg-type]  # one method is used

    return made


BUILD = Build(Path("/opt/llama/llama-server"), (), "test", False)


def test_what_was_measured_is_found_after_a_restart(
    make: Callable[[], tuple[Learning, Digests, list[Path]]], model: Path
) -> None:
    learning, _, _ = make()
    known = learning.known((model,), BUILD, CAPABILITIES, (CARD, OTHER))
    assert known.keys() == {"GPU-1", "GPU-2"}
    assert not known["GPU-1"].seen
    assert not known["GPU-1"].has_measured_build
    key = CalibrationKey(known["GPU-1"].scope, "launch")
    learning.learn(Measurement(key, 5 * GIB, 4 * GIB, 2048, 0.0), 4 * GIB)
    again, _, _ = make()
    found = again.known((model,), BUILD, CAPABILITIES, (CARD, OTHER))
    seen = found["GPU-1"].of("launch")
    assert seen is not None
    assert seen.peak_bytes == 5 * GIB
    assert seen.seen_s > 1e9  # it was given the time of day
    assert found["GPU-1"].has_measured_build
    assert not found["GPU-2"].seen


def test_a_checkpoint_is_sampled_once_for_each_state_of_its_file(
    make: Callable[[], tuple[Learning, Digests, list[Path]]], model: Path
) -> None:
    learning, _, read = make()
    first = learning.known((model,), BUILD, CAPABILITIES, (CARD,))["GPU-1"].scope
    assert read == [model]
    again, _, read_again = make()
    assert again.known((model,), BUILD, CAPABILITIES, (CARD,))["GPU-1"].scope == first
    assert read_again == []
    write_llama(model, embedding_length=512)
    other = again.known((model,), BUILD, CAPABILITIES, (CARD,))["GPU-1"].scope
    assert read_again == [model]
    assert other.checkpoint != first.checkpoint


def test_a_list_looks_for_nothing_until_something_was_measured(
    make: Callable[[], tuple[Learning, Digests, list[Path]]], model: Path, tmp_path: Path
) -> None:
    learning, _, read = make()
    assert learning.of_build(BUILD, CAPABILITIES, "GPU-1") is None
    known = learning.known((model,), BUILD, CAPABILITIES, (CARD,))["GPU-1"]
    learning.learn(Measurement(CalibrationKey(known.scope, "l"), GIB, GIB, 512, 0.0), GIB)
    scope = learning.of_build(BUILD, CAPABILITIES, "GPU-1")
    assert scope is not None
    read.clear()
    assert learning.of_listed((model,), scope, ()).of("l") is not None
    other = tmp_path / "other.gguf"
    write_llama(other, vocabulary=64)
    listed = learning.of_listed((other,), scope, ())
    assert not listed.seen
    assert listed.has_measured_build
    assert read == []  # a list reads no file


def test_running_out_of_memory_is_remembered(
    make: Callable[[], tuple[Learning, Digests, list[Path]]], model: Path
) -> None:
    learning, _, _ = make()
    known = learning.known((model,), BUILD, CAPABILITIES, (CARD,))["GPU-1"]
    learning.learn_out_of_memory(CalibrationKey(known.scope, "l"), 4 * GIB)
    assert learning.known((model,), BUILD, CAPABILITIES, (CARD,))["GPU-1"].excess_bytes > 0


def test_without_a_digest_nothing_is_known_and_nothing_fails(
    make: Callable[[], tuple[Learning, Digests, list[Path]]], model: Path
) -> None:
    learning, digests, _ = make()
    known = learning.known((model,), BUILD, CAPABILITIES, (CARD,))["GPU-1"]
    learning.learn(Measurement(CalibrationKey(known.scope, "l"), GIB, GIB, 512, 0.0), GIB)
    digests.failure = LlmError(ErrorCode.ENGINE_UNUSABLE, "its files cannot be read")
    assert learning.known((model,), BUILD, CAPABILITIES, (CARD,)) == {}
    assert learning.of_build(BUILD, CAPABILITIES, "GPU-1") is None
    assert learning.known((model.with_name("gone.gguf"),), BUILD, CAPABILITIES, (CARD,)) == {}
