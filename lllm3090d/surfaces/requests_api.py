"""The part of the control API about requests to the gateway that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel

from lllm3090d.checkpoints.library import Checkpoint, resolve
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.request_log import RequestLog
from lllm3090d.gateway.request_table import Wanted
from lllm3090d.gateway.service import GatewayService
from lllm3090d.serving.daemon import Daemon
from lllm3090d.surfaces.queries import flag, moment, number

USUAL_REQUESTS, MOST_REQUESTS = 100, 10_000
Streamer = Callable[[web.Request, AsyncGenerator[BaseModel, None]], Awaitable[web.StreamResponse]]


class RequestsApi:
    """Routes and handlers.

    Args:
        daemon: asked for names.
        gateway: where there is one.
        stream: writes the lines of an answer.
    """

    def __init__(
        self, daemon: Daemon, gateway: Callable[[], GatewayService | None], stream: Streamer
    ) -> None:
        self._daemon = daemon
        self._gateway = gateway
        self._stream = stream

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        return [web.get("/v1/requests", self.requests)]

    async def requests(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/requests?model=&since=&last=&follow=``: NDJSON."""
        from_us, last = moment(request, "since") or 0, number(request, "last", USUAL_REQUESTS, MOST_REQUESTS)
        follows = flag(request, "follow")
        service = self._gateway()
        if service is None:
            raise LlmError(
                ErrorCode.GATEWAY_UNAVAILABLE,
                "There is no gateway yet: the daemon is still starting.",
                hint="Ask again in a moment.",
            )
        requests, name = service.requests, request.query.get("model")
        wanted = Wanted(await self._named(name, requests) if name is not None else None, from_us, last)
        return await self._stream(request, requests.follow(wanted) if follows else _past(requests, wanted))

    async def _named(self, name: str, requests: RequestLog) -> str:
        """A model that was asked for, also one that is gone, or one that can be. Raises as all look-ups of names."""
        known = tuple(Checkpoint(each, Path(each), (), 0) for each in await requests.models())
        try:
            return resolve(name, known, self._daemon.settings.aliases).name
        except LlmError as error:
            if error.code not in {ErrorCode.UNKNOWN_MODEL, ErrorCode.NO_MODELS}:
                raise
        return (await asyncio.to_thread(self._daemon.lookup.resolve, name)).name


async def _past(requests: RequestLog, wanted: Wanted) -> AsyncGenerator[BaseModel, None]:
    for view in await requests.past(wanted):
        yield view
