"""Loading again what is wanted: in order, one failing not in the way of others, written before the deed, told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving import restoring as restoring_module
from lllm3090d.serving.events import (
    Admitted,
    ComebackRefused,
    Effect,
    EngineReady,
    Event,
    Failed,
    LoadDone,
    Queued,
    ReleaseRequested,
    Restore,
    ResumeRequested,
    StartFinished,
    UnitAdopted,
    UnitSeen,
    UnloadRequested,
)
from lllm3090d.serving.history import History
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.restoring import Restoring
from lllm3090d.serving.wanted import Life, Lot, Want
from lllm3090d.serving.wanted_set import WantedSet
from lllm3090d.serving.wanted_store import Mark, Remembered, WantedStore
from lllm3090d.serving.wanted_views import autoload_view, wanted_views
from lllm3090d.store import FILE_NAME, Store
from lllm3090d.wire import EventKind
from lllm3090d.wire_wanted import MarkOrigin
from tests.fakes.scheduler_world import CARD, GIB, World, status

pytestmark = pytest.mark.unit

NOW = Life("boot-1", "manager-1")
DIED = Life("boot-1", "manager-0")
WISH = PlanRequest(context_tokens=4096)
NO_ROOM = LlmError(ErrorCode.INSUFFICIENT_VRAM, "it does not fit now")
DAMAGED = LlmError(ErrorCode.BAD_CHECKPOINT, "it is damaged")


class Desk:
    """A wanted set over a real scheduler and a real state file; loads are answered by script."""

    def __init__(self, directory: Path, configured: Sequence[str] = ()) -> None:
        self.world = World(least_residency_s=0.0, least_idle_s=0.0)
        self.scheduler = self.world.scheduler
        self.store = Store(directory / FILE_NAME)
        self.kept = WantedStore(lambda: self.store)
        self.history = History()
        self.asked: list[tuple[str, LoadWish]] = []
        self.answers: dict[str, list[Any]] = {}  # by model: what each next load of it comes to
        self.unknown: set[str] = set()
        self.withdrawn: list[str] = []
        self.submitted: list[Event] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.gates: dict[str, asyncio.Event] = {}  # by model: until it is set its load stands in line
        self.settled = asyncio.Event()
        self.settled.set()
        self.waits_for_desktop = False
        self.news = asyncio.Event()
        self.restoring = Restoring(
            load=self.load,
            withdraw=self.withdrawn.append,
            scheduler=self.scheduler,
            history=self.history,
            submit=self.submitted.append,
            spawn=self.spawn,
        )
        self.set = WantedSet(
            scheduler=self.scheduler,
            restoring=self.restoring,
            store=self.kept,
            history=self.history,
            spawn=self.spawn,
            configured=lambda: configured,
            named=self.named,
            settled=self._wait_until_settled,
            unsettled=lambda: "" if self.settled.is_set() else "the session begins",
        )

    async def _wait_until_settled(self) -> None:
        self.waits_for_desktop = True
        self.news.set()
        await self.settled.wait()

    def named(self, name: str) -> str:
        """Models are called by their names in capitals too."""
        if name in self.unknown:
            raise LlmError(ErrorCode.UNKNOWN_MODEL, f"there is no {name}", hint="look")
        return name.lower()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def until(self, question: Callable[[], object]) -> None:
        """Until it is so; asked again after each load, event and end of a task."""
        async with asyncio.timeout(20):
            while not question():
                self.news.clear()
                await self.news.wait()

    async def idle(self) -> None:
        """Until nothing is under way."""
        await self.until(lambda: not self.tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.news.set()

    async def load(self, name: str, wish: LoadWish, token: str) -> tuple[str, AsyncGenerator[Any, None]]:
        """As the daemon's: an error, or a stream; what is loaded then runs."""
        self.asked.append((name, wish))
        self.news.set()
        answer = self.answers.get(name, [None])
        outcome = answer.pop(0) if answer else None
        if isinstance(outcome, LlmError):
            raise outcome
        return token, self._stream(name, wish, token)

    async def _stream(self, name: str, wish: LoadWish, token: str) -> AsyncGenerator[Any, None]:
        gate = self.gates.get(name)
        if gate is not None:
            yield Queued(token, name, "room")
            await gate.wait()
        self.apply_load(name, wish)
        yield Admitted(token, "run", None, None, ())  # type: ignore[arg-type]
        self.bring_up(name)
        yield LoadDone(token, "run")

    def apply_load(self, name: str, wish: LoadWish) -> None:
        self.do(self.world.request(name, f"t-{name}", 2.0, wish.request, pinned=wish.pinned))

    def bring_up(self, name: str) -> None:
        """All that a load still needs; the engine takes 1 GiB."""
        instance = self.world.get(name)
        for event in (
            UnitSeen(status(instance)),
            StartFinished(instance.run, None),
            EngineReady(instance.run, {CARD.uuid: GIB}),
        ):
            self.do(event)

    def apply(self, event: Event) -> None:
        """As the writer, with no interest in what is to be done."""
        self.do(event)

    def do(self, event: Event) -> list[Effect]:
        """As the writer."""
        effects = self.world.do(event)
        self.set.follow()
        self.news.set()
        return effects

    def begin(
        self,
        remembered: Remembered,
        asleep: Sequence[str] = (),
        life: Life = NOW,
        *,
        is_behind: bool = False,
    ) -> None:
        """As at a start."""
        self.set.begin(remembered, life, self.apply, asleep, is_behind=is_behind)
        self.set.go_on()

    def told(self) -> list[str]:
        """What the history says of it."""
        return [
            f"{each.model}: {each.message}" if each.model else each.message
            for each in self.history._events
            if each.kind is EventKind.RESTORE
        ]

    def names(self) -> list[str]:
        """What was asked for, in order."""
        return [name for name, _ in self.asked]


def with_desk(
    tmp_path: Path, test: Callable[[Desk], Awaitable[None]], configured: Sequence[str] = ()
) -> None:
    async def run() -> None:
        desk = Desk(tmp_path, configured)
        try:
            await test(desk)
        finally:
            for task in tuple(desk.tasks):
                task.cancel()
            await asyncio.gather(*desk.tasks, return_exceptions=True)
            desk.store.close()

    asyncio.run(run())


def want(name: str, lot: Lot = Lot.UP, **changes: Any) -> Want:
    """One that has run."""
    return Want(name=name, lot=lot, request=WISH, **({"run": f"run-of-{name}"} | changes))


def test_after_the_user_managers_death_all_come_back_as_they_were(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.begin(Remembered(DIED, (want("b", pinned=True), want("a"))))
        await desk.idle()
        assert desk.names() == ["b", "a"]
        wish = desk.asked[0][1]
        assert (wish.request, wish.pinned, wish.may_evict, wish.may_wait, wish.attempt) == (
            WISH,
            True,
            False,
            True,
            0,
        )
        assert [each.lot for each in desk.set.wants] == [Lot.UP, Lot.UP]
        assert desk.told() == [
            "to be loaded again (the user manager died): b, a",
            "b: loaded again (the user manager died)",
            "a: loaded again (the user manager died)",
        ]
        kept = desk.kept.remembered()
        assert (kept.life, [each.name for each in kept.wants]) == (NOW, ["b", "a"])

    with_desk(tmp_path, test)


def test_one_that_fails_or_stands_in_line_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring_module, "PAUSES_S", (0.0, 3600.0))

    async def test(desk: Desk) -> None:
        desk.answers = {"bad": [DAMAGED], "full": [NO_ROOM]}
        desk.gates["waits"] = asyncio.Event()
        names = ("bad", "full", "waits", "last")
        desk.begin(Remembered(DIED, tuple(map(want, names))))
        await desk.until(lambda: len(desk.asked) == 4 and len(desk.told()) == 4)
        assert desk.names() == list(names)
        views = {each.name: each for each in await wanted_views(desk.set, desk.scheduler)}
        assert set(views) == {"bad", "full", "waits"}
        assert views["bad"].why == "it could not be loaded again: it is damaged"
        assert views["full"].why == "it could not be loaded again, and is tried later: it does not fit now"
        assert views["full"].problem is not None and views["full"].problem["code"] == "insufficient_vram"
        assert views["waits"].why == "it is being loaded again"
        assert (
            "full: not loaded again (the user manager died): it does not fit now; tried again in 3600 s"
            in (desk.told())
        )
        assert "bad: not loaded again (the user manager died): it is damaged" in desk.told()
        desk.gates["waits"].set()
        await desk.until(lambda: desk.scheduler.instance("waits") is not None)
        # A person gives up on one: nothing tries any more, and nothing is wanted.
        assert desk.set.forget("full") is not None
        desk.restoring.forget("full")
        assert "full" not in desk.restoring.coming
        assert [each.name for each in await wanted_views(desk.set, desk.scheduler)] == ["bad"]

    with_desk(tmp_path, test)


def test_what_was_refused_for_what_passes_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring_module, "PAUSES_S", (0.0, 0.0, 0.0))

    async def test(desk: Desk) -> None:
        desk.answers = {"a": [NO_ROOM, NO_ROOM], "b": [NO_ROOM] * 9}
        desk.begin(Remembered(DIED, (want("a"), want("b"))))
        await desk.idle()
        assert desk.names().count("a") == 3 and desk.names().count("b") == 3
        assert {each.name: each.lot for each in desk.set.wants} == {"a": Lot.UP, "b": Lot.COMING}
        (view,) = await wanted_views(desk.set, desk.scheduler)
        assert (view.name, view.wanted, view.autoload) == ("b", True, False)
        assert view.why == "it could not be loaded again: it does not fit now"

    with_desk(tmp_path, test)


def test_a_login_loads_what_is_marked_settings_first_then_the_oldest_mark(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.unknown = {"gone"}
        for name in ("old", "by-both", "young"):
            desk.kept.mark(Mark(name=name, request=WISH, pinned=name == "old"))
        before = Remembered(Life("boot-0", "manager-1"), (want("was-loaded"), want("old")))
        desk.settled.clear()
        desk.begin(before)
        await desk.until(lambda: desk.waits_for_desktop)
        assert desk.asked == []  # the desktop comes first
        # Whoever asks for one meanwhile is served what is marked.
        wish = desk.set.wish("old")
        assert wish is not None and (wish.request, wish.pinned) == (WISH, True)
        assert desk.set.wish("nobody") is None
        assert desk.kept.remembered().life is None  # killed now, the next daemon begins the login anew
        desk.settled.set()
        await desk.idle()
        assert desk.names() == ["first", "by-both", "old", "young"]
        assert [wish.request for _, wish in desk.asked] == [PlanRequest(), WISH, WISH, WISH]
        assert [wish.pinned for _, wish in desk.asked] == [False, False, True, False]
        assert desk.told()[0].startswith("gone: not loaded (loaded at every login): there is no gone")
        assert desk.kept.remembered().life == NOW
        listed = (await autoload_view(desk.set, desk.scheduler)).models
        assert [(each.name, each.origin, each.state) for each in listed] == [
            ("first", MarkOrigin.SETTING, "ready"),
            ("gone", MarkOrigin.SETTING, None),
            ("by-both", MarkOrigin.SETTING, "ready"),
            ("old", MarkOrigin.COMMAND, "ready"),
            ("young", MarkOrigin.COMMAND, "ready"),
        ]
        assert listed[1].why == "there is no gone"
        assert listed[3].options == {"context_tokens": 4096, "pin": True}
        # Unloaded, it is not wanted until the next login.
        desk.do(UnloadRequested("u", "young"))
        desk.world.bring_down(desk.world.get("young"))
        desk.set.follow()
        views = {each.name: each for each in await wanted_views(desk.set, desk.scheduler)}
        assert (views["young"].wanted, views["young"].autoload, views["young"].why) == (
            False,
            True,
            "it is loaded at the next login",
        )

    def run(desk: Desk) -> Awaitable[None]:
        return test(desk)

    with_desk(tmp_path, run, ("FIRST", "gone", "by-both", "First"))


def test_a_person_is_faster_than_the_login(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.kept.mark(Mark(name="a"))
        desk.settled.clear()
        desk.begin(Remembered())
        await desk.until(lambda: desk.waits_for_desktop)
        desk.apply_load("a", LoadWish(request=WISH))
        desk.bring_up("a")
        desk.settled.set()
        await desk.idle()
        assert desk.asked == [] and desk.set.wants[0].request == WISH
        # Marked now, it is marked as it is loaded.
        await desk.set.mark(desk.set.mark_of("a"))
        (marked,) = await desk.set.marked()
        assert marked.mark.request == WISH and not marked.by_setting
        assert desk.set.mark_of("never") == Mark(name="never")
        assert await desk.set.unmark("a") and not await desk.set.unmark("a")

    with_desk(tmp_path, test)


def test_what_waits_for_the_desktop_is_wanted_already_and_can_be_given_up(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        for name in ("kept", "given-up", "unmarked", "by-hand"):
            desk.kept.mark(Mark(name=name))
        desk.settled.clear()
        desk.begin(Remembered())
        await desk.until(lambda: desk.waits_for_desktop)
        assert desk.set.waits_for_desktop and desk.asked == []
        views = {each.name: each for each in await wanted_views(desk.set, desk.scheduler)}
        assert {each.why for each in views.values()} == {
            "it waits for the desktop to settle: the session begins"
        }
        assert all(each.wanted and each.autoload for each in views.values()) and len(views) == 4
        listed = (await autoload_view(desk.set, desk.scheduler)).models
        assert listed[0].why == "it waits for the desktop to settle: the session begins"
        assert desk.set.forget("given-up") is not None
        await desk.set.unmark("unmarked")
        await desk.set.mark(Mark(name="marked-later"))
        desk.apply_load("by-hand", LoadWish(request=WISH))
        desk.bring_up("by-hand")
        desk.settled.set()
        await desk.idle()
        assert desk.names() == ["kept"]
        assert "to be loaded again (loaded at every login): kept" in desk.told()
        assert [each.name for each in desk.set.wants] == ["kept", "by-hand"]
        assert desk.kept.remembered().life == NOW

    with_desk(tmp_path, test)


def test_the_last_mark_that_is_taken_away_leaves_nothing_to_wait_for(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.kept.mark(Mark(name="a"))
        desk.kept.mark(Mark(name="by-setting"))
        desk.settled.clear()
        desk.begin(Remembered())
        await desk.until(lambda: desk.waits_for_desktop)
        assert await desk.set.unmark("by-setting")  # the settings name it all the same
        assert [each.name for each in desk.set.wants] == ["by-setting", "a"]
        assert await desk.set.unmark("a")
        assert [each.name for each in desk.set.wants] == ["by-setting"] and desk.set.waits_for_desktop
        desk.set.forget("by-setting")
        await desk.until(lambda: not desk.set.waits_for_desktop)
        # What is not waited for, and what a person has loaded, is not let go by that.
        desk.apply_load("loaded", LoadWish(request=WISH))
        await desk.set.mark(Mark(name="loaded"))
        assert await desk.set.unmark("loaded")
        assert [each.name for each in desk.set.wants] == ["loaded"]

    with_desk(tmp_path, test, configured=["by-setting"])


def test_killed_while_it_waits_and_something_was_loaded_it_waits_again(tmp_path: Path) -> None:
    """Models run, so the set is no login's; but the desktop has not settled."""

    async def test(desk: Desk) -> None:
        desk.apply_load("by-hand", LoadWish(request=WISH))
        desk.bring_up("by-hand")
        run = desk.world.get("by-hand").run
        desk.settled.clear()
        left = (want("a", Lot.COMING), want("by-hand", run=run))
        desk.begin(Remembered(Life("boot-1", "manager-0", ended=True), left))
        await desk.until(lambda: desk.waits_for_desktop)
        assert desk.asked == [] and desk.set.waits_for_desktop
        await desk.set.end()
        assert desk.kept.remembered().life != Life("boot-1", "manager-1", ended=True)
        desk.settled.set()
        await desk.idle()
        assert desk.names() == ["a"] and desk.kept.remembered().life == NOW

    with_desk(tmp_path, test)


def test_given_away_and_taken_back_in_one_breath_each_is_asked_for_once(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        for name in ("a", "b"):
            desk.kept.mark(Mark(name=name))
        desk.settled.clear()
        desk.begin(Remembered())
        await desk.until(lambda: desk.waits_for_desktop)
        desk.do(ReleaseRequested("r", until_resume=True))
        desk.settled.set()
        desk.do(ResumeRequested("r2"))
        desk.set.resumed()
        await desk.idle()
        assert desk.names() == ["a", "b"]
        assert "to be loaded again (loaded at every login): a, b" in desk.told()

    with_desk(tmp_path, test)


def test_with_nothing_to_load_no_desktop_is_waited_for(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.settled.clear()
        desk.begin(Remembered())
        await desk.idle()
        assert not desk.waits_for_desktop and desk.kept.remembered().life == NOW

    with_desk(tmp_path, test)


def test_nothing_is_left_to_wait_for_once_a_person_has_loaded_or_given_up_all(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.kept.mark(Mark(name="a"))
        desk.kept.mark(Mark(name="b"))
        desk.settled.clear()
        desk.begin(Remembered())
        await desk.until(lambda: desk.waits_for_desktop)
        desk.set.forget("a")
        assert desk.set.waits_for_desktop
        desk.apply_load("b", LoadWish(request=WISH))
        assert not desk.set.waits_for_desktop

    with_desk(tmp_path, test)


def test_after_the_managers_death_the_desktop_is_waited_for_too(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.settled.clear()
        desk.begin(Remembered(DIED, (want("a"), want("b"))))
        await desk.until(lambda: desk.waits_for_desktop)
        assert desk.asked == [] and desk.set.waits_for_desktop
        desk.settled.set()
        await desk.idle()
        assert desk.names() == ["a", "b"]
        # The same manager: what was on its way goes on at once.
        desk.settled.clear()
        desk.waits_for_desktop = False
        desk.begin(Remembered(NOW, (want("c", Lot.COMING),)))
        await desk.idle()
        assert desk.names() == ["a", "b", "c"] and not desk.waits_for_desktop

    with_desk(tmp_path, test)


@pytest.mark.parametrize("before", [Life("boot-0", "manager-0"), DIED])
def test_a_daemon_that_is_stopped_while_it_waits_begins_the_login_anew(tmp_path: Path, before: Life) -> None:
    async def test(desk: Desk) -> None:
        desk.kept.mark(Mark(name="a"))
        desk.kept.keep((want("a"),), before)
        desk.settled.clear()
        desk.begin(desk.kept.remembered())
        await desk.until(lambda: desk.waits_for_desktop)
        await desk.set.end()
        assert desk.kept.remembered().life == before
        for task in tuple(desk.tasks):
            task.cancel()
        desk.settled.set()
        await desk.idle()
        assert desk.asked == []
        desk.begin(desk.kept.remembered())
        await desk.idle()
        assert desk.names() == ["a"] and desk.kept.remembered().life == NOW
        await desk.set.end()
        assert desk.kept.remembered().life == Life("boot-1", "manager-1", ended=True)

    with_desk(tmp_path, test)


def test_given_away_while_it_waits_it_comes_at_the_resumption(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.kept.mark(Mark(name="a"))
        desk.settled.clear()
        desk.begin(Remembered())
        await desk.until(lambda: desk.waits_for_desktop)
        desk.do(ReleaseRequested("r", until_resume=True))
        desk.settled.set()
        await desk.idle()
        assert desk.asked == [] and [each.lot for each in desk.set.wants] == [Lot.RELEASED]
        desk.do(ResumeRequested("r2"))
        desk.set.resumed()
        await desk.idle()
        assert desk.names() == ["a"]

    with_desk(tmp_path, test)


def test_given_away_nothing_comes_until_a_resumption(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.scheduler.released = True
        desk.begin(Remembered(DIED, (want("a"), want("b", Lot.COMING))))
        await desk.idle()
        assert desk.asked == [] and {each.lot for each in desk.set.wants} == {Lot.RELEASED}
        (first, _) = await wanted_views(desk.set, desk.scheduler)
        assert first.why.startswith("the card is released")
        desk.do(ResumeRequested("r"))
        desk.set.resumed()
        await desk.idle()
        assert desk.names() == ["a", "b"]
        assert "a: loaded again (the card is no longer released)" in desk.told()
        desk.set.resumed()  # nothing is owed any more
        desk.do(ReleaseRequested("r2", until_resume=False))
        await desk.idle()
        assert desk.names() == ["a", "b"] and desk.set.wants == ()

    with_desk(tmp_path, test)


def test_given_away_before_the_login_is_over(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.kept.mark(Mark(name="a"))
        desk.scheduler.released = True
        desk.begin(Remembered())
        await desk.idle()
        assert desk.asked == [] and [each.lot for each in desk.set.wants] == [Lot.RELEASED]

    with_desk(tmp_path, test)


def test_what_was_stopped_while_nobody_looked_is_told(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.begin(Remembered(NOW, (want("a"), want("b", Lot.COMING), want("c", Lot.COMING))), asleep=["c"])
        await desk.idle()
        assert desk.names() == ["b"]
        assert "a: no longer wanted: it was stopped while no daemon was there" in desk.told()

    with_desk(tmp_path, test)


@pytest.mark.parametrize("is_behind", [True, False])
def test_what_a_full_disk_kept_from_being_written_was_not_asked_to_end(
    tmp_path: Path, is_behind: bool
) -> None:
    """Of a model that was loaded then and has died since, the cause is read; else it was unloaded."""

    async def test(desk: Desk) -> None:
        before = World()
        before.do(before.request("a", "t", 2.0, WISH))
        launched = before.get("a")
        dead = status(launched, active_state="failed", result="signal", main_pid=0)
        shares = launched.record.shares(CARD.uuid)
        desk.do(UnitAdopted(dead, launched.record, healthy=False, shares=shares))
        desk.begin(Remembered(NOW, (want("b"),)), is_behind=is_behind)
        assert desk.world.get("a").post_mortem_pending is is_behind
        await desk.idle()
        (told,) = desk.told()
        assert told.startswith("b: no longer wanted: it ")
        assert ("could not be recorded" in told) is is_behind

    with_desk(tmp_path, test)


def test_a_comeback_that_is_refused_is_told_to_the_scheduler_alone(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.begin(Remembered(NOW))
        effect = Restore("a", WISH, (), False, None, "again", attempt=2)
        desk.answers = {"a": [NO_ROOM]}
        await desk.restoring.restore(effect)
        assert desk.submitted == [ComebackRefused("a", NO_ROOM)] and desk.told() == []
        desk.answers = {"a": [LlmError(ErrorCode.SHUTTING_DOWN, "the daemon stops")]}
        await desk.restoring.restore(replace(effect, attempt=0))
        assert desk.told() == [] and desk.restoring.problems == {}

    with_desk(tmp_path, test)


def test_what_is_forgotten_while_it_is_looked_up_is_withdrawn(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.begin(Remembered(NOW))
        work = desk.restoring.restore(Restore("a", WISH, (), False, None, "again"))
        assert desk.restoring.coming == {"a"}
        desk.restoring.forget()
        assert desk.restoring.coming == frozenset() and len(desk.withdrawn) == 1
        desk.answers = {"a": [LlmError(ErrorCode.LOAD_CANCELLED, "withdrawn")]}
        await work
        assert desk.told() == [] and desk.restoring.problems == {}

    with_desk(tmp_path, test)


def test_a_load_that_fails_after_its_admission_is_no_refusal(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        async def failing(_name: str, _wish: LoadWish, token: str) -> tuple[str, AsyncGenerator[Any, None]]:
            async def stream() -> AsyncGenerator[Any, None]:
                yield Admitted(token, "run", None, None, ())  # type: ignore[arg-type]
                yield Failed(token, LlmError(ErrorCode.ENGINE_FAILED, "it died"))

            return token, stream()

        desk.restoring._load = failing
        desk.begin(Remembered(NOW))
        await desk.restoring.restore(Restore("a", WISH, (), False, None, "again"))
        assert desk.told() == [] and desk.submitted == []  # the change of state tells it

    with_desk(tmp_path, test)


def test_it_is_written_before_the_deed(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.begin(Remembered(NOW))
        desk.apply_load("a", LoadWish(request=WISH))
        desk.bring_up("a")
        seen: list[list[str]] = []

        async def stop() -> None:
            seen.append([each.name for each in desk.kept.remembered().wants])

        await desk.set.after_writing(stop)
        desk.do(UnloadRequested("u", "a"))
        await desk.set.after_writing(stop)
        assert seen == [["a"], []]
        await desk.set.end()
        assert desk.kept.remembered().life == Life("boot-1", "manager-1", ended=True)

    with_desk(tmp_path, test)


def test_a_full_disk_is_told_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(desk: Desk) -> None:
        desk.begin(Remembered(NOW))
        await desk.idle()
        ((pages,),) = desk.store.rows("PRAGMA page_count")
        desk.store.rows(f"PRAGMA max_page_count = {pages}")
        for name in ("a", "b", "c"):
            desk.apply_load(name, LoadWish(request=WISH))
            desk.bring_up(name)
            await desk.set.written()
        assert desk.set.problem is not None and desk.set.problem.code is ErrorCode.STATE_UNUSABLE
        assert caplog.text.count("Which models are wanted is not kept") == 1
        ran = asyncio.Event()

        async def work() -> None:
            ran.set()

        await desk.set.after_writing(work)
        assert ran.is_set()
        desk.store.rows("PRAGMA max_page_count = 1000000")
        desk.do(UnloadRequested("u", "c"))
        assert await desk.set.written() is None
        assert [each.name for each in desk.kept.remembered().wants] == ["a", "b"]

    with_desk(tmp_path, test)


def test_a_disk_that_hangs_holds_up_no_stop_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lllm3090d.serving.wanted_set.WRITE_LIMIT_S", 0.01)

    async def test(desk: Desk) -> None:
        held = asyncio.Event()

        async def never(*_: Any) -> None:
            await held.wait()

        desk.begin(Remembered(NOW))
        await desk.idle()
        monkeypatch.setattr(desk.set, "_keep", never)
        desk.apply_load("a", LoadWish(request=WISH))
        ran: list[str] = []

        async def work() -> None:
            ran.append("stopped")

        await desk.set.after_writing(work)
        assert ran == ["stopped"]
        held.set()
        await desk.idle()

    with_desk(tmp_path, test)
