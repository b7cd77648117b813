"""``unload --drain``, ``--force``, and what ``ps`` shows of models that drain or get nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from lllm3090d import wire
from lllm3090d.serving.instance import InstanceState
from tests.fakes.control_server import INSTANCE, MIB, ControlServer, changed, ctl

pytestmark = pytest.mark.unit

DONE = wire.Unloaded(name="SmolLM2-135M", run="r", released_bytes=512 * MIB, elapsed_s=2.04)
STALL = wire.StallView(
    reason="for 130 s no slot computes or generates; at its speed 120 s are enough",
    stalled_s=130.4,
    patience_s=120.0,
)


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ([], wire.UnloadBody(model="smol")),
        (["--drain", "300"], wire.UnloadBody(model="smol", drain_s=300.0)),
        (["--drain", "0"], wire.UnloadBody(model="smol", drain_s=0.0)),
        (["--force"], wire.UnloadBody(model="smol", force=True)),
    ],
)
def test_how_it_is_unloaded(options: list[str], body: wire.UnloadBody) -> None:
    with ControlServer(unload=DONE) as server:
        done = ctl(server, "unload", "smol", *options)
        assert server.next_request().body == body
    assert done.exit_code == 0
    assert done.stdout == "SmolLM2-135M is unloaded: 512.0 MiB released in 2.0 s\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drain", "-1"], "not in the range"),
        (["--drain", "86401"], "not in the range"),
        (["--drain", "nan"], "nan is not a number of seconds"),
        (["--drain", "soon"], "not a valid float"),
        (["--drain", "5", "--force"], "leave out one"),
    ],
)
def test_what_is_no_way_to_unload(options: list[str], said: str) -> None:
    with ControlServer(unload=DONE) as server:
        done = ctl(server, "unload", "smol", *options)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("unfinished", "end"),
    [(0, "s"), (None, "s"), (1, "s; 1 request was cut off"), (3, "s; 3 requests were cut off")],
)
def test_what_was_cut_off_is_said(unfinished: int | None, end: str) -> None:
    with ControlServer(unload=DONE.model_copy(update={"unfinished": unfinished})) as server:
        assert ctl(server, "unload", "smol").stdout.endswith(f" 2.0 {end}\n")


def shown(command: str = "ps", **changes: Any) -> str:
    with ControlServer(instances=wire.Instances(instances=(changed(INSTANCE, **changes),))) as server:
        done = ctl(server, command)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("in_flight", "use"), [(2, "drains 2, 8 s left"), (0, "drains 0, 8 s left"), (None, "draining")]
)
def test_one_that_drains(in_flight: int | None, use: str) -> None:
    drain = wire.DrainView(in_flight=in_flight, limit_s=10.0, remaining_s=7.2)
    text = shown(state=InstanceState.STOPPING, drain=drain, busy=True)
    assert "stopping" in text
    assert use in text


def test_one_that_is_stalled_and_will_be_restarted() -> None:
    stall = STALL.model_copy(update={"restart_in_s": 109.6})
    text = shown(state=InstanceState.STALLED, stall=stall, busy=True)
    assert "stalled 2 min" in text
    assert f"{INSTANCE.name}: stalled: for 130 s no slot computes or generates" in text
    assert f"{INSTANCE.name}: is restarted in 1 min, unless it gets on" in text


def test_one_that_is_stalled_and_only_reported() -> None:
    text = shown(state=InstanceState.STALLED, stall=STALL, name="a b\x1b[2J")
    assert "restarted" not in text
    assert "\x1b" not in text
    assert "Hint: Stop it: lllm3090ctl unload 'a b" in text
