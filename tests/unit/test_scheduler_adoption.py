"""What the scheduler makes of units that are found: in every state, at the worst moment, beside what there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lllm3090d.bus.unit_status import EXITED, KILLED, UnitStatus
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.events import (
    EngineReady,
    ForgetUnit,
    MemoryReleased,
    PostMortemRead,
    ReadPostMortem,
    ResetRequested,
    Restore,
    StopFinished,
    StopUnit,
    UnitAdopted,
    UnitSeen,
    UnitVanished,
    UnloadDone,
    UnloadRequested,
    WaitForMemory,
    WatchLoading,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.running import Instance
from tests.fakes.scheduler_world import CARD, GIB, World, error_of, kinds, status, the

pytestmark = pytest.mark.unit

S = InstanceState


def made(name: str = "a") -> Instance:
    """A launch of another daemon's, before this one."""
    before = World()
    before.load(name, "t")
    return before.get(name)


def found(instance: Instance, unit: UnitStatus | None = None, **wishes: object) -> UnitAdopted:
    record = instance.record
    given: dict[str, object] = {"healthy": False, "shares": record.shares(CARD.uuid)}
    return UnitAdopted(unit or status(instance), record, **(given | wishes))  # type: ignore[arg-type]  # by name


@pytest.fixture
def world() -> World:
    return World()


def failure() -> LlmError:
    return LlmError(ErrorCode.ENGINE_FAILED, "it was killed because memory ran out", hint="see")


def test_while_activating_it_waits_for_systemd_and_then_for_the_engine(world: World) -> None:
    original = made()
    world.do(found(original, status(original, active_state="activating", sub_state="start", main_pid=0)))
    adopted = world.get("a")
    assert (adopted.state, adopted.main_pid) == (S.STARTING, None)
    # Nobody here waits for the job of its start: its unit's own signal tells.
    assert WatchLoading in kinds(world.do(UnitSeen(status(original))))
    assert (adopted.state, adopted.main_pid) == (S.LOADING, 100)
    world.do(EngineReady(adopted.run, {CARD.uuid: 5 * GIB}))
    assert adopted.state is S.READY


@pytest.mark.parametrize("result", ["exec", "success", "oom-kill"])
def test_while_activating_it_may_fail(world: World, result: str) -> None:
    original = made()
    world.do(found(original, status(original, active_state="activating", main_pid=0)))
    effects = world.do(
        UnitSeen(status(original, active_state="failed", result=result, exec_main_code=EXITED))
    )
    assert {WaitForMemory, ReadPostMortem} <= set(kinds(effects))
    world.do(PostMortemRead(original.run, failure()))
    world.do(MemoryReleased(original.run, {}))
    assert world.get("a").state is S.FAILED
    assert world.charged_bytes == 0


def test_while_deactivating_an_engine_that_ignores_sigterm_is_waited_for_and_killed(world: World) -> None:
    """systemd kills it in the end: the job that this daemon asked for says so, or its last signal does."""
    original = made()
    stopping = status(original, active_state="deactivating", sub_state="stop-sigterm")
    assert the(world.do(found(original, stopping)), StopUnit).unit == original.unit
    assert world.get("a").state is S.STOPPING and world.charged_bytes > 0
    world.do(UnitSeen(replace(stopping, sub_state="stop-sigkill")))
    killed = replace(stopping, active_state="failed", result="timeout", exec_main_code=KILLED)
    effects = world.do(UnitSeen(killed))
    # It was told to go, so nobody asks why it went.
    assert WaitForMemory in kinds(effects) and ReadPostMortem not in kinds(effects)
    assert world.do(StopFinished(original.run, None)) == []
    world.do(MemoryReleased(original.run, {}))
    assert world.scheduler.instances == ()


def test_while_deactivating_an_engine_that_survives_sigkill_is_stuck(world: World) -> None:
    original = made()
    world.do(found(original, status(original, active_state="deactivating")))
    error = LlmError(ErrorCode.STOP_FAILED, "it is still there", hint="reboot")
    world.do(StopFinished(original.run, error))
    assert world.get("a").state is S.STUCK and world.charged_bytes > 0
    assert StopUnit in kinds(world.do(UnloadRequested("u", "a")))


def test_while_deactivating_it_may_be_loaded_anew(world: World) -> None:
    original = made()
    world.do(found(original, status(original, active_state="deactivating")))
    world.load("a", "t2")
    assert world.get("a").run == original.run
    world.do(UnitVanished(original.unit, None))
    world.do(MemoryReleased(original.run, {}))


def test_a_failure_for_lack_of_memory_is_told_as_that_and_its_unit_is_reset(world: World) -> None:
    original = made()
    dead = status(original, active_state="failed", result="oom-kill", main_pid=0, exec_main_code=KILLED)
    effects = world.do(found(original, dead))
    assert the(effects, ReadPostMortem).status is dead
    world.do(PostMortemRead(original.run, failure()))
    last = world.do(MemoryReleased(original.run, {}))
    adopted = world.get("a")
    assert adopted.failure is not None and "memory ran out" in adopted.failure.message
    again = adopted.retry_at_s is not None
    assert (ForgetUnit in kinds(last)) is not again  # kept for the next daemon while a start is to come


def test_a_unit_that_is_gone_before_anything_is_known_leaves_nothing(world: World) -> None:
    """Between the list and its adoption it has ended and was unloaded."""
    original = made()
    world.do(found(original, healthy=True))
    world.do(UnitVanished(original.unit, None))
    world.do(MemoryReleased(original.run, {}))
    assert world.scheduler.instances == () and world.charged_bytes == 0


def test_a_unit_of_another_name_is_the_one_that_is_heard_and_stopped(world: World) -> None:
    original = made()
    unit = status(original, name="lllm3090-somebodys.service")
    world.do(found(original, unit, healthy=True, reconstructed="it carries no record", file_note="x"))
    adopted = world.get("a")
    assert (adopted.unit, adopted.reconstructed, adopted.file_note) == (
        unit.name,
        "it carries no record",
        "x",
    )
    world.do(UnitVanished(original.unit, None))  # nothing of ours
    assert adopted.state is S.READY
    assert the(world.do(UnloadRequested("u", "a")), StopUnit).unit == unit.name
    world.do(UnitVanished(unit.name, None))
    assert the(world.do(MemoryReleased(original.run, {})), UnloadDone).name == "a"
    assert the(world.do(UnitVanished(unit.name, None)) + world.do(found(original, unit)), WatchLoading)


def test_a_failure_makes_room_for_a_unit_of_its_model_that_runs(world: World) -> None:
    first, second = made(), made()
    second = replace(second, record=second.record.model_copy(update={"run": "0000beef"}))
    world.do(found(first, status(first, active_state="failed", result="exit-code")))
    world.do(PostMortemRead(first.run, failure()))
    world.do(MemoryReleased(first.run, {}))
    failed = world.get("a")
    effects = world.do(found(second))
    assert world.get("a").run == "0000beef"
    # Its failure is reported, and nothing of it is left to be found again or started again.
    assert failed.retry_at_s is None or ForgetUnit in kinds(effects)
    world.now_s += 3600
    assert not any(isinstance(each, Restore) for each in world.look())


def test_what_is_here_already_is_not_adopted_twice(world: World) -> None:
    mine = world.bring_up("a")
    before = world.charged_bytes
    assert world.do(found(mine, healthy=True)) == []
    other = made()
    other = replace(other, record=other.record.model_copy(update={"run": "0000beef"}))
    assert world.do(found(other, healthy=True)) == []
    twin = made("b")
    twin = replace(twin, record=twin.record.model_copy(update={"run": mine.run}))
    assert world.do(found(twin, healthy=True)) == []
    assert world.get("a") is mine and world.charged_bytes == before
    # Nor does a failure that is found take the place of one that is known.
    assert world.do(found(other, status(other, active_state="failed"))) == []


def test_a_reconstructed_one_can_be_reset_as_far_as_it_knows_what_was_asked(world: World) -> None:
    original = made()
    record = original.record
    assert record.launch is not None
    nobody = record.model_copy(update={"launch": record.launch.model_copy(update={"asked": None})})
    world.do(found(replace(original, record=nobody), healthy=True, reconstructed="it carries no record"))
    assert error_of(world.do(ResetRequested("r", "a")), "r").hint
