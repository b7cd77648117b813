"""Find llama-server builds, and which of them the next start uses.

Order, first hit wins:

1. ``LLLM3090_LLAMA_DIR`` in the environment. The choice is locked: where the server is missing, that is an
   error and nothing else is tried.
2. the build that a person chose (:mod:`lllm3090d.engines.choice`), while it is offered and can be executed.
3. ``llama_dir`` of the settings, the managed build, if it holds a server.
4. the newest compiled build below ``engines_dir``: ``<tag>-<backend>``, for CUDA ``<tag>-cuda-sm<arch>``.
5. ``llama-server`` in ``PATH``.
6. where distributions and administrators put theirs.
7. Python packages beside the running interpreter that ship one; their files are used, without importing them.
8. any other directory below ``engines_dir``: for comparison, never offered.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.engines.capabilities import Build, BuildKind
from lllm3090d.engines.choice import FILE_NAME, ignored, read_choice
from lllm3090d.engines.places import ENVIRONMENT_NAME, SERVER_NAME, Find, Search, every, is_there
from lllm3090d.engines.wheel import link_libraries
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import Settings

# Searched by the loader anyway; naming them would only change its order for every other library.
SYSTEM_LIBRARY_DIRS = frozenset({"/lib", "/lib64", "/usr/lib", "/usr/lib64"})
# The loader splits LD_LIBRARY_PATH at : and ;, and expands $ORIGIN: such a directory cannot be expressed.
INEXPRESSIBLE = re.compile(r"[:;$]")

ENGINE_HINT = (
    "Install llama.cpp, or set llama_dir in config.toml (or LLLM3090_LLAMA_DIR) to the directory that holds "
    "llama-server."
)


@dataclass(frozen=True, slots=True)
class Selection:
    """What the next start uses, and what came of a choice.

    Attributes:
        build: None where there is none that can be used.
        problem: why there is none.
        choice: the name that was chosen; None where the choice is automatic.
        choice_problem: why the choice is ignored; None where it counts, or where there is none.
        locked: the environment decides, so no choice counts.
    """

    build: Build | None
    problem: LlmError | None
    choice: str | None
    choice_problem: LlmError | None
    locked: bool

    def use(self) -> Build:
        """The build, or its problem raised."""
        if self.build is None:
            raise self.problem or LlmError(
                ErrorCode.ENGINE_NOT_FOUND, "No engine is used.", hint=ENGINE_HINT
            )
        return self.build


def find_build(
    settings: Settings,
    environment: Mapping[str, str] | None = None,
    *,
    site_directories: Sequence[Path] | None = None,
    distribution_directories: Sequence[Path] | None = None,
) -> Build:
    """The build that the next load uses; resolved anew for every load.

    Args:
        settings: for ``llama_dir``, ``engines_dir``, ``state_dir`` and whether the choice is locked.
        environment: for ``PATH``; None for the process's own.
        site_directories: where the interpreter keeps packages; None for those of the running interpreter.
        distribution_directories: None for :data:`DISTRIBUTION_DIRECTORIES`.

    Raises:
        LlmError: ENGINE_NOT_FOUND with the places looked at; ENGINE_NOT_EXECUTABLE where a server was found
            that cannot be executed; ENGINE_UNUSABLE where a package's libraries cannot be linked.
    """
    return select(
        settings,
        environment,
        site_directories=site_directories,
        distribution_directories=distribution_directories,
    ).use()


def select(
    settings: Settings,
    environment: Mapping[str, str] | None = None,
    *,
    site_directories: Sequence[Path] | None = None,
    distribution_directories: Sequence[Path] | None = None,
) -> Selection:
    """As :func:`find_build`, but what is wrong is told and not raised."""
    search = Search.of(
        settings,
        os.environ if environment is None else environment,
        site_directories,
        distribution_directories,
    )
    choice: str | None = None
    choice_problem: LlmError | None = None
    try:
        choice = read_choice(settings.state_dir)
    except LlmError as error:
        choice_problem = error
    if settings.llama_dir_from_env:
        build, problem = _attempt(lambda: usable(_locked(search)))
        return Selection(build, problem, choice, choice_problem, locked=True)
    if choice is not None:
        build, choice_problem = _attempt(lambda: _chosen(search, choice))
        if build is not None:
            return Selection(build, None, choice, None, locked=False)
    build, problem = _attempt(lambda: _automatic(search))
    return Selection(build, problem, choice, choice_problem, locked=False)


def finds(
    settings: Settings,
    environment: Mapping[str, str] | None = None,
    *,
    site_directories: Sequence[Path] | None = None,
    distribution_directories: Sequence[Path] | None = None,
) -> tuple[Find, ...]:
    """Every server there is, best rank first, each once. Blocking; nothing is executed.

    Raises:
        LlmError: ENGINE_NOT_FOUND where ``engines_dir`` cannot be read.
    """
    search = Search.of(
        settings,
        os.environ if environment is None else environment,
        site_directories,
        distribution_directories,
    )
    found: dict[str, Find] = {}
    locked = _attempt_find(search)
    for each in (*locked, *every(search)):
        if each.name not in {other.name for other in found.values()}:
            found.setdefault(os.path.realpath(each.server), each)
    return tuple(found.values())


def find_named(search_result: Iterable[Find], name: str) -> Find:
    """The offered build of that name.

    Raises:
        LlmError: UNKNOWN_ENGINE, naming those that are offered.
    """
    known = tuple(search_result)
    for each in known:
        if each.name == name and each.is_offered:
            return each
    names = [each.name for each in known if each.is_offered]
    kind = next((each.kind for each in known if each.name == name), None)
    why = "No build of this name is offered"
    if kind is BuildKind.CANDIDATE:
        why = "This build is there for comparison only: its directory is not named <tag>-<backend>"
    elif kind is BuildKind.ENVIRONMENT:
        why = "This build is set by LLLM3090_LLAMA_DIR"
    raise LlmError(
        ErrorCode.UNKNOWN_ENGINE,
        f"{why}: {name}. Offered are: {', '.join(names) or 'none'}.",
        hint="See them with: lllm3090ctl engine list",
        name=name,
        offered=names,
    )


def library_environment(build: Build, inherited: Mapping[str, str]) -> dict[str, str]:
    """``LD_LIBRARY_PATH``: the build's own directories, then the inherited; empty without any."""
    own = [str(path) for path in build.library_path if not INEXPRESSIBLE.search(str(path))]
    # An empty element would mean the current directory.
    rest = [
        part for part in re.split("[:;]", inherited.get("LD_LIBRARY_PATH", "")) if part and part not in own
    ]
    return {"LD_LIBRARY_PATH": ":".join(own + rest)} if own or rest else {}


def _attempt(work: Callable[[], Build]) -> tuple[Build | None, LlmError | None]:
    try:
        return work(), None
    except LlmError as error:
        return None, error


def _attempt_find(search: Search) -> tuple[Find, ...]:
    """The build that the environment names, if there is one; its absence is told by :func:`select`."""
    directory = search.settings.llama_dir
    server = search.first(directory) if search.settings.llama_dir_from_env else None
    return (_environment_find(server),) if server else ()


def _environment_find(server: Path) -> Find:
    return Find(ENVIRONMENT_NAME, BuildKind.ENVIRONMENT, "LLLM3090_LLAMA_DIR", server)


def _locked(search: Search) -> Find:
    directory = search.settings.llama_dir
    server = search.first(directory)
    if server is not None:
        return _environment_find(server)
    if is_there(directory) and not directory.is_dir():
        why = "it is a file; the directory that holds llama-server is wanted"
    elif not directory.is_dir():
        why = "there is no such directory"
    else:
        why = f"it holds no {SERVER_NAME}"
    raise LlmError(
        ErrorCode.ENGINE_NOT_FOUND,
        f"LLLM3090_LLAMA_DIR is {directory}, but {why}.",
        hint="Correct the variable, or unset it to let llama_dir, engines_dir and PATH be searched.",
        looked_at=[str(place) for place in search.looked_at],
    )


def _chosen(search: Search, name: str) -> Build:
    file = search.settings.state_dir / FILE_NAME
    try:
        return usable(find_named(every(search), name))
    except LlmError as error:
        raise ignored(file, f"{name} was chosen, but: {error.message}", name=name) from error


def _automatic(search: Search) -> Build:
    for each in every(search):
        return usable(each)
    raise LlmError(
        ErrorCode.ENGINE_NOT_FOUND,
        f"No {SERVER_NAME} was found, neither in the usual places nor in the daemon's PATH.",
        hint=ENGINE_HINT,
        looked_at=[*map(str, search.looked_at), f"PATH: {search.path or 'empty'}"],
    )


def usable(found: Find) -> Build:
    """A find as a build that can be run; raises as :func:`find_build`."""
    server = found.server
    reason, hint = _why_not_executable(server)
    if reason is not None:
        raise LlmError(
            ErrorCode.ENGINE_NOT_EXECUTABLE,
            f"{server} (found through {found.source}) cannot be executed: {reason}.",
            hint=hint,
            path=str(server),
            source=found.source,
        )
    link_libraries(Path(os.path.realpath(server)).parent)
    return Build(
        server=server,
        library_path=_library_path(server),
        source=found.source,
        locked=found.kind is BuildKind.ENVIRONMENT,
        name=found.name,
        kind=found.kind,
        tag=found.tag,
        gpu_architecture=found.gpu_architecture,
    )


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
