"""The decision on one load: admit it, evict for it, let it wait, or refuse it. Pure.

Tried in this order, and the first that serves is taken: as asked in the room there is; as asked in the room of idle
models; smaller, where that was said to do; worse than one would wish (a window too short for an agent, a part of the
model in host memory), where nothing else is to be had; later, once those are idle that are not now. A size that was
asked for is never changed unless the load says what else will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.planner import LEAST_DRAFTED_WINDOW_TOKENS, Plan
from lllm3090d.planning.request import PlanRequest
from lllm3090d.planning.reserves import Budget
from lllm3090d.serving.admission import Rooms
from lllm3090d.serving.aims import Gives, content, served
from lllm3090d.serving.events import LoadRequested, Observation
from lllm3090d.serving.explaining import explained
from lllm3090d.serving.fitting import Fitting, Made, Question, card_name, is_satisfying, usable_cards
from lllm3090d.serving.instance import ON_THE_WAY_DOWN, ON_THE_WAY_UP, SERVING, InstanceState
from lllm3090d.serving.ledger import Ledger, ReservationState
from lllm3090d.serving.placed import together
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.room_table import RoomTable, room_table
from lllm3090d.serving.running import Instance
from lllm3090d.serving.victims import Victim, all_victims, fewest_victims


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


@dataclass(frozen=True)
class Decider:
    """All that a decision rests on, at one moment.

    Attributes:
        observation: the cards.
        ledger: what is promised.
        policy: from the settings.
        instances: what runs.
        now_s: on the scheduler's clock.
        planner: the question of a load within some room.
        gone: runs that are thought away from the first.
    """

    observation: Observation
    ledger: Ledger
    policy: Policy
    instances: Sequence[Instance]
    now_s: float
    planner: Callable[[LoadRequested, Rooms], Question]
    gone: frozenset[str] = frozenset()

    def refusal(self, event: LoadRequested) -> Refuse | None:
        """Of a load that could be served neither now nor later; whom it would replace otherwise is left open."""
        decision = self.decide(event, names_victims=False)
        return decision if isinstance(decision, Refuse) else None

    def decide(self, event: LoadRequested, *, names_victims: bool = True) -> Decision:
        """What becomes of a load now; without names an eviction is of all that may go."""
        try:
            decision = self._decide(event, names_victims=names_victims)
            if isinstance(decision, Refuse) and decision.error.code is ErrorCode.INSUFFICIENT_MEMORY:
                error = self._why_not_at_all(event)
                return self._smaller(event, error) or Refuse(self._explained(event, error))
        except LlmError as error:
            return Refuse(error)
        return decision

    @cached_property
    def _table(self) -> RoomTable:
        """What every memory can give; raises as :func:`lllm3090d.serving.admission.rooms`."""
        return room_table(self.observation, self.ledger, self.policy.reserves, self.gone)

    def _fitting(self, event: LoadRequested) -> Fitting:
        return Fitting(event, self.observation, self._table, self.planner)

    def _why_not_at_all(self, event: LoadRequested) -> LlmError:
        """The refusal with its arithmetic, which takes longer than finding out that it is one."""
        try:
            self.planner(event, self._table.given).plan()
        except LlmError as error:
            return error
        raise ValueError("a load was refused that fits")

    # --- one size -----------------------------------------------------------------------------------------------

    def _decide(self, event: LoadRequested, *, names_victims: bool = True) -> Decision:
        fitting = self._fitting(event)
        now = fitting.made(self._table.now)
        if isinstance(now, Made) and is_satisfying(now.plan, event.request):
            return self._admit(event, now)
        victims = self.victims() if event.may_evict else ()
        choose = fewest_victims if names_victims else all_victims
        chosen = self._chosen(fitting, victims, choose, must_satisfy=isinstance(now, Made))
        if chosen:
            names = ", ".join(each.name for each in chosen)
            return Evict(tuple(each.run for each in chosen), f"{names} to be unloaded")
        if isinstance(now, Made):
            return self._admit(event, now)
        return self._wait(fitting) or Refuse(now)

    def _admit(self, event: LoadRequested, made: Made) -> Admit:
        given = self._table.given.cards
        named = [(card_name(self.observation, each), given[each]) for each in made.cards]
        return Admit(made.plan, made.cards, together(named), event.request)

    def aimed(self, event: LoadRequested) -> LoadRequested:
        """The load, with the one card of several that it would be on now; as it is where it needs more than one.

        Raises:
            LlmError: as :func:`usable_cards`.
        """
        fitting = self._fitting(event)
        if len(fitting.usable) < 2:
            return replace(event, card=fitting.usable[0]) if len(self.observation.cards) > 1 else event
        alone = fitting.on_one_card(self._table.now)
        return event if alone is None else replace(event, card=alone.cards[0])

    # --- the room of others -------------------------------------------------------------------------------------

    def victims(self) -> tuple[Victim, ...]:
        """Those that may go for another one now."""
        return tuple(
            Victim(
                each.run,
                each.name,
                each.last_used_s or 0.0,
                sum([r.charged_bytes for r in self.ledger.of(each.run)]),
            )
            for each in self.instances
            if each.run not in self.gone and self._why_not(each) is None
        )

    def _why_not(self, instance: Instance) -> str | None:
        """Why a model may not go for another one now; None where it may."""
        if instance.state not in SERVING:
            return "is loading" if instance.state in ON_THE_WAY_UP else "is ending"
        since_ready_s = self.now_s - (instance.ready_since_s or 0.0)
        idle_s = self.now_s - (instance.last_used_s or 0.0)
        why: str | None = None
        if instance.pinned:
            why = "is pinned"
        elif instance.state is InstanceState.STALLED:
            why = "is stalled"
        elif instance.is_silent:
            why = "does not tell whether it is idle"
        elif instance.busy or instance.leases:
            why = "is busy"
        elif since_ready_s < self.policy.least_residency_s:
            why = f"has been loaded for less than {self.policy.least_residency_s:g} s"
        elif idle_s < self.policy.least_idle_s:
            why = f"has been idle for less than {self.policy.least_idle_s:g} s"
        return why

    def _chosen(
        self,
        fitting: Fitting,
        victims: Sequence[Victim],
        choose: Callable[[Sequence[Victim], RoomTable, Gives], tuple[Victim, ...]],
        *,
        must_satisfy: bool,
    ) -> tuple[Victim, ...]:
        """Whom to evict; nobody where that gives no more than there is."""
        most = self._table.without(each.run for each in victims)
        chosen = choose(victims, self._table, content(fitting, most))
        return chosen if chosen or must_satisfy else choose(victims, self._table, served(fitting, most))

    def _wait(self, fitting: Fitting) -> Wait | None:
        """What it may wait for: memory on its way back, and models that will be idle one day; never pinned ones."""
        down = {i.run: i for i in self.instances if i.state in ON_THE_WAY_DOWN - {InstanceState.STUCK}}
        ending = {r.run for r in self.ledger if r.state is ReservationState.RELEASING} | set(down)
        names = ", ".join(sorted({r.name for r in self.ledger if r.run in ending}))
        returning = [f"the memory of {names} to come back"] if ending else []
        if ending and isinstance(fitting.made(self._table.without(ending)), Made):
            return Wait(returning[0])
        if not fitting.event.may_evict:
            return None
        later = {
            i.run: i
            for i in self.instances
            if i.state in SERVING | ON_THE_WAY_UP and not (i.pinned or i.is_silent)
        }
        if not later or not isinstance(fitting.made(self._table.without(ending | later.keys())), Made):
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
        given = self._table.given
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
