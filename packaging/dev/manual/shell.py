"""A shell that runs the commands of a page one by one, as a reader would type them: directory and variables stay."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Done:
    """What came of a command: its exit status, and what it wrote."""

    status: int
    output: str


class ShellEndedError(Exception):
    """A command took the shell down, or did not end."""


class Shell:
    """``bash`` with its own directory for what it writes.

    Args:
        directory: where it begins.
        environment: whole.
        notes: an empty directory for texts and outputs of commands.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], notes: Path) -> None:
        self._notes = notes
        self._count = 0
        self._statuses, theirs = os.pipe()
        # -a: what a page sets, the processes that follow see.
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-a"],
            stdin=subprocess.PIPE,
            cwd=directory,
            env=dict(environment) | {"STATUSES": str(theirs)},
            pass_fds=[theirs],
            text=True,
            start_new_session=True,
        )
        os.close(theirs)
        if self._bash.stdin is None:
            raise ShellEndedError("it has no standard input")
        self._keyboard = self._bash.stdin

    def run(self, text: str) -> Done:
        """Run a command to its end.

        Raises:
            ShellEndedError: it does not end in time, or ends the shell.
        """
        script, output = self._files(text)
        self._say(f'source "{script}" </dev/null >"{output}" 2>&1; echo $? >&$STATUSES')
        status = int(self._answer(text))
        return Done(status, output.read_text(errors="replace"))

    def follow(self, text: str) -> str:
        """Run a command that goes on, and end it once it has said something: what that is.

        Raises:
            ShellEndedError: it says nothing in time.
        """
        script, output = self._files(f"echo $$ >&$STATUSES\n{text}")  # it leads a group of its own by then
        os.mkfifo(output)
        reader = os.open(output, os.O_RDONLY | os.O_NONBLOCK)  # the writer is not let begin before
        os.set_blocking(reader, True)
        self._say(f'setsid bash "{script}" </dev/null >"{output}" 2>&1 &')
        pid = int(self._answer(text))
        with os.fdopen(reader, "rb", buffering=0) as stream, selectors.DefaultSelector() as ready:
            ready.register(stream, selectors.EVENT_READ)
            if not ready.select(TIMEOUT_S):
                raise ShellEndedError(f"it says nothing: {text}")
            said = stream.read(65536)
            with contextlib.suppress(ProcessLookupError):  # it has failed
                os.killpg(pid, signal.SIGTERM)
            while more := stream.read(65536):
                said += more
        return said.decode(errors="replace")

    def close(self) -> None:
        """End it, and whatever it has begun."""
        self._keyboard.close()
        try:
            self._bash.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._bash.pid, signal.SIGKILL)
            self._bash.wait()
        os.close(self._statuses)

    def _files(self, text: str) -> tuple[Path, Path]:
        self._count += 1
        script = self._notes / f"{self._count}.sh"
        script.write_text(text + "\n")
        return script, self._notes / f"{self._count}.out"

    def _say(self, line: str) -> None:
        self._keyboard.write(line + "\n")
        self._keyboard.flush()

    def _answer(self, text: str) -> str:
        with selectors.DefaultSelector() as ready:
            ready.register(self._statuses, selectors.EVENT_READ)
            if not ready.select(TIMEOUT_S):
                os.killpg(self._bash.pid, signal.SIGKILL)
                raise ShellEndedError(f"it does not end within {TIMEOUT_S:g} s: {text}")
        answer = os.read(self._statuses, 64).decode().strip()
        if not answer:
            raise ShellEndedError(f"the shell has ended with it: {text}")
        return answer
