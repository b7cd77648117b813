"""What models for vectors compute, against the engine's own dry run; and a real engine with the arguments of a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.dry_run import DryRun, Request
from bench.launches import Case, installed, start
from lllm3090d.checkpoints.classify import Kind
from lllm3090d.checkpoints.facts import CheckpointFacts, read_facts
from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.engines.arguments import features
from lllm3090d.engines.capabilities import Backend
from lllm3090d.errors import ErrorCode
from lllm3090d.planning.quote import Place
from lllm3090d.planning.request import PlanRequest, Room
from tests.fakes.model_files import ModelSpec, published, write
from tests.fakes.random_plans import PLENTY, RandomQuestion
from tests.fakes.real_engines import RealModel, real_world
from tests.fakes.tiny_bert import CONTEXT, WIDTH, write_tiny_bert
from tests.unit.engine_truth import POLICY
from tests.unit.plans import plan_of

pytestmark = pytest.mark.engine

ENCODERS = ("bge-large-en", "nomic-embed-text-v1.5", "embeddinggemma-300m")
DECODERS = ("smollm2-135m", "qwen3-8b", "gemma-3-270m")
SHAPES = (
    (2, 64, 128),
    (4, 256, 3072),
    (16, 512, 256),
    (8, 1024, 1024),
    (2, 128, 8192),
)  # heads, width, feed-forward


def specs() -> list[ModelSpec]:
    """Published dimensions, and encoders of any width."""
    known = published()
    found = [known[name] for name in (*ENCODERS, *DECODERS)]
    for base in map(known.__getitem__, ENCODERS):
        for heads, width, feed_forward in SHAPES:
            keys = dict(base.keys) | {
                "attention.head_count": heads,
                "attention.head_count_kv": heads,
                "embedding_length": width,
                "feed_forward_length": feed_forward,
                "context_length": 2048,
            }
            if "attention.key_length" in keys:
                keys |= {"attention.key_length": width // heads, "attention.value_length": width // heads}
            found.append(replace(base, name=f"{base.name} {heads}/{width}/{feed_forward}", keys=keys))
    return found


def asked(facts: CheckpointFacts, micro_batch: int, slots: int) -> PlanRequest:
    context = slots * min(facts.trained_context_tokens, 4096)
    return PlanRequest(context, slots, purpose=Purpose.EMBEDDING, micro_batch_tokens=micro_batch)


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA])
def test_no_graph_for_vectors_is_short(exact_engine: DryRun, tmp_path: Path, backend: Backend) -> None:
    """The quote covers what the engine reserves on the card and beside it, and is no wild guess."""
    rows, far = [], []
    for number, spec in enumerate(specs()):
        path = write(tmp_path / f"{number}.gguf", spec)
        facts = read_facts([path])
        for micro_batch, slots in ((64, 1), (512, 1), (512, 4), (2048, 2)):
            made = plan_of(facts, asked(facts, micro_batch, slots), backend=backend)
            sizes = made.launch
            answer = exact_engine.ask(
                Request(
                    path,
                    context_tokens=sizes.context_tokens,
                    parallel=sizes.parallel,
                    batch_tokens=sizes.batch_tokens,
                    micro_batch_tokens=sizes.micro_batch_tokens,
                    cache_type_k=sizes.cache_type_k,
                    cache_type_v=sizes.cache_type_v,
                    device=backend,
                    embeddings=True,
                    outputs=0,
                )
            )
            on_cpu = backend is Backend.CPU
            engine = answer.host.compute if on_cpu else answer.card.compute
            charged = made.quote.item("compute").bytes
            where = f"{spec.name} -ub {micro_batch} -np {slots}: {charged} for {engine}"
            if charged < engine:
                rows.append(where)
            if charged > 2.2 * engine:
                far.append(where)
            if not on_cpu:
                beside = made.quote.total_bytes(Place.HOST)
                assert answer.host.compute <= beside, where
    assert rows == []
    assert far == []


@pytest.mark.parametrize("scores", [False, True])
def test_a_plan_for_vectors_is_carried_out(
    llama_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, scores: bool
) -> None:
    """Its command line is taken, and the engine's log shows the ledger's sizes."""
    monkeypatch.setenv("LLLM3090_LLAMA_DIR", str(llama_server.parent))
    engine = installed(tmp_path)
    if engine.capabilities.backend is not Backend.CPU:
        pytest.skip("these checkpoints are for an engine without a card")
    path = write_tiny_bert(tmp_path / "tiny.gguf", scores=scores)
    facts, question = read_facts([path]), RandomQuestion(PlanRequest(), POLICY, Room(PLENTY))
    plan = question.plan(facts, features(engine.capabilities))
    started = start(engine, Case(facts.architecture, path, facts, plan, question))
    assert started.faults == []
    assert started.lines


def test_encoders_through_the_gateway(llama_server: Path, tmp_path: Path) -> None:
    models = {}
    for name, kind, flag in (
        ("vectors", Kind.EMBEDDING, "--embeddings"),
        ("scores", Kind.RERANK, "--reranking"),
    ):
        path = write_tiny_bert(tmp_path / f"{name}.gguf", scores=kind is Kind.RERANK)
        models[name] = RealModel(path, CONTEXT, 1, (flag, "-b", str(CONTEXT), "-ub", str(CONTEXT)), kind)
    with (
        real_world(tmp_path, llama_server, models) as world,
        openai.OpenAI(base_url=f"{world.address}/v1", api_key="none", timeout=60.0) as client,
    ):
        many = client.embeddings.create(model="vectors", input=["a cat", "a dog"]).data
        assert [len(each.embedding) for each in many] == [WIDTH, WIDTH]
        wish: Any = {"model": "scores", "query": "cat", "documents": ["a cat", "dogs", "x y z"]}
        for path_ in ("/rerank", "/reranking"):
            ranked: Any = client.post(path_, body=wish, cast_to=object)
            assert sorted(each["index"] for each in ranked["results"]) == [0, 1, 2]
            values = [each["relevance_score"] for each in ranked["results"]]
            assert values == sorted(values, reverse=True)
        assert world.last().status == 200
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="scores", input="a")
        assert caught.value.code == ErrorCode.WRONG_PURPOSE
        wish["documents"] = ["a " * CONTEXT]
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/rerank", body=wish, cast_to=object)
        assert caught.value.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert {each.id: each.purpose for each in client.models.list()} == {  # type: ignore[attr-defined]  # ours
            "vectors": "embedding",
            "scores": "rerank",
        }
