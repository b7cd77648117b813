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
from lllm3090d.serving.answers import Answer
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.events import CancelDone, LoadRequested
from lllm3090d.serving.instance import ENDED, SERVING, InstanceState
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.refusals import not_loaded
from lllm3090d.settings import Settings

# Within which we have learnt that a unit has ended; systemd tells at once, but a busy machine takes its time.
NOTICED_WITHIN_S, NOTICED_STEP_S = 2.0, 0.02


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

    def promised(self, name: str) -> Purpose | None:
        """What it serves; else what its next launch is asked for, by the first load that waits or to have it back."""
        if (purpose := launched(self._daemon.scheduler.instance(name))) is not None:
            return purpose
        wish = self._daemon.wish_as_it_was(name)
        requests = [each.request for each in self._ahead(name)] + (
            [wish.request] if wish is not None else []
        )
        if requests and requests[0].purpose is not None:
            return requests[0].purpose
        own = self.settings.models.get(name)
        return own.purpose if own is not None else None

    async def purpose(self, name: str) -> Purpose:
        """What a model serves; of one that is not loaded, what it would."""
        instance = self._daemon.scheduler.instance(name)
        if (purpose := self.promised(name)) is not None:
            return purpose
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
            purpose=instance.plan.launch.purpose,
            reasoning=self._reasoning.wanted(self.settings, instance.name, run, instance.main_pid),
        )

    def give_back(self, lease: str, keep_alive_s: float | None = None) -> None:
        """The request has ended."""
        self._daemon.give_back(lease, keep_alive_s)

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        """Have a model loaded; one that is wanted and does not run, as it was: nobody has asked for another launch."""
        known = self._daemon.wish_as_it_was(name)
        is_up = launched(self._daemon.scheduler.instance(name)) is not None
        # Behind a load that waits it is joined; it must not differ from that.
        if known is not None and not is_up and all(_is_same(each, known) for each in self._ahead(name)):
            wish = replace(
                wish,
                request=known.request,
                arguments=known.arguments,
                card=known.card,
                least_context_tokens=known.least_context_tokens,
                pinned=known.pinned,
            )
        return await self._daemon.load(name, wish, token or secrets.token_hex(8))

    def _ahead(self, name: str) -> tuple[LoadRequested, ...]:
        """Loads of a model that wait: for the end of its last launch, then for room."""
        scheduler = self._daemon.scheduler
        instance = scheduler.instance(name)
        waiting = tuple(each.event for each in scheduler.pending if each.name == name)
        # What waits for the start of one that has ended takes it as it comes.
        if instance is None or instance.state in ENDED:
            return waiting
        return (*instance.successors, *waiting)

    async def comes_back(self, name: str, run: str) -> bool:
        """Of a launch whose engine cannot be reached: it has ended, and the model is wanted still.

        A client may see the end of an engine before systemd has told us.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + NOTICED_WITHIN_S
        while (instance := self._daemon.scheduler.by_run(run)) is not None and instance.state in SERVING:
            if clock() > until_s:
                return False
            await asyncio.sleep(NOTICED_STEP_S)
        return self._daemon.wish_as_it_was(name) is not None

    def held_back(self, name: str, within_s: float) -> LlmError | None:
        """Why a load of a model is refused because it has ended by itself."""
        return self._daemon.scheduler.held_back(name, within_s)

    def has_ended(self, name: str) -> bool:
        """It has ended by itself, and is started again or stays down."""
        instance = self._daemon.scheduler.instance(name)
        if instance is None:
            return False
        if instance.state is InstanceState.RELEASING:  # nobody knows yet why
            return instance.ended_by_itself and self._daemon.wish_as_it_was(name) is not None
        return instance.comes_back or instance.state is InstanceState.LATCHED

    async def cancel(self, load_token: str) -> CancelDone:
        """Withdraw a load."""
        return await self._daemon.cancel(load_token)


def _is_same(event: LoadRequested, known: LoadWish) -> bool:
    """Whether a load asks for the very launch."""
    return (event.request, event.arguments, event.card) == (known.request, known.arguments, known.card)
