"""The part of the control API that names what there is, for a shell that completes a word.

It is asked with each press of a key, so nothing is planned, no engine is asked and no card is read for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from aiohttp import web

from lllm3090d.engines.builds import finds
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.wire_names import Names, NamesOf

if TYPE_CHECKING:
    from lllm3090d.gateway.service import GatewayService
    from lllm3090d.serving.daemon import Daemon


class NamesApi:
    """Route and handler.

    Args:
        daemon: whose models and engines they are.
        gateway: whose keys they are; None while the daemon starts.
    """

    def __init__(self, daemon: Daemon, gateway: Callable[[], GatewayService | None]) -> None:
        self._daemon = daemon
        self._gateway = gateway

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        return [web.get("/v1/names", self.names)]

    async def names(self, request: web.Request) -> web.Response:
        """``GET /v1/names?of=``: raises what reading the models, builds or keys does."""
        found = await self._find(_kind(request))
        answer = Names(names=tuple(sorted(set(found))))
        return web.Response(text=answer.model_dump_json() + "\n", content_type="application/json")

    async def _find(self, kind: NamesOf) -> Iterable[str]:
        match kind:
            case NamesOf.MODELS:
                return await asyncio.to_thread(self._models)
            case NamesOf.INSTANCES:
                scheduler = self._daemon.scheduler
                running = [each.name for each in scheduler.instances]
                return [*running, *(each.name for each in scheduler.pending)]
            case NamesOf.ENGINES:
                builds = await asyncio.to_thread(finds, self._daemon.settings)
                return [each.name for each in builds if each.is_offered]
            case NamesOf.KEYS:
                gateway = self._gateway()
                return [key.name for key in gateway.keys.listed] if gateway is not None else []

    def _models(self) -> Iterable[str]:
        library = self._daemon.lookup.library()
        return [*(each.name for each in library.scan()), *library.aliases]


def _kind(request: web.Request) -> NamesOf:
    """Raises LlmError INVALID_REQUEST."""
    text = request.query.get("of", NamesOf.MODELS)
    try:
        return NamesOf(text)
    except ValueError as error:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"of={text[:40]} is none of {', '.join(NamesOf)}",
            hint="Leave of out for models.",
        ) from error
