"""Units compared with what is known: at start, anew, and one by one, with ends that come at the worst moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lllm3090d.bus.systemd import SystemdManager
from lllm3090d.bus.unit_status import UnitStatus
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.planning.rope import RopeScaling
from lllm3090d.planning.stretch import Stretch
from lllm3090d.serving.adoption import DAMAGED_RECORD, NO_RECORD, Rebuilt
from lllm3090d.serving.events import (
    Event,
    MemoryReleased,
    PostMortemRead,
    UnitAdopted,
    UnitSeen,
    UnitVanished,
    UnloadRequested,
)
from lllm3090d.serving.foreign_units import ForeignUnits
from lllm3090d.serving.history import History
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.lookup import Lookup
from lllm3090d.serving.reconcile import Reconciler
from lllm3090d.serving.unit_reader import UnitReader
from lllm3090d.serving.unit_spec import LaunchRecord, Record, ShareRecord
from lllm3090d.settings import Settings
from tests.fakes.scheduler_world import CARD, World
from tests.unit.test_adoption import record, unit

pytestmark = pytest.mark.unit

S = InstanceState
GIB = 1 << 30


class Card24:
    """An empty card."""

    card = Card(CardKind.NVIDIA, CARD.uuid, CARD.name, CARD.driver_version, 24 * GIB)

    def read(self) -> MemoryReading:
        return MemoryReading(0.0, 24 * GIB, 0, 0, 24 * GIB, ())

    def close(self) -> None:
        """Nothing is open."""


class Scripted(UnitReader):
    """Reads what the test says, and lets things happen meanwhile."""

    def __init__(self, results: dict[str, Rebuilt], meanwhile: Callable[[], None]) -> None:
        settings = Settings()
        super().__init__(Lookup(lambda: settings), tuple, lambda: World().scheduler.policy.plan)
        self.results = results
        self.meanwhile = meanwhile

    def read(self, status: UnitStatus) -> Rebuilt:
        self.meanwhile()
        return self.results.get(status.name, Rebuilt(None, "it runs something else"))


class Scene:
    """systemd with some units, and a scheduler whose events are handled as the writer would, when the test says."""

    def __init__(self, tmp_path: Path, *units: UnitStatus) -> None:
        self.units = {each.name: each for each in units}
        self.world = World(engine_sockets_dir=tmp_path)
        self.scheduler = self.world.scheduler
        self.queue: list[Event] = []
        self.results: dict[str, Rebuilt] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.reset: list[str] = []
        self.listed = 0
        self.failures = 0
        self.history = History()
        self.foreign = ForeignUnits(lambda name: self.scheduler.by_unit(name) is not None)
        self.reconciler = Reconciler(
            manager=cast(SystemdManager, self),
            scheduler=self.scheduler,
            readers=(Card24(),),
            history=self.history,
            submit=self.queue.append,
            units=Scripted(self.results, self._meanwhile),
            foreign=self.foreign,
        )

    # --- systemd ---

    async def list(self) -> tuple[UnitStatus, ...]:
        self.listed += 1
        if self.failures:
            self.failures -= 1
            raise LlmError(ErrorCode.BUS_UNAVAILABLE, "no bus", hint="wait")
        return tuple(self.units.values())

    async def status(self, name: str) -> UnitStatus | None:
        if self.failures:
            self.failures -= 1
            raise LlmError(ErrorCode.BUS_UNAVAILABLE, "no bus", hint="wait")
        return self.units.get(name)

    async def reset_failed(self, name: str) -> None:
        self.reset.append(name)

    # --- what happens ---

    def _meanwhile(self) -> None:
        self.meanwhile()

    def write(self) -> None:
        """Handle what has been submitted."""
        while self.queue:
            self.world.do(self.queue.pop(0))

    def signal(self, status: UnitStatus) -> bool:
        """A signal of systemd, as the daemon takes it; whether the unit is to be looked at."""
        self.queue.append(UnitSeen(status))
        return self.reconciler.is_news(status)

    def end(self, name: str) -> None:
        """A unit ends and is unloaded, with its signals."""
        self.units.pop(name, None)
        self.queue.append(UnitVanished(name, None))
        self.reconciler.vanished(name)

    def adopt(self) -> None:
        asyncio.run(self.reconciler.adopt(self._apply))

    def _apply(self, event: Event) -> None:
        self.world.do(event)

    def compare(self) -> None:
        asyncio.run(self.reconciler.compare())

    def look_at(self, name: str) -> None:
        asyncio.run(self.reconciler.look_at(name))

    @property
    def states(self) -> dict[str, InstanceState]:
        return {each.name: each.state for each in self.scheduler.instances}

    @property
    def messages(self) -> tuple[str, ...]:
        return tuple(event.message for event in self.history.since(0))


def names_of(scene: Scene) -> list[str]:
    """Of the foreign units."""
    return list(scene.foreign.names)


def bare(run: str, **changes: Any) -> UnitStatus:
    """A unit without a record."""
    return replace(unit(run, text=""), **changes)


def test_at_start_each_unit_becomes_what_it_is(tmp_path: Path) -> None:
    lost, odd = (
        bare("a"),
        bare("b", name="lllm3090-odd.service", argv=("/bin/x", str(tmp_path / "odd.sock"))),
    )
    scene = Scene(tmp_path, lost, odd, unit("c", name="gemma"), unit("d", "failed", name="gemma"))
    scene.results[lost.name] = Rebuilt(record("qwen", "a"))
    for name in ("odd", "orphan"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(tmp_path / f"{name}.sock"))
    (tmp_path / "directory.sock").mkdir()  # whoever put it there; it must not keep the daemon from starting
    scene.adopt()
    assert scene.states == {"qwen": S.LOADING, "gemma": S.LOADING}
    qwen = scene.world.get("qwen")
    assert (qwen.reconstructed, qwen.adopted, qwen.unit) == (NO_RECORD, True, lost.name)
    assert not scene.world.get("gemma").reconstructed
    assert names_of(scene) == [odd.name]
    assert scene.reset == [unit("d", name="gemma").name]
    # The socket of what is left alone is left alone too.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory.sock", "odd.sock"]
    assert any(
        "reconstructed from its command line: it carries no record" in each for each in scene.messages
    )
    assert any(
        f"foreign unit {odd.name} is left alone: it carries no record, and" in m for m in scene.messages
    )
    assert scene.messages[-1] == "adopted 2 units"


def test_its_memory_is_charged_and_an_unload_stops_its_own_unit(tmp_path: Path) -> None:
    """Whatever that unit is called."""
    lost = bare("a", name="lllm3090-somebodys.service")
    scene = Scene(tmp_path, lost)
    scene.results[lost.name] = Rebuilt(record("qwen", "0badcafe"))
    scene.adopt()
    (held,) = scene.scheduler.ledger.of("0badcafe")
    assert held.reserved_bytes == 7
    (stop,) = [e for e in scene.world.do(UnloadRequested("u", "qwen")) if hasattr(e, "unit")]
    assert stop.unit == lost.name


def test_a_dead_unit_that_nobody_understands_is_not_touched(tmp_path: Path) -> None:
    scene = Scene(tmp_path, bare("a", active_state="failed"))
    scene.adopt()
    assert (scene.states, names_of(scene), scene.reset) == ({}, [], [])


def test_a_dead_unit_that_can_be_reconstructed_is_the_news_of_a_failure(tmp_path: Path) -> None:
    dead = replace(unit("a", "failed", text="garbage"), result="oom-kill")
    scene = Scene(tmp_path, dead)
    scene.results[dead.name] = Rebuilt(record("qwen", "a"))
    scene.adopt()
    qwen = scene.world.get("qwen")
    assert (qwen.state, qwen.reconstructed, qwen.post_mortem_pending) == (S.RELEASING, DAMAGED_RECORD, True)


# --- while the daemon runs ------------------------------------------------------------------------------------------


def test_a_unit_that_somebody_starts_is_found_by_its_signal(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.adopt()
    odd = bare("a", name="lllm3090-odd.service")
    scene.units[odd.name] = odd
    assert scene.signal(replace(odd, argv=(), environment=(), control_group=""))
    scene.look_at(odd.name)
    assert names_of(scene) == [odd.name]
    assert not scene.signal(odd)  # known now
    scene.end(odd.name)
    assert names_of(scene) == []
    assert scene.messages[-1] == f"foreign unit {odd.name} has ended"


def test_a_unit_with_a_record_that_turns_up_is_adopted(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.adopt()
    ours = unit("a")
    scene.units[ours.name] = ours
    scene.compare()
    assert names_of(scene) == [ours.name]  # counted until the writer has it
    scene.write()
    assert scene.states == {"qwen": S.LOADING} and names_of(scene) == []
    scene.compare()
    scene.write()
    assert [type(each) for each in scene.queue] == [] and scene.states == {"qwen": S.LOADING}


@pytest.mark.parametrize("when", ["while it is read", "before the writer has it"])
def test_a_unit_that_ends_meanwhile_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    """The signal of its end overtakes its adoption: nobody may be charged for it, or wait for it, for ever."""
    scene = Scene(tmp_path)
    lost = bare("a")
    scene.units[lost.name] = lost
    scene.results[lost.name] = Rebuilt(record("qwen", "a"))
    if when == "while it is read":
        scene.meanwhile = lambda: scene.end(lost.name)
        scene.look_at(lost.name)
        assert not any(isinstance(each, UnitAdopted) for each in scene.queue)
    else:
        submit = scene.queue.append

        def overtaken(event: Event) -> None:
            if isinstance(event, UnitAdopted):
                scene.units.pop(lost.name)
                submit(UnitVanished(lost.name, None))
                scene.reconciler.vanished(lost.name)
            submit(event)

        scene.reconciler._submit = overtaken
        scene.look_at(lost.name)
        assert any(isinstance(each, UnitAdopted) for each in scene.queue)
    scene.write()
    assert names_of(scene) == []
    assert S.LOADING not in scene.states.values() and S.READY not in scene.states.values()


def test_what_was_read_before_its_end_was_told_is_old(tmp_path: Path) -> None:
    """The answer of systemd comes before the signal, and the signal is heard first."""
    scene = Scene(tmp_path)
    gone, failed = bare("a", name="lllm3090-odd.service"), unit("b")

    async def overtaken() -> tuple[UnitStatus, ...]:
        scene.end(gone.name)
        scene.signal(replace(failed, active_state="failed"))
        return (gone, failed)

    scene.list = overtaken  # type: ignore[method-assign]  # systemd at its worst
    scene.compare()
    scene.write()
    assert (scene.states, names_of(scene)) == ({}, [])
    scene.adopt()
    assert names_of(scene) == []
    # The same name may be used again.
    assert scene.signal(gone)
    scene.units[gone.name] = gone
    scene.look_at(gone.name)
    assert names_of(scene) == [gone.name]


def test_a_second_unit_of_a_model_that_runs_is_left_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path, unit("a"))
    scene.adopt()
    second = bare("b", exec_main_start_monotonic_s=999.0)
    scene.units[second.name] = second
    scene.results[second.name] = Rebuilt(record("qwen", "b"))
    scene.look_at(second.name)
    scene.write()
    assert scene.world.get("qwen").run == "a"
    (left,) = scene.foreign.all
    assert left.why == f"qwen runs in {unit('a').name} too"
    # When the first one ends, the next comparison takes the second in.
    scene.end(unit("a").name)
    scene.write()
    error = LlmError(ErrorCode.ENGINE_FAILED, "it died", hint="see")
    scene.world.do(PostMortemRead("a", error))
    scene.world.do(MemoryReleased("a", {}))
    assert scene.states == {"qwen": S.FAILED}
    scene.compare()
    scene.write()
    assert (scene.world.get("qwen").run, scene.states) == ("b", {"qwen": S.LOADING})
    assert names_of(scene) == []


def test_a_load_that_comes_first_keeps_its_name_and_the_unit_stays_foreign(tmp_path: Path) -> None:
    """A person loads the model while a unit of the same name is read: two launches, one instance, both counted."""
    scene = Scene(tmp_path)
    lost = bare("a")
    scene.units[lost.name] = lost
    scene.results[lost.name] = Rebuilt(record("qwen", "a"))
    scene.look_at(lost.name)
    scene.world.load("qwen", "t")
    mine = scene.world.get("qwen")
    assert mine.unit != lost.name
    scene.write()
    assert scene.world.get("qwen") is mine and mine.state is S.STARTING
    assert names_of(scene) == [lost.name]
    assert scene.scheduler.ledger.of("a") == ()


def test_an_ended_foreign_unit_that_stays_loaded_is_shown_no_longer(tmp_path: Path) -> None:
    odd = bare("a", name="lllm3090-odd.service")
    scene = Scene(tmp_path, odd)
    scene.adopt()
    scene.units[odd.name] = replace(odd, active_state="failed")
    scene.compare()
    assert names_of(scene) == [] and scene.messages[-2] == f"foreign unit {odd.name} has ended"
    assert scene.reset == []


def test_a_bus_that_is_lost_again_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lllm3090d.serving.reconcile.LIST_FIRST_S", 0.001)
    scene = Scene(tmp_path)
    ours = unit("a")
    scene.units[ours.name] = ours
    scene.failures = 1
    scene.compare()
    assert scene.listed == 2
    scene.write()
    assert scene.states == {"qwen": S.LOADING}
    scene.failures = 1
    scene.look_at("lllm3090-x.service")  # told in the log, and found with the next comparison
    assert names_of(scene) == []


def odd_record(run: str = "a", name: str = "qwen", **changes: Any) -> Record:
    """A record that nothing has looked through."""
    return record(name, run).model_copy(update=changes)


SHARE = ShareRecord(where="GPU-1", items=record("qwen", "a").items)


@pytest.mark.parametrize(
    "odd",
    [
        odd_record(socket=Path("/run/x\0.sock")),
        odd_record(path=Path("/m/\0"), shards=(Path("/m/\0"),)),
        odd_record(size_bytes=10**400),
        odd_record(window_tokens=10**400),
        odd_record(launch=LaunchRecord().model_copy(update={"shares": (SHARE, SHARE)})),
        odd_record(launch=LaunchRecord(rope=Stretch(RopeScaling.YARN, float("nan"), 4096, 4096))),
        odd_record(launch=LaunchRecord(rope=Stretch(RopeScaling.YARN, 1e308, 4096, 4096))),
        odd_record(items=(SHARE.items[0].model_copy(update={"bytes": 1 << 60}),)),
        odd_record(items=(SHARE.items[0].model_copy(update={"bytes": -7}),)),
        odd_record(context_tokens="many"),
    ],
)
def test_one_odd_unit_is_its_own_trouble(tmp_path: Path, odd: Record) -> None:
    """Whatever slipped through: the unit is left alone with the reason, its neighbour is adopted."""
    strange = bare("a")
    for unit_of in ("start", "later"):
        scene = Scene(tmp_path, *((strange,) if unit_of == "start" else ()), unit("b", name="gemma"))
        scene.results[strange.name] = Rebuilt(odd)
        scene.adopt()
        scene.units[strange.name] = strange
        if unit_of == "later":
            scene.look_at(strange.name)
            scene.write()
        assert scene.states == {"gemma": S.LOADING}
        (left,) = scene.foreign.all
        assert left.name == strange.name and "it cannot be adopted: " in left.why and len(left.why) < 400


def test_what_stood_behind_an_instance_is_looked_at_again_when_that_ends(tmp_path: Path) -> None:
    mine, twin, other = unit("a", started_s=1), bare("b"), bare("c")
    scene = Scene(tmp_path, mine, twin, other)
    scene.results |= {each.name: Rebuilt(record("qwen", run)) for each, run in ((twin, "b"), (other, "c"))}
    asyncio.run(scene.reconciler.adopt(scene._apply, frozenset({"a"}), {"qwen": "a"}))
    assert scene.world.get("qwen").unit == mine.name and scene.world.get("qwen").pinned
    assert names_of(scene) == [twin.name, other.name] and scene.reconciler.freed() == ()
    scene.end(mine.name)
    scene.write()
    assert scene.reconciler.freed() == ()  # its memory is not back yet
    scene.world.do(MemoryReleased("a", {}))
    scene.world.do(PostMortemRead("a", LlmError(ErrorCode.ENGINE_FAILED, "it died", hint="see")))
    freed = scene.reconciler.freed()
    assert set(freed) == {twin.name, other.name} and scene.reconciler.freed() == ()
    asyncio.run(scene.reconciler.look_at_all(freed))
    scene.write()
    assert scene.world.get("qwen").unit in {twin.name, other.name}
    # The one that is left stands behind that one now.
    (left,) = scene.foreign.all
    assert left.behind == scene.world.get("qwen").unit and scene.reconciler.freed() == ()


def test_whoever_is_wanted_is_known_though_its_record_is_lost(tmp_path: Path) -> None:
    for wanted, is_known in (({"qwen": "z"}, True), ({}, False)):
        scene = Scene(tmp_path, bare("a"))
        scene.results[unit("a").name] = Rebuilt(record("qwen", "a"))
        asyncio.run(scene.reconciler.adopt(scene._apply, frozenset(), wanted))
        assert scene.world.get("qwen").is_known is is_known
