"""Which address needs which kind of model; and a model that serves something else is neither loaded nor asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientSession

from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway import daemon_house
from lllm3090d.gateway.daemon_house import DaemonHouse
from lllm3090d.gateway.models_list import entry
from lllm3090d.gateway.purposes import check, needed
from lllm3090d.gateway.relay import raise_if_too_long
from lllm3090d.gateway.routes import ROUTES, find
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.events import LeaseAsked, UnloadRequested
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.settings import Settings
from tests.fakes.control_server import MODELS
from tests.fakes.gateway_world import Asked, gateway_world
from tests.fakes.scheduler_world import World

pytestmark = pytest.mark.unit

EMBEDS = {"/v1/embeddings", "/embeddings", "/embedding"}
SCORES = {"/v1/rerank", "/v1/reranking", "/rerank", "/reranking"}
ANY = {"/props", "/slots", "/metrics", "/tokenize", "/detokenize", "/apply-template"}


def need(path: str, method: str = "POST") -> Purpose | None:
    route = find(method, path)
    assert route is not None
    return needed(route)


def test_every_address_has_its_purpose() -> None:
    for path, row in ROUTES.items():
        method = min(row.methods)
        if path in EMBEDS:
            assert need(path, method) is Purpose.EMBEDDING
        elif path in SCORES:
            assert need(path, method) is Purpose.RERANK
        elif path in ANY or path.endswith(("input_tokens", "count_tokens")):
            assert need(path, method) is None
        else:
            assert need(path, method) is Purpose.CHAT, path
    assert set(ROUTES) >= EMBEDS | SCORES | ANY


@pytest.mark.parametrize(
    ("path", "purpose"),
    [
        ("/upstream/m/v1/embeddings?a=b", Purpose.EMBEDDING),
        ("/upstream/m/rerank", Purpose.RERANK),
        ("/upstream/m/completion", Purpose.CHAT),
        ("/upstream/m/tokenize", None),
        ("/upstream/m/v1/%65mbeddings", Purpose.EMBEDDING),
    ],
)
def test_what_is_asked_of_an_engine_by_its_path(path: str, purpose: Purpose | None) -> None:
    """A rerank engine (b11434) reads beyond its scores where it is asked for vectors, so no spelling gets through."""
    assert need(path) is purpose


def test_the_refusal_says_where_to_ask() -> None:
    route = find("POST", "/v1/embeddings")
    assert route is not None
    check(route, "m", Purpose.EMBEDDING)
    with pytest.raises(LlmError) as caught:
        check(route, "m", Purpose.CHAT)
    error = caught.value
    assert error.code is ErrorCode.WRONG_PURPOSE and error.kind.http_status == 400
    assert error.hint is not None and "/v1/chat/completions" in error.hint
    assert "lllm3090ctl load m --purpose embedding" in error.hint


def test_nothing_is_loaded_for_a_wrong_request(tmp_path: Path) -> None:
    async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
        raise AssertionError(asked.target)

    async def story() -> None:
        async with gateway_world(tmp_path, never) as world, ClientSession() as session:
            house = world.house
            (name,) = house.engines
            for purpose, path in (
                (Purpose.CHAT, "/v1/embeddings"),
                (Purpose.EMBEDDING, "/v1/messages"),
                (Purpose.RERANK, "/embedding"),
            ):
                house.purposes[name] = purpose
                async with session.post(f"{world.address}{path}", json={"model": name}) as answer:
                    told = await answer.json()
                    assert (answer.status, told["error"]["code"]) == (400, "wrong_purpose")
            assert (house.loads, house.leases) == ([], set())

    asyncio.run(story())


class Shelf:
    """What :class:`DaemonHouse` asks of a daemon for a purpose: settings, what runs, what is on disk."""

    def __init__(self, world: World, settings: Settings, kinds: dict[str, Kind]) -> None:
        self.scheduler, self.settings, self.lookup = world.scheduler, settings, self
        self.wishes: dict[str, LoadWish] = {}
        self._kinds = kinds

    def wish_as_it_was(self, name: str) -> LoadWish | None:
        return self.wishes.get(name)

    def resolve(self, name: str) -> Checkpoint:
        if name not in self._kinds:
            raise LlmError(ErrorCode.UNKNOWN_MODEL, f"There is no model {name}.", hint="See /v1/models.")
        path = Path(f"/models/{name}.gguf")
        return Checkpoint(name, path, (path,), 1, kind=self._kinds[name])


def test_a_models_purpose_is_what_it_serves_then_its_setting_then_its_kind() -> None:
    world = World()
    settings = Settings.model_validate(
        {"models": {"set": {"purpose": "embedding"}, "up": {"purpose": "rerank"}}}
    )
    kinds = {
        "with-its-file": Kind.MODEL,
        "set": Kind.MODEL,
        "up": Kind.MODEL,
        "e": Kind.EMBEDDING,
        "r": Kind.RERANK,
        "plain": Kind.MODEL,
    }
    house = DaemonHouse(cast(Daemon, Shelf(world, settings, kinds)))
    world.bring_up("up", gib=3.0)
    for_vectors: dict[str, Any] = {
        "request": PlanRequest(8192, 1, purpose=Purpose.EMBEDDING),
        "capabilities": replace(
            world.capabilities, flags=world.capabilities.flags | {"--embeddings", "--pooling"}
        ),
    }
    world.load("on-its-way", "t", gib=3.0, **for_vectors)
    world.load("with-its-file", "t2", gib=3.0, **for_vectors)
    assert world.get("on-its-way").state is InstanceState.STARTING
    expected = {
        "set": Purpose.EMBEDDING,
        "e": Purpose.EMBEDDING,
        "r": Purpose.RERANK,
        "plain": Purpose.CHAT,
        "up": Purpose.CHAT,  # as it was loaded, whatever is set since
        "with-its-file": Purpose.EMBEDDING,  # on its way, too
        "on-its-way": Purpose.EMBEDDING,  # its file is gone
    }
    assert {name: asyncio.run(house.purpose(name)) for name in expected} == expected
    world.do(UnloadRequested("t-down", "up"))
    world.bring_down(world.get("up"))
    assert asyncio.run(house.purpose("up")) is Purpose.RERANK
    with pytest.raises(LlmError) as caught:
        asyncio.run(house.purpose("nobody"))
    assert caught.value.code is ErrorCode.UNKNOWN_MODEL


FOR_VECTORS = PlanRequest(8192, 1, purpose=Purpose.EMBEDDING)


class Loader(Shelf):
    """Keeps what it is asked to load."""

    def __init__(self, world: World, settings: Settings | None = None) -> None:
        super().__init__(world, settings or Settings(), {"e": Kind.MODEL})
        self.asked: list[LoadWish] = []

    async def load(self, name: str, wish: LoadWish, token: str) -> Any:
        self.asked.append(wish)

    def ask(self) -> tuple[Purpose, LoadWish]:
        """What a request for it needs, and how it would be loaded for one."""
        house = DaemonHouse(cast(Daemon, self))
        asyncio.run(house.load("e", LoadWish(lease=True)))
        return asyncio.run(house.purpose("e")), self.asked.pop()


def test_what_is_wanted_comes_back_as_it_was_asked_for() -> None:
    """However it went, a request meanwhile is for the model that was loaded, not for another launch of its file."""
    shelf = Loader(World())
    plain = LoadWish(lease=True)
    assert shelf.ask() == (Purpose.CHAT, plain)
    known = LoadWish(
        FOR_VECTORS, ("--threads", "1"), "GPU-a", 4096, pinned=True, may_evict=False, may_wait=False
    )
    shelf.wishes["e"] = known
    purpose, wish = shelf.ask()
    assert purpose is Purpose.EMBEDDING
    assert wish == replace(known, lease=True, may_evict=True, may_wait=True)


def test_what_is_wanted_without_a_purpose_has_that_of_its_settings() -> None:
    shelf = Loader(World(), Settings.model_validate({"models": {"e": {"purpose": "embedding"}}}))
    shelf.wishes["e"] = LoadWish(PlanRequest(8192, 1))
    assert shelf.ask()[0] is Purpose.EMBEDDING


def test_what_serves_is_joined_whatever_is_wanted() -> None:
    world = World()
    world.bring_up("e", gib=3.0)
    shelf = Loader(world)
    shelf.wishes["e"] = LoadWish(FOR_VECTORS)
    assert shelf.ask() == (Purpose.CHAT, LoadWish(lease=True))


@pytest.mark.parametrize("wanted", [True, False])
def test_whether_a_launch_that_has_ended_comes_back(*, wanted: bool) -> None:
    """The end may be seen by a client before the daemon has learnt of it."""
    world = World()
    made = world.bring_up("e", gib=3.0)
    shelf = Loader(world)
    if wanted:
        shelf.wishes["e"] = LoadWish(FOR_VECTORS)
    house = DaemonHouse(cast(Daemon, shelf))

    async def story() -> bool:
        asked = asyncio.create_task(house.comes_back("e", made.run))
        await asyncio.sleep(0)
        assert not asked.done()
        made.state = InstanceState.RELEASING
        return await asked

    assert asyncio.run(story()) is wanted


def test_an_engine_that_is_there_and_cannot_be_reached_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon_house, "NOTICED_WITHIN_S", 0.0)
    world = World()
    made = world.bring_up("e", gib=3.0)
    shelf = Loader(world)
    shelf.wishes["e"] = LoadWish(FOR_VECTORS)
    assert not asyncio.run(DaemonHouse(cast(Daemon, shelf)).comes_back("e", made.run))


@pytest.mark.parametrize("ends", [True, False])
def test_a_load_that_waits_tells_what_comes_of_it(*, ends: bool) -> None:
    """For room, or for the end of the last launch: the request joins it, and must not ask for anything else."""
    world = World()
    flags = world.capabilities.flags | {"--embeddings", "--pooling"}
    if ends:
        world.bring_up("e", gib=3.0)
        world.do(UnloadRequested("t-down", "e"))
    else:
        world.bring_up("big", gib=20.0)
        world.do(LeaseAsked("t-lease", "big", "lease"))
    world.load(
        "e", "t", gib=10.0, request=FOR_VECTORS, capabilities=replace(world.capabilities, flags=flags)
    )
    instance = world.scheduler.instance("e")
    assert [each.token for each in (instance.successors if instance else ())] == ["t"] * ends
    assert [each.token for each in world.scheduler.pending] == ["t"] * (not ends)
    shelf = Loader(world)
    for known in (None, LoadWish(PlanRequest(4096, 1))):
        if known is not None:
            shelf.wishes["e"] = known
        assert shelf.ask() == (Purpose.EMBEDDING, LoadWish(lease=True))
    shelf.wishes["e"] = LoadWish(
        FOR_VECTORS, pinned=True
    )  # the very same: it stays so should the first one leave
    assert shelf.ask() == (Purpose.EMBEDDING, LoadWish(FOR_VECTORS, lease=True, pinned=True))


def test_a_model_that_was_loaded_for_something_else_meanwhile_is_not_asked(tmp_path: Path) -> None:
    async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
        raise AssertionError(asked.target)

    async def story() -> None:
        async with gateway_world(tmp_path, never) as world, ClientSession() as session:
            (name,) = world.house.engines
            world.house.launched[name] = Purpose.EMBEDDING
            async with session.post(f"{world.address}/v1/completions", json={"model": name}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "wrong_purpose")
            assert world.house.leases == set()

    asyncio.run(story())


@pytest.mark.parametrize("own", [None, *Purpose])
def test_the_list_tells_the_purpose_that_is_asked_for(own: Purpose | None) -> None:
    """Of one that is not loaded: as the gateway would refuse or take a request for it."""
    view = MODELS.models[0]
    assert view.kind is Kind.MODEL
    assert entry(view, None, own)["purpose"] == (own or Purpose.CHAT)
    made_for = view.model_copy(update={"kind": Kind.RERANK})
    assert entry(made_for, None, own)["purpose"] == (own or Purpose.RERANK)


def test_a_text_that_is_too_long_for_a_micro_batch() -> None:
    said = (
        b'{"error":{"code":500,"message":"input (803 tokens) is too large to process. increase the physical batch size'
        b' (current batch size: 512)","type":"server_error"}}'
    )
    with pytest.raises(LlmError) as caught:
        raise_if_too_long(said)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert (caught.value.details["prompt_tokens"], caught.value.details["context_tokens"]) == (803, 512)
    raise_if_too_long(b'{"error":{"code":500,"message":"something else","type":"server_error"}}')
    raise_if_too_long(b"no JSON")
