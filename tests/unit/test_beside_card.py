"""Host memory beside a card: what is kept there only to be quick is given up where it is short, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import Plan, Planner
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import PlanRequest, ProjectorPlace, Room
from lllm3090d.planning.units import MIB
from lllm3090d.serving.launching import shares_of
from lllm3090d.serving.ledger import Share
from lllm3090d.serving.observation import HOST
from tests.fakes.scheduler_world import CARD, CUDA, SECOND, TWO_CARDS, World
from tests.unit.engine_truth import POLICY
from tests.unit.plans import GEMMA_27B, LLAMA_8B, PLENTY, plan_of, planner_of, projector_of

pytestmark = pytest.mark.unit

WISH = PlanRequest(8192, 1)
WITHOUT = replace(POLICY, prompt_cache_mib=0, context_checkpoints=0)


def beside(made: Plan) -> int:
    return made.quote.total_bytes(Place.HOST)


def question(
    host_bytes: int | None, request: PlanRequest = WISH, *, keeps_host_caches: bool = False
) -> Planner:
    return replace(
        planner_of(LLAMA_8B, request, room=Room(PLENTY, host_bytes)), keeps_host_caches=keeps_host_caches
    )


@pytest.fixture(scope="module")
def usual() -> Plan:
    """With room for everything."""
    return plan_of(LLAMA_8B, WISH)


def refused(planner: Planner) -> LlmError:
    with pytest.raises(LlmError) as caught:
        planner.plan()
    assert caught.value.code is ErrorCode.INSUFFICIENT_MEMORY
    return caught.value


def test_where_there_is_room_nothing_is_given_up(usual: Plan) -> None:
    assert question(beside(usual)).plan() == usual
    assert question(None).plan() == usual
    assert usual.launch.prompt_cache_mib == POLICY.prompt_cache_mib


@pytest.mark.parametrize(("short_bytes", "given_up_mib"), [(1, 1), (MIB, 1), (MIB + 1, 2), (300 * MIB, 300)])
def test_the_prompt_cache_is_made_smaller_by_what_is_missing(
    usual: Plan, short_bytes: int, given_up_mib: int
) -> None:
    made = question(beside(usual) - short_bytes).plan()
    kept = POLICY.prompt_cache_mib - given_up_mib
    assert made.launch == replace(usual.launch, prompt_cache_mib=kept)
    assert beside(made) <= beside(usual) - short_bytes
    assert made.notes[-1] == (
        f"prompt cache of {kept} MiB instead of {POLICY.prompt_cache_mib}: host memory is short"
    )
    assert made.quote.total_bytes(Place.CARD) == usual.quote.total_bytes(Place.CARD)


def test_without_a_prompt_cache_context_checkpoints_go_too() -> None:
    """Of a model that has some: they hold the state of sliding or recurrent layers."""
    usual = plan_of(GEMMA_27B, WISH)
    cache = POLICY.prompt_cache_mib * MIB
    exactly = replace(planner_of(GEMMA_27B, WISH), room=Room(PLENTY, beside(usual) - cache)).plan()
    assert (exactly.launch.prompt_cache_mib, exactly.launch.context_checkpoints) == (
        0,
        POLICY.context_checkpoints,
    )
    made = replace(planner_of(GEMMA_27B, WISH), room=Room(PLENTY, beside(usual) - cache - 1)).plan()
    assert (made.launch.prompt_cache_mib, made.launch.context_checkpoints) == (0, 0)
    assert "no prompt cache" in made.notes[-1] and "no context checkpoints" in made.notes[-1]


def test_a_load_is_refused_where_that_does_not_help(usual: Plan) -> None:
    least = beside(plan_of(LLAMA_8B, WISH, policy=WITHOUT))
    assert question(least).plan().launch.prompt_cache_mib == 0
    error = refused(question(least - 1))
    assert error.details["place"] == "host"
    assert error.details["needed_bytes"] == beside(usual)
    assert error.details["missing_bytes"] == beside(usual) - least + 1
    assert "of host memory beside the card" in error.message


def test_what_was_asked_for_by_size_is_not_made_smaller(usual: Plan) -> None:
    assert question(beside(usual), keeps_host_caches=True).plan() == usual
    error = refused(question(beside(usual) - 1, keeps_host_caches=True))
    assert error.details["missing_bytes"] == 1


def test_in_place_of_a_card_host_memory_is_the_card() -> None:
    """Its room is that of the card; there is none beside it."""
    made = plan_of(LLAMA_8B, WISH, room=Room(PLENTY, 0), backend=Backend.CPU)
    assert made.launch.prompt_cache_mib == POLICY.prompt_cache_mib


def test_a_remedy_counts_what_it_takes_beside_the_card() -> None:
    """A projector moved to the host needs room there, and one that has none is not recommended."""
    wish = replace(WISH, context_tokens=32_768)
    need = plan_of(LLAMA_8B, wish, projector=projector_of(900)).quote.total_bytes(Place.CARD)

    def recommended(host_bytes: int) -> bool:
        planner = planner_of(
            LLAMA_8B, wish, room=Room(need - 800 * MIB, host_bytes), projector=projector_of(900)
        )
        asked = replace(planner, request=replace(wish, projector=ProjectorPlace.CARD))
        return bool(refused(asked).details.get("fits_with_projector_on_host"))

    assert recommended(4 << 30)
    assert not recommended(500 * MIB)


# --- shares ------------------------------------------------------------------------------------------------------


def sizes(shares: tuple[Share, ...]) -> dict[str, int]:
    return {share.where: share.bytes for share in shares}


def test_a_launch_takes_its_lines_of_the_card_and_those_beside_it(usual: Plan) -> None:
    shares = shares_of(usual, ("GPU-1",), CardKind.NVIDIA)
    assert sizes(shares) == {"GPU-1": usual.quote.total_bytes(Place.CARD), HOST: beside(usual)}
    assert [item for share in shares for item in share.items] == sorted(
        usual.quote.items, key=lambda item: item.place is Place.HOST
    )


def test_in_host_memory_there_is_one_memory() -> None:
    made = plan_of(LLAMA_8B, WISH, backend=Backend.CPU)
    shares = shares_of(made, (HOST,), CardKind.CPU)
    assert sizes(shares) == {HOST: made.quote.total_bytes(Place.CARD)}


def test_without_a_line_beside_the_card_the_host_is_no_part_of_it(usual: Plan) -> None:
    on_card = tuple(item for item in usual.quote.items if item.place is Place.CARD)
    made = replace(usual, quote=replace(usual.quote, items=on_card))
    assert [share.where for share in shares_of(made, ("GPU-1",), CardKind.NVIDIA)] == ["GPU-1"]


def test_of_several_cards_each_is_charged_its_own_ledger() -> None:
    """In the order of the plan's devices, which need not be that of the machine."""
    world = World(TWO_CARDS)
    world.capabilities = CUDA
    world.load("a", "t", 30)
    made = world.get("a").plan
    assert made.split is not None
    uuids = (SECOND.uuid, CARD.uuid)
    shares = sizes(shares_of(made, uuids, CardKind.NVIDIA))
    assert [shares[uuid] for uuid in uuids] == list(made.split.needs_bytes)
    assert shares[HOST] == beside(made)
    with pytest.raises(ValueError, match="zip"):
        shares_of(made, (*uuids, "GPU-3"), CardKind.NVIDIA)
    # And that is what is reserved.
    reserved = {each.where: each.reserved_bytes for each in world.scheduler.ledger}
    assert sum(reserved.values()) == sum(shares.values())
    assert set(reserved) == {CARD.uuid, SECOND.uuid, HOST}
