"""A decision made a unit: its record, its command line, what it reserves of each memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.engines.arguments import launch as engine_launch
from lllm3090d.engines.visibility import sight, variables
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.calibration import Calibration, CalibrationKey, launch_text
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.admitting import Admit
from lllm3090d.serving.events import LoadRequested, Observation
from lllm3090d.serving.extras import extra_of
from lllm3090d.serving.fitting import cards_of
from lllm3090d.serving.ledger import Share
from lllm3090d.serving.observation import HOST
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.unit_spec import Record, UnitSpec, memory_max_bytes, socket_path, unit_spec


@dataclass(frozen=True, slots=True)
class Launched:
    """All that a launch needs."""

    record: Record
    spec: UnitSpec
    shares: tuple[Share, ...]
    argv: tuple[str, ...]
    environment: tuple[str, ...] = ()  # by which it is kept to its cards


def shares_of(plan: Plan, cards: tuple[str, ...], kind: CardKind) -> tuple[Share, ...]:
    """What a launch takes of each memory.

    Args:
        plan: the launch.
        cards: UUIDs of its cards, in the order of its devices; the host's name where host memory is the card.
        kind: of the cards.
    """
    beside = tuple(item for item in plan.quote.items if item.place is Place.HOST)
    if plan.split is not None and len(cards) > 1:
        on_cards = tuple(
            Share(uuid, tuple(ledger.items)) for uuid, ledger in zip(cards, plan.split.ledgers, strict=True)
        )
    else:
        items = tuple(item for item in plan.quote.items if item.place is Place.CARD)
        on_cards = (Share(cards[0], items),)
    if kind is CardKind.CPU or not beside:
        return on_cards
    return (*on_cards, Share(HOST, beside))


def launched(
    event: LoadRequested, decision: Admit, observation: Observation, policy: Policy, wish: PlanRequest
) -> Launched:
    """The unit of an admitted load.

    Args:
        event: the load.
        decision: the plan and its cards.
        observation: the cards.
        policy: from the settings.
        wish: what the load itself asked for, to be told from other loads later.

    Raises:
        LlmError: as :func:`lllm3090d.engines.arguments.launch` and :func:`lllm3090d.engines.visibility.sight`;
            SOCKET_PATH_TOO_LONG.
    """
    plan = decision.plan
    extra = extra_of(event, policy.extra_arguments)
    socket = socket_path(policy.engine_sockets_dir, event.checkpoint.name, event.run)
    projector, drafter = event.checkpoint.projector, event.checkpoint.drafter
    drafts_from: Path | None = None
    if drafter is not None and plan.launch.drafter is not None:
        drafts_from = drafter.path
    cards = cards_of(observation)
    chosen = [state.card for uuid in decision.cards if (state := observation.of(uuid)) is not None]
    seen = sight(event.capabilities, cards, chosen)
    launch = engine_launch(
        event.build,
        event.capabilities,
        event.checkpoint.path,
        plan,
        socket,
        event.checkpoint.name,
        projector_path=projector.path if projector else None,
        drafter_path=drafts_from,
        extra=extra,
        inherited=policy.inherited_environment,
        sight=seen,
        reasoning=policy.reasoning,
        reasoning_words=event.ruled.reasoning if event.ruled else (),
    )
    shares = shares_of(plan, decision.cards, observation.card.kind)
    record = Record.of(
        run=event.run,
        checkpoint=event.checkpoint,
        plan=plan,
        socket=socket,
        engine_version=event.capabilities.version,
        engine_server=event.build.server,
        arguments=extra.shown,
        asked=wish,
        shares=shares,
    )
    spec = unit_spec(
        record=record,
        launch=launch,
        memory_max=memory_max_bytes(plan, observation.card.kind),
        stop_timeout_s=policy.stop_timeout_s,
        inherited=policy.inherited_environment,
        log_files_dir=policy.log_files_dir,
    )
    return Launched(record, spec, shares, launch.argv, variables(seen))


def calibration_for(event: LoadRequested, usable: Sequence[str]) -> Calibration | None:
    """What was learnt that holds for a launch on one of these cards, or on several of them."""
    known = [event.calibrations[uuid] for uuid in usable if uuid in event.calibrations]
    if not known:
        return None
    if len(usable) == 1:
        return known[0]
    worst = max(known, key=lambda each: each.excess_bytes).for_several_cards()
    return replace(worst, has_measured_build=all(each.has_measured_build for each in known))


def key_of(event: LoadRequested, decision: Admit, arguments: tuple[str, ...]) -> CalibrationKey | None:
    """The launch as measurements of it are remembered; None over several cards, and where nobody can tell."""
    known = event.calibrations.get(decision.cards[0])
    if known is None or len(decision.cards) > 1:
        return None
    projector = event.projector if decision.plan.with_projector else None
    return CalibrationKey(known.scope, launch_text(decision.plan.launch, projector, arguments))


def was_measured(event: LoadRequested, key: CalibrationKey | None) -> bool:
    """A launch like this computed a prompt before, so that its peak is known."""
    known = event.calibrations.get(key.scope.card) if key is not None else None
    seen = known.of(key.launch) if known is not None and key is not None else None
    return seen is not None and seen.is_whole
