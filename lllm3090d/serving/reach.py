"""Whether a load of a given size fits into one room after the other, asking for as few plans as can be. Pure.

More memory never refuses a size that less has room for (:mod:`lllm3090d.planning.planner`). So what a plan needs is
enough wherever there is as much, and what is refused with one byte less is refused with less than that: two plans
answer for all rooms of one card, and of two cards one plan more and the cuts of its launch. Whatever is said to fit is
a launch with its price. For three cards and more together the planner is asked about each room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lllm3090d.planning.planner import Planner
from lllm3090d.planning.split_search import TwoCards
from lllm3090d.serving.fitting import Fitting, Made
from lllm3090d.serving.room_table import Point

# A launch may be made in ways that need less, one after the other: without drafting, with the projector beside the
# card, in one slot. Beyond so many of them every room is asked about by itself.
MOST_WAYS = 8


@dataclass(slots=True)
class Threshold:
    """What of one card a load needs at least.

    Attributes:
        ask: what it needs of the card and of the host in such a room; None where it does not fit.
        most_card_bytes, most_host_bytes: what they can ever give.
    """

    ask: Callable[[int, int], tuple[int, int] | None]
    most_card_bytes: int
    most_host_bytes: int
    _enough: tuple[int, int] | None = None
    _too_little: int = -1
    _ways: int = 0

    def __call__(self, card_bytes: int, host_bytes: int) -> bool:
        """Whether it fits into so much."""
        if self._enough is None and self._too_little < 0:
            self._asked(self.most_card_bytes, self.most_host_bytes)
        while True:
            if card_bytes <= self._too_little:
                return False
            if self._enough is None or self._ways >= MOST_WAYS or host_bytes < self._enough[1]:
                return self._asked(card_bytes, host_bytes)
            if card_bytes >= self._enough[0]:
                return True
            self._ways += self._asked(self._enough[0] - 1, self.most_host_bytes)

    def _asked(self, card_bytes: int, host_bytes: int) -> bool:
        needs = self.ask(card_bytes, host_bytes)
        if needs is not None:
            if self._enough is None or needs[0] < self._enough[0]:
                self._enough = needs
            return True
        if host_bytes >= self.most_host_bytes:
            self._too_little = max(self._too_little, card_bytes)
        return False


@dataclass(slots=True)
class Shared:
    """Whether a load fits on two cards together.

    What fits nowhere with one byte less than the cuts of a launch ask for is not made in any way that needs less of
    both cards, so that its cuts say it all.

    Attributes:
        fitting: the load.
        most_host_bytes: that the host can ever give.
    """

    fitting: Fitting
    most_host_bytes: int
    _launches: list[tuple[TwoCards, int]] = field(default_factory=list)
    _is_all: bool = False

    def learn(self, made: Made) -> None:
        """A launch of this load, which may be shared out."""
        question = self.fitting.question
        if isinstance(question, Planner):
            self._launches.append((question.on_two_cards(made.plan), self.fitting.needs(made)[-1]))

    @property
    def knows_a_launch(self) -> bool:
        """Rooms can be told apart by its cuts."""
        return bool(self._launches)

    def __call__(self, point: Point) -> bool:
        """Whether it fits into so much of both."""
        host = point[-1]
        first, last = sorted(point[:2])  # the main card is the one with more, and comes last
        while True:
            if any(launch.fits(first, last) and needs <= host for launch, needs in self._launches):
                return True
            ample = self._launches and host >= max(needs for _, needs in self._launches)
            if self._is_all and ample:
                return False
            if not ample or len(self._launches) > MOST_WAYS:
                return self._asked(point)
            short_first, short_last = self._launches[-1][0].just_too_little(first, last)
            corner = (min(short_first, short_last), short_last)
            if any(launch.fits(*corner) for launch, _ in self._launches):
                return self._asked(point)
            self._is_all = not self._asked((*corner, self.most_host_bytes))

    def _asked(self, point: Point) -> bool:
        made = self.fitting.shared(point)
        if isinstance(made, Made):
            self.learn(made)
        return isinstance(made, Made)


class Reach:
    """What is known of one load so far.

    Args:
        fitting: a load that asks for a size, all of it on cards or divided by hand. Layers that may be left in host
            memory make a launch take less of one card and more of another, so that no cuts would say it all.
        most: the most room that will be asked about.
    """

    def __init__(self, fitting: Fitting, most: Point) -> None:
        self._fitting, self._number = fitting, {uuid: n for n, uuid in enumerate(fitting.table.cards)}
        self._alone = [
            (self._at(cards), Threshold(partial(self._needs, cards[0]), max(most[:-1]), most[-1]))
            for cards in fitting.alike
        ]
        two = len(fitting.usable) == len(self._number) == 2 and fitting.all_take_part
        self._two = Shared(fitting, most[-1]) if two else None

    def __call__(self, point: Point) -> bool:
        """Whether it fits into so much; raises what memory could not help."""
        return self.fits_alone(point) or self.fits_shared(point)

    def fits_alone(self, point: Point) -> bool:
        """Whether it fits on one of its cards."""
        return any(alone(max([point[n] for n in numbers]), point[-1]) for numbers, alone in self._alone)

    def fits_shared(self, point: Point) -> bool:
        """Whether it fits on several of them together, where it does on none."""
        if len(self._fitting.usable) == 1:
            return False
        if self._two is not None:
            return self._two(point)
        return isinstance(self._fitting.shared(point), Made)

    def _needs(self, uuid: str, card_bytes: int, host_bytes: int) -> tuple[int, int] | None:
        made = self._fitting.alone(uuid, card_bytes, host_bytes)
        if not isinstance(made, Made):
            return None
        if self._two is not None and not self._two.knows_a_launch:
            self._two.learn(made)
        needs = self._fitting.needs(made)
        return needs[self._number[uuid]], needs[-1]

    def _at(self, cards: Sequence[str]) -> list[int]:
        return [self._number[uuid] for uuid in cards]
