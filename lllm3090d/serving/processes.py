"""Processes as the kernel knows them: to which unit they belong, what they hold in host memory, who they are."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.gpus.sysfs import SYSTEM, Roots
from lllm3090d.serving.load_watch import LoadCounters
from lllm3090d.serving.observation import RunProcesses
from lllm3090d.serving.readiness import cgroups_of

KIB = 1024
# Below /sys/fs/cgroup: nothing where version 2 is alone, else where version 2 or systemd's own hierarchy is.
HIERARCHIES = ("", "unified", "systemd")
COMM_LENGTH = 15  # characters of a command name that the kernel keeps


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Host memory of a process, bytes (``/proc/PID/status``).

    Attributes:
        resident_bytes: everything it has in memory, mapped files included.
        anonymous_bytes: what the kernel cannot drop: anonymous and shared memory.
    """

    resident_bytes: int
    anonymous_bytes: int

    def __add__(self, other: ProcessMemory) -> ProcessMemory:
        """Of both; memory that they share counts twice."""
        return ProcessMemory(
            self.resident_bytes + other.resident_bytes, self.anonymous_bytes + other.anonymous_bytes
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is, as a person knows it; empty where nobody may look, user also for our own.

    Attributes:
        name: its command.
        user: who owns it, by name, or ``user`` and the number of one without a name.
        uid: who owns it.
    """

    name: str
    user: str
    uid: int


def process_memory(pid: int, proc: Path = SYSTEM.proc) -> ProcessMemory | None:
    """Memory of a process; None when it is gone."""
    try:
        text = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("VmRSS", "Rss")))

    def read_bytes(key: str) -> int:
        # A zombie has no such lines: it holds nothing.
        return int(fields.get(key, "0 kB").split()[0]) * KIB

    return ProcessMemory(read_bytes("VmRSS"), read_bytes("RssAnon") + read_bytes("RssShmem"))


def owner_of(pid: int, runs: Mapping[str, RunProcesses], proc: Path = SYSTEM.proc) -> str | None:
    """The run that a process is one of, if any: it lies in the unit's control group or below it.

    The main process counts also where no control group is known: before systemd has told the unit's, and when the
    process has ended while a driver still lists it. In another group than the unit's it is a stranger with a number
    that was used before.
    """
    groups = frozenset(path.removesuffix(" (deleted)") for path in groups_of(pid, proc))
    return next((name for name, run in runs.items() if _is_one(pid, groups, run)), None)


def groups_of(pid: int, proc: Path = SYSTEM.proc) -> frozenset[str]:
    """The control groups of a process; none where it is gone, or nobody may look."""
    try:
        return cgroups_of(pid, proc)
    except PermissionError:
        return frozenset()  # of another user, where proc hides those


def _is_one(pid: int, groups: frozenset[str], run: RunProcesses) -> bool:
    if not groups or not run.control_group:
        return pid == run.main_pid
    return any(path == run.control_group or path.startswith(run.control_group + "/") for path in groups)


def pids_of(run: RunProcesses, roots: Roots = SYSTEM) -> frozenset[int]:
    """All processes of a run: those in its unit's control group, or the main one where that cannot be read."""
    if run.control_group:
        for hierarchy in HIERARCHIES:
            file = roots.cgroup / hierarchy / run.control_group.lstrip("/") / "cgroup.procs"
            try:
                return frozenset(int(line) for line in file.read_text(encoding="ascii").split())
            except OSError:
                continue  # another hierarchy, or the unit has ended
    if run.main_pid is not None and _is_one(run.main_pid, groups_of(run.main_pid, roots.proc), run):
        return frozenset({run.main_pid})
    return frozenset()


def host_memory_of(run: RunProcesses, roots: Roots = SYSTEM) -> ProcessMemory | None:
    """What all processes of a run hold in host memory; None when there is none of them."""
    found = [
        memory for pid in pids_of(run, roots) if (memory := process_memory(pid, roots.proc)) is not None
    ]
    return sum(found, ProcessMemory(0, 0)) if found else None


def load_counters_of(run: RunProcesses, roots: Roots = SYSTEM) -> LoadCounters:
    """What all processes of a run have read, written and hold in host memory; None of what nobody may see.

    A process that has ended takes its figures with it, so a sum may fall.
    """
    found = [
        counters for pid in pids_of(run, roots) if (counters := process_io(pid, roots.proc)) is not None
    ]
    memory = host_memory_of(run, roots)
    resident = None if memory is None else memory.resident_bytes
    if not found:
        return LoadCounters(resident_bytes=resident)
    return LoadCounters(
        read_bytes=sum(each.read_bytes or 0 for each in found),
        disk_bytes=sum(each.disk_bytes or 0 for each in found),
        written_bytes=sum(each.written_bytes or 0 for each in found),
        resident_bytes=resident,
    )


def process_io(pid: int, proc: Path = SYSTEM.proc) -> LoadCounters | None:
    """What a process has read and written (proc_pid_io(5)); None when it is gone, or of another user."""
    try:
        text = (proc / str(pid) / "io").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    values = {name: int(value) for name, _, value in (line.partition(":") for line in text.splitlines())}
    return LoadCounters(values.get("rchar"), values.get("read_bytes"), values.get("wchar"))


def identity_of(pid: int, proc: Path = SYSTEM.proc) -> Identity | None:
    """Who a process is; None where proc does not know it: it has ended, or lives in another namespace of processes."""
    place = proc / str(pid)
    try:
        owner = place.stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Identity(_name(place), "" if owner == os.geteuid() else _user(owner), owner)


def _name(place: Path) -> str:
    """Of the command, whole where that may be seen; empty where nobody may look."""
    try:
        name = (place / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    if len(name) < COMM_LENGTH:
        return name
    try:
        whole = (place / "exe").readlink().name
    except OSError:
        return name  # of another user
    return whole if whole.startswith(name) else name


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
