"""Models that are sound and cannot be planned: what is said of each kind, and what to do instead."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.purpose import Pooling, Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.lookup import FoundModel, Lookup
from lllm3090d.serving.unplanned import unplanned
from lllm3090d.settings import Settings
from tests.fakes.model_files import published, write
from tests.unit.engine_truth import facts_of

pytestmark = pytest.mark.unit

PATH = Path("/models/it's a/m.gguf")
ENCODER = facts_of("bge-large-en")


def refusal(kind: Kind, architecture: str = "modern-bert") -> LlmError:
    error = unplanned(PATH, kind, replace(ENCODER, architecture=architecture))
    assert error is not None
    assert error.code is ErrorCode.UNSUPPORTED_ARCHITECTURE
    assert error.message.startswith(f"{PATH} is a")
    assert f"(architecture {architecture})" in error.message
    assert "This version does not run it: it cannot tell beforehand how much memory" in error.message
    return error


@pytest.mark.parametrize(
    ("kind", "switch"), [(Kind.EMBEDDING, "--embeddings"), (Kind.RERANK, "--reranking")]
)
def test_encoders_are_told_by_what_they_are_good_for(kind: Kind, switch: str) -> None:
    error = refusal(kind)
    assert str(kind) in error.message
    assert error.hint is not None
    command = error.hint.split(": ", 1)[1].split(" (its memory")[0]
    assert shlex.split(command) == ["llama-server", switch, "-m", str(PATH)]


def test_what_only_looks_like_a_model_is_no_encoder_to_embed_with() -> None:
    error = refusal(Kind.MODEL)
    assert "an encoder or a diffusion model" in error.message
    assert error.hint == "Choose a model of another architecture."


def test_a_text_model_without_a_formula_can_be_run_by_hand() -> None:
    error = refusal(Kind.MODEL, "rwkv7")
    assert "a model that generates text" in error.message
    assert error.hint is not None
    assert "llama-server -m " in error.hint


def test_what_can_be_planned_is_no_problem() -> None:
    assert unplanned(PATH, Kind.MODEL, facts_of("llama-3.1-8b")) is None
    assert unplanned(PATH, Kind.EMBEDDING, facts_of("qwen3-8b")) is None
    assert unplanned(PATH, Kind.EMBEDDING, ENCODER) is None


def test_a_load_of_an_encoder_with_a_formula_is_found(tmp_path: Path) -> None:
    """Before an engine is looked for: there is none here."""
    chosen = Settings(models_dir=tmp_path / "models", state_dir=tmp_path / "state", llama_dir=tmp_path)
    write(chosen.models_dir / "bge" / "m.gguf", published()["bge-large-en"])
    lookup = Lookup(lambda: chosen)
    found = lookup.model("bge")
    asyncio.run(lookup.close())
    assert isinstance(found, FoundModel)
    assert (found.facts.purpose, found.facts.pooling) == (Purpose.EMBEDDING, Pooling.CLS)
