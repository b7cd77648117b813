"""The scheduler over long histories in simulated time: what must never happen does not, and would be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.planning.planner import PlanRequest
from lllm3090d.serving.events import Event, HoldLoads, LoadRequested, Looked, MemoryReleased, Observation
from lllm3090d.serving.hangs import Verdict
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from tests.fakes.simulated_machine import GIB, BrokenInvariantError, Machine, run

pytestmark = [pytest.mark.unit, pytest.mark.timeout(600)]  # thousands of steps
STEPS = 10_000
SEEDS = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An executable for the builds of these tests."""
    path = tmp_path_factory.mktemp("engine") / "llama-server"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("seed", SEEDS)
def test_ten_thousand_steps_break_nothing(server: Path, seed: int) -> None:
    machine = run(Machine(seed, server), STEPS)
    # The history was worth something: models came, and some went for others.
    assert len(machine.granted) > 100
    assert machine.evictions > 10
    assert machine.drained > 10
    assert machine.hung > 0


class ForgetsToRelease(Scheduler):
    """Now and then the memory of an ended engine stays charged."""

    released_so_far = 0

    def _on_memory_released(self, event: MemoryReleased) -> None:
        if not event.missing:
            self.released_so_far += 1
            if self.released_so_far == 20:
                return
        super()._on_memory_released(event)


class ReleasesTooEarly(Scheduler):
    """What does not come back in time is given out again."""

    def _on_memory_released(self, event: MemoryReleased) -> None:
        super()._on_memory_released(MemoryReleased(event.run, {}))


class TrustsAnOldReading(Scheduler):
    """Loads are decided on the reading before."""

    before: Observation | None = None

    def handle(self, event: Event, observation: Observation | None = None) -> list[object]:  # type: ignore[override]
        if isinstance(event, LoadRequested | Looked):
            observation, self.before = self.before or observation, observation
        return list(super().handle(event, observation))


class EvictsTheBusy(Scheduler):
    """What an engine says when it is asked once more counts for nothing."""

    def _may_go(self, victim: Instance, busy: frozenset[str]) -> bool:
        return super()._may_go(victim, frozenset())


class EvictsThePinned(Scheduler):
    """Pins are forgotten."""

    def _pin(self, instance: Instance, *, pinned: bool) -> None:
        super()._pin(instance, pinned=False)


class ForgetsThoseWhoWait(Scheduler):
    """Nobody looks at the time."""

    def _time_out(self) -> None:
        """Nothing."""

    def next_attention_s(self) -> float | None:
        """Never."""
        return None


class TakesTheSlowForHung(Scheduler):
    """Every engine that is at work is said to get nowhere."""

    def _see_verdict(self, instance: Instance, verdict: Verdict | None) -> None:
        if verdict is not None and instance.busy:
            verdict = replace(verdict, stalled=True)
        super()._see_verdict(instance, verdict)


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (TakesTheSlowForHung, "said to be stalled, and gets on"),
        (ForgetsToRelease, "nothing of it is left"),
        (ReleasesTooEarly, "nobody is charged for"),
        (TrustsAnOldReading, "over-committed|in error"),
        (EvictsTheBusy, "busy"),
        (EvictsThePinned, "pinned"),
        (ForgetsThoseWhoWait, "left in the queue"),
    ],
)
def test_a_planted_bug_is_caught(
    server: Path, planted: Callable[[Policy, Callable[[], float]], Scheduler], said: str
) -> None:
    with pytest.raises(BrokenInvariantError, match=said):
        for seed in SEEDS:
            run(Machine(seed, server, planted), STEPS)


class NeverSleeps(Scheduler):
    """Loads go on although the machine goes to sleep."""

    def _on_hold_loads(self, event: HoldLoads) -> None:
        super()._on_hold_loads(HoldLoads(event.token, held=False))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_machine_that_sleeps_now_and_then_breaks_nothing_either(server: Path, seed: int) -> None:
    machine = run(Machine(seed, server, sleeps=True), STEPS // 4)
    assert len(machine.granted) > 25


def test_a_load_that_is_begun_before_a_sleep_is_caught(server: Path) -> None:
    with pytest.raises(BrokenInvariantError, match="goes to sleep"):
        for seed in SEEDS:
            run(Machine(seed, server, NeverSleeps, sleeps=True), STEPS // 4)


def test_eviction_and_reload_leave_ledger_and_card_equal_a_hundred_times(server: Path) -> None:
    """Two models that fit alone and not together take turns; in between nothing is lost and nothing left over."""
    machine = Machine(0, server)
    machine.random.seed(0)
    for round_number in range(100):
        name = ("large", "middle")[round_number % 2]
        rested_s = machine.now_s + 60
        while machine.now_s < rested_s:
            machine.pass_time()
        token = machine.load(name, PlanRequest(context_tokens=8192))
        while token in machine.open:
            machine.pass_time()
            machine.check()
    machine.wind_down()
    assert all(process.is_alive for process in machine.processes.values())
    held = sum(p.held_bytes for p in machine.processes.values())
    assert machine.used_bytes == machine.foreign_bytes + held
    assert {r.run for r in machine.scheduler.ledger} == set(machine.processes)
    assert machine.evictions > 60  # a start may fail, and its victim then be loaded again
    assert held < 24 * GIB
