"""Release check: after a unit has ended, have the memories shown back what its run held? Pure.

A process that is gone from a card's list has not given its memory back yet: the driver does that later, or never. So
two things count: nothing of the run is listed, and what the card counts as used has fallen by what the run held there.

Where the driver tells who holds how much, memory that did not come back is memory that nobody on the list holds. That
is compared with the moment of the stop, so programs that take or give memory meanwhile make no difference. Where it
does not tell, only the sum is there: a stranger who takes memory meanwhile hides that it came back, until he gives it
back too, and one who gives memory hides that it did not. In host memory what counts is that the processes are gone:
the kernel frees their pages with them.

Runs that end at the same time, or while an earlier one is missing something still, are looked at together: memory that
is missing is missing once. Which of them it is put down to is of no consequence; the sum is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from lllm3090d.planning.units import MIB
from lllm3090d.serving.admission import unlisted_bytes
from lllm3090d.serving.observation import HOST, CardState, Observation

# What a driver's own bookkeeping may move by; of small engines an eighth.
TOLERANCE_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class ReleaseCheck:
    """What is to come back of a run.

    Attributes:
        before: the memories when it was last seen to hold something. Of a look from later, when its processes were
            gone from the list already, what they left behind passes for somebody else's. None where nobody looked: then
            its memory is taken to be back once it is off the list.
        run: identity of the launch.
        measured: what it held of each memory: bytes by UUID of the card, or :data:`HOST`.
    """

    before: Observation | None
    run: str
    measured: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def missing(self, now: Observation, taken_since: Mapping[str, int] | None = None) -> Mapping[str, int]:
        """What has not come back yet, where no other run is missing something: see :func:`missing_of`."""
        return missing_of((self,), now, taken_since)[self.run]


def missing_of(
    checks: Iterable[ReleaseCheck], now: Observation, taken_since: Mapping[str, int] | None = None
) -> Mapping[str, Mapping[str, int]]:
    """What has not come back yet, bytes by run and memory; memories of which nothing is missing are left out.

    Args:
        checks: of all runs that are missing something or may, in the order in which they were stopped.
        now: the memories.
        taken_since: by UUID, what our own engines have taken since of cards that do not tell who holds how much.
    """
    pending = tuple(checks)
    found: dict[str, dict[str, int]] = {check.run: {} for check in pending}
    wheres = [where for check in pending for where in check.measured]
    wheres += [state.card.uuid for state in now.cards] + [HOST]
    for where in dict.fromkeys(wheres):
        for check, missing in zip(pending, _missing_at(where, pending, now, taken_since or {}), strict=True):
            if missing > 0:
                found[check.run][where] = missing
    return found


def _missing_at(
    where: str, checks: Sequence[ReleaseCheck], now: Observation, taken_since: Mapping[str, int]
) -> Sequence[int]:
    """What each is missing of one memory."""
    state = now.of(where)
    if where == HOST:
        in_use = now.host_in_use if state is None else state.in_use
        return [in_use.get(check.run, 0) for check in checks]
    if state is None or state.reading is None:
        # Nobody can tell, so nothing has come back.
        return [check.measured.get(where, 0) for check in checks]
    if state.attributed:
        return _by_list(where, checks, state)
    return _by_sum(where, checks, state.reading.used_bytes - taken_since.get(where, 0))


def _by_list(where: str, checks: Sequence[ReleaseCheck], state: CardState) -> Sequence[int]:
    """By what nobody on the list holds. Of a run that is on the list still, that is missing in any case."""
    nobodys = unlisted_bytes(state)
    grown = [
        max(0, nobodys - before) for before in (_unlisted_before(where, each, nobodys) for each in checks)
    ]
    # Since the moment from which most has gone missing.
    left = _beyond_noise(max(grown, default=0), where, checks)
    missing = []
    for check, since in reversed(tuple(zip(checks, grown, strict=True))):
        listed = state.resident.get(check.run, 0)
        unlisted = min(max(0, check.measured.get(where, 0) - listed), since, left)
        left -= unlisted
        missing.append(listed + unlisted)
    return missing[::-1]


def _unlisted_before(where: str, check: ReleaseCheck, otherwise: int) -> int:
    """What nobody held when a run was stopped; where the card did not tell then, nothing has grown."""
    state = check.before.of(where) if check.before else None
    if state is None or state.reading is None or not state.attributed:
        return otherwise
    return unlisted_bytes(state)


def _by_sum(where: str, checks: Sequence[ReleaseCheck], used_now: int) -> Sequence[int]:
    """By how far the sum has fallen since each was stopped: by less than it and those after it held."""
    left = to_fall = 0
    for check in reversed(checks):
        to_fall += check.measured.get(where, 0)
        before = _used_before(where, check)
        if before is not None:
            left = max(left, to_fall - (before - used_now))
    left = _beyond_noise(left, where, checks)
    missing = []
    for check in reversed(checks):
        part = min(check.measured.get(where, 0), left)
        left -= part
        missing.append(part)
    return missing[::-1]


def _used_before(where: str, check: ReleaseCheck) -> int | None:
    state = check.before.of(where) if check.before else None
    return None if state is None or state.reading is None else state.reading.used_bytes


def _beyond_noise(missing: int, where: str, checks: Sequence[ReleaseCheck]) -> int:
    """What is missing, or nothing where that is no more than a driver's bookkeeping."""
    held = sum(check.measured.get(where, 0) for check in checks)
    return 0 if missing <= min(TOLERANCE_BYTES, held // 8) else missing
