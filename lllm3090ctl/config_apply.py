"""Tell the daemon that its settings file is another one now, by systemd."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import own_failure

UNIT = "lllm3090d.service"
LIMIT_S = 60.0
# What came of it: read again; to be read at the next start; not told, as asked for.
APPLIED = ("reloaded", "not_running", "left")

Run = Callable[[Sequence[str]], tuple[int, str]]


def systemctl(arguments: Sequence[str]) -> tuple[int, str]:
    """Exit status and all output of ``systemctl --user``; 127 where it cannot be run or does not end."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", *arguments],  # noqa: S607 - the one of PATH, as everywhere
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 127, f"systemctl has not answered within {LIMIT_S:g} s"
    except OSError as error:
        return 127, f"systemctl cannot be run: {error.strerror or error}"
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace").strip()


def apply(wanted: bool, run: Run = systemctl) -> str:
    """Have a running daemon read the file again; models that run are not disturbed. One of :data:`APPLIED`.

    Args:
        wanted: whether to do it at all.
        run: asks systemd.

    Raises:
        Failure: ``reload_failed``.
    """
    if not wanted:
        return "left"
    status, told = run(["is-active", UNIT])
    if told not in {"active", "reloading"}:
        return "not_running"
    status, told = run(["reload", UNIT])
    if status != 0:
        last = told.splitlines()[-1] if told else f"systemctl ended with status {status}"
        raise own_failure(
            "reload_failed",
            "The daemon has not read the settings again",
            f"The file was written, but the daemon has not read it again: {last}",
            exit_status=ExitStatus.FAILURE,
            hint="See: systemctl --user status lllm3090d\nthen: systemctl --user reload lllm3090d",
        )
    return "reloaded"
