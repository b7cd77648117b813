"""Library: the checkpoints below the models directory, what accompanies them, and names for them.

One directory for each model; the directory's path below the models directory is the name. Where a directory
holds several checkpoints, and for files in the models directory itself, the file's stem is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from lllm3090d.checkpoints.classify import LOADABLE, Digest, DraftMethod, Kind, digest, kind_by_name
from lllm3090d.checkpoints.cursor import FileStamp, printable
from lllm3090d.checkpoints.header import read_header
from lllm3090d.checkpoints.pairing import Candidate, Pairing
from lllm3090d.checkpoints.patience import LIMIT_S, HangsError, Patience
from lllm3090d.checkpoints.resolve import resolve
from lllm3090d.checkpoints.shards import Part, check_parts, complete_shards, shard_name
from lllm3090d.checkpoints.walk import SUFFIX, DirectoryStamp, Folder, Skipped, Walk, unchanged, walk
from lllm3090d.errors import ErrorCode, LlmError

__all__ = ["Checkpoint", "Companion", "Headers", "Library", "Skipped", "Survey", "problem_of", "resolve"]


T = TypeVar("T")
HEADERS_AT_ONCE = 16  # after which a survey has got on


class Headers(Protocol):
    """Where a library gets its digests from; :class:`HeaderCache` is one that remembers."""

    def digests(self, files: Mapping[Path, FileStamp]) -> Mapping[Path, Digest | LlmError]:
        """The digest of each file, or why it cannot be read."""

    def prune(self, root: Path, present: Mapping[Path, FileStamp]) -> None:
        """Forget what is below ``root`` and not present."""


class PlainHeaders:
    """Reads every header each time."""

    def digests(self, files: Mapping[Path, FileStamp]) -> Mapping[Path, Digest | LlmError]:
        """As :meth:`Headers.digests`."""
        found: dict[Path, Digest | LlmError] = {}
        for path in files:
            try:
                found[path] = digest(read_header(path))
            except LlmError as error:
                found[path] = error
        return found

    def prune(self, root: Path, present: Mapping[Path, FileStamp]) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class Companion:
    """What is no model by itself: a projector, drafter, adapter or the like.

    Attributes:
        path: the first file, which is what the engine gets.
        shards: all files that are there, in order.
        size_bytes: of all of them.
        kind: what it is.
        method: how a drafter drafts, else None.
        problem: why it cannot be used.
    """

    path: Path
    shards: tuple[Path, ...]
    size_bytes: int
    kind: Kind
    method: DraftMethod | None = None
    problem: LlmError | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        name: unique in the library, printable.
        path: the first shard, which is what the engine gets.
        shards: all files that are there, in order.
        size_bytes: of all of them.
        kind: model, embedding or rerank.
        projector: lets it see or hear.
        drafter: guesses tokens for it.
        problem: why it cannot be loaded, as far as the headers of its files tell by themselves:
            INCOMPLETE_CHECKPOINT or BAD_CHECKPOINT.
        modified_ns: when its first file was last changed, nanoseconds since 1970; 0 where it was not looked at.
    """

    name: str
    path: Path
    shards: tuple[Path, ...]
    size_bytes: int
    kind: Kind = Kind.MODEL
    projector: Companion | None = None
    drafter: Companion | None = None
    problem: LlmError | None = field(default=None, compare=False)
    modified_ns: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Survey:
    """What a scan found.

    Attributes:
        checkpoints: by name.
        skipped: what had to be left out.
        companions: everything else, by path; those that no checkpoint has too.
        directories: all that were looked into.
        linked: the model files that are links.
    """

    checkpoints: tuple[Checkpoint, ...]
    skipped: tuple[Skipped, ...]
    companions: tuple[Companion, ...] = ()
    directories: tuple[DirectoryStamp, ...] = field(default=(), compare=False, repr=False)
    linked: Mapping[Path, FileStamp] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class _Group:
    """The files of one checkpoint or companion before it has its final name."""

    folder: tuple[str, ...]  # below the models directory
    stem: str
    shards: tuple[Path, ...]
    size_bytes: int
    kind: Kind
    method: DraftMethod | None
    candidate: Candidate | None  # None when its first file cannot be read
    problem: LlmError | None
    modified_ns: int

    def companion(self) -> Companion:
        return Companion(self.shards[0], self.shards, self.size_bytes, self.kind, self.method, self.problem)


class Library:
    """The models below one directory; calls block for the disk. Thread-safe.

    Args:
        models_dir: where the models are.
        aliases: short name -> name of a model.
        headers: where digests come from; None reads each file each time.
        changes: a number that is another one after anything below ``models_dir`` has changed, or None while
            nobody watches it. What a scan found is kept only while somebody does.
        limit_s: how long a disk may do nothing, before it counts as gone.
    """

    def __init__(
        self,
        models_dir: Path,
        aliases: Mapping[str, str],
        headers: Headers | None = None,
        changes: Callable[[], int | None] = lambda: None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.models_dir = models_dir
        self.aliases = aliases
        self._headers = headers or PlainHeaders()
        self._changes = changes
        self._kept: tuple[int, Survey] | None = None
        self._patience: Patience[Survey] = Patience(limit_s)

    def scan(self) -> tuple[Checkpoint, ...]:
        """The checkpoints, by name; empty when there are none.

        Raises:
            LlmError: MODELS_DIR_UNREADABLE.
        """
        return self.survey().checkpoints

    def survey(self) -> Survey:
        """The checkpoints, their companions and what was left out. Raises as :meth:`scan`."""
        try:
            return self._patience.do(self._surveyed)
        except HangsError as error:
            raise LlmError(
                ErrorCode.MODELS_DIR_UNREADABLE,
                f"The models directory {printable(self.models_dir)} cannot be read: {error.strerror}.",
                hint="See whether its disk or network mount is there (findmnt, journalctl -k); models that run go on.",
                path=printable(self.models_dir),
            ) from error

    def _surveyed(self, get_on: Callable[[], None]) -> Survey:
        before = self._changes()
        kept = self._kept
        if kept is not None and kept[0] == before and _holds(kept[1]):
            return kept[1]
        survey = self._look(get_on)
        # What changed during the scan may or may not be in it.
        self._kept = (before, survey) if before is not None and self._changes() == before else None
        return survey

    def resolve(self, name: str) -> Checkpoint:
        """Find the checkpoint that is meant. Raises as :meth:`scan` and :func:`resolve`."""
        return resolve(name, self.scan(), self.aliases, models_dir=self.models_dir)

    def _look(self, get_on: Callable[[], None]) -> Survey:
        found = walk(self.models_dir, lambda _: get_on())
        files = {path: stamp for folder in found.folders for path, stamp in folder.files.items()}
        digests: dict[Path, Digest | LlmError] = {}
        for some in batched(files.items(), HEADERS_AT_ONCE):
            digests |= self._headers.digests(dict(some))
            get_on()
        if files:  # none at all is rather a disk that is not mounted than a library thrown away
            self._headers.prune(self.models_dir, files)
        groups = [group for folder in found.folders for group in _groups(folder, digests)]
        checkpoints = sorted(_named(found, groups), key=lambda checkpoint: checkpoint.name)
        companions = sorted(
            (group.companion() for group in groups if group.kind not in LOADABLE), key=lambda item: item.path
        )
        return Survey(
            tuple(checkpoints),
            tuple(found.skipped),
            tuple(companions),
            tuple(found.directories),
            {path: files[path] for path in found.linked},
        )


def batched(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """The items in order, so many together."""
    iterator = iter(items)
    while batch := tuple(islice(iterator, size)):
        yield batch


def _holds(survey: Survey) -> bool:
    """The directories are as they were, which also tells of mounts and network shares that nobody reports."""
    if not unchanged(survey.directories):
        return False
    for path, stamp in survey.linked.items():
        try:
            if FileStamp.of(path.stat()) != stamp:
                return False
        except OSError:
            return False
    return True


def _groups(folder: Folder, digests: Mapping[Path, Digest | LlmError]) -> Iterator[_Group]:
    """The files of a directory, shards together."""
    together: dict[tuple[str, int], list[Path]] = {}
    for path in folder.files:  # sorted by name, and so are the numbers of the shards
        shard = shard_name(path.name)
        key = (shard.stem, shard.count) if shard else (path.name[: -len(SUFFIX)], 0)
        together.setdefault(key, []).append(path)
    for (stem, _), shards in together.items():
        first = digests[shards[0]]
        size_bytes = sum(folder.files[shard].size_bytes for shard in shards)
        candidate = None
        if isinstance(first, LlmError):
            kind, method = kind_by_name(shards[0].name)
        else:
            kind, method = first.kind, first.method
            candidate = Candidate(folder.parts, stem, first, size_bytes)
        problem = problem_of(shards, [digests[shard] for shard in shards])
        modified_ns = folder.files[shards[0]].mtime_ns
        yield _Group(
            folder.parts, stem, tuple(shards), size_bytes, kind, method, candidate, problem, modified_ns
        )


def problem_of(shards: Sequence[Path], digests: Sequence[Digest | LlmError]) -> LlmError | None:
    """Why the files of a checkpoint cannot be loaded together; None where nothing in their headers says so."""
    try:
        complete_shards(shards)
        parts: list[Part] = []
        for path, found in zip(shards, digests, strict=True):
            if isinstance(found, LlmError):
                return found
            if found.big_endian:
                return LlmError(
                    ErrorCode.BAD_CHECKPOINT,
                    f"{printable(path)} is for big-endian machines, which the engine does not read here.",
                    hint="Convert it again without --bigendian, or fetch the ordinary file.",
                    path=printable(path),
                )
            parts.append(
                Part(path, found.split_number, found.split_count, found.split_tensors, found.tensor_count)
            )
        check_parts(parts)
    except LlmError as error:
        return error
    return None


def _named(found: Walk, groups: list[_Group]) -> Iterator[Checkpoint]:
    """Give each loadable group its name; where a name would occur twice, the path of the file is used."""
    loadable = [group for group in groups if group.kind in LOADABLE]
    pair = _pairing(groups)
    in_folder = Counter(group.folder for group in loadable)
    preferred = [
        Path(*group.folder)
        if group.folder and in_folder[group.folder] == 1
        else Path(*group.folder, group.stem)
        for group in loadable
    ]
    occurrences = Counter(map(printable, preferred))
    taken: set[str] = set()
    for group, wanted in zip(loadable, preferred, strict=True):
        name = printable(wanted)
        if occurrences[name] > 1:
            name = printable(Path(*group.folder, group.shards[0].name))
        if name in taken:
            found.skip(group.shards[0], f"has the same name as another model, {name}")
            continue
        taken.add(name)
        checkpoint = Checkpoint(
            name,
            group.shards[0],
            group.shards,
            group.size_bytes,
            group.kind,
            problem=group.problem,
            modified_ns=group.modified_ns,
        )
        yield replace(checkpoint, projector=pair(group, Kind.PROJECTOR), drafter=pair(group, Kind.DRAFTER))


def _pairing(groups: list[_Group]) -> Callable[[_Group, Kind], Companion | None]:
    """A function from a model to its companion of a kind."""
    sound = {id(group.candidate): group for group in groups if group.candidate and not group.problem}
    models = [group.candidate for group in groups if group.candidate and group.kind in LOADABLE]
    pairing = Pairing(models)
    companions = {
        kind: [group.candidate for group in sound.values() if group.candidate and group.kind is kind]
        for kind in (Kind.PROJECTOR, Kind.DRAFTER)
    }

    def pair(group: _Group, kind: Kind) -> Companion | None:
        if group.candidate is None:
            return None
        best = pairing.best(group.candidate, companions[kind])
        return sound[id(best)].companion() if best else None

    return pair
