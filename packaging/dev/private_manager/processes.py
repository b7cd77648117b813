"""Processes: starting one as somebody in a cgroup, passing signals on, exit statuses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from private_manager import hierarchies

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
PR_SET_PDEATHSIG = 1
SI_KERNEL = 0x80  # sent by the terminal, so the whole foreground process group has it already

FORWARDED = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
WATCHED = FORWARDED | {signal.SIGCHLD}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Account:
    """Whom a process runs as."""

    name: str
    uid: int
    gid: int
    home: Path


def unshare(flags: int) -> None:
    """unshare(2).

    Raises:
        OSError: the kernel refused.
    """
    if _libc.unshare(ctypes.c_int(flags)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"unshare: {os.strerror(error)}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def spawn(
    argv: Sequence[str],
    *,
    account: Account,
    environment: Mapping[str, str],
    cgroups: Sequence[Path],
    own_session: bool,
    log: Path | None = None,
) -> int:
    """Fork; join `cgroups`; become `account`; execute. Returns the process id.

    Args:
        argv: program (looked up in the PATH of `environment`) and arguments.
        account: whom to become.
        environment: all of it.
        cgroups: one directory of each hierarchy.
        own_session: detached from the terminal, so that Ctrl-C does not reach it.
        log: file for its output, else ours.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        hierarchies.join(cgroups)
        if own_session:
            os.setsid()
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if account.uid != os.getuid():
            os.setgroups([account.gid])
            os.setresgid(account.gid, account.gid, account.gid)
            os.setresuid(account.uid, account.uid, account.uid)
            try:
                Path().stat()
            except PermissionError:
                os.chdir(account.home)
        restore_signals()
        execute(argv, environment)
    except OSError as error:
        print(f"user-manager: {argv[0]} cannot be prepared: {error}", file=sys.stderr, flush=True)
    os._exit(126)


def execute(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become another program, or end as a shell would: 127 if there is none, 126 if it will not start."""
    try:
        os.execvpe(argv[0], list(argv), dict(environment))  # noqa: S606
    except OSError as error:
        print(f"user-manager: {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def restore_signals() -> None:
    """Undo what Python and `watch_signals` changed, for a program about to be executed."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def watch_signals() -> None:
    """Queue the signals that `wait_and_forward` handles from now on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def wait_and_forward(pid: int) -> int:
    """Wait for a child, pass signals on to it, reap all others. Needs `watch_signals` first.

    Returns its exit status, 128 + N if signal N ended it.
    """
    while True:
        with contextlib.suppress(ChildProcessError):
            while True:
                ended, status = os.waitpid(-1, os.WNOHANG)
                if ended == 0:
                    break
                if ended == pid:
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
        received = signal.sigwaitinfo(WATCHED)
        if received.si_signo != signal.SIGCHLD and received.si_code != SI_KERNEL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, received.si_signo)


def fail(message: str, status: int) -> NoReturn:
    """Say why and leave."""
    print(f"user-manager: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)
