"""A small vision projector that the engine loads beside a text model, of the kind that Gemma 3 has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.fakes.gguf_files import Tensor, write_gguf

WIDTH, HEADS, BLOCKS, FEED_FORWARD = 64, 4, 2, 128
IMAGE_SIZE, PATCH_SIZE = 448, 14


def write_projector(path: Path, text_embedding_length: int) -> Path:
    """Write one that goes with a text model of such a width."""
    metadata = {
        "general.architecture": "clip",
        "general.name": "made up",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        "clip.vision.image_size": IMAGE_SIZE,
        "clip.vision.patch_size": PATCH_SIZE,
        "clip.vision.embedding_length": WIDTH,
        "clip.vision.feed_forward_length": FEED_FORWARD,
        "clip.vision.attention.head_count": HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.block_count": BLOCKS,
        "clip.vision.projection_dim": text_embedding_length,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }
    return write_gguf(path, metadata, list(_tensors(text_embedding_length)))


def _tensors(text_embedding_length: int) -> Iterator[Tensor]:
    yield Tensor("v.patch_embd.weight", (PATCH_SIZE, PATCH_SIZE, 3, WIDTH), "F16")
    yield Tensor("v.patch_embd.bias", (WIDTH,), "F32")
    yield Tensor("v.position_embd.weight", (WIDTH, (IMAGE_SIZE // PATCH_SIZE) ** 2), "F32")
    yield from _norm("v.post_ln")
    for block in range(BLOCKS):
        prefix = f"v.blk.{block}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from _linear(prefix + name, WIDTH, WIDTH)
        yield from _linear(prefix + "ffn_up", WIDTH, FEED_FORWARD)
        yield from _linear(prefix + "ffn_down", FEED_FORWARD, WIDTH)
        yield from _norm(prefix + "ln1")
        yield from _norm(prefix + "ln2")
    yield Tensor("mm.input_projection.weight", (text_embedding_length, WIDTH), "F16")
    yield Tensor("mm.soft_emb_norm.weight", (WIDTH,), "F32")


def _linear(name: str, columns: int, rows: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (columns, rows), "F16")
    yield Tensor(f"{name}.bias", (rows,), "F32")


def _norm(name: str) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (WIDTH,), "F32")
    yield Tensor(f"{name}.bias", (WIDTH,), "F32")
