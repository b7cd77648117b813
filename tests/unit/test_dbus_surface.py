"""What the D-Bus surface does beside the contract: jobs, news, strangers, floods, and calls that go wrong."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from lllm3090d.bus import service
from lllm3090d.bus.messages import RemoteError
from lllm3090d.bus.service_contract import JOB, MANAGER, MODEL, ROOT, path_of_job, path_of_model
from lllm3090d.bus.service_pace import Pace
from lllm3090d.errors import KINDS, ErrorCode, LlmError
from lllm3090d.serving.actors import CALLER
from lllm3090d.serving.instance import InstanceState
from lllm3090d.surfaces import dbus_jobs
from lllm3090d.surfaces.dbus_jobs import Jobs
from lllm3090d.wire import EventKind, LoadLine, LoadLineKind
from tests.fakes.dbus_world import Invocation, World, instance

pytestmark = pytest.mark.unit

T = TypeVar("T")
TOKEN = "job-1234"  # noqa: S105  # no secret
PATH = path_of_job(TOKEN)


def play(scenario: Callable[[World], Awaitable[T]]) -> T:
    async def run() -> T:
        world = World()
        try:
            return await scenario(world)
        finally:
            await world.surface.end()

    return asyncio.run(run())


def line(kind: LoadLineKind, **members: Any) -> LoadLine:
    return LoadLine(kind=kind, elapsed_s=0.0, token=TOKEN, **members)


async def load(world: World, *lines: LoadLine | LlmError, **options: Any) -> Invocation:
    world.api.lines = list(lines)
    options = {"token": TOKEN, **options}
    return await world.call("Load", "alpha", options, path=ROOT, interface=MANAGER)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # any step of any task may make it true
            await asyncio.sleep(0)


async def state(world: World) -> str:
    return str((await world.surface.properties(PATH, JOB, ("State",)))["State"])


async def told_until(world: World, enough: Callable[[list[tuple[Any, ...]]], bool]) -> list[tuple[Any, ...]]:
    """What was told from now on until that is enough."""
    told: list[tuple[Any, ...]] = []
    async with asyncio.timeout(20):
        while not enough(told):
            await asyncio.sleep(0)
            told += world.bus.told()
    return told


async def ended(world: World) -> list[tuple[Any, ...]]:
    """What was told until the job had ended."""
    return await told_until(world, lambda told: bool({"JobCompleted", "JobFailed"} & set(names(told))))


def names(told: list[tuple[Any, ...]]) -> list[str]:
    return [each[1] for each in told]


def test_a_job_is_there_before_its_path_is_told_and_that_before_anything_of_it() -> None:
    async def scenario(world: World) -> None:
        world.api.lines = [line(LoadLineKind.READY, instance=instance())]
        invocation = Invocation()
        options = {"token": TOKEN, "context_tokens": 4096}
        world.arrive(
            "Load",
            "alpha",
            options,
            path=ROOT,
            interface=MANAGER,
            sender=":1.1",
            invocation=invocation,
        )
        await until(
            lambda: len(world.bus.work) >= 5
        )  # export, news of it, the answer, and the first of the job
        work = list(world.bus.work)
        answers = [index for index, each in enumerate(work) if not hasattr(each, "func")]
        kinds = [each.func.__name__ if hasattr(each, "func") else "answer" for each in work]
        assert kinds[:3] == ["_bus_publish", "_bus_emit", "answer"] and answers == [2]
        world.answered()
        assert invocation.answer == (PATH,)
        told = await ended(world)
        assert names(told)[-2:] == ["Completed", "JobCompleted"]
        result = told[-1][2][3]
        assert result["object"] == path_of_model("alpha") and result["run"] == "0a1b2c3d"
        (asked,) = world.api.asked
        assert asked[1].token == TOKEN and asked[1].context_tokens == 4096

    play(scenario)


def test_a_load_tells_how_far_it_is_and_why_it_failed() -> None:
    why = LlmError(ErrorCode.ENGINE_FAILED, "it ended", hint="look").problem()

    async def scenario(world: World) -> None:
        await load(
            world,
            line(LoadLineKind.STATE, state=InstanceState.QUEUED, why="room"),
            line(LoadLineKind.PROGRESS, state=InstanceState.LOADING, resident_bytes=5, expected_bytes=9),
            line(LoadLineKind.STATE, state=InstanceState.LOADING),
            line(LoadLineKind.FAILED, problem=why),
        )
        told = await ended(world)
        progress = [
            each[2][1]["Progress"]
            for each in told
            if each[1] == "PropertiesChanged" and "Progress" in each[2][1]
        ]
        assert progress == [("queued", -1, -1), ("loading", 5, 9)]  # the third is no news
        error = ("org.lllm3090.Error.EngineFailed", "it ended\nlook")
        assert told[-2] == (PATH, "Failed", error)
        assert told[-1] == (ROOT, "JobFailed", (PATH, "load", "alpha", *error))
        assert await state(world) == "failed"

    play(scenario)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([LlmError(ErrorCode.UNKNOWN_MODEL, "no such")], ErrorCode.UNKNOWN_MODEL),
        ([line(LoadLineKind.STATE), LlmError(ErrorCode.SHUTTING_DOWN, "stops")], ErrorCode.SHUTTING_DOWN),
        ([line(LoadLineKind.ADMITTED)], ErrorCode.LOAD_CANCELLED),
    ],
)
def test_every_load_comes_to_an_end(lines: list[Any], code: ErrorCode) -> None:
    async def scenario(world: World) -> None:
        await load(world, *lines)
        told = await ended(world)
        assert told[-1][2][3] == KINDS[code].dbus_name

    play(scenario)


def test_a_mistake_of_ours_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        await load(world, None)  # type: ignore[arg-type]  # no line at all
        told = await ended(world)
        assert told[-1][2][3] == KINDS[ErrorCode.INTERNAL].dbus_name
        world.api.previews = SimpleNamespace()
        plan = await world.call("Plan", "alpha", {}, path=ROOT, interface=MANAGER)
        assert plan.error is not None and plan.error[0] == KINDS[ErrorCode.INTERNAL].dbus_name

    play(scenario)
    assert "a job failed unexpectedly" in caplog.text and "a call failed unexpectedly" in caplog.text


def test_a_token_belongs_to_one_job_and_is_free_when_that_is_forgotten() -> None:
    async def scenario(world: World) -> None:
        jobs = Jobs(world.service, kept_s=0)
        jobs.other("unload", "alpha", TOKEN, world.api.unloaded(SimpleNamespace(model="alpha")))  # type: ignore[arg-type]
        with pytest.raises(LlmError, match="belongs to another job"):
            jobs.check(TOKEN)
        told = await told_until(world, lambda told: "JobRemoved" in names(told))
        assert names(told)[-3:] == ["_bus_withdraw", "InterfacesRemoved", "JobRemoved"]
        jobs.check(TOKEN)
        with pytest.raises(LlmError) as gone:
            jobs.of(PATH)
        assert gone.value.code is ErrorCode.NO_SUCH_LOAD

    play(scenario)


def test_ended_jobs_are_kept_up_to_a_number_and_running_ones_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dbus_jobs, "MOST_ENDED", 2)
    monkeypatch.setattr(dbus_jobs, "MOST_RUNNING", 3)

    async def scenario(world: World) -> None:
        world.api.hold.clear()
        for number in range(3):
            answer = await world.call(
                "Unload", "alpha", {"token": f"token-{number}x"}, path=ROOT, interface=MANAGER
            )
            assert answer.error is None
        answer = await world.call("Release", {}, path=ROOT, interface=MANAGER)
        assert answer.error is not None and answer.error[0] == KINDS[ErrorCode.TOO_MANY_REQUESTS].dbus_name
        world.api.hold.set()
        told = await told_until(world, lambda told: names(told).count("JobCompleted") == 3)
        removed = [each[2][0] for each in told if each[1] == "JobRemoved"]
        assert removed == [path_of_job("token-0x")]
        assert (await world.call("Release", {}, path=ROOT, interface=MANAGER)).error is None

    play(scenario)


def test_the_end_of_the_daemon_is_the_end_of_its_jobs() -> None:
    async def run() -> list[tuple[Any, ...]]:
        world = World()
        world.api.hold.clear()
        begun = [Invocation(), Invocation()]
        for each in begun:  # they come in the very moment
            world.arrive("Release", {}, path=ROOT, interface=MANAGER, sender=":1.1", invocation=each)
        await load(world, line(LoadLineKind.STATE))
        await world.surface.end()
        world.answered()
        assert all(each.answer or each.error for each in begun)
        late = Invocation()
        world.arrive("Resume", path=ROOT, interface=MANAGER, sender=":1.1", invocation=late)
        world.answered()
        assert late.error is not None and late.error[0] == KINDS[ErrorCode.SHUTTING_DOWN].dbus_name
        return world.bus.told()

    told = asyncio.run(run())
    assert [each[2][3] for each in told if each[1] == "JobFailed"] == [
        KINDS[ErrorCode.SHUTTING_DOWN].dbus_name
    ]


def test_only_loads_are_withdrawn() -> None:
    async def scenario(world: World) -> None:
        world.api.hold.clear()
        await load(world, line(LoadLineKind.STATE))
        assert (await world.call("Cancel", path=PATH, interface=JOB)).error is None
        assert ("cancel", TOKEN) in world.api.asked
        world.api.hold.set()

    play(scenario)


def test_a_caller_of_another_user_is_refused_and_asked_for_once() -> None:
    async def scenario(world: World) -> None:
        world.bus.uid = os.getuid() + 1
        for _ in range(2):
            refused = await world.call("Resume", path=ROOT, interface=MANAGER, sender=":1.66")
            assert (
                refused.error is not None and refused.error[0] == KINDS[ErrorCode.FORBIDDEN_PEER].dbus_name
            )
        assert world.bus.asked.count("GetConnectionCredentials") == 1
        world.bus.uid = os.getuid()
        assert (await world.call("Resume", path=ROOT, interface=MANAGER, sender=":1.67")).answer == (True,)

    play(scenario)


def test_who_changes_something_is_remembered_and_who_reads_is_not() -> None:
    seen: list[Any] = []

    async def scenario(world: World) -> None:
        async def resume() -> bool:
            seen.append(CALLER.get())
            return True

        async def plan(_: object) -> Any:
            seen.append(CALLER.get())
            return instance()

        world.api.daemon.resume = resume
        world.api.previews = SimpleNamespace(plan=plan)
        await world.call("Resume", path=ROOT, interface=MANAGER)
        await world.call("Plan", "alpha", {}, path=ROOT, interface=MANAGER)

    play(scenario)
    assert (seen[0].uid, seen[0].pid) == (os.getuid(), 77) and seen[1] is None


def test_a_flood_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_CALLS", 3)

    async def scenario(world: World) -> None:
        waiting = [Invocation() for _ in range(4)]
        for each in waiting:
            world.arrive("Resume", path=ROOT, interface=MANAGER, sender=":1.1", invocation=each)
        world.answered()
        assert waiting[3].error is not None
        assert waiting[3].error[0] == KINDS[ErrorCode.TOO_MANY_REQUESTS].dbus_name

        def all_answered() -> bool:
            world.answered()
            return all(each.answer for each in waiting[:3])

        await until(all_answered)

    play(scenario)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            {"RequestName": (3,), "GetConnectionUnixProcessID": (99,)},
            "another program (pid 99) has the name",
        ),
        (
            {"RequestName": (3,), "GetConnectionUnixProcessID": RemoteError("a.B", "gone")},
            "another program has",
        ),
        ({"RequestName": RemoteError("a.B", "not allowed")}, "the bus refuses the name"),
        ({"RequestName": LlmError(ErrorCode.BUS_UNAVAILABLE, "It hangs.")}, "It hangs."),
    ],
)
def test_a_name_that_cannot_be_had_is_told_and_not_fatal(answers: dict[str, Any], words: str) -> None:
    async def scenario(world: World) -> None:
        world.bus.answers |= answers
        await world.surface.start()
        problem = world.api.dbus_problem()
        assert (
            problem is not None and problem.code is ErrorCode.DBUS_UNAVAILABLE and words in problem.message
        )
        world.bus.answers["RequestName"] = (1,)
        # Whoever had it has gone.
        gone = SimpleNamespace(arguments=("org.lllm3090.Manager1", ":1.9", ""))
        world.service._on_owner(gone)  # type: ignore[arg-type]  # as the bus tells it
        await until(lambda: world.api.dbus_problem() is None)

    play(scenario)


def test_models_come_change_are_replaced_and_go() -> None:
    async def scenario(world: World) -> None:
        path = path_of_model("alpha")
        await world.surface.start()
        world.bus.told()

        def look() -> list[tuple[Any, ...]]:
            world.surface._news.look()  # as after an event
            return world.bus.told()

        world.api.run(instance(state="loading"))
        came = look()
        assert names(came) == ["_bus_publish", "InterfacesAdded", "InstanceAdded", "PropertiesChanged"]
        assert came[-1][2][1] == {"Instances": [path], "State": "changing"}
        assert look() == []
        world.api.run(instance(measured_bytes=5))
        changed = look()
        assert changed[0][2] == (MODEL, {"State": "ready", "MeasuredBytes": 5}, [])
        assert changed[1][2] == (MANAGER, {"State": "serving"}, [])
        world.api.run(instance(run="ffffffff"))
        assert names(look())[:6] == [
            "_bus_withdraw",
            "InterfacesRemoved",
            "InstanceRemoved",
            "_bus_publish",
            "InterfacesAdded",
            "InstanceAdded",
        ]
        world.api.run()
        gone = look()
        assert gone[2] == (ROOT, "InstanceRemoved", (path, "alpha", "ffffffff"))
        assert gone[3][2] == (MANAGER, {"Instances": [], "State": "idle"}, [])
        with pytest.raises(LlmError, match="not loaded any more"):
            await world.surface.properties(path, MODEL, ("State",))

    play(scenario)


def test_what_happens_is_told() -> None:
    async def scenario(world: World) -> None:
        await world.surface.start()
        await asyncio.sleep(0)
        world.bus.told()
        history, path = world.api.history, path_of_model("alpha")
        refusal = LlmError(ErrorCode.INSUFFICIENT_VRAM, "too big", hint="less")
        world.api.run(instance())
        S = InstanceState
        history.add(
            EventKind.STATE, model="alpha", run="r", state=S.READY, previous=S.LOADING, message="answers"
        )
        history.add(EventKind.REFUSED, model="beta", message="too big", details=refusal.problem())
        history.add(EventKind.REFUSED, model="beta", message="too big", details={"left_out": ["detail"]})
        history.add(EventKind.PRESSURE, message="short", details={"card": "GPU-1"})
        history.add(EventKind.EVICTION, model="alpha", run="r", message="for beta")
        history.add(EventKind.PROGRESS, model="alpha", run="r")
        history.add(EventKind.STATE, model="alpha", run="r", state=S.GONE, previous=S.RELEASING)
        told = await told_until(world, lambda told: len(told) >= 10)
        signals = [
            each[1:] for each in told if each[0] == ROOT and not each[1].startswith(("Prop", "Interf"))
        ]
        assert signals == [
            ("InstanceAdded", (path, "alpha", "0a1b2c3d")),
            ("InstanceStateChanged", (path, "alpha", "r", "ready", "loading", "answers")),
            ("Refused", ("beta", "org.lllm3090.Error.InsufficientVram", "too big\nless")),
            ("Refused", ("beta", "org.lllm3090.Error.Internal", "too big")),
            ("MemoryPressure", ("GPU-1", "short")),
            ("Evicted", ("alpha", "r", "for beta")),
            ("InstanceStateChanged", (path, "alpha", "r", "gone", "releasing", "")),
        ]

    play(scenario)


def test_one_that_is_cut_off_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lllm3090d.serving.history.SUBSCRIBER_BACKLOG", 5)

    async def scenario(world: World) -> None:
        await world.surface.start()
        await asyncio.sleep(0)
        world.bus.told()
        for number in range(50):
            world.api.history.add(EventKind.EVICTION, model=str(number), run="r", message="")
        told = await told_until(world, lambda told: names(told).count("Evicted") == 50)
        assert [each[2][0] for each in told if each[1] == "Evicted"] == [str(number) for number in range(50)]

    play(scenario)


def test_a_storm_is_begun_slowly_and_in_turn() -> None:
    async def scenario() -> list[str]:
        now_s, begun = 100.0, list[str]()
        pace = Pace(burst=2, interval_s=0.001, clock=lambda: now_s)
        for number in range(4):
            pace.add("loud", partial(begun.append, f"loud {number}"))
        pace.add("quiet", partial(begun.append, "quiet"))
        assert begun == ["loud 0", "loud 1"] and len(pace) == 3
        for step in range(3):
            now_s += 0.001
            await until(lambda step=step: len(begun) == 3 + step)  # type: ignore[misc]  # bound above
        now_s += 1.0  # after a quiet time a few at once, but no more than that
        for number in range(4):
            pace.add("loud", partial(begun.append, f"again {number}"))
        assert begun[5:] == ["again 0", "again 1"]
        pace.begin_all()
        assert len(pace) == 0
        return begun

    begun = asyncio.run(scenario())
    assert begun[2:5] == ["loud 2", "quiet", "loud 3"]
    assert begun[7:] == ["again 2", "again 3"]
