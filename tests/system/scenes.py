"""What the tests of the bus share: a manager of their own on the user's bus, and a bus that they may kill."""

import asyncio
import signal
import subprocess
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from lllm3090d.bus.messages import Target
from lllm3090d.bus.properties import PropertyValue
from lllm3090d.bus.systemd import Event, SystemdManager, UnitChanged, UnitGone, UnitStatus
from lllm3090d.bus.thread import BusThread

T = TypeVar("T")
EVENT_TIMEOUT_S = 60.0  # a machine that others use may stand still for seconds
SLEEP = ("/bin/sleep", "300")
BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")


def systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``systemctl --user``, whatever comes of it."""
    return subprocess.run(
        ["systemctl", "--user", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=EVENT_TIMEOUT_S,
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
