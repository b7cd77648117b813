"""Plans without loading: what a load would get now, what another card would give, and models that are not on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.engines.arguments import features
from lllm3090d.engines.arguments import launch as engine_launch
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.extra_arguments import NOTHING, ExtraArguments
from lllm3090d.engines.visibility import Sight, sight, variables
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.profiles import NAMELESS_IDS
from lllm3090d.gpus.readings import Card, CardKind
from lllm3090d.planning.alternatives import alternatives
from lllm3090d.planning.planner import Features, Plan, Planner, Room
from lllm3090d.planning.request import option_of
from lllm3090d.planning.reserves import Budget, host_reserve_bytes
from lllm3090d.planning.smallest_card import SmallestCard, smallest_card
from lllm3090d.planning.speeds import predicting, shown_speed
from lllm3090d.planning.units import mib_text
from lllm3090d.planning.verdict import Verdict
from lllm3090d.serving import refusals
from lllm3090d.serving.admission import held_now
from lllm3090d.serving.catalogue_plans import catalogue_plan
from lllm3090d.serving.catalogues import NOT_ON_DISK, KnownModels, known_models
from lllm3090d.serving.commands import NOBODY, Wish
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.empty_card import (
    EmptyCard,
    Machine,
    assumed_build,
    assumed_card,
    emptied,
    giver_text,
    is_hypothetical,
    wished,
)
from lllm3090d.serving.engine_check import Asked, EngineChecks
from lllm3090d.serving.events import LoadRequested, Observation
from lllm3090d.serving.explaining import holders
from lllm3090d.serving.extras import asked_of, extra_of, section_note, with_section
from lllm3090d.serving.fitting import card_name, cards_of, cards_of_plan, room_for, usable_cards
from lllm3090d.serving.launch_remedies import headless
from lllm3090d.serving.learning import learnt
from lllm3090d.serving.ledger import Reservation
from lllm3090d.serving.lookup import FoundModel, FoundUnruled
from lllm3090d.serving.observation import HOST, CardState
from lllm3090d.serving.placed import Placed, parts_of, together
from lllm3090d.serving.plan_requests import plan_request
from lllm3090d.serving.plan_views import Insight, card_view_of, plan_view
from lllm3090d.serving.remedies import Holder, Remedy
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.unit_spec import socket_path
from lllm3090d.serving.unruled_previews import UnruledPreview
from lllm3090d.wire import PlanBody, PlannedCardView, PlanView
from lllm3090d.wire_plans import EngineCheckView

PREVIEW_RUN = "0" * 8  # stands in a command line where a launch has its identity


@dataclass(frozen=True, slots=True)
class _Engine:
    """The engine that is used next."""

    build: Build
    capabilities: Capabilities


@dataclass(frozen=True, slots=True)
class _Question:
    """One model on one card.

    Attributes:
        model: what is planned.
        planner: the question.
        card: the card as it would be empty, for its profile and reserves.
        view: the card as it is told.
        budget: what it can give.
        ours: of our own models on it.
        notes: what a person should know of how this was asked.
        argv: the command line of a plan; () where no engine here could carry it out.
        check: asks the engine what a plan takes, without holding a thread; None where nobody wants to know.
        state: the card as it was read; None where it is only thought of.
        holders: our models that run.
        held: what each run holds of the card, bytes by run.
        now_s: on the scheduler's clock.
        host: what host memory beside the card can give; None where nobody limits it.
        asked: what was asked for, to be asked again with a change.
        placed: on which cards of this machine a plan lies; None for another one.
        free_bytes: really free on the card now, less what loading models will take.
        given_back_bytes: what the model gives back first, where it is loaded; None where it is not.
    """

    model: FoundModel
    planner: Planner
    card: EmptyCard
    view: PlannedCardView
    budget: Budget
    ours: tuple[Reservation, ...]
    notes: tuple[str, ...]
    argv: Callable[[Plan], tuple[str, ...]]
    check: Callable[[Plan], Awaitable[EngineCheckView]] | None = None
    state: CardState | None = None
    holders: tuple[Holder, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    now_s: float | None = None
    host: Budget | None = None
    asked: Wish = NOBODY
    placed: Callable[[Plan], Placed] | None = None
    free_bytes: int | None = None
    given_back_bytes: int | None = None


class Previews:
    """Answers questions about plans; holds nothing and starts nothing."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    @cached_property
    def _checks(self) -> EngineChecks:
        """Made when somebody first asks for one."""
        lookup = self._daemon.lookup
        return EngineChecks(lookup, lookup.dry_runs, lookup.dry_run_queue)

    async def plan(self, body: PlanBody) -> PlanView:
        """The plan that a request describes.

        Raises:
            LlmError: what a load would be refused with; INVALID_REQUEST for a card that cannot be.
        """
        daemon = self._daemon
        await daemon.look_for_desktop()
        known = await asyncio.to_thread(known_models, daemon.settings)
        try:
            model = await asyncio.to_thread(daemon.lookup.model, body.model)
        except LlmError as error:
            entry = known.named(body.model) if error.code in NOT_ON_DISK else None
            if entry is None:
                raise
            policy, engine = daemon.scheduler.policy, await asyncio.to_thread(self._engine)
            card = self._card(body, self._machine(daemon.observe(), engine))
            notes = assumed_card(body, card, daemon.observe().card)
            if not isinstance(engine, LlmError):
                notes += assumed_build(card, engine.capabilities.backend)
            return catalogue_plan(entry, card, body, policy.plan, policy.reserves, notes=notes)
        engine = await asyncio.to_thread(self._engine)
        if isinstance(model, FoundUnruled):
            return await self._unruled(body, model, engine, known).plan(daemon.lookup)
        if is_hypothetical(body):
            question = self._elsewhere(body, model, engine)
        elif isinstance(engine, LlmError):
            raise engine
        else:
            policy, cards = daemon.scheduler.policy, daemon.observe()
            event = await learnt(_event(body, model, engine), daemon.lookup.learning, policy, cards)
            question = self._here(body, model, engine, event)
        question = _predicting(question, known)
        if known.problem is not None:
            question = replace(question, notes=(*question.notes, _left_out(known.problem)))
        if body.check:
            question = replace(question, check=self._check(question, engine))
        plan = await asyncio.to_thread(_planned, question, known)
        check = await question.check(plan) if question.check else None
        return await asyncio.to_thread(_answer, question, known, plan, check)

    def _unruled(
        self, body: PlanBody, model: FoundUnruled, engine: _Engine | LlmError, known: KnownModels
    ) -> UnruledPreview:
        """The same question about a model that only the engine can price."""
        if isinstance(engine, LlmError):
            raise engine
        scheduler, observation = self._daemon.scheduler, self._daemon.observe()
        event = _event(body, model, engine)
        extra = extra_of(event, scheduler.policy.extra_arguments)
        card = self._card(body, self._machine(observation, engine))
        notes = section_note(event, extra, scheduler.policy.models)
        notes += () if known.problem is None else (_left_out(known.problem),)
        there, assumed = is_hypothetical(body), tuple[str, ...]()
        if there:
            assumed = assumed_build(card, engine.capabilities.backend)
            notes = (*assumed_card(body, card, observation.card), *assumed, *notes)
        own = frozenset() if there else scheduler.given_back(model.checkpoint.name)
        given, given_back = scheduler.rooms(observation, own), _given_back_bytes(scheduler, own)
        notes += _about_those_there((), given_back)
        usable = usable_cards(event, observation, given)
        best = max(usable, key=lambda uuid: given.cards[uuid].grantable_bytes)  # it is on one card alone
        return UnruledPreview(
            event=event,
            model=model.unruled,
            policy=scheduler.policy,
            card=card,
            view=card_view_of(card, empty=there),
            budget=card.budget if there else given.cards[best],
            room=Room(card.budget.grantable_bytes, giver=giver_text(card))
            if there
            else room_for(event, observation, given),
            known=known,
            asked=replace(_asked(body, model, extra, event.arguments), reloads=bool(own)),
            notes=notes,
            argv=lambda plan: (
                ()
                if assumed
                else self._argv(model, engine, plan, extra, _sight(engine, observation, (best,)))
            ),
            state=None if there else observation.of(best),
            ours=() if there else _without(own, scheduler.ledger.on(best)),
            host=None if there else given.host,
            free_bytes=None if there else scheduler.rooms(observation).cards[best].live_bytes,
            given_back_bytes=given_back,
            check=body.check,
        )

    def _check(
        self, question: _Question, engine: _Engine | LlmError
    ) -> Callable[[Plan], Awaitable[EngineCheckView]]:
        """How the engine is asked; of another card, or with another backend, it is asked off the card."""
        if isinstance(engine, LlmError):
            raise engine
        backend = question.planner.features.backend
        if question.planner.card_kind is CardKind.CPU:
            backend = Backend.CPU
        several = len(self._daemon.observe().cards) > 1
        here = not question.view.empty and backend is engine.capabilities.backend and not several
        free = question.free_bytes if here and backend is not Backend.CPU else None
        asked = Asked(
            engine.build,
            engine.capabilities,
            backend,
            free,
            "" if here else _aside(question.card, several=several),
        )
        return lambda plan: self._checks.check(question.model, asked, plan)

    def _here(self, body: PlanBody, model: FoundModel, engine: _Engine, event: LoadRequested) -> _Question:
        """What a load would get now."""
        scheduler, observation = self._daemon.scheduler, self._daemon.observe()
        extra = extra_of(event, scheduler.policy.extra_arguments)
        own = scheduler.given_back(model.checkpoint.name)
        asked = replace(_asked(body, model, extra, event.arguments), reloads=bool(own))
        event = scheduler.aimed(event, observation, own)
        victims = scheduler.would_evict(event, observation, own)
        given = scheduler.rooms(observation, own | frozenset(each.run for each in victims))
        usable = usable_cards(event, observation, given)
        state = observation.of(usable[0]) or observation.main
        card = emptied(self._machine(observation, engine, state), scheduler.policy.reserves)
        given_back = _given_back_bytes(scheduler, own)

        def seen(plan: Plan) -> Sight | None:
            return _sight(engine, observation, cards_of_plan(plan, observation, usable))

        def placed(plan: Plan) -> Placed:
            on, cards = cards_of_plan(plan, observation, usable), cards_of(observation)
            budget = together([(card_name(observation, each), given.cards[each]) for each in on])
            return Placed(parts_of(plan, cards, on), budget, variables(seen(plan)))

        return _Question(
            model=model,
            planner=scheduler.planner(event, observation, given),
            card=card,
            view=card_view_of(card, empty=False),
            budget=given.cards[usable[0]],
            ours=_without(own, scheduler.ledger.on(usable[0])),
            notes=(
                *section_note(event, extra, scheduler.policy.models),
                *_about_those_there(victims, given_back),
            ),
            argv=lambda plan: self._argv(model, engine, plan, extra, seen(plan)),
            state=state,
            holders=holders(
                [each for each in scheduler.instances if each.run not in own], scheduler.clock()
            ),
            held={run: size for run, size in held_now(state, scheduler.ledger).items() if run not in own},
            now_s=scheduler.clock(),
            host=given.host,
            asked=asked,
            placed=placed,
            free_bytes=scheduler.rooms(observation).cards[usable[0]].live_bytes,
            given_back_bytes=given_back,
        )

    def _elsewhere(self, body: PlanBody, model: FoundModel, engine: _Engine | LlmError) -> _Question:
        """What a card would give that is not there, or not empty."""
        policy = self._daemon.scheduler.policy
        observation = self._daemon.observe()
        card = self._card(body, self._machine(observation, engine))
        host = HostMemoryReader().read()
        room = max(0, host.total_bytes - host_reserve_bytes(host.total_bytes))
        extra, given_notes = NOTHING, tuple[str, ...]()
        request = with_section(plan_request(body), policy.models.get(model.checkpoint.name))
        if not isinstance(engine, LlmError):
            event = _event(body, model, engine)
            extra = extra_of(event, policy.extra_arguments)
            request = asked_of(event, extra, policy.models)
            given_notes = section_note(event, extra, policy.models)
        elif body.arguments:
            raise engine  # nobody could say whether it takes them
        offered, notes, argv = self._offered(model, card, engine, observation, extra)
        notes = (*given_notes, *assumed_card(body, card, observation.card), *notes)
        return _Question(
            model=model,
            planner=Planner(
                facts=model.facts,
                request=request,
                policy=extra.policy(policy.plan),
                features=offered,
                card_kind=card.kind,
                room=Room(
                    card.budget.grantable_bytes,
                    None if card.kind is CardKind.CPU else room,
                    giver=giver_text(card),
                ),
                projector=model.projector,
                drafter=model.drafter,
            ),
            card=card,
            view=card_view_of(card),
            budget=card.budget,
            ours=(),
            notes=notes,
            argv=argv,
            asked=_asked(body, model, extra, body.arguments),
        )

    def _offered(  # what a command line is made of
        self,
        model: FoundModel,
        card: EmptyCard,
        engine: _Engine | LlmError,
        observation: Observation,
        extra: ExtraArguments,
    ) -> tuple[Features, tuple[str, ...], Callable[[Plan], tuple[str, ...]]]:
        """What an engine for a card offers, what of that is assumed, and the command line of a plan with it."""
        if isinstance(engine, LlmError):
            note = "no engine can be asked here: the usual options of one are assumed"
            return Features(card.backend), (note,), lambda _: ()
        backend = engine.capabilities.backend
        its = observation.card if card.present else Card(card.kind, card.profile.id, card.profile.name, None)
        offered = replace(features(engine.capabilities, its, observation.host), backend=card.backend)
        assumed = assumed_build(card, backend)
        if not assumed:
            return offered, (), lambda plan: self._argv(model, engine, plan, extra)
        return offered, assumed, lambda _: ()

    def _card(self, body: PlanBody, machine: Machine) -> EmptyCard:
        reserves = self._daemon.scheduler.policy.reserves
        if not is_hypothetical(body):
            return emptied(machine, reserves)
        return wished(body, machine, HostMemoryReader().read().total_bytes, reserves)

    @staticmethod
    def _machine(
        observation: Observation, engine: _Engine | LlmError, state: CardState | None = None
    ) -> Machine:
        backend = None if isinstance(engine, LlmError) else engine.capabilities.backend
        of = state or observation.main
        return Machine(of.card, of.read(), observation.desktop_active, backend)

    def _engine(self) -> _Engine | LlmError:
        """The engine that is used next, or why there is none; blocking."""
        try:
            return _Engine(*self._daemon.lookup.engine())
        except LlmError as error:
            return error

    def _argv(
        self,
        model: FoundModel | FoundUnruled,
        engine: _Engine,
        plan: Plan,
        extra: ExtraArguments,
        seen: Sight | None = None,
    ) -> tuple[str, ...]:
        checkpoint, sockets = model.checkpoint, self._daemon.settings.engine_sockets_dir
        launch = engine_launch(
            engine.build,
            engine.capabilities,
            checkpoint.path,
            plan,
            socket_path(sockets, checkpoint.name, PREVIEW_RUN),
            checkpoint.name,
            projector_path=checkpoint.projector.path if checkpoint.projector else None,
            drafter_path=checkpoint.drafter.path if checkpoint.drafter and plan.launch.drafter else None,
            extra=extra,
            inherited=self._daemon.scheduler.policy.inherited_environment,
            sight=seen,
            reasoning=self._daemon.scheduler.policy.reasoning,
            reasoning_words=model.facts.reasoning if isinstance(model, FoundModel) else (),
        )
        return launch.argv


def _sight(engine: _Engine, observation: Observation, uuids: tuple[str, ...]) -> Sight | None:
    """How the engine would be kept to these cards."""
    chosen = [state.card for uuid in uuids if (state := observation.of(uuid)) is not None]
    return sight(engine.capabilities, cards_of(observation), chosen)


def _event(body: PlanBody, model: FoundModel | FoundUnruled, engine: _Engine) -> LoadRequested:
    """The load that is asked about."""
    ruled = model if isinstance(model, FoundModel) else None
    return LoadRequested(
        token="preview",  # noqa: S106  # names a request, guards nothing
        run=PREVIEW_RUN,
        checkpoint=model.checkpoint,
        facts=model.facts if isinstance(model, FoundModel) else model.unruled,
        request=plan_request(body),
        build=engine.build,
        capabilities=engine.capabilities,
        projector=ruled.projector if ruled else None,
        drafter=ruled.drafter if ruled else None,
        arguments=body.arguments,
    )


def _predicting(question: _Question, known: KnownModels) -> _Question:
    """The same question, with speeds of the very file on this card, from which a tier's is predicted."""
    entry, planner = known.entry_of(question.model.checkpoint), question.planner
    speeds = entry.speeds if entry is not None else ()
    return replace(
        question,
        planner=replace(planner, features=predicting(planner.features, speeds, question.card.profile)),
    )


def _without(gone: frozenset[str], reserved: Sequence[Reservation]) -> tuple[Reservation, ...]:
    return tuple(each for each in reserved if each.run not in gone)


def _given_back_bytes(scheduler: Scheduler, own: frozenset[str]) -> int | None:
    """What the runs of a model are charged on cards; None where it has none."""
    shares = [each for run in own for each in scheduler.ledger.of(run)]
    on_cards = [each for each in shares if each.where != HOST] or shares
    return sum(each.charged_bytes for each in on_cards) if own else None


def _about_those_there(victims: Sequence[Instance], given_back_bytes: int | None) -> tuple[str, ...]:
    """What a plan has to say of models that run."""
    notes: list[str] = []
    if given_back_bytes is not None:
        notes.append(
            f"it is loaded: its own {mib_text(given_back_bytes)} MiB count as given back, so this is what it would get"
            " if it were unloaded and loaded anew"
        )
    if victims:
        names = ", ".join(each.name for each in victims)
        notes.append(f"a load unloads {names} first, idle now, to make room")
    return tuple(notes)


def _planned(question: _Question, known: KnownModels) -> Plan:
    """The plan, or a refusal that says what else could be done; takes milliseconds."""
    card = question.card
    try:
        return question.planner.plan()
    except LlmError as error:
        if error.code is not ErrorCode.INSUFFICIENT_MEMORY:
            raise
        entry = known.entry_of(question.model.checkpoint)
        can_compute = entry is None or card.profile.can_compute(entry.least_compute_capability)
        verdict = Verdict.TOO_BIG if can_compute else Verdict.CAPABILITY
        raise _refused(error, question, verdict) from error


def _answer(question: _Question, known: KnownModels, plan: Plan, check: EngineCheckView | None) -> PlanView:
    """The plan and what else can be had; takes tens of milliseconds."""
    model, planner, card = question.model, question.planner, question.card
    entry = known.entry_of(model.checkpoint)
    can_compute = entry is None or card.profile.can_compute(entry.least_compute_capability)
    smallest = _smallest(question)
    insight = Insight(
        card=question.view,
        has_projector=model.projector is not None,
        card_can_compute=can_compute,
        notes=question.notes,
        alternatives=alternatives(planner, plan),
        smallest=smallest,
        speed=shown_speed(entry.speeds, card.profile, card.backend) if entry else None,
        engine_check=check,
        given_back_bytes=question.given_back_bytes,
    )
    placed = question.placed(plan) if question.placed else Placed((), question.budget)
    return plan_view(
        model.checkpoint,
        model.facts,
        plan,
        placed.budget,
        argv=question.argv(plan),
        card_kind=card.kind,
        insight=insight,
        parts=placed.parts,
        environment=placed.environment,
    )


def _smallest(question: _Question) -> SmallestCard | None:
    """The smallest card on which the model serves an agent; None of one that generates no text."""
    card, planner = question.card, question.planner
    if (planner.request.purpose or planner.facts.purpose) is not Purpose.CHAT:
        return None
    return smallest_card(
        question.planner, driver_bytes=_driver_bytes(card), desktop_bytes=_desktop_bytes(card)
    )


def _refused(error: LlmError, question: _Question, verdict: Verdict) -> LlmError:
    """The refusal of a load, which also says for which card it is, and which would do."""
    smallest = _smallest(question)
    facts: dict[str, Any] = {"card": question.view.model_dump(mode="json")}
    more: list[Remedy] = []
    if question.view.empty and _fits_headless(question):
        facts["fits_headless"] = True
        more.append(headless())
    if smallest is not None:
        facts["smallest_card_gib"] = smallest.gib
    given_back = ""
    if question.given_back_bytes is not None:
        facts["given_back_bytes"] = question.given_back_bytes
        own = mib_text(question.given_back_bytes)
        given_back = f" It is loaded: its own {own} MiB are counted as given back."
    fits, serves = refusals.fits_with_more(question.planner), refusals.serves_changed(question.planner)
    if question.state is None:
        told = refusals.with_budget(
            error,
            question.budget,
            question.card.kind,
            question.ours,
            verdict,
            fits=fits,
            serves=serves,
            asked=question.asked,
            smallest=smallest,
            more=more,
        )
    else:
        told = refusals.refuse(
            error,
            budget=question.budget,
            card=question.state,
            reservations=question.ours,
            instances=question.holders,
            fits=fits,
            serves=serves,
            verdict=verdict,
            asked=question.asked,
            held=question.held,
            now_s=question.now_s,
            host=question.host,
            smallest=smallest,
            more=more,
            roomier=refusals.in_more_room(question.planner),
        )
    return LlmError(told.code, told.message + given_back, hint=told.hint, **(dict(told.details) | facts))


def _asked(
    body: PlanBody, model: FoundModel | FoundUnruled, extra: ExtraArguments, arguments: tuple[str, ...]
) -> Wish:
    """What was asked for: of this machine's card as a load, of another one as a plan."""
    card = [word for name in ("card", "vram", "backend") for word in _option(name, getattr(body, name))]
    if body.desktop is not None:
        card.append("--desktop" if body.desktop else "--headless")
    return Wish(
        name=model.checkpoint.name,
        request=plan_request(body),
        arguments=arguments,
        stated=extra.stated,
        verb="plan" if is_hypothetical(body) else "load",
        more=tuple(card),
    )


def _option(name: str, value: str | None) -> tuple[str, ...]:
    return () if value is None else (option_of(name), value)


def _fits_headless(question: _Question) -> bool:
    """It would fit if no desktop were on the card."""
    desktop, planner = _desktop_bytes(question.card), question.planner
    if not desktop:
        return False
    # The reserves may exceed the card, so what is gained is not all that the desktop has.
    free = sum(line.bytes for line in question.card.budget.deciding_lines) + desktop
    try:
        replace(planner, room=replace(planner.room, card=max(0, free))).plan()
    except LlmError:
        return False
    return True


def _aside(card: EmptyCard, *, several: bool) -> str:
    """Why an engine is not asked on the card of a plan."""
    if card.present and several:
        why = "a dry run would be on all cards"
    elif card.present:
        why = "the card is not as the plan has it"
    else:
        known = card.profile.id not in NAMELESS_IDS
        why = f"no {card.profile.id} here" if known else "there is no such card here"
    return f"asked on this machine's CPU ({why}), so it says nothing of what lies on the card"


def _driver_bytes(card: EmptyCard) -> int:
    """What the driver keeps, as the budget has it."""
    return -sum(line.bytes for line in card.budget.lines if line.name == "driver")


def _desktop_bytes(card: EmptyCard) -> int:
    """What is kept for a desktop, as the budget has it."""
    return -sum(line.bytes for line in card.budget.lines if line.name == "desktop reserve")


def _left_out(problem: LlmError) -> str:
    return f"own entries of the catalogue are left out: {problem.message}"
