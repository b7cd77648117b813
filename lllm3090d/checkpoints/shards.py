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


@dataclass(frozen=True, slots=True)
class Part:
    """What one file of a checkpoint says about itself.

    Attributes:
        path: the file.
        number: its number, from 0; -1 when it does not say.
        count: how many files there are, at least 1.
        claimed_tensors: how many tensors all of them hold together; -1 when it does not say.
        tensors: how many it holds.
    """

    path: Path
    number: int
    count: int
    claimed_tensors: int
    tensors: int


def check_split(headers: Sequence[GgufHeader]) -> None:
    """Check that the headers of all shards belong together, as the engine does when it loads them.

    Raises:
        LlmError: INCOMPLETE_CHECKPOINT naming the file that contradicts the others.
    """
    parts: list[Part] = []
    for header in headers:
        keys = Keys(header)
        count = max(1, keys.number("split.count", 1))
        number = keys.number("split.no", None if len(headers) > 1 else 0)
        claimed = -1 if keys.value("split.tensors.count") is None else keys.number("split.tensors.count")
        parts.append(Part(header.path, number, count, claimed, len(header.tensors)))
    check_parts(parts)


def check_parts(parts: Sequence[Part]) -> None:
    """Check that all files of a checkpoint, in the order of their names, belong together.

    Raises:
        LlmError: INCOMPLETE_CHECKPOINT naming the file that contradicts the others.
    """
    first = parts[0]
    name = shard_name(first.path.name)
    by_name = f"one of {name.count} by its name" if name else "not named like one of several"
    expected = name.count if name else 1
    for index, part in enumerate(parts):
        if part.count != expected:
            reason = f"it is one of {part.count} files by its header, but {by_name}"
            _fail(part.path, f"{reason}; the engine finds them by name")
        if part.number != index and (expected > 1 or part.number > 0):
            own = part.number if part.number >= 0 else "none"
            _fail(part.path, f"its number (from 0) is {own} by its header, but {index} by its name")
    tensors = sum(part.tensors for part in parts)
    if first.claimed_tensors not in (-1, tensors):
        _fail(
            first.path,
            f"it claims {first.claimed_tensors} tensors in all its files, but they hold {tensors}",
        )


def _fail(file: Path, reason: str) -> NoReturn:
    path = printable(file)
    raise LlmError(
        ErrorCode.INCOMPLETE_CHECKPOINT,
        f"{path} does not belong to a whole model: {reason}.",
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
