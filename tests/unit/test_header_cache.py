"""Headers that were read before: the same as read anew, and never out of date."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints import header_cache as cache_module
from lllm3090d.checkpoints.classify import Digest, Kind, digest
from lllm3090d.checkpoints.cursor import ByteOrder, FileStamp
from lllm3090d.checkpoints.header import GgufHeader, TensorInfo, Unread, read_header
from lllm3090d.checkpoints.header_cache import HeaderCache
from lllm3090d.checkpoints.header_codec import BadEntryError, pack, unpack
from lllm3090d.checkpoints.library import Library
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.store import Store
from tests.fakes.gguf_files import write_gemma3, write_llama, write_projector, write_split

pytestmark = pytest.mark.unit


class Reader:
    """Reads headers and remembers which."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, path: Path) -> GgufHeader:
        self.read.append(path.name)
        return read_header(path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state" / "state.db")
    yield opened
    opened.close()


def stamps(*paths: Path) -> dict[Path, FileStamp]:
    return {path: FileStamp.of(path.stat()) for path in paths}


def test_a_header_is_read_once_and_comes_back_the_same(tmp_path: Path, store: Store) -> None:
    path = write_gemma3(
        tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": ["a", "b"], "flags": [True, False]}
    )
    reader = Reader()
    for cache in (HeaderCache(store, reader), HeaderCache(store, reader)):
        assert cache.header(path) == read_header(path)
        assert cache.header(path).metadata["flags"] == (True, False)
    assert reader.read == ["m.gguf"]


def test_digests_are_read_once_and_serve_the_headers_too(tmp_path: Path, store: Store) -> None:
    paths = [write_llama(tmp_path / f"{i}.gguf", blocks=i + 1) for i in range(3)]
    reader = Reader()
    first = HeaderCache(store, reader).digests(stamps(*paths))
    again = HeaderCache(store, reader)
    assert again.digests(stamps(*paths)) == first
    assert [again.header(path).tensors for path in paths] == [read_header(path).tensors for path in paths]
    assert sorted(reader.read) == ["0.gguf", "1.gguf", "2.gguf"]
    assert first[paths[0]] == digest(read_header(paths[0]))


def test_a_large_library_is_kept_in_batches(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_BATCH", 2)
    paths = [write_llama(tmp_path / f"{i}.gguf") for i in range(5)]
    first = HeaderCache(store).digests(stamps(*paths))
    assert store.rows("SELECT count(*) FROM header_bodies") == [(5,)]
    reader = Reader()
    assert HeaderCache(store, reader).digests(stamps(*paths)) == first
    assert reader.read == []


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_a_file_that_changed_is_read_again(tmp_path: Path, store: Store, change: str) -> None:
    path = write_llama(tmp_path / "m.gguf", blocks=1)
    reader = Reader()
    cache = HeaderCache(store, reader)
    cache.digests(stamps(path))
    before = path.stat()
    if change == "size":
        os.truncate(path, before.st_size + 32)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        write_llama(tmp_path / "other", blocks=1).rename(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    cache.digests(stamps(path))
    assert reader.read == ["m.gguf"] * 2
    assert cache.header(path).stamp == FileStamp.of(path.stat())
    assert reader.read == ["m.gguf"] * 2
    assert store.rows("SELECT count(*) FROM headers") == [(1,)]
    assert store.rows("SELECT count(*) FROM header_bodies") == [(1,)]


def test_another_reader_trusts_nothing_of_the_old_one(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "m.gguf")
    HeaderCache(store).digests(stamps(path))
    monkeypatch.setattr(cache_module, "READER_VERSION", 999)
    reader = Reader()
    cache = HeaderCache(store, reader)
    cache.digests(stamps(path))
    cache.header(path)
    assert reader.read == ["m.gguf"]
    assert store.rows("SELECT DISTINCT reader FROM headers") == [(cache_module.reader_version(),)]


def test_what_is_broken_is_read_each_time_and_says_the_same(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("<html>")
    reader = Reader()
    cache = HeaderCache(store, reader)
    for _ in range(2):
        found = cache.digests(stamps(path))[path]
        assert isinstance(found, LlmError)
        assert "web page" in found.message
        with pytest.raises(LlmError, match="web page"):
            cache.header(path)
    assert len(reader.read) == 4
    with pytest.raises(LlmError) as caught:
        cache.header(tmp_path / "missing.gguf")
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT


def test_damaged_entries_are_read_again(tmp_path: Path, store: Store) -> None:
    path = write_llama(tmp_path / "m.gguf")
    HeaderCache(store).digests(stamps(path))
    store.change(
        lambda c: [
            c.execute("UPDATE header_bodies SET body = x'00'"),
            c.execute("UPDATE headers SET digest='7'"),
        ]
    )
    reader = Reader()
    cache = HeaderCache(store, reader)
    assert cache.header(path) == read_header(path)
    assert cache.digests(stamps(path))[path] == digest(read_header(path))
    assert reader.read == ["m.gguf"]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE headers SET path = 7",
        "UPDATE headers SET inode = 'x'",
        "UPDATE headers SET size_bytes = 'x'",
        "UPDATE headers SET digest = x'ff'",
    ],
)
def test_rows_of_other_types_are_read_again(tmp_path: Path, store: Store, damage: str) -> None:
    path = write_llama(tmp_path / "m.gguf")
    HeaderCache(store).digests(stamps(path))
    assert store.change(lambda connection: connection.execute(damage))
    assert HeaderCache(store).digests(stamps(path))[path] == digest(read_header(path))


def test_a_store_that_fails_costs_time_only(tmp_path: Path) -> None:
    broken = Store(tmp_path / "state.db")
    broken.close()
    path = write_llama(tmp_path / "m.gguf")
    reader = Reader()
    cache = HeaderCache(broken, reader)
    assert cache.header(path) == cache.header(path) == read_header(path)
    assert isinstance(cache.digests(stamps(path))[path], Digest)
    assert reader.read == ["m.gguf"] * 2  # the digest is known in memory


def test_files_that_are_gone_are_forgotten(tmp_path: Path, store: Store) -> None:
    models = tmp_path / "models"
    gone, left = write_llama(models / "a" / "m.gguf"), write_llama(models / "b" / "m.gguf")
    outside = write_llama(tmp_path / "elsewhere.gguf")
    vanished = write_llama(tmp_path / "vanished.gguf")
    cache = HeaderCache(store)
    for path in (outside, vanished):
        cache.header(path)
    assert len(Library(models, {}, cache).scan()) == 2
    gone.unlink()
    vanished.unlink()
    assert len(Library(models, {}, cache).scan()) == 1
    left.rename(tmp_path / "unmounted")
    assert Library(models, {}, cache).scan() == ()
    (tmp_path / "unmounted").rename(left)
    rows = store.rows("SELECT path FROM headers ORDER BY path")
    assert rows == [(os.fsencode(outside),), (os.fsencode(left),)]
    assert store.rows("SELECT count(*) FROM header_bodies") == [(2,)]


def test_paths_that_are_not_utf8_and_inodes_of_64_bits(tmp_path: Path, store: Store) -> None:
    path = write_llama(tmp_path / os.fsdecode(b"m\xff.gguf"))
    huge = FileStamp(path.stat().st_size, -5, 2**64 - 1)

    def read(file: Path) -> GgufHeader:
        header = read_header(file)
        return GgufHeader(file, 3, huge.size_bytes, header.metadata, header.tensors, stamp=huge)

    first = HeaderCache(store, read).digests({path: huge})
    reader = Reader()
    assert HeaderCache(store, reader).digests({path: huge}) == first
    assert reader.read == []


def test_a_library_with_a_cache_finds_the_same(tmp_path: Path, store: Store) -> None:
    models = tmp_path / "models"
    write_llama(models / "one" / "m.gguf")
    write_projector(models / "one" / "mmproj.gguf")
    write_split(models / "split", "big", count=3)
    (models / "broken.gguf").write_text("{}")
    plain = Library(models, {}).survey()
    reader = Reader()
    for _ in range(2):
        assert Library(models, {}, HeaderCache(store, reader)).survey() == plain
    assert sorted(reader.read) == sorted(
        [*(f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)), "m.gguf", "mmproj.gguf", *["broken.gguf"] * 2]
    )


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=4).map(tuple),
    st.builds(Unread, st.integers(0, 2**63), st.integers(0, 2**63)),
)
tensors = st.builds(
    TensorInfo,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    st.lists(st.integers(1, 2**40), max_size=4).map(tuple),
    st.sampled_from(["F32", "Q4_K", "TYPE_99"]),
    st.integers(0, 2**50),
    st.integers(0, 2**50),
    st.booleans(),
)


@given(
    metadata=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=9), values, max_size=5
    ),
    infos=st.lists(tensors, max_size=4),
    order=st.sampled_from(ByteOrder),
)
def test_packing_loses_nothing(
    metadata: dict[str, object], infos: list[TensorInfo], order: ByteOrder
) -> None:
    stamp = FileStamp(1, 2, 3)
    header = GgufHeader(Path("m"), 3, 1, metadata, tuple(infos), order, stamp, 96)  # type: ignore[arg-type]
    again = unpack(Path("m"), stamp, pack(header))
    assert again == header
    assert repr(again.metadata) == repr(type(again.metadata)(dict(metadata)))  # type: ignore[call-arg]


@given(st.binary(max_size=200))
def test_unpacking_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(BadEntryError):
        unpack(Path("m"), FileStamp(1, 2, 3), data)


def test_digests_of_another_shape_are_refused() -> None:
    for text in ("", "[]", "{}", '{"kind": "model"}', "nonsense"):
        with pytest.raises(ValueError):
            Digest.from_json(text)
    assert Kind("model") is Kind.MODEL
