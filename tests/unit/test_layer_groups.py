"""Kinds of layers in place of layers: the same bytes, and facts that are found again by what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import Memory
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, placement
from lllm3090d.planning.cache import CacheType, cache_shape
from lllm3090d.planning.layer_groups import (
    all_groups,
    context_groups,
    context_groups_from,
    mtp_groups,
    trunk_groups,
)
from lllm3090d.planning.placement import Placement
from tests.unit.engine_truth import facts_of, model_names
from tests.unit.plans import DRAFTING, LLAMA_8B, SMOLLM2

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("model", model_names())
def test_every_layer_is_in_one_group(model: str) -> None:
    facts = facts_of(model)
    for groups, layers in (
        (all_groups(facts), facts.layers),
        (trunk_groups(facts), facts.trunk),
        (mtp_groups(facts), facts.mtp_layers),
        (context_groups(facts), facts.context_layers),
    ):
        assert sum(group.count for group in groups) == len(layers)
        for group in groups:
            alike = [layer for layer in layers if replace(layer, weights=group.layer.weights) == group.layer]
            assert len(alike) == group.count
    assert len(all_groups(facts)) < len(facts.layers)


@given(
    model=st.sampled_from(model_names()),
    context=st.integers(2, 300_000),
    parallel=st.integers(1, 5),
    types=st.tuples(st.sampled_from(CacheType), st.sampled_from(CacheType)),
    backend=st.sampled_from([Backend.CPU, Backend.CUDA, Backend.VULKAN]),
    first=st.integers(0, 80),
)
def test_groups_have_the_bytes_of_their_layers(
    *,
    model: str,
    context: int,
    parallel: int,
    types: tuple[CacheType, CacheType],
    backend: Backend,
    first: int,
) -> None:
    facts = facts_of(model)
    shape = cache_shape(
        facts,
        context_tokens=context + parallel,
        parallel=parallel,
        batch_tokens=2048,
        micro_batch_tokens=512,
        rollback_tokens=3,
    )
    where = Placement(layers_on_card=max(0, len(facts.layers) + 1 - first))
    sizes = {True: 0, False: 0}
    for index, layer in enumerate(facts.layers):
        if layer.in_main_context:
            memory = placement.memory_of(backend) if index >= first else Memory.HOST
            size = cache.layer_kv_bytes(facts, layer, shape, types, memory=memory)
            if not layer.is_mtp:
                size += cache.layer_state_bytes(layer, shape, memory=memory)
            sizes[index >= first] += size
    split = placement.context(facts, where, backend, shape, types)
    if backend is Backend.CPU:
        assert (split.card, split.host) == (sum(sizes.values()), 0)
    else:
        assert (split.card, split.host) == (sizes[True], sizes[False])
    behind, before = context_groups_from(facts, first)
    together = sum(group.count for group in (*behind, *before))
    assert together == len(facts.context_layers)


def test_facts_are_told_apart_by_their_values_and_found_by_them() -> None:
    """The hash looks at a few fields; what is remembered of facts is that of equal ones alone."""
    facts = facts_of(LLAMA_8B)
    again = replace(facts)
    assert again is not facts
    assert (again, hash(again)) == (facts, hash(facts))
    assert trunk_groups(again) is trunk_groups(facts)
    wider = replace(facts, layers=tuple(replace(layer, k_values=2048) for layer in facts.layers))
    assert hash(wider) == hash(facts)
    assert wider != facts
    assert trunk_groups(wider)[0].layer.k_values == 2048
    assert trunk_groups(facts)[0].layer.k_values == 1024
    assert len({hash(facts_of(model)) for model in model_names()}) == len(model_names())


def test_weights_are_remembered_by_placement_and_backend() -> None:
    facts = facts_of(DRAFTING)
    kinds = [
        (where, backend)
        for where in (Placement(), Placement(9))
        for backend in (Backend.CUDA, Backend.VULKAN)
    ]
    found = [placement.weights(facts, where, backend) for where, backend in kinds]
    assert len(set(found)) == len(kinds)
    assert [placement.weights(replace(facts), where, backend) for where, backend in kinds] == found
    other = facts_of(SMOLLM2)
    assert placement.weights(other, Placement(), Backend.CUDA) not in found
