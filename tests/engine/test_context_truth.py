"""Our weights and contexts against ``llama-fit-params``, for files with the dimensions of published models."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy import ask_engine
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, placement
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.units import MIB
from tests.fakes.model_files import published, write

pytestmark = pytest.mark.engine


# A model without states of hundreds of MiB, which the dry run would really allocate, for each kind of cache.
@pytest.mark.parametrize(
    "model",
    [
        "gemma-4-e2b",
        "gemma-3n-e4b",
        "gpt-oss-20b",
        "glm-4.7-flash",
        "glm-4.5-air",
        "lfm2-1.2b",
        "phi-3.5-mini",
    ],
)
@pytest.mark.parametrize("parallel", [1, 3])
def test_published_dimensions(llama_fit_params: Path, tmp_path: Path, model: str, parallel: int) -> None:
    path = write(tmp_path / "m.gguf", published()[model])
    facts, types = read_facts([path]), (CacheType.Q8_0, CacheType.Q8_0)
    shape = cache.cache_shape(
        facts, context_tokens=20_000, parallel=parallel, batch_tokens=2048, micro_batch_tokens=512
    )
    engine = ask_engine(llama_fit_params, path, 20_000, *types, parallel=parallel)
    assert cache.context_bytes(facts, shape, *types) // MIB == engine.context
    assert placement.weights(facts, placement.EVERYTHING, Backend.CPU).card // MIB == engine.weights


def test_two_cache_types_of_latent_attention_are_refused_by_the_engine_too(
    llama_fit_params: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", published()["deepseek-v2-lite"])
    with pytest.raises(RuntimeError, match="ended with"):
        ask_engine(llama_fit_params, path, 4096, CacheType.Q8_0, CacheType.Q4_0)
