"""Loading on demand, whose turn it is, and clients that leave: through the port."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway import seating
from lllm3090d.gateway.gateway import TRIES
from lllm3090d.gateway.record import Outcome
from lllm3090d.gateway.turns import Priority, Turns
from tests.fakes.gateway_world import Asked, GatewayWorld
from tests.unit.test_gateway_wire import ASK, CHAT, answering, chunked, play, post, whole

pytestmark = pytest.mark.unit

OK = whole(b"{}")
NO_ROOM = LlmError(ErrorCode.INSUFFICIENT_VRAM, "It does not fit.", hint="Unload gemma.", remedies=[])


async def until(condition: Any) -> None:
    """Let others go on until something is so."""
    while not condition():  # noqa: ASYNC110  # whatever it is about has no event
        await asyncio.sleep(0)


# --- an engine that ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("restarts", "settings", "status"),
    [(True, {}, 200), (False, {}, 502), (True, {"gateway_load": "refuse"}, 502)],
)
def test_whom_a_dead_engine_was_told_nothing_of_waits_for_its_restart(
    tmp_path: Path, restarts: bool, settings: dict[str, str], status: int
) -> None:
    """It stood in the line, and has neither harmed nor been harmed."""

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.restarts = restarts
        engine = world.house.engines["small"]
        await engine.close()
        world.house.may_load.clear()
        asked = asyncio.create_task(post(world, session))
        if status == 200:
            await until(lambda: world.house.loads)
            assert world.house.leases == set() and world.gateway.seating.lines()["small"].in_work == 0
            await engine.start()
            world.house.may_load.set()
        answer, _, body = await asked
        assert answer == status, body
        assert len(world.house.loads) == (status == 200) and not world.house.leases
        assert world.gateway.seating.lines()["small"].in_work == 0

    play(tmp_path, answering(OK), story, **settings)


def test_an_engine_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.restarts = True
        await world.house.engines["small"].close()
        status, _, body = await post(world, session)
        assert (status, json.loads(body)["error"]["code"]) == (502, "engine_failed")
        assert len(world.house.loads) == TRIES - 1 and not world.house.leases

    play(tmp_path, answering(OK), story)


# --- loading ----------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_when_it_is_asked_for_and_kept_while_it_is_used(tmp_path: Path) -> None:
    held: list[set[str]] = []

    async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
        held.append(set(world_of[0].house.leases))
        writer.write(OK)

    world_of: list[GatewayWorld] = []

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world_of.append(world)
        status, _, _ = await post(world, session)
        assert status == 200
        assert world.house.loads == ["small"]
        assert held == [{world.records[0].request_id}]
        assert not world.house.leases
        assert world.records[0].load_s > 0

    play(tmp_path, respond, story, loaded=False)


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "server_error"), ("/v1/messages", "overloaded_error")])
def test_a_refusal_has_its_remedies_in_the_callers_words(tmp_path: Path, path: str, kind: str) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.failure = NO_ROOM
        status, headers, body = await post(world, session, path=path)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (507, "insufficient_vram", kind)
        assert headers["x-should-retry"] == "false"
        assert "Unload gemma." in error["message"] and error["details"] == {"remedies": []}

    play(tmp_path, answering(OK), story, loaded=False)


def test_to_look_at_an_engine_loads_none(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        async with session.get(world.address + "/props?model=small") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "not_loaded"
        assert world.house.loads == []

    play(tmp_path, answering(OK), story, loaded=False)


def test_policy_retry_loads_and_tells_when_to_come_again(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.may_load.clear()
        for _ in range(2):
            status, headers, body = await post(world, session)
            assert (status, json.loads(body)["error"]["code"]) == (503, "model_not_ready")
            assert int(headers["Retry-After"]) > 0
        await until(lambda: world.house.loads == ["small"])
        world.house.may_load.set()
        await until(lambda: world.house.serving)
        assert (await post(world, session))[0] == 200

    play(tmp_path, answering(OK), story, loaded=False, gateway_load="retry")


def test_policy_retry_tells_why_it_failed(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.failure = NO_ROOM
        assert (await post(world, session))[0] == 503
        await until(lambda: world.gateway.seating.has_failed("small"))
        assert (await post(world, session))[0] == 507

    play(tmp_path, answering(OK), story, loaded=False, gateway_load="retry")


def test_policy_retry_does_not_tell_an_old_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody came again, and by now there may be room."""

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.failure = NO_ROOM
        assert (await post(world, session))[0] == 503
        await until(lambda: world.gateway.seating.has_failed("small"))
        monkeypatch.setattr(seating, "TOLD_WITHIN_S", 0.0)
        world.house.failure = None
        assert (await post(world, session))[0] == 503
        await until(lambda: world.house.serving)
        assert (await post(world, session))[0] == 200

    play(tmp_path, answering(OK), story, loaded=False, gateway_load="retry")


def test_policy_refuse_loads_nothing(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        status, _, body = await post(world, session)
        assert (status, json.loads(body)["error"]["code"]) == (404, "not_loaded")
        assert world.house.loads == []

    play(tmp_path, answering(OK), story, loaded=False, gateway_load="refuse")


def test_a_wait_has_an_end(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.may_load.clear()
        status, _, body = await post(world, session)
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_not_ready")
        await until(lambda: world.house.cancelled == [world.records[0].request_id])

    play(tmp_path, answering(OK), story, loaded=False, gateway_wait_s=0.05)


def test_a_client_that_leaves_withdraws_its_load(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.may_load.clear()
        asked = asyncio.create_task(post(world, session))
        await until(lambda: world.house.loads)
        asked.cancel()
        await until(lambda: world.house.cancelled)
        await until(lambda: world.records)
        assert [each.outcome for each in world.records] == [Outcome.CLIENT_CLOSED]
        assert world.records[0].status == 0
        await until(lambda: not world.house.leases)

    play(tmp_path, answering(OK), story, loaded=False)


def test_a_client_that_leaves_before_its_lease_is_answered_keeps_no_lease(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.may_answer.clear()
        asked = asyncio.create_task(post(world, session))
        await until(lambda: world.house.leases)
        asked.cancel()
        await until(lambda: world.records)
        await until(lambda: world.house.leases == set())

    play(tmp_path, answering(OK), story)


def test_a_stream_that_waits_is_kept_alive_and_then_the_engines(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.may_load.clear()
        async with session.post(world.address + CHAT, json=ASK | {"stream": True}) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert await answer.content.readline() == b": waiting\n"
            world.house.may_load.set()
            rest = await answer.content.read()
        assert rest.replace(b": waiting\n\n", b"").strip() == b"data: 1"

    play(tmp_path, answering(chunked(b"data: 1\n\n")), story, loaded=False, gateway_keepalive_s=0.02)


@pytest.mark.parametrize("engine", [False, True])
def test_a_failure_in_a_stream_that_has_begun_is_an_event(tmp_path: Path, engine: bool) -> None:
    answer = whole(b'{"error": {"message": "no such word"}}', status="500 No")

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.may_load.clear()
        world.house.failure = None if engine else NO_ROOM
        async with session.post(world.address + "/v1/messages", json=ASK | {"stream": True}) as response:
            await response.content.readline()
            world.house.may_load.set()
            rest = (await response.content.read()).decode()
        event, data = rest.replace(": waiting\n\n", "").strip().splitlines()
        assert event == "event: error"
        error = json.loads(data.removeprefix("data: "))["error"]
        assert ("no such word" if engine else "Unload gemma.") in error["message"]
        assert [each.outcome for each in world.records] == [Outcome.ENGINE_ERROR]

    play(tmp_path, answering(answer), story, loaded=False, gateway_keepalive_s=0.02)


def test_who_wants_no_stream_is_sent_nothing_while_it_waits(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.may_load.clear()
        asyncio.get_running_loop().call_later(0.1, world.house.may_load.set)
        status, headers, body = await post(world, session)
        assert (status, body, headers["Content-Length"]) == (200, b"{}", "2")

    play(tmp_path, answering(OK), story, loaded=False, gateway_keepalive_s=0.02)


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({"model": "gpt-4o"}, {"gateway_models": {"gpt-4o": "small"}}),
        ({"model": "Claude-Opus-9"}, {"gateway_models": {"claude-*": "small"}}),
        ({}, {"gateway_default_model": "small"}),
        ({"model": ""}, {"gateway_default_model": "small"}),
    ],
)
def test_names_that_clients_insist_on(
    tmp_path: Path, asked: dict[str, str], settings: dict[str, Any]
) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        assert (await post(world, session, json=asked))[0] == 200
        assert world.records[0].model == "small"

    play(tmp_path, answering(OK), story, **settings)


@pytest.mark.parametrize(("models", "status"), [(("small",), 200), (("small", "large"), 422)])
def test_llama_cpps_own_addresses_mean_the_only_one(
    tmp_path: Path, models: tuple[str, ...], status: int
) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        assert (await post(world, session, path="/tokenize", json={"content": "x"}))[0] == status
        async with session.get(world.address + "/slots") as answer:
            assert answer.status == status

    play(tmp_path, answering(OK), story, models=models)


# --- turns ------------------------------------------------------------------------------------------------------


class Gate:
    """An engine whose answers are let go one by one."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Asked, asyncio.Event]] = []

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        go = asyncio.Event()
        self.waiting.append((asked, go))
        left = asyncio.create_task(asked.left.wait())
        done = asyncio.create_task(go.wait())
        await asyncio.wait({left, done}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        done.cancel()
        writer.write(OK)

    @property
    def bodies(self) -> list[str]:
        return [json.loads(asked.body)["n"] for asked, _ in self.waiting]


def test_as_many_at_a_time_as_there_are_slots_then_by_class_and_order(tmp_path: Path) -> None:
    gate = Gate()

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        async def ask(number: str, priority: str) -> int:
            return (await post(world, session, json=ASK | {"n": number}, headers={"x-priority": priority}))[
                0
            ]

        asks, lines = [], world.gateway.seating.lines
        for waiting, (number, priority) in enumerate(
            [("a", "low"), ("b", ""), ("c", "low"), ("d", "normal"), ("e", "high"), ("f", "nonsense")]
        ):
            asks.append(asyncio.create_task(ask(number, priority)))
            await until(lambda at=waiting: at < 2 or lines()["small"].waiting == at - 1)
            await until(lambda at=waiting: len(gate.waiting) == min(2, at + 1))
        for at in range(6):
            await until(lambda at=at: len(gate.waiting) > at)
            gate.waiting[at][1].set()
        assert [await each for each in asks] == [200] * 6
        assert gate.bodies[:2] == ["a", "b"]
        assert gate.bodies[2:] == ["e", "d", "f", "c"]
        assert world.gateway.seating.lines()["small"].in_work == 0

    play(tmp_path, gate, story, slots=2)


def test_one_too_many_is_told_when_to_come_again(tmp_path: Path) -> None:
    gate = Gate()

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        first = [asyncio.create_task(post(world, session, json=ASK | {"n": n})) for n in ("a", "b")]
        await until(lambda: "small" in world.gateway.seating.lines())
        await until(lambda: world.gateway.seating.lines()["small"].waiting == 1)
        status, headers, body = await post(world, session)
        assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_requests")
        assert int(headers["Retry-After"]) >= 1
        for at in range(2):
            await until(lambda at=at: len(gate.waiting) > at)
            gate.waiting[at][1].set()
        assert [(await each)[0] for each in first] == [200, 200]

    play(tmp_path, gate, story, slots=1, gateway_queue=1)


def test_what_takes_no_slot_waits_for_none(tmp_path: Path) -> None:
    gate = Gate()

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        work = asyncio.create_task(post(world, session, json=ASK | {"n": "a"}))
        await until(lambda: gate.waiting)
        look = asyncio.create_task(post(world, session, json=ASK | {"n": "b"}, path="/tokenize"))
        await until(lambda: len(gate.waiting) == 2)
        gate.waiting[1][1].set()
        assert (await look)[0] == 200
        assert not work.done()
        gate.waiting[0][1].set()
        assert (await work)[0] == 200

    play(tmp_path, gate, story, slots=1)


@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_leaves_frees_its_slot_or_its_place(tmp_path: Path, queued: bool) -> None:
    gate = Gate()

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        asks = [asyncio.create_task(post(world, session, json=ASK | {"n": n})) for n in ("a",)]
        await until(lambda: gate.waiting)
        line = world.gateway.seating.lines()["small"]
        for waiting, number in enumerate(("b", "c"), start=1):
            asks.append(asyncio.create_task(post(world, session, json=ASK | {"n": number})))
            await until(lambda at=waiting: line.waiting == at)
        asks[1 if queued else 0].cancel()
        await until(lambda: world.records)
        assert world.records[0].outcome is Outcome.CLIENT_CLOSED
        if queued:
            assert line.waiting == 1
            gate.waiting[0][1].set()
        else:
            await gate.waiting[0][0].left.wait()  # the engine is told by the end of its connection
        await until(lambda: len(gate.waiting) == 2)
        assert gate.bodies[1] == ("c" if queued else "b")
        for _, go in gate.waiting:
            go.set()
        if not queued:
            await until(lambda: len(gate.waiting) == 3)
            gate.waiting[2][1].set()
        await asyncio.gather(*asks, return_exceptions=True)
        await until(lambda: line.in_work == 0 and not world.house.leases and not world.gateway.in_flight)

    play(tmp_path, gate, story, slots=1)


def test_more_slots_let_those_who_wait_go_on() -> None:
    async def run() -> None:
        turns, held = Turns("m", 1), list[str]()

        async def hold(name: str) -> None:
            async with turns.turn(Priority.NORMAL, 10):
                held.append(name)
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(hold(name)) for name in "abc"]
        await until(lambda: held == ["a"] and turns.waiting == 2)
        turns.resize(2)
        await until(lambda: held == ["a", "b"])
        turns.resize(1)
        tasks[0].cancel()
        await until(lambda: turns.in_work == 1)
        assert held == ["a", "b"]
        tasks[1].cancel()
        await until(lambda: held == ["a", "b", "c"])
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (turns.in_work, turns.waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_turn_given_to_one_who_leaves_in_that_moment_goes_on() -> None:
    async def run() -> None:
        turns, held = Turns("m", 1), list[str]()

        async def hold(name: str) -> None:
            async with turns.turn(Priority.NORMAL, 10):
                held.append(name)
                await asyncio.Event().wait()

        first = turns.turn(Priority.NORMAL, 10)
        await first.__aenter__()
        second, third = (asyncio.create_task(hold(name)) for name in "bc")
        await until(lambda: turns.waiting == 2)
        await first.__aexit__(None, None, None)
        second.cancel()  # it has been given the slot, and has not run since
        await until(lambda: held == ["c"])
        third.cancel()
        await asyncio.gather(second, third, return_exceptions=True)
        assert turns.in_work == 0

    asyncio.run(asyncio.wait_for(run(), 10))


# --- idle, and those who wait for room --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "headers", "seconds"),
    [
        ({"keep_alive": "5m"}, {}, [300.0]),
        ({"keep_alive": 0}, {}, [0.0]),
        ({"keep_alive": "5m"}, {"x-keep-alive": "10"}, [10.0]),
        ({"keep_alive": "nonsense"}, {}, []),
        ({}, {}, []),
        ({"pad": "x" * 300_000, "keep_alive": 7}, {}, [7.0]),
    ],
)
def test_a_client_says_for_how_long_its_model_stays(
    tmp_path: Path, more: dict[str, Any], headers: dict[str, str], seconds: list[float]
) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> list[float]:
        assert (await post(world, session, json=ASK | more, headers=headers))[0] == 200
        assert b"x-keep-alive" not in dict(world.house.engines["small"].asked[0].headers)
        return world.house.kept_alive

    assert play(tmp_path, answering(OK), story) == seconds


def test_new_requests_let_one_pass_that_waits_too_long_for_room(tmp_path: Path) -> None:
    gate = Gate()

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.serving.discard("large")
        world.house.may_load.clear()  # there is no room while small works
        ask = lambda model, n: asyncio.create_task(post(world, session, json={"model": model, "n": n}))  # noqa: E731
        first = ask("small", "a")
        await until(lambda: gate.waiting)
        starving = ask("large", "b")
        await until(lambda: world.gateway.seating.stand_back.starving == {"large"})
        later = ask("small", "c")
        await until(lambda: len(world.gateway.in_flight) == 3)
        gate.waiting[0][1].set()
        assert (await first)[0] == 200
        await until(lambda: len(world.house.leases) == 0)  # nobody uses small: it may be unloaded
        world.house.may_load.set()
        await until(lambda: len(gate.waiting) == 3)
        assert sorted(gate.bodies[1:]) == ["b", "c"] and gate.bodies[0] == "a"
        for _, go in gate.waiting:
            go.set()
        assert [(await each)[0] for each in (starving, later)] == [200, 200]

    play(tmp_path, gate, story, models=("small", "large"), gateway_starvation_s=0.02)


def test_nobody_stands_back_where_that_is_switched_off(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        world.house.serving.discard("large")
        world.house.may_load.clear()
        waiting = asyncio.create_task(post(world, session, json={"model": "large"}))
        await until(lambda: world.house.loads)
        assert (await post(world, session))[0] == 200
        world.house.may_load.set()
        assert (await waiting)[0] == 200

    play(tmp_path, answering(OK), story, models=("small", "large"), gateway_starvation_s=0)
