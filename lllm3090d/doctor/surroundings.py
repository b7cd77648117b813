"""What the checks look at: the machine's files below a root, the answers of programs, and what was asked beforehand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.settings import Settings

ASK_LIMIT_S = 5.0  # each program that is asked; systemctl answers in 20 ms
_DEATH_S = 0.5  # a killed program that hangs in the kernel is left behind


class UnansweredError(Exception):
    """A program or the system gave no answer; the message says which, and for how long it was waited."""


@dataclass(frozen=True, slots=True)
class Said:
    """How a program ended and what it wrote."""

    status: int
    stdout: str
    stderr: str = ""


class Ask(Protocol):
    """Runs a program for its answer."""

    def __call__(self, *argv: str) -> Said:
        """Raises UnansweredError where it cannot be run or does not end in time."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is left on a file system; ``free_files`` is None where it has no limit."""

    free_bytes: int
    free_files: int | None
    read_only: bool


@dataclass(frozen=True, slots=True)
class Units:
    """What the user's systemd says.

    Attributes:
        version: of systemd, e.g. ``252.39-1``.
        control_group: of the manager, such as ``/user.slice/user-1000.slice/user@1000.service``.
        service, socket: properties of the daemon's units.
    """

    version: str
    control_group: str
    service: Mapping[str, str]
    socket: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CardsFound:
    """The cards that the daemon would manage, or why there are none to be had.

    Attributes:
        cards: those.
        problem: why there are none.
        lost: why one of several, which was managed before, is not among them.
        unknown: why nobody knows whether there was one; then host memory takes the place of a card.
        xid_source: who tells of errors of NVIDIA's; empty where nobody does, None where there is none of them.
    """

    cards: tuple[Card, ...] = ()
    problem: LlmError | None = None
    xid_source: str | None = None
    lost: LlmError | None = None
    unknown: LlmError | None = None


@dataclass(frozen=True, slots=True)
class EngineFound:
    """The engine that the next start would use, what it said of itself, or why it cannot be used."""

    build: Build | None = None
    capabilities: Capabilities | None = None
    problem: LlmError | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What several checks need. None stands for what could not be asked, which a line of its own tells.

    Attributes:
        settings: those of the daemon; the defaults where they are not valid.
        settings_problem: why they are not valid.
        config_file: where they are read from.
        units: of the user's systemd.
        units_problem: why it did not tell.
        cards, engine: as the daemon finds them.
    """

    settings: Settings
    config_file: Path
    settings_problem: LlmError | None = None
    units: Units | None = None
    units_problem: str = ""
    cards: CardsFound | None = None
    engine: EngineFound | None = None

    @property
    def managed(self) -> list[Card]:
        """The graphics cards that the daemon manages; none where host memory takes their place."""
        return [card for card in self.cards.cards if card.kind is not CardKind.CPU] if self.cards else []

    @property
    def backend(self) -> Backend:
        """What the engine computes on."""
        told = self.engine.capabilities if self.engine else None
        return told.backend if told else Backend.UNKNOWN


def _access(path: Path, mode: int) -> bool:
    return os.access(path, mode)


def room_at(path: Path) -> Room:
    """What is left on the file system of a path. Raises OSError."""
    disk = os.statvfs(path)
    files = disk.f_favail if disk.f_files else None  # btrfs and the like make them as they need them
    return Room(disk.f_bavail * disk.f_frsize, files, bool(disk.f_flag & os.ST_RDONLY))


def ask(*argv: str, limit_s: float = ASK_LIMIT_S) -> Said:
    """Run a program for its answer, for at most so many seconds. Raises UnansweredError."""
    try:
        process = subprocess.Popen(  # its pipes are closed below, also where it cannot be waited for
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""},
        )
    except OSError as error:
        raise UnansweredError(f"{argv[0]} cannot be run: {error.strerror}") from error
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_DEATH_S)
        raise UnansweredError(f"{' '.join(argv[:3])} has not answered within {limit_s:g} s") from None
    return Said(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


def _no_problem() -> LlmError | None:
    return None


@dataclass(frozen=True, slots=True)
class World:
    """The machine as the checks see it; a test gives a tree of files and answers of its own.

    Attributes:
        root: below which the kernel's and the distribution's files are.
        environment: of the daemon.
        home: of the user.
        user: name of the user.
        user_id: of the user.
        ask: runs a program.
        may: whether this user may open a path so (``os.access``).
        room: what is left on a file system.
        journal_problem: why the journal cannot be read, None where it can; may raise UnansweredError.
        now_s: seconds since the epoch.
        installed_s: when this program was made or installed; no clock that goes right can be before that.
    """

    root: Path
    environment: Mapping[str, str]
    home: Path
    user: str
    user_id: int
    ask: Ask = field(default=ask)
    may: Callable[[Path, int], bool] = field(default=_access)
    room: Callable[[Path], Room] = field(default=room_at)
    journal_problem: Callable[[], LlmError | None] = field(default=_no_problem)
    now_s: Callable[[], float] = field(default=time.time)
    installed_s: float = 0.0

    def at(self, path: str | Path) -> Path:
        """An absolute path of the machine below the root."""
        return self.root / str(path).lstrip("/")

    def text(self, path: str | Path) -> str | None:
        """What a small file says, without blanks around it; None where it is not there or may not be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str | Path, pattern: str) -> tuple[Path, ...]:
        """What a directory holds, sorted, as paths of the machine."""
        return tuple(
            Path("/") / found.relative_to(self.root) for found in sorted(self.at(path).glob(pattern))
        )
