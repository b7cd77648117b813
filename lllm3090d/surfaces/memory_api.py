"""The part of the control API about memory: who holds what of the cards, a price explained, and figures to scrape."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable

from aiohttp import web
from pydantic import BaseModel

from lllm3090d.engines.memory_log import MemoryLog, read_memory_log
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.service import GatewayService
from lllm3090d.serving.card_views import Scene, gpus_view
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.engine_logs import EngineLogs
from lllm3090d.serving.explain_views import explain_view
from lllm3090d.serving.extras import running_notes
from lllm3090d.serving.fences import limits
from lllm3090d.serving.journal import LINES_MAX
from lllm3090d.serving.learnt import learnt_of
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.running import Instance
from lllm3090d.wire_cards import ExplainView, Gpus


def _json(model: BaseModel) -> web.Response:
    return web.Response(text=model.model_dump_json() + "\n", content_type="application/json")


class MemoryApi:
    """Routes and handlers; each asks the daemon and renders what it says.

    Args:
        daemon: asked.
        gateway: where there is one, for its figures.
    """

    def __init__(self, daemon: Daemon, gateway: Callable[[], GatewayService | None]) -> None:
        self._daemon = daemon
        self._gateway = gateway

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        return [
            web.get("/v1/gpus", self.gpus),
            web.get("/v1/models/{name:.+}/explain", self.explain),
            web.get("/metrics", self.metrics),
        ]

    async def gpus(self, _: web.Request) -> web.Response:
        """``GET /v1/gpus``: a card that cannot be read is among them, with the reason."""
        await self._daemon.look_for_desktop()
        return _json(self.gpus_now())

    def gpus_now(self) -> Gpus:
        """The cards now; takes about a millisecond for each."""
        scheduler, observation = self._daemon.scheduler, self._daemon.observe()
        try:
            rooms = scheduler.rooms(observation)
            budgets, host_budget = rooms.cards, rooms.host
        except LlmError as error:
            # A reading that cannot be true: nothing is granted of any card, and the reading itself shows it.
            if error.code is not ErrorCode.CARD_UNREADABLE:
                raise
            budgets, host_budget = {}, None
        return gpus_view(
            Scene(
                observation=observation,
                ledger=scheduler.ledger,
                budgets=budgets,
                host_budget=host_budget,
                instances={each.run: each for each in scheduler.instances},
                now_s=scheduler.clock(),
                released=scheduler.released,
            )
        )

    async def explain(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{name}/explain``: of a model that is loaded."""
        return _json(await self.explained(request.match_info["name"]))

    async def explained(self, name: str) -> ExplainView:
        """The price of a loaded model beside what its engine says. Raises LlmError NOT_LOADED, AMBIGUOUS_MODEL."""
        daemon = self._daemon
        instance = _loaded(daemon, name)
        log, note = await _log_of(daemon.logs, instance)
        shares = daemon.scheduler.ledger.of(instance.run)
        cards = [each.where for each in shares if each.where != HOST] or [daemon.observe().card.uuid]
        learnt = await asyncio.to_thread(learnt_of, instance, daemon.lookup, cards[0])
        observation = daemon.observe()
        return explain_view(
            instance,
            daemon.scheduler.ledger,
            observation,
            log,
            learnt,
            log_note=note,
            limits=limits(instance.control_group, [state.card for state in observation.cards]),
            config_notes=running_notes(
                instance.name,
                instance.plan,
                instance.record.asked,
                daemon.scheduler.policy.models.get(instance.name),
            ),
        )

    async def metrics(self, _: web.Request) -> web.Response:
        """``GET /metrics``: the text format of Prometheus."""
        # The library is imported when somebody asks: a daemon that nobody scrapes has no use for it.
        metrics = await asyncio.to_thread(importlib.import_module, "lllm3090d.serving.metrics")
        requests = await asyncio.to_thread(importlib.import_module, "lllm3090d.gateway.metrics")
        daemon, scheduler = self._daemon, self._daemon.scheduler
        figures = metrics.Figures(
            gpus=self.gpus_now(),
            statistics=daemon.statistics,
            states=tuple(instance.state for instance in scheduler.instances),
            waiting=len(scheduler.pending),
        )
        service = self._gateway()
        more = () if service is None else requests.families(*service.figures_now())
        return web.Response(
            body=metrics.exposition(figures, more), headers={"Content-Type": metrics.CONTENT_TYPE}
        )


def _loaded(daemon: Daemon, name: str) -> Instance:
    try:
        return daemon.loaded(name)
    except LlmError as error:
        if error.code is not ErrorCode.NOT_LOADED:
            raise
        hint = f"What it would take: lllm3090ctl plan '{name}' --explain"
        raise LlmError(error.code, error.message, hint=hint, **dict(error.details)) from error


async def _log_of(logs: EngineLogs, instance: Instance) -> tuple[MemoryLog, str]:
    """What the engine wrote of its memory, and why that could not be read."""
    try:
        lines = await logs.tail(instance.unit, LINES_MAX)
    except LlmError as error:
        return MemoryLog(), error.message
    log = await asyncio.to_thread(read_memory_log, [line.message for line in lines])
    if not log.buffers and len(lines) == LINES_MAX:
        return log, "Its engine has written so much since its start that the lines of it lie too far back."
    return log, ""
