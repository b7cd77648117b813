"""The part of the control API about what happened: events, the runs of a model, and logs of engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from lllm3090d.checkpoints.library import Checkpoint, resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.engine_logs import LogEntry
from lllm3090d.serving.history import Since
from lllm3090d.serving.instance import ENDED
from lllm3090d.serving.journal import LINES_MAX
from lllm3090d.serving.moments import time_text
from lllm3090d.serving.run_histories import run_histories
from lllm3090d.serving.unit_spec import unit_name
from lllm3090d.surfaces.queries import flag, is_number, moment, number
from lllm3090d.wire import Event, LogLine, RunHistory

DEFAULT_LOG_LINES = 100
DEFAULT_RUNS, MOST_RUNS = 20, 1000
MOST_SEQ = 1 << 62
# Silence after the end of a run that counts as "that was all": journald may still be writing it down.
LAST_LINES_S = 0.5

Item = TypeVar("Item")
Streamer = Callable[[web.Request, AsyncGenerator[BaseModel, None]], Awaitable[web.StreamResponse]]


class HistoryApi:
    """Routes and handlers.

    Args:
        daemon: asked.
        stream: writes the lines of an answer.
    """

    def __init__(self, daemon: Daemon, stream: Streamer) -> None:
        self._daemon = daemon
        self._stream = stream

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        return [
            web.get("/v1/events", self.events),
            web.get("/v1/models/{name:.+}/history", self.history),
            web.get("/v1/instances/{name:.+}/logs", self.logs),
        ]

    async def events(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/events?since=&last=&follow=``: NDJSON."""
        since = _since(request)
        history = self._daemon.history
        return await self._stream(
            request, history.follow(since) if flag(request, "follow") else history.past(since)
        )

    async def history(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{name}/history?runs=``: the last launches of a model, also of one that is gone."""
        daemon = self._daemon
        most = number(request, "runs", DEFAULT_RUNS, MOST_RUNS)
        name = await self._remembered(request.match_info["name"])
        live = {each.run for each in daemon.scheduler.instances if each.state not in ENDED}
        runs = run_histories(await daemon.history.of_model(name), live)
        view = RunHistory(name=name, runs=runs[:most])
        return web.Response(text=view.model_dump_json() + "\n", content_type="application/json")

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/instances/{name}/logs?lines=&since=&follow=``: NDJSON; of a model that is gone its last run's."""
        name, run = await self._run_of(request.match_info["name"])
        lines = number(request, "lines", DEFAULT_LOG_LINES, LINES_MAX)
        since_us = moment(request, "since")
        unit, logs = unit_name(name, run), self._daemon.logs
        if flag(request, "follow") and self._is_live(run):
            logs.check_time(unit, since_us)
            return await self._stream(request, self._until_the_end(run, logs.follow(unit, lines, since_us)))
        found = await logs.tail(unit, lines, since_us)
        return await self._stream(request, _each(_line(entry) for entry in found))

    # --- names --------------------------------------------------------------------------------------------------

    async def _remembered(self, name: str) -> str:
        """A model that anything is remembered of, by the rules for all names."""
        known = await self._daemon.history.models()
        checkpoints = tuple(_named(each) for each in known)
        try:
            return resolve(name, checkpoints, self._daemon.settings.aliases).name
        except LlmError as error:
            if error.code not in {ErrorCode.UNKNOWN_MODEL, ErrorCode.NO_MODELS}:
                raise
            raise LlmError(
                error.code,
                f"Nothing is remembered of a model {name!r}: it was not loaded since the history begins.",
                hint="What is remembered: lllm3090ctl events. Models on disk: lllm3090ctl models",
                name=name,
            ) from error

    async def _run_of(self, name: str) -> tuple[str, str]:
        """Name and run of a model that is loaded or was loaded last."""
        try:
            instance = self._daemon.loaded(name)
        except LlmError as error:
            if error.code is not ErrorCode.NOT_LOADED:
                raise
            found = await self._last_run_of(name)
            if found is None:
                raise
            return found
        return instance.name, instance.run

    async def _last_run_of(self, name: str) -> tuple[str, str] | None:
        try:
            remembered = await self._remembered(name)
        except LlmError as error:
            if error.code not in {ErrorCode.UNKNOWN_MODEL, ErrorCode.NO_MODELS}:
                raise
            return None
        runs = run_histories(await self._daemon.history.of_model(remembered))
        return (remembered, runs[0].run) if runs else None

    # --- following ----------------------------------------------------------------------------------------------

    def _is_live(self, run: str) -> bool:
        instance = self._daemon.scheduler.by_run(run)
        return instance is not None and instance.state not in ENDED

    async def _ended(self, run: str) -> None:
        """Return once a run has ended, or the daemon does."""
        async with contextlib.aclosing(self._daemon.history.follow(Since(last=0))) as events:
            if not self._is_live(run):
                return
            async for event in events:
                if _is_end(event, run):
                    return

    async def _until_the_end(
        self, run: str, entries: AsyncGenerator[LogEntry, None]
    ) -> AsyncGenerator[BaseModel, None]:
        """Lines as they come, until the run has ended and nothing more comes."""
        ended = asyncio.create_task(self._ended(run))
        coming: asyncio.Task[LogEntry] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(_next(entries))
                await asyncio.wait({coming, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    await asyncio.wait({coming}, timeout=LAST_LINES_S)
                if not coming.done():
                    return
                try:
                    entry = coming.result()
                except StopAsyncIteration:
                    return
                yield _line(entry)
        finally:
            for task in (ended, coming):
                if task is not None:
                    task.cancel()
            await asyncio.gather(ended, *([coming] if coming is not None else []), return_exceptions=True)
            await entries.aclose()


async def _next(entries: AsyncGenerator[LogEntry, None]) -> LogEntry:
    return await anext(entries)


def _is_end(event: Event, run: str) -> bool:
    return event.run == run and event.state in ENDED


def _since(request: web.Request) -> Since:
    """Which of the past a request wants; ``since`` is a number or a moment. Raises LlmError INVALID_REQUEST."""
    last = number(request, "last", LINES_MAX, LINES_MAX) if "last" in request.query else None
    text = request.query.get("since", "0")
    if is_number(text):
        return Since(seq=number(request, "since", 0, MOST_SEQ), last=last)
    return Since(from_us=moment(request, "since") or 0, last=last)


def _named(name: str) -> Checkpoint:
    """A name as names are looked up in; the file may be gone."""
    return Checkpoint(name=name, path=Path(name), shards=(), size_bytes=0)


def _line(entry: LogEntry) -> LogLine:
    at = time_text(entry.at_realtime_us) if entry.at_realtime_us is not None else None
    return LogLine(at=at, message=entry.message)


async def _each(items: Iterable[Item]) -> AsyncGenerator[Item, None]:
    for item in items:
        yield item
