"""Bounded, lazy reader of GGUF headers (versions 2 and 3, little endian).

Layout: the magic, u32 version, u64 tensor count, u64 metadata count, the metadata, the tensor infos,
padding, data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Every count and length is compared
with the file's size and with a limit before it is used, so a hostile file costs bounded time and memory.
Long arrays and all arrays of strings (the vocabulary) are stepped over, not built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lllm3090d.checkpoints.cursor import INCOMPLETE_HINT, Cursor, open_model_file, printable
from lllm3090d.checkpoints.gguf_format import GgufFormat, gguf_format

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS of the engine

# Each far above any published model; with the cursor's limits they bound a header at some 2 s and 100 MiB.
MAX_METADATA_COUNT = 1 << 16
MAX_TENSOR_COUNT = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_TENSOR_NAME_BYTES = 256
MAX_KEPT_STRING_BYTES = 1 << 16
MAX_KEPT_ARRAY = 1 << 12  # per-layer arrays; the engine knows at most 512 layers
MAX_ALIGNMENT = 1 << 30

_U32_BYTES = 4
_U64_BYTES = 8

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Unread:
    """A long value that was stepped over: ``count`` elements, or bytes of a string, at ``offset``."""

    count: int
    offset: int


Value = Scalar | tuple[Scalar, ...] | Unread


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: e.g. ``blk.0.attn_k.weight``.
        shape: the engine's order, length of a row first.
        type_name: e.g. ``Q4_1``.
        offset: from the beginning of the file, bytes.
        size_bytes: without padding.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one file.

    Attributes:
        path: the file.
        version: of the format.
        file_bytes: size of the file.
        metadata: values in the order of the file; long ones are :class:`Unread`.
        tensors: in the order of the file, all of them inside it.
    """

    path: Path
    version: int
    file_bytes: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor infos; takes milliseconds, at most about 0.2 s for the largest vocabularies.

    Raises:
        LlmError: BAD_CHECKPOINT naming file, offset and reason. Never blocks on a FIFO or device.
    """
    with open_model_file(path) as cursor:
        version, tensor_count, metadata_count = _preamble(cursor)
        metadata: dict[str, Value] = {}
        for key, value in _metadata(cursor, metadata_count):
            if key in metadata:
                cursor.fail(f"the metadata key {printable(key)!r} occurs twice")
            metadata[key] = value
        alignment = _alignment(cursor, metadata)
        tensors = _tensors(cursor, tensor_count, alignment)
        return GgufHeader(path, version, cursor.file_bytes, MappingProxyType(metadata), tensors)


def read_general(path: Path) -> Mapping[str, Value]:
    """Read the metadata that precedes the tokenizer, which is where writers put ``general.*``; about 0.3 ms.

    Raises:
        LlmError: BAD_CHECKPOINT, as :func:`read_header`.
    """
    with open_model_file(path) as cursor:
        _, _, metadata_count = _preamble(cursor)
        found: dict[str, Value] = {}
        for key, value in _metadata(cursor, metadata_count):
            if key.startswith("tokenizer."):
                break
            found[key] = value
        return MappingProxyType(found)


def _preamble(cursor: Cursor) -> tuple[int, int, int]:
    """Check magic and version; return version, tensor count and metadata count."""
    head = cursor.take(min(cursor.file_bytes, 512), "the beginning")
    if not head.startswith(MAGIC):
        reason, hint = _what_it_is(head)
        cursor.fail(reason, offset=0, hint=hint)
    cursor.offset = len(MAGIC)
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:  # versions are small: only a swapped one has an empty lower half
        hint = "Convert it again without --bigendian, or fetch the ordinary file."
        cursor.fail("the file is for big-endian machines", offset=len(MAGIC), hint=hint)
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
    return f"it begins with {head[:4]!r} instead of {MAGIC!r}", INCOMPLETE_HINT


def _metadata(cursor: Cursor, count: int) -> Iterator[tuple[str, Value]]:
    form = gguf_format()
    for number in range(1, count + 1):
        key = cursor.name(MAX_KEY_BYTES, f"key {number} of {count}")
        what = f"the value of {printable(key)!r}"
        kind = cursor.u32(f"the type of {printable(key)!r}")
        if kind in form.scalars:
            yield key, _scalars(cursor, form, kind, 1, what)[0]
        elif kind == form.string_type:
            yield key, _string(cursor, what)
        elif kind == form.array_type:
            yield key, _array(cursor, form, what)
        else:
            cursor.fail(f"{what} has the unknown type {kind}", offset=cursor.offset - _U32_BYTES)


def _scalars(cursor: Cursor, form: GgufFormat, kind: int, count: int, what: str) -> tuple[Scalar, ...]:
    layout = form.scalars[kind]
    cursor.keep(count * layout.size)
    data = cursor.take(count * layout.size, what)
    values = tuple(value for (value,) in layout.iter_unpack(data))
    return tuple(value != 0 for value in values) if kind == form.bool_type else values


def _string(cursor: Cursor, what: str) -> str | Unread:
    length = cursor.u64(f"the length of {what}")
    if length > MAX_KEPT_STRING_BYTES:
        unread = Unread(length, cursor.offset)
        cursor.skip(length, what)
        return unread
    cursor.keep(length)
    return cursor.take(length, what).decode("utf-8", "backslashreplace")


def _array(cursor: Cursor, form: GgufFormat, what: str) -> tuple[Scalar, ...] | Unread:
    kind = cursor.u32(f"the element type of {what}")
    count = cursor.u64(f"the length of {what}")
    start = cursor.offset
    if kind in form.scalars:
        if count <= MAX_KEPT_ARRAY:
            return _scalars(cursor, form, kind, count, what)
        cursor.skip(count * form.scalars[kind].size, what)
        return Unread(count, start)
    if kind != form.string_type:
        cursor.fail(f"{what} is an array of elements of type {kind}, which the engine does not read")
    if count > (cursor.file_bytes - start) // _U64_BYTES:
        cursor.fail(f"{what} claims {count} strings, more than fit into the file")
    # Arrays of strings are vocabularies, merges and tags; nothing here needs them.
    cursor.skip_strings(count, what)
    return Unread(count, start)


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int):
        cursor.fail("general.alignment is not a number")
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, not a power of two")
    return alignment


def _tensors(cursor: Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    """Read the tensor infos; the data must follow each other, as the engine requires, inside the file."""
    relative: list[TensorInfo] = []  # offsets in the data section, whose start is known last
    names: set[str] = set()
    expected = 0
    for number in range(1, count + 1):
        start = cursor.offset
        tensor = _tensor_info(cursor, f"{number} of {count}")
        what = f"tensor {printable(tensor.name)!r}"
        if tensor.name in names:
            cursor.fail(f"{what} occurs twice", offset=start)
        names.add(tensor.name)
        if tensor.offset != expected:
            reason = f"{what} lies at {tensor.offset} of the data, its place is {expected}"
            cursor.fail(reason, offset=start)
        relative.append(tensor)
        expected = _padded(tensor.offset + tensor.size_bytes, alignment)
    data_start = _padded(cursor.offset, alignment)
    tensors = tuple(dataclasses.replace(tensor, offset=data_start + tensor.offset) for tensor in relative)
    end = tensors[-1].offset + tensors[-1].size_bytes if tensors else 0
    if end > cursor.file_bytes:
        cursor.fail(
            f"the tensor data are cut off: {end - cursor.file_bytes} of {end} bytes are missing;"
            " the download is probably incomplete",
            offset=cursor.file_bytes,
            hint="Fetch the file again, or let the download finish.",
        )
    return tensors


def _tensor_info(cursor: Cursor, number: str) -> TensorInfo:
    """One tensor info, its offset relative to the data. Bytes = values / block values * block bytes."""
    start = cursor.offset
    name = cursor.name(MAX_TENSOR_NAME_BYTES, f"the name of tensor {number}")
    what = f"tensor {printable(name)!r}"
    dimensions = cursor.u32(f"the dimensions of {what}")
    if dimensions > MAX_DIMENSIONS:
        reason = f"{what} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed"
        cursor.fail(reason, offset=start)
    shape = tuple(cursor.u64(f"the shape of {what}") for _ in range(dimensions))
    code = cursor.u32(f"the type of {what}")
    offset = cursor.u64(f"the place of {what}")
    storage = gguf_format().tensor_types.get(code)
    if storage is None:
        hint = "Update the Python package gguf if the file is newer than it; otherwise the file is damaged."
        cursor.fail(f"{what} has the unknown type {code}", offset=start, hint=hint)
    values = math.prod(shape)
    if not 0 < values < 1 << 63:  # the engine counts in signed 64 bits
        cursor.fail(f"{what} has the impossible shape {list(shape)}", offset=start)
    row = shape[0] if shape else 1
    if row % storage.block_values:
        reason = f"{what} has rows of {row} values, {storage.name} needs multiples of {storage.block_values}"
        cursor.fail(reason, offset=start)
    return TensorInfo(
        name, shape, storage.name, offset, values // storage.block_values * storage.block_bytes
    )


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
