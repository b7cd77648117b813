"""Our arithmetic for a plan held against the engine's own dry run; blocks for as long as that takes."""

from __future__ import annotations

from dataclasses import dataclass

from lllm3090d.checkpoints.fingerprint import fingerprint
from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.dry_run import DryRun, DryRuns
from lllm3090d.errors import LlmError
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.planning import cache
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.projection import Where, judge, main_context, may_run
from lllm3090d.serving.lookup import FoundModel, Lookup
from lllm3090d.wire_plans import EngineCheckView


@dataclass(frozen=True, slots=True)
class Asked:
    """Of whom, about what.

    Attributes:
        build, capabilities: of the engine.
        backend: what the plan counts on.
        card_free_bytes: free on the card now, less what loading models will take; None where the plan is for
            another card, which is then left alone.
    """

    build: Build
    capabilities: Capabilities
    backend: Backend
    card_free_bytes: int | None


def engine_check(
    lookup: Lookup, dry_runs: DryRuns, model: FoundModel, asked: Asked, plan: Plan
) -> EngineCheckView:
    """What the engine projects for a plan beside what we compute; why not, where it cannot be asked.

    The draft's context and the projector are in no dry run; the main context is compared without them.
    """
    launch = main_context(plan.launch)
    states = cache.state_bytes(model.facts, launch.shape(model.facts))
    host = HostMemoryReader().read()
    permission = may_run(
        asked.backend,
        card_free_bytes=asked.card_free_bytes,
        host_available_bytes=host.free_bytes,
        state_bytes=states,
    )
    if permission.where is Where.NOWHERE:
        return EngineCheckView(where=Where.NOWHERE, agrees=None, text=f"not asked: {permission.reason}")
    try:
        projection = dry_runs.project(
            DryRun(
                build=asked.build,
                capabilities=asked.capabilities,
                digest=lookup.engines.digest(asked.build),
                checkpoint_path=model.checkpoint.path,
                checkpoint=fingerprint(model.checkpoint.shards, lookup.header),
                launch=launch,
                where=permission.where,
            )
        )
        found = judge(model.facts, launch, asked.backend, projection)
    except LlmError as error:
        return EngineCheckView(where=permission.where, agrees=None, text=f"not known: {error.message}")
    text = f"{found.report()}; {permission.reason}" if permission.reason else found.report()
    return EngineCheckView(
        where=permission.where,
        agrees=found.agrees,
        text=text,
        ours=found.ours.lines(),
        engine=found.engine.lines(),
    )
