"""What else could be had: each alternative gives what it says when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import LlmError
from lllm3090d.planning.alternatives import Alternative, alternatives
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.planner import Plan, Planner
from lllm3090d.planning.refusal import slots_text
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, ProjectorPlace, SlotPolicy
from lllm3090d.planning.units import MIB
from tests.unit.engine_truth import facts_of, priced_models
from tests.unit.plans import (
    BACKENDS,
    DRAFTING,
    LLAMA_8B,
    MIXTURE,
    SMOLLM2,
    need_of,
    on_card,
    plan_of,
    planner_of,
    projector_of,
)

pytestmark = pytest.mark.unit

OPTIONS: dict[str, tuple[str, Any]] = {
    "--parallel": ("parallel", int),
    "--slot-policy": ("slot_policy", SlotPolicy),
    "--cache-type": ("cache_type_k", CacheType),
    "--draft": ("drafting", Drafting),
    "--projector": ("projector", ProjectorPlace),
    "--offload": ("offload", Offload),
}


def asked(planner: Planner, ask: str) -> Plan:
    """The plan that a person gets who adds these options to the question."""
    option, value = ask.split(" ")
    name, read = OPTIONS[option]
    changes = {name: read(value)}
    if option == "--cache-type":
        changes["cache_type_v"] = changes["cache_type_k"]
    return replace(planner, request=replace(planner.request, **changes)).plan()


def found(planner: Planner) -> dict[str, Alternative]:
    return {each.ask: each for each in alternatives(planner, planner.plan())}


def test_another_number_of_slots() -> None:
    room = need_of(SMOLLM2, PlanRequest(16_384, 2))
    ways = found(planner_of(SMOLLM2, room=room))
    assert plan_of(SMOLLM2, room=room).parallel == 2
    one, three = ways["--parallel 1"], ways["--parallel 3"]
    assert (one.slots, one.window_tokens) == (1, 8192)
    assert one.gain == "1 slot instead of 2, 8,192 tokens of context less in all"
    assert (three.slots, three.window_tokens) == (3, 5120)
    assert three.gain.startswith("3,072 tokens of window less, 3 slots instead of 2")


def test_another_cache_type_and_what_it_costs() -> None:
    room = need_of(LLAMA_8B, PlanRequest(32_768, 1))
    planner = planner_of(LLAMA_8B, room=room)
    ways = found(planner)
    smaller, exact = ways["--cache-type q4_0"], ways["--cache-type f16"]
    assert smaller.window_tokens > 32_768 > exact.window_tokens
    assert smaller.gain.endswith(" tokens of window more; quality falls")
    assert exact.gain.endswith(" tokens of window less; a more exact cache")
    given = replace(planner, request=PlanRequest(cache_type_k=CacheType.Q8_0))
    assert not [ask for ask in found(given) if "cache-type" in ask]


def test_another_policy() -> None:
    room = need_of(SMOLLM2, PlanRequest(16_384, 2)) - 1
    ways = found(planner_of(SMOLLM2, room=room))
    assert (ways["--slot-policy window"].slots, ways["--slot-policy window"].window_tokens) == (1, 8192)
    asked_for = found(planner_of(SMOLLM2, PlanRequest(slot_policy=SlotPolicy.BALANCED), room=room))
    assert not [ask for ask in asked_for if "slot-policy" in ask]


def test_with_and_without_a_draft() -> None:
    room = need_of(DRAFTING, PlanRequest(65_536, 1))
    off = found(planner_of(DRAFTING, room=room))["--draft off"]
    assert off.window_tokens > 65_536
    assert off.gain.endswith(" tokens of window more; slower answers")
    room = need_of(DRAFTING, PlanRequest(20_480, 1, drafting=Drafting.ON))
    planner = planner_of(DRAFTING, room=room)
    assert planner.plan().launch.draft is None
    on = found(planner)["--draft on"]
    assert on.window_tokens == 20_480
    assert on.gain.endswith(" tokens of window less; faster answers")


def test_another_place_for_the_projector() -> None:
    projector = projector_of(800)
    room = need_of(LLAMA_8B, PlanRequest(65_536, 1), projector=projector)
    host = found(planner_of(LLAMA_8B, room=room, projector=projector))["--projector host"]
    assert host.window_tokens > 65_536
    assert host.gain.endswith("; images take longer")
    room = need_of(LLAMA_8B, PlanRequest(16_384, 1))
    card = found(planner_of(LLAMA_8B, room=room, projector=projector))["--projector card"]
    assert card.window_tokens < 16_384
    assert card.gain.endswith("; images are quicker")


def test_a_part_in_host_memory() -> None:
    room = need_of(MIXTURE, PlanRequest(16_384, 1))
    planner = planner_of(MIXTURE, room=room)
    more = found(planner)["--offload allowed"]
    assert more.window_tokens == 65_536
    assert more.gain.endswith("; slower answers")
    by_policy = replace(planner, policy=replace(planner.policy, offload=Offload.ALLOWED))
    less = found(by_policy)["--offload resident"]
    assert less.window_tokens == planner.plan().window_tokens
    assert less.gain.endswith("; quicker answers")
    assert not [
        ask for ask in found(planner_of(MIXTURE, PlanRequest(gpu_layers=49), room=room)) if "offload" in ask
    ]


def test_what_is_no_better_is_left_out() -> None:
    """With room for everything, more slots are all that could be had."""
    ways = found(planner_of(LLAMA_8B))
    assert set(ways) == {"--parallel 1", "--parallel 5", "--cache-type q4_0"}
    assert ways["--cache-type q4_0"].gain.startswith("the same window and ")
    everything = PlanRequest(8192, 1, cache_type_k=CacheType.Q8_0, offload=Offload.RESIDENT)
    assert found(planner_of(LLAMA_8B, everything)) == {}


@settings(deadline=None)
@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(BACKENDS),
    context=st.one_of(st.none(), st.integers(2048, 65_536)),
    parallel=st.one_of(st.none(), st.integers(1, 3)),
    policy=st.one_of(st.none(), st.sampled_from(SlotPolicy)),
    offload=st.one_of(st.none(), st.sampled_from(Offload)),
    projector_mib=st.sampled_from([None, 800]),
    spare_mib=st.integers(1500, 30_000),
)
def test_every_alternative_is_what_it_says(
    *,
    model: str,
    backend: Backend,
    context: int | None,
    parallel: int | None,
    policy: SlotPolicy | None,
    offload: Offload | None,
    projector_mib: int | None,
    spare_mib: int,
) -> None:
    planner = planner_of(
        model,
        PlanRequest(context, parallel, slot_policy=policy, offload=offload),
        room=facts_of(model).weight_bytes + spare_mib * MIB,
        backend=backend,
        projector=None if projector_mib is None else projector_of(projector_mib),
    )
    try:
        plan = planner.plan()
    except LlmError:
        return
    ways = alternatives(planner, plan)
    assert len({way.ask for way in ways}) == len(ways)
    for way in ways:
        other = asked(planner, way.ask)
        assert (other.window_tokens, other.parallel) == (way.window_tokens, way.slots)
        assert on_card(other.quote) == way.card_bytes <= planner.room.card
        assert other.launch != plan.launch
        window = other.window_tokens - plan.window_tokens
        if window:
            assert f"{abs(window):,} tokens of window {'more' if window > 0 else 'less'}" in way.gain
        if other.parallel != plan.parallel:
            assert f"{slots_text(other.parallel)} instead of {plan.parallel}" in way.gain
