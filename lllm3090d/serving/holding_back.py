"""Loads by programs of what has ended by itself: kept until its start, or refused. Pure; see ``held_back``."""

from __future__ import annotations

from dataclasses import replace

from lllm3090d.errors import LlmError
from lllm3090d.serving import held_back
from lllm3090d.serving.events import Failed, LoadRequested, Queued
from lllm3090d.serving.running import Instance
from lllm3090d.serving.standing import Standing


class HoldingBack(Standing):
    """State of everything that runs, waits or failed."""

    def held_back(self, name: str, within_s: float) -> LlmError | None:
        """Why a load of a model by a program would be refused now, without a look at the cards; None where it is not.

        Args:
            name: of the model.
            within_s: a start that is due so soon is waited for.
        """
        instance = self._instances.get(name)
        if instance is None or not self._is_held_back(instance):
            return None
        return held_back.refusal(instance, self.clock(), self.clock() + within_s)

    def _is_held_back(self, instance: Instance) -> bool:
        """Unless a person's load is in the line, which others follow."""
        is_overruled = any(
            each.name == instance.name and each.event.restart_until_s is None and not each.event.attempt
            for each in self._waiting
        )
        restarts = self.policy.restarts is not None
        return held_back.is_held_back(instance, restarts=restarts) and not is_overruled

    def _hold_back(self, instance: Instance, event: LoadRequested) -> bool:
        """Have a load by a program wait for the start of what has ended, or refuse it; whether it is one."""
        if event.restart_until_s is None or event.attempt or not self._is_held_back(instance):
            return False
        refused = held_back.refusal(instance, self.clock(), event.restart_until_s)
        if refused is not None:
            self._do(Failed(event.token, refused))
            return True
        if instance.start_refused and instance.retry_at_s is not None:
            instance.retry_at_s = None
            self._start_again(instance, "it is asked for")
        for each in self._waiting:
            if each.name == instance.name and each.event.attempt and not each.event.may_evict:
                each.event = replace(each.event, may_evict=True)
                self._has_changed = True
        instance.successors.append(event)
        why = held_back.what_for(instance, self.clock())
        self._do(Queued(event.token, event.checkpoint.name, why, is_restart=True))
        return True
