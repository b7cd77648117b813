"""What ``status`` says of a sleep: nothing where all is well, else what is under way and what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lllm3090ctl import suspend
from lllm3090ctl.documents import Document
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import SuspendPolicy
from lllm3090d.wire_sleep import SuspendPhase, SuspendView
from tests.fakes.control_server import STATUS, ControlServer, changed, ctl

pytestmark = pytest.mark.unit

WELL = SuspendView(policy=SuspendPolicy.UNLOAD, phase=SuspendPhase.AWAKE, delays=True, delay_s=5.0)
UNREADABLE = LlmError(
    ErrorCode.CARD_UNREADABLE, "The card has fallen off the bus.", hint="nvidia-smi"
).problem()
ABSENT = LlmError(ErrorCode.LOGIND_UNAVAILABLE, "Nobody tells of sleep.", hint="See logind.").problem()


def status(**changes: Any) -> str:
    view = changed(WELL, **changes)
    with ControlServer(status=changed(STATUS, suspend=view)) as server:
        return " ".join(ctl(server, "status").stdout.split())


def test_where_all_is_well_nothing_is_said() -> None:
    text = status()
    assert "daemon" in text
    assert "sleep" not in text and "suspend" not in text


@pytest.mark.parametrize("phase", [SuspendPhase.GOING, SuspendPhase.ASLEEP])
def test_before_a_sleep_loads_wait(phase: SuspendPhase) -> None:
    assert "The machine goes to sleep, or sleeps: loads wait for its return." in status(phase=phase)


def test_after_it_what_is_loaded_again_is_listed() -> None:
    text = status(phase=SuspendPhase.RESTORING, restoring=("qwen", "gemma"))
    assert "Loaded again after a sleep, one after the other: qwen, gemma" in text


def test_a_card_in_error_is_said_with_what_waits_for_it() -> None:
    text = status(phase=SuspendPhase.BLOCKED, restoring=("qwen",), problem=UNREADABLE)
    assert "Not loaded again after a sleep, for the card is in error: qwen" in text
    assert (
        "suspend: The card's memory cannot be read: The card has fallen off the bus. Hint: nvidia-smi"
        in text
    )


@pytest.mark.parametrize("policy", [SuspendPolicy.UNLOAD, SuspendPolicy.STOP, SuspendPolicy.KEEP])
def test_that_nobody_tells_of_sleep_matters_only_where_something_would_be_done(
    policy: SuspendPolicy,
) -> None:
    text = status(policy=policy, logind_problem=ABSENT, delays=False)
    told = "suspend: Sleep is not noticed, or not delayed: Nobody tells of sleep. Hint: See logind." in text
    assert told is (policy is not SuspendPolicy.KEEP)


def test_a_phase_of_a_newer_daemon_is_no_trouble() -> None:
    members = json.loads(WELL.model_dump_json()) | {"phase": "dreaming", "restoring": ["qwen"]}
    (line,) = suspend.lines(Document(members))
    assert "qwen" in str(line)
    assert [problem for _, problem in suspend.problems(Document(members))] == [None, None]
