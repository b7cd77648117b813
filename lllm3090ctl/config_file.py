"""The settings file on disk: read, and replaced in one step by one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, own_failure
from lllm3090ctl.text import named

NEW_SUFFIX = ".lllm3090ctl-new"
LARGEST_BYTES = 4 << 20


class ConfigFile:
    """A settings file, followed through symbolic links: what they lead to is changed, and they stay.

    Args:
        path: as the daemon knows it; it may be missing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.shown = named(path)
        self._target = Path(os.path.realpath(path))

    def read(self) -> bytes | None:
        """What is in it; None where it is not there.

        Raises:
            Failure: ``config_unusable``.
        """
        try:
            # Not Path.read_bytes: reading a pipe or a device may never end.
            with open(self._target, "rb", opener=_without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise self._unusable("it is no regular file")
                raw = file.read(LARGEST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        if len(raw) > LARGEST_BYTES:
            raise self._unusable(f"it has more than {LARGEST_BYTES >> 20} MiB")
        return raw

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands of this program from changing it meanwhile; its directory is made where it is missing.

        Raises:
            Failure: ``config_unusable``.
        """
        try:
            self._target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = os.open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        with _closing(directory):
            try:
                # The directory, as the file itself is another one after each change.
                fcntl.flock(directory, fcntl.LOCK_EX)
            except OSError as error:
                raise self._unusable(error.strerror or str(error)) from error
            yield

    def replace(self, raw: bytes, before: bytes | None) -> None:
        """Put other bytes in its place, all or none; its mode, owner and group stay, a new one is the user's alone.

        To be called within :meth:`locked`.

        Args:
            raw: the bytes.
            before: what it held when the change began.

        Raises:
            Failure: ``config_changed`` where it holds something else now; ``config_unusable``.
        """
        new = self._target.with_name(f".{self._target.name}{NEW_SUFFIX}")
        try:
            was = self._target.stat() if before is not None else None
            if was is not None and not os.access(self._target, os.W_OK):
                raise self._unusable("you may not write it")
            new.unlink(missing_ok=True)  # of a run that was killed
            try:
                with open(new, "xb", opener=_private) as file:
                    if was is not None:
                        if (was.st_uid, was.st_gid) != (os.geteuid(), os.getegid()):
                            os.fchown(file.fileno(), was.st_uid, was.st_gid)
                        os.fchmod(file.fileno(), stat.S_IMODE(was.st_mode))
                    file.write(raw)
                    file.flush()
                    os.fsync(file.fileno())
                if self.read() != before:
                    raise own_failure(
                        "config_changed",
                        "The file was changed meanwhile",
                        f"{self.shown} was changed by somebody else meanwhile, so nothing was written.",
                        exit_status=ExitStatus.REFUSED,
                        hint="Do it again, on what the file holds now.",
                    )
                new.replace(self._target)
            finally:
                new.unlink(missing_ok=True)
            self._keep_directory()
        except FileNotFoundError as error:  # another one's doing: its directory was there a moment ago
            raise self._unusable(error.strerror or str(error)) from error
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error

    def _keep_directory(self) -> None:
        """Make the new name last over a loss of power."""
        directory = os.open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with _closing(directory):
            os.fsync(directory)

    def _unusable(self, why: str) -> Failure:
        target = named(str(self._target))
        through = "" if target == self.shown else f" (which leads to {target})"
        return own_failure(
            "config_unusable",
            "The settings file cannot be used",
            f"{self.shown}{through} cannot be read or changed: {why}.",
            exit_status=ExitStatus.CONFIG,
            hint="Look at the permissions of the file and its directory, and at the space on the disk.",
        )


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
