"""Files that the engine refuses are refused, files that it loads are not, whatever keys they lack or contradict.

``tests/data/key_verdicts.json`` has the verdicts of the engine's own dry runs: of a small model of each architecture
that the generator can write, with each key removed or altered while the tensors stay as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.architectures import ARCHITECTURES
from lllm3090d.checkpoints.engine_rules import ENGINE_RULES
from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind, read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType, cache_shape, context_bytes
from lllm3090d.planning.placement import EVERYTHING, weights
from tests.fakes.demanded_tensors import fitted
from tests.fakes.gguf_files import Tensor, Typed, model_metadata, model_tensors, write_gguf
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
    keys |= {"leading_dense_block_count": spec.keys["block_count"]}
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


def without(spec: ModelSpec, end: str) -> list[Tensor]:
    return [tensor for tensor in tensors_of(spec) if not tensor.name.endswith(end)]


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("llama-3.1-8b", "block_count", Typed("u64", 32)),
        ("llama-3.1-8b", "attention.head_count_kv", Typed("i32", 8)),
        ("llama-3.1-8b", "attention.layer_norm_rms_epsilon", Typed("f64", 1e-5)),
        ("llama-3.1-8b", "rope.freq_base", Typed("f64", 5e5)),
        ("jamba-52b", "attention.head_count_kv", Typed("u64", [0, 0, 0, 0, 8, 0, 0, 0] * 4)),
        ("qwen3.5-27b", "full_attention_interval", Typed("i32", 4)),
        ("glm-4.7-flash", "attention.q_lora_rank", Typed("u16", 768)),
    ],
)  # fmt: skip
def test_values_of_a_type_that_the_engine_does_not_take(
    tmp_path: Path, model: str, key: str, value: Typed
) -> None:
    spec = published()[model]
    error = refusal(written(tmp_path / "m.gguf", spec, {key: value}))
    assert error.details["key"] == f"{spec.architecture}.{key}"
    assert f"has the type {'[u64]' if model == 'jamba-52b' else value.type}" in error.message


@pytest.mark.parametrize("name", ["i32", "bool"])
def test_arrays_that_the_engine_takes(tmp_path: Path, name: str) -> None:
    spec = published()["jamba-52b"]
    heads = [bool(count) if name == "bool" else count for count in spec.keys["attention.head_count_kv"]]
    if name == "bool":
        narrow = dict.fromkeys(("attn_k.weight", "attn_v.weight"), (4096, 128))
        tensors = [
            Tensor(t.name, narrow.get(t.name.split(".", 2)[-1], t.shape), t.type) for t in tensors_of(spec)
        ]
    else:
        tensors = tensors_of(spec)
    metadata = metadata_of(spec, {"attention.head_count_kv": Typed(name, heads)})
    read = read_facts([write_gguf(tmp_path / "m.gguf", metadata, tensors)])
    assert Counter(layer.kind for layer in read.layers) == {LayerKind.RECURRENT: 28, LayerKind.FULL: 4}


def test_a_value_that_nothing_reads_may_have_any_type(tmp_path: Path) -> None:
    spec = published()["llama-3.1-8b"]
    value = {"leading_dense_block_count": Typed("f64", 0.5), "attention.sliding_window": "no"}
    assert len(read_facts([written(tmp_path / "m.gguf", spec, value)]).layers) == 32


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-3.1-8b", "output_norm.weight"),
        ("llama-3.1-8b", "ffn_up.weight"),
        ("gpt-oss-20b", "attn_sinks.weight"),
        ("gpt-oss-20b", "ffn_gate_exps.weight"),
        ("gpt-oss-20b", "output.weight"),
        ("glm-4.7-flash", "attn_k_b.weight"),
        ("glm-4.5-air", "nextn.hnorm.weight"),
        ("lfm2-1.2b", "attn_q_norm.weight"),
        ("falcon-h1-7b", "ssm_dt.bias"),
    ],
)
def test_tensors_that_the_engine_demands(tmp_path: Path, model: str, name: str) -> None:
    spec = published()[model]
    path = write_gguf(tmp_path / "m.gguf", metadata_of(spec, {}), without(spec, name))
    assert f"{name} is missing" in refusal(path).message


@pytest.mark.parametrize(
    "surplus", ["blk.0.attn_q_norm.weight", "blk.0.ffn_up.weigth", "output.norm", "blk.3.nextn_extra.weight"]
)
def test_tensors_that_the_engine_does_not_know(tmp_path: Path, surplus: str) -> None:
    spec = published()["llama-3.1-8b"]
    tensors = [*tensors_of(spec), Tensor(surplus, (128,))]
    error = refusal(write_gguf(tmp_path / "m.gguf", metadata_of(spec, {}), tensors))
    assert f"knows no tensor {surplus}" in error.message


def test_scales_of_a_quantisation_are_known(tmp_path: Path) -> None:
    spec = published()["llama-3.1-8b"]
    scales = [Tensor(f"blk.0.attn_q.{end}", (1,)) for end in ("scale", "input_scale")]
    path = write_gguf(tmp_path / "m.gguf", metadata_of(spec, {}), [*tensors_of(spec), *scales])
    assert len(read_facts([path]).layers) == 32


def test_norms_are_as_long_as_the_embedding(tmp_path: Path) -> None:
    spec = published()["llama-3.1-8b"]
    tensors = [
        Tensor(t.name, (2048,)) if t.name == "blk.3.attn_norm.weight" else t for t in tensors_of(spec)
    ]
    error = refusal(write_gguf(tmp_path / "m.gguf", metadata_of(spec, {}), tensors))
    assert "blk.3.attn_norm.weight has the shape [2048]" in error.message


def test_ones_at_the_end_of_a_shape_mean_nothing(tmp_path: Path) -> None:
    spec = published()["llama-3.1-8b"]
    ends = ("attn_k.weight", "output.weight", "token_embd.weight", "attn_norm.weight")
    tensors = [
        Tensor(t.name, (*t.shape, 1), t.type) if t.name.endswith(ends) else t for t in tensors_of(spec)
    ]
    facts = read_facts([write_gguf(tmp_path / "m.gguf", metadata_of(spec, {}), tensors)])
    assert facts.layers == read_facts([written(tmp_path / "plain.gguf", spec)]).layers


def test_codeshell_may_lack_the_token_embedding(tmp_path: Path) -> None:
    """Then the engine allocates the output matrix twice, both where the output is."""
    metadata = model_metadata("codeshell", metadata={"codeshell.attention.layer_norm_epsilon": 1e-5})
    tensors = fitted(metadata, model_tensors(metadata))
    whole = read_facts([write_gguf(tmp_path / "whole.gguf", metadata, tensors)])
    rest = [t for t in tensors if t.name != "token_embd.weight"]
    facts = read_facts([write_gguf(tmp_path / "rest.gguf", metadata, rest)])
    assert facts.output_bytes == 2 * whole.output_bytes
    assert (facts.token_embedding_bytes, facts.vocabulary_size) == (0, whole.vocabulary_size)
    assert not facts.output_is_tied


def test_bitnet_multiplies_by_the_embedding_itself(tmp_path: Path) -> None:
    metadata = model_metadata("bitnet")
    tensors = [t for t in fitted(metadata, model_tensors(metadata)) if t.name != "output.weight"]
    facts = read_facts([write_gguf(tmp_path / "m.gguf", metadata, tensors)])
    assert facts.output_is_tied
    assert not facts.output_is_copied
    assert (
        weights(facts, EVERYTHING, Backend.VULKAN).card == facts.weight_bytes - facts.token_embedding_bytes
    )


@pytest.mark.parametrize("model", ["lfm2-1.2b", "granite-4.0-h-tiny", "jamba-52b"])
def test_a_hybrid_caches_for_blocks_behind_the_trunk(tmp_path: Path, model: str) -> None:
    """Seen in the engine's dry runs: the attention cache of a hybrid has all blocks but those with a state."""
    spec = published()[model]
    count = spec.keys["block_count"]
    longer = {key: [*value, max(value)] for key, value in spec.keys.items() if isinstance(value, list)}
    keys = {**longer, "block_count": count + 1, "nextn_predict_layers": 1}
    facts = read_facts([written(tmp_path / "m.gguf", spec, keys)])
    assert facts.layers[-1].is_mtp
    assert facts.layers[-1].in_main_context
    assert facts.layers[-1].k_values > 0
    assert facts.trunk == read_facts([written(tmp_path / "plain.gguf", spec)]).layers


def test_a_rope_base_has_to_be_finite(tmp_path: Path) -> None:
    error = refusal(
        written(tmp_path / "m.gguf", published()["llama-3.1-8b"], {"rope.freq_base": float("nan")})
    )
    assert "llama.rope.freq_base is nan, not a finite number" in error.message


def test_tensors_of_a_file_without_a_trunk_are_not_demanded(tmp_path: Path) -> None:
    """By the first norm the engine tells a file with blocks for drafting alone from a damaged one."""
    spec = published()["glm-4.5-air"]
    rest = [t for t in tensors_of(spec) if t.name != "blk.0.attn_norm.weight"]
    assert read_facts([write_gguf(tmp_path / "m.gguf", metadata_of(spec, {}), rest)]).has_mtp


def test_a_state_space_model_keeps_nothing_for_blocks_behind_the_trunk(tmp_path: Path) -> None:
    spec = published()["mamba-2.8b"]
    keys = {"block_count": spec.keys["block_count"] + 1, "nextn_predict_layers": 1}
    facts = read_facts([written(tmp_path / "m.gguf", spec, keys)])
    assert facts.layers[-1].kind is LayerKind.NONE
    assert not facts.layers[-1].owns_kv


def test_llama_embed_may_count_other_heads_than_its_tensors_have(tmp_path: Path) -> None:
    """Its graph does not use the cache, so nothing in the engine compares the two but for the first block."""
    metadata = model_metadata("llama-embed", blocks=2)
    tensors = model_tensors(metadata)
    heads = {"llama-embed.attention.head_count_kv": [metadata["llama-embed.attention.head_count_kv"], 1]}
    facts = read_facts([write_gguf(tmp_path / "m.gguf", {**metadata, **heads}, tensors)])
    assert facts.layers[0].k_values > facts.layers[1].k_values > 0
