"""The part of the control API about what is loaded at every login."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.wanted_views import autoload_view
from lllm3090d.wire_wanted import AutoloadBody


class WantedApi:
    """Routes and handlers.

    Args:
        daemon: asked.
        body: reads the body of a request.
    """

    def __init__(self, daemon: Daemon, body: Callable[[web.Request, type[Any]], Awaitable[Any]]) -> None:
        self._daemon = daemon
        self._body = body

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        return [
            web.get("/v1/autoload", self.listed),
            web.post("/v1/models/{name:.+}/autoload", self.mark),
        ]

    async def listed(self, _: web.Request) -> web.Response:
        """``GET /v1/autoload``: what is loaded at every login, in order."""
        return _json(await autoload_view(self._daemon.wanted, self._daemon.scheduler))

    async def mark(self, request: web.Request) -> web.Response:
        """``POST /v1/models/{name}/autoload``: load a model at every login, or no longer."""
        body: AutoloadBody = await self._body(request, AutoloadBody)
        await self._daemon.autoload(request.match_info["name"], marked=body.autoload)
        return await self.listed(request)


def _json(model: BaseModel) -> web.Response:
    return web.Response(text=model.model_dump_json() + "\n", content_type="application/json")
