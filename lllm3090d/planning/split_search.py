"""Shares of a launch over several cards that leave the most room on the fullest one. Pure.

Each card is checked on its own, in bytes; nothing is pooled. A card never takes less with more layers, so of two cards
one rises and the other falls as the cut between them moves, and the best cut is where they cross; with more cards the
same holds for each cut and the best of what is behind it. So no other shares leave more room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lllm3090d.planning.devices import DeviceRoom, main_device, pooled_free_bytes
from lllm3090d.planning.request import Room
from lllm3090d.planning.split import MAX_DEVICES, DeviceSplit, Division


def card_sets(cards: Sequence[DeviceRoom]) -> tuple[tuple[DeviceRoom, ...], ...]:
    """The cards to try: the one with most room, the two with most, and so on, each set in the order of ``--device``.

    Cards that are too small take no part, unless there are no others. The main card, the one with most room, is named
    last, and the others as they were.
    """
    allowed = [card for card in cards if card.takes_part] or list(cards)
    ranked = sorted(range(len(allowed)), key=lambda index: (-allowed[index].free_bytes, index))
    sets = []
    for count in range(1, min(len(ranked), MAX_DEVICES) + 1):
        chosen = [allowed[index] for index in sorted(ranked[:count])]
        main = chosen.pop(main_device([card.free_bytes for card in chosen]))
        sets.append((*chosen, main))
    return tuple(sets)


def card_rooms(room: Room) -> tuple[Room, ...]:
    """The same for each of :func:`card_sets`, the fewest cards first; ``card`` is what they can give together."""
    return tuple(
        replace(room, card=pooled_free_bytes(cards), cards=cards) for cards in card_sets(room.cards)
    )


def best_split(division: Division, cards: Sequence[DeviceRoom]) -> DeviceSplit:
    """The launch on these cards, in their order, the main one last; those that would get no layer are left out."""
    shares = best_shares(division, [card.free_bytes for card in cards])
    used = [(card.name, share) for card, share in zip(cards[:-1], shares[:-1], strict=True) if share]
    used.append((cards[-1].name, shares[-1]))
    return division.split([name for name, _ in used], [share for _, share in used])


def best_excess_bytes(division: Division, rooms_bytes: Sequence[int]) -> int:
    """By how much the launch is too large for the fullest card with the best shares; 0 or less where it fits."""
    return _Cuts(division, tuple(rooms_bytes)).best(0, 0)[0]


def best_shares(division: Division, rooms_bytes: Sequence[int]) -> tuple[int, ...]:
    """Layers for each card so that the fullest has the most room left, or is over by the least.

    Args:
        division: the launch.
        rooms_bytes: what each card can give, in the order of ``--device``.

    Raises:
        ValueError: there is no card.
    """
    if not rooms_bytes:
        raise ValueError("without a card there is nothing to share out")
    cuts, begin, shares = _Cuts(division, tuple(rooms_bytes)), 0, []
    for card in range(len(rooms_bytes)):
        end = cuts.best(card, begin)[1]
        shares.append(end - begin)
        begin = end
    return tuple(shares)


@dataclass(frozen=True)
class TwoCards:
    """Whether one launch fits on two cards, asked for many rooms: what each card takes is worked out once.

    Attributes:
        division: the launch.
        beside_bytes: what every card is charged beyond that.
    """

    division: Division
    beside_bytes: int = 0
    _first: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    _last: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def fits(self, first_bytes: int, last_bytes: int) -> bool:
        """It fits, the main card being the last one; as :func:`best_excess_bytes` finds it."""
        return self._is_cut(first_bytes, last_bytes) or (
            self._first_takes(0) <= first_bytes and self._last_takes(0) <= last_bytes
        )

    def just_too_little(self, first_bytes: int, last_bytes: int) -> tuple[int, int]:
        """More than so much, where one byte more of either card would do, for what does not fit into less."""
        cut, high = self._cut(first_bytes), self._high
        least = min(self._first_takes(0), self._first_takes(min(1, high)))
        if least > first_bytes:  # the first card is too small for whatever the last one has
            return least - 1, last_bytes
        first = self._first_takes(cut + 1) - 1 if cut < high else first_bytes
        return max(first, first_bytes), max(self._last_takes(cut) - 1, last_bytes)

    @cached_property
    def _high(self) -> int:
        return max(0, min(self.division.last_cut, self.division.layers - 1))

    def _is_cut(self, first_bytes: int, last_bytes: int) -> bool:
        cut = self._cut(first_bytes)
        return cut > 0 and self._last_takes(cut) <= last_bytes

    def _cut(self, first_bytes: int) -> int:
        """The most layers that the first card has room for; 0 also where it has none."""
        low, high, known = 0, self._high, self._first
        while low < high:
            middle = (low + high + 1) // 2
            takes = known[middle] if middle in known else self._first_takes(middle)
            if takes <= first_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _first_takes(self, cut: int) -> int:
        if cut not in self._first:
            self._first[cut] = self.division.need_bytes(0, cut) + self.beside_bytes
        return self._first[cut]

    def _last_takes(self, cut: int) -> int:
        if cut not in self._last:
            self._last[cut] = self.division.need_bytes(cut, self.division.layers) + self.beside_bytes
        return self._last[cut]


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The best way to go on from any layer with any of the cards."""

    division: Division
    rooms: tuple[int, ...]
    _known: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def best(self, card: int, begin: int) -> tuple[int, int]:
        """Excess of the fullest of this card and those behind it, and the layer behind this card's last."""
        key = (card, begin)
        if key not in self._known:
            self._known[key] = self._found(card, begin)
        return self._known[key]

    def _found(self, card: int, begin: int) -> tuple[int, int]:
        layers = self.division.layers
        if card == len(self.rooms) - 1:
            return self._excess(card, begin, layers), layers
        # A cut may leave this card without a layer, so that the more there are before a cut, the less is behind it.
        # The card with the first layer has other inputs than those behind it, so that it is none is a case of its own.
        high = max(begin, min(self.division.last_cut, layers - 1))
        low = min(max(begin, 1), high)
        least = low
        while low < high:
            middle = (low + high) // 2
            if self._excess(card, begin, middle) >= self.best(card + 1, middle)[0]:
                high = middle
            else:
                low = middle + 1
        ends = {begin, max(least, low - 1), low}
        return min((max(self._excess(card, begin, end), self.best(card + 1, end)[0]), end) for end in ends)

    def _excess(self, card: int, begin: int, end: int) -> int:
        return self.division.need_bytes(begin, end) - self.rooms[card]
