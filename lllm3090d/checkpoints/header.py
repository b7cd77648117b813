"""Bounded, lazy reader of GGUF headers (versions 2 and 3, little and big endian).

Layout: the magic, u32 version, u64 tensor count, u64 metadata count, the metadata, the tensor infos,
padding, data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Every count and length is compared
with the file's size and with a limit before it is used, so a hostile file costs bounded time and memory.
Long arrays and all arrays of strings (the vocabulary) are stepped over, not built. The tensor infos are read by
:mod:`lllm3090d.checkpoints.tensor_infos`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from lllm3090d.checkpoints.cursor import (
    INCOMPLETE_HINT,
    ByteOrder,
    Cursor,
    FileStamp,
    open_model_file,
    printable,
    quoted,
    refusal,
)
from lllm3090d.checkpoints.gguf_format import GgufFormat, gguf_format
from lllm3090d.checkpoints.tensor_infos import TensorInfo, padded, read_tensors
from lllm3090d.errors import LlmError

__all__ = ["GgufHeader", "Scalar", "TensorInfo", "Unread", "Value", "read_header"]

# Raised whenever the same file would be read differently, so that what was cached is read again.
READER_VERSION = 2

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Each far above any published model; with the cursor's limits they bound a header at some 2 s and 100 MiB.
MAX_METADATA_COUNT = 1 << 16
MAX_TENSOR_COUNT = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_KEPT_STRING_BYTES = 1 << 18  # the longest chat templates have some 60 kB
MAX_KEPT_ARRAY = 1 << 16  # per-layer arrays; the engine knows at most 512 layers
MAX_KEPT_TOKENIZER_ARRAY = 1 << 8  # there arrays are as long as the vocabulary, or list a few tokens
TOKENIZER_PREFIX = "tokenizer."
MAX_ALIGNMENT = 1 << 30

_U32_BYTES = 4
_U64_BYTES = 8
_ORDER = {ByteOrder.LITTLE: "<", ByteOrder.BIG: ">"}

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Unread:
    """A long value that was stepped over: ``count`` elements, or bytes of a string, at ``offset``."""

    count: int
    offset: int


Value = Scalar | tuple[Scalar, ...] | Unread


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one file.

    Attributes:
        path: the file.
        version: of the format.
        file_bytes: size of the file.
        metadata: values in the order of the file; long ones are :class:`Unread`.
        tensors: in the order of the file, all of them inside it.
        types: of the metadata values as the engine calls them, e.g. ``u32``, or ``[u32]`` for an array.
        byte_order: of the file; the engine reads only that of its machine.
        stamp: the state of the file that was read.
        data_offset: where the tensor data begin.
    """

    path: Path
    version: int
    file_bytes: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    byte_order: ByteOrder = ByteOrder.LITTLE
    stamp: FileStamp | None = None
    data_offset: int = 0
    types: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor infos; takes milliseconds, at most about 0.2 s for the largest vocabularies.

    A file that changes meanwhile is read once more.

    Raises:
        LlmError: BAD_CHECKPOINT naming file, offset and reason. Never blocks on a FIFO or device.
    """
    for _ in range(2):
        with open_model_file(path) as cursor:
            try:
                header = _read(cursor, path)
            except LlmError:
                if not cursor.changed():
                    raise
            else:
                if not cursor.changed():
                    return header
    raise refusal(
        path,
        "it changed while it was read, twice",
        "Wait until the download or the copy has finished, then try again.",
    )


def _read(cursor: Cursor, path: Path) -> GgufHeader:
    version, tensor_count, metadata_count = _preamble(cursor)
    metadata: dict[str, Value] = {}
    types: dict[str, str] = {}
    for key, value, type_name, start in _metadata(cursor, metadata_count):
        if key in metadata:
            cursor.fail(f"the metadata key {quoted(key)} occurs twice", offset=start)
        metadata[key] = value
        types[key] = type_name
    alignment = _alignment(cursor, metadata, types)
    tensors = read_tensors(cursor, tensor_count, alignment)
    return GgufHeader(
        path=path,
        version=version,
        file_bytes=cursor.file_bytes,
        metadata=MappingProxyType(metadata),
        tensors=tensors,
        byte_order=cursor.byte_order,
        stamp=cursor.stamp,
        data_offset=min(padded(cursor.offset, alignment), cursor.file_bytes),
        types=MappingProxyType(types),
    )


def _preamble(cursor: Cursor) -> tuple[int, int, int]:
    """Check magic and version; return version, tensor count and metadata count."""
    head = cursor.take(min(cursor.file_bytes, 512), "the beginning")
    if not head.startswith(MAGIC):
        reason, hint = _what_it_is(head)
        cursor.fail(reason, offset=0, hint=hint)
    cursor.offset = len(MAGIC)
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:  # versions are small: only a swapped one has an empty lower half
        cursor.byte_order = ByteOrder.BIG
        cursor.offset = len(MAGIC)
        version = cursor.u32("the version")
    if version not in SUPPORTED_VERSIONS:
        known = " and ".join(map(str, SUPPORTED_VERSIONS))
        hint = "Fetch a newer conversion of the model." if version < 2 else "Update lllm3090."
        cursor.fail(f"GGUF version {version}; known are {known}", offset=len(MAGIC), hint=hint)
    tensor_count = cursor.u64("the tensor count")
    if tensor_count > MAX_TENSOR_COUNT:
        cursor.fail(f"it claims {tensor_count} tensors, at most {MAX_TENSOR_COUNT} are plausible", offset=8)
    metadata_count = cursor.u64("the metadata count")
    if metadata_count > MAX_METADATA_COUNT:
        cursor.fail(
            f"it claims {metadata_count} metadata entries, at most {MAX_METADATA_COUNT} are plausible",
            offset=16,
        )
    return version, tensor_count, metadata_count


# First bytes, lower case and without white space before them -> reason and hint.
_IMPOSTORS: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    (
        (b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--"),
        "it is a web page, not a model: the page about the file was saved, or an error page",
        "Fetch the file itself: on Hugging Face its address contains /resolve/, not /blob/, and a gated"
        " model needs a login.",
    ),
    (
        (b"version https://git-lfs",),
        "it is a Git LFS pointer, not the model itself",
        "Run `git lfs pull` in its repository.",
    ),
    (
        (b"{", b"["),
        "it is JSON text, not a model: perhaps the error message of a download",
        "Fetch the file again.",
    ),
    (
        (b"lmgg", b"fmgg", b"tjgg", b"algg"),  # a little-endian number each: ggml, ggmf, ggjt, ggla
        "it is in the GGML format that preceded GGUF",
        "Fetch a GGUF conversion of the model.",
    ),
    (
        (b"pk\x03\x04",),
        "it is a ZIP archive, perhaps PyTorch weights",
        "Fetch a GGUF conversion of the model.",
    ),
)


def _what_it_is(head: bytes) -> tuple[str, str]:
    """Reason and hint for a file without the magic, from its first bytes."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for beginnings, reason, hint in _IMPOSTORS:
        if text.startswith(beginnings):
            return reason, hint
    if not head:
        return "it is empty", INCOMPLETE_HINT
    if not head.strip(b"\0"):
        return "it begins with zero bytes, as a file whose download never got so far", INCOMPLETE_HINT
    if head[8:10] == b'{"':
        return "it holds safetensors weights", "Fetch a GGUF conversion of the model."
    found = printable(head[:4].decode("latin-1"))
    return f"it begins with '{found}', not with '{MAGIC.decode()}'", INCOMPLETE_HINT


def _metadata(cursor: Cursor, count: int) -> Iterator[tuple[str, Value, str, int]]:
    """Key, value, the type's name and where the key begins."""
    form = gguf_format()
    for number in range(1, count + 1):
        start = cursor.offset
        key = cursor.name(MAX_KEY_BYTES, f"key {number} of {count}")
        what = f"the value of {quoted(key)}"
        kind = cursor.u32(f"the type of {quoted(key)}")
        if kind in form.scalars:
            yield key, _scalars(cursor, form, kind, 1, what)[0], form.type_names[kind], start
        elif kind == form.string_type:
            yield key, _string(cursor, what), form.type_names[kind], start
        elif kind == form.array_type:
            yield (key, *_array(cursor, form, key, what), start)
        else:
            cursor.fail(f"{what} has the unknown type {kind}", offset=cursor.offset - _U32_BYTES)


def _scalars(cursor: Cursor, form: GgufFormat, kind: int, count: int, what: str) -> tuple[Scalar, ...]:
    letter, size_bytes = form.scalars[kind]
    cursor.keep(count * size_bytes)
    data = cursor.take(count * size_bytes, what)
    values: tuple[Scalar, ...] = struct.unpack(f"{_ORDER[cursor.byte_order]}{count}{letter}", data)
    return tuple(value != 0 for value in values) if kind == form.bool_type else values


def _string(cursor: Cursor, what: str) -> str | Unread:
    length = cursor.u64(f"the length of {what}")
    if length > MAX_KEPT_STRING_BYTES:
        unread = Unread(length, cursor.offset)
        cursor.skip(length, what)
        return unread
    cursor.keep(length)
    return cursor.take(length, what).decode("utf-8", "backslashreplace")


def _array(cursor: Cursor, form: GgufFormat, key: str, what: str) -> tuple[Value, str]:
    kind = cursor.u32(f"the element type of {what}")
    kind_at = cursor.offset - _U32_BYTES
    count = cursor.u64(f"the length of {what}")
    start = cursor.offset
    if kind in form.scalars:
        if count <= (MAX_KEPT_TOKENIZER_ARRAY if key.startswith(TOKENIZER_PREFIX) else MAX_KEPT_ARRAY):
            return _scalars(cursor, form, kind, count, what), form.array_names[kind]
        cursor.skip(count * form.scalars[kind][1], what)
        return Unread(count, start), form.array_names[kind]
    if kind == form.array_type:
        cursor.fail(f"{what} is an array of arrays, which the engine does not read", offset=kind_at)
    if kind != form.string_type:
        cursor.fail(f"{what} is an array of elements of the unknown type {kind}", offset=kind_at)
    if count > (cursor.file_bytes - start) // _U64_BYTES:
        cursor.fail(f"{what} claims {count} strings, more than fit into the file", offset=start - _U64_BYTES)
    # Arrays of strings are vocabularies, merges and tags; nothing here needs them.
    cursor.skip_strings(count, what)
    return Unread(count, start), form.array_names[kind]


def _alignment(cursor: Cursor, metadata: Mapping[str, Value], types: Mapping[str, str]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int):
        cursor.fail("general.alignment is not a number")
    if types.get("general.alignment", "u32") != "u32":
        cursor.fail(f"general.alignment has the type {types['general.alignment']}, not u32")
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, not a power of two")
    return alignment
