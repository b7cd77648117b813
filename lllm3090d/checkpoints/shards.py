"""Split checkpoints: ``NAME-00001-of-00003.gguf`` and so on, as ``llama-gguf-split`` names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.header import GgufHeader
from lllm3090d.checkpoints.metadata import Keys
from lllm3090d.errors import ErrorCode, LlmError

MAX_SHARDS = 1000  # published models have at most a few dozen
_NAMES_SHOWN = 5
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)


@dataclass(frozen=True, slots=True)
class ShardName:
    """A file name taken apart: shard ``number`` (from 1) of ``count``."""

    stem: str
    number: int
    count: int


def shard_name(file_name: str) -> ShardName | None:
    """Take a file name apart; None when it is not that of a shard."""
    match = _SHARD.fullmatch(file_name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_SHARDS:
        return None
    return ShardName(match["stem"], number, count)


def complete_shards(shards: Sequence[Path]) -> tuple[Path, ...]:
    """All files of a checkpoint in order, by the name of the first one given.

    Raises:
        LlmError: INCOMPLETE_CHECKPOINT naming the missing files.
    """
    name = shard_name(shards[0].name)
    if name is None:
        return tuple(shards)
    folder = shards[0].parent
    expected = tuple(
        folder / f"{name.stem}-{number:05d}-of-{name.count:05d}.gguf" for number in range(1, name.count + 1)
    )
    missing = [printable(path.relative_to(folder)) for path in expected if not _exists(path)]
    if missing:
        shown = ", ".join(missing[:_NAMES_SHOWN])
        rest = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
        stem = printable(name.stem)
        raise LlmError(
            ErrorCode.INCOMPLETE_CHECKPOINT,
            f"{stem} consists of {name.count} files, of which {len(missing)} are missing: {shown}{rest}.",
            hint=f"Fetch what is missing into {printable(folder)}.",
            missing=missing,
            directory=printable(folder),
        )
    return expected


def check_split(headers: Sequence[GgufHeader]) -> None:
    """Check that the headers of all shards belong together, as the engine does when it loads them.

    Raises:
        LlmError: BAD_CHECKPOINT.
    """
    first = headers[0]
    count = max(1, Keys(first).number("split.count", 1))
    name = shard_name(first.path.name)
    if count != (name.count if name else 1):
        by_name = f"one of {name.count} by its name" if name else "not named like one of several"
        _fail(
            first, f"it is one of {count} files by its header, but {by_name}; the engine finds them by name"
        )
    tensors = 0
    for index, header in enumerate(headers):
        tensors += len(header.tensors)
        number = Keys(header).number("split.no", None if count > 1 else 0)
        if number != index:
            _fail(header, f"it is number {number} (from 0) by its header, but {index} by its name")
    claimed = Keys(first).number("split.tensors.count", tensors)
    if claimed != tensors:
        _fail(first, f"it claims {claimed} tensors in all its files, but they hold {tensors}")


def _fail(header: GgufHeader, reason: str) -> NoReturn:
    path = printable(header.path)
    raise LlmError(
        ErrorCode.BAD_CHECKPOINT,
        f"{path} is not a usable model file: {reason}.",
        hint="Give the files the names they were published with, or fetch them again.",
        path=path,
    )


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it is there but cannot be looked at; opening it will say why
    return True
