"""One load, planned into any room: what it asks is worked out once, and only the room differs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from lllm3090d.engines.gpu_code import can_never_run, check_code
from lllm3090d.engines.visibility import can_be_kept_to, sight
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card
from lllm3090d.planning.devices import LEAST_CARD_BYTES, DeviceRoom
from lllm3090d.planning.planner import LEAST_DRAFTED_WINDOW_TOKENS, CappedBy, Plan, Planner
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Offload, PlanRequest, ProjectorPlace, Room, SlotPolicy
from lllm3090d.serving import refusals
from lllm3090d.serving.admission import Rooms
from lllm3090d.serving.events import LoadRequested, Observation
from lllm3090d.serving.placed import number_name
from lllm3090d.serving.room_table import Point, RoomTable
from lllm3090d.serving.unruled import OfferedPlan

Question = Planner | OfferedPlan


def card_name(observation: Observation, uuid: str) -> str:
    """By which plans name a card."""
    return number_name(cards_of(observation), uuid)


def cards_of(observation: Observation) -> tuple[Card, ...]:
    """The cards in the order of their numbers."""
    return tuple(state.card for state in observation.cards)


def cards_of_plan(plan: Plan, observation: Observation, usable: tuple[str, ...]) -> tuple[str, ...]:
    """UUIDs of the cards that a plan is for, in the order of its devices; of one without names the first usable one."""
    if plan.split is None:
        return usable[:1]
    by_name = {card_name(observation, uuid): uuid for uuid in usable}
    return tuple(by_name[name] for name in plan.split.devices)


def room_for(event: LoadRequested, observation: Observation, given: Rooms) -> Room:
    """The room of a load: on its card, on all cards, or in host memory."""
    usable = usable_cards(event, observation, given)
    granted = {uuid: given.cards[uuid].grantable_bytes for uuid in usable}
    return _room(observation, granted, given.host_bytes)


def _room(observation: Observation, granted: dict[str, int], host_bytes: int | None) -> Room:
    """The room on these cards, the first of them being the one that is meant where there is one."""
    cards: tuple[DeviceRoom, ...] = ()
    if len(granted) > 1:
        cards = tuple(
            DeviceRoom(
                state.read().total_bytes, granted[state.card.uuid], card_name(observation, state.card.uuid)
            )
            for state in observation.cards
            if state.card.uuid in granted
        )
    return Room(next(iter(granted.values())), host_bytes, cards)


def usable_cards(event: LoadRequested, observation: Observation, given: Rooms) -> tuple[str, ...]:
    """The cards that a load may be on, the one with the most memory first.

    Those that its engine cannot be kept to, or has no code for, are none of them.

    Raises:
        LlmError: CARD_UNREADABLE or CARD_AT_RISK where none can be used; INVALID_REQUEST for a card that is not there;
            ENGINE_UNUSABLE where the engine can be kept to none, or has code for none.
    """
    cards = cards_of(observation)
    if event.card is not None:
        state = observation.of(event.card)
        if state is None:
            raise refusals.no_such_card(event.card, cards)
        state.usable()
        sight(event.capabilities, cards, (state.card,))
        check_code(event.build, state.card)
        return (event.card,)
    readable = [state.card for state in observation.cards if state.card.uuid in given.cards]
    if not readable:
        observation.main.usable()
    usable = tuple(
        card.uuid
        for card in readable
        if can_be_kept_to(event.capabilities, cards, card) and not can_never_run(event.build, card)
    )
    if not usable:
        sight(event.capabilities, cards, readable[:1])
        for card in readable:
            check_code(event.build, card)
    return usable


@dataclass(frozen=True, slots=True)
class Made:
    """A plan that fits.

    Attributes:
        plan: how it is launched.
        cards: UUIDs of the cards it is on, in the order of the plan's devices.
    """

    plan: Plan
    cards: tuple[str, ...]


@dataclass(frozen=True)
class Fitting:
    """A load and all that its plans rest on but the room.

    Attributes:
        event: the load.
        observation: the cards.
        table: what each of them, and the host, can give.
        planner: the question of a load within some room.
    """

    event: LoadRequested
    observation: Observation
    table: RoomTable
    planner: Callable[[LoadRequested, Rooms], Question]
    _known: dict[Point, Made | LlmError] = field(default_factory=dict, compare=False, repr=False)
    _alone: dict[str, Question] = field(default_factory=dict, compare=False, repr=False)
    _sound: set[int] = field(
        default_factory=set, compare=False, repr=False
    )  # questions that were answered before

    @cached_property
    def usable(self) -> tuple[str, ...]:
        """The cards it may be on; raises as :func:`usable_cards`."""
        return usable_cards(self.event, self.observation, self.table.given)

    @cached_property
    def question(self) -> Question:
        """What it asks; raises as the planner does."""
        return _brief(self.planner(self.event, self.table.given))

    @property
    def has_size(self) -> bool:
        """It asks for a context of some size, or brings its plan."""
        return not isinstance(self.question, Planner) or self.question.request.context_tokens is not None

    @property
    def is_whole(self) -> bool:
        """Nothing of it is left in host memory, or just what it asks to be."""
        question = self.question
        if not isinstance(question, Planner):
            return True
        if question.request.places_by_hand:
            return self.event.request.places_by_hand
        return (question.request.offload or question.policy.offload) is not Offload.ALLOWED

    @property
    def is_mixture(self) -> bool:
        """It has experts."""
        return isinstance(self.question, Planner) and bool(self.question.facts.expert_count)

    @property
    def alike(self) -> tuple[tuple[str, ...], ...]:
        """The cards it may be on, those together for which it asks the same."""
        groups: list[list[str]] = []
        for uuid in self.usable:
            question = self._question_of(uuid)
            group = next((each for each in groups if self._question_of(each[0]) == question), None)
            if group is None:
                groups.append([uuid])
            else:
                group.append(uuid)
        return tuple(map(tuple, groups))

    @property
    def all_take_part(self) -> bool:
        """None of the cards is too small to be one of several."""
        states = [state for state in self.observation.cards if state.card.uuid in self.usable]
        return all(state.read().total_bytes >= LEAST_CARD_BYTES for state in states)

    def made(self, point: Point) -> Made | LlmError:
        """The plan within so much, or why there is none; raises what memory could not help."""
        known = self._known.get(point)
        if known is None:
            known = self.on_one_card(point) if len(self.usable) > 1 else None
            known = self._known[point] = known or self.shared(point)
        return known

    @cached_property
    def _is_same_everywhere(self) -> bool:
        """It needs the same of whatever card it is on, and all of it."""
        return self.has_size and len(self.alike) == 1

    def _fits_on_none(self, granted: dict[str, int], host_bytes: int) -> bool:
        """What the card with the most is too small for fits on no other either."""
        largest = max(self.usable, key=lambda each: granted[each])
        return not isinstance(self.alone(largest, granted[largest], host_bytes), Made)

    def on_one_card(self, point: Point) -> Made | None:
        """On the card that serves most, of those that serve as much the one with the least room; None needs them all.

        A model that does not fit whole, or only with a window too short to be of use, is better shared out: nothing of
        it is left in host memory while another card has room.
        """
        granted = self._granted(point)
        if self._is_same_everywhere and self._fits_on_none(granted, point[-1]):
            return None
        best: Made | None = None
        for uuid in sorted(self.usable, key=lambda each: granted[each]):
            made = self.alone(uuid, granted[uuid], point[-1])
            if not isinstance(made, Made) or not _is_enough(self._question_of(uuid), made.plan):
                continue
            if best is None or _served(made.plan) > _served(best.plan):
                best = made
            if self.event.request.context_tokens is not None:
                break  # it serves the same on every card
        return best

    def alone(self, uuid: str, card_bytes: int, host_bytes: int) -> Made | LlmError:
        """The plan on one of the cards; raises as :meth:`made`."""
        return self._planned(self._question_of(uuid), {uuid: card_bytes}, host_bytes)

    def shared(self, point: Point) -> Made | LlmError:
        """The plan on all cards that it may be on, together, where it fits on none alone; raises as :meth:`made`."""
        granted = self._granted(point)
        return self._planned(self._several, {uuid: granted[uuid] for uuid in self.usable}, point[-1])

    @cached_property
    def _several(self) -> Question:
        """What it asks of several cards, once it is known to fit on none alone; of its only one as it is."""
        question = self.question
        if isinstance(question, Planner) and self.has_size and self.is_whole and len(self.usable) > 1:
            return replace(question, fits_on_none=True)
        return question

    def needs(self, made: Made) -> Point:
        """What a plan takes of every memory."""
        quote, split = made.plan.quote, made.plan.split
        needs = dict.fromkeys(self.table.cards, 0)
        if split is not None and len(made.cards) > 1:
            needs |= zip(made.cards, split.needs_bytes, strict=True)
        else:
            needs[made.cards[0]] = quote.total_bytes(Place.CARD)
        host = quote.total_bytes(Place.HOST) if self.table.given.host is not None else 0
        return (*needs.values(), host)

    def of_window(self, window_tokens: int) -> Fitting | None:
        """The same load asking for such a window; it fits where the load as it is would get no less.

        None where that is not so: a window may then be shorter, or a part of the model left in host memory, with more
        room. Such a load chooses between its window and something else: the place of its projector, windows that are
        nearly whole, what it leaves in host memory, or it has a tier or stretched positions.
        """
        question = self.question
        if not isinstance(question, Planner) or not _gets_no_less(question):
            return None
        sized = Fitting(self.event, self.observation, self.table, self.planner)
        window_tokens = min(window_tokens, question.facts.trained_context_tokens)
        sized.__dict__["usable"] = self.usable  # the same cards, and the same question but for its size
        sized.__dict__["question"] = _sized(question, window_tokens)
        if len(self.usable) > 1:
            alone = {uuid: self._question_of(uuid) for uuid in self.usable}
            sized._alone.update(
                {
                    uuid: _sized(each, window_tokens)
                    for uuid, each in alone.items()
                    if isinstance(each, Planner)
                }
            )
        return sized

    def _question_of(self, uuid: str) -> Question:
        """What it asks of one card: of several the whole model on it."""
        if len(self.usable) == 1:
            return self.question
        if uuid not in self._alone:
            self._alone[uuid] = self._aimed(uuid)
        return self._alone[uuid]

    def _aimed(self, uuid: str) -> Question:
        """All of the model on that card, as far as nobody has said otherwise; cards differ in what was learnt there."""
        question, request = self.question, self.event.request
        if not isinstance(question, Planner):
            return question
        asked = question.request
        if not request.tiered and not request.places_by_hand:
            asked = replace(asked, offload=Offload.RESIDENT)
        return replace(question, request=asked, calibration=self.event.calibrations.get(uuid))

    def _granted(self, point: Point) -> dict[str, int]:
        return dict(zip(self.table.cards, point, strict=False))

    def _planned(self, question: Question, granted: dict[str, int], host_bytes: int) -> Made | LlmError:
        host = host_bytes if self.table.given.host is not None else None
        room = _room(self.observation, granted, host)
        asked = (
            replace(question, room=room, is_checked=id(question) in self._sound)
            if isinstance(question, Planner)
            else replace(question, room=room)
        )
        try:
            plan = asked.plan()
        except LlmError as error:
            if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
                raise
            self._sound.add(id(question))
            return error
        self._sound.add(id(question))
        return Made(plan, cards_of_plan(plan, self.observation, tuple(granted)))


def _gets_no_less(question: Planner) -> bool:
    """With more room its window is no shorter than an agent's, once it is as long as that."""
    asked, policy = question.request, question.policy
    projects = (
        question.projector is not None and (asked.projector or policy.projector) is ProjectorPlace.AUTO
    )
    leaves = (asked.offload or policy.offload) is Offload.ALLOWED or asked.places_by_hand
    # Slots that are added where whole windows fit leave more than half of one each (lllm3090d.planning.slots).
    is_long = question.facts.trained_context_tokens >= 2 * LEAST_DRAFTED_WINDOW_TOKENS
    one_length = asked.parallel is not None or (asked.slot_policy or policy.slot_policy) is SlotPolicy.WINDOW
    other = asked.context_tokens is not None or asked.rope_scaling is not None or asked.tiered
    return not (projects or leaves or other) and (is_long or one_length)


def _sized(question: Planner, window_tokens: int) -> Planner:
    """It asks for that window, and is charged by its price as every search goes by it, never by a peak."""
    slots, known = question.request.parallel or 1, question.calibration
    return replace(
        question,
        request=replace(question.request, context_tokens=window_tokens * slots, parallel=slots),
        calibration=None if known is None else known.for_several_cards(),
    )


def is_satisfying(plan: Plan, request: PlanRequest) -> bool:
    """Nothing better is worth another model."""
    resident = plan.launch.layers.is_full or request.places_by_hand
    enough = plan.capped_by is not CappedBy.MEMORY or plan.window_tokens >= LEAST_DRAFTED_WINDOW_TOKENS
    return resident and enough


def _brief(question: Question) -> Question:
    """Without the arithmetic of a refusal, which takes longer than finding out that it is one."""
    return replace(question, explains=False)


def _resident(asked: PlanRequest) -> Offload | None:
    return asked.offload if asked.places_by_hand else Offload.RESIDENT


def _is_enough(planner: Question, plan: Plan) -> bool:
    """More cards would be of no use to it; a model without a rule is on one card whatever it serves."""
    return isinstance(planner, OfferedPlan) or planner.is_enough(plan)


def _served(plan: Plan) -> int:
    """Tokens of all slots together."""
    return plan.window_tokens * plan.parallel
