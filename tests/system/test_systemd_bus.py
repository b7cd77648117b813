"""The bus thread and the systemd manager against a real bus and a real ``systemd --user``."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from gi.repository import GLib

from lllm3090d.bus import thread
from lllm3090d.bus.messages import Match, RemoteError, Signal, Target
from lllm3090d.bus.properties import INFINITY, PROPERTIES, PropertyValue
from lllm3090d.bus.systemd import (
    BusBack,
    BusLost,
    Event,
    Relist,
    SystemdManager,
    UnitChanged,
    UnitGone,
    UnitStatus,
    explain_exit,
)
from lllm3090d.bus.thread import BusState, BusThread
from lllm3090d.errors import ErrorCode, LlmError

pytestmark = pytest.mark.system
T = TypeVar("T")
EVENT_TIMEOUT_S = 20.0
SLEEP = ("/bin/sleep", "300")
# Ignores SIGTERM, and says so by opening the pipe it is given.
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(300)
"""
BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")


def systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemctl", "--user", *arguments], capture_output=True, text=True, check=False, timeout=30
    )


class Scene:
    """A connected manager whose units and events belong to one test."""

    def __init__(self, bus: BusThread, manager: SystemdManager, prefix: str) -> None:
        self.bus = bus
        self.manager = manager
        self.prefix = prefix
        self.events: list[Event] = []
        self._came = asyncio.Event()
        manager.set_listener(self._listen)

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        self._came.set()

    def name(self, part: str = "a") -> str:
        return f"{self.prefix}-{part}.service"

    def properties(
        self, argv: tuple[str, ...] = SLEEP, **more: PropertyValue
    ) -> Mapping[str, PropertyValue]:
        return {
            "Description": "test of lllm3090d",
            "Type": "exec",
            "Slice": "lllm3090.slice",
            "ExecStart": [(argv[0], argv, False)],
            "StandardOutput": "null",
            "StandardError": "null",
            **more,
        }

    async def start(self, part: str = "a", argv: tuple[str, ...] = SLEEP, **more: PropertyValue) -> str:
        return await self.manager.start(self.name(part), self.properties(argv, **more))

    async def status(self, part: str = "a") -> UnitStatus:
        status = await self.manager.status(self.name(part))
        assert status is not None
        return status

    async def until(self, found: Callable[[Event], bool], begin: int = 0) -> Event:
        """The first event from number ``begin`` on that is meant, waited for."""
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            while True:
                self._came.clear()
                for event in self.events[begin:]:
                    if found(event):
                        return event
                await self._came.wait()

    async def gone(self, part: str = "a") -> UnitStatus | None:
        event = await self.until(lambda event: isinstance(event, UnitGone) and event.name == self.name(part))
        assert isinstance(event, UnitGone)
        return event.last

    async def failed(self, part: str = "a") -> UnitStatus:
        event = await self.until(lambda event: isinstance(event, UnitChanged) and event.status.is_failed)
        assert isinstance(event, UnitChanged) and event.status.name == self.name(part)
        return event.status


def play(scenario: Callable[[Scene], Awaitable[T]]) -> T:
    """Run a scenario with a manager of its own; no unit of it is left behind."""

    async def run() -> T:
        prefix = f"lllm3090-test{uuid.uuid4().hex[:8]}"
        bus = BusThread()
        await bus.start()
        try:
            manager = await SystemdManager.connect(bus, f"{prefix}-*.service")
            try:
                return await scenario(Scene(bus, manager, prefix))
            finally:
                await manager.close()
        finally:
            await bus.close()
            systemctl("kill", "--signal=KILL", f"{prefix}-*.service")
            systemctl("stop", f"{prefix}-*.service")
            systemctl("reset-failed", f"{prefix}-*.service")

    return asyncio.run(run())


async def told(*arguments: str) -> None:
    """A stranger uses systemctl."""
    done = await asyncio.to_thread(systemctl, *arguments)
    assert done.returncode == 0, done.stderr


def proc(pid: int, file: str) -> bytes:
    return Path(f"/proc/{pid}/{file}").read_bytes()


def strings(pid: int, file: str) -> list[bytes]:
    """The NUL-terminated strings of a file of a process."""
    return proc(pid, file).split(b"\0")[:-1]


# --- starting and stopping ---


def test_a_hundred_starts_and_stops_lose_no_job() -> None:
    async def scenario(scene: Scene) -> None:
        for number in range(100):
            assert (
                await scene.manager.start(scene.name(str(number)), scene.properties(), timeout_s=20)
                == "done"
            )
            left = await scene.manager.stop(scene.name(str(number)), timeout_s=20)
            assert left is None or left.is_gone
        for number in range(100):
            last = await scene.gone(str(number))
            assert last is not None and last.exec_main_status == signal.SIGTERM

    play(scenario)


def test_a_started_unit_is_described_in_full() -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.start(Environment=["LLLM3090_RUN=1"], WorkingDirectory="/") == "done"
        status = await scene.status()
        assert (status.load_state, status.active_state, status.sub_state) == ("loaded", "active", "running")
        assert (status.is_active, status.transient, status.job_pending) == (True, True, False)
        assert (status.description, status.argv) == ("test of lllm3090d", SLEEP)
        assert status.environment == ("LLLM3090_RUN=1",)
        assert proc(status.main_pid, "comm") == b"sleep\n"
        assert len(bytes.fromhex(status.invocation_id)) == 16
        assert status.control_group.endswith(f"/lllm3090.slice/{scene.name()}")
        cgroups = proc(status.main_pid, "cgroup").decode().splitlines()
        assert any(line.endswith(status.control_group) for line in cgroups)
        assert 0 < status.exec_main_start_monotonic_s <= time.clock_gettime(time.CLOCK_MONOTONIC)
        assert explain_exit(status) == "has not ended"
        (listed,) = await scene.manager.list()
        assert listed.invocation_id == status.invocation_id

    play(scenario)


def test_a_missing_binary_fails_the_job_and_is_explained() -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.start(argv=("/nonexistent/llama-server",)) == "failed"
        status = await scene.failed()
        assert explain_exit(status) == "never ran: the file could not be executed (203/EXEC)"
        assert (await scene.status()).is_failed
        await scene.manager.reset_failed(scene.name())
        await scene.gone()
        assert await scene.manager.status(scene.name()) is None
        await scene.manager.reset_failed(scene.name())  # nothing there any more is no error

    play(scenario)


def test_a_crash_at_once_is_seen_with_its_status() -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.start(argv=("/bin/sh", "-c", "exit 7")) in {"done", "failed"}
        assert explain_exit(await scene.failed()) == "exited with status 7"

    play(scenario)


def test_a_crash_by_signal_is_explained() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(LimitCORE=0)
        await scene.manager.kill(scene.name(), signal.SIGSEGV, whom="main")
        assert explain_exit(await scene.failed()) == "killed by SIGSEGV"
        await scene.manager.kill(scene.name(), signal.SIGKILL)  # nothing left to kill is no error
        await scene.manager.kill(scene.name("never"), signal.SIGKILL)

    play(scenario)


def test_a_good_end_is_told_although_the_unit_is_unloaded_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.start(argv=("/bin/true",)) == "done"
        last = await scene.gone()
        assert last is not None
        assert (last.active_state, last.result, last.exec_main_status) == ("inactive", "success", 0)
        assert last.argv == ("/bin/true",)
        assert explain_exit(last) == "exited with status 0"
        assert await scene.manager.status(scene.name()) is None
        assert await scene.manager.stop(scene.name(), timeout_s=5) is None

    play(scenario)


def test_who_ignores_sigterm_is_killed_and_seen_to_have_failed(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await start_stubborn(scene, tmp_path, stop_after_us=300_000)
        left = await scene.manager.stop(scene.name(), timeout_s=20)
        assert left is not None and left.is_failed
        assert (left.result, left.exec_main_status) == ("timeout", signal.SIGKILL)
        assert explain_exit(left) == "ran into a time limit of systemd (killed by SIGKILL)"

    play(scenario)


def test_a_stop_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await start_stubborn(scene, tmp_path, stop_after_us=60_000_000)
        with pytest.raises(LlmError, match="was not stopped: it is deactivating") as caught:
            await scene.manager.stop(scene.name(), timeout_s=0.2)
        assert caught.value.code is ErrorCode.STOP_FAILED
        assert caught.value.details["job_result"] == "timeout"
        await scene.manager.kill(scene.name(), signal.SIGKILL)
        assert explain_exit(await scene.failed()) == "killed by SIGKILL"

    play(scenario)


async def start_stubborn(scene: Scene, tmp_path: Path, stop_after_us: int) -> None:
    """A unit that ignores SIGTERM by now."""
    deaf = tmp_path / "deaf"
    os.mkfifo(deaf)
    argv = (sys.executable, "-c", STUBBORN, str(deaf))
    assert await scene.start(argv=argv, TimeoutStopUSec=stop_after_us) == "done"
    assert await asyncio.to_thread(deaf.read_bytes) == b""  # open() returns when the unit opens it too


# --- what is refused ---


def test_a_name_in_use_is_refused_and_the_unit_untouched() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        before = await scene.status()
        with pytest.raises(LlmError, match="already loaded") as caught:
            await scene.start()
        assert caught.value.code is ErrorCode.UNIT_REFUSED
        assert caught.value.details["dbus_error"] == "org.freedesktop.systemd1.UnitExists"
        assert caught.value.hint is not None and f"reset-failed {scene.name()}" in caught.value.hint
        assert (await scene.status()).invocation_id == before.invocation_id

    play(scenario)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"Restart": "never"}, "Invalid Restart setting"),
        ({"Slice": "lllm3090"}, "Invalid unit name"),
        ({"ExecStart": []}, "bad unit file setting"),
        ({"Environment": ["no equals sign"]}, "Invalid environment"),
    ],
)
def test_a_refusal_says_what_systemd_said_and_leaves_nothing(
    wrong: dict[str, PropertyValue], message: str
) -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(LlmError, match=message) as caught:
            await scene.manager.start(scene.name(), {**scene.properties(), **wrong})
        assert caught.value.code is ErrorCode.UNIT_REFUSED
        assert caught.value.hint
        assert await scene.manager.status(scene.name()) is None
        assert await scene.start() == "done"  # the name is free

    play(scenario)


def test_wrong_properties_never_reach_systemd() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(ValueError, match="RestartSec is not in the table"):
            await scene.start(RestartSec=1)
        with pytest.raises(TypeError, match="MemoryMax"):
            await scene.start(MemoryMax="1G")
        assert scene.events == []

    play(scenario)


# --- the table, against this systemd ---

SAMPLES: Mapping[str, PropertyValue] = {
    "Documentation": ["https://example.org/"],
    "SourcePath": "/models/model.gguf",
    "CollectMode": "inactive",
    "Restart": "no",
    "TimeoutStartUSec": INFINITY,
    "TimeoutStopUSec": 15_000_000,
    "SuccessExitStatus": ((143,), ()),
    "OOMPolicy": "stop",
    "Environment": ["A=1"],
    "UnsetEnvironment": ["LLAMA_ARG_MODEL"],
    "WorkingDirectory": "/",
    "UMask": 0o077,
    "OOMScoreAdjust": 500,
    "Nice": 5,
    "StandardInput": "null",
    "StandardOutput": "journal",
    "StandardError": "journal",
    "SyslogIdentifier": "lllm3090-test",
    "LogExtraFields": [b"LLLM3090_RUN=1"],
    "LimitCORE": 0,
    "LimitNOFILE": 1024,
    "LimitMEMLOCK": 1 << 16,
    "NoNewPrivileges": True,
    "LockPersonality": True,
    "RestrictRealtime": True,
    "RestrictSUIDSGID": True,
    "RestrictNamespaces": 0,
    "RestrictAddressFamilies": (True, ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"]),
    "SystemCallArchitectures": ["native"],
    "SystemCallFilter": (True, ["@system-service"]),
    "SystemCallErrorNumber": 1,
    "MemoryAccounting": True,
    "MemoryHigh": INFINITY,
    "MemoryMax": 1 << 30,
    "MemorySwapMax": INFINITY,
    "MemoryZSwapMax": INFINITY,
    "KillMode": "mixed",
    "KillSignal": signal.SIGTERM,
    "SendSIGKILL": True,
}


def test_every_property_of_the_table_is_accepted_together() -> None:
    async def scenario(scene: Scene) -> None:
        sent = {**scene.properties(), **SAMPLES}
        assert sent.keys() == PROPERTIES.keys()
        assert await scene.manager.start(scene.name(), sent) == "done"
        assert await scene.manager.stop(scene.name(), timeout_s=20) is None

    play(scenario)


def test_the_table_agrees_with_what_systemd_says_of_itself() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        unit = Target(
            "org.freedesktop.systemd1",
            "/org/freedesktop/systemd1/unit/" + scene.name().replace("-", "_2d").replace(".", "_2e"),
            "org.freedesktop.DBus.Introspectable",
        )
        (xml,) = await scene.bus.method(unit, "Introspect")
        getters = {
            str(row.get("name")): str(row.get("type"))
            for interface in ET.fromstring(xml).iter("interface")  # noqa: S314 - systemd wrote it
            if interface.get("name") in {"org.freedesktop.systemd1.Unit", "org.freedesktop.systemd1.Service"}
            for row in interface.iter("property")
        }
        # The getter of ExecStart tells times and statuses besides.
        getters["ExecStart"] = getters["ExecStart"].replace("ttttuii", "")
        known = {
            name: row.signature
            for name, row in PROPERTIES.items()
            if row.since <= scene.manager.version_number
        }
        assert {name: getters.get(name) for name in known} == known

    play(scenario)


NASTY = (
    "with space",
    "'single'",
    '"double"',
    "back\\slash",
    "tab\tnewline\n",
    "naïve 模型 🦙",
    "%h %% 100%",
    '{"json": [1, 2]}',
    "-@:!+",
    "*~?",
    "",
    "=",
)


def test_arguments_arrive_byte_for_byte_and_survive_a_reload() -> None:
    async def scenario(scene: Scene) -> None:
        argv = (sys.executable, "-c", "import time\ntime.sleep(300)", *NASTY)
        assert await scene.start(argv=argv) == "done"
        status = await scene.status()
        assert status.argv == argv
        assert strings(status.main_pid, "cmdline") == [item.encode() for item in argv]
        await told("daemon-reload")
        assert (await scene.status()).argv == argv

    play(scenario)


def test_the_environment_arrives_byte_for_byte_and_survives_a_reload() -> None:
    async def scenario(scene: Scene) -> None:
        values = (*NASTY, "$HOME ${HOME} $$", "a; b & c | d", "`id` $(id)")
        environment = tuple(f"LLLM3090_TEST_{number}={value}" for number, value in enumerate(values))
        assert await scene.start(Environment=environment, UnsetEnvironment=["LANG"]) == "done"
        status = await scene.status()
        assert status.environment == environment
        got = strings(status.main_pid, "environ")
        assert [item for item in got if item.startswith(b"LLLM3090_TEST_")] == [
            item.encode() for item in environment
        ]
        assert not [item for item in got if item.startswith(b"LANG=")]
        await told("daemon-reload")
        assert (await scene.status()).environment == environment

    play(scenario)


# --- strangers and upheavals ---


def test_a_stop_by_a_stranger_is_seen_to_its_end() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await told("stop", scene.name())
        last = await scene.gone()
        assert last is not None and last.is_gone
        assert explain_exit(last) == "killed by SIGTERM"

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


def test_without_systemd_on_the_bus_the_manager_says_so(private_bus: "PrivateBus") -> None:
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


# --- the thread ---


class PrivateBus:
    """A dbus-daemon of the test, which it may kill."""

    def __init__(self, directory: Path) -> None:
        self.address = f"unix:path={directory}/bus"
        self._socket = directory / "bus"
        self._config = directory / "bus.conf"
        self._config.write_text(
            '<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"'
            ' "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">'
            f"<busconfig><type>session</type><listen>{self.address}</listen>"
            '<policy context="default"><allow send_destination="*"/><allow receive_sender="*"/>'
            '<allow own="*"/></policy></busconfig>'
        )
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            ["dbus-daemon", f"--config-file={self._config}", "--nofork", "--print-address"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("unix:path=")  # it listens

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        self._socket.unlink(missing_ok=True)

    def pause(self, *, paused: bool) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)


@pytest.fixture
def private_bus(tmp_path: Path) -> Any:
    if shutil.which("dbus-daemon") is None:
        pytest.skip("dbus-daemon is not installed")
    bus = PrivateBus(tmp_path)
    yield bus
    bus.kill()


def on(private_bus: PrivateBus, scenario: Callable[[BusThread], Awaitable[T]]) -> T:
    async def run() -> T:
        private_bus.start()
        bus = BusThread(private_bus.address)
        await bus.start()
        try:
            return await scenario(bus)
        finally:
            await bus.close()
            assert "bus" not in {one.name for one in threading.enumerate()}

    return asyncio.run(run())


@pytest.mark.parametrize(
    "address", ["unix:path=/nonexistent/bus", "nonsense", "unix:nonsense", "tcp:host=x;"]
)
def test_no_bus_is_said_at_once_and_leaves_no_thread(address: str) -> None:
    async def scenario() -> None:
        bus = BusThread(address)
        with pytest.raises(LlmError, match=f"No D-Bus at {address}: .+") as caught:
            await bus.start()
        assert caught.value.code is ErrorCode.BUS_UNAVAILABLE
        assert "bus" not in {one.name for one in threading.enumerate()}
        with pytest.raises(LlmError, match="closed"):
            await bus.ping()

    asyncio.run(scenario())


def test_a_bus_that_hangs_is_given_up(private_bus: PrivateBus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        private_bus.start()
        private_bus.pause(paused=True)
        try:
            with pytest.raises(LlmError, match=r"no answer within 0\.2 s"):
                await BusThread(private_bus.address).start()
        finally:
            private_bus.pause(paused=False)

    monkeypatch.setattr(thread, "CONNECT_TIMEOUT_S", 0.2)
    asyncio.run(scenario())


def test_functions_run_on_the_thread_and_their_errors_come_back(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        assert await bus.call(lambda _: threading.current_thread().name) == "bus"
        assert str(await bus.call(lambda it: it.con.get_unique_name())).startswith(":")
        with pytest.raises(ZeroDivisionError):
            await bus.call(lambda _: 1 // 0)
        assert 0 <= await bus.ping() < 5

    on(private_bus, scenario)


def test_exit_on_close_is_off(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> bool:
        return await bus.call(lambda it: bool(it.con.get_exit_on_close()))

    assert on(private_bus, scenario) is False


def test_methods_answer_refuse_or_are_not_there(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        (names,) = await bus.method(BUS, "ListNames")
        assert "org.freedesktop.DBus" in names
        with pytest.raises(RemoteError) as refused:
            await bus.method(BUS, "NoSuchMethod")
        assert refused.value.name == "org.freedesktop.DBus.Error.UnknownMethod"
        assert "GDBus.Error" not in refused.value.message
        with pytest.raises(LlmError) as nobody:
            await bus.method(Target("org.example.Nobody", "/", "org.example"), "Hello")
        assert nobody.value.code is ErrorCode.BUS_UNAVAILABLE
        with pytest.raises(TypeError, match="the arguments of GetNameOwner are s, not a tuple"):
            await bus.method(BUS, "GetNameOwner", GLib.Variant("s", "org.example.Nobody"))

    on(private_bus, scenario)


def test_calls_do_not_block_each_other_and_time_out_alone(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        private_bus.pause(paused=True)
        try:
            hanging = asyncio.create_task(bus.method(BUS, "ListNames", timeout_s=0.3))
            assert await bus.ping() < 5  # the thread is free while the bus hangs
            with pytest.raises(LlmError, match=r"ListNames was not answered within 0\.3 s"):
                await hanging
        finally:
            private_bus.pause(paused=False)
        assert (await bus.method(BUS, "GetId"))[0]

    on(private_bus, scenario)


def test_a_blocked_thread_does_not_answer_a_ping(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        release = threading.Event()
        blocking = asyncio.create_task(bus.call(lambda _: release.wait(30)))
        await asyncio.sleep(0)  # lets the task hand its function over
        with pytest.raises(LlmError, match="did not answer within"):
            await bus.ping(timeout_s=0.1)
        release.set()
        assert await blocking
        assert await bus.ping() < 5

    on(private_bus, scenario)


def test_a_cancelled_call_harms_nobody(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        task = asyncio.create_task(bus.method(BUS, "ListNames"))
        await asyncio.sleep(0)  # lets the task make its call
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await bus.method(BUS, "GetId"))[0]

    on(private_bus, scenario)


def test_closing_answers_what_still_waits(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        private_bus.pause(paused=True)
        try:
            hanging = asyncio.create_task(bus.method(BUS, "ListNames", timeout_s=60))
            assert await bus.ping() < 5  # the call is under way
            await bus.close()
            with pytest.raises(LlmError) as caught:
                await hanging
            assert caught.value.code is ErrorCode.BUS_UNAVAILABLE
            await bus.close()  # twice is fine
        finally:
            private_bus.pause(paused=False)

    on(private_bus, scenario)


def test_a_lost_bus_is_noticed_found_again_and_its_signals_with_it(private_bus: PrivateBus) -> None:
    async def scenario(bus: BusThread) -> None:
        states: asyncio.Queue[BusState] = asyncio.Queue()
        bus.add_state_handler(states.put_nowait)
        signals: asyncio.Queue[Signal] = asyncio.Queue()
        match = Match(
            "org.freedesktop.DBus", "org.freedesktop.DBus", "NameOwnerChanged", arg0="org.example.A"
        )
        await bus.subscribe(match, signals.put_nowait)

        async def own_and_hear() -> None:
            await bus.method(BUS, "RequestName", GLib.Variant("(su)", ("org.example.A", 4)))
            arrived = await asyncio.wait_for(signals.get(), EVENT_TIMEOUT_S)
            assert arrived.arguments[:2] == ("org.example.A", "")

        await own_and_hear()
        hanging = asyncio.create_task(bus.method(BUS, "Unanswered", timeout_s=60))
        private_bus.kill()
        assert await asyncio.wait_for(states.get(), EVENT_TIMEOUT_S) is BusState.LOST
        with pytest.raises((LlmError, RemoteError)):
            await hanging
        for attempt in (bus.call(lambda _: None), bus.method(BUS, "GetId")):
            with pytest.raises(LlmError, match="is lost") as caught:
                await attempt
            assert caught.value.code is ErrorCode.BUS_UNAVAILABLE
        assert await bus.ping() < 5
        private_bus.start()
        assert await asyncio.wait_for(states.get(), EVENT_TIMEOUT_S) is BusState.BACK
        await own_and_hear()

    on(private_bus, scenario)


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


def test_systemd_may_come_to_the_bus_after_the_daemon(private_bus: PrivateBus) -> None:
    """As at login, when the daemon's connection starts the bus and systemd takes its name there a moment later."""

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
