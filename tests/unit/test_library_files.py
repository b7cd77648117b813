"""Files that may not be read, are none, or have names in every script: in the library, ``models``, ``inspect``."""

from __future__ import annotations

import asyncio
import importlib.readers  # noqa: F401  # before root is given up: Python may lie where only root may read
import json
import os
import socket
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lllm3090d import wire
from lllm3090d.checkpoints.library import Library
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.inspection import inspect, listed
from lllm3090d.serving.lookup import Lookup
from lllm3090d.settings import Settings
from lllm3090d.wire import InspectBody, InspectView, ModelView
from tests.fakes.control_server import ControlServer, ctl
from tests.fakes.gguf_files import write_llama, write_split

pytestmark = pytest.mark.unit

NOBODY = 65_534


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Without root's power to read everything, by giving it up for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of a short name that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture
def settings(place: Path) -> Settings:
    (place / "models").mkdir(mode=0o755)
    return Settings(models_dir=place / "models", state_dir=place / "state")


@pytest.fixture
def lookup(settings: Settings) -> Iterator[Lookup]:
    lookup = Lookup(lambda: settings)
    yield lookup
    asyncio.run(lookup.close())


def listing(lookup: Lookup, settings: Settings) -> dict[str, ModelView]:
    views = [listed(lookup, settings, checkpoint, None) for checkpoint in lookup.library().scan()]
    return {view.name: view for view in views}


def shown(view: InspectView) -> str:
    """What ``lllm3090ctl inspect`` prints of it."""
    with ControlServer(inspect=view) as server:
        result = ctl(server, "inspect", "/some/file.gguf")
    assert result.exit_code == 0, result.output
    return result.stdout


def table(settings: Settings, views: dict[str, ModelView]) -> str:
    """What ``lllm3090ctl models`` prints of them."""
    answer = wire.Models(models_dir=str(settings.models_dir), models=tuple(views.values()))
    with ControlServer(models=answer) as server:
        result = ctl(server, "models")
    assert result.exit_code == 0, result.output
    return result.stdout


# ---- Files that may not be read ----------------------------------------------------------------------------------


def test_a_file_that_may_not_be_read_is_listed_with_the_reason(lookup: Lookup, settings: Settings) -> None:
    """Its permissions are none at all; its neighbours are not touched by that."""
    models = settings.models_dir
    write_llama(models / "open" / "m.gguf")
    shut = write_llama(models / "shut" / "m.gguf")
    shut.chmod(0)
    with ordinary_user():
        views = listing(lookup, settings)
        with pytest.raises(LlmError) as caught:
            inspect(lookup, InspectBody(model="shut"))
        with pytest.raises(LlmError) as by_path:
            inspect(lookup, InspectBody(path=str(shut)))
    assert views["open"].problem is None
    problem = views["shut"].problem
    assert problem is not None
    assert problem["code"] == ErrorCode.BAD_CHECKPOINT
    assert "Permission denied" in problem["detail"]
    assert str(shut) in problem["detail"]
    assert "permissions" in problem["hint"]
    for error in (caught.value, by_path.value):
        assert error.code is ErrorCode.BAD_CHECKPOINT
        assert "Permission denied" in error.message
    text = table(settings, views)
    assert "unusable" in text
    assert "Permission denied" in text


def test_a_file_that_may_be_read_again_is_taken_again(lookup: Lookup, settings: Settings) -> None:
    """The failure is not remembered: only the permissions change, and neither size nor time of the file does."""
    path = write_llama(settings.models_dir / "m" / "m.gguf")
    path.chmod(0)
    with ordinary_user():
        assert listing(lookup, settings)["m"].problem is not None
    path.chmod(0o644)
    with ordinary_user():
        assert listing(lookup, settings)["m"].problem is None


def test_one_unreadable_shard_makes_the_set_unusable(place: Path) -> None:
    shards = write_split(place / "Big", "big", count=3)
    shards[1].chmod(0)
    with ordinary_user():
        (only,) = Library(place, {}).scan()
    assert only.shards == tuple(shards)
    assert only.problem is not None
    assert "Permission denied" in only.problem.message
    assert str(shards[1]) in only.problem.message


def test_a_directory_that_may_be_listed_but_not_entered(place: Path) -> None:
    """Names without what stands behind them: each is reported, and the rest of the library is there."""
    write_llama(place / "A" / "m.gguf")
    closed = write_llama(place / "B" / "m.gguf").parent
    closed.chmod(0o444)
    try:
        with ordinary_user():
            found = Library(place, {}).survey()
    finally:
        closed.chmod(0o755)
    assert [checkpoint.name for checkpoint in found.checkpoints] == ["A"]
    assert [(item.path, item.reason) for item in found.skipped] == [
        (closed / "m.gguf", "cannot be examined: Permission denied")
    ]


def test_a_link_into_a_closed_directory(place: Path) -> None:
    (place / "models").mkdir()
    target = write_llama(place / "private" / "m.gguf")
    link = place / "models" / "m.gguf"
    link.symlink_to(target)
    target.parent.chmod(0)
    try:
        with ordinary_user():
            found = Library(place / "models", {}).survey()
    finally:
        target.parent.chmod(0o755)
    assert found.checkpoints == ()
    assert [(item.path, item.reason) for item in found.skipped] == [
        (link, "cannot be examined: Permission denied")
    ]


# ---- What is no file ---------------------------------------------------------------------------------------------


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_device(kind: int) -> Callable[[Path], None]:
    """The null device, or the first loop device, which need not exist: it must not be opened anyway."""

    def make(path: Path) -> None:
        numbers = (1, 3) if kind == stat.S_IFCHR else (7, 0)
        try:
            os.mknod(path, kind | 0o666, os.makedev(*numbers))
        except PermissionError:
            pytest.skip(
                "device nodes can be made with CAP_MKNOD only; the link to /dev/zero is tested all the same"
            )

    return make


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (make_fifo, "a FIFO"),
    "socket": (make_socket, "a socket"),
    "link to a device": (make_link_to_device, "a device"),
    "character device": (make_device(stat.S_IFCHR), "a device"),
    "block device": (make_device(stat.S_IFBLK), "a device"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_left_out_and_said_so(lookup: Lookup, settings: Settings, kind: str) -> None:
    """None of them is opened, which would block on the FIFO and never end with the device."""
    make, name = NO_FILES[kind]
    odd = settings.models_dir / "m" / "m.gguf"
    write_llama(settings.models_dir / "sound" / "m.gguf")
    odd.parent.mkdir()
    make(odd)
    found = lookup.library().survey()
    assert [checkpoint.name for checkpoint in found.checkpoints] == ["sound"]
    assert [(item.path, item.reason) for item in found.skipped] == [(odd, "is no regular file")]
    with pytest.raises(LlmError) as caught:
        inspect(lookup, InspectBody(path=str(odd)))
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT
    assert f"it is {name}" in caught.value.message
    assert caught.value.hint
    assert list(listing(lookup, settings)) == ["sound"]


def test_a_directory_with_the_name_of_a_file(lookup: Lookup, settings: Settings) -> None:
    """It is a directory like any other: what is in it is found, and it is no model itself."""
    folder = settings.models_dir / "folder.gguf"
    file = write_llama(folder / "m.gguf")
    (settings.models_dir / "empty.gguf").mkdir()
    found = lookup.library().survey()
    assert [(checkpoint.name, checkpoint.path) for checkpoint in found.checkpoints] == [
        ("folder.gguf", file)
    ]
    assert found.skipped == ()
    with pytest.raises(LlmError, match="it is a directory"):
        inspect(lookup, InspectBody(path=str(folder)))
    assert inspect(lookup, InspectBody(model="folder.gguf")).path == str(file)


# ---- Names -------------------------------------------------------------------------------------------------------

NAMES = {
    "Cyrillic": "Модель-семь",
    "Greek": "Μοντέλο",
    "Arabic": "نموذج كبير",
    "Hebrew, mixed with Latin": "מודל-GGUF-7B",
    "Devanagari": "मॉडल",
    "Thai": "โมเดล",
    "Georgian": "მოდელი",
    "Amharic": "ሞዴል",
    "Chinese": "模型",
    "Japanese": "日本語モデルｶﾅ",
    "Korean": "모델",
    "emoji": "🦙 llama 🇬🇷",
    "combining marks": "e\u0301\u0327 Z\u0351\u036b\u0343algo",
    "beyond the BMP": "𐍈𝔐𠜎",
    "spaces that look alike": "a\u00a0b",
}
ESCAPED = {
    "zero-width joiner": ("👩\u200d💻", "👩\\u200d💻"),
    "right-to-left override": ("abc\u202egpj", "abc\\u202egpj"),
    "line separator": ("a\u2028b", "a\\u2028b"),
    "newline": ("two\nlines", "two\\nlines"),
    "tab": ("a\tb", "a\\tb"),
    "escape sequence": ("\x1b[2Jx", "\\x1b[2Jx"),
    "Latin-1 bytes": (os.fsdecode(b"caf\xe9"), "caf\\xe9"),
    "half a UTF-8 sequence": (os.fsdecode("模".encode()[:2] + b"x"), "\\xe6\\xa8x"),
    "an encoded surrogate": (os.fsdecode(b"\xed\xa0\x80"), "\\xed\\xa0\\x80"),
}
# A no-break space is no printable character either.
SHOWN = {what: name.replace("\u00a0", "\\xa0") for what, name in NAMES.items()}
ALL_NAMES = {
    **{what: (name, SHOWN[what]) for what, name in NAMES.items()},
    **ESCAPED,
}


@pytest.mark.parametrize("what", ALL_NAMES)
def test_a_name_in_any_script(lookup: Lookup, settings: Settings, what: str) -> None:
    """It is found, shown without anything that steers a terminal, and found again by what was shown."""
    name, text = ALL_NAMES[what]
    file = write_llama(settings.models_dir / name / f"{name}.gguf")
    loose = write_llama(settings.models_dir / f"{name}.Q8_0.gguf")
    found = lookup.library().survey()
    assert found.skipped == ()
    assert {checkpoint.name: checkpoint.path for checkpoint in found.checkpoints} == {
        text: file,
        f"{text}.Q8_0": loose,
    }
    assert lookup.library().resolve(text).path == file

    views = listing(lookup, settings)
    assert set(views) == {text, f"{text}.Q8_0"}
    for view in views.values():
        assert view.problem is None
        document = view.model_dump_json()
        assert json.loads(document)["name"] == view.name
        assert document.encode()  # no lone surrogates
    lines = table(settings, views).splitlines()
    assert [line.startswith(f"{text} ") or line == text for line in lines].count(True) == 1
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 3

    by_name = inspect(lookup, InspectBody(model=text))
    assert inspect(lookup, InspectBody(path=file.as_uri())) == by_name
    assert by_name.path == os.fsencode(file).decode(
        "utf-8", "backslashreplace"
    )  # to be handed back where it can be
    assert by_name.name == text
    inspected = shown(by_name).splitlines()
    assert f"model         {text}" in inspected
    assert all(line.isprintable() for line in inspected)


def test_composed_and_decomposed_names_are_two(lookup: Lookup, settings: Settings) -> None:
    """They look the same and are different files; each is found by its own spelling."""
    composed = unicodedata.normalize("NFC", "é")
    decomposed = unicodedata.normalize("NFD", "é")
    files = {name: write_llama(settings.models_dir / name / "m.gguf") for name in (composed, decomposed)}
    assert len(files) == 2
    library = lookup.library()
    assert {checkpoint.name: checkpoint.path for checkpoint in library.scan()} == files
    for name, file in files.items():
        assert library.resolve(name).path == file


def test_all_names_at_once(lookup: Lookup, settings: Settings) -> None:
    """One library with all of them: each once, in one order, with its size."""
    for name, _ in ALL_NAMES.values():
        write_llama(settings.models_dir / name / "m.gguf")
    checkpoints = lookup.library().scan()
    assert sorted(text for _, text in ALL_NAMES.values()) == [checkpoint.name for checkpoint in checkpoints]
    assert all(checkpoint.size_bytes for checkpoint in checkpoints)
    assert lookup.library().scan() == checkpoints


def test_the_longest_name(lookup: Lookup, settings: Settings) -> None:
    """255 bytes, which are 85 characters here; the file system takes no more."""
    name = "模" * 83 + "x.gguf"
    assert len(name.encode()) == 255
    file = write_llama(settings.models_dir / name)
    (only,) = lookup.library().scan()
    assert (only.name, only.path) == (name.removesuffix(".gguf"), file)
    assert inspect(lookup, InspectBody(path=str(file))).architecture == "llama"
