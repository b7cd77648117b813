"""How long the scheduler takes to decide, with many instances and many who wait.

    python -m bench.scheduling [--samples N]

A card that is full of models of 2 GiB, all busy or in use, and clients that wait for as many others. Timed are the
answers of :meth:`Scheduler.handle`: to a load that comes (decided, then put behind those who wait), to a look at the
cards and engines (the first of those who wait is decided anew), and to a load of a model that serves. The same with ten
times as many; the ratio tells whether time grows faster than what there is.

Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import _support as support
from bench.planning import p95, timed_ms
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.engines.capabilities import Build
from lllm3090d.gpus.readings import CardProcess, MemoryReading
from lllm3090d.planning.planner import CacheType, PlanPolicy, PlanRequest
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.serving.events import (
    Activity,
    EngineReady,
    LoadRequested,
    Looked,
    Observation,
    StartFinished,
)
from lllm3090d.serving.instance import SERVING
from lllm3090d.serving.observation import CardState
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.scheduler import Scheduler
from tests.fakes.simulated_machine import CAPABILITIES, CARD, DRIVER_BYTES, GIB, model_facts

INSTANCES, WAITERS, TIMES = 50, 500, 10
MEDIAN_LIMIT_MS, RATIO_LIMIT = 1.0, 15.0
MODEL_GIB = 2.0
CONTEXT_TOKENS = 8192
LOAD, LOOK, SERVES = "a load that comes", "a look at everything", "a load of what serves"


@dataclass
class House:
    """A scheduler with so many instances and waiters, on a card that they fill."""

    scheduler: Scheduler
    total_bytes: int
    numbers: itertools.count[int]

    @classmethod
    def filled(cls, instances: int, waiters: int) -> House:
        """All instances are busy, and everybody else waits."""
        policy = Policy(
            plan=PlanPolicy(CacheType.Q8_0, 2048, 512, 8, 1024, 1024),
            reserves=ReservePolicy(512, 2400),
            stop_timeout_s=15,
            engine_sockets_dir=Path("/run/user/1000/lllm3090d/engines"),
            inherited_environment={},
            queue_timeout_s=1e9,
        )
        house = cls(Scheduler(policy, lambda: 0.0), instances * 4 * GIB, itertools.count(1))
        for number in range(instances):
            house.bring_up(f"model-{number}")
        # Nothing is left beside what they hold.
        house.total_bytes = DRIVER_BYTES + sum(house.held().values())
        house.scheduler.handle(Looked(house.activity()), house.observation())
        for number in range(waiters):
            house.scheduler.handle(house.request(f"waiter-{number}"), house.observation())
        assert len(house.scheduler.pending) == waiters
        return house

    def request(self, name: str) -> LoadRequested:
        """A load of a model."""
        number = next(self.numbers)
        path = Path(f"/models/{name}/model.gguf")
        return LoadRequested(
            token=f"token-{number}",
            run=f"{number:08x}",
            checkpoint=Checkpoint(name, path, (path,), int(MODEL_GIB * GIB)),
            facts=FACTS,
            request=PlanRequest(context_tokens=CONTEXT_TOKENS, parallel=1),
            build=Build(Path(sys.executable), (), "bench", False),
            capabilities=CAPABILITIES,
        )

    def bring_up(self, name: str) -> None:
        """Load it, up to its readiness."""
        request = self.request(name)
        self.scheduler.handle(request, self.observation())
        self.scheduler.handle(StartFinished(request.run, None))
        self.scheduler.handle(EngineReady(request.run, {}))
        instance = self.scheduler.by_run(request.run)
        assert instance is not None and instance.state in SERVING

    def held(self) -> Mapping[str, int]:
        """Every run holds what it is charged."""
        return {each.run: each.charged_bytes for each in self.scheduler.ledger.on(CARD.uuid)}

    def activity(self) -> Mapping[str, Activity]:
        """Everybody is busy."""
        return {each.run: Activity(True, 1000) for each in self.scheduler.instances}

    def observation(self) -> Observation:
        """The card now."""
        held = self.held()
        used = sum(held.values())
        reading = MemoryReading(
            0.0,
            self.total_bytes,
            DRIVER_BYTES,
            used,
            self.total_bytes - DRIVER_BYTES - used,
            tuple(CardProcess(number, size) for number, size in enumerate(held.values(), 100)),
        )
        return Observation((CardState(CARD, reading, None, held, held),), False)

    def measure(self, samples: int) -> Mapping[str, Sequence[float]]:
        """Milliseconds of each kind of event."""
        observation, looked = self.observation(), Looked(self.activity())
        loads = [self.request(f"late-{number}") for number in range(samples)]
        serves = [self.request(f"model-{number}") for number in range(min(samples, INSTANCES))]
        return {
            LOAD: [timed_ms(lambda e=each: self.scheduler.handle(e, observation)) for each in loads],  # type: ignore[misc]  # bound in time
            LOOK: [timed_ms(lambda: self.scheduler.handle(looked, observation)) for _ in range(samples)],
            SERVES: [timed_ms(lambda e=each: self.scheduler.handle(e, observation)) for each in serves],  # type: ignore[misc]  # bound in time
        }


FACTS = model_facts(MODEL_GIB)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the time of a decision")
    parser.add_argument("--samples", type=int, default=50, help="events of each kind (default: 50)")
    samples = parser.parse_args().samples
    print(support.machine_line() + "\n")
    sizes = [(INSTANCES, WAITERS), (TIMES * INSTANCES, TIMES * WAITERS)]
    found = {size: House.filled(*size).measure(samples) for size in sizes}
    rows = [
        (kind, f"{size[0]}", f"{size[1]}", f"{statistics.median(values):.3f}", f"{p95(values):.3f}")
        for size, kinds in found.items()
        for kind, values in kinds.items()
    ]
    print(support.table(("", "instances", "waiters", "median ms", "p95 ms"), rows))
    targets = []
    for kind in (LOAD, LOOK, SERVES):
        small, large = (statistics.median(found[size][kind]) for size in sizes)
        targets.append(support.Target(f"{kind}, median", small, MEDIAN_LIMIT_MS, "ms"))
        targets.append(support.Target(f"{kind}, {TIMES} times as many", large / small, RATIO_LIMIT, "times"))
    return support.report_targets(targets)


if __name__ == "__main__":
    sys.exit(main())
