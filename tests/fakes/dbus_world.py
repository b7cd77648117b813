"""The D-Bus surface without a bus: what would go out is kept, as the variants that it would be."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from gi.repository import GLib

from lllm3090d.bus.service import BusService, Call
from lllm3090d.bus.thread import BusThread
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.history import History
from lllm3090d.surfaces.control import ControlApi
from lllm3090d.surfaces.dbus_api import DbusApi
from lllm3090d.wire import InstanceView, LoadLine, ReleaseBody, Released, UnloadBody, Unloaded

PEER_UID = "UnixUserID"


def instance(name: str = "alpha", run: str = "0a1b2c3d", **changes: Any) -> InstanceView:
    """An instance as clients see it."""
    members: dict[str, Any] = {
        "name": name,
        "run": run,
        "state": "ready",
        "since": "2026-11-30T12:00:00.000Z",
        "unit": f"lllm3090-{name}-{run}.service",
        "endpoint": "/run/e.sock",
        "path": "/m/a.gguf",
        "context_tokens": 8192,
        "parallel": 2,
        "window_tokens": 4096,
        "cache_type_k": "q8_0",
        "cache_type_v": "q8_0",
        "reserved_bytes": 1 << 40,
        "engine_version": "11434",
        "adopted": False,
    }
    return InstanceView.model_validate(members | changes)


class FakeBus:
    """Stands for the bus thread: calls of functions are kept, and the bus itself answers as told."""

    def __init__(self) -> None:
        self.uid = os.getuid()
        self.answers: dict[str, Any] = {"RequestName": (1,), "ReleaseName": (1,)}
        self.asked: list[str] = []
        self.work: deque[Callable[[Any], None]] = deque()

    def soon(self, function: Callable[[Any], None]) -> None:
        """Keep what is to be done on the bus thread."""
        self.work.append(function)

    def add_state_handler(self, _: object) -> None:
        """Nobody is told: this bus is never lost."""

    remove_state_handler = add_state_handler

    async def subscribe(self, _: object, __: object) -> None:
        """There are no signals."""

    async def method(self, _: object, member: str, __: object = None) -> tuple[Any, ...]:
        """As told; a caller is the user that was set."""
        self.asked.append(member)
        if member == "GetConnectionCredentials":
            return ({PEER_UID: self.uid, "ProcessID": 77},)
        answer = self.answers[member]
        if isinstance(answer, Exception):
            raise answer
        return cast(tuple[Any, ...], answer)

    def told(self) -> list[tuple[Any, ...]]:
        """What was done since the last question: signals as (path, name, arguments), others as ("", the work, ...)."""
        found: list[tuple[Any, ...]] = []
        for work in self.work:
            if not isinstance(work, partial):
                continue
            if work.func.__name__ == "_bus_emit":
                path, _, name, body = work.args
                found.append((path, name, body.unpack()))
            else:
                found.append(("", work.func.__name__, *work.args))
        self.work.clear()
        return found


class Invocation:
    """A call that waits for its answer."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.error: tuple[str, str] | None = None
        self.dropped = 0

    def return_value(self, body: GLib.Variant) -> None:
        """It is answered."""
        self.answer = body.unpack()

    def _unref(self) -> None:
        """Older GLib is to be told."""
        self.dropped += 1

    def return_dbus_error(self, name: str, message: str) -> None:
        """It is refused."""
        self.error = (name, message)


class FakeApi:
    """The pieces of the control API, scripted."""

    def __init__(self) -> None:
        self.views: tuple[InstanceView, ...] = ()
        self.asked: list[tuple[Any, ...]] = []
        self.lines: list[LoadLine | LlmError] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.history = History()
        self.daemon = SimpleNamespace(
            scheduler=SimpleNamespace(
                released=False, instances=(), ledger=SimpleNamespace(charged_bytes=lambda _: 0)
            ),
            wanted=SimpleNamespace(wants=()),
            readers=(),
            history=self.history,
            look_at_cards=lambda: None,
            look_for_desktop=self._nothing,
            resume=self._resume,
            reset=self._reset,
            cancel=self._cancel,
        )
        self.dbus_problem: Callable[[], LlmError | None] = lambda: None
        self.previews = SimpleNamespace(plan=self._document)
        self.memory = SimpleNamespace(explained=self._document, gpus_now=lambda: SimpleNamespace(gpus=()))
        self.listings = SimpleNamespace(models=self._models)

    def instance_views(self) -> tuple[InstanceView, ...]:
        """All instances."""
        return self.views

    def instance_view(self, found: Any) -> InstanceView:
        """That of a running one."""
        return next(each for each in self.views if each.name == found.name)

    def pending_views(self) -> tuple[Any, ...]:
        """Nobody waits."""
        return ()

    def run(self, *views: InstanceView) -> None:
        """These are there now."""
        self.views = views
        self.daemon.scheduler.instances = tuple(SimpleNamespace(name=each.name) for each in views)

    async def loading(self, body: Any) -> AsyncGenerator[LoadLine]:
        """The scripted lines, once they may go on."""
        self.asked.append(("load", body))
        first = self.lines[0]
        if isinstance(first, LlmError):
            raise first
        return self._stream()

    async def _stream(self) -> AsyncGenerator[LoadLine]:
        for line in self.lines:
            await self.hold.wait()
            if isinstance(line, LlmError):
                raise line
            yield line

    async def unloaded(self, body: UnloadBody) -> Unloaded:
        """One model goes."""
        self.asked.append(("unload", body))
        await self.hold.wait()
        if body.model == "nothing":
            raise LlmError(ErrorCode.NOT_LOADED, "nothing is not loaded")
        return Unloaded(name=body.model, run="0a1b", released_bytes=1 << 33, elapsed_s=0.5)

    async def released(self, body: ReleaseBody) -> Released:
        """All go."""
        self.asked.append(("release", body))
        return Released(names=("a", "b"), released_bytes=7, until_resume=body.until_resume, elapsed_s=0.1)

    async def _nothing(self) -> None:
        pass

    async def _resume(self) -> bool:
        return True

    async def _reset(self, name: str) -> Any:
        self.asked.append(("reset", name))
        return SimpleNamespace(run="0a1b", starts=False)

    async def _cancel(self, token: str) -> None:
        self.asked.append(("cancel", token))

    async def _document(self, asked: Any) -> Any:
        self.asked.append(("document", asked))
        return instance()

    async def _models(self, *, with_catalogue: bool) -> Any:
        self.asked.append(("models", with_catalogue))
        return SimpleNamespace(models=(instance(),))


class World:
    """A surface on a bus that is none."""

    def __init__(self) -> None:
        self.bus = FakeBus()
        self.api = FakeApi()
        self.surface = DbusApi(cast(ControlApi, self.api), cast(BusThread, self.bus))
        self.service: BusService = self.surface._service  # looked at by tests

    async def call(
        self, member: str, *arguments: Any, path: str, interface: str, sender: str = ":1.7"
    ) -> Invocation:
        """Have a client call; the answer."""
        invocation = Invocation()
        self.arrive(member, *arguments, path=path, interface=interface, sender=sender, invocation=invocation)
        while invocation.answer is None and invocation.error is None:
            await asyncio.sleep(0)
            self.answered()
        return invocation

    def arrive(
        self, member: str, *arguments: Any, path: str, interface: str, sender: str, invocation: Invocation
    ) -> None:
        """A call is handed over by the bus thread."""
        self.service._arrived(Call(path, interface, member, arguments), sender, invocation)

    def answered(self) -> None:
        """Do what the bus thread would: answers go out, all else is kept."""
        for work in tuple(self.bus.work):
            if not isinstance(work, partial):
                self.bus.work.remove(work)
                work(None)
