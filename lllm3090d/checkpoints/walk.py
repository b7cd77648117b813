"""The GGUF files below a directory: recursive to a depth, through links but not in circles."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lllm3090d.checkpoints.cursor import FileStamp, printable
from lllm3090d.errors import ErrorCode, LlmError

MAX_DEPTH = 4  # directories below the models directory
MAX_DIRECTORIES = 10_000  # ends a walk through links that multiply
SUFFIX = ".gguf"
PARTIAL_SUFFIXES = frozenset(
    {".part", ".partial", ".incomplete", ".tmp", ".download", ".crdownload", ".unfinished", ".!qb"}
)
# Written beside a file of its full size while its download goes on.
DOWNLOAD_MARKERS = (".aria2", ".st")


@dataclass(frozen=True)
class Skipped:
    """Something below the models directory that could not be looked at, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class DirectoryStamp:
    """What tells one state of a directory's list from another."""

    path: Path
    device: int
    inode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Folder:
    """One directory with its model files, by name.

    Attributes:
        parts: its path below the models directory.
        files: path -> state.
    """

    parts: tuple[str, ...]
    files: dict[Path, FileStamp]


@dataclass
class Walk:
    """What a walk found; the lists grow while it goes on.

    Attributes:
        folders: those with model files.
        skipped: what was left out.
        directories: all that were looked into, with the state they had before.
        linked: the files that are links, which may change without their directory.
        enter: called with each directory before its entries are listed, to watch it without a gap.
    """

    folders: list[Folder] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    directories: list[DirectoryStamp] = field(default_factory=list)
    linked: list[Path] = field(default_factory=list)
    enter: Callable[[Path], None] = lambda _: None
    _seen: int = 0

    def skip(self, path: Path, reason: str) -> None:
        """Leave something out."""
        self.skipped.append(Skipped(path, reason))

    def entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """The entries of a directory by name. Raises OSError."""
        self.enter(folder)
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)

    def descend(
        self,
        path: Path,
        parts: tuple[str, ...],
        ancestors: frozenset[tuple[int, int]],
        status: os.stat_result,
    ) -> None:
        """Look into a directory unless a limit forbids."""
        self._seen += 1
        if (status.st_dev, status.st_ino) in ancestors:
            self.skip(path, "leads back to a directory above it")
        elif len(parts) > MAX_DEPTH:
            self.skip(path, f"is more than {MAX_DEPTH} directories deep")
        elif self._seen > MAX_DIRECTORIES:
            if self._seen == MAX_DIRECTORIES + 1:
                self.skip(path, f"and the rest are left out after {MAX_DIRECTORIES} directories")
        else:
            try:
                entries = self.entries(path)
            except OSError as error:
                self.skip(path, f"cannot be read: {error.strerror}")
                return
            self.visit(path, entries, parts, ancestors, status)

    def visit(
        self,
        path: Path,
        entries: Sequence[os.DirEntry[str]],
        parts: tuple[str, ...],
        ancestors: frozenset[tuple[int, int]],
        status: os.stat_result,
    ) -> None:
        """Collect the model files of a directory and of those below it."""
        self.directories.append(DirectoryStamp(path, status.st_dev, status.st_ino, status.st_mtime_ns))
        above = ancestors | {(status.st_dev, status.st_ino)}
        files: dict[Path, FileStamp] = {}
        names = {entry.name for entry in entries}
        for entry in entries:
            is_model_file = entry.name.lower().endswith(SUFFIX)
            if entry.name.startswith(".") or _is_partial(entry.name, names):
                continue
            # Nothing else can be a directory, and a library may hold many other files.
            if not is_model_file and entry.is_file(follow_symlinks=False):
                continue
            try:
                found = entry.stat()
            except OSError as error:
                if is_model_file or not entry.is_symlink():
                    self.skip(Path(entry.path), f"cannot be examined: {error.strerror}")
                continue
            if stat.S_ISDIR(found.st_mode):
                self.descend(Path(entry.path), (*parts, entry.name), above, found)
            elif is_model_file and stat.S_ISREG(found.st_mode):
                files[Path(entry.path)] = FileStamp.of(found)
                if entry.is_symlink():
                    self.linked.append(Path(entry.path))
            elif is_model_file:
                self.skip(Path(entry.path), "is no regular file")
        if files:
            self.folders.append(Folder(parts, files))


def walk(models_dir: Path, enter: Callable[[Path], None] = lambda _: None) -> Walk:
    """Walk through a directory; blocks for the disk.

    Args:
        models_dir: where to begin.
        enter: called with each directory before its entries are listed.

    Raises:
        LlmError: MODELS_DIR_UNREADABLE.
    """
    found = Walk(enter=enter)
    try:
        status = models_dir.stat()
        entries = found.entries(models_dir)
    except OSError as error:
        raise LlmError(
            ErrorCode.MODELS_DIR_UNREADABLE,
            f"The models directory {printable(models_dir)} cannot be read: {error.strerror}.",
            hint="Create it or correct its permissions, or set models_dir (LLLM3090_MODELS_DIR) to where"
            " the models are.",
            path=printable(models_dir),
        ) from error
    found.visit(models_dir, entries, (), frozenset(), status)
    return found


def unchanged(directories: Sequence[DirectoryStamp]) -> bool:
    """No entry was added to or taken from any of the directories, and none was replaced."""
    for known in directories:
        try:
            status = known.path.stat()
        except OSError:
            return False
        if (status.st_dev, status.st_ino, status.st_mtime_ns) != (known.device, known.inode, known.mtime_ns):
            return False
    return True


def _is_partial(file_name: str, names: set[str]) -> bool:
    lower = file_name.lower()
    ending = Path(lower.removesuffix(SUFFIX)).suffix
    return ending in PARTIAL_SUFFIXES or any(file_name + marker in names for marker in DOWNLOAD_MARKERS)
