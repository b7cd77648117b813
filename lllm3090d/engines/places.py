"""Where llama-server builds lie, best rank first. Nothing is executed."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lllm3090d.engines.capabilities import BuildKind
from lllm3090d.engines.wheel import WHEEL_BIN, package_tag
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import Settings

SERVER_NAME = "llama-server"
PLACES_BELOW = ("", "bin", "build/bin")  # release archive, installation prefix, build tree
MANAGED_NAME = "managed"
ENVIRONMENT_NAME = "environment"
PATH_NAME = "path"
COMPILED = re.compile(
    r"(?P<tag>[A-Za-z]?[0-9][A-Za-z0-9._]*)-(?:cuda-(?P<arch>sm[0-9]+[a-z]?)|vulkan|rocm|hip|sycl|cpu)"
)
DISTRIBUTION_DIRECTORIES = tuple(
    map(
        Path,
        ("/usr/local/bin", "/usr/bin", "/usr/lib/llama.cpp", "/usr/libexec/llama.cpp", "/opt/llama.cpp"),
    )
)


@dataclass(frozen=True, slots=True)
class Find:
    """A server that lies somewhere, whether or not it can be executed.

    Attributes:
        name: what it is chosen by.
        kind: where it comes from.
        source: how it was found, for a person.
        server: where it is.
        tag, gpu_architecture: as of :class:`Build`.
    """

    name: str
    kind: BuildKind
    source: str
    server: Path
    tag: str | None = None
    gpu_architecture: str | None = None

    @property
    def is_offered(self) -> bool:
        """It may be chosen by its name."""
        return self.kind not in (BuildKind.CANDIDATE, BuildKind.ENVIRONMENT)


@dataclass(slots=True)
class Search:
    """Where to look, and where was looked.

    Attributes:
        settings: for ``llama_dir`` and ``engines_dir``.
        path: the ``PATH``.
        sites: where the interpreter keeps packages.
        distribution: directories of distributions and administrators.
        looked_at: grows with the search.
    """

    settings: Settings
    path: str
    sites: tuple[Path, ...]
    distribution: tuple[Path, ...]
    looked_at: list[Path] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        settings: Settings,
        environment: Mapping[str, str],
        sites: Sequence[Path] | None,
        distribution: Sequence[Path] | None,
    ) -> Search:
        """None stands for the directories of the running interpreter, and :data:`DISTRIBUTION_DIRECTORIES`."""
        if sites is None:
            # Usually one directory under both names.
            sites = tuple(dict.fromkeys(Path(sysconfig.get_path(key)) for key in ("platlib", "purelib")))
        places = DISTRIBUTION_DIRECTORIES if distribution is None else tuple(distribution)
        return cls(settings, environment.get("PATH", ""), tuple(sites), places)

    def first(self, directory: Path) -> Path | None:
        """The server of a directory; None where there is none."""
        for below in PLACES_BELOW:
            place = directory / below / SERVER_NAME
            self.looked_at.append(place)
            if is_there(place):
                return place
        return None


def every(search: Search) -> Iterator[Find]:
    """All servers by rank, but for the one of the environment; looked for as they are asked for."""
    settings = search.settings
    if not settings.llama_dir_from_env:
        server = search.first(settings.llama_dir)
        if server is not None:
            yield Find(MANAGED_NAME, BuildKind.MANAGED, "llama_dir", server)
    names = _engine_names(settings.engines_dir)
    if not names:
        search.looked_at.append(settings.engines_dir / "*" / SERVER_NAME)
    yield from _compiled(search, names)
    on_path = shutil.which(SERVER_NAME, path=search.path)
    if on_path:
        yield Find(PATH_NAME, BuildKind.PATH, "PATH", Path(on_path).absolute())
    for directory in search.distribution:
        server = search.first(directory)
        if server is not None:
            name = "distribution:" + str(directory).strip("/").replace("/", "-")
            yield Find(name, BuildKind.DISTRIBUTION, str(directory), server)
    yield from _packages(search)
    for name in names:
        if not COMPILED.fullmatch(name):
            server = search.first(settings.engines_dir / name)
            if server is not None:
                yield Find(name, BuildKind.CANDIDATE, "engines_dir", server, tag=_plain_tag(name))


def _compiled(search: Search, names: Sequence[str]) -> Iterator[Find]:
    for name in names:
        match = COMPILED.fullmatch(name)
        server = search.first(search.settings.engines_dir / name) if match else None
        if match and server:
            yield Find(name, BuildKind.COMPILED, "engines_dir", server, match["tag"], match["arch"])


def _packages(search: Search) -> Iterator[Find]:
    for site in search.sites:
        search.looked_at.append(site / WHEEL_BIN / SERVER_NAME)
        servers = sorted(site.glob(f"*/bin/{SERVER_NAME}"))
        # The one that set-up installs comes before any other.
        servers.sort(key=lambda server: server.parent.parent.name != WHEEL_BIN.parts[0])
        for server in servers:
            package = server.parent.parent.name
            name = package.replace("_", "-")
            yield Find(f"python:{name}", BuildKind.PYTHON, name, server, tag=package_tag(site, package))


def _engine_names(engines_dir: Path) -> list[str]:
    """Directories below it, newest first by the numbers in their names; hidden ones are unfinished.

    A name that no request could carry is left out.
    """
    try:
        names = [
            entry.name
            for entry in engines_dir.iterdir()
            if entry.is_dir() and not entry.name.startswith(".") and entry.name.isprintable()
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
    return sorted(names, key=_by_number, reverse=True)


def _by_number(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that compares digits as numbers, so that b9999 comes before b10434."""
    return tuple(
        (1, int(part), "") if part.isdigit() else (0, 0, part)
        for part in re.findall(r"[0-9]+|[^0-9]+", name)
    )


def _plain_tag(name: str) -> str | None:
    """The tag that a plain candidate is named after."""
    return name if re.fullmatch(r"b[0-9]+", name) else None


def is_there(path: Path) -> bool:
    """Whether the place is taken: not by a broken link, but by what may not be looked at."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
