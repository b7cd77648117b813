"""Telling checkpoints apart without reading them whole: a digest of sizes, headers and samples of the data.

Two files with the same fingerprint are the same for every purpose here, but for damage between the samples; it is no
checksum. Names and places are not part of it, so a checkpoint that was moved or renamed keeps it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lllm3090d.checkpoints.cursor import FileStamp, refusal
from lllm3090d.checkpoints.header import GgufHeader, read_header

SCHEME = "s1"  # part of the result: another scheme gives other fingerprints
SAMPLE_BYTES = 64 << 10
SAMPLES = 24  # over the data of all files, the last bytes of each beside them
HEADER_SAMPLE_BYTES = 512 << 10  # at either end of a header; between them lies the vocabulary
_DIGEST_BYTES = 20


def fingerprint(shards: Sequence[Path], read: Callable[[Path], GgufHeader] = read_header) -> str:
    """The fingerprint of a checkpoint; reads about 3 MiB, of many shards up to 1.1 MiB each.

    Args:
        shards: all its files in order.
        read: where headers come from.

    Raises:
        LlmError: BAD_CHECKPOINT when a file cannot be read or changes meanwhile.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"lllm3090")
    each = max(1, SAMPLES // len(shards))
    for path in shards:
        header = read(path)
        digest.update(header.file_bytes.to_bytes(8, "little"))
        digest.update(header.data_offset.to_bytes(8, "little"))
        for block in _blocks(path, header, each):
            digest.update(block)
    return f"{SCHEME}-{digest.hexdigest()}"


def _blocks(path: Path, header: GgufHeader, samples: int) -> Iterator[bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        hint = "Check that the file exists and that its permissions allow reading."
        raise refusal(path, f"it cannot be opened: {error.strerror}", hint) from error
    try:
        for start, end in _spans(header.data_offset, header.file_bytes, samples):
            yield os.pread(descriptor, end - start, start)
        if header.stamp is not None and FileStamp.of(os.fstat(descriptor)) != header.stamp:
            raise refusal(path, "it changed while it was read", "Try again when it is complete.")
    except OSError as error:
        raise refusal(path, f"it cannot be read: {error.strerror}", "Check the disk.") from error
    finally:
        os.close(descriptor)


def _spans(data_offset: int, file_bytes: int, samples: int) -> Iterator[tuple[int, int]]:
    """Both ends of the header, then samples evenly over the data, the last one at its end."""
    yield 0, min(HEADER_SAMPLE_BYTES, data_offset)
    if data_offset > HEADER_SAMPLE_BYTES:
        yield max(HEADER_SAMPLE_BYTES, data_offset - HEADER_SAMPLE_BYTES), data_offset
    data_bytes = file_bytes - data_offset
    if data_bytes <= samples * SAMPLE_BYTES:
        yield data_offset, file_bytes
        return
    for index in range(samples):
        start = data_offset + (data_bytes - SAMPLE_BYTES) * index // max(1, samples - 1)
        yield start, start + SAMPLE_BYTES
