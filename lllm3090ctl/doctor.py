"""Is everything as it should be: the daemon, asked here; the machine, which a process of the daemon's package looks at.

That process (``lllm3090d --doctor``) is run with this interpreter, so that it is of the same installation, and needs no
daemon. Where it does not end in time, its process is left to die and its lines are missing: one line says so.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lllm3090ctl import suspend
from lllm3090ctl.client import Client
from lllm3090ctl.documents import Document, parse
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure
from lllm3090ctl.text import Block, Prose, Style, clean, count

OK, WARN, FAIL = "ok", "warn", "fail"
ORDER = (OK, WARN, FAIL)
STATUS = {OK: ExitStatus.OK, WARN: ExitStatus.WARNED, FAIL: ExitStatus.UNFIT}
STYLES = {OK: Style.PLAIN, WARN: Style.DOUBTFUL, FAIL: Style.BAD}
DISTRIBUTION = "lllm3090"
DAEMON_LIMIT_S = 10.0  # it may have to start first, which takes about a second
MACHINE_LIMIT_S = 60.0  # it ends by itself within about 45 s, unless not even that works
DEATH_S = 0.5
SAYS = "It says: "
LARGEST_REPORT_BYTES = 1 << 20
# With -P nothing in the working directory is taken for the daemon's package.
MACHINE = (sys.executable, "-P", "-m", "lllm3090d", "--doctor")
RESTART = "Models go on running: systemctl --user restart lllm3090d"
# Members of the daemon's status that say what is wrong there.
PROBLEMS = (
    "cards_problem",
    "engine_problem",
    "engine_choice_problem",
    "state_problem",
    "history_problem",
    "bus_problem",
    "dbus_problem",
    "journal_problem",
    "watch_problem",
)
NOTES = {
    "shell": "Settings and PATH were taken from this shell, as systemd could not be asked for those of the daemon.",
}


class Line(NamedTuple):
    """What one check found: its name, ``ok``, ``warn`` or ``fail``, what is the case, and what to do."""

    check: str
    level: str
    message: str
    hint: str | None = None


class Report(NamedTuple):
    """All lines in order, and whose environment the machine was looked at with; None where it was not."""

    lines: tuple[Line, ...]
    environment: str | None

    @property
    def level(self) -> str:
        """The worst of the lines."""
        return max((line.level for line in self.lines), key=ORDER.index, default=OK)

    @property
    def exit_status(self) -> int:
        """That of the worst."""
        return STATUS[self.level]

    def document(self) -> Mapping[str, object]:
        """As JSON."""
        return {
            "level": self.level,
            "environment": self.environment,
            "checks": [line._asdict() for line in self.lines],
        }


def examine(client: Client, machine: Sequence[str] = MACHINE, limit_s: float = MACHINE_LIMIT_S) -> Report:
    """Ask the daemon, then look at the machine; never raises for what is wrong with either.

    Args:
        client: of the daemon.
        machine: command line of the process that looks at the machine.
        limit_s: seconds for it.
    """
    lines = daemon_lines(client)
    try:
        told = parse(_answer(machine, limit_s))
        environment: str | None = told.text("environment")
        lines += [_line(each) for each in told.children("checks")]
    except Failure as failure:
        said = failure.problem.get("detail")
        lines.append(_broken(f"What looked at the machine made no sense: {said}"))
        environment = None
    except _SilentError as error:
        lines.append(_broken(str(error)))
        environment = None
    return Report(tuple(_without_echoes(lines)), environment)


def daemon_lines(client: Client) -> list[Line]:
    """Whether the daemon answers, is of this version, and what it says is wrong."""
    from importlib.metadata import version  # noqa: PLC0415 - slow, and only needed here

    try:
        theirs = client.version(DAEMON_LIMIT_S).text("version")
    except Failure as failure:
        return [_failed(failure, FAIL)]
    lines = [Line("daemon", OK, f"lllm3090d {theirs} answers on {client.shown_path}.")]
    try:
        lines += [
            Line("daemon", WARN, SAYS + message, hint or "See: lllm3090ctl status")
            for message, hint in _problems(client.status(DAEMON_LIMIT_S))
        ]
    except Failure as failure:  # it waits for an engine or a card that hangs; lines below say more
        lines.append(_failed(failure, WARN))
    own = version(DISTRIBUTION)
    if own == theirs:
        lines.append(Line("version", OK, f"The client and the daemon are both {own}."))
    else:
        message = f"The client is {own} and the daemon {theirs}."
        lines.append(
            Line("version", WARN, message, f"Restart the daemon, which takes the installed one. {RESTART}")
        )
    return lines


def _failed(failure: Failure, level: str) -> Line:
    """What the daemon was asked and did not answer."""
    message = failure.problem.get("detail") or failure.problem.get("title")
    return Line("daemon", level, str(message), str(failure.problem.get("hint") or RESTART))


def shown(report: Report) -> list[Block]:
    """What ``doctor`` shows."""
    width = max(len(line.check) for line in report.lines)
    blocks: list[Block] = []
    for line in report.lines:
        lead = f"{line.level.ljust(4)}  {clean(line.check).ljust(width)}  "
        blocks.append(Prose(clean(line.message.replace("\n", " ")), lead, STYLES[line.level]))
        if line.hint:
            blocks += [
                Prose(clean(part), " " * len(lead) + ("Do: " if number == 0 else "    "))
                for number, part in enumerate(line.hint.splitlines())
            ]
    note = NOTES.get(report.environment or "", "")
    bad, doubtful = (sum(line.level == level for line in report.lines) for level in (FAIL, WARN))
    counts = [count(number, noun) for number, noun in ((bad, "failure"), (doubtful, "warning")) if number]
    return [*blocks, "", *([note] if note else []), " and ".join(counts) + "." if counts else "All is well."]


class _SilentError(Exception):
    """The process that looks at the machine said nothing; the message says why."""


def _answer(command: Sequence[str], limit_s: float) -> bytes:
    """The first line that a program writes. Raises _SilentError.

    The line is the end, not the end of the process: one that hangs in the kernel cannot be waited for.
    """
    deadline_s = time.monotonic() + limit_s
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise _SilentError(f"{command[0]} cannot be run: {error.strerror or error}.") from error
    try:
        said, errors = _first_line(process, deadline_s)
    finally:
        _leave(process)
    if said.endswith(b"\n"):
        return said
    if errors is None:
        raise _SilentError(f"What looks at the machine has not answered within {limit_s:g} s.")
    last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    raise _SilentError(f"What looks at the machine broke off: {last[0]}")


def _first_line(process: subprocess.Popen[bytes], deadline_s: float) -> tuple[bytes, bytes | None]:
    """Output up to its first line feed, and errors; None for those where time is up."""
    assert process.stdout is not None and process.stderr is not None  # noqa: S101 - both are pipes, for mypy
    said = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    output, errors = said
    with selectors.DefaultSelector() as selector:
        for stream in said:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not said[output].endswith(b"\n"):
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return said[output], None
            if len(said[output]) > LARGEST_REPORT_BYTES:
                raise _SilentError(
                    f"What looks at the machine says more than {LARGEST_REPORT_BYTES >> 20} MiB."
                )
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                said[key.fd] = (said[key.fd] + piece)[-LARGEST_REPORT_BYTES - 1 :]
    return said[output], said[errors]


def _leave(process: subprocess.Popen[bytes]) -> None:
    """End it, and wait a moment for that."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(DEATH_S)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DEATH_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _line(told: Document) -> Line:
    """A line of the machine's report; a level that is not known here is no reason for joy."""
    level = told.text("level")
    return Line(
        told.text("check"), level if level in ORDER else WARN, told.text("message"), told.maybe_text("hint")
    )


def _problems(status: Document) -> list[tuple[str, str | None]]:
    """What the daemon says is wrong, each with what to do."""
    card, sleep = status.maybe_child("card"), status.maybe_child("suspend")
    found = [card.maybe_child("problem") if card else None, *(status.maybe_child(name) for name in PROBLEMS)]
    found += [problem for _, problem in suspend.problems(sleep)] if sleep else []
    return [
        (each.maybe_text("detail") or each.maybe_text("title") or "", each.maybe_text("hint"))
        for each in found
        if each is not None
    ]


def _without_echoes(lines: Sequence[Line]) -> list[Line]:
    """What the daemon says is left out where a line about the machine says it too."""
    told = [
        line.message.rstrip(".") for line in lines if line.level != OK and not line.message.startswith(SAYS)
    ]
    return [
        line
        for line in lines
        if not line.message.startswith(SAYS)
        or not any(line.message.removeprefix(SAYS).startswith(each) for each in told)
    ]


def _broken(message: str) -> Line:
    command = "python -m lllm3090d --doctor"
    return Line(
        "machine",
        FAIL,
        message,
        f"Run it by hand: {command}\nIf it is not there, install again: make install",
    )
