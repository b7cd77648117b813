"""How layers of every kind keep their context, and the contradictions that make a file unusable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind, Memory, read_facts
from lllm3090d.checkpoints.weights import block_of, place_in_block, place_outside, row_padding_bytes
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.demanded_tensors import fitted
from tests.fakes.gguf_files import Tensor, model_metadata, model_tensors, write_gguf
from tests.fakes.model_files import ModelSpec, published, tensors_of, write
from tests.unit.engine_truth import facts_of

pytestmark = pytest.mark.unit

KINDS = {
    "embeddinggemma-300m": {"none": 24},
    "bge-large-en": {"none": 24},
    "deepseek-v2-lite": {"latent": 27},
    "falcon-h1-7b": {"full": 44},
    "gemma-3n-e4b": {"sliding": 16, "full": 4, "shared": 15},
    "gemma-4-26b-a4b": {"sliding": 25, "full": 5},
    "gemma-4-e2b": {"sliding": 12, "full": 3, "shared": 20},
    "gpt-oss-20b": {"sliding": 12, "full": 12},
    "granite-4.0-h-tiny": {"recurrent": 36, "full": 4},
    "jamba-52b": {"recurrent": 28, "full": 4},
    "lfm2-1.2b": {"recurrent": 10, "full": 6},
    "mamba-2.8b": {"recurrent": 64},
    "muse-glimmer-30b": {"sliding": 39, "full": 13},
    "nemotron-nano-9b-v2": {"recurrent": 27, "none": 25, "full": 4},
    "phi-3.5-mini": {"full": 32},
    "qwen3-next-80b-a3b": {"recurrent": 36, "full": 12},
    "qwen3.5-27b-mtp": {"recurrent": 48, "full": 17},
}


@pytest.mark.parametrize("model", KINDS)
def test_kinds_of_published_models(model: str) -> None:
    assert Counter(str(layer.kind) for layer in facts_of(model).layers) == KINDS[model]


def changed(tmp_path: Path, model: str, keys: Mapping[str, Any], drop: str = "?") -> Path:
    """A published model with other metadata, but the tensors it had."""
    spec = published()[model]
    tensors = [tensor for tensor in tensors_of(spec) if not tensor.name.startswith(drop)]
    metadata = {
        "general.architecture": spec.architecture,
        **{f"{spec.architecture}.{key}": value for key, value in {**spec.keys, **keys}.items()},
    }
    return write_gguf(tmp_path / "m.gguf", metadata, tensors)


def refusal(path: Path) -> LlmError:
    with pytest.raises(LlmError) as caught:
        read_facts([path])
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("gemma-4-e2b", "attention.sliding_window_pattern", None),
        ("gemma-4-e2b", "attention.sliding_window_pattern", 5),
        ("gemma-4-e2b", "attention.value_length_swa", 128),
        ("gemma-4-e2b", "attention.shared_kv_layers", 19),
        ("gemma-4-e2b", "attention.sliding_window_pattern", [False] * 35),
        ("gemma-4-e2b", "attention.sliding_window", None),
        ("gemma-4-e2b", "attention.sliding_window", 0),
        ("gemma-4-e2b", "attention.shared_kv_layers", 35),
        ("gemma-4-e2b", "attention.head_count_kv", [1] * 36),
        ("gemma-4-e2b", "embedding_length_per_layer_input", "256"),
        ("gpt-oss-20b", "attention.sliding_window", None),
        ("deepseek-v2-lite", "attention.value_length_mla", None),
        ("deepseek-v2-lite", "attention.kv_lora_rank", None),
        ("qwen3.5-27b", "ssm.state_size", None),
        ("qwen3.5-27b", "ssm.conv_kernel", 0),
        ("qwen3.5-27b", "ssm.group_count", None),
        ("qwen3.5-27b", "full_attention_interval", 0),
        ("qwen3.5-27b", "attention.recurrent_layers", [True] * 63),
        ("qwen3.5-27b-mtp", "nextn_predict_layers", 65),
        ("qwen3.5-27b-mtp", "nextn_predict_layers", -1.5),
        ("jamba-52b", "attention.head_count_kv", [0] * 31),
        ("lfm2-1.2b", "shortconv.l_cache", None),
        ("nemotron-nano-9b-v2", "feed_forward_length", [0] * 3),
        ("qwen3-30b-a3b", "expert_used_count", 129),
        ("qwen3-8b", "nextn_predict_layers", 1),
        ("qwen3-8b", "rope.freq_base", "large"),
    ],
)
def test_missing_and_malformed_keys_are_named(tmp_path: Path, model: str, key: str, value: Any) -> None:
    error = refusal(changed(tmp_path, model, {key: value}))
    assert error.details["key"] == f"{published()[model].architecture}.{key}"


def test_contradictions_name_what_is_wrong(tmp_path: Path) -> None:
    """64 layers of tensors with a block_count of 65, and the other ways round."""
    error = refusal(changed(tmp_path, "qwen3.5-27b", {"block_count": 65}))
    assert "block 64 of 65 has no tensors" in error.message
    assert error.details["key"] == "qwen35.block_count"
    assert "qwen35.block_count" in error.message
    error = refusal(changed(tmp_path, "qwen3-8b", {"attention.head_count_kv": 4}))
    assert error.details["key"] == "qwen3.attention.head_count_kv"
    assert "qwen3.attention.head_count_kv" in error.message
    error = refusal(changed(tmp_path, "qwen3.5-27b-mtp", {"block_count": 64, "nextn_predict_layers": None}))
    assert "beyond the block_count of 64" in error.message
    error = refusal(changed(tmp_path, "qwen3.5-27b-mtp", {"nextn_predict_layers": None}))
    assert "nextn_predict_layers leaves block 64 in the trunk" in error.message
    error = refusal(changed(tmp_path, "deepseek-v2-lite", {"attention.key_length": 512}))
    assert "attn_kv_a_mqa" in error.message
    narrow = {"attention.key_length_swa": 128, "attention.value_length_swa": 128}
    error = refusal(changed(tmp_path, "gemma-4-e2b", narrow))
    assert "blk.0.attn_k.weight" in error.message


def test_drafting_needs_the_tensors_not_only_the_key(tmp_path: Path) -> None:
    """Without them the engine loads some architectures for what is left, and others not at all."""
    for whole in ("qwen3.5-27b-mtp", "glm-4.5-air"):
        assert facts_of(whole).has_mtp
        assert len(facts_of(whole).mtp_layers) == 1
    assert not facts_of("qwen3.5-27b").has_mtp
    stripped = read_facts([changed(tmp_path, "glm-4.5-air", {}, "blk.46.nextn")])
    assert not stripped.has_mtp
    error = refusal(changed(tmp_path, "qwen3.5-27b-mtp", {}, "blk.64.nextn"))
    assert "blk.64.nextn.eh_proj.weight is missing" in error.message


def test_blocks_that_were_stripped_are_missed_only_where_the_engine_misses_them(tmp_path: Path) -> None:
    facts = read_facts([changed(tmp_path, "glm-4.5-air", {}, "blk.46.")])
    assert not facts.has_mtp
    assert facts.trunk == facts_of("glm-4.5-air").trunk
    assert (
        "block 64 of 65 has no tensors"
        in refusal(changed(tmp_path, "qwen3.5-27b-mtp", {}, "blk.64.")).message
    )


def test_rollback_needs_a_state() -> None:
    assert facts_of("qwen3.5-27b").rolls_back
    assert facts_of("nemotron-nano-9b-v2").rolls_back
    assert not facts_of("qwen3-next-80b-a3b").rolls_back  # the engine cannot
    assert not facts_of("glm-4.5-air").rolls_back  # nothing to take back


def test_named_recurrent_layers_come_before_the_interval(tmp_path: Path) -> None:
    named = [i % 4 != 3 for i in range(64)]
    facts = read_facts([changed(tmp_path, "qwen3.5-27b", {"attention.recurrent_layers": named})])
    assert facts.layers == facts_of("qwen3.5-27b").layers


# What the engine demands beside what every small model has. Its blocks are all dense.
DEMANDED: Mapping[str, Mapping[str, Any]] = {
    "cohere2": {"logit_scale": 1.0, "attention.layer_norm_epsilon": 1e-5},
    "cohere2moe": {"logit_scale": 1.0, "leading_dense_block_count": 64, "expert_feed_forward_length": 32},
    "exaone-moe": {
        "leading_dense_block_count": 64,
        "expert_feed_forward_length": 32,
        "expert_gating_func": 2,
        "expert_count": 2,
        "expert_used_count": 1,
    },
    "granitemoe": {"logit_scale": 1.0},
    "laguna": {"leading_dense_block_count": 64, "expert_feed_forward_length": 32},
    "llama4": {"expert_feed_forward_length": 32, "interleave_moe_layer_step": 1},
    "mimo2": {"expert_feed_forward_length": 32},
    "smallthinker": {
        "expert_gating_func": 2,
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 32,
    },
}


def small(architecture: str, tmp_path: Path, keys: Mapping[str, Any], blocks: int = 8) -> CheckpointFacts:
    demanded = DEMANDED.get(architecture, {})
    prefixed = {f"{architecture}.{key}": value for key, value in {**demanded, **keys}.items()}
    metadata = model_metadata(architecture, blocks=blocks, metadata=prefixed)
    tensors = model_tensors(metadata)
    if architecture == "plamo3":  # gate and up are one
        tensors = [
            Tensor(t.name, (64, 256), t.type) if t.name.endswith("ffn_up.weight") else t
            for t in tensors
            if not t.name.endswith("ffn_gate.weight")
        ]
    return read_facts([write_gguf(tmp_path / "m.gguf", metadata, fitted(metadata, tensors))])


F, S = LayerKind.FULL, LayerKind.SLIDING
INDEXER = {"head_count": 4, "key_length": 128, "top_k": 64}
WINDOW = {"attention.sliding_window": 512}


@pytest.mark.parametrize(
    ("architecture", "keys", "kinds", "window"),
    [
        ("gemma2", {}, [S, F] * 4, 4096),
        ("gemma2", WINDOW, [S, F] * 4, 512),
        ("cohere2", WINDOW, [S, S, S, F] * 2, 512),
        ("cohere2moe", WINDOW, [F, S, S, S] * 2, 512),
        ("smallthinker", WINDOW, [F, S, S, S] * 2, 4096),
        ("smallthinker", {}, [F] * 8, 0),
        ("laguna", WINDOW, [F, S, S, S] * 2, 512),
        ("llama4", {}, [S, S, S, F] * 2, 8192),
        ("llama4", WINDOW, [S, S, S, F] * 2, 8192),
        ("llama4", {"attention.sliding_window": 0}, [F] * 8, 0),
        ("olmo2", {}, [F] * 8, 0),
        ("olmo2", WINDOW, [S, S, S, F] * 2, 512),
        ("plamo3", WINDOW, [S] * 7 + [F], 512),
        ("exaone4", WINDOW, [F] * 8, 0),  # only the one with 64 layers slides
        ("mimo2", {**WINDOW, "attention.sliding_window_pattern": [True] * 5 + [False] * 3}, [S] * 5 + [F] * 3, 512),
        ("mistral3", WINDOW, [F] * 8, 0),
        ("granitemoe", WINDOW, [F] * 8, 0),
    ],
)  # fmt: skip
def test_windows_of_the_architectures(
    tmp_path: Path, architecture: str, keys: Mapping[str, Any], kinds: list[LayerKind], window: int
) -> None:
    facts = small(architecture, tmp_path, keys)
    assert [layer.kind for layer in facts.layers] == kinds
    assert facts.sliding_window_tokens == window


def test_exaone4_of_64_layers_slides(tmp_path: Path) -> None:
    facts = small("exaone4", tmp_path, {}, blocks=64)
    assert facts.sliding_window_tokens == 4096
    assert [layer.kind for layer in facts.layers] == [S, S, S, F] * 16


def test_blocks_that_are_never_loaded_are_no_drafter(tmp_path: Path) -> None:
    keys = {**DEMANDED["exaone-moe"], "nextn_predict_layers": 1, "attention.sliding_window": 128}
    prefixed = {f"exaone-moe.{key}": value for key, value in keys.items()}
    metadata = model_metadata("exaone-moe", blocks=5, metadata=prefixed)
    tensors = fitted(
        metadata, [*model_tensors(metadata), Tensor("blk.4.nextn.eh_proj.weight", (128, 64), "Q8_0")]
    )
    facts = read_facts([write_gguf(tmp_path / "m.gguf", metadata, tensors)])
    assert (len(facts.trunk), len(facts.mtp_layers), facts.has_mtp) == (4, 1, False)


def test_an_indexer_has_rows_of_its_own(tmp_path: Path) -> None:
    spec = published()["glm-4.7-flash"]
    indexer = {f"attention.indexer.{key}": value for key, value in INDEXER.items()}
    keys = {**spec.keys, **indexer, "expert_gating_func": 2}
    metadata = {
        "general.architecture": "deepseek32",
        **{f"deepseek32.{key}": value for key, value in keys.items()},
    }
    facts = read_facts([write_gguf(tmp_path / "m.gguf", metadata, fitted(metadata, tensors_of(spec)))])
    assert {(layer.kind, layer.k_values, layer.index_values) for layer in facts.layers} == {
        (LayerKind.LATENT, 576, 128)
    }


def test_linear_attention_of_kimi(tmp_path: Path) -> None:
    """KDA: three convolutions and one square matrix per head."""
    blocks, width = 4, 64
    keys = {
        "block_count": blocks,
        "context_length": 4096,
        "embedding_length": width,
        "feed_forward_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.head_count": 4,
        "attention.head_count_kv": [0, 0, 0, 1],
        "attention.key_length": 96,
        "attention.value_length": 64,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "attention.kv_lora_rank": 64,
        "rope.dimension_count": 32,
        "ssm.conv_kernel": 4,
        "kda.head_dim": 16,
        "leading_dense_block_count": blocks,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
    }
    metadata = {
        "general.architecture": "kimi-linear",
        **{f"kimi-linear.{key}": value for key, value in keys.items()},
    }
    feed_forward = {"ffn_gate": (width, 128), "ffn_up": (width, 128), "ffn_down": (128, width)}
    recurrent = {
        **{f"attn_{letter}": (width, 64) for letter in "qkv"},
        **{f"ssm_conv1d_{letter}": (4, 1, 64) for letter in "qkv"},
        "ssm_beta": (width, 4),
        "attn_output": (64, width),
    }
    latent = {
        "attn_q": (width, 4 * 48),
        "attn_kv_a_mqa": (width, 96),
        "attn_k_b": (16, 64, 4),
        "attn_v_b": (64, 32, 4),
        "attn_output": (4 * 32, width),
    }
    tensors = [Tensor("token_embd.weight", (width, 64), "Q8_0")]
    for i in range(blocks):
        shapes = {**feed_forward, **(latent if i == 3 else recurrent)}
        tensors += [Tensor(f"blk.{i}.{name}.weight", shape) for name, shape in shapes.items()]
    tensors = fitted(metadata, tensors, states=range(3))
    facts = read_facts([write_gguf(tmp_path / "m.gguf", metadata, tensors)])
    swapped = {**metadata, "kimi-linear.attention.head_count_kv": [1, 0, 0, 0]}
    error = refusal(write_gguf(tmp_path / "swapped.gguf", swapped, tensors))
    assert "block 0 has the tensors of a state" in error.message
    assert [str(layer.kind) for layer in facts.layers] == ["recurrent"] * 3 + ["latent"]
    assert (facts.layers[0].conv_values, facts.layers[0].state_values) == (3 * 3 * 4 * 16, 16 * 16 * 4)
    assert (facts.layers[3].k_values, facts.layers[3].v_values) == (96, 0)
    assert facts.keeps_state


@pytest.mark.parametrize("model", published())
def test_every_byte_has_a_place(tmp_path: Path, model: str) -> None:
    spec = published()[model]
    sizes = {tensor.name: tensor.size_bytes for tensor in tensors_of(spec)}
    facts = read_facts([write(tmp_path / "m.gguf", spec)])
    assert facts.weight_bytes == sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if "exps." in name)
    assert sum(layer.weights.experts.stored for layer in facts.layers) == experts
    assert facts.token_embedding_bytes == sizes["token_embd.weight"]
    assert facts.tables.per_layer_embeddings.stored == sizes.get("per_layer_token_embd.weight", 0)
    for layer in facts.layers:
        assert layer.weights.all.host >= layer.weight_bytes > 0
        assert bool(layer.weights.recurrent.stored) is layer.keeps_state
        has_attention = layer.owns_kv or layer.kind in (LayerKind.SHARED, LayerKind.NONE)
        assert has_attention or not layer.weights.attention.stored


@pytest.mark.parametrize(
    ("name", "recurrent", "place"),
    [
        ("attn_q.weight", False, "attention"),
        ("attn_qkv.weight", True, "recurrent"),
        ("attn_norm.weight", False, "other"),
        ("ssm_norm.weight", True, "recurrent"),
        ("ffn_down.weight", False, "feed_forward"),
        ("ffn_gate_up_exps.weight", False, "experts"),
        ("ffn_down_chexps.weight", False, "experts"),
        ("ffn_down_exps.scale", False, "experts"),
        ("ffn_up_shexp.weight", False, "feed_forward"),
        ("ffn_gate_inp.weight", False, "feed_forward"),
        ("exp_probs_b.bias", False, "feed_forward"),
        ("nextn.eh_proj.weight", False, "other"),
    ],
)
def test_places_in_a_block(name: str, recurrent: bool, place: str) -> None:
    assert place_in_block(name, recurrent) == place


def test_places_outside_the_blocks() -> None:
    assert block_of("blk.12.attn_q.weight") == (12, "attn_q.weight")
    assert block_of("per_layer_model_proj.weight") == (0, "per_layer_model_proj.weight")
    assert block_of("output.weight") is None
    assert block_of("token_embd_norm.weight") == (0, "token_embd_norm.weight")
    assert block_of("token_embd_norm.weight", embedding_norm_is_final=True) is None
    assert place_outside("output_norm.weight") == "output_other"
    assert place_outside("rope_freqs.weight") == "rope"
    assert place_outside("position_embd.weight") == "input"


def test_cuda_fills_the_last_row_up() -> None:
    assert row_padding_bytes(512, 32, 34) == 0
    assert row_padding_bytes(576, 32, 34) == 448 // 32 * 34
    assert row_padding_bytes(576, 1, 2) == 0  # nothing quantised
    weights = facts_of("smollm2-135m").layers[0].weights.all
    assert weights.in_memory(Memory.CUDA) > weights.in_memory(Memory.VULKAN) == weights.stored


def test_rope_of_a_stretched_model(tmp_path: Path) -> None:
    keys = {
        "rope.freq_base": 1e6,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 1024,
        "rope.dimension_count": 8,
    }
    rope = small("gemma2", tmp_path, keys).rope
    assert rope is not None
    assert (rope.base, rope.dimensions, rope.scaling, rope.factor) == (1e6, 8, "yarn", 4.0)
    assert rope.original_context_tokens == 1024
    assert facts_of("mamba-2.8b").rope is None


def test_a_spec_is_data() -> None:
    spec = published()["qwen3-8b"]
    assert isinstance(spec, ModelSpec)
    wider = replace(spec, vocabulary=2 * spec.vocabulary)
    assert sum(t.size_bytes for t in tensors_of(wider)) > sum(t.size_bytes for t in tensors_of(spec))


@pytest.mark.parametrize("width", [0, 1856])
def test_a_drafting_block_of_nemotron_has_its_cache_where_the_engine_puts_it(
    tmp_path: Path, width: int
) -> None:
    """In the draft context always; in the main one, unused, where its feed-forward length is 0."""
    spec = published()["nemotron-3-nano-30b-a3b"]
    keys = {
        **spec.keys,
        "block_count": 53,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [*spec.keys["attention.head_count_kv"], 2],
        "feed_forward_length": [*spec.keys["feed_forward_length"], width],
    }
    facts = read_facts([write(tmp_path / "m.gguf", replace(spec, keys=keys))])
    assert facts.has_mtp
    block = facts.layers[52]
    assert (block.kind, block.k_values, block.is_mtp) == (LayerKind.FULL, 256, True)
    assert block.in_main_context is (width == 0)
    assert len(facts.context_layers) == (53 if width == 0 else 52)
