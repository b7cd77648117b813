"""The KV cache: cells and bytes as the engine lays them out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerKind
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning import cache
from lllm3090d.planning.cache import CacheShape, CacheType
from lllm3090d.planning.context_checkpoints import context_checkpoint_bytes
from lllm3090d.planning.placement import memory_of
from tests.unit.engine_truth import TruthRow, facts_of, model_names, truth_rows

pytestmark = pytest.mark.unit

CUDA_PADDING_BYTES = 40_000  # rows of quantised tensors that are rounded up to 512 values
SMOLLM2 = "smollm2-135m"
GEMMA_270M = "gemma-3-270m"
GEMMA_27B = "gemma-3-27b"
DRAFTING = "qwen3.5-27b-mtp"


def shape_of(facts: CheckpointFacts, context: int, parallel: int = 1, micro_batch: int = 512) -> CacheShape:
    return cache.cache_shape(
        facts,
        context_tokens=context,
        parallel=parallel,
        batch_tokens=max(2048, micro_batch),
        micro_batch_tokens=micro_batch,
    )


def test_the_engine_told_us_enough() -> None:
    """The truth holds what it should: the tests below cannot pass by being empty."""
    assert len(truth_rows()) == 1822
    encoders = {"embeddinggemma-300m", "nomic-embed-text-v1.5", "bge-large-en"}
    seen = {(row.model, row.backend) for row in truth_rows()}
    backends = (Backend.CPU, Backend.CUDA, Backend.VULKAN)
    assert seen >= {(model, backend) for model in set(model_names()) - encoders for backend in backends}
    assert len({facts_of(model).architecture for model in model_names()}) == 23
    assert sum(row.refused for row in truth_rows()) == 2
    for flag in ("unified", "swa_full", "draft_context", "rollback_tokens", "mtp"):
        assert any(getattr(row, flag) for row in truth_rows()), flag
    assert not all(row.flash_attention for row in truth_rows())


def context_of(row: TruthRow) -> int:
    """Our figure for the row."""
    make = cache.draft_context_bytes if row.draft_context else cache.context_bytes
    memory = memory_of(row.backend)
    return make(row.facts, row.shape, *row.cache_types, memory=memory, flash_attention=row.flash_attention)


@pytest.mark.parametrize("model", model_names())
def test_cells_and_bytes_are_the_engines(model: str) -> None:
    """Context and split, and the bytes of the context, the padding of CUDA included, are equal."""
    for row in truth_rows():
        if row.model == model and not row.refused:
            assert (row.shape.context_tokens, row.shape.stream_cells) == (row.n_ctx, row.n_ctx_seq), str(row)
            assert context_of(row) == row.context_bytes, str(row)


def test_what_the_engine_refuses_is_refused_and_nothing_else() -> None:
    for row in truth_rows():
        facts, types = row.facts, row.cache_types
        if row.refused:
            with pytest.raises(LlmError, match="latent attention") as caught:
                cache.check_cache_types(facts, *types, flash_attention=row.flash_attention)
            assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
        else:
            cache.check_cache_types(facts, *types, flash_attention=row.flash_attention)


def test_without_a_card_padding_nobody_pads() -> None:
    """What CUDA adds to a cache is below 40 kB, and nothing where rows are whole."""
    for row in truth_rows():
        if row.backend is Backend.CUDA and not row.draft_context:
            host = cache.context_bytes(
                row.facts, row.shape, *row.cache_types, flash_attention=row.flash_attention
            )
            assert 0 <= row.context_bytes - host <= CUDA_PADDING_BYTES


def test_a_quantised_v_needs_flash_attention() -> None:
    facts = facts_of("llama-3.1-8b")
    cache.check_cache_types(facts, CacheType.Q8_0, CacheType.F16, flash_attention=False)
    with pytest.raises(LlmError, match="without flash attention"):
        cache.check_cache_types(facts, CacheType.F16, CacheType.Q8_0, flash_attention=False)


def test_a_draft_context_needs_blocks_for_it() -> None:
    facts = facts_of("llama-3.1-8b")
    with pytest.raises(LlmError, match="cannot draft for itself") as caught:
        cache.draft_context_bytes(facts, shape_of(facts, 8192), CacheType.F16, CacheType.F16)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION


@pytest.mark.parametrize(
    ("window", "batch", "slots", "unified", "context", "cells"),
    [
        (16_384, 2048, 1, False, 262_144, 20_736),
        (16_384, 1024, 1, False, 262_144, 18_688),
        (16_384, 2048, 3, False, 262_144, 20_736),
        (16_384, 2048, 3, True, 262_144, 3 * 20_736),
        (1, 256, 1, False, 8192, 1024),  # 1 + 2 x 256 + 256, padded
        (0, 2048, 1, False, 8192, 8192),
        (4096, 2048, 1, False, 8192, 8192),  # no smaller than the main context
    ],
)
def test_a_draft_window(
    *, window: int, batch: int, slots: int, unified: bool, context: int, cells: int
) -> None:
    """Cells of a stream of the draft context; all slots together in a shared pool."""
    facts = facts_of(DRAFTING)
    shape = cache.cache_shape(
        facts,
        context_tokens=context,
        parallel=slots,
        batch_tokens=batch,
        micro_batch_tokens=min(512, batch),
        unified=unified,
    )
    draft = cache.draft_shape(shape, window_tokens=window, batch_tokens=batch)
    assert draft.stream_cells == cells
    assert draft.context_tokens == cells * draft.streams
    assert draft.streams == shape.streams
    kept = cache.draft_context_bytes(facts, draft, CacheType.Q8_0, CacheType.Q8_0)
    assert kept == draft.context_tokens * 2176 * len(facts.mtp_layers)


@given(
    model=st.sampled_from([name for name in model_names() if facts_of(name).has_mtp]),
    context=st.integers(1, 1 << 18),
    more=st.integers(0, 1 << 18),
    slots=st.integers(1, 8),
    window=st.integers(1, 1 << 16),
    batch=st.integers(9, 4096),  # a token for each slot at least
    unified=st.booleans(),
)
def test_a_draft_context_never_shrinks(
    *, model: str, context: int, more: int, slots: int, window: int, batch: int, unified: bool
) -> None:
    """As context, slots or window grow; and a window never costs more than none."""
    facts = facts_of(model)

    def draft_bytes(each: int, parallel: int, window_tokens: int) -> int:
        shape = cache.cache_shape(
            facts,
            context_tokens=each * parallel,
            parallel=parallel,
            batch_tokens=batch,
            micro_batch_tokens=512,
            unified=unified,
        )
        draft = cache.draft_shape(shape, window_tokens=window_tokens, batch_tokens=batch)
        return cache.draft_context_bytes(facts, draft, CacheType.F16, CacheType.Q8_0)

    here = draft_bytes(context, slots, window)
    assert 0 < here <= draft_bytes(context, slots, 0)
    assert here <= draft_bytes(context + more, slots, window)
    assert here <= draft_bytes(context, slots, window + more)
    assert here <= draft_bytes(context, slots + 1, window)


@pytest.mark.parametrize(("swa_full", "cells"), [(False, 1536), (True, 20_736)])
def test_sliding_blocks_in_a_windowed_draft_context(swa_full: bool, cells: int) -> None:
    """Their own window is the shorter one, unless they keep everything."""
    facts = facts_of(DRAFTING)
    slides = tuple(replace(layer, kind=LayerKind.SLIDING) for layer in facts.mtp_layers)
    facts = replace(facts, layers=(*facts.trunk, *slides), sliding_window_tokens=1024)
    shape = cache.cache_shape(
        facts,
        context_tokens=262_144,
        parallel=1,
        batch_tokens=2048,
        micro_batch_tokens=512,
        swa_full=swa_full,
    )
    draft = cache.draft_shape(shape, window_tokens=16_384, batch_tokens=2048)
    assert draft.cells(LayerKind.SLIDING) == cells


def test_a_draft_window_cannot_be_negative() -> None:
    shape = shape_of(facts_of(DRAFTING), 8192)
    for window, batch in ((-1, 512), (4096, 0)):
        with pytest.raises(ValueError, match="not negative"):
            cache.draft_shape(shape, window_tokens=window, batch_tokens=batch)


@pytest.mark.parametrize(
    ("model", "mib"),
    [
        ("qwen3.5-27b", 149.62),
        ("qwen3.5-35b-a3b-mtp", 62.81),
        ("qwen3-next-80b-a3b", 75.38),
        ("lfm2-1.2b", 0.16),
        ("nemotron-nano-9b-v2", 138.80),
        ("granite-4.0-h-tiny", 55.37),
        ("mamba-codestral-7b", 263.50),
    ],
)
def test_states_cost_the_same_at_every_context(model: str, mib: float) -> None:
    """MiB per slot; also the size of a context checkpoint, which holds one sequence without its copies."""
    facts = facts_of(model)
    for context in (4096, 65_536):
        shape = shape_of(facts, context)
        assert cache.state_bytes(facts, shape) / (1 << 20) == pytest.approx(mib, abs=0.01)
        checkpoint = context_checkpoint_bytes(facts, shape, CacheType.F16, CacheType.F16)
        assert checkpoint == cache.state_bytes(facts, shape)
    two = cache.cache_shape(
        facts, context_tokens=8192, parallel=2, batch_tokens=2048, micro_batch_tokens=512, rollback_tokens=3
    )
    planes = 4 if facts.rolls_back else 1
    assert cache.state_bytes(facts, two) == 2 * planes * cache.state_bytes(facts, shape_of(facts, 8192))


def test_a_shared_pool_is_not_cut() -> None:
    """One stream of the whole context; sliding layers keep the windows of all slots and one batch."""
    facts = facts_of(GEMMA_27B)

    def shape(**options: bool) -> CacheShape:
        return cache.cache_shape(
            facts, context_tokens=32_768, parallel=4, batch_tokens=2048, micro_batch_tokens=512, **options
        )

    unified, split = shape(unified=True), shape()
    assert (unified.streams, unified.slots, unified.stream_cells) == (1, 4, 32_768)
    assert unified.window_tokens == 4 * split.window_tokens
    assert (unified.sliding_cells, 4 * split.sliding_cells) == (4608, 6144)
    assert shape(swa_full=True).sliding_cells == 8192


@pytest.mark.parametrize(
    ("context", "parallel", "n_ctx", "stream"),
    [
        (1, 1, 256, 256),
        (256, 1, 256, 256),
        (257, 1, 512, 512),
        (1000, 4, 1024, 256),
        (10_000, 3, 10_752, 3584),
        (8192, 2, 8192, 4096),
        (100, 3, 768, 256),
    ],
)
def test_padding(context: int, parallel: int, n_ctx: int, stream: int) -> None:
    """Each slot gets its share of the context, padded up to 256 cells."""
    shape = shape_of(facts_of(SMOLLM2), context, parallel)
    assert (shape.context_tokens, shape.stream_cells, shape.streams) == (n_ctx, stream, parallel)


@given(context=st.integers(cache.MAX_SLOTS, 1 << 24), parallel=st.integers(1, cache.MAX_SLOTS))
def test_a_padded_context_stays_as_it_is(context: int, parallel: int) -> None:
    """What the engine makes of a padded context is that context: a plan can state it before the launch."""
    facts = facts_of(GEMMA_27B)
    padded = shape_of(facts, context, parallel).context_tokens
    assert shape_of(facts, padded, parallel).context_tokens == padded >= context
    assert padded % parallel == 0


def test_the_micro_batch_is_limited_by_the_context_as_given() -> None:
    assert shape_of(facts_of(SMOLLM2), 300).micro_batch_tokens == 300
    assert shape_of(facts_of(SMOLLM2), 4096, micro_batch=1024).micro_batch_tokens == 1024
    small_batch = cache.cache_shape(
        facts_of(SMOLLM2), context_tokens=4096, parallel=1, batch_tokens=128, micro_batch_tokens=512
    )
    assert small_batch.micro_batch_tokens == 128


def test_a_window_is_never_longer_than_the_model_was_trained() -> None:
    assert shape_of(facts_of(SMOLLM2), 16_384).window_tokens == 8192
    odd = replace(facts_of(SMOLLM2), trained_context_tokens=5000)
    assert shape_of(odd, 5000).window_tokens == 5000
    assert shape_of(odd, 5000).context_tokens == 5120


@pytest.mark.parametrize(
    ("context", "parallel", "micro_batch", "cells"),
    [
        (32_768, 1, 512, 1536),  # window 1024 and one micro batch
        (32_768, 4, 512, 1536),  # the same for every stream
        (32_768, 1, 2048, 3072),  # grows with the micro batch
        (32_768, 1, 300, 1536),  # padded up to 256
        (1024, 1, 512, 1024),  # never more than the stream
    ],
)
def test_sliding_layers_keep_their_window(context: int, parallel: int, micro_batch: int, cells: int) -> None:
    shape = shape_of(facts_of(GEMMA_27B), context, parallel, micro_batch)
    assert shape.sliding_cells == cells
    assert shape.cells(LayerKind.SLIDING) == cells
    assert shape.cells(LayerKind.FULL) == context // parallel


def test_models_without_sliding_layers_have_no_sliding_cells() -> None:
    assert shape_of(facts_of("llama-3.1-8b"), 4096).sliding_cells == 0


@pytest.mark.parametrize(
    ("cache_type", "expected"),
    [
        (CacheType.F32, 4096),
        (CacheType.F16, 2048),
        (CacheType.BF16, 2048),
        (CacheType.Q8_0, 1088),
        (CacheType.Q5_1, 768),
        (CacheType.Q5_0, 704),
        (CacheType.Q4_1, 640),
        (CacheType.Q4_0, 576),
        (CacheType.IQ4_NL, 576),
    ],
)
def test_rows_of_every_type(cache_type: CacheType, expected: int) -> None:
    """1024 values, which is one K row of an 8B Llama."""
    assert cache_type.row_bytes(1024) == expected
    facts = facts_of("llama-3.1-8b")
    shape = shape_of(facts, 8192)
    for other in CacheType:
        mixed = cache.kv_cache_bytes(facts, shape, cache_type, other)
        assert mixed == 32 * 8192 * (expected + other.row_bytes(1024))


@given(
    model=st.sampled_from(model_names()),
    context=st.integers(1, 1 << 20),
    more=st.integers(0, 1 << 20),
    slots=st.integers(1, 16),
    types=st.tuples(st.sampled_from(CacheType), st.sampled_from(CacheType)),
    unified=st.booleans(),
    swa_full=st.booleans(),
    rollback=st.integers(0, 4),
)
def test_more_context_slots_or_window_never_cost_less(
    *,
    model: str,
    context: int,
    more: int,
    slots: int,
    types: tuple[CacheType, CacheType],
    unified: bool,
    swa_full: bool,
    rollback: int,
) -> None:
    """Slots are compared at the same window, one slot and several."""
    facts = facts_of(model)

    def context_bytes(window: int, parallel: int, of: CheckpointFacts = facts) -> int:
        shape = cache.cache_shape(
            of,
            context_tokens=window * parallel,
            parallel=parallel,
            batch_tokens=2048,
            micro_batch_tokens=512,
            unified=unified,
            swa_full=swa_full,
            rollback_tokens=rollback,
        )
        return cache.context_bytes(of, shape, *types)

    here = context_bytes(context, slots)
    assert here <= context_bytes(context + more, slots)
    assert here <= context_bytes(context, slots + 1)
    assert (here == 0) is not facts.keeps_context
    if facts.sliding_window_tokens:
        wider = replace(facts, sliding_window_tokens=facts.sliding_window_tokens + more)
        assert here <= context_bytes(context, slots, wider)


def test_context_checkpoints_are_those_measured() -> None:
    """The engine reported 3.991 MiB for Gemma-3-270M at q8_0, and about 221 MiB for the 27B."""
    small, large = facts_of(GEMMA_270M), facts_of(GEMMA_27B)
    size = context_checkpoint_bytes(small, shape_of(small, 8192), CacheType.Q8_0, CacheType.Q8_0)
    assert size == 512 * (15 * 544 + 12)
    assert size / (1 << 20) == pytest.approx(3.991, abs=0.002)
    size = context_checkpoint_bytes(large, shape_of(large, 8192), CacheType.Q8_0, CacheType.Q8_0)
    assert size / (1 << 20) == pytest.approx(221, abs=0.5)


def test_models_without_a_window_make_no_checkpoints() -> None:
    facts = facts_of("qwen3-8b")
    assert context_checkpoint_bytes(facts, shape_of(facts, 8192), CacheType.F16, CacheType.F16) == 0


def with_heads(facts: CheckpointFacts, key_length: int, value_length: int) -> CheckpointFacts:
    layers = tuple(
        replace(
            layer,
            key_length=key_length,
            value_length=value_length,
            k_values=2 * key_length,
            v_values=2 * value_length,
        )
        for layer in facts.layers
    )
    return replace(facts, layers=layers)


@pytest.mark.parametrize(
    ("key_length", "value_length", "type_k", "type_v", "side"),
    [
        (80, 80, CacheType.Q8_0, CacheType.F16, "K"),
        (80, 80, CacheType.F16, CacheType.Q4_0, "V"),
        (96, 80, CacheType.IQ4_NL, CacheType.Q8_0, "V"),
    ],
)
def test_heads_that_are_no_whole_blocks_are_refused(
    key_length: int, value_length: int, type_k: CacheType, type_v: CacheType, side: str
) -> None:
    facts = with_heads(facts_of("llama-3.1-8b"), key_length, value_length)
    with pytest.raises(LlmError, match=f"The {side} cache cannot be") as caught:
        cache.check_cache_types(facts, type_k, type_v)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert caught.value.hint is not None and "f16" in caught.value.hint
    assert caught.value.details["head_values"] == 80


@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.F16, CacheType.BF16])
def test_types_without_blocks_suit_every_head(cache_type: CacheType) -> None:
    cache.check_cache_types(with_heads(facts_of("llama-3.1-8b"), 80, 72), cache_type, cache_type)


@pytest.mark.parametrize("model", model_names())
@pytest.mark.parametrize("cache_type", CacheType)
def test_the_truth_models_take_every_type(model: str, cache_type: CacheType) -> None:
    cache.check_cache_types(facts_of(model), cache_type, cache_type)


def test_more_slots_than_the_engine_has_are_refused() -> None:
    with pytest.raises(LlmError, match="at most 256") as caught:
        shape_of(facts_of(SMOLLM2), 1 << 20, 257)
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert shape_of(facts_of(SMOLLM2), 1 << 20, 256).streams == 256


@pytest.mark.parametrize(
    ("context", "parallel", "batch"),
    [(3, 4, 2048), (1, 2, 2048), (255, 256, 2048), (8192, 4, 3), (0, 4, 2)],
)
@pytest.mark.parametrize("unified", [False, True])
def test_slots_without_a_token_each_are_refused(
    *, context: int, parallel: int, batch: int, unified: bool
) -> None:
    """The engine's own assertion ends it there: a token of every slot is computed at once."""
    with pytest.raises(LlmError, match="less than one for each") as caught:
        cache.cache_shape(
            facts_of(SMOLLM2),
            context_tokens=context,
            parallel=parallel,
            batch_tokens=batch,
            micro_batch_tokens=512,
            unified=unified,
        )
    assert caught.value.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert caught.value.hint is not None and str(parallel) in caught.value.hint
    assert caught.value.details["largest_parallel"] == min(context or 8192, batch)


@pytest.mark.parametrize(
    ("context", "parallel", "unified", "n_ctx", "stream"),
    [
        (1, 1, False, 256, 256),
        (2, 2, True, 256, 256),
        (4, 4, False, 1024, 256),
        (5, 4, False, 1024, 256),
        (7, 4, True, 256, 256),
        (256, 256, False, 65_536, 256),
        (300, 256, True, 512, 512),
        (0, 1, False, 8192, 8192),
        (0, 3, False, 8448, 2816),
        (0, 3, True, 8192, 8192),
        (None, 3, False, 8448, 2816),
    ],
)
def test_the_least_contexts_and_the_trained_one(
    *, context: int | None, parallel: int, unified: bool, n_ctx: int, stream: int
) -> None:
    """As the engine's dry run has them; 0 is the trained length, and so is an option that is left out."""
    shape = cache.cache_shape(
        facts_of(SMOLLM2),
        context_tokens=context,
        parallel=parallel,
        batch_tokens=2048,
        micro_batch_tokens=512,
        unified=unified,
    )
    assert (shape.context_tokens, shape.stream_cells) == (n_ctx, stream)
    assert shape.micro_batch_tokens == min(512, context or 8192)


@pytest.mark.parametrize(
    ("context", "parallel", "slot", "unified", "n_ctx", "window"),
    [
        (None, 2, 1000, False, 2048, 1000),
        (None, 2, 1000, True, 2048, 1000),
        (0, 2, 1000, False, 8192, 1000),  # 0 given is the trained length, not the product
        (4096, 3, 2000, True, 4096, 2000),
        (100, 1, 300, False, 256, 256),  # beyond the pool it has no effect
        (None, 1, 1 << 20, False, 1 << 20, 8192),  # never longer than trained
    ],
)
def test_a_window_of_a_slot(
    *, context: int | None, parallel: int, slot: int, unified: bool, n_ctx: int, window: int
) -> None:
    """As llama-server reports n_ctx and n_ctx_slot for --kv-unified-per-slot."""
    shape = cache.cache_shape(
        facts_of(SMOLLM2),
        context_tokens=context,
        parallel=parallel,
        batch_tokens=2048,
        micro_batch_tokens=512,
        unified=unified,
        slot_tokens=slot,
    )
    assert (shape.context_tokens, shape.window_tokens) == (n_ctx, window)


@pytest.mark.parametrize(
    "wrong",
    [
        {"context_tokens": -5},
        {"parallel": 0},
        {"parallel": -1},
        {"batch_tokens": 0},
        {"micro_batch_tokens": -1},
        {"rollback_tokens": -1},
        {"slot_tokens": -1},
        {"context_tokens": 1 << 31},
        {"context_tokens": None, "slot_tokens": 1 << 30, "parallel": 4},
    ],
)
def test_numbers_that_no_option_can_have_are_a_mistake_of_the_caller(wrong: dict[str, int | None]) -> None:
    numbers = {
        "context_tokens": 4096,
        "parallel": 1,
        "batch_tokens": 2048,
        "micro_batch_tokens": 512,
        **wrong,
    }
    with pytest.raises(ValueError, match=r"positive|negative|more than"):
        cache.cache_shape(facts_of(SMOLLM2), **numbers)  # type: ignore[arg-type]  # also None where it is wrong


def test_sliding_layers_without_a_window_are_a_damaged_model() -> None:
    with pytest.raises(LlmError, match="no window size") as caught:
        shape_of(replace(facts_of(GEMMA_270M), sliding_window_tokens=0), 4096)
    assert caught.value.code is ErrorCode.BAD_CHECKPOINT
