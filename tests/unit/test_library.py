"""The library: directories to checkpoints, and names to checkpoints."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints import walk as walk_module
from lllm3090d.checkpoints.library import Checkpoint, Library, Survey, resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.models_list import entry
from lllm3090d.serving.views import model_view
from tests.fakes.gguf_files import write_gguf, write_llama, write_projector, write_split

pytestmark = pytest.mark.unit


def survey(models: Path) -> Survey:
    return Library(models, {}).survey()


def names(models: Path) -> list[str]:
    return [checkpoint.name for checkpoint in Library(models, {}).scan()]


def made_up(*model_names: str) -> tuple[Checkpoint, ...]:
    return tuple(
        Checkpoint(name, Path("/m") / f"{name}.gguf", (Path("/m") / f"{name}.gguf",), 1)
        for name in model_names
    )


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's power to read everything; root can take it back."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_one_directory_for_each_model(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "SmolLM2-135M-Instruct" / "SmolLM2.Q4_1.gguf")
    write_llama(tmp_path / "Qwen3.8-27B" / "x.GGUF")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    first, second = Library(tmp_path, {}).scan()
    assert first.name == "Qwen3.8-27B"
    assert second == Checkpoint("SmolLM2-135M-Instruct", file, (file,), file.stat().st_size)


def test_several_quantisations_and_loose_files(tmp_path: Path) -> None:
    write_llama(tmp_path / "Qwen" / "qwen-Q4_K_M.gguf")
    write_llama(tmp_path / "Qwen" / "qwen-Q8_0.gguf")
    write_llama(tmp_path / "loose.gguf")
    write_llama(tmp_path / "publisher" / "Model-GGUF" / "model.gguf")
    assert names(tmp_path) == ["Qwen/qwen-Q4_K_M", "Qwen/qwen-Q8_0", "loose", "publisher/Model-GGUF"]


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    shards = write_split(tmp_path / "Big", "big-Q4", count=3)
    (only,) = Library(tmp_path, {}).scan()
    assert only.name == "Big"
    assert only.path == shards[0]
    assert only.shards == tuple(shards)
    assert only.size_bytes == sum(shard.stat().st_size for shard in shards)
    write_split(tmp_path / "Big", "big-Q8", count=2)
    write_split(tmp_path / "Big", "big-Q8", count=3)
    assert [len(checkpoint.shards) for checkpoint in Library(tmp_path, {}).scan()] == [3, 2, 3]
    assert len(set(names(tmp_path))) == 3


def test_a_checkpoint_with_a_missing_shard_is_listed(tmp_path: Path) -> None:
    shards = write_split(tmp_path / "Big", "big", count=3)
    shards[0].unlink()
    (only,) = Library(tmp_path, {}).scan()
    assert (only.name, only.path, only.shards) == ("Big", shards[1], tuple(shards[1:]))


def test_projectors_and_the_like_are_no_models(tmp_path: Path) -> None:
    folder = tmp_path / "Gemma"
    write_llama(folder / "gemma.gguf")
    write_projector(folder / "vision.gguf")
    (folder / "MMPROJ-model-f16.gguf").write_text("unreadable, so its name decides")
    for kind in ("mmproj", "adapter", "imatrix"):
        write_gguf(folder / f"{kind}.gguf", {"general.architecture": "llama", "general.type": kind})
    assert names(tmp_path) == ["Gemma"]


def test_a_file_that_changes_its_kind_is_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_projector(path)
    assert names(tmp_path) == []
    path.unlink()
    write_llama(path)
    assert names(tmp_path) == ["m"]


def test_broken_files_are_listed_so_that_loading_explains(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    (tmp_path / "nothing.gguf").touch()
    assert names(tmp_path) == ["nothing", "page"]


def test_hidden_and_partial_files_are_ignored(tmp_path: Path) -> None:
    for name in (
        ".hidden.gguf",
        ".cache/m.gguf",
        "m.gguf.part",
        "m.gguf.incomplete",
        "m.gguf.tmp",
        "m.gguf.download",
        "m.part.gguf",
        "Model.incomplete/m.gguf",
    ):
        write_llama(tmp_path / name)
    assert survey(tmp_path) == Survey((), ())


def test_links_are_followed_without_circles(tmp_path: Path) -> None:
    store = tmp_path / "store"
    file = write_llama(store / "blobs" / "0123abcd")
    models = tmp_path / "models"
    (models / "A").mkdir(parents=True)
    (models / "A" / "model.gguf").symlink_to(file)
    (models / "A" / "again").symlink_to(models)
    (models / "A" / "self").symlink_to(models / "A" / "self")
    (models / "A" / "gone.gguf").symlink_to(store / "nothing")
    (models / "B").symlink_to(models / "A")
    found = survey(models)
    assert [c.name for c in found.checkpoints] == ["A", "B"]
    assert found.checkpoints[0].path == models / "A" / "model.gguf"
    reasons = {str(item.path.relative_to(models)): item.reason for item in found.skipped}
    assert "leads back" in reasons["A/again"]
    assert "cannot be examined" in reasons["A/gone.gguf"]


def test_models_dir_itself_may_be_a_link(tmp_path: Path) -> None:
    write_llama(tmp_path / "real" / "A" / "m.gguf")
    (tmp_path / "models").symlink_to(tmp_path / "real")
    assert names(tmp_path / "models") == ["A"]


def test_depth_and_number_of_directories_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "1/2/3/4/m.gguf")
    write_llama(tmp_path / "1/2/3/4/5/m.gguf")
    found = survey(tmp_path)
    assert [c.name for c in found.checkpoints] == ["1/2/3/4"]
    assert ["directories deep" in item.reason for item in found.skipped] == [True]
    monkeypatch.setattr(walk_module, "MAX_DIRECTORIES", 2)
    assert "left out after 2" in survey(tmp_path).skipped[0].reason


def test_what_is_no_regular_file_is_reported_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    write_llama(tmp_path / "folder.gguf" / "m.gguf")
    found = survey(tmp_path)
    assert [c.name for c in found.checkpoints] == ["folder.gguf"]
    assert [(item.path.name, item.reason) for item in found.skipped] == [("fifo.gguf", "is no regular file")]


def test_an_unreadable_directory_does_not_hide_the_others(public_dir: Path) -> None:
    write_llama(public_dir / "A" / "m.gguf")
    write_llama(public_dir / "B" / "m.gguf")
    (public_dir / "B").chmod(0)
    with as_nobody():
        found = survey(public_dir)
    (public_dir / "B").chmod(0o755)
    assert [c.name for c in found.checkpoints] == ["A"]
    assert [(item.path.name, item.reason) for item in found.skipped] == [
        ("B", "cannot be read: Permission denied")
    ]


def test_models_dir_unreadable(public_dir: Path) -> None:
    locked = public_dir / "locked"
    locked.mkdir(mode=0)
    (public_dir / "file").touch()
    for path in (public_dir / "missing", public_dir / "file", locked):
        with as_nobody(), pytest.raises(LlmError) as caught:
            survey(path)
        assert caught.value.code is ErrorCode.MODELS_DIR_UNREADABLE
        assert str(path) in caught.value.message
        assert "models_dir" in (caught.value.hint or "")


def test_empty(tmp_path: Path) -> None:
    library = Library(tmp_path, {"small": "x"})
    assert library.scan() == ()
    for name in ("anything", "small"):
        with pytest.raises(LlmError) as caught:
            library.resolve(name)
        assert caught.value.code is ErrorCode.NO_MODELS
        assert str(tmp_path) in (caught.value.hint or "")
    with pytest.raises(LlmError) as caught:
        resolve("anything", (), {})
    assert "~/models" in (caught.value.hint or "")


def test_names_that_would_occur_twice(tmp_path: Path) -> None:
    write_llama(tmp_path / "A.gguf")
    write_llama(tmp_path / "A" / "x.gguf")
    write_llama(tmp_path / "B" / "x.gguf")
    write_llama(tmp_path / "B" / "y.gguf")
    write_llama(tmp_path / "B" / "x" / "z.gguf")
    assert names(tmp_path) == ["A.gguf", "A/x.gguf", "B/x.gguf", "B/x/z.gguf", "B/y"]


def test_names_that_look_the_same_are_reported(tmp_path: Path) -> None:
    write_llama(tmp_path / os.fsdecode(b"m\xff") / "m.gguf")
    write_llama(tmp_path / "m\\xff" / "m.gguf")
    found = survey(tmp_path)
    assert [c.name for c in found.checkpoints] == ["m\\xff/m.gguf"]
    assert "same name" in found.skipped[0].reason


@pytest.mark.parametrize("name", ["with space", "quo'te\"", "$HOME", "semi;colon", "näme", "-rf", "%s"])
def test_awkward_names(tmp_path: Path, name: str) -> None:
    file = write_llama(tmp_path / name / f"{name}.gguf")
    library = Library(tmp_path, {})
    assert library.resolve(name).path == file
    assert library.resolve(name).name == name


def test_names_that_cannot_be_shown_are_escaped(tmp_path: Path) -> None:
    raw = write_llama(tmp_path / os.fsdecode(b"bad\xff") / os.fsdecode(b"\xfe.gguf"))
    steering = write_llama(tmp_path / "a\x1b[31m\nb" / "m.gguf")
    library = Library(tmp_path, {})
    assert names(tmp_path) == ["a\\x1b[31m\\nb", "bad\\xff"]
    assert library.resolve("bad\\xff").path == raw
    assert library.resolve("a\\x1b[31m\\nb").path == steering
    json.dumps(names(tmp_path), ensure_ascii=False).encode("utf-8")


MODELS = made_up(
    "Qwen3.8-27B",
    "Qwen3-8B",
    "Qwen3-0.6B",
    "SmolLM2-135M-Instruct",
    "Llama-3.1-8B-Instruct",
    "Mistral/mistral-Q4_K_M",
    "Mistral/mistral-Q4_K_S",
    "gemma-3-270m",
)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("Qwen3.8-27B", "Qwen3.8-27B"),
        ("qwen3.8-27b", "Qwen3.8-27B"),
        ("qwen-27b", "Qwen3.8-27B"),
        ("27b qwen", "Qwen3.8-27B"),
        ("qwen3.8", "Qwen3.8-27B"),
        ("qwen 3.8", "Qwen3.8-27B"),
        ("27", "Qwen3.8-27B"),
        ("qwen3-8b", "Qwen3-8B"),
        ("qwen-8", "Qwen3-8B"),
        ("0.6b", "Qwen3-0.6B"),
        ("smollm2", "SmolLM2-135M-Instruct"),
        ("smol", "SmolLM2-135M-Instruct"),
        ("smollm-2", "SmolLM2-135M-Instruct"),
        ("SMOLLM2_135M_INSTRUCT", "SmolLM2-135M-Instruct"),
        ("smollm2-135m-instruct.gguf", "SmolLM2-135M-Instruct"),
        ("llama3", "Llama-3.1-8B-Instruct"),
        ("llama3.1", "Llama-3.1-8B-Instruct"),
        ("llama-8b-inst", "Llama-3.1-8B-Instruct"),
        ("mistral-q4_k_m", "Mistral/mistral-Q4_K_M"),
        ("q4_k_s", "Mistral/mistral-Q4_K_S"),
        ("gemma", "gemma-3-270m"),
        ("270m", "gemma-3-270m"),
        ("270", "gemma-3-270m"),
    ],
)
def test_resolve_finds(query: str, expected: str) -> None:
    assert resolve(query, MODELS, {}).name == expected


@pytest.mark.parametrize(
    "query", ["7b", "smollm-1", "35m", "qwen2", "qwen38", "6b", "qwen8b", "b27", "", "-", "🙂", "x" * 9999]
)
def test_resolve_does_not_guess(query: str) -> None:
    with pytest.raises(LlmError) as caught:
        resolve(query, MODELS, {})
    assert caught.value.code is ErrorCode.UNKNOWN_MODEL
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    ("query", "candidates"),
    [
        ("qwen", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3.8-27B"]),
        ("8b", ["Llama-3.1-8B-Instruct", "Qwen3-8B"]),
        ("mistral", ["Mistral/mistral-Q4_K_M", "Mistral/mistral-Q4_K_S"]),
        ("instruct", ["Llama-3.1-8B-Instruct", "SmolLM2-135M-Instruct"]),
    ],
)
def test_ambiguity_lists_the_candidates(query: str, candidates: list[str]) -> None:
    with pytest.raises(LlmError) as caught:
        resolve(query, MODELS, {})
    assert caught.value.code is ErrorCode.AMBIGUOUS_MODEL
    assert caught.value.details["candidates"] == candidates
    assert all(candidate in caught.value.message for candidate in candidates)


def test_an_exact_part_goes_before_a_beginning() -> None:
    known = made_up("Qwen3-8B", "Qwen3.8-27B", "coder-7B", "code-7B")
    assert resolve("qwen3", known, {}).name == "Qwen3-8B"
    assert resolve("code", known, {}).name == "code-7B"
    with pytest.raises(LlmError, match="fits 2 models"):
        resolve("cod", known, {})


def test_all_the_parts_go_before_some_of_them() -> None:
    known = made_up("SmolLM2-135M", "SmolLM2-135M-Instruct")
    assert resolve("smollm2 135m", known, {}).name == "SmolLM2-135M"


def test_case_decides_when_only_case_differs() -> None:
    known = made_up("Model", "model")
    assert resolve("model", known, {}).name == "model"
    with pytest.raises(LlmError) as caught:
        resolve("MODEL", known, {})
    assert caught.value.details["candidates"] == ["Model", "model"]


def test_many_candidates_are_cut_in_the_message_only() -> None:
    with pytest.raises(LlmError) as caught:
        resolve("m", made_up(*(f"m-{i:02}" for i in range(30))), {})
    assert "and 20 more" in caught.value.message
    assert len(caught.value.details["candidates"]) == 30


def test_aliases() -> None:
    aliases = {
        "small": "SmolLM2-135M-Instruct",
        "Big": "qwen-27b",
        "Qwen3-8B": "gemma-3-270m",
        "qwen": "qwen3-8b",
    }
    assert resolve("small", MODELS, aliases).name == "SmolLM2-135M-Instruct"
    assert resolve("SMALL", MODELS, aliases).name == "SmolLM2-135M-Instruct"
    assert resolve("Big", MODELS, aliases).name == "Qwen3.8-27B"
    assert resolve("Qwen3-8B", MODELS, aliases).name == "Qwen3-8B"  # the model, not the alias
    assert resolve("qwen", MODELS, aliases).name == "Qwen3-8B"  # the alias, not the parts


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("nowhere", ErrorCode.UNKNOWN_MODEL),
        ("qwen", ErrorCode.AMBIGUOUS_MODEL),
        ("loop", ErrorCode.UNKNOWN_MODEL),
    ],
)
def test_a_bad_alias_is_named(target: str, code: ErrorCode) -> None:
    with pytest.raises(LlmError) as caught:
        resolve("loop", MODELS, {"loop": target})
    assert caught.value.code is code
    assert caught.value.details["alias"] == "loop"
    assert caught.value.details["target"] == target
    assert "alias 'loop'" in caught.value.message
    assert "aliases" in (caught.value.hint or "")


def test_unknown_suggests_what_is_close() -> None:
    for query, close in [
        ("SmolLM2-135M-Instrukt", "SmolLM2-135M-Instruct"),
        ("gemma-9b", "gemma-3-270m"),
        ("smal", "small"),
    ]:
        with pytest.raises(LlmError) as caught:
            resolve(query, MODELS, {"small": "gemma"})
        assert caught.value.code is ErrorCode.UNKNOWN_MODEL
        assert close in caught.value.details["close"]
        assert close in caught.value.message


def test_what_was_asked_for_cannot_steer_the_terminal() -> None:
    with pytest.raises(LlmError) as caught:
        resolve("\x1b[2J\udcff", MODELS, {})
    assert caught.value.message.isprintable()
    caught.value.message.encode("utf-8")


@given(query=st.text(max_size=40), known=st.lists(st.text(min_size=1, max_size=20), max_size=5, unique=True))
def test_resolve_finds_one_or_explains(query: str, known: list[str]) -> None:
    checkpoints = made_up(*known)
    try:
        found = resolve(query, checkpoints, {})
    except LlmError as error:
        assert query not in known
        assert error.hint
    else:
        assert found in checkpoints
    for name in known:
        assert resolve(name, checkpoints, {}).name == name


def test_when_a_model_came_is_told_to_clients(tmp_path: Path) -> None:
    """OpenAI's ``created`` is a date that lists sort by; a model without one, or from nowhere, has the epoch."""
    file = write_llama(tmp_path / "one" / "one.gguf")
    os.utime(file, ns=(0, 1_700_000_000_900_000_000))
    (found,) = Library(tmp_path, {}).scan()
    view = model_view(found, {}, None, None, None)
    told = entry(view, None)
    assert (view.modified_s, told["created"], told["created_at"]) == (
        1_700_000_000,
        1_700_000_000,
        "2023-11-14T22:13:20Z",
    )
    for odd, created in ((None, 0), (1 << 62, 1 << 62)):
        told = entry(view.model_copy(update={"modified_s": odd}), None)
        assert (told["created"], told["created_at"]) == (created, "1970-01-01T00:00:00Z")
