"""Files of ``setup``: looking, writing in one step, saving what is somebody else's, removing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from lllm3090ctl.setup_plan import Action, Found, Manifest, Step, digest, read_manifest

MANIFEST = "setup.json"
SAVED = "saved"


def found(paths: Iterable[Path]) -> Mapping[Path, Found]:
    """What is at each place; nothing for those where nothing is. Raises OSError."""
    there = {}
    for path in paths:
        if path.is_symlink():
            target = path.read_bytes() if path.is_file() else b""
            there[path] = Found(digest(target), is_link=True)
        elif path.exists():
            there[path] = Found(digest(path.read_bytes()))
    return there


def manifest(directory: Path) -> Manifest | None:
    """What was done before; None where that is not known. Raises OSError."""
    file = directory / MANIFEST
    try:
        return read_manifest(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def carry_out(steps: Iterable[Step], saved: Path) -> tuple[Mapping[Path, Path], list[Path]]:
    """Do what the steps say, each file in one step of its own. Raises OSError.

    Args:
        steps: what to do.
        saved: directory for what is somebody else's.

    Returns:
        Where each saved file is now, and the directories that were made.
    """
    moved: dict[Path, Path] = {}
    made: list[Path] = []
    for step in steps:
        if step.action is Action.REMOVE:
            step.path.unlink(missing_ok=True)
        elif step.content is not None:
            if step.action is Action.SAVE:
                made += _directory(saved)
                moved[step.path] = _saved(step.path, saved)
            made += _directory(step.path.parent)
            write(step.path, step.content)
    return moved, made


def write(path: Path, content: bytes) -> None:
    """Write a file that is whole at any time. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".lllm3090-", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            Path(file.name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # what went wrong before is told
                Path(file.name).unlink()
            raise


def put_manifest(directory: Path, new: Manifest) -> None:
    """Write what was done. Raises OSError."""
    _directory(directory)
    write(directory / MANIFEST, new.text().encode())


def take_directories(directories: Iterable[str | Path]) -> None:
    """Remove those that are empty, the innermost first."""
    for directory in sorted({str(each) for each in directories}, reverse=True):
        with contextlib.suppress(OSError):  # others have files there, or it has gone
            Path(directory).rmdir()


def _directory(path: Path) -> list[Path]:
    """Make a directory; those that were not there before."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return missing


def _saved(path: Path, directory: Path) -> Path:
    """Copy a file to a name of its own in a directory: until it is replaced it stays where it is."""
    number = 0
    while True:
        place = directory / (f"{path.name}.{number}" if number else path.name)
        try:
            with place.open("xb") as file:
                file.write(path.read_bytes())
        except FileExistsError:
            number += 1
            continue
        return place
