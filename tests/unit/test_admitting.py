"""One load decided: admitted, in another one's place, later, smaller, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lllm3090d.errors import ErrorCode
from lllm3090d.planning.planner import LEAST_DRAFTED_WINDOW_TOKENS, CappedBy
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.admitting import Admit, Decider, Decision, Evict, Refuse, Wait
from lllm3090d.serving.events import (
    Activity,
    LeaseAsked,
    LoadRequested,
    PinRequested,
    StopFinished,
    UnloadRequested,
)
from lllm3090d.serving.instance import InstanceState
from tests.fakes.scheduler_world import CARD, CUDA, GIB, SECOND, TWO_CARDS, World

pytestmark = pytest.mark.unit

OPEN = PlanRequest()
Prepare = Callable[[World], object]


def decide(world: World, event: LoadRequested) -> Decision:
    observation, scheduler = world.observation(), world.scheduler
    return Decider(
        observation=observation,
        ledger=scheduler.ledger,
        policy=scheduler.policy,
        instances=scheduler.instances,
        now_s=world.now_s,
        planner=lambda load, room: scheduler.question(load, observation, room),
    ).decide(event)


def admitted(decision: Decision) -> Admit:
    assert isinstance(decision, Admit), decision
    return decision


def refused(decision: Decision, code: ErrorCode = ErrorCode.INSUFFICIENT_VRAM) -> Refuse:
    assert isinstance(decision, Refuse), decision
    assert decision.error.code is code
    return decision


def waits(decision: Decision) -> str:
    assert isinstance(decision, Wait), decision
    return decision.why


def evicted(world: World, decision: Decision) -> list[str]:
    assert isinstance(decision, Evict), decision
    names = {each.run: each.name for each in world.scheduler.instances}
    return [names[run] for run in decision.runs]


@pytest.fixture
def world() -> World:
    """One model of 13 GiB serves and has been idle for a while; another one does not fit beside it."""
    made = World()
    made.bring_up("a", gib=13)
    made.rest()
    return made


def test_what_fits_is_admitted_as_asked() -> None:
    world = World()
    event = world.request("a", "t")
    made = admitted(decide(world, event))
    assert (made.cards, made.request, made.plan.context_tokens) == ((CARD.uuid,), event.request, 8192)
    assert made.budget.grantable_bytes >= made.plan.quote.total_bytes(Place.CARD)


def test_beside_another_one_where_there_is_room(world: World) -> None:
    admitted(decide(world, world.request("b", "t", 6)))


def test_an_idle_model_goes_where_there_is_none(world: World) -> None:
    decision = decide(world, world.request("b", "t", 13))
    assert evicted(world, decision) == ["a"]
    assert isinstance(decision, Evict) and decision.why == "a to be unloaded"


def busy(world: World) -> None:
    world.look({"a": Activity(True, 10)})


def silent(world: World) -> None:
    """It does not tell; that is asked again before it goes."""
    world.look({"a": Activity(None, None)})


def leased(world: World) -> None:
    world.do(LeaseAsked("l", "a", "lease-1"))
    world.rest()


def just_used(world: World) -> None:
    world.look({"a": Activity(False, 10)})
    world.look({"a": Activity(False, 11)})


def just_loaded(world: World) -> None:
    world.get("a").ready_since_s = world.now_s - 29.0


def pinned(world: World) -> None:
    world.do(PinRequested("p", "a", True))


def loading(world: World) -> None:
    world.get("a").state = InstanceState.LOADING


def stopping(world: World) -> None:
    world.do(UnloadRequested("u", "a"))


def releasing(world: World) -> None:
    stopping(world)
    world.do(StopFinished(world.get("a").run, None))


def stuck(world: World) -> None:
    stopping(world)
    world.get("a").state = InstanceState.STUCK


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (busy, "a, which is busy"),
        (leased, "a, which is busy"),
        (just_used, "a, which has been idle for less than 5 s"),
        (just_loaded, "a, which has been loaded for less than 30 s"),
        (loading, "a, which is loading"),
        (stopping, "the memory of a to come back"),
        (releasing, "the memory of a to come back"),
    ],
)
def test_nobody_goes_who_may_be_needed_and_who_comes_later_waits(
    world: World, prepare: Prepare, why: str
) -> None:
    prepare(world)
    assert waits(decide(world, world.request("b", "t", 13))) == why


@pytest.mark.parametrize("prepare", [pinned, stuck])
def test_for_what_may_never_go_nobody_waits(world: World, prepare: Prepare) -> None:
    prepare(world)
    refused(decide(world, world.request("b", "t", 13)))


def test_one_that_does_not_tell_what_it_does_may_be_asked(world: World) -> None:
    silent(world)
    assert evicted(world, decide(world, world.request("b", "t", 13))) == ["a"]


@pytest.mark.parametrize("prepare", [busy, just_loaded, loading, lambda _: None])
def test_a_load_that_must_not_evict_is_refused(world: World, prepare: Prepare) -> None:
    """Nor does it wait for what only an eviction could give."""
    prepare(world)
    refused(decide(world, world.request("b", "t", 13, may_evict=False)))


@pytest.mark.parametrize("prepare", [stopping, releasing])
def test_it_waits_for_memory_on_its_way_back_all_the_same(world: World, prepare: Prepare) -> None:
    prepare(world)
    waits(decide(world, world.request("b", "t", 13, may_evict=False)))


def test_nobody_goes_where_that_would_not_help(world: World) -> None:
    refused(decide(world, world.request("b", "t", 40)))
    world.foreign_bytes = world.observation().reading.free_bytes
    assert evicted(world, decide(world, world.request("b", "t", 13))) == ["a"]
    refused(decide(world, world.request("b", "t", 13.1)))


def test_nobody_goes_for_what_memory_cannot_help(world: World) -> None:
    refused(
        decide(world, world.request("b", "t", 13, PlanRequest(context_tokens=999_936, parallel=1))),
        ErrorCode.UNSUPPORTED_COMBINATION,
    )


def test_the_least_recently_used_of_many_goes_first() -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.bring_up(name, gib=5)
    world.rest()
    world.do(LeaseAsked("l", "a", "lease"))  # a is used now, and again later
    world.look({"b": Activity(False, 0)})
    world.now_s += 100
    world.get("a").leases.clear()
    decision = decide(world, world.request("d", "t", 6))
    assert evicted(world, decision) == ["b"]
    assert evicted(world, decide(world, world.request("d", "t", 13))) == ["b", "c"]


# --- how much ----------------------------------------------------------------------------------------------------


def crowded(gib: float = 6) -> World:
    """A card on which a stranger leaves room for a model and little context."""
    world = World()
    need = admitted(decide(world, world.request("m", "t", gib, PlanRequest(4096, 1))))
    need_bytes = need.plan.quote.total_bytes(Place.CARD)
    empty = world.observation().reading.free_bytes
    world.foreign_bytes = empty - need_bytes
    return world


def test_an_explicit_size_is_never_changed_silently() -> None:
    world = crowded()
    error = refused(decide(world, world.request("m", "t", 6, PlanRequest(32_768, 1)))).error
    assert error.details["largest_context_tokens"] == 4096


@pytest.mark.parametrize("least", [1, 2048, 4096])
def test_the_largest_that_fits_is_taken_where_less_will_do(least: int) -> None:
    world = crowded()
    event = world.request("m", "t", 6, PlanRequest(32_768, 1), least_context_tokens=least)
    made = admitted(decide(world, event))
    assert made.plan.context_tokens == 4096
    assert made.request == replace(event.request, context_tokens=4096)


def test_less_than_the_least_is_refused() -> None:
    world = crowded()
    event = world.request("m", "t", 6, PlanRequest(32_768, 1), least_context_tokens=4097)
    refused(decide(world, event))


def test_an_idle_model_goes_before_the_context_is_made_smaller(world: World) -> None:
    world.foreign_bytes = 0
    event = world.request("b", "t", 8, PlanRequest(32_768, 1), least_context_tokens=1024)
    big = replace(event, facts=world.request("b", "t2", 9).facts)
    assert evicted(world, decide(world, big)) == ["a"]


def test_the_setting_asks_for_no_less_than_an_agent_needs() -> None:
    """As if every load had said so; what a load says itself comes first."""
    world = World(serve_smaller=True)
    wide = PlanRequest(65_536, 2)
    need = admitted(decide(world, world.request("m", "t", 6, PlanRequest(49_152, 2))))
    free = world.observation().reading.free_bytes
    world.foreign_bytes = free - need.plan.quote.total_bytes(Place.CARD)
    assert admitted(decide(world, world.request("m", "t", 6, wide))).plan.context_tokens == 49_152
    refused(decide(world, world.request("m", "t", 6, wide, least_context_tokens=65_536)))
    world.foreign_bytes += 2 * GIB
    error = refused(decide(world, world.request("m", "t", 6, wide))).error
    assert error.details["largest_context_tokens"] is None or (
        error.details["largest_context_tokens"] < LEAST_DRAFTED_WINDOW_TOKENS
    )
    without = World()
    without.foreign_bytes = world.foreign_bytes - 2 * GIB
    refused(decide(without, without.request("m", "t", 6, wide)))


def tight(**idle: float) -> World:
    """Models serve, idle, and leave room for another one with a short window only."""
    world = World()
    for name, gib in idle.items():
        world.bring_up(name, gib=gib)
    world.rest()
    short = admitted(decide(world, world.request("m", "t", 8, PlanRequest(4096, 1))))
    free = world.observation().reading.free_bytes
    world.foreign_bytes = free - short.plan.quote.total_bytes(Place.CARD)
    return world


def test_a_window_too_short_for_an_agent_is_worth_an_idle_model() -> None:
    world = tight(a=3, b=3)
    assert evicted(world, decide(world, world.request("m", "t", 8, OPEN))) == ["a"]


def test_it_is_better_than_nothing_where_nobody_may_go() -> None:
    world = tight(a=3)
    for event in (
        world.request("m", "t", 8, OPEN, may_evict=False),
        replace(world.request("m", "t", 8, OPEN), token="t2"),
    ):
        if event.may_evict:
            world.do(PinRequested("p", "a", True))
        made = admitted(decide(world, event))
        assert made.plan.capped_by is CappedBy.MEMORY
        assert 1024 <= made.plan.window_tokens < LEAST_DRAFTED_WINDOW_TOKENS


def test_a_size_that_was_asked_for_is_worth_nobody_beyond_it() -> None:
    world = tight(a=3)
    admitted(decide(world, world.request("m", "t", 8, PlanRequest(4096, 1))))


# --- cards -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> World:
    """Two equal cards, and an engine that takes them by UUID."""
    made = World(TWO_CARDS)
    made.capabilities = CUDA
    return made


def test_nothing_is_admitted_on_a_card_in_error() -> None:
    world = World()
    world.failed_cards = {CARD.uuid}
    refused(decide(world, world.request("a", "t", 1)), ErrorCode.CARD_UNREADABLE)


def test_a_card_in_error_leaves_the_other_one(pair: World) -> None:
    pair.failed_cards = {CARD.uuid}
    assert admitted(decide(pair, pair.request("a", "t"))).cards == (SECOND.uuid,)
    refused(decide(pair, pair.request("a", "t", card=CARD.uuid)), ErrorCode.CARD_UNREADABLE)


def test_a_card_can_be_asked_for_by_its_uuid(pair: World) -> None:
    for uuid in (CARD.uuid, SECOND.uuid):
        made = admitted(decide(pair, pair.request("a", "t", card=uuid)))
        assert (made.cards, made.plan.split) == ((uuid,), None)
    error = refused(decide(pair, pair.request("a", "t", card="GPU-9")), ErrorCode.INVALID_REQUEST).error
    assert "GPU-9" in error.message and SECOND.uuid in error.message


def test_of_two_cards_the_one_that_it_fits_tightest(pair: World) -> None:
    pair.foreign = {SECOND.uuid: 10 * GIB}
    assert admitted(decide(pair, pair.request("a", "t"))).cards == (SECOND.uuid,)
    pair.foreign = {SECOND.uuid: 20 * GIB}
    assert admitted(decide(pair, pair.request("a", "t"))).cards == (CARD.uuid,)


def test_one_that_fits_on_no_card_is_shared_out_among_them(pair: World) -> None:
    made = admitted(decide(pair, pair.request("a", "t", 30)))
    assert set(made.cards) == {CARD.uuid, SECOND.uuid}
    assert made.plan.split is not None and len(made.plan.split.devices) == 2
    refused(decide(pair, pair.request("a", "t", 30, card=CARD.uuid)))


def test_on_the_card_that_was_asked_for_only_those_there_go(pair: World) -> None:
    pair.bring_up("a", gib=13, card=CARD.uuid)
    pair.bring_up("b", gib=13, card=SECOND.uuid)
    pair.rest()
    pair.now_s += 60
    decision = decide(pair, pair.request("c", "t", 13, card=SECOND.uuid))
    assert evicted(pair, decision) == ["b"]


def test_beside_the_cards_there_must_be_room_in_host_memory() -> None:
    """What is kept there only to be quick is given up first; a load is refused where that does not help."""
    world = World()
    world.host_available_bytes = 32 * GIB
    usual = admitted(decide(world, world.request("a", "t")))
    beside = usual.plan.quote.total_bytes(Place.HOST)
    world.host_available_bytes = usual_reserve(world) + beside - 100 * (1 << 20)
    less = admitted(decide(world, world.request("a", "t")))
    assert less.plan.launch.prompt_cache_mib == usual.plan.launch.prompt_cache_mib - 100
    world.host_available_bytes = usual_reserve(world)
    error = refused(decide(world, world.request("a", "t")), ErrorCode.INSUFFICIENT_MEMORY).error
    assert error.details["place"] == "host"


def usual_reserve(world: World) -> int:
    observation = world.observation()
    assert observation.host is not None and observation.host_room_bytes is not None
    return observation.host.available_bytes - observation.host_room_bytes
