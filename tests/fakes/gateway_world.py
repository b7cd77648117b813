"""A gateway in front of engines of this process, and a daemon that loads them: for tests of what goes over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h11
from aiohttp import web

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.connections import Patience
from lllm3090d.gateway.gateway import Gateway
from lllm3090d.gateway.guard import Rules
from lllm3090d.gateway.house import Served
from lllm3090d.gateway.port import Address, Port, bind
from lllm3090d.gateway.record import Record
from lllm3090d.gateway.upstream import Engine
from lllm3090d.serving.answers import Answer
from lllm3090d.serving.events import CancelDone, Failed, LoadDone
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.readiness import cgroups_of
from lllm3090d.settings import Settings


@dataclass(slots=True)
class Asked:
    """A request as an engine got it."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    # Set when the connection was closed before the answer was complete.
    left: asyncio.Event = field(default_factory=asyncio.Event)


Respond = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


class ScriptedEngine:
    """Listens on a Unix socket and answers with bytes, as they are.

    Args:
        path: of the socket.
        respond: writes the answer.
    """

    def __init__(self, path: Path, respond: Respond) -> None:
        self.path = path
        self.respond = respond
        self.asked: list[Asked] = []
        self.open = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=1 << 20)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            asked = await _read(reader)
            if asked is None:
                return
            self.asked.append(asked)
            watch = asyncio.create_task(_watch(reader, asked))
            try:
                await self.respond(asked, writer)
                await writer.drain()
            except ConnectionError:
                asked.left.set()
            finally:
                watch.cancel()
        except ConnectionError:
            return
        finally:
            self.open -= 1
            writer.close()


async def _watch(reader: asyncio.StreamReader, asked: Asked) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()
    asked.left.set()


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    asked: Asked | None = None
    body: list[bytes] = []
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(1 << 18)
            protocol.receive_data(data)
            if not data:
                return None
        elif isinstance(event, h11.Request):
            asked = Asked(event.method.decode(), event.target.decode(), list(event.headers))
        elif isinstance(event, h11.Data):
            body.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage) and asked is not None:
            asked.body = b"".join(body)
            return asked
        else:
            return None


class FakeHouse:
    """A daemon that has models and loads them at once, or when it is told to.

    Args:
        settings: the present ones.
        engines: by the name of their model.
        slots: of each.
    """

    def __init__(self, settings: Settings, engines: dict[str, ScriptedEngine], slots: int = 4) -> None:
        self.settings = settings
        self.engines = engines
        self.slots = slots
        self.serving: set[str] = set()
        self.leases: set[str] = set()
        self.loads: list[str] = []
        self.cancelled: list[str] = []
        self.kept_alive: list[float] = []
        self.may_answer = asyncio.Event()  # a wish for a lease: it is granted before the answer is there
        self.may_answer.set()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.failure: LlmError | None = None
        self.purposes: dict[str, Purpose] = {}
        self.restarts = False  # an engine that ends is started again
        self.held: dict[str, LlmError] = {}  # why those that have ended are not loaded
        self.ended: set[str] = set()  # whose engine ends while it is loaded, and is started again
        self.launched: dict[
            str, Purpose
        ] = {}  # those that are loaded for something else than they were promised as

    def serving_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.serving))

    async def canonical(self, name: str) -> str:
        if name not in self.engines:
            raise LlmError(ErrorCode.UNKNOWN_MODEL, f"There is no model {name}.", hint="See /v1/models.")
        return name

    def promised(self, name: str) -> Purpose | None:
        return self.purposes.get(name)

    async def purpose(self, name: str) -> Purpose:
        return self.purposes.get(name, Purpose.CHAT)

    async def lease(self, name: str, lease: str) -> Served:
        if name not in self.serving:
            raise LlmError(ErrorCode.NOT_LOADED, f"{name} is not loaded.", hint="Load it.")
        self.leases.add(lease)
        await self.may_answer.wait()
        group = min(cgroups_of(os.getpid()))
        return Served(
            name,
            f"run-{name}",
            Engine(name, self.engines[name].path, group),
            self.slots,
            4096,
            lease,
            self.launched.get(name) or await self.purpose(name),
        )

    def give_back(self, lease: str, keep_alive_s: float | None = None) -> None:
        self.leases.discard(lease)
        if keep_alive_s is not None:
            self.kept_alive.append(keep_alive_s)

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        self.loads.append(name)
        token = token or "t"
        return token, self._answers(name, token, wish)

    async def _answers(self, name: str, token: str, wish: LoadWish) -> AsyncGenerator[Answer, None]:
        await self.may_load.wait()
        if self.failure is not None:
            yield Failed(token, self.failure)
            return
        self.serving.add(name)
        if wish.lease:
            self.leases.add(token)
        yield LoadDone(token, f"run-{name}")

    async def comes_back(self, name: str, run: str) -> bool:
        self.serving.discard(name)
        return self.restarts

    def held_back(self, name: str, within_s: float) -> LlmError | None:
        return self.held.get(name)

    def has_ended(self, name: str) -> bool:
        return name in self.ended

    async def cancel(self, load_token: str) -> CancelDone:
        self.cancelled.append(load_token)
        return CancelDone("c", load_token, stopped=True)


@dataclass(slots=True)
class GatewayWorld:
    """A gateway on a free port."""

    house: FakeHouse
    gateway: Gateway
    address: str
    records: list[Record]


@asynccontextmanager
async def gateway_world(
    tmp_path: Path,
    respond: Respond,
    *,
    models: tuple[str, ...] = ("small",),
    loaded: bool = True,
    slots: int = 4,
    rules: Rules | None = None,
    patience: Patience | None = None,
    most_connections: int | None = None,
    **settings: object,
) -> AsyncIterator[GatewayWorld]:
    """A gateway in front of engines that answer in one way."""
    engines = {name: ScriptedEngine(tmp_path / f"{name}.sock", respond) for name in models}
    house = FakeHouse(Settings.model_validate({"gateway_port": 0, **settings}), engines, slots)
    records: list[Record] = []

    async def listed(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": name} for name in models]})

    gateway = Gateway(house, lambda: rules or Rules(), listed, records.append)
    sock = bind(Address("127.0.0.1", 0), has_keys=False)
    port = Port(gateway, sock, patience or Patience(), most_connections)
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines.values():
            await engine.start()
            stack.push_async_callback(engine.close)
        await port.start()
        stack.push_async_callback(port.close)
        if loaded:
            house.serving.update(models)
        yield GatewayWorld(house, gateway, f"http://{port.address}", records)
