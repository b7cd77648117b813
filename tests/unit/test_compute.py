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
from tests.unit.engine_truth import TruthRow, facts_of, model_names, truth_rows
from tests.unit.test_cache import row_name

pytestmark = pytest.mark.unit

WEIGHT_PADDING_BYTES = MIB // 8  # CUDA rounds quantised rows up to 512 values
SERVER_ROWS = tuple(row for row in truth_rows() if row.outputs == row.parallel)
CARD_ROWS = tuple(row for row in SERVER_ROWS if row.backend is not Backend.CPU)


def graph_bytes(row: TruthRow) -> int:
    if row.backend is Backend.CPU:
        return compute.cpu_compute_bytes(row.facts, row.shape, row.cache_type_k, row.cache_type_v)
    return compute.card_compute_bytes(row.facts, row.shape, row.cache_type_k, row.cache_type_v, row.backend)


def engine_bytes(row: TruthRow) -> int:
    return row.compute_host_bytes if row.backend is Backend.CPU else row.compute_card_bytes


def test_there_are_rows_with_the_servers_outputs() -> None:
    assert {row.model for row in CARD_ROWS} == set(model_names())
    assert {row.parallel for row in SERVER_ROWS} >= {1, 4}
    assert any(row.backend is Backend.CPU for row in SERVER_ROWS)


@pytest.mark.parametrize("row", SERVER_ROWS, ids=row_name)
def test_the_graph_is_never_short_once_the_margin_is_added(row: TruthRow) -> None:
    """And the formula alone is within 6 % below and never above the engine."""
    formula, engine = graph_bytes(row), engine_bytes(row)
    assert 0.94 * engine <= formula <= engine
    charged = formula + compute.compute_margin_bytes(row.facts, row.shape, formula)
    assert engine <= charged <= 1.3 * engine


def test_the_formula_is_close_to_the_engine() -> None:
    errors = [graph_bytes(row) / engine_bytes(row) - 1 for row in SERVER_ROWS]
    assert abs(statistics.median(errors)) < 0.0005


@pytest.mark.parametrize("row", CARD_ROWS, ids=row_name)
def test_the_pinned_part_of_the_graph(row: TruthRow) -> None:
    """Pinned memory is within half a per cent of the engine's."""
    ours = compute.host_compute_bytes(row.facts, row.shape, row.cache_type_k, row.cache_type_v)
    assert 0.995 * row.compute_host_bytes <= ours <= row.compute_host_bytes


@pytest.mark.parametrize("row", truth_rows(), ids=row_name)
def test_weights_are_where_the_engine_puts_them(row: TruthRow) -> None:
    if row.backend is Backend.CPU:
        assert row.facts.weight_bytes == row.model_host_bytes
        return
    padding = WEIGHT_PADDING_BYTES if row.backend is Backend.CUDA else 0
    assert 0 <= row.model_card_bytes - compute.weights_on_card_bytes(row.facts) <= padding
    assert row.model_host_bytes == row.facts.token_embedding_bytes


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
    layers = tuple(replace(layer, key_length=96, k_values=768, v_values=768) for layer in facts.layers)
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


def test_a_tied_output_is_copied_to_the_card() -> None:
    tied, untied = facts_of("smollm2-135m"), facts_of("llama-3.1-8b")
    assert tied.output_is_tied and not untied.output_is_tied
    assert compute.weights_on_card_bytes(tied) == tied.weight_bytes
    assert compute.weights_on_card_bytes(untied) == untied.weight_bytes - untied.token_embedding_bytes
