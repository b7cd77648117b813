"""The daemon's scheduler, what starts models again, and the gateway's seats, in simulated time, with engines that end.

Everything that decides is real: ``Scheduler``, ``Restoring``, ``Seating`` and ``DaemonHouse``; see
:mod:`tests.fakes.idle_world`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, cast

from lllm3090d.engines.crash_causes import CrashCause
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.record import Record
from lllm3090d.gateway.routes import Duty
from lllm3090d.gateway.turns import Priority
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.answers import Answer
from lllm3090d.serving.events import (
    Effect,
    ReadPostMortem,
    ReleaseRequested,
    ResetRequested,
    Restore,
    ResumeRequested,
    StartUnit,
    UnitSeen,
    UnloadRequested,
)
from lllm3090d.serving.events import PostMortemRead as Read
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import ENDED, SERVING, InstanceState
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.restarts import RestartPolicy
from lllm3090d.serving.restoring import Restoring
from lllm3090d.serving.sleep_set import asked_for
from tests.fakes.idle_world import IdleWorld
from tests.fakes.scheduler_world import status


class RestartWorld(IdleWorld):
    """Models whose engines end, by a request or by themselves.

    Attributes:
        starts: of engines: when, and of which model.
        ends: when an engine has ended, by model.
        doomed: so many next engines end while they load.
        cause: why they end.

    Args:
        sizes_gib: of each model, by name.
        seed: of every delay.
        settings: of the gateway.
    """

    def __init__(self, sizes_gib: Mapping[str, float], seed: int = 1, **settings: Any) -> None:
        super().__init__(sizes_gib, seed, ttl_s=0.0)
        self.settings = self.settings.model_copy(update=settings)
        self.scheduler.policy = replace(
            self.scheduler.policy, restarts=RestartPolicy(), least_residency_s=0.0, least_idle_s=0.0
        )
        self.starts: list[tuple[float, str]] = []
        self.ends: list[tuple[float, str]] = []
        self.doomed = 0
        self.cause = CrashCause.ENGINE_FAULT
        self._dead: set[str] = set()
        self._requests = itertools.count(1)
        self.restoring = Restoring(
            load=self.load,
            withdraw=lambda _: None,
            scheduler=self.scheduler,
            history=cast(History, self),
            submit=self.submit,
            spawn=self.spawn,
        )

    def add(self, *_: object, **__: object) -> None:
        """What is told of a model that is loaded again."""

    def now_s(self) -> float:
        """The clock of everything here."""
        return asyncio.get_running_loop().time()

    def started(self, name: str) -> int:
        """How often an engine was started for a model."""
        return sum(each == name for _, each in self.starts)

    def state(self, name: str) -> InstanceState | None:
        """Of a model's launch."""
        instance = self.scheduler.instance(name)
        return None if instance is None else instance.state

    async def until(self, name: str, state: InstanceState) -> None:
        """Wait until a model is in a state."""
        while self.state(name) is not state:  # noqa: ASYNC110  # simulated: it costs nothing
            await asyncio.sleep(0.01)

    # --- clients --------------------------------------------------------------------------------------------------

    async def ask(self, name: str, *, poison: bool = False, work_s: float = 0.01) -> str:
        """A request through the gateway's seat; the run that has answered it.

        Args:
            name: of the model.
            poison: its engine ends by it.
            work_s: how long it takes.

        Raises:
            LlmError: it was not answered.
        """
        record = Record(f"ask-{next(self._requests)}", "/v1/chat/completions", 0.0)
        seat = self.seating.seat(name, record, duty=Duty.WORK, load=True, priority=Priority.NORMAL)
        async with seat as served:
            self.at_work[name] += 1
            try:
                if poison:
                    self.kill(name)
                else:
                    await asyncio.sleep(work_s)
            finally:
                self.at_work[name] -= 1
            if served.run not in self.alive:
                raise LlmError(ErrorCode.ENGINE_FAILED, "the answer broke off")
        return served.run

    def kill(self, name: str) -> None:
        """Its engine ends by itself, where one is there."""
        instance = self.scheduler.instance(name)
        if (
            instance is None
            or instance.state in ENDED | {InstanceState.RELEASING}
            or instance.run in self._dead
        ):
            return
        self._dead.add(instance.run)
        self.alive.discard(instance.run)
        self.ends.append((self.now_s(), name))
        ended = status(instance, active_state="failed", result="signal", main_pid=0)
        self.submit(UnitSeen(ended))

    async def person_loads(self, name: str, request: PlanRequest) -> None:
        """As by ``lllm3090ctl load``. Raises LlmError."""
        _, answers = await self.load(name, LoadWish(request))
        async for answer in answers:
            if isinstance(error := getattr(answer, "error", None), LlmError):
                raise error

    async def reset(self, name: str) -> None:
        """As by ``lllm3090ctl reset``."""
        await self._ask(ResetRequested(token := self._token(), name), token)

    async def unload(self, name: str) -> None:
        """As by ``lllm3090ctl unload``."""
        self.restoring.forget(name)
        await self._ask(UnloadRequested(token := self._token(), name), token)

    async def release(self) -> None:
        """As by ``lllm3090ctl release --until-resume``."""
        self.restoring.forget()
        await self._ask(ReleaseRequested(token := self._token(), until_resume=True), token)

    async def resume(self) -> None:
        """As by ``lllm3090ctl resume``."""
        await self._ask(ResumeRequested(token := self._token()), token)

    # --- the daemon ------------------------------------------------------------------------------------------------

    def wish_as_it_was(self, name: str) -> LoadWish | None:  # type: ignore[override]  # nothing comes back there
        """What has ended is wanted as it was."""
        instance = self.scheduler.instance(name)
        if instance is None or instance.unwanted or instance.state in SERVING:
            return None
        is_wanted = (
            instance.comes_back or instance.ended_by_itself or instance.state is InstanceState.LATCHED
        )
        return LoadWish(asked_for(instance), may_evict=False) if is_wanted else None

    async def load(
        self, name: str, wish: LoadWish, token: str | None = None
    ) -> tuple[str, AsyncGenerator[Answer, None]]:
        """A load, after a look-up that takes a moment."""
        token = token or self._token()
        until_s = None if wish.restart_within_s is None else self.now_s() + wish.restart_within_s
        await asyncio.sleep(self._delay(0.02))
        event = self.world.request(
            name,
            token,
            self.sizes_gib[name],
            None if wish.request == PlanRequest() else wish.request,
            lease=wish.lease,
            may_evict=wish.may_evict,
            attempt=wish.attempt,
            restart_until_s=until_s,
        )
        first = await self._ask(event, token, keep=True)
        return token, self._follow(token, first)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartUnit():
                instance = self.scheduler.by_run(effect.run)
                assert instance is not None
                self.starts.append((self.now_s(), instance.name))
            case ReadPostMortem():
                error = LlmError(ErrorCode.ENGINE_FAILED, "it ended", hint="See its log.", cause=self.cause)
                self._later(0.05, Read(effect.run, error))
            case Restore():
                self.spawn(self.restoring.restore(effect))
        super()._perform(effect)

    async def _come_up(self, run: str) -> None:
        if self.doomed:
            self.doomed -= 1
            instance = self.scheduler.by_run(run)
            assert instance is not None
            await asyncio.sleep(self._delay(0.05))
            self.kill(instance.name)
            return
        await super()._come_up(run)
