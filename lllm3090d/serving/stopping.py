"""Stopping: at once, by force, or after the requests in flight have had a while to end. Pure.

A model that is drained is ``stopping`` already: it takes no new requests and no lease, and its memory counts as on its
way back. Whoever wants it gone sooner (a shorter drain, force, a release, a sleep) ends the drain; nobody makes it
longer.
"""

from __future__ import annotations

from dataclasses import replace

from lllm3090d.errors import LlmError
from lllm3090d.serving.drains import Drain, Purpose
from lllm3090d.serving.events import DrainEnded, DrainSeen, DrainUnit, StopUnit, TellDrain, UnloadRequested
from lllm3090d.serving.instance import SERVING, InstanceState
from lllm3090d.serving.lives import Lives
from lllm3090d.serving.running import Instance

S = InstanceState


class Stopping(Lives):
    """State of everything that runs, with what is on its way down."""

    def _drain(
        self,
        instance: Instance,
        reason: str,
        waiters_are_told: LlmError | None,
        limit_s: float,
        purpose: Purpose = Purpose.UNLOAD,
    ) -> None:
        """Stop one that serves once its requests have ended, or their time is over."""
        if limit_s <= 0 or instance.state not in SERVING:
            self._stop(instance, reason, waiters_are_told)
            return
        if waiters_are_told is not None:
            self._interrupt(instance, waiters_are_told)
        instance.drain = Drain(limit_s, self.clock() + limit_s, purpose)
        self._move(instance, S.STOPPING, reason)
        self._do(DrainUnit(instance.run))

    def _unload(self, instance: Instance, event: UnloadRequested, waiters_are_told: LlmError) -> None:
        """Of one that is not on its way down yet."""
        if event.force:
            self._stop(instance, "unload requested, by force", waiters_are_told, kill=True)
            return
        limit_s = event.drain_s
        if limit_s is None:
            # What gets nowhere is not waited for without being asked to.
            limit_s = 0.0 if instance.state is S.STALLED else self.policy.drain_s
        self._drain(instance, "unload requested", waiters_are_told, limit_s)

    def _hurry(self, instance: Instance, event: UnloadRequested) -> None:
        """Somebody wants gone what is on its way down."""
        if event.force and instance.state in {S.STOPPING, S.STUCK}:
            self._cut_short(instance)
            self._do(StopUnit(instance.run, instance.unit, kill=True))
        elif instance.state is S.STUCK:
            self._do(StopUnit(instance.run, instance.unit))  # nobody else would ask systemd again
        elif instance.drain is not None:
            drain = replace(instance.drain, purpose=Purpose.UNLOAD)
            if event.drain_s is not None:
                drain = replace(drain, deadline_s=min(drain.deadline_s, self.clock() + event.drain_s))
            instance.drain = drain
            if drain.deadline_s <= self.clock():
                self._stop_drained(instance)

    def _stop_drained(self, instance: Instance) -> None:
        """Its requests have had their time: stop it now; nothing where it is not drained."""
        if self._cut_short(instance):
            self._do(StopUnit(instance.run, instance.unit))

    def _cut_short(self, instance: Instance) -> bool:
        """End its drain; whether there was one."""
        drain = instance.drain
        if drain is None:
            return False
        instance.drain, instance.unfinished = None, drain.in_flight
        if drain.is_told:
            self._do(TellDrain(instance.name, instance.run, drain.in_flight, drain.limit_s, _ended(drain)))
        return True

    def _on_drain_seen(self, event: DrainSeen) -> None:
        instance = self.by_run(event.run)
        if instance is None or instance.drain is None:
            return
        drain = replace(instance.drain, in_flight=event.in_flight)
        if event.in_flight != 0 and not drain.is_told:
            left_s = max(0.0, drain.deadline_s - self.clock())
            text = f"waits for {_requests(event.in_flight)} to end, for {left_s:.0f} s at most"
            self._do(TellDrain(instance.name, instance.run, event.in_flight, drain.limit_s, text))
            drain = replace(drain, is_told=True)
        instance.drain = drain

    def _on_drain_ended(self, event: DrainEnded) -> None:
        instance = self.by_run(event.run)
        if instance is not None and instance.state is S.STOPPING:
            self._stop_drained(instance)


def _requests(number: int | None) -> str:
    if number is None:
        return "requests of an engine that does not tell how many"
    return "1 request" if number == 1 else f"{number} requests"


def _ended(drain: Drain) -> str:
    if drain.in_flight == 0:
        return "all requests have ended"
    return f"{_requests(drain.in_flight)} had not ended and may be cut off"
