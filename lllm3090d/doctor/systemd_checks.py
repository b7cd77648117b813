"""The user's systemd: its version, the daemon's units, what models get of it, and the journal."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lllm3090d.doctor.findings import Check, Finding, fail, ok, warn
from lllm3090d.doctor.surroundings import Ask, Facts, Said, UnansweredError, Units, World

SERVICE = "lllm3090d.service"
SOCKET = "lllm3090d.socket"
LEAST_SYSTEMD = 252  # Debian 12; older ones lack properties that models are started with
PROPERTIES = "Id,LoadState,ActiveState,SubState,Result,UnitFileState,NeedDaemonReload,MainPID,NRestarts"
DBUS_NAME = "org.lllm3090.Manager1"
ENABLED = frozenset(
    {"enabled", "enabled-runtime", "linked", "linked-runtime", "static", "alias", "generated"}
)
JOURNAL = "journalctl --user-unit lllm3090d -n 20"


def read_units(ask: Ask) -> Units:
    """Ask the user's systemd. Raises UnansweredError with the reason."""
    manager = _answer(ask("systemctl", "--user", "show", "-p", "Version,ControlGroup"))
    units = _answer(ask("systemctl", "--user", "show", SERVICE, SOCKET, "-p", PROPERTIES))
    told = _properties(manager)
    service, _, socket = units.partition("\n\n")
    return Units(
        told.get("Version", ""), told.get("ControlGroup", ""), _properties(service), _properties(socket)
    )


def manager(_world: World, facts: Facts) -> Finding:
    """The user's systemd answers and is new enough."""
    units = facts.units
    if units is None:
        return fail(
            Check.MANAGER,
            f"Your systemd user manager does not answer: {facts.units_problem or 'for an unknown reason'}.",
            "Log in with a session of your own (ssh or a desktop, not su or sudo -i), then: systemctl --user status."
            " Without a login: sudo loginctl enable-linger $USER",
        )
    number = re.match(r"\d+", units.version)
    if number is None:
        return warn(
            Check.MANAGER, f"systemd tells a strange version: {units.version!r}.", "See: systemctl --version"
        )
    if int(number[0]) < LEAST_SYSTEMD:
        return fail(
            Check.MANAGER,
            f"systemd {units.version} is older than {LEAST_SYSTEMD}: models cannot be started with it.",
            f"Upgrade to a distribution with systemd {LEAST_SYSTEMD} or later, such as Debian 12.",
        )
    return ok(Check.MANAGER, f"systemd {units.version} answers for you.")


def service(_world: World, facts: Facts) -> Finding:  # noqa: PLR0911  # one for each way to be wrong
    """The daemon's unit is installed and has not failed."""
    if facts.units is None:
        return _unknown(Check.SERVICE)
    unit = facts.units.service
    load, active = unit.get("LoadState", ""), unit.get("ActiveState", "")
    if load == "not-found":
        return fail(Check.SERVICE, f"{SERVICE} is not installed for you.", "Set it up: lllm3090ctl setup")
    if load == "masked":
        return fail(
            Check.SERVICE,
            f"{SERVICE} is masked, so it cannot start.",
            "Allow it again: systemctl --user unmask lllm3090d",
        )
    if load != "loaded":
        return fail(
            Check.SERVICE,
            f"systemd cannot load {SERVICE} ({load or 'unknown'}).",
            "See: systemctl --user status lllm3090d",
        )
    if active == "failed":
        return fail(
            Check.SERVICE,
            f"{SERVICE} failed (systemd's result: {unit.get('Result') or 'unknown'}).",
            f"See why: {JOURNAL}; then: systemctl --user reset-failed lllm3090d;"
            " systemctl --user start lllm3090d",
        )
    again = unit.get("NRestarts") or "0"
    if active == "activating" and again != "0":
        return fail(
            Check.SERVICE,
            f"{SERVICE} does not come up: systemd has started it anew {again} times.",
            f"See why: {JOURNAL}",
        )
    if unit.get("NeedDaemonReload") == "yes":
        return warn(
            Check.SERVICE,
            f"The file of {SERVICE} is newer than what systemd has read.",
            "systemctl --user daemon-reload && systemctl --user restart lllm3090d",
        )
    state = {"active": "running", "inactive": "not running", "activating": "starting"}.get(active, active)
    return ok(Check.SERVICE, f"{SERVICE} is installed and {state}.")


def socket(_world: World, facts: Facts) -> Finding:  # noqa: PLR0911  # one for each way to be wrong
    """The daemon starts with its first use, after the next login too."""
    if facts.units is None:
        return _unknown(Check.SOCKET)
    unit, daemon = facts.units.socket, facts.units.service
    if unit.get("LoadState") == "not-found":
        if daemon.get("LoadState") == "not-found":
            return fail(Check.SOCKET, f"{SOCKET} is not installed for you.", "Set it up: lllm3090ctl setup")
        return warn(
            Check.SOCKET,
            f"{SOCKET} is not installed: nothing starts the daemon when it is needed.",
            "Set it up: lllm3090ctl setup",
        )
    if unit.get("LoadState") == "masked":
        return fail(
            Check.SOCKET, f"{SOCKET} is masked.", f"Allow it again: systemctl --user unmask {SOCKET}"
        )
    if unit.get("ActiveState") == "failed":
        return fail(
            Check.SOCKET,
            f"{SOCKET} failed (systemd's result: {unit.get('Result') or 'unknown'}).",
            f"systemctl --user reset-failed {SOCKET}; systemctl --user restart {SOCKET}",
        )
    active = unit.get("ActiveState") == "active"
    # The service brings the socket along.
    enabled = unit.get("UnitFileState") in ENABLED or daemon.get("UnitFileState") in ENABLED
    if active and enabled:
        return ok(
            Check.SOCKET,
            f"{SOCKET} listens, and does after the next login: the first use starts the daemon.",
        )
    if active:
        return warn(
            Check.SOCKET,
            f"{SOCKET} listens now, but is not enabled: after the next login it will not.",
            f"systemctl --user enable {SOCKET}",
        )
    return warn(
        Check.SOCKET,
        f"{SOCKET} does not listen: nothing starts the daemon when it is needed.",
        f"systemctl --user enable --now {SOCKET}",
    )


def dbus(world: World, _facts: Facts) -> Finding:
    """A file that lets D-Bus start the daemon names the daemon's unit."""
    runtime = world.environment.get("XDG_RUNTIME_DIR")
    data = world.environment.get("XDG_DATA_HOME") or str(world.home / ".local/share")
    shared = (world.environment.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":")
    places = [*([runtime] if runtime else []), data, *shared]
    for place in places:
        for file in world.names(Path(place) / "dbus-1/services", f"{DBUS_NAME}.service"):
            text = world.text(file) or ""
            if re.search(rf"^SystemdService\s*=\s*{re.escape(SERVICE)}\s*$", text, re.M):
                return ok(Check.DBUS, f"D-Bus starts the daemon when it is called ({file}).")
            return warn(
                Check.DBUS,
                f"{file} does not start {SERVICE}, so D-Bus starts nothing or something else.",
                f"Install the release's own file again, or remove this one: rm {file}",
            )
    return warn(
        Check.DBUS,
        f"Nothing tells D-Bus how to start the daemon: programs can call {DBUS_NAME} only while it runs.",
        "Set it up again: lllm3090ctl setup",
    )


def delegation(world: World, facts: Facts) -> Finding:
    """Limits of memory have an effect on models."""
    if facts.units is None:
        return _unknown(Check.DELEGATION)
    group = facts.units.control_group or "/"
    if os.path.lexists(world.at("/sys/fs/cgroup/cgroup.controllers")):
        controllers = (world.text(f"/sys/fs/cgroup{group}/cgroup.controllers") or "").split()
        if "memory" in controllers:
            return ok(Check.DELEGATION, "Your user manager may limit the memory of models (cgroup v2).")
        if "memory" not in (world.text("/sys/fs/cgroup/cgroup.controllers") or "").split():
            return warn(
                Check.DELEGATION,
                "The kernel offers no memory controller (cgroup v2): MemoryMax of models has no effect.",
                "See: cat /proc/cmdline; take cgroup_disable=memory away, and in a container ask its host.",
            )
        return warn(
            Check.DELEGATION,
            "The memory controller is not delegated to your user manager: MemoryMax of models has no effect, so one"
            " that needs too much of the host's memory may take other programs down.",
            "sudo systemctl edit user@.service; add the lines [Service] and Delegate=cpu memory pids; log in anew.",
        )
    if os.path.isdir(world.at(f"/sys/fs/cgroup/memory{group}")):  # noqa: PTH112  # as above
        return ok(Check.DELEGATION, "Your user manager may limit the memory of models (cgroup v1).")
    return warn(
        Check.DELEGATION,
        "This machine's control groups are of version 1 and the memory of your units cannot be limited: MemoryMax of"
        " models has no effect.",
        "Boot with systemd.unified_cgroup_hierarchy=1 on the kernel's command line.",
    )


def linger(world: World, facts: Facts) -> Finding:
    """Whether models outlive a logout."""
    if facts.units is None:
        return _unknown(Check.LINGER)
    if os.path.lexists(world.at(f"/var/lib/systemd/linger/{world.user}")):
        return ok(Check.LINGER, "Your user manager runs without a login too: models outlive a logout.")
    if not os.path.lexists(world.at("/run/systemd/seats")):
        return ok(Check.LINGER, "No logind runs here, so no logout ends your user manager.")
    enable = "sudo loginctl enable-linger $USER"
    desktop = world.ask("systemctl", "--user", "is-active", "graphical-session.target")
    if desktop.stdout.strip() == "active":
        return ok(Check.LINGER, f"Models stop when you log out of your desktop; should they not: {enable}")
    return warn(
        Check.LINGER,
        "Models stop when you log out: your user manager ends with your last session.",
        f"Let it run on: {enable}",
    )


def journal(world: World, _facts: Facts) -> Finding:
    """What engines write can be read again."""
    problem = world.journal_problem()
    if problem is not None:
        return warn(Check.JOURNAL, f"{problem.message.rstrip('.')}.", problem.hint or "Try: journalctl -n 5")
    kept = (
        "kept across boots"
        if os.path.isdir(world.at("/var/log/journal"))  # noqa: PTH112  # as above
        else "kept until the next boot only"
    )
    return ok(Check.JOURNAL, f"What your programs write to the journal can be read; it is {kept}.")


def _unknown(check: Check) -> Finding:
    """Not a failure of its own: the line of the manager is one."""
    return warn(check, "Not known: your systemd user manager does not answer.", "See the line: manager")


def _answer(said: Said) -> str:
    if said.status != 0:
        reason = (
            said.stderr.strip() or said.stdout.strip() or f"systemctl ended with {said.status}"
        ).splitlines()[-1]
        raise UnansweredError(reason.rstrip("."))
    return said.stdout


def _properties(text: str) -> dict[str, str]:
    lines = (line.partition("=") for line in text.splitlines())
    return {name: value for name, separator, value in lines if separator}
