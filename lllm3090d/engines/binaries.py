"""The files that a build computes with: which they are, whether they are still the same, and a digest of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from lllm3090d.engines.builds import SYSTEM_LIBRARY_DIRS
from lllm3090d.engines.capabilities import Build
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.store import Store

FIT_PARAMS_NAME = "llama-fit-params"
SCHEME = "e1"  # part of the digest: another scheme gives other digests
DIGEST_BYTES = 20
READ_BYTES = 1 << 20
# In a directory that it shares with the rest of the system, by these names.
ENGINE_LIBRARIES = ("libllama*.so*", "libggml*.so*", "libmtmd*.so*")
# Private directories of distributions below a library directory, with their backends.
PRIVATE_DIRECTORIES = ("llama", "llama.cpp", "ggml", "ggml/*")
GPU_LIBRARIES = ("cuda", "vulkan", "hip", "sycl", "metal", "musa", "opencl", "cann")

Stamp = tuple[str, int, int, int]


def fit_params(build: Build) -> Path | None:
    """The program beside the server that projects memory; None where there is none."""
    for directory in (build.server.parent, Path(os.path.realpath(build.server)).parent):
        program = directory / FIT_PARAMS_NAME
        if os.access(program, os.X_OK) and program.is_file():
            return program
    return None


def libraries(build: Build) -> frozenset[Path]:
    """Names of the libraries that the server loads from its own directories, or from those of a distribution."""
    found: set[Path] = set()
    own = Path(os.path.realpath(build.server)).parent
    for directory in {build.server.parent, own, *build.library_path}:
        if not _is_shared(directory):
            found.update(_matching(directory, ("*.so*",)))
    for directory in _shared_library_directories(own):
        found.update(_matching(directory, ENGINE_LIBRARIES))
        for below in PRIVATE_DIRECTORIES:
            found.update(_matching(directory, (f"{below}/*.so*",)))
    return frozenset(found)


def fingerprint(build: Build) -> tuple[Stamp, ...]:
    """Path, size in bytes, mtime in ns and inode of the executables and of their libraries.

    An engine replaced under the same name has another fingerprint. A file that vanishes is left out.
    """
    program = fit_params(build)
    files = {build.server, *libraries(build)} | ({program} if program else set())
    rows = []
    for file in sorted(files):
        with contextlib.suppress(FileNotFoundError):
            rows.append(_stamp(file))
    return tuple(rows)


def has_gpu_library(build: Build) -> bool:
    """A backend for a GPU lies beside the server, so that without a device something may be missing."""
    return any(
        library.name.startswith(f"libggml-{kind}") for library in libraries(build) for kind in GPU_LIBRARIES
    )


def binaries_digest(build: Build, store: Store) -> str:
    """Digest of the contents of the server and its libraries; reads what the store does not know.

    Names and places are no part of it, so a build that was moved keeps it.

    Args:
        build: the build.
        store: remembers the digest of each file while its path, size, mtime and inode are the same.

    Raises:
        LlmError: ENGINE_UNUSABLE where a file cannot be read.
    """
    parts = {_file_digest(file, store) for file in libraries(build)}
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"lllm3090")
    whole.update(_file_digest(build.server, store).encode())
    for part in sorted(parts):
        whole.update(part.encode())
    return f"{SCHEME}-{whole.hexdigest()}"


def _file_digest(file: Path, store: Store) -> str:
    try:
        before = _stamp(file)
        for (known,) in store.rows(_SELECT, _key(before)):
            return str(known)
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        with file.open("rb") as content:
            while block := content.read(READ_BYTES):
                digest.update(block)
        unchanged = _stamp(file) == before
    except OSError as error:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"{file} of the engine cannot be read: {error.strerror}.",
            hint="Correct its permissions, or install the build again.",
            path=str(file),
        ) from error
    text = digest.hexdigest()
    if unchanged:
        store.change(lambda connection: _keep(connection, before, text))
    return text


_SELECT = "SELECT digest FROM engine_files WHERE path = ? AND size_bytes = ? AND mtime_ns = ? AND inode = ?"


def _keep(connection: sqlite3.Connection, stamp: Stamp, digest: str) -> None:
    connection.execute("INSERT OR REPLACE INTO engine_files VALUES (?, ?, ?, ?, ?)", (*_key(stamp), digest))


def _key(stamp: Stamp) -> tuple[bytes, int, int, int]:
    path, size_bytes, mtime_ns, inode = stamp
    # An inode of 64 bits as SQLite keeps it.
    return os.fsencode(path), size_bytes, mtime_ns, inode - (1 << 64) if inode >= 1 << 63 else inode


def _stamp(file: Path) -> Stamp:
    found = file.stat()
    return str(file), found.st_size, found.st_mtime_ns, found.st_ino


def _is_shared(directory: Path) -> bool:
    """Programs or libraries of the whole system lie there."""
    return str(directory) in SYSTEM_LIBRARY_DIRS or (
        directory.name in ("bin", "sbin")
        and directory.parent
        in (
            Path("/"),
            Path("/usr"),
            Path("/usr/local"),
        )
    )


def _shared_library_directories(own: Path) -> Iterator[Path]:
    """Where a distribution puts the libraries of a program in ``/usr/bin``; nothing for a private build."""
    if _is_shared(own):
        yield from (own.parent / "lib", own.parent / "lib64")
        yield from own.parent.glob("lib/*-linux-gnu*")


def _matching(directory: Path, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from directory.glob(pattern)  # nothing from a directory that may not be listed
