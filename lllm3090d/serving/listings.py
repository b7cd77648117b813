"""The list of models: what each would get on this machine's card with nothing on it. Blocks for the disk."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from lllm3090d.checkpoints.facts import CheckpointFacts, ProjectorFacts
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.engines.arguments import features
from lllm3090d.engines.capabilities import Capabilities
from lllm3090d.engines.dry_run import dry_run_ability
from lllm3090d.engines.extra_arguments import chosen_for, extra_arguments, merged
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.calibration import Calibration, CalibrationScope
from lllm3090d.planning.launch import Drafter
from lllm3090d.planning.planner import Features, Planner, PlanPolicy, PlanRequest, Room
from lllm3090d.planning.quote import Evidence
from lllm3090d.planning.reserves import host_reserve_bytes
from lllm3090d.planning.speeds import shown_speed
from lllm3090d.planning.verdict import Verdict, verdict
from lllm3090d.serving.catalogue_plans import catalogue_row
from lllm3090d.serving.catalogues import KnownModels, known_models
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.empty_card import EmptyCard, Machine, emptied
from lllm3090d.serving.events import Observation
from lllm3090d.serving.extras import with_section
from lllm3090d.serving.inspection import listed
from lllm3090d.serving.learning import Learning
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.plan_views import card_view_of, speed_view, weakest
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.views import path_text
from lllm3090d.wire import Models, ModelView, PlannedCardView

REMEMBERED_PLANS = 2048  # checkpoints; as many as the facts that are remembered


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What a model would get.

    Attributes:
        verdict: in a word; None where no plan can be made.
        parallel, window_tokens: slots and window of each; 0 where nothing fits.
        evidence: of the price; None where there is none.
        problem: why there is no plan, beyond a lack of memory.
    """

    verdict: Verdict | None
    parallel: int = 0
    window_tokens: int = 0
    evidence: Evidence | None = None
    problem: LlmError | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """All that a plan depends on beside the model: the same terms, the same plan."""

    policy: PlanPolicy
    features: Features
    kind: CardKind
    room: Room
    request: PlanRequest = field(default_factory=PlanRequest)
    calibration: Calibration | None = None


class ModelPlans:
    """Plans of a whole library, remembered while neither the files nor the terms change; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[
            tuple[CheckpointFacts, ProjectorFacts | None, Terms, Drafter | None], ModelPlan
        ] = OrderedDict()

    def get(
        self,
        facts: CheckpointFacts,
        projector: ProjectorFacts | None,
        terms: Terms,
        drafter: Drafter | None = None,
    ) -> ModelPlan:
        """The plan of a model; takes milliseconds where it is not known."""
        key = (facts, projector, terms, drafter)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        made = _planned(facts, projector, terms, drafter)
        with self._lock:
            self._known[key] = made
            while len(self._known) > REMEMBERED_PLANS:
                self._known.popitem(last=False)
        return made


def _planned(
    facts: CheckpointFacts, projector: ProjectorFacts | None, terms: Terms, drafter: Drafter | None
) -> ModelPlan:
    planner = Planner(
        facts,
        terms.request,
        terms.policy,
        terms.features,
        terms.kind,
        terms.room,
        projector,
        drafter,
        terms.calibration,
        explains=False,
    )
    try:
        plan = planner.plan()
    except LlmError as error:
        if error.code is ErrorCode.INSUFFICIENT_MEMORY:
            return ModelPlan(Verdict.TOO_BIG, evidence=Evidence.HEADER)
        return ModelPlan(None, problem=error)
    found = verdict(plan.window_tokens, purpose=plan.launch.purpose)
    return ModelPlan(found, plan.parallel, plan.window_tokens, weakest(plan.quote))


class Listings:
    """Answers what models there are."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._plans = ModelPlans()

    async def models(self, *, with_catalogue: bool) -> Models:
        """The models on disk, and on request those of the catalogue that are not.

        Raises:
            LlmError: MODELS_DIR_UNREADABLE.
        """
        daemon = self._daemon
        await daemon.look_for_desktop()
        seen = daemon.observe()
        return await asyncio.to_thread(self._models, seen.main.error or seen, with_catalogue)

    def _models(self, observation: Observation | LlmError, with_catalogue: bool) -> Models:
        lookup, settings, scheduler = self._daemon.lookup, self._daemon.settings, self._daemon.scheduler
        known = known_models(settings)
        checkpoints = lookup.library().scan()
        views = [
            listed(lookup, settings, checkpoint, scheduler.instance(checkpoint.name))
            for checkpoint in checkpoints
        ]
        problem: LlmError | None
        planned = None
        if isinstance(observation, LlmError):
            problem = observation
        else:
            machine = Machine(observation.card, observation.reading, observation.desktop_active, None)
            planned = planned_for(lookup, machine, scheduler.policy, known)
            problem = planned.problem
            views = [
                with_plan(view, checkpoint, lookup, self._plans, planned)
                for view, checkpoint in zip(views, checkpoints, strict=True)
            ]
        if planned is not None and with_catalogue:
            views += catalogue_rows(checkpoints, planned)
        watch_problem = lookup.watch_problem()
        return Models(
            models_dir=path_text(settings.models_dir),
            models=tuple(views),
            watch_problem=watch_problem.problem() if watch_problem else None,
            planned_for=planned.card_view if planned else None,
            plan_problem=problem.problem() if problem else None,
            catalogue_problem=known.problem.problem() if known.problem else None,
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """What the plans of one list are made for.

    Attributes:
        card: with nothing on it.
        terms: without further arguments for the engine; None where no plan can be made.
        problem: why not.
        policy: of the settings.
        known: the catalogue.
        capabilities: of the engine; None where there is none.
        scope: whose measurements hold here; None where there are none.
    """

    card: EmptyCard
    terms: Terms | None
    problem: LlmError | None
    policy: Policy
    known: KnownModels
    capabilities: Capabilities | None = None
    scope: CalibrationScope | None = None

    @property
    def card_view(self) -> PlannedCardView:
        """The card as clients see it."""
        return card_view_of(self.card)

    def terms_of(self, checkpoint: Checkpoint, facts: CheckpointFacts, learning: Learning) -> Terms | None:
        """Those of one model: further arguments of the settings may change them, and what was learnt of it.

        Raises:
            LlmError: for arguments that cannot be.
        """
        terms, given = self.terms, chosen_for(checkpoint.name, self.policy.extra_arguments)
        if terms is None or self.capabilities is None:
            return terms
        shown: tuple[str, ...] = ()
        if given:
            extra = extra_arguments(given, self.capabilities, facts)
            shown = extra.shown
            terms = replace(
                terms, policy=extra.policy(terms.policy), request=merged(terms.request, extra.request)
            )
        request = with_section(terms.request, self.policy.models.get(checkpoint.name))
        terms = replace(terms, request=request)
        if self.scope is not None:
            known = learning.of_listed(checkpoint.shards, self.scope, shown)
            terms = replace(terms, calibration=known)
        return terms


def planned_for(lookup: Lookup, machine: Machine, policy: Policy, known: KnownModels) -> Planned:
    """What the plans of a list are made for: the engine that is used next, on this machine's empty card."""
    try:
        build, capabilities = lookup.engine()
    except LlmError as error:
        return Planned(emptied(machine, policy.reserves), None, error, policy, known)
    card = emptied(replace(machine, backend=capabilities.backend), policy.reserves)
    host = None
    if card.kind is not CardKind.CPU:
        total = HostMemoryReader().read().total_bytes
        host = max(0, total - host_reserve_bytes(total))
    room = Room(card.budget.grantable_bytes, host)
    terms = Terms(policy.plan, features(capabilities), card.kind, room)
    scope = lookup.learning.of_build(build, capabilities, machine.card.uuid)
    return Planned(card, terms, None, policy, known, capabilities, scope)


def with_plan(
    view: ModelView, checkpoint: Checkpoint, lookup: Lookup, plans: ModelPlans, planned: Planned
) -> ModelView:
    """A line of the list with its plan and the speed of its very file; what cannot be planned stays as it is."""
    entry = planned.known.entry_of(checkpoint)
    if entry is not None:
        shown = shown_speed(entry.speeds, planned.card.profile, planned.card.backend)
        view = view.model_copy(update={"speed": speed_view(shown)})
    if view.problem is not None:
        return view
    if view.verdict is Verdict.DRY_RUN:
        return _priced_by_dry_run(view, planned)
    try:
        facts = lookup.facts.get(checkpoint.shards)
        terms = planned.terms_of(checkpoint, facts, lookup.learning)
        if terms is None:
            return view
        found = plans.get(facts, lookup.projector(checkpoint), terms, lookup.drafter(checkpoint))
    except (
        LlmError
    ) as error:  # it changed since it was listed, its projector is damaged, or its arguments are wrong
        return view.model_copy(update={"plan_problem": error.problem()})
    if found.problem is not None:
        return view.model_copy(update={"plan_problem": found.problem.problem()})
    outcome = found.verdict
    if entry is not None and not planned.card.profile.can_compute(entry.least_compute_capability):
        outcome = Verdict.CAPABILITY
    return view.model_copy(
        update={
            "verdict": outcome,
            "parallel": found.parallel or None,
            "window_tokens": found.window_tokens or None,
            "evidence": found.evidence,
        }
    )


def _priced_by_dry_run(view: ModelView, planned: Planned) -> ModelView:
    """A list makes no dry run; it only says where this engine could make none."""
    if planned.capabilities is None:
        return view
    try:
        dry_run_ability(planned.capabilities)
    except LlmError as error:
        return view.model_copy(update={"verdict": None, "plan_problem": error.problem()})
    return view


def catalogue_rows(checkpoints: tuple[Checkpoint, ...], planned: Planned) -> tuple[ModelView, ...]:
    """The models of the catalogue that are not on disk."""
    return tuple(
        catalogue_row(entry, planned.card, planned.policy.plan, planned.policy.reserves)
        for entry in planned.known.not_on_disk(checkpoints)
    )
