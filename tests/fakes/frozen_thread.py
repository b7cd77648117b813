"""Stops one thread of another process where it is, as nothing but a debugger can: with ptrace(2).

Run as a program, it stops the thread and holds it until it or the thread ends; the end of a tracer lets a thread go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000  # waitpid(2): threads too
# poll and ppoll, in which a GLib main loop waits; asyncio waits in epoll.
POLLS = {"x86_64": {"7", "271"}, "aarch64": {"73"}}
GLIB_OWN = frozenset({"gdbus", "gmain", "pool-spawner", "dconf worker"})


def main_loops(pid: int) -> list[int]:
    """Threads of a process that wait in a GLib main loop of their own, in the order of their start."""
    polls = POLLS.get(platform.machine(), set())
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            call = (task / "syscall").read_text().split()[0]
        except PermissionError:
            pytest.skip("threads of another process may not be looked at here")
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if call in polls and name not in GLIB_OWN:
            found.append(int(task.name))
    return sorted(found)


@contextlib.contextmanager
def frozen(thread: int) -> Iterator[None]:
    """A thread that stands still meanwhile."""
    command = [sys.executable, __file__, str(thread)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None
        said = tracer.stdout.readline().strip()
        if said == "EPERM":
            pytest.skip("a thread of another process may not be stopped here (kernel.yama.ptrace_scope)")
        assert said == "frozen", said
        try:
            yield
        finally:
            tracer.kill()


def _hold(thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(ctypes.c_long(request), ctypes.c_long(thread), None, None) == -1:
            error = ctypes.get_errno()
            sys.stdout.write("EPERM\n" if error == 1 else f"ptrace: {os.strerror(error)}\n")
            return
    _, status = os.waitpid(thread, WALL)
    sys.stdout.write("frozen\n" if os.WIFSTOPPED(status) else "it has ended\n")
    sys.stdout.flush()
    # Its end is ours to take; without that the process would never be seen to have ended.
    while not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
        _, status = os.waitpid(thread, WALL)


if __name__ == "__main__":
    _hold(int(sys.argv[1]))
