"""A login on a desktop: a real graphical-session.target, a stand-in logind, and a card that the desktop fills."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.logind import FakeLogind, Session
from tests.system.harness import eventually, properties, systemctl
from tests.system.rig import MIB, Rig, rigged
from tests.system.scenes import PrivateBus
from tests.system.test_wanted import anew, restored, wanted

pytestmark = pytest.mark.system

MODELS = {"small": 1.0, "tiny": 1.0, "other": 1.0}
TARGET = "graphical-session.target"
DESKTOP_UNIT = "lllm-test-desktop.service"
DESKTOP_MIB = 1800
SETTLED_S = 90.0  # far more than it takes a desktop that stands still to be seen to
WAITS = "it waits for the desktop to settle: "


@contextlib.contextmanager
def desktop(rig: Rig) -> Iterator[Path]:
    """As desktops have it: a unit with the session's target bound to it; both are up when the file is there."""
    is_up = rig.service.directory / "desktop-is-up"
    is_up.unlink(missing_ok=True)
    unit = rig.service.units_dir / DESKTOP_UNIT
    unit.write_text(
        # Without graphical-session-pre.target, to which a machine may have tied services of its own.
        f"[Unit]\nBindsTo={TARGET}\nBefore={TARGET}\n"
        "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        f"ExecStart=/bin/sh -c 'until [ -e {is_up} ]; do sleep 0.05; done'\n"
    )
    systemctl("daemon-reload")
    try:
        systemctl("start", "--no-block", DESKTOP_UNIT)
        eventually(lambda: properties(DESKTOP_UNIT, "ActiveState")["ActiveState"] == "activating")
        assert properties(TARGET, "ActiveState")["ActiveState"] == "inactive"
        yield is_up
    finally:
        systemctl("stop", DESKTOP_UNIT, check=False)
        unit.unlink()
        systemctl("daemon-reload")


def autoload_wait(rig: Rig) -> dict[str, Any]:
    """What is waited for; empty where nothing is."""
    found: dict[str, Any] | None = rig.service.request("GET", "/v1/status").json()["autoload_wait"]
    return found or {}


def until_awaits(rig: Rig, what: str, why: str) -> dict[str, Any]:
    """Wait until models wait for that."""

    def found() -> dict[str, Any] | None:
        wait = autoload_wait(rig)
        return wait if wait.get("awaited") == what and why in wait["why"] else None

    return eventually(found, what=f"models wait for {what}: {autoload_wait(rig)}, {rig.events('restore')}")


def test_models_of_a_login_are_loaded_once_the_desktop_has_taken_its_memory(
    private_bus: PrivateBus, tmp_path: Path
) -> None:
    private_bus.start()
    logind = FakeLogind(private_bus.address)
    environment = {"DBUS_SYSTEM_BUS_ADDRESS": private_bus.address}
    settings = {"desktop": "auto", "autoload_wait_s": "600"}
    with contextlib.closing(logind), rigged(tmp_path, MODELS, settings, environment) as rig:
        check_a_login(rig, logind)
        check_what_ends_the_wait(rig)


def check_a_login(rig: Rig, logind: FakeLogind) -> None:
    for name in ("small", "other"):
        rig.service.ctl("autoload", name)
    # A login without a desktop, such as through ssh, waits for none.
    logind.sessions = (Session("", "tty", uid=os.getuid()),)
    anew(rig, boot="another")
    restored(rig, "small", "other")
    assert not [each for each in rig.events("restore") if "desktop" in each["message"]]
    # The session has begun, and the greeter is still in front; the daemon is there before the session's target.
    logind.sessions = (
        Session("seat0", "wayland", of="greeter", uid=os.getuid() + 1),
        Session("seat0", "wayland", active=False, uid=os.getuid()),
    )
    rig.nvml.grow(100 * MIB)
    with desktop(rig) as is_up:
        anew(rig, boot="a third")
        wait = until_awaits(rig, "target", TARGET)
        assert wait["remaining_s"] > 400 and wait["since"].endswith("Z")
        assert rig.states() == {}
        assert {each["why"] for each in wanted(rig).values()} == {WAITS + wait["why"]}
        shown = " ".join(rig.service.ctl("status").stdout.split())
        assert "What is to be loaded at this login waits for the desktop to settle, since 20" in shown
        # What a person asks for is served meanwhile, and what a person gives up does not come.
        rig.load_ready("tiny")
        assert rig.unload("other")["waited"]
        assert autoload_wait(rig)["awaited"] == "target" and set(wanted(rig)) == {"small", "other"}
        assert not wanted(rig)["other"]["wanted"]
        is_up.touch()
        eventually(lambda: properties(TARGET, "ActiveState")["ActiveState"] == "active")
        until_awaits(rig, "memory", "has changed by")
        assert rig.states() == {"tiny": "ready"}
        rig.nvml.settle(DESKTOP_MIB * MIB)
        eventually(lambda: rig.states().get("small") == "ready", SETTLED_S, "it is loaded")
        assert set(rig.states()) == {"tiny", "small"}
    told = rig.events("restore")
    begins, ends = (each for each in told if "desktop" in each["message"])
    assert begins["details"]["awaited"] == "target" and ends["details"]["ending"] == "settled"
    assert f"other programs hold {DESKTOP_MIB:,}.0 MiB" in ends["message"]
    reserved = [
        each["seq"]
        for each in rig.events("state")
        if each["model"] == "small" and each["state"] == "reserved"
    ]
    assert reserved[-1] > ends["seq"] > begins["seq"] > reserved[-2]  # the last of them at the login before
    assert rig.check_books().foreign_bytes == DESKTOP_MIB * MIB


def check_what_ends_the_wait(rig: Rig) -> None:
    """A person who gives the card away."""
    with desktop(rig):
        anew(rig, boot="a fourth")
        until_awaits(rig, "target", TARGET)
        rig.service.ctl("release", "--until-resume")
        eventually(lambda: not autoload_wait(rig), what="nothing waits any more")
        assert rig.events("restore")[-1]["details"]["ending"] == "released"
        eventually(lambda: "the card is released" in wanted(rig)["small"]["why"])
        assert rig.states() == {}
    rig.service.ctl("resume")
    restored(rig, "small", "other")
