"""What is true, read from systemd, ``/proc``, control groups and the fake card's state file; nothing of the product.

systemd is asked over the private socket of its manager, as ``systemctl --user`` does, so that a dead message bus does
not blind the checker.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

DAEMON_UNIT = "lllm3090d.service"
MODEL_UNITS = "lllm3090-*.service"
SHOWN = (
    "Id,ActiveState,SubState,MainPID,InvocationID,Result,ExecMainCode,ExecMainStatus,"
    "ActiveEnterTimestampMonotonic,ControlGroup"
)
SYSTEMD_TIMEOUT_S = 10.0
# Either failing makes the card unreadable.
MEMORY_CALL = "nvmlDeviceGetMemoryInfo_v2"
CGROUP_ROOTS = (Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit as systemd shows it."""

    name: str
    active: str = "inactive"
    sub: str = "dead"
    main_pid: int = 0
    invocation: str = ""
    result: str = ""
    active_since_s: float = 0.0  # CLOCK_MONOTONIC
    control_group: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """A process of an engine that serves or loads a model.

    Attributes:
        pid: the process.
        model: its alias.
        unit: last part of its control group.
        socket: where it listens.
        stopped: by SIGSTOP.
    """

    pid: int
    model: str
    unit: str
    socket: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A process on the card.

    Attributes:
        pid: the process.
        bytes: what it holds.
        counts: the card counts it; of a dead process only where the driver gives memory back late.
        alive: the process runs.
    """

    pid: int
    bytes: int
    counts: bool
    alive: bool


@dataclass(frozen=True, slots=True)
class Card:
    """The card as its state file has it, bytes."""

    total: int = 0
    reserved: int = 0
    other: int = 0
    rows: tuple[Row, ...] = ()
    readable: bool = True

    @property
    def used(self) -> int:
        """Without what the driver keeps."""
        return self.other + sum(row.bytes for row in self.rows if row.counts)

    @property
    def late(self) -> bool:
        """Memory of a process that has ended is not back."""
        return any(row.counts and not row.alive for row in self.rows)

    def of(self, pids: Iterable[int]) -> int:
        """What these hold."""
        wanted = set(pids)
        return sum(row.bytes for row in self.rows if row.counts and row.pid in wanted)


@dataclass(frozen=True, slots=True)
class Truth:
    """One look at the machine.

    Attributes:
        at_s: CLOCK_MONOTONIC at its beginning.
        daemon: the daemon's unit.
        daemon_frozen: its process is stopped.
        units: of models, by name; None where systemd did not answer.
        engines: by process.
        card: the card.
    """

    at_s: float
    daemon: Unit
    daemon_frozen: bool
    units: Mapping[str, Unit] | None
    engines: Mapping[int, Engine]
    card: Card = field(default_factory=Card)


def look(engine: Path, card_state: Path) -> Truth:
    """Read everything once.

    Args:
        engine: the executable that counts as an engine.
        card_state: state file of the fake card.
    """
    at_s = time.monotonic()
    units = read_units()
    daemon = (units or {}).get(DAEMON_UNIT, Unit(DAEMON_UNIT))
    return Truth(
        at_s=at_s,
        daemon=daemon,
        daemon_frozen=daemon.main_pid > 0 and process_state(daemon.main_pid) in {"T", "t"},
        units=None if units is None else {name: unit for name, unit in units.items() if name != DAEMON_UNIT},
        engines=find_engines(engine),
        card=read_card(card_state.read_text(encoding="utf-8")),
    )


def read_units() -> dict[str, Unit] | None:
    """The daemon's unit and those of models that systemd has loaded; None where it does not answer."""
    command = ["systemctl", "--user", "show", "--all", MODEL_UNITS, DAEMON_UNIT, f"--property={SHOWN}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SYSTEMD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    found = {}
    for block in done.stdout.split("\n\n"):
        shown = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in shown:
            found[shown["Id"]] = Unit(
                name=shown["Id"],
                active=shown.get("ActiveState", ""),
                sub=shown.get("SubState", ""),
                main_pid=int(shown.get("MainPID") or 0),
                invocation=shown.get("InvocationID", ""),
                result=shown.get("Result", ""),
                active_since_s=int(shown.get("ActiveEnterTimestampMonotonic") or 0) / 1e6,
                control_group=shown.get("ControlGroup", ""),
            )
    return found if DAEMON_UNIT in found else None


def process_state(pid: int) -> str | None:
    """The letter of its state; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()[0]


def runs(pid: int) -> bool:
    """It is there, and no zombie."""
    return process_state(pid) not in {None, "Z", "X"}


def find_engines(engine: Path) -> dict[int, Engine]:
    """All processes of this executable that serve or load a model, wherever they are."""
    found = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        pid = int(directory.name)
        try:
            words = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if str(engine) not in words[:4] or "--host" not in words:
                continue
            cgroups = (directory / "cgroup").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        options = dict(itertools.pairwise(words))
        found[pid] = Engine(
            pid=pid,
            model=options.get("--alias", "").split(",")[0],
            unit=cgroup_of(cgroups).rpartition("/")[2],
            socket=options.get("--host", ""),
            stopped=process_state(pid) in {"T", "t"},
        )
    return found


def cgroup_of(text: str) -> str:
    """The control group that systemd has put a process into, by ``/proc/PID/cgroup``."""
    lines = [line.split(":", 2) for line in text.splitlines()]
    named = [line[2] for line in lines if line[1] == "name=systemd"]
    return (named or [line[2] for line in lines if line[0] == "0"] or [""])[0]


def processes_below(control_group: str) -> list[int]:
    """All processes in a control group and below it."""
    found: set[int] = set()
    for root in CGROUP_ROOTS:
        for file in (root / control_group.lstrip("/")).rglob("cgroup.procs"):
            try:
                found |= {int(line) for line in file.read_text(encoding="ascii").split()}
            except (FileNotFoundError, OSError):  # it has just gone
                continue
    return sorted(found)


def read_card(text: str) -> Card:
    """The first card of a state file, by the rules that the fake library documents."""
    figures = {"total": 0, "reserved": 0, "other": 0}
    rows: list[Row] = []
    readable = True
    for line in text.splitlines():
        key, *values = line.split() or [""]
        if key in figures:
            figures[key] = int(values[0])
        elif key == "lost" or (key == "fail" and values[0] == MEMORY_CALL):
            readable = False
        elif key == "process" and values[2] != "na":
            pid = int(values[1])
            alive = runs(pid)
            rows.append(Row(pid, int(values[2]), alive or values[3:4] != ["alive"], alive))
    return Card(figures["total"], figures["reserved"], figures["other"], tuple(rows), readable)
