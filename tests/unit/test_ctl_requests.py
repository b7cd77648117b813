"""``requests`` of the client: what it asks for, a table, lines for those who follow."""

from __future__ import annotations

import pytest

from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import REQUEST, ControlServer, Stream, changed, ctl

pytestmark = pytest.mark.unit

LEFT = changed(
    REQUEST,
    request_id="req_2",
    model=None,
    status=None,
    outcome="client-closed",
    prompt_tokens=None,
    generated_tokens=None,
    tokens_per_s=None,
    first_byte_s=None,
    load_s=0.0,
    total_s=0.25,
)
REFUSED = changed(
    LEFT, request_id="req_3", model="a\x1b[31mb", status=404, outcome="refused", code="unknown_model"
)


def test_they_are_a_table() -> None:
    with ControlServer(requests=Stream((REQUEST, LEFT, REFUSED))) as server:
        done = ctl(server, "requests")
        assert server.next_request().target == "/v1/requests?last=20&follow=0"
    assert done.exit_code == 0
    head, first, second, third = done.stdout.splitlines()
    assert head.split() == [
        *("ENDED", "MODEL", "ROUTE", "STATUS", "PROMPT", "ANSWER", "TOKENS/S"),
        *("LOAD", "LINE", "FIRST", "TOTAL", "REQUEST"),
    ]
    assert first.split()[1:] == [
        *("SmolLM2-135M", "/v1/chat/completions", "200", "1,200", "64", "41.3"),
        *("7.2", "s", "-", "7.8", "s", "9.4", "s", "req_1"),
    ]
    assert second.split()[1:] == [
        "-",
        "/v1/chat/completions",
        "client-closed",
        *"-----",
        "-",
        "250",
        "ms",
        "req_2",
    ]
    assert "404 unknown_model" in third and "a\\x1b[31mb" in third and "\x1b" not in done.stdout


def test_which_are_asked_for() -> None:
    with ControlServer(requests=Stream((REQUEST,))) as server:
        ctl(server, "requests", "qwen/27b", "-n", "3")
        assert server.next_request().target == "/v1/requests?last=3&follow=0&model=qwen%2F27b"
        ctl(server, "requests", "--since", "2026-11-30T11:00:00Z")
        target = server.next_request().target
        assert target == "/v1/requests?last=10000&follow=0&since=2026-11-30T11%3A00%3A00.000Z"
        assert ctl(server, "requests", "-n", "10001").exit_code == 2
        assert ctl(server, "requests", "--since", "yesterday").exit_code == 2
        assert ctl(server, "requests", "").exit_code == 2


def test_json_is_a_line_for_each() -> None:
    with ControlServer(requests=Stream((REQUEST, LEFT))) as server:
        lines = ctl(server, "requests", "--json").stdout.splitlines()
    assert [wire.RequestView.model_validate_json(line) for line in lines] == [REQUEST, LEFT]


def test_who_follows_gets_lines_until_the_daemon_ends() -> None:
    with ControlServer(requests=Stream((REQUEST, LEFT))) as server:
        done = ctl(server, "requests", "-f", "-n", "0")
        assert server.next_request().target == "/v1/requests?last=0&follow=1"
    assert done.exit_code == 3
    first, second = done.stdout.splitlines()
    assert first == (
        "2026-11-30T11:20:01.000Z  SmolLM2-135M  /v1/chat/completions  200  prompt 1,200  answer 64  tokens/s 41.3"
        "  load 7.2 s  first 7.8 s  total 9.4 s  req_1"
    )
    assert second == "2026-11-30T11:20:01.000Z  /v1/chat/completions  client-closed  total 250 ms  req_2"


def test_none_and_an_unknown_model() -> None:
    with ControlServer(requests=Stream((b"",))) as server:
        assert ctl(server, "requests").stdout == "No requests are remembered.\n"
    with ControlServer(requests=LlmError(ErrorCode.UNKNOWN_MODEL, "There is no model x.")) as server:
        done = ctl(server, "requests", "x")
        assert done.exit_code == 4 and "There is no model x." in done.stderr
