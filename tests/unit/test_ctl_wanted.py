"""What the client shows of the wanted set, of marks, and of what could not be written down."""

from __future__ import annotations

import pytest

from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.instance import InstanceState
from tests.fakes.control_server import INSTANCE, STATUS, ControlServer, ctl

pytestmark = pytest.mark.unit

PROBLEM = LlmError(
    ErrorCode.STATE_UNUSABLE, "It is not kept: the disk is full.", hint="Make room."
).problem()
DOWN = (
    wire.WantedView(name="a\x1b[2J", wanted=True, autoload=True, why="it waits for room"),
    wire.WantedView(name="b", wanted=False, autoload=True, why="it is loaded at the next login"),
)
MARKS = wire.Autoload(
    models=(
        wire.MarkView(name="a", origin=wire.MarkOrigin.SETTING, state=InstanceState.READY),
        wire.MarkView(
            name="b",
            origin=wire.MarkOrigin.COMMAND,
            options={"context_tokens": 8192, "arguments": ["-np", "1"], "pin": True},
            why="it is loaded at the next login",
        ),
    )
)


@pytest.mark.parametrize("instances", [(), (INSTANCE,)])
def test_ps_and_status_say_what_is_wanted_and_does_not_run(instances: tuple[wire.InstanceView, ...]) -> None:
    listing = wire.Instances(instances=instances, wanted=DOWN)
    status = STATUS.model_copy(update={"instances": instances, "wanted": DOWN})
    with ControlServer(instances=listing, status=status) as server:
        for command in ("ps", "status"):
            shown = ctl(server, command).output
            assert "a\\x1b[2J: wanted, and does not run: it waits for room" in shown
            assert "b: autoload, and does not run: it is loaded at the next login" in shown


def test_status_says_that_models_wait_for_the_desktop_for_what_and_how_long() -> None:
    wait = wire.AutoloadWaitView(
        awaited=wire.Awaited.TARGET,
        why="graphical-session.target\x1b[2J is not active yet",
        since="2026-12-01T07:00:00.000Z",
        waiting_s=4.7,
        remaining_s=55.3,
    )
    status = STATUS.model_copy(update={"autoload_wait": wait})
    with ControlServer(status=status) as server:
        shown = " ".join(ctl(server, "status").output.split())
    assert (
        "What is to be loaded at this login waits for the desktop to settle, since 2026-12-01T07:00:00.000Z (4 s),"
        " for 55 s more at most: graphical-session.target\\x1b[2J is not active yet." in shown
    )
    with ControlServer(status=STATUS) as server:
        assert "desktop" not in ctl(server, "status").output


def test_marks_are_listed_with_how_they_are_loaded() -> None:
    with ControlServer(autoload=MARKS) as server:
        shown = " ".join(ctl(server, "autoload").output.split())
    assert "a setting ready as the settings say" in shown
    assert "b command - context_tokens 8192, arguments -np 1, pin True" in shown
    assert "b: it is loaded at the next login" in shown


def test_no_marks_say_how_to_make_one() -> None:
    with ControlServer(autoload=wire.Autoload(models=())) as server:
        assert "lllm3090ctl autoload NAME" in ctl(server, "autoload").output


@pytest.mark.parametrize(
    ("arguments", "marked", "said"),
    [
        (["smol"], True, "smol is loaded at every login from now on."),
        (["smol", "--off"], False, "smol is no longer loaded at a login."),
    ],
)
def test_a_mark_is_made_and_taken_away(arguments: list[str], marked: bool, said: str) -> None:
    with ControlServer(autoload=MARKS) as server:
        done = ctl(server, "autoload", *arguments)
        asked = server.next_request()
    assert (asked.method, asked.target) == ("POST", "/v1/models/smol/autoload")
    assert asked.body == wire.AutoloadBody(autoload=marked)
    assert done.output.startswith(said)


def test_off_needs_a_name() -> None:
    with ControlServer(autoload=MARKS) as server:
        done = ctl(server, "autoload", "--off")
        assert done.exit_code == 2 and server.seen.empty()


def test_what_is_not_written_down_is_told() -> None:
    released = wire.Released(names=(), released_bytes=0, until_resume=True, elapsed_s=0.1, problem=PROBLEM)
    unloaded = wire.Unloaded(name="x", run="r", released_bytes=1, elapsed_s=0.1, problem=PROBLEM)
    waited = unloaded.model_copy(update={"waited": True})
    with ControlServer(release=released, unload=[unloaded, waited]) as server:
        for arguments in (["release", "--until-resume"], ["unload", "x"], ["unload", "x"]):
            done = ctl(server, *arguments)
            assert done.exit_code == 0
            shown = " ".join(done.output.split())
            assert "It is not kept: the disk is full." in shown and "Make room." in shown
