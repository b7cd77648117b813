"""Checkpoints with dimensions drawn at random, for every architecture that ``model_files`` can write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from lllm3090d.planning.cache import CacheType
from tests.fakes.model_files import QUANTISATIONS, RECIPES, ModelSpec

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class RandomCase:
    """A model and the arguments of a launch that the engine accepts for it."""

    spec: ModelSpec
    context_tokens: int
    parallel: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    batch_tokens: int
    micro_batch_tokens: int
    swa_full: bool


ARCHITECTURES = tuple(sorted(RECIPES))
UNTIED = ("gpt-oss", "muse-glimmer", "olmo2", "mimo2")  # the engine insists on an output matrix
TIED = ("gemma2", "cohere2")  # the engine knows no other


@st.composite
def random_cases(draw: Draw, architecture: str) -> RandomCase:
    """Any dimensions that the layers of an architecture can have, any arguments."""
    spec = ModelSpec(
        name=f"random {architecture}",
        architecture=architecture,
        vocabulary=draw(st.integers(8, 64)) * 32,
        keys=_keys(draw, architecture),
        quantisation=draw(st.sampled_from(sorted(QUANTISATIONS))),
        tied=architecture in TIED or draw(st.booleans()) if architecture not in UNTIED else False,
        options={"k_eq_v": draw(st.booleans())} if architecture == "gemma4" else {},
    )
    type_k = draw(st.sampled_from(CacheType))
    encoder = spec.keys.get("attention.causal") is False
    return RandomCase(
        spec=spec,
        context_tokens=draw(st.integers(256, 65_536)),
        parallel=draw(st.integers(1, 8)),
        cache_type_k=type_k,
        # Latent attention has one type for both.
        cache_type_v=type_k if architecture == "deepseek2" else draw(st.sampled_from(CacheType)),
        batch_tokens=2048,
        micro_batch_tokens=2048 if encoder else draw(st.sampled_from((64, 300, 512, 1024, 2048))),
        swa_full=draw(st.booleans()),
    )


def _multiple(draw: Draw, of: int, most: int) -> int:
    return of * int(draw(st.integers(1, most)))


def _heads(draw: Draw) -> tuple[int, int]:
    kv_heads = draw(st.integers(1, 4))
    return kv_heads * draw(st.integers(1, 4)), kv_heads


def _keys(draw: Draw, architecture: str) -> dict[str, Any]:
    blocks = draw(st.integers(2, 12))
    heads, kv_heads = _heads(draw)
    keys: dict[str, Any] = {
        "context_length": draw(st.sampled_from((2048, 8192, 131_072))),
        "block_count": blocks,
        # A multiple of every number of heads, so that heads may have the length that follows.
        "embedding_length": heads * _multiple(draw, 32, 4),
        "feed_forward_length": _multiple(draw, 32, 32),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-6,
    }
    _ADD[architecture](draw, keys)
    return keys


def _lengths(draw: Draw, keys: dict[str, Any], suffix: str = "", *, of: int = 32) -> None:
    length = _multiple(draw, of, 256 // of)
    keys[f"attention.key_length{suffix}"] = keys[f"attention.value_length{suffix}"] = length


def _window(draw: Draw, keys: dict[str, Any]) -> None:
    keys["attention.sliding_window"] = draw(st.integers(1, 4096))


def _experts(draw: Draw, keys: dict[str, Any]) -> None:
    count = draw(st.integers(2, 16))
    keys["expert_count"] = count
    # The engine has room for some 8 graph nodes per tensor, which more experts in a small model exceed.
    keys["expert_used_count"] = draw(st.integers(1, min(count, 6)))
    keys["expert_feed_forward_length"] = _multiple(draw, 32, 8)
    keys["expert_gating_func"] = 2  # sigmoid


def _per_block(draw: Draw, keys: dict[str, Any], values: tuple[int, ...]) -> list[int]:
    """One of the values for each block, each of them at least once."""
    rest = keys["block_count"] - len(values)
    drawn = draw(st.lists(st.sampled_from(values), min_size=max(rest, 0), max_size=max(rest, 0)))
    chosen = [*values, *drawn]
    keys["block_count"] = len(chosen)
    return list(draw(st.permutations(chosen)))


def _mamba(draw: Draw, keys: dict[str, Any], *, groups: bool) -> None:
    inner = 2 * keys["embedding_length"]  # a multiple of 64
    heads = inner // 64
    keys["ssm.conv_kernel"] = draw(st.integers(2, 5))
    keys["ssm.state_size"] = 128 if groups else 16
    keys["ssm.inner_size"] = inner
    keys["ssm.time_step_rank"] = heads if groups else draw(st.integers(1, 64))
    if groups:
        keys["ssm.group_count"] = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0]))


def _plain(draw: Draw, keys: dict[str, Any]) -> None:
    _lengths(draw, keys)
    keys["rope.dimension_count"] = keys["attention.key_length"]


def _mixture(draw: Draw, keys: dict[str, Any]) -> None:
    _plain(draw, keys)
    _experts(draw, keys)


def _sliding(draw: Draw, keys: dict[str, Any]) -> None:
    _lengths(draw, keys)
    _window(draw, keys)


def _gemma3(draw: Draw, keys: dict[str, Any]) -> None:
    _sliding(draw, keys)
    if draw(st.booleans()):
        keys["attention.sliding_window_pattern"] = draw(st.integers(2, 8))


def _gemma3n(draw: Draw, keys: dict[str, Any]) -> None:
    _sliding(draw, keys)
    keys["block_count"] = draw(st.integers(20, 26))


def _gemma4(draw: Draw, keys: dict[str, Any]) -> None:
    _window(draw, keys)
    # Multiples of 64: the engine decides by the first layer whether the rows of all others are rotated.
    _lengths(draw, keys, of=64)
    _lengths(draw, keys, "_swa", of=64)
    period, times, shared = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    keys["block_count"] = period * (times + shared)
    # The layers that share look back to the last two with a cache: one that slides, then a dense one.
    keys["attention.sliding_window_pattern"] = [i % period < period - 1 for i in range(keys["block_count"])]
    keys["attention.shared_kv_layers"] = period * shared
    keys["embedding_length_per_layer_input"] = draw(st.sampled_from((0, 64)))
    keys["rope.dimension_count"] = keys["attention.key_length"]
    keys["rope.dimension_count_swa"] = keys["attention.key_length_swa"]
    if draw(st.booleans()):
        _experts(draw, keys)


def _muse_glimmer(draw: Draw, keys: dict[str, Any]) -> None:
    _sliding(draw, keys)
    keys["logit_scale"] = 1.0


def _gpt_oss(draw: Draw, keys: dict[str, Any]) -> None:
    _sliding(draw, keys)
    _experts(draw, keys)


def _glm4moe(draw: Draw, keys: dict[str, Any]) -> None:
    _mixture(draw, keys)
    keys["expert_shared_count"] = draw(st.integers(1, 2))
    keys["leading_dense_block_count"] = 1
    keys["nextn_predict_layers"] = draw(st.integers(0, 1))
    keys["block_count"] += keys["nextn_predict_layers"]


def _deepseek2(draw: Draw, keys: dict[str, Any]) -> None:
    rank, rotated = _multiple(draw, 64, 8), draw(st.sampled_from((32, 64)))
    _experts(draw, keys)
    keys |= {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": _multiple(draw, 32, 8),
        "attention.kv_lora_rank": rank,
        "attention.key_length_mla": rotated + _multiple(draw, 32, 4),
        "attention.value_length_mla": _multiple(draw, 32, 4),
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "rope.dimension_count": rotated,
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
    }


def _qwen_hybrid(draw: Draw, keys: dict[str, Any], *, experts: bool, mtp: bool) -> None:
    _lengths(draw, keys)
    groups, state = draw(st.integers(1, 4)), draw(st.sampled_from((64, 128)))
    heads = groups * draw(st.integers(1, 3))
    keys |= {
        "ssm.conv_kernel": draw(st.integers(2, 5)),
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * state,
        "full_attention_interval": draw(st.integers(2, 5)),
        "rope.dimension_count": 32,
    }
    if mtp:
        keys["rope.dimension_sections"] = [4, 6, 6, 0]
        keys["nextn_predict_layers"] = draw(st.integers(0, 1))
        keys["block_count"] += keys["nextn_predict_layers"]
    if experts:
        _experts(draw, keys)
        keys["expert_shared_feed_forward_length"] = _multiple(draw, 32, 8)


def _all_mamba(draw: Draw, keys: dict[str, Any], *, groups: bool) -> None:
    keys["attention.head_count"] = keys["attention.head_count_kv"] = keys["feed_forward_length"] = 0
    _mamba(draw, keys, groups=groups)


def _jamba(draw: Draw, keys: dict[str, Any]) -> None:
    _mamba(draw, keys, groups=False)
    keys["attention.head_count_kv"] = _per_block(draw, keys, (0, keys["attention.head_count_kv"]))


def _granite_hybrid(draw: Draw, keys: dict[str, Any]) -> None:
    _mamba(draw, keys, groups=True)
    keys["attention.head_count_kv"] = _per_block(draw, keys, (0, keys["attention.head_count_kv"]))
    if draw(st.booleans()):
        _experts(draw, keys)
        keys["expert_shared_feed_forward_length"] = _multiple(draw, 32, 8)


def _nemotron_h(draw: Draw, keys: dict[str, Any], *, experts: bool) -> None:
    _lengths(draw, keys)
    _mamba(draw, keys, groups=True)
    mixers = _per_block(draw, keys, (0, 1, 2))  # state, attention, feed-forward
    heads, wide = keys["attention.head_count_kv"], keys["feed_forward_length"]
    keys["attention.head_count_kv"] = [heads if mixer == 1 else 0 for mixer in mixers]
    keys["feed_forward_length"] = [wide if mixer == 2 else 0 for mixer in mixers]
    keys["rope.dimension_count"] = 32
    if experts:
        _experts(draw, keys)
        keys["expert_shared_feed_forward_length"] = _multiple(draw, 32, 8)
        keys["expert_shared_count"] = 1
        keys["nextn_predict_layers"] = draw(st.integers(0, 1))
        keys["block_count"] += keys["nextn_predict_layers"]
        for _ in range(keys["nextn_predict_layers"]):
            keys["attention.head_count_kv"].append(heads)
            keys["feed_forward_length"].append(draw(st.sampled_from((0, wide))))


def _falcon_h1(draw: Draw, keys: dict[str, Any]) -> None:
    _lengths(draw, keys)
    _mamba(draw, keys, groups=True)


def _lfm2(draw: Draw, keys: dict[str, Any]) -> None:
    keys["shortconv.l_cache"] = draw(st.integers(2, 5))
    keys["attention.head_count_kv"] = _per_block(draw, keys, (0, keys["attention.head_count_kv"]))
    if draw(st.booleans()):
        _window(draw, keys)


def _encoder(draw: Draw, keys: dict[str, Any]) -> None:
    keys |= {"attention.causal": False, "pooling_type": 1}
    keys["attention.head_count_kv"] = keys["attention.head_count"]


def _granite(draw: Draw, keys: dict[str, Any]) -> None:
    _plain(draw, keys)
    keys["logit_scale"] = 1.0


def _cohere2(draw: Draw, keys: dict[str, Any]) -> None:
    _window(draw, keys)
    keys["logit_scale"] = 1.0


def _perhaps_sliding(draw: Draw, keys: dict[str, Any]) -> None:
    if draw(st.booleans()):
        _window(draw, keys)
        if draw(st.booleans()):
            keys["attention.sliding_window_pattern"] = draw(st.integers(2, 8))


def _gemma2(draw: Draw, keys: dict[str, Any]) -> None:
    _lengths(draw, keys)
    _perhaps_sliding(draw, keys)


def _smallthinker(draw: Draw, keys: dict[str, Any]) -> None:
    _mixture(draw, keys)
    _perhaps_sliding(draw, keys)


def _exaone4(draw: Draw, keys: dict[str, Any]) -> None:
    keys["block_count"] = draw(st.sampled_from((5, 64)))
    _never_loaded(draw, keys)


def _never_loaded(draw: Draw, keys: dict[str, Any]) -> None:
    keys["nextn_predict_layers"] = draw(st.integers(0, 1))
    keys["block_count"] += keys["nextn_predict_layers"]


def _glm4(draw: Draw, keys: dict[str, Any]) -> None:
    _plain(draw, keys)
    _never_loaded(draw, keys)


def _mimo2(draw: Draw, keys: dict[str, Any]) -> None:
    _experts(draw, keys)
    _window(draw, keys)
    keys["attention.key_length"] = _multiple(draw, 32, 8)
    keys["attention.value_length"] = _multiple(draw, 32, 8)
    pattern = [value == 1 for value in _per_block(draw, keys, (0, 1))]
    _never_loaded(draw, keys)
    pattern += [False] * keys["nextn_predict_layers"]
    keys["attention.sliding_window_pattern"] = pattern
    keys["rope.dimension_count"] = 32
    keys["leading_dense_block_count"] = 1


def _gemma_embedding(draw: Draw, keys: dict[str, Any]) -> None:
    _sliding(draw, keys)
    keys["pooling_type"] = 1


def _phi3(draw: Draw, keys: dict[str, Any]) -> None:
    keys["rope.scaling.original_context_length"] = 4096
    _window(draw, keys)


_ADD: dict[str, Callable[[Draw, dict[str, Any]], None]] = {
    **dict.fromkeys(("llama", "mistral3", "smollm3", "qwen3"), _plain),
    "granite": _granite,
    "gemma2": _gemma2,
    "cohere2": _cohere2,
    "olmo2": _perhaps_sliding,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "smallthinker": _smallthinker,
    "mimo2": _mimo2,
    "qwen2": lambda draw, keys: None,  # its heads together are as wide as the embedding
    "qwen3moe": _mixture,
    "phi3": _phi3,
    "gemma3": _gemma3,
    "gemma-embedding": _gemma_embedding,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "muse-glimmer": _muse_glimmer,
    "gpt-oss": _gpt_oss,
    "glm4moe": _glm4moe,
    "deepseek2": _deepseek2,
    "qwen35": lambda draw, keys: _qwen_hybrid(draw, keys, experts=False, mtp=True),
    "qwen35moe": lambda draw, keys: _qwen_hybrid(draw, keys, experts=True, mtp=True),
    "qwen3next": lambda draw, keys: _qwen_hybrid(draw, keys, experts=True, mtp=False),
    "mamba": lambda draw, keys: _all_mamba(draw, keys, groups=False),
    "mamba2": lambda draw, keys: _all_mamba(draw, keys, groups=True),
    "jamba": _jamba,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": lambda draw, keys: _nemotron_h(draw, keys, experts=False),
    "nemotron_h_moe": lambda draw, keys: _nemotron_h(draw, keys, experts=True),
    "falcon-h1": _falcon_h1,
    "lfm2": _lfm2,
    "bert": _encoder,
    "nomic-bert": _encoder,
}
