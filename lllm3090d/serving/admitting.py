"""The decision on one load: admit it, evict for it, let it wait, or refuse it. Pure.

Tried in this order, and the first that serves is taken: as asked in the room there is; as asked in the room of idle
models; smaller, where that was said to do; worse than one would wish (a window too short for an agent, a part of the
model in host memory), where nothing else is to be had; later, once those are idle that are not now. A size that was
asked for is never changed unless the load says what else will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lllm3090d.engines.gpu_code import can_never_run, check_code
from lllm3090d.engines.visibility import can_be_kept_to, sight
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card
from lllm3090d.planning.devices import DeviceRoom
from lllm3090d.planning.planner import LEAST_DRAFTED_WINDOW_TOKENS, CappedBy, Plan, Planner
from lllm3090d.planning.request import Offload, PlanRequest, Room
from lllm3090d.planning.reserves import Budget
from lllm3090d.serving import refusals
from lllm3090d.serving.admission import Rooms, Victim, fewest_victims, rooms
from lllm3090d.serving.events import LoadRequested, Observation
from lllm3090d.serving.explaining import explained
from lllm3090d.serving.instance import ON_THE_WAY_DOWN, ON_THE_WAY_UP, SERVING, InstanceState
from lllm3090d.serving.ledger import Ledger, ReservationState
from lllm3090d.serving.placed import number_name, together
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.running import Instance
from lllm3090d.serving.unruled import OfferedPlan


@dataclass(frozen=True, slots=True)
class Admit:
    """It fits now.

    Attributes:
        plan: how it is launched.
        cards: UUIDs of the cards it is on, in the order of the plan's devices.
        budget: what they could give together.
        request: what was planned; another than the one asked for only where the load said that it would do.
    """

    plan: Plan
    cards: tuple[str, ...]
    budget: Budget
    request: PlanRequest


@dataclass(frozen=True, slots=True)
class Evict:
    """It would fit, were these runs gone."""

    runs: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """It may fit later."""

    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """It cannot be."""

    error: LlmError


Decision = Admit | Evict | Wait | Refuse


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
    first = given.cards[usable[0]]
    cards: tuple[DeviceRoom, ...] = ()
    if len(usable) > 1:
        cards = tuple(
            DeviceRoom(
                state.read().total_bytes,
                given.cards[state.card.uuid].grantable_bytes,
                card_name(observation, state.card.uuid),
            )
            for state in observation.cards
            if state.card.uuid in usable
        )
    return Room(first.grantable_bytes, given.host_bytes, cards)


def usable_cards(event: LoadRequested, observation: Observation, given: Rooms) -> tuple[str, ...]:
    """The cards that a load may be on, the one with the most memory first.

    Those that its engine cannot be kept to, or has no code for, are none of them.

    Raises:
        LlmError: CARD_UNREADABLE where none can be read; INVALID_REQUEST for a card that is not there; ENGINE_UNUSABLE
            where the engine can be kept to none, or has code for none.
    """
    cards = cards_of(observation)
    if event.card is not None:
        state = observation.of(event.card)
        if state is None:
            raise refusals.no_such_card(event.card, cards)
        state.read()
        sight(event.capabilities, cards, (state.card,))
        check_code(event.build, state.card)
        return (event.card,)
    readable = [state.card for state in observation.cards if state.card.uuid in given.cards]
    if not readable:
        observation.main.read()
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


def _is_enough(planner: Planner | OfferedPlan, plan: Plan) -> bool:
    """More cards would be of no use to it; a model without a rule is on one card whatever it serves."""
    return isinstance(planner, OfferedPlan) or planner.is_enough(plan)


def _served(plan: Plan) -> int:
    """Tokens of all slots together."""
    return plan.window_tokens * plan.parallel


@dataclass(frozen=True, slots=True)
class Decider:
    """All that a decision rests on, at one moment.

    Attributes:
        observation: the cards.
        ledger: what is promised.
        policy: from the settings.
        instances: what runs.
        now_s: on the scheduler's clock.
        planner: the question of a load within some room.
    """

    observation: Observation
    ledger: Ledger
    policy: Policy
    instances: Sequence[Instance]
    now_s: float
    planner: Callable[[LoadRequested, Rooms], Planner | OfferedPlan]

    def decide(self, event: LoadRequested) -> Decision:
        """What becomes of a load now."""
        try:
            decision = self._decide(event)
            if isinstance(decision, Refuse) and decision.error.code is ErrorCode.INSUFFICIENT_MEMORY:
                error = self._why_not_at_all(event)
                return self._smaller(event, error) or Refuse(self._explained(event, error))
        except LlmError as error:
            return Refuse(error)
        return decision

    def _why_not_at_all(self, event: LoadRequested) -> LlmError:
        """The refusal with its arithmetic, which takes longer than finding out that it is one."""
        given = rooms(self.observation, self.ledger, self.policy.reserves)
        try:
            self.planner(event, given).plan()
        except LlmError as error:
            return error
        raise ValueError("a load was refused that fits")

    # --- one size -----------------------------------------------------------------------------------------------

    def _decide(self, event: LoadRequested) -> Decision:
        now = self._admit(event, frozenset())
        if isinstance(now, Admit) and self._is_satisfying(now.plan, event):
            return now
        victims = self.victims() if event.may_evict else ()
        chosen = self._chosen(event, victims, must_satisfy=isinstance(now, Admit))
        if chosen:
            names = ", ".join(each.name for each in chosen)
            return Evict(tuple(each.run for each in chosen), f"{names} to be unloaded")
        if isinstance(now, Admit):
            return now
        return self._wait(event) or Refuse(now)

    def _admit(self, event: LoadRequested, gone: frozenset[str]) -> Admit | LlmError:
        """The plan were these gone, or why there is none; raises what memory could not help."""
        given = rooms(self.observation, self.ledger, self.policy.reserves, gone)
        usable = usable_cards(event, self.observation, given)
        if len(usable) > 1:
            alone = self._on_one_card(event, given, usable)
            if alone is not None:
                return alone
        return self._planned(event, given, usable)

    def _on_one_card(self, event: LoadRequested, given: Rooms, usable: tuple[str, ...]) -> Admit | None:
        """On the card that serves most, of those that serve as much the one with the least room; None needs them all.

        A model that does not fit whole, or only with a window too short to be of use, is better shared out: nothing of
        it is left in host memory while another card has room.
        """
        request = event.request
        if not request.tiered and not request.places_by_hand:
            request = replace(request, offload=Offload.RESIDENT)
        best: Admit | None = None
        for uuid in sorted(usable, key=lambda each: given.cards[each].grantable_bytes):
            aimed = replace(event, card=uuid, request=request)
            made = self._planned(aimed, given, (uuid,))
            if not isinstance(made, Admit) or not _is_enough(self.planner(aimed, given), made.plan):
                continue
            if best is None or _served(made.plan) > _served(best.plan):
                best = replace(made, request=event.request)
            if event.request.context_tokens is not None:
                break  # it serves the same on every card
        return best

    def aimed(self, event: LoadRequested) -> LoadRequested:
        """The load, with the one card of several that it would be on now; as it is where it needs more than one.

        Raises:
            LlmError: as :func:`usable_cards`.
        """
        given = rooms(self.observation, self.ledger, self.policy.reserves)
        usable = usable_cards(event, self.observation, given)
        if len(usable) < 2:
            return replace(event, card=usable[0]) if len(self.observation.cards) > 1 else event
        alone = self._on_one_card(event, given, usable)
        return event if alone is None else replace(event, card=alone.cards[0])

    def _planned(self, event: LoadRequested, given: Rooms, usable: tuple[str, ...]) -> Admit | LlmError:
        try:
            plan = replace(self.planner(event, given), explains=False).plan()
        except LlmError as error:
            if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
                raise
            return error
        cards = cards_of_plan(plan, self.observation, usable)
        budget = together([(card_name(self.observation, each), given.cards[each]) for each in cards])
        return Admit(plan, cards, budget, event.request)

    @staticmethod
    def _is_satisfying(plan: Plan, event: LoadRequested) -> bool:
        """Nothing better is worth another model."""
        resident = plan.launch.layers.is_full or event.request.places_by_hand
        enough = plan.capped_by is not CappedBy.MEMORY or plan.window_tokens >= LEAST_DRAFTED_WINDOW_TOKENS
        return resident and enough

    # --- the room of others -------------------------------------------------------------------------------------

    def victims(self) -> tuple[Victim, ...]:
        """Those that may go for another one now."""
        return tuple(
            Victim(
                each.run,
                each.name,
                each.last_used_s or 0.0,
                sum(r.charged_bytes for r in self.ledger.of(each.run)),
            )
            for each in self.instances
            if self._why_not(each) is None
        )

    def _why_not(self, instance: Instance) -> str | None:
        """Why a model may not go for another one now; None where it may."""
        if instance.state not in SERVING:
            return "is loading" if instance.state in ON_THE_WAY_UP else "is ending"
        age_s = self.now_s - (instance.ready_since_s or 0.0)
        idle_s = self.now_s - (instance.last_used_s or 0.0)
        residency_s, least_idle_s = self.policy.least_residency_s, self.policy.least_idle_s
        reasons = (
            (instance.pinned, "is pinned"),
            (instance.is_silent, "does not tell whether it is idle"),
            (bool(instance.busy or instance.leases), "is busy"),
            (age_s < residency_s, f"has been loaded for less than {residency_s:g} s"),
            (idle_s < least_idle_s, f"has been idle for less than {least_idle_s:g} s"),
        )
        return next((text for holds, text in reasons if holds), None)

    def _chosen(
        self, event: LoadRequested, victims: Sequence[Victim], *, must_satisfy: bool
    ) -> tuple[Victim, ...]:
        """Whom to evict; nobody where that gives no more than there is."""

        def admits(gone: frozenset[str]) -> bool:
            return isinstance(self._admit(event, gone), Admit)

        def satisfies(gone: frozenset[str]) -> bool:
            made = self._admit(event, gone)
            return isinstance(made, Admit) and self._is_satisfying(made.plan, event)

        chosen = fewest_victims(victims, satisfies)
        return chosen if chosen or must_satisfy else fewest_victims(victims, admits)

    def _wait(self, event: LoadRequested) -> Wait | None:
        """What it may wait for: memory on its way back, and models that will be idle one day; never pinned ones."""
        down = {i.run: i for i in self.instances if i.state in ON_THE_WAY_DOWN - {InstanceState.STUCK}}
        ending = {r.run for r in self.ledger if r.state is ReservationState.RELEASING} | set(down)
        names = ", ".join(sorted({r.name for r in self.ledger if r.run in ending}))
        returning = [f"the memory of {names} to come back"] if ending else []
        if ending and isinstance(self._admit(event, frozenset(ending)), Admit):
            return Wait(returning[0])
        if not event.may_evict:
            return None
        later = {
            i.run: i
            for i in self.instances
            if i.state in SERVING | ON_THE_WAY_UP and not (i.pinned or i.is_silent)
        }
        if not later or not isinstance(self._admit(event, frozenset(ending | later.keys())), Admit):
            return None
        reasons = [f"{i.name}, which {why}" for i in later.values() if (why := self._why_not(i))]
        return Wait("; ".join([*returning, *reasons]))

    # --- smaller, or not at all ---------------------------------------------------------------------------------

    def _smaller(self, event: LoadRequested, refused: LlmError) -> Decision | None:
        """As much of the context as there is room for, where the load says that it would do."""
        least, asked = event.least_context_tokens, event.request.context_tokens
        if least is None and self.policy.serve_smaller:
            least = LEAST_DRAFTED_WINDOW_TOKENS
        largest = refused.details.get("largest_context_tokens")
        if least is None or asked is None or not isinstance(largest, int) or not least <= largest < asked:
            return None
        smaller = replace(event, request=replace(event.request, context_tokens=largest))
        decision = self._decide(smaller)
        return decision if isinstance(decision, Admit) else None

    def _explained(self, event: LoadRequested, error: LlmError) -> LlmError:
        given = rooms(self.observation, self.ledger, self.policy.reserves)
        uuid = usable_cards(event, self.observation, given)[0]
        return explained(
            error,
            event,
            self.observation.of(uuid) or self.observation.main,
            given,
            ledger=self.ledger,
            instances=self.instances,
            now_s=self.now_s,
            planner=self.planner(event, given),
        )
