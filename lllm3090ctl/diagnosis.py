"""Why nobody answers on the control socket, as systemd tells it. Imported only when that happened."""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, own_failure

UNIT = "lllm3090d.service"
ASK_TIMEOUT_S = 2.0
START = "systemctl --user start lllm3090d"
JOURNAL = "journalctl --user -u lllm3090d -n 20"


class Diagnosis(NamedTuple):
    """Why the daemon is not there; ``reason`` is for programs."""

    reason: str
    sentence: str
    hint: str


def unreachable(path: str, error: OSError) -> Failure:
    """The failure of a connection that could not be made."""
    found = _not_a_socket(path) or diagnose(unit_state())
    return own_failure(
        "daemon_unreachable",
        "The daemon is not running",
        f"Nobody listens on {path} ({error.strerror or error}). {found.sentence}",
        exit_status=ExitStatus.UNREACHABLE,
        hint=found.hint,
        details={"reason": found.reason, "socket": path},
    )


def unit_state() -> Mapping[str, str]:
    """What systemd knows of the daemon's unit; empty where it cannot be asked (no systemctl, no manager)."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return {}
    try:
        done = subprocess.run(
            [systemctl, "--user", "show", UNIT, "-p", "LoadState,ActiveState,Result,SubState"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode != 0:
        return {}
    properties = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, separator, value in properties if separator}


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
        f"Start it: {START}\nor, without systemd, in a terminal of its own: lllm3090d",
    ),
    "not-found": Diagnosis(
        "not_installed",
        "lllm3090d is not installed as a service of this user.",
        f"Install it as README.md describes under 'Install', then start it: {START}",
    ),
    "masked": Diagnosis(
        "masked",
        "lllm3090d.service is masked, so it cannot start.",
        f"Allow it again: systemctl --user unmask lllm3090d\nthen start it: {START}",
    ),
}


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
