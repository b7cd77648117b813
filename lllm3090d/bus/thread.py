"""The bus thread: a GLib main loop that owns one D-Bus connection and survives the bus.

asyncio and GLib do not share a loop, so GLib gets a thread of its own. Whatever comes from the bus (replies,
signals, loss and return of the connection) reaches asyncio through one ordered queue,
``call_soon_threadsafe``; whatever asyncio wants is run on the thread. Nothing here blocks either loop: calls
are asynchronous, and so is connecting.

Methods of :class:`BusThread` belong to the asyncio thread, those beginning with ``_bus_`` to the bus thread.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pydbus  # noqa: F401 - gives Gio.DBusConnection its .pydbus
from gi.repository import Gio, GLib

from lllm3090d.bus.messages import Match, Signal, Target, call_error, unavailable
from lllm3090d.errors import LlmError

log = logging.getLogger(__name__)
T = TypeVar("T")
Bus = Any  # pydbus.bus.Bus, which has no types

RECONNECT_FIRST_S = 0.1
RECONNECT_LAST_S = 5.0
RECONNECT_ABSENT_S = 60.0  # to a bus that was never there, as in a container
CONNECT_TIMEOUT_S = 5.0  # one attempt; also how long start() waits
CALL_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 5.0
_CLIENT = Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION


def session_bus_address() -> str:
    """``$DBUS_SESSION_BUS_ADDRESS``, else the socket in ``$XDG_RUNTIME_DIR``."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return os.environ.get("DBUS_SESSION_BUS_ADDRESS") or f"unix:path={runtime_dir}/bus"


class BusState(enum.Enum):
    """What state handlers are told."""

    LOST = enum.auto()  # the connection is closed; signals may be missed from here on
    BACK = enum.auto()  # connected again, matches in place


@dataclass(frozen=True, slots=True)
class _Subscription:
    match: Match
    handler: Callable[[Signal], None]


@dataclass(frozen=True, slots=True)
class _Call:
    target: Target
    member: str
    arguments: GLib.Variant | None
    timeout_s: float
    flags: Gio.DBusCallFlags


class BusThread:
    """One D-Bus connection on a thread of its own.

    Args:
        address: of the bus; None for the session bus.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or session_bus_address()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._state_handlers: list[Callable[[BusState], None]] = []
        self._connected = False
        self._started: asyncio.Future[None] | None = None
        # Below: touched on the bus thread only, once it runs.
        self._context = GLib.MainContext.new()
        self._main_loop = GLib.MainLoop.new(self._context, False)
        self._bus: Bus | None = None
        self._subscriptions: list[_Subscription] = []
        self._attempt: Gio.Cancellable | None = None
        self._backoff_s = RECONNECT_FIRST_S
        self._longest_s = RECONNECT_LAST_S
        self._stays = False
        self._closing = False

    @property
    def connected(self) -> bool:
        """Whether the bus is there, as far as asyncio has heard."""
        return self._connected

    async def start(self) -> None:
        """Start the thread and connect.

        Raises:
            LlmError: BUS_UNAVAILABLE when the bus cannot be reached; the thread is gone then.
        """
        if self._thread is not None:
            raise RuntimeError("a BusThread starts once")
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._thread = threading.Thread(target=self._bus_main, name="bus", daemon=True)
        self._thread.start()
        try:
            await self._started
        except LlmError:
            if not self._stays:
                await self.close()
            raise
        except BaseException:
            await self.close()
            raise

    async def start_anyway(self) -> LlmError | None:
        """Start the thread, and go on trying where the bus is not there; state handlers are told when it is.

        Returns:
            BUS_UNAVAILABLE where it cannot be reached now.
        """
        self._stays, self._longest_s = True, RECONNECT_ABSENT_S
        try:
            await self.start()
        except LlmError as error:
            return error
        return None

    async def close(self) -> None:
        """Close the connection, end the thread and join it; unanswered calls get BUS_UNAVAILABLE."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._invoke(self._bus_quit)
        # The thread ends within milliseconds: it never blocks. Waited for off the loop all the same.
        await asyncio.get_running_loop().run_in_executor(None, thread.join, PING_TIMEOUT_S)
        if thread.is_alive():
            log.error("the bus thread did not end within %g s", PING_TIMEOUT_S)
        self._connected = False
        for future in tuple(self._pending):
            if not future.done():
                future.set_exception(unavailable("the connection to D-Bus was closed"))

    def add_state_handler(self, handler: Callable[[BusState], None]) -> None:
        """Have ``handler`` called on the asyncio loop when the bus is lost and when it is back."""
        self._state_handlers.append(handler)

    def remove_state_handler(self, handler: Callable[[BusState], None]) -> None:
        """Undo :meth:`add_state_handler`."""
        self._state_handlers.remove(handler)

    async def ping(self, timeout_s: float = PING_TIMEOUT_S) -> float:
        """Prove that the thread's loop turns; the bus may be lost.

        Returns:
            Seconds there and back.

        Raises:
            LlmError: BUS_UNAVAILABLE when it does not within ``timeout_s``.
        """
        begin = time.monotonic()
        future: asyncio.Future[None] = self._expect()
        self._invoke(self._answer, future, None, None)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise unavailable(f"the bus thread did not answer within {timeout_s:g} s") from error
        return time.monotonic() - begin

    async def answers(self, limit_s: float) -> None:
        """Return once the thread has answered. Raises LlmError BUS_UNAVAILABLE when it does not within ``limit_s``."""
        await self.ping(limit_s)

    @property
    def thread_id(self) -> int | None:
        """Of the thread, as ``threading`` counts; None where it does not run."""
        return self._thread.ident if self._thread is not None else None

    async def call(self, function: Callable[[Bus], T]) -> T:
        """Run ``function`` with the pydbus bus on the bus thread and return its result.

        For what is quick or has no asynchronous form, such as exporting objects. Its exceptions come back.

        Raises:
            LlmError: BUS_UNAVAILABLE while the bus is lost.
        """
        future: asyncio.Future[T] = self._expect()
        self._invoke(self._bus_run, function, future)
        return await future

    async def method(
        self,
        target: Target,
        member: str,
        arguments: GLib.Variant | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        auto_start: bool = False,
    ) -> tuple[Any, ...]:
        """Call a method without blocking any thread.

        Args:
            arguments: a tuple variant; None for a method without arguments.
            auto_start: let the bus start the service if it does not run.

        Returns:
            The reply as plain Python values.

        Raises:
            RemoteError: the other side answered with an error.
            LlmError: BUS_UNAVAILABLE when there is no answer: bus lost, nobody of that name, timeout.
        """
        if arguments is not None and not arguments.get_type().is_tuple():
            raise TypeError(f"the arguments of {member} are {arguments.get_type_string()}, not a tuple")
        flags = Gio.DBusCallFlags.NONE if auto_start else Gio.DBusCallFlags.NO_AUTO_START
        future: asyncio.Future[tuple[Any, ...]] = self._expect()
        self._invoke(self._bus_method, _Call(target, member, arguments, timeout_s, flags), future)
        return await future

    async def method_for_files(
        self,
        target: Target,
        member: str,
        arguments: GLib.Variant,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> tuple[int, ...]:
        """Call a method that answers with open files; a service that does not run is not started.

        Args:
            arguments: a tuple variant.

        Returns:
            The file descriptors of the reply, in order. They are the caller's to close.

        Raises:
            RemoteError, LlmError: as :meth:`method`.
        """
        call = _Call(target, member, arguments, timeout_s, Gio.DBusCallFlags.NO_AUTO_START)
        future: asyncio.Future[tuple[int, ...]] = self._expect()
        self._invoke(self._bus_method_for_files, call, future)
        return await future

    async def subscribe(self, match: Match, handler: Callable[[Signal], None]) -> None:
        """Have ``handler`` called on the asyncio loop for each matching signal, also after the bus was lost.

        The match is in place before any call made later on this connection is carried out.
        """
        future: asyncio.Future[None] = self._expect()
        self._invoke(self._bus_subscribe, _Subscription(match, handler), future)
        await future

    # --- between the threads ---

    def soon(self, function: Callable[[Bus | None], None]) -> None:
        """Run ``function`` on the bus thread, in the order of these calls, and wait for nothing.

        It gets the pydbus bus, None while the bus is lost, and raises nothing.
        """
        self._invoke(lambda: function(self._bus))

    def hand_over(self, function: Callable[..., None], *arguments: Any) -> None:
        """From the bus thread: run ``function`` on the asyncio loop, in the order of these calls."""
        self._post(function, *arguments)

    def _expect(self) -> asyncio.Future[Any]:
        """A future that close() will not leave behind."""
        if self._thread is None:
            raise unavailable("the connection to D-Bus is closed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _invoke(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run ``function`` on the bus thread, in the order of the calls."""

        def once(*_: Any) -> bool:
            function(*arguments)
            return bool(GLib.SOURCE_REMOVE)

        source = GLib.Idle(priority=GLib.PRIORITY_DEFAULT)
        source.set_callback(once)
        source.attach(self._context)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run ``function`` on the asyncio loop, in the order of the calls."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _answer(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        self._post(_settle, future, result, error)

    def _changed(self, state: BusState) -> None:
        self._connected = state is BusState.BACK
        for handler in tuple(self._state_handlers):
            handler(state)

    def _first_connected(self, error: LlmError | None) -> None:
        self._connected = error is None
        if self._started is not None:
            _settle(self._started, None, error)

    # --- on the bus thread ---

    def _bus_main(self) -> None:
        # Everything Gio starts on this thread is dispatched by this context, not by the default one.
        self._context.push_thread_default()
        try:
            self._bus_connect(first=True)
            self._main_loop.run()
        finally:
            self._context.pop_thread_default()

    def _bus_quit(self) -> None:
        self._closing = True
        if self._attempt is not None:
            self._attempt.cancel()
        if self._bus is not None:
            try:
                self._bus.con.flush_sync(None)
                self._bus.con.close_sync(None)
            except GLib.Error as error:
                log.debug("closing the bus: %s", error.message)
        self._main_loop.quit()

    def _bus_connect(self, first: bool) -> None:
        attempt = Gio.Cancellable.new()
        self._attempt = attempt
        deadline = self._bus_after(CONNECT_TIMEOUT_S, attempt.cancel)

        def connected(_: object, result: Gio.AsyncResult) -> None:
            deadline.destroy()
            self._attempt = None
            try:
                connection = Gio.DBusConnection.new_for_address_finish(result)
            except GLib.Error as error:
                hangs = error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.CANCELLED)
                why = f"no answer within {CONNECT_TIMEOUT_S:g} s" if hangs else error.message
                self._bus_not_connected(first, why)
                return
            self._bus_connected(first, connection)

        # pydbus.connect() does the same and blocks; a bus that hangs must not stop this loop.
        Gio.DBusConnection.new_for_address(self.address, _CLIENT, None, attempt, connected)

    def _bus_not_connected(self, first: bool, why: str) -> None:
        if first:
            self._post(self._first_connected, unavailable(f"no D-Bus at {self.address}: {why}"))
        if not self._closing and (self._stays or not first):
            log.debug("D-Bus at %s is not there: %s", self.address, why)
            self._bus_after(self._backoff_s, lambda: self._bus_connect(first=False))
            self._backoff_s = min(self._backoff_s * 2, self._longest_s)

    def _bus_connected(self, first: bool, connection: Gio.DBusConnection) -> None:
        if self._closing:
            connection.close(None, None)
            return
        connection.set_exit_on_close(False)
        connection.connect("closed", self._bus_closed)
        self._bus = connection.pydbus
        self._backoff_s, self._longest_s = RECONNECT_FIRST_S, RECONNECT_LAST_S
        for subscription in self._subscriptions:
            self._bus_install(subscription)
        if first:
            self._post(self._first_connected, None)
        else:
            log.info("D-Bus is there", extra={"bus": self.address})
            self._post(self._changed, BusState.BACK)

    def _bus_closed(self, connection: Gio.DBusConnection, _: bool, error: GLib.Error | None) -> None:
        if self._closing or self._bus is None or self._bus.con is not connection:
            return
        self._bus = None
        why = error.message if error is not None else "connection closed"
        log.warning("D-Bus is lost: %s", why, extra={"bus": self.address})
        self._post(self._changed, BusState.LOST)
        self._bus_after(self._backoff_s, lambda: self._bus_connect(first=False))

    def _bus_after(self, delay_s: float, function: Callable[[], None]) -> GLib.Source:
        def once(*_: Any) -> bool:
            if not self._closing:
                function()
            return bool(GLib.SOURCE_REMOVE)

        source = GLib.Timeout(round(delay_s * 1000))
        source.set_callback(once)
        source.attach(self._context)
        return source

    def _bus_run(self, function: Callable[[Bus], Any], future: asyncio.Future[Any]) -> None:
        if self._bus is None:
            self._answer(future, None, unavailable("the connection to D-Bus is lost"))
            return
        try:
            result = function(self._bus)
        except Exception as error:  # noqa: BLE001 - it belongs to the task that awaits the call
            self._answer(future, None, error)
        else:
            self._answer(future, result, None)

    def _bus_method(self, call: _Call, future: asyncio.Future[Any]) -> None:
        if self._bus is None:
            self._answer(future, None, unavailable("the connection to D-Bus is lost"))
            return
        target = call.target

        def replied(connection: Gio.DBusConnection, result: Gio.AsyncResult) -> None:
            try:
                reply = connection.call_finish(result).unpack()
            except GLib.Error as error:
                what = f"{target.interface}.{call.member}"
                self._answer(future, None, call_error(error, what, call.timeout_s))
            else:
                self._answer(future, reply, None)

        self._bus.con.call(
            target.destination,
            target.path,
            target.interface,
            call.member,
            call.arguments,
            None,  # any type of reply
            call.flags,
            round(call.timeout_s * 1000),
            None,
            replied,
        )

    def _bus_method_for_files(self, call: _Call, future: asyncio.Future[tuple[int, ...]]) -> None:
        if self._bus is None:
            self._answer(future, None, unavailable("the connection to D-Bus is lost"))
            return
        target = call.target

        def replied(connection: Gio.DBusConnection, result: Gio.AsyncResult) -> None:
            try:
                _, files = connection.call_with_unix_fd_list_finish(result)
            except GLib.Error as error:
                what = f"{target.interface}.{call.member}"
                self._answer(future, None, call_error(error, what, call.timeout_s))
            else:
                self._post(_hand_over, future, () if files is None else tuple(files.steal_fds()))

        # pydbus and a plain call drop the files and leave their index in the message.
        self._bus.con.call_with_unix_fd_list(
            target.destination,
            target.path,
            target.interface,
            call.member,
            call.arguments,
            None,
            call.flags,
            round(call.timeout_s * 1000),
            None,
            None,
            replied,
        )

    def _bus_subscribe(self, subscription: _Subscription, future: asyncio.Future[None]) -> None:
        self._subscriptions.append(subscription)
        if self._bus is not None:
            self._bus_install(subscription)
        self._answer(future, None, None)

    def _bus_install(self, subscription: _Subscription) -> None:
        """Add the match rule and the handler to the present connection; both end with it."""
        match = subscription.match

        def arrived(
            _: object, sender: str, path: str, interface: str, member: str, arguments: GLib.Variant
        ) -> None:
            if path.startswith(match.path_prefix):
                told = Signal(path, interface, member, arguments.unpack(), sender)
                self._post(subscription.handler, told)

        def added(connection: Gio.DBusConnection, result: Gio.AsyncResult) -> None:
            try:
                connection.call_finish(result)
            except GLib.Error as error:
                if not connection.is_closed():
                    log.error("the bus refused the match rule %s: %s", match.rule, error.message)

        # The rule is added by hand: Gio writes none with a path_namespace.
        connection = self._bus.con  # type: ignore[union-attr]  # only called while connected
        connection.signal_subscribe(
            None,
            match.interface,
            match.member,
            match.path,
            match.arg0,
            Gio.DBusSignalFlags.NO_MATCH_RULE,
            arrived,
        )
        connection.call(
            "org.freedesktop.DBus",
            "/org/freedesktop/DBus",
            "org.freedesktop.DBus",
            "AddMatch",
            GLib.Variant("(s)", (match.rule,)),
            None,
            Gio.DBusCallFlags.NONE,
            -1,
            None,
            added,
        )


def _hand_over(future: asyncio.Future[tuple[int, ...]], files: tuple[int, ...]) -> None:
    """Files that nobody waits for any more are closed: an inhibitor that is held by nobody would delay for ever."""
    if future.done():
        for file in files:
            os.close(file)
        return
    future.set_result(files)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # the task that waited was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
