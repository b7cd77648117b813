"""The real engine's dry run against our arithmetic, and as the only word on a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.checkpoints.fingerprint import fingerprint
from lllm3090d.engines.binaries import binaries_digest
from lllm3090d.engines.builds import find_build
from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.dry_run import DryRun, DryRuns
from lllm3090d.engines.probe_cache import ProbeCache
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.cache import CacheType
from lllm3090d.planning.engine_quote import engine_quote, unruled_quote
from lllm3090d.planning.launch import Launch, PlanPolicy
from lllm3090d.planning.projection import Where, expected, judge, may_run
from lllm3090d.planning.quote import Evidence, Place, price
from lllm3090d.planning.units import MIB
from lllm3090d.settings import load_settings
from lllm3090d.store import FILE_NAME, Store
from tests.fakes.model_files import published, write

pytestmark = pytest.mark.engine

POLICY = PlanPolicy(CacheType.Q8_0, 2048, 512, 8, 1024, 1024)
LAUNCH = Launch(8192, 2, CacheType.Q8_0, CacheType.Q8_0, 2048, 512, 0, 1024)


class Projector:
    """Makes dry runs with the real engine, off every device."""

    def __init__(self, server: Path, state: Path) -> None:
        self.store = Store(state / FILE_NAME)
        variables = {"LLLM3090_LLAMA_DIR": str(server.parent), "LLLM3090_STATE_DIR": str(state)}
        self.build = find_build(load_settings(state / "config.toml", variables))
        self.capabilities = ProbeCache(store=lambda: self.store).get(self.build)
        if self.capabilities.dry_run is None or not self.capabilities.dry_run.can_project:
            pytest.skip("this engine cannot project")
        self.runs = DryRuns(lambda: self.store)

    def run(self, model: Path, launch: Launch) -> DryRun:
        return DryRun(
            self.build,
            self.capabilities,
            binaries_digest(self.build, self.store),
            model,
            fingerprint([model]),
            launch,
            may_run(Backend.CPU, card_free_bytes=None, host_available_bytes=1 << 34, state_bytes=0).where,
        )


@pytest.fixture
def projector(llama_server: Path, tmp_path: Path) -> Iterator[Projector]:
    made = Projector(llama_server, tmp_path / "state")
    yield made
    made.store.close()


@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
@pytest.mark.parametrize("parallel", [1, 4])
def test_real_checkpoints_agree(
    model: str, parallel: int, projector: Projector, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    launch = replace(LAUNCH, parallel=parallel)
    projection = projector.runs.project(projector.run(path, launch))
    assert projection.where is Where.HOST
    facts = read_facts([path])
    ours = expected(facts, launch, Backend.CPU, Where.HOST)
    assert projection.host.weights_bytes == ours.host.weights_bytes // MIB * MIB
    assert projection.host.context_bytes == ours.host.context_bytes // MIB * MIB
    found = judge(facts, launch, Backend.CPU, projection)
    assert found.agrees, found.report()

    quote = engine_quote(facts, launch, Backend.CPU, POLICY, projection)
    base = price(facts, launch, Backend.CPU, POLICY)
    assert quote.item("weights").evidence is Evidence.ENGINE
    assert 0.97 < quote.total_bytes(Place.CARD) / base.total_bytes(Place.CARD) < 1.01
    assert projector.runs.project(projector.run(path, launch)) == projection
    assert projector.store.rows("SELECT count(*) FROM dry_runs") == [(1,)]


@pytest.mark.parametrize("model", ["gemma-4-e2b", "gpt-oss-20b", "glm-4.7-flash", "phi-3.5-mini"])
def test_the_engine_alone_is_never_below_a_rule(model: str, projector: Projector, tmp_path: Path) -> None:
    """Of models whose rule is known, priced as if it were not."""
    path = write(tmp_path / "m.gguf", published()[model])
    facts = read_facts([path])
    projection = projector.runs.project(projector.run(path, LAUNCH))
    assert judge(facts, LAUNCH, Backend.CPU, projection).agrees
    quote = unruled_quote(projection, LAUNCH, Backend.CPU, POLICY, facts.vocabulary_size)
    truth = price(facts, LAUNCH, Backend.CPU, POLICY)
    margin = 4 * LAUNCH.micro_batch_tokens * facts.embedding_length
    assert quote.total_bytes(Place.CARD) >= truth.total_bytes(Place.CARD) - margin
    logits = 4 * LAUNCH.micro_batch_tokens * facts.vocabulary_size * 21 // 20
    assert quote.total_bytes(Place.CARD) <= truth.total_bytes(Place.CARD) + logits + 3 * MIB


def test_a_model_that_the_engine_refuses_is_told_in_its_words(
    projector: Projector, smollm2_path: Path, tmp_path: Path
) -> None:
    content = smollm2_path.read_bytes()
    at = content.index(b"llama", content.index(b"general.architecture"))
    path = tmp_path / "unknown.gguf"
    path.write_bytes(content[:at] + b"zlama" + content[at + 5 :])
    with pytest.raises(LlmError) as caught:
        projector.runs.project(projector.run(path, LAUNCH))
    assert caught.value.code is ErrorCode.ENGINE_FAILED
    assert "unknown model architecture: 'zlama'" in caught.value.message
    assert "SIGABRT" in caught.value.message
    assert projector.store.rows("SELECT count(*) FROM dry_runs") == [(0,)]
