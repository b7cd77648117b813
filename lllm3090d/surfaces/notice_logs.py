"""Opening the log of a run on the desktop: a copy in a file, shown by whatever the person has for text."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from pathlib import Path
from typing import Protocol

from lllm3090d.bus.systemd import SystemdManager
from lllm3090d.errors import LlmError
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.unit_spec import identifier, unit_name

log = logging.getLogger(__name__)

PROGRAM = "xdg-open"
LINES = 5000
MOST_COPIES = 10
OPEN_LIMIT_S = 15.0
DISPLAYS = ("WAYLAND_DISPLAY=", "DISPLAY=")


class House(Protocol):
    """What is needed of the daemon."""

    logs: EngineLogs
    manager: SystemdManager


async def open_log(house: House, directory: Path, model: str, run: str) -> tuple[Path, bool]:
    """Write down the last lines of a run and have them shown.

    It is started by the user's systemd, as a program of the session and not of the daemon: in its environment is the
    display, which the session hands over, and what it starts goes on without us.

    Returns:
        The file, and whether a program was found that shows it.

    Raises:
        LlmError: LOGS_UNAVAILABLE; BUS_UNAVAILABLE.
        OSError: the file cannot be written.
    """
    unit = unit_name(model, run)
    lines = await house.logs.tail(unit, LINES)
    text = "\n".join(each.message for each in lines) or "It has written nothing."
    path = directory / f"{identifier(unit)}.txt"
    await asyncio.to_thread(_write, path, text)
    program = shutil.which(PROGRAM)
    environment = await house.manager.manager_environment()
    if program is None or not any(each.startswith(DISPLAYS) for each in environment):
        return path, False
    properties = {
        "Description": f"The log of {unit}",
        "Type": "oneshot",  # so that the end of its job is its own end, and tells how that went
        "ExecStart": [(program, (program, path.name), False)],
        "WorkingDirectory": str(directory),  # whatever is in its name is no argument
        "KillMode": "process",  # the viewer outlives what has started it
        "CollectMode": "inactive-or-failed",
        "Slice": "app.slice",
    }
    starting = house.manager.start(
        f"lllm3090d-log-{secrets.token_hex(4)}.service", properties, timeout_s=OPEN_LIMIT_S
    )
    try:
        async with asyncio.timeout(OPEN_LIMIT_S):
            result = await starting
    except TimeoutError:
        return path, True  # some wait for the viewer's end
    except LlmError as error:
        log.info("a log is not shown", extra={"reason": error.message})
        return path, False
    return path, result in {"done", "timeout"}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    copies = sorted(path.parent.glob("*.txt"), key=lambda each: each.stat().st_mtime)
    for old in copies[: max(0, len(copies) - MOST_COPIES + 1)]:
        old.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
