"""Whether a room gives a load what it needs: by what is known of other rooms it is the same as by a plan for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, SlotPolicy
from lllm3090d.serving.admitting import Admit, Decider, Evict, Refuse, Wait
from lllm3090d.serving.aims import content, served
from lllm3090d.serving.events import EngineReady, LoadRequested, StartFinished
from lllm3090d.serving.fitting import Fitting, Made, is_satisfying
from lllm3090d.serving.instance import SERVING
from lllm3090d.serving.room_table import Point, RoomTable, room_table
from lllm3090d.serving.victims import fewest_victims
from tests.fakes.scheduler_world import CARDS, CUDA, GIB, SECOND, TWO_CARDS, World
from tests.unit.engine_truth import facts_of
from tests.unit.plans import DRAFTING, DRAFTING_MIXTURE, GEMMA_27B, LLAMA_8B, MIXTURE, SMOLLM2, projector_of

pytestmark = pytest.mark.unit

THREE_CARDS = (*TWO_CARDS, replace(SECOND, uuid="GPU-3", pci_address="0000:03:00.0"))
KNOWN = (LLAMA_8B, MIXTURE, DRAFTING, DRAFTING_MIXTURE, GEMMA_27B, SMOLLM2)


def bring_up(world: World, event: LoadRequested) -> None:
    """It serves, and holds what it is charged."""
    for each in (event, StartFinished(event.run, None), EngineReady(event.run, {})):
        world.do(each)
    assert world.get(event.checkpoint.name).state in SERVING


def crowded(
    cards: Sequence[Card],
    models: Iterable[tuple[float, int]],
    *,
    host_bytes: int | None = None,
    projects: bool = False,
    **plan: Any,
) -> World:
    """Models of so many GiB serve, each on the card of such a number, as far as there is room for them."""
    world = World(cards)
    seen = CUDA.listed + CUDA.listed[:1] if len(cards) > 1 else CUDA.listed
    flags = CUDA.flags | {"--mmproj"} if projects else CUDA.flags
    world.capabilities = replace(CUDA, listed=seen, flags=flags)
    policy = world.scheduler.policy
    world.scheduler.policy = replace(policy, plan=replace(policy.plan, **plan))
    world.host_available_bytes = host_bytes
    for number, (gib, card) in enumerate(models):
        uuid = cards[card % len(cards)].uuid
        event = world.request(f"m{number}", f"t{number}", gib, PlanRequest(4096, 1), card=uuid)
        if isinstance(decider(world).decide(event), Admit):
            bring_up(world, event)
    return world


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Models of several sizes that serve, idle for different times, some of them busy or pinned."""
    sizes = st.tuples(st.sampled_from([0.5, 1, 2, 3, 5]), st.integers(0, 2))
    world = crowded(
        draw(st.sampled_from([CARDS, CARDS, TWO_CARDS, TWO_CARDS, THREE_CARDS])),
        draw(st.lists(sizes, min_size=1, max_size=12)),
        host_bytes=draw(st.sampled_from([None, None, 24 * GIB, 64 * GIB])),
        projects=draw(st.booleans()),
        slot_policy=draw(st.sampled_from(SlotPolicy)),
        offload=draw(st.sampled_from([Offload.RESIDENT, Offload.RESIDENT, Offload.ALLOWED])),
    )
    world.rest()
    world.now_s += 100
    for instance in world.scheduler.instances:
        instance.last_used_s = world.now_s - draw(st.sampled_from([50, 60, 70, 80]))
        instance.pinned = draw(st.integers(0, 9)) == 0
        instance.busy = draw(st.integers(0, 9)) == 0
    return world


@st.composite
def wishes(draw: st.DrawFn) -> Mapping[str, Any]:
    """What is loaded, and how."""
    made = draw(st.sampled_from([None, None, *KNOWN]))
    facts: Mapping[str, CheckpointFacts] = {} if made is None else {"facts": facts_of(made)}
    request = PlanRequest(
        context_tokens=draw(st.sampled_from([None, None, None, 4096, 8192, 65_536])),
        parallel=draw(st.sampled_from([None, None, 1, 2])),
        drafting=draw(st.sampled_from([None, None, Drafting.OFF])),
        offload=draw(st.sampled_from([None, None, None, Offload.ALLOWED, Offload.RESIDENT])),
        slot_policy=draw(st.sampled_from([None, *SlotPolicy])),
    )
    projector = {"projector": projector_of(900)} if draw(st.integers(0, 4)) == 0 else {}
    gib = draw(st.sampled_from([1, 4, 8, 12, 16, 20, 24, 30, 40]))
    return {"gib": gib, "request": request, **facts, **projector}


def decider(world: World) -> Decider:
    observation, scheduler = world.observation(), world.scheduler
    return Decider(
        observation=observation,
        ledger=scheduler.ledger,
        policy=scheduler.policy,
        instances=scheduler.instances,
        now_s=world.now_s,
        planner=lambda load, room: scheduler.question(load, observation, room),
    )


def fitting_of(made: Decider, table: RoomTable, event: LoadRequested) -> Fitting:
    """One that has learnt nothing yet."""
    return Fitting(event, made.observation, table, made.planner)


def plainly(fitting: Fitting, *, contented: bool) -> Callable[[Point], bool]:
    """The same question, put to the planner each time."""

    def gives(point: Point) -> bool:
        made = fitting.made(point)
        if not isinstance(made, Made):
            return False
        return not contented or is_satisfying(made.plan, fitting.event.request)

    return gives


def plain_runs(made: Decider, plain: Fitting, table: RoomTable) -> tuple[str, ...] | Made | None:
    """Who goes for it, how it is launched as it is, or None, with every room planned by itself."""
    now = plain.made(table.now)
    if isinstance(now, Made) and is_satisfying(now.plan, plain.event.request):
        return now
    chosen = fewest_victims(made.victims(), table, plainly(plain, contented=True))
    if not chosen and not isinstance(now, Made):
        chosen = fewest_victims(made.victims(), table, plainly(plain, contented=False))
    if chosen:
        return tuple(each.run for each in chosen)
    return now if isinstance(now, Made) else None


@settings(deadline=None, max_examples=50)
@given(world=worlds(), wish=wishes())
def test_who_goes_is_who_would_go_were_every_room_planned(world: World, wish: Mapping[str, Any]) -> None:
    made, event = decider(world), world.request("new", "t", **wish)
    table = room_table(made.observation, made.ledger, world.scheduler.policy.reserves)
    decision = made.decide(event)
    try:
        expected = plain_runs(made, fitting_of(made, table, event), table)
    except LlmError as error:  # what no memory could help
        assert isinstance(decision, Refuse) and decision.error.code is error.code
        return
    if isinstance(expected, Made):
        assert isinstance(decision, Admit) and (decision.plan, decision.cards) == (
            expected.plan,
            expected.cards,
        )
    elif expected is not None:
        assert isinstance(decision, Evict) and decision.runs == expected
    else:
        assert isinstance(decision, Wait | Refuse)


def outcome(gives: Callable[[Point], bool], point: Point) -> bool | ErrorCode:
    """What it says, or why it says nothing."""
    try:
        return gives(point)
    except LlmError as error:
        return error.code


@settings(deadline=None, max_examples=30)
@given(
    world=worlds(),
    wish=wishes(),
    shares=st.lists(st.tuples(*[st.integers(0, 100)] * 3), min_size=1, max_size=6),
)
@example(
    # With a part in host memory it needs more of the card that is nearly full, and less of the other.
    world=crowded(TWO_CARDS, [*[(0.5, 0)] * 7, (2, 0), (3, 0), *[(0.5, 1)] * 2], offload=Offload.ALLOWED),
    wish={"gib": 20, "request": PlanRequest(context_tokens=4096)},
    shares=[(0, 0, 0), (3, 0, 0)],
)
def test_a_room_gives_what_its_plan_gives(
    world: World, wish: Mapping[str, Any], shares: list[tuple[int, int, int]]
) -> None:
    """Whatever was asked before; also of rooms that no set of victims would leave."""
    made, event = decider(world), world.request("new", "t", **wish)
    table = room_table(made.observation, made.ledger, world.scheduler.policy.reserves)
    most = table.without(each.run for each in world.scheduler.instances)
    plain = fitting_of(made, table, event)
    for aim, contented in ((content, True), (served, False)):
        plan = plainly(plain, contented=contented)
        gives = aim(fitting_of(made, table, event), most)
        for share in shares:
            cards = [
                low + (high - low) * part // 100
                for low, high, part in zip(table.now[:-1], most[:-1], share, strict=False)
            ]
            point = (*cards, most[-1])
            assert outcome(gives, point) == outcome(plan, point), (aim, point)


def test_few_plans_answer_for_many_rooms() -> None:
    """One card: what the load takes, and that one byte less is too little. Beside that only what it gets as it is."""
    world = World()
    for number in range(12):
        bring_up(world, world.request(f"m{number}", f"t{number}", 0.5, PlanRequest(1024, 1)))
        world.now_s += 1
    world.rest()
    world.now_s += 100
    asked: list[int] = []
    made = decider(world)

    class Counting(Fitting):
        def alone(self, uuid: str, card_bytes: int, host_bytes: int) -> Any:
            asked.append(card_bytes)
            return super().alone(uuid, card_bytes, host_bytes)

    table = room_table(made.observation, made.ledger, world.scheduler.policy.reserves)
    event = world.request("new", "t", 11, PlanRequest(8192, 1))
    victims = made.victims()
    fitting = Counting(event, made.observation, table, made.planner)
    chosen = fewest_victims(victims, table, content(fitting, table.without(each.run for each in victims)))
    assert 4 <= len(chosen) < 12
    assert len(asked) == 2 and asked[1] < asked[0]
    assert not isinstance(made.decide(event), Refuse)
