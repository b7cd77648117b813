"""Search by the quote: the largest window, the least offload. Pure.

A :class:`Variant` is everything about a launch but its context and its slots. Its price never falls as the
window or the slots grow, so asking between what fits and what does not finds the largest; there is no second
formula.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, placement
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.calibration import Calibration, calibrated, launch_text, with_excess
from lllm3090d.planning.placement import Placement
from lllm3090d.planning.quote import Launch, Place, PlanPolicy, Quote, draft_need_bytes, price
from lllm3090d.planning.request import Room
from lllm3090d.planning.split import DeviceSplit, Division, division_of
from lllm3090d.planning.split_search import best_excess_bytes, best_split
from lllm3090d.planning.units import MIB, PAGE_TOKENS, round_up

MOST_POOL_TOKENS = 1 << 24  # of one slot, that a search looks for
_ROUNDED_BYTES = (
    64 * MIB
)  # more than tensors of one checkpoint take less where they are rounded layer by layer
SPARE_STEPS = 2  # that a search may lose to a price that is no straight line


@dataclass(frozen=True, slots=True)
class Variant:
    """Everything about a launch but its context and its slots, and the memory it must fit into.

    Attributes:
        facts: the checkpoint.
        template: the launch; its context and slots are replaced.
        policy: what the settings decide.
        backend: what the engine computes on; cpu where host memory takes the card's place.
        room: memory it may take.
        limit_tokens: the longest window: what was trained, or what stretched positions reach.
        projector: loaded beside it; None without.
        draft_types: types of the draft's cache to choose from by the quote; empty where it is given.
        calibration: what was seen of this model here; None for nothing.
    """

    facts: CheckpointFacts
    template: Launch
    policy: PlanPolicy
    backend: Backend
    room: Room
    limit_tokens: int
    projector: ProjectorFacts | None = None
    draft_types: tuple[CacheType, ...] = ()
    calibration: Calibration | None = None
    _windows: dict[int, int | None] = field(default_factory=dict, compare=False, repr=False)

    def launch(self, window_tokens: int, slots: int) -> Launch:
        """The launch of so many slots of such a window; its context is already what the engine makes of it."""
        stream = round_up(window_tokens, cache.CELL_PADDING_TOKENS)
        return self.with_context(stream * slots, slots)

    def with_context(self, context_tokens: int, slots: int) -> Launch:
        """The launch with such a context, as the engine would pad it, and the cheapest cache of its draft."""
        asked = replace(self.template, context_tokens=context_tokens, parallel=slots)
        padded = asked.shape(self.facts).context_tokens
        made = asked if padded == context_tokens else replace(asked, context_tokens=padded)
        if made.draft is None or not self.draft_types:
            return made
        candidates = [
            replace(made, draft=replace(made.draft, cache_type_k=each, cache_type_v=each))
            for each in self.draft_types
        ]
        return min(
            candidates, key=lambda each: draft_need_bytes(self.facts, each, self.backend, self.policy)
        )

    def price(self, launch: Launch) -> Quote:
        """The quote of a launch of this variant, on all its cards together; what the search goes by."""
        split = self.split(launch)
        return split.quote if split else with_excess(self.uncalibrated(launch), self.calibration)

    def uncalibrated(self, launch: Launch) -> Quote:
        """The same without anything that was learnt here."""
        if len(self.room.cards) > 1:
            return best_split(self._division(launch), self.room.cards).quote
        return price(self.facts, launch, self.backend, self.policy, self.projector)

    def charge(self, launch: Launch) -> Quote:
        """What a launch is charged in the end: its own peak where that is known, else its price."""
        calibration = self.calibration
        if calibration is None or not calibration.seen or len(self.room.cards) > 1:
            return self.price(launch)
        text = launch_text(launch, self.projector, calibration.arguments)
        return calibrated(self.uncalibrated(launch), text, calibration)

    def split(self, launch: Launch) -> DeviceSplit | None:
        """How a launch is best shared out among several cards; None where there is one."""
        cards = self.room.cards
        if len(cards) < 2:
            return None
        found = best_split(self._division(launch), cards)
        ledgers = tuple(with_excess(ledger, self.calibration) for ledger in found.ledgers)
        return replace(found, ledgers=ledgers)

    def _division(self, launch: Launch) -> Division:
        return division_of(self.facts, launch, self.backend, self.policy, self.projector)

    def need_bytes(self, launch: Launch) -> int:
        """What it takes of the card."""
        return self.price(launch).total_bytes(Place.CARD)

    def fits_card(self, launch: Launch) -> bool:
        """It fits on the card, or on each of several, whatever it takes beside it."""
        if len(self.room.cards) > 1:
            return self._cards_excess_bytes(self._division(launch)) <= 0
        return self.need_bytes(launch) <= self.room.card

    def fits(self, launch: Launch) -> bool:
        """It fits into the room on the card; and beside it, where a part of it was moved there."""
        return self.excess_bytes(launch) <= 0

    def is_admissible(self, launch: Launch) -> bool:
        """It fits by its price, or by what it was seen to take; for single launches, no search goes by it.

        Neither turns false with more room.
        """
        return self.fits(launch) or (
            self.calibration is not None
            and len(self.room.cards) < 2
            and self._beyond_bytes(launch, self.charge(launch)) <= 0
        )

    def excess_bytes(self, launch: Launch) -> int:
        """By how much it is too large, in the memory where that is most; 0 or less where it fits."""
        if len(self.room.cards) > 1:
            return self._several_excess_bytes(launch)
        return self._beyond_bytes(launch, self.price(launch))

    def _beyond_bytes(self, launch: Launch, quote: Quote) -> int:
        excess = quote.total_bytes(Place.CARD) - self.room.card
        if self.room.host is None or (launch.layers.is_full and not launch.line_tokens):
            return excess
        return max(excess, quote.total_bytes(Place.HOST) - self.room.host)

    def _several_excess_bytes(self, launch: Launch) -> int:
        division = self._division(launch)
        excess = self._cards_excess_bytes(division)
        if self.room.host is None or launch.layers.is_full:
            return excess
        return max(excess, division.host().total_bytes(Place.HOST) - self.room.host)

    def _cards_excess_bytes(self, division: Division) -> int:
        """Of the fullest card; each is checked on its own. At least so much, where all together are too small."""
        weights = placement.weights(self.facts, division.where, self.backend).card
        short = weights - sum(max(0, card.free_bytes) for card in self.room.cards) - _ROUNDED_BYTES
        if short > 0:
            return short
        learnt = self.calibration.excess_bytes if self.calibration is not None else 0
        return best_excess_bytes(division, [card.free_bytes - learnt for card in self.room.cards])

    def largest_window(self, slots: int) -> int | None:
        """The largest window of so many slots that fits, in whole pages or all there can be; None where none."""
        if slots not in self._windows:
            limit = self.limit_tokens
            pages = last_within(
                -(-limit // PAGE_TOKENS),
                lambda n: self.excess_bytes(self.launch(min(n * PAGE_TOKENS, limit), slots)),
            )
            self._windows[slots] = min(pages * PAGE_TOKENS, limit) if pages else None
        return self._windows[slots]

    def pool_tokens(self, slots: int) -> int:
        """Tokens that so many slots could hold together, were the model's window without a limit.

        0 where a context takes nothing, or so little that the number would say nothing.
        """
        endless = replace(self, limit_tokens=MOST_POOL_TOKENS, _windows={})
        window = endless.largest_window(slots) or 0
        return slots * window if window < MOST_POOL_TOKENS else 0

    def least_window(self) -> int:
        """What a slot has at least: a page, or all there can be."""
        return min(PAGE_TOKENS, self.limit_tokens)

    def placed(self, layers: Placement, micro_batch_tokens: int | None = None) -> Variant:
        """The same with another placement, and perhaps another micro batch."""
        template = replace(self.template, layers=layers)
        if micro_batch_tokens is not None:
            template = replace(
                template,
                micro_batch_tokens=micro_batch_tokens,
                batch_tokens=max(template.batch_tokens, micro_batch_tokens),
            )
        return self.changed(template=template)

    def changed(
        self,
        *,
        template: Launch | None = None,
        projector: ProjectorFacts | None = None,
        room: Room | None = None,
    ) -> Variant:
        """A variant that differs, with nothing found yet; ``projector`` None keeps what there is."""
        return replace(
            self,
            template=template or self.template,
            projector=projector or self.projector,
            room=room or self.room,
            _windows={},
        )


def last_within(last: int, excess: Callable[[int], int]) -> int:
    """The greatest of 1 .. last whose excess is not above 0, of a function that never falls; 0 where there is none.

    See :func:`asking_last_within`.
    """
    asking, value = asking_last_within(last), None
    while True:
        try:
            asked = next(asking) if value is None else asking.send(value)
        except StopIteration as end:
            return int(end.value)
        value = excess(asked)


def asking_last_within(last: int) -> Generator[int, int, int]:
    """Asks for the excess of numbers, and returns the greatest of 1 .. last that has none; 0 where there is none.

    A price is close to a straight line, so the next number to ask is where the line through both ends crosses 0, but
    never one after which halving could not finish in the steps that are left: at most two more than halving alone.
    Whatever is asked, the answer is proven: it fits, and the next number does not.
    """
    above = (yield last) if last else 0
    if above <= 0:  # everything fits: common
        return last
    low, high, below = 1, last, (yield 1)
    if below > 0:
        return 0
    steps = (
        last - 2
    ).bit_length() + SPARE_STEPS  # halving takes the base-2 logarithm of the range, rounded up
    while high - low > 1:
        width, steps = high - low, steps - 1
        reach = 1 << steps
        step = width * -below // (above - below)
        middle = low + max(1, width - reach, min(step, width - 1, reach))
        value = yield middle
        if value <= 0:
            low, below = middle, value
        else:
            high, above = middle, value
    return low


def first_true(last: int, holds: Callable[[int], bool]) -> int | None:
    """The least of 0 .. last for which a predicate that turns true once holds; None where it never does."""
    if not holds(last):
        return None
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
