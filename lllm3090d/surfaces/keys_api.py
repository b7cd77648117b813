"""The part of the control API about the gateway's keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import BaseModel

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.wire_keys import KeyBody, KeyMade, KeysView, KeyView

if TYPE_CHECKING:
    from lllm3090d.gateway.service import GatewayService


class KeysApi:
    """Routes and handlers.

    Args:
        gateway: whose keys they are; None while the daemon starts.
        body: reads the body of a request.
    """

    def __init__(
        self,
        gateway: Callable[[], GatewayService | None],
        body: Callable[[web.Request, type[Any]], Awaitable[Any]],
    ) -> None:
        self._find = gateway
        self._body = body

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        return [
            web.get("/v1/keys", self.listed),
            web.post("/v1/keys/add", self.add),
            web.post("/v1/keys/remove", self.remove),
        ]

    async def listed(self, _: web.Request) -> web.Response:
        """``GET /v1/keys``: names, never the keys."""
        keys = self._gateway().keys
        if keys.problem is not None:
            raise keys.problem
        return _json(KeysView(keys=tuple(KeyView(name=key.name, made=key.made) for key in keys.listed)))

    async def add(self, request: web.Request) -> web.Response:
        """``POST /v1/keys/add``: make a key."""
        body: KeyBody = await self._body(request, KeyBody)
        key, secret = await self._gateway().add_key(body.name)
        return _json(KeyMade(name=key.name, made=key.made, key=secret))

    async def remove(self, request: web.Request) -> web.Response:
        """``POST /v1/keys/remove``: forget a key."""
        body: KeyBody = await self._body(request, KeyBody)
        await self._gateway().remove_key(body.name)
        return await self.listed(request)

    def _gateway(self) -> GatewayService:
        gateway = self._find()
        if gateway is None:
            raise LlmError(
                ErrorCode.SHUTTING_DOWN, "The daemon is not ready.", hint="Try again in a moment."
            )
        return gateway


def _json(model: BaseModel) -> web.Response:
    return web.Response(text=model.model_dump_json() + "\n", content_type="application/json")
