"""Which of several cards a load is on, and how its engine is kept to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode
from lllm3090d.planning.planner import CappedBy, PlanRequest
from lllm3090d.planning.quote import Place
from lllm3090d.serving.admission import rooms
from lllm3090d.serving.events import Admitted, StartUnit
from lllm3090d.serving.placed import parts_of, together
from tests.fakes.scheduler_world import CARD, CUDA, GIB, HOST, SECOND, TWO_CARDS, World, error_of, the

pytestmark = pytest.mark.unit

OPEN = PlanRequest()
THIRD = replace(CARD, uuid="GPU-3", pci_address="0000:03:00.0")


@pytest.fixture
def pair() -> World:
    """Two equal cards, and an engine that takes them by UUID."""
    made = World(TWO_CARDS)
    made.capabilities = CUDA
    return made


def _started(
    world: World, name: str, gib: float, request: PlanRequest | None = None
) -> tuple[dict[str, str], list[str]]:
    """Environment and command line of a load's unit."""
    properties = the(world.load(name, f"t-{name}", gib, request), StartUnit).spec.properties
    environment, command = properties["Environment"], properties["ExecStart"]
    assert isinstance(environment, tuple) and isinstance(command, tuple)
    return dict(item.split("=", 1) for item in environment), list(command[0][1])


def _cards(world: World, name: str) -> set[str]:
    return {each.where for each in world.scheduler.ledger.of(world.get(name).run)} - {HOST}


def _after(line: list[str], option: str) -> str:
    return line[line.index(option) + 1]


def test_an_open_context_is_on_the_card_that_serves_most(pair: World) -> None:
    pair.foreign = {SECOND.uuid: 12 * GIB}  # room for the model, and for half its context
    pair.load("a", "t", 8, OPEN)
    assert _cards(pair, "a") == {CARD.uuid}
    assert pair.get("a").plan.capped_by is CappedBy.MODEL


def test_of_cards_that_serve_as_much_it_is_on_the_tightest(pair: World) -> None:
    pair.foreign = {SECOND.uuid: 2 * GIB}
    pair.load("a", "t", 3, OPEN)
    assert _cards(pair, "a") == {SECOND.uuid}


def test_the_second_card_is_for_the_second_model(pair: World) -> None:
    environment, line = _started(pair, "a", 13)
    assert environment["CUDA_VISIBLE_DEVICES"] == CARD.uuid
    other, line = _started(pair, "b", 13)
    assert other["CUDA_VISIBLE_DEVICES"] == SECOND.uuid
    assert _after(line, "--device") == "CUDA0"  # the only one that it sees
    assert "-ts" not in line
    # What it was asked for is remembered as it was asked, not as it was tried.
    asked = pair.get("b").record.asked
    assert asked is not None and asked.offload == PlanRequest().offload


def test_nothing_is_left_in_host_memory_while_another_card_has_room(pair: World) -> None:
    environment, line = _started(pair, "a", 30)
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert set(environment["CUDA_VISIBLE_DEVICES"].split(",")) == {CARD.uuid, SECOND.uuid}
    assert _after(line, "--device") == "CUDA0,CUDA1"
    assert _after(line, "--main-gpu") == "1"
    plan = pair.get("a").plan
    assert plan.launch.layers.is_full
    assert plan.split is not None and set(plan.split.devices) == {"GPU0", "GPU1"}
    # The order of the names, of the shares and of the charges is one.
    numbers = {"GPU0": CARD.uuid, "GPU1": SECOND.uuid}
    uuids = [numbers[name] for name in plan.split.devices]
    assert environment["CUDA_VISIBLE_DEVICES"].split(",") == uuids
    assert _after(line, "-ts") == ",".join(map(str, plan.split.shares))
    for uuid, need in zip(uuids, plan.split.needs_bytes, strict=True):
        held = pair.scheduler.ledger.get(pair.get("a").run, uuid)
        assert held is not None and held.reserved_bytes == need


def test_a_card_keeps_its_number_when_another_one_is_lost() -> None:
    world = World((*TWO_CARDS, THIRD))
    world.capabilities = replace(
        CUDA,
        devices=("CUDA0", "CUDA1", "CUDA2"),
        listed=(*CUDA.listed, replace(CUDA.listed[0], name="CUDA2")),
    )
    world.failed_cards = {CARD.uuid}
    environment, line = _started(world, "a", 30)
    assert set(environment["CUDA_VISIBLE_DEVICES"].split(",")) == {SECOND.uuid, THIRD.uuid}
    assert _after(line, "--device") == "CUDA0,CUDA1"
    split = world.get("a").plan.split
    assert split is not None and set(split.devices) == {"GPU1", "GPU2"}


def test_equal_cards_of_an_engine_without_uuids_get_nothing(pair: World) -> None:
    listed = tuple(replace(each, name=f"Vulkan{number}") for number, each in enumerate(CUDA.listed))
    pair.capabilities = replace(
        CUDA, backend=Backend.VULKAN, devices=tuple(each.name for each in listed), listed=listed
    )
    for card in (None, CARD.uuid):
        effects = pair.load("a", "t", 8, card=card)
        assert error_of(effects, "t").code is ErrorCode.ENGINE_UNUSABLE
    assert not list(pair.scheduler.ledger)


def test_of_unlike_cards_only_those_that_are_known_are_used(pair: World) -> None:
    other = replace(SECOND, name="NVIDIA GeForce RTX 4090")
    pair.cards = (CARD, other)
    seen = (
        replace(CUDA.listed[0], name="Vulkan0", description="an unknown name"),
        replace(CUDA.listed[1], name="Vulkan1", description=other.name),
    )
    pair.capabilities = replace(CUDA, backend=Backend.VULKAN, devices=("Vulkan0", "Vulkan1"), listed=seen)
    environment, line = _started(pair, "a", 8)
    assert _cards(pair, "a") == {other.uuid}
    assert _after(line, "--device") == "Vulkan1"
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert error_of(pair.load("b", "t", 8, card=CARD.uuid), "t").code is ErrorCode.ENGINE_UNUSABLE


def test_a_preview_is_aimed_at_the_card_of_a_load(pair: World) -> None:
    pair.foreign = {SECOND.uuid: 10 * GIB}
    event = pair.request("a", "t", 8)
    assert pair.scheduler.aimed(event, pair.observation()).card == SECOND.uuid
    shared_out = pair.request("b", "t", 30)
    assert pair.scheduler.aimed(shared_out, pair.observation()) is shared_out
    alone = World()
    assert alone.scheduler.aimed(event, alone.observation()) is event


def test_the_parts_of_a_plan_and_what_their_cards_can_give(pair: World) -> None:
    effects = pair.load("a", "t", 30)
    admitted, plan = the(effects, Admitted), pair.get("a").plan
    assert plan.split is not None
    uuids = tuple({"GPU0": CARD.uuid, "GPU1": SECOND.uuid}[name] for name in plan.split.devices)
    parts = parts_of(plan, pair.cards, uuids)
    assert [part.name for part in parts] == list(plan.split.devices)
    assert [part.layers for part in parts] == list(plan.split.shares)
    assert sum(part.bytes for part in parts) == plan.quote.total_bytes(Place.CARD)
    assert plan.quote.total_bytes(Place.CARD) <= admitted.budget.grantable_bytes
    assert {line.name.split()[0] for line in admitted.budget.lines} == {"GPU0", "GPU1"}
    assert admitted.environment == (
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        f"CUDA_VISIBLE_DEVICES={','.join(uuids)}",
    )
    assert parts_of(plan, pair.cards[:1], (CARD.uuid,)) == ()


def test_together_cards_can_give_what_each_of_them_can() -> None:
    world = World(TWO_CARDS)
    world.foreign = {SECOND.uuid: 5 * GIB}
    given = rooms(world.observation(), world.scheduler.ledger, world.scheduler.policy.reserves).cards
    both = together([("GPU0", given[CARD.uuid]), ("GPU1", given[SECOND.uuid])])
    assert both.grantable_bytes == sum(budget.grantable_bytes for budget in given.values())
    assert together([("GPU0", given[CARD.uuid])]) is given[CARD.uuid]


def test_what_a_run_holds_of_a_card_that_it_was_not_promised_is_taken(pair: World) -> None:
    pair.load("a", "t", 8, card=CARD.uuid)
    run, seen = pair.get("a").run, pair.observation()
    stray = {run: 3 * GIB}
    second = seen.cards[1]
    reading = second.read()
    moved = replace(
        second,
        reading=replace(reading, used_bytes=3 * GIB, free_bytes=reading.free_bytes - 3 * GIB),
        resident=stray,
        in_use=stray,
    )
    ledger, reserves = pair.scheduler.ledger, pair.scheduler.policy.reserves
    before = rooms(seen, ledger, reserves).cards[SECOND.uuid]
    after = rooms(replace(seen, cards=(seen.cards[0], moved)), ledger, reserves).cards[SECOND.uuid]
    assert after.available_bytes <= before.available_bytes - 3 * GIB
    gone = rooms(replace(seen, cards=(seen.cards[0], moved)), ledger, reserves, frozenset({run}))
    assert gone.cards[SECOND.uuid].available_bytes == before.available_bytes
