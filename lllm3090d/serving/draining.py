"""Draining: shuts an engine's door and waits until its requests have ended; the slow half of :mod:`drains`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from lllm3090d.serving.activity import ACTIVITY_TIMEOUT_S, EngineSocket
from lllm3090d.serving.drains import Drain, shut
from lllm3090d.serving.events import DrainEnded, DrainSeen, Event
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
# A request that came just before the door was shut is not counted until it has been read: idle is what is idle twice.
QUIET_LOOKS = 2
QUIET_PAUSE_S = 0.05


class Draining:
    """Drains.

    Args:
        scheduler: read, never changed.
        ask: how many requests an engine has, within so many seconds; None where it does not tell.
        submit: hands an event to the writer.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ask: Callable[[EngineSocket, float], Awaitable[int | None]],
        submit: Callable[[Event], None],
    ) -> None:
        self._scheduler = scheduler
        self._ask = ask
        self._submit = submit

    async def drain(self, run: str) -> None:
        """Until its requests have ended or their time is over; ends in DrainEnded, unless something else ends it."""
        door: Path | None = None
        marked: tuple[object, ...] = ()
        quiet, told = 0, False
        while (instance := self._drained(run)) is not None and instance.drain is not None:
            drain = instance.drain
            if door is None or marked != (drain.deadline_s, drain.purpose):
                door, marked = self._shut(instance, drain), (drain.deadline_s, drain.purpose)
            left_s = drain.deadline_s - self._scheduler.clock()
            if left_s <= 0:
                break
            engine = EngineSocket(run, door, instance.control_group or "")
            in_flight = await self._ask(engine, min(ACTIVITY_TIMEOUT_S, left_s))
            if in_flight is not None:
                in_flight = max(in_flight, len(instance.leases))
            if not told or in_flight != drain.in_flight:
                told = True
                self._submit(DrainSeen(run, in_flight))
            quiet = quiet + 1 if in_flight == 0 else 0
            if quiet >= QUIET_LOOKS:
                break
            left_s = max(0.0, drain.deadline_s - self._scheduler.clock())
            await asyncio.sleep(min(QUIET_PAUSE_S if quiet else LOOK_EVERY_S, left_s))
        if self._drained(run) is not None:
            self._submit(DrainEnded(run))

    def _drained(self, run: str) -> Instance | None:
        """The instance, for as long as it is drained."""
        instance = self._scheduler.by_run(run)
        is_drained = (
            instance is not None and instance.state is InstanceState.STOPPING and instance.drain is not None
        )
        return instance if is_drained else None

    def _shut(self, instance: Instance, drain: Drain) -> Path:
        """Where the engine listens from now on; at its usual place where it cannot be moved."""
        socket = instance.record.socket
        try:
            # A unit that somebody made by hand may name any path: only in our own directory anything is renamed.
            if socket.parent != self._scheduler.policy.engine_sockets_dir:
                raise PermissionError(f"{socket} is not in our directory")
            return shut(socket, drain)
        except OSError as error:
            log.warning(
                "new requests cannot be refused while a model is drained",
                extra={"model": instance.name, "run": instance.run, "reason": str(error)},
            )
            return socket
