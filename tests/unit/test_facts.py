"""CheckpointFacts from headers: exact figures, engine rules, split files, the cache."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lllm3090d.checkpoints import facts as facts_module
from lllm3090d.checkpoints.architectures import ARCHITECTURES, REFUSED
from lllm3090d.checkpoints.facts import (
    CheckpointFacts,
    FactsCache,
    LayerFacts,
    LayerKind,
    RopeFacts,
    read_facts,
)
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.demanded_tensors import fitted
from tests.fakes.gguf_files import (
    Tensor,
    Typed,
    model_metadata,
    model_tensors,
    write_gemma3,
    write_gguf,
    write_llama,
    write_model,
    write_split,
)

pytestmark = pytest.mark.unit

F, S = LayerKind.FULL, LayerKind.SLIDING


def refused(path: Path, code: ErrorCode = ErrorCode.BAD_CHECKPOINT) -> LlmError:
    with pytest.raises(LlmError) as caught:
        read_facts([path])
    assert caught.value.code is code
    assert caught.value.hint
    return caught.value


def kinds(path: Path) -> list[LayerKind]:
    return [layer.kind for layer in read_facts([path]).layers]


def test_llama_in_full(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "{{ messages }}"})
    facts = read_facts([path])
    # Q8_0: 34 bytes for 32 values. Norms are F32.
    matrices = 64 * 64 + 64 * 32 + 64 * 32 + 64 * 64 + 3 * 64 * 128
    block = matrices // 32 * 34 + 2 * 64 * 4
    assert facts == CheckpointFacts(
        architecture="llama",
        title="Tiny llama",
        quantisation="Q8_0",
        trained_context_tokens=4096,
        embedding_length=64,
        vocabulary_size=256,
        sliding_window_tokens=0,
        layers=facts.layers,
        tables=facts.tables,
        file_bytes=path.stat().st_size,
        has_chat_template=True,
        widest_v_values=32,
        rope=RopeFacts(10_000.0, 16, "none", 1.0, 4096),
    )
    assert len(facts.layers) == 2
    layer = facts.layers[0]
    assert (
        layer == facts.layers[1] == LayerFacts(F, 4, 16, 16, 32, 32, layer.weights, feed_forward_length=128)
    )
    assert layer.weight_bytes == block
    assert layer.weights.attention.stored == (2 * 64 * 64 + 2 * 64 * 32) // 32 * 34
    assert layer.weights.feed_forward.stored == 3 * 64 * 128 // 32 * 34
    assert layer.weights.other.stored == 2 * 64 * 4
    assert facts.token_embedding_bytes == facts.output_bytes == 64 * 256 // 32 * 34
    assert facts.tables.output_other.stored == 64 * 4
    assert not facts.output_is_tied
    assert facts.weight_bytes == 2 * block + 2 * 17408 + 256


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_byte_has_a_place(tmp_path: Path, architecture: str) -> None:
    for tied in (False, True):
        path = write_model(tmp_path / "m.gguf", architecture, tied=tied, blocks=3)
        tensors = model_tensors(model_metadata(architecture, blocks=3), tied=tied)
        facts = read_facts([path])
        assert facts.weight_bytes == sum(tensor.size_bytes for tensor in tensors)
        assert facts.output_is_tied is tied
        assert all(layer.weight_bytes > 0 for layer in facts.layers)


def test_head_counts_per_layer_and_lengths(tmp_path: Path) -> None:
    """Of an architecture that takes them block by block; with llama the engine does not load such a file."""
    dimensions: dict[str, Any] = {
        "blocks": 3,
        "head_count": [4, 4, 8],
        "kv_head_count": [1, 2, 4],
        "feed_forward_length": [128, 64, 32],
        "type": "F16",
    }
    keys = {"deci.attention.key_length": 24, "deci.attention.value_length": 24}
    layers = read_facts([write_model(tmp_path / "m.gguf", "deci", metadata=keys, **dimensions)]).layers
    assert [layer.head_count for layer in layers] == [4, 4, 8]
    assert [layer.k_values for layer in layers] == [24, 48, 96]
    assert [layer.v_values for layer in layers] == [24, 48, 96]
    assert [layer.feed_forward_length for layer in layers] == [128, 64, 32]
    assert {layer.key_length for layer in layers} == {24}
    assert "blk.1.attn_k.weight" in refused(write_llama(tmp_path / "n.gguf", **dimensions)).message


def test_defaults_of_the_engine(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", metadata={"llama.attention.head_count_kv": None})
    layer = read_facts([path]).layers[0]
    assert (layer.key_length, layer.k_values, layer.v_values) == (16, 64, 64)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, [S, S, S, S, S, F] * 2),
        (3, [S, S, F] * 4),
        (0, [S] * 12),
        (100, [S] * 12),
        ([True, False] * 6, [S, F] * 6),
        ([0] * 11 + [1], [F] * 11 + [S]),
        ([1] * 11, [S] * 11 + [F]),  # the engine takes any length
        ([1] * 13, [S] * 12),
        ([2] * 12, [S] * 12),
    ],
)
def test_gemma3_pattern(tmp_path: Path, pattern: Any, expected: list[LayerKind]) -> None:
    path = write_gemma3(tmp_path / "m.gguf", metadata={"gemma3.attention.sliding_window_pattern": pattern})
    assert kinds(path) == expected
    assert read_facts([path]).sliding_window_tokens == 512


@pytest.mark.parametrize(
    "pattern", [1, -1, True, 1.5, "6", [1] * 513, [0] * 12, [1.0] * 12, ["x"] * 12, Typed("u8", [1] * 12)]
)
def test_gemma3_pattern_malformed(tmp_path: Path, pattern: Any) -> None:
    path = write_gemma3(
        tmp_path / "m.gguf",
        metadata={"gemma3.attention.sliding_window_pattern": Typed("i32", -1) if pattern == -1 else pattern},
    )
    assert "sliding_window_pattern" in refused(path).details["key"]


def test_gemma3_without_a_window_is_dense(tmp_path: Path) -> None:
    for window in (None, 0):
        path = write_gemma3(tmp_path / "m.gguf", metadata={"gemma3.attention.sliding_window": window})
        assert kinds(path) == [F] * 12
        assert read_facts([path]).sliding_window_tokens == 0


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_others_ignore_the_window(tmp_path: Path, architecture: str) -> None:
    keys = {
        f"{architecture}.attention.sliding_window": 128,
        f"{architecture}.attention.sliding_window_pattern": 2,
    }
    path = write_model(tmp_path / "m.gguf", architecture, metadata=keys)
    assert kinds(path) == [F, F]
    assert read_facts([path]).sliding_window_tokens == 0


def test_sliding_layers_may_have_their_own_lengths(tmp_path: Path) -> None:
    """With gemma3 all blocks must have the projections of the first, whatever their windows."""
    keys = {
        "attention.sliding_window": 64,
        "attention.sliding_window_pattern": [1, 0],
        "attention.key_length_swa": 8,
        "attention.value_length_swa": 8,
    }
    narrow: dict[str, tuple[int, ...]] = {
        "attn_q": (64, 32),
        "attn_k": (64, 16),
        "attn_v": (64, 16),
        "attn_output": (32, 64),
        "attn_q_norm": (8,),
        "attn_k_norm": (8,),
    }
    shapes = {f"blk.0.{name}.weight": shape for name, shape in narrow.items()}

    def written(architecture: str) -> Path:
        prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
        metadata = model_metadata(architecture, metadata=prefixed)
        tensors = [Tensor(t.name, shapes.get(t.name, t.shape), "F32") for t in model_tensors(metadata)]
        return write_gguf(tmp_path / "m.gguf", metadata, fitted(metadata, tensors))

    layers = read_facts([written("spark2_5")]).layers
    assert [(layer.k_values, layer.v_values) for layer in layers] == [(16, 16), (32, 32)]
    assert "blk.1.attn_" in refused(written("gemma3")).message


def test_real_dimensions(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf",
        blocks=80,
        embedding_length=8192,
        head_count=64,
        kv_head_count=8,
        feed_forward_length=28672,
        vocabulary=128256,
        context_tokens=131072,
        type="Q4_K",
    )
    facts = read_facts([path])
    assert facts.weight_bytes > 36 << 30
    assert facts.layers[79].k_values == 1024
    assert path.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"],
)
@pytest.mark.parametrize(
    "value",
    [
        None,
        "7",
        1.5,
        True,
        0,
        Typed("i32", -1),
        Typed("u64", 2**64 - 1),
        [4] * 7,
        ["a", "b"],
        [0, 0],
        "x" * 70000,
    ],
    ids=repr,
)
def test_a_bad_key_is_named(tmp_path: Path, key: str, value: Any) -> None:
    metadata = model_metadata()
    tensors = model_tensors(metadata)
    path = write_gguf(tmp_path / "m.gguf", {**metadata, f"llama.{key}": value}, tensors)
    error = refused(path)
    assert error.details["key"] == f"llama.{key}"
    assert f"llama.{key}" in error.message
    assert len(error.message) < 400


def test_bad_texts_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for key, value in [
        ("general.architecture", None),
        ("general.architecture", 3),
        ("general.name", 3),
        ("general.file_type", "Q8_0"),
        ("llama.block_count", 513),
        ("llama.attention.key_length", 0),
        ("llama.attention.head_count", 65),
    ]:
        metadata = model_metadata()
        write_gguf(path, {**metadata, key: value}, model_tensors(metadata))
        assert refused(path).details["key"] == key


@pytest.mark.parametrize("architecture", ["madeup", "\x1b[31mred", *REFUSED])
def test_an_architecture_without_a_rule_is_refused_with_the_reason(
    tmp_path: Path, architecture: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": architecture}, [Tensor("t", (8,))])
    error = refused(path, ErrorCode.UNSUPPORTED_ARCHITECTURE)
    assert REFUSED.get(architecture, "no rule") in error.message
    assert {"llama", "gemma3", "qwen35", "mamba"} <= set(error.details["known"])
    assert error.message.isprintable()


def test_no_architecture_is_both_known_and_refused() -> None:
    assert not set(ARCHITECTURES) & set(REFUSED)
    assert len(ARCHITECTURES) > 100


def test_experts_must_be_used(tmp_path: Path) -> None:
    for used in (None, 0, 9):
        keys = {"llama.expert_count": 8, "llama.expert_used_count": used}
        error = refused(write_llama(tmp_path / "m.gguf", metadata=keys))
        assert error.details["key"] == "llama.expert_used_count"
    assert read_facts([write_llama(tmp_path / "n.gguf", metadata={"llama.expert_count": 0})]).layers


def test_tensors_that_contradict_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = model_metadata()
    tensors = model_tensors(metadata)
    for words, changed in [
        ("token_embd.weight is missing", tensors[1:]),
        ("block 1 of 2", [t for t in tensors if not t.name.startswith("blk.1.")]),
        ("blk.2.attn_k.weight", [*tensors, Tensor("blk.2.attn_k.weight", (64, 32))]),
        (
            "blk.0.attn_k.weight",
            [replace(t, shape=(64, 96)) if t.name == "blk.0.attn_k.weight" else t for t in tensors],
        ),
        ("token_embd.weight", [replace(tensors[0], shape=(32, 256)), *tensors[1:]]),
        ("token_embd.weight", [replace(tensors[0], shape=(64,)), *tensors[1:]]),
    ]:
        write_gguf(path, metadata, changed)
        assert words in refused(path).message


def test_quantisation_label(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for file_type, tensor_type, label in [(15, "Q8_0", "Q4_K_M"), (1, "F16", "F16"), (0, "F32", "F32")]:
        write_llama(path, type=tensor_type, metadata={"general.file_type": file_type})
        assert read_facts([path]).quantisation == label
    for unknown in (None, 4, 99999, 1024):  # missing, removed, unknown, "guessed"
        write_llama(path, type="Q4_0", metadata={"general.file_type": unknown})
        assert read_facts([path]).quantisation == "Q4_0"


def test_title_and_template(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_llama(path, metadata={"general.name": None, "tokenizer.chat_template": ""})
    assert read_facts([path]).title is None
    assert not read_facts([path]).has_chat_template
    write_llama(path, metadata={"general.name": "a\x1b[0mb", "tokenizer.chat_template": "x" * 100_000})
    assert read_facts([path]).title == "a\\x1b[0mb"
    assert read_facts([path]).has_chat_template


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, RopeFacts(10_000.0, 16, "none", 1.0, 4096)),
        (
            {"freq_base": 1e6, "scaling.type": "yarn", "scaling.factor": 4.0}
            | {"scaling.original_context_length": 1024, "dimension_count": 16},
            RopeFacts(1e6, 16, "yarn", 4.0, 1024),
        ),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, RopeFacts(10_000.0, 16, "linear", 1.0, 4096)),
        ({"scale_linear": 2.0}, RopeFacts(10_000.0, 16, "linear", 2.0, 4096)),  # older files
    ],
)
def test_rope_limits(tmp_path: Path, keys: dict[str, Any], expected: RopeFacts) -> None:
    """The trained context is what the file says, the original one what it was before positions were stretched."""
    metadata = {f"llama.rope.{key}": value for key, value in keys.items()}
    if "dimension_count" not in keys:
        metadata["llama.rope.dimension_count"] = None
    facts = read_facts([write_llama(tmp_path / "m.gguf", metadata=metadata)])
    assert facts.rope == expected
    assert facts.trained_context_tokens == 4096


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scaling.factor", float("nan")),
        ("scaling.factor", float("inf")),
        ("scaling.factor", "4"),
        ("freq_base", float("-inf")),
        ("scaling.type", 3),
        ("scaling.type", "dynamic"),
        ("dimension_count", 8),  # of a llama all values of a head are rotated
        ("scaling.original_context_length", -1.5),
    ],
)
def test_malformed_rope_keys_are_named(tmp_path: Path, key: str, value: Any) -> None:
    path = write_llama(tmp_path / "m.gguf", metadata={f"llama.rope.{key}": value})
    assert refused(path).details["key"] == f"llama.rope.{key}"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    count=st.integers(1, 12),
    chosen=st.data(),
    name=st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20
    ),
)
def test_facts_are_the_same_from_any_shards_name(
    tmp_path: Path, count: int, chosen: st.DataObject, name: str
) -> None:
    """One name or several, in any order, and names in every script."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        shards = write_split(Path(folder), name, count=count)
        whole = read_facts(shards)
        some = chosen.draw(st.lists(st.sampled_from(shards), min_size=1, unique=True))
        assert read_facts(some) == whole
        assert all(read_facts([shard]) == whole for shard in shards)


def test_split(tmp_path: Path) -> None:
    shards = write_split(tmp_path, "big model", count=3)
    facts = read_facts(shards)
    whole = read_facts([write_llama(tmp_path / "one.gguf", blocks=3)])
    assert facts.file_bytes == sum(shard.stat().st_size for shard in shards)
    assert replace(facts, file_bytes=whole.file_bytes) == whole
    assert read_facts(shards[:1]) == facts
    assert read_facts(shards[2:]) == facts


def test_missing_shards_are_named(tmp_path: Path) -> None:
    shards = write_split(tmp_path, "m", count=9)
    shards[4].unlink()
    error = refused(shards[0], ErrorCode.INCOMPLETE_CHECKPOINT)
    assert "m-00005-of-00009.gguf" in error.message
    assert error.details["missing"] == ["m-00005-of-00009.gguf"]
    assert error.details["directory"] == str(tmp_path)
    for shard in shards[:4] + shards[5:8]:
        shard.unlink()
    error = refused(shards[8], ErrorCode.INCOMPLETE_CHECKPOINT)
    assert "and 3 more" in error.message
    assert len(error.details["missing"]) == 8


def test_split_that_does_not_belong_together(tmp_path: Path) -> None:
    shards = write_split(tmp_path, "m", count=2)
    renamed = shards[0].rename(tmp_path / "renamed.gguf")
    incomplete = ErrorCode.INCOMPLETE_CHECKPOINT
    assert "one of 2 files" in refused(renamed, incomplete).message
    renamed.rename(shards[0])
    shards[1].write_bytes(shards[0].read_bytes())
    assert "number (from 0) is 0" in refused(shards[0], incomplete).message
    write_llama(shards[0])
    assert "split.no is missing" in refused(shards[0]).message
    other = write_split(tmp_path / "other", "m", count=2, blocks=4)
    shards = write_split(tmp_path, "m", count=2)
    other[1].replace(shards[1])
    assert "tensors" in refused(shards[0], incomplete).message


def test_the_same_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = write_split(tmp_path, "m", count=2)
    metadata = model_metadata()
    tensors = model_tensors(metadata)
    half = -(-len(tensors) // 2)
    split = {"split.no": Typed("u16", 1), "split.count": Typed("u16", 2)}
    write_gguf(shards[1], split, [tensors[0], *tensors[half + 1 :]])
    assert "occurs in two of its files" in refused(shards[0]).message


def test_one_of_one_is_whole(tmp_path: Path) -> None:
    assert len(read_facts([write_llama(tmp_path / "m-00001-of-00001.gguf")]).layers) == 2
    assert len(read_facts([write_llama(tmp_path / "m-00000-of-00002.gguf")]).layers) == 2
    assert len(read_facts([write_llama(tmp_path / "m-00001-of-99999.gguf")]).layers) == 2


class CountedReads:
    """Counts how often the facts are really read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._read = facts_module.read_facts
        monkeypatch.setattr(facts_module, "read_facts", self)

    def __call__(self, *arguments: Any) -> CheckpointFacts:
        self.count += 1
        return self._read(*arguments)


def test_cache_reads_once_until_a_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = CountedReads(monkeypatch)
    cache = FactsCache()
    shards = write_split(tmp_path, "m", count=2)
    first = cache.get(shards)
    assert cache.get(shards) is first
    assert cache.get(shards[:1]) is first
    assert reads.count == 1
    os.utime(shards[1], ns=(1, 1))
    assert cache.get(shards) == first
    assert reads.count == 2
    copy = tmp_path / "copy"
    copy.write_bytes(shards[1].read_bytes())
    os.utime(copy, ns=(1, 1))
    copy.replace(shards[1])  # same size and time, another inode
    cache.get(shards)
    assert reads.count == 3
    shards[1].unlink()
    with pytest.raises(LlmError) as caught:
        cache.get(shards)
    assert caught.value.code is ErrorCode.INCOMPLETE_CHECKPOINT


def test_cache_is_bounded_and_keeps_what_was_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = CountedReads(monkeypatch)
    cache = FactsCache(capacity=2)
    a, b, c = (write_llama(tmp_path / f"{name}.gguf") for name in "abc")
    for path in (a, b, a, c):
        cache.get([path])
    assert reads.count == 3
    cache.get([a])
    assert reads.count == 3
    cache.get([b])
    assert reads.count == 4


def test_the_facts_of_a_large_library_are_kept_and_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of models asks for all of them in order: with one too few, each list would read every header."""
    reads = CountedReads(monkeypatch)
    cache = FactsCache()
    first = write_llama(tmp_path / "0.gguf", blocks=40)
    paths = [first, *(tmp_path / f"{number}.gguf" for number in range(1, 1000))]
    for path in paths[1:]:
        path.symlink_to(first)
    for _ in range(2):
        for path in paths:
            facts = cache.get([path])
    assert reads.count == len(paths)
    assert len(facts.layers) == 40
    assert len(set(map(id, facts.layers))) == 1  # equal blocks are kept once


def test_cache_does_not_keep_failures_or_what_changed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FactsCache()
    path = tmp_path / "m.gguf"
    with pytest.raises(LlmError, match="No such file"):
        cache.get([path])
    path.write_bytes(b"<html>")
    with pytest.raises(LlmError, match="web page"):
        cache.get([path])
    write_llama(path)
    facts_of = facts_module.facts_of_headers

    def replaced_while_reading(*arguments: Any) -> CheckpointFacts:
        found = facts_of(*arguments)
        write_llama(path, blocks=5)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(facts_module, "facts_of_headers", replaced_while_reading)
        assert len(cache.get([path]).layers) == 2
    assert len(cache.get([path]).layers) == 5


def test_cache_from_many_threads(tmp_path: Path) -> None:
    cache = FactsCache(capacity=3)
    paths = [write_llama(tmp_path / f"{i}.gguf", blocks=i + 1) for i in range(6)]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(10):
            wrong.extend(i for i, path in enumerate(paths) if len(cache.get([path]).layers) != i + 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
