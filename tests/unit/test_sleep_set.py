"""What is to be loaded again after a sleep: taken from what runs, in order, and kept within one boot."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from lllm3090d.planning.planner import PlanRequest
from lllm3090d.serving.events import Activity, PinRequested, UnloadRequested
from lllm3090d.serving.sleep_set import Sleeper, SleepStore, merged, sleepers
from lllm3090d.store import Store
from tests.fakes.scheduler_world import CARD, World

pytestmark = pytest.mark.unit


def sleeper(name: str, **values: object) -> Sleeper:
    made: dict[str, object] = {"name": name, "run": "0000000a", "request": PlanRequest(context_tokens=8192)}
    return Sleeper.model_validate(made | values)


def test_what_was_used_last_comes_first_and_a_load_under_way_before_all() -> None:
    world = World()
    world.bring_up("old", gib=3.0)
    world.now_s += 10
    world.bring_up("older-but-used", gib=3.0)
    world.now_s += 10
    world.bring_up("newest", gib=3.0)
    world.now_s += 10
    world.look({"old": Activity(True, 5)})
    world.look({"old": Activity(False, 9)})
    world.now_s += 5
    world.load("loading", "t-loading", gib=3.0)
    found = sleepers(world.scheduler)
    assert [each.name for each in found] == ["loading", "old", "newest", "older-but-used"]
    assert [each.idle_s for each in found] == [0.0, 5.0, 15.0, 25.0]


def test_what_is_on_its_way_down_or_has_failed_is_not_loaded_again() -> None:
    world = World()
    world.bring_up("stays", gib=3.0)
    world.bring_up("goes", gib=3.0)
    world.do(UnloadRequested("t-unload", "goes"))
    assert [each.name for each in sleepers(world.scheduler)] == ["stays"]


def test_all_that_a_load_asked_for_is_remembered() -> None:
    world = World()
    request = PlanRequest(context_tokens=16384, parallel=2)
    instance = world.bring_up("a", request=request, card=CARD.uuid, gib=3.0)
    world.do(PinRequested("t-pin", "a", True))
    (found,) = sleepers(world.scheduler)
    assert (found.name, found.run, found.request) == ("a", instance.run, request)
    assert (found.card, found.cards, found.pinned) == (CARD.uuid, (CARD.uuid,), True)
    assert found.least_context_tokens is None
    wish = found.wish()
    assert (wish.request, wish.card, wish.pinned) == (request, CARD.uuid, True)
    assert not wish.may_evict and not wish.may_wait


def test_a_context_that_was_smaller_than_asked_for_will_do_again() -> None:
    world = World()
    instance = world.bring_up(
        "a", request=PlanRequest(context_tokens=32768), least_context_tokens=4096, gib=21.0
    )
    (found,) = sleepers(world.scheduler)
    assert found.request.context_tokens == 32768
    assert found.least_context_tokens == instance.plan.context_tokens < 32768


def test_of_an_older_record_what_it_has_is_asked_for() -> None:
    world = World()
    instance = world.bring_up("a", gib=3.0)
    assert instance.record.launch is not None
    launch = instance.record.launch.model_copy(update={"asked": None})
    instance.record = instance.record.model_copy(update={"launch": launch})
    (found,) = sleepers(world.scheduler)
    assert found.request.context_tokens == instance.plan.context_tokens
    assert found.request.parallel == instance.plan.parallel


def test_what_is_there_now_goes_before_what_was_left_of_an_earlier_sleep() -> None:
    now, left = (sleeper("a", run="2"), sleeper("b")), (sleeper("c"), sleeper("a", run="1"))
    assert [(each.name, each.run) for each in merged(now, left)] == [
        ("a", "2"),
        ("b", "0000000a"),
        ("c", "0000000a"),
    ]


def test_it_is_kept_in_order_beyond_the_daemons_life(tmp_path: Path) -> None:
    members = (
        sleeper("b", pinned=True, arguments=("--threads", "8"), cards=("GPU-1",), idle_s=3.5),
        sleeper("a", card="GPU-1", least_context_tokens=4096),
    )
    first = Store(tmp_path / "state.db")
    assert SleepStore(lambda: first, lambda: "boot").keep(members)
    first.close()
    second = Store(tmp_path / "state.db")
    kept = SleepStore(lambda: second, lambda: "boot")
    assert kept.kept() == members
    assert kept.keep(members[1:])
    assert kept.kept() == members[1:]
    assert kept.keep(())
    assert kept.kept() == ()
    second.close()


def test_another_boot_has_nothing_to_load_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    SleepStore(lambda: store, lambda: "one").keep([sleeper("a")])
    assert SleepStore(lambda: store, lambda: "two").kept() == ()
    assert len(SleepStore(lambda: store, lambda: "one").kept()) == 1
    store.close()


def test_what_is_not_understood_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    kept = SleepStore(lambda: store, lambda: "boot")
    kept.keep([sleeper("a"), sleeper("b")])

    def damage(connection: sqlite3.Connection) -> None:
        connection.execute("""UPDATE sleepers SET body = '{"name": 7}' WHERE position = 0""")

    assert store.change(damage)
    assert [each.name for each in kept.kept()] == ["b"]
    store.close()


def test_memory_in_place_of_the_file_does_not_count_as_kept(tmp_path: Path) -> None:
    (tmp_path / "state.db").mkdir()
    store = Store(tmp_path / "state.db")
    kept = SleepStore(lambda: store, lambda: "boot")
    assert kept.keep([sleeper("a")]) is False
    assert [each.name for each in kept.kept()] == ["a"]  # for this life
    store.close()


def test_the_kernel_tells_one_boot_from_another(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    kept = SleepStore(lambda: store)
    kept.keep([sleeper("a")])
    ((boot,),) = store.rows("SELECT boot FROM sleepers")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len(kept.kept()) == 1
    store.close()
