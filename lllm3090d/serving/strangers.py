"""Who a process on a card is that is none of ours: its name, its owner, and whose model it serves.

What the kernel lets every user see is enough: the owner of ``/proc/PID``, its ``comm`` and ``cgroup`` (proc(5)). Where
proc is mounted with ``hidepid``, or the process lives in another PID namespace, even that is missing, and so is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lllm3090d.gpus.readings import CardProcess
from lllm3090d.gpus.sysfs import SYSTEM, Roots
from lllm3090d.serving.observation import Stranger
from lllm3090d.serving.processes import HIERARCHIES, groups_of, identity_of
from lllm3090d.serving.unit_spec import SLICE, UNIT_PREFIX

NOT_HERE = "it has ended, or runs in another PID namespace such as a container"
HIDDEN = "proc hides processes of other users here (hidepid), unless it has ended"
FIRST_PERSON = 1000
DYNAMIC_USERS = range(61184, 65520)
NOBODY = (65534, 65535)
# The unit of a launch below the manager of the user whom its control group names.
_MODEL = re.compile(
    rf"/user@(?P<uid>\d{{1,10}})\.service(?:/[^/]+)*/{re.escape(UNIT_PREFIX)}(?P<name>[^/]+)-[0-9a-f]+\.service(?:/|$)"
)
# A line of proc_pid_mounts(5); the last one counts.
_MOUNT = re.compile(r"^\S+ /proc proc (?P<options>\S+)", re.MULTILINE)
_HIDES = re.compile(r"\bhidepid=(?:[24]|invisible|ptraceable)\b")


def stranger_of(process: CardProcess, proc: Path = SYSTEM.proc) -> Stranger:
    """Who a process is that no run of ours has.

    Args:
        process: as the driver lists it.
        proc: where proc is mounted.
    """
    who = identity_of(process.pid, proc)
    if who is None:
        return Stranger(process.pid, "", "", process.used_bytes, unseen=why_unseen(proc))
    model = model_of(groups_of(process.pid, proc), who.uid) if who.user else ""
    is_persons = bool(who.user) and is_person(who.uid)
    return Stranger(process.pid, who.name, who.user, process.used_bytes, model, is_persons=is_persons)


def is_person(uid: int) -> bool:
    """A number that people have, by systemd's "Users, Groups, UIDs and GIDs": no system, dynamic or unmapped user."""
    return uid >= FIRST_PERSON and uid not in DYNAMIC_USERS and uid not in NOBODY


def model_of(groups: Iterable[str], uid: int) -> str:
    """The model that a process serves for its user, as far as its unit's name tells; empty where it is no engine.

    Args:
        groups: its control groups.
        uid: who owns it. A group of another user's manager says nothing: only that user's daemon makes units there.
    """
    found = (_MODEL.search(group.removesuffix(" (deleted)")) for group in groups)
    return next((match["name"] for match in found if match and int(match["uid"]) == uid), "")


def why_unseen(proc: Path = SYSTEM.proc) -> str:
    """Why proc does not know a process that a driver lists, as the end of a sentence."""
    try:
        mounts = (proc / "mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return NOT_HERE
    options = [match["options"] for match in _MOUNT.finditer(mounts)]
    return HIDDEN if options and _HIDES.search(options[-1]) else NOT_HERE


def engines_of_others(roots: Roots = SYSTEM) -> tuple[Stranger, ...]:
    """Main processes of other users' models, by their control groups; what they hold is not known.

    For cards whose drivers tell nobody about another user's process (:mod:`lllm3090d.gpus.fdinfo`).
    """
    found = {each.pid: each for group in _groups_of_models(roots.cgroup) for each in _first(group, roots)}
    return tuple(found[pid] for pid in sorted(found))


def _groups_of_models(root: Path) -> Iterator[Path]:
    pattern = f"user.slice/user-*.slice/user@*.service/{SLICE}/{UNIT_PREFIX}*.service"
    for hierarchy in HIERARCHIES:
        yield from (root / hierarchy).glob(pattern)


def _first(group: Path, roots: Roots) -> Iterator[Stranger]:
    """The process of a group that came first, where it is another user's engine."""
    try:
        pids = sorted(int(line) for line in (group / "cgroup.procs").read_text(encoding="ascii").split())
    except OSError:
        return  # it has ended, or is hidden
    for pid in pids[:1]:
        each = stranger_of(CardProcess(pid, None), roots.proc)
        if each.user and each.model:
            yield each
