"""A client of the daemon on the session bus: it calls, and keeps every signal that the daemon sends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gi.repository import Gio, GLib

from lllm3090d.bus.service_contract import BUS_NAME, JOB, MANAGER, PROPERTIES, ROOT
from lllm3090d.bus.thread import session_bus_address
from tests.system.harness import REPOSITORY, eventually

ACTIVATION = REPOSITORY / "packaging" / "dbus" / f"{BUS_NAME}.service"
CALL_LIMIT_MS = 60_000
Told = tuple[str, str, str, tuple[Any, ...]]  # path, interface, name, arguments


class CallError(Exception):
    """The daemon, or the bus for it, answered with an error."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


class Client:
    """One connection."""

    def __init__(self) -> None:
        flags = (
            Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
        )
        self.con = Gio.DBusConnection.new_for_address_sync(session_bus_address(), flags, None, None)
        self.con.set_exit_on_close(False)
        self.told: list[Told] = []
        self.con.signal_subscribe(BUS_NAME, None, None, None, None, Gio.DBusSignalFlags.NONE, self._arrived)
        self.bus("GetId")  # the match is in place

    def _arrived(self, _: object, __: str, path: str, interface: str, name: str, body: GLib.Variant) -> None:
        self.told.append((path, interface, name, body.unpack()))

    def bus(self, member: str, arguments: GLib.Variant | None = None) -> Any:
        """Ask the bus itself."""
        name = "org.freedesktop.DBus"
        return self._call(name, "/org/freedesktop/DBus", name, member, arguments)

    def call(
        self, member: str, signature: str = "", *values: Any, path: str = ROOT, interface: str = MANAGER
    ) -> Any:
        """Call a method of the daemon; its only value, or all of them. Raises CallError."""
        body = GLib.Variant(f"({signature})", values) if signature else None
        return self._call(BUS_NAME, path, interface, member, body)

    def _call(self, name: str, path: str, interface: str, member: str, body: GLib.Variant | None) -> Any:
        try:
            answer = self.con.call_sync(
                name, path, interface, member, body, None, Gio.DBusCallFlags.NONE, CALL_LIMIT_MS, None
            ).unpack()
        except GLib.Error as error:
            remote = Gio.DBusError.get_remote_error(error) or ""
            raise CallError(remote, error.message.removeprefix(f"GDBus.Error:{remote}: ")) from error
        return answer[0] if len(answer) == 1 else answer

    def get(self, name: str, path: str = ROOT, interface: str = MANAGER) -> Any:
        """A property."""
        return self.call("Get", "ss", interface, name, path=path, interface=PROPERTIES)

    def get_all(self, path: str, interface: str) -> dict[str, Any]:
        """All properties."""
        found: dict[str, Any] = self.call("GetAll", "s", interface, path=path, interface=PROPERTIES)
        return found

    def pump(self) -> None:
        """Take in the signals that have arrived."""
        while GLib.MainContext.default().iteration(False):
            pass

    def until(self, name: str, wanted: Callable[[Told], bool] = lambda _: True) -> Told:
        """The first signal of that name that is meant, waited for."""

        def found() -> Told | None:
            self.pump()
            return next((each for each in self.told if each[2] == name and wanted(each)), None)

        return eventually(found, what=f"the signal {name}; there were {self.told[-20:]}")

    def end_of(self, job: str) -> Told:
        """How a job ended: its Completed or Failed."""

        def found() -> Told | None:
            self.pump()
            ends = (each for each in self.told if each[0] == job and each[2] in {"Completed", "Failed"})
            return next((each for each in ends if each[1] == JOB), None)

        return eventually(found, what=f"the end of {job}")

    def done(self, member: str, signature: str, *values: Any) -> dict[str, Any]:
        """Start a job that completes; its result."""
        _, _, name, arguments = self.end_of(self.call(member, signature, *values))
        assert name == "Completed", arguments
        result: dict[str, Any] = arguments[0]
        return result

    def changes(self, path: str, interface: str) -> dict[str, list[Any]]:
        """Every value of each property that PropertiesChanged told, in order."""
        self.pump()
        found: dict[str, list[Any]] = {}
        for where, _, name, arguments in self.told:
            if name == "PropertiesChanged" and where == path and arguments[0] == interface:
                for key, value in arguments[1].items():
                    found.setdefault(key, []).append(value)
                for key in arguments[2]:
                    found.setdefault(key, []).append(None)
        return found

    def close(self) -> None:
        """Leave."""
        if not self.con.is_closed():
            self.con.close_sync(None)
        self.pump()


@contextlib.contextmanager
def activatable() -> Iterator[None]:
    """The bus knows how to start the daemon."""
    place = Path(os.environ["XDG_RUNTIME_DIR"]) / "dbus-1" / "services" / ACTIVATION.name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(ACTIVATION.read_text())
    try:
        _read_again()
        yield
    finally:
        place.unlink(missing_ok=True)
        _read_again()


def _read_again() -> None:
    client = Client()
    client.bus("ReloadConfig")
    client.close()
