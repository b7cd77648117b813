"""A gateway in front of real engines of this process, on a thread of its own: for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.library import Checkpoint, resolve
from lllm3090d.checkpoints.purpose import Purpose, purpose_of_kind
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.gateway import Gateway
from lllm3090d.gateway.guard import Rules
from lllm3090d.gateway.house import Served
from lllm3090d.gateway.models_list import ModelsList
from lllm3090d.gateway.port import Address, Port, bind
from lllm3090d.gateway.record import Record
from lllm3090d.gateway.upstream import Engine
from lllm3090d.serving.answers import Answer
from lllm3090d.serving.events import CancelDone, Failed, LoadDone
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.listings import Listings
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.readiness import cgroups_of
from lllm3090d.serving.refusals import not_loaded
from lllm3090d.serving.running import Instance
from lllm3090d.settings import Settings
from lllm3090d.wire import Models, ModelView
from tests.fakes.unix_http import health

START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model and how its engine is started.

    Attributes:
        slots: that share the context equally.
    """

    path: Path
    context_tokens: int
    slots: int
    flags: Sequence[str] = ()
    kind: Kind = Kind.MODEL

    @property
    def window_tokens(self) -> int:
        """Of one slot."""
        return self.context_tokens // self.slots


class EngineHouse:
    """A daemon that starts an engine for each model that is asked for, without asking whether it fits.

    Args:
        directory: for sockets.
        llama_server: the engine.
        models: by name.
    """

    def __init__(self, directory: Path, llama_server: Path, models: Mapping[str, RealModel]) -> None:
        self.settings = Settings()
        self.models = models
        # Refused with this when it is to be loaded.
        self.refused: dict[str, LlmError] = {}
        self._directory = directory
        self._llama_server = llama_server
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._group = min(cgroups_of(os.getpid()))

    def serving_names(self) -> tuple[str, ...]:
        return tuple(self._processes)

    def instances(self) -> tuple[Instance, ...]:
        """What runs, as far as a list of models looks at it."""
        return tuple(
            cast(
                Instance,
                SimpleNamespace(
                    name=name,
                    state=InstanceState.READY,
                    plan=SimpleNamespace(
                        window_tokens=self.models[name].window_tokens,
                        parallel=self.models[name].slots,
                        launch=SimpleNamespace(purpose=purpose_of_kind(self.models[name].kind)),
                    ),
                ),
            )
            for name in self._processes
        )

    async def listed(self, *, with_catalogue: bool) -> Models:
        """The models on disk."""
        del with_catalogue
        views = tuple(
            ModelView(
                name=name,
                aliases=(),
                path=str(model.path),
                size_bytes=model.path.stat().st_size,
                shards=1,
                architecture="llama",
                quantisation=None,
                trained_context_tokens=8192,
                kind=model.kind,
                parallel=1,
                window_tokens=8192,
            )
            for name, model in self.models.items()
        )
        return Models(models_dir=str(self._directory), models=views)

    async def canonical(self, name: str) -> str:
        checkpoints = tuple(Checkpoint(each, model.path, (), 0) for each, model in self.models.items())
        return resolve(name, checkpoints, {}).name

    def promised(self, name: str) -> Purpose | None:
        """Its file tells."""
        return None

    async def comes_back(self, name: str, run: str) -> bool:
        """Nothing is."""
        return False

    def held_back(self, name: str, within_s: float) -> LlmError | None:
        """Nothing is."""
        return None

    def has_ended(self, name: str) -> bool:
        """Nothing is started again here."""
        return False

    async def purpose(self, name: str) -> Purpose:
        return purpose_of_kind(self.models[name].kind)

    async def lease(self, name: str, lease: str) -> Served:
        if name not in self._processes:
            raise not_loaded(name, self.serving_names())
        model = self.models[name]
        engine = Engine(name, self._socket(name), self._group)
        return Served(
            name, f"run-{name}", engine, model.slots, model.window_tokens, lease, purpose_of_kind(model.kind)
        )

    def give_back(self, lease: str, keep_alive_s: float | None = None) -> None:
        """Nothing is ever evicted."""

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        if name in self.refused:
            raise self.refused[name]
        return token or "t", self._loading(name, token or "t")

    async def _loading(self, name: str, token: str) -> AsyncGenerator[Answer, None]:
        model = self.models[name]
        command = [
            str(self._llama_server),
            *("-m", str(model.path), "--host", str(self._socket(name)), "-c", str(model.context_tokens)),
            *("-np", str(model.slots), "--no-kv-unified", "--jinja", "--no-webui", "--alias", name),
            *model.flags,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220  # a fork of a small process
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while await asyncio.to_thread(health, self._socket(name)) != 200:
                    if process.poll() is not None:
                        error = LlmError(ErrorCode.ENGINE_FAILED, f"{command} ended: {process.returncode}")
                        yield Failed(token, error)
                        return
                    await asyncio.sleep(0.02)
        except BaseException:
            process.kill()
            raise
        self._processes[name] = process
        yield LoadDone(token, f"run-{name}")

    async def cancel(self, load_token: str) -> CancelDone:
        return CancelDone("c", load_token, stopped=False)

    def close(self) -> None:
        """End the engines."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(START_LIMIT_S)

    def _socket(self, name: str) -> Path:
        return self._directory / f"{name}.sock"


@dataclass(slots=True)
class RealWorld:
    """A gateway on a free port, in front of real engines.

    Attributes:
        address: such as http://127.0.0.1:40321.
        records: of all requests that have ended.
        ended: notified of each.
    """

    house: EngineHouse
    gateway: Gateway
    address: str
    records: list[Record]
    ended: threading.Condition

    def last(self) -> Record:
        """The record of the request that has ended last, once none is in flight: clients are answered earlier."""
        with self.ended:
            assert self.ended.wait_for(lambda: not self.gateway.in_flight, START_LIMIT_S)
            return self.records[-1]

    def ended_requests(self) -> int:
        """How many requests have ended, once none is in flight."""
        with self.ended:
            assert self.ended.wait_for(lambda: not self.gateway.in_flight, START_LIMIT_S)
            return len(self.records)


@asynccontextmanager
async def _gateway(house: EngineHouse) -> AsyncIterator[RealWorld]:
    records: list[Record] = []
    ended = threading.Condition()

    def end(record: Record) -> None:
        with ended:
            records.append(record)
            ended.notify_all()

    listings = cast(Listings, SimpleNamespace(models=house.listed))
    models = ModelsList(house, listings, house.instances)
    gateway = Gateway(house, Rules, models.answer, end)
    port = Port(gateway, bind(Address("127.0.0.1", 0), has_keys=False))
    await port.start()
    try:
        yield RealWorld(house, gateway, f"http://{port.address}", records, ended)
    finally:
        await port.close()


@contextmanager
def real_world(directory: Path, llama_server: Path, models: Mapping[str, RealModel]) -> Iterator[RealWorld]:
    """The gateway; its engines start when they are asked for."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    with contextlib.closing(EngineHouse(directory, llama_server, models)) as house:
        context = _gateway(house)
        try:
            yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(START_LIMIT_S)
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(START_LIMIT_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
