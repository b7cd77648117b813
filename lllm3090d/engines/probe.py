"""Ask a build what it can do: ``--version``, ``--help``, ``--list-devices``. Blocking; callers use a thread.

On a CUDA build ``--list-devices`` opens a compute context in the short-lived child, never in the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.engines.builds import library_environment
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.errors import ErrorCode, LlmError

TIME_LIMIT_S = 20.0  # each command; a real build answers in 10 ms, a CUDA build in about a second
LAST_LINES = 12
# By these a launch would differ from the plan; GGML_VK_VISIBLE_DEVICES and the like describe the card and
# stay.
REMOVED_PREFIXES = ("LLAMA_", "MTMD_", "LLLM3090_")

OPTION_LINE = re.compile(
    r"^(?P<names>-{1,2}[A-Za-z][^\s,]*(?:,\s+-{1,2}[A-Za-z][^\s,]*)*)(?P<rest>.*)$", re.MULTILINE
)
VARIABLE = re.compile(r"\(env:\s*([A-Z][A-Z0-9_]*)\)")
# A description starts at column 40, or on the next line; at least two spaces part it from the value.
DESCRIPTION_GAP = re.compile(r"\s{2,}")
REMOVED_REMARK = "the argument has been removed"
DEVICES_MARK = "Available devices:"
DEVICE_LINE = re.compile(r"^\s+(?P<name>[A-Za-z][A-Za-z0-9_]*): .*\(\d+ MiB, \d+ MiB free\)\s*$")
BACKENDS: Mapping[str, Backend] = {
    "CUDA": Backend.CUDA,
    "Vulkan": Backend.VULKAN,
    "ROCm": Backend.ROCM,
    "HIP": Backend.ROCM,
    "SYCL": Backend.SYCL,
    "Metal": Backend.METAL,
    "MTL": Backend.METAL,
}
# Listed as devices, yet they compute on the processor.
HOST_ACCELERATORS = frozenset({"BLAS", "AMX", "CPU", "ZenDNN", "KleidiAI"})
SIGNAL_MEANING: Mapping[int, str] = {
    signal.SIGILL: "an instruction this processor does not have: the build is for another processor",
    signal.SIGSEGV: "a memory error",
    signal.SIGABRT: "the engine gave up by itself",
    signal.SIGBUS: "a file or memory error",
    signal.SIGKILL: "killed from outside, perhaps for lack of memory",
}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one command said; status is negative for a signal, as subprocess has it."""

    status: int
    stdout: str
    stderr: str
    timed_out: bool

    @property
    def text(self) -> str:
        return self.stdout + ("\n" if self.stdout and not self.stdout.endswith("\n") else "") + self.stderr


def probe(
    build: Build, *, inherited: Mapping[str, str] | None = None, time_limit_s: float = TIME_LIMIT_S
) -> Capabilities:
    """Run the build's three informative commands, side by side.

    Args:
        build: the build.
        inherited: environment to start from, cleaned; None for the process's own.
        time_limit_s: seconds for each command.

    Returns:
        the capabilities; backend UNKNOWN where only ``--list-devices`` failed.

    Raises:
        LlmError: ENGINE_NOT_EXECUTABLE where the system forbids it, ENGINE_UNUSABLE where the build cannot
            run here (missing library, other processor, no such format, no answer in time), with its last
            lines.
    """
    environment = _clean_environment(build, os.environ if inherited is None else inherited)
    options = ("--version", "--help", "--list-devices")
    with ThreadPoolExecutor(max_workers=len(options), thread_name_prefix="probe") as pool:
        running = [pool.submit(_ask, build, option, environment, time_limit_s) for option in options]
        version, usage, devices = (item.result() for item in running)
    for option, answer in (("--version", version), ("--help", usage)):
        if answer.timed_out or answer.status != 0:
            raise _unusable(build, option, answer, time_limit_s)
    flags, valued, variables = parse_help(usage.text)
    if not flags:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"{build.server} lists no options on --help, so it is no llama-server.",
            hint="Choose another build: set llama_dir in config.toml.",
            path=str(build.server),
            last_lines=_last_lines(usage.text),
        )
    names: tuple[str, ...] = ()
    backend = Backend.UNKNOWN
    if not devices.timed_out and devices.status == 0:
        # The list is on stdout; the drivers' own remarks are on stderr.
        names, backend = parse_devices(devices.stdout if DEVICES_MARK in devices.stdout else devices.stderr)
    return Capabilities(
        version=parse_version(version.text),
        flags=flags,
        backend=backend,
        devices=names,
        valued_flags=valued,
        variables=variables,
    )


def parse_version(text: str) -> str:
    """The version line without its label, whatever its format; else the first line, else ``unknown``.

    Seen: ``version: 0.6.0-dev (build 0, commit unknown)``, ``version: 11434 (abc1234)``, ``version: 0.7.0``.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        label, colon, value = line.partition(":")
        if colon and label.lower() == "version" and value.strip():
            return value.strip()
    return lines[0] if lines else "unknown"


def parse_help(text: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Options, those of them that take a value, and environment variables, out of a help text.

    Options stand at the start of a line, their spellings separated by commas, the value's name after the
    last. Those that are only kept to say that they were removed do not count.
    """
    flags: set[str] = set()
    valued: set[str] = set()
    starts = [match.start() for match in OPTION_LINE.finditer(text)]
    for match, end in zip(OPTION_LINE.finditer(text), [*starts, len(text)][1:], strict=False):
        if REMOVED_REMARK in text[match.start() : end]:
            continue
        names = [name.strip() for name in match["names"].split(",")]
        flags.update(names)
        # ``-c,    --ctx-size N    size of ...``: one space and a word is a value, two begin the description.
        rest = match["rest"]
        if rest.startswith(" ") and not DESCRIPTION_GAP.match(rest) and rest.strip():
            valued.update(names)
    return frozenset(flags), frozenset(valued), frozenset(VARIABLE.findall(text))


def parse_devices(text: str) -> tuple[tuple[str, ...], Backend]:
    """Device names and backend out of ``--list-devices``; UNKNOWN without a list, or for an unknown kind."""
    _, mark, rest = text.partition(DEVICES_MARK)
    if not mark:
        return (), Backend.UNKNOWN
    names = tuple(match["name"] for line in rest.splitlines() if (match := DEVICE_LINE.match(line)))
    kinds = [name.rstrip("0123456789") for name in names]
    known = [BACKENDS[kind] for kind in kinds if kind in BACKENDS]
    if known:
        return names, known[0]
    listed = [line.strip() for line in rest.splitlines() if line.strip()]
    if all(kind in HOST_ACCELERATORS for kind in kinds) and (names or listed in ([], ["(none)"], ["none"])):
        return names, Backend.CPU
    return names, Backend.UNKNOWN


def fingerprint(build: Build) -> tuple[tuple[str, int, int, int], ...]:
    """Path, size in bytes, mtime in ns and inode of the executable and of the libraries beside it.

    An engine replaced under the same name has another fingerprint. A file that vanishes is left out.
    """
    files = {build.server}
    for directory in {build.server.parent, *build.library_path}:
        files.update(_libraries(directory))
    rows = []
    for file in sorted(files):
        with contextlib.suppress(FileNotFoundError):
            found = file.stat()
            rows.append((str(file), found.st_size, found.st_mtime_ns, found.st_ino))
    return tuple(rows)


class ProbeCache:
    """Remembers answers in memory as long as the build's files are the same. Thread-safe.

    A failure is not remembered, nor an unknown backend: the next call asks again.
    """

    def __init__(self, *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[tuple[tuple[str, int, int, int], ...], Capabilities]] = {}
        # The last failure, and when it was found: for those who waited for that very probe.
        self._failed: tuple[tuple[tuple[str, int, int, int], ...], float, LlmError] | None = None

    def get(self, build: Build) -> Capabilities:
        """The capabilities of the build; simultaneous callers share one probe. Raises as :func:`probe`."""
        asked_s = time.monotonic()
        with self._lock:
            key = fingerprint(build)
            known = self._known.get(build.server)
            if known is not None and known[0] == key:
                return known[1]
            if self._failed is not None and self._failed[0] == key and self._failed[1] >= asked_s:
                raise self._failed[2]
            try:
                answer = probe(build, time_limit_s=self._time_limit_s)
            except LlmError as error:
                self._failed = (key, time.monotonic(), error)
                raise
            # Exchanged while it was asked: the answer may be of either build, so it is not kept.
            if answer.backend is not Backend.UNKNOWN and fingerprint(build) == key:
                self._known[build.server] = (key, answer)
            else:
                self._known.pop(build.server, None)
            return answer


def _libraries(directory: Path) -> list[Path]:
    try:
        return [entry for entry in directory.iterdir() if ".so" in entry.name]
    except OSError:
        return []  # it may be searched but not listed: the executable's own row has to do


def _clean_environment(build: Build, inherited: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in inherited.items() if not name.startswith(REMOVED_PREFIXES)}
    environment.pop("LD_LIBRARY_PATH", None)
    environment.update(library_environment(build, inherited))
    environment["GGML_NO_BACKTRACE"] = "1"  # a dying engine would start gdb
    return environment


def _ask(build: Build, option: str, environment: Mapping[str, str], time_limit_s: float) -> _Answer:
    try:
        process = subprocess.Popen(
            [str(build.server), option],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(build, error) from error
    with process:
        try:
            stdout, stderr = process.communicate(timeout=time_limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            # The whole session: a child that kept the pipes would be waited for without end.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            timed_out = True
    return _Answer(process.returncode, stdout, stderr, timed_out)


def _not_started(build: Build, error: OSError) -> LlmError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return LlmError(
            ErrorCode.ENGINE_NOT_EXECUTABLE,
            f"{build.server} cannot be executed: {error.strerror}.",
            hint=f"Run: chmod +x '{build.server}'",
            path=str(build.server),
        )
    why = {
        errno.ENOEXEC: "its format cannot be executed here (for another processor, or no program at all)",
        errno.ENOENT: "the file, or the loader or interpreter it names, does not exist",
    }.get(error.errno or 0, error.strerror or str(error))
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"{build.server} cannot be started: {why}.",
        hint="Install a build for this machine, or set llama_dir in config.toml to another one.",
        path=str(build.server),
        source=build.source,
    )


def _unusable(build: Build, option: str, answer: _Answer, time_limit_s: float) -> LlmError:
    lines = _last_lines(answer.text)
    if answer.timed_out:
        how = f"did not answer {option} within {time_limit_s:g} s"
    else:
        how = f"ended on {option}: {describe_status(answer.status)}"
    said = f" It said: {lines[-1]}" if lines else ""
    missing = re.search(r"error while loading shared libraries: (\S+):", answer.text)
    hint = "Install a build for this machine, or set llama_dir in config.toml to another one."
    if missing:
        hint = (
            f"Install the package that holds {missing[1]}, or use a build that brings its libraries with it."
        )
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"{build.server} {how}.{said}",
        hint=hint,
        path=str(build.server),
        source=build.source,
        status=answer.status,
        last_lines=lines,
    )


def describe_status(status: int) -> str:
    """An exit status for a person; a negative one is a signal, named with what it means."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
    meaning = SIGNAL_MEANING.get(-status)
    return f"{name} ({meaning})" if meaning else name


def _last_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LAST_LINES:]
