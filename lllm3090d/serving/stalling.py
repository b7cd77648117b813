"""Stalled models: shown, and after a while restarted once. Pure.

What tells that one is stalled is in :mod:`lllm3090d.serving.hangs`. A stalled model serves still, as far as anybody
knows: it is no victim, and whoever asks for it is told that it is loaded. One that is restarted has failed, by a cause
of its own; whether it comes back is decided where that of every failed model is (:mod:`lllm3090d.serving.restarts`).
"""

from __future__ import annotations

import shlex

from lllm3090d.engines.crash_causes import KINDS, CrashCause
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.commands import CTL
from lllm3090d.serving.drains import Purpose
from lllm3090d.serving.hangs import Step, Verdict, next_step
from lllm3090d.serving.holding_back import HoldingBack
from lllm3090d.serving.instance import SERVING, InstanceState
from lllm3090d.serving.running import Instance

S = InstanceState


class Stalling(HoldingBack):
    """State of everything that runs, waits or failed, with what gets nowhere."""

    def _see_verdict(self, instance: Instance, verdict: Verdict | None) -> None:
        """Take what the last look has told of one that serves; None where it could not be judged."""
        if verdict is None or instance.state not in SERVING:
            return
        if not verdict.stalled:
            if instance.state is S.STALLED:
                instance.stall = None
                self._move(instance, S.BUSY if instance.busy else S.READY, "it gets on again")
                self._has_changed = True
            return
        instance.stall = verdict
        step = next_step(verdict, reported=instance.state is S.STALLED)
        if step is Step.REPORT:
            self._move(instance, S.STALLED, verdict.reason)
        elif step is Step.RESTART and self._may_restart(instance):
            # Where it is the second time it stays down then: that is known to those who decide on the start.
            self._restart(instance, verdict)

    @property
    def restarts_hung(self) -> bool:
        """Whether what is stalled for long is restarted; it would stay down where nothing is started again."""
        return self.policy.restart_hung and self.policy.restarts is not None

    def _may_restart(self, instance: Instance) -> bool:
        """Nobody said otherwise, and it would come back."""
        return self.restarts_hung and not self.asleep and instance.record.asked is not None

    def _restart(self, instance: Instance, verdict: Verdict) -> None:
        kind = KINDS[CrashCause.HUNG]
        error = LlmError(
            ErrorCode.ENGINE_FAILED,
            f"the engine {kind.title}: {verdict.reason}; it was stopped",
            hint=f"{kind.advice} See: {CTL} logs {shlex.quote(instance.name)}",
            unit=instance.unit,
            cause=str(CrashCause.HUNG),
            advice=kind.advice,
            stalled_s=round(verdict.idle_s, 3),
            patience_s=round(verdict.patience_s, 3),
        )
        instance.failure = error
        self._drain(instance, "stalled for too long", error, self.policy.drain_s, Purpose.RESTART)
