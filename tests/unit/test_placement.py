"""Weights and context by place, against the engine's dry runs with and without a stand-in card."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import Memory
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import compute, placement
from lllm3090d.planning.cache import CacheType, cache_shape
from lllm3090d.planning.placement import EVERYTHING, Placement, Split
from lllm3090d.planning.quote import Draft, Launch, Place, price
from tests.unit.engine_truth import (
    PARTIAL_CACHE_TYPES,
    POLICY,
    facts_of,
    model_names,
    partial_rows,
    priced_models,
    truth_rows,
)

pytestmark = pytest.mark.unit

TIED_TWICE = ("gemma-3n-e4b", "gemma-4-e2b", "gemma-4-26b-a4b")


@pytest.mark.parametrize("model", model_names())
def test_weights_are_where_the_engine_puts_them(model: str) -> None:
    """To the byte: alignment, the row padding of CUDA, tied outputs and blocks for drafting included."""
    for row in (row for row in truth_rows() if row.model == model and not row.refused):
        ours = placement.weights(row.facts, row.placement, row.backend)
        if row.backend is Backend.CPU:
            assert ours == Split(row.weights_host_bytes, 0), str(row)
        else:
            assert ours == Split(row.weights_card_bytes, row.weights_host_bytes), str(row)


@pytest.mark.parametrize("model", sorted({row.model for row in partial_rows()}))
def test_partial_placements_are_the_engines(model: str) -> None:
    for row in (row for row in partial_rows() if row.model == model):
        ours = placement.weights(row.facts, row.placement, row.backend)
        assert ours == Split(row.weights_card_bytes, row.weights_host_bytes), str(row)
        ours = placement.context(row.facts, row.placement, row.backend, row.shape, PARTIAL_CACHE_TYPES)
        assert ours == Split(row.context_card_bytes, row.context_host_bytes), str(row)


def test_there_are_partial_rows_enough() -> None:
    assert len({row.facts.architecture for row in partial_rows()}) >= 10
    assert {row.backend for row in partial_rows()} == {Backend.CUDA, Backend.VULKAN}
    assert any(row.expert_layers_on_host and row.layers_on_card < 30 for row in partial_rows())


def test_the_price_of_a_partial_placement_covers_the_engines_buffers() -> None:
    """Compute on the card and on the host is bounded, by a host tensor or two beside the full graph."""
    for row in partial_rows():
        launch = Launch(8192, 2, *PARTIAL_CACHE_TYPES, 2048, 512, 8, 0, layers=replace(row.placement))
        quote = price(row.facts, launch, row.backend, POLICY)
        assert quote.item("compute").bytes >= row.compute_card_bytes, str(row)
        assert quote.item("host compute").bytes >= row.compute_host_bytes, str(row)


@pytest.mark.parametrize("model", TIED_TWICE)
def test_some_models_hold_the_tied_matrix_twice_without_a_card(model: str) -> None:
    facts = facts_of(model)
    whole = placement.weights(facts, EVERYTHING, Backend.CPU).card
    assert whole - facts.weight_bytes >= facts.token_embedding_bytes
    ordinary = facts_of("gemma-3-27b")
    assert placement.weights(ordinary, EVERYTHING, Backend.CPU).card == ordinary.weight_bytes


def test_a_tied_output_is_copied_to_the_card() -> None:
    tied, untied = facts_of("smollm2-135m"), facts_of("llama-3.1-8b")
    assert tied.output_is_tied and not untied.output_is_tied
    assert placement.weights(tied, EVERYTHING, Backend.VULKAN).card == tied.weight_bytes
    expected = untied.weight_bytes - untied.token_embedding_bytes
    assert placement.weights(untied, EVERYTHING, Backend.VULKAN) == Split(
        expected, untied.token_embedding_bytes
    )


def test_blocks_for_drafting_are_loaded_only_for_it() -> None:
    facts = facts_of("qwen3.5-27b-mtp")
    without = placement.weights(facts, EVERYTHING, Backend.CUDA).card
    with_mtp = placement.weights(facts, Placement(with_mtp=True), Backend.CUDA).card
    assert round((with_mtp - without) / (1 << 20)) == 228


@pytest.mark.parametrize(
    ("model", "where", "backend", "words"),
    [
        ("llama-3.1-8b", Placement(layers_on_card=4), Backend.CPU, "without a card"),
        ("llama-3.1-8b", Placement(expert_layers_on_host=4), Backend.CUDA, "no experts"),
        ("llama-3.1-8b", Placement(with_mtp=True), Backend.CUDA, "no blocks for multi-token"),
        ("qwen3.5-27b", Placement(with_mtp=True), Backend.CPU, "no blocks for multi-token"),
    ],
)
def test_impossible_placements_are_refused(
    model: str, where: Placement, backend: Backend, words: str
) -> None:
    with pytest.raises(LlmError, match=words) as caught:
        placement.weights(facts_of(model), where, backend)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION


@pytest.mark.parametrize("where", [Placement(layers_on_card=-1), Placement(expert_layers_on_host=-1)])
def test_negative_numbers_are_a_mistake_of_the_caller(where: Placement) -> None:
    with pytest.raises(ValueError, match="negative"):
        placement.weights(facts_of("qwen3-30b-a3b"), where, Backend.CUDA)


@pytest.mark.parametrize("backend", [Backend.CUDA, Backend.VULKAN])
@given(
    model=st.sampled_from(model_names()),
    layers=st.integers(0, 100),
    experts=st.integers(0, 100),
    parallel=st.integers(1, 4),
)
def test_nothing_is_lost_between_the_places(
    *, backend: Backend, model: str, layers: int, experts: int, parallel: int
) -> None:
    """More layers on the card never leave less there, and what leaves the host is on the card."""
    facts = facts_of(model)
    moved = experts if facts.expert_count else 0
    types = (CacheType.F16, CacheType.F16)
    shape = cache_shape(
        facts, context_tokens=8192, parallel=parallel, batch_tokens=2048, micro_batch_tokens=512
    )
    here = Placement(layers_on_card=layers, expert_layers_on_host=moved)
    more = Placement(layers_on_card=layers + 1, expert_layers_on_host=moved)
    before, after = (placement.weights(facts, where, backend) for where in (here, more))
    assert before.card <= after.card
    assert before.host >= after.host
    before, after = (placement.context(facts, where, backend, shape, types) for where in (here, more))
    assert before.card <= after.card
    # States of short convolutions are rounded differently in the two memories.
    assert before.card + before.host == pytest.approx(after.card + after.host, abs=100_000)


def test_a_cache_can_stay_in_host_memory() -> None:
    facts = facts_of("llama-3.1-8b")
    shape = cache_shape(facts, context_tokens=8192, parallel=1, batch_tokens=2048, micro_batch_tokens=512)
    split = placement.context(facts, Placement(cache_on_host=True), Backend.CUDA, shape, PARTIAL_CACHE_TYPES)
    assert split == Split(0, 8192 * 32 * 2 * 1088)


@pytest.mark.parametrize("model", ["qwen3.5-27b-mtp", "glm-4.5-air", "qwen3.5-35b-a3b-mtp"])
@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA, Backend.VULKAN])
def test_drafting_is_priced_whole(model: str, backend: Backend) -> None:
    """Weights, cache, graph, copies of the state, runtime of a second context."""
    facts = facts_of(model)
    launch = Launch(32_768, 2, CacheType.Q8_0, CacheType.Q8_0, 2048, 512, 8, 0)
    plain = price(facts, launch, backend, POLICY)
    drafting = price(facts, replace(launch, draft=Draft(3)), backend, POLICY)
    names = {item.name for item in drafting.items}
    new = {"draft cache", "draft compute", "draft output buffer", "hidden states"}
    new |= set() if backend is Backend.CPU else {"draft host compute"}
    assert names - {item.name for item in plain.items} == new
    assert drafting.item("weights").bytes > plain.item("weights").bytes
    if facts.keeps_state:
        states = plain.item("recurrent state").bytes
        assert drafting.item("recurrent state").bytes == 4 * states
    if backend is not Backend.CPU:
        more = drafting.item("runtime").bytes - plain.item("runtime").bytes
        assert more == compute.SECOND_CONTEXT_BYTES


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA, Backend.VULKAN])
def test_a_draft_window_makes_only_the_draft_cheaper(backend: Backend) -> None:
    facts = facts_of("qwen3.5-27b-mtp")
    launch = Launch(262_144, 1, CacheType.Q8_0, CacheType.Q8_0, 2048, 512, 8, 0, draft=Draft(2))
    windowed = replace(launch, draft=Draft(2, window_tokens=16_384))
    whole, cut = (price(facts, each, backend, POLICY) for each in (launch, windowed))
    assert cut.item("draft cache").bytes * 262_144 == whole.item("draft cache").bytes * 20_736
    assert cut.item("draft compute").bytes < whole.item("draft compute").bytes
    assert "20736 cells" in cut.item("draft cache").formula
    # A context checkpoint holds a copy of the draft's cells.
    drafts = ("draft cache", "draft compute", "draft host compute", "context checkpoints")
    kept = [[item for item in quote.items if item.name not in drafts] for quote in (whole, cut)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("model", priced_models())
def test_the_price_has_the_engines_bytes(model: str) -> None:
    """Weights and context of a quote are those of the dry run."""
    for row in truth_rows():
        usual = row.flash_attention and not (row.refused or row.draft_context or row.mtp or row.embeddings)
        if row.model != model or not usual or row.rollback_tokens or row.backend is Backend.CPU:
            continue
        launch = Launch(
            row.context, row.parallel, *row.cache_types, row.batch, row.micro_batch, 8, 0,
            unified=row.unified, swa_full=row.swa_full,
        )  # fmt: skip
        quote = price(row.facts, launch, row.backend, POLICY)
        kept = [item.bytes for item in quote.items if item.name in ("kv cache", "recurrent state")]
        assert sum(kept) == row.context_bytes, str(row)
        assert quote.item("weights").bytes == row.weights_card_bytes
        assert quote.item("weights").place is Place.CARD


@pytest.mark.parametrize(
    ("backend", "memory"),
    [
        (Backend.CPU, Memory.HOST),
        (Backend.CUDA, Memory.CUDA),
        (Backend.VULKAN, Memory.VULKAN),
        (Backend.SYCL, Memory.CUDA),
    ],
)
def test_buffers_of_a_backend(backend: Backend, memory: Memory) -> None:
    assert placement.memory_of(backend) is memory
