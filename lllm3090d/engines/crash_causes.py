"""Why an engine ended, by how it ended and by its last lines. Pure.

The texts are those of llama.cpp b11434 and some older builds, of the drivers that it passes on, of the loader of shared
libraries and of systemd. What nothing explains is ``unknown``; a line of another kind is never taken for one of these.

Three layers, the first that knows decides: what only the system can know (the kernel's memory killer, a start that
never was, a signal from outside), then the first line that names a cause, then the exit status alone.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

LINES_OF_INTEREST = 40  # what is said last of an engine's log


class CrashCause(enum.StrEnum):
    """Causes; the values are stable, clients treat one that they do not know as ``unknown``."""

    OUT_OF_DEVICE_MEMORY = "out_of_device_memory"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    BAD_FILE = "bad_file"
    FILE_UNREADABLE = "file_unreadable"
    UNKNOWN_FLAG = "unknown_flag"
    MISSING_LIBRARY = "missing_library"
    WRONG_BUILD = "wrong_build"
    ILLEGAL_INSTRUCTION = "illegal_instruction"
    DEVICE_LOST = "device_lost"
    KILLED = "killed"
    SOCKET_TROUBLE = "socket_trouble"
    SETUP_FAILED = "setup_failed"
    ENGINE_FAULT = "engine_fault"
    HUNG = "hung"
    UNKNOWN = "unknown"


OUT_OF_DEVICE_MEMORY = CrashCause.OUT_OF_DEVICE_MEMORY


class Retry(enum.Enum):
    """Whether starting the same again can help."""

    NEVER = enum.auto()
    SMALLER_ONCE = enum.auto()  # once, with the plan that the calibration makes of it
    ONCE = enum.auto()
    YES = enum.auto()


@dataclass(frozen=True, slots=True)
class CauseKind:
    """A cause for a person.

    Attributes:
        title: the end of a sentence that begins with "the engine".
        advice: what to do.
        retry: whether starting the same again can help.
    """

    title: str
    advice: str
    retry: Retry

    @property
    def is_transient(self) -> bool:
        """It may be gone at the next start."""
        return self.retry is not Retry.NEVER


C = CrashCause
KINDS: Mapping[CrashCause, CauseKind] = MappingProxyType(
    {
        C.OUT_OF_DEVICE_MEMORY: CauseKind(
            "ran out of device memory",
            "Ask for a smaller context or free the card; the next plan of this model counts with more.",
            Retry.SMALLER_ONCE,
        ),
        C.OUT_OF_HOST_MEMORY: CauseKind(
            "ran out of host memory",
            "Close other programs, or ask for less of what stays in host memory: checkpoints, prompt cache, layers.",
            Retry.YES,
        ),
        C.BAD_FILE: CauseKind(
            "cannot use the model's file",
            "Download the file again, or select an engine that knows this kind of model.",
            Retry.NEVER,
        ),
        C.FILE_UNREADABLE: CauseKind(
            "could not read a file of the model",
            "See whether the disk is mounted and healthy, and whether the file is there and readable.",
            Retry.YES,
        ),
        C.UNKNOWN_FLAG: CauseKind(
            "was given an argument that it does not know or cannot use",
            "Remove it from extra_arguments, or select an engine that knows it: lllm3090ctl engine list",
            Retry.NEVER,
        ),
        C.MISSING_LIBRARY: CauseKind(
            "could not be executed: a file or a shared library is missing",
            "Install what its last line names, or select another engine: lllm3090ctl engine list",
            Retry.NEVER,
        ),
        C.WRONG_BUILD: CauseKind(
            "was not built for this card or this driver",
            "Select a build for this card, or update the driver: lllm3090ctl engine list",
            Retry.NEVER,
        ),
        C.ILLEGAL_INSTRUCTION: CauseKind(
            "uses instructions that this processor does not have",
            "Select a build for this processor: lllm3090ctl engine list",
            Retry.NEVER,
        ),
        C.DEVICE_LOST: CauseKind(
            "lost the card: a computation failed on it, or it no longer answers",
            "See the kernel's messages (journalctl -k); where the card does not come back, restart the machine.",
            Retry.YES,
        ),
        C.KILLED: CauseKind(
            "was stopped from outside",
            "Somebody sent it a signal: a person, or a guard such as earlyoom. To unload it: lllm3090ctl unload",
            Retry.YES,
        ),
        C.SOCKET_TROUBLE: CauseKind(
            "could not listen on its socket",
            "See whether the runtime directory is there, writable and not full.",
            Retry.YES,
        ),
        C.SETUP_FAILED: CauseKind(
            "could not be set up by systemd",
            "See: systemctl --user status with the unit's name; a restriction may not be supported here.",
            Retry.NEVER,
        ),
        C.ENGINE_FAULT: CauseKind(
            "failed by a fault of its own",
            "If it happens again, try another build of the engine, and report the last lines to its makers.",
            Retry.YES,
        ),
        # Not told by how it ended: whoever watches it has stopped it.
        C.HUNG: CauseKind(
            "hung: it was at work and got nowhere",
            "See the kernel's messages (journalctl -k); if it happens again, try another build of the engine.",
            Retry.ONCE,
        ),
        C.UNKNOWN: CauseKind(
            "ended for a reason that is not known",
            "See its last lines.",
            Retry.YES,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a unit ended, as systemd says it.

    Attributes:
        result: of the service, such as ``exit-code``, ``signal``, ``oom-kill``; empty unknown.
        exit_status: of the main process, where it exited.
        signal_number: that killed the main process, where one did.
        on_card: the engine computes on a card: of a buffer without a name there, it is the card's.
        asked_for: we stopped it; a signal is then not from outside.
    """

    result: str = ""
    exit_status: int | None = None
    signal_number: int | None = None
    on_card: bool = True
    asked_for: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """The cause, the line that tells it, and what the card reported of it; None where none does."""

    cause: CrashCause
    line: str | None = None
    reported: str | None = None

    @property
    def kind(self) -> CauseKind:
        """The cause for a person."""
        return KINDS[self.cause]


_DEVICE = r"(?:CUDA|Vulkan|ROCm|HIP|SYCL)\d*(?:_Split)?"
# Errors of the driver's interface after which a process cannot compute any more; a new one may.
_LOST = (
    r"unspecified launch failure|the launch timed out|an illegal memory access|device-side assert|misaligned address"
    r"|uncorrectable ECC|unknown error|GPU is lost|no CUDA-capable device|device not ready"
    r"|hardware stack error|illegal instruction was encountered|invalid program counter|system not yet initialized"
)
# Xid of NVIDIA's driver by which the card or its memory is broken, not only the process that used it.
_FATAL_XID = r"(?:48|61|62|64|74|79|92|94|95|109|119|120|140|143|154)"
_UNREADABLE = (
    r"(?:No such (?:file|device)|Permission denied|Input/output error|Stale|Too many open|Is a directory)"
)
_MEMORY = r"(?:Cannot allocate memory|Out of memory|not enough memory|std::bad_alloc)"


def _rule(cause: CrashCause, *patterns: str) -> tuple[CrashCause, re.Pattern[str]]:
    return cause, re.compile("|".join(patterns), re.IGNORECASE)


# Lines that name a cause by themselves; of one line the first rule that fits.
_STRONG = (
    _rule(
        C.OUT_OF_DEVICE_MEMORY,
        r"(?:cuda|hip)\w*Malloc\w* failed: out of memory",
        r"(?:CUDA|ROCm|HIP) error: out of memory",
        r"ErrorOutOfDeviceMemory|VK_ERROR_OUT_OF_DEVICE_MEMORY",
        r"ggml_vulkan: Device memory allocation of size \d+ failed",
        rf"(?:failed|unable) to allocate {_DEVICE} buffer",
    ),
    _rule(
        C.WRONG_BUILD,
        r"no kernel image is available",
        r"driver version is insufficient",
        r"unsupported display driver / cuda driver combination",
        r"the provided PTX was compiled with an unsupported toolchain",
    ),
    _rule(
        C.DEVICE_LOST,
        rf"(?:CUDA|ROCm|HIP) error:?(?: \d+.*)? ?(?:{_LOST})",
        r"vk::DeviceLostError|ErrorDeviceLost|VK_ERROR_DEVICE_LOST",
        r"Memory access fault by GPU node|HSA_STATUS_ERROR",
        rf"NVRM: Xid \([^)]*\): {_FATAL_XID}\b",
        r"GPU has fallen off the bus",
        # The card that was to be used is not among those that the driver shows.
        r'error while handling argument "(?:-dev|--device)": invalid device: (?!none)',
    ),
    _rule(
        C.MISSING_LIBRARY,
        r"error while loading shared libraries:",
        r"symbol lookup error:",
        r"version `[^']*' not found \(required by",
        r"Failed to (?:execute|locate executable)",
    ),
    _rule(
        C.UNKNOWN_FLAG,
        r"^error: (?:invalid|unknown) argument:",
        r'^error while handling argument "',
        r"^error while handling environment variable ",
        r"quantized V cache (?:was requested|requires)",
    ),
    _rule(C.SOCKET_TROUBLE, r"couldn't bind (?:HTTP server|to server) socket", r"Address already in use"),
    _rule(
        C.OUT_OF_HOST_MEMORY,
        r"ggml_aligned_malloc: insufficient memory",
        r"ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer",
        r"(?:failed|unable) to allocate CPU\w* buffer",
        rf"mmap failed: {_MEMORY}",
        r"posix_memalign failed",
        # Alone on its line, as the runtime library says it: elsewhere the engine has caught it.
        r"terminate called after throwing an instance of 'std::bad_alloc'|^\s*what\(\):\s+std::bad_alloc",
        r"ErrorOutOfHostMemory|VK_ERROR_OUT_OF_HOST_MEMORY",
        r"killed by the OOM killer",
    ),
    _rule(
        C.FILE_UNREADABLE,
        rf"failed to open .*(?:: |\(){_UNREADABLE}",
        rf"(?:read|seek|mmap) (?:error|failed): {_UNREADABLE}",
    ),
    _rule(
        C.BAD_FILE,
        r"data is not within the file bounds",
        r"gguf_init_from_\w+: (?:failed to read|invalid|bad |duplicate|tensor|this GGUF file is version)",
        r"invalid magic characters",
        r"failed to read magic",
        r"\bread: string length \d+ exceeds remaining",
        r"unknown model architecture",
        r"unknown (?:pre-tokenizer type|tokenizer)",
        r"error loading model (?:vocabulary|hyperparameters|architecture):",
        r"error loading model: (?:missing tensor|check_tensor_dims|create_tensor|done_getting_tensors|get_tensor)",
        r"error loading model: (?:key not found|invalid model|corrupted model|invalid split|illegal split|missing key)",
        r"error loading model: (?:unexpectedly reached end of file|tensor .* has invalid data|found tensors with)",
        r"wrong number of tensors; expected",
        r"has wrong (?:shape; expected|array length; expected|type \S+ but expected)",
        r"unexpectedly reached end of file",
    ),
    _rule(
        C.ENGINE_FAULT,
        r"GGML_ASSERT\(|GGML_ABORT\(|GGML_ASSERT: ",
        r"(?:CUDA|ROCm|HIP) error: ",  # of another kind than above: a call that it should not have made
        r"^free\(\): invalid|double free or corruption|malloc\(\): |corrupted size vs\. prev_size",
        r"\*\*\* stack smashing detected",
    ),
)
# Lines that tell a cause where no other does: they also stand in the log of an engine that went on.
_WEAK = (
    _rule(C.OUT_OF_HOST_MEMORY, r"failed to mlock", rf"\b{_MEMORY}"),
    _rule(C.ENGINE_FAULT, r"^terminate called after throwing an instance of"),
)
# Of buffers without a name; on a card they are the card's.
_NAMELESS_BUFFER = re.compile(
    r"failed to allocate buffer for (?:kv|rs) cache|failed to allocate compute (?:pp |tg )?buffers"
)
# What was said before these was overcome.
_OVERCOME = re.compile(
    r"retrying without pipeline parallelism|llama_server: (?:model loaded|listening on)|server is listening on"
)
# The engine goes on without: pinned memory is only quicker, the prompt cache only saves work.
_HARMLESS = re.compile(r"pinned memory|prompt cache state")
# Names of files and models, which say nothing of what happened: a model may be called anything.
_QUOTED = re.compile(r"(?<=[\s(=:])'[^']*'")
_KEPT_QUOTES = re.compile(r"'(?:std|vk)::\w+'")

_FROM_OUTSIDE = frozenset(
    {
        signal.SIGTERM,
        signal.SIGKILL,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_BY_SIGNAL: Mapping[int, CrashCause] = MappingProxyType(
    {
        signal.SIGABRT: C.ENGINE_FAULT,
        signal.SIGSEGV: C.ENGINE_FAULT,
        signal.SIGFPE: C.ENGINE_FAULT,
        signal.SIGTRAP: C.ENGINE_FAULT,
        signal.SIGBUS: C.FILE_UNREADABLE,  # a mapped file that ended, or a disk that does not deliver
        signal.SIGSYS: C.SETUP_FAILED,  # a system call that the unit's filter forbids
    }
)
# systemd.exec(5), "Process Exit Codes": set by systemd where the program never ran.
_EXEC, _NO_MEMORY = 203, 204
_SETUP = frozenset(range(200, 246))
_NOT_FOUND = frozenset({126, 127})  # the loader's, and a shell's


def classify(ending: Ending, lines: Sequence[str] = (), reported: str | None = None) -> Finding:
    """Find the cause of an end.

    Args:
        ending: what systemd says.
        lines: the last ones of the engine, oldest first; more than :data:`LINES_OF_INTEREST` are cut to the last.
        reported: an error that the card has reported just before, of the engine's process or of the whole card. It
            explains what looks like a fault of the engine's own, and nothing that has an explanation.
    """
    recent = _since_overcome(lines[-LINES_OF_INTEREST:])
    found = _by_system(ending) or _by_lines(recent, ending.on_card) or _by_status(ending)
    if reported is not None and found.cause in {C.ENGINE_FAULT, C.UNKNOWN}:
        return Finding(C.DEVICE_LOST, found.line, reported)
    return found


def ran_out_of_device_memory(lines: Iterable[str]) -> str | None:
    """The line that says so, of an engine on a card; None where none does."""
    found = _by_lines(_since_overcome(list(lines)), on_card=True)
    return found.line if found is not None and found.cause is C.OUT_OF_DEVICE_MEMORY else None


def _by_system(ending: Ending) -> Finding | None:
    """What the lines cannot tell, and what they must not overrule."""
    if ending.result == "oom-kill":
        return Finding(C.OUT_OF_HOST_MEMORY)
    if ending.exit_status in _SETUP:
        causes = {_EXEC: C.MISSING_LIBRARY, _NO_MEMORY: C.OUT_OF_HOST_MEMORY}
        return Finding(causes.get(ending.exit_status or 0, C.SETUP_FAILED))
    if ending.signal_number == signal.SIGILL:
        return Finding(C.ILLEGAL_INSTRUCTION)
    if ending.signal_number in _FROM_OUTSIDE and not ending.asked_for:
        # systemd itself kills what runs into one of its limits.
        return Finding(C.UNKNOWN if ending.result in {"timeout", "watchdog"} else C.KILLED)
    return None


def _by_status(ending: Ending) -> Finding:
    if ending.exit_status in _NOT_FOUND:
        return Finding(C.MISSING_LIBRARY)
    if ending.signal_number is not None and ending.signal_number in _BY_SIGNAL:
        return Finding(_BY_SIGNAL[ending.signal_number])
    if ending.exit_status == 0 and not ending.asked_for:
        return Finding(C.KILLED)  # it ends with 0 only after SIGTERM or SIGINT
    if ending.result == "resources":
        return Finding(C.SETUP_FAILED)
    return Finding(C.UNKNOWN)


def _since_overcome(lines: Sequence[str]) -> Sequence[str]:
    for index in range(len(lines) - 1, -1, -1):
        if _OVERCOME.search(lines[index]):
            return lines[index + 1 :]
    return lines


def _by_lines(lines: Sequence[str], on_card: bool) -> Finding | None:
    bare = [(line, _without_names(line)) for line in lines if not _HARMLESS.search(line)]
    nameless = (C.OUT_OF_DEVICE_MEMORY if on_card else C.OUT_OF_HOST_MEMORY, _NAMELESS_BUFFER)
    # An assertion often follows what was said of its reason, so the first line counts within a tier.
    for rules in (_STRONG[:-1], (nameless,), _STRONG[-1:], _WEAK):
        for line, text in bare:
            for cause, pattern in rules:
                if pattern.search(text):
                    return Finding(cause, line)
    return None


def _without_names(line: str) -> str:
    return _QUOTED.sub(lambda found: found[0] if _KEPT_QUOTES.fullmatch(found[0]) else "''", line)
