"""A stand-in for the desktop's notification service: a process of its own that says what it is told to show.

As a program it reads a JSON line for each thing to do from standard input, and writes one for each call that it gets:

    python -m tests.fakes.notification_service ADDRESS CAPABILITY...
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from gi.repository import Gio, GLib

NAME = "org.freedesktop.Notifications"
PATH = "/org/freedesktop/Notifications"
XML = f"""
<node><interface name="{NAME}">
  <method name="GetCapabilities"><arg type="as" direction="out"/></method>
  <method name="Notify">
    <arg type="s" direction="in"/><arg type="u" direction="in"/><arg type="s" direction="in"/>
    <arg type="s" direction="in"/><arg type="s" direction="in"/><arg type="as" direction="in"/>
    <arg type="a{{sv}}" direction="in"/><arg type="i" direction="in"/><arg type="u" direction="out"/>
  </method>
  <method name="CloseNotification"><arg type="u" direction="in"/></method>
  <signal name="ActionInvoked"><arg type="u"/><arg type="s"/></signal>
  <signal name="NotificationClosed"><arg type="u"/><arg type="u"/></signal>
</interface></node>
"""
USUAL = ("body", "body-markup", "actions", "persistence")
DEADLINE_S = 60.0
MEMBERS = ("app", "replaces", "icon", "summary", "body", "actions", "hints", "expires_ms")


class FakeNotifications:
    """The process, seen from a test.

    Args:
        address: of the bus, which runs.
        capabilities: that it tells.
        named: whether it takes the service's name; else it is a stranger who only sends signals.
    """

    def __init__(self, address: str, capabilities: tuple[str, ...] = USUAL, *, named: bool = True) -> None:
        command = [sys.executable, "-m", "tests.fakes.notification_service", address, str(int(named))]
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [*command, *capabilities],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.calls: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._take()["call"] == "up"

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(json.loads(line))

    def _take(self, within_s: float = DEADLINE_S) -> dict[str, Any]:
        try:
            return self._lines.get(timeout=within_s)
        except queue.Empty:
            raise AssertionError(f"no further call; there were {self.calls}") from None

    def next(self, call: str = "Notify") -> dict[str, Any]:
        """The next call of that name, waited for; others before it are kept in ``calls``."""
        while True:
            told = self._take()
            self.calls.append(told)
            if told["call"] == call:
                return told

    def until(self, summary: str) -> dict[str, Any]:
        """The next notice with such a summary."""
        while True:
            told = self.next()
            if told["summary"] == summary:
                return told

    def calls_so_far(self) -> list[dict[str, Any]]:
        """All calls that have arrived."""
        while not self._lines.empty():
            self.calls.append(self._lines.get())
        return self.calls

    def choose(self, number: int, action: str) -> None:
        """Somebody presses a button."""
        self._do({"signal": "ActionInvoked", "number": number, "with": action})

    def closed(self, number: int) -> None:
        """Somebody puts a notice away."""
        self._do({"signal": "NotificationClosed", "number": number, "with": 2})

    def _do(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        self.next("sent")

    def hang(self, *, hangs: bool) -> None:
        """It answers nothing, or goes on."""
        self._process.send_signal(signal.SIGSTOP if hangs else signal.SIGCONT)

    def close(self) -> None:
        """Leave the bus."""
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        assert self._process.stdin is not None
        self._process.stdin.close()


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(address: str, named: str, *capabilities: str) -> None:
    """Serve until killed."""
    flags = Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
    bus = Gio.DBusConnection.new_for_address_sync(address, flags, None, None)
    last = 0

    def called(_: Any, __: str, ___: str, ____: str, member: str, body: GLib.Variant, call: Any) -> None:
        nonlocal last
        if member == "GetCapabilities":
            call.return_value(GLib.Variant("(as)", (capabilities,)))
        elif member == "CloseNotification":
            _say(call=member, number=body.unpack()[0])
            call.return_value(None)
        else:
            told = dict(zip(MEMBERS, body.unpack(), strict=True))
            last += 1
            number = told["replaces"] or last
            call.return_value(GLib.Variant("(u)", (number,)))
            _say(call=member, number=number, **told)

    def do(line: str) -> bool:
        what = json.loads(line)
        kind = "(us)" if what["signal"] == "ActionInvoked" else "(uu)"
        body = GLib.Variant(kind, (what["number"], what["with"]))
        # To everybody who listens, and a stranger to each connection by itself: that passes every match rule.
        for each in (None,) if named == "1" else _peers(bus):
            bus.emit_signal(each, PATH, NAME, what["signal"], body)
        bus.flush_sync(None)
        _say(call="sent")
        return bool(GLib.SOURCE_REMOVE)

    def read() -> None:
        for line in sys.stdin:
            GLib.idle_add(do, line)

    bus.register_object(PATH, Gio.DBusNodeInfo.new_for_xml(XML).interfaces[0], called, None, None)
    if named == "1":
        _ask(bus, "RequestName", GLib.Variant("(su)", (NAME, 4)))
    threading.Thread(target=read, daemon=True).start()
    _say(call="up")
    GLib.MainLoop().run()


def _peers(bus: Gio.DBusConnection) -> list[str]:
    (names,) = _ask(bus, "ListNames", None)
    return [each for each in names if each.startswith(":")]


def _ask(bus: Gio.DBusConnection, member: str, body: GLib.Variant | None) -> Any:
    name = "org.freedesktop.DBus"
    return bus.call_sync(
        name, "/org/freedesktop/DBus", name, member, body, None, Gio.DBusCallFlags.NONE, -1, None
    ).unpack()


if __name__ == "__main__":
    main(*sys.argv[1:])
