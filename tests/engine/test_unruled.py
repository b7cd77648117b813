"""Models without a rule, priced by the real engine alone: of an architecture that nothing here knows, and as if."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.checkpoints import architectures, facts
from lllm3090d.checkpoints.facts import read_facts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.planner import CappedBy, Plan
from lllm3090d.planning.quote import Evidence, Place, price
from lllm3090d.planning.request import PlanRequest, Room
from lllm3090d.planning.units import MIB, PAGE_TOKENS
from lllm3090d.serving.events import LoadRequested
from lllm3090d.serving.lookup import FoundUnruled, Lookup
from lllm3090d.serving.offering import Ground, offer
from lllm3090d.serving.policy import Policy, policy_of
from lllm3090d.settings import Settings
from tests.fakes.renamed_model import write_renamed

pytestmark = pytest.mark.engine

GIB = 1 << 30
LOOPED = "nanbeige"  # the engine knows it, no rule here does: it runs through its blocks several times


class Bench:
    """A library with one model, the real engine, and host memory of the size that a test says."""

    def __init__(self, folder: Path, server: Path) -> None:
        self.settings = Settings(
            models_dir=folder / "models", state_dir=folder / "state", llama_dir=server.parent
        )
        self.lookup = Lookup(lambda: self.settings)
        self.policy: Policy = policy_of(self.settings, {})

    def offer(self, name: str, room: int, **asked: int) -> Plan:
        found = self.lookup.model(name)
        assert isinstance(found, FoundUnruled)
        build, capabilities = self.lookup.engine()
        if capabilities.dry_run is None or not capabilities.dry_run.can_project:
            pytest.skip("this engine cannot project")
        event = LoadRequested(
            "t", "r", found.checkpoint, found.unruled, PlanRequest(**asked), build, capabilities
        )
        ground = Ground(Backend.CPU, CardKind.CPU, Room(room))
        return asyncio.run(offer(self.lookup, event, found.unruled, self.policy, ground))

    def made(self) -> int:
        """Dry runs that were made and understood."""
        return int(str(self.lookup.store().rows("SELECT count(*) FROM dry_runs")[0][0]))


@pytest.fixture
def bench(tmp_path: Path, llama_server: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, llama_server)
    yield made
    asyncio.run(made.lookup.close())


def test_an_architecture_without_a_rule(bench: Bench, smollm2_path: Path) -> None:
    """Its two loops keep twice the cache of the same tensors run through once."""
    folder = bench.settings.models_dir
    write_renamed(smollm2_path, folder / "looped" / "m.gguf", LOOPED, {"num_loops": 2})
    plan = bench.offer("looped", 8 * GIB, context_tokens=8000, parallel=2)
    assert (plan.context_tokens, plan.window_tokens, plan.capped_by) == (8192, 4096, CappedBy.REQUEST)
    once = price(
        replace(read_facts([smollm2_path]), title="once"), plan.launch, Backend.CPU, bench.policy.plan
    )
    weights, context = plan.quote.item("weights"), plan.quote.item("context")
    assert weights.evidence is context.evidence is Evidence.ENGINE
    assert abs(weights.bytes - once.item("weights").bytes) <= MIB
    assert abs(context.bytes - 2 * once.item("kv cache").bytes) <= MIB
    assert bench.made() == 1
    bench.offer("looped", 8 * GIB, context_tokens=8000, parallel=2)
    assert bench.made() == 1


def test_the_largest_context_that_fits(bench: Bench, smollm2_path: Path) -> None:
    folder = bench.settings.models_dir
    write_renamed(smollm2_path, folder / "looped" / "m.gguf", LOOPED, {"num_loops": 4})
    whole = bench.offer("looped", 16 * GIB)
    assert (whole.window_tokens, whole.capped_by, bench.made()) == (8192, CappedBy.MODEL, 1)
    room = whole.quote.total_bytes(Place.CARD) - 200 * MIB
    plan = bench.offer("looped", room)
    assert plan.capped_by is CappedBy.MEMORY
    assert plan.quote.total_bytes(Place.CARD) <= room
    assert bench.made() <= 8
    more = bench.offer("looped", room, context_tokens=plan.context_tokens + PAGE_TOKENS)
    assert more.quote.total_bytes(Place.CARD) > room


def test_a_model_whose_rule_is_taken_away_is_priced_close_to_it(
    bench: Bench, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bench.settings.models_dir / "plain" / "m.gguf"
    target.parent.mkdir(parents=True)
    target.symlink_to(smollm2_path)
    known = read_facts([smollm2_path])
    rules = {name: rule for name, rule in architectures.ARCHITECTURES.items() if name != "llama"}
    with monkeypatch.context() as patch:
        patch.setattr(facts, "ARCHITECTURES", rules)
        plan = bench.offer("plain", 8 * GIB, context_tokens=8192)
    truth = price(known, plan.launch, Backend.CPU, bench.policy.plan).total_bytes(Place.CARD)
    logits = 4 * plan.launch.micro_batch_tokens * known.vocabulary_size * 21 // 20
    margin = 4 * plan.launch.micro_batch_tokens * known.embedding_length
    assert truth - margin <= plan.quote.total_bytes(Place.CARD) <= truth + logits + 3 * MIB


def test_an_architecture_that_the_engine_does_not_know_either(bench: Bench, smollm2_path: Path) -> None:
    write_renamed(smollm2_path, bench.settings.models_dir / "new" / "m.gguf", "brand-new")
    with pytest.raises(LlmError) as caught:
        bench.offer("new", 8 * GIB, context_tokens=4096)
    assert caught.value.code is ErrorCode.ENGINE_FAILED
    assert "unknown model architecture: 'brand-new'" in caught.value.message
    assert bench.made() == 0
