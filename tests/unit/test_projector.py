"""Projectors: facts from the header, bytes on the card or in host memory, the price of a launch with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.projector import ProjectorFacts, VisionFacts, read_projector
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.placement import Split
from lllm3090d.planning.projector import (
    UNKNOWN_GRAPH_BYTES,
    image_patches,
    projector_graph_bytes,
    projector_weights,
)
from lllm3090d.planning.quote import Evidence, Launch, Place, price
from tests.fakes.gguf_files import Tensor, Typed, write_gguf, write_llama
from tests.unit.engine_truth import POLICY, facts_of

pytestmark = pytest.mark.unit

GIB = 1 << 30
KEYS: dict[str, Any] = {
    "general.architecture": "clip",
    "clip.projector_type": "gemma3",
    "clip.has_vision_encoder": True,
    "clip.vision.image_size": 768,
    "clip.vision.patch_size": 16,
    "clip.vision.embedding_length": 1152,
    "clip.vision.feed_forward_length": 4304,
    "clip.vision.attention.head_count": 16,
    "clip.vision.block_count": 27,
    "clip.vision.projection_dim": 5376,
}
TENSORS = (
    Tensor("v.patch_embd.weight", (16, 16, 3, 1152), "F32"),
    Tensor("v.blk.0.ffn_up.weight", (1152, 4304), "Q8_0"),
    Tensor("v.blk.0.ffn_up.bias", (4301,), "F32"),
    Tensor("mm.input_projection.weight", (5376, 1152), "F16"),
    Tensor("model.image_newline", (5376,), "F32"),
)
LAUNCH = Launch(8192, 1, CacheType.Q8_0, CacheType.Q8_0, 2048, 512, 8, 0)


def projector(
    folder: Path, changes: dict[str, Any] | None = None, tensors: tuple[Tensor, ...] = TENSORS
) -> ProjectorFacts:
    return read_projector(write_gguf(folder / "mmproj.gguf", KEYS | (changes or {}), tensors))


def test_facts_in_full(tmp_path: Path) -> None:
    facts = projector(tmp_path)
    assert (facts.projector_type, facts.projection_length, facts.hears) == ("gemma3", 5376, False)
    assert facts.vision == VisionFacts(
        image_size=768,
        patch_size=16,
        embedding_length=1152,
        feed_forward_length=4304,
        head_count=16,
        block_count=27,
    )
    assert facts.file_bytes == (tmp_path / "mmproj.gguf").stat().st_size
    patches, matrix, bias = 16 * 16 * 3 * 1152 * 4, 1152 * 4304 // 32 * 34, 4301 * 4
    assert facts.weights.vision.stored == patches + matrix + bias
    assert facts.weights.projection.stored == 5376 * 1152 * 2
    assert facts.weights.other.stored == 5376 * 4
    assert facts.weights.audio.stored == 0
    assert facts.weights.all.stored == sum(tensor.size_bytes for tensor in TENSORS)


def test_bytes_by_place(tmp_path: Path) -> None:
    """Alignment of each buffer, and on CUDA whole rows of 512 values for what is quantised."""
    facts = projector(tmp_path)
    stored = sum(tensor.size_bytes for tensor in TENSORS)
    host = stored + 12  # the bias has 17,204 bytes, to 32 they are 17,216
    vulkan = stored + 12  # to 16 the same
    cuda = stored + 76 + 384 // 32 * 34 + 104  # the bias; 1152 = 2 x 512 + 128 values; 408 more bytes to 128
    assert projector_weights(facts, Backend.CPU) == Split(host, 0)
    assert projector_weights(facts, Backend.CPU, on_card=False) == Split(host, 0)
    assert projector_weights(facts, Backend.VULKAN) == Split(vulkan, 0)
    assert projector_weights(facts, Backend.CUDA) == Split(cuda, 0)
    assert projector_weights(facts, Backend.CUDA, on_card=False) == Split(0, host)


@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ({}, 0.472),
        ({"clip.vision.patch_size": 8}, 6.825),
        ({"clip.vision.attention.head_count": None}, 0.0866),
        ({"clip.vision.feed_forward_length": None}, 0.4756),
        ({"clip.vision.image_size": None}, 1.0),
        ({"clip.vision.patch_size": None}, 1.0),
        ({"clip.vision.patch_size": 1024}, 1.0),
        ({"clip.vision.embedding_length": None}, 1.0),
        ({"clip.vision.image_max_pixels": 1536 * 1536}, 6.825),  # as many patches
        ({"clip.vision.image_max_pixels": 256}, 0.472),
        ({"clip.has_audio_encoder": True}, 1.472),
        ({"clip.has_audio_encoder": True, "clip.has_vision_encoder": False}, 1.472),  # it has the tensors
    ],
)
def test_the_graph_of_the_encoder(tmp_path: Path, changes: dict[str, Any], gib: float) -> None:
    assert projector_graph_bytes(projector(tmp_path, changes)) / GIB == pytest.approx(gib, abs=5e-4)


def test_a_projector_that_only_hears(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "clip.has_vision_encoder": None,
        "clip.projector_type": None,
        "clip.vision.projection_dim": None,
    }
    keys |= {"clip.audio.projector_type": "ultravox", "clip.audio.projection_dim": 2048}
    facts = projector(
        tmp_path, keys, (Tensor("a.conv1d.weight", (3, 80, 128)), Tensor("mm.a.mlp.weight", (64, 64)))
    )
    assert (facts.projector_type, facts.projection_length) == ("ultravox", 2048)
    assert facts.hears
    assert facts.vision is None
    assert (facts.merge_size, facts.image_tokens) == (0, 0)
    assert facts.weights.audio.stored == 3 * 80 * 128 * 4
    assert facts.weights.projection.stored == 64 * 64 * 4
    assert projector_graph_bytes(facts) == UNKNOWN_GRAPH_BYTES


def test_tokens_of_an_image_are_patches_that_were_merged() -> None:
    vision = VisionFacts(image_size=224, patch_size=14, merge_size=2)
    assert image_patches(vision) == 256
    assert image_patches(vision, 16) == 256  # the usual square is always possible
    assert image_patches(vision, 4096) == 4 * 4096
    assert image_patches(replace(vision, merge_size=0), 4096) == 4096
    assert image_patches(replace(vision, image_max_pixels=14 * 14 * 1000), 500) == 2000
    assert image_patches(replace(vision, patch_size=0), 4096) == 0
    with pytest.raises(ValueError, match="negative"):
        image_patches(vision, -1)


@pytest.mark.parametrize(
    ("kind", "size", "patch", "merge", "sides", "tokens"),
    [
        ("gemma3", 896, 14, 0, 4, 256),
        ("gemma3", 768, 16, 2, 2, 576),  # the file goes before what is built in
        ("mlp", 336, 14, 0, 1, 576),
        ("idefics3", 512, 16, 4, 4, 64),
        ("internvl", 448, 14, 2, 2, 256),
        ("idefics3", 512, 16, 0, 0, 0),  # nobody knows
        ("qwen2vl_merger", 560, 14, 0, 2, 0),  # depends on the image
        ("pixtral", 1024, 16, 2, 2, 0),
        ("of-the-future", 224, 14, 2, 2, 0),
        ("gemma3", 0, 14, 0, 4, 0),
        ("gemma3", 896, 0, 0, 4, 0),
    ],
)
def test_tokens_of_an_image(  # noqa: PLR0917 - a row of the table
    tmp_path: Path, kind: str, size: int, patch: int, merge: int, sides: int, tokens: int
) -> None:
    keys = {"clip.projector_type": kind, "clip.vision.image_size": size, "clip.vision.patch_size": patch}
    facts = projector(tmp_path, keys | ({"clip.vision.spatial_merge_size": merge} if merge else {}))
    assert (facts.merge_size, facts.image_tokens) == (sides, tokens)


@given(
    size=st.integers(1, 2048),
    patch=st.integers(1, 64),
    tokens=st.integers(1, 8192),
    more=st.integers(0, 8192),
)
def test_larger_images_never_cost_less(size: int, patch: int, tokens: int, more: int) -> None:
    vision = VisionFacts(image_size=size, patch_size=patch, merge_size=2)
    assert image_patches(vision) <= image_patches(vision, tokens) <= image_patches(vision, tokens + more)


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA, Backend.VULKAN])
@pytest.mark.parametrize("on_card", [True, False])
def test_the_price_of_a_launch_with_a_projector(tmp_path: Path, backend: Backend, on_card: bool) -> None:
    """Two items more, both in the place that was chosen; nothing else changes."""
    facts, seen = facts_of("gemma-3-27b"), projector(tmp_path)
    launch = replace(LAUNCH, projector_on_card=on_card)
    plain, quote = price(facts, launch, backend, POLICY), price(facts, launch, backend, POLICY, seen)
    added = [item for item in quote.items if item not in plain.items]
    assert [item.name for item in added] == ["projector", "projector graph"]
    assert tuple(item for item in quote.items if item not in added) == plain.items
    place = Place.CARD if on_card or backend is Backend.CPU else Place.HOST
    split = projector_weights(seen, backend, on_card=on_card)
    assert {item.place for item in added} == {place}
    assert {item.evidence for item in added} == {Evidence.HEADER}
    assert [item.bytes for item in added] == [split.card + split.host, projector_graph_bytes(seen)]
    larger = price(facts, replace(launch, image_max_tokens=9216), backend, POLICY, seen)
    assert larger.item("projector graph").bytes > 10 * quote.item("projector graph").bytes


def refused(path: Path) -> LlmError:
    with pytest.raises(LlmError) as caught:
        read_projector(path)
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT
    assert caught.value.hint
    return caught.value


def test_what_is_no_projector_is_refused(tmp_path: Path) -> None:
    assert "is not a usable projector: it is a llama" in refused(write_llama(tmp_path / "m.gguf")).message
    empty = write_gguf(tmp_path / "e.gguf", KEYS)
    assert "it has no tensors" in refused(empty).message
    nameless = write_gguf(tmp_path / "n.gguf", {}, TENSORS)
    assert refused(nameless).details["key"] == "general.architecture"
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "t.gguf")


@pytest.mark.parametrize("value", ["768", 768.5, True, Typed("i32", -1), [768, 768]])
def test_a_malformed_dimension_is_named(tmp_path: Path, value: Any) -> None:
    path = write_gguf(tmp_path / "p.gguf", KEYS | {"clip.vision.image_size": value}, TENSORS)
    assert refused(path).details["key"] == "clip.vision.image_size"
