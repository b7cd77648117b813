"""``history``, ``events`` and ``logs`` of the client: times that a person gives, and what is shown."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from lllm3090d import wire
from lllm3090d.engines.memory_log import EnginePart
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.instance import InstanceState
from lllm3090d.wire_history import EngineBufferView
from tests.fakes.control_server import STATUS, ControlServer, Stream, ctl, event

pytestmark = pytest.mark.unit

MIB = 1 << 20
CLIENT = wire.Actor(kind=wire.ActorKind.CLIENT, uid=1000, pid=42, program="lllm3090ctl\x1b[31m")
FAILED = wire.RunView(
    run="a1",
    state=InstanceState.FAILED,
    is_live=False,
    asked_by=CLIENT,
    requested_at="2026-11-30T11:00:00.000Z",
    why="the engine ended with exit status 1",
    problem=LlmError(ErrorCode.ENGINE_FAILED, "x").problem(),
    last_lines=("loading\tmodel", "error: \x1b[31mno"),
    memory=wire.EngineMemory(
        buffers=(EngineBufferView(device="CUDA0", part=EnginePart.MODEL, bytes=512 * MIB),), is_summary=False
    ),
)
GONE = wire.RunView(
    run="b2",
    state=InstanceState.GONE,
    is_live=False,
    asked_by=CLIENT,
    ended_by=wire.Actor(kind=wire.ActorKind.SYSTEMD),
    requested_at="2026-11-30T12:00:00.000Z",
    load_s=8.44,
    served_s=4000,
    context_tokens=32768,
    measured_bytes=1024 * MIB,
    why="systemd stops the unit",
)


def test_runs_are_a_table_with_the_last_lines_below() -> None:
    view = wire.RunHistory(name="smol", runs=(GONE, FAILED))
    with ControlServer(history=view) as server:
        done = ctl(server, "history", "smol", "-n", "5")
        assert server.next_request().target == "/v1/models/smol/history?runs=5"
        assert done.exit_code == 0
        as_json = ctl(server, "history", "smol", "--json")
        assert server.next_request().target == "/v1/models/smol/history?runs=20"
    assert wire.RunHistory.model_validate_json(as_json.stdout) == view
    lines = done.stdout.splitlines()
    assert lines[1].split()[:3] == ["RUN", "ASKED", "FOR"]
    assert "8.4 s" in lines[2] and "1 h 6 min" in lines[2] and "32,768" in lines[2]
    assert lines[2].endswith("  gone    systemd stops the unit [systemd]")
    assert lines[3].endswith("  failed  the engine ended with exit status 1")
    assert "lllm3090ctl\\x1b[31m 42" in lines[2]
    assert "The last 2 lines of a1:" in lines
    assert "  error: \\x1b[31mno" in lines
    assert "  CUDA0 model  512.0 MiB" in lines
    assert "\x1b" not in done.stdout


def test_nothing_to_remember() -> None:
    with ControlServer(history=wire.RunHistory(name="smol", runs=())) as server:
        assert ctl(server, "history", "smol").stdout == "Nothing is remembered of smol.\n"


def since_of(command: list[str], given: str) -> datetime:
    """What becomes of a time on its way to the daemon."""
    with ControlServer(
        events=Stream((event(1),)), logs=Stream((wire.LogLine(at="t", message="m"),))
    ) as server:
        done = ctl(server, *command, "--since", given)
        assert done.exit_code == 0, done.output
        (told,) = parse_qs(urlsplit(server.next_request().target).query)["since"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told)
    return datetime.fromisoformat(told)


@pytest.mark.parametrize("command", [["events"], ["logs", "x"]])
@pytest.mark.parametrize(
    ("given", "ago"),
    [
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("3d", timedelta(days=3)),
    ],
)
def test_how_long_ago(command: list[str], given: str, ago: timedelta) -> None:
    before = datetime.now(UTC) - ago - timedelta(milliseconds=1)
    assert before <= since_of(command, given) <= datetime.now(UTC) - ago


@pytest.mark.parametrize("command", [["events"], ["logs", "x"]])
def test_a_time_is_that_time_and_without_a_zone_the_time_here(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = datetime(2026, 11, 30, 11, 0, tzinfo=UTC)
    for given in ("2026-11-30T11:00:00Z", "2026-11-30T12:00:00+01:00"):
        assert since_of(command, given) == moment
    for given in ("2026-11-30 11:00", "2026-11-30"):
        assert since_of(command, given) == datetime.fromisoformat(given).astimezone()


def test_a_number_is_an_events_number() -> None:
    with ControlServer(events=Stream((event(1),))) as server:
        ctl(server, "events", "--since", "120", "-n", "7")
        assert server.next_request().target == "/v1/events?since=120&follow=0&last=7"
        ctl(server, "events", "-n", "7")
        assert server.next_request().target == "/v1/events?since=0&follow=0&last=7"


@pytest.mark.parametrize(
    "given",
    ["", "yesterday", "-1", "1.5h", "10", "h", "9999999999999d", "2026-13-01", "\x1b[31m", "1969-01-01"],
)
def test_a_bad_time_is_a_usage_error(given: str) -> None:
    with ControlServer(logs=Stream(())) as server:
        done = ctl(server, "logs", "x", "--since", given)
    assert done.exit_code == 2
    assert "\x1b" not in done.output
    assert "--since" in done.stderr


@pytest.mark.parametrize("arguments", [["history", "x", "-n", "0"], ["history", ""], ["events", "-n", "-1"]])
def test_usage_errors(arguments: list[str]) -> None:
    with ControlServer() as server:
        assert ctl(server, *arguments).exit_code == 2


def test_an_event_says_who_caused_it() -> None:
    lines = (
        event(1, kind="settings", actor=wire.Actor(kind=wire.ActorKind.DAEMON)),
        event(2, kind="hold", model="m", message="pinned", actor=CLIENT),
    )
    with ControlServer(events=Stream(lines)) as server:
        shown = ctl(server, "events").stdout.splitlines()
    assert shown[0].endswith("settings  [daemon]")
    assert shown[1].endswith("hold  m  pinned  [lllm3090ctl\\x1b[31m 42]")


def test_lines_of_a_file_have_no_time() -> None:
    lines: Any = (wire.LogLine(message="a"), wire.LogLine(at="t", message="b"))
    with ControlServer(logs=Stream(lines)) as server:
        assert ctl(server, "logs", "x").stdout == "a\nt  b\n"
        as_json = ctl(server, "logs", "x", "--json").stdout.splitlines()
    assert json.loads(as_json[0])["message"] == "a"


def test_status_says_what_is_not_recorded_and_where_logs_go() -> None:
    closed = LlmError(ErrorCode.LOGS_UNAVAILABLE, "The journal cannot be read: closed.").problem()
    full = LlmError(ErrorCode.STATE_UNUSABLE, "What happens is not recorded: full.").problem()
    status = STATUS.model_copy(update={"journal_problem": closed, "history_problem": full})
    with ControlServer(status=status) as server:
        shown = ctl(server, "status").stdout.splitlines()
    assert [line for line in shown if line.startswith("logs: ") and "closed" in line]
    assert [line for line in shown if line.startswith("history: ") and "not recorded" in line]
