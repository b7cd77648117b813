"""The systemd manager among strangers, reloads and new buses, and where systemd is not there or comes late."""

import asyncio
import os
import subprocess
import sys

import pytest

from lllm3090d.bus import systemd as systemd_module
from lllm3090d.bus.systemd import (
    BusBack,
    BusLost,
    Relist,
    SystemdManager,
    UnitChanged,
    UnitGone,
    explain_exit,
)
from lllm3090d.bus.thread import BusThread
from lllm3090d.errors import ErrorCode, LlmError
from tests.system.scenes import BUS, EVENT_TIMEOUT_S, SLEEP, PrivateBus, Scene, on, play, systemctl, told

pytestmark = pytest.mark.system


def test_a_stop_by_a_stranger_is_seen_to_its_end() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await told("stop", scene.name())
        last = await scene.gone()
        assert last is not None and last.is_gone
        assert explain_exit(last) == "was killed by SIGTERM"

    play(scenario)


def test_a_unit_started_by_a_stranger_is_seen_and_listed() -> None:
    async def scenario(scene: Scene) -> None:
        done = await asyncio.to_thread(
            subprocess.run,
            ["systemd-run", "--user", "--quiet", f"--unit={scene.name()}", *SLEEP],
            check=False,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        event = await scene.until(lambda event: isinstance(event, UnitChanged) and event.status.is_active)
        assert isinstance(event, UnitChanged)
        (listed,) = await scene.manager.list()
        assert (listed.name, listed.main_pid) == (scene.name(), event.status.main_pid)
        assert listed.argv == SLEEP

    play(scenario)


@pytest.mark.parametrize("upheaval", ["daemon-reload", "daemon-reexec"])
def test_a_reload_of_systemd_changes_nothing_for_a_running_unit(upheaval: str) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        before = await scene.status()
        begin = len(scene.events)
        await told(upheaval)
        await scene.until(lambda event: isinstance(event, Relist), begin)
        (after,) = await scene.manager.list()
        assert (after.main_pid, after.invocation_id, after.is_active) == (
            before.main_pid,
            before.invocation_id,
            True,
        )
        # Signals still arrive, and in order: nothing about this unit can be under way once its real end is told.
        assert await scene.manager.stop(scene.name(), timeout_s=20) is None
        await scene.gone()
        assert sum(isinstance(event, UnitGone) for event in scene.events) == 1
        assert isinstance(scene.events[-1], UnitGone)

    play(scenario)


def test_a_new_session_bus_is_found_and_units_outlive_the_old_one() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        before = await scene.status()
        restarted = await asyncio.to_thread(systemctl, "restart", "dbus.service")
        if restarted.returncode != 0:
            pytest.skip(f"the session bus cannot be restarted here: {restarted.stderr.strip()}")
        await scene.until(lambda event: isinstance(event, BusBack))
        await scene.until(lambda event: isinstance(event, Relist))
        upheaval = [event for event in scene.events if isinstance(event, BusLost | BusBack | Relist)]
        assert upheaval == [BusLost(), BusBack(), Relist()]
        (after,) = await scene.manager.list()
        assert (after.main_pid, after.invocation_id) == (before.main_pid, before.invocation_id)
        # Matches are back: an end that nobody here asked for is heard, with what was known before the loss.
        await told("stop", scene.name())
        last = await scene.gone()
        assert last is not None and last.argv == SLEEP and last.is_gone
        assert await scene.start("b") == "done"

    if systemctl("show", "--property=MainPID", "dbus.service").stdout.strip() in {"", "MainPID=0"}:
        pytest.skip("the session bus is not dbus.service of this manager")
    if (
        os.environ.get("XDG_CURRENT_DESKTOP")
        or os.environ.get("WAYLAND_DISPLAY")
        or os.environ.get("DISPLAY")
    ):
        pytest.skip("a desktop session would not survive a restart of its bus")
    play(scenario)


def test_without_systemd_on_the_bus_the_manager_says_so(private_bus: PrivateBus) -> None:
    async def scenario() -> None:
        private_bus.start()
        bus = BusThread(private_bus.address)
        await bus.start()
        try:
            with pytest.raises(LlmError, match="Subscribe could not be called") as caught:
                await SystemdManager.connect(bus, "lllm3090-*.service")
            assert caught.value.code is ErrorCode.BUS_UNAVAILABLE
        finally:
            await bus.close()

    asyncio.run(scenario())


def test_questions_about_the_manager_and_about_any_unit() -> None:
    async def scenario(scene: Scene) -> None:
        assert scene.manager.version_number >= 252
        assert scene.manager.version.startswith(str(scene.manager.version_number))
        environment = await scene.manager.manager_environment()
        assert any(item.startswith("XDG_RUNTIME_DIR=") for item in environment)
        assert await scene.manager.unit_active_state("basic.target") == "active"
        assert await scene.manager.unit_active_state("lllm3090-not-loaded.target") is None
        assert systemctl("list-units", "--all", "--no-legend", "lllm3090-not-loaded.target").stdout == ""
        assert await scene.manager.list() == ()

    play(scenario)


LATE_SYSTEMD = """
import sys
import pydbus
from gi.repository import GLib

class Manager:
    dbus = '<node><interface name="org.freedesktop.systemd1.Manager"><method name="Subscribe"/>' \\
        '<property name="Version" type="s" access="read"/></interface></node>'
    Version = "252.1-late"

    def Subscribe(self):
        pass

bus = pydbus.connect(sys.argv[1])
published = bus.publish("org.freedesktop.systemd1", ("/org/freedesktop/systemd1", Manager()))
GLib.MainLoop().run()
"""


def test_systemd_may_come_to_the_bus_after_the_daemon(
    private_bus: PrivateBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at login, when the daemon's connection starts the bus and systemd takes its name there a moment later."""
    # The stand-in is a program that imports much.
    monkeypatch.setattr(systemd_module, "GREETING_TIMEOUT_S", EVENT_TIMEOUT_S)

    async def scenario(bus: BusThread) -> None:
        connecting = asyncio.create_task(SystemdManager.connect(bus, "lllm3090-*.service"))
        # The first question is answered, with nobody there, before a program can be started.
        await bus.method(BUS, "ListNames")
        command = (sys.executable, "-c", LATE_SYSTEMD, private_bus.address)
        late = await asyncio.create_subprocess_exec(*command)
        try:
            manager = await connecting
            assert manager.version_number == 252
            await manager.close()
        finally:
            late.kill()
            await late.wait()

    on(private_bus, scenario)
