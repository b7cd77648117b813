"""The user manager, for ``setup``: having it read the units, starting what is to run, stopping what is taken away."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import own_failure

SERVICE = "lllm3090d.service"
CONTROL_SOCKET = "lllm3090d.socket"
GATEWAY_SOCKET = "lllm3090-gateway.socket"
SOCKETS = (CONTROL_SOCKET, GATEWAY_SOCKET)
SLICE = "lllm3090.slice"
MODELS = "lllm3090-*.service"
# Of packages and of the administrator, the stronger first; those of the person are stronger.
SYSTEM_UNITS = ("/etc/systemd/user", "/usr/local/lib/systemd/user", "/usr/lib/systemd/user")
LIMIT_S = 90.0  # stopping a daemon takes 20 s at most, and a model as long as its drain
ANSWER_S = 10.0


def answers() -> bool:
    """Whether there is a user manager."""
    return _run("show-environment", limit_s=ANSWER_S) is not None


def system_units(directories: Sequence[str] = SYSTEM_UNITS) -> Path | None:
    """Where a package has put the daemon's unit."""
    return next((Path(each) for each in directories if (Path(each) / SERVICE).is_file()), None)


def is_active(unit: str) -> bool:
    """Whether a unit is up, or on its way."""
    return (_run("is-active", unit, limit_s=ANSWER_S, check=False) or "").strip() in {
        "active",
        "activating",
        "reloading",
    }


def is_enabled(unit: str) -> bool:
    """Whether it starts with a session."""
    return _file_state(unit) == "enabled"


def is_masked(unit: str) -> bool:
    """Whether the person wants it never to start."""
    return _file_state(unit).startswith("masked")


def told_of(properties: Sequence[str], *units: str) -> tuple[Mapping[str, str], ...] | None:
    """Properties of units, in the order of these; None without a user manager. What is not set is left out."""
    told = _run("show", f"--property={','.join(properties)}", *units, limit_s=ANSWER_S)
    blocks = told.strip().split("\n\n") if told is not None else []
    if len(blocks) != len(units):
        return None
    return tuple(
        {key: value for key, found, value in (line.partition("=") for line in block.splitlines()) if found}
        for block in blocks
    )


def _file_state(unit: str) -> str:
    return (_run("is-enabled", unit, limit_s=ANSWER_S, check=False) or "").strip()


def running_models() -> tuple[str, ...]:
    """Units of models that are up."""
    told = _run("list-units", "--plain", "--no-legend", MODELS, limit_s=ANSWER_S) or ""
    return tuple(line.split()[0] for line in told.splitlines() if line.strip())


def do(*arguments: str) -> None:
    """One call of ``systemctl --user`` that has to succeed.

    Raises:
        Failure: ``systemd_failed``.
    """
    done = _process(arguments, LIMIT_S)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise own_failure(
            "systemd_failed",
            "systemd does not do it",
            f"systemctl --user {' '.join(arguments)}: {said or f'status {done.returncode}'}",
            exit_status=ExitStatus.FAILURE,
            hint="The files are written. Look at: systemctl --user status lllm3090d; then repeat lllm3090ctl setup.",
        )


def attempt(*arguments: str) -> bool:
    """One call that may fail; whether it has succeeded."""
    return _process(arguments, LIMIT_S).returncode == 0


def read_bus_services_again() -> None:
    """A bus that runs has read the directory at its start; without one there is nothing to do."""
    call = ("--quiet", "call", "org.freedesktop.DBus", "/", "org.freedesktop.DBus", "ReloadConfig")
    _process(call, ANSWER_S, "busctl")


def _run(*arguments: str, limit_s: float, check: bool = True) -> str | None:
    """Output of ``systemctl --user``; None where it fails or does not answer."""
    done = _process(arguments, limit_s)
    return done.stdout if done.returncode == 0 or not check else None


def _process(
    arguments: Sequence[str], limit_s: float, program: str = "systemctl"
) -> subprocess.CompletedProcess[str]:
    """Run it; what is not there or does not end is a failure like any other."""
    command = [program, "--user", *arguments]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {limit_s:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"{program}: {error.strerror}")
