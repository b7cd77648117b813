"""A stand-in for logind on a bus of the test: tells of sleep, hands out the real kind of lock, and sees it closed.

It serves in a thread of its own. A machine that sleeps is not simulated: time goes on.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gi.repository import Gio, GLib

NAME = "org.freedesktop.login1"
PATH = "/org/freedesktop/login1"
INTERFACE = NAME + ".Manager"
XML = f"""
<node><interface name="{INTERFACE}">
  <method name="Inhibit">
    <arg name="what" type="s" direction="in"/><arg name="who" type="s" direction="in"/>
    <arg name="why" type="s" direction="in"/><arg name="mode" type="s" direction="in"/>
    <arg name="lock" type="h" direction="out"/>
  </method>
  <method name="ListSessions"><arg name="sessions" type="a(susso)" direction="out"/></method>
  <property name="PreparingForSleep" type="b" access="read"/>
  <property name="InhibitDelayMaxUSec" type="t" access="read"/>
  <signal name="PrepareForSleep"><arg name="start" type="b"/></signal>
</interface></node>
"""
SESSION_XML = f"""
<node><interface name="{NAME}.Session">
  <property name="Active" type="b" access="read"/>
  <property name="Type" type="s" access="read"/>
  <property name="Class" type="s" access="read"/>
  <property name="State" type="s" access="read"/>
  <property name="TimestampMonotonic" type="t" access="read"/>
</interface></node>
"""
PROPERTIES = "org.freedesktop.DBus.Properties"
IN_PROGRESS = NAME + ".OperationInProgress"
DEADLINE_S = 60.0
MOST_SESSIONS = 4


@dataclass(frozen=True)
class Session:
    """A session as logind knows it."""

    seat: str
    kind: str
    active: bool = True
    of: str = "user"
    uid: int = 1000
    since_us: int = 0  # on the monotonic clock; 0 is not told


@dataclass(eq=False)
class Lock:
    """A lock that was handed out: what it was taken for, and our end of the pipe."""

    what: str
    who: str
    why: str
    mode: str
    reading: int

    def is_closed(self, within_s: float = 0.0) -> bool:
        """Whether its holder has closed it, waited for."""
        poll = select.poll()
        poll.register(self.reading, select.POLLIN)
        return bool(poll.poll(within_s * 1000))


class FakeLogind:
    """See the module.

    Args:
        address: of the bus, which runs.
        delay_s: how long it would wait for locks.
    """

    def __init__(self, address: str, delay_s: float = 5.0) -> None:
        self.delay_s = delay_s
        self.refuses = False
        self.preparing = False
        self.locks: list[Lock] = []
        self.sessions: tuple[Session, ...] = ()
        self._changed = threading.Condition()
        self._context = GLib.MainContext.new()
        self._loop = GLib.MainLoop.new(self._context, False)
        self._served = threading.Event()
        self._connection: Any = None
        self._thread = threading.Thread(target=self._serve, args=(address,), name="logind", daemon=True)
        self._thread.start()
        assert self._served.wait(DEADLINE_S), "the stand-in for logind does not come up"

    def close(self) -> None:
        """Leave the bus; the pipes of locks stay open until then."""
        self._run(self._loop.quit)
        self._thread.join(DEADLINE_S)
        for lock in self.locks:
            os.close(lock.reading)

    # --- for tests --------------------------------------------------------------------------------------------------

    def lock(self, number: int = 1) -> Lock:
        """The lock that was handed out as the so-manieth, waited for."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.locks) >= number, DEADLINE_S), (
                "nobody took a lock"
            )
            return self.locks[number - 1]

    def sleep(self) -> None:
        """Tell that the machine is about to sleep."""
        self.preparing = True
        self._emit(start=True)

    def wake(self) -> None:
        """Tell that it is awake."""
        self.preparing = False
        self._emit(start=False)

    # --- on its thread ----------------------------------------------------------------------------------------------

    def _serve(self, address: str) -> None:
        self._context.push_thread_default()
        flags = (
            Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
        )
        self._connection = Gio.DBusConnection.new_for_address_sync(address, flags, None, None)
        self._connection.set_exit_on_close(False)
        interface = Gio.DBusNodeInfo.new_for_xml(XML).interfaces[0]
        self._connection.register_object(PATH, interface, self._called, None, None)
        session = Gio.DBusNodeInfo.new_for_xml(SESSION_XML).interfaces[0]
        for number in range(MOST_SESSIONS):
            self._connection.register_object(f"{PATH}/session/{number}", session, self._called, None, None)
        self._connection.call_sync(
            "org.freedesktop.DBus",
            "/org/freedesktop/DBus",
            "org.freedesktop.DBus",
            "RequestName",
            GLib.Variant("(su)", (NAME, 4)),
            None,
            Gio.DBusCallFlags.NONE,
            -1,
            None,
        )
        self._served.set()
        self._loop.run()
        if not self._connection.is_closed():  # the test may have killed the bus
            self._connection.close_sync(None)
        self._context.pop_thread_default()

    def _run(self, function: Callable[[], object]) -> None:
        def once(*_: Any) -> bool:
            function()
            return bool(GLib.SOURCE_REMOVE)

        source = GLib.Idle(priority=GLib.PRIORITY_DEFAULT)
        source.set_callback(once)
        source.attach(self._context)

    def _emit(self, *, start: bool) -> None:
        arguments = GLib.Variant("(b)", (start,))
        self._run(lambda: self._connection.emit_signal(None, PATH, INTERFACE, "PrepareForSleep", arguments))

    def _called(
        self, _: Any, __: str, path: str, interface: str, member: str, arguments: GLib.Variant, call: Any
    ) -> None:
        if member == "ListSessions":
            rows = [
                (str(number), each.uid, "somebody", each.seat, f"{PATH}/session/{number}")
                for number, each in enumerate(self.sessions)
            ]
            call.return_value(GLib.Variant("(a(susso))", (rows,)))
        elif member == "GetAll":
            told = self.sessions[int(path.rpartition("/")[2])]
            values = {
                "Active": GLib.Variant("b", told.active),
                "Type": GLib.Variant("s", told.kind),
                "Class": GLib.Variant("s", told.of),
                "State": GLib.Variant("s", "active" if told.active else "online"),
                "TimestampMonotonic": GLib.Variant("t", told.since_us),
            }
            call.return_value(GLib.Variant("(a{sv})", (values,)))
        elif interface == PROPERTIES:
            call.return_value(GLib.Variant("(v)", (self._property(arguments.unpack()[1]),)))
        elif self.preparing or self.refuses:
            call.return_dbus_error(IN_PROGRESS, "The operation inhibition has been requested for is running")
        else:
            self._inhibit(arguments, call)

    def _property(self, name: str) -> GLib.Variant:
        if name == "PreparingForSleep":
            return GLib.Variant("b", self.preparing)
        return GLib.Variant("t", round(self.delay_s * 1e6))

    def _inhibit(self, arguments: GLib.Variant, call: Any) -> None:
        reading, writing = os.pipe()
        files = Gio.UnixFDList.new()
        index = files.append(writing)  # a copy
        os.close(writing)
        with self._changed:
            what, who, why, mode = arguments.unpack()
            self.locks.append(Lock(what, who, why, mode, reading))
            self._changed.notify_all()
        # After it was noted: whoever has the answer may ask for it.
        call.return_value_with_unix_fd_list(GLib.Variant("(h)", (index,)), files)
