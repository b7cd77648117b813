"""Inside the namespaces: the first process builds what looks like a booted system and runs the command."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from private_manager import hierarchies, surroundings
from private_manager.hierarchies import Hierarchy
from private_manager.processes import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNS,
    Account,
    fail,
    spawn,
    unshare,
    wait_and_forward,
)

START_DEADLINE_S = 30.0
EX_SOFTWARE = 70
PRIVATE = Path("/run/user-manager")  # our own files, gone with the namespace
# Without unit-root, inaccessible and the others every mount-namespacing directive fails with 226/NAMESPACE.
RUN_DIRECTORIES = (
    "systemd/system",
    "systemd/unit-root",
    "systemd/mount-rootfs",
    "systemd/inaccessible",
    "systemd/propagate",
    "systemd/incoming",
    "systemd/journal",
    "systemd/journald.conf.d",
    "user",
    "dbus",
    "lock",
    "log",
    "user-manager",
)
# Audit is left as the kernel has it: journald's default would switch it on for the whole machine.
JOURNALD_CONF = """\
[Journal]
Storage=persistent
ReadKMsg=no
Audit=
ForwardToSyslog=no
ForwardToWall=no
RateLimitIntervalSec=0
SystemMaxUse=192M
SystemKeepFree=1M
"""


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Attributes:
        command: the argument vector.
        repository: the working tree.
        as_user: run as an ordinary user that exists only inside.
        directory: private directory on disk, with home and scratch space; None to keep the caller's home.
    """

    command: Sequence[str]
    repository: Path
    as_user: bool
    directory: Path | None


def systemd_program(name: str) -> str | None:
    """Where a program of systemd is that is not in PATH."""
    for directory in ("/usr/lib/systemd", "/lib/systemd"):
        if os.access(f"{directory}/{name}", os.X_OK):
            return f"{directory}/{name}"
    return None


def has_bus_unit() -> bool:
    """Whether the user manager can start the session bus by itself (package dbus-user-session)."""
    return any(Path(f"{lib}/systemd/user/dbus.socket").exists() for lib in ("/usr/lib", "/lib", "/etc"))


def run(wish: Wish, found: Sequence[Hierarchy]) -> int:
    """Run the command under a private manager, as process 1 of a new pid namespace. Returns its status."""
    try:
        account, cgroups = _build(wish, found)
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"the private surroundings cannot be built: {error}", EX_SOFTWARE)
    runtime = Path(f"/run/user/{account.uid}")
    _start_journal(cgroups["journal"])
    start_manager(account, runtime, PRIVATE, cgroups["manager"])
    _leave_if_interrupted()
    scratch = None if wish.directory is None else wish.directory / "t"
    command = spawn(
        wish.command,
        account=account,
        environment=surroundings.command_environment(account, runtime, scratch),
        cgroups=open_session(account, cgroups["manager"]),
        own_session=False,
    )
    return wait_and_forward(command)


def _build(wish: Wish, found: Sequence[Hierarchy]) -> tuple[Account, dict[str, list[Path]]]:
    unshare(CLONE_NEWCGROUP | CLONE_NEWNS | CLONE_NEWIPC)
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "proc", "proc", "/proc")
    mounts = hierarchies.mount_below(found, Path("/sys/fs/cgroup"))
    _replace_run()
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")  # noqa: S108
    _run("mount", "-t", "tmpfs", "-o", "mode=755,size=256m", "tmpfs", "/var/log")
    Path("/var/log/journal").mkdir()
    _ensure_machine_id()
    home = None if wish.directory is None else wish.directory / "home"
    if wish.as_user:
        if home is None:
            raise OSError("an ordinary user needs a private directory")
        account = surroundings.invent_account(home, PRIVATE)
        surroundings.open_up(surroundings.wanted_paths(wish.repository))
    else:
        account = surroundings.myself(home)
    if wish.directory is not None:
        for name in ("home", "t"):
            _own_directory(wish.directory / name, account)
    _own_directory(Path(f"/run/user/{account.uid}"), account)
    return account, _build_cgroups(mounts, account)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def _own_directory(path: Path, account: Account) -> None:
    path.mkdir(exist_ok=True)
    os.chown(path, account.uid, account.gid)
    path.chmod(0o700)


def _replace_run() -> None:
    """A fresh /run that says: booted with systemd. What /etc/resolv.conf points to in it is kept."""
    resolver = Path("/etc/resolv.conf").resolve()
    text = resolver.read_bytes() if resolver.is_relative_to("/run") and resolver.exists() else None
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for name in RUN_DIRECTORIES:
        (Path("/run") / name).mkdir(parents=True)
    if text is not None:
        resolver.parent.mkdir(parents=True, exist_ok=True)
        resolver.write_bytes(text)


def _ensure_machine_id() -> None:
    """Container images ship an empty one; journald and D-Bus need a real one."""
    machine_id = Path("/etc/machine-id")
    if not machine_id.exists():
        raise OSError("/etc/machine-id is missing; run: systemd-machine-id-setup")
    if machine_id.read_text(encoding="ascii").strip() in {"", "uninitialized"}:
        made = PRIVATE / "machine-id"
        made.write_text(secrets.token_hex(16) + "\n", encoding="ascii")
        made.chmod(0o444)
        _run("mount", "--bind", str(made), str(machine_id))


def _build_cgroups(mounts: Mapping[str, Path], account: Account) -> dict[str, list[Path]]:
    """The tree of a real machine, up to the manager's own cgroup, which is delegated to the account."""
    service = Path(f"user.slice/user-{account.uid}.slice/user@{account.uid}.service")
    places = {
        "first": Path("init.scope"),
        "journal": Path("system.slice/systemd-journald.service"),
        "manager": service / "init.scope",
    }
    cgroups: dict[str, list[Path]] = {key: [] for key in places}
    for name, mount in mounts.items():
        for key, place in places.items():
            (mount / place).mkdir(parents=True, exist_ok=True)
            cgroups[key].append(mount / place)
        for directory in (service, service / "init.scope"):
            _delegate(mount / directory, account)
        hierarchies.join([mount / "init.scope"])
        if name == "unified":
            for directory in (mount, mount / "user.slice", (mount / service).parent):
                hierarchies.enable_controllers(directory)
    return cgroups


def open_session(account: Account, manager: Sequence[Path]) -> list[Path]:
    """Make the cgroups of the command, once the manager runs (at its start it removes what is empty).

    They lie below the manager's own, or it could not move the command's children into units.
    """
    session = [cgroup.parent / "session.scope" for cgroup in manager]
    for cgroup in session:
        cgroup.mkdir()
        _delegate(cgroup, account)
    return session


def _delegate(cgroup: Path, account: Account) -> None:
    os.chown(cgroup, account.uid, account.gid)
    for name in ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks"):
        if (cgroup / name).exists():
            os.chown(cgroup / name, account.uid, account.gid)


def _start_journal(cgroups: Sequence[Path]) -> None:
    program = systemd_program("systemd-journald")
    if program is None:
        fail("systemd-journald is missing; install the package systemd", EX_SOFTWARE)
    Path("/run/systemd/journald.conf.d/private.conf").write_text(JOURNALD_CONF, encoding="ascii")
    Path(
        "/run/systemd/journal/flushed"
    ).touch()  # else journald keeps to /run, where there are no user journals
    log = PRIVATE / "journald.log"
    root = Account("root", 0, 0, Path("/"))
    environment = {"PATH": os.environ.get("PATH", os.defpath)}
    pid = spawn([program], account=root, environment=environment, cgroups=cgroups, own_session=True, log=log)
    sockets = [Path("/run/systemd/journal") / name for name in ("stdout", "socket", "dev-log")]
    wait_until(lambda: all(path.is_socket() for path in sockets), "systemd-journald", pid, log)


def start_manager(account: Account, runtime: Path, logs: Path, cgroups: Sequence[Path]) -> None:
    """Start ``systemd --user`` with its session bus, and wait until both answer."""
    program = systemd_program("systemd")
    if program is None:
        fail("systemd is missing; install the package systemd", EX_SOFTWARE)
    environment = surroundings.manager_environment(account, runtime)
    log = logs / "manager.log"
    log.touch()
    os.chown(log, account.uid, account.gid)
    if not has_bus_unit():
        argv = ["dbus-daemon", "--session", "--systemd-activation", "--nofork", "--nopidfile"]
        argv.append(f"--address=unix:path={runtime}/bus")
        bus = spawn(
            argv, account=account, environment=environment, cgroups=cgroups, own_session=True, log=log
        )
        wait_until((runtime / "bus").is_socket, "dbus-daemon", bus, log)
    # Not default.target: it would start the whole desktop's services a second time.
    manager = spawn(
        [program, "--user", "--unit=basic.target", "--log-target=journal"],
        account=account,
        environment=environment,
        cgroups=cgroups,
        own_session=True,
        log=log,
    )
    wait_until((runtime / "systemd/private").is_socket, "systemd --user", manager, log)
    wait_until((runtime / "bus").is_socket, "the session bus", manager, log)
    foreign = account.uid != os.getuid()
    # With --wait it asks over the session bus, which this proves too.
    asked = subprocess.run(
        ["systemctl", "--user", "is-system-running", "--wait"],
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        timeout=START_DEADLINE_S,
        check=False,
        user=account.uid if foreign else None,
        group=account.gid if foreign else None,
        extra_groups=[account.gid] if foreign else None,
    )
    if asked.stdout.strip() not in {"running", "degraded"}:
        _report_failure("systemd --user", f"state {asked.stdout.strip() or 'unknown'}", log)


def wait_until(reached: Callable[[], bool], what: str, pid: int, log: Path) -> None:
    """Wait for a condition that process `pid` brings about; leave with its last words if it fails to."""
    deadline = time.monotonic() + START_DEADLINE_S
    while not reached():
        _leave_if_interrupted()
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _report_failure(what, f"ended at once, status {os.waitstatus_to_exitcode(status)}", log)
        if time.monotonic() > deadline:
            _report_failure(what, f"not ready after {START_DEADLINE_S:.0f} s", log)
        time.sleep(0.005)


def _leave_if_interrupted() -> None:
    for number in signal.sigpending() & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}:
        raise SystemExit(128 + number)


def _report_failure(what: str, why: str, log: Path) -> None:
    last = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else ""
    fields = ["journalctl", "--no-pager", "--lines=20", "--output=short-monotonic"]
    journal = subprocess.run(
        fields, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout
    fail(f"{what}: {why}\n{last}{journal}", EX_SOFTWARE)
