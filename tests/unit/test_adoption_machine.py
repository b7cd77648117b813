"""Daemons that die at random moments of long histories: the next one knows what runs, and nothing is promised twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.gpus.readings import CardProcess
from lllm3090d.serving.events import Admitted, Event, Observation, UnitAdopted, UnitSeen
from lllm3090d.serving.instance import SERVING, InstanceState
from lllm3090d.serving.ledger import Share
from lllm3090d.serving.observation import CardState
from lllm3090d.serving.scheduler import Scheduler
from tests.fakes.simulated_machine import (
    CARD,
    DRIVER_BYTES,
    TOTAL_BYTES,
    BrokenInvariantError,
    Machine,
    Process,
    run,
)

pytestmark = [pytest.mark.unit, pytest.mark.timeout(600)]  # thousands of steps

STEPS = 4_000
SEEDS = (1, 2, 3)
S = InstanceState
STOPPING = frozenset({S.STOPPING, S.STUCK})


class MortalMachine(Machine):
    """Its daemon is killed now and then, and another one starts.

    Of the units that serve then, some are understood by nobody: they are left alone, hold what they hold, and end one
    day.
    """

    def __init__(self, seed: int, server: Path, make: type[Scheduler] = Scheduler) -> None:
        super().__init__(seed, server, make)
        self.make = make
        self.left_alone: dict[str, Process] = {}  # by unit
        self.deaths = 0
        self.adopted: dict[InstanceState, int] = {}
        self.foreign_units = 0

    # --- foreign units ------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """By everybody, really."""
        foreign_units = sum(each.held_bytes for each in self.left_alone.values())
        return min(TOTAL_BYTES - DRIVER_BYTES, super().used_bytes + foreign_units)

    def observe(self) -> Observation:
        """With what foreign units hold, under their names, as the daemon measures it."""
        seen = super().observe()
        return replace(seen, cards=tuple(self._with_units(state) for state in seen.cards))

    def _with_units(self, state: CardState) -> CardState:
        if state.reading is None:
            return state
        units = {name: each.held_bytes for name, each in self.left_alone.items()}
        listed = tuple(CardProcess(number, size) for number, size in enumerate(units.values(), 500))
        reading = replace(state.reading, processes=(*state.reading.processes, *listed))
        held = {**state.in_use, **units}
        return replace(state, reading=reading, resident=held, in_use=held)

    def _was_admitted(self, effect: Admitted) -> None:
        """What foreign units hold is there beside strangers and the desktop."""
        known = self.processes
        self.processes = known | self.left_alone
        super()._was_admitted(effect)
        known[effect.run] = self.processes[effect.run]
        self.processes = known

    def step(self) -> None:
        """One thing happens; or the daemon dies."""
        if self.random.random() < 0.01 and not self.asleep:
            self.kill_daemon()
        elif self.left_alone and self.random.random() < 0.01:
            self.left_alone.popitem()
        else:
            super().step()
        others = [*self.processes.values(), *self.left_alone.values()]
        room = TOTAL_BYTES - DRIVER_BYTES - sum(each.held_bytes for each in others)
        self.foreign_bytes = max(0, min(self.foreign_bytes, room))

    # --- the daemon ---------------------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        """All that it knew, and all that it waited for, is gone; units, cards and what was written down are not."""
        self.deaths += 1
        old = self.scheduler
        self.open.clear()
        self.leases.clear()
        self.stalled.clear()
        self._later.clear()
        self.stale = None
        self.scheduler = self.make(old.policy, lambda: self.now_s)
        self.scheduler.released = self.released
        for process in tuple(self.processes.values()):
            if process.is_alive:
                self._find(process, old)
            else:  # while nobody looked its memory has come back
                del self.processes[process.run]

    def _find(self, process: Process, old: Scheduler) -> None:
        instance = old.by_run(process.run)
        assert instance is not None
        state, record = instance.state, instance.record
        process.frozen_s = None
        if state in SERVING and self.random.random() < 0.1:
            self.foreign_units += 1
            del self.processes[process.run]
            process.name, process.promised_bytes = process.unit, 0
            self.left_alone[process.unit] = process
            self.pins.discard(process.run)
            return
        self.adopted[state] = self.adopted.get(state, 0) + 1
        serves = state in SERVING
        active = "deactivating" if state in STOPPING else "activating" if state is S.STARTING else "active"
        found = self._status(process, active_state=active)
        shares: Sequence[Share] = record.shares(CARD.uuid)
        held = {CARD.uuid: process.held_bytes}
        pinned = process.run in self.pins
        self.feed(UnitAdopted(found, record, serves, tuple(shares), held, pinned))
        if active == "activating":
            self.later(0.1, lambda: self.feed(UnitSeen(self._status(process))))
        if serves:
            self.ready_s[process.run] = self.now_s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An executable for the builds of these tests."""
    path = tmp_path_factory.mktemp("engine") / "llama-server"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("seed", SEEDS)
def test_daemons_that_die_break_nothing(server: Path, seed: int) -> None:
    machine = MortalMachine(seed, server)
    run(machine, STEPS)
    assert machine.deaths > 20 and machine.foreign_units > 1
    assert machine.adopted.keys() >= {S.READY, S.LOADING}
    assert len(machine.granted) > 50


class ForgetsWhatItFinds(Scheduler):
    """A unit that is found is taken over without its promise."""

    def _on_adopted(self, event: UnitAdopted) -> None:
        super()._on_adopted(replace(event, shares=()))


class BlindMachine(MortalMachine):
    """What foreign units hold is taken for the desktop's."""

    def _with_units(self, state: CardState) -> CardState:
        return state


class NeverAsksForTheEnd(Scheduler):
    """An engine that is found stopping is left to itself, and so nobody notices where it does not end."""

    def handle(self, event: Event, observation: Observation | None = None) -> list[object]:  # type: ignore[override]
        effects = super().handle(event, observation)
        if isinstance(event, UnitAdopted) and event.status.active_state == "deactivating":
            return [each for each in effects if type(each).__name__ != "StopUnit"]
        return list(effects)


@pytest.mark.parametrize(
    ("machine", "make"),
    [
        (MortalMachine, ForgetsWhatItFinds),
        (MortalMachine, NeverAsksForTheEnd),
        (BlindMachine, Scheduler),
    ],
)
def test_a_planted_fault_is_found(server: Path, machine: type[MortalMachine], make: type[Scheduler]) -> None:
    with pytest.raises(BrokenInvariantError):
        for seed in range(1, 10):
            run(machine(seed, server, make), STEPS)
