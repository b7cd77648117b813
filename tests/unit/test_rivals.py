"""The formulas of other programs: the figures that were worked out with them by hand, and the comparison."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from bench.rivals import RIVALS, Case, compared_rows, errors, lllm3090, localai, ollama, textgen
from lllm3090d.engines.capabilities import Backend

pytestmark = pytest.mark.unit

GIB = 1 << 30


def case(
    gib: float, dimensions: tuple[int, int, int, int], tokens: int, bits: int, *, full: int = 0
) -> Case:
    """``dimensions`` are blocks, heads, KV heads and the embedding length."""
    blocks, heads, kv_heads, width = dimensions
    return Case(
        file_bytes=int(gib * GIB),
        blocks=blocks,
        heads=heads,
        kv_heads=kv_heads,
        embedding_length=width,
        key_length=128,
        context_tokens=tokens,
        cache_bits=bits,
        full_layers=full or blocks,
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (case(4.58, (32, 32, 8, 4096), 65_536, 8), (12.58, 6.90, 9.87)),  # Llama-3.1-8B
        (case(17.28, (48, 32, 4, 2048), 32_768, 16), (18.78, 18.61, 22.24)),  # Qwen3-30B-A3B
        (case(15.65, (64, 24, 4, 5120), 65_536, 8), (28.96, 17.67, 20.42)),  # Qwen3.6-27B
        (case(15.41, (62, 32, 16, 5376), 65_536, 8), (56.10, 21.42, 32.27)),  # Gemma-3-27B
    ],
)
def test_formulas_give_the_known_figures(model: Case, expected: tuple[float, float, float]) -> None:
    """GiB of Q4_K_M files, within the rounding of their size."""
    found = tuple(formula(model).total / GIB for formula in (ollama, localai, textgen))
    assert found == pytest.approx(expected, abs=0.011)


@pytest.mark.parametrize(("backend", "kib"), [(Backend.VULKAN, 35.84), (Backend.CUDA, 40.72)])
def test_the_catalogue_price(backend: Backend, kib: float) -> None:
    """A 27B hybrid with 16 growing layers of 1024 values; of a token, and only at q8_0."""
    model = replace(case(15.65, (64, 24, 8, 5120), 65_536, 8, full=16), backend=backend)
    price = lllm3090(model)
    assert price is not None
    assert price.context is not None
    assert price.context / 65_536 / 1024 == pytest.approx(kib, abs=0.01)
    assert lllm3090(replace(model, cache_bits=16)) is None
    assert lllm3090(replace(model, has_latent=True)) is None


def test_ours_is_the_best_of_all_and_never_short() -> None:
    rows = compared_rows()
    assert len(rows) > 400
    assert {row.backend for row in rows} == {Backend.CUDA, Backend.VULKAN}
    *rivals, ours = errors(rows)
    assert len(rivals) == len(RIVALS)
    assert set(ours.context) == {0.0}
    assert 0 <= min(ours.total) <= max(ours.total) < 0.05
    for rival in rivals:
        assert statistics.median(map(abs, rival.total)) > 10 * statistics.median(map(abs, ours.total))
        assert not rival.context or max(map(abs, rival.context)) > 0.5
