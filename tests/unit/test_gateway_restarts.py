"""Requests for a model that has ended by itself: they wait for its start or are refused, and change nothing of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lllm3090d.engines.crash_causes import KINDS, CrashCause
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.comebacks import cause_of
from lllm3090d.serving.events import (
    ComebackRefused,
    FailureRecalled,
    Joined,
    Queued,
    ResetRequested,
    UnloadRequested,
)
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.restarts import End, RestartPolicy
from tests.fakes.gateway_world import GatewayWorld
from tests.fakes.restart_world import RestartWorld
from tests.fakes.scheduler_world import World, error_of, of_kind
from tests.fakes.simulated_loop import simulate
from tests.unit.test_gateway_turns import OK, until
from tests.unit.test_gateway_wire import answering, play, post
from tests.unit.test_scheduler_restarts import Restarting

pytestmark = pytest.mark.unit

S = InstanceState
# Two have room beside each other.
MODELS = {"aster": 9.0, "birch": 9.0, "cedar": 9.0}
PAUSES_S = (1.0, 4.0, 16.0, 64.0)
MOST_ENDS = RestartPolicy().most_ends
SOON_S = 1.0  # an engine is up by then, whatever the delays of the simulation


def scene(story: Callable[[RestartWorld], Awaitable[None]], seed: int = 1, **settings: Any) -> None:
    async def scenario() -> None:
        world = RestartWorld(MODELS, seed, **settings)
        try:
            async with asyncio.timeout(1e6):
                await story(world)
        finally:
            await world.close()

    simulate(scenario())


async def refused(ask: Awaitable[object]) -> LlmError:
    with pytest.raises(LlmError) as caught:
        await ask
    return caught.value


async def crash(world: RestartWorld, times: int = 1) -> None:
    """Its engine ends so often, each time after it has served."""
    for _ in range(times):
        await world.ask("aster")
        world.kill("aster")
    await world.until("aster", S.FAILED)


# --- a client that tries again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_kills_its_engine_does_so_five_times_and_no_more(clients: int, seed: int) -> None:
    """However often its client tries again; what it is told last has the reason and the way out."""
    told: list[LlmError] = []

    async def retry(world: RestartWorld) -> None:
        while not told or told[-1].code is not ErrorCode.MODEL_LATCHED:
            told.append(await refused(world.ask("aster", poison=True)))

    async def story(world: RestartWorld) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(retry(world))
        assert len(world.ends) == world.started("aster") == MOST_ENDS
        for number, pause_s in enumerate(PAUSES_S):
            assert world.starts[number + 1][0] - world.ends[number][0] >= pause_s, (world.starts, world.ends)
        began_s = world.now_s()
        for _ in range(20):
            error = await refused(world.ask("aster"))
            assert error.code is ErrorCode.MODEL_LATCHED
            assert f"ended {MOST_ENDS} times" in error.message
            assert error.hint is not None and error.hint.endswith("lllm3090ctl reset aster")
            assert error.details["cause"] == CrashCause.ENGINE_FAULT
        assert world.now_s() == began_s and world.started("aster") == MOST_ENDS
        await world.ask("birch")  # others go on
        await world.reset("aster")
        await world.ask("aster")  # it waits for what a person has begun
        assert world.started("aster") == MOST_ENDS + 1 and world.scheduler.ends() == {}

    scene(story, seed)
    assert {each.code for each in told} <= {ErrorCode.ENGINE_FAILED, ErrorCode.MODEL_LATCHED}


def test_many_requests_wait_for_one_start_and_the_end_still_counts() -> None:
    async def story(world: RestartWorld) -> None:
        await crash(world)
        ended_s = world.ends[0][0]
        runs = await asyncio.gather(*(world.ask("aster") for _ in range(5)))
        assert len(set(runs)) == 1 and world.started("aster") == 2
        assert PAUSES_S[0] <= world.starts[1][0] - ended_s < PAUSES_S[0] + SOON_S
        instance = world.scheduler.instance("aster")
        assert instance is not None and instance.attempt == 1 and len(world.scheduler.ends()["aster"]) == 1
        assert instance.leases == set()

    scene(story)


def test_a_pause_that_is_longer_than_the_wait_is_told_at_once() -> None:
    async def story(world: RestartWorld) -> None:
        await crash(world, 3)
        at_s = world.now_s()
        error = await refused(world.ask("aster"))
        assert world.now_s() == at_s
        assert error.code is ErrorCode.MODEL_NOT_READY
        after_s = error.details["retry_after_s"]
        assert PAUSES_S[2] - 1 < after_s <= PAUSES_S[2]
        assert KINDS[CrashCause.ENGINE_FAULT].title in error.message and f"{after_s} s" in error.message
        assert error.details["cause"] == CrashCause.ENGINE_FAULT and "reset aster" in str(error.hint)
        await asyncio.sleep(after_s + SOON_S)
        assert world.started("aster") == 4  # nobody has hurried it, and it was not late
        await world.ask("aster")

    scene(story, gateway_wait_s=10.0)


def test_a_start_that_is_due_within_the_wait_and_fails_is_waited_for_no_longer_than_that() -> None:
    async def story(world: RestartWorld) -> None:
        await crash(world)
        world.doomed = 9
        at_s = world.now_s()
        error = await refused(world.ask("aster"))
        # After the starts at 1 and 5 s the next is due at 21 s.
        assert error.code is ErrorCode.MODEL_NOT_READY and world.now_s() - at_s < 10.0
        assert PAUSES_S[2] - 1 < error.details["retry_after_s"] <= PAUSES_S[2]
        assert world.started("aster") == 3

    scene(story, gateway_wait_s=10.0)


def test_who_waits_is_told_when_it_is_given_up() -> None:
    async def story(world: RestartWorld) -> None:
        await crash(world)
        world.doomed = 9
        errors = await asyncio.gather(*(refused(world.ask("aster")) for _ in range(3)))
        assert {each.code for each in errors} == {ErrorCode.MODEL_LATCHED}
        assert world.started("aster") == MOST_ENDS

    scene(story)


def test_a_request_that_has_waited_long_enough_is_told_of_the_next_start() -> None:
    """It had come before anybody knew when that would be."""

    async def story(world: RestartWorld) -> None:
        await crash(world)
        await world.ask("aster")
        world.kill("aster")
        await world.until("aster", S.RELEASING)
        error = await refused(world.ask("aster"))
        assert error.code is ErrorCode.MODEL_NOT_READY and error.details["retry_after_s"] == PAUSES_S[1]

    scene(story, gateway_wait_s=PAUSES_S[1] - 1.0)


# --- who comes between ----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_does_not_take_the_start_with_it() -> None:
    async def story(world: RestartWorld) -> None:
        for wait_s in (0.5, 1.0, 1.02, 1.05, 1.1):
            await crash(world)
            asked = asyncio.create_task(world.ask("aster", work_s=9.0))
            await asyncio.sleep(wait_s)
            asked.cancel()
            await world.until("aster", S.READY)
            await asyncio.sleep(SOON_S)
            instance = world.scheduler.instance("aster")
            assert instance is not None and instance.leases == set()
            await world.unload("aster")

    scene(story)


def test_a_persons_load_is_what_they_get() -> None:
    """It begins anew, and whoever waits takes the launch as it comes."""

    async def story(world: RestartWorld) -> None:
        await crash(world, 3)
        asked = asyncio.create_task(world.ask("aster"))
        await asyncio.sleep(1.0)
        await world.person_loads("aster", PlanRequest(4096, 1))
        instance = world.scheduler.instance("aster")
        assert instance is not None and await asked == instance.run
        assert (instance.attempt, instance.record.asked, world.scheduler.ends()) == (
            0,
            PlanRequest(4096, 1),
            {},
        )

    scene(story)


@pytest.mark.parametrize(
    ("deed", "code"),
    [("unload", ErrorCode.LOAD_CANCELLED), ("release", ErrorCode.CARD_RELEASED)],
)
def test_what_a_person_wants_gone_is_not_waited_for(deed: str, code: ErrorCode) -> None:
    async def story(world: RestartWorld) -> None:
        await crash(world)
        asked = asyncio.create_task(refused(world.ask("aster")))
        await asyncio.sleep(0.5)
        if deed == "unload":
            await world.unload("aster")
            assert (await asked).code is code and world.state("aster") is None
            return
        await world.release()
        assert (await asked).code is code
        await asyncio.sleep(60.0)
        assert world.started("aster") == 1
        await world.resume()
        await world.ask("aster")  # waits for the start that was due
        assert world.started("aster") == 2

    scene(story)


@pytest.mark.parametrize("seed", range(5))
def test_a_start_under_way_when_the_card_is_given_away_is_made_after(seed: int) -> None:
    """Though whoever asked for it was told to forget it."""

    async def story(world: RestartWorld) -> None:
        await crash(world)
        while (instance := world.scheduler.instance("aster")) and instance.retry_at_s is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await world.release()
        await asyncio.sleep(5.0)
        await world.resume()
        await world.ask("aster")

    scene(story, seed)


# --- room -----------------------------------------------------------------------------------------------------------


def test_a_start_that_is_asked_for_has_room_made_for_it() -> None:
    """By itself none goes for it, and it waits for another try."""

    async def story(world: RestartWorld) -> None:
        await world.ask("birch")
        await crash(world, 2)
        await world.ask("cedar")  # in its place
        await asyncio.sleep(PAUSES_S[1] + SOON_S)
        assert world.state("aster") is S.FAILED and world.state("birch") is world.state("cedar") is S.READY
        instance = world.scheduler.instance("aster")
        assert instance is not None and instance.start_refused and instance.retry_at_s is not None
        at_s = world.now_s()
        run = await world.ask("aster")
        instance = world.scheduler.instance("aster")
        assert instance is not None and (instance.run, instance.attempt) == (run, 2)
        assert world.now_s() - at_s < 2 * SOON_S
        assert len(world.scheduler.ends()["aster"]) == 2

    scene(story)


def test_a_start_that_stands_in_the_line_takes_them_with_it() -> None:
    world = Restarting()
    world.bring_up("a", gib=9.0)
    world.bring_up("b", gib=9.0, lease=True)
    world.die()
    world.load("big", "t-big", gib=16.0)  # waits for b
    world.do(world.restored(world.look(after_s=2.0)))
    assert [each.event.may_evict for each in world.scheduler.pending] == [True, False]
    (told,) = of_kind(world.load("a", "t", restart_until_s=world.now_s, lease=True), Queued)
    assert told.is_restart and "started again" in told.why
    assert [each.event.may_evict for each in world.scheduler.pending] == [True, True]
    effects = world.do(UnloadRequested("u", "big")) + world.look()
    assert [each.token for each in of_kind(effects, Joined)] == ["t"]
    assert world.finish_load("a").attempt == 1 and world.get("a").leases == {"t"}


def test_where_there_is_no_room_that_is_what_is_told() -> None:
    async def story(world: RestartWorld) -> None:
        await crash(world)
        world.world.foreign_bytes = 23 << 30
        error = await refused(world.ask("aster"))
        assert error.code is ErrorCode.INSUFFICIENT_VRAM, error.message
        again = await refused(world.ask("aster"))  # it is tried anew: there may be room by now
        assert again.code is ErrorCode.INSUFFICIENT_VRAM and world.started("aster") == 1
        world.world.foreign_bytes = 0
        await world.ask("aster")

    scene(story)


def test_who_waits_for_a_start_holds_up_no_other_model() -> None:
    """Room would not bring it about."""

    async def story(world: RestartWorld) -> None:
        await world.ask("birch")
        await crash(world, 3)
        asked = asyncio.create_task(world.ask("aster"))
        await asyncio.sleep(5.0)
        assert world.seating.stand_back.starving == frozenset()
        await asyncio.wait_for(world.ask("birch"), 1.0)
        await asked

    scene(story, gateway_starvation_s=0.5)


# --- gateway_load = retry -------------------------------------------------------------------------------------------


def test_who_is_to_come_again_is_told_when() -> None:
    async def story(world: RestartWorld) -> None:
        def told() -> LlmError:
            with pytest.raises(LlmError) as caught:
                world.seating.require("aster")
            return caught.value

        await crash(world, 2)
        error = told()
        assert error.code is ErrorCode.MODEL_NOT_READY and error.details["retry_after_s"] == PAUSES_S[1]
        assert error.details["cause"] == CrashCause.ENGINE_FAULT
        await asyncio.sleep(PAUSES_S[1] - 0.5)
        assert told().details["retry_after_s"] == 1 and world.started("aster") == 2
        await world.until("aster", S.READY)
        world.seating.require("aster")
        for _ in range(MOST_ENDS - 2):
            world.kill("aster")
            await world.until("aster", S.RELEASING)
            assert told().code is ErrorCode.MODEL_NOT_READY  # nobody knows yet what becomes of it
            while world.state("aster") not in {S.READY, S.LATCHED}:  # noqa: ASYNC110  # simulated
                await asyncio.sleep(0.5)
        error = told()
        assert error.code is ErrorCode.MODEL_LATCHED and world.started("aster") == MOST_ENDS

    scene(story, gateway_load="retry")


# --- the next daemon ------------------------------------------------------------------------------------------------


def test_a_start_that_the_end_of_the_daemon_cuts_short_is_no_reason_to_stay_down() -> None:
    async def story(world: RestartWorld) -> None:
        async def stopping(*_: object) -> None:
            raise LlmError(ErrorCode.SHUTTING_DOWN, "the daemon is stopping")

        await crash(world)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.restoring, "_load", stopping)
            await asyncio.sleep(PAUSES_S[0] + SOON_S)
        instance = world.scheduler.instance("aster")
        assert instance is not None and instance.comes_back and instance.retry_at_s is None

    scene(story)


@pytest.mark.parametrize("latch", ["", "it has ended too often"])
def test_the_next_daemon_holds_it_back_as_the_last_one_did(latch: str) -> None:
    before = World(restarts=RestartPolicy())
    record = before.bring_up("a").record
    world = World(restarts=RestartPolicy())
    ends = tuple(End(world.now_s - 10 + each, CrashCause.ENGINE_FAULT, 1.0) for each in range(3))
    failure = LlmError(ErrorCode.ENGINE_FAILED, "it ended", cause=CrashCause.ENGINE_FAULT)
    world.do(
        FailureRecalled(
            name="a",
            ends=ends,
            record=record,
            arguments=(),
            card=None,
            pinned=False,
            failure=failure,
            retry_at_s=None if latch else world.now_s + 20.0,
            next_attempt=1 if latch else 3,  # somebody had reset it, and then the daemon was gone
            latch_reason=latch,
            way_out="",
        )
    )
    error = error_of(world.load("a", "t", restart_until_s=world.now_s + 19.0), "t")
    assert error.code is (ErrorCode.MODEL_LATCHED if latch else ErrorCode.MODEL_NOT_READY)
    assert error.hint is not None and "lllm3090ctl reset a" in error.hint
    assert cause_of(failure) == error.details["cause"]
    told = world.scheduler.held_back("a", 19.0)
    assert told is not None and (told.code, told.details) == (error.code, error.details)
    if not latch:
        assert world.scheduler.held_back("a", 20.0) is None
    world.load("a", "t-person")
    assert world.finish_load("a").attempt == 0


def test_without_restarts_a_request_loads_what_has_failed_but_not_what_stays_down() -> None:
    for cause, loads in ((CrashCause.ENGINE_FAULT, True), (CrashCause.BAD_FILE, False)):
        world = Restarting()
        world.bring_up("a")
        world.die(cause=cause)
        world.scheduler.policy = replace(world.scheduler.policy, restarts=None)
        assert (world.scheduler.held_back("a", 0.0) is None) is loads
        world.load("a", "t", restart_until_s=world.now_s)
        assert (world.get("a").state is S.STARTING) is loads


def test_a_reset_in_vain_leaves_it_held_back() -> None:
    world = Restarting()
    world.bring_up("a")
    world.die(cause=CrashCause.BAD_FILE)
    world.do(ResetRequested("x", "a"))
    assert world.scheduler.held_back("a", 0.0) is None  # a start is under way
    world.do(ComebackRefused("a", LlmError(ErrorCode.INSUFFICIENT_VRAM, "too large now")))
    told = world.scheduler.held_back("a", 1e9)
    assert told is not None and told.code is ErrorCode.MODEL_LATCHED


# --- whatever comes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_between_every_request_has_an_answer(seed: int) -> None:
    """And in the end nothing is kept, and nobody waits."""
    outcomes: Counter[str] = Counter()
    expected = {
        ErrorCode.ENGINE_FAILED,
        ErrorCode.MODEL_NOT_READY,
        ErrorCode.MODEL_LATCHED,
        ErrorCode.LOAD_CANCELLED,
        ErrorCode.CARD_RELEASED,
        ErrorCode.QUEUE_TIMED_OUT,
        ErrorCode.NOT_LOADED,
        ErrorCode.LOADED_DIFFERENTLY,
    }

    async def story(world: RestartWorld) -> None:
        chance = random.Random(seed)  # noqa: S311  # a simulation

        async def client() -> None:
            for _ in range(15):
                asked = asyncio.create_task(
                    world.ask(chance.choice(sorted(MODELS)), poison=chance.random() < 0.2)
                )
                if chance.random() < 0.2:
                    await asyncio.wait({asked}, timeout=chance.choice([0.0, 0.1, 1.0, 5.0]))
                    asked.cancel()
                try:
                    await asked
                    outcomes["served"] += 1
                except LlmError as error:
                    assert error.code in expected, error
                    outcomes[str(error.code)] += 1
                except asyncio.CancelledError:
                    outcomes["left"] += 1
                await asyncio.sleep(chance.choice([0.0, 0.1, 3.0]))

        async def person() -> None:
            for _ in range(25):
                await asyncio.sleep(chance.uniform(0.0, 20.0))
                name = chance.choice(sorted(MODELS))
                world.doomed = chance.choice([0, 0, 1])
                deeds: list[Callable[[], Awaitable[None]]] = [
                    lambda name=name: world.reset(name),  # type: ignore[misc]
                    lambda name=name: world.unload(name),  # type: ignore[misc]
                    lambda name=name: world.person_loads(name, PlanRequest(4096, 1)),  # type: ignore[misc]
                ]
                try:
                    await chance.choice(deeds)()
                except LlmError as error:
                    assert error.code in expected, error
                if chance.random() < 0.15:
                    await world.release()
                    await asyncio.sleep(chance.uniform(0.0, 3.0))
                    await world.resume()

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(client())
            group.create_task(person())
        await asyncio.sleep(2000.0)
        assert not world.scheduler.pending
        for each in world.scheduler.instances:
            # In whose place others are, and nobody has asked for it since: it is tried again and again.
            is_tried = each.start_refused and each.retry_at_s is not None
            assert each.state in {S.READY, S.LATCHED} or not each.comes_back or is_tried, each.state
            assert not each.successors and not each.leases and not each.waiters
        assert world.seating.stand_back.starving == frozenset()

    scene(story, seed, gateway_wait_s=60.0)
    assert sum(outcomes.values()) == 60 and outcomes["served"] > 5, outcomes


# --- over the wire --------------------------------------------------------------------------------------------------

LATCHED = LlmError(
    ErrorCode.MODEL_LATCHED,
    "small stays down until a person resets it: the engine ended 5 times",
    hint="Try another build. Then: lllm3090ctl reset small",
    model="small",
)
NOT_READY = LlmError(
    ErrorCode.MODEL_NOT_READY,
    "the engine of small failed; it is started again in 256 s",
    hint="Come again after Retry-After.",
    model="small",
    retry_after_s=256,
)


@pytest.mark.parametrize("policy", ["wait", "retry"])
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "server_error"),
        ("/v1/messages", "overloaded_error"),
        ("/completion", "server_error"),
        ("/upstream/small/tokenize", "server_error"),
    ],
)
def test_each_api_is_told_so(tmp_path: Path, path: str, kind: str, policy: str) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.held["small"] = LATCHED
        status, headers, body = await post(world, session, path=path)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (503, "model_latched", kind)
        assert headers["x-should-retry"] == "false" and "Retry-After" not in headers
        assert "ended 5 times" in error["message"] and "lllm3090ctl reset small" in error["message"]
        world.house.held["small"] = NOT_READY
        status, headers, body = await post(world, session, path=path)
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_not_ready")
        assert headers["Retry-After"] == "256" and "x-should-retry" not in headers
        assert world.house.loads == [] and world.house.leases == set()

    play(tmp_path, answering(OK), story, loaded=False, gateway_load=policy)


def test_who_stood_in_the_line_of_an_engine_that_is_given_up_is_told_so(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.restarts = True
        world.house.held["small"] = LATCHED
        await world.house.engines["small"].close()
        status, headers, body = await post(world, session)
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_latched")
        assert headers["x-should-retry"] == "false"
        assert world.house.loads == [] and world.house.leases == set()

    play(tmp_path, answering(OK), story)


def test_an_engine_that_ends_while_it_is_started_again_is_waited_for(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.failure = LlmError(ErrorCode.ENGINE_FAILED, "it ended")
        world.house.ended.add("small")
        world.house.may_load.clear()
        asked = asyncio.create_task(post(world, session))
        await until(lambda: world.house.loads)
        world.house.may_load.set()
        await until(lambda: len(world.house.loads) > 2)
        world.house.failure = None
        assert (await asked)[0] == 200

    play(tmp_path, answering(OK), story, loaded=False)
