"""Graphs, runtimes and host memory: the terms beside weights and cache, against the engine's dry runs."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from lllm3090d.checkpoints.facts import CheckpointFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import compute
from lllm3090d.planning.cache import CacheShape, CacheType, cache_shape
from lllm3090d.planning.units import MIB
from tests.unit.engine_truth import TruthRow, facts_of, priced_models, truth_rows

pytestmark = pytest.mark.unit

# Rows whose graph we have a formula for, as a launch has them.
GRAPH_ROWS = tuple(
    row
    for row in truth_rows()
    if row.model in priced_models()
    and row.flash_attention
    and not (row.refused or row.draft_context or row.embeddings)
)
DRAFT_ROWS = tuple(row for row in truth_rows() if row.draft_context and row.flash_attention)


def graph_bytes(row: TruthRow) -> int:
    facts, shape, types, outputs = row.facts, row.shape, row.cache_types, row.graph_outputs
    if row.backend is Backend.CPU:
        return compute.cpu_compute_bytes(facts, shape, *types, outputs=outputs)
    return compute.card_compute_bytes(facts, shape, *types, row.backend, outputs=outputs)


def engine_bytes(row: TruthRow) -> int:
    return row.compute_host_bytes if row.backend is Backend.CPU else row.compute_card_bytes


def test_there_are_rows_enough() -> None:
    assert len(GRAPH_ROWS) > 1500
    assert {row.model for row in GRAPH_ROWS} == set(priced_models())
    assert len({row.model for row in DRAFT_ROWS}) == 3


@pytest.mark.parametrize("model", priced_models())
def test_the_graph_is_never_short_once_the_margin_is_added(model: str) -> None:
    """And it is never half as much again: lfm2 on the CPU reuses the masks for its logits."""
    for row in (row for row in GRAPH_ROWS if row.model == model):
        formula, engine = graph_bytes(row), engine_bytes(row)
        charged = formula + compute.compute_margin_bytes(row.facts, row.shape, formula)
        assert engine <= charged <= 1.6 * engine, f"{row}: {charged} for {engine}"


def test_the_formula_is_close_to_the_engine() -> None:
    errors = sorted(graph_bytes(row) / engine_bytes(row) - 1 for row in GRAPH_ROWS)
    assert abs(statistics.median(errors)) < 0.0005
    assert errors[len(errors) // 20] > -0.03
    assert errors[-len(errors) // 20] < 0.06


@pytest.mark.parametrize("model", priced_models())
def test_the_pinned_part_of_the_graph(model: str) -> None:
    """Pinned memory is within half a per cent of the engine's."""
    for row in (row for row in GRAPH_ROWS if row.model == model and row.backend is not Backend.CPU):
        ours = compute.host_compute_bytes(row.facts, row.shape, *row.cache_types)
        assert 0.995 * row.compute_host_bytes <= ours <= row.compute_host_bytes * 1.0005, str(row)


def test_the_graph_of_a_draft_is_bounded() -> None:
    """The bound is never short and at most half as much again."""
    for row in DRAFT_ROWS:
        bound = compute.draft_compute_bytes(row.facts, row.shape, *row.cache_types, row.backend)
        assert engine_bytes(row) <= bound <= 1.55 * engine_bytes(row), str(row)


def test_an_encoder_that_nobody_has_compared_is_not_priced() -> None:
    facts = replace(facts_of("bge-large-en"), architecture="modern-bert")
    with pytest.raises(LlmError, match="cannot be priced") as caught:
        compute.cpu_compute_bytes(facts, shape_of(facts, 512), CacheType.F16, CacheType.F16)
    assert caught.value.code is ErrorCode.UNSUPPORTED_ARCHITECTURE


def shape_of(facts: CheckpointFacts, context: int, parallel: int = 1) -> CacheShape:
    return cache_shape(
        facts, context_tokens=context, parallel=parallel, batch_tokens=2048, micro_batch_tokens=512
    )


def test_each_slot_gets_the_same_number_of_tokens() -> None:
    facts = facts_of("qwen3-8b")
    assert compute.graph_tokens(shape_of(facts, 8192)) == 512
    assert compute.graph_tokens(shape_of(facts, 12_288, 3)) == 513


def test_only_cuda_copies_a_cache_that_is_not_f16() -> None:
    """One layer's K and V at two bytes, once: 4 KiB per token for a model with 1024 + 1024 values."""
    facts = facts_of("llama-3.1-8b")
    shape = shape_of(facts, 32_768)

    def copies(type_k: CacheType, type_v: CacheType, backend: Backend = Backend.CUDA) -> int:
        return compute.f16_copies_bytes(facts, shape, type_k, type_v, backend)

    assert copies(CacheType.Q8_0, CacheType.Q8_0) == 4096 * 32_768
    assert copies(CacheType.Q8_0, CacheType.Q8_0) == copies(CacheType.Q4_0, CacheType.Q4_0)
    assert copies(CacheType.F16, CacheType.Q8_0) == copies(CacheType.Q8_0, CacheType.F16) == 2048 * 32_768
    assert copies(CacheType.F16, CacheType.F16) == 0
    assert copies(CacheType.Q8_0, CacheType.Q8_0, Backend.VULKAN) == 0


def test_rotation_needs_heads_of_64() -> None:
    """A head of 96 values is quantised without rotation, so its inputs are the mask alone."""
    facts = facts_of("llama-3.1-8b")
    layers = tuple(
        replace(layer, key_length=96, value_length=96, k_values=768, v_values=768) for layer in facts.layers
    )
    odd = replace(facts, layers=layers)
    shape = shape_of(odd, 4096)
    plain = compute.mask_bytes(odd, shape, CacheType.F16, CacheType.F16)
    assert plain == 4096 * 512 * 2
    assert compute.mask_bytes(odd, shape, CacheType.Q8_0, CacheType.Q8_0) == plain
    rotated = compute.mask_bytes(facts, shape, CacheType.Q8_0, CacheType.Q8_0)
    assert rotated == plain + 128 * 128 * 4 + 64 * 64 * 4


def test_the_servers_outputs_not_those_of_fit_params() -> None:
    facts = facts_of("gemma-3-270m")
    assert compute.logits_bytes(facts, 1) == 262_144 * 4
    assert compute.logits_bytes(facts, 4) == compute.output_buffer_bytes(facts, 4) == 4 * 262_144 * 4


@pytest.mark.parametrize(("backend", "mib"), [(Backend.CPU, 0), (Backend.VULKAN, 410), (Backend.CUDA, 640)])
def test_runtimes(backend: Backend, mib: int) -> None:
    assert compute.runtime_bytes(backend) == mib * MIB


@pytest.mark.parametrize("backend", [Backend.SYCL, Backend.METAL, Backend.UNKNOWN])
def test_a_backend_nobody_measured_is_refused(backend: Backend) -> None:
    with pytest.raises(LlmError, match=str(backend)) as caught:
        compute.runtime_bytes(backend)
    assert caught.value.code is ErrorCode.ENGINE_UNUSABLE


def test_slack_is_larger_for_a_long_context() -> None:
    assert compute.slack_bytes(65_535) == 128 * MIB
    assert compute.slack_bytes(65_536) == 512 * MIB


def test_the_workspace_floor_charges_only_the_difference() -> None:
    assert compute.workspace_missing_bytes(1000 * MIB, 1024) == 24 * MIB
    assert compute.workspace_missing_bytes(1024 * MIB, 1024) == 0
    assert compute.workspace_missing_bytes(3000 * MIB, 1024) == 0
