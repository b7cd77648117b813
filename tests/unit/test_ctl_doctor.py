"""``lllm3090ctl doctor``: the daemon's lines, the machine's, and what happens where the machine's do not come."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from lllm3090ctl import doctor
from lllm3090ctl.client import Client
from lllm3090ctl.doctor import Line, Report, examine
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.text import Prose, Style
from lllm3090d import wire
from lllm3090d.doctor.findings import Check, Level
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import STATUS, ControlServer, ctl

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[2] / "docs"
OWN = version(doctor.DISTRIBUTION)
SAME = wire.Version(version=OWN)


def saying(
    *checks: tuple[str, str, str, str | None], environment: str = "daemon", after: str = ""
) -> Sequence[str]:
    """A program that reports these lines."""
    lines = [dict(zip(("check", "level", "message", "hint"), each, strict=True)) for each in checks]
    document = json.dumps({"level": "ok", "environment": environment, "checks": lines})
    return program(f"print({document!r}, flush=True)\n{after}")


def program(code: str) -> Sequence[str]:
    return (sys.executable, "-c", code)


GOOD = saying(("clock", "ok", "It goes right.", None))


def test_all_is_well() -> None:
    with ControlServer(version=SAME, status=STATUS) as server:
        report = examine(Client(str(server.path)), GOOD)
    assert [(line.check, line.level) for line in report.lines] == [
        ("daemon", "ok"),
        ("version", "ok"),
        ("clock", "ok"),
    ]
    assert report.exit_status == ExitStatus.OK
    assert doctor.shown(report)[-1] == "All is well."


@pytest.mark.parametrize(
    ("levels", "status", "summary"),
    [
        (("ok",), ExitStatus.OK, "All is well."),
        (("ok", "warn", "warn"), ExitStatus.WARNED, "2 warnings."),
        (("fail", "warn"), ExitStatus.UNFIT, "1 failure and 1 warning."),
        (("warn", "fail", "fail"), ExitStatus.UNFIT, "2 failures and 1 warning."),
        (("strange",), ExitStatus.WARNED, "1 warning."),  # of a later release
    ],
)
def test_exit_status_is_that_of_the_worst(levels: tuple[str, ...], status: ExitStatus, summary: str) -> None:
    machine = saying(*(("clock", level, "m", "h") for level in levels))
    with ControlServer(version=SAME, status=STATUS) as server:
        report = examine(Client(str(server.path)), machine)
    assert report.exit_status == status
    assert doctor.shown(report)[-1] == summary


def test_without_a_daemon_the_machine_is_looked_at_all_the_same(tmp_path: Path) -> None:
    report = examine(Client(str(tmp_path / "control.sock")), GOOD)
    daemon, clock = report.lines
    assert (daemon.check, daemon.level, clock.check) == ("daemon", "fail", "clock")
    assert "Nobody listens" in daemon.message and daemon.hint
    assert report.exit_status == ExitStatus.UNFIT


def test_another_version_of_the_daemon() -> None:
    with ControlServer(version=wire.Version(version="9.9"), status=STATUS) as server:
        report = examine(Client(str(server.path)), GOOD)
    line = next(line for line in report.lines if line.check == "version")
    assert line.level == "warn"
    assert f"The client is {OWN} and the daemon 9.9." in line.message
    assert "restart lllm3090d" in (line.hint or "")


def test_what_the_daemon_says_is_wrong() -> None:
    error = LlmError(ErrorCode.LIBRARY_UNWATCHED, "Too many watches.", hint="Raise the limit.")
    status = STATUS.model_copy(update={"watch_problem": error.problem()})
    with ControlServer(version=SAME, status=status) as server:
        report = examine(Client(str(server.path)), GOOD)
    assert Line("daemon", "warn", "It says: Too many watches.", "Raise the limit.") in report.lines


def test_what_the_machine_shows_too_is_told_once() -> None:
    error = LlmError(
        ErrorCode.ENGINE_NOT_FOUND, "None was found.", hint="Install one.", looked_at=["here", "there"]
    )
    status = STATUS.model_copy(update={"engine_problem": error.problem()})
    with ControlServer(version=SAME, status=status) as server:
        report = examine(
            Client(str(server.path)), saying(("engine", "fail", "None was found.", "Install one."))
        )
    assert [line.check for line in report.lines] == ["daemon", "version", "engine"]


def test_a_daemon_that_cannot_tell_its_status() -> None:
    error = LlmError(ErrorCode.INTERNAL, "A mistake.", hint="Report it.")
    with ControlServer(version=SAME, status=error) as server:
        report = examine(Client(str(server.path)), GOOD)
    assert Line("daemon", "warn", "A mistake.", "Report it.") in report.lines


@pytest.mark.parametrize(
    ("machine", "word"),
    [
        (("/nowhere/python",), "cannot be run: No such file"),
        (program("raise SystemExit('no module named lllm3090d')"), "no module named lllm3090d"),
        (program("pass"), "it said nothing"),
        (program("print('no JSON')"), "not JSON"),
        (program("print('{}')"), "'environment'"),
        (program("print('{' * 3_000_000)"), "more than 1 MiB"),
    ],
)
def test_machine_that_cannot_be_looked_at_is_one_failure(machine: Sequence[str], word: str) -> None:
    with ControlServer(version=SAME, status=STATUS) as server:
        report = examine(Client(str(server.path)), machine)
    line = report.lines[-1]
    assert (line.check, line.level) == ("machine", "fail")
    assert word in line.message
    assert report.exit_status == ExitStatus.UNFIT


def test_machine_that_never_answers() -> None:
    began_s = time.monotonic()
    with ControlServer(version=SAME, status=STATUS) as server:
        report = examine(Client(str(server.path)), program("import signal; signal.pause()"), limit_s=0.3)
    assert time.monotonic() - began_s < 10
    assert report.lines[-1].message == "What looks at the machine has not answered within 0.3 s."


def test_machine_that_answers_and_does_not_end() -> None:
    """A thread that hangs in the kernel keeps its process; the answer counts all the same."""
    machine = saying(("clock", "ok", "It goes right.", None), after="import signal; signal.pause()")
    with ControlServer(version=SAME, status=STATUS) as server:
        report = examine(Client(str(server.path)), machine)
    assert report.lines[-1] == Line("clock", "ok", "It goes right.")


def test_text() -> None:
    report = Report(
        (
            Line("daemon", "ok", "It runs."),
            Line("models-disk", "warn", "It is\nslow \x1b[2J.", "Buy one.\nOr wait."),
            Line("engine", "fail", "None.", "Build one."),
        ),
        "shell",
    )
    blocks = doctor.shown(report)
    assert blocks[:5] == [
        Prose("It runs.", "ok    daemon       ", Style.PLAIN),
        Prose("It is slow \\x1b[2J.", "warn  models-disk  ", Style.DOUBTFUL),
        Prose("Buy one.", " " * 19 + "Do: "),
        Prose("Or wait.", " " * 19 + "    "),
        Prose("None.", "fail  engine       ", Style.BAD),
    ]
    assert "taken from this shell" in str(blocks[-2])


def test_json_of_the_real_machine(tmp_path: Path) -> None:
    """The whole way, as far as it goes without a user manager of the tests."""
    done = ctl(tmp_path / "control.sock", "doctor", "--json")
    document = json.loads(done.output)
    assert [each["check"] for each in document["checks"]] == ["daemon", *map(str, Check)]
    assert {each["level"] for each in document["checks"]} <= set(map(str, Level))
    assert (document["level"], done.exit_code) == ("fail", ExitStatus.UNFIT)
    for each in document["checks"]:
        assert bool(each["hint"]) is (each["level"] != "ok"), each


def test_every_check_is_in_the_reference() -> None:
    section = (DOCS / "reference" / "cli.md").read_text().split("\n## doctor\n", 1)[1].split("\n## ", 1)[0]
    told = [
        line.split("`")[1] for line in section.splitlines() if line.startswith("| `") and "`--" not in line
    ]
    assert told == ["daemon", "version", *map(str, Check), "machine"]
