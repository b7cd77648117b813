"""Asking the engine for a plan of a model without a rule: dry runs, made beside the loop and the writer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from lllm3090d.checkpoints.fingerprint import fingerprint
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.unruled import UnruledModel
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.dry_run import DryRun
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.launch import Launch
from lllm3090d.planning.planner import LEAST_DRAFTED_WINDOW_TOKENS, CappedBy, Plan
from lllm3090d.planning.projection import Permission, Projection, Where, may_run
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import Room
from lllm3090d.planning.unruled import Steps, UnruledQuestion, most_room_bytes
from lllm3090d.serving import refusals
from lllm3090d.serving.admission import rooms
from lllm3090d.serving.events import LoadRequested, Observation
from lllm3090d.serving.extras import asked_of, extra_of
from lllm3090d.serving.fitting import room_for, usable_cards
from lllm3090d.serving.instance import ON_THE_WAY_DOWN, ON_THE_WAY_UP, SERVING, InstanceState
from lllm3090d.serving.ledger import ReservationState
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Ground:
    """What an offer is made for.

    Attributes:
        backend: what the plan counts on; of a card.
        card_kind: whose memory is managed.
        room: what it can give.
        card_free_bytes: free on the card now, for the dry run itself; None where it must be left alone.
        most_tokens: context of all slots that is not exceeded where none is asked for; None for no such limit.
    """

    backend: Backend
    card_kind: CardKind
    room: Room
    card_free_bytes: int | None = None
    most_tokens: int | None = None


class Offers:
    """Plans of models without a rule for loads that are about to be decided.

    Args:
        lookup: has the dry runs.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._under_way: dict[str, asyncio.Task[Plan]] = {}  # by token of the load
        self._withdrawn: set[str] = set()

    async def offered(
        self, event: LoadRequested, scheduler: Scheduler, observe: Callable[[], Observation]
    ) -> LoadRequested:
        """The load with its plan, where only the engine can price it; any other as it is: it is planned when it is
        admitted. What runs needs no plan: it is compared with what was asked for.

        Raises:
            LlmError: as :func:`offer`; CARD_UNREADABLE; LOAD_CANCELLED where it was withdrawn.
        """
        model, current = event.facts, scheduler.instance(event.checkpoint.name)
        if not isinstance(model, UnruledModel):
            return event
        if current is not None and current.state in SERVING | ON_THE_WAY_UP:
            return event
        made = asyncio.create_task(self._made(event, model, scheduler, observe()))
        self._under_way[event.token] = made
        try:
            return replace(event, offer=await made)
        except asyncio.CancelledError:
            if event.token in self._withdrawn:
                raise refusals.cancelled(event.checkpoint.name) from None
            made.cancel()
            raise
        finally:
            del self._under_way[event.token]
            self._withdrawn.discard(event.token)

    async def _made(
        self, event: LoadRequested, model: UnruledModel, scheduler: Scheduler, observation: Observation
    ) -> Plan:
        """The plan for the room there is; where that is not worth having, for the room of others.

        In the order of :class:`lllm3090d.serving.admitting.Decider`, which decides whether they go.
        """
        reserves, offers, fitting = scheduler.policy.reserves, list[Plan](), list[Plan]()
        kind, now = observation.card.kind, scheduler.rooms(observation)
        live = now.cards[usable_cards(event, observation, now)[0]].live_bytes
        free = None if kind is CardKind.CPU else live
        for gone in _gone(event, scheduler, observation):
            given = rooms(observation, scheduler.ledger, reserves, gone)
            room = room_for(event, observation, given)
            ground = Ground(event.capabilities.backend, kind, room, free)
            plan = await offer(self._lookup, event, model, scheduler.policy, ground)
            offers.append(plan)
            if plan.quote.total_bytes(Place.CARD) > most_room_bytes(room):
                continue
            fitting.append(plan)
            if plan.capped_by is not CappedBy.MEMORY or plan.window_tokens >= LEAST_DRAFTED_WINDOW_TOKENS:
                return plan
        smaller = None if fitting else await self._smaller(event, model, scheduler, observation, free)
        return smaller or (fitting or offers)[0]

    async def _smaller(
        self,
        event: LoadRequested,
        model: UnruledModel,
        scheduler: Scheduler,
        observation: Observation,
        free: int | None,
    ) -> Plan | None:
        """As much of the context as there is room for, where the load says that it would do."""
        least, asked = event.least_context_tokens, event.request.context_tokens
        if least is None or asked is None or not least < asked:
            return None
        room = room_for(event, observation, scheduler.rooms(observation))
        ground = Ground(event.capabilities.backend, observation.card.kind, room, free, most_tokens=asked)
        wish = replace(event, request=replace(event.request, context_tokens=None))
        plan = await offer(self._lookup, wish, model, scheduler.policy, ground)
        fits = plan.quote.total_bytes(Place.CARD) <= most_room_bytes(room)
        return plan if fits and plan.context_tokens >= least else None

    def withdraw(self, token: str) -> None:
        """Nobody wants this load any more."""
        made = self._under_way.get(token)
        if made is not None:
            self._withdrawn.add(token)
            made.cancel()


def _gone(event: LoadRequested, scheduler: Scheduler, observation: Observation) -> Iterator[frozenset[str]]:
    """Who might be thought away for a load: those that are ending, those that are idle too, the others too."""
    ending = {r.run for r in scheduler.ledger if r.state is ReservationState.RELEASING}
    ending |= {i.run for i in scheduler.instances if i.state in ON_THE_WAY_DOWN - {InstanceState.STUCK}}
    yield frozenset(ending)
    if event.request.context_tokens is not None or not event.may_evict:
        return  # the price is the same whatever the room
    idle = ending | scheduler.evictable(observation)
    if idle > ending:
        yield frozenset(idle)
    others = {i.run for i in scheduler.instances if i.state in SERVING | ON_THE_WAY_UP and not i.pinned}
    if event.may_wait and not others <= idle:
        yield frozenset(idle | others)


async def offer(
    lookup: Lookup, event: LoadRequested, model: UnruledModel, policy: Policy, ground: Ground
) -> Plan:
    """A plan of the size that was asked for, or of the largest that fits; the smallest, where nothing does.

    Cancelling gives up the place of a dry run that waits; one that is made goes on, and its result is remembered.

    Args:
        lookup: has the dry runs, and those who wait for them.
        event: the load, or what would be one.
        model: without a rule.
        policy: of the settings.
        ground: what the plan is made for.

    Raises:
        LlmError: as :meth:`UnruledQuestion.steps` and :meth:`DryRuns.project`; ENGINE_UNUSABLE where too many dry
            runs are waiting; INSUFFICIENT_MEMORY where there is no room for a dry run.
    """
    extra = extra_of(event, policy.extra_arguments)
    request = asked_of(event, extra, policy.models)
    slots = request.parallel or 1
    permission = _permission(event.capabilities, model, slots, ground)
    if permission.where is Where.NOWHERE:
        raise LlmError(
            ErrorCode.INSUFFICIENT_MEMORY,
            f"{model.title} can only be priced by a dry run of the engine, which has no room: {permission.reason}.",
            hint="Close something, and try again.",
        )
    on_host = ground.card_kind is CardKind.CPU
    question = UnruledQuestion(
        model=model,
        request=request,
        policy=extra.policy(policy.plan),
        backend=Backend.CPU if on_host else ground.backend,
        card_kind=ground.card_kind,
        where=permission.where,
        context_checkpoints=extra.context_checkpoints or 0,
        left_out=_left_out(event.checkpoint),
        most_tokens=ground.most_tokens,
    )
    question.check()  # before a file is read
    template = await asyncio.to_thread(
        prepared_run, lookup, event.checkpoint, event.build, event.capabilities, permission.where
    )
    return await driven(
        question.steps(most_room_bytes(ground.room)), lambda launch: _projected(lookup, template, launch)
    )


async def driven(steps: Steps, project: Callable[[Launch], Awaitable[Projection]]) -> Plan:
    """Make the dry runs that a search asks for, one after the other, until it has a plan."""
    try:
        launch = next(steps)
        while True:
            try:
                projection = await project(launch)
            except LlmError as error:
                launch = steps.throw(error)
            else:
                launch = steps.send(projection)
    except StopIteration as end:
        return cast(Plan, end.value)
    finally:
        steps.close()


def prepared_run(
    lookup: Lookup, checkpoint: Checkpoint, build: Build, capabilities: Capabilities, where: Where
) -> Callable[[Launch], DryRun]:
    """What is the same in all dry runs of a checkpoint; reads a few MiB of it, and the first time all of the build."""
    digest = lookup.engines.digest(build)
    mark = fingerprint(checkpoint.shards, lookup.header)
    return lambda launch: DryRun(build, capabilities, digest, checkpoint.path, mark, launch, where)


async def _projected(lookup: Lookup, run_of: Callable[[Launch], DryRun], launch: Launch) -> Projection:
    run = run_of(launch)
    known = await asyncio.to_thread(lookup.dry_runs.known, run)
    if known is not None:
        return known
    waiting = lookup.dry_run_queue.submit(run)
    if waiting is None:
        raise LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            "The engine is not asked for a dry run: other dry runs are waiting.",
            hint="Try again in a moment.",
        )
    return await asyncio.wrap_future(waiting)


def _permission(capabilities: Capabilities, model: UnruledModel, slots: int, ground: Ground) -> Permission:
    """On what the dry runs are made: on the card only where there is one, and where its states are known."""
    backend = capabilities.backend
    here = ground.card_kind is not CardKind.CPU and ground.backend is backend
    alone = (
        here and len(capabilities.devices) == 1
    )  # on several it would tell their sum, for a launch on one
    states = model.state_bytes_per_slot
    return may_run(
        backend if here else Backend.CPU,
        card_free_bytes=ground.card_free_bytes if alone else None,
        host_available_bytes=HostMemoryReader().read().free_bytes,
        state_bytes=None if states is None else states * slots,
    )


def _left_out(checkpoint: Checkpoint) -> tuple[str, ...]:
    companions = (("its projector", checkpoint.projector), ("its drafter", checkpoint.drafter))
    return tuple(what for what, companion in companions if companion is not None)
