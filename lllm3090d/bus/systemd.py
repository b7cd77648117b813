"""The user's systemd: start, stop, list and watch services over D-Bus.

Subscribe before acting: matches and the buffer of finished jobs are in place from
:meth:`SystemdManager.connect` on, so no signal falls between a call and whoever waits for what it caused.
Signals are hints; whoever must know asks :meth:`SystemdManager.status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from gi.repository import GLib

from lllm3090d.bus.jobs import Job, JobWaits
from lllm3090d.bus.messages import Match, RemoteError, Signal, Target, timed_out
from lllm3090d.bus.properties import PropertyValue, encode
from lllm3090d.bus.thread import BusState, BusThread
from lllm3090d.bus.unit_errors import refused, unknown_property
from lllm3090d.bus.unit_status import (
    UNIT_PATH_PREFIX,
    UnitStatus,
    explain_exit,
    unit_name,
    unit_path_element,
)
from lllm3090d.bus.unit_watch import BusBack, BusLost, Event, Relist, UnitChanged, UnitGone, UnitWatch
from lllm3090d.errors import ErrorCode, LlmError

__all__ = [
    "BusBack",
    "BusLost",
    "Event",
    "Relist",
    "SystemdManager",
    "UnitChanged",
    "UnitGone",
    "UnitStatus",
    "explain_exit",
]

log = logging.getLogger(__name__)

NAME = "org.freedesktop.systemd1"
MANAGER_PATH = "/org/freedesktop/systemd1"
MANAGER_INTERFACE = NAME + ".Manager"
UNIT_INTERFACE = NAME + ".Unit"
SERVICE_INTERFACE = NAME + ".Service"
PROPERTIES_INTERFACE = "org.freedesktop.DBus.Properties"
MANAGER = Target(NAME, MANAGER_PATH, MANAGER_INTERFACE)
MANAGER_PROPERTIES = Target(NAME, MANAGER_PATH, PROPERTIES_INTERFACE)

NO_SUCH_UNIT = NAME + ".NoSuchUnit"
ALREADY_SUBSCRIBED = NAME + ".AlreadySubscribed"
UNKNOWN_OBJECT = "org.freedesktop.DBus.Error.UnknownObject"
NO_SUCH_PROCESS = NAME + ".NoSuchProcess"

DEFAULT_TIMEOUT_START_S = 90.0  # DefaultTimeoutStartSec= of systemd
JOB_MARGIN_S = 5.0  # added to systemd's own limit before we stop waiting for a job
GREETING_TIMEOUT_S = 5.0
RESUME_FIRST_S = 0.2
RESUME_LAST_S = 5.0


class SystemdManager:
    """The user's service manager, and the services that match one pattern. Made by :meth:`connect`."""

    def __init__(self, bus: BusThread, pattern: str) -> None:
        self._bus = bus
        self._pattern = pattern
        self._listener: Callable[[Event], None] | None = None
        self._backlog: list[Event] = []
        self._watch = UnitWatch(pattern, self._tell)
        self._jobs = JobWaits()
        self._starting: set[str] = set()
        self._unknown: set[str] = set()  # optional properties that this systemd has refused
        self._lost = False
        self._closed = False
        self._greeted = False
        self._owner_came = asyncio.Event()
        self._resuming: asyncio.Task[None] | None = None
        self.version = ""

    @classmethod
    async def connect(cls, bus: BusThread, pattern: str) -> Self:
        """Watch the units that match ``pattern``, a shell pattern of unit names that begins with letters.

        Raises:
            LlmError: BUS_UNAVAILABLE when systemd does not answer.
        """
        manager = cls(bus, pattern)
        for match, handler in manager._matches():
            await bus.subscribe(match, handler)
        bus.add_state_handler(manager._on_bus_state)
        try:
            await manager._greet()
        except BaseException:
            await manager.close()
            raise
        manager._greeted = True
        return manager

    @property
    def version_number(self) -> int:
        """The leading number of :attr:`version`, 0 if there is none."""
        found = re.search(r"\d+", self.version)
        return int(found[0]) if found else 0

    def set_listener(self, listener: Callable[[Event], None]) -> None:
        """Have ``listener`` called with each event, in order, on the asyncio loop; earlier ones follow."""
        self._listener = listener
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            listener(event)

    async def close(self) -> None:
        """Stop telling and resuming. The bus stays open: it belongs to the caller."""
        self._closed = True
        self._bus.remove_state_handler(self._on_bus_state)
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)

    # --- units ---

    async def start(
        self, name: str, properties: Mapping[str, PropertyValue], timeout_s: float | None = None
    ) -> str:
        """Start a transient unit and wait for its start job.

        Args:
            properties: by name, as in :mod:`lllm3090d.bus.properties`; those this systemd is too old for
                are left out and logged.
            timeout_s: how long to wait for the job; None for the unit's own TimeoutStartUSec and a margin.

        Returns:
            The result of the job: "done", or why not ("failed", "canceled", "timeout" ...).

        Raises:
            LlmError: UNIT_REFUSED with what systemd said; BUS_UNAVAILABLE: the unit may exist or not.
            ValueError, TypeError: the properties are wrong, a programming error.
        """
        if timeout_s is None:
            own = properties.get("TimeoutStartUSec")
            timeout_s = (own / 1e6 if isinstance(own, int) else DEFAULT_TIMEOUT_START_S) + JOB_MARGIN_S
        expected = self._watch.expect(name, properties)
        self._starting.add(name)
        try:
            path = await self._start(name, properties)
        except RemoteError as error:
            if expected:
                self._watch.forget((name,))
            raise self._refused(name, error) from error
        finally:
            self._starting.discard(name)
        return await self._wait(Job(path, name, starts=True), timeout_s)

    async def _start(self, name: str, properties: Mapping[str, PropertyValue]) -> str:
        """Path of the start job. What this systemd can be seen not to know is left out where it may be."""
        while True:
            encoded = encode(properties, self.version_number, self._unknown)
            if encoded.dropped:
                log.warning(
                    "%s: systemd %s does not know %s", name, self.version, ", ".join(encoded.dropped)
                )
            arguments = GLib.Variant("(ssa(sv)a(sa(sv)))", (name, "fail", encoded.variants, ()))
            try:
                (path,) = await self._ask(MANAGER, "StartTransientUnit", arguments)
            except RemoteError as error:
                unknown = unknown_property(error)
                if unknown is None or unknown in self._unknown or unknown not in properties:
                    raise
                self._unknown.add(unknown)  # a call that is refused leaves nothing behind
            else:
                return str(path)

    async def stop(self, name: str, timeout_s: float) -> UnitStatus | None:
        """Stop a unit and wait for it to end.

        Returns:
            What is left: None when it is unloaded, or was not loaded to begin with; a failed status where it
            ended badly, SIGKILL after an ignored SIGTERM included.

        Raises:
            LlmError: STOP_FAILED when it has not ended within ``timeout_s``; BUS_UNAVAILABLE.
        """
        try:
            (path,) = await self._ask(MANAGER, "StopUnit", GLib.Variant("(ss)", (name, "replace")))
        except RemoteError as error:
            if error.name == NO_SUCH_UNIT:
                return None
            raise LlmError(
                ErrorCode.STOP_FAILED,
                f"systemd refused to stop {name}: {error.message}",
                hint=f"Look at `systemctl --user status {name}`.",
                dbus_error=error.name,
            ) from error
        result = await self._wait(Job(path, name, starts=False), timeout_s)
        status = await self.status(name)
        if status is None or status.is_failed or status.is_gone:
            return status
        raise LlmError(
            ErrorCode.STOP_FAILED,
            f"{name} was not stopped: it is {status.active_state} ({status.sub_state}), and the result "
            f"of its stop job, waited for up to {timeout_s:g} s, is {result}.",
            hint=f"Look at `systemctl --user status {name}`.",
            job_result=result,
            active_state=status.active_state,
        )

    async def kill(self, name: str, signal: int, whom: str = "all") -> None:
        """Send a signal to the processes of a unit ("all"), or to its main process ("main").

        A unit or process that is not there any more is no error.

        Raises:
            LlmError: UNIT_REFUSED, BUS_UNAVAILABLE.
        """
        await self._tolerant(name, "KillUnit", GLib.Variant("(ssi)", (name, whom, int(signal))))

    async def reset_failed(self, name: str) -> None:
        """Forget that a unit failed, which unloads it; one that is not loaded is no error.

        Raises:
            LlmError: UNIT_REFUSED, BUS_UNAVAILABLE.
        """
        await self._tolerant(name, "ResetFailedUnit", GLib.Variant("(s)", (name,)))

    async def status(self, name: str) -> UnitStatus | None:
        """All of a service's status, or None when it is not loaded. Does not load it.

        Raises:
            LlmError: BUS_UNAVAILABLE, UNIT_REFUSED.
        """
        path = await self._unit_path(name)
        return None if path is None else await self._read(name, path)

    async def list(self) -> tuple[UnitStatus, ...]:
        """All loaded units of the pattern, failed ones included.

        Raises:
            LlmError: BUS_UNAVAILABLE, UNIT_REFUSED.
        """
        known = self._watch.known - self._starting
        arguments = GLib.Variant("(asas)", ((), (self._pattern,)))
        try:
            (rows,) = await self._ask(MANAGER, "ListUnitsByPatterns", arguments)
        except RemoteError as error:
            raise self._refused(self._pattern, error) from error
        listed = {row[0]: row[6] for row in rows}
        self._watch.forget(known - listed.keys())
        read = await asyncio.gather(*(self._read(name, path) for name, path in listed.items()))
        return tuple(status for status in read if status is not None)

    async def unit_active_state(self, name: str) -> str | None:
        """``ActiveState`` of any unit, such as graphical-session.target; None when it is not loaded.

        Raises:
            LlmError: BUS_UNAVAILABLE, UNIT_REFUSED.
        """
        path = await self._unit_path(name)
        if path is None:
            return None
        return str(
            await self._property(Target(NAME, path, PROPERTIES_INTERFACE), UNIT_INTERFACE, "ActiveState")
        )

    async def unit_has_job(self, name: str) -> bool:
        """Whether a start or another job of any unit waits or is under way.

        Raises:
            LlmError: BUS_UNAVAILABLE, UNIT_REFUSED.
        """
        path = await self._unit_path(name)
        if path is None:
            return False
        job, _ = await self._property(Target(NAME, path, PROPERTIES_INTERFACE), UNIT_INTERFACE, "Job")
        return bool(job)

    async def manager_environment(self) -> tuple[str, ...]:
        """``NAME=value`` of what systemd hands to every unit.

        Raises:
            LlmError: BUS_UNAVAILABLE, UNIT_REFUSED.
        """
        return tuple(await self._property(MANAGER_PROPERTIES, MANAGER_INTERFACE, "Environment"))

    async def session(self) -> str:
        """Tells this user manager from another one of the same boot, also after a daemon-reexec; "" if it does not say.

        Raises:
            LlmError: BUS_UNAVAILABLE.
        """
        try:
            return str(
                await self._property(MANAGER_PROPERTIES, MANAGER_INTERFACE, "UserspaceTimestampMonotonic")
            )
        except LlmError as error:
            if error.code is not ErrorCode.UNIT_REFUSED:
                raise
            return ""

    # --- calls ---

    async def _ask(
        self, target: Target, member: str, arguments: GLib.Variant | None = None
    ) -> tuple[Any, ...]:
        """Call a method. A systemd, or bus, that does not answer counts as lost until it does.

        Its signals cannot be relied on meanwhile, so that all states are read again afterwards.
        """
        try:
            return await self._bus.method(target, member, arguments)
        except LlmError as error:
            if timed_out(error) and not self._lost and not self._closed and self._greeted:
                self._gone()
                self._resume()
            raise

    async def _greet(self) -> None:
        """Subscribe. The first connection of all starts the bus, where systemd takes its name a moment later."""
        deadline = asyncio.get_running_loop().time() + GREETING_TIMEOUT_S
        while True:
            self._owner_came.clear()
            try:
                await self._subscribe()
                await self._read_version()
            except LlmError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                log.info("systemd is not on the bus yet: %s", error.message)
            else:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._owner_came.wait(), RESUME_FIRST_S)

    async def _subscribe(self) -> None:
        try:
            await self._ask(MANAGER, "Subscribe")
        except RemoteError as error:
            if error.name != ALREADY_SUBSCRIBED:
                raise self._refused("Subscribe", error) from error

    async def _read_version(self) -> None:
        self.version = str(await self._property(MANAGER_PROPERTIES, MANAGER_INTERFACE, "Version"))

    async def _property(self, target: Target, interface: str, name: str) -> Any:
        try:
            (value,) = await self._ask(target, "Get", GLib.Variant("(ss)", (interface, name)))
        except RemoteError as error:
            raise self._refused(name, error) from error
        return value

    async def _unit_path(self, name: str) -> str | None:
        try:
            (path,) = await self._ask(MANAGER, "GetUnit", GLib.Variant("(s)", (name,)))
        except RemoteError as error:
            if error.name == NO_SUCH_UNIT:
                return None
            raise self._refused(name, error) from error
        return str(path)

    async def _read(self, name: str, path: str) -> UnitStatus | None:
        target = Target(NAME, path, PROPERTIES_INTERFACE)
        try:
            (unit,), (service,) = await asyncio.gather(
                self._ask(target, "GetAll", GLib.Variant("(s)", (UNIT_INTERFACE,))),
                self._ask(target, "GetAll", GLib.Variant("(s)", (SERVICE_INTERFACE,))),
            )
        except RemoteError as error:
            if error.name == UNKNOWN_OBJECT:
                return None
            raise self._refused(name, error) from error
        if unit.get("LoadState") == "not-found" and unit.get("ActiveState") == "inactive":
            return None  # unloaded since, and our question made systemd look for it anew
        self._watch.was_read(name, unit, service)
        return UnitStatus.from_properties(name, unit, service)

    async def _tolerant(self, name: str, member: str, arguments: GLib.Variant) -> None:
        try:
            await self._ask(MANAGER, member, arguments)
        except RemoteError as error:
            if error.name not in {NO_SUCH_UNIT, NO_SUCH_PROCESS}:
                raise self._refused(name, error) from error

    def _refused(self, name: str, error: RemoteError) -> LlmError:
        return refused(name, error, self.version)

    # --- jobs ---

    async def _wait(self, job: Job, timeout_s: float) -> str:
        result = await self._jobs.result(job, timeout_s)
        return result or await self._inferred(job) or "timeout"

    async def _inferred(self, job: Job) -> str | None:
        """The result of a job whose signal was missed, by the unit's state; None while a job is pending."""
        status = await self.status(job.unit)
        if status is not None and status.job_pending:
            return None
        running = status is not None and status.is_active
        return "done" if running is job.starts else "failed"

    # --- signals, all on the asyncio loop and in order ---

    def _matches(self) -> tuple[tuple[Match, Callable[[Signal], None]], ...]:
        literal = re.match(r"[^*?\[]*", self._pattern)
        prefix = UNIT_PATH_PREFIX + unit_path_element(literal[0] if literal else "")
        properties = [
            Match(
                NAME,
                PROPERTIES_INTERFACE,
                "PropertiesChanged",
                path_namespace=UNIT_PATH_PREFIX.rstrip("/"),
                path_prefix=prefix,
                arg0=interface,
            )
            for interface in (SERVICE_INTERFACE, UNIT_INTERFACE)
        ]
        return (
            (
                Match("org.freedesktop.DBus", "org.freedesktop.DBus", "NameOwnerChanged", arg0=NAME),
                self._on_owner,
            ),
            (Match(NAME, MANAGER_INTERFACE, "JobRemoved", path=MANAGER_PATH), self._on_job_removed),
            (Match(NAME, MANAGER_INTERFACE, "UnitRemoved", path=MANAGER_PATH), self._on_unit_removed),
            (Match(NAME, MANAGER_INTERFACE, "Reloading", path=MANAGER_PATH), self._on_reloading),
            *((match, self._on_properties) for match in properties),
        )

    def _tell(self, event: Event) -> None:
        if self._closed:
            return
        if self._listener is None:
            self._backlog.append(event)
        else:
            self._listener(event)

    def _on_properties(self, signal: Signal) -> None:
        interface, changed, _ = signal.arguments
        if interface == SERVICE_INTERFACE:
            self._watch.service_changed(unit_name(signal.path), changed)
        else:
            self._watch.unit_changed(unit_name(signal.path), changed)

    def _on_unit_removed(self, signal: Signal) -> None:
        self._watch.unit_removed(signal.arguments[0])

    def _on_job_removed(self, signal: Signal) -> None:
        _, path, _, result = signal.arguments
        self._jobs.removed(path, result)

    def _on_reloading(self, signal: Signal) -> None:
        self._watch.reloading(signal.arguments[0])

    def _on_owner(self, signal: Signal) -> None:
        if signal.arguments[2]:
            self._resume()
        else:
            self._gone()

    def _on_bus_state(self, state: BusState) -> None:
        if state is BusState.BACK:
            self._resume()
        else:
            self._gone()

    # --- loss and return ---

    def _gone(self) -> None:
        self._watch.doubt()
        self._jobs.doubt()
        if not self._lost:
            self._lost = True
            self._tell(BusLost())

    def _resume(self) -> None:
        self._owner_came.set()
        if not self._closed and (self._resuming is None or self._resuming.done()):
            self._resuming = asyncio.create_task(self._resume_until_back(), name="systemd-resume")

    async def _resume_until_back(self) -> None:
        """Subscribe with whichever systemd owns the name now, trying again until it answers."""
        pause_s = RESUME_FIRST_S
        while True:
            self._owner_came.clear()
            try:
                await self._subscribe()
                await self._read_version()
                await self._jobs.settle(self._inferred)
            except LlmError as error:
                log.info("systemd is not back: %s", error.message)
            else:
                if not self._owner_came.is_set():
                    break
                continue
            try:
                await asyncio.wait_for(self._owner_came.wait(), pause_s)
            except TimeoutError:
                pause_s = min(pause_s * 2, RESUME_LAST_S)
        if self._lost:
            self._lost = False
            self._tell(BusBack())
        self._tell(Relist())
