"""How long the scheduler takes to decide, with many instances and many who wait.

    python -m bench.scheduling [--samples N]

A card that is full of models of 2 GiB, all busy or in use, and clients that wait for as many others. Timed are the
answers of :meth:`Scheduler.handle`: to a load that comes (decided, then put behind those who wait), to a look at the
cards and engines (the first of those who wait is decided anew), and to a load of a model that serves. Then cards that
are full of idle models, and loads that must choose among them: on one card and on two, with a context and with the
largest that fits, that need the room of one of them, of several, and of nearly all. Every decision is about another
model, which was planned before, as the list of models does. The same with ten times as many; the ratio tells whether
time grows faster than what there is.

Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import _support as support
from bench.planning import p95, timed_ms
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.engines.capabilities import Build
from lllm3090d.gpus.readings import Card, CardProcess, MemoryReading
from lllm3090d.planning.planner import CacheType, PlanPolicy, PlanRequest, Room
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.serving.events import (
    Activity,
    CancelRequested,
    EngineReady,
    HoldLoads,
    LoadRequested,
    Looked,
    Observation,
    StartFinished,
)
from lllm3090d.serving.instance import SERVING
from lllm3090d.serving.observation import CardState
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.scheduler import Scheduler
from tests.fakes.scheduler_world import CARD, CUDA, TWO_CARDS
from tests.fakes.simulated_machine import CAPABILITIES, DRIVER_BYTES, GIB, model_facts

INSTANCES, WAITERS, TIMES = 50, 500, 10
MEDIAN_LIMIT_MS, RATIO_LIMIT = 1.0, 15.0
MOST_CHOICES = 25
MODEL_GIB = 2.0
CONTEXT_TOKENS = 8192
HOST_BYTES = 8192 * GIB
POLICY = Policy(
    plan=PlanPolicy(CacheType.Q8_0, 2048, 512, 8, 1024, 1024),
    reserves=ReservePolicy(512, 2400),
    stop_timeout_s=15,
    engine_sockets_dir=Path("/run/user/1000/lllm3090d/engines"),
    inherited_environment={},
    queue_timeout_s=1e9,
)
LOAD, LOOK, SERVES = "a load that comes", "a look at everything", "a load of what serves"


@dataclass(frozen=True)
class Scene:
    """A load that needs the room of idle models.

    Attributes:
        needs: of how many, in words.
        size_gib: of its model.
        context_tokens: None for the largest that fits.
    """

    needs: str
    size_gib: float
    context_tokens: int | None

    def kind(self, cards: int) -> str:
        """In the table."""
        context = "largest context" if self.context_tokens is None else f"context {self.context_tokens}"
        return f"{cards} card{'s' * (cards > 1)}, room of {self.needs}, {context}"


@dataclass
class House:
    """A scheduler with so many instances and waiters, on a card that they fill."""

    scheduler: Scheduler
    total_bytes: int
    numbers: itertools.count[int]

    @classmethod
    def filled(cls, instances: int, waiters: int) -> House:
        """All instances are busy, and everybody else waits."""
        house = cls(Scheduler(POLICY, lambda: 0.0), instances * 4 * GIB, itertools.count(1))
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


@dataclass
class IdleHouse(House):
    """Cards that are full of models of which any may go, and clients that wait for as many others."""

    cards: tuple[Card, ...] = (CARD,)
    now_s: list[float] = field(default_factory=lambda: [0.0])
    total: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, instances: int, cards: tuple[Card, ...]) -> IdleHouse:
        """All are idle, each a little longer than the next one, and by turns on each of the cards."""
        now_s = [0.0]
        made = cls(
            Scheduler(POLICY, lambda: now_s[0]), instances * 4 * GIB, itertools.count(1), cards, now_s
        )
        for number in range(instances):
            made.bring_up(f"model-{number}")
            now_s[0] += 1.0
        made.total = {card.uuid: DRIVER_BYTES + sum(made.on(card).values()) for card in cards}
        idle = {each.run: Activity(False, 1000) for each in made.scheduler.instances}
        made.scheduler.handle(Looked(idle), made.observation())
        now_s[0] += 1000.0
        return made

    def request(self, name: str, scene: Scene | None = None) -> LoadRequested:
        """A load of a model, which differs a little from all others."""
        made, number = super().request(name), next(self.numbers)
        size = MODEL_GIB if scene is None else scene.size_gib + number / 1024
        asked = PlanRequest(CONTEXT_TOKENS, 1) if scene is None else PlanRequest(scene.context_tokens)
        return replace(
            made,
            facts=replace(model_facts(size), trained_context_tokens=131_072),
            request=asked,
            capabilities=CAPABILITIES if len(self.cards) == 1 else CUDA,
            card=self.cards[len(self.scheduler.instances) % len(self.cards)].uuid if scene is None else None,
        )

    def on(self, card: Card) -> Mapping[str, int]:
        """What every run holds of a card."""
        return {each.run: each.charged_bytes for each in self.scheduler.ledger.on(card.uuid)}

    def observation(self) -> Observation:
        """The cards now."""
        return Observation(tuple(map(self._state, self.cards)), False, HostMemory(HOST_BYTES, HOST_BYTES))

    def _state(self, card: Card) -> CardState:
        held, total = self.on(card), self.total.get(card.uuid, self.total_bytes)
        used = sum(held.values())
        processes = tuple(CardProcess(number, size) for number, size in enumerate(held.values(), 100))
        reading = MemoryReading(0.0, total, DRIVER_BYTES, used, total - DRIVER_BYTES - used, processes)
        return CardState(card, reading, None, held, held)

    def scenes(self) -> Sequence[Scene]:
        """What is loaded: as much as one model, as six, and as all but the last of both cards together."""
        all_gib = sum(sum(self.on(card).values()) for card in self.cards) / GIB
        sizes = (("one", MODEL_GIB), ("several", 6 * MODEL_GIB), ("nearly all", 0.9 * all_gib - 4.0))
        return [Scene(needs, size, tokens) for needs, size in sizes for tokens in (CONTEXT_TOKENS, None)]

    def choose(self, waiters: int, samples: int) -> Mapping[str, Sequence[float]]:
        """Milliseconds of a look in which the first of those who wait is to have the room of others."""
        scenes = self.scenes()
        loads = [(scene, self.request("new", scene)) for scene in scenes for _ in range(samples)]
        self.scheduler.handle(HoldLoads("held", held=True))  # nothing is decided while they come
        for number, (_, load) in enumerate(loads):
            named = replace(load, checkpoint=replace(load.checkpoint, name=f"new-{number}"))
            self.scheduler.handle(named, self.observation())
            self._plan(load)
        for number in range(max(0, waiters - len(loads))):
            self.scheduler.handle(self.request(f"later-{number}"), self.observation())
        self.scheduler.handle(HoldLoads("free", held=False))
        found: dict[str, list[float]] = {}
        observation = self.observation()
        for scene, load in loads:
            time_ms = timed_ms(lambda: self.scheduler.handle(Looked(), observation))
            assert self.scheduler.pending[0].asked, scene
            found.setdefault(scene.kind(len(self.cards)), []).append(time_ms)
            self.scheduler.handle(CancelRequested(f"cancel {load.token}", load.token))
        return found

    def _plan(self, load: LoadRequested) -> None:
        """As the list of models does, with another context than is loaded."""
        question = self.scheduler.planner(replace(load, request=PlanRequest(2048, 1)), self.observation())
        replace(question, room=Room(HOST_BYTES, HOST_BYTES)).plan()


FACTS = model_facts(MODEL_GIB)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the time of a decision")
    parser.add_argument("--samples", type=int, default=50, help="events of each kind (default: 50)")
    samples = parser.parse_args().samples
    print(support.machine_line() + "\n")
    sizes = [(INSTANCES, WAITERS), (TIMES * INSTANCES, TIMES * WAITERS)]
    found = {size: dict(House.filled(*size).measure(samples)) for size in sizes}
    for size, cards in itertools.product(sizes, ((CARD,), TWO_CARDS)):
        found[size] |= IdleHouse.of(size[0], cards).choose(size[1], min(samples, MOST_CHOICES))
    rows = [
        (kind, f"{size[0]}", f"{size[1]}", f"{statistics.median(values):.3f}", f"{p95(values):.3f}")
        for size, kinds in found.items()
        for kind, values in kinds.items()
    ]
    print(support.table(("", "instances", "waiters", "median ms", "p95 ms"), rows))
    targets = []
    for kind in found[sizes[0]]:
        small, large = (statistics.median(found[size][kind]) for size in sizes)
        targets.append(support.Target(f"{kind}, median", small, MEDIAN_LIMIT_MS, "ms"))
        targets.append(support.Target(f"{kind}, {TIMES} times as many", large / small, RATIO_LIMIT, "times"))
    return support.report_targets(targets)


if __name__ == "__main__":
    sys.exit(main())
