"""Whom to evict: the least recently used that make room, and of those none that could stay. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lllm3090d.serving.room_table import Point, RoomTable, add, point_of, take


@dataclass(frozen=True, slots=True)
class Victim:
    """A model that could go for another one.

    Attributes:
        run, name: which.
        last_used_s: on the scheduler's clock; of one that was never used, when it became ready.
        moved_bytes: what unloading it frees, and loading it again would have to read: the sum of its charges.
    """

    run: str
    name: str
    last_used_s: float
    moved_bytes: int


def all_victims(
    victims: Sequence[Victim], table: RoomTable, makes_room: Callable[[Point], bool]
) -> tuple[Victim, ...]:
    """All that could go, where that makes room; see :func:`fewest_victims`."""
    return tuple(victims) if victims and makes_room(table.without(each.run for each in victims)) else ()


def fewest_victims(
    victims: Sequence[Victim], table: RoomTable, makes_room: Callable[[Point], bool]
) -> tuple[Victim, ...]:
    """Whom to evict: the least recently used that make room, and of those none that could stay.

    Args:
        victims: all that could go.
        table: what there is, and what each of them frees.
        makes_room: whether a load would fit into so much; more never fits less.

    Returns:
        In order of their last use; empty where not even all of them make room.
    """
    ordered = sorted(victims, key=lambda each: (each.last_used_s, each.name))
    sums = list(accumulate((table.of(each.run) for each in ordered), add, initial=table.base))
    if not ordered or not makes_room(point_of(sums[-1])):
        return ()
    low, high = 1, len(ordered)
    while low < high:
        middle = (low + high) // 2
        if makes_room(point_of(sums[middle])):
            high = middle
        else:
            low = middle + 1
    chosen, freed = ordered[:low], sums[low]
    stays = set[str]()
    # The last one is needed: without it there was no room. Of the others the largest is spared first.
    for each in sorted(chosen[:-1], key=lambda victim: -victim.moved_bytes):
        rest = take(freed, table.of(each.run))
        if makes_room(point_of(rest)):
            freed = rest
            stays.add(each.run)
    return tuple(each for each in chosen if each.run not in stays)
