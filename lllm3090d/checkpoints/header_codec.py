"""Headers as bytes for the cache: compressed JSON, some tens of kB for the largest models. Pure."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lllm3090d.checkpoints.cursor import ByteOrder, FileStamp
from lllm3090d.checkpoints.header import GgufHeader, Unread, Value
from lllm3090d.checkpoints.tensor_infos import TensorInfo

_LEVEL = 1  # reading speed matters, and tensor names repeat themselves
# What a header holds at most, so that a damaged entry cannot blow up.
_MAX_JSON_BYTES = 64 << 20


class BadEntryError(Exception):
    """The bytes are not what :func:`pack` wrote."""


def pack(header: GgufHeader) -> bytes:
    """Everything but the path and the stamp, which are the key of the cache."""
    document = {
        "version": header.version,
        "byte_order": header.byte_order,
        "data_offset": header.data_offset,
        "metadata": [
            [key, _stored(value), header.types.get(key, "")] for key, value in header.metadata.items()
        ],
        "tensors": [
            [t.name, t.shape, t.type_name, t.offset, t.size_bytes, t.sized_by_offset] for t in header.tensors
        ],
    }
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode("ascii"), _LEVEL)


def unpack(path: Path, stamp: FileStamp, data: bytes) -> GgufHeader:
    """The header that was packed. Raises BadEntryError."""
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(data, _MAX_JSON_BYTES)
        document = json.loads(text)
        return GgufHeader(
            path=path,
            version=document["version"],
            file_bytes=stamp.size_bytes,
            metadata=MappingProxyType({key: _restored(value) for key, value, _ in document["metadata"]}),
            tensors=tuple(
                TensorInfo(name, tuple(shape), kind, offset, size, unsure)
                for name, shape, kind, offset, size, unsure in document["tensors"]
            ),
            byte_order=ByteOrder(document["byte_order"]),
            stamp=stamp,
            data_offset=document["data_offset"],
            types=MappingProxyType({key: name for key, _, name in document["metadata"] if name}),
        )
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise BadEntryError(f"{type(error).__name__}: {error}") from error


def _stored(value: Value) -> Any:
    return {"count": value.count, "offset": value.offset} if isinstance(value, Unread) else value


def _restored(value: Any) -> Value:
    if isinstance(value, dict):
        return Unread(value["count"], value["offset"])
    if isinstance(value, list):
        return tuple(value)
    restored: Value = value
    return restored
