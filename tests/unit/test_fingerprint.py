"""Fingerprints: the same for the same bytes wherever they lie, another for others, and little is read."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from lllm3090d.checkpoints import fingerprint as fingerprint_module
from lllm3090d.checkpoints.fingerprint import fingerprint
from lllm3090d.checkpoints.header import GgufHeader, read_header
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.gguf_files import model_metadata, model_tensors, write_gguf, write_llama, write_split

pytestmark = pytest.mark.unit

MIB = 1 << 20


def filled(path: Path, seed: int = 1, **dimensions: int) -> Path:
    """A checkpoint whose data are no hole."""
    write_llama(
        path, **{"embedding_length": 512, "vocabulary": 4096, "feed_forward_length": 2048, **dimensions}
    )
    start, size = read_header(path).data_offset, path.stat().st_size
    with path.open("r+b") as file:
        file.seek(start)
        file.write(random.Random(seed).randbytes(size - start))  # noqa: S311 - filling, no secret
    return path


def patched(path: Path, at: int, to: bytes = b"\x01") -> str:
    """The fingerprint with some bytes changed."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(to)
    return fingerprint([path])


def test_it_is_that_of_the_bytes_not_of_the_name(tmp_path: Path) -> None:
    path = filled(tmp_path / "a" / "m.gguf")
    (tmp_path / "b").mkdir()
    copy = Path(shutil.copyfile(path, tmp_path / "b" / "other.gguf"))
    first = fingerprint([path])
    assert first == fingerprint([copy])
    assert first.startswith("s1-")
    assert first != fingerprint([filled(tmp_path / "c.gguf", seed=2)])


def test_changes_at_the_beginning_and_at_the_end_are_seen(tmp_path: Path) -> None:
    path = filled(tmp_path / "m.gguf")
    header = read_header(path)
    size = path.stat().st_size
    seen = {fingerprint([path])}
    name_at = path.read_bytes().index(b"Tiny llama")
    seen.add(patched(path, name_at, b"Tony"))
    seen.add(patched(path, header.data_offset, b"\x01\x02\x03\x04"))
    seen.add(patched(path, size - 4, b"\x01\x02\x03\x04"))
    os.truncate(path, size + 1)
    seen.add(fingerprint([path]))
    assert len(seen) == 5


def test_a_change_anywhere_in_a_small_file_is_seen(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    seen = {fingerprint([path])}
    places = range(read_header(path).data_offset, path.stat().st_size, 4099)
    for place in places:
        seen.add(patched(path, place))
    assert len(seen) == len(places) + 1


def test_the_vocabulary_is_seen_at_both_ends(tmp_path: Path) -> None:
    tokens = [f"{i:024}" for i in range(60_000)]  # 1.9 MB, more than both samples together
    metadata = model_metadata(metadata={"tokenizer.ggml.tokens": tokens})
    seen = set()
    for changed in (None, 0, 59_999):
        those = [*tokens]
        if changed is not None:
            those[changed] = "x" * 24
        metadata["tokenizer.ggml.tokens"] = those
        seen.add(fingerprint([write_gguf(tmp_path / "m.gguf", metadata, model_tensors(metadata))]))
    assert len(seen) == 3


@pytest.mark.parametrize("blocks", [1, 4, 200])
def test_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    path = write_llama(tmp_path / "m.gguf", embedding_length=4096, vocabulary=128256, blocks=blocks)
    header = read_header(path)
    read = 0
    real = os.pread

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        nonlocal read
        assert offset + count <= header.file_bytes
        read += count
        return real(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    fingerprint([path], lambda _: header)
    assert MIB < read < 4 * MIB


def test_every_shard_counts_in_its_order(tmp_path: Path) -> None:
    shards = write_split(tmp_path, "big", count=3)
    first = fingerprint(shards)
    assert first != fingerprint(shards[:2])
    assert first != fingerprint([shards[1], shards[0], shards[2]])
    with shards[2].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert first != fingerprint(shards)


def test_a_header_without_tensors(tmp_path: Path) -> None:
    assert fingerprint([write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"})])


def test_a_file_that_changes_or_goes_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")

    def read_then_touch(file: Path) -> GgufHeader:
        header = read_header(file)
        os.utime(file, ns=(1, 1))
        return header

    def read_then_remove(file: Path) -> GgufHeader:
        header = read_header(file)
        file.unlink()
        return header

    for read, words in ((read_then_touch, "changed"), (read_then_remove, "No such file")):
        with pytest.raises(LlmError, match=words) as caught:
            fingerprint([path], read)
        assert caught.value.code is ErrorCode.BAD_CHECKPOINT


def test_samples_cover_the_data_without_leaving_it() -> None:
    for data_offset, file_bytes in ((96, 96), (96, 1000), (700_000, 1 << 34), (20 * MIB, 21 * MIB), (0, 1)):
        spans = list(fingerprint_module._spans(data_offset, file_bytes, 24))
        assert all(0 <= start <= end <= file_bytes for start, end in spans)
        assert spans[-1][1] == file_bytes
