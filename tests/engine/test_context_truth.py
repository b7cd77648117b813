"""Our weights and contexts against the engine's own dry run, for made-up models of every architecture."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from bench.accuracy import ask_engine, difference_of, random_differences
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning import cache, placement
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.units import MIB
from tests.fakes.model_files import published, write
from tests.fakes.random_models import ARCHITECTURES, RandomCase, random_cases

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_models_cost_what_the_engine_says(llama_fit_params: Path, architecture: str) -> None:
    """Weights and context to the MiB that the tool prints, and the same refusals."""

    @settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(random_cases(architecture))
    def run(case: RandomCase) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = write(Path(folder) / "m.gguf", case.spec)
            assert difference_of(llama_fit_params, model, case) == []

    run()


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


def test_every_architecture_has_its_share(llama_fit_params: Path) -> None:
    seen, differing = random_differences(llama_fit_params, len(ARCHITECTURES))
    assert set(seen) == set(ARCHITECTURES)
    assert differing == []
