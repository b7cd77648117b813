"""What ``setup`` has to do to each file, and what it leaves alone. Pure."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from lllm3090ctl.setup_files import File

FORMAT = 1


class Action(enum.StrEnum):
    """What is done to a file."""

    CREATE = "create"
    REPLACE = "replace"  # setup wrote it, and nobody has changed it since
    SAVE = "save"  # somebody else's: it is moved to a place that is told, then written
    SAME = "same"
    KEEP = "keep"  # the person has changed it, or put a link, or an entry of their own, there
    REMOVE = "remove"


class Found(NamedTuple):
    """What is at a place now: the digest of its content, and whether it is a symbolic link."""

    digest: str
    is_link: bool = False


class Step(NamedTuple):
    """What is done to one file; the content to write, if any."""

    path: Path
    action: Action
    content: bytes | None = None

    @property
    def changes(self) -> bool:
        """Whether the file is another one afterwards."""
        return self.action not in {Action.SAME, Action.KEEP}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What setup has done, so that it can tell its own files from a person's.

    Attributes:
        program: the daemon that the units start.
        build: of that installation, see :func:`lllm3090ctl.setup_files.build`.
        files: digest of each file as it was written.
        directories: those that were made for them.
    """

    program: str
    build: str
    files: Mapping[str, str] = field(default_factory=dict)
    directories: Sequence[str] = ()

    def within(self, directories: Iterable[Path]) -> Manifest:
        """What it says of places where setup puts files: a damaged one may say anything of any other."""
        roots = tuple(directories)
        files = {
            path: each
            for path, each in self.files.items()
            if ".." not in path.split("/") and any(Path(path).is_relative_to(root) for root in roots)
        }
        return replace(self, files=files)

    def text(self) -> str:
        """As it is written."""
        document = {
            "format": FORMAT,
            "program": self.program,
            "build": self.build,
            "files": dict(sorted(self.files.items())),
            "directories": sorted(self.directories),
        }
        return json.dumps(document, indent=2) + "\n"


def read_manifest(text: str) -> Manifest | None:
    """The manifest of a text; None where it is none, damaged, or of a release that this one does not know."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        return None
    program, build, files, made = (read.get(key) for key in ("program", "build", "files", "directories"))
    if not (isinstance(program, str) and isinstance(build, str)):
        return None
    if not (isinstance(files, dict) and isinstance(made, list)):
        return None
    are_texts = all(isinstance(each, str) for each in (*files.values(), *made))
    if not are_texts or not all(map(_is_path, (program, *files, *made))):
        return None
    return Manifest(program, build, files, tuple(made))


def _is_path(text: str) -> bool:
    return text.startswith("/") and "\0" not in text


def digest(content: bytes) -> str:
    """SHA-256 of a content."""
    return hashlib.sha256(content).hexdigest()


def installing(
    files: Sequence[File], found: Mapping[Path, Found], manifest: Manifest | None
) -> tuple[Step, ...]:
    """How to have all files as they should be, and none that an older release had and this one has not.

    Args:
        files: as they should be.
        found: what is there now, of those and of the manifest's.
        manifest: what was done before.
    """
    written = manifest.files if manifest is not None else {}
    steps = [_installed(file, found.get(file.path), written.get(str(file.path))) for file in files]
    named = {file.path for file in files}
    for path in sorted(Path(each) for each in written):
        if path not in named and path in found:
            steps.append(_removed(path, found[path], frozenset({written[str(path)]})))
    return tuple(steps)


def _installed(file: File, there: Found | None, written: str | None) -> Step:
    if there is None:
        return Step(file.path, Action.CREATE, file.content)
    if there.digest == digest(file.content):
        return Step(file.path, Action.SAME)
    if there.is_link or (written is None and file.yields):
        return Step(file.path, Action.KEEP)
    if written is None:
        return Step(file.path, Action.SAVE, file.content)
    if there.digest == written:
        return Step(file.path, Action.REPLACE, file.content)
    return Step(file.path, Action.KEEP)


def removing(
    files: Sequence[File], found: Mapping[Path, Found], manifest: Manifest | None
) -> tuple[Step, ...]:
    """How to take away what setup has written, or would write just so."""
    own = {str(file.path): {digest(file.content)} for file in files}
    for path, written in manifest.files.items() if manifest is not None else ():
        own.setdefault(path, set()).add(written)
    return tuple(
        _removed(Path(path), found[Path(path)], frozenset(digests))
        for path, digests in sorted(own.items())
        if Path(path) in found
    )


def _removed(path: Path, there: Found, own: frozenset[str]) -> Step:
    is_own = there.digest in own and not there.is_link
    return Step(path, Action.REMOVE if is_own else Action.KEEP)


def written(steps: Sequence[Step], manifest: Manifest | None) -> Mapping[str, str]:
    """Digests for the next manifest, after these steps.

    A file that was kept goes on being told as changed, for it keeps the digest with which it was written.
    """
    before = manifest.files if manifest is not None else {}
    return dict(_written(steps, before))


def _written(steps: Sequence[Step], before: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for step in steps:
        path = str(step.path)
        if step.content is not None:
            yield path, digest(step.content)
        elif step.action in {Action.SAME, Action.KEEP} and path in before:
            yield path, before[path]


def adopted(steps: Sequence[Step], files: Sequence[File]) -> Mapping[str, str]:
    """Digests of files that are as they should be, whoever has written them."""
    same = {step.path for step in steps if step.action is Action.SAME}
    return {str(file.path): digest(file.content) for file in files if file.path in same}
