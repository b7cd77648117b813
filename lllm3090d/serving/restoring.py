"""Loading models again that went for nothing, have failed, or are wanted and do not run: the slow half of it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.comebacks import PASSING
from lllm3090d.serving.events import (
    Admitted,
    ComebackRefused,
    Event,
    Failed,
    Joined,
    LoadDone,
    Queued,
    Restore,
)
from lllm3090d.serving.history import History
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.wire import EventKind

log = logging.getLogger(__name__)

# Between tries to load again what was unloaded for nothing.
PAUSES_S = (0.0, 5.0, 15.0, 60.0, 300.0)


class Restoring:
    """Asks for models as a client would.

    Args:
        load: the daemon's.
        withdraw: gives up a load by its token, while it is being looked up.
        scheduler: read, never changed.
        history: told what came of it.
        submit: hands an event to the writer.
        spawn: runs a coroutine beside the writer.
    """

    def __init__(
        self,
        *,
        load: Callable[[str, LoadWish, str], Awaitable[tuple[str, AsyncGenerator[Any, None]]]],
        withdraw: Callable[[str], None],
        scheduler: Scheduler,
        history: History,
        submit: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._load = load
        self._withdraw = withdraw
        self._scheduler = scheduler
        self._history = history
        self._submit = submit
        self._spawn = spawn
        self._asked: dict[str, set[str]] = {}  # by model: tokens of loads that are under way
        self._later_ones: dict[str, Restore] = {}  # by model: those that wait for another try
        # Why the last try to load a model came to nothing, by model.
        self.problems: dict[str, LlmError] = {}
        # Called when a name has left `coming`.
        self.on_settled: Callable[[], None] = lambda: None

    @property
    def coming(self) -> frozenset[str]:
        """Models that are being asked for, or will be."""
        return frozenset((*self._asked, *self._later_ones))

    def restore(
        self, effect: Restore, on_wait: Callable[[], None] = lambda: None
    ) -> Coroutine[Any, Any, None]:
        """Load it where there is room without unloading others; what was refused for what passes is tried again.

        Args:
            effect: what is to be loaded.
            on_wait: called where it stands in line.

        Returns:
            What does so, and ends with the load; the model counts as coming from this call on.
        """
        token = secrets.token_hex(8)
        self._asked.setdefault(effect.name, set()).add(token)
        return self._restore(effect, token, on_wait)

    async def one_after_another(self, effects: Iterable[Restore], is_due: Callable[[str], bool]) -> None:
        """Load these in order, each when the one before is ready, has failed, or stands in line.

        Args:
            effects: what is to be loaded.
            is_due: whether that is still so when its turn comes, by model.
        """
        for effect in effects:
            if is_due(effect.name):
                await self._until_it_moves_on(effect)

    def forget(self, name: str | None = None) -> None:
        """A model is not loaded again, or none is: somebody wants it, or everything, gone."""
        for each in (*self._asked, *self._later_ones, *self.problems) if name is None else (name,):
            self._later_ones.pop(each, None)
            self.problems.pop(each, None)
            for token in self._asked.pop(each, ()):
                self._withdraw(token)

    async def _until_it_moves_on(self, effect: Restore) -> None:
        moves_on = asyncio.Event()
        task = self._spawn(self.restore(effect, moves_on.set))
        task.add_done_callback(lambda _: moves_on.set())
        await moves_on.wait()

    async def _restore(self, effect: Restore, token: str, on_wait: Callable[[], None]) -> None:
        name = effect.name
        log.info("loaded again: %s", name, extra={"model": name, "reason": effect.reason})
        try:
            await self._ask(effect, token, on_wait)
        except LlmError as error:
            if token in self._asked.get(name, ()):
                self._refused(effect, error)
        else:
            self.problems.pop(name, None)
        finally:
            self._forget_token(name, token)
            self.on_settled()

    def _forget_token(self, name: str, token: str) -> None:
        tokens = self._asked.get(name)
        if tokens is not None:
            tokens.discard(token)
            if not tokens:
                del self._asked[name]

    def _refused(self, effect: Restore, error: LlmError) -> None:
        name = effect.name
        log.warning("a model could not be loaded again", extra={"model": name, "reason": error.message})
        if error.code is ErrorCode.SHUTTING_DOWN:
            return  # the next life goes on with it
        if effect.attempt:
            self._submit(ComebackRefused(name, error))
            return
        self.problems[name] = error
        later = ""
        # While the card is given away there is nothing to wait for: it comes when somebody resumes.
        passes = error.code in PASSING - {ErrorCode.CARD_RELEASED}
        if passes and effect.tries + 1 < len(PAUSES_S):
            self._later_ones[name] = again = replace(effect, tries=effect.tries + 1)
            self._spawn(self._later(again))
            later = f"; tried again in {PAUSES_S[again.tries]:g} s"
        self._history.add(
            EventKind.RESTORE,
            model=name,
            message=f"not loaded again ({effect.reason}): {error.message}{later}",
            details={"problem": error.problem()},
        )

    async def _ask(self, effect: Restore, token: str, on_wait: Callable[[], None]) -> None:
        """Raises LlmError where nothing was started."""
        wish = LoadWish(
            effect.request,
            effect.arguments,
            card=effect.card,
            least_context_tokens=effect.least_context_tokens,
            pinned=effect.pinned,
            may_evict=False,
            attempt=effect.attempt,
        )
        _, answers = await self._load(effect.name, wish, token)
        started = False
        async for answer in answers:
            started = started or isinstance(answer, Admitted | Joined)
            if isinstance(answer, Queued):
                on_wait()
            if isinstance(answer, Failed) and not started:
                raise answer.error
            if isinstance(answer, LoadDone) and started and not effect.attempt:
                self._history.add(
                    EventKind.RESTORE,
                    model=effect.name,
                    run=answer.run,
                    message=f"loaded again ({effect.reason})",
                )

    async def _later(self, effect: Restore) -> None:
        """Its place may be taken by what is late to come back, or by a stranger."""
        await asyncio.sleep(PAUSES_S[effect.tries])
        if self._later_ones.get(effect.name) is not effect:
            return
        del self._later_ones[effect.name]
        if self._scheduler.instance(effect.name) is None:
            await self.restore(effect)
        else:
            self.on_settled()
