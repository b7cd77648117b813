"""Our arithmetic for a plan held against the engine's own dry run, for which a client may wait a while."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from lllm3090d.engines.capabilities import Backend, Build, Capabilities
from lllm3090d.engines.dry_run import DryRun, DryRuns
from lllm3090d.engines.dry_run_queue import DryRunQueue
from lllm3090d.errors import LlmError
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.planning import cache
from lllm3090d.planning.launch import Launch
from lllm3090d.planning.planner import Plan
from lllm3090d.planning.projection import Permission, Projection, Where, judge, main_context, may_run
from lllm3090d.serving.lookup import FoundModel, Lookup
from lllm3090d.serving.offering import prepared_run
from lllm3090d.wire_plans import EngineCheckView


@dataclass(frozen=True, slots=True)
class Asked:
    """Of whom, about what.

    Attributes:
        build, capabilities: of the engine.
        backend: what the plan counts on.
        card_free_bytes: free on the card now, less what loading models will take; None where the plan is for
            another card, which is then left alone.
        aside: why the card is left alone; empty where it need not be.
    """

    build: Build
    capabilities: Capabilities
    backend: Backend
    card_free_bytes: int | None
    aside: str = ""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A dry run that may be made.

    Attributes:
        run: what is asked.
        known: its result, where it was made before.
        reason: why it is not made on the card; empty where it is.
    """

    run: DryRun
    known: Projection | None
    reason: str


class EngineChecks:
    """Asks engines what plans take, for callers on the loop.

    Args:
        lookup: for digests and headers.
        runs: the dry runs.
        queue: who waits for them; None makes one.
    """

    def __init__(self, lookup: Lookup, runs: DryRuns, queue: DryRunQueue | None = None) -> None:
        self._lookup = lookup
        self._runs = runs
        self._queue = queue or DryRunQueue(runs)

    async def check(self, model: FoundModel, asked: Asked, plan: Plan) -> EngineCheckView:
        """What the engine projects for a plan beside what we compute; why not, where it cannot be asked.

        The draft's context and the projector are in no dry run; the main context is compared without them. Cancelling
        gives up the place of a dry run that waits.
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
        where = permission.where
        if where is Where.NOWHERE:
            return _nothing(where, f"not asked: {permission.reason}")
        try:
            ready = await asyncio.to_thread(self._prepared, model, asked, launch, permission)
            projection = ready.known
            if projection is None:
                waiting = self._queue.submit(ready.run)
                if waiting is None:
                    return _nothing(where, "not asked: other dry runs are waiting")
                projection = await asyncio.wrap_future(waiting)
            found = judge(model.facts, launch, asked.backend, projection)
        except LlmError as error:
            return _nothing(where, f"not known: {error.message}")
        return EngineCheckView(
            where=where,
            agrees=found.agrees,
            text=f"{found.report()}; {ready.reason}" if ready.reason else found.report(),
            ours=found.ours.lines(),
            engine=found.engine.lines(),
        )

    def _prepared(
        self, model: FoundModel, asked: Asked, launch: Launch, permission: Permission
    ) -> _Prepared:
        """Reads files, a few MiB of the checkpoint and the first time those of the build."""
        run = prepared_run(
            self._lookup, model.checkpoint, asked.build, asked.capabilities, permission.where
        )(launch)
        return _Prepared(
            run, self._runs.known(run), permission.reason and (asked.aside or permission.reason)
        )


def _nothing(where: Where, text: str) -> EngineCheckView:
    return EngineCheckView(where=where, agrees=None, text=text)
