"""Our own objects on the bus: exported by the contract, called from anywhere, answered by the asyncio loop.

The bus thread takes a call apart and hands it over; the answer goes back the same way, so neither loop ever waits for
the other. All that goes out (objects, answers, signals) passes one queue: the answer that names an object follows its
export and precedes its signals.

pydbus exports an object by answering each call at once on the bus thread and turns exceptions into names of its own, so
the objects are registered with the connection below it, as pydbus itself does.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gi.repository import Gio, GLib

from lllm3090d.bus.messages import Match, RemoteError, Signal, Target
from lllm3090d.bus.service_contract import (
    BUS_NAME,
    MANAGER,
    OBJECT_MANAGER,
    PROPERTIES,
    ROOT,
    contract,
    text,
)
from lllm3090d.bus.service_gio import answer, refuse, register
from lllm3090d.bus.service_pace import Pace
from lllm3090d.bus.service_values import arguments, variant
from lllm3090d.bus.thread import BusState, BusThread
from lllm3090d.errors import ErrorCode, LlmError

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 20  # of the arguments of one call, as of a request's body
MOST_CALLS = 1024  # that have not been answered
MOST_PEERS = 256  # that are remembered
AGAIN_S = 5.0  # a bus that does not answer is asked again for the name
DO_NOT_QUEUE = 4
OWNER, ALREADY_OWNER = 1, 4  # answers to RequestName
BUS = Target("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who calls, by the bus; ``pid`` is 0 where it does not tell."""

    uid: int
    pid: int


@dataclass(frozen=True, slots=True)
class Call:
    """A method of ours is called; ``arguments`` are plain Python values of the contract's types."""

    path: str
    interface: str
    member: str
    arguments: tuple[Any, ...]


class Objects(Protocol):
    """What is behind the objects. All of it runs on the asyncio loop."""

    async def call(self, call: Call, peer: Peer) -> Sequence[Any]:
        """The values that the method gives. Raises LlmError."""

    async def properties(self, path: str, interface: str, names: Collection[str]) -> Mapping[str, Any]:
        """At least these properties of an object. Raises LlmError where it has just gone."""

    def error_text(self, error: LlmError) -> str:
        """What a caller is told beside the name of the error."""


class BusService:
    """The daemon's name and objects on the user's bus.

    Args:
        bus: started.
        objects: answer.
    """

    def __init__(self, bus: BusThread, objects: Objects) -> None:
        self._bus = bus
        self._objects = objects
        self._published: dict[str, tuple[str, ...]] = {}  # path -> interfaces
        self._calls: set[asyncio.Task[None]] = set()
        self._pace = Pace()
        self._peers: dict[str, Peer] = {}  # unique name -> who that is
        self._again: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._closed = False
        self._owned = False
        self._problem: LlmError | None = None
        # Below: touched on the bus thread only.
        self._infos = {each.name: each for each in Gio.DBusNodeInfo.new_for_xml(text()).interfaces}
        self._connection: Any = None  # Gio.DBusConnection
        self._ids: dict[str, list[int]] = {}

    async def start(self) -> None:
        """Offer the manager, and then take the name: calls that have waited for it come at once. Never raises."""
        self.publish(ROOT, (MANAGER, OBJECT_MANAGER))
        self._bus.add_state_handler(self._on_bus_state)
        match = Match(BUS.destination, BUS.interface, "NameOwnerChanged", arg0=BUS_NAME)
        await self._bus.subscribe(match, self._on_owner)
        await self._take_name()

    async def close(self) -> None:
        """Give the name back and take the objects away; calls that have not been answered are told so."""
        self._closed = True
        self._bus.remove_state_handler(self._on_bus_state)
        self._pace.begin_all()
        await asyncio.sleep(0)  # a call that is cancelled before it has begun would have no answer
        for task in (self._asking, *self._calls):
            if task is not None:
                task.cancel()
        if self._again is not None:
            self._again.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._owned:
            try:
                await self._bus.method(BUS, "ReleaseName", GLib.Variant("(s)", (BUS_NAME,)))
            except (LlmError, RemoteError) as error:
                log.info("the name on the bus goes with the connection", extra={"reason": str(error)})
        for path in tuple(self._published):
            self.withdraw(path)

    @property
    def problem(self) -> LlmError | None:
        """Why nobody can call us; None where all is well."""
        return self._problem

    @property
    def published(self) -> Mapping[str, tuple[str, ...]]:
        """The objects and their interfaces."""
        return self._published

    # --- what goes out ------------------------------------------------------------------------------------------

    def publish(self, path: str, interfaces: tuple[str, ...]) -> None:
        """Offer an object from now on, and whenever the bus is back."""
        self._published[path] = interfaces
        self._bus.soon(partial(self._bus_publish, {path: interfaces}))

    def withdraw(self, path: str) -> None:
        """Offer an object no more; an unknown one is no error."""
        if self._published.pop(path, None) is not None:
            self._bus.soon(partial(self._bus_withdraw, path))

    def emit(self, path: str, interface: str, name: str, *values: Any) -> None:
        """Send a signal of the contract; nobody hears it while the bus is lost."""
        carried = [each.signature for each in contract()[interface].signals[name].carries]
        self._emit(path, interface, name, arguments(carried, values))

    def changed(
        self, path: str, interface: str, values: Mapping[str, Any], invalid: Collection[str] = ()
    ) -> None:
        """Send PropertiesChanged: new values, and names of those that are to be read again."""
        body = GLib.Variant("(sa{sv}as)", (interface, _variants(interface, values), list(invalid)))
        self._emit(path, PROPERTIES, "PropertiesChanged", body)

    def added(self, path: str, properties: Mapping[str, Mapping[str, Any]]) -> None:
        """Send InterfacesAdded of the manager."""
        body = {name: _variants(name, values) for name, values in properties.items()}
        self._emit(ROOT, OBJECT_MANAGER, "InterfacesAdded", GLib.Variant("(oa{sa{sv}})", (path, body)))

    def removed(self, path: str, interfaces: tuple[str, ...]) -> None:
        """Send InterfacesRemoved of the manager."""
        self.emit(ROOT, OBJECT_MANAGER, "InterfacesRemoved", path, interfaces)

    def _emit(self, path: str, interface: str, name: str, body: GLib.Variant) -> None:
        self._bus.soon(partial(_bus_emit, path, interface, name, body))

    # --- the name -----------------------------------------------------------------------------------------------

    async def _take_name(self) -> None:
        try:
            (answer,) = await self._bus.method(
                BUS, "RequestName", GLib.Variant("(su)", (BUS_NAME, DO_NOT_QUEUE))
            )
            if answer in {OWNER, ALREADY_OWNER}:
                self._owned = True
                self._solved()
            else:
                self._is_wrong(await self._taken())
        except RemoteError as error:  # a policy of the bus
            self._is_wrong(_unavailable(f"the bus refuses the name {BUS_NAME}: {error.message}"))
        except LlmError as error:
            self._is_wrong(_unavailable(error.message))
            if not self._closed:
                self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._ask)

    async def _taken(self) -> LlmError:
        """Who has the name; it is ours as soon as that one is gone."""
        asked = GLib.Variant("(s)", (BUS_NAME,))
        try:
            (pid,) = await self._bus.method(BUS, "GetConnectionUnixProcessID", asked)
        except RemoteError:
            who = "another program"
        else:
            who = f"another program (pid {pid})"
        return _unavailable(f"{who} has the name {BUS_NAME} on your bus")

    def _ask(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._take_name(), name="bus name")

    def _on_owner(self, signal: Signal) -> None:
        _, _, owner = signal.arguments
        if not owner and not self._closed:  # nobody has it any more
            self._owned = False
            self._ask()

    def _on_bus_state(self, state: BusState) -> None:
        if state is BusState.LOST:
            self._owned = False
            self._peers.clear()
            self._is_wrong(_unavailable("your bus is lost; it is tried again until it is back"))
            return
        self._bus.soon(partial(self._bus_publish, dict(self._published)))
        self._ask()

    def _is_wrong(self, problem: LlmError) -> None:
        if self._problem is None or self._problem.message != problem.message:
            log.warning("%s", problem.message)
        self._problem = problem

    def _solved(self) -> None:
        if self._problem is not None:
            log.info("programs can call %s again", BUS_NAME)
        self._problem = None

    # --- calls, on the asyncio loop -----------------------------------------------------------------------------

    def _arrived(self, call: Call, sender: str, invocation: Gio.DBusMethodInvocation) -> None:
        if self._closed or len(self._calls) + len(self._pace) >= MOST_CALLS:
            code = ErrorCode.SHUTTING_DOWN if self._closed else ErrorCode.TOO_MANY_REQUESTS
            why = "the daemon is stopping" if self._closed else f"{MOST_CALLS} calls have not been answered"
            self._refuse(invocation, LlmError(code, why, hint="Try again later."))
            return
        self._pace.add(sender, partial(self._begin, call, sender, invocation))

    def _begin(self, call: Call, sender: str, invocation: Gio.DBusMethodInvocation) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(call, sender, invocation))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, call: Call, sender: str, invocation: Gio.DBusMethodInvocation) -> None:
        try:
            body = await self._respond(call, sender)
        except LlmError as error:
            self._refuse(invocation, error)
        except asyncio.CancelledError:
            self._refuse(invocation, LlmError(ErrorCode.SHUTTING_DOWN, "the daemon is stopping"))
            raise
        except Exception as error:  # the edge: the caller gets an answer, the journal the traceback
            log.error("a call failed unexpectedly", exc_info=error, extra={"member": call.member})
            text_ = f"the daemon made a mistake: {type(error).__name__}: {error}"
            hint = "Please report it with: journalctl --user-unit lllm3090d -n 50"
            self._refuse(invocation, LlmError(ErrorCode.INTERNAL, text_, hint=hint))
        else:
            self._bus.soon(lambda _: answer(invocation, body))

    def _refuse(self, invocation: Gio.DBusMethodInvocation, error: LlmError) -> None:
        name, said = error.kind.dbus_name, variant("s", self._objects.error_text(error)).get_string()
        self._bus.soon(lambda _: refuse(invocation, name, said))

    async def _respond(self, call: Call, sender: str) -> GLib.Variant:
        peer = await self._peer(sender)
        if call.interface == PROPERTIES:
            return await self._read(call)
        if call.interface == OBJECT_MANAGER:
            return arguments(("a{oa{sa{sv}}}",), (await self._managed(),))
        gives = [each.signature for each in contract()[call.interface].methods[call.member].gives]
        return arguments(gives, await self._objects.call(call, peer))

    async def _peer(self, sender: str) -> Peer:
        """Who calls; a unique name is never given to another one. Raises LlmError FORBIDDEN_PEER."""
        found = self._peers.get(sender)
        if found is None:
            try:
                (told,) = await self._bus.method(
                    BUS, "GetConnectionCredentials", GLib.Variant("(s)", (sender,))
                )
            except RemoteError as error:  # it has left: nobody waits for an answer
                raise LlmError(
                    ErrorCode.FORBIDDEN_PEER, f"nobody knows {sender}: {error.message}"
                ) from error
            found = Peer(told.get("UnixUserID", -1), told.get("ProcessID", 0))
            while len(self._peers) >= MOST_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[sender] = found
        if found.uid != os.getuid():
            log.warning("a foreign user was refused", extra={"uid": found.uid})
            raise LlmError(
                ErrorCode.FORBIDDEN_PEER,
                f"this daemon belongs to uid {os.getuid()}; uid {found.uid} may not use it",
                hint="Call it as that user, on the bus of that user.",
            )
        return found

    async def _read(self, call: Call) -> GLib.Variant:
        """``Get`` or ``GetAll``; that there is such a property was looked at before, and none can be set."""
        interface = call.arguments[0]
        known = contract()[interface].properties if interface in contract() else {}
        names = call.arguments[1:] if call.member == "Get" else tuple(known)
        values = await self._objects.properties(call.path, interface, names) if names else {}
        told = _variants(interface, {name: values[name] for name in names})
        return (
            GLib.Variant("(v)", (told[names[0]],))
            if call.member == "Get"
            else GLib.Variant("(a{sv})", (told,))
        )

    async def _managed(self) -> dict[str, dict[str, dict[str, GLib.Variant]]]:
        found: dict[str, dict[str, dict[str, GLib.Variant]]] = {}
        for path, interfaces in tuple(self._published.items()):
            if path == ROOT:
                continue
            try:
                found[path] = {
                    name: _variants(
                        name,
                        await self._objects.properties(path, name, tuple(contract()[name].properties)),
                    )
                    for name in interfaces
                }
            except LlmError as error:  # it has just gone
                log.debug("an object is left out", extra={"path": path, "reason": error.message})
        return found

    # --- on the bus thread --------------------------------------------------------------------------------------

    def _bus_publish(self, objects: Mapping[str, tuple[str, ...]], bus: Any) -> None:
        if bus is None:
            return
        if self._connection is not bus.con:  # what was registered went with the old one
            self._connection, self._ids = bus.con, {}
        for path, interfaces in objects.items():
            if path not in self._ids:
                self._ids[path] = [
                    register(bus.con, path, self._infos[name], self._bus_called) for name in interfaces
                ]

    def _bus_withdraw(self, path: str, bus: Any) -> None:
        numbers = self._ids.pop(path, ())
        if bus is not None and self._connection is bus.con:
            for number in numbers:
                bus.con.unregister_object(number)

    def _bus_called(  # noqa: PLR0917  # as Gio calls it
        self,
        _connection: Gio.DBusConnection,
        sender: str,
        path: str,
        interface: str,
        member: str,
        body: GLib.Variant,
        invocation: Gio.DBusMethodInvocation,
    ) -> None:
        if body.get_size() > MOST_BYTES:
            error = LlmError(
                ErrorCode.INVALID_REQUEST,
                f"the arguments of {member} are larger than {MOST_BYTES} bytes",
                hint="See what is understood: man org.lllm3090.Manager1",
            )
            refuse(invocation, error.kind.dbus_name, self._objects.error_text(error))
            return
        call = Call(path, interface, member, body.unpack())
        self._bus.hand_over(self._arrived, call, sender, invocation)


def _bus_emit(path: str, interface: str, name: str, body: GLib.Variant, bus: Any) -> None:
    if bus is None or bus.con.is_closed():
        return
    try:
        bus.con.emit_signal(None, path, interface, name, body)
    except GLib.Error as error:  # the connection goes in this moment
        log.debug("a signal was not sent: %s", error.message)


def _variants(interface: str, values: Mapping[str, Any]) -> dict[str, GLib.Variant]:
    known = contract()[interface].properties if interface in contract() else {}
    return {name: variant(known[name].signature, value) for name, value in values.items()}


def _unavailable(why: str) -> LlmError:
    return LlmError(
        ErrorCode.DBUS_UNAVAILABLE,
        f"Programs cannot call the daemon over D-Bus: {why}. Everything else works.",
        hint=f"See who has it: busctl --user status {BUS_NAME}. The socket serves the same.",
    )
