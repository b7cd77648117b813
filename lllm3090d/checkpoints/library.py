"""Library: the checkpoints below the models directory, and names for them.

One directory for each model; the directory's path below the models directory is the name. Where a directory
holds several checkpoints, and for files in the models directory itself, the file's stem is added.
"""

from __future__ import annotations

import functools
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lllm3090d.checkpoints import names
from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.header import read_header
from lllm3090d.checkpoints.shards import shard_name
from lllm3090d.errors import ErrorCode, LlmError

MAX_DEPTH = 4  # directories below the models directory
MAX_DIRECTORIES = 10_000  # ends a walk through links that multiply
SUFFIX = ".gguf"
PARTIAL_SUFFIXES = frozenset({".part", ".incomplete", ".tmp", ".download"})
PROJECTOR_PREFIX = "mmproj"
PROJECTOR_ARCHITECTURE = "clip"
# ``general.type`` of GGUF files that are not models by themselves.
OTHER_TYPES = frozenset({"mmproj", "adapter", "imatrix"})

LIST_HINT = "`lllm3090ctl models` lists the models there are."
_NAMES_SHOWN = 10


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        name: unique in the library, printable.
        path: the first shard, which is what the engine gets.
        shards: all files that are there, in order.
        size_bytes: of all of them.
    """

    name: str
    path: Path
    shards: tuple[Path, ...]
    size_bytes: int


@dataclass(frozen=True)
class Skipped:
    """Something below the models directory that could not be looked at, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Survey:
    """What a scan found: checkpoints by name, and what had to be left out."""

    checkpoints: tuple[Checkpoint, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class _Group:
    """The files of one checkpoint before it has its final name."""

    folder: tuple[str, ...]  # below the models directory
    stem: str
    shards: tuple[Path, ...]
    size_bytes: int


@dataclass
class _Walk:
    """The state of one scan."""

    skipped: list[Skipped] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)
    directories: int = 0

    def skip(self, path: Path, reason: str) -> None:
        self.skipped.append(Skipped(path, reason))


class Library:
    """The models below one directory. Nothing is kept between calls; calls block for the disk.

    Args:
        models_dir: where the models are.
        aliases: short name -> name of a model.
    """

    def __init__(self, models_dir: Path, aliases: Mapping[str, str]) -> None:
        self.models_dir = models_dir
        self.aliases = aliases

    def scan(self) -> tuple[Checkpoint, ...]:
        """The checkpoints, by name; empty when there are none.

        Raises:
            LlmError: MODELS_DIR_UNREADABLE.
        """
        return self.survey().checkpoints

    def survey(self) -> Survey:
        """The checkpoints and what was left out. Raises as :meth:`scan`."""
        walk = _Walk()
        try:
            entries = _entries(self.models_dir)
            status = self.models_dir.stat()
        except OSError as error:
            raise LlmError(
                ErrorCode.MODELS_DIR_UNREADABLE,
                f"The models directory {printable(self.models_dir)} cannot be read: {error.strerror}.",
                hint="Create it or correct its permissions, or set models_dir (LLLM3090_MODELS_DIR) to where"
                " the models are.",
                path=printable(self.models_dir),
            ) from error
        _visit(walk, entries, (), frozenset({(status.st_dev, status.st_ino)}))
        checkpoints = sorted(_named(walk), key=lambda checkpoint: checkpoint.name)
        return Survey(tuple(checkpoints), tuple(walk.skipped))

    def resolve(self, name: str) -> Checkpoint:
        """Scan and find the checkpoint that is meant. Raises as :meth:`scan` and :func:`resolve`."""
        return resolve(name, self.scan(), self.aliases, models_dir=self.models_dir)


def resolve(
    name: str,
    checkpoints: Sequence[Checkpoint],
    aliases: Mapping[str, str],
    *,
    models_dir: Path | None = None,
) -> Checkpoint:
    """Find the checkpoint that is meant: exact name, alias, exact but for case, then unambiguous parts.

    Args:
        name: what was asked for; the ending ``.gguf`` may be there.
        checkpoints: what there is.
        aliases: short name -> name (or parts of it).
        models_dir: for the hint when there are no checkpoints.

    Raises:
        LlmError: NO_MODELS; UNKNOWN_MODEL with close matches in ``details["close"]``; AMBIGUOUS_MODEL with
            ``details["candidates"]``. A bad alias is named in ``details["alias"]``.
    """
    if not checkpoints:
        place = printable(models_dir) if models_dir else "models_dir (~/models unless set)"
        raise LlmError(
            ErrorCode.NO_MODELS,
            f"There are no models, so {printable(name)!r} cannot be found.",
            hint=f"Put each model, as GGUF, into a directory of its own below {place}.",
            name=printable(name),
        )
    by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
    if name in by_name:
        return by_name[name]
    if name in aliases:
        return _resolve_alias(name, checkpoints, aliases[name])
    spellings = {names.fold(name), names.fold(name).removesuffix(SUFFIX)}
    found = [known for known in by_name if names.fold(known) in spellings]
    if not found:
        for alias, target in aliases.items():
            if names.fold(alias) in spellings:
                return _resolve_alias(alias, checkpoints, target)
        found = _by_parts(name, list(by_name))
    if len(found) == 1:
        return by_name[found[0]]
    raise _ambiguous(name, found) if found else _unknown(name, [*by_name, *aliases])


def _by_parts(name: str, known: Sequence[str]) -> list[str]:
    """The names that are meant; one that fits exactly goes before those that only begin like it."""
    query = name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
    same = [candidate for candidate in known if names.same_pieces(query, candidate)]
    if len(same) == 1:
        return same
    fits = {candidate: names.fit(query, candidate) for candidate in known}
    exact = [candidate for candidate, fit in fits.items() if fit is names.Fit.EXACT]
    if len(exact) == 1:
        return exact
    return sorted(candidate for candidate, fit in fits.items() if fit is not names.Fit.NONE)


def _resolve_alias(alias: str, checkpoints: Sequence[Checkpoint], target: str) -> Checkpoint:
    try:
        return resolve(target, checkpoints, {})
    except LlmError as error:
        raise LlmError(
            error.code,
            f"The alias {printable(alias)!r} points to {printable(target)!r}. {error.message}",
            hint="Correct `aliases` in config.toml (LLLM3090_ALIASES).",
            **{**error.details, "alias": printable(alias), "target": printable(target)},
        ) from error


def _ambiguous(name: str, candidates: Sequence[str]) -> LlmError:
    more = f" and {len(candidates) - _NAMES_SHOWN} more" if len(candidates) > _NAMES_SHOWN else ""
    return LlmError(
        ErrorCode.AMBIGUOUS_MODEL,
        f"{printable(name)!r} fits {len(candidates)} models: {', '.join(candidates[:_NAMES_SHOWN])}{more}.",
        hint="Give more of the name, or all of it.",
        name=printable(name),
        candidates=list(candidates),
    )


def _unknown(name: str, known: Sequence[str]) -> LlmError:
    shown = printable(name[: names.MAX_QUERY_CHARACTERS])
    close = names.suggestions(name, known)
    meant = f" Close to it: {', '.join(map(printable, close))}." if close else ""
    return LlmError(
        ErrorCode.UNKNOWN_MODEL,
        f"There is no model {shown!r}.{meant}",
        hint=LIST_HINT,
        name=shown,
        close=[printable(match) for match in close],
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _visit(
    walk: _Walk,
    entries: Sequence[os.DirEntry[str]],
    folder: tuple[str, ...],
    ancestors: frozenset[tuple[int, int]],
) -> None:
    """Collect the checkpoints of a directory and of those below it; follows links, but not in circles."""
    files: dict[Path, os.stat_result] = {}
    for entry in entries:
        path = Path(entry.path)
        is_model_file = entry.name.lower().endswith(SUFFIX)
        if entry.name.startswith(".") or _is_partial(entry.name):
            continue
        try:
            status = entry.stat()
        except OSError as error:
            if is_model_file or not entry.is_symlink():
                walk.skip(path, f"cannot be examined: {error.strerror}")
            continue
        if stat.S_ISDIR(status.st_mode):
            _descend(walk, path, (*folder, entry.name), ancestors, (status.st_dev, status.st_ino))
        elif is_model_file and stat.S_ISREG(status.st_mode):
            files[path] = status
        elif is_model_file:
            walk.skip(path, "is no regular file")
    walk.groups.extend(_groups(folder, files))


def _descend(
    walk: _Walk,
    path: Path,
    folder: tuple[str, ...],
    ancestors: frozenset[tuple[int, int]],
    identity: tuple[int, int],
) -> None:
    walk.directories += 1
    if identity in ancestors:
        walk.skip(path, "leads back to a directory above it")
    elif len(folder) > MAX_DEPTH:
        walk.skip(path, f"is more than {MAX_DEPTH} directories deep")
    elif walk.directories > MAX_DIRECTORIES:
        if walk.directories == MAX_DIRECTORIES + 1:
            walk.skip(path, f"and the rest are left out after {MAX_DIRECTORIES} directories")
    else:
        try:
            entries = _entries(path)
        except OSError as error:
            walk.skip(path, f"cannot be read: {error.strerror}")
            return
        _visit(walk, entries, folder, ancestors | {identity})


def _is_partial(file_name: str) -> bool:
    lower = file_name.lower()
    return Path(lower.removesuffix(SUFFIX)).suffix in PARTIAL_SUFFIXES


def _groups(folder: tuple[str, ...], files: Mapping[Path, os.stat_result]) -> Iterator[_Group]:
    """Shards belong together; projectors, adapters and the like are left out."""
    together: dict[tuple[str, int], list[Path]] = {}
    for path in files:  # sorted by name, and so are the numbers of the shards
        shard = shard_name(path.name)
        key = (shard.stem, shard.count) if shard else (path.name[: -len(SUFFIX)], 0)
        together.setdefault(key, []).append(path)
    for (stem, _), shards in together.items():
        status = files[shards[0]]
        if not _is_model(shards[0], status.st_size, status.st_mtime_ns, status.st_ino):
            continue
        size_bytes = sum(files[shard].st_size for shard in shards)
        yield _Group(folder, stem, tuple(shards), size_bytes)


@functools.lru_cache(maxsize=4096)
def _is_model(path: Path, _size: int, _mtime_ns: int, _inode: int) -> bool:
    """By the header; the arguments after the path make the cache forget a file that changed."""
    if path.name.lower().startswith(PROJECTOR_PREFIX):
        return False
    try:
        general = read_header(path).metadata
    except LlmError:
        return True  # it is meant to be one: loading it says what is wrong with it
    return (
        general.get("general.architecture") != PROJECTOR_ARCHITECTURE
        and general.get("general.type") not in OTHER_TYPES
    )


def _named(walk: _Walk) -> Iterator[Checkpoint]:
    """Give each group its name; where a name would occur twice, the path of the file is used."""
    in_folder = Counter(group.folder for group in walk.groups)
    preferred = [
        Path(*group.folder)
        if group.folder and in_folder[group.folder] == 1
        else Path(*group.folder, group.stem)
        for group in walk.groups
    ]
    occurrences = Counter(map(printable, preferred))
    taken: set[str] = set()
    for group, wanted in zip(walk.groups, preferred, strict=True):
        name = printable(wanted)
        if occurrences[name] > 1:
            name = printable(Path(*group.folder, group.shards[0].name))
        if name in taken:
            walk.skip(group.shards[0], f"has the same name as another model, {name}")
            continue
        taken.add(name)
        yield Checkpoint(name, group.shards[0], group.shards, group.size_bytes)
