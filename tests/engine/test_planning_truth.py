"""The largest context of a plan beside that of the installed engine, and graphs that no recorded row has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import planning_truth
from bench.dry_run import DryRun, DryRunUnavailableError, Request
from bench.largest_context import (
    CASES,
    LEAST_WINDOW_TOKENS,
    MODELS,
    SHARES,
    Finding,
    context_table,
    findings,
)
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import compute
from lllm3090d.planning.cache import CacheType, cache_shape
from tests.fakes.model_files import published, write

pytestmark = pytest.mark.engine

# Linear attention with drafting, sliding windows, latent attention.
TRIED = ("qwen3.5-27b-mtp", "gemma-4-26b-a4b", "deepseek-v2-lite")


@pytest.fixture(scope="module")
def found(exact_engine: DryRun) -> list[Finding]:
    return list(findings(exact_engine, models=TRIED))


def test_the_plan_is_at_most_the_engines_context_and_nearly_that(found: list[Finding]) -> None:
    assert len(found) == len(TRIED) * len(CASES) * len(SHARES)
    assert [each for each in found if not each.holds] == []
    assert all(each.engine_tokens > LEAST_WINDOW_TOKENS for each in found)


def test_a_plan_that_is_larger_or_too_small_is_outside(found: list[Finding]) -> None:
    first = found[0]
    assert not replace(first, planned_tokens=first.engine_tokens + 1).holds
    assert not replace(first, planned_tokens=first.engine_tokens * 97 // 100).holds
    assert "OUTSIDE" in context_table([replace(first, planned_tokens=1), *found[1:]])
    assert "OUTSIDE" not in context_table(found)


def test_the_whole_table_has_models_of_every_kind() -> None:
    architectures = {published()[name].architecture for name in MODELS}
    assert len(architectures) >= 10
    assert {"qwen35", "qwen3next", "gemma3", "gemma4", "deepseek2", "glm4moe", "nemotron_h"} <= architectures


@pytest.mark.parametrize("cache_type", [CacheType.F16, CacheType.Q8_0])
def test_mixers_side_by_side_are_bounded(
    exact_engine: DryRun, tmp_path: Path, cache_type: CacheType
) -> None:
    """Attention and Mamba-2 in one layer: from a micro batch of 640 tokens the engine needs a third more."""
    model = write(tmp_path / "model.gguf", published()["falcon-h1-7b"])
    facts = read_facts([model])
    for context in (4096, 32_768, 131_072):
        for micro_batch in (256, 512, 640, 1024, 2048):
            for slots in (1, 4):
                asked = Request(
                    model,
                    context,
                    slots,
                    micro_batch_tokens=micro_batch,
                    cache_type_k=cache_type,
                    cache_type_v=cache_type,
                    device=Backend.VULKAN,
                )
                engine = exact_engine.ask(asked).card.compute
                shape = cache_shape(
                    facts,
                    context_tokens=context,
                    parallel=slots,
                    batch_tokens=asked.batch_tokens,
                    micro_batch_tokens=micro_batch,
                )
                graph = compute.card_compute_bytes(facts, shape, cache_type, cache_type, Backend.VULKAN)
                charged = graph + compute.compute_margin_bytes(facts, shape, graph)
                assert engine <= charged <= 1.6 * engine, str(asked)


def test_an_engine_that_cannot_be_asked_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_engine: Path) -> None:
        raise DryRunUnavailableError("there is no C++ compiler")

    monkeypatch.setattr(planning_truth, "dry_run", refuse)
    assert planning_truth.main(["--contexts"]) == 1
    assert "no C++ compiler" in capsys.readouterr().out
