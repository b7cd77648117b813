"""Engines that end by themselves: they come back with growing pauses, or stay down with the reason and the way out.

Nothing here waits for time to pass: each test waits until something is so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from lllm3090d.engines.crash_causes import KINDS, CrashCause
from lllm3090d.serving.moments import realtime_us
from tests.fakes.engine import MIB
from tests.system.conftest import PRIVATE_MANAGER
from tests.system.harness import (
    DAEMON_UNIT,
    SOCKET_UNIT,
    http_request,
    properties,
    systemctl,
    until_no_units,
)
from tests.system.harness import eventually as eventually_within
from tests.system.rig import ROOM_MIB, Rig, rigged
from tests.system.scenes import strings
from tests.system.test_gateway import call, port

pytestmark = pytest.mark.system

# GiB: three that go together, and one whose window is bound by the card.
MODELS = {"large": 15.0, "one": 2.0, "two": 2.0, "full": 21.5}
QUICK_S, SLOW_S = 0.01, 3.0
MOST_ENDS = 5
FAULT = {"exit": 1, "lines": ["GGML_ASSERT(n_tokens > 0) failed"]}
KEPT = ("context_tokens", "parallel", "window_tokens", "cache_type_k", "cache_type_v", "pinned", "path")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One daemon for all tests. It is made before the fixture that skips them outside a private manager."""
    if os.environ.get(PRIVATE_MANAGER) != "1":
        pytest.skip("needs a private user manager; run: make test-system")
    with rigged(tmp_path_factory.mktemp("rig"), MODELS, {"restart_failed": "true"}) as made:
        yield made


@pytest.fixture
def quick(shared: Rig) -> Iterator[Rig]:
    yield from used(shared, QUICK_S)


@pytest.fixture
def slow(shared: Rig) -> Iterator[Rig]:
    """For what is to be done while a start is due later."""
    yield from used(shared, SLOW_S)


def used(rig: Rig, pause_s: float) -> Iterator[Rig]:
    """By one test, which leaves nothing for the next one."""
    pauses(rig, pause_s)
    yield rig
    rig.behave(crash_during_load=None, prompt_vram_mib=0, crash_after_tokens=None)
    for name in rig.states():
        rig.unload(name)
    until_no_units()


def pauses(rig: Rig, pause_s: float) -> None:
    """From now on a first start again comes after so long."""
    rig.service.config_file.write_text(f"restart_pause_s = {pause_s}\n")
    rig.service.reload()


def eventually(question: Any, what: str) -> Any:
    return eventually_within(question, what=what)


def kill(instance: dict[str, Any]) -> None:
    os.kill(instance["main_pid"], signal.SIGKILL)


def of(rig: Rig, name: str) -> dict[str, Any]:
    found: dict[str, Any] = rig.service.instances().get(name, {})
    return found


def back(rig: Rig, before: dict[str, Any]) -> dict[str, Any]:
    """The launch that follows another one of the model, once it is ready."""
    name = before["name"]

    def ready() -> dict[str, Any] | None:
        now = of(rig, name)
        is_new = now.get("state") == "ready" and now["run"] != before["run"]
        return now if is_new and now["main_pid"] else None

    found: dict[str, Any] = eventually(ready, f"{name} is back: {of(rig, name)}")
    return found


def failed(rig: Rig, name: str) -> dict[str, Any]:
    """A model that has failed, and is to be started again."""

    def waits() -> dict[str, Any] | None:
        now = of(rig, name)
        return now if now.get("state") == "failed" and now.get("retry_in_s") is not None else None

    found: dict[str, Any] = eventually(waits, f"{name} has failed: {of(rig, name)}")
    return found


def latched(rig: Rig, name: str) -> dict[str, Any]:
    rig.until(name, "latched")
    return of(rig, name)


def command_line(instance: dict[str, Any]) -> list[str]:
    """Without the socket, which each launch has of its own."""
    words = [word.decode() for word in strings(instance["main_pid"], "cmdline")]
    return [word for word in words if not word.endswith(".sock")]


def moments(rig: Rig, first: dict[str, Any], state: str) -> list[float]:
    """When a model went into a state, in seconds, from a launch on."""
    events = [each for each in rig.events("state") if each["model"] == first["name"]]
    begin = next(number for number, each in enumerate(events) if each["run"] == first["run"])
    return [realtime_us(each["at"]) / 1e6 for each in events[begin:] if each["state"] == state]


def test_a_killed_engine_comes_back_as_it_was_with_growing_pauses(quick: Rig) -> None:
    card = quick.gpu().uuid
    wish = {"context_tokens": 8192, "parallel": 2, "cache_type": "f16", "pin": True, "gpu": card}
    first = now = quick.load_ready("one", **wish)
    words = command_line(first)
    for attempt in (1, 2, 3):
        kill(now)
        now = back(quick, now)
        assert {key: now[key] for key in KEPT} == {key: first[key] for key in KEPT}
        assert (now["attempt"], now["adopted"]) == (attempt, False)
        assert command_line(now) == words
        assert card in {each["where"] for each in now["reservations"]}
        quick.check_books()
    ends, starts = moments(quick, first, "failed"), moments(quick, first, "starting")
    pauses = [start - end for end, start in zip(ends, starts[1:], strict=True)]
    for number, pause in enumerate(pauses):
        assert pause >= QUICK_S * 4**number - 0.002, pauses  # times are told in milliseconds
    # A person's load begins anew.
    assert quick.unload("one")["name"] == "one"
    kill(anew := quick.load_ready("one"))
    assert back(quick, anew)["attempt"] == 1


def test_one_that_dies_at_once_stays_down_in_the_end_and_reset_brings_it_back(quick: Rig) -> None:
    first = quick.load_ready("one")
    quick.behave(crash_during_load=FAULT)
    kill(first)
    down = latched(quick, "one")
    assert len(moments(quick, first, "failed")) == len(moments(quick, first, "starting")) == MOST_ENDS
    assert f"the engine ended {MOST_ENDS} times" in down["latch_reason"]
    assert down["way_out"].endswith("lllm3090ctl reset one")
    assert down["failure"]["code"] == "engine_failed"
    assert down["retry_in_s"] is None
    for command in ("ps", "status"):
        shown = quick.service.ctl(command).stdout
        assert down["latch_reason"] in " ".join(shown.split()) and "lllm3090ctl reset one" in shown
    until_no_units()
    quick.check_books()
    quick.behave(crash_during_load=None)
    assert quick.service.ctl("reset", "one").stdout == "one is being started again\n"
    quick.until("one", "ready")
    assert of(quick, "one")["latch_reason"] is None
    answer = quick.service.ctl("reset", "one").stdout
    assert answer == "one runs; what happened to it is forgotten\n"
    assert quick.service.ctl("reset", "two", check=False).returncode == 4
    quick.check_books()


def ask(rig: Rig, name: str) -> tuple[int, dict[str, Any]]:
    """Through the gateway; status and error."""
    answer = call(
        port(rig), "POST", "/v1/chat/completions", {"model": name, "messages": [], "max_tokens": 4}
    )
    return answer.status, answer.json().get("error", {})


def test_a_client_that_repeats_what_kills_the_engine_ends_that_at_the_latch(quick: Rig) -> None:
    first = quick.load_ready("one", context_tokens=4096)
    quick.behave(crash_after_tokens=1)
    told: list[tuple[int, dict[str, Any]]] = []

    def is_refused() -> bool:
        told.append(ask(quick, "one"))
        return bool(told[-1][1]["code"] == "model_latched")

    eventually(is_refused, "the client is told that the model stays down")
    quick.behave(crash_after_tokens=None)
    for _ in range(3):
        status, error = ask(quick, "one")
        assert status == 503 and error["code"] == "model_latched"
        assert f"the engine ended {MOST_ENDS} times" in error["message"]
        assert error["hint"].endswith("lllm3090ctl reset one")
    assert {each[1]["code"] for each in told} == {"engine_failed", "model_latched"}
    assert len(moments(quick, first, "failed")) == len(moments(quick, first, "starting")) == MOST_ENDS
    assert all(each["model"] != "one" for each in quick.events("refused"))
    quick.service.ctl("reset", "one")
    assert ask(quick, "one")[0] == 200  # it waits for what a person has begun
    assert of(quick, "one")["context_tokens"] == 4096
    quick.check_books()


def test_a_load_that_never_served_is_not_repeated(quick: Rig) -> None:
    quick.behave(crash_during_load=FAULT)
    assert quick.load("one")["problem"]["code"] == "engine_failed"
    now = of(quick, "one")
    assert (now["state"], now["attempt"], now.get("retry_in_s")) == ("failed", 0, None)
    until_no_units()
    assert "starts again" not in quick.service.ctl("ps").stdout
    # It is one that a reset starts again, all the same.
    quick.behave(crash_during_load=None)
    quick.service.ctl("reset", "one")
    quick.until("one", "ready")


def test_an_unload_cancels_the_start_and_a_persons_load_is_what_stays(slow: Rig) -> None:
    """What is killed last comes back last: then the starts of the others would have been made."""
    cancelled, replaced = slow.load_ready("one"), slow.load_ready("two", context_tokens=8192)
    last = slow.load_ready("large")
    kill(cancelled)
    kill(replaced)
    waits = failed(slow, "one")
    assert 0 < waits["retry_in_s"] <= SLOW_S and waits["attempt"] == 1
    failed(slow, "two")
    assert slow.unload("one")["name"] == "one"
    by_hand = slow.load_ready("two", context_tokens=4096)
    assert by_hand["attempt"] == 0
    kill(last)
    back(slow, last)
    assert set(slow.states()) == {"two", "large"}
    now = of(slow, "two")
    assert (now["run"], now["context_tokens"]) == (by_hand["run"], 4096)
    slow.check_books()


def test_a_daemon_that_is_killed_while_a_start_is_due_makes_it_all_the_same(slow: Rig) -> None:
    first = slow.load_ready("one", context_tokens=8192, pin=True)
    kill(first)
    failed(slow, "one")
    slow.kill_daemon()
    second = back(slow, first)
    pauses(slow, QUICK_S)  # for the next, which would be longer
    assert {key: second[key] for key in KEPT} == {key: first[key] for key in KEPT}
    slow.check_books()
    # It dies while nobody looks.
    systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
    kill(second)
    eventually(
        lambda: properties(second["unit"], "ActiveState")["ActiveState"] == "failed", "its unit has failed"
    )
    slow.service.start()
    third = back(slow, second)
    assert {key: third[key] for key in KEPT} == {key: first[key] for key in KEPT}
    slow.check_books()
    # What was unloaded does not come back with the next daemon.
    pauses(slow, SLOW_S)
    kill(third)
    failed(slow, "one")
    slow.unload("one")
    until_no_units()
    slow.kill_daemon()
    assert slow.states() == {}


def test_out_of_memory_makes_the_next_plan_smaller_and_the_second_time_it_stays_down(quick: Rig) -> None:
    quick.behave(prompt_vram_mib=ROOM_MIB)
    first = quick.load_ready("full")
    answer_is_cut_off(first)
    second = back(quick, first)
    assert second["context_tokens"] < first["context_tokens"]
    explained = quick.service.request("GET", "/v1/models/full/explain").json()
    assert explained["calibration"]["excess_bytes"] >= 256 * MIB
    answer_is_cut_off(second)
    down = latched(quick, "full")
    assert down["failure"]["details"]["cause"] == CrashCause.OUT_OF_DEVICE_MEMORY
    assert "with the smaller plan too" in down["latch_reason"]
    assert KINDS[CrashCause.OUT_OF_DEVICE_MEMORY].advice in down["way_out"]
    quick.check_books()


def answer_is_cut_off(instance: dict[str, Any]) -> None:
    """A prompt for which the engine takes memory that is not there."""
    with pytest.raises((ConnectionError, OSError)):
        http_request(instance["endpoint"], "POST", "/v1/chat/completions", b'{"messages": []}')


def test_an_argument_that_the_engine_does_not_know_stays_down_at_once(quick: Rig) -> None:
    first = quick.load_ready("one")
    quick.behave(crash_during_load={"exit": 1, "lines": ["error: invalid argument: --metrics"]})
    kill(first)
    down = latched(quick, "one")
    assert len(moments(quick, first, "starting")) == 2
    assert KINDS[CrashCause.UNKNOWN_FLAG].advice in down["way_out"]
    assert "--metrics" in str(down["failure"])


def test_a_card_that_is_given_away_keeps_starts_back(slow: Rig) -> None:
    first = slow.load_ready("one")
    kill(first)
    failed(slow, "one")
    slow.service.ctl("release", "--until-resume")
    assert is_due(slow, "one")["state"] == "failed"
    assert slow.service.ctl("reset", "one", check=False).returncode == 5
    assert "one: is to be started again (attempt 1)" in slow.service.ctl("ps").stdout
    assert slow.on_card() == {}
    slow.kill_daemon()  # the next one keeps to it
    assert is_due(slow, "one")["state"] == "failed"
    assert slow.on_card() == {}
    slow.service.ctl("resume")
    back(slow, first)


def is_due(rig: Rig, name: str) -> dict[str, Any]:
    """A model whose start would be made now."""
    return dict(eventually(lambda: (n := of(rig, name)).get("retry_in_s") == 0.0 and n, f"{name} is due"))
