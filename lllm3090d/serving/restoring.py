"""Loading models again that went for nothing or have failed: the slow half of what the scheduler wants restored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from lllm3090d.errors import LlmError
from lllm3090d.serving.comebacks import PASSING
from lllm3090d.serving.events import Admitted, ComebackRefused, Event, Failed, Joined, Restore
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.scheduler import Scheduler

log = logging.getLogger(__name__)

# Between tries to load again what was unloaded for nothing.
PAUSES_S = (0.0, 5.0, 15.0, 60.0, 300.0)


class Restoring:
    """Asks for models as a client would.

    Args:
        load: the daemon's.
        scheduler: read, never changed.
        submit: hands an event to the writer.
        spawn: runs a coroutine beside the writer.
    """

    def __init__(
        self,
        load: Callable[[str, LoadWish], Awaitable[tuple[str, AsyncGenerator[Any, None]]]],
        scheduler: Scheduler,
        submit: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._load = load
        self._scheduler = scheduler
        self._submit = submit
        self._spawn = spawn
        self._later_ones: dict[str, Restore] = {}  # by model: those that wait for another try

    async def restore(self, effect: Restore) -> None:
        """Load it where there is room without unloading others; what was refused for what passes is tried again."""
        log.info("loaded again: %s", effect.name, extra={"model": effect.name, "reason": effect.reason})
        try:
            await self._ask(effect)
        except LlmError as error:
            log.warning(
                "a model could not be loaded again", extra={"model": effect.name, "reason": error.message}
            )
            if effect.attempt:
                self._submit(ComebackRefused(effect.name, error))
            elif error.code in PASSING and effect.tries + 1 < len(PAUSES_S):
                self._spawn(self._later(replace(effect, tries=effect.tries + 1)))

    def forget(self, name: str | None = None) -> None:
        """A model is not loaded again, or none is: somebody wants it, or everything, gone."""
        if name is None:
            self._later_ones.clear()
        else:
            self._later_ones.pop(name, None)

    async def _ask(self, effect: Restore) -> None:
        """Raises LlmError where nothing was started."""
        wish = LoadWish(
            effect.request,
            effect.arguments,
            card=effect.card,
            pinned=effect.pinned,
            may_evict=False,
            attempt=effect.attempt,
        )
        _, answers = await self._load(effect.name, wish)
        started = False
        async for answer in answers:
            started = started or isinstance(answer, Admitted | Joined)
            if isinstance(answer, Failed) and not started:
                raise answer.error

    async def _later(self, effect: Restore) -> None:
        """Its place may be taken by what is late to come back, or by a stranger."""
        self._later_ones[effect.name] = effect
        await asyncio.sleep(PAUSES_S[effect.tries])
        if self._later_ones.get(effect.name) is not effect:
            return
        del self._later_ones[effect.name]
        if self._scheduler.instance(effect.name) is None:
            await self.restore(effect)
