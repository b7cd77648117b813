"""Who waits for a dry run, how many may, and what becomes of those that leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Backend, Build, Capabilities, DryRunAbility
from lllm3090d.engines.dry_run import DryRun, DryRuns
from lllm3090d.engines.dry_run_queue import MOST_WAITING, DryRunQueue
from lllm3090d.engines.help_text import parse_help
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.launch import Launch
from lllm3090d.planning.projection import Projection, Where
from lllm3090d.planning.units import MIB
from lllm3090d.store import FILE_NAME, Store
from tests.fakes.gated import Gate
from tests.unit.engine_captures import answers

pytestmark = pytest.mark.unit

DEADLINE_S = 60.0
LAUNCH = Launch(1024, 1, CacheType.Q8_0, CacheType.Q8_0, 2048, 512, 8, 1024)
FLAGS = parse_help(answers("b11434")["fit-help"].stdout)[0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "state" / FILE_NAME)
    yield made
    made.close()


def dry_run(program: Path, number: int) -> DryRun:
    ability = DryRunAbility(program, FLAGS)
    return DryRun(
        build=Build(program.parent / "llama-server", (), "test", locked=False),
        capabilities=Capabilities("1", frozenset(), Backend.CPU, (), dry_run=ability),
        digest="e1-abc",
        checkpoint_path=Path("/models/m.gguf"),
        checkpoint="s1-def",
        launch=replace(LAUNCH, context_tokens=1024 * (number + 1)),
        where=Where.HOST,
    )


def test_a_bounded_number_waits_and_the_rest_is_turned_away(tmp_path: Path, store: Store) -> None:
    gate = Gate(tmp_path / "llama-fit-params", "echo Host 1 2 3")
    queue = DryRunQueue(DryRuns(lambda: store))
    asked = [queue.submit(dry_run(gate.program, number)) for number in range(MOST_WAITING + 3)]
    gate.wait_for_one()
    assert [each is None for each in asked] == [False] * (MOST_WAITING + 1) + [True] * 2
    taken = [each for each in asked if each is not None]

    assert taken[2].cancel()  # its client has left: room for another
    another = queue.submit(dry_run(gate.program, 99))
    assert another is not None
    assert queue.submit(dry_run(gate.program, 100)) is None
    assert not taken[0].cancel()  # it is being made

    taken[2] = another
    for number in range(len(taken)):
        if number:
            gate.wait_for_one()
        gate.let_go()
    assert {result(each).host.weights_bytes for each in taken} == {MIB}
    assert gate.passed() == len(taken)  # what was cancelled was never made

    again = queue.submit(dry_run(gate.program, 0))
    assert again is not None
    assert result(again).host.weights_bytes == MIB  # remembered: nobody opens the gate


def test_a_failure_is_the_asking_ones_and_makes_room(tmp_path: Path, store: Store) -> None:
    queue = DryRunQueue(DryRuns(lambda: store), most_waiting=0)
    for _ in range(3):
        asked = queue.submit(dry_run(tmp_path / "missing", 0))
        assert asked is not None
        with pytest.raises(LlmError) as caught:
            asked.result(DEADLINE_S)
        assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


def result(asked: Future[Projection]) -> Projection:
    return asked.result(DEADLINE_S)


def test_the_gate_is_one(tmp_path: Path) -> None:
    """What these tests stand on."""
    gate = Gate(tmp_path / "program", "echo hello")
    assert os.access(gate.program, os.X_OK) and gate.passed() == 0
