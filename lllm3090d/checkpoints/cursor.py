"""Opening a model file and reading forward through its header, within limits.

Reading is by ``pread``, not by a memory map: a download that truncates a mapped file would kill the daemon
with SIGBUS.
"""

from __future__ import annotations

import enum
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lllm3090d.errors import ErrorCode, LlmError

MAX_HEADER_BYTES = 256 << 20  # vocabularies of 262,144 entries take 5 to 20 MiB
MAX_KEPT_BYTES = 4 << 20  # of all keys and kept values
MAX_SKIPPED_STRINGS = 1 << 22

INCOMPLETE_HINT = "The download is probably incomplete or damaged; fetch the file again."

_FIRST_READ_BYTES = 64 << 10
_READ_BYTES = 1 << 20


class ByteOrder(enum.StrEnum):
    """In which order a file keeps the bytes of its numbers; the values are those of ``sys.byteorder``."""

    LITTLE = "little"
    BIG = "big"


_U32 = {ByteOrder.LITTLE: struct.Struct("<I"), ByteOrder.BIG: struct.Struct(">I")}
_U64 = {ByteOrder.LITTLE: struct.Struct("<Q"), ByteOrder.BIG: struct.Struct(">Q")}
_U32_BYTES = 4
_U64_BYTES = 8


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one state of a file from another."""

    size_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """From ``stat`` or ``fstat``."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


def printable(text: str | os.PathLike[str]) -> str:
    """Text as it may be shown, stored as JSON and sent over D-Bus.

    Bytes of a path that are no UTF-8 and characters that would steer a terminal become escapes.
    """
    decoded = (
        os.fsencode(text).decode("utf-8", "backslashreplace") if isinstance(text, os.PathLike) else text
    )
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in decoded
    )


def quoted(text: str | os.PathLike[str]) -> str:
    """The same between quotes, for a sentence; unlike ``repr`` of it, what is an escape already stays as it is."""
    return f"'{printable(text)}'"


class Cursor:
    """Reads forward through a header; refuses to leave the file or the limit of a header.

    Attributes:
        offset: where the next byte is read.
        byte_order: of the numbers that follow; little until the version has told.
        stamp: the state of the file when it was opened.
    """

    def __init__(self, descriptor: int, path: Path, file_bytes: int) -> None:
        self._descriptor = descriptor
        self._path = path
        self.file_bytes = file_bytes
        self.stamp = FileStamp.of(os.fstat(descriptor))
        self.offset = 0
        self.byte_order = ByteOrder.LITTLE
        self._buffer = b""
        self._buffer_at = 0
        self._kept_bytes = 0
        self._skipped_strings = 0

    def fail(self, reason: str, *, offset: int | None = None, hint: str = INCOMPLETE_HINT) -> NoReturn:
        """Raise BAD_CHECKPOINT for this file at ``offset`` (default: here)."""
        at = self.offset if offset is None else offset
        raise LlmError(
            ErrorCode.BAD_CHECKPOINT,
            f"{printable(self._path)} is not a usable model file: at byte {at}: {reason}.",
            hint=hint,
            path=printable(self._path),
            offset=at,
        )

    def require(self, count: int, what: str) -> None:
        """Check that ``count`` more bytes exist and belong to a plausible header."""
        if count > self.file_bytes - self.offset:
            left = self.file_bytes - self.offset
            self.fail(f"the header is cut off: {what} needs {count} bytes and the file has {left} left")
        if self.offset + count > MAX_HEADER_BYTES:
            self.fail(f"{what} would make the header larger than {MAX_HEADER_BYTES} bytes, no model's is")

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes."""
        self.require(count, what)
        start = self._fill(count, what)
        self.offset += count
        return self._buffer[start : start + count]

    def skip(self, count: int, what: str) -> None:
        """Step over ``count`` bytes without reading them."""
        self.require(count, what)
        self.offset += count

    def skip_strings(self, count: int, what: str) -> None:
        """Step over ``count`` strings; the inner loop is what makes a large vocabulary cheap."""
        self._skipped_strings += count
        if self._skipped_strings > MAX_SKIPPED_STRINGS:
            self.fail(f"more than {MAX_SKIPPED_STRINGS} strings in the metadata, no model has as many")
        length_at = self.u64_layout.unpack_from
        while count:
            self.require(_U64_BYTES, what)
            start = position = self._fill(_U64_BYTES, what)
            buffer = self._buffer
            stepped = 1
            try:
                for stepped in range(1, count + 1):  # noqa: B007 - read behind the loop
                    position += _U64_BYTES + length_at(buffer, position)[0]
                stepped = count + 1
            except (struct.error, OverflowError):
                pass  # the next length lies behind the buffer, which is read or refused in the next round
            count -= stepped - 1
            self.skip(position - start, what)

    def window(self, at_most: int, what: str) -> tuple[bytes, int]:
        """A buffer and where the current offset is in it; ``at_most`` bytes follow, fewer at the file's end."""
        at = self._fill(min(at_most, self.file_bytes - self.offset), what)
        return self._buffer, at

    def changed(self) -> bool:
        """The file is no longer what it was when it was opened."""
        return FileStamp.of(os.fstat(self._descriptor)) != self.stamp

    def keep(self, count: int) -> None:
        """Count ``count`` bytes towards what is held in memory."""
        self._kept_bytes += count
        if self._kept_bytes > MAX_KEPT_BYTES:
            self.fail(
                f"more than {MAX_KEPT_BYTES} bytes of metadata beside the vocabulary, no model has as much"
            )

    @property
    def u64_layout(self) -> struct.Struct:
        """How an unsigned 64-bit number is stored."""
        return _U64[self.byte_order]

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit number."""
        number: int = _U32[self.byte_order].unpack(self.take(_U32_BYTES, what))[0]
        return number

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit number."""
        number: int = self.u64_layout.unpack(self.take(_U64_BYTES, what))[0]
        return number

    def name(self, limit_bytes: int, what: str) -> str:
        """The next string, which must be UTF-8 of at most ``limit_bytes``."""
        length = self.u64(f"the length of {what}")
        if length > limit_bytes:
            self.fail(f"{what} would be {length} bytes long, at most {limit_bytes} are allowed")
        self.keep(length)
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", offset=self.offset - length)

    def _fill(self, count: int, what: str) -> int:
        """Have ``count`` bytes at the current offset in the buffer; return where they start in it."""
        start = self.offset - self._buffer_at
        if start + count <= len(self._buffer):
            return start
        wanted = max(count, _READ_BYTES if self.offset else _FIRST_READ_BYTES)
        try:
            self._buffer = os.pread(self._descriptor, wanted, self.offset)
        except OSError as error:
            self.fail(
                f"{what} cannot be read: {error.strerror}", hint="Check the disk or the network file system."
            )
        self._buffer_at = self.offset
        if len(self._buffer) < count:  # pread of a regular file is short only at its end
            self.fail(f"the file was shortened while {what} was read")
        return 0


@contextmanager
def open_model_file(path: Path) -> Iterator[Cursor]:
    """Open a regular file for reading its header.

    Raises:
        LlmError: BAD_CHECKPOINT when it cannot be opened or is no regular file. Never blocks on a FIFO.
    """
    # Looked at before it is opened, because opening a device can have effects, and again afterwards, because
    # it may have been replaced. O_NONBLOCK keeps a FIFO from blocking in between.
    try:
        _require_regular(path, path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        hint = "Check that the file exists and that its permissions allow reading."
        raise refusal(path, f"it cannot be opened: {error.strerror}", hint) from error
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status.st_mode)
        yield Cursor(descriptor, path, status.st_size)
    finally:
        os.close(descriptor)


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    kind = kinds.get(stat.S_IFMT(mode), "no regular file")
    raise refusal(
        path, f"it is {kind}", "Move it out of the models directory or name the model file itself."
    )


def refusal(path: Path, reason: str, hint: str) -> LlmError:
    """BAD_CHECKPOINT for a file as a whole."""
    shown = printable(path)
    return LlmError(
        ErrorCode.BAD_CHECKPOINT,
        f"{shown} is not a usable model file: {reason}.",
        hint=hint,
        path=shown,
        offset=0,
    )
