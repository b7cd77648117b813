"""Notifications on a real session bus: a stand-in service shows them, and somebody presses their buttons."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gi.repository import GLib

from lllm3090d.bus.thread import session_bus_address
from tests.fakes.notification_service import FakeNotifications
from tests.system.conftest import PRIVATE_MANAGER
from tests.system.dbus_scene import Client
from tests.system.harness import eventually, systemctl
from tests.system.rig import Rig, rigged
from tests.system.test_gateway import chat

pytestmark = pytest.mark.system

MODELS = {"alpha": 1.0, "full": 21.5}
MARKUP = "<b>&amp; 60 %"
STALE = "full was not loaded"
NO_CODE = {"exit": 1, "lines": ["CUDA error: no kernel image is available for execution on the device"]}
FAULT = {"exit": 1, "lines": ["GGML_ASSERT(n_tokens > 0) failed"]}
OPENED = "opened.txt"
WIDE = {"context_tokens": GLib.Variant("u", 131_072), "parallel": GLib.Variant("u", 32)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One daemon for all tests; programs that it finds first are ours."""
    if os.environ.get(PRIVATE_MANAGER) != "1":
        pytest.skip("needs a private user manager; run: make test-system")
    programs = tmp_path_factory.mktemp("bin")
    opener = programs / "xdg-open"
    opener.write_text(
        f'#!/bin/sh\ncp "$1" "{programs}/.new" && mv "{programs}/.new" "{programs}/{OPENED}"\n'
    )
    opener.chmod(0o755)
    settings = {"drain_s": "0", "restart_failed": "true", "restart_pause_s": "0.01"}
    with rigged(
        tmp_path_factory.mktemp("rig"),
        MODELS,
        settings,
        {"PATH": f"{programs}:{os.environ['PATH']}", "TEST_PROGRAMS": str(programs)},
    ) as made:
        for name in ("huge", "vast", MARKUP, "late"):
            made.add_model(name, 60.0)
        yield made


@pytest.fixture
def service() -> Iterator[FakeNotifications]:
    made = FakeNotifications(session_bus_address())
    yield made
    made.close()


def models(rig: Rig) -> set[str]:
    listed = rig.service.request("GET", "/v1/models").json()["models"]
    return {each["name"] for each in listed}


def actions(notice: dict[str, Any]) -> list[str]:
    found: list[str] = notice["actions"][::2]
    return found


def reserved_by_a_button(rig: Rig) -> list[dict[str, Any]]:
    events = [each for each in rig.events("state") if each["state"] == "reserved"]
    return [each for each in events if each["actor"].get("program") == "notification"]


def test_what_nobody_was_told_is_shown_and_its_buttons_work(shared: Rig, service: FakeNotifications) -> None:
    # A program asks the gateway; a name is no markup.
    assert chat(shared, MARKUP).status == 507
    told = service.until(f"{MARKUP} was not loaded")
    assert (told["app"], told["replaces"], told["hints"]["urgency"]) == ("lllm3090", 0, 1)
    assert re.search(r"&lt;b&gt;&amp;amp; 60 % is too big for the card .* MiB", told["body"])
    assert actions(told) == []
    # Who asks with the client is told by it; the same refusal again is no news.
    assert shared.service.ctl("load", "huge", check=False).returncode == 5
    assert chat(shared, MARKUP).status == 507

    # A load over D-Bus is refused; the smaller one is loaded by a button, and a stranger's word is not heard.
    client = Client()
    _, _, name, _ = client.end_of(client.call("Load", "sa{sv}", "full", WIDE))
    assert name == "Failed"
    told = service.next()
    assert (told["summary"], actions(told)) == (STALE, ["retry"]), str(told)
    stranger = FakeNotifications(session_bus_address(), named=False)
    stranger.choose(told["number"], "retry")
    stranger.close()
    service.choose(told["number"], "no such button")
    assert client.get("State") == "idle"
    service.choose(told["number"], "retry")
    told = service.until("full is loaded")
    context = shared.service.instances()["full"]["context_tokens"]
    assert f"{context:,} tokens" in told["body"] and told["hints"]["urgency"] == 0
    (reserved,) = reserved_by_a_button(shared)
    assert (reserved["model"], reserved["details"]["context_tokens"]) == ("full", context)
    shared.unload("full")

    # The model is gone by the time its button is pressed.
    client.end_of(client.call("Load", "sa{sv}", "full", WIDE))
    told = service.until(STALE)
    directory = shared.service.models_dir / "full"
    directory.rename(directory.with_name(".full"))
    eventually(lambda: "full" not in models(shared), what="its end is seen")
    service.choose(told["number"], "retry")
    told = service.until(STALE)
    assert told["body"].startswith("There is no model 'full'")
    directory.with_name(".full").rename(directory)
    client.close()

    # An engine that does not come up, for somebody who does not look; its log.
    shared.behave(crash_during_load=FAULT)
    assert shared.load("alpha")["kind"] == "failed"
    told = service.until("alpha could not be started")
    assert actions(told) == ["logs"]
    number = told["number"]
    service.choose(number, "logs")
    told = service.until("The log of alpha could not be opened")
    path = Path(re.search(r"It is in (\S+\.txt), and", told["body"])[1])  # type: ignore[index]  # fails if None
    assert FAULT["lines"][0] in path.read_text() and path.stat().st_mode & 0o777 == 0o600  # type: ignore[index]
    systemctl("set-environment", "DISPLAY=:99")
    try:
        service.choose(number, "logs")
        opened = Path(shared.service.environment["TEST_PROGRAMS"]) / OPENED
        eventually(lambda: opened.exists() and opened.read_text() == path.read_text(), what="it is shown")
    finally:
        systemctl("unset-environment", "DISPLAY")

    # One that serves, ends, and cannot be started again; one notice, which is replaced.
    shared.behave(crash_during_load=None)
    instance = shared.load_ready("alpha")
    shared.behave(crash_during_load=NO_CODE)
    os.kill(instance["main_pid"], 9)
    told = service.until("alpha stays down")
    assert (told["replaces"], told["expires_ms"], actions(told)) == (number, 0, ["logs", "reset"])
    shared.behave(crash_during_load=None)
    service.choose(told["number"], "reset")
    shared.until("alpha", "ready")
    assert service.next("CloseNotification")["number"] == told["number"]
    shared.unload("alpha")
    assert len(reserved_by_a_button(shared)) == 1  # what is reset comes back by itself
    shown = {each["summary"] for each in service.calls_so_far() if each["call"] == "Notify"}
    assert "huge was not loaded" not in shown


def test_a_service_that_is_not_there_comes_late_or_hangs_harms_nobody(shared: Rig) -> None:
    assert chat(shared, "vast").status == 507
    assert shared.service.request("GET", "/v1/status").status == 200
    late = FakeNotifications(session_bus_address(), ("body",))
    told = late.until("vast was not loaded")
    assert told["actions"] == [] and "&" not in told["body"]

    late.hang(hangs=True)
    assert chat(shared, "late").status == 507
    client = Client()
    assert client.get("State") == "idle"
    client.close()
    assert shared.load_ready("alpha")["name"] == "alpha"
    shared.unload("alpha")
    late.hang(hangs=False)
    assert late.until("late was not loaded")["replaces"] == 0
    late.close()

    # Switched off by a reload.
    after = FakeNotifications(session_bus_address())
    shared.service.config_file.write_text('notifications = "failed"\n')
    shared.service.reload()
    assert chat(shared, "huge").status == 507
    shared.behave(crash_during_load=FAULT)
    assert shared.load("alpha")["kind"] == "failed"
    after.until("alpha could not be started")
    assert [each["summary"] for each in after.calls if each["call"] == "Notify"] == [
        "alpha could not be started"
    ]
    after.close()
    shared.behave(crash_during_load=None)
    shared.unload("alpha")
    assert "unexpectedly" not in shared.service.journal()
