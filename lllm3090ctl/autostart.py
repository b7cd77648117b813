"""Starting the daemon from a desktop's autostart entry, where it is enabled and systemd has not done it itself.

A user manager starts what is enabled with ``default.target``, once. So where that target was started, the daemon runs,
has failed, or was stopped by somebody since, and neither a second session nor a desktop's list of programs may change
that.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from lllm3090ctl import setup_systemd as systemd
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import own_failure

TARGET = "default.target"
PROPERTIES = ("LoadState", "ActiveState", "UnitFileState", "Job")
UP = frozenset({"active", "activating", "reloading"})
ENABLED = frozenset({"enabled", "enabled-runtime"})


class Verdict(enum.StrEnum):
    """What is done about the daemon, and why. The values are part of the JSON."""

    NOT_INSTALLED = "not_installed"
    MASKED = "masked"
    NOT_ENABLED = "not_enabled"
    RUNS = "runs"
    SYSTEMD_STARTS_IT = "systemd_starts_it"
    START = "start"


TOLD: Mapping[Verdict, str] = {
    Verdict.NOT_INSTALLED: f"Nothing was started: your systemd knows no {systemd.SERVICE}.",
    Verdict.MASKED: f"Nothing was started: {systemd.SERVICE} is masked.",
    Verdict.NOT_ENABLED: "Nothing was started: the daemon is not enabled. To have it at every login:"
    f" systemctl --user enable {systemd.SERVICE}",
    Verdict.RUNS: "The daemon runs already.",
    Verdict.SYSTEMD_STARTS_IT: "Nothing was started: systemd does that at login. A daemon that does not run was stopped"
    f" since, or has failed: systemctl --user status {systemd.SERVICE}",
    Verdict.START: "The daemon was started.",
}


def verdict(service: Mapping[str, str], target: Mapping[str, str]) -> Verdict:
    """What to do, by what systemd says of the daemon's unit and of ``default.target``. Pure."""
    if service.get("LoadState") == "masked" or service.get("UnitFileState", "").startswith("masked"):
        return Verdict.MASKED
    if service.get("LoadState") == "not-found":
        return Verdict.NOT_INSTALLED
    if service.get("ActiveState") in UP:
        return Verdict.RUNS
    if service.get("UnitFileState") not in ENABLED:
        return Verdict.NOT_ENABLED
    # A job: it is on its way, and the daemon with it.
    if target.get("ActiveState") in UP or target.get("Job"):
        return Verdict.SYSTEMD_STARTS_IT
    return Verdict.START


def start() -> Verdict:
    """Start the daemon if that is to be done, and wait until it is ready; what was done.

    Raises:
        Failure: ``no_user_manager``, or ``systemd_failed``.
    """
    told = systemd.told_of(PROPERTIES, systemd.SERVICE, TARGET)
    if told is None:
        raise own_failure(
            "no_user_manager",
            "No user manager answers",
            "This session has no systemd user manager, without which the daemon cannot run.",
            exit_status=ExitStatus.UNREACHABLE,
            hint="Log in with pam_systemd (package libpam-systemd), then look at: systemctl --user status",
        )
    service, target = told
    done = verdict(service, target)
    if done is Verdict.START and not systemd.attempt("start", systemd.SERVICE):
        raise own_failure(
            "systemd_failed",
            "systemd does not do it",
            f"{systemd.SERVICE} is enabled and could not be started.",
            exit_status=ExitStatus.FAILURE,
            hint=f"Look at: systemctl --user status {systemd.SERVICE}; journalctl --user -u {systemd.SERVICE}",
        )
    return done
