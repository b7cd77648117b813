"""Why nobody answers on the control socket, as systemd tells it. Imported only when that happened."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, own_failure
from lllm3090ctl.text import named

UNIT = "lllm3090d.service"
SOCKET_UNIT = "lllm3090d.socket"
PROPERTIES = "LoadState,ActiveState,Result,SubState,Listen"
ASK_TIMEOUT_S = 2.0
START = "systemctl --user start lllm3090d"
JOURNAL = "journalctl --user-unit lllm3090d -n 20"


class Diagnosis(NamedTuple):
    """Why the daemon is not there; ``reason`` is for programs."""

    reason: str
    sentence: str
    hint: str


def unreachable(path: str, error: OSError) -> Failure:
    """The failure of a connection that could not be made."""
    found = _not_a_socket(path)
    if found is None:
        service, listener = unit_states()
        found = _socket_removed(path, listener) or diagnose(service)
    return own_failure(
        "daemon_unreachable",
        "The daemon is not running",
        f"Nobody listens on {named(path)} ({error.strerror or error}). {found.sentence}",
        exit_status=ExitStatus.UNREACHABLE,
        hint=found.hint,
        details={"reason": found.reason, "socket": named(path)},
    )


def unit_states() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """What systemd knows of the daemon's service and socket; empty where it cannot be asked (no manager, ...)."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return {}, {}
    try:
        done = subprocess.run(
            [systemctl, "--user", "show", UNIT, SOCKET_UNIT, "-p", PROPERTIES],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}, {}
    if done.returncode != 0:
        return {}, {}
    # One paragraph for each unit, in the order asked for.
    service, _, listener = done.stdout.partition("\n\n")
    return _properties(service), _properties(listener)


def _properties(text: str) -> Mapping[str, str]:
    lines = (line.partition("=") for line in text.splitlines())
    return {name: value for name, separator, value in lines if separator}


def diagnose(unit: Mapping[str, str]) -> Diagnosis:
    """Turn the unit's properties into a reason and the next command. Pure.

    Args:
        unit: ``LoadState``, ``ActiveState``, ``SubState`` and ``Result``; empty when unknown.
    """
    load, active = unit.get("LoadState", ""), unit.get("ActiveState", "")
    if load in _BY_LOAD_STATE:
        return _BY_LOAD_STATE[load]
    if active == "failed":
        return Diagnosis(
            "failed",
            f"lllm3090d.service failed (systemd's result: {unit.get('Result') or 'unknown'}).",
            f"See why: {JOURNAL}\nthen start it again: {START}",
        )
    if active in {"activating", "reloading"}:
        return Diagnosis(
            "starting",
            f"lllm3090d.service is on its way up ({unit.get('SubState') or active}).",
            f"Try again in a moment; if that does not help: {JOURNAL}",
        )
    if active == "active":
        return Diagnosis(
            "elsewhere",
            "lllm3090d.service runs, so it listens on another path.",
            "Set the same LLLM3090_RUNTIME_DIR as for the daemon, or name its socket with --socket.\n"
            f"The daemon logs where it listens: {JOURNAL}",
        )
    return Diagnosis("not_running", "lllm3090d is installed but not running.", f"Start it: {START}")


_BY_LOAD_STATE = {
    "": Diagnosis(
        "unknown",
        "lllm3090d does not run, and systemd cannot be asked about it in this session.",
        f"Start it: {START}\nIt needs a systemd user manager; in a container, from the project's directory:"
        " packaging/dev/user-manager --private -- bash",
    ),
    "not-found": Diagnosis(
        "not_installed",
        "lllm3090d is not installed as a service of this user.",
        "Set it up: lllm3090ctl setup",
    ),
    "masked": Diagnosis(
        "masked",
        "lllm3090d.service is masked, so it cannot start.",
        f"Allow it again: systemctl --user unmask lllm3090d\nthen start it: {START}",
    ),
}


def _socket_removed(path: str, listener: Mapping[str, str]) -> Diagnosis | None:
    """systemd listens at this path, so whatever stood there is not what systemd listens on any more.

    Starting the daemon would not help: it gets the socket that systemd has, which nobody can find.
    """
    if listener.get("ActiveState") != "active":
        return None
    # As in "/run/user/1000/lllm3090d/control.sock (Stream)".
    listens_on = listener.get("Listen", "").rpartition(" ")[0]
    if os.path.realpath(path) != os.path.realpath(listens_on):
        return None
    return Diagnosis(
        "socket_removed",
        f"systemd's {SOCKET_UNIT} is active, but its file was removed or replaced.",
        f"Make it anew (models go on running): systemctl --user restart {SOCKET_UNIT}",
    )


def _not_a_socket(path: str) -> Diagnosis | None:
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return None
    if stat.S_ISSOCK(mode):
        return None
    return Diagnosis(
        "not_a_socket",
        "The path is not a socket.",
        "Name the daemon's control socket with --socket, or set LLLM3090_RUNTIME_DIR to its directory.",
    )
