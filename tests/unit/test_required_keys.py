"""Files that the engine refuses are refused, files that it loads are not, whatever keys they lack or contradict.

``tests/data/key_verdicts.json`` has the verdicts of the engine's own dry runs: of a small model of each architecture
that the generator can write, with each key removed or altered while the tensors stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.architectures import ARCHITECTURES
from lllm3090d.checkpoints.engine_rules import ENGINE_RULES
from lllm3090d.checkpoints.facts import CheckpointFacts, read_facts
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType, cache_shape, context_bytes
from tests.fakes.gguf_files import Tensor, model_metadata, model_tensors, write_gguf
from tests.fakes.model_files import RECIPES, ModelSpec, published, tensors_of

pytestmark = pytest.mark.unit

VERDICTS = Path(__file__).parents[1] / "data" / "key_verdicts.json"


@cache
def verdicts() -> Mapping[str, Any]:
    models: dict[str, Any] = json.loads(VERDICTS.read_text(encoding="utf-8"))["models"]
    return models


def spec_of(model: Mapping[str, Any]) -> ModelSpec:
    names = ("architecture", "vocabulary", "keys", "quantisation", "tied")
    return ModelSpec("m", **{name: model[name] for name in names}, options=model.get("options", {}))


def metadata_of(spec: ModelSpec, changed: Mapping[str, Any]) -> dict[str, Any]:
    keys = {"vocab_size": spec.vocabulary, **spec.keys, **changed}
    tokens = {"token_type_count": 2} if spec.architecture in ("bert", "nomic-bert") else {}
    return {
        "general.architecture": spec.architecture,
        "tokenizer.ggml.model": "none",
        **{f"tokenizer.ggml.{key}": value for key, value in tokens.items()},
        **{f"{spec.architecture}.{key}": value for key, value in keys.items()},
    }


def altered(value: Any, change: str) -> Any:
    """The value after one of the changes that the file of verdicts describes."""
    match change, value:
        case "drop", _:
            return None
        case "short", list():
            return value[:-1]
        case "reverse", list():
            return value[::-1]
        case "first+1", [bool() as first, *rest]:
            return [not first, *rest]
        case "first+1", [first, *rest]:
            return [first + 1, *rest]
        case "flip", list():
            return [not item for item in value]
        case "flip", bool():
            return not value
        case "+1", list():
            return [item + 1 for item in value]
        case _, list():
            return [altered(item, change) if item else item for item in value]
    numbers = {"x2": value * 2, "/2": value // 2, "+1": value + 1, "-1": value - 1, "0": 0}
    return numbers[change]


def expected(model: Mapping[str, Any]) -> Iterator[tuple[str, str, int | None]]:
    """Key, change, and the bytes of its context; None where the engine refuses."""
    for key, found in model["verdicts"].items():
        yield from ((key, change, None) for change in found.get("refused", "").split())
        yield from ((key, change, model["context_bytes"]) for change in found.get("same", "").split())
        yield from ((key, change, size) for change, size in found.get("bytes", {}).items())


def context_of(facts: CheckpointFacts) -> int:
    """As in the dry runs: ``-c 4096 -b 2048 -ub 512``."""
    shape = cache_shape(facts, context_tokens=4096, parallel=1, batch_tokens=2048, micro_batch_tokens=512)
    return context_bytes(facts, shape, CacheType.F16, CacheType.F16)


def test_every_architecture_of_the_generator_has_verdicts() -> None:
    assert {model["architecture"] for model in verdicts().values()} == set(RECIPES)


@pytest.mark.parametrize("name", verdicts())
def test_altered_keys_are_refused_where_the_engine_refuses(tmp_path: Path, name: str) -> None:
    """And nowhere else; what is accepted has the engine's bytes."""
    model = verdicts()[name]
    spec = spec_of(model)
    tensors = tensors_of(spec)
    path = tmp_path / "m.gguf"
    assert (
        context_of(read_facts([write_gguf(path, metadata_of(spec, {}), tensors)])) == model["context_bytes"]
    )
    wrong: list[str] = []
    for key, change, size in expected(model):
        value = altered({"vocab_size": spec.vocabulary, **spec.keys}[key], change)
        write_gguf(path, metadata_of(spec, {key: value}), tensors)
        try:
            ours: int | None = context_of(read_facts([path]))
        except LlmError as error:
            assert error.code is ErrorCode.BAD_CHECKPOINT
            ours = None
        if ours != size:
            wrong.append(f"{key} {change}: {ours}, the engine {size}")
    assert wrong == []


def test_every_architecture_has_a_rule_of_the_engine() -> None:
    assert set(ENGINE_RULES) == set(ARCHITECTURES)


def refusal(path: Path) -> LlmError:
    with pytest.raises(LlmError) as caught:
        read_facts([path])
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT
    return caught.value


@pytest.mark.parametrize("architecture", sorted(RECIPES))
def test_a_required_key_is_named(tmp_path: Path, architecture: str) -> None:
    spec = next(spec_of(model) for model in verdicts().values() if model["architecture"] == architecture)
    tensors = tensors_of(spec)
    for key in ("context_length", "embedding_length", "block_count", *ENGINE_RULES[architecture].keys):
        path = write_gguf(tmp_path / "m.gguf", metadata_of(spec, {key: None}), tensors)
        error = refusal(path)
        assert error.details["key"] == f"{architecture}.{key}"
        assert "is missing" in error.message


def written(
    path: Path, spec: ModelSpec, changed: Mapping[str, Any] | None = None, without: str = "?"
) -> Path:
    tensors = [tensor for tensor in tensors_of(spec) if without not in tensor.name]
    return write_gguf(path, metadata_of(spec, changed or {}), tensors)


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("qwen3-8b", "blk.7.attn_k.weight"),
        ("qwen3-8b", "blk.7.attn_q.weight"),
        ("qwen3-8b", "blk.7.attn_v.weight"),
        ("phi-3.5-mini", "blk.7.attn_qkv.weight"),
        ("qwen3.5-27b", "blk.0.ssm_conv1d.weight"),
        ("qwen3.5-27b", "blk.3.attn_k.weight"),
        ("mamba-codestral-7b", "blk.7.ssm_in.weight"),
        ("lfm2-1.2b", "blk.0.shortconv.conv.weight"),
        ("deepseek-v2-lite", "blk.7.attn_kv_a_mqa.weight"),
        ("glm-4.7-flash", "blk.7.attn_q_a.weight"),
        ("glm-4.5-air", "blk.0.ffn_down.weight"),
        ("glm-4.5-air", "blk.7.ffn_down_exps.weight"),
        ("gemma-4-e2b", "per_layer_token_embd.weight"),
        ("gemma-4-e2b", "blk.3.inp_gate.weight"),
    ],
)
def test_tensors_that_the_facts_rely_on_must_be_there(tmp_path: Path, model: str, tensor: str) -> None:
    message = refusal(written(tmp_path / "m.gguf", published()[model], without=tensor)).message
    assert tensor.replace("attn_qkv", "attn_q") in message


def test_values_may_be_the_keys_where_the_engine_takes_them_for_it(tmp_path: Path) -> None:
    whole, shared = "gemma-4-e2b", "gemma-4-12b"
    assert read_facts([written(tmp_path / "a.gguf", published()[whole], without="blk.4.attn_v.")]).layers
    assert read_facts([written(tmp_path / "b.gguf", published()[shared])]).layers


def test_the_tokenizer_and_the_embedding_have_the_same_tokens(tmp_path: Path) -> None:
    metadata = model_metadata()
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(255)]}
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(metadata))
    assert "256 rows for 255 tokens" in refusal(path).message
    metadata["tokenizer.ggml.tokens"] += ["last"]
    assert read_facts([write_gguf(path, metadata, model_tensors(metadata))]).vocabulary_size == 256


def test_the_output_has_a_row_for_each_token(tmp_path: Path) -> None:
    metadata = model_metadata()
    tensors = [
        Tensor(t.name, (64, 128), t.type) if t.name == "output.weight" else t
        for t in model_tensors(metadata)
    ]
    assert "output.weight" in refusal(write_gguf(tmp_path / "m.gguf", metadata, tensors)).message


def test_layers_share_the_cache_of_a_layer_of_their_kind(tmp_path: Path) -> None:
    """Of the last two with a cache, a layer that slides shares the first and a dense one the second."""
    spec = published()["gemma-4-e2b"]
    error = refusal(written(tmp_path / "m.gguf", spec, {"attention.shared_kv_layers": 19}))
    assert error.details["key"] == "gemma4.attention.shared_kv_layers"
    assert "of the other kind" in error.message


@pytest.mark.parametrize(("key", "value"), [("context_length", 0), ("attention.sliding_window", 0)])
def test_what_would_load_and_be_of_no_use_is_refused(tmp_path: Path, key: str, value: int) -> None:
    """The engine loads both, but no token can be served: there is no room for it, or it sees nothing."""
    error = refusal(written(tmp_path / "m.gguf", published()["gemma-4-e2b"], {key: value}))
    assert error.details["key"] == f"gemma4.{key}"


def test_blocks_that_are_counted_but_not_there_are_no_fault(tmp_path: Path) -> None:
    """Where the engine knows no blocks for multi-token prediction it does not look for them."""
    spec = published()["qwen3-8b"]
    counted = written(tmp_path / "m.gguf", spec, {"nextn_predict_layers": 1}, without="blk.35.")
    facts = read_facts([counted])
    assert (len(facts.trunk), len(facts.context_layers), facts.has_mtp) == (35, 35, False)
    error = refusal(written(tmp_path / "n.gguf", spec, {"nextn_predict_layers": 1}))
    assert error.details["key"] == "qwen3.nextn_predict_layers"


def test_a_window_of_lfm2moe_is_ignored(tmp_path: Path) -> None:
    """Unlike lfm2's; seen in the engine's dry runs."""
    spec = published()["lfm2-1.2b"]
    window = {"attention.sliding_window": 64}
    assert read_facts([written(tmp_path / "a.gguf", spec, window)]).sliding_window_tokens == 64
    experts = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}
    keys = {**spec.keys, **experts, "expert_gating_func": 2, **window}
    tensors = tensors_of(spec)
    metadata = metadata_of(replace(spec, architecture="lfm2moe", keys=keys), {})
    facts = read_facts([write_gguf(tmp_path / "b.gguf", metadata, tensors)])
    assert facts.sliding_window_tokens == 0


def test_a_lite_model_has_no_rank_of_queries(tmp_path: Path) -> None:
    """Of other models of the architecture the engine demands it."""
    lite, other = published()["deepseek-v2-lite"], published()["glm-4.7-flash"]
    assert "attention.q_lora_rank" not in lite.keys
    assert read_facts([written(tmp_path / "lite.gguf", lite)]).latent is not None
    error = refusal(written(tmp_path / "other.gguf", other, {"attention.q_lora_rank": None}))
    assert error.details["key"] == "deepseek2.attention.q_lora_rank"
