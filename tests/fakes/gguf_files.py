"""Small GGUF files for tests: real headers and dimensions, tensor data as holes (17 GB take kilobytes).

``write_llama(path, blocks=2)`` and its siblings write a checkpoint that ``llama-fit-params`` accepts too.
Metadata can be overridden: ``metadata={"llama.block_count": 3, "general.name": None}`` changes one key and
removes another.
Written by hand, not with ``gguf.GGUFWriter``, so that broken files can be written as well.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# name: code, values of a block, bytes of a block
TENSOR_TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "I64": (27, 1, 8),
    "MXFP4": (39, 32, 17),
}
_LAYOUTS = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<?"),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Typed:
    """A metadata value (or the elements of an array) of a given type, e.g. ``Typed("u16", 3)``."""

    type: str
    value: Any


@dataclass(frozen=True)
class Tensor:
    """A tensor; the first dimension is the length of a row."""

    name: str
    shape: tuple[int, ...]
    type: str = "F32"

    @property
    def size_bytes(self) -> int:
        """Without padding."""
        _, values, size = TENSOR_TYPES[self.type]
        return math.prod(self.shape) // values * size


def text(value: str | bytes) -> bytes:
    """A string as GGUF stores it."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def typed_value(value: Any) -> bytes:
    """Type and value of a metadata entry; a plain int is u32, a float f32, a list typed by its first."""
    kind, body = _encode(value)
    return struct.pack("<I", kind) + body


def header_bytes(
    metadata: Mapping[str, Any], tensors: Sequence[Tensor] = (), *, version: int = 3, alignment: int = 32
) -> bytes:
    """Everything before the tensor data, padding included. An entry that is None is left out."""
    entries = {key: value for key, value in metadata.items() if value is not None}
    parts = [struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(entries))]
    parts += [text(key) + typed_value(value) for key, value in entries.items()]
    offset = 0
    for tensor in tensors:
        parts.append(text(tensor.name) + struct.pack("<I", len(tensor.shape)))
        parts.append(struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
        parts.append(struct.pack("<IQ", TENSOR_TYPES[tensor.type][0], offset))
        offset += _padded(tensor.size_bytes, alignment)
    header = b"".join(parts)
    return header.ljust(_padded(len(header), alignment), b"\0")


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a file whose tensor data are a hole; makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = header_bytes(metadata, tensors, version=version, alignment=alignment)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(_padded(tensor.size_bytes, alignment) for tensor in tensors))
    return path


def model_metadata(
    architecture: str = "llama",
    *,
    blocks: int = 2,
    embedding_length: int = 64,
    head_count: int = 4,
    kv_head_count: int = 2,
    feed_forward_length: int = 128,
    vocabulary: int = 256,
    context_tokens: int = 4096,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Metadata of a dense model; the tokenizer is ``none``, for which the engine invents a vocabulary."""
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": f"Tiny {architecture}",
        "general.file_type": 7,  # Q8_0
        f"{architecture}.block_count": blocks,
        f"{architecture}.context_length": context_tokens,
        f"{architecture}.embedding_length": embedding_length,
        f"{architecture}.feed_forward_length": feed_forward_length,
        f"{architecture}.attention.head_count": head_count,
        f"{architecture}.attention.head_count_kv": kv_head_count,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.vocab_size": vocabulary,
        "tokenizer.ggml.model": "none",
        **(metadata or {}),
    }


def model_tensors(metadata: Mapping[str, Any], *, tied: bool = False, type: str = "Q8_0") -> list[Tensor]:
    """The tensors that go with the metadata: matrices of ``type``, norms and biases F32."""
    architecture = metadata["general.architecture"]

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}")
        return default if value is None else value

    blocks, width, vocabulary = key("block_count"), key("embedding_length"), key("vocab_size")
    heads = _per_layer(key("attention.head_count"), blocks)
    kv_heads = _per_layer(key("attention.head_count_kv", key("attention.head_count")), blocks)
    feed_forward = _per_layer(key("feed_forward_length"), blocks)
    k_length = key("attention.key_length", width // heads[0])
    v_length = key("attention.value_length", width // heads[0])
    tensors = [
        Tensor("token_embd.weight", (width, vocabulary), type),
        Tensor("output_norm.weight", (width,)),
    ]
    if not tied:
        tensors.append(Tensor("output.weight", (width, vocabulary), type))
    for i in range(blocks):
        q, k, v, ff = heads[i] * k_length, kv_heads[i] * k_length, kv_heads[i] * v_length, feed_forward[i]
        matrices = {
            "attn_q": (width, q),
            "attn_k": (width, k),
            "attn_v": (width, v),
            "attn_output": (heads[i] * v_length, width),
            "ffn_gate": (width, ff),
            "ffn_up": (width, ff),
            "ffn_down": (ff, width),
        }
        norms = {"attn_norm.weight": width, "ffn_norm.weight": width}
        if architecture in ("qwen3", "gemma3"):
            norms |= {"attn_q_norm.weight": k_length, "attn_k_norm.weight": k_length}
        if architecture == "gemma3":
            norms |= {"post_attention_norm.weight": width, "post_ffw_norm.weight": width}
        if architecture == "qwen2":
            norms |= {"attn_q.bias": q, "attn_k.bias": k, "attn_v.bias": v}
        tensors += [Tensor(f"blk.{i}.{name}.weight", shape, type) for name, shape in matrices.items()]
        tensors += [Tensor(f"blk.{i}.{name}", (length,)) for name, length in norms.items()]
    return tensors


def write_model(
    path: Path, architecture: str, *, tied: bool = False, type: str = "Q8_0", **dimensions: Any
) -> Path:
    """Write a dense model of an architecture; ``dimensions`` as for :func:`model_metadata`."""
    metadata = model_metadata(architecture, **dimensions)
    return write_gguf(path, metadata, model_tensors(metadata, tied=tied, type=type))


def write_llama(path: Path, **options: Any) -> Path:
    """Write a small llama checkpoint; options as for :func:`write_model`."""
    return write_model(path, "llama", **options)


def write_gemma3(path: Path, *, window: int = 512, **options: Any) -> Path:
    """Write a small gemma3 checkpoint with sliding layers and a tied output."""
    metadata = {"gemma3.attention.sliding_window": window, **options.pop("metadata", {})}
    return write_model(path, "gemma3", **{"blocks": 12, "tied": True, **options}, metadata=metadata)


def write_projector(path: Path) -> Path:
    """Write what accompanies a vision model: a projector, not a model."""
    return write_gguf(path, {"general.architecture": "clip"}, [Tensor("mm.0.weight", (64, 64), "F16")])


def write_split(folder: Path, stem: str, *, count: int = 3, **options: Any) -> list[Path]:
    """Write a llama checkpoint in ``count`` shards: metadata in the first, the tensors over all."""
    metadata = model_metadata("llama", **{"blocks": count, **options})
    tensors = model_tensors(metadata)
    share = -(-len(tensors) // count)
    paths: list[Path] = []
    for i in range(count):
        split = {
            "split.no": Typed("u16", i),
            "split.count": Typed("u16", count),
            "split.tensors.count": Typed("i32", len(tensors)),
        }
        path = folder / f"{stem}-{i + 1:05d}-of-{count:05d}.gguf"
        mine = tensors[i * share : (i + 1) * share]
        paths.append(write_gguf(path, {**metadata, **split} if i == 0 else split, mine))
    return paths


def _per_layer(value: Any, blocks: int) -> list[int]:
    return list(value) if isinstance(value, list) else [value] * blocks


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _encode(value: Any) -> tuple[int, bytes]:
    match value:
        case Typed(type=kind, value=list() as items):
            code, layout = _LAYOUTS[kind]
            body = b"".join(struct.pack(layout, item) for item in items)
            return _ARRAY, struct.pack("<IQ", code, len(items)) + body
        case Typed(type=kind, value=item):
            code, layout = _LAYOUTS[kind]
            return code, struct.pack(layout, item)
        case str() | bytes():
            return _STRING, text(value)
        case bool():
            return _encode(Typed("bool", value))
        case int():
            return _encode(Typed("u32", value))
        case float():
            return _encode(Typed("f32", value))
        case list() if value:
            elements = [_encode(item) for item in value]
            body = b"".join(element for _, element in elements)
            return _ARRAY, struct.pack("<IQ", elements[0][0], len(value)) + body
    raise TypeError(f"cannot be stored in GGUF: {value!r}")
