"""Run a program of an engine build for its answer: time-boxed, in a session and an environment of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.engines.builds import library_environment
from lllm3090d.engines.capabilities import Build
from lllm3090d.errors import ErrorCode, LlmError

LAST_LINES = 12
SHELL_SIGNAL_BASE = 128  # a shell or another program between reports a signal as this and its number
# By these a launch would differ from the plan; GGML_VK_VISIBLE_DEVICES and the like describe the card and
# stay.
# A dying engine would start gdb. And below XDG_CONFIG_HOME it looks for llama.cpp/config.ini, whose options it takes
# before all others: with a device in that place there is none.
FIXED_ENVIRONMENT = {"GGML_NO_BACKTRACE": "1", "XDG_CONFIG_HOME": os.devnull}
REMOVED_PREFIXES = ("LLAMA_", "MTMD_", "LLLM3090_")
SIGNAL_MEANING: Mapping[int, str] = {
    signal.SIGILL: "an instruction this processor does not have: the build is for another processor",
    signal.SIGSEGV: "a memory error",
    signal.SIGABRT: "the engine gave up by itself",
    signal.SIGBUS: "a file or memory error",
    signal.SIGKILL: "killed from outside, perhaps for lack of memory",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one command said; status is negative for a signal, as subprocess has it."""

    status: int
    stdout: str
    stderr: str
    timed_out: bool = False

    @property
    def succeeded(self) -> bool:
        """It ended by itself with status 0."""
        return self.status == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Both streams, one after the other."""
        return self.stdout + ("\n" if self.stdout and not self.stdout.endswith("\n") else "") + self.stderr

    @property
    def last_lines(self) -> list[str]:
        """The last lines that are not empty."""
        return last_lines(self.text)

    def how(self, what: str, time_limit_s: float) -> str:
        """How it ended, for a message: ``did not answer WHAT within 3 s`` or ``ended on WHAT: SIGABRT ...``."""
        if self.timed_out:
            return f"did not answer {what} within {time_limit_s:g} s"
        return f"ended on {what}: {describe_status(self.status)}"


def clean_environment(build: Build, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a program of the build is run with: its libraries first, nothing that changes its defaults."""
    environment = {name: value for name, value in inherited.items() if not name.startswith(REMOVED_PREFIXES)}
    environment.pop("LD_LIBRARY_PATH", None)
    environment.update(library_environment(build, inherited))
    environment.update(FIXED_ENVIRONMENT)
    return environment


def run_program(
    build: Build,
    program: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    time_limit_s: float,
) -> Answer:
    """Run a program of the build and wait for it; blocking.

    When the time is over its whole process group is killed: a child that kept the pipes would be waited for
    without end.

    Raises:
        LlmError: ENGINE_NOT_EXECUTABLE or ENGINE_UNUSABLE where it cannot be started.
    """
    try:
        process = subprocess.Popen(
            [str(program), *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(build, program, error) from error
    with process:
        try:
            stdout, stderr = process.communicate(timeout=time_limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            stdout, stderr = process.communicate()
            timed_out = True
        except BaseException:
            _kill_group(process.pid)
            raise
    return Answer(process.returncode, stdout, stderr, timed_out)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _not_started(build: Build, program: Path, error: OSError) -> LlmError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return LlmError(
            ErrorCode.ENGINE_NOT_EXECUTABLE,
            f"{program} cannot be executed: {error.strerror}.",
            hint=f"Run: chmod +x '{program}'",
            path=str(program),
        )
    why = {
        errno.ENOEXEC: "its format cannot be executed here (for another processor, or no program at all)",
        errno.ENOENT: "the file, or the loader or interpreter it names, does not exist",
    }.get(error.errno or 0, error.strerror or str(error))
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"{program} cannot be started: {why}.",
        hint="Install a build for this machine, or set llama_dir in config.toml to another one.",
        path=str(program),
        source=build.source,
    )


def describe_status(status: int) -> str:
    """An exit status for a person; a negative one is a signal, named with what it means."""
    if status > SHELL_SIGNAL_BASE and status - SHELL_SIGNAL_BASE in SIGNAL_MEANING:
        return f"exit status {status}, {describe_status(SHELL_SIGNAL_BASE - status)}"
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
    meaning = SIGNAL_MEANING.get(-status)
    return f"{name} ({meaning})" if meaning else name


def last_lines(text: str) -> list[str]:
    """The last lines that are not empty, for a message."""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LAST_LINES:]
