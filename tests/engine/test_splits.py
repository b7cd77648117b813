"""Launches over two and three stand-ins for cards: each card's weights and context to the byte, compute bounded."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from bench.dry_run import DryRun, Request
from bench.splits import asked, cases, differences, main, recorded
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.split import assigned_layers
from tests.fakes.model_files import published, write
from tests.unit.engine_truth import POLICY

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("models", [slice(None, None, 2), slice(1, None, 2)], ids=["even", "odd"])
def test_every_card_has_what_the_engine_puts_there(exact_engine: DryRun, models: slice) -> None:
    chosen = sorted({case.model for case in cases()})[models]
    rows = list(asked(exact_engine, (case for case in cases() if case.model in chosen)))
    assert [text for case, facts in rows for text in differences(case, facts, POLICY)] == []
    assert len({facts.architecture for _, facts in rows}) >= 5


def test_recorded_rows_are_the_engines(exact_engine: DryRun) -> None:
    """A few, so that the record is of this engine."""
    chosen = [row for row in recorded() if row.model in {"smollm2-135m", "qwen3.5-35b-a3b-mtp"}]
    empty = (replace(row, cards=(), drafts=(), host_compute=0) for row in chosen)
    assert [case for case, _ in asked(exact_engine, empty)] == chosen


@pytest.mark.parametrize("shares", [(1, 1), (7, 3), (1, 0), (0, 1), (5, 5, 5), (1, 2, 4, 8)])
def test_any_shares_are_understood_as_the_engine_does(exact_engine: DryRun, shares: tuple[int, ...]) -> None:
    """By the cache: each layer of this model has the same."""
    with tempfile.TemporaryDirectory() as folder:
        model = write(Path(folder) / "model.gguf", published()["llama-3.1-8b"])
        request = Request(model, device=Backend.VULKAN, shares=shares, cache_type_k=CacheType.F16)
        answer = exact_engine.ask(request)
    counts = list(assigned_layers(33, shares))
    counts[max(index for index, count in enumerate(counts) if count)] -= 1  # the output has no cache
    each = answer.card.context // 32
    assert [card.context // each for card in answer.cards] == counts


def test_the_comparison_can_be_called(dry_run_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run_engine
    assert main(["smollm2-135m"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    for wrong in (["no-such-model"], ["--write", "smollm2-135m"]):
        with pytest.raises(SystemExit):
            main(wrong)
