"""Files that draft for a model, as sparse files that the engine loads alone: EAGLE-3, DFlash, and MTP sidecars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes.gguf_files import Tensor, write_gguf
from tests.fakes.model_files import published, tensors_of

SIDECARS = ("qwen3.5-27b-mtp", "qwen3.5-35b-a3b-mtp", "glm-4.5-air")
_KEYS: Mapping[str, Any] = {
    "attention.head_count": 32, "attention.head_count_kv": 8, "embedding_length": 4096,
    "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
# Dimensions of published drafters: for an 8B and a 70B Llama, for an 8B Qwen, the last one also with windows.
DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "eagle3-8b": {
        **_KEYS, "architecture": "eagle3", "vocabulary": 128_256, "context_length": 131_072, "block_count": 1,
        "feed_forward_length": 14_336, "target_layers": [2, 16, 29], "target_hidden_size": 4096,
        "attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128,
    },
    "eagle3-70b": {
        **_KEYS, "architecture": "eagle3", "vocabulary": 128_256, "context_length": 131_072, "block_count": 1,
        "embedding_length": 6144, "attention.head_count": 48, "feed_forward_length": 16_384,
        "target_layers": [2, 40, 77], "target_hidden_size": 8192,
        "attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128,
    },
    "eagle3-few-words": {
        **_KEYS, "architecture": "eagle3", "vocabulary": 128_256, "context_length": 131_072, "block_count": 1,
        "feed_forward_length": 14_336, "target_layers": [2, 16, 29], "target_hidden_size": 4096,
        "attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128,
        "own_words": 32_000,
    },
    "dflash-8b": {
        **_KEYS, "architecture": "dflash", "vocabulary": 151_936, "context_length": 40_960, "block_count": 5,
        "feed_forward_length": 12_288, "target_layers": [1, 9, 17, 25, 33], "block_size": 16,
        "attention.key_length": 128, "attention.value_length": 128,
    },
    "dflash-windows": {
        **_KEYS, "architecture": "dflash", "vocabulary": 151_936, "context_length": 40_960, "block_count": 5,
        "feed_forward_length": 12_288, "target_layers": [1, 9, 17, 25, 33], "block_size": 16,
        "attention.key_length": 128, "attention.value_length": 128, "attention.sliding_window": 2048,
        "attention.sliding_window_pattern": [True, True, True, True, False],
    },
}  # fmt: skip


def write_drafter(path: Path, name: str, *, whole: bool = True) -> Path:
    """Write one of :data:`DRAFTERS`, or the blocks for multi-token prediction of one of :data:`SIDECARS`.

    Args:
        path: of the file.
        name: of the drafter, or of the model that the sidecar is for.
        whole: with token embedding and output, so that the engine loads it alone; else those are the model's.
    """
    if name in SIDECARS:
        return _write_sidecar(path, name)
    keys = dict(DRAFTERS[name])
    architecture, vocabulary = keys.pop("architecture"), keys.pop("vocabulary")
    own_words = keys.pop("own_words", 0)
    metadata = {
        "general.architecture": architecture,
        "general.name": name,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        f"{architecture}.vocab_size": vocabulary,
        "tokenizer.ggml.model": "none",
    }
    tensors = _tensors(architecture, keys, vocabulary, own_words, whole=whole)
    return write_gguf(path, metadata, tensors)


def _tensors(
    architecture: str, keys: Mapping[str, Any], vocabulary: int, own_words: int, *, whole: bool
) -> list[Tensor]:
    width, length = keys["embedding_length"], keys["attention.key_length"]
    queries, rows = keys["attention.head_count"] * length, keys["attention.head_count_kv"] * length
    eagle = architecture == "eagle3"
    features = len(keys["target_layers"]) * (keys["target_hidden_size"] if eagle else width)
    inputs = 2 * width if eagle else width
    matrices = {"fc.weight": (features, width)}
    vectors = {"output_norm.weight": width}
    if whole:
        matrices |= {
            "token_embd.weight": (width, vocabulary),
            "output.weight": (width, own_words or vocabulary),
        }
    if not eagle:
        vectors["enc.output_norm.weight"] = width
    for block in range(keys["block_count"]):
        prefix = f"blk.{block}."
        matrices |= {
            f"{prefix}attn_q.weight": (inputs, queries),
            f"{prefix}attn_k.weight": (inputs, rows),
            f"{prefix}attn_v.weight": (inputs, rows),
            f"{prefix}attn_output.weight": (queries, width),
            f"{prefix}ffn_gate.weight": (width, keys["feed_forward_length"]),
            f"{prefix}ffn_up.weight": (width, keys["feed_forward_length"]),
            f"{prefix}ffn_down.weight": (keys["feed_forward_length"], width),
        }
        norms = ["attn_norm", "ffn_norm"] + (["attn_norm_2"] if eagle else [])
        vectors |= {f"{prefix}{norm}.weight": width for norm in norms}
        if not eagle:
            vectors |= {f"{prefix}{norm}.weight": length for norm in ("attn_q_norm", "attn_k_norm")}
    tensors = [Tensor(name, shape, "Q8_0") for name, shape in matrices.items()]
    tensors += [Tensor(name, (size,)) for name, size in vectors.items()]
    if own_words:
        tensors.append(Tensor("d2t", (own_words,), "I64"))
    return tensors


def _write_sidecar(path: Path, name: str) -> Path:
    """What is left of a model without its trunk."""
    spec = published()[name]
    last = f"blk.{spec.keys['block_count'] - 1}."
    mine = [t for t in tensors_of(spec) if not t.name.startswith("blk.") or t.name.startswith(last)]
    metadata = {
        "general.architecture": spec.architecture,
        "general.name": f"{name} sidecar",
        **{f"{spec.architecture}.{key}": value for key, value in spec.keys.items()},
        f"{spec.architecture}.vocab_size": spec.vocabulary,
        "tokenizer.ggml.model": "none",
    }
    return write_gguf(path, metadata, mine)
