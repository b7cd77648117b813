"""From a model's name to an engine that may be asked: loaded if need be, kept, and the request's turn.

In this order, so that a model is not evicted while requests for it stand in its line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.house import House, Served
from lllm3090d.gateway.record import Record
from lllm3090d.gateway.routes import Duty
from lllm3090d.gateway.starvation import Claim, StandBack
from lllm3090d.gateway.turns import Priority, Turns
from lllm3090d.serving.answers import Answer
from lllm3090d.serving.events import Failed, LoadDone, Queued
from lllm3090d.serving.held_back import CODES
from lllm3090d.serving.plan_requests import LoadWish

log = logging.getLogger(__name__)

# Whoever was told to come again has done so by then; later the reason may be none any more.
TOLD_WITHIN_S = 60.0
# What a load is told whose engine has ended before it could be used.
ENDED_MEANWHILE = frozenset({ErrorCode.ENGINE_FAILED, ErrorCode.NOT_LOADED})


class Seating:
    """The lines of all models, and the way to each.

    Args:
        house: the daemon.
        clock: seconds, monotonic.
    """

    def __init__(self, house: House, clock: Callable[[], float]) -> None:
        self._house = house
        self._clock = clock
        self._turns: dict[str, Turns] = {}
        self.stand_back = StandBack()
        # Withdrawals of loads whose client has left; kept so that they are not collected while they run.
        self._withdrawals: set[asyncio.Task[None]] = set()
        # Loads for clients that were told to come again, and why they failed.
        self._required: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, tuple[float, LlmError]] = {}  # with when

    def lines(self) -> dict[str, Turns]:
        """The line of each model that was asked for."""
        return dict(self._turns)

    def has_failed(self, name: str) -> bool:
        """A load for a client that was told to come again has failed, and nobody was told yet."""
        return name in self._failed and self._clock() - self._failed[name][0] < TOLD_WITHIN_S

    @asynccontextmanager
    async def seat(
        self, name: str, record: Record, *, duty: Duty, load: bool, priority: Priority
    ) -> AsyncIterator[Served]:
        """A model that may be asked, for as long as the context lasts.

        Args:
            name: of a model on disk.
            record: told how long what took.
            duty: whether the request takes a slot.
            load: the model is loaded when it is not.
            priority: in its line.

        Raises:
            LlmError: NOT_LOADED where it is not to be loaded; whatever a load may end in; TOO_MANY_REQUESTS. Of what
                has ended by itself MODEL_NOT_READY with the time of its start, or MODEL_LATCHED.
        """
        if duty is Duty.WORK and name in self._house.serving_names():
            await self.stand_back.enter(name)
        try:
            served = await self._served(name, record, load=load)
        except BaseException:
            # A client that leaves while the daemon answers may have the lease already; an unknown one is no fault.
            self._house.give_back(record.request_id)
            raise
        try:
            if duty is Duty.ASK:
                yield served
                return
            turns = self._turns.setdefault(served.name, Turns(served.name, served.slots))
            if turns.slots != served.slots:
                turns.resize(served.slots)
            asked_s = self._clock()
            async with turns.turn(priority, self._house.settings.gateway_queue):
                record.line_s = self._clock() - asked_s
                yield served
        finally:
            self._house.give_back(served.lease, record.keep_alive_s)

    def require(self, name: str) -> None:
        """Have a model loaded for whoever comes again.

        Raises:
            LlmError: MODEL_NOT_READY where it does not serve yet; MODEL_LATCHED; why an earlier attempt failed.
        """
        if name in self._house.serving_names():
            return
        if (held_back := self._house.held_back(name, 0.0)) is not None:
            raise held_back
        is_fresh = self.has_failed(name)
        failed = self._failed.pop(name, None)
        if failed is not None and is_fresh:
            raise failed[1]
        if name not in self._required:
            task = asyncio.create_task(self._load_for_later(name))
            self._required[name] = task
            task.add_done_callback(lambda _: self._required.pop(name, None))
        raise LlmError(
            ErrorCode.MODEL_NOT_READY,
            f"{name} is not loaded yet; it is on its way.",
            hint="Come again after Retry-After. See: lllm3090ctl ps",
            model=name,
        )

    async def _load_for_later(self, name: str) -> None:
        try:
            _, answers = await self._house.load(name, LoadWish(restart_within_s=0.0))
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if isinstance(answer, Failed):
                        raise answer.error
        except LlmError as error:
            # Of one that is started again, or stays down, the present state is told.
            if error.code not in CODES and not self._is_restarted(name, error):
                self._failed[name] = self._clock(), error

    def _is_restarted(self, name: str, error: LlmError) -> bool:
        """A load has failed because the engine ended, and that is not the last word."""
        return error.code in ENDED_MEANWHILE and self._house.has_ended(name)

    async def _served(self, name: str, record: Record, *, load: bool) -> Served:
        lease = record.request_id
        try:
            return await self._house.lease(name, lease)
        except LlmError as error:
            if error.code is not ErrorCode.NOT_LOADED or not load:
                raise
        wait_s = self._house.settings.gateway_wait_s
        if (held_back := self._house.held_back(name, wait_s)) is not None:
            raise held_back
        asked_s = self._clock()
        try:
            with self.stand_back.waiting(name, lease, self._house.settings.gateway_starvation_s) as claim:
                async with asyncio.timeout(wait_s):
                    return await self._loaded(name, lease, claim, asked_s + wait_s)
        except TimeoutError as error:
            raise self._house.held_back(name, 0.0) or LlmError(
                ErrorCode.MODEL_NOT_READY,
                f"{name} was not ready within {wait_s:g} s.",
                hint="Try again later, or raise gateway_wait_s. See: lllm3090ctl ps",
                model=name,
            ) from error
        finally:
            record.load_s = self._clock() - asked_s

    async def _loaded(self, name: str, lease: str, claim: Claim, until_s: float) -> Served:
        """A model that serves now; where its engine ends meanwhile, after its next start."""
        while True:
            try:
                await self._load(name, lease, claim, until_s - self._clock())
                return await self._house.lease(name, lease)
            except LlmError as error:
                if not self._is_restarted(name, error):
                    raise

    async def _load(self, name: str, token: str, claim: Claim, within_s: float) -> None:
        """Have it loaded; the load holds the lease. A client that leaves withdraws its part in it."""
        wish = LoadWish(lease=True, restart_within_s=max(0.0, within_s))
        asked = asyncio.create_task(self._house.load(name, wish, token))
        try:
            _, answers = await asyncio.shield(asked)
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if isinstance(answer, Failed):
                        raise answer.error
                    if isinstance(answer, LoadDone):
                        return
                    if isinstance(answer, Queued):
                        claim.end() if answer.is_restart else claim.begin()
        except asyncio.CancelledError:
            task = asyncio.create_task(self._withdraw(asked, token))
            self._withdrawals.add(task)
            task.add_done_callback(self._withdrawals.discard)
            raise

    async def _withdraw(
        self, asked: asyncio.Task[tuple[str, AsyncGenerator[Answer, None]]], token: str
    ) -> None:
        try:
            await self._house.cancel(token)
        except LlmError as error:  # it has come to its end meanwhile
            log.debug("nothing to withdraw", extra={"token": token, "reason": error.message})
        try:
            _, answers = await asked
            await answers.aclose()
        except LlmError as error:
            log.debug("a load was withdrawn", extra={"token": token, "reason": error.message})
        self._house.give_back(token)
