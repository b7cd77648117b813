"""The daemon as the gateway sees it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace

from lllm3090d.checkpoints.purpose import Purpose, purpose_of_kind
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.house import Served
from lllm3090d.gateway.purposes import launched
from lllm3090d.gateway.reasoning import Reasoning
from lllm3090d.gateway.upstream import Engine
from lllm3090d.serving.daemon import Answer, Daemon
from lllm3090d.serving.events import CancelDone
from lllm3090d.serving.instance import SERVING
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.refusals import not_loaded
from lllm3090d.settings import Settings


class DaemonHouse:
    """See :class:`lllm3090d.gateway.house.House`."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._reasoning = Reasoning()

    @property
    def settings(self) -> Settings:
        """The present ones."""
        return self._daemon.settings

    def serving_names(self) -> tuple[str, ...]:
        """Names of the models that serve."""
        return tuple(each.name for each in self._daemon.scheduler.instances if each.state in SERVING)

    async def canonical(self, name: str) -> str:
        """The name of a model on disk, or of one that is loaded though its file is gone."""
        try:
            return (await asyncio.to_thread(self._daemon.lookup.resolve, name)).name
        except LlmError as error:
            if error.code is ErrorCode.AMBIGUOUS_MODEL:
                raise
            try:
                return self._daemon.loaded(name).name
            except LlmError:
                raise error from None

    async def purpose(self, name: str) -> Purpose:
        """What a model serves; of one that is not loaded, what it would: the setting, else what it was made for."""
        instance = self._daemon.scheduler.instance(name)
        if (purpose := launched(instance)) is not None:
            return purpose
        own = self.settings.models.get(name)
        if own is not None and own.purpose is not None:
            return own.purpose
        try:
            return purpose_of_kind((await asyncio.to_thread(self._daemon.lookup.resolve, name)).kind)
        except LlmError:
            if instance is None:
                raise
            return instance.plan.launch.purpose  # its file is gone

    async def lease(self, name: str, lease: str) -> Served:
        """Keep a model that serves."""
        run = await self._daemon.lease(name, lease)
        instance = self._daemon.scheduler.by_run(run)
        if instance is None:  # it has ended in the same moment
            self.give_back(lease)
            raise not_loaded(name, self.serving_names())
        return Served(
            name=instance.name,
            run=run,
            engine=Engine(instance.name, instance.record.socket, instance.control_group or ""),
            slots=instance.plan.parallel,
            window_tokens=instance.plan.window_tokens,
            lease=lease,
            reasoning=self._reasoning.wanted(self.settings, instance.name, run, instance.main_pid),
        )

    def give_back(self, lease: str, keep_alive_s: float | None = None) -> None:
        """The request has ended."""
        self._daemon.give_back(lease, keep_alive_s)

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        """Have a model loaded; one that is to be started again, as it was: nobody has asked for another launch."""
        instance = self._daemon.scheduler.instance(name)
        if instance is not None and instance.comes_back and instance.record.asked is not None:
            wish = replace(
                wish,
                request=instance.record.asked,
                arguments=instance.words,
                card=instance.card,
                pinned=instance.pinned,
            )
        return await self._daemon.load(name, wish, token or secrets.token_hex(8))

    async def cancel(self, load_token: str) -> CancelDone:
        """Withdraw a load."""
        return await self._daemon.cancel(load_token)
