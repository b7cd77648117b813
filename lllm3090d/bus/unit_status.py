"""What systemd says of a service, as plain data: no bus and no I/O here.

Words of systemd (states, results) stay strings: newer versions add more, and an unknown one must not hurt.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

NO_DATA = (1 << 64) - 1  # how systemd says that a counter is not there
NO_JOB = 0
UNIT_PATH_PREFIX = "/org/freedesktop/systemd1/unit/"
EXITED, KILLED, DUMPED = 1, 2, 3  # ExecMainCode: CLD_EXITED, CLD_KILLED, CLD_DUMPED of waitid(2)

# What is kept of the properties of the two interfaces.
UNIT_KEYS = frozenset(
    {"Description", "LoadState", "ActiveState", "SubState", "InvocationID", "Job", "Transient"}
)
SERVICE_KEYS = frozenset(
    {
        "Result",
        "MainPID",
        "ExecMainCode",
        "ExecMainStatus",
        "ExecMainStartTimestampMonotonic",
        "ControlGroup",
        "Environment",
        "ExecStart",
        "MemoryCurrent",
    }
)


@dataclass(frozen=True, slots=True)
class UnitStatus:
    """A service as systemd describes it.

    Attributes:
        result: how it ended, "success" until it fails.
        main_pid: 0 when there is no main process.
        exec_main_code: 0 while it runs, else :data:`EXITED`, :data:`KILLED` or :data:`DUMPED`.
        exec_main_status: exit status or signal, by ``exec_main_code``.
        exec_main_start_monotonic_s: CLOCK_MONOTONIC when the main process was started; 0 if never.
        invocation_id: 32 hexadecimal digits, or empty before the first start.
        control_group: path below the cgroup root, empty when unknown or gone.
        environment: ``NAME=value`` of the unit's own settings.
        argv: of the first ExecStart, with argv[0].
        job_pending: a job waits or runs for this unit.
        memory_current_bytes: None when not asked for or not counted.
    """

    name: str
    description: str
    load_state: str
    active_state: str
    sub_state: str
    result: str
    main_pid: int
    exec_main_code: int
    exec_main_status: int
    exec_main_start_monotonic_s: float
    invocation_id: str
    control_group: str
    environment: tuple[str, ...]
    argv: tuple[str, ...]
    job_pending: bool
    transient: bool
    memory_current_bytes: int | None

    @property
    def is_active(self) -> bool:
        """Up and past its start."""
        return self.active_state in {"active", "reloading", "refreshing"}

    @property
    def is_failed(self) -> bool:
        """Ended badly, and nothing is about to change that."""
        return self.active_state == "failed" and not self.job_pending

    @property
    def is_gone(self) -> bool:
        """Not running, not failed, and nothing is about to change that."""
        return self.active_state == "inactive" and not self.job_pending

    @property
    def variables(self) -> Mapping[str, str]:
        """``environment`` by name."""
        return MappingProxyType(dict(item.partition("=")[::2] for item in self.environment))

    @classmethod
    def from_properties(cls, name: str, unit: Mapping[str, Any], service: Mapping[str, Any]) -> Self:
        """From what the interfaces ``Unit`` and ``Service`` say; what is missing counts as unknown."""
        commands: Sequence[Any] = service.get("ExecStart", ())
        memory = service.get("MemoryCurrent", NO_DATA)
        return cls(
            name=name,
            description=unit.get("Description", ""),
            load_state=unit.get("LoadState", ""),
            active_state=unit.get("ActiveState", ""),
            sub_state=unit.get("SubState", ""),
            result=service.get("Result", ""),
            main_pid=service.get("MainPID", 0),
            exec_main_code=service.get("ExecMainCode", 0),
            exec_main_status=service.get("ExecMainStatus", 0),
            exec_main_start_monotonic_s=service.get("ExecMainStartTimestampMonotonic", 0) / 1e6,
            invocation_id=bytes(unit.get("InvocationID", ())).hex(),
            control_group=service.get("ControlGroup", ""),
            environment=tuple(service.get("Environment", ())),
            argv=tuple(commands[0][1]) if commands else (),
            job_pending=unit.get("Job", (NO_JOB, "/"))[0] != NO_JOB,
            transient=unit.get("Transient", False),
            memory_current_bytes=None if memory == NO_DATA else memory,
        )


def unit_path_element(text: str) -> str:
    """Escape a unit name, or the beginning of one, as systemd does in object paths."""
    escaped = re.sub(
        r"[^A-Za-z0-9]", lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), text
    )
    return f"_{ord(escaped[0]):02x}{escaped[1:]}" if escaped[:1].isdigit() else escaped


def unit_name(path: str) -> str:
    """The unit name in an object path of systemd, the reverse of :func:`unit_path_element`."""
    element = path.removeprefix(UNIT_PATH_PREFIX).encode()
    return re.sub(rb"_([0-9a-f]{2})", lambda found: bytes.fromhex(found[1].decode()), element).decode()


# Exit statuses that systemd itself sets when the program never ran; systemd.exec(5), "Process Exit Codes".
SETUP_FAILURES: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        200: ("CHDIR", "the working directory could not be entered"),
        202: ("FDS", "file descriptors could not be prepared"),
        203: ("EXEC", "the file could not be executed"),
        204: ("MEMORY", "memory ran out before the start"),
        205: ("LIMITS", "resource limits could not be set"),
        206: ("OOM_ADJUST", "the OOM score could not be set"),
        207: ("SIGNAL_MASK", "the signal mask could not be set"),
        208: ("STDIN", "standard input could not be set up"),
        209: ("STDOUT", "standard output could not be set up"),
        210: ("CHROOT", "the root directory could not be changed"),
        211: ("IOPRIO", "the I/O priority could not be set"),
        214: ("SETSCHEDULER", "the CPU scheduling could not be set"),
        215: ("CPUAFFINITY", "the CPU affinity could not be set"),
        216: ("GROUP", "the group could not be changed"),
        217: ("USER", "the user could not be changed"),
        218: ("CAPABILITIES", "capabilities or a sandbox could not be set up"),
        219: ("CGROUP", "the control group could not be set up"),
        222: ("STDERR", "standard error could not be set up"),
        225: ("NETWORK", "the network sandbox could not be built"),
        226: ("NAMESPACE", "the sandbox could not be built"),
        227: ("NO_NEW_PRIVILEGES", "new privileges could not be forbidden"),
        228: ("SECCOMP", "the system call filter could not be installed"),
        233: ("RUNTIME_DIRECTORY", "the runtime directory could not be made"),
        238: ("STATE_DIRECTORY", "the state directory could not be made"),
        239: ("CACHE_DIRECTORY", "the cache directory could not be made"),
        240: ("LOGS_DIRECTORY", "the logs directory could not be made"),
        243: ("CREDENTIALS", "credentials could not be set up"),
        245: ("BPF", "a BPF restriction could not be installed"),
    }
)
_RESULTS: Mapping[str, str] = MappingProxyType(
    {
        "timeout": "ran into a time limit of systemd",
        "watchdog": "stopped sending watchdog pings",
        "oom-kill": "was killed because memory ran out",
        "start-limit-hit": "was started too often",
        "resources": "could not be set up by systemd for lack of resources",
        "protocol": "did not keep to the start-up protocol",
        "exec-condition": "was not started: a condition did not hold",
    }
)


def explain_exit(status: UnitStatus) -> str:
    """How the main process ended, as the end of a sentence that begins with its name."""
    why = _RESULTS.get(status.result)
    how = _how(status)
    if why is not None:
        return f"{why} ({how})" if how else why
    if how:
        return f"was {how}" if status.exec_main_code in {KILLED, DUMPED} else how
    if status.is_failed or status.is_gone:
        return (
            "never ran" if status.result in {"", "success"} else f"never ran: systemd says {status.result}"
        )
    return "has not ended"


def _how(status: UnitStatus) -> str:
    if status.exec_main_code == EXITED:
        failure = SETUP_FAILURES.get(status.exec_main_status)
        if failure is not None:
            return f"never ran: {failure[1]} ({status.exec_main_status}/{failure[0]})"
        return f"exited with status {status.exec_main_status}"
    if status.exec_main_code in {KILLED, DUMPED}:
        core = " and dumped core" if status.exec_main_code == DUMPED else ""
        return f"killed by {_signal_name(status.exec_main_status)}{core}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
