"""Context checkpoints: how many a slot may hold, and what a drafter adds to each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.context_checkpoints import (
    checkpoints_of_slot,
    context_checkpoint_bytes,
    draft_copy_bytes,
)
from lllm3090d.planning.launch import Draft, Launch
from lllm3090d.planning.quote import price
from tests.unit.engine_truth import POLICY, facts_of

pytestmark = pytest.mark.unit

F16 = (CacheType.F16, CacheType.F16)
DRAFTING = "qwen3.5-27b-mtp"


def shape_of(
    facts: CheckpointFacts, context: int, parallel: int = 1, *, unified: bool = False, slot_tokens: int = 0
) -> CacheShape:
    return cache.cache_shape(
        facts,
        context_tokens=context,
        parallel=parallel,
        batch_tokens=2048,
        micro_batch_tokens=512,
        unified=unified,
        slot_tokens=slot_tokens,
    )


@pytest.mark.parametrize(
    ("limit", "window", "count"), [(8, 8192, 8), (32, 8192, 32), (0, 8192, 0), (256, 100, 99), (8, 1, 0)]
)
def test_a_slot_holds_as_many_as_it_may(limit: int, window: int, count: int) -> None:
    """Whatever the distance: the engine held 7 of 8 with 8192, and 8 of 8 with 0, after turns of 60 tokens."""
    facts = facts_of("gemma-3-270m")
    assert checkpoints_of_slot(limit, replace(shape_of(facts, 8192), window_tokens=window)) == count


def test_the_distance_does_not_change_the_price() -> None:
    facts = facts_of("gemma-3-270m")
    launch = Launch(8192, 2, *F16, 2048, 512, 8, 0)
    for step in (0, 8192, 1 << 30):
        quote = price(facts, replace(launch, checkpoint_min_step_tokens=step), Backend.CUDA, POLICY)
        assert quote == price(facts, launch, Backend.CUDA, POLICY)


def test_a_tiny_window_has_no_room_for_all_of_them() -> None:
    """No two are of the same position."""
    facts = facts_of("gemma-3-270m")
    launch = Launch(8192, 1, *F16, 2048, 512, 8, 0, slot_tokens=5)
    each = context_checkpoint_bytes(facts, launch.shape(facts), *F16)
    quote = price(facts, launch, Backend.CUDA, POLICY)
    assert quote.item("context checkpoints").bytes == 4 * each
    one = price(facts, replace(launch, slot_tokens=1), Backend.CUDA, POLICY)
    assert "context checkpoints" not in [item.name for item in one.items]


def test_a_draft_is_copied_whole() -> None:
    """A plain cache has no partial form, so each checkpoint holds all of the draft's cells: 4 KiB a token here."""
    facts = facts_of(DRAFTING)
    launch = Launch(131_072, 1, *F16, 2048, 512, 8, 0)
    plain = price(facts, launch, Backend.CUDA, POLICY).item("context checkpoints")
    drafting = price(facts, replace(launch, draft=Draft(3)), Backend.CUDA, POLICY).item(
        "context checkpoints"
    )
    assert drafting.bytes - plain.bytes == 8 * 131_072 * (4096 + 24)
    assert "of the draft's context" in drafting.formula
    assert "of the draft's context" not in plain.formula


def test_the_measured_copy_of_a_small_hybrid() -> None:
    """The engine's log: 0.691 MiB at 168 tokens and 1.524 MiB at 1796, two KV heads of 64 values in f16."""
    facts = facts_of(DRAFTING)
    (layer,) = facts.mtp_layers
    small = replace(layer, k_values=128, v_values=128)
    per_token = draft_copy_bytes(facts, (small,), shape_of(facts, 8192), shape_of(facts, 8192), F16) / 8192
    assert per_token == 512 + 24
    assert per_token == pytest.approx((1.524 - 0.691) * (1 << 20) / (1796 - 168), abs=1.0)


def test_slots_of_a_shared_pool_hold_no_more_than_the_pool() -> None:
    facts = facts_of(DRAFTING)
    layers = facts.mtp_layers

    def copied(*, unified: bool, slot_tokens: int = 0) -> int:
        shape = shape_of(facts, 32_768, 4, unified=unified, slot_tokens=slot_tokens)
        return draft_copy_bytes(facts, layers, shape, shape, F16)

    assert copied(unified=True) == copied(unified=False) == 32_768 * (4096 + 24)
    assert copied(unified=True, slot_tokens=1000) == 4000 * (4096 + 24)


def test_a_drafter_that_has_a_partial_form_adds_only_that() -> None:
    hybrid = facts_of("lfm2-1.2b")
    shape = shape_of(hybrid, 32_768, 2)
    assert draft_copy_bytes(hybrid, hybrid.context_layers, shape, shape, F16) == 2 * sum(
        4 * layer.conv_values for layer in hybrid.layers
    )
    sliding = facts_of("gemma-3-270m")
    shape = shape_of(sliding, 32_768, 2)
    rows = sum(layer.kind is LayerKind.SLIDING for layer in sliding.layers) * 2 * 256 * 2
    assert draft_copy_bytes(sliding, sliding.context_layers, shape, shape, F16) == 2 * 512 * (rows + 24)


def test_a_drafter_without_a_cache_adds_nothing() -> None:
    facts = facts_of(DRAFTING)
    shape = shape_of(facts, 8192)
    assert draft_copy_bytes(facts, (), shape, shape, F16) == 0


@given(
    window=st.integers(2, 1 << 18),
    more=st.integers(0, 1 << 18),
    slots=st.integers(1, 8),
    unified=st.booleans(),
)
def test_checkpoints_never_get_cheaper(*, window: int, more: int, slots: int, unified: bool) -> None:
    facts = facts_of(DRAFTING)

    def size(each: int, parallel: int) -> int:
        launch = Launch(each * parallel, parallel, *F16, 2048, 512, 8, 0, unified=unified, draft=Draft(2))
        return price(facts, launch, Backend.CUDA, POLICY).item("context checkpoints").bytes

    here = size(window, slots)
    assert here <= size(window + more, slots)
    assert here <= size(window, slots + 1)
