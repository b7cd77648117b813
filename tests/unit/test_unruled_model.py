"""What the header of a model without a rule says, and which models the engine's dry run prices at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.architectures import ARCHITECTURES, REFUSED, UNRULED
from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.checkpoints.unruled import WITHOUT_FORMULA, generates_text, read_unruled
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.costs import state_bytes_per_slot
from lllm3090d.serving.unplanned import Described, described
from tests.fakes.gguf_files import Tensor, Typed, write_gguf
from tests.unit.engine_truth import facts_of

pytestmark = pytest.mark.unit

METADATA: dict[str, Any] = {
    "general.architecture": "kimi-k3",
    "kimi-k3.context_length": Typed("u32", 32_768),
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
TABLE = Tensor("token_embd.weight", (64, 500), "F16")


def described_file(path: Path, kind: Kind = Kind.MODEL) -> Described:
    return described((path,), kind, "m", read_facts, read_unruled)


@pytest.mark.parametrize("architecture", ["kimi-k3", "brand-new"])
def test_what_a_header_says_without_a_rule(tmp_path: Path, architecture: str) -> None:
    metadata = {key.replace("kimi-k3", architecture): value for key, value in METADATA.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata | {"general.architecture": architecture}, [TABLE])
    found = read_unruled((path,), "my model")
    assert (found.architecture, found.title, found.quantisation) == (architecture, "my model", "F16")
    assert (found.trained_context_tokens, found.vocabulary_size) == (32_768, 500)
    assert found.file_bytes == path.stat().st_size
    assert found.reason == UNRULED.get(architecture, "no rule says how the engine keeps its context")
    assert found.state_bytes_per_slot is None
    assert described_file(path) == Described(None, replace(found, title="m"))


def test_the_vocabulary_is_the_most_of_what_is_said(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, [Tensor("t", (8,))])
    assert read_unruled((path,), "m").vocabulary_size == 3
    more = METADATA | {"kimi-k3.vocab_size": Typed("u32", 9000)}
    path = write_gguf(tmp_path / "n.gguf", more, [TABLE])
    assert read_unruled((path,), "m").vocabulary_size == 9000


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kimi-k3.context_length": None}, "kimi-k3.context_length"),
        ({"kimi-k3.context_length": Typed("u32", 0)}, "kimi-k3.context_length"),
        ({"kimi-k3.context_length": "long"}, "kimi-k3.context_length"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"kimi-k3.vocab_size": "many"}, "kimi-k3.vocab_size"),
    ],
)
def test_a_key_that_is_missing_or_wrong_is_named(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    metadata = {name: value for name, value in (METADATA | change).items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", metadata, [Tensor("t", (8,))])
    with pytest.raises(LlmError) as caught:
        described_file(path)
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT
    assert caught.value.details["key"] == key


@pytest.mark.parametrize("architecture", sorted(REFUSED))
def test_what_generates_no_text_is_refused(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": architecture}, [TABLE])
    found = described_file(path)
    assert found.unruled is None
    assert found.problem is not None
    assert found.problem.code is ErrorCode.UNSUPPORTED_ARCHITECTURE
    assert REFUSED[architecture] in found.problem.message


@pytest.mark.parametrize("kind", [Kind.EMBEDDING, Kind.RERANK])
def test_embedding_and_rerank_models_are_refused(tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, [TABLE])
    assert described_file(path, kind).problem is not None
    encoder = replace(facts_of("bge-large-en"), architecture="modern-bert")
    for each in (kind, Kind.MODEL):
        found = described((path,), each, "m", lambda _: encoder, read_unruled)
        assert found.unruled is None
        assert found.problem is not None


def test_no_architecture_is_in_two_lists() -> None:
    assert not set(UNRULED) & set(REFUSED)
    assert not set(UNRULED) & set(ARCHITECTURES)
    assert all(map(generates_text, UNRULED))


def test_a_model_without_a_formula_keeps_what_its_rule_tells() -> None:
    """Of a recurrent one the states are known, so a dry run may be made on the card."""
    facts = replace(facts_of("mamba-codestral-7b"), architecture="rwkv7")
    found = described((Path("/m.gguf"),), Kind.MODEL, "m", lambda _: facts, read_unruled)
    assert found.facts is facts
    assert found.problem is None
    assert found.unruled is not None
    assert found.unruled.reason == WITHOUT_FORMULA
    assert found.unruled.state_bytes_per_slot == state_bytes_per_slot(facts) > 0
    assert found.unruled.vocabulary_size == facts.vocabulary_size


def test_a_model_with_a_rule_needs_no_dry_run() -> None:
    facts = facts_of("llama-3.1-8b")
    assert described((Path("/m.gguf"),), Kind.MODEL, "m", lambda _: facts, read_unruled) == Described(facts)
