"""A plan is held against the real engine's dry run, when somebody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from lllm3090d.engines.builds import find_build
from lllm3090d.engines.probe import probe
from lllm3090d.planning.projection import Where
from lllm3090d.serving.previews import Previews
from lllm3090d.settings import load_settings
from lllm3090d.wire import PlanBody, PlanView
from tests.fakes.model_files import published, write
from tests.fakes.plan_desk import HOST, Desk

pytestmark = pytest.mark.engine


@pytest.fixture
def desk(llama_server: Path, tmp_path: Path) -> Iterator[Desk]:
    """The real engine and host memory in place of a card."""
    made = Desk(tmp_path, catalogue_file=tmp_path / "catalogue.json", micro_batch_tokens=64)
    (tmp_path / "catalogue.json").write_text('{"schema": 1, "models": []}')
    build = find_build(
        load_settings(tmp_path / "none.toml", {"LLLM3090_LLAMA_DIR": str(llama_server.parent)})
    )
    made.lookup.next_engine = (build, probe(build))
    made.card, made.reserved_bytes = HOST, 0
    yield made
    asyncio.run(made.lookup.close())


def checked(desk: Desk, model: str) -> PlanView:
    write(desk.settings.models_dir / model / "model.gguf", published()[model])
    body = PlanBody.model_validate({"model": model, "context_tokens": 4096, "parallel": 1, "check": True})
    return asyncio.run(Previews(desk.daemon).plan(body))


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma-3-270m", "qwen3.5-27b-mtp", "lfm2-1.2b"])
def test_our_arithmetic_and_the_engines_agree(desk: Desk, model: str) -> None:
    found = checked(desk, model).engine_check
    assert found is not None
    assert found.agrees is True, found.text
    assert found.where is Where.HOST
    assert found.ours and found.engine


def test_a_second_look_runs_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is kept for this checkpoint, build and arguments."""
    first = checked(desk, "smollm2-135m").engine_check
    monkeypatch.setattr("lllm3090d.engines.dry_run.run_program", None)
    assert checked(desk, "smollm2-135m").engine_check == first


def test_nobody_asks_without_being_told(desk: Desk) -> None:
    write(desk.settings.models_dir / "a" / "model.gguf", published()["smollm2-135m"])
    assert asyncio.run(Previews(desk.daemon).plan(PlanBody(model="a"))).engine_check is None
