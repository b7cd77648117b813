"""Control-group hierarchies: which exist here, a cgroup of our own in each, and its removal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Nothing in systemd uses cpuset, net_cls and the like as v1 controllers; a new v1 cpuset cannot even hold a
# process before it is given CPUs.
V1_CONTROLLERS = frozenset({"cpu", "cpuacct", "blkio", "memory", "devices", "pids", "freezer"})
LAST_SYSTEMD_WITH_V1 = 257
SUPERVISOR = "supervisor"  # the cgroup in a delegated scope that survives until all else is gone


@dataclass(frozen=True)
class Hierarchy:
    """One mounted hierarchy and where this process is in it.

    Attributes:
        mount_point: where it is mounted.
        options: mount options that name it: v1 controllers, or ``name=...``; empty for cgroup v2.
        own: directory of this process's cgroup.
    """

    mount_point: Path
    options: tuple[str, ...]
    own: Path

    @property
    def unified(self) -> bool:
        """Whether it is cgroup v2."""
        return not self.options

    @property
    def name(self) -> str:
        """Name of its directory in a hybrid layout."""
        if self.unified:
            return "unified"
        return ",".join(option.removeprefix("name=") for option in self.options)


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def _below(mount_point: Path, mount_root: str, cgroup: str) -> Path | None:
    relative = os.path.relpath(cgroup, mount_root)
    if relative.startswith(".."):
        return None
    return mount_point / relative


def parse_hierarchies(mountinfo: str, own_cgroups: str, systemd_version: int) -> list[Hierarchy]:
    """Hierarchies usable for a user manager, from ``/proc/self/mountinfo`` and ``/proc/self/cgroup``."""
    own_paths: dict[frozenset[str], str] = {}
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        own_paths[frozenset(filter(None, controllers.split(",")))] = path
    found: dict[frozenset[str], Hierarchy] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fs_type, _, super_options = right.split(" ", 2)
        if fs_type not in {"cgroup", "cgroup2"}:
            continue
        fields = left.split(" ")
        names: frozenset[str] = frozenset()
        if fs_type == "cgroup":
            if systemd_version > LAST_SYSTEMD_WITH_V1:
                continue
            options = frozenset(super_options.split(","))
            names = next((key for key in own_paths if key and key <= options), frozenset())
            if not names or not (names == {"name=systemd"} or names <= V1_CONTROLLERS):
                continue
        if names in found or names not in own_paths:
            continue
        mount_point = Path(_unescape(fields[4]))
        own = _below(mount_point, _unescape(fields[3]), own_paths[names])
        if own is not None:
            found[names] = Hierarchy(mount_point, tuple(sorted(names)), own)
    return list(found.values())


def find_hierarchies() -> list[Hierarchy]:
    """The hierarchies of this machine that the installed systemd can use."""
    shown = subprocess.run(["systemctl", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    version = re.match(r"systemd (\d+)", shown)
    return parse_hierarchies(
        Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
        Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        int(version.group(1)) if version else LAST_SYSTEMD_WITH_V1,
    )


def delegated(found: Sequence[Hierarchy]) -> list[Path]:
    """The cgroup of the delegated scope that this process is in, in each hierarchy where the scope has one.

    In the others (v1 controllers, not delegated to ordinary users) our cgroup is shared with strangers.
    """
    tracking = next(item for item in found if item.unified or item.options == ("name=systemd",))
    unit = tracking.own.name
    return [
        item.own for item in found if item.own.name == unit and os.access(item.own / "cgroup.procs", os.W_OK)
    ]


def beside_supervisor(scopes: Sequence[Path]) -> list[Path]:
    """Everything in these scopes but the supervisor."""
    return [
        path for scope in scopes for path in scope.iterdir() if path.is_dir() and path.name != SUPERVISOR
    ]


def enable_controllers(cgroup: Path) -> None:
    """Hand every controller of a v2 cgroup to its children, as far as the kernel allows."""
    for controller in (cgroup / "cgroup.controllers").read_text(encoding="ascii").split():
        # EBUSY where processes live in the cgroup itself, as in some containers: then it is absent inside.
        with contextlib.suppress(OSError):
            (cgroup / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")


def join(cgroups: Iterable[Path], pid: int = 0) -> None:
    """Move a process (0: the caller) into one cgroup of each hierarchy."""
    for cgroup in cgroups:
        (cgroup / "cgroup.procs").write_text(str(pid), encoding="ascii")


def mount_below(hierarchies: Sequence[Hierarchy], target: Path) -> dict[str, Path]:
    """Mount the same layout at `target`, as this cgroup namespace shows it. Returns mount point by name."""
    if all(hierarchy.unified for hierarchy in hierarchies):
        _mount("-t", "cgroup2", "none", str(target))
        return {"unified": target}
    _mount("-t", "tmpfs", "-o", "mode=755,size=1m", "tmpfs", str(target))
    mounts: dict[str, Path] = {}
    for hierarchy in hierarchies:
        point = target / hierarchy.name
        point.mkdir()
        if hierarchy.unified:
            _mount("-t", "cgroup2", "none", str(point))
        else:
            named = hierarchy.options[0].startswith("name=")
            options = ("none", *hierarchy.options) if named else hierarchy.options
            _mount("-t", "cgroup", "-o", ",".join(options), "none", str(point))
        mounts[hierarchy.name] = point
        if len(hierarchy.options) > 1:
            for option in hierarchy.options:
                (target / option).symlink_to(hierarchy.name)
    return mounts


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def remove(cgroups: Iterable[Path], deadline_s: float = 10.0) -> None:
    """Kill whatever is left in these cgroups and below, then remove them."""
    deadline = time.monotonic() + deadline_s
    trees = [cgroup for cgroup in cgroups if cgroup.is_dir()]
    while trees and time.monotonic() < deadline:
        for pid in {pid for tree in trees for pid in _pids(tree)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        trees = [tree for tree in trees if not _remove_tree(tree)]
        if trees:
            time.sleep(0.01)


def _pids(tree: Path) -> list[int]:
    pids: list[int] = []
    for directory, _, _ in os.walk(tree):
        with contextlib.suppress(OSError):
            text = (Path(directory) / "cgroup.procs").read_text(encoding="ascii")
            pids += [int(line) for line in text.split() if line != "0"]
    return pids


def _remove_tree(tree: Path) -> bool:
    for directory, _, _ in os.walk(tree, topdown=False):
        with contextlib.suppress(FileNotFoundError):
            try:
                Path(directory).rmdir()
            except OSError:  # EBUSY: a killed process is not gone yet
                return False
    return True
