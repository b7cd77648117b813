"""Facts of files that only draft for a model, and what of them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.facts import LayerKind, read_drafter_facts, read_facts
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.drafter_files import DRAFTERS, SIDECARS, write_drafter
from tests.fakes.gguf_files import Tensor, write_gguf, write_llama

pytestmark = pytest.mark.unit

EAGLE = {
    "general.architecture": "eagle3",
    "eagle3.context_length": 4096,
    "eagle3.block_count": 1,
    "eagle3.embedding_length": 64,
    "eagle3.feed_forward_length": 128,
    "eagle3.attention.head_count": 2,
    "eagle3.attention.head_count_kv": 1,
    "eagle3.attention.layer_norm_rms_epsilon": 1e-6,
    "eagle3.rope.dimension_count": 32,
    "eagle3.target_layers": [0, 1, 2],
    "eagle3.target_hidden_size": 96,
}
TENSORS = [
    Tensor("fc.weight", (288, 64)),
    Tensor("blk.0.attn_q.weight", (128, 64)),
    Tensor("blk.0.attn_k.weight", (128, 32)),
    Tensor("blk.0.attn_v.weight", (128, 32)),
    Tensor("blk.0.ffn_gate.weight", (64, 128)),
    Tensor("blk.0.ffn_up.weight", (64, 128)),
    Tensor("blk.0.ffn_down.weight", (128, 64)),
]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter(tmp_path: Path, name: str) -> None:
    facts = read_drafter_facts([write_drafter(tmp_path / "d.gguf", name)])
    spec = DRAFTERS[name]
    features = len(spec["target_layers"]) * spec.get("target_hidden_size", spec["embedding_length"])
    assert facts.drafter is not None
    assert facts.drafter.feature_length == features
    assert facts.drafter.reduced_vocabulary is ("own_words" in spec)
    assert facts.vocabulary_size == spec["vocabulary"]
    assert len(facts.layers) == spec["block_count"] and not facts.has_mtp
    assert {layer.kind for layer in facts.layers} <= {LayerKind.FULL, LayerKind.SLIDING}
    assert facts.weight_bytes <= facts.file_bytes


@pytest.mark.parametrize("name", SIDECARS)
def test_blocks_in_a_file_of_their_own(tmp_path: Path, name: str) -> None:
    """They draft; no model loads from them, and a whole model with such blocks can draft for another."""
    path = write_drafter(tmp_path / "mtp.gguf", name)
    facts = read_drafter_facts([path])
    assert facts.drafter is not None and facts.drafter.feature_length == facts.embedding_length
    assert facts.has_mtp and len(facts.mtp_layers) == 1
    assert sum(layer.weight_bytes for layer in facts.trunk) == 0 < facts.mtp_layers[0].weight_bytes
    with pytest.raises(LlmError) as caught:
        read_facts([path])
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT


def test_a_drafter_is_no_model(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "d.gguf", "eagle3-8b")
    with pytest.raises(LlmError, match="it is a drafter") as caught:
        read_facts([path])
    assert caught.value.code is ErrorCode.UNSUPPORTED_ARCHITECTURE


def refusal(path: Path, metadata: dict[str, Any], tensors: list[Tensor]) -> LlmError:
    with pytest.raises(LlmError) as caught:
        read_drafter_facts([write_gguf(path, metadata, tensors)])
    assert caught.value.hint
    return caught.value


def test_a_drafter_that_lacks_what_makes_it_one(tmp_path: Path) -> None:
    assert read_drafter_facts([write_gguf(tmp_path / "ok.gguf", EAGLE, TENSORS)]).vocabulary_size == 0
    no_fusion = refusal(tmp_path / "a.gguf", EAGLE, TENSORS[1:])
    assert no_fusion.code is ErrorCode.BAD_CHECKPOINT and "fc.weight" in no_fusion.message
    no_block = refusal(tmp_path / "b.gguf", EAGLE, TENSORS[:1])
    assert no_block.code is ErrorCode.BAD_CHECKPOINT and "block 0 of 1" in no_block.message
    with pytest.raises(LlmError, match="names no block that predicts further tokens"):
        read_drafter_facts([write_llama(tmp_path / "c.gguf", blocks=2)])


@pytest.mark.parametrize(
    "changes",
    [
        {"general.architecture": "gemma4-assistant"},
        {"general.architecture": "clip"},
        {"general.architecture": "nobody"},
        {"eagle3.hyper_connection_count": 4},
    ],
)
def test_drafters_that_nobody_has_compared_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    error = refusal(tmp_path / "d.gguf", {**EAGLE, **changes}, TENSORS)
    assert error.code is ErrorCode.UNSUPPORTED_ARCHITECTURE
