"""Clearing up after the supervisor, whatever ends it: a process outside that waits for the end of a pipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from private_manager import hierarchies


@dataclass
class Janitor:
    """The waiting process; `finish` lets it work and waits for it."""

    pid: int
    pipe: int

    def finish(self) -> None:
        """Clear up now and return when that is done."""
        os.close(self.pipe)
        os.waitpid(self.pid, 0)

    def disown(self) -> None:
        """In a forked child: the supervisor's end alone is the one that counts."""
        os.close(self.pipe)


def start(cgroups: Callable[[], Sequence[Path]], directories: Sequence[Path]) -> Janitor:
    """Start the process that will remove these cgroups, with all in them, and these directories.

    Args:
        cgroups: asked when the time has come.
        directories: removed with all in them.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)
        return Janitor(pid, writing)
    os.setsid()  # out of reach of a signal to the process group
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.close(writing)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir("/")
    os.read(reading, 1)  # returns when the supervisor is gone or says so by closing
    hierarchies.remove(cgroups())
    for directory in directories:
        _remove_directory(directory)
    os._exit(0)


def _remove_directory(directory: Path) -> None:
    """Remove all of it, also systemd's ``inaccessible`` directories of mode 0 when we are not root."""
    for parent, names, _ in os.walk(directory):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # rmtree below is what counts
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)
