"""The catalogue: the packaged entries, a person's own file, and everything that may be wrong in it."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lllm3090d.checkpoints.badges import Badge
from lllm3090d.checkpoints.catalogue import (
    MAX_FILE_BYTES,
    MAX_MODELS,
    ModelKind,
    load_catalogue,
    packaged_catalogue,
)
from lllm3090d.errors import ErrorCode, LlmError

pytestmark = pytest.mark.unit

OWN: dict[str, Any] = {
    "id": "tiny",
    "name": "Tiny-1B",
    "repository": "somebody/Tiny-1B-GGUF",
    "file": "tiny-Q8_0.gguf",
    "quantisation": "Q8_0",
    "file_bytes": 1_000_000_000,
    "kind": "dense",
    "total_parameters_b": 1,
    "active_parameters_b": 1,
    "trained_context_tokens": 8192,
    "block_count": 16,
    "full_attention": {"layers": 16, "kv_heads": 8, "head_length": 64},
}


def write(folder: Path, *models: dict[str, Any], **others: Any) -> Path:
    file = folder / "catalogue.json"
    file.write_text(json.dumps({"schema": 1, "models": models} | others), encoding="utf-8")
    return file


def refusal(file: Path) -> LlmError:
    with pytest.raises(LlmError) as caught:
        load_catalogue(file)
    assert caught.value.code is ErrorCode.SETTINGS_INVALID
    assert str(file) in caught.value.message
    assert caught.value.hint
    json.dumps(caught.value.problem())
    return caught.value


# --- the package's own -------------------------------------------------------------------------------------


def test_the_packaged_entries() -> None:
    entries = packaged_catalogue().entries
    assert [entry.name for entry in entries] == [
        "Qwen3.8-27B",
        "Qwen3.6-35B-A3B",
        "Qwen3.6-35B-A3B-MTP",
        "Qwen3.6-35B-A3B-Q4KS",
        "gpt-oss-20b",
        "Qwen3-8B",
        "Gemma-4-26B-A4B",
        "Muse-Glimmer-30B",
        "Gemma-4-12B-QAT",
    ]
    assert all(entry.verified and entry.speeds and entry.tags for entry in entries)
    shown = [round(entry.speeds[0].tokens_per_s) for entry in entries]
    assert shown == [55, 126, 172, 124, 160, 115, 128, 44, 84]


def test_full_attention_has_the_global_geometry() -> None:
    """KiB of a token at f16; the geometry of the sliding layers would give two and four times as much."""
    growing = {
        entry.id: entry.full_attention.f16_bytes_per_token / 1024
        for entry in packaged_catalogue().entries
        if entry.full_attention
    }
    assert growing == {
        "qwen3.8-27b": 64,
        "qwen3.6-35b-a3b": 20,
        "qwen3.6-35b-a3b-mtp": 20,
        "qwen3.6-35b-a3b-q4ks": 20,
        "gpt-oss-20b": 24,
        "qwen3-8b": 144,
        "gemma-4-26b-a4b": 20,
        "muse-glimmer-30b": 13,
        "gemma-4-12b-qat": 16,
    }


def test_entries_are_found_by_id_and_name_and_not_by_file() -> None:
    catalogue = packaged_catalogue()
    assert catalogue.find("QWEN3.8-27B") is catalogue.find("qwen3.8-27b") is catalogue.entries[0]
    assert catalogue.find("Gemma-4-12B-QAT") is catalogue.entries[-1]
    plain, mtp = catalogue.find("qwen3.6-35b-a3b"), catalogue.find("qwen3.6-35b-a3b-mtp")
    assert plain is not None and mtp is not None
    assert plain.file == mtp.file  # two builds under one file name
    assert catalogue.find(plain.file) is None


def test_badges() -> None:
    found = {entry.id: entry.badges for entry in packaged_catalogue().entries}
    assert found["qwen3.8-27b"] == (Badge.DENSE, Badge.MTP)
    assert found["qwen3.6-35b-a3b-mtp"] == (Badge.MOE, Badge.MTP)
    assert found["gemma-4-26b-a4b"] == (Badge.MOE, Badge.VISION)
    assert found["qwen3-8b"] == (Badge.DENSE,)


# --- a person's own ----------------------------------------------------------------------------------------


def test_without_a_file_the_package_stands_alone(tmp_path: Path) -> None:
    assert load_catalogue(None) is packaged_catalogue()
    assert load_catalogue(tmp_path / "missing.json") is packaged_catalogue()
    with pytest.raises(LlmError, match="does not exist") as caught:
        load_catalogue(tmp_path / "missing.json", must_exist=True)
    assert caught.value.code is ErrorCode.SETTINGS_INVALID


def test_own_entries_are_added_behind(tmp_path: Path) -> None:
    catalogue = load_catalogue(write(tmp_path, OWN))
    assert catalogue.entries[:-1] == packaged_catalogue().entries
    added = catalogue.find("tiny-1b")
    assert added is catalogue.entries[-1]
    assert added is not None
    assert (added.kind, added.weight_bytes, added.badges) == (ModelKind.DENSE, 10**9, (Badge.DENSE,))
    assert not (added.verified or added.speeds or added.drafts_itself or added.has_projector)


def test_an_entry_with_a_known_id_replaces_it_in_its_place(tmp_path: Path) -> None:
    catalogue = load_catalogue(write(tmp_path, OWN | {"id": "gpt-oss-20b", "name": "gpt-oss-20b"}))
    assert len(catalogue.entries) == len(packaged_catalogue().entries)
    assert catalogue.entries[4].file == "tiny-Q8_0.gguf"
    assert packaged_catalogue().entries[4].file == "gpt-oss-20b-MXFP4.gguf"


def test_an_id_counts_more_than_the_name_of_another(tmp_path: Path) -> None:
    catalogue = load_catalogue(write(tmp_path, OWN | {"name": "Qwen3-8B"}))
    found = catalogue.find("qwen3-8b")
    assert found is not None
    assert found.file == "Qwen3-8B-Q4_K_M.gguf"


BAD_ENTRIES: list[tuple[dict[str, Any], str]] = [
    ({"id": "Tiny 1B"}, "id"),
    ({"id": ""}, "id"),
    ({"name": "../../etc"}, "name"),
    ({"name": ".."}, "name"),
    ({"name": "a" * 201}, "name"),
    ({"file": "sub/dir.gguf"}, "file"),
    ({"file": "a\nb.gguf"}, "file"),
    ({"repository": "no-slash"}, "repository"),
    ({"repository": "https://huggingface.co/a/b"}, "repository"),
    ({"repository": "../b"}, "repository"),
    ({"file_bytes": 0}, "file_bytes"),
    ({"file_bytes": 1.5}, "file_bytes"),
    ({"file_bytes": "1000"}, "file_bytes"),
    ({"file_bytes": 1 << 50}, "file_bytes"),
    ({"kind": "sparse"}, "kind"),
    ({"total_parameters_b": -1}, "total_parameters_b"),
    ({"active_parameters_b": 2}, "active_parameters_b"),
    ({"trained_context_tokens": 1023}, "trained_context_tokens"),
    ({"trained_context_tokens": True}, "trained_context_tokens"),
    ({"block_count": 15}, "block_count"),
    ({"block_count": 10**9}, "block_count"),
    ({"full_attention": {"layers": 0, "kv_heads": 8, "head_length": 64}}, "layers"),
    ({"full_attention": {"layers": 16, "kv_heads": 8}}, "head_length"),
    (
        {"full_attention": {"layers": 4, "kv_heads": 8, "head_length": 64, "window_tokens": 5}},
        "window_tokens",
    ),
    ({"sliding_attention": {"layers": 1, "kv_heads": 8, "head_length": 64}}, "window_tokens"),
    ({"drafts_itself": True, "full_attention": None}, "drafts_itself"),
    ({"projector_file": "mmproj.gguf"}, "projector"),
    ({"projector_bytes": 5}, "projector"),
    ({"least_compute_capability": "sm_90"}, "least_compute_capability"),
    (
        {"speeds": [{"tokens_per_s": 0, "card": "x", "backend": "cuda", "speculation": "none"}]},
        "tokens_per_s",
    ),
    ({"speeds": [{"tokens_per_s": 5}]}, "card"),
    ({"tags": ["two words"]}, "tags"),
    ({"colour": "red"}, "colour"),
]


@pytest.mark.parametrize(("wrong", "word"), BAD_ENTRIES)
def test_a_bad_entry_is_refused_and_named(tmp_path: Path, wrong: dict[str, Any], word: str) -> None:
    error = refusal(write(tmp_path, deepcopy(OWN) | wrong))
    assert word in error.message
    assert "models.0" in error.message


@pytest.mark.parametrize("key", [key for key in OWN if key != "full_attention"])
def test_nothing_that_is_needed_is_guessed(tmp_path: Path, key: str) -> None:
    lacking = {name: value for name, value in OWN.items() if name != key}
    assert f"models.0.{key}" in refusal(write(tmp_path, lacking)).message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"schema": 2, "models": []}', b'{"models": []}',
     b'{"schema": 1, "models": {}}', b'{"schema": 1, "models": [], "more": 1}', b"[" * 100_000],
)  # fmt: skip
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "catalogue.json"
    file.write_bytes(content)
    refusal(file)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, OWN | {"total_parameters_b": float("nan")})
    assert "NaN" in file.read_text(encoding="utf-8")
    assert "total_parameters_b" in refusal(file).message


@pytest.mark.parametrize("twin", [{}, {"id": "other"}, {"id": "other", "name": "TINY-1b"}])
def test_two_entries_of_one_name_are_refused(tmp_path: Path, twin: dict[str, Any]) -> None:
    assert "occurs twice" in refusal(write(tmp_path, OWN, OWN | twin)).message


def test_many_mistakes_are_cut_short(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, {key: None for key in OWN}))
    assert "and 6 more" in error.message
    assert len(error.details["problems"]) == 5


def test_sizes_are_bounded(tmp_path: Path) -> None:
    many = [OWN | {"id": f"t{n}", "name": f"T{n}"} for n in range(MAX_MODELS + 1)]
    assert "models" in refusal(write(tmp_path, *many)).message
    file = tmp_path / "large.json"
    file.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    assert "larger than" in refusal(file).message


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "no regular file" in refusal(pipe).message
    assert "no regular file" in refusal(tmp_path).message
    assert "Not a directory" in refusal(write(tmp_path, OWN) / "below").message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(sorted(OWN)),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_any_value_is_taken_or_refused(tmp_path: Path, key: str, value: Any) -> None:
    file = write(tmp_path, OWN | {key: value})
    try:
        assert len(load_catalogue(file).entries) >= 9
    except LlmError as error:
        assert error.code is ErrorCode.SETTINGS_INVALID
