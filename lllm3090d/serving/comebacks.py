"""Models that ended by themselves and are wanted: when each is started again, and which stays down. Pure.

Wanted is what served once, or what was found when the daemon came back. A load that never came up was told to whoever
asked for it, and is theirs to repeat. What runs in a unit that nobody here has loaded is its starter's to start again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lllm3090d.engines.crash_causes import CrashCause
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.restarts import Again, End, Latch, RestartPolicy
from lllm3090d.serving.running import Instance

# What may be otherwise in a while; any other refusal stands until somebody changes something.
PASSING = frozenset(
    {
        ErrorCode.INSUFFICIENT_VRAM,
        ErrorCode.INSUFFICIENT_MEMORY,
        ErrorCode.QUEUE_TIMED_OUT,
        ErrorCode.CARD_UNREADABLE,
        ErrorCode.CARD_AT_RISK,
        ErrorCode.BUS_UNAVAILABLE,
        ErrorCode.CARD_RELEASED,
    }
)
# A card that is lost may be back at any moment, and to ask costs nothing.
CARD_PAUSE_S = 10.0


class Comebacks:
    """Remembers ends since the last reset, by model.

    Args:
        policy: how patient to be; None where nothing is started again.
        clock: monotonic, seconds.
    """

    def __init__(self, policy: Callable[[], RestartPolicy | None], clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._ends: dict[str, list[End]] = {}

    def ended(self, instance: Instance) -> Latch | None:
        """An instance has failed: note when it is started again, or say why it stays down.

        Returns:
            Why it stays down for good; None where it is started again, or nobody said that it should be.
        """
        policy, now = self._policy(), self._clock()
        wanted = instance.ready_since_s is not None or instance.attempt > 0 or _is_found(instance)
        if (
            policy is None
            or not (wanted and instance.is_known)
            or instance.failure is None
            or instance.record.asked is None
        ):
            return None
        # What hung has served until it got nowhere any more.
        hung_s = 0.0 if instance.stall is None else instance.stall.idle_s
        served = 0.0 if instance.ready_since_s is None else max(0.0, now - instance.ready_since_s - hung_s)
        end = End(now, cause_of(instance.failure), served, instance.run)
        history = self._ends.setdefault(instance.name, [])
        if history and history[-1].run == instance.run:
            end = history.pop()  # the daemon before this one has counted it
        step = policy.after(instance.name, history, end)
        history.append(end)
        if isinstance(step, Latch):
            return step
        self._note(instance, step)
        return None

    def refused(self, instance: Instance, error: LlmError) -> Latch | None:
        """The start of a failed instance was refused: try again later, or say why not."""
        policy = self._policy()
        if policy is None:
            return None
        if error.code not in PASSING:
            return Latch(f"it could not be started again: {error.message}", error.hint or "")
        delay_s = policy.cap_s
        if error.code is ErrorCode.CARD_RELEASED:
            delay_s = (
                0.0  # while the card is given away nothing is due; afterwards there is nothing to wait for
            )
        elif error.code in {ErrorCode.CARD_UNREADABLE, ErrorCode.CARD_AT_RISK}:
            delay_s = min(policy.cap_s, CARD_PAUSE_S)
        self._note(instance, Again(delay_s, instance.next_attempt))
        instance.start_refused = True
        return None

    def due(self, instances: Iterable[Instance]) -> tuple[Instance, ...]:
        """Those to be started again now; each is given once."""
        found = [
            each
            for each in (instances if self._policy() is not None else ())
            if each.state is InstanceState.FAILED
            and each.retry_at_s is not None
            and each.retry_at_s <= self._clock()
        ]
        for each in found:
            each.retry_at_s = None
        return tuple(found)

    def next_s(self, instances: Iterable[Instance]) -> float | None:
        """When the next one is due, on the clock; None where none is, or nothing is started again any more."""
        moments = [
            each.retry_at_s
            for each in (instances if self._policy() is not None else ())
            if each.state is InstanceState.FAILED and each.retry_at_s is not None
        ]
        return min(moments, default=None)

    def ends(self) -> dict[str, tuple[End, ...]]:
        """Ends since the last reset, oldest first, by model."""
        return {name: tuple(history) for name, history in self._ends.items() if history}

    def recall(self, name: str, ends: Iterable[End]) -> None:
        """What the daemon before this one has seen of a model, in this boot."""
        self._ends[name] = list(ends)

    def forget(self, name: str) -> None:
        """Somebody has taken it into their own hands: what was does not count any more."""
        self._ends.pop(name, None)

    def _note(self, instance: Instance, step: Again) -> None:
        instance.retry_at_s = self._clock() + step.delay_s
        instance.next_attempt = step.attempt


def _is_found(instance: Instance) -> bool:
    """Found when the daemon came back; one that others went for and that does not come up makes room for these."""
    return instance.adopted and not instance.evicted


def cause_of(failure: LlmError) -> CrashCause:
    """Why an engine ended, as it was found out."""
    told = failure.details.get("cause")
    return CrashCause(told) if isinstance(told, str) and told in set(CrashCause) else CrashCause.UNKNOWN
