"""Models that go while requests are in flight, and models that get nowhere: real systemd, a stand-in engine and card.

Nothing here waits for time to pass: each test waits until something is so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from lllm3090d.engines.crash_causes import CrashCause
from tests.system.conftest import PRIVATE_MANAGER
from tests.system.harness import eventually as eventually_within
from tests.system.harness import http_request, until_no_units
from tests.system.rig import Rig, now_s, rigged

pytestmark = pytest.mark.system

MODELS = {"one": 2.0, "two": 2.0}
# An engine that has no core for as long as its patience counts as stalled.
PATIENCE_S, DRAIN_S, STOP_S = 1.5, 0.5, 300.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One daemon for all tests. It is made before the fixture that skips them outside a private manager."""
    if os.environ.get(PRIVATE_MANAGER) != "1":
        pytest.skip("needs a private user manager; run: make test-system")
    settings = {
        "restart_failed": "true",
        "restart_pause_s": "0.05",
        "hang_patience_s": str(PATIENCE_S),
        "drain_s": str(DRAIN_S),
        "stop_timeout_s": str(STOP_S),
    }
    with rigged(tmp_path_factory.mktemp("rig"), MODELS, settings) as made:
        yield made


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """For one test, which leaves nothing for the next one."""
    policy(shared, "report")
    yield shared
    shared.behave(held=False, prompt_steps=0)
    for name in shared.states():
        shared.service.ctl("unload", name, "--force")
    until_no_units()  # one that had to be killed has failed
    engines = shared.service.control_socket.parent / "engines"
    eventually(lambda: list(engines.iterdir()) == [], "no socket is left")
    assert shared.on_card() == {}


def policy(rig: Rig, word: str) -> None:
    rig.service.config_file.write_text(f'hang_policy = "{word}"\n')
    rig.service.reload()


def eventually(question: Any, what: str) -> Any:
    return eventually_within(question, what=what)


def of(rig: Rig, name: str) -> dict[str, Any]:
    found: dict[str, Any] = rig.service.instances().get(name, {})
    return found


def unload_later(rig: Rig, name: str, **how: Any) -> Future[dict[str, Any]]:
    def ask() -> dict[str, Any]:
        document: dict[str, Any] = rig.service.request("POST", "/v1/unload", {"model": name, **how}).json()
        return document

    return rig.clients.submit(ask)


def drains(rig: Rig, name: str, in_flight: int) -> dict[str, Any]:
    """Until it is seen to wait for so many requests."""

    def seen() -> dict[str, Any] | None:
        now = of(rig, name)
        drain = now.get("drain") or {}
        return now if now.get("state") == "stopping" and drain.get("in_flight") == in_flight else None

    found: dict[str, Any] = eventually(seen, f"{name} drains: {of(rig, name)}")
    return found


def told(rig: Rig, kind: str, name: str) -> list[dict[str, Any]]:
    return [each for each in rig.events(kind) if each["model"] == name]


def test_requests_end_and_nobody_else_gets_in_whatever_becomes_of_the_daemon(rig: Rig) -> None:
    rig.behave(held=True)
    instance = rig.load_ready("one")
    answer = rig.ask_later(instance)
    first = unload_later(rig, "one", drain_s=60.0)
    seen = drains(rig, "one", 1)
    assert 0 < seen["drain"]["remaining_s"] <= seen["drain"]["limit_s"] == 60
    with pytest.raises(FileNotFoundError):
        http_request(instance["endpoint"], "GET", "/health")
    shown = rig.service.ctl("ps").stdout
    assert "stopping" in shown and "drains 1, " in shown
    # Its daemon dies, and the next one goes on with it.
    rig.kill_daemon()
    with pytest.raises((OSError, ValueError)):
        first.result(60)
    after = drains(rig, "one", 1)
    assert (after["run"], after["main_pid"]) == (instance["run"], instance["main_pid"])
    assert after["drain"]["remaining_s"] <= seen["drain"]["remaining_s"]
    with pytest.raises(FileNotFoundError):
        http_request(instance["endpoint"], "GET", "/health")
    # Who wants it again waits, and who wants it gone waits for the same end.
    load = rig.load_later("one")
    second = unload_later(rig, "two")
    assert second.result(60)["code"] == "not_loaded"
    eventually(lambda: rig.events("drain"), "the next daemon tells of it")
    rig.behave(held=False)
    assert answer.result(60).status == 200
    assert load.result(60)[-1]["kind"] == "ready"
    texts = [each["message"] for each in told(rig, "drain", "one")]
    assert texts[0].startswith("waits for 1 request to end, for ")
    assert texts[-1] == "all requests have ended"
    rig.check_books()


def test_the_time_is_bounded_and_force_is_at_once(rig: Rig) -> None:
    rig.behave(held=True)
    answer = rig.ask_later(rig.load_ready("one"))
    began_s = now_s()
    done = rig.service.ctl("unload", "one")
    assert DRAIN_S <= now_s() - began_s < 60
    assert done.stdout.rstrip().endswith("; 1 request was cut off")
    with pytest.raises((OSError, ValueError)):
        answer.result(60)
    # An engine that does not stop, drained for long, and then by force.
    rig.behave(ignore_sigterm=True)
    instance = rig.load_ready("one")
    rig.behave(ignore_sigterm=False)
    answers = [rig.ask_later(instance)]
    waiting = unload_later(rig, "one", drain_s=600.0)
    drains(rig, "one", 1)
    began_s = now_s()
    assert rig.service.ctl("unload", "one", "--force").returncode == 0
    assert now_s() - began_s < 60
    assert waiting.result(60)["unfinished"] == 1
    for each in answers:
        with pytest.raises((OSError, ValueError)):
            each.result(60)
    # Without requests nobody waits.
    rig.load_ready("two")
    began_s = now_s()
    assert unload_later(rig, "two", drain_s=600.0).result(60)["unfinished"] == 0
    assert now_s() - began_s < 60
    assert told(rig, "drain", "two") == []
    answer_of_both = rig.service.request(
        "POST", "/v1/unload", {"model": "two", "force": True, "drain_s": 1.0}
    )
    assert answer_of_both.json()["code"] == "invalid_request"


def test_one_that_freezes_is_reported_and_one_that_gets_on_is_not(rig: Rig) -> None:
    slow, frozen = rig.load_ready("two"), rig.load_ready("one")
    # A prompt that goes on for as long as the rest of this test takes.
    rig.behave(prompt_steps=3000, prompt_step_s=0.2)
    rig.ask_later(slow)
    rig.behave(prompt_steps=0, held=True)
    answer = rig.ask_later(frozen)
    rig.until("one", "stalled")
    assert http_request(frozen["endpoint"], "GET", "/health").status == 200
    stall = of(rig, "one")["stall"]
    assert stall["stalled_s"] > stall["patience_s"] == PATIENCE_S
    assert "restart_in_s" not in stall or stall["restart_in_s"] is None
    shown = " ".join(rig.service.ctl("ps").stdout.split())
    assert "one: stalled: for " in shown and "no slot computes or generates" in shown
    (event,) = [each for each in told(rig, "state", "one") if each["state"] == "stalled"]
    assert event["actor"]["kind"] == "engine"
    assert event["details"]["stalled_s"] > event["details"]["patience_s"]
    rig.behave(held=False)
    assert answer.result(60).status == 200
    rig.until("one", "ready")
    # One that does not even answer to /health.
    os.kill(frozen["main_pid"], signal.SIGSTOP)
    rig.until("one", "stalled")
    assert "does not answer" in of(rig, "one")["stall"]["reason"]
    os.kill(frozen["main_pid"], signal.SIGCONT)
    rig.until("one", "ready")
    assert of(rig, "one")["main_pid"] == frozen["main_pid"]
    assert of(rig, "two")["state"] == "busy"
    assert "stalled" not in {each["state"] for each in told(rig, "state", "two")}


def test_it_is_restarted_as_it_was_and_the_second_time_left_down(rig: Rig) -> None:
    policy(rig, "restart")
    first = rig.load_ready("one", context_tokens=8192, pin=True)
    rig.behave(held=True)
    answer = rig.ask_later(first)

    def back() -> dict[str, Any] | None:
        now = of(rig, "one")
        return now if now.get("state") == "ready" and now["run"] != first["run"] else None

    second = eventually(back, "it is back")
    with pytest.raises((OSError, ValueError)):
        answer.result(60)
    assert (second["context_tokens"], second["pinned"], second["attempt"]) == (8192, True, 1)
    states = [each["state"] for each in told(rig, "state", "one") if each["run"] == first["run"]]
    assert states[-4:] == ["stalled", "stopping", "releasing", "failed"]
    (why,) = [each for each in told(rig, "state", "one") if each["state"] == "failed"]
    assert why["details"]["details"]["cause"] == CrashCause.HUNG
    rig.ask_later(second)
    rig.until("one", "latched")
    down = of(rig, "one")
    assert "so it had before its last start" in down["latch_reason"]
    assert down["way_out"].endswith("lllm3090ctl reset one")
    assert "the engine hung" in rig.service.ctl("history", "one").stdout
    until_no_units()
    rig.behave(held=False)
    rig.service.ctl("reset", "one")
    rig.until("one", "ready")
    rig.check_books()
