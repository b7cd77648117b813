"""What every memory could give without any of the runs, worked out once and then added up. Pure.

Every budget is made of sums over runs (:mod:`lllm3090d.serving.admission`), so what each of them frees is worked out
once for a decision that thinks away many sets of them, and what a set frees is a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.serving.admission import Rooms, holdings
from lllm3090d.serving.ledger import Ledger
from lllm3090d.serving.observation import Observation

# Bytes that each card can give to a launch, in the order of the observation, and at the end the host beside them;
# where nobody limits the host that is 0, and without meaning.
Point = tuple[int, ...]
# Of each memory what is left by promises and what is free now; they may be negative.
Sums = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoomTable:
    """What there is to give, and what more without each run.

    Attributes:
        cards: UUIDs of those that can be used, in the order of the observation.
        given: what they and the host can give as it is; None for a table without budgets.
        base: the same as sums.
        freed: what each run that is thought away adds to them; a run that is missing adds nothing.
    """

    cards: tuple[str, ...]
    given: Rooms
    base: Sums
    freed: Mapping[str, Sums]

    @property
    def now(self) -> Point:
        """With nobody thought away."""
        return point_of(self.base)

    def without(self, gone: Iterable[str]) -> Point:
        """With these thought away."""
        return point_of(reduce(add, (self.of(run) for run in gone), self.base))

    def of(self, run: str) -> Sums:
        """What a run adds."""
        return self.freed.get(run) or (0,) * len(self.base)


def add(left: Sums, right: Sums) -> Sums:
    """Memory by memory."""
    return tuple([one + other for one, other in zip(left, right, strict=True)])


def take(whole: Sums, part: Sums) -> Sums:
    """A whole without a part of it."""
    return tuple([left - right for left, right in zip(whole, part, strict=True)])


def point_of(sums: Sums) -> Point:
    """What may be granted: the smaller of both sides, never negative."""
    return tuple([max(0, min(sums[side], sums[side + 1])) for side in range(0, len(sums), 2)])


def room_table(
    observation: Observation, ledger: Ledger, reserves: ReservePolicy, gone: frozenset[str] = frozenset()
) -> RoomTable:
    """Work it out, some runs thought away from the first; raises as :func:`lllm3090d.serving.admission.rooms`."""
    held = holdings(observation, ledger)
    given = held.rooms(reserves, gone)
    memories = [held.freed_on_card(uuid) for uuid in given.cards]
    base = [side for each in given.cards.values() for side in (each.available_bytes, each.live_bytes)]
    memories.append(held.freed_on_host())
    base += [0, 0] if given.host is None else [given.host.available_bytes, given.host.live_bytes]
    nothing = (0, 0)
    freed = {
        run: tuple([side for memory in memories for side in memory.get(run, nothing)])
        for run in dict.fromkeys(run for memory in memories for run in memory)
        if run not in gone
    }
    return RoomTable(
        cards=tuple(given.cards),
        given=given,
        base=tuple(base),
        freed=freed,
    )
