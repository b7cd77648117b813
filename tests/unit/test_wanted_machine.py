"""The wanted set over long histories: at any moment a daemon that is killed loses no model that served.

What is owed is told by the effects alone: the answers, the changes of state and the evictions that the world sees.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.serving.events import (
    Admitted,
    Announce,
    CancelRequested,
    ComebackRefused,
    Event,
    Failed,
    Joined,
    ReleaseRequested,
    Restore,
    TellEviction,
    UnloadRequested,
)
from lllm3090d.serving.instance import ENDED, InstanceState
from lllm3090d.serving.policy import Policy
from lllm3090d.serving.running import Instance
from lllm3090d.serving.scheduler import Scheduler
from lllm3090d.serving.wanted import Occasion, Scene, Want, beginning, followed
from tests.fakes.simulated_machine import BrokenInvariantError, Machine, run

pytestmark = pytest.mark.unit

S = InstanceState
STEPS = 1500
SEEDS = (1, 2)
HAS_UNIT = frozenset({S.STARTING, S.LOADING, S.READY, S.BUSY, S.STALLED, S.STOPPING, S.STUCK})


class Keeper(Machine):
    """A machine whose daemon is killed, in thought, after each step.

    Attributes:
        wants: the set.
        owed: models that served and that nobody has sent away.
        sent_away: models that somebody unloaded, or that went for one that serves, and that nobody has loaded since.
        killed: how often a model that did not run was owed.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.wants: dict[str, Want] = {}
        self.owed: set[str] = set()
        self.sent_away: set[str] = set()
        self.victims: dict[str, set[str]] = {}  # by the model that they went for
        self.asked: dict[str, int] = {}  # restores that have not been put to the scheduler
        self.restores: dict[str, tuple[str, int]] = {}  # by token: which model, as which attempt
        self.started: set[str] = set()  # tokens of loads that were admitted, or joined one
        self.killed = 0

    def feed(self, event: Event) -> None:
        """Follow what comes of each event."""
        match event:
            case UnloadRequested():
                self.asked.pop(event.name, None)
                self.owed.discard(event.name)
                self.sent_away.add(event.name)
                # The daemon forgets what does not run.
                if self.scheduler.instance(event.name) is None:
                    self.wants.pop(event.name, None)
            case ReleaseRequested():
                self.asked.clear()
                if not event.until_resume:
                    self.owed.clear()
                    self.wants.clear()
            case CancelRequested():
                waiting = [each.name for each in self.scheduler.pending if each.token == event.load_token]
                waiting += [
                    each.name for each in self.scheduler.instances if event.load_token in each.waiters
                ]
                self.owed -= set(waiting)  # the load that would bring it back may be what is cancelled
        super().feed(event)
        self.wants = followed(self.wants, self.scene(self.scheduler.instances))

    def scene(self, instances: tuple[Instance, ...]) -> Scene:
        """With these instances."""
        scheduler = self.scheduler
        coming = {name for token, (name, _) in self.restores.items() if token in self.open} | set(self.asked)
        return Scene(instances, scheduler.evicted_for(), coming, scheduler.released, scheduler.ends())

    def _perform(self, effect: Any) -> None:
        if isinstance(effect, Restore):
            self.asked[effect.name] = self.asked.get(effect.name, 0) + 1
            for each in self.victims.values():
                each.discard(effect.name)  # it went for nothing
        super()._perform(effect)

    def _restore(self, effect: Restore) -> None:
        if effect.name not in self.asked:
            return  # withdrawn
        self.asked[effect.name] -= 1
        if not self.asked[effect.name]:
            del self.asked[effect.name]
        # The next token and run are those of this load.
        token = f"load-{next(self._numbers) + 1}"
        self.restores[token] = (effect.name, effect.attempt)
        super()._restore(effect)

    def _was_admitted(self, effect: Admitted) -> None:
        super()._was_admitted(effect)
        self.started.add(effect.token)

    def _was_answered(self, effect: Any) -> None:
        super()._was_answered(effect)
        if isinstance(effect, Joined):
            self.started.add(effect.token)
        name, attempt = self.restores.get(effect.token, ("", 0))
        if isinstance(effect, Failed) and attempt and effect.token not in self.started:
            self.later(0.0, lambda: self.feed(ComebackRefused(name, effect.error)))

    def _was_evicted(self, effect: TellEviction) -> None:
        super()._was_evicted(effect)
        self.victims.setdefault(effect.reason.removeprefix("makes room for "), set()).add(effect.name)

    def _has_moved(self, change: Announce) -> None:
        super()._has_moved(change)
        name = change.name
        if change.state is S.RESERVED:
            self.sent_away.discard(name)
        elif change.state is S.READY and change.previous is S.LOADING:
            self.owed.add(name)
            gone = self.victims.pop(name, set()) - {name}
            # One that has been loaded since is there for another reason.
            gone -= {each.name for each in self.scheduler.instances if each.state not in ENDED}
            self.owed -= gone
            self.sent_away |= gone

    def check(self) -> None:
        """The daemon is killed now, and starts again."""
        super().check()
        # Of a load that somebody asked for and that never served; whoever asked was told.
        self.owed -= {
            each.name
            for each in self.scheduler.instances
            if each.state is S.FAILED and not each.next_attempt
        }
        alive = {each.run for each in self.processes.values() if each.is_alive}
        units = tuple(
            each for each in self.scheduler.instances if each.run in alive and each.state in HAS_UNIT
        )
        adopted = Scene(units, released=self.scheduler.released)
        begun = beginning(self.wants.values(), adopted, Occasion.CONTINUED)
        runs = {each.name for each in units if each.state not in {S.STOPPING, S.STUCK}}
        comes = {each.name for each in (*begun.load, *begun.failed)} | set(begun.kept)
        lost = self.owed - runs - comes
        if lost:
            raise BrokenInvariantError(f"{lost} would be lost at {self.now_s}: {self.wants}")
        back = self.sent_away & {each.name for each in (*begun.load, *begun.failed)}
        if back:
            raise BrokenInvariantError(f"{back} would come back at {self.now_s}, and nobody wants that")
        self.killed += bool(self.owed - runs)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An executable for the builds of these tests."""
    path = tmp_path_factory.mktemp("engine") / "llama-server"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("seed", SEEDS)
def test_a_daemon_that_is_killed_at_any_moment_loses_nothing(server: Path, seed: int) -> None:
    machine = Keeper(seed, server)
    run(machine, STEPS)
    assert machine.killed > 50  # there was something to lose


class ForgetsVictims(Scheduler):
    """What went for a load is not told, and so never gone for good."""

    def evicted_for(self) -> dict[str, str]:
        """Nothing."""
        return {}


class EvictsForGood(Scheduler):
    """What makes room is not missed."""

    def _go(self, victim: Instance, cause: str, reason: str) -> None:
        victim.unwanted = True
        super()._go(victim, cause, reason)


class ForgetsUnloads(Scheduler):
    """That somebody wants a model gone is not noted."""

    def _on_unload(self, event: UnloadRequested) -> None:
        super()._on_unload(event)
        for instance in self.instances:
            instance.unwanted = False


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (ForgetsVictims, "would come back"),
        (EvictsForGood, "would be lost"),
        (ForgetsUnloads, "would come back"),
    ],
)
def test_a_planted_bug_is_caught(
    server: Path, planted: Callable[[Policy, Callable[[], float]], Scheduler], said: str
) -> None:
    with pytest.raises(BrokenInvariantError, match=said):
        for seed in SEEDS:
            run(Keeper(seed, server, planted), STEPS)


def test_the_set_follows_from_the_scheduler_alone(server: Path) -> None:
    """Following twice changes nothing, at any moment."""
    machine = Keeper(5, server)
    for _ in range(300):
        machine.step()
        scene = machine.scene(machine.scheduler.instances)
        assert followed(machine.wants, scene) == machine.wants
