"""What ``ps`` and ``status`` say of models that failed and are started again, or stay down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lllm3090ctl import comebacks
from lllm3090ctl.documents import Document
from lllm3090ctl.failures import Failure
from lllm3090d import wire
from tests.fakes.control_server import INSTANCE, STATUS, ControlServer, changed, ctl

pytestmark = pytest.mark.unit

FAILURE = {
    "title": "The engine failed",
    "detail": "It died.",
    "code": "engine_failed",
    "hint": "See its lines.",
}
DEAD = {"name": "Dead", "main_pid": None, "failure": FAILURE}


def below(command: str, **members: Any) -> str:
    """What stands below the table of a model that is so."""
    instance = changed(INSTANCE, **(DEAD | members))
    status = changed(STATUS, instances=(instance,))
    with ControlServer(instances=wire.Instances(instances=(instance,)), status=status) as server:
        done = ctl(server, command)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    lines = lines[lines.index("Dead: The engine failed: It died.") :]
    assert lines[1] == "  Hint: See its lines."
    return "\n".join(lines[2:])


@pytest.mark.parametrize("command", ["ps", "status"])
@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"retry_in_s": 3.2, "attempt": 2}, "Dead: starts again in 4 s (attempt 2)"),
        ({"retry_in_s": 300.0, "attempt": 5}, "Dead: starts again in 5 min (attempt 5)"),
        ({"retry_in_s": 0.0, "attempt": 1}, "Dead: is to be started again (attempt 1)"),
        ({}, ""),  # never served, or its start waits for room
    ],
)
def test_when_it_starts_again(command: str, members: dict[str, Any], text: str) -> None:
    assert below(command, state="failed", **members) == text


@pytest.mark.parametrize("command", ["ps", "status"])
@pytest.mark.parametrize(
    ("members", "text"),
    [
        (
            {"latch_reason": "it ended 5 times\x1b", "way_out": "Do this. Then: lllm3090ctl reset Dead"},
            "Dead: is not started again: it ended 5 times\\x1b.\n  Hint: Do this. Then: lllm3090ctl reset Dead",
        ),
        ({"latch_reason": "it cannot be"}, "Dead: is not started again: it cannot be."),
        ({}, "Dead: is not started again."),
    ],
)
def test_why_it_stays_down_and_what_to_do(command: str, members: dict[str, Any], text: str) -> None:
    assert below(command, state="latched", **members) == text


def test_the_json_has_all_of_it() -> None:
    members = {"state": "latched", "latch_reason": "why", "way_out": "what", "attempt": 3}
    instance = changed(INSTANCE, **(DEAD | members))
    with ControlServer(instances=wire.Instances(instances=(instance,))) as server:
        done = ctl(server, "ps", "--json")
    (shown,) = json.loads(done.stdout)["instances"]
    assert {key: shown[key] for key in members} == members


@pytest.mark.parametrize(
    ("members", "lines"),
    [
        ({"state": "failed"}, []),
        ({"state": "latched"}, ["x: is not started again."]),
        ({"state": "failed", "retry_in_s": 2}, ["x: starts again in 2 s"]),
    ],
)
def test_what_a_daemon_leaves_out_is_not_made_up(members: dict[str, Any], lines: list[str]) -> None:
    assert [block.text for block in comebacks.lines(Document({"name": "x", **members}))] == lines


@pytest.mark.parametrize(
    "members",
    [{"state": "failed", "retry_in_s": "soon"}, {"state": "latched", "latch_reason": 7}, {"state": None}],
)
def test_what_is_misshapen_is_a_bad_answer(members: dict[str, Any]) -> None:
    with pytest.raises(Failure, match="is not a"):
        comebacks.lines(Document({"name": "x", **members}))
