"""Random plans carried out by a real llama-server: it takes every command line, and its log shows the ledger's sizes.

A few here; ``python -m bench.launches --count 100`` starts the full number, and with ``--root`` on a card in software.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.launches import (
    PLANNED,
    SEED,
    Case,
    Engine,
    Line,
    installed,
    random_plans,
    report,
    start,
)
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.engines.arguments import features
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import PlanRequest, Room
from tests.fakes.random_plans import PLENTY, RandomQuestion
from tests.unit.engine_truth import POLICY

pytestmark = pytest.mark.engine

COUNT = 12


@pytest.fixture
def engine(llama_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("LLLM3090_LLAMA_DIR", str(llama_server.parent))
    found = installed(tmp_path)
    if found.capabilities.backend is not Backend.CPU:
        pytest.skip("these checkpoints are for an engine without a card")
    return found


def case_of(engine: Engine, model: Path, request: PlanRequest) -> Case:
    facts = read_facts([model])
    question = RandomQuestion(request, POLICY, Room(PLENTY))
    plan = question.plan(facts, features(engine.capabilities))
    return Case(facts.architecture, model, facts, plan, question)


def test_random_plans_are_carried_out(engine: Engine) -> None:
    """Every third architecture; the seed makes them the same ones each time."""
    every_third = PLANNED[:: len(PLANNED) // COUNT]
    done = [start(engine, case) for case in random_plans(engine, COUNT, SEED, every_third)]
    assert not [each.faults for each in done if each.faults], report(done)
    assert len(done) == COUNT
    assert all(each.lines for each in done)


@pytest.mark.parametrize("name", ["smollm2_path", "gemma3_path"])
@pytest.mark.parametrize(
    "wish",
    [
        PlanRequest(context_tokens=8192, parallel=3),
        PlanRequest(context_tokens=2048, parallel=2, purpose=Purpose.EMBEDDING, micro_batch_tokens=200),
        PlanRequest(context_tokens=5000, parallel=2, unified=True, cache_type_k=CacheType.F16),
        PlanRequest(context_tokens=4096, swa_full=True, micro_batch_tokens=100, batch_tokens=300),
    ],
)
def test_real_checkpoints(
    engine: Engine, name: str, wish: PlanRequest, request: pytest.FixtureRequest
) -> None:
    done = start(engine, case_of(engine, request.getfixturevalue(name), wish))
    assert done.faults == []
    assert {line.name for line in done.lines} == {
        "context, host",
        "compute, host",
        "output",
        "all buffers, host",
    }


def test_a_model_that_drafts_for_itself(engine: Engine) -> None:
    """Both contexts are in the log, and equal to their lines."""
    drafting = next(
        case
        for case in random_plans(engine, 40, SEED, ("qwen35", "qwen35moe"))
        if case.plan.launch.draft is not None
    )
    assert drafting.facts.has_mtp
    done = start(engine, drafting)
    assert done.faults == []
    assert any(line.name == "draft context, host" and line.engine > 0 for line in done.lines)


def test_a_difference_shows(engine: Engine, smollm2_path: Path) -> None:
    case = case_of(engine, smollm2_path, PlanRequest(context_tokens=4096, parallel=1))
    other = case_of(engine, smollm2_path, PlanRequest(context_tokens=4352, parallel=1))
    wrong = replace(case, plan=replace(case.plan, quote=other.plan.quote, window_tokens=4352))
    done = start(engine, wrong)
    assert any(fault.startswith("context, host: the engine has") for fault in done.faults)
    assert any("windows of {4096} tokens, 4352 in the plan" in fault for fault in done.faults)
    assert any("another price" in fault for fault in done.faults)
    assert "differ" in report([done])


def test_an_engine_that_does_not_start_is_a_fault(
    engine: Engine, tmp_path: Path, smollm2_path: Path
) -> None:
    case = case_of(engine, smollm2_path, PlanRequest(context_tokens=4096))
    gone = replace(case, model=tmp_path / "gone.gguf")
    (fault,) = start(engine, gone).faults
    assert "did not start" in fault


def test_sizes_that_hold() -> None:
    assert Line("x", 1.0, 1.004, tolerance=0.005).holds
    assert not Line("x", 1.0, 1.006, tolerance=0.005).holds
    assert Line("x", 1.0, 5.0, at_most=True).holds
    assert not Line("x", 5.1, 5.0, at_most=True).holds
