"""What would make room for a launch that does not fit, and for whom it does not fit. Pure.

Nothing is offered on a guess: the planner is asked whether the launch would fit with the room that would come of it.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.reserves import Budget
from lllm3090d.serving.freeings import EASE, Freeing, Holder, RemedyKind, Scene, gain_bytes

__all__ = ["Cause", "Holder", "Remedy", "RemedyKind", "Room", "cause_of", "freeing_remedies"]

MOST_OF_A_KIND = 3  # ways that come to the same are no help in numbers
MOST_TOGETHER = 8  # of so many the smallest set is searched; of more, what can be left out is left out
_COSTLY = EASE[RemedyKind.COMBINED]  # only offered where nothing easier makes room


class Cause(enum.StrEnum):
    """Why a launch does not fit; clients must treat an unknown one as ``card``."""

    CARD = "card"  # too big for it, whoever leaves
    STRANGERS = "strangers"  # too big now: other programs are in the way
    OURS = "ours"  # too big now: our models are in the way
    BOTH = "both"  # neither leaving alone would do
    DESKTOP = "desktop"  # it would fit if there were no desktop
    HOST = "host"  # host memory beside the card is what lacks


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to make it fit.

    Attributes:
        kind: what is changed.
        text: the change in a sentence, without its full stop.
        command: what carries it out; empty where a person has to.
        gain_bytes: room that it makes; 0 where the launch is changed instead.
        verified: the planner was asked and it fits then; False for advice on another card.
        options: where the launch is changed, what stands beside the model in the body of a load that asks for that.
    """

    kind: RemedyKind
    text: str
    command: str
    gain_bytes: int
    verified: bool
    options: Mapping[str, Any] | None = None


class Room:
    """Whether it would fit with so much more room, asked of the planner no more often than need be.

    Args:
        budget: what can be given now.
        fits: whether the launch fits with so many bytes more; more never fits less.
    """

    def __init__(self, budget: Budget, fits: Callable[[int], bool]) -> None:
        self._budget = budget
        self._fits = fits
        self._asked: dict[int, bool] = {}
        self._too_little = 0
        self._enough: int | None = None

    def is_made(self, freed: Iterable[Freeing]) -> bool:
        """It would fit, had they given their memory back; by what was asked before where that says it."""
        gain = gain_bytes(self._budget, freed)
        if gain <= self._too_little:
            return False
        if self._enough is not None and gain >= self._enough:
            return True
        return self._ask(gain)

    def is_proven(self, freed: Iterable[Freeing]) -> bool:
        """The same, by the planner's answer to exactly that."""
        gain = gain_bytes(self._budget, freed)
        return gain > 0 and self._ask(gain)

    def _ask(self, gain: int) -> bool:
        if gain not in self._asked:
            self._asked[gain] = self._fits(gain)
            if self._asked[gain]:
                self._enough = gain if self._enough is None else min(self._enough, gain)
            else:
                self._too_little = max(self._too_little, gain)
        return self._asked[gain]


def cause_of(scene: Scene, freeings: Sequence[Freeing], room: Room) -> Cause:
    """For whom it does not fit: whose leaving would be enough; of two that would be, who holds more."""
    ours = [each for each in freeings if each.is_ours]
    strangers = [each for each in freeings if not each.is_ours and not each.is_desktop]
    if scene.kind is CardKind.CPU:  # nobody is listed there, and nobody is asked to leave
        strangers = [Freeing(RemedyKind.OTHERS, "", foreign_bytes=scene.budget.foreign_bytes)]
    if not room.is_made([*freeings, *strangers]):
        return Cause.CARD
    enough = {
        cause: gain_bytes(scene.budget, who)
        for cause, who in ((Cause.STRANGERS, strangers), (Cause.OURS, ours))
        if room.is_made(who)
    }
    if enough:
        return max(enough, key=lambda cause: enough[cause])
    return Cause.BOTH if room.is_made([*ours, *strangers]) else Cause.DESKTOP


def freeing_remedies(scene: Scene, freeings: Sequence[Freeing], room: Room) -> tuple[Remedy, ...]:
    """Who could make room, each proven: alone where one suffices, else the easiest few together.

    What is costly for a person (a model that works, another user's program, the desktop) is named only where nothing
    easier suffices.
    """
    found: list[Remedy] = []
    for ease in sorted({each.ease for each in freeings}):
        if ease >= _COSTLY and any(EASE[each.kind] < _COSTLY for each in found):
            break
        alike = [each for each in freeings if each.ease == ease]
        found += [_remedy(scene.budget, (each,)) for each in _sufficient(scene.budget, alike, room)]
    if found:
        return tuple(found)
    together = fewest(freeings, room)
    return (_remedy(scene.budget, together),) if together else ()


def _sufficient(budget: Budget, alike: Sequence[Freeing], room: Room) -> list[Freeing]:
    """Those that make room alone, the smallest first, no more than a few."""
    ordered = sorted(alike, key=lambda each: gain_bytes(budget, [each]))
    first = bisect_left(ordered, True, key=lambda each: room.is_made([each]))
    # What was found between what suffices and what does not is asked exactly before it is offered.
    return [each for each in ordered[first : first + MOST_OF_A_KIND] if room.is_proven([each])]


def fewest(freeings: Sequence[Freeing], room: Room) -> tuple[Freeing, ...]:
    """The easiest few that make room together: no costlier kind than must be, none that could stay. May be ()."""
    pool: tuple[Freeing, ...] = ()
    for ease in sorted({each.ease for each in freeings}):
        pool = tuple(each for each in freeings if each.ease <= ease)
        if room.is_made(pool):
            break
    else:
        return ()
    chosen = _smallest(pool, room) if len(pool) <= MOST_TOGETHER else _shortened(pool, room)
    for each in _dispensable_first(chosen):
        rest = tuple(other for other in chosen if other is not each)
        if rest and room.is_made(rest):
            chosen = rest
    return chosen if room.is_proven(chosen) else ()


def _dispensable_first(some: Iterable[Freeing]) -> list[Freeing]:
    """The costliest first, of those the smallest."""
    return sorted(some, key=lambda one: (-one.ease, one.charged_bytes + one.foreign_bytes))


def _shortened(pool: tuple[Freeing, ...], room: Room) -> tuple[Freeing, ...]:
    """Without as many of the dispensable ones as can go at once, in the pool's order."""
    ordered = _dispensable_first(pool)
    low, high = 0, len(ordered) - 1  # what is left makes room without so many, but not without all
    while low < high:
        middle = (low + high + 1) // 2
        if room.is_made(ordered[middle:]):
            low = middle
        else:
            high = middle - 1
    kept = ordered[low:]
    return tuple(each for each in pool if each in kept)


def _smallest(pool: tuple[Freeing, ...], room: Room) -> tuple[Freeing, ...]:
    """Of the sets that make room one with the fewest members, of those the easiest, of those the smallest."""
    for number in range(2, len(pool)):
        fitting = [each for each in combinations(pool, number) if room.is_made(each)]
        if fitting:
            return min(
                fitting,
                key=lambda some: (
                    sum(each.ease for each in some),
                    sum(each.charged_bytes + each.foreign_bytes for each in some),
                ),
            )
    return pool


def _remedy(budget: Budget, freed: tuple[Freeing, ...]) -> Remedy:
    kinds = {each.kind for each in freed}
    phrases = [each.phrase for each in freed]
    text = phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"
    return Remedy(
        kind=freed[0].kind if len(kinds) == 1 else RemedyKind.COMBINED,
        text=text[0].upper() + text[1:],
        command=" && ".join(each.command for each in freed if each.command),
        gain_bytes=gain_bytes(budget, freed),
        verified=True,
    )
