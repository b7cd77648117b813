"""What the bus is told without being asked: models come, change and go, loads are refused, memory gets short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from lllm3090d.bus.service import BusService
from lllm3090d.bus.service_contract import MANAGER, MODEL, ROOT, contract, path_of_model
from lllm3090d.errors import KINDS, ErrorCode, LlmError
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.history import Since
from lllm3090d.serving.instance import InstanceState
from lllm3090d.surfaces.dbus_views import error_of, model_properties
from lllm3090d.wire import Event, EventKind, InstanceView

log = logging.getLogger(__name__)

_CONSTANT = frozenset(name for name, each in contract()[MODEL].properties.items() if each.emits == "const")


class News:
    """Keeps objects and signals in step with the daemon.

    Args:
        service: told.
        daemon: looked at after each of its events.
        views: of all instances now.
        manager: the properties of the manager that announce themselves, now.
    """

    def __init__(
        self,
        service: BusService,
        daemon: Daemon,
        views: Callable[[], tuple[InstanceView, ...]],
        manager: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._service = service
        self._daemon = daemon
        self._views = views
        self._ask_manager = manager
        self._models: dict[str, dict[str, Any]] = {}  # by path: the properties that were told last
        self._told: dict[str, Any] = {}  # of the manager
        self._charged: object = None
        self._due = False
        self._follower: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Show what is there, and follow what happens from now on."""
        self.look()
        self._daemon.on_event = self._daemon.wanted.on_change = self.look_soon
        self._follower = asyncio.create_task(self._follow(), name="dbus news")
        self._follower.add_done_callback(_ended)

    def end(self) -> None:
        """Follow no more."""
        self._daemon.on_event = self._daemon.wanted.on_change = lambda: None
        if self._follower is not None:
            self._follower.cancel()

    def manager(self) -> Mapping[str, Any]:
        """The properties of the manager that announce themselves, as they are now."""
        if self._due or not self._told:
            self.look()
        return self._told

    def model(self, path: str) -> Mapping[str, Any]:
        """The properties of a model's object, as they are now. Raises LlmError NOT_LOADED."""
        if self._due:
            self.look()
        found = self._models.get(path)
        if found is None:
            raise LlmError(ErrorCode.NOT_LOADED, f"the model of {path} is not loaded any more")
        return found

    def look_soon(self) -> None:
        """Have all changes told, once for all that happens in this turn of the loop."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        """Tell what is different now from what was told last."""
        self._due = False
        now = {path_of_model(view.name): model_properties(view) for view in self._views()}
        for path, before in tuple(self._models.items()):
            if path not in now or now[path]["Run"] != before["Run"]:
                self._gone(path, before)
        for path, properties in now.items():
            if path not in self._models:
                self._came(path, properties)
            else:
                self._changed(path, properties)
        self._look_at_manager()

    def _came(self, path: str, properties: dict[str, Any]) -> None:
        self._models[path] = properties
        self._service.publish(path, (MODEL,))
        self._service.added(path, {MODEL: properties})
        self._service.emit(ROOT, MANAGER, "InstanceAdded", path, properties["Name"], properties["Run"])

    def _gone(self, path: str, before: Mapping[str, Any]) -> None:
        del self._models[path]
        self._service.withdraw(path)
        self._service.removed(path, (MODEL,))
        self._service.emit(ROOT, MANAGER, "InstanceRemoved", path, before["Name"], before["Run"])

    def _changed(self, path: str, properties: dict[str, Any]) -> None:
        before, self._models[path] = self._models[path], properties
        changes = {
            name: value
            for name, value in properties.items()
            if value != before[name] and name not in _CONSTANT
        }
        if changes:
            self._service.changed(path, MODEL, changes)

    def _look_at_manager(self) -> None:
        now = dict(self._ask_manager())
        ledger = self._daemon.scheduler.ledger
        charged = {
            reader.card.uuid: ledger.charged_bytes(reader.card.uuid) for reader in self._daemon.readers
        }
        changes = {name: value for name, value in now.items() if value != self._told.get(name)}
        invalid = ("Budget",) if charged != self._charged else ()
        first, self._told, self._charged = not self._told, now, charged
        if not first and (changes or invalid):
            self._service.changed(ROOT, MANAGER, changes, invalid)

    # --- events -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """The events from now on."""
        async for event in self._daemon.history.follow_on(Since(last=0)):
            self._tell(event)

    def _tell(self, event: Event) -> None:
        model, run = event.model or "", event.run or ""
        match event.kind:
            case EventKind.STATE:
                is_gone = event.state is InstanceState.GONE
                if not is_gone:
                    self.look()
                self._emit(
                    "InstanceStateChanged",
                    path_of_model(model),
                    model,
                    run,
                    event.state or "",
                    event.previous or "",
                    event.message,
                )
                if is_gone:
                    self.look()
            case EventKind.REFUSED:
                # Details that were too large to keep have lost what makes a document.
                known = "code" in event.details and "detail" in event.details
                name = KINDS[ErrorCode.INTERNAL].dbus_name
                self._emit("Refused", model, *(error_of(event.details) if known else (name, event.message)))
            case EventKind.PRESSURE:
                self._emit("MemoryPressure", str(event.details.get("card", "")), event.message)
            case EventKind.EVICTION:
                self._emit("Evicted", model, run, event.message)
            case _:
                self.look_soon()

    def _emit(self, name: str, *values: str) -> None:
        self._service.emit(ROOT, MANAGER, name, *values)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the bus is told no more news", exc_info=error)
