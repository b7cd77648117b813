"""``release``, ``resume``, ``pin``, ``unpin`` and ``reset``, against a server that speaks the contract."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import MIB, STATUS, ControlServer, Script, changed, ctl

pytestmark = pytest.mark.unit

RELEASED = wire.Released(
    names=("a", "b\x1b[2J"), released_bytes=512 * MIB, until_resume=False, elapsed_s=0.42
)
NOTHING = wire.Released(names=(), released_bytes=0, until_resume=True, elapsed_s=0.01)
RESUMED = wire.Resumed(was_released=True)
PINNED = wire.Pinned(name="SmolLM2-135M", run="k3f9", pinned=True)
UNPINNED = wire.Pinned(name="SmolLM2-135M", run="k3f9", pinned=False)
STARTS = wire.Reset(name="SmolLM2-135M\x07", run="k3f9", starts=True)
RUNS = wire.Reset(name="SmolLM2-135M", run="k3f9", starts=False)
NOT_LOADED = LlmError(ErrorCode.NOT_LOADED, "It is not loaded.", hint="lllm3090ctl ps")


@pytest.mark.parametrize(
    ("arguments", "scripts", "target", "body"),
    [
        (["release"], {"release": RELEASED}, "/v1/release", wire.ReleaseBody(until_resume=False)),
        (
            ["release", "--until-resume"],
            {"release": NOTHING},
            "/v1/release",
            wire.ReleaseBody(until_resume=True),
        ),
        (["resume"], {"resume": RESUMED}, "/v1/resume", wire.ResumeBody()),
        (["pin", "smol"], {"pin": PINNED}, "/v1/models/smol/pin", wire.PinBody(pinned=True)),
        (["unpin", "a/b c?"], {"pin": UNPINNED}, "/v1/models/a%2Fb%20c%3F/pin", wire.PinBody(pinned=False)),
        (["reset", "a/b c?"], {"reset": STARTS}, "/v1/models/a%2Fb%20c%3F/reset", wire.ResetBody()),
    ],
)
def test_what_is_asked_and_its_json(
    arguments: list[str], scripts: dict[str, Script], target: str, body: BaseModel
) -> None:
    (answer,) = scripts.values()
    with ControlServer(**scripts) as server:
        done = ctl(server, *arguments, "--json")
        seen = server.next_request()
    assert (seen.method, seen.target, seen.body) == ("POST", target, body)
    assert (done.exit_code, done.stderr) == (0, "")
    assert isinstance(answer, BaseModel)
    assert type(answer).model_validate_json(done.stdout) == answer


@pytest.mark.parametrize(
    ("arguments", "scripts", "lines"),
    [
        (["release"], {"release": RELEASED}, ["a, b\\x1b[2J: unloaded, 512.0 MiB released in 0.4 s"]),
        (
            ["release", "--until-resume"],
            {"release": NOTHING},
            [
                "No model was loaded.",
                "The card is released. Loads are refused until: lllm3090ctl --socket SOCKET resume",
            ],
        ),
        (
            ["resume"],
            {"resume": RESUMED},
            [
                "The card is no longer released: models can be loaded again, and those that were loaded come back."
            ],
        ),
        (
            ["resume"],
            {"resume": wire.Resumed(was_released=False)},
            ["The card was not released: models could be loaded all the time."],
        ),
        (["pin", "smol"], {"pin": PINNED}, ["SmolLM2-135M is pinned until it is unloaded"]),
        (["unpin", "smol"], {"pin": UNPINNED}, ["SmolLM2-135M is not pinned"]),
        (["reset", "smol"], {"reset": STARTS}, ["SmolLM2-135M\\x07 is being started again"]),
        (["reset", "smol"], {"reset": RUNS}, ["SmolLM2-135M runs; what happened to it is forgotten"]),
    ],
)
def test_what_a_person_is_told(arguments: list[str], scripts: dict[str, Script], lines: list[str]) -> None:
    with ControlServer(**scripts) as server:
        done = ctl(server, *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.replace(str(server.path), "SOCKET").splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["pin", "x"], "pin"), (["unpin", "x"], "pin"), (["reset", "x"], "reset"), (["release"], "release")],
)
def test_a_failure_has_its_exit_status(arguments: list[str], word: str) -> None:
    with ControlServer(**{word: NOT_LOADED}) as server:
        done = ctl(server, *arguments)
    assert done.exit_code == 4
    assert "It is not loaded." in done.stderr


def test_a_load_while_the_card_is_released_is_refused() -> None:
    error = LlmError(ErrorCode.CARD_RELEASED, "It was given away.", hint="lllm3090ctl resume")
    assert error.kind.http_status == 409
    with ControlServer(load=error) as server:
        done = ctl(server, "load", "smol")
    assert done.exit_code == 5
    assert done.stderr.splitlines()[-1] == "Hint: lllm3090ctl resume"


@pytest.mark.parametrize(
    "arguments",
    [["pin"], ["unpin"], ["pin", ""], ["reset"], ["reset", "x", "y"], ["release", "x"], ["resume", "x"]],
)
def test_a_wrong_command_line_is_usage(arguments: list[str]) -> None:
    with ControlServer() as server:
        assert ctl(server, *arguments).exit_code == 2


@pytest.mark.parametrize("until_resume", [True, False])
def test_a_card_that_was_released_before_stays_so(until_resume: bool) -> None:
    answer = wire.Released(
        names=(), released_bytes=0, until_resume=until_resume, was_released=True, elapsed_s=0.01
    )
    with ControlServer(release=answer) as server:
        done = ctl(server, "release", *(["--until-resume"] if until_resume else []))
        told = f"The card was released already. Loads stay refused until: lllm3090ctl --socket {server.path} resume"
    assert done.stdout.splitlines() == ["No model was loaded.", told]


@pytest.mark.parametrize("command", ["ps", "status"])
@pytest.mark.parametrize("released", [True, False])
def test_a_released_card_is_told_of(command: str, released: bool) -> None:
    listing = wire.Instances(instances=(), released=released)
    status = changed(STATUS, instances=(), released=released)
    with ControlServer(instances=listing, status=status) as server:
        done = ctl(server, command)
    told = "The card is released: loads are refused until: lllm3090ctl resume"
    assert (told in done.stdout.splitlines()) is released


def test_a_load_that_only_waited_released_nothing() -> None:
    answer = wire.Unloaded(name="a\x1b", run="r", released_bytes=0, elapsed_s=0.1, waited=True)
    with ControlServer(unload=answer) as server:
        done = ctl(server, "unload", "a")
    assert done.stdout == "The waiting load of a\\x1b was cancelled.\n"
