"""The GGUF reader: what it reads, what it refuses, and that nothing else ever happens."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lllm3090d.checkpoints import cursor, header
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.header import GgufHeader, Unread, read_header
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.gguf_files import (
    Tensor,
    Typed,
    header_bytes,
    model_metadata,
    model_tensors,
    text,
    typed_value,
    write_gguf,
    write_llama,
)

pytestmark = pytest.mark.unit

HUGE = 2**64 - 1


def refusal(path: Path) -> LlmError:
    """The error with which the file is refused; it always names file, offset and a next step."""
    with pytest.raises(LlmError) as caught:
        read_header(path)
    error = caught.value
    assert error.code is ErrorCode.BAD_CHECKPOINT
    assert printable(path) in error.message
    assert isinstance(error.details["offset"], int)
    assert error.hint
    return error


def write_bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_every_scalar_type(tmp_path: Path) -> None:
    values = {
        "u8": Typed("u8", 255),
        "i8": Typed("i8", -128),
        "u16": Typed("u16", 65535),
        "i16": Typed("i16", -32768),
        "u32": Typed("u32", 2**32 - 1),
        "i32": Typed("i32", -(2**31)),
        "u64": Typed("u64", HUGE),
        "i64": Typed("i64", -(2**63)),
        "f32": Typed("f32", 0.5),
        "f64": Typed("f64", 0.1),
        "bool": True,
        "text": "naïve ☃",
    }
    metadata = read_header(write_gguf(tmp_path / "m.gguf", values)).metadata
    expected = {key: value.value if isinstance(value, Typed) else value for key, value in values.items()}
    assert dict(metadata) == expected
    assert metadata["bool"] is True


def test_arrays_are_kept_when_short_and_stepped_over_when_long(tmp_path: Path) -> None:
    long = header.MAX_KEPT_ARRAY + 1
    path = write_gguf(
        tmp_path / "m.gguf",
        {
            "short": [1, 2, 3],
            "flags": [True, False],
            "long": Typed("f32", [0.0] * long),
            "tokens": ["a", "", "ccc"],
            "essay": "x" * (header.MAX_KEPT_STRING_BYTES + 1),
            "after": 7,
        },
    )
    metadata = read_header(path).metadata
    assert metadata["short"] == (1, 2, 3)
    assert metadata["flags"] == (True, False)
    assert isinstance(metadata["long"], Unread)
    assert metadata["long"].count == long
    assert isinstance(metadata["tokens"], Unread)
    assert metadata["tokens"].count == 3
    assert isinstance(metadata["essay"], Unread)
    assert metadata["after"] == 7


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_tensor_infos(tmp_path: Path, version: int, alignment: int) -> None:
    tensors = [
        Tensor("a", (33,)),
        Tensor("b", (64, 3), "Q8_0"),
        Tensor("c", (256, 2, 2), "Q6_K"),
        Tensor("d", ()),
    ]
    path = write_gguf(
        tmp_path / "m.gguf", {"general.alignment": alignment}, tensors, version=version, alignment=alignment
    )
    found = read_header(path)
    assert found.version == version
    assert found.file_bytes == path.stat().st_size
    assert [(t.name, t.shape, t.type_name, t.size_bytes) for t in found.tensors] == [
        ("a", (33,), "F32", 132),
        ("b", (64, 3), "Q8_0", 204),
        ("c", (256, 2, 2), "Q6_K", 840),
        ("d", (), "F32", 4),
    ]
    assert all(tensor.offset % alignment == 0 for tensor in found.tensors)
    assert found.tensors[-1].offset + alignment == found.file_bytes


def test_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = write_llama(tmp_path / "m.gguf", blocks=3, type="Q4_0")
    ours, reference = read_header(path), GGUFReader(path)
    assert [(t.name, list(t.shape), t.type_name, t.offset, t.size_bytes) for t in ours.tensors] == [
        (t.name, t.shape.tolist(), t.tensor_type.name, t.data_offset, t.n_bytes) for t in reference.tensors
    ]
    ours_as_theirs = {key: value for key, value in ours.metadata.items() if isinstance(value, int)}
    assert ours_as_theirs == {key: reference.fields[key].contents() for key in ours_as_theirs}


def _reference_file(path: Path, big_endian: bool) -> Path:
    """Written by the gguf package itself, in either byte order."""
    import numpy
    from gguf import GGUFEndian, GGUFWriter

    order = GGUFEndian.BIG if big_endian else GGUFEndian.LITTLE
    writer = GGUFWriter(path, "llama", endianess=order)
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("flag", True)
    writer.add_uint64("large", HUGE)
    writer.add_int16("negative", -2)
    writer.add_array("llama.attention.head_count_kv", [1, 2, 3])
    writer.add_token_list([f"token {i}" * (i % 40) for i in range(3000)])
    writer.add_tensor("a.weight", numpy.zeros((3, 64), numpy.float32))
    writer.add_tensor("b.weight", numpy.zeros((2, 3, 32), numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_big_endian_files_read_the_same(tmp_path: Path) -> None:
    big = read_header(_reference_file(tmp_path / "big.gguf", big_endian=True))
    little = read_header(_reference_file(tmp_path / "little.gguf", big_endian=False))
    assert (big.byte_order, little.byte_order) == ("big", "little")
    assert big.metadata == little.metadata
    assert big.metadata["large"] == HUGE
    assert big.metadata["llama.attention.head_count_kv"] == (1, 2, 3)
    assert big.tensors == little.tensors
    assert big.data_offset == little.data_offset == big.tensors[0].offset


def test_every_truncation_point_of_a_big_endian_file(tmp_path: Path) -> None:
    whole = _reference_file(tmp_path / "whole.gguf", big_endian=True).read_bytes()
    path = tmp_path / "m.gguf"
    for length in range(0, len(whole), 997):
        assert refusal(write_bytes(path, whole[:length])).details["offset"] <= length


def test_every_truncation_point(tmp_path: Path) -> None:
    metadata = model_metadata(blocks=1, metadata={"per_layer": [1, 2], "tokenizer.ggml.tokens": ["a", "b"]})
    tensors = model_tensors(metadata)
    whole = header_bytes(metadata, tensors)
    path = tmp_path / "m.gguf"
    for length in range(len(whole) + 1):
        error = refusal(write_bytes(path, whole[:length]))
        assert error.details["offset"] <= length


def test_truncated_data_says_how_much_is_missing(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    size = path.stat().st_size
    last = read_header(path).tensors[-1]
    os.truncate(path, last.offset + last.size_bytes)  # only padding is lost
    read_header(path)
    os.truncate(path, last.offset + last.size_bytes - 1)
    assert "1 of" in refusal(path).message
    os.truncate(path, size - 1000)
    error = refusal(path)
    assert f"{last.offset + last.size_bytes - (size - 1000)} of" in error.message
    assert "download is probably incomplete" in error.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
        (b"\xef\xbb\xbf\r\n  <html lang=en>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (b'{"error":"Repository not found"}', "JSON"),
        (b"tjgg\x03\x00\x00\x00", "GGML format"),
        (b"PK\x03\x04archive/data.pkl", "ZIP archive"),
        (b'\x40\x00\x00\x00\x00\x00\x00\x00{"__metadata__":{}}', "safetensors"),
        (b"\0" * 4096, "zero bytes"),
        (b"GGU", "not with 'GGUF'"),
        (b"random bytes that are no model at all", "not with 'GGUF'"),
    ],
)
def test_impostors(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(write_bytes(tmp_path / "m.gguf", content)).message


def test_versions(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert read_header(write_bytes(path, struct.pack("<4sIQQ", b"GGUF", 2, 0, 0))).version == 2
    assert "version 1" in refusal(write_bytes(path, struct.pack(">4sIQQ", b"GGUF", 1, 0, 0))).message
    assert "version 1" in refusal(write_bytes(path, struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))).message
    error = refusal(write_bytes(path, struct.pack("<4sIQQ", b"GGUF", 4, 0, 0)))
    assert "version 4" in error.message
    assert "Update" in (error.hint or "")


def _preamble(tensors: int, metadata: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, metadata)


def _one_key(body: bytes) -> bytes:
    return _preamble(0, 1) + text("k") + body


def _one_tensor(name: bytes, dimensions: int, shape: bytes, kind: int, offset: int) -> bytes:
    info = text(name) + struct.pack("<I", dimensions) + shape + struct.pack("<IQ", kind, offset)
    return _preamble(1, 0) + info


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_preamble(HUGE, 0), id="tensor count"),
        pytest.param(_preamble(0, HUGE), id="metadata count"),
        pytest.param(_preamble(0, 2**63), id="metadata count, sign bit"),
        pytest.param(_preamble(0, 1) + struct.pack("<Q", HUGE), id="key length"),
        pytest.param(_one_key(struct.pack("<IQ", 8, HUGE)), id="string length"),
        pytest.param(_one_key(struct.pack("<IQ", 8, HUGE - 7)), id="string length that wraps around"),
        pytest.param(_one_key(struct.pack("<IIQ", 9, 4, HUGE)), id="array length"),
        pytest.param(_one_key(struct.pack("<IIQ", 9, 4, 2**62)), id="array length times 4 wraps around"),
        pytest.param(_one_key(struct.pack("<IIQ", 9, 8, HUGE)), id="string array length"),
        pytest.param(_one_key(struct.pack("<IIQQ", 9, 8, 1, HUGE - 3)), id="string in an array"),
        pytest.param(_one_key(struct.pack("<IIQ", 9, 9, 1)), id="array of arrays"),
        pytest.param(_one_key(struct.pack("<I", 13)), id="value type"),
        pytest.param(_one_key(struct.pack("<IIQ", 9, 99, 0)), id="element type"),
        pytest.param(_preamble(0, 1) + text(b"\xff\xfe") + struct.pack("<IB", 0, 1), id="key not UTF-8"),
        pytest.param(_one_tensor(b"t" * 300, 1, struct.pack("<Q", 1), 0, 0), id="tensor name length"),
        pytest.param(_one_tensor(b"t", HUGE & 0xFFFFFFFF, b"", 0, 0), id="dimensions"),
        pytest.param(_one_tensor(b"t", 1, struct.pack("<Q", HUGE), 0, 0), id="dimension"),
        pytest.param(
            _one_tensor(b"t", 2, struct.pack("<QQ", 2**40, 2**40), 0, 0), id="product of dimensions"
        ),
        pytest.param(
            _one_tensor(b"t", 2, struct.pack("<QQ", 2**32, 2**32), 0, 0), id="product wraps to zero"
        ),
        pytest.param(_one_tensor(b"t", 1, struct.pack("<Q", 0), 0, 0), id="empty tensor"),
        pytest.param(_one_tensor(b"t", 1, struct.pack("<Q", 33), 8, 0), id="row no multiple of the block"),
        pytest.param(_one_tensor(b"t", 1, struct.pack("<Q", 32), 4, 0), id="removed tensor type"),
        pytest.param(_one_tensor(b"t", 1, struct.pack("<Q", 32), 0xFFFFFFFF, 0), id="tensor type"),
        pytest.param(_one_tensor(b"t", 1, struct.pack("<Q", 32), 0, HUGE - 31), id="tensor offset"),
        pytest.param(_one_tensor(b"t", 1, struct.pack("<Q", 32), 0, 64), id="gap before the data"),
    ],
)
@pytest.mark.parametrize("tail", [0, 1 << 20, 1 << 42], ids=["cut", "1 MiB follows", "4 TiB follow"])
@pytest.mark.timeout(20)  # a bound, not a measurement: what is believed unread takes minutes, or all memory
def test_hostile_numbers(tmp_path: Path, data: bytes, tail: int) -> None:
    path = write_bytes(tmp_path / "m.gguf", data)
    os.truncate(path, len(data) + tail)
    refusal(path)


def _three_tensors(*infos: tuple[str, int, int, int]) -> bytes:
    """A header with tensors of name, row, type and place."""
    parts = [_preamble(len(infos), 0)]
    for name, row, kind, place in infos:
        parts.append(text(name) + struct.pack("<IQIQ", 1, row, kind, place))
    data = b"".join(parts)
    return data.ljust(-(-len(data) // 32) * 32, b"\0")


def test_a_type_that_gguf_does_not_know_is_sized_by_the_offsets(tmp_path: Path) -> None:
    header_of_three = _three_tensors(("a", 64, 0, 0), ("b", 256, 1000, 256), ("c", 512, 1001, 416))
    path = write_bytes(tmp_path / "m.gguf", header_of_three + bytes(416 + 300))
    first, second, third = read_header(path).tensors
    assert (first.type_name, first.size_bytes, first.sized_by_offset) == ("F32", 256, False)
    assert (second.type_name, second.size_bytes, second.sized_by_offset) == ("TYPE_1000", 160, True)
    assert (third.type_name, third.size_bytes, third.sized_by_offset) == ("TYPE_1001", 300, True)
    assert third.offset + third.size_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("infos", "words"),
    [
        ([("a", 64, 0, 0), ("b", 64, 0, 128)], "overlaps"),
        ([("a", 64, 0, 0), ("b", 64, 0, 0)], "overlaps"),
        ([("a", 64, 0, 0), ("b", 64, 0, 288)], "gap"),
        ([("a", 64, 0, 0), ("b", 64, 0, 257)], "not aligned to 32"),
        ([("a", 64, 0, 32), ("b", 64, 0, 0)], "gap"),
        ([("a", 64, 1000, 0), ("b", 64, 0, 33)], "not aligned"),
        ([("a", 64, 1000, 0), ("b", 64, 0, 0)], "0 bytes for 64 values"),
        ([("a", 64, 1000, 0), ("b", 64, 0, 1 << 19)], "cannot be"),
        ([("a", 64, 0, 0), ("b", 64, 1000, 256), ("c", 64, 0, 64)], "-192 bytes"),
        ([("a", 64, 31, 0)], "removed from the format"),
        ([("a", 64, 5000, 0)], "at most 4096 are plausible"),
        ([("a", 0, 0, 0)], "dimension of 0"),
        ([("a", 64, 0, 0), ("b", 0, 0, 256)], "dimension of 0"),
        ([("a", 1 << 63, 0, 0)], "impossible shape"),
    ],
)
def test_places_shapes_and_types(tmp_path: Path, infos: list[tuple[str, int, int, int]], words: str) -> None:
    data = _three_tensors(*infos)
    error = refusal(write_bytes(tmp_path / "m.gguf", data + bytes(1 << 20)))
    assert words in error.message
    named = error.message.partition("tensor '")[2][0]
    assert error.details["offset"] == data.index(text(named))


def test_ten_thousand_tensors(tmp_path: Path) -> None:
    tensors = [Tensor(f"blk.{i // 10}.weight_{i % 10}", (32, 2), "Q8_0") for i in range(10_000)]
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, tensors)
    found = read_header(path)
    assert [tensor.name for tensor in found.tensors] == [tensor.name for tensor in tensors]
    assert found.tensors[-1].offset + 96 == found.file_bytes


def test_a_vocabulary_of_a_million_tokens(tmp_path: Path) -> None:
    count = 1_000_000
    entry = struct.pack("<Q", 5)
    data = _preamble(0, 2) + text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, count)
    data += b"".join(entry + b"%05d" % (i % 100_000) for i in range(count)) + text("after") + typed_value(7)
    path = write_bytes(tmp_path / "m.gguf", data)
    tracemalloc.start()
    metadata = read_header(path).metadata
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    assert metadata["tokenizer.ggml.tokens"] == Unread(count, 69)
    assert metadata["after"] == 7


def test_arrays_for_many_layers_are_kept_and_those_of_the_vocabulary_are_not(tmp_path: Path) -> None:
    layers = header.MAX_KEPT_ARRAY
    flags = [i % 3 == 0 for i in range(layers)]
    path = write_gguf(
        tmp_path / "m.gguf",
        {
            "llama.attention.head_count_kv": Typed("u32", [8] * layers),
            "llama.attention.sliding_window_pattern": flags,
            "tokenizer.ggml.token_type": Typed("i32", [1] * 32_000),
            "tokenizer.ggml.eot_token_ids": [1, 2],
        },
    )
    metadata = read_header(path).metadata
    assert metadata["llama.attention.head_count_kv"] == (8,) * layers
    kept = metadata["llama.attention.sliding_window_pattern"]
    assert kept == tuple(flags)
    assert isinstance(kept, tuple)
    assert isinstance(kept[0], bool)
    assert isinstance(metadata["tokenizer.ggml.token_type"], Unread)
    assert metadata["tokenizer.ggml.eot_token_ids"] == (1, 2)


def _change_while_reading(path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append to the file behind the first ``times`` readings of its beginning."""
    real = os.pread
    left = times

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        nonlocal left
        data = real(descriptor, count, offset)
        if offset == 0 and left:
            left -= 1
            with path.open("ab") as file:
                file.write(bytes(32))
        return data

    monkeypatch.setattr(os, "pread", pread)


def test_a_file_that_changes_once_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "m.gguf")
    size = path.stat().st_size
    _change_while_reading(path, 1, monkeypatch)
    found = read_header(path)
    assert found.file_bytes == size + 32
    assert found.stamp is not None
    assert found.stamp.size_bytes == size + 32


def test_a_file_that_goes_on_changing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llama(tmp_path / "m.gguf")
    _change_while_reading(path, 2, monkeypatch)
    error = refusal(path)
    assert "changed while it was read" in error.message
    assert "Wait" in (error.hint or "")
    os.truncate(path, 100)
    _change_while_reading(path, 2, monkeypatch)
    assert (
        "changed while it was read" in refusal(path).message
    )  # not what the half-written header looked like


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = write_llama(Path(folder) / "m.gguf")
        path.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            assert "Permission denied" in refusal(path).message
        finally:
            if user == 0:
                os.seteuid(0)


def test_nested_arrays_are_refused_where_they_begin(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 1) + struct.pack("<I", 7)
    data = _one_key(struct.pack("<IIQ", 9, 9, 1) + inner)
    error = refusal(write_bytes(tmp_path / "m.gguf", data))
    assert "array of arrays" in error.message
    assert error.details["offset"] == 24 + 9 + 4


def test_duplicates_and_alignment(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    twice = _preamble(0, 2) + (text("k") + typed_value(1)) * 2
    assert "occurs twice" in refusal(write_bytes(path, twice)).message
    tensors = [Tensor("same", (8,)), Tensor("same", (8,))]
    assert "occurs twice" in refusal(write_gguf(path, {}, tensors)).message
    for alignment in (0, 3, Typed("u64", HUGE), "32", True, Typed("i32", -32)):
        assert "general.alignment" in refusal(write_gguf(path, {"general.alignment": alignment})).message


def test_memory_and_time_of_a_file_made_to_hurt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    strings = cursor.MAX_SKIPPED_STRINGS + 1
    data = _one_key(struct.pack("<IIQ", 9, 8, strings))
    os.truncate(write_bytes(path, data), len(data) + 8 * strings)
    assert "strings" in refusal(path).message
    os.truncate(write_bytes(path, _one_key(struct.pack("<IIQ", 9, 0, 1 << 40))), 1 << 41)
    assert "larger than" in refusal(path).message
    monkeypatch.setattr(cursor, "MAX_KEPT_BYTES", 100)
    assert "bytes of metadata" in refusal(write_gguf(path, {"a": "x" * 60, "b": "x" * 60})).message


def test_not_regular_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    assert "FIFO" in refusal(fifo).message
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert "directory" in refusal(folder).message
    with socket.socket(socket.AF_UNIX) as server:
        address = tmp_path / "s.gguf"
        server.bind(str(address))
        assert "socket" in refusal(address).message
    device = tmp_path / "zero.gguf"
    device.symlink_to("/dev/zero")
    assert "device" in refusal(device).message
    assert "No such file" in refusal(tmp_path / "missing.gguf").message
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    assert "cannot be opened" in refusal(loop).message


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    with cursor.open_model_file(path) as opened:
        os.truncate(path, 10)
        with pytest.raises(LlmError, match="shortened"):
            opened.take(100, "the test")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)  # reading a directory fails, as a broken disk does
    try:
        with pytest.raises(LlmError, match="cannot be read: Is a directory"):
            cursor.Cursor(descriptor, tmp_path / "m.gguf", 1000).take(100, "the test")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "name",
    [
        "with space.gguf",
        "quote'\".gguf",
        "$HOME;rm -rf.gguf",
        "new\nline.gguf",
        "Модель.gguf",
        "模型.gguf",
        "モデル.gguf",
        "نموذج.gguf",
        "מודל.gguf",
        "मॉडल.gguf",
        "โมเดล.gguf",
        "모델.gguf",
        "μοντέλο-😀.gguf",
        "e\u0301.gguf",
        "\u202egpj.gguf",
    ],
)
def test_awkward_names(tmp_path: Path, name: str) -> None:
    assert read_header(write_llama(tmp_path / name)).tensors
    os.truncate(tmp_path / name, 30)
    message = refusal(tmp_path / name).message
    assert message.isprintable()


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff\xfe.gguf")
    assert read_header(write_llama(path)).path == path
    os.truncate(path, 30)
    message = refusal(path).message
    assert "m\\xff\\xfe.gguf" in message
    message.encode("utf-8")


def test_texts_from_the_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, [Tensor("\x1b[2J", (8,)), Tensor("\x1b[2J", (8,))])
    assert "\x1b" not in refusal(path).message


def test_a_large_vocabulary_is_cheap(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(262144)]
    metadata = model_metadata(
        metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": Typed("f32", [0.0] * 262144)}
    )
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(metadata))
    found = read_header(path)
    assert isinstance(found.metadata["tokenizer.ggml.tokens"], Unread)


def test_neither_gguf_nor_numpy_is_imported(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    script = """
import sys
from pathlib import Path
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.checkpoints.library import Library

path = Path(sys.argv[1])
print(len(read_facts([path]).layers), Library(path.parent, {}).scan()[0].name)
print(sorted({"numpy", "gguf", "gguf.constants"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert done.stdout == "2 m\n[]\n"


def _small_file() -> bytes:
    metadata = model_metadata(
        blocks=1, metadata={"llama.attention.head_count_kv": [2], "tokenizer.ggml.tokens": ["a", "bb", ""]}
    )
    tensors = model_tensors(metadata)
    head = header_bytes(metadata, tensors)
    return head.ljust(len(head) + sum(tensor.size_bytes + 32 for tensor in tensors), b"\0")


SMALL_FILE = _small_file()
HEADER_LENGTH = len(SMALL_FILE.rstrip(b"\0"))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    patches=st.lists(
        st.tuples(
            st.integers(0, HEADER_LENGTH), st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8))
        ),
        min_size=1,
        max_size=4,
    ),
    length=st.one_of(st.none(), st.integers(0, len(SMALL_FILE))),
)
def test_corruption_never_does_anything_but_refuse(
    tmp_path: Path, patches: list[tuple[int, bytes]], length: int | None
) -> None:
    from lllm3090d.checkpoints.facts import read_facts

    data = bytearray(SMALL_FILE)
    for offset, patch in patches:
        data[offset : offset + len(patch)] = patch
    path = write_bytes(tmp_path / "m.gguf", bytes(data[:length]))
    try:
        found = read_header(path)
    except LlmError as error:
        assert error.code is ErrorCode.BAD_CHECKPOINT
        assert error.message.isprintable()
    else:
        assert isinstance(found, GgufHeader)
        assert all(t.offset + t.size_bytes <= path.stat().st_size for t in found.tensors)
    try:
        facts = read_facts([path])
    except LlmError as error:
        assert error.message.isprintable()
    else:
        assert facts.weight_bytes <= path.stat().st_size


def test_an_alignment_of_another_type_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": Typed("u64", 32)})
    with pytest.raises(LlmError) as caught:
        read_header(path)
    assert "general.alignment has the type u64, not u32" in caught.value.message


def test_types_are_named_as_in_the_engine(tmp_path: Path) -> None:
    values = {
        "a": Typed("u16", 3),
        "b": Typed("f64", 0.5),
        "c": True,
        "d": "text",
        "e": Typed("i32", [1, 2]),
        "f": ["x", "y"],
        "g": Typed("u8", [0] * 70_000),
    }
    types = {"a": "u16", "b": "f64", "c": "bool", "d": "str", "e": "[i32]", "f": "[str]", "g": "[u8]"}
    assert dict(read_header(write_gguf(tmp_path / "m.gguf", values)).types) == types
