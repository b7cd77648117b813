"""Run a program of an engine build for its answer: with limits of time and output, in a session of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.engines.builds import library_environment
from lllm3090d.engines.capabilities import Build
from lllm3090d.engines.confidential import is_confidential
from lllm3090d.errors import ErrorCode, LlmError

LAST_LINES = 12
LARGEST_OUTPUT_BYTES = 4 << 20  # of each stream; the longest real answer, --help, has some 60 KiB
_CHUNK_BYTES = 64 << 10
# A killed program that is inside a driver may not end; it is left behind then.
_DEATH_S = 1.0
SHELL_SIGNAL_BASE = 128  # a shell or another program between reports a signal as this and its number
# By these a launch would differ from the plan; GGML_VK_VISIBLE_DEVICES and the like describe the card and
# stay.
# A dying engine would start gdb. And below XDG_CONFIG_HOME it looks for llama.cpp/config.ini, whose options it takes
# before all others: with a device in that place there is none. And a layer of Mesa puts the card of the desktop first
# in Vulkan's list, where a desktop can be asked: names of devices would mean another card than when they were listed.
FIXED_ENVIRONMENT = {"GGML_NO_BACKTRACE": "1", "NODEVICE_SELECT": "1", "XDG_CONFIG_HOME": os.devnull}
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
    """What a program of the build is run with: its libraries first, nothing secret or that changes its defaults."""
    environment = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(REMOVED_PREFIXES) and not is_confidential(name)
    }
    environment.pop("LD_LIBRARY_PATH", None)
    environment.update(library_environment(build, inherited))
    environment.update(FIXED_ENVIRONMENT)
    return environment


class Helpers:
    """The programs that run for an answer now, so that they can be ended together. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """No program is run any more."""
        return self._stopped

    def stop(self) -> None:
        """Kill the process groups of all that run, and of any that is started later; returns at once."""
        with self._lock:
            self._stopped = True
            for group in self._groups:
                _kill_group(group)

    @contextlib.contextmanager
    def holding(self, group: int) -> Iterator[None]:
        """While a group runs; it must not be reaped before the end, so that its number stays its own."""
        with self._lock:
            self._groups.add(group)
            if self._stopped:
                _kill_group(group)
        try:
            yield
        finally:
            with self._lock:
                self._groups.discard(group)


HELPERS = Helpers()  # those of this process


def run_program(
    build: Build,
    program: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    time_limit_s: float,
    *,
    helpers: Helpers = HELPERS,
) -> Answer:
    """Run a program of the build and wait for it; blocking.

    When it has ended, its time is over or it says too much, its whole process group is killed: children would go on,
    and one that kept the pipes would be waited for without end.

    Args:
        build: whose program it is.
        program: the executable.
        arguments: its arguments.
        environment: all of its environment.
        time_limit_s: seconds for which it may run.
        helpers: who may end it.

    Raises:
        LlmError: ENGINE_NOT_EXECUTABLE or ENGINE_UNUSABLE where it cannot be started; ENGINE_UNUSABLE where it says
            more than LARGEST_OUTPUT_BYTES on one stream; SHUTTING_DOWN where the helpers were stopped.
    """
    if helpers.stopped:
        raise _stopped(program)
    try:
        process = subprocess.Popen(
            [str(program), *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(build, program, error) from error
    with _Conversation(process) as conversation:
        with helpers.holding(process.pid):
            try:
                timed_out = not conversation.listen(time_limit_s)
            finally:
                conversation.end()
        status = process.poll()  # reaps it, now that nobody else knows its number
    if helpers.stopped:
        raise _stopped(program)
    if conversation.overflowed:
        raise _says_too_much(build, program, arguments)
    stdout, stderr = conversation.texts()
    return Answer(-signal.SIGKILL if status is None else status, stdout, stderr, timed_out)


class _Conversation:
    """What one program says until it ends. A context: its pipes are closed at the end, whoever else has them."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._said: dict[int, bytearray] = {}
        self._stack = contextlib.ExitStack()
        self._selector = selectors.DefaultSelector()
        self._end = -1  # readable when the program has ended
        self.overflowed = False

    def __enter__(self) -> _Conversation:
        stack = self._stack
        stack.enter_context(self._selector)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None  # noqa: S101  # both are pipes
            stack.enter_context(stream)
            self._said[stream.fileno()] = bytearray()
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream.fileno(), selectors.EVENT_READ)
        try:
            self._end = os.pidfd_open(self._process.pid)
        except OSError:
            _kill_group(self._process.pid)
            stack.close()
            raise
        stack.callback(os.close, self._end)
        self._selector.register(self._end, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def listen(self, time_limit_s: float) -> bool:
        """Read until it ends or says too much; False where the time was over before."""
        deadline_s = time.monotonic() + time_limit_s
        while not self.overflowed:
            events = self._selector.select(max(0.0, deadline_s - time.monotonic()))
            ready = {key.fd for key, _ in events}
            for stream in ready - {self._end}:
                if self._read(stream) is False:
                    self._selector.unregister(stream)
            if self._end in ready:
                return True
            if time.monotonic() >= deadline_s:
                return False
        return True

    def end(self) -> None:
        """Kill what is left of its group, and take what still lies in the pipes."""
        _kill_group(self._process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            selector.select(_DEATH_S)
        for stream in self._said:
            while not self.overflowed and self._read(stream):
                pass

    def texts(self) -> tuple[str, str]:
        """Output and errors, with the line ends of this system."""
        stdout, stderr = (bytes(said).decode("utf-8", "replace") for said in self._said.values())
        return _plain_lines(stdout), _plain_lines(stderr)

    def _read(self, stream: int) -> bool | None:
        """One piece of a stream; False at its end, None where nothing is there now."""
        try:
            piece = os.read(stream, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        self._said[stream] += piece
        self.overflowed = self.overflowed or len(self._said[stream]) > LARGEST_OUTPUT_BYTES
        return bool(piece)


def _plain_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _stopped(program: Path) -> LlmError:
    return LlmError(
        ErrorCode.SHUTTING_DOWN,
        f"{program} is not asked any more: the daemon is stopping.",
        hint="Start it again: systemctl --user start lllm3090d",
        path=str(program),
    )


def _says_too_much(build: Build, program: Path, arguments: Sequence[str]) -> LlmError:
    asked = f" on {arguments[0]}" if len(arguments) == 1 else ""
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"{program} says more than {LARGEST_OUTPUT_BYTES >> 20} MiB{asked}, so it was killed.",
        hint="It is broken or no llama.cpp: install another build, or set llama_dir in config.toml to another one.",
        path=str(program),
        source=build.source,
    )


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
