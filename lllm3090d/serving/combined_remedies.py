"""Making room and changing the launch together, where neither alone makes it fit. Pure.

The planner is asked what would fit in the room of those who could leave, and who could stay all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lllm3090d.errors import LlmError
from lllm3090d.serving.commands import Wish, asking_again
from lllm3090d.serving.freeings import EASE, Freeing, RemedyKind, Scene, gain_bytes
from lllm3090d.serving.launch_remedies import Changes, changed_launches
from lllm3090d.serving.remedies import Remedy, Room, fewest

MOST_OFFERED = 2  # such as one with another cache and one with a shorter context
SLOWER = frozenset({RemedyKind.OFFLOAD})  # it fits, but others would rather unload something


@dataclass(frozen=True, slots=True)
class Roomier:
    """A launch that was refused, asked for with more room on the card.

    Attributes:
        refusal: why it does not fit with so many bytes more; None where it does.
        serves: whether there is a plan with some fields of the request changed, and so many bytes more.
    """

    refusal: Callable[[int], LlmError | None]
    serves: Callable[[Changes, int], bool]


def combined_remedies(
    scene: Scene,
    freeings: Sequence[Freeing],
    roomier: Roomier,
    asked: Wish,
    alone: Collection[RemedyKind] = (),
) -> tuple[Remedy, ...]:
    """What fits once some have left: with the easiest of those who could, and of them as few as will do.

    Args:
        scene: the memory.
        freeings: who could give memory back.
        roomier: the launch.
        asked: what was asked for.
        alone: what suffices by itself: a launch changed in such a way is not offered again, and where that is more
            than a slower launch, nobody who is costly to a person is asked to leave for less.
    """
    easy_only = bool(frozenset(alone) - SLOWER)
    for ease in sorted({each.ease for each in freeings}):
        if easy_only and ease >= EASE[RemedyKind.COMBINED]:
            break
        pool = [each for each in freeings if each.ease <= ease]
        found = _with(scene, pool, roomier, asked, alone)
        if found:
            return found
    return ()


def _with(
    scene: Scene,
    pool: Sequence[Freeing],
    roomier: Roomier,
    asked: Wish,
    alone: Collection[RemedyKind],
) -> tuple[Remedy, ...]:
    """What fits once these have left."""
    gain = gain_bytes(scene.budget, pool)
    refused = roomier.refusal(gain) if gain else None
    if refused is None:
        return ()
    found: list[Remedy] = []
    for kind, text, changes in sorted(changed_launches(refused.details), key=lambda each: EASE[each[0]]):
        if len(found) == MOST_OFFERED:
            break
        if kind in alone or not roomier.serves(changes, gain):
            continue
        freed = fewest(pool, Room(scene.budget, functools.partial(roomier.serves, changes)))
        if freed:
            found.append(_remedy(scene, freed, text, asking_again(asked, changes)))
    return tuple(found)


def _remedy(scene: Scene, freed: Sequence[Freeing], text: str, command: str) -> Remedy:
    phrases = [each.phrase for each in freed]
    told = phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"
    commands = [*(each.command for each in freed), command]
    return Remedy(
        kind=RemedyKind.COMBINED,
        text=f"{told[0].upper()}{told[1:]}; then {text[0].lower()}{text[1:]}",
        command=" && ".join(filter(None, commands)),
        gain_bytes=gain_bytes(scene.budget, freed),
        verified=True,
    )
