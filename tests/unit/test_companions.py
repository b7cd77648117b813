"""What a file is, and which projector and drafter belong to which model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.checkpoints.classify import Digest, DraftMethod, Kind, digest, kind_by_name
from lllm3090d.checkpoints.header import read_header
from lllm3090d.checkpoints.library import Checkpoint, Library, Survey
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.gguf_files import (
    Tensor,
    Typed,
    model_metadata,
    model_tensors,
    write_gguf,
    write_llama,
    write_model,
    write_split,
)

pytestmark = pytest.mark.unit

F16, Q8_0 = 1, 7  # general.file_type


def survey(models: Path) -> Survey:
    return Library(models, {}).survey()


def only(models: Path) -> Checkpoint:
    (checkpoint,) = survey(models).checkpoints
    return checkpoint


def projector(path: Path, length: int, *, kind: str = "mlp", file_type: int = F16, **more: Any) -> Path:
    """A projector for models whose embedding has ``length`` values."""
    metadata = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.file_type": file_type,
        "clip.projector_type": kind,
        "clip.vision.projection_dim": length,
        **more,
    }
    return write_gguf(
        path, metadata, [Tensor("mm.0.weight", (32, length), "F16"), Tensor("v.class_embd", (32,))]
    )


def mtp_sidecar(path: Path, architecture: str = "llama", **dimensions: Any) -> Path:
    """Only the blocks of a model that predict further tokens, with its token embedding."""
    metadata = model_metadata(architecture, **dimensions)
    blocks, width = metadata[f"{architecture}.block_count"], metadata[f"{architecture}.embedding_length"]
    metadata[f"{architecture}.nextn_predict_layers"] = 1
    everything = model_tensors(metadata)
    mine = [
        t for t in everything if not t.name.startswith("blk.") or t.name.startswith(f"blk.{blocks - 1}.")
    ]
    mine.append(Tensor(f"blk.{blocks - 1}.nextn.eh_proj.weight", (2 * width, width), "Q8_0"))
    return write_gguf(path, metadata, mine)


def drafter(
    path: Path, architecture: str, length: int, *, own_length: int = 32, layers: tuple[int, ...] = (0, 1)
) -> Path:
    """An EAGLE-3 or DFlash drafter for models whose embedding has ``length`` values."""
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 1,
        f"{architecture}.embedding_length": own_length,
        f"{architecture}.target_layers": list(layers),
        **({f"{architecture}.target_hidden_size": length} if architecture == "eagle3" else {}),
    }
    return write_gguf(
        path, metadata, [Tensor("fc.weight", (64, own_length)), Tensor("blk.0.attn_q.weight", (64, 32))]
    )


def digest_of(path: Path) -> Digest:
    return digest(read_header(path))


def kind_of(path: Path, metadata: Mapping[str, Any], tensors: list[Tensor]) -> Kind:
    return digest_of(write_gguf(path, metadata, tensors)).kind


WEIGHT = Tensor("blk.0.attn_norm.weight", (64,))


@pytest.mark.parametrize(
    ("metadata", "tensors", "expected"),
    [
        ({"general.architecture": "llama"}, [WEIGHT], Kind.MODEL),
        ({"general.architecture": "never-heard-of"}, [WEIGHT], Kind.MODEL),
        ({}, [WEIGHT], Kind.MODEL),
        ({"general.architecture": "clip"}, [], Kind.PROJECTOR),
        ({"general.architecture": "llama", "general.type": "mmproj"}, [], Kind.PROJECTOR),
        ({"general.architecture": "llama", "general.type": "adapter"}, [], Kind.ADAPTER),
        ({"general.architecture": "llama", "adapter.type": "lora"}, [], Kind.ADAPTER),
        ({"general.architecture": "llama"}, [Tensor("blk.0.attn_q.weight.lora_a", (8, 8))], Kind.ADAPTER),
        ({"general.type": "imatrix"}, [Tensor("blk.0.attn_q.weight.in_sum2", (8,))], Kind.OTHER),
        ({"imatrix.datasets": ["wiki.txt"]}, [], Kind.OTHER),
        ({"general.architecture": "bert"}, [WEIGHT], Kind.EMBEDDING),
        ({"general.architecture": "nomic-bert-moe"}, [WEIGHT], Kind.EMBEDDING),
        ({"general.architecture": "t5encoder"}, [WEIGHT], Kind.EMBEDDING),
        (
            {"general.architecture": "gemma-embedding", "gemma-embedding.pooling_type": 1},
            [WEIGHT],
            Kind.EMBEDDING,
        ),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 3}, [WEIGHT], Kind.EMBEDDING),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 0}, [WEIGHT], Kind.MODEL),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 4}, [WEIGHT], Kind.RERANK),
        ({"general.architecture": "qwen3"}, [WEIGHT, Tensor("cls.output.weight", (64, 2))], Kind.RERANK),
        ({"general.architecture": "bert"}, [WEIGHT, Tensor("cls.weight", (64, 64))], Kind.RERANK),
        ({"general.architecture": "eagle3"}, [], Kind.DRAFTER),
        ({"general.architecture": "dflash"}, [], Kind.DRAFTER),
        ({"general.architecture": "gemma4-assistant"}, [], Kind.DRAFTER),
        (
            {"general.architecture": "llama", "llama.target_layers": [1]},
            [Tensor("fc.weight", (8, 8))],
            Kind.DRAFTER,
        ),
        # A whole model with blocks that predict further tokens is a model.
        (
            {"general.architecture": "qwen35"},
            [WEIGHT, Tensor("blk.1.nextn.eh_proj.weight", (8, 8))],
            Kind.MODEL,
        ),
        ({"general.architecture": "qwen35"}, [Tensor("blk.1.nextn.eh_proj.weight", (8, 8))], Kind.DRAFTER),
        # Malformed values tell nothing; reading the facts complains.
        ({"general.architecture": 7, "general.type": 7}, [WEIGHT], Kind.MODEL),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": "x"}, [WEIGHT], Kind.MODEL),
    ],
)
def test_kind_by_content(
    tmp_path: Path, metadata: dict[str, Any], tensors: list[Tensor], expected: Kind
) -> None:
    # The name says the contrary.
    name = "model.gguf" if expected is not Kind.MODEL else "mmproj-dflash-mtp-imatrix.gguf"
    assert kind_of(tmp_path / name, metadata, tensors) is expected


@pytest.mark.parametrize(
    ("architecture", "tensors", "method"),
    [
        ("eagle3", [], DraftMethod.EAGLE3),
        ("dflash", [], DraftMethod.DFLASH),
        ("dflash", [Tensor("markov_w1.weight", (8, 8))], DraftMethod.DSPARK),
        ("gemma4-assistant", [], DraftMethod.MTP),
        ("glm4moe", [Tensor("blk.46.nextn.eh_proj.weight", (8, 8))], DraftMethod.MTP),
    ],
)
def test_draft_methods(
    tmp_path: Path, architecture: str, tensors: list[Tensor], method: DraftMethod
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": architecture}, tensors)
    assert digest_of(path).method is method


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.gguf", (Kind.MODEL, None)),
        ("mmproj-model-f16.gguf", (Kind.PROJECTOR, None)),
        ("Qwen.mmproj-Q8_0.gguf", (Kind.PROJECTOR, None)),
        ("mtp-model.gguf", (Kind.DRAFTER, DraftMethod.MTP)),
        ("Qwen3.5-27B-MTP-Q4.gguf", (Kind.MODEL, None)),
        ("prompt-mtproto.gguf", (Kind.MODEL, None)),
        ("eagle3-model.gguf", (Kind.DRAFTER, DraftMethod.EAGLE3)),
        ("x-dspark-y.gguf", (Kind.DRAFTER, DraftMethod.DSPARK)),
        ("imatrix.gguf", (Kind.OTHER, None)),
    ],
)
def test_kind_by_name_where_the_content_cannot_be_read(
    name: str, expected: tuple[Kind, DraftMethod | None]
) -> None:
    assert kind_by_name(name) == expected


def test_kinds_in_the_library(tmp_path: Path) -> None:
    write_llama(tmp_path / "Chat" / "m.gguf")
    write_gguf(tmp_path / "Embed" / "m.gguf", {"general.architecture": "bert"}, [WEIGHT])
    write_gguf(
        tmp_path / "Rank" / "m.gguf", {"general.architecture": "qwen3", "qwen3.pooling_type": 4}, [WEIGHT]
    )
    lora = write_gguf(tmp_path / "lora.gguf", {"general.type": "adapter"})
    broken = tmp_path / "mmproj.gguf"
    broken.write_text("<html>")
    found = survey(tmp_path)
    assert [(c.name, c.kind) for c in found.checkpoints] == [
        ("Chat", Kind.MODEL),
        ("Embed", Kind.EMBEDDING),
        ("Rank", Kind.RERANK),
    ]
    assert [(c.path, c.kind, c.problem is None) for c in found.companions] == [
        (lora, Kind.ADAPTER, True),
        (broken, Kind.PROJECTOR, False),
    ]


def test_a_projector_and_a_drafter_beside_a_model(tmp_path: Path) -> None:
    write_llama(tmp_path / "A" / "m.gguf", embedding_length=64)
    vision = projector(tmp_path / "A" / "vision.gguf", 64)
    heads = mtp_sidecar(tmp_path / "A" / "heads.gguf", embedding_length=64)
    found = only(tmp_path)
    assert found.name == "A"
    assert found.projector is not None
    assert found.drafter is not None
    assert (found.projector.path, found.projector.kind) == (vision, Kind.PROJECTOR)
    assert found.projector.size_bytes == vision.stat().st_size
    assert (found.drafter.path, found.drafter.method) == (heads, DraftMethod.MTP)
    assert [item.path for item in survey(tmp_path).companions] == [heads, vision]


def test_dimensions_that_contradict_are_never_paired(tmp_path: Path) -> None:
    write_llama(tmp_path / "A" / "m.gguf", embedding_length=64, vocabulary=256, blocks=2)
    projector(tmp_path / "A" / "vision.gguf", 128)
    mtp_sidecar(tmp_path / "A" / "a.gguf", embedding_length=128)
    mtp_sidecar(tmp_path / "A" / "b.gguf", embedding_length=64, vocabulary=512)
    mtp_sidecar(tmp_path / "A" / "c.gguf", "qwen3", embedding_length=64)
    drafter(tmp_path / "A" / "d.gguf", "eagle3", 128)
    drafter(tmp_path / "A" / "e.gguf", "dflash", 0, own_length=32)
    drafter(tmp_path / "A" / "f.gguf", "eagle3", 64, layers=(0, 2))
    found = only(tmp_path)
    assert (found.projector, found.drafter) == (None, None)


@pytest.mark.parametrize("architecture", ["eagle3", "dflash"])
def test_drafters_of_their_own_architecture(tmp_path: Path, architecture: str) -> None:
    write_llama(tmp_path / "A" / "m.gguf", embedding_length=64)
    path = drafter(tmp_path / "A" / "d.gguf", architecture, 64, own_length=64)
    found = only(tmp_path)
    assert found.drafter is not None
    assert found.drafter.path == path


def test_the_dimension_is_that_of_the_tensors_where_the_key_is_missing(tmp_path: Path) -> None:
    for length, name, shape in (
        (64, "mm.2.weight", (32, 64)),
        (128, "mm.input_projection.weight", (128, 32)),
    ):
        metadata = {"general.architecture": "clip"}
        path = write_gguf(tmp_path / f"{length}.gguf", metadata, [Tensor(name, shape)])
        assert digest_of(path).target_lengths == (length,)


def test_projectors_of_one_family_go_with_it(tmp_path: Path) -> None:
    write_llama(tmp_path / "A" / "m.gguf", embedding_length=64)
    write_model(tmp_path / "B" / "m.gguf", "qwen3", embedding_length=64)
    projector(tmp_path / "A" / "mmproj.gguf", 64, kind="qwen3vl_merger")
    right = projector(tmp_path / "B" / "mmproj.gguf", 64, kind="qwen3vl_merger")
    first, second = survey(tmp_path).checkpoints
    assert first.projector is None
    assert second.projector is not None
    assert second.projector.path == right


def test_the_better_of_several_projectors(tmp_path: Path) -> None:
    write_llama(tmp_path / "A" / "m.gguf", embedding_length=64)
    projector(tmp_path / "A" / "a.gguf", 64, file_type=Q8_0)
    best = projector(tmp_path / "A" / "b.gguf", 64, file_type=F16)
    projector(tmp_path / "A" / "c.gguf", 64, file_type=0)
    found = only(tmp_path)
    assert found.projector is not None
    assert found.projector.path == best


def test_several_quants_share_a_projector_and_lower_directories_inherit_it(tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "lower/m-Q2_K.gguf"):
        write_llama(tmp_path / "A" / name, embedding_length=64)
    vision = projector(tmp_path / "A" / "mmproj.gguf", 64)
    nearer = projector(tmp_path / "A" / "lower" / "mmproj.gguf", 64)
    write_llama(tmp_path / "B" / "m.gguf", embedding_length=64)
    found = {c.name: c.projector.path if c.projector else None for c in survey(tmp_path).checkpoints}
    assert found == {"A/lower": nearer, "A/m-Q4_K_M": vision, "A/m-Q8_0": vision, "B": None}


def test_in_a_heap_of_files_the_names_must_agree(tmp_path: Path) -> None:
    write_llama(
        tmp_path / "Alpha-7B-Q4_K_M.gguf", embedding_length=64, blocks=2, metadata={"general.name": "Alpha"}
    )
    write_llama(
        tmp_path / "Beta-7B-Q4_K_M.gguf", embedding_length=64, blocks=3, metadata={"general.name": "Beta"}
    )
    write_llama(
        tmp_path / "Gamma-Q4_K_M.gguf", embedding_length=64, blocks=4, metadata={"general.name": "Gamma"}
    )
    alpha = projector(tmp_path / "mmproj-Alpha-f16.gguf", 64)
    beta = projector(tmp_path / "mmproj-Beta-f16.gguf", 64)
    found = {c.name[:1]: c.projector.path if c.projector else None for c in survey(tmp_path).checkpoints}
    assert found == {"A": alpha, "B": beta, "G": None}


def test_embedding_models_get_no_companion(tmp_path: Path) -> None:
    metadata = {"general.architecture": "bert", "bert.embedding_length": 64}
    write_gguf(tmp_path / "A" / "m.gguf", metadata, [WEIGHT])
    projector(tmp_path / "A" / "mmproj.gguf", 64)
    assert only(tmp_path).projector is None


def test_a_broken_companion_is_not_paired(tmp_path: Path) -> None:
    write_llama(tmp_path / "A" / "m.gguf", embedding_length=64)
    path = projector(tmp_path / "A" / "mmproj.gguf", 64)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4000)
    found = survey(tmp_path)
    assert found.checkpoints[0].projector is None
    assert found.companions[0].problem is not None


# --- what is wrong with a set of files ------------------------------------------------------------------------


def problem(models: Path) -> LlmError:
    found = only(models).problem
    assert found is not None
    return found


def test_a_sound_set_has_no_problem(tmp_path: Path) -> None:
    write_split(tmp_path / "Big", "big", count=3)
    assert only(tmp_path).problem is None


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard(tmp_path: Path, missing: int) -> None:
    shards = write_split(tmp_path / "Big", "big", count=3)
    shards[missing].unlink()
    error = problem(tmp_path)
    assert error.code is ErrorCode.INCOMPLETE_CHECKPOINT
    assert error.details["missing"] == [shards[missing].name]


def test_shards_that_contradict_each_other(tmp_path: Path) -> None:
    def rewritten(number: int, **changes: int) -> LlmError:
        shards = write_split(tmp_path / "Big", "big", count=3)
        keys = {"no": number, "count": 3, "tensors.count": 30, **changes}
        split = {f"split.{key}": Typed("u16", value) for key, value in keys.items()}
        count = len(read_header(shards[number]).tensors)
        write_gguf(shards[number], split, [Tensor(f"t{i}", (8,)) for i in range(count)])
        return problem(tmp_path)

    assert "its number (from 0) is 2 by its header, but 1 by its name" in rewritten(1, no=2).message
    assert "one of 4 files by its header" in rewritten(1, count=4).message
    shards = write_split(tmp_path / "Big", "big", count=3)
    write_gguf(shards[2], {"split.no": Typed("u16", 2), "split.count": Typed("u16", 3)}, [Tensor("t", (8,))])
    assert "tensors in all its files" in problem(tmp_path).message
    write_llama(shards[1])
    assert problem(tmp_path).code is ErrorCode.INCOMPLETE_CHECKPOINT
    shards[1].write_text("<html>")
    assert "web page" in problem(tmp_path).message


def test_a_shard_under_another_name(tmp_path: Path) -> None:
    shards = write_split(tmp_path / "Big", "big", count=2)
    shards[1].unlink()
    shards[0].rename(shards[0].with_name("renamed.gguf"))
    assert "the engine finds them by name" in problem(tmp_path).message


def test_files_for_other_machines_are_listed_and_not_loaded(tmp_path: Path) -> None:
    from gguf import GGUFEndian, GGUFWriter

    (tmp_path / "Big").mkdir()
    writer = GGUFWriter(tmp_path / "Big" / "m.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    error = problem(tmp_path)
    assert error.code is ErrorCode.BAD_CHECKPOINT
    assert "big-endian" in error.message


@pytest.mark.parametrize(
    "name",
    [
        "m.gguf.aria2",
        "m.partial.gguf",
        "m.gguf.crdownload",
        "m.unfinished.gguf",
        "m.!qB.gguf",
        "m.gguf.partial",
    ],
)
def test_partial_downloads_are_ignored(tmp_path: Path, name: str) -> None:
    if name.endswith(".aria2"):
        write_llama(tmp_path / "m.gguf")
        (tmp_path / name).write_bytes(b"\0")
    else:
        write_llama(tmp_path / name)
    assert survey(tmp_path) == Survey((), ())
