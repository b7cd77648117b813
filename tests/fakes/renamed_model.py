"""A real checkpoint under the name of another architecture: the same tensors and tokenizer, other keys."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

_STRING, _ARRAY = 8, 9  # gguf_metadata_value_type
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT = 32


class _Reader:
    """Pieces of a GGUF header as they are."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, form: str) -> int:
        """The next number."""
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> str:
        """The next string."""
        return self.take(self.number("<Q")).decode()

    def value(self, kind: int) -> bytes:
        """The next value of that type, raw."""
        start = self.at
        if kind == _STRING:
            self.text()
        elif kind == _ARRAY:
            item, count = self.number("<I"), self.number("<Q")
            for _ in range(count):
                self.value(item)
        else:
            self.take(_WIDTHS[kind])
        return self.content[start : self.at]


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write_renamed(
    source: Path, path: Path, architecture: str, numbers: Mapping[str, int] | None = None
) -> Path:
    """Write ``source`` to ``path`` as a model of another architecture.

    Args:
        source: a little-endian GGUF file of version 3 with the usual alignment.
        path: the new file; its directory is made.
        architecture: the new name, of the keys too.
        numbers: further keys, without the prefix, as u32.
    """
    reader = _Reader(source.read_bytes())
    assert reader.take(4) == b"GGUF"
    version, tensors, count = reader.number("<I"), reader.number("<Q"), reader.number("<Q")
    old, pairs = "", []
    for _ in range(count):
        key, kind = reader.text(), reader.number("<I")
        value = reader.value(kind)
        if key == "general.architecture":
            old, value = value[8:].decode(), _text(architecture)
        pairs.append((key, kind, value))
    infos_at = reader.at
    for _ in range(tensors):
        reader.text()
        reader.take(8 * reader.number("<I") + 4 + 8)
    infos = reader.content[infos_at : reader.at]
    data = reader.content[-(-reader.at // _ALIGNMENT) * _ALIGNMENT :]
    extra = [
        (f"{architecture}.{key}", 4, struct.pack("<I", number)) for key, number in (numbers or {}).items()
    ]
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, count + len(extra))
    for key, kind, value in (*pairs, *extra):
        prefix, _, rest = key.partition(".")
        head += _text(f"{architecture}.{rest}" if prefix == old else key) + struct.pack("<I", kind) + value
    head += infos
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + data)
    return path
