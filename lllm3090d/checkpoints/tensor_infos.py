"""The tensor infos of a GGUF header: name, shape, type and place of each tensor.

A large model has a thousand of them and a library hundreds of thousands, so each is taken from the buffer in one
piece; only one that cannot be is read again step by step, to say what is wrong with it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NoReturn

from lllm3090d.checkpoints.cursor import INCOMPLETE_HINT, ByteOrder, Cursor, quoted
from lllm3090d.checkpoints.gguf_format import gguf_format

MAX_DIMENSIONS = 4  # GGML_MAX_DIMS of the engine
MAX_TENSOR_NAME_BYTES = 256
MAX_TENSOR_TYPE = 1 << 12  # forks number theirs up to some 400; larger ones are damage
# Types that were taken out of the format; no engine reads them any more.
REMOVED_TENSOR_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
# A type that is not known takes at most this per value, the widest known being F64.
MAX_VALUE_BYTES = 8
MAX_BLOCK_BYTES = 1 << 12  # and its last block may be filled up

_TOO_MANY_VALUES = 1 << 63  # the engine counts in signed 64 bits
_U32_BYTES = 4
_U64_BYTES = 8
_MAX_INFO_BYTES = (
    _U64_BYTES + MAX_TENSOR_NAME_BYTES + _U32_BYTES + MAX_DIMENSIONS * _U64_BYTES + _U32_BYTES + _U64_BYTES
)
_SIGNS = {ByteOrder.LITTLE: "<", ByteOrder.BIG: ">"}
_DIMENSIONS = {order: struct.Struct(f"{sign}I") for order, sign in _SIGNS.items()}
# By byte order and number of dimensions: the shape, the type, the place.
_REST = {
    order: [struct.Struct(f"{sign}{dimensions}QIQ") for dimensions in range(MAX_DIMENSIONS + 1)]
    for order, sign in _SIGNS.items()
}

# Name, shape, type, and place relative to the data.
_Raw = tuple[str, tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: e.g. ``blk.0.attn_k.weight``.
        shape: the engine's order, length of a row first.
        type_name: e.g. ``Q4_1``; ``TYPE_99`` for a code the ``gguf`` package does not know.
        offset: from the beginning of the file, bytes.
        size_bytes: without padding.
        sized_by_offset: its type is not known, so the size is all that lies before the next tensor.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    size_bytes: int
    sized_by_offset: bool = False


def read_tensors(cursor: Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    """Read the tensor infos at the cursor; the data must follow each other in the file, as the engine requires.

    Raises:
        LlmError: BAD_CHECKPOINT.
    """
    raw: list[_Raw] = []
    starts: list[int] = []
    names: set[str] = set()
    for number in range(1, count + 1):
        start = cursor.offset
        info = _quickly(cursor) or _carefully(cursor, number, count)
        if info[0] in names:
            _fail(cursor, info[0], start, "occurs twice")
        names.add(info[0])
        raw.append(info)
        starts.append(start)
    return _placed(cursor, raw, starts, alignment)


def padded(size: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // alignment) * alignment


def _quickly(cursor: Cursor) -> _Raw | None:
    """One tensor info out of the buffer; None when it is not wholly there or not plausible."""
    buffer, at = cursor.window(_MAX_INFO_BYTES, "the tensor infos")
    order = cursor.byte_order
    name_at = at + _U64_BYTES
    try:
        length: int = cursor.u64_layout.unpack_from(buffer, at)[0]
        if length > MAX_TENSOR_NAME_BYTES:
            return None
        rest_at = name_at + length
        dimensions: int = _DIMENSIONS[order].unpack_from(buffer, rest_at)[0]
        if dimensions > MAX_DIMENSIONS:
            return None
        rest = _REST[order][dimensions]
        *shape, code, offset = rest.unpack_from(buffer, rest_at + _U32_BYTES)
        name = buffer[name_at:rest_at].decode("utf-8")
    except (struct.error, UnicodeDecodeError):
        return None
    cursor.keep(length)
    cursor.offset += rest_at + _U32_BYTES + rest.size - at
    return name, tuple(shape), code, offset


def _carefully(cursor: Cursor, number: int, count: int) -> _Raw:
    """One tensor info step by step, with an error that tells the step."""
    start = cursor.offset
    name = cursor.name(MAX_TENSOR_NAME_BYTES, f"the name of tensor {number} of {count}")
    what = f"tensor {quoted(name)}"
    dimensions = cursor.u32(f"the dimensions of {what}")
    if dimensions > MAX_DIMENSIONS:
        _fail(cursor, name, start, f"has {dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed")
    shape = tuple(cursor.u64(f"the shape of {what}") for _ in range(dimensions))
    return name, shape, cursor.u32(f"the type of {what}"), cursor.u64(f"the place of {what}")


def _placed(cursor: Cursor, raw: list[_Raw], starts: list[int], alignment: int) -> tuple[TensorInfo, ...]:
    """Sizes and places: bytes = values / values of a block * bytes of a block."""
    known = gguf_format().tensor_types
    data_start = padded(cursor.offset, alignment)
    tensors: list[TensorInfo] = []
    place = 0  # where the next one must begin, relative to the data
    for index, (name, shape, code, offset) in enumerate(raw):
        storage = known.get(code)
        values = math.prod(shape)
        if not 0 < values < _TOO_MANY_VALUES or offset != place:
            _misfit(cursor, raw[index], starts[index], place, alignment)
        if storage is None:
            following = raw[index + 1][3] if index + 1 < len(raw) else cursor.file_bytes - data_start
            size = following - offset
            _check_unknown(cursor, raw[index], starts[index], size, alignment)
            tensors.append(TensorInfo(name, shape, f"TYPE_{code}", data_start + offset, size, True))
        else:
            row = shape[0] if shape else 1
            if row % storage.block_values:
                reason = (
                    f"has rows of {row} values, {storage.name} needs multiples of {storage.block_values}"
                )
                _fail(cursor, name, starts[index], reason)
            size = values // storage.block_values * storage.block_bytes
            tensors.append(TensorInfo(name, shape, storage.name, data_start + offset, size))
        place = padded(offset + size, alignment)
    _check_end(cursor, tensors)
    return tuple(tensors)


def _misfit(cursor: Cursor, info: _Raw, start: int, place: int, alignment: int) -> NoReturn:
    """Say what is wrong with a shape or a place."""
    name, shape, _, offset = info
    if 0 in shape:
        _fail(cursor, name, start, f"has the shape {list(shape)}, with a dimension of 0")
    if math.prod(shape) >= _TOO_MANY_VALUES:
        _fail(cursor, name, start, f"has the impossible shape {list(shape)}")
    where = f"lies at {offset} of the data, its place is {place}"
    if offset % alignment:
        _fail(cursor, name, start, f"{where}: it is not aligned to {alignment} bytes")
    fault = "it overlaps the one before it" if offset < place else "it leaves a gap"
    _fail(cursor, name, start, f"{where}: {fault}")


def _check_unknown(cursor: Cursor, info: _Raw, start: int, size: int, alignment: int) -> None:
    """Refuse a type that was removed or is implausible, and a size that no type can have."""
    name, shape, code, _ = info
    if code in REMOVED_TENSOR_TYPES:
        hint = "Fetch a newer conversion of the model."
        _fail(cursor, name, start, f"has the type {code}, which was removed from the format", hint)
    if code > MAX_TENSOR_TYPE:
        _fail(cursor, name, start, f"has the unknown type {code}, at most {MAX_TENSOR_TYPE} are plausible")
    values = math.prod(shape)
    if not 0 < size <= values * MAX_VALUE_BYTES + MAX_BLOCK_BYTES + alignment:
        hint = "Update the Python package gguf if the file is newer than it; otherwise the file is damaged."
        reason = f"has the unknown type {code} and {size} bytes for {values} values, which cannot be"
        _fail(cursor, name, start, reason, hint)


def _check_end(cursor: Cursor, tensors: list[TensorInfo]) -> None:
    """Refuse a file that ends before its tensors do."""
    end = tensors[-1].offset + tensors[-1].size_bytes if tensors else 0
    if end > cursor.file_bytes:
        cursor.fail(
            f"the tensor data are cut off: {end - cursor.file_bytes} of {end} bytes are missing;"
            " the download is probably incomplete",
            offset=cursor.file_bytes,
            hint="Fetch the file again, or let the download finish.",
        )


def _fail(cursor: Cursor, name: str, start: int, reason: str, hint: str = INCOMPLETE_HINT) -> NoReturn:
    cursor.fail(f"tensor {quoted(name)} {reason}", offset=start, hint=hint)
