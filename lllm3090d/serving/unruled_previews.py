"""Plans of models without a rule, without loading: the engine is asked, and the answer looks like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.projection import Where
from lllm3090d.planning.request import Room
from lllm3090d.planning.reserves import Budget
from lllm3090d.planning.speeds import shown_speed
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving import refusals
from lllm3090d.serving.catalogues import KnownModels
from lllm3090d.serving.commands import Wish
from lllm3090d.serving.empty_card import EmptyCard
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.ledger import Reservation
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.observation import CardState
from lllm3090d.serving.offering import Ground, offer
from lllm3090d.serving.plan_views import Insight, plan_view
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.remedies import Holder
from lllm3090d.serving.unruled import OfferedPlan
from lllm3090d.wire import PlannedCardView, PlanView
from lllm3090d.wire_plans import EngineCheckView

NOTHING_TO_COMPARE = (
    "the price is the engine's own dry run already; without a rule there is nothing to hold against it"
)


@dataclass(frozen=True, slots=True)
class UnruledPreview:
    """One model without a rule on one card.

    Attributes:
        event: the load that is asked about.
        model: what its header says.
        policy: of the settings.
        card: the card as it would be empty.
        view: the card as it is told.
        budget: what it can give.
        room: the same for a plan.
        known: the catalogue.
        asked: what was asked for, to be asked again with a change.
        notes: what a person should know of how this was asked.
        argv: the command line of a plan.
        state: the card as it was read; None where it is only thought of.
        ours: of our own models on it.
        holders: our models that run.
        host: what host memory beside the card can give; None where nobody limits it.
        check: somebody wants the engine's word beside ours.
        free_bytes: really free on the card now; None where that is of no use.
        given_back_bytes: what the model gives back first, where it is loaded; None where it is not.
    """

    event: LoadRequested
    model: UnruledModel
    policy: Policy
    card: EmptyCard
    view: PlannedCardView
    budget: Budget
    room: Room
    known: KnownModels
    asked: Wish
    notes: tuple[str, ...]
    argv: Callable[[Plan], Iterable[str]]
    state: CardState | None = None
    ours: tuple[Reservation, ...] = ()
    holders: tuple[Holder, ...] = ()
    host: Budget | None = None
    check: bool = False
    free_bytes: int | None = None
    given_back_bytes: int | None = None

    async def plan(self, lookup: Lookup) -> PlanView:
        """The plan as clients see it.

        Raises:
            LlmError: what a load would be refused with.
        """
        card, entry = self.card, self.known.entry_of(self.event.checkpoint)
        can_compute = entry is None or card.profile.can_compute(entry.least_compute_capability)
        here = self.state is not None and card.kind is not CardKind.CPU
        ground = Ground(card.backend, card.kind, self.room, self.free_bytes if here else None)
        offered = await offer(lookup, self.event, self.model, self.policy, ground)
        question = OfferedPlan(offered, self.model, card.kind, self.room)
        try:
            plan = question.plan()
        except LlmError as error:
            if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
                raise
            verdict = Verdict.TOO_BIG if can_compute else Verdict.CAPABILITY
            raise self._refused(error, question, verdict) from error
        insight = Insight(
            card=self.view,
            has_projector=False,
            card_can_compute=can_compute,
            notes=self.notes,
            speed=shown_speed(entry.speeds, card.profile, card.backend) if entry else None,
            engine_check=EngineCheckView(where=Where.NOWHERE, agrees=None, text=NOTHING_TO_COMPARE)
            if self.check
            else None,
            given_back_bytes=self.given_back_bytes,
        )
        return plan_view(
            self.event.checkpoint,
            self.model,
            plan,
            self.budget,
            argv=self.argv(plan),
            card_kind=card.kind,
            insight=insight,
        )

    def _refused(self, error: LlmError, question: OfferedPlan, verdict: Verdict) -> LlmError:
        """The refusal of a load, which also says for which card it is."""
        fits = refusals.fits_with_more(question)
        if self.state is None:
            told = refusals.with_budget(
                error, self.budget, self.card.kind, self.ours, verdict, fits=fits, asked=self.asked
            )
        else:
            told = refusals.refuse(
                error,
                budget=self.budget,
                card=self.state,
                reservations=self.ours,
                instances=self.holders,
                fits=fits,
                verdict=verdict,
                asked=self.asked,
                host=self.host,
            )
        details = dict(told.details) | {"card": self.view.model_dump(mode="json")}
        return LlmError(told.code, told.message, hint=told.hint, **details)
