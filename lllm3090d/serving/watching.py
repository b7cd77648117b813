"""Looking at cards and engines while it matters: while models are loaded, and while somebody waits for room.

One timer is armed for the next moment that needs attention; a daemon without models has none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from lllm3090d.errors import LlmError
from lllm3090d.planning.units import MIB
from lllm3090d.serving.admission import foreign_bytes
from lllm3090d.serving.events import Activity, Event, Looked, Observation, YieldWanted
from lllm3090d.serving.idle import expired
from lllm3090d.serving.instance import ON_THE_WAY_UP, SERVING
from lllm3090d.serving.observation import CardState
from lllm3090d.serving.pressure import ModelOnCard, Over, PressureReading, PressureWatch, Unload, Warn
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.stalls import StallWatch
from lllm3090d.settings import Settings

log = logging.getLogger(__name__)

# Idle time is shown in minutes and strangers grow in seconds: often enough for both, and hardly any work.
LOOK_EVERY_S = 5.0
# Nobody says when a request ends, and what is shown as busy should not be idle for long.
LOOK_AT_BUSY_EVERY_S = 1.0


class Watching:
    """Feeds the scheduler with fresh looks, and the watch on strangers with readings.

    Args:
        scheduler: read, never changed.
        observe: reads the cards.
        ask: asks engines what they are doing, by run.
        submit: hands an event to the writer.
        tell: told what a person should know of strangers: an episode's beginning and end.
        settings: the present settings.
        spawn: runs a coroutine beside the writer.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        observe: Callable[[], Observation],
        ask: Callable[[Sequence[Instance]], Awaitable[Mapping[str, Activity]]],
        submit: Callable[[Event], None],
        tell: Callable[[Warn | Over | Unload], None],
        settings: Callable[[], Settings],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._scheduler = scheduler
        self._observe = observe
        self._ask = ask
        self._submit = submit
        self._tell = tell
        self._settings = settings
        self._spawn = spawn
        self._pressure = PressureWatch()
        self._stalls = StallWatch()
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        self._looked_s = float("-inf")

    def arm(self) -> None:
        """Set the timer for the next moment that needs attention; to be called after each change."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._due_s()
        if due is not None and not self._looking:
            delay = max(0.0, due - self._scheduler.clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._begin)

    def stop(self) -> None:
        """No more looks."""
        self._looking = True  # for good
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due_s(self) -> float | None:
        moments = []
        waiting = self._scheduler.next_attention_s()
        if waiting is not None:
            moments.append(waiting)
        serving = [each for each in self._scheduler.instances if each.state in SERVING]
        if serving:
            interval = LOOK_AT_BUSY_EVERY_S if any(each.busy for each in serving) else LOOK_EVERY_S
            moments.append(self._looked_s + interval)
        return min(moments, default=None)

    def _begin(self) -> None:
        self._timer = None
        self._looking = True
        self._spawn(self._look())

    async def _look(self) -> None:
        try:
            serving = [each for each in self._scheduler.instances if each.state in SERVING]
            activity = await self._ask(serving) if serving else {}
            observation = self._observe()
            verdicts = self._stalls.look(
                self._scheduler.clock(),
                serving,
                activity,
                observation,
                least_s=self._settings().hang_patience_s,
            )
            self._watch_strangers(observation)
        except LlmError as error:
            log.warning("the cards cannot be looked at", extra={"reason": error.message})
            activity, verdicts = {}, {}
        finally:
            self._looking = False
            self._looked_s = self._scheduler.clock()
        self._submit(Looked(activity, verdicts))
        for idle in self._idle():
            self._submit(idle)

    def _idle(self) -> tuple[YieldWanted, ...]:
        settings, scheduler = self._settings(), self._scheduler
        return expired(scheduler.instances, scheduler.clock(), settings.idle_ttl_s, settings.idle_ttl_of)

    def _watch_strangers(self, observation: Observation) -> None:
        settings = self._settings()
        for state in observation.cards:
            if state.reading is None or observation.on_host:
                continue
            decision = self._pressure.look(
                self._reading_of(state, observation.desktop_active, settings),
                settings.pressure_policy,
                settings.pressure_grace_s,
            )
            if isinstance(decision, Warn | Over | Unload):
                self._tell(decision)
            if isinstance(decision, Unload):
                self._submit(YieldWanted(decision.runs, decision.text))

    def _reading_of(
        self, state: CardState, desktop_active: bool | None, settings: Settings
    ) -> PressureReading:
        reading, scheduler = state.read(), self._scheduler
        foreign = foreign_bytes(state, scheduler.ledger)
        reserve = 0 if desktop_active is False else settings.desktop_reserve_mib * MIB
        models = tuple(
            ModelOnCard(
                run=each.run,
                name=each.name,
                charged_bytes=held.charged_bytes,
                in_use_bytes=state.in_use.get(each.run, 0),
                idle=each.state in SERVING and each.busy is False and not each.leases,
                pinned=each.pinned,
                starting=each.state in ON_THE_WAY_UP,
            )
            for each in scheduler.instances
            if (held := scheduler.ledger.get(each.run, state.card.uuid)) is not None
            and each.state in SERVING | ON_THE_WAY_UP
        )
        return PressureReading(
            now_s=scheduler.clock(),
            card=state.card.uuid,
            foreign_bytes=foreign if state.attributed else None,
            free_bytes=reading.free_bytes,
            desktop_reserve_bytes=reserve,
            models=models,
        )
