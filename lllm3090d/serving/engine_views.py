"""Engines as clients see them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lllm3090d.engines.builds import Selection
from lllm3090d.engines.capabilities import Build, Capabilities
from lllm3090d.engines.gpu_code import best_fit
from lllm3090d.errors import LlmError
from lllm3090d.gpus.readings import Card
from lllm3090d.serving.engines import EngineState, is_stale, release_tag
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.running import Instance
from lllm3090d.serving.views import path_text
from lllm3090d.wire import (
    EngineBuildView,
    EngineDetails,
    EngineOptionView,
    Engines,
    EngineView,
    RunningEngineView,
)

# Without a process: nothing of theirs runs.
NOT_RUNNING = frozenset(
    {InstanceState.PLANNED, InstanceState.QUEUED, InstanceState.GONE, InstanceState.FAILED}
)


def build_view(
    state: EngineState, selection: Selection, pin: str, cards: Sequence[Card] = ()
) -> EngineBuildView:
    """One build; ``cards`` are those of this machine, on which its code may or may not run."""
    found, capabilities = state.found, state.capabilities
    tag = release_tag(found.tag, capabilities)
    ability = capabilities.dry_run if capabilities else None
    return EngineBuildView(
        name=found.name,
        kind=found.kind,
        source=found.source,
        server=path_text(found.server),
        offered=found.is_offered and not selection.locked,
        next=selection.build is not None and selection.build.server == found.server,
        version=capabilities.version if capabilities else None,
        tag=tag,
        stale=is_stale(tag, pin),
        gpu_architecture=found.gpu_architecture,
        code_fit=best_fit(found.gpu_architecture, tuple(card.compute_capability for card in cards)),
        backend=capabilities.backend if capabilities else None,
        devices=capabilities.devices if capabilities else (),
        dry_run=ability is not None and ability.can_project,
        problem=state.problem.problem() if state.problem else None,
    )


def engines_view(
    states: Iterable[EngineState],
    selection: Selection,
    running: Iterable[Instance],
    capabilities: Capabilities | None,
    pin: str,
    *,
    cards: Sequence[Card] = (),
) -> Engines:
    """All builds, the choice, and what runs; ``capabilities`` are those of the next start's build."""
    return Engines(
        engines=tuple(build_view(state, selection, pin, cards) for state in states),
        next=selection.build.name if selection.build else None,
        next_problem=selection.problem.problem() if selection.problem else None,
        choice=selection.choice,
        choice_problem=selection.choice_problem.problem() if selection.choice_problem else None,
        locked=selection.locked,
        pin=pin,
        running=running_views(running, selection.build, capabilities),
    )


def running_views(
    instances: Iterable[Instance], build: Build | None, capabilities: Capabilities | None
) -> tuple[RunningEngineView, ...]:
    """The engines that run, and whether each is the one that the next start uses."""
    views = []
    for instance in instances:
        if instance.state in NOT_RUNNING:
            continue
        record = instance.record
        views.append(
            RunningEngineView(
                model=instance.name,
                run=instance.run,
                server=record.engine_server,
                version=record.engine_version,
                is_next=build is not None
                and record.engine_server == path_text(build.server)
                and capabilities is not None
                and record.engine_version == capabilities.version,
            )
        )
    return tuple(views)


def details_view(
    state: EngineState,
    selection: Selection,
    pin: str,
    digest: str | None,
    digest_problem: LlmError | None,
    *,
    cards: Sequence[Card] = (),
) -> EngineDetails:
    """Everything about one build."""
    capabilities, build = state.capabilities, state.build
    ability = capabilities.dry_run if capabilities else None
    return EngineDetails(
        engine=build_view(state, selection, pin, cards),
        library_path=tuple(map(path_text, build.library_path)) if build else (),
        digest=digest,
        digest_problem=digest_problem.problem() if digest_problem else None,
        dry_run_program=path_text(ability.program) if ability else None,
        dry_run_flags=tuple(sorted(ability.flags)) if ability else (),
        options=tuple(
            EngineOptionView(
                names=option.names,
                value=option.value or None,
                allowed=option.allowed,
                default=option.default,
                variables=option.variables,
            )
            for option in (capabilities.options if capabilities else ())
        ),
    )


def next_engine_view(build: Build, capabilities: Capabilities, pin: str) -> EngineView:
    """The engine that the next start uses, for the status."""
    tag = release_tag(build.tag, capabilities)
    return EngineView(
        server=path_text(build.server),
        source=build.source,
        locked=build.locked,
        version=capabilities.version,
        backend=capabilities.backend,
        devices=capabilities.devices,
        name=build.name or None,
        tag=tag,
        stale=is_stale(tag, pin),
    )
