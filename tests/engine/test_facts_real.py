"""Real checkpoints: our reader against the reference reader, and the figures that planning uses."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from lllm3090d.checkpoints.facts import LayerKind, read_facts
from lllm3090d.checkpoints.header import Unread, read_header

pytestmark = pytest.mark.engine


@functools.cache
def reference_reader(path: Path) -> GGUFReader:
    """It builds every token, which takes seconds."""
    return GGUFReader(path)


@pytest.fixture(params=["smollm2_path", "gemma3_path"])
def model_path(request: pytest.FixtureRequest) -> Path:
    path: Any = request.getfixturevalue(request.param)
    return Path(path)


def test_header_agrees_with_the_reference_reader(model_path: Path) -> None:
    ours, reference = read_header(model_path), reference_reader(model_path)
    assert [(t.name, list(t.shape), t.type_name, t.offset, t.size_bytes) for t in ours.tensors] == [
        (t.name, t.shape.tolist(), t.tensor_type.name, t.data_offset, t.n_bytes) for t in reference.tensors
    ]
    theirs = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(theirs)
    for key, value in ours.metadata.items():
        if isinstance(value, Unread):
            assert value.count == len(theirs[key].data), key
        else:
            expected = theirs[key].contents()
            assert value == (tuple(expected) if isinstance(expected, list) else expected), key


def test_weights_by_place_agree_with_the_reference_reader(model_path: Path) -> None:
    facts, reference = read_facts([model_path]), reference_reader(model_path)
    sizes = {tensor.name: tensor.n_bytes for tensor in reference.tensors}
    assert facts.token_embedding_bytes == sizes["token_embd.weight"]
    assert facts.output_bytes == sizes.get("output.weight", 0)
    assert facts.weight_bytes == sum(sizes.values())
    assert facts.file_bytes == model_path.stat().st_size
    for index, layer in enumerate(facts.layers):
        block = f"blk.{index}."
        assert layer.weight_bytes == sum(size for name, size in sizes.items() if name.startswith(block))
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reference.tensors}
    for index, layer in enumerate(facts.layers):
        assert layer.k_values == shapes[f"blk.{index}.attn_k.weight"][1]
        assert layer.v_values == shapes[f"blk.{index}.attn_v.weight"][1]
        assert layer.feed_forward_length == shapes[f"blk.{index}.ffn_gate.weight"][1]
        assert layer.head_count * layer.key_length == shapes[f"blk.{index}.attn_q.weight"][1]


def test_smollm2(smollm2_path: Path) -> None:
    facts = read_facts([smollm2_path])
    assert facts.architecture == "llama"
    assert facts.quantisation == "Q4_1"
    assert facts.trained_context_tokens == 8192
    assert facts.vocabulary_size == 49152
    assert len(facts.layers) == 30
    assert {(layer.kind, layer.k_values, layer.v_values) for layer in facts.layers} == {
        (LayerKind.FULL, 192, 192)
    }
    assert facts.output_is_tied
    assert facts.has_chat_template


def test_gemma3(gemma3_path: Path) -> None:
    facts = read_facts([gemma3_path])
    assert facts.architecture == "gemma3"
    assert facts.quantisation == "Q4_K_M"
    assert facts.sliding_window_tokens == 512
    assert [i for i, layer in enumerate(facts.layers) if layer.kind is LayerKind.FULL] == [5, 11, 17]
    assert {(layer.k_values, layer.v_values) for layer in facts.layers} == {(256, 256)}


def test_a_real_vocabulary_is_cheap(gemma3_path: Path) -> None:
    started = time.process_time()
    found = read_header(gemma3_path)
    assert time.process_time() - started < 0.3
    assert found.metadata["tokenizer.ggml.tokens"] == Unread(262144, 979)
