"""What holds of every plan: a larger card serves no less."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.planner import LEAST_DRAFTED_WINDOW_TOKENS, Plan
from lllm3090d.planning.request import Drafting, Offload, PlanRequest, Room, SlotPolicy
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from tests.unit.engine_truth import facts_of, priced_models
from tests.unit.plans import BACKENDS, CARDS, DRAFTING, MIXTURE, need_of, planner_of, served

pytestmark = pytest.mark.unit

# Of what lies between the smallest launch and four whole windows, and a little beyond both.
shares = st.integers(-20, 1050)
more_mib = st.one_of(st.integers(1, 64), st.integers(1, 20_000))


@cache
def ends_of(model: str, backend: Backend) -> tuple[int, int]:
    """Bytes of the smallest launch of a model, and of four whole windows."""
    window = facts_of(model).trained_context_tokens
    requests = (PlanRequest(PAGE_TOKENS, 1, drafting=Drafting.OFF), PlanRequest(4 * window, 4))
    least, most = (need_of(model, request, backend=backend) for request in requests)
    return least, most


def room_of(model: str, backend: Backend, share: int) -> int:
    """Room on the card, thousandths of the way between both ends."""
    least, most = ends_of(model, backend)
    return max(0, least + (most - least) * share // 1000)


def both(
    model: str, request: PlanRequest, backend: Backend, room: int, more: int
) -> tuple[Plan | None, Plan | None]:
    """The plans for a card and for a larger one."""
    small, large = (
        served(planner_of(model, request, room=size, backend=backend)) for size in (room, room + more)
    )
    return small, large


def total(plan: Plan | None) -> int:
    return 0 if plan is None else plan.parallel * plan.window_tokens


@settings(deadline=None)
@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(BACKENDS),
    policy=st.sampled_from(SlotPolicy),
    parallel=st.one_of(st.none(), st.integers(1, 6)),
    drafting=st.sampled_from([Drafting.ON, Drafting.OFF]),
    offload=st.sampled_from(Offload),
    share=shares,
    more=more_mib,
)
@example(
    model=MIXTURE,
    backend=Backend.CUDA,
    policy=SlotPolicy.BALANCED,
    parallel=None,
    drafting=Drafting.OFF,
    offload=Offload.ALLOWED,
    share=-20,
    more=300,
)
def test_a_larger_card_serves_no_less(
    *,
    model: str,
    backend: Backend,
    policy: SlotPolicy,
    parallel: int | None,
    drafting: Drafting,
    offload: Offload,
    share: int,
    more: int,
) -> None:
    if drafting is Drafting.ON and not facts_of(model).has_mtp:
        drafting = Drafting.OFF
    request = PlanRequest(parallel=parallel, slot_policy=policy, drafting=drafting, offload=offload)
    small, large = both(model, request, backend, room_of(model, backend, share), more * MIB)
    assert total(small) <= total(large)
    if small is not None and large is not None and (policy is SlotPolicy.WINDOW or parallel is not None):
        assert small.window_tokens <= large.window_tokens


@settings(deadline=None)
@given(
    model=st.sampled_from([name for name in priced_models() if facts_of(name).has_mtp]),
    backend=st.sampled_from(CARDS),
    policy=st.sampled_from(SlotPolicy),
    share=st.integers(-20, 300),
    more=more_mib,
)
def test_drafting_by_itself_takes_no_window_that_an_agent_needs(
    *, model: str, backend: Backend, policy: SlotPolicy, share: int, more: int
) -> None:
    """Where it begins, the window shrinks once, but not below that; else a larger card serves no less."""
    request = PlanRequest(slot_policy=policy)
    small, large = both(model, request, backend, room_of(model, backend, share), more * MIB)
    if small is None or large is None:
        assert small is None
        return
    begins = small.launch.draft is None and large.launch.draft is not None
    assert small.launch.draft is None or large.launch.draft is not None
    least = LEAST_DRAFTED_WINDOW_TOKENS if begins else total(small)
    assert total(large) >= min(total(small), least)


@settings(deadline=None)
@given(
    model=st.sampled_from([MIXTURE, DRAFTING, "llama-3.1-8b", "gemma-3-27b"]),
    backend=st.sampled_from(CARDS),
    card_mib=st.integers(0, 20_000),
    host_mib=st.integers(0, 30_000),
    more=st.integers(1, 8000),
)
def test_more_host_memory_serves_no_less(
    *, model: str, backend: Backend, card_mib: int, host_mib: int, more: int
) -> None:
    request = PlanRequest(offload=Offload.ALLOWED, drafting=Drafting.OFF)
    small, large = (
        served(planner_of(model, request, room=Room(card_mib * MIB, size * MIB), backend=backend))
        for size in (host_mib, host_mib + more)
    )
    assert total(small) <= total(large)


@settings(deadline=None)
@given(
    model=st.sampled_from(priced_models()),
    backend=st.sampled_from(CARDS),
    share=shares,
    host_mib=st.integers(0, 60_000),
)
def test_what_may_be_offloaded_never_serves_less(
    *, model: str, backend: Backend, share: int, host_mib: int
) -> None:
    room = Room(room_of(model, backend, share), host_mib * MIB)
    request = PlanRequest(drafting=Drafting.OFF)
    resident, allowed = (
        served(planner_of(model, replace(request, offload=each), room=room, backend=backend))
        for each in Offload
    )
    assert total(resident) <= total(allowed)
    if allowed is not None and not allowed.launch.layers.is_full:
        assert resident is None or resident.window_tokens < allowed.window_tokens
