"""The runtime directory, the lock that keeps a second daemon out, and the control socket."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.unit_spec import SUN_PATH_BYTES

LISTEN_FDS_START = 3  # sd_listen_fds(3)
BACKLOG = 128
_FAMILIES = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6})
_SEE_UNITS = "See: systemctl --user cat lllm3090d.socket lllm3090-gateway.socket"


@dataclass(frozen=True, slots=True)
class Passed:
    """The sockets that systemd holds for us."""

    control: socket.socket | None = None
    gateway: socket.socket | None = None


@dataclass(slots=True)
class Listening:
    """A bound control socket and the lock; close() ends both."""

    sock: socket.socket
    path: Path
    lock_fd: int
    activated: bool  # systemd owns the socket and keeps it when we end
    gateway: socket.socket | None = None  # the gateway's, where systemd holds that

    def close(self) -> None:
        """Stop listening; removes the socket's file unless systemd owns it."""
        self.sock.close()
        if self.gateway is not None:
            self.gateway.close()
        if not self.activated:
            self.path.unlink(missing_ok=True)
        os.close(self.lock_fd)


def prepare_runtime_dir(directory: Path) -> None:
    """Make the directory and ``engines`` in it, private to this user.

    Raises:
        LlmError: RUNTIME_DIR_UNUSABLE when it cannot be made or belongs to somebody else.
    """
    try:
        for path in (directory, directory / "engines"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                raise LlmError(
                    ErrorCode.RUNTIME_DIR_UNUSABLE,
                    f"{path} is not a directory of uid {os.getuid()}",
                    hint="Remove it, or choose another runtime_dir (LLLM3090_RUNTIME_DIR).",
                    path=str(path),
                )
            if stat.S_IMODE(status.st_mode) & 0o077:
                path.chmod(0o700)
    except OSError as error:
        raise LlmError(
            ErrorCode.RUNTIME_DIR_UNUSABLE,
            f"the runtime directory cannot be made: {error}",
            hint="Log in through a session that has XDG_RUNTIME_DIR, or set LLLM3090_RUNTIME_DIR.",
            path=str(directory),
        ) from error


def check_length(path: Path) -> None:
    """Raise SOCKET_PATH_TOO_LONG for a path that does not fit ``sun_path``."""
    length = len(os.fsencode(path))
    if length > SUN_PATH_BYTES:
        raise LlmError(
            ErrorCode.SOCKET_PATH_TOO_LONG,
            f"{path} is {length} bytes long; a Unix socket's path holds {SUN_PATH_BYTES}",
            hint="Choose a shorter runtime_dir (LLLM3090_RUNTIME_DIR).",
            path=str(path),
            limit_bytes=SUN_PATH_BYTES,
        )


def _lock(directory: Path) -> int:
    """Take the lock of the directory; the kernel gives it back however we end."""
    path = directory / "daemon.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LlmError(
            ErrorCode.RUNTIME_DIR_UNUSABLE,
            f"the lock cannot be opened: {error}",
            hint="Remove it, or choose another runtime_dir (LLLM3090_RUNTIME_DIR).",
            path=str(path),
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise LlmError(
            ErrorCode.ALREADY_RUNNING,
            f"another lllm3090d{f' (PID {holder})' if holder else ''} runs here; its lock is in {directory}",
            hint="Use it: lllm3090ctl status. Or stop it: systemctl --user stop lllm3090d",
            directory=str(directory),
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _activated() -> Passed:
    """The sockets that systemd passed; the variables are for us alone and go no further."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "0")
    os.environ.pop("LISTEN_FDNAMES", None)  # a socket tells by itself which one it is
    if pid != str(os.getpid()) or count == "0":
        return Passed()
    if count not in {"1", "2"}:
        raise LlmError(
            ErrorCode.RUNTIME_DIR_UNUSABLE,
            f"systemd passed {count} sockets; the control socket and the gateway's are expected",
            hint=_SEE_UNITS,
        )
    found = [_passed(LISTEN_FDS_START + number) for number in range(int(count))]
    control = [each for each in found if each.family == socket.AF_UNIX]
    gateway = [each for each in found if each.family in {socket.AF_INET, socket.AF_INET6}]
    if len(control) > 1 or len(gateway) > 1 or len(control) + len(gateway) != len(found):
        for each in found:
            each.close()
        raise LlmError(
            ErrorCode.RUNTIME_DIR_UNUSABLE,
            "of the sockets that systemd passed, at most one may be a Unix socket and at most one a TCP socket",
            hint=_SEE_UNITS,
        )
    return Passed(control[0] if control else None, gateway[0] if gateway else None)


def _passed(fd: int) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise LlmError(
            ErrorCode.RUNTIME_DIR_UNUSABLE,
            f"what systemd passed is not a socket: {error}",
            hint=_SEE_UNITS,
        ) from error
    if sock.family not in _FAMILIES or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise LlmError(
            ErrorCode.RUNTIME_DIR_UNUSABLE,
            "the socket that systemd passed is not a listening Unix or TCP socket",
            hint=_SEE_UNITS,
        )
    return sock


def listen(path: Path, *, lock_dir: Path | None = None, systemd_listens: bool = False) -> Listening:
    """Lock the directory and take systemd's socket, or bind our own at this path.

    Args:
        path: of the control socket.
        lock_dir: what only one daemon may hold; None for the socket's directory. All daemons of one user manager
            see the same units and the same card, so they share one lock wherever their sockets are.
        systemd_listens: the socket unit is active. Then a socket of our own would replace systemd's, whose clients
            would wait for ever.

    Raises:
        LlmError: ALREADY_RUNNING, SOCKET_PATH_TOO_LONG, RUNTIME_DIR_UNUSABLE.
    """
    check_length(path)
    prepare_runtime_dir(path.parent)
    if lock_dir is not None:
        prepare_runtime_dir(lock_dir)
    lock_fd = _lock(lock_dir or path.parent)
    try:
        passed = _activated()
    except LlmError:
        os.close(lock_fd)
        raise
    control, gateway = passed.control, passed.gateway
    if control is not None:
        path = Path(os.fsdecode(control.getsockname()))
        return Listening(control, path, lock_fd, activated=True, gateway=gateway)
    if systemd_listens:
        _close(gateway, lock_fd)
        raise LlmError(
            ErrorCode.ALREADY_RUNNING,
            f"systemd listens on {path} already and starts the daemon on first use",
            hint="Use it: lllm3090ctl status. Or run by hand after: systemctl --user stop lllm3090d.socket",
            path=str(path),
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # We hold the lock and systemd does not listen: whatever lies there is a dead daemon's.
        path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(mask)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        _close(gateway, lock_fd)
        raise LlmError(
            ErrorCode.RUNTIME_DIR_UNUSABLE,
            f"the control socket {path} cannot be bound: {error}",
            hint="Choose another runtime_dir (LLLM3090_RUNTIME_DIR).",
            path=str(path),
        ) from error
    return Listening(sock, path, lock_fd, activated=False, gateway=gateway)


def _close(sock: socket.socket | None, lock_fd: int) -> None:
    if sock is not None:
        sock.close()
    os.close(lock_fd)
